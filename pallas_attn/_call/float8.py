"""Calls of attention on float8 q, k and v, each with scales."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_attn._autodiff import linear
from pallas_attn._autodiff.derivative import Attention, KernelCall
from pallas_attn._call import batching, checks, dispatch
from pallas_attn._call.problem import (
    FLOAT8,
    SCALE_ROWS,
    AttentionInputs,
    AttentionProblem,
    QuantizeInputs,
    QuantizeProblem,
    live,
    rows_of_scale,
)
from pallas_attn.errors import Limit, described

Array = jax.Array
OUT_DTYPES = ("bfloat16", "float16", "float32")
SCALES = ("q_scale", "k_scale", "v_scale")


class Options(NamedTuple):
    """The arguments of `flash_attention` that only float8 has."""

    q_scale: Any
    k_scale: Any
    v_scale: Any
    out_dtype: DTypeLike | None


def bound(inputs: AttentionInputs, options: Options) -> tuple[AttentionInputs, dict[str, Any]]:
    """The inputs with scales [B, n, heads], and the fields of the problem that follow from them."""
    named = dict(zip(Options._fields, options, strict=True))
    if str(inputs.q.dtype) not in FLOAT8:
        name = next((name for name, value in named.items() if value is not None), None)
        if name is None:  # no argument of float8; dtypes are checked elsewhere
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
        "out_dtype": _out_dtype(options.out_dtype),
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


_NO_DERIVATIVE = Limit(
    "kernels on float8 have no derivative",
    "pass bfloat16 q, k and v with float8=True, which has the derivative of their rounded numbers",
)


def attend(
    problem: AttentionProblem, inputs: AttentionInputs, implementation: str | None
) -> tuple[Array, Array]:
    """(out, lse) by the implementation that takes the problem."""
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    leaves, tree = jax.tree.flatten(inputs)
    leaves = batching.underived(problem, _NO_DERIVATIVE)(*leaves)
    inputs = jax.tree.unflatten(tree, leaves)
    out, lse = batching.compiled_once(batching.attention, chosen, problem, inputs)
    return out, lse


def refuse_devices(problem: AttentionProblem) -> None:
    """Raises the ValueError for float8 arrays with a `context`."""
    raise ValueError(
        f"context: expected None for {problem.dtype} q, k and v; dequantise them, "
        "x.astype(jnp.bfloat16) * scale"
    )


# ---- training: float8 forward, 16-bit backward ---------------------------------------------------

BLOCK = 128  # rows of a head that share a scale, at most


def straight_through(
    problem: AttentionProblem, inputs: AttentionInputs, implementation: str | None
) -> tuple[Array, Array]:
    """(out, lse) of 16-bit q, k and v rounded to float8. Scales are powers of 2, so that the
    rounded numbers times their scales are exact in 16 bits. The forward multiplies float8;
    derivatives are those of 16-bit kernels on the rounded numbers, and the derivative of the
    rounding counts as 1.
    """
    if problem.dtype not in ("bfloat16", "float16"):
        raise ValueError(
            f"float8: expected bfloat16 or float16 q, k and v, got {problem.dtype}; cast them, or "
            "leave float8 out"
        )
    ends = {"q": inputs.q_lengths, "k": inputs.kv_lengths, "v": inputs.kv_lengths}
    rows: dict[str, Any] = {
        name: rounded(live(getattr(inputs, name), end)) for name, end in ends.items()
    }
    inputs = inputs._replace(**rows)
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    call = KernelCall(problem, implementation, chosen, _forward)
    out, lse = linear.differentiable(Attention, call, inputs)
    return out, lse


def _forward(
    problem: AttentionProblem, implementation: str | None, inputs: AttentionInputs
) -> tuple[Array, Array]:
    """The forward kernel on rounded inputs, which are float8 times powers of 2."""
    q, k, v = (quantised(getattr(inputs, name)) for name in "qkv")
    inputs = inputs._replace(q=q[0], k=k[0], v=v[0], q_scale=q[1], k_scale=k[1], v_scale=v[1])
    narrow = dataclasses.replace(
        problem,
        dtype=FLOAT8[0],
        out_dtype=problem.dtype,
        scale_blocks=(q[1].shape[1], k[1].shape[1], v[1].shape[1]),
    )
    narrow = batching.resized(narrow, inputs)
    chosen = dispatch.select(narrow, implementation)
    return batching.compiled_once(batching.attention, chosen, narrow, inputs)


def blocks_of(rows: int, most: int) -> int:
    """The least number of blocks, of at most `most` rows, that have one scale each."""
    if rows <= most:
        return 1
    if most >= SCALE_ROWS:
        return -(-rows // (most // SCALE_ROWS * SCALE_ROWS))
    equal = (rows // n for n in range(most, 0, -1) if rows % n == 0)
    return next(blocks for blocks in equal if rows_of_scale(rows, blocks) <= most)


def quantised(x: Array) -> tuple[Array, Array]:
    """x as float8_e4m3fn, and scales [B, n, heads], one for a block of rows: the power of 2 that
    brings the block's largest number into 224 .. 448. `rounded` returns numbers times scales.
    """
    batch, rows, heads, dim = x.shape
    blocks = blocks_of(rows, BLOCK)
    size = rows_of_scale(rows, blocks)
    wide = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, blocks * size - rows), (0, 0), (0, 0)))
    wide = wide.reshape(batch, blocks, size, heads, dim)
    top = jnp.abs(wide).max(axis=(2, 4), keepdims=True)
    # The next power of 2, by bits: jnp.frexp has a derivative, which kernels' primitives refuse.
    bits = lax.bitcast_convert_type(
        jnp.maximum(top, checks.LEAST_SCALE) * np.float32(1 / 448), jnp.int32
    )
    exponent = jnp.minimum((bits >> 23 & 255) + 1, 254)  # an infinity or a NaN: the largest power
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    numbers = (wide / scale).astype(FLOAT8[0]).reshape(batch, blocks * size, heads, dim)
    return numbers[:, :rows], scale[:, :, 0, :, 0]


@jax.custom_jvp
def rounded(x: Array) -> Array:
    """x rounded to float8 with scales; its derivative is 1."""
    numbers, scale = quantised(x)
    size = rows_of_scale(x.shape[1], scale.shape[1])
    each = jnp.repeat(scale, size, axis=1)[:, : x.shape[1], :, None]
    return (numbers.astype(jnp.float32) * each).astype(x.dtype)


@rounded.defjvp
def _pass_on(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return rounded(*primals), tangents[0]


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
    leaves, tree = jax.tree.flatten(inputs)
    leaves = batching.underived(problem, _NO_DERIVATIVE_OF_ROUNDING)(*leaves)
    inputs = jax.tree.unflatten(tree, leaves)
    return batching.compiled_once(batching.quantize, chosen, problem, inputs)
