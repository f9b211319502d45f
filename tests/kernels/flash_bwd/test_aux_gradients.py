"""Gradients of the arrays that a score function reads, by backward kernels: in the interpreter with
races watched and, with `-m gpu`, on the real thing, beside dS by hand, added up by NumPy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, FULL, Mask, sliding_window
from pallas_attn._call import config
from pallas_attn.kernels.flash_bwd import aux_sums
from tests.support import budget, subjects, tolerance

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def t5(s, b, h, q, kv, table):
    """Exact buckets near the diagonal, then buckets of 16, as T5's grow."""
    far = jnp.maximum(q - kv, 0)
    return s + table[h, jnp.minimum(jnp.where(far < 16, far, 15 + far // 16), 23)]


def both_ways(s, b, h, q, kv, table):
    far = jnp.abs(q - kv)
    return s + table[jnp.where(q < kv, 8, 0) + jnp.minimum(far // 4, 7), h]


def alibi(s, b, h, q, kv, slopes):
    return s - slopes[h] * (q - kv)


def of_times(s, b, h, q, kv, slopes):
    """Integers that no float32 holds, whose difference one does."""
    begin = 1_700_000_000
    return s - slopes[h] * ((q + begin) - (kv + begin))


def number(s, b, h, q, kv, rate):
    return s + rate[0] * jnp.abs(q - kv)


def of_keys(s, b, h, q, kv, x):
    return s + x[b, kv]


def of_rows(s, b, h, q, kv, x):
    return s + x[h, q] * (kv & 1)


def of_rows_and_alibi(s, b, h, q, kv, x, slopes):
    return of_rows(s, b, h, q, kv, x) - slopes[h] * (q - kv)


def of_one_place(s, b, h, q, kv, x):
    """All distances have one element."""
    return s + x[jnp.minimum(q - kv + 1000, 0)] * (kv & 7)


def of_roots(s, b, h, q, kv, x):
    """Its derivative is NaN past the keys."""
    return s + x[h] * jnp.sqrt(((149 - kv) * (kv % 5)).astype(jnp.float32))


def of_far(s, b, h, q, kv, slopes):
    """Queries at positions that no float32 holds."""
    return s - slopes[h] * ((q - 2**25) - kv)


def of_both(s, b, h, q, kv, table, slopes):
    return t5(s, b, h, q, kv, table) - slopes[h] * (q - kv)


def of_every_distance(s, b, h, q, kv, table):
    return s + table[q - kv + 300]


class Function:
    """A score function, the shapes of its arrays, and its reads: (array, shape by b, h, q, kv)."""

    def __init__(self, f: Callable[..., Any], *shapes: tuple[int, ...]):
        self.f, self.shapes = f, shapes


FUNCTIONS = {
    "t5": Function(t5, (4, 24)),
    "both_ways": Function(both_ways, (16, 4)),
    "alibi": Function(alibi, (4,)),
    "of_times": Function(of_times, (4,)),
    "number": Function(number, (1,)),
    "of_keys": Function(of_keys, (2, 200)),
    "of_rows": Function(of_rows, (4, 200)),
    "of_both": Function(of_both, (4, 24), (4,)),
    "of_every_distance": Function(of_every_distance, (600,)),
    "of_rows_and_alibi": Function(of_rows_and_alibi, (4, 200), (4,)),
    "of_one_place": Function(of_one_place, (1,)),
    "of_roots": Function(of_roots, (4,)),
    "of_far": Function(of_far, (4,)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call."""

    function: str
    mask: Mask = CAUSAL
    sizes: tuple[int, int] = (150, 150)  # T and S
    batch: int = 2
    heads: int = 4  # functions read as many, or more
    kv_heads: int = 2
    dim: int = 32
    dtype: str = "bfloat16"
    aux_dtype: str = "float32"
    q_offset: Any = 0
    kv_lengths: tuple[int, ...] | None = None
    sinks: bool = False
    bias: bool = False
    deterministic: bool = False


CASES = {
    "t5": Case("t5"),
    "t5_lengths": Case("t5", sizes=(70, 190), q_offset=120, kv_lengths=(130, 190)),
    "t5_window": Case("t5", sliding_window(40), kv_heads=4, aux_dtype="bfloat16"),
    "offsets": Case("both_ways", FULL, (70, 130), q_offset=(0, 33)),
    "t5_far": Case("t5", sizes=(420, 420), kv_heads=4),
    "both_ways_far": Case("both_ways", FULL, (300, 420), kv_heads=4),
    "alibi": Case("alibi", kv_heads=4),
    "alibi_grouped": Case("alibi", sinks=True),
    "alibi_bits": Case("alibi", deterministic=True, kv_heads=4, dim=72),
    "of_times": Case("of_times", sizes=(70, 70), kv_heads=4),
    "number": Case("number", FULL, (70, 150), kv_heads=4),
    "of_keys": Case("of_keys", FULL, (70, 200)),
    "of_rows": Case("of_rows", sizes=(200, 150)),
    "of_both": Case("of_both", bias=True),
    "of_every_distance": Case("of_every_distance", FULL, (130, 260)),
    "float32": Case("t5", dtype="float32"),
    "wide": Case("alibi", dim=160, sizes=(70, 70), kv_heads=4),
    "of_rows_and_alibi": Case("of_rows_and_alibi", sizes=(70, 150), kv_heads=4),
    "of_one_place": Case("of_one_place", sizes=(70, 150), kv_heads=4),
    "of_roots": Case("of_roots", sizes=(70, 150), kv_heads=4),
    "of_far": Case("of_far", sizes=(70, 70), q_offset=2**25, kv_heads=4),
}


def small(name):
    """A case for the interpreter, whose time is that of its tiles: one batch row where all are
    alike, and half the heads.
    """
    case = CASES[name]
    alike = case.kv_lengths is None and isinstance(case.q_offset, int) and name != "of_keys"
    fewer = {"heads": case.heads // 2, "kv_heads": case.kv_heads // 2, "batch": 1 if alike else 2}
    return dataclasses.replace(case, **fewer)


def drawn(case):
    """(floats that have gradients, other arguments, the cotangent of out)"""
    rng, (rows, keys) = np.random.default_rng(3), case.sizes
    sizes = dict.fromkeys(("q", "do"), (case.batch, rows, case.heads, case.dim))
    sizes |= dict.fromkeys("kv", (case.batch, keys, case.kv_heads, case.dim))
    arrays = {name: jnp.asarray(rng.standard_normal(x), case.dtype) for name, x in sizes.items()}
    for n, shape in enumerate(FUNCTIONS[case.function].shapes):
        scale = 0.05 if case.function in ("alibi", "of_times", "number") or n else 0.5
        arrays[f"aux{n}"] = jnp.asarray(scale * rng.standard_normal(shape), case.aux_dtype)
    rest = {"mask": case.mask, "q_offset": case.q_offset, "deterministic": case.deterministic}
    if case.kv_lengths is not None:
        rest["kv_lengths"] = jnp.asarray(case.kv_lengths, jnp.int32)
    if not isinstance(case.q_offset, int):
        rest["q_offset"] = jnp.asarray(case.q_offset, jnp.int32)
    if case.sinks:
        arrays["sinks"] = jnp.asarray(rng.standard_normal(case.heads), jnp.float32)
    if case.bias:
        bias = rng.standard_normal((1, case.heads, rows, keys))
        rest["bias"] = jnp.asarray(bias, jnp.float32)
    return arrays, rest, arrays.pop("do")


def attend(case, rest, floats, implementation):
    floats = dict(floats)
    aux = [floats.pop(f"aux{n}") for n in range(len(FUNCTIONS[case.function].shapes))]
    score = pa.score_fn(FUNCTIONS[case.function].f, *aux)
    return pa.flash_attention(**floats, **rest, score=score, implementation=implementation)


def gradients(case, rest, floats, do, implementation):
    run = functools.partial(attend, case, rest, implementation=implementation)
    return jax.vjp(run, floats)[1](do)[0]


def positions(case):
    rows, keys = case.sizes
    b, h, q, kv = np.ogrid[: case.batch, : case.heads, :rows, :keys]
    offset = np.asarray(case.q_offset).reshape(-1, 1, 1, 1)
    return tuple(jnp.asarray(x, jnp.int32) for x in (b, h, q + offset, kv))


@functools.lru_cache(maxsize=8)  # neighbours run one case with several Configs
def by_hand(case):
    """{name: gradient} by the oracle's dS, and by the naive one's."""
    floats, rest, do = drawn(case)
    function, at = FUNCTIONS[case.function], positions(case)
    aux = [floats.pop(f"aux{n}").astype(jnp.float32) for n in range(len(function.shapes))]
    full = (case.batch, case.heads, *case.sizes)
    add = lambda *aux: function.f(jnp.zeros((1,) * 4), *at, *aux)  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):
        score, pull = jax.vjp(lambda *aux: jnp.broadcast_to(add(*aux), full), *aux)
    bias = np.asarray(score) + np.asarray(rest.pop("bias", 0.0))
    rest.pop("deterministic")
    expected = budget.attention(floats | rest | {"bias": bias}, do, tensor_cores=True)

    def summed(ds):
        return [np.asarray(x, np.float64) for x in pull(jnp.asarray(ds, jnp.float32))]

    return summed(expected.oracle["dbias"]), summed(expected.naive["dbias"])


def check(case, got):
    """Within four times the naive error of any element of the array, of which there are few, and a
    rounding.
    """
    oracle, naive = by_hand(case)
    for n, (want, plain) in enumerate(zip(oracle, naive, strict=True)):
        mine = np.asarray(got[f"aux{n}"], np.float64)
        assert mine.shape == want.shape
        eps = float(jnp.finfo(case.aux_dtype).eps)
        error, most = np.abs(plain - want).max(), np.abs(want).max()
        allowed = tolerance.allowed(2 * error, eps * most + 1e-5 * most)
        assert allowed < 0.3 * np.sqrt((want**2).mean()) or want.size == 1, "proves nothing"
        assert np.abs(mine - want).max() <= allowed, (np.abs(mine - want).max(), allowed, most)


def computed(case, generation):
    floats, rest, do = drawn(case)
    subject = subjects.Subject("interpreted", generation, generation)

    def run(floats, rest, do, implementation):
        return gradients(case, rest | static, floats, do, implementation)

    static = {name: rest.pop(name) for name in ("mask", "deterministic")}
    if isinstance(rest["q_offset"], int):
        static["q_offset"] = rest.pop("q_offset")
    return subject.call(run, floats, rest, do)


@pytest.mark.guards
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("t5", "t5_far", "alibi")])
def test_hopper_interpreted(name):
    check(small(name), computed(small(name), "sm90"))


@pytest.mark.guards
@pytest.mark.parametrize(
    "name, changes",
    [
        ("t5_far", {"block_q": 128}),
        ("both_ways_far", {"block_q": 64, "dq_lag": 2}),
        ("t5_far", {"kernel": "flash_bwd_sm90_two_kernels", "block_q": 64}),
        ("alibi", {"block_q": 64, "parts": 3}),
    ],
    ids=str,
)
def test_sums_of_keys_interpreted(name, changes):
    configuration = {"kernel": "flash_bwd_sm90", "grid": 3} | changes
    kernel = configuration.pop("kernel")
    with config.forced(kernel, configuration), config.watched() as choices:
        results = computed(small(name), "sm90")
    assert choices[-1].kernel == kernel
    check(small(name), results)


@pytest.mark.guards
@pytest.mark.parametrize("name", ["t5_lengths", "alibi_grouped", "of_rows", "float32", "wide"])
def test_portable_interpreted(name):
    check(small(name), computed(small(name), "sm80"))


@pytest.mark.guards
def test_sums_that_are_sorted_interpreted(monkeypatch):
    """They are too many to compare each with all elements."""
    monkeypatch.setattr(aux_sums, "MOST_COMPARED", 0)
    check(small("of_keys"), computed(small("of_keys"), "sm90"))


@pytest.mark.guards
def test_a_weight_that_depends_on_the_score_interpreted():
    """The score is the one after softcap, as in the reference."""
    rng, names = np.random.default_rng(5), ("q", "k", "v", "do")
    q, k, v, do = (jnp.asarray(rng.standard_normal((1, 70, 2, 32)), "bfloat16") for _ in names)

    def gradient(q, k, v, do, rates, *, implementation):
        def out(rates):
            score = pa.score_fn(lambda s, b, h, q, kv, x: s * x[h], rates)
            options = {"softcap": 2.0, "implementation": implementation}
            return pa.flash_attention(q, k, v, score=score, **options)

        return jax.vjp(out, rates)[1](do)[0]

    subject = subjects.Subject("interpreted", "sm90", "sm90")
    arrays = q, k, v, do, jnp.asarray([0.5, 2.0], jnp.float32)
    got, want = subject.call(gradient, *arrays), gradient(*arrays, implementation="reference")
    np.testing.assert_allclose(got, want, 0.02, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["sm90", "sm80"])
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name, implementation):
    case = CASES[name]
    floats, rest, do = drawn(case)
    run = functools.partial(gradients, case, rest, implementation=implementation)
    got = jax.block_until_ready(jax.jit(run)(floats, do))
    check(case, got)
    if case.deterministic:
        again = jax.block_until_ready(jax.jit(run)(floats, do))
        assert all(
            bool((x == y).all()) for x, y in zip(*map(jax.tree.leaves, (got, again)), strict=True)
        )
