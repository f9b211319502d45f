"""The kernels of tangents: right in the interpreter with their races watched, lowered and compiled
ahead of time, and, with `-m gpu`, right on the real thing, beside derivatives by hand.
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, Mask, sliding_window
from pallas_attn._call import bind, config, device, dispatch
from pallas_attn.kernels.flash_jvp import sm90, sm90_dual
from tests.support import fuzz, mosaic, subjects
from tests.support.fuzz_derivatives import Tangents, run_tangents

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


class Rising(Tangents):
    """The bias rises from key to key: each kv tile raises the row maxima."""

    def arrays(self, seed=0, *, poison=False):
        arrays = super().arrays(seed, poison=poison)
        rising = 0.15 * np.arange(self.kv_len, dtype=np.float32)
        return arrays | {"bias": arrays["bias"] + rising[None, None, None]}


class Blocks(Tangents):
    """A mask function of blocks of 32 rows and keys."""

    def functions(self) -> tuple[dict[str, Any], dict[str, Any]]:
        rows, keys = np.arange(self.q_len)[:, None] // 32, np.arange(self.kv_len) // 32
        mask = pa.mask_fn(lambda b, h, q, kv: q // 32 >= kv // 32)
        return {"mask": mask}, {"mask_array": (rows >= keys)[None, None]}


class Bent(Tangents):
    """A score function with a slope: 3/4 of the capped score, less a multiple of the distance."""

    def functions(self) -> tuple[dict[str, Any], dict[str, Any]]:
        slopes = 0.125 * (1 + np.arange(self.q_heads, dtype=np.float32))
        score = lambda s, b, h, q, kv, m: s * 0.75 - m[h] * abs(q - kv)  # noqa: E731
        away = np.abs(np.arange(self.q_len)[:, None] - np.arange(self.kv_len)).astype(np.float32)
        dense = {"scale": 0.75 * self.head_dim**-0.5, "softcap": 0.75 * self.softcap}
        bias = -slopes[None, :, None, None] * away
        return {"score": pa.score_fn(score, slopes)}, dense | {"bias": bias}


def case(
    along="q k v", q=(2, 70, 4, 32), kv=(90, 2), v_dim=32, kind=Tangents, **fields
) -> Tangents:
    """`along`: the inputs that have tangents; `kv`: keys and their heads."""
    (batch, rows, heads, dim), fields = q, {"linearized": True} | fields
    sizes = batch, rows, kv[0], heads, kv[1], dim, v_dim
    return kind("tangents", *sizes, along=tuple(along.split()), **fields)


DOCUMENTS = (37, 37, 37, 37, 37, 15)
CASES = {
    "plain": case(),
    "causal": case(mask=CAUSAL, q=(1, 150, 4, 64), kv=(150, 2), v_dim=64),
    "window": case(mask=sliding_window(40), q=(1, 150, 2, 24), kv=(150, 1), v_dim=48),
    "band": case(mask=Mask(20, 30), q_offset=15, softcap=2.0),
    "offset": case(mask=CAUSAL, q_offset=-30),  # rows without a key
    "lengths": case(mask=CAUSAL, q_lengths=(70, 33), kv_lengths=(51, 90), q_offset=20),
    "documents": case(mask=CAUSAL, q=(1, 200, 2, 32), kv=(200, 2), segments=DOCUMENTS),
    "blocks": case(q=(1, 130, 2, 32), kv=(130, 2), kind=Blocks),
    "score": case(mask=CAUSAL, softcap=3.0, kind=Bent),
    "bias": case("bias k q v", bias_shape=(1, 4, 70, 90), kv_lengths=(51, 90)),
    "bias_of_keys": case("bias", bias_shape=(2, 1, 1, 90)),
    "ramp": case("bias k q v", kv=(200, 2), bias_shape=(1, 1, 1, 200), kind=Rising),
    "mask_of_keys": case(mask_shape=(2, 1, 1, 90)),
    "mask_array": case(mask=CAUSAL, mask_shape=(1, 4, 70, 90)),
    "sinks": case("k q sinks v", sinks=True, mask=CAUSAL, q_offset=-5),
    "float16": case(dtype="float16", q=(1, 70, 2, 128), v_dim=128, kv=(90, 1)),
    "panels": case(q=(2, 67, 2, 72), kv=(93, 2), v_dim=72, kv_lengths=(93, 51)),
    "panels_wide": case(mask=CAUSAL, q=(1, 81, 2, 104), kv=(81, 1), v_dim=88),
    "of_q": case("q", mask=CAUSAL, kv_lengths=(90, 51)),
    "of_k": case("k"),
    "of_v": case("v", mask=CAUSAL),
}
# By the launch of results and tangents: masks and arrays that it reads as the other one does are
# tested there, and on a GPU by both.
DUAL = [
    *("plain", "causal", "window", "band", "offset", "lengths", "score", "bias", "ramp", "sinks"),
    *("mask_array", "float16", "panels", "of_k", "of_v"),
]
FLOAT32 = {
    "float32": case(dtype="float32", mask=CAUSAL),
    "float32_highest": case(dtype="float32", mask=CAUSAL, precision="highest"),
}


def check(case: Tangents, module: str, configuration: dict[str, int] | None = None) -> None:
    """By that kernel: in the interpreter, or on a GPU."""
    generation, interpreted = module.removesuffix("_dual"), jax.default_backend() != "gpu"
    subject = subjects.Subject(module, generation, generation if interpreted else None)
    case = dataclasses.replace(case, linearized=not module.endswith("dual"))
    name, forced = f"flash_jvp_{module}", contextlib.nullcontext()
    if configuration:
        forced = config.forced(name, configuration)
    with forced, config.watched() as choices:
        fuzz.prove(run_tangents, case, subject)
    assert choices[-1].kernel == name


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    fuzz.prove(run_tangents, CASES[name], subjects.ROWS[0])


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_hopper_interpreted(name):
    check(CASES[name], "sm90")


LONGER = dataclasses.replace(CASES["causal"], q_len=260, kv_len=260, q_heads=2, kv_heads=1)
by_configuration = pytest.mark.parametrize(
    "configuration",
    [
        {"warpgroups": 3, "block_kv": 64, "stages": 3, "grid": 2},
        {"warpgroups": 1, "block_kv": 64, "stages": 2, "grid": 1},
        {"warpgroups": 2, "block_kv": 128, "stages": 2, "grid": 2, "l2_heads": 1},
    ],
    ids=str,
)


@pytest.mark.guards
@by_configuration
def test_hopper_interpreted_otherwise(configuration):
    check(LONGER, "sm90", configuration)


@pytest.mark.guards
@pytest.mark.parametrize("name", DUAL)
def test_dual_interpreted(name):
    check(CASES[name], "sm90_dual")


@pytest.mark.guards
@by_configuration
def test_dual_interpreted_otherwise(configuration):
    check(LONGER, "sm90_dual", configuration)


@pytest.mark.guards
@pytest.mark.parametrize("name", [*CASES, *FLOAT32])
def test_portable_interpreted(name):
    check((CASES | FLOAT32)[name], "sm80")


@pytest.mark.guards
@pytest.mark.parametrize("configuration", [{"block_kv": 16, "stages": 1}, {"block_kv": 64}])
def test_portable_interpreted_otherwise(configuration):
    check(CASES["window"], "sm80", configuration)


@pytest.mark.gpu
@pytest.mark.parametrize("module", ["sm90", "sm90_dual", "sm80"])
@pytest.mark.parametrize("name", [*CASES, *FLOAT32])
def test_on_the_gpu(name, module):
    if not (name in FLOAT32 and module != "sm80"):
        check((CASES | FLOAT32)[name], module)


def problem_of(dim, along=("k", "q", "v"), dtype="bfloat16", gpu="sm90"):
    q = jax.ShapeDtypeStruct((1, 512, 4, dim), dtype)
    problems = []

    def bound(q):
        problems.append(bind.attention(q, q, q, bind.Call())[0])

    with device.assume(gpu):
        jax.eval_shape(bound, q)
    return dataclasses.replace(problems[0], op="flash_jvp", tangents=along)


def test_what_kernels_take():
    assert sm90.limit(problem_of(128)) is None
    for problem in (problem_of(192), problem_of(64, dtype="float32"), problem_of(64, ("sinks",))):
        assert sm90.limit(problem) is not None and sm90_dual.KERNEL.limit(problem) is not None
    *_, portable = dispatch.TABLES["flash_jvp"]
    assert portable.refusal(problem_of(256, gpu="sm80")) is None
    said = portable.refusal(problem_of(256, dtype="float32", gpu="sm86"))
    assert said.reason == "a block needs 204800 bytes of shared memory; sm86 has 101376"
    shared = dataclasses.replace(problem_of(64, gpu="sm80"), share=2)
    assert portable.refusal(shared).reason == "batch rows that read the same k and v"


def lowered(run, generation):
    shape = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    with device.assume(generation):
        text = mosaic.lower_for_cuda(lambda *arrays: run(*arrays), *[shape] * 6)  # traced anew
    names = re.findall(r"kernel_name = \"(\w+)\"", text) or re.findall(r"(flash_\w+?_sm\d+)", text)
    return sorted(set(names))


ATTEND = functools.partial(pa.flash_attention_with_lse, mask=CAUSAL)
POLICY = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")


def forward(q, k, v, *dots):
    return jax.jvp(ATTEND, (q, k, v), dots)


def linearized(q, k, v, *dots):
    return jax.linearize(ATTEND, q, k, v)[1](*dots)


def with_a_gradient(q, k, v, *dots):
    def loss(q):
        (out, _), (out_dot, _) = jax.jvp(ATTEND, (q, k, v), dots)
        away = out - jax.lax.stop_gradient(out_dot)
        return (away.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss)(q)


def gradient_alone(q, k, v, *dots):
    del dots
    attend = jax.checkpoint(lambda q: ATTEND(q, k, v)[0].astype(jnp.float32).sum(), policy=POLICY)
    return jax.grad(attend)(q)


@pytest.mark.guards
@pytest.mark.parametrize("generation", ["sm80", "sm90"])
def test_launches(generation):
    """One launch where forward mode alone asks."""
    number = "sm90" if generation == "sm90" else "sm80"
    fwd, jvp = (f"flash_{x}_{number}" for x in ("fwd", "jvp"))
    alone = ["flash_dual_sm90"] if number == "sm90" else [fwd, jvp]
    assert lowered(forward, generation) == alone
    assert lowered(linearized, generation) == [fwd, jvp]


@pytest.mark.guards
@pytest.mark.parametrize("generation", ["sm80", "sm90"])
def test_launches_beside_gradients(generation):
    """A gradient has the launches that it always had, and one more for a tangent that is in the
    loss.
    """
    fwd, jvp = (f"flash_{x}_{generation}" for x in ("fwd", "jvp"))
    launches = lowered(with_a_gradient, generation)
    assert {fwd, jvp} < set(launches) and any("flash_bwd" in name for name in launches)
    assert not any("jvp" in x or "dual" in x for x in lowered(gradient_alone, generation))
