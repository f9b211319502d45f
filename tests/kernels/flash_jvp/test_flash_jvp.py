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
from pallas_attn import CAUSAL, FULL, Mask, sliding_window
from pallas_attn._call import bind, config, device, dispatch
from pallas_attn.kernels.flash_jvp import sm90, sm90_dual
from tests.support import aot, builds, mosaic, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the inputs that have tangents."""

    along: tuple[str, ...] = ("q", "k", "v")
    q: tuple[int, ...] = (2, 70, 4, 32)
    kv: tuple[int, int] = (90, 2)  # S and K
    v_dim: int = 32
    mask: Any = FULL
    dtype: str = "bfloat16"
    softcap: float | None = None
    q_offset: int = 0
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    documents: int = 0  # rows of a segment
    blocks: int = 0  # a mask function of blocks of so many rows
    score: bool = False
    hidden: tuple[int, ...] | None = None  # the shape of a mask_array that hides a third
    bias: tuple[int, ...] | None = None
    ramp: float = 0.0  # by which the bias rises from key to key: each tile raises the row max
    sinks: bool = False
    precision: str | None = None


CASES = {
    "plain": Case(),
    "causal": Case(mask=CAUSAL, q=(1, 150, 4, 64), kv=(150, 2), v_dim=64),
    "window": Case(mask=sliding_window(40), q=(1, 150, 2, 24), kv=(150, 1), v_dim=48),
    "band": Case(mask=Mask(20, 30), q_offset=15, softcap=2.0),
    "offset": Case(mask=CAUSAL, q_offset=-30),  # rows without a key
    "lengths": Case(mask=CAUSAL, q_lengths=(70, 33), kv_lengths=(51, 90), q_offset=20),
    "documents": Case(mask=CAUSAL, q=(1, 200, 2, 32), kv=(200, 2), documents=37),
    "blocks": Case(q=(1, 130, 2, 32), kv=(130, 2), blocks=32),
    "score": Case(mask=CAUSAL, score=True, softcap=3.0),
    "bias": Case(("bias", "k", "q", "v"), bias=(1, 4, 70, 90), kv_lengths=(51, 90)),
    "bias_of_keys": Case(("bias",), bias=(2, 1, 1, 90)),
    "ramp": Case(("bias", "k", "q", "v"), kv=(200, 2), bias=(1, 1, 1, 200), ramp=0.15),
    "mask_of_keys": Case(hidden=(2, 1, 1, 90)),
    "mask_array": Case(mask=CAUSAL, hidden=(1, 4, 70, 90)),
    "sinks": Case(("k", "q", "sinks", "v"), sinks=True, mask=CAUSAL, q_offset=-5),
    "float16": Case(dtype="float16", q=(1, 70, 2, 128), v_dim=128, kv=(90, 1)),
    "panels": Case(q=(2, 67, 2, 72), kv=(93, 2), v_dim=72, kv_lengths=(93, 51)),
    "panels_wide": Case(mask=CAUSAL, q=(1, 81, 2, 104), kv=(81, 1), v_dim=88),
    "of_q": Case(("q",), mask=CAUSAL, kv_lengths=(90, 51)),
    "of_k": Case(("k",)),
    "of_v": Case(("v",), mask=CAUSAL),
}
# By the launch of results and tangents: masks and arrays that it reads as the other one does are
# tested there, and on a GPU by both.
DUAL = [
    *("plain", "causal", "window", "band", "offset", "lengths", "score", "bias", "ramp", "sinks"),
    *("mask_array", "float16", "panels", "of_k", "of_v"),
]
FLOAT32 = {
    "float32": Case(dtype="float32", mask=CAUSAL),
    "float32_highest": Case(dtype="float32", mask=CAUSAL, precision="highest"),
}


def bend(s, b, h, q, kv, slopes):
    return s * 0.75 - slopes[h] * abs(q - kv)


def drawn(case, poison=False):
    """(floats, their tangents, other arguments); NaN past every length where `poison`."""
    rng = np.random.default_rng(5)
    (batch, rows, heads, dim), (keys, kv_heads) = case.q, case.kv
    shapes = {
        "q": case.q,
        "k": (batch, keys, kv_heads, dim),
        "v": (batch, keys, kv_heads, case.v_dim),
    }
    floats, dots = (
        {name: jnp.asarray(rng.standard_normal(x), case.dtype) for name, x in shapes.items()}
        for _ in range(2)
    )
    if case.bias:
        floats["bias"], dots["bias"] = np.float32(rng.standard_normal((2, *case.bias)))
        floats["bias"] += np.float32(case.ramp * np.arange(case.bias[3]))
    if case.sinks:
        floats["sinks"], dots["sinks"] = np.float32(rng.standard_normal((2, heads)))
    rest: dict[str, Any] = {"mask": case.mask, "softcap": case.softcap, "q_offset": case.q_offset}
    rest["precision"] = case.precision
    for name, of, lengths in (("q", ("q",), case.q_lengths), ("kv", "kv", case.kv_lengths)):
        if lengths is None:
            continue
        rest[f"{name}_lengths"] = np.array(lengths, np.int32)
        for tree in (floats, dots) if poison else ():
            for n in of:
                live = np.arange(tree[n].shape[1])[None] < np.array(lengths)[:, None]
                tree[n] = jnp.where(live[..., None, None], tree[n], jnp.nan)
    if case.documents:
        ids = [np.arange(n)[None] // case.documents for n in (rows, keys)]
        rest["segment_ids"] = tuple(np.int32(np.repeat(x, batch, axis=0)) for x in ids)
    if case.blocks:
        rest["mask"] = pa.mask_fn(lambda b, h, q, kv: q // case.blocks >= kv // case.blocks)
    if case.hidden:
        rest["mask_array"] = shown(case)
    if case.score:
        slopes = jnp.asarray(0.1 * (1 + np.arange(heads)), case.dtype).astype(jnp.float32)
        rest["score"] = pa.score_fn(bend, slopes)
    return floats, {name: dots[name] for name in case.along}, rest


def shown(case):
    """A mask_array: the first keys hidden, and some of the others."""
    mask = np.random.default_rng(7).random(case.hidden) < 0.8
    mask[..., :12] = False
    return mask


def seen(case):
    """bool[B, 1 or N, T, S]"""
    (batch, rows, *_), (keys, _) = case.q, case.kv
    row, key = np.arange(rows)[:, None], np.arange(keys)[None]
    at = row + case.q_offset
    allowed = np.ones((batch, rows, keys), bool) & np.asarray(case.mask.allows(at, key))
    for lengths, number in ((case.q_lengths, row), (case.kv_lengths, key)):
        if lengths is not None:
            allowed &= number[None] < np.array(lengths)[:, None, None]
    if case.documents:
        allowed &= row // case.documents == key // case.documents
    if case.blocks:
        allowed &= row // case.blocks >= key // case.blocks
    return allowed[:, None] & (shown(case) if case.hidden else True)


def by_hand(case, floats, dots, rounded=lambda x: x):
    """The tangents of out and lse in float64. `rounded`: of what tensor cores multiply with values,
    and of the out that is subtracted.
    """
    _, rows, heads, dim = case.q
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    by_head = lambda x: np.repeat(wide(x), heads // x.shape[2], axis=2).swapaxes(1, 2)  # noqa: E731
    q, k, v = (by_head(floats[name]) for name in "qkv")
    named = zip("qkv", (q, k, v), strict=True)
    dq, dk, dv = (by_head(dots[name]) if name in dots else 0 * x for name, x in named)
    scale = dim**-0.5
    s, s_dot = scale * q @ k.swapaxes(2, 3), scale * (dq @ k.swapaxes(2, 3) + q @ dk.swapaxes(2, 3))
    if case.softcap is not None:
        s = case.softcap * np.tanh(s / case.softcap)
        s_dot = s_dot * (1 - (s / case.softcap) ** 2)
    if case.score:
        away = np.abs(np.arange(rows)[:, None] + case.q_offset - np.arange(case.kv[0]))
        slopes = jnp.asarray(0.1 * (1 + np.arange(heads)), case.dtype)
        s_dot, s = s_dot * 0.75, s * 0.75 - wide(slopes)[:, None, None] * away
    if case.bias:
        s = s + wide(floats["bias"])
        s_dot = s_dot + (wide(dots["bias"]) if "bias" in dots else 0)
    allowed = np.broadcast_to(seen(case), s.shape)
    s = np.where(allowed, s, -np.inf)
    some = allowed.any(-1, keepdims=True)
    top = np.where(some, s.max(-1, keepdims=True), 0)
    p, extra, sink_dot = np.exp(s - top), 0.0, 0.0
    if case.sinks:
        extra = np.exp(wide(floats["sinks"])[:, None, None] - top)
        sink_dot = wide(dots["sinks"])[:, None, None] if "sinks" in dots else 0.0
    total = np.where(some, p.sum(-1, keepdims=True) + extra, 1)
    p, p_sink = p / total, np.where(some, extra / total, 0)
    moved = p * np.where(allowed, s_dot, 0)
    r = moved.sum(-1, keepdims=True) + p_sink * sink_dot
    out = rounded(p) @ v
    out_dot = rounded(p) @ dv + rounded(moved) @ v - r * rounded(out)
    return out_dot.swapaxes(1, 2), r[..., 0]


def tangents(floats, dots, rest, implementation):
    """The tangents by jax.linearize: from out and lse of the forward."""

    def run(some):
        return pa.flash_attention_with_lse(**(floats | some), **rest, implementation=implementation)

    return jax.linearize(run, {name: floats[name] for name in dots})[1](dots)


def dual(floats, dots, rest, implementation):
    """Results and tangents by jax.jvp: in one launch on Hopper."""

    def run(some):
        return pa.flash_attention_with_lse(**(floats | some), **rest, implementation=implementation)

    return jax.jvp(run, ({name: floats[name] for name in dots},), (dots,))


@pytest.mark.parametrize("name", [name for name in CASES if name != "score"])  # it is of float32
def test_derivatives_by_hand_are_those_of_the_reference(name):
    case = dataclasses.replace(CASES[name], dtype="float32")
    floats, dots, rest = drawn(case)
    wide = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
    with jax.enable_x64(True):
        run = functools.partial(tangents, rest=rest, implementation="reference")
        got = jax.jit(run)(wide(floats), wide(dots))
    for x, y in zip(got, by_hand(case, floats, dots), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@functools.cache
def expected_of(case):
    """The tangents in float64, and with rounded operands."""
    floats, dots, _ = drawn(case)
    narrow = jnp.bfloat16 if case.dtype == "float32" else case.dtype
    rounded = lambda x: np.asarray(jnp.asarray(x, narrow), np.float64)  # noqa: E731
    return by_hand(case, floats, dots), by_hand(case, floats, dots, rounded)


def check(case, got):
    """Within twice the error of the same mathematics with rounded operands, and a rounding."""
    want, naive = expected_of(case)
    eps, more = float(jnp.finfo(case.dtype).eps), 1.0
    if case.dtype == "float32":  # terms: two are good to 2**-16, three to 2**-23
        more = 2.0**-6 if case.precision is None else 2.0**-13
    for x, y, z in zip(got, want, naive, strict=True):
        x = np.asarray(x, np.float64)
        axes = (0, 2, 3) if y.ndim == 4 else (0, 1)  # a band of each query; early rows are larger
        size = np.abs(y).max(axes, keepdims=True)
        allowed = 3 * more * np.abs(z - y).max(axes, keepdims=True) + eps * size + 5e-5
        assert np.sqrt((allowed**2).mean()) < 0.1 * np.sqrt((y**2).mean()) + 1e-3, "proves nothing"
        assert (np.abs(x - y) <= allowed).all(), (np.abs(x - y) - allowed).max()


def computed(case, kernel, configuration=None, call=tangents):
    floats, dots, rest = drawn(case, poison=True)
    forced = contextlib.nullcontext()
    if configuration:
        forced = config.forced(kernel, configuration)
    generation = "sm80" if "sm80" in kernel else "sm90"
    subject = subjects.Subject("interpreted", generation, generation)
    run = lambda floats, dots, implementation: call(floats, dots, rest, implementation)  # noqa: E731
    with forced, config.watched() as choices:
        results = subject.call(run, floats, dots)
    assert choices[-1].kernel == kernel
    return results


def check_dual(case, results):
    """The results are those of the forward, too."""
    check(case, results[1])
    floats, _, rest = drawn(case)
    options = rest | {name: x for name, x in floats.items() if name in ("bias", "sinks")}
    qkv = [floats[name] for name in "qkv"]
    run = functools.partial(pa.flash_attention_with_lse, **options, implementation="reference")
    for x, y in zip(results[0], jax.jit(run)(*qkv), strict=True):
        x, y = np.float32(x), np.float32(y)
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=2e-2 if x.ndim == 4 else 1e-4)


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_hopper_interpreted(name):
    check(CASES[name], computed(CASES[name], "flash_jvp_sm90"))


LONGER = dataclasses.replace(CASES["causal"], q=(1, 260, 2, 64), kv=(260, 1))
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
    check(LONGER, computed(LONGER, "flash_jvp_sm90", configuration))


@pytest.mark.guards
@pytest.mark.parametrize("name", DUAL)
def test_dual_interpreted(name):
    check_dual(CASES[name], computed(CASES[name], "flash_jvp_sm90_dual", call=dual))


@pytest.mark.guards
@by_configuration
def test_dual_interpreted_otherwise(configuration):
    check_dual(LONGER, computed(LONGER, "flash_jvp_sm90_dual", configuration, dual))


@pytest.mark.guards
@pytest.mark.parametrize("name", [*CASES, *FLOAT32])
def test_portable_interpreted(name):
    case = (CASES | FLOAT32)[name]
    check(case, computed(case, "flash_jvp_sm80"))


@pytest.mark.guards
@pytest.mark.parametrize("configuration", [{"block_kv": 16, "stages": 1}, {"block_kv": 64}])
def test_portable_interpreted_otherwise(configuration):
    check(CASES["window"], computed(CASES["window"], "flash_jvp_sm80", configuration))


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


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", ["h128_causal", "h64_dual", "h128_dual"])
def test_machine_code_of_hopper(name):
    """No matmuls that wait for each other, and few spills."""
    build = builds.BUILDS[f"flash_jvp/sm90/{name}"]
    report = aot.compile_for(build.call, *build.shapes)
    assert report.spill_bytes <= (400 if name == "h128_dual" else 32)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["sm90", "sm80"])
@pytest.mark.parametrize("name", [*CASES, *FLOAT32])
def test_on_the_gpu(name, implementation):
    case = (CASES | FLOAT32)[name]
    floats, dots, rest = drawn(case, poison=True)
    for call in (tangents, dual):
        run = functools.partial(call, rest=rest, implementation=implementation)
        results = jax.block_until_ready(jax.jit(run)(floats, dots))
        check(case, results if call is tangents else results[1])
