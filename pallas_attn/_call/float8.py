"""Calls of attention on float8 q, k and v, each with scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_attn._call import batching, checks, dispatch
from pallas_attn._call.problem import (
    FLOAT8,
    SCALE_ROWS,
    AttentionInputs,
    QuantizeInputs,
    QuantizeProblem,
    rows_of_scale,
)
from pallas_attn.errors import Limit, described
from pallas_attn.values import Float8

Array = jax.Array
OUT_DTYPES = ("bfloat16", "float16", "float32")
SCALES = ("q_scale", "k_scale", "v_scale")


def bound(inputs: AttentionInputs, float8: Float8 | bool) -> tuple[AttentionInputs, dict[str, Any]]:
    """The inputs with scales [B, n, heads], and the fields of the problem that follow from them."""
    named = vars(float8 if isinstance(float8, Float8) else Float8())
    if str(inputs.q.dtype) not in FLOAT8:
        name = next((name for name, value in named.items() if value is not None), None)
        if name is None:  # nothing of float8; dtypes are checked elsewhere
            return inputs, {}
        remedy = "cast the result" if name == "out_dtype" else "multiply by it instead"
        raise ValueError(
            f"{name}: expected None for {inputs.q.dtype} q, k and v, since it belongs to "
            f"{' and '.join(FLOAT8)}, got {described(named[name])}; {remedy}"
        )
    scales: dict[str, Any] = {}
    blocks: list[int] = []
    for name in SCALES:
        rows = getattr(inputs, name[0])
        if named[name] is None:
            blocks.append(1)
            continue
        scales[name] = _scale(name, named[name], rows.shape[:3])
        blocks.append(scales[name].shape[1])
    facts: dict[str, Any] = {
        "out_dtype": _out_dtype(named["out_dtype"]),
        "scale_blocks": tuple(blocks),
    }
    return inputs._replace(**scales), facts


def _scale(name: str, value: checks.Argument, sizes: tuple[int, int, int]) -> Array:
    """float32 [B, n, heads] of an argument that broadcasts to it."""
    batch, rows, heads = sizes
    number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    x = jnp.float32(checks.scale_of_numbers(name, value)) if number else checks.array(name, value)
    letter, kind = ("T", "N") if name == "q_scale" else ("S", "K")
    if x.ndim == 2:
        raise ValueError(
            f"{name}: expected a number, [{kind}] or [B, n, {kind}], got {x.dtype}{list(x.shape)}, "
            "which does not say whether its first axis is B or n; write x[:, None] for one a batch "
            "row and head (FlashAttention-3's descale), x[None] for blocks of rows"
        )
    axes = (1,) * (3 - x.ndim) + x.shape
    fits = len(axes) == 3 and axes[0] in (1, batch) and axes[2] in (1, heads)
    if not fits or not cuts(rows, axes[1]) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{name}: expected floats that broadcast to [B, n, {kind}] = [{batch}, n, {heads}], "
            f"where n is 1, a number of blocks of {letter} = {rows} rows that are all but the last "
            f"of the same multiple of {SCALE_ROWS} rows, or a larger divisor of {letter}, got "
            f"{x.dtype}{list(x.shape)}"
        )
    x = jnp.broadcast_to(x.reshape(axes), (batch, axes[1], heads))
    return jnp.maximum(x.astype(jnp.float32), checks.LEAST_SCALE)  # NaN stays


def cuts(rows: int, blocks: int) -> bool:
    """Whether rows are cut into so many blocks that each have a scale."""
    if blocks in (1, rows):
        return True
    size = rows_of_scale(rows, blocks) if blocks else 0
    return size > 0 and -(-rows // size) == blocks


def _out_dtype(value: DTypeLike | None) -> str:
    if value is None:
        return "bfloat16"
    name = checks.dtype_name(value)
    if name not in OUT_DTYPES:
        raise ValueError(
            f"out_dtype: expected one of {', '.join(OUT_DTYPES)} or None (bfloat16), got "
            f"{described(value)}"
        )
    return name


def blocks_of(rows: int, most: int) -> int:
    """The least number of blocks, of at most `most` rows, that have one scale each."""
    if rows <= most:
        return 1
    if most >= SCALE_ROWS:
        return -(-rows // (most // SCALE_ROWS * SCALE_ROWS))
    equal = (rows // n for n in range(most, 0, -1) if rows % n == 0)
    return next(blocks for blocks in equal if rows_of_scale(rows, blocks) <= most)


# ---- rounding q, k and v -------------------------------------------------------------------------

_NO_DERIVATIVE_OF_ROUNDING = Limit(
    "rounding by a kernel has no derivative", "train with flash_attention(float8=True)"
)


def quantize(
    problem: QuantizeProblem, inputs: QuantizeInputs, implementation: str | None
) -> tuple[Array, ...]:
    """q, k and v in float8 and their scales, by the implementation that takes the problem."""
    dispatch.check_name(implementation)
    if any(x.size == 0 for x in inputs[:3]):
        implementation = dispatch.Reference.implementation
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    (inputs,) = batching.underived(problem, _NO_DERIVATIVE_OF_ROUNDING)(inputs)
    return batching.compiled_once(batching.quantize, chosen, problem, inputs)
