"""Ops "float8" and "quantize" of the benchmark: subjects, peers and judges.

JAX offers cuDNN's float8 attention by a private module alone: scales of whole arrays, full and
causal masks, an output in float8. Nobody else offers float8 attention in JAX.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn
from benchmarks import subjects, verify
from benchmarks.call import Call, Unavailable
from benchmarks.timing import Produced, Subject
from pallas_attn._call.problem import rows_of_scale
from pallas_attn.masks import CAUSAL
from tests.support.problems.case import AttentionCase

Array = jax.Array
Judge = Callable[[Subject, Produced], str | None]
LARGEST = 448.0  # largest float8_e4m3fn
PROBABILITIES = 256.0  # cuDNN's factor of probabilities, which are at most 1


def widened(arrays: dict[str, Array]) -> dict[str, Array]:
    """q, k and v times their scales in bfloat16, exact for scales that are powers of 2."""
    rest = {name: x for name, x in arrays.items() if not name.endswith("_scale")}
    for name in "qkv":
        x = arrays[name].astype(jnp.bfloat16)
        if f"{name}_scale" in arrays:
            scale = arrays[f"{name}_scale"].astype(jnp.bfloat16)
            size = rows_of_scale(x.shape[1], scale.shape[1])
            x = x * jnp.repeat(scale, size, axis=1)[:, : x.shape[1], :, None]
        rest[name] = x
    return rest


def bfloat16(call: Call) -> list[Subject]:
    """Ours on the same numbers in bfloat16."""
    case = dataclasses.replace(call.case, dtype="bfloat16", scale_rows=None)
    launch = subjects.attention(case, widened(call.arrays), None, call.op, None)
    return [Subject("bfloat16", launch)]


def cudnn(call: Call) -> list[Subject]:
    """cuDNN on float8."""
    if jax.devices()[0].platform != "gpu":
        raise Unavailable("no cuDNN without a GPU")
    call.require()
    case: AttentionCase = call.case
    if case.scale_rows is not None:
        raise Unavailable("no scales of blocks")
    from jax._src.cudnn import fused_attention_stablehlo as module

    kinds = module.MaskType
    mask = kinds.CAUSAL if case.mask == CAUSAL else kinds.NO_MASK
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    operands = tuple(call.arrays[name] for name in "qkv")

    def attend(q: Array, k: Array, v: Array, scale_of_out: Array) -> tuple[Array, Array]:
        factor = lambda x: jnp.full((1, 1, 1, 1), x, jnp.float32)  # noqa: E731
        factors: Any = dict.fromkeys(module.fp8_params_keys, factor(1.0))
        factors["scale_s"], factors["descale_s"] = factor(PROBABILITIES), factor(1 / PROBABILITIES)
        factors["scale_o"] = scale_of_out
        options: dict[str, Any] = {"scale": scale, "mask_type": mask, "use_fp8": True}
        out, _, largest = module.dot_product_attention(q, k, v, fp8_params=factors, **options)
        return out, largest

    step = jax.jit(attend)
    once = jnp.ones((1, 1, 1, 1), jnp.float32)
    largest = float(jnp.max(step(*operands, once)[1]))
    by = 2.0 ** np.floor(np.log2(LARGEST / max(largest, 2.0**-20)))

    def outputs(produced: tuple[Array, ...]) -> tuple[Array, ...]:
        return ((produced[0].astype(jnp.float32) / by).astype(jnp.bfloat16),)

    return [Subject("cudnn_float8", subjects.Step(step, (*operands, by * once)), outputs)]


def judge_of_attention(call: Call) -> Judge:
    """The check of results on float8, beside the same numbers in float32."""
    expected = verify.expected(widened(call.arrays), call.case.options(), narrow="float8")
    return lambda subject, produced: verify.judge(subject.outputs(produced), *expected)


# ---- rounding q, k and v -------------------------------------------------------------------------


def rounding(
    case: AttentionCase, arrays: dict[str, Array], implementation: str | None
) -> Callable[[], Any]:
    """A launch of `quantize_qkv`."""
    run = functools.partial(
        pallas_attn.quantize_qkv, rows=case.scale_rows, implementation=implementation
    )
    return subjects.Step(jax.jit(lambda *x: tuple(run(*x))), tuple(arrays[x] for x in "qkv"))


def by_xla(call: Call) -> list[Subject]:
    """The reference, which is XLA's."""
    return [Subject("xla", rounding(call.case, call.arrays, "reference"))]


def judge_of_rounding(call: Call) -> Judge:
    """Compares every byte with those of the reference."""
    expected = rounding(call.case, call.arrays, "reference")()

    def judge(subject: Subject, produced: Produced) -> str | None:
        for n, (a, b) in enumerate(zip(subject.outputs(produced), expected, strict=True)):
            if a.dtype != b.dtype or a.shape != b.shape or not bool(jnp.array_equal(a, b)):
                return f"array {n} differs from the reference's"
        return None

    return judge
