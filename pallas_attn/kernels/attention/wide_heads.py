"""Outputs and gradients of head dims above 256 by the portable kernels. The registers of a block
hold an accumulator of 64 rows by 256 columns in float32, so several launches make some of the
columns each, and each of them computes all scores again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_attn.kernels.attention.sm80_common import MmaFormat

COLUMNS = 256  # largest number of columns that a launch makes


def value_columns(dim: int) -> list[slice]:
    """The columns of v that each launch of a forward takes: nearly as many each, in eights."""
    width = -(-dim // (8 * -(-dim // COLUMNS))) * 8
    return [slice(start, min(start + width, dim)) for start in range(0, dim, width)]


def by_parts(
    form: MmaFormat, name: str, make: Callable[[MmaFormat, jax.Array | None], jax.Array]
) -> jax.Array:
    """The gradient of "q", "k" or "v", put together from the columns that each launch makes:
    `make(format, before)`, where `format` names whole chunks of columns, and `before` are the
    columns of the launch before, or None.
    """
    if not form.columns or form.width(name) <= COLUMNS:
        return make(form, None)
    most = COLUMNS // form.columns
    made: list[jax.Array] = []
    for first in range(0, form.chunks(name), most):
        part = form.of_chunks(first, min(most, form.chunks(name) - first))
        made.append(make(part, made[-1] if made else None))
    return jnp.concatenate(made, axis=-1)
