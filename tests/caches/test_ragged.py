"""Pages with K and V interleaved by head: `ragged_paged_attention` against JAX's own reference of
it, which knows nothing of this package.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as of_tpu

import pallas_attn as pa
from pallas_attn._call import config, device
from tests.support import builds, fuzz_ragged, mosaic, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

COUNTS = (1, 0, 2, 7, 8, 16, 63, 64, 65, 128, 0, 300, 1)  # query rows of each sequence
HELD = (130, 9, 0, 60, 1, 0, 70, 0, 63, 5, 0, 20, 0)  # rows before these
FEW = ((1, 0, 40, 7), (70, 9, 0, 33))  # for the interpreter
SOME = ((1, 0, 2, 7, 65, 0, 1), (130, 9, 0, 60, 20, 0, 0))  # for the reference, which has no tiles
ONES = ((1,) * 9, (0, 5, 130, 63, 64, 65, 16, 15, 200))
UNUSED, REST = 2, 3  # sequences that do not count, and rows of q behind those that do


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sequences with `counts` query rows behind `held` rows."""

    counts: tuple[int, ...] = COUNTS
    held: tuple[int, ...] = HELD
    dtype: str = "bfloat16"
    page_dtype: str | None = None
    page_size: int = 16
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def arguments(self, rng: np.random.Generator) -> tuple[Any, ...]:
        """Numbers of sequences that do not count, page ids and rows past a length are spoiled."""
        used, sequences = len(self.counts), len(self.counts) + UNUSED
        lengths = np.full(sequences, 2**30, np.int32)
        lengths[:used] = np.add(self.counts, self.held)
        width = -(-int(lengths[:used].max()) // self.page_size) + 1
        pages = used * width + 3
        table = np.full((sequences, width), 2**31 - 1, np.int32)
        table[:used] = rng.permutation(pages)[: used * width].reshape(used, width)
        shape = (pages, self.page_size, 2 * self.kv_heads, self.head_dim)
        live = np.zeros(shape[:2], bool)
        for m, length in enumerate(lengths[:used]):
            rows = np.arange(length)
            live[table[m, rows // self.page_size], rows % self.page_size] = True
            table[m, -(-length // self.page_size) :] = -7
        numbers = rng.standard_normal(shape, np.float32)
        dtype = jnp.dtype(self.page_dtype or self.dtype)
        if dtype == jnp.int8:
            numbers = np.round(40 * numbers)
        else:
            numbers[~live] = np.nan
        starts = np.full(sequences + 1, -(2**31), np.int32)
        starts[: used + 1] = np.cumsum((0, *self.counts))
        q = rng.standard_normal((starts[used] + REST, self.q_heads, self.head_dim), np.float32)
        q[starts[used] :] = np.nan
        arrays = lengths, table, starts, np.asarray([used], np.int32)
        pages_of_both = jnp.asarray(numbers).astype(dtype)
        return jnp.asarray(q, self.dtype), pages_of_both, *map(jnp.asarray, arrays)


def expected(arguments: tuple[Any, ...], **options: Any) -> np.ndarray:
    """JAX's reference, in float32, of the sequences that have query rows; it wants keys of some
    sort in each page.
    """
    q, pages, lengths, table, starts, count = map(np.asarray, arguments)
    counts = np.diff(starts[: count[0] + 1])
    some = np.flatnonzero(counts)
    starts = np.cumsum([0, *counts[some]])
    pages = np.nan_to_num(pages.astype(np.float32))
    small = lengths[some], np.clip(table[some], 0, len(pages) - 1), starts, np.array([len(some)])
    arrays = (jnp.asarray(x, jnp.int32) for x in small)
    rows = jnp.asarray(q[: starts[-1]], jnp.float32)
    wanted = of_tpu.ref_ragged_paged_attention(rows, jnp.asarray(pages), *arrays, **options)
    return np.asarray(wanted)


def check(mixture: Mixture, rng: np.random.Generator, subject: Any, **options: Any) -> None:
    arguments = mixture.arguments(rng)
    options = {"sm_scale": mixture.head_dim**-0.5} | options
    out = np.asarray(subject.call(pa.ragged_paged_attention, *arguments, **options), np.float32)
    want = expected(arguments, **options)
    assert out.shape == arguments[0].shape
    assert not out[len(want) :].any()
    most = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 3e-3}[mixture.dtype]
    size = np.abs(want).max()
    np.testing.assert_allclose(out[: len(want)], want, atol=most * size, rtol=0)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 37},
    "soft_cap": {"soft_cap": 3.0},
    "scales": {"k_scale": 0.5, "v_scale": 3.0, "mask_value": -1e30},
    "all": {"sliding_window": 100, "soft_cap": -20.0, "sm_scale": 0.3},
}
CASES = {
    "mixture": Mixture(),
    "float16": Mixture(dtype="float16", head_dim=128, page_size=32),
    "float32": Mixture(dtype="float32", page_size=8),
    "one_head": Mixture(kv_heads=1, q_heads=8, page_size=64),
    "odd_pages": Mixture(page_size=5),
    "ones": Mixture(*ONES, q_heads=8, head_dim=128),
    "ones_wide": Mixture(*ONES, kv_heads=1, page_size=1),
    "float8": Mixture(page_dtype="float8_e4m3fn"),
    "float8_e5m2": Mixture(page_dtype="float8_e5m2", head_dim=128, kv_heads=1),
    "int8_ones": Mixture(*ONES, page_dtype="int8", dtype="float16"),
}
PAIRS = [
    (case, name)
    for case in CASES
    for name in OPTIONS
    if name == "plain" or case == "mixture" or (name, case) == ("scales", "float8")
]


@pytest.mark.parametrize("case, name", PAIRS)
@pytest.mark.parametrize("subject", subjects.rows("decode", but=("interpreted", "portable")))
def test_a_mixture(rng, subject, case, name):
    mixture = CASES[case]
    if subject.name == "reference" and mixture.counts is COUNTS and name != "all":
        mixture = dataclasses.replace(mixture, counts=SOME[0], held=SOME[1])
    check(mixture, rng, subject, **OPTIONS[name])


INTERPRETED = {
    "mixture": (Mixture(*FEW), {"sliding_window": 30}),
    "ones": (Mixture(*(x[:4] for x in ONES), page_size=8), {"soft_cap": 3.0}),
    "float8": (
        Mixture((1, 0, 2), (70, 9, 0), page_dtype="float8_e4m3fn"),
        {"k_scale": 0.5, "v_scale": 2.0},
    ),
}
ROWS = [row for row in subjects.ROWS if row.name in ("interpreted", "portable")]


@pytest.mark.parametrize("name", INTERPRETED)
@pytest.mark.parametrize("subject", [row.param() for row in ROWS])
def test_a_mixture_interpreted(rng, subject, name):
    mixture, options = INTERPRETED[name]
    check(mixture, rng, subject, **options)


@pytest.mark.guards
def test_many_rows_over_pages_of_float8_are_lowered():
    """XLA widens the pages for the kernel over those of q's dtype."""
    shapes = {"q": (2048, 4, 128), "kv_lens": (4,), "page_indices": (4, 8)}
    shapes |= {"cu_q_lens": (5,), "num_seqs": (1,)}
    dtypes = {"q": "bfloat16"}
    arrays = {x: jax.ShapeDtypeStruct(n, dtypes.get(x, "int32")) for x, n in shapes.items()}
    arrays["kv_pages"] = jax.ShapeDtypeStruct((8, 128, 2, 128), "float8_e4m3fn")
    with device.assume("sm90"), config.watched() as choices:
        call = lambda arrays: pa.ragged_paged_attention(**arrays)  # noqa: E731
        assert "mosaic_gpu" in mosaic.lower_for_cuda(call, arrays)
    assert choices[-1].kernel == "prefill_widened_sm90"


UPDATES = {
    "mixture": Mixture(),
    "few": Mixture(*FEW, dtype="float16", kv_heads=3, q_heads=3, page_size=5),
    "float32": Mixture(*FEW, dtype="float32", head_dim=24),
    "narrow": Mixture(*FEW, page_dtype="float8_e4m3fn"),
    "int8": Mixture(*FEW, page_dtype="int8", page_size=8),
    "odd": Mixture(*FEW, head_dim=3, page_size=8),
}


def check_update(mixture: Mixture, rng: np.random.Generator, subject: Any) -> None:
    _, pages, *small = mixture.arguments(rng)
    small[0] = small[0].at[1].set(-3)  # a length of no rows
    small[1] = small[1].at[2, 0].set(10**6)  # and a page that does not exist
    narrow = mixture.page_dtype is not None
    factors = {"k_scale": 0.25, "v_scale": 2.0} if narrow else {}
    tokens = int(small[2][len(mixture.counts)]) + REST
    shape = tokens, mixture.kv_heads, mixture.head_dim
    k, v = (jnp.asarray(2 * rng.standard_normal(shape, np.float32), mixture.dtype) for _ in "kv")
    got = subject.call(pa.update_kv_pages, pages, k, v, *small, **factors)
    assert got.shape == pages.shape and got.dtype == pages.dtype
    arrays = dict(
        zip(("kv_pages", *fuzz_ragged.SMALL, "k", "v"), (pages, *small, k, v), strict=True)
    )
    wanted = fuzz_ragged.written({name: np.asarray(x) for name, x in arrays.items()}, factors)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("subject", subjects.rows("append", but=("interpreted", "portable")))
def test_update(rng, subject, name):
    check_update(UPDATES[name], rng, subject)


@pytest.mark.parametrize("name", ["few", "narrow", "odd"])
def test_update_interpreted(rng, name):
    check_update(UPDATES[name], rng, ROWS[0])


@pytest.mark.parametrize("value", [np.finfo(np.float32).min, -np.inf, -1e30, None])
def test_mask_values_of_hidden_keys(value):
    pages = jnp.ones((1, 2, 2, 4), jnp.float32)
    small = (jnp.asarray(x, jnp.int32) for x in ([1], [[0]], [0, 1], [1]))
    out = pa.ragged_paged_attention(jnp.ones((1, 1, 4)), pages, *small, mask_value=value)
    np.testing.assert_array_equal(np.asarray(out), np.ones((1, 1, 4)))


def test_narrow_rows_are_clipped():
    pages = jnp.zeros((1, 2, 2, 4), jnp.float8_e4m3fn)
    small = (jnp.asarray(x, jnp.int32) for x in ([1], [[0]], [0, 1], [1]))
    k = jnp.asarray([[[1e6, -1e6, 8.0, 0.0]]], jnp.bfloat16)
    got = pa.update_kv_pages(pages, k, k, *small, k_scale=2.0)
    want = np.asarray([[448, -448, 4, 0], [448, -448, 8, 0]], np.float32)
    np.testing.assert_array_equal(np.asarray(got[0, 0], np.float32), want)
    assert not np.asarray(got[0, 1], np.float32).any()


BUILDS = {
    "decode/sm90/interleaved": 2,
    "decode/sm90/interleaved_float8": 2,
    "append/sm90/interleaved": 1,
}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", BUILDS)
def test_machine_code(name):
    """No copy of the pages; written in place; at most a register is spilled."""
    build = builds.BUILDS[name]
    report = mosaic.compile_for(
        build.call, *build.shapes, target=build.target, donate_argnums=build.donate
    )
    assert (report.launches, report.copies) == (BUILDS[name], 0) and report.spill_bytes <= 4
    assert report.aliases == len(build.donate)
