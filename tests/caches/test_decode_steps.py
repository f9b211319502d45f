"""Generation, many steps of it: decoding is attention over the concatenation, step after step, in a
loop inside one jit; pages in any order; quantised caches too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, PagedCache, PerSequenceCache, StackedCache, sliding_window
from tests.support import budget, subjects
from tests.support.quantized import quantized

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KINDS = ("per_sequence", "stacked", "paged")
CAPACITY, PAGE, HEADS, GROUP, DIM = 256, 16, 2, 4, 64
STEPS = 24  # 3 in the interpreter, where each takes seconds
# Rows held before the first step: nothing, one, both sides of a tile's edge, as many as just fit
# and, in the interpreter too, some too many.
STARTS = (0, 1, 63, 64, 65, 127, 128, 129, CAPACITY - STEPS, CAPACITY - 2)
M = len(STARTS)
NARROW = ("float8_e4m3fn", "int8")


def create(kind, dtype, order=None):
    sizes = {"kv_heads": HEADS, "head_dim": DIM, "dtype": dtype}
    if kind == "per_sequence":
        return PerSequenceCache.create((CAPACITY,) * M, **sizes)
    if kind == "stacked":
        return StackedCache.create(M, CAPACITY, **sizes)
    pages = M * CAPACITY // PAGE
    cache = PagedCache.create(M, pages, PAGE, capacity=CAPACITY, **sizes)
    return dataclasses.replace(cache, free_list=jnp.asarray(order, jnp.int32))


def generate(cache, q, k, v, *, implementation, **options):
    """The cache after a scan over tokens [steps, M, ...], and all rows of out and lse."""

    def step(cache, token):
        q, k, v = token
        cache = pa.append_kv(cache, k, v, implementation=implementation)
        return cache, pa.decode_attention_with_lse(
            q, cache, implementation=implementation, **options
        )

    return jax.lax.scan(step, cache, (q, k, v))


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    cache_dtype: str | None = None  # None: that of the queries
    window: int | None = None
    batch_invariant: bool = False

    @property
    def name(self):
        return "-".join(str(x) for x in dataclasses.astuple(self) if x not in (None, False))

    def options(self):
        mask = CAUSAL if self.window is None else sliding_window(self.window)
        return {"mask": mask, "batch_invariant": self.batch_invariant}

    def call(self, dtype="bfloat16"):
        cache = create(self.kind, self.cache_dtype or dtype, np.arange(M * CAPACITY // PAGE))
        q = jnp.zeros((M, HEADS * GROUP, DIM), dtype)
        return pa.decode_attention_with_lse, {"q": q, "cache": cache} | self.options()


CASES = [
    *(Case(kind) for kind in KINDS),
    *(Case(kind, window=70) for kind in KINDS),
    *(Case(kind, batch_invariant=True) for kind in KINDS),
    *(Case(kind, dtype) for kind in KINDS for dtype in NARROW),
]


def draw(rng, subject, steps):
    """q [M, steps, N, H], k and v [M, CAPACITY + steps, K, H]."""
    shapes = (steps, HEADS * GROUP), (CAPACITY + steps, HEADS), (CAPACITY + steps, HEADS)
    dtype = jnp.dtype(subject.dtype)
    return [jnp.asarray(rng.standard_normal((M, *s, DIM)).astype(dtype)) for s in shapes]


FEW = [Case("per_sequence"), Case("paged", "int8")]
# The reference reads every cache as the same rows, and is batch-invariant as it is.
FOR_REFERENCE = [
    *(Case(kind) for kind in KINDS),
    Case("paged", window=70),
    Case("stacked", batch_invariant=True),
    *(Case(kind, dtype) for kind, dtype in zip(("per_sequence", "paged"), NARROW, strict=True)),
]


@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs(
        "decode",
        CASES,
        Case.call,
        but=("kernels_float32",),
        interpreted=FEW,
        reference=FOR_REFERENCE,
    ),
)
def test_step_by_step(rng, subject, case):
    """Rows past a length are NaN; rows past the capacity are lost, and only those steps show it. A
    second run gives the same bits.
    """
    steps = 3 if subject.generation else STEPS
    q, k, v = draw(rng, subject, steps)
    starts = np.array(STARTS, np.int32)
    dtype = case.cache_dtype or subject.dtype
    order = rng.permutation(M * CAPACITY // PAGE)
    cache = create(case.kind, dtype, order)
    poison = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
    cache = dataclasses.replace(cache, **jax.tree.map(_poisoned, poison))
    cache = pa.append_kv(cache, k[:, :CAPACITY], v[:, :CAPACITY], new_lengths=jnp.asarray(starts))
    at = starts[:, None] + np.arange(steps)
    tokens = [jnp.swapaxes(_rows(x, at), 0, 1) for x in (k, v)]
    arguments = (cache, jnp.swapaxes(q, 0, 1), *tokens)
    got_cache, (out, lse) = subject.call(generate, *arguments, **case.options())
    # The interpreter and XLA on a CPU have one order of things.
    if not subject.generation and subject.name != "reference":
        _, again = subject.call(generate, *arguments, **case.options())
        for first, two in zip((out, lse), again, strict=True):
            np.testing.assert_array_equal(_bits(first), _bits(two))
    np.testing.assert_array_equal(got_cache.lengths, starts + steps)
    np.testing.assert_array_equal(got_cache.overflowed, starts + steps > CAPACITY)

    if case.cache_dtype:  # rows as the cache returns them: decode is not charged for quantising
        k, v = (_held(x, case.cache_dtype) for x in (k, v))
    wanted = {"q": q, "k": k, "v": v, "mask": case.options()["mask"]}
    wanted |= {"kv_lengths": starts + steps, "q_offset": starts}
    expected = budget.attention(wanted)
    out, lse = np.swapaxes(np.asarray(out), 0, 1), np.moveaxis(np.asarray(lse), 0, 2)
    fits = at < CAPACITY
    assert np.isnan(out[~fits].astype(np.float32)).all()
    assert np.isnan(np.swapaxes(lse, 1, 2)[~fits]).all()
    # Results of lost rows are not compared.
    for name, there in (("out", fits[..., None, None]), ("lse", fits[:, None, :])):
        for side in (expected.oracle, expected.naive):
            side[name] = np.where(there, side[name], 0)
    out = np.where(fits[..., None, None], out, np.zeros_like(out))
    budget.check({"out": out, "lse": np.where(fits[:, None, :], lse, 0)}, expected)


def _rows(x, at):
    return jnp.take_along_axis(x, jnp.asarray(at)[..., None, None], axis=1)


def _held(rows, dtype):
    numbers, scales = quantized(rows, dtype)
    return jnp.asarray(numbers.astype(np.float32) * scales[..., None])


def _poisoned(x):
    """Every bit set: NaN in each float type here; int8 has its NaN in the scale."""
    return jnp.asarray(np.full(x.nbytes, 255, np.uint8).view(x.dtype).reshape(x.shape))


def _bits(x):
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")
