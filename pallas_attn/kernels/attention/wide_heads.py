"""Outputs and gradients of head dims above 256 by the portable kernels: launches that make some of
their columns each, since registers of a warpgroup hold 64 rows of 256 columns in float32. Each
launch computes all scores again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_attn.kernels.attention.sm80_common import MmaFormat

COLUMNS = 256  # columns of a launch, at most


def value_columns(dim: int) -> list[slice]:
    """The columns of v that each launch of a forward weighs: nearly as many each, in eights."""
    width = -(-dim // (8 * -(-dim // COLUMNS))) * 8
    return [slice(start, min(start + width, dim)) for start in range(0, dim, width)]


def by_parts(
    form: MmaFormat, name: str, make: Callable[[MmaFormat, jax.Array | None], jax.Array]
) -> jax.Array:
    """The gradient of "q", "k" or "v" by `make(format, before)`, the columns of each launch, whose
    format has whole chunks of them; `before`: the columns that the launch before made.
    """
    if not form.columns or form.width(name) <= COLUMNS:
        return make(form, None)
    most = COLUMNS // form.columns
    made: list[jax.Array] = []
    for first in range(0, form.chunks(name), most):
        part = form.of_chunks(first, min(most, form.chunks(name) - first))
        made.append(make(part, made[-1] if made else None))
    return jnp.concatenate(made, axis=-1)
