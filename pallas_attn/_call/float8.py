"""Calls of attention on float8 q, k and v, each with scales."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn._call import batching, checks, dispatch
from pallas_attn._call.problem import FLOAT8, AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit, described

Array = jax.Array
OUT_DTYPES = ("bfloat16", "float16", "float32")
SCALES = ("q_scale", "k_scale", "v_scale")
LEAST = 2.0**-100  # scales below count as this one


class Options(NamedTuple):
    """The arguments of `flash_attention` that only float8 has."""

    q_scale: Any
    k_scale: Any
    v_scale: Any
    out_dtype: DTypeLike | None


def bound(inputs: AttentionInputs, options: Options) -> tuple[AttentionInputs, dict[str, Any]]:
    """The inputs with scales [B, n, heads], and the facts that follow from them."""
    named = dict(zip(Options._fields, options, strict=True))
    if str(inputs.q.dtype) not in FLOAT8:
        name = next((name for name, value in named.items() if value is not None), None)
        if name is None:  # another dtype of 8 bits
            return inputs, {}
        remedy = "cast the result" if name == "out_dtype" else "multiply by it instead"
        raise ValueError(
            f"{name}: expected None for {inputs.q.dtype} q, k and v, since it belongs to "
            f"{' and '.join(FLOAT8)}, got {described(named[name])}; {remedy}"
        )
    scales, blocks = {}, []
    for name in SCALES:
        rows = getattr(inputs, name[0])
        if named[name] is None:
            blocks.append(1)
            continue
        scales[name] = _scale(name, named[name], rows.shape[:3])
        blocks.append(scales[name].shape[1])
    facts = {"out_dtype": _out_dtype(options.out_dtype), "scale_blocks": tuple(blocks)}
    return inputs._replace(**scales), facts


def _scale(name: str, value: checks.Argument, sizes: tuple[int, int, int]) -> Array:
    """float32 [B, n, heads] of an argument that broadcasts to it; n divides the rows."""
    batch, rows, heads = sizes
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    x = jnp.float32(value) if number else checks.array(name, value)
    axes = (1,) * (3 - x.ndim) + x.shape
    fits = len(axes) == 3 and axes[0] in (1, batch) and axes[2] in (1, heads)
    if not fits or axes[1] < 1 or rows % axes[1] or not jnp.issubdtype(x.dtype, jnp.floating):
        letter, kind = ("T", "N") if name == "q_scale" else ("S", "K")
        raise ValueError(
            f"{name}: expected floats that broadcast to [B, n, {kind}] = [{batch}, n, {heads}], "
            f"where n is 1 or divides {letter} = {rows} (a scale of {letter} / n rows each), got "
            f"{x.dtype}{list(x.shape)}"
        )
    x = jnp.broadcast_to(x.reshape(axes), (batch, axes[1], heads))
    return jnp.maximum(x.astype(jnp.float32), LEAST)  # NaN stays


def _out_dtype(value: DTypeLike | None) -> str:
    if value is None:
        return "bfloat16"
    try:
        name = str(jnp.dtype(value))
    except TypeError:
        name = ""
    if name not in OUT_DTYPES:
        raise ValueError(
            f"out_dtype: expected one of {', '.join(OUT_DTYPES)} or None (bfloat16), got "
            f"{described(value)}"
        )
    return name


_NO_DERIVATIVE = Limit(
    "kernels on float8 have no derivative",
    "train with pallas_attn.flash_attention on dequantised arrays, x.astype(jnp.bfloat16) * scale",
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
    """ValueError for a `context`."""
    raise ValueError(
        f"context: expected None for {problem.dtype} q, k and v; dequantise them, "
        "x.astype(jnp.bfloat16) * scale"
    )
