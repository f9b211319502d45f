"""The kernel that makes lists of tiles: what it writes is what jax.numpy makes of the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn._call import gpu_specs
from pallas_attn.kernels.attention import list_tables, listed_tiles, tile_lists
from pallas_attn.kernels.lang import mosaic as lang
from tests.support import builds, mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

BATCH, HEADS, BLOCKS = 2, 3, 7


def some_kinds(rng, shape):
    """bool[2, B, N, tiles, row_blocks, n]: lists of few tiles and of many, in one run or scattered,
    with whole tiles where no query sees one, too.
    """
    *lists, row_blocks, n = shape
    each = (*lists, 1, 1)
    at, ends = np.arange(n), np.sort(rng.integers(0, n + 1, (2, *lists, row_blocks, 1)), axis=0)
    run = (at >= ends[0]) & (at < ends[1])
    scattered = rng.random(shape) < rng.choice([0, 0.05, 0.3, 0.97, 1], each)
    some = np.where(rng.random(each) < 0.5, run, scattered)
    whole = rng.random(shape) < rng.choice([0, 0.1, 0.5, 0.9, 1], each)
    return np.stack([some, whole & (some | (rng.random(each) < 0.5))])


def table_of_ranks(batch_heads, tiles):
    """A schedule of ranks, in which blocks take different numbers of work tiles."""
    bits = (tiles - 1).bit_length()
    codes = (np.arange(batch_heads)[:, None] << bits) + np.arange(tiles)
    each = [codes.ravel()[block::BLOCKS] for block in range(BLOCKS)]
    table = np.zeros((BLOCKS, 3 + max(map(len, each))), np.int32)
    for row, mine in zip(table, each, strict=True):
        row[: len(mine) + 1] = [len(mine), *mine]
    return table, bits


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize(
    "shape, never_empty, heads",
    [
        ((2, 1, 5, 1, 33), False, HEADS),
        ((1, 3, 18, 3, 70), True, HEADS),
        ((1, 1, 1, 4, 290), True, HEADS),
        ((2, 3, 9, 1, 33), True, 2 * HEADS),  # two heads share a list
    ],
    ids=str,
)
def test_lists_and_codes_are_those_of_jax_numpy(shape, never_empty, heads, where):
    kinds = some_kinds(np.random.default_rng(sum(shape)), shape)
    table, bits = table_of_ranks(BATCH * heads, shape[2])
    assert listed_tiles.fits(kinds)

    def prepare(kinds):
        codes = tile_lists.codes(kinds)
        return listed_tiles.prepare(codes, table, shape[3], never_empty, (bits, heads))

    with where():
        lists, codes = jax.jit(prepare)(jnp.asarray(kinds))
    want = tile_lists.of_kinds(kinds, never_empty=never_empty)
    np.testing.assert_array_equal(lists, want)
    np.testing.assert_array_equal(codes, list_tables.by_length(table, bits, heads, want))


def test_a_grid_that_cuda_launches_the_other_way_round(monkeypatch):
    """The grid of more than 65535 heads with lists of their own."""
    monkeypatch.setattr(lang, "MOST_BLOCKS", 2)
    assert lang.grid_of(owner=3, part=2) == {"grid": (2, 3), "grid_names": ("part", "owner")}
    shape, never_empty = (1, 3, 18, 3, 70), True
    test_lists_and_codes_are_those_of_jax_numpy(shape, never_empty, HEADS, mosaic.interpret)


def test_a_mask_of_many_tiles_is_left_to_xla():
    fits = [listed_tiles.fits(np.empty((2, 1, 1, *sizes), bool)) for sizes in SIZES]
    assert fits == [True, True, True, False, False, False]
    many = np.broadcast_to(np.bool_(True), (2, 2, 64, 1024, 1, 2**14))
    assert not listed_tiles.fits(many) and listed_tiles.fits(many[:, :1])
    words = listed_tiles._Sizes(1, 1, SIZES[2][0], 8, 1, True, (1, 1), 1, 1).words
    assert 4 * words <= min(map(gpu_specs.shared_memory, ("sm80", "sm86", "sm90")))


SIZES = [(1024, 1, 2**14), (1, 4, 2**14), (12 * 1024, 1, 8)]
SIZES += [(1025, 1, 2**14), (1, 1, 2**14 + 1), (12 * 1024 + 1, 1, 8)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 65), (1, 300)], ids=str)
def test_work_tiles_come_longest_first(shape):
    """The order is that of a stable sort, the greatest number of steps first."""
    for most in (0, 2, 1000):
        steps = np.random.default_rng(most).integers(-most, most + 1, shape, np.int32)
        order = jax.jit(tile_lists.longest_first)(jnp.asarray(steps))
        assert order.dtype == jnp.int32
        np.testing.assert_array_equal(order, np.argsort(-steps, axis=-1, kind="stable"))


@pytest.mark.machine_code
@pytest.mark.guards
def test_documents_take_few_launches():
    """A reduction, what it leaves of each pair of tiles, the lists, and attention."""
    build = builds.BUILDS["flash_fwd/sm90/h128_documents"]
    report = mosaic.compile_for(build.call, *build.shapes, target=build.target)
    assert (report.launches, len(report.others)) == (2, 2), report.others
    assert report.spill_bytes == 0
