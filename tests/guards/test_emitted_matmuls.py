"""Matmuls by mma.sync, `ldmatrix`, conversions and copies of single threads, as a GPU runs them,
against their twins in NumPy, which are all that the interpreter runs.
"""

import ast
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn.kernels.lang import gather, mosaic, slopes, threads
from pallas_attn.kernels.mma import (
    column_parts,
    mma_2x2,
    mma_rowmajor,
    mma_sync,
    mma_tf32,
    packed_rows,
)
from pallas_attn.kernels.mma.mma_rowmajor import Queries, Split
from pallas_attn.kernels.mma.mma_sync import WarpGrid
from tests.support import emitted
from tests.support.emitted import captured, evaluate

pytestmark = pytest.mark.guards

ONE = np.int32(1)


def tile_places(shape):
    """Elements that a thread has of a tile of blocks of 64 rows, or of a number a row of one."""
    if len(shape) == 1:
        return tile_places((*shape, 8))[..., :1] // 8
    block = emitted.places((64, shape[1]), 4)
    return np.concatenate([block + n * shape[1] for n in range(0, shape[0], 64)], axis=1)


def warp_places(down):
    return lambda shape: emitted.places(shape, down)


HELD = {repr(mosaic.TILE): tile_places, repr(mosaic.ROW): tile_places}


def held(*shapes_and_down):
    """Places of the layouts of warps that stand `down` one above the other."""
    return HELD | {
        repr(mosaic.warp_layout(shape, down)): warp_places(down) for shape, down in shapes_and_down
    }


def tile_of(registers, shape, places=tile_places):
    """A tile, of what threads hold of it."""
    tile = np.empty(shape, registers.dtype)
    tile.reshape(-1)[places(shape)] = registers.reshape(128, places(shape).shape[1], -1)
    return tile


def both(call, *args, shape=None, where=HELD, places=tile_places, **options):
    """Results of code and twin for the same arguments: a tile of this shape, or the refs."""
    results = []
    for ours in (True, False):
        own = [np.array(x) if isinstance(x, np.ndarray) and x.ndim else x for x in args]
        code = captured(call, *own, **options)
        made = evaluate(code, where) if ours else code.function.twin(*code.args)
        if shape is not None:
            results.append(tile_of(made, shape, places) if ours else np.asarray(made))
        else:
            results.append([x for x in own if isinstance(x, np.ndarray) and x.ndim])
    return results


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def assert_close(got, want, most=2e-5):
    assert np.isfinite(want).all() and np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=most, atol=most * np.abs(want).max())


# ---- decode: rows as they lie in a cache ---------------------------------------------------------


def at_rows(q, rows):
    """Some query rows of a head group of 3, from row 5 on."""
    return Queries(q, np.int32(5), np.int32(1), rows, 7, 3, q.shape[1])


SPLITS = {
    "one block": Split(1, 64),
    "two blocks": Split(2, 64),
    "four blocks": Split(4, 32),
    "folded": Split(1, 128, folded=True),
    "columns of four": Split(1, 32, across=True),
    "columns of two": Split(2, 16, across=True),
}


def taken_queries(call, at, split, dtype, name):
    """Query rows by code and by twin."""
    code = captured(call, at, split)
    shape = 64, 32 * -(-at.dim // 32)
    if split.parts > 1:
        shape = 64, split.units(at.dim * (1 if name == "narrow" else 2)) * 64
    made, twin = evaluate(code, HELD), code.function.twin(*code.args)
    if name == "narrow":
        shape = 64, at.dim if split.parts == 1 else split.units(at.dim) * 128
        rows = [tile_of(made[0], shape), tile_of(made[1], (64,))], list(twin)
        np.testing.assert_array_equal(rows[0][1], rows[1][1])
        return rows[0][0].astype(dtype), twin[0]
    return tile_of(made, shape).astype(dtype), twin


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(
    "dim, dtype",
    [(64, "bfloat16"), (40, "float16"), (192, "bfloat16"), (264, "float16"), (512, "bfloat16")],
)
def test_scores_of_decode(rng, name, dim, dtype):
    split, q = SPLITS[name], normal(rng, (60, dim), dtype)
    rows = 8 if split.folded else 21
    ours, twins = taken_queries(mma_rowmajor.queries, at_rows(q, rows), split, jnp.dtype(dtype), "")
    k = normal(rng, (2, split.keys, dim), dtype)
    shape = 64, split.width
    code = captured(mma_rowmajor.scores, jnp.asarray(ours), k, ONE, split)
    got = tile_of(evaluate(code, HELD), shape)
    assert_close(got, code.function.twin(twins, k, ONE))


NARROW = {
    "float8_e4m3fn": False,
    "float8_e4m3fn by integers": True,
    "float8_e5m2": False,
    "int8": False,
}


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("dim, blocks, across", [(64, 2, False), (320, 1, True), (512, 2, True)])
def test_scores_of_narrow_keys(rng, kind, dim, blocks, across):
    split = Split(blocks, 64, integers=NARROW[kind], across=across)
    q, dtype = normal(rng, (60, dim), "bfloat16"), jnp.dtype(kind.split()[0])
    call = mma_rowmajor.float16_queries
    ours, twins = taken_queries(call, at_rows(q, 21), split, np.float16, "narrow")
    k = (rng.standard_normal((2, 64, dim)) * (30 if dtype == np.int8 else 1)).astype(dtype)
    code = captured(mma_rowmajor.scores, jnp.asarray(ours), k, ONE, split)
    got = tile_of(evaluate(code, HELD), (64, split.width))
    assert_close(got, code.function.twin(twins, k, ONE))


@pytest.mark.parametrize("name", ["one block", "two blocks", "four blocks"])
def test_scales_of_a_warps_own_keys(rng, name):
    split, scales = SPLITS[name], normal(rng, (2, SPLITS[name].keys), "float32")
    shape = 64, split.columns
    got, want = both(mma_rowmajor.number_of_each_key, scales, ONE, split, shape=shape)
    np.testing.assert_array_equal(got, want)


def stored(rng, split, product, v, dtype, rows):
    """Accumulators, in the columns in which they are stored; by code and by twin."""
    width = mma_rowmajor.accumulator_width(v.shape[2], split.parts)
    acc = np.zeros((64, width), np.float32)
    p = normal(rng, (64, split.width), dtype)
    code = captured(product, jnp.asarray(acc), jnp.asarray(p), v, ONE, split)
    ours = tile_of(evaluate(code, HELD), acc.shape)
    top, total = (normal(rng, (64,), "float32") for _ in range(2))
    results = []
    for x, is_ours in ((ours, True), (code.function.twin(acc, p, v, ONE), False)):
        pitch = v.shape[2] + mma_rowmajor.ROW_PADDING
        to = [np.zeros((4 * rows, *rest), np.float32) for rest in ((pitch,), (), ())]
        tiles = map(jnp.asarray, (x, top, total))
        store = captured(mma_rowmajor.store_accumulators, *tiles, tuple(to), rows, split)
        evaluate(store, HELD) if is_ours else store.function.twin(*map(np_of, store.args))
        results.append(to)
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


def np_of(x):
    return x if isinstance(x, tuple) else np.asarray(x)


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(
    "dim, dtype",
    [(64, "bfloat16"), (40, "float16"), (128, "bfloat16"), (512, "float16"), (328, "bfloat16")],
)
def test_values_of_decode(rng, name, dim, dtype):
    v = normal(rng, (2, SPLITS[name].keys, dim), dtype)
    stored(rng, SPLITS[name], mma_rowmajor.matmul_add, v, dtype, 8 if name == "folded" else 16)


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("dim, across", [(64, False), (512, True)])
def test_narrow_values(rng, kind, dim, across):
    split, dtype = Split(2, 64, integers=NARROW[kind], across=across), jnp.dtype(kind.split()[0])
    v = (rng.standard_normal((2, 64, dim)) * (30 if dtype == np.int8 else 1)).astype(dtype)
    stored(rng, split, mma_rowmajor.matmul_add, v, "float16", 16)


@pytest.mark.parametrize(
    "dim, rows, across",
    [(64, 16, False), (40, 16, False), (192, 32, False), (512, 16, True), (264, 16, True)],
)
def test_float32_of_decode(rng, dim, rows, across):
    split = Split(rows // 16, 32 if across else 64, across=across)
    q, k, v = (normal(rng, shape, "float32") for shape in ((60, dim), *[(2, split.keys, dim)] * 2))
    shape = 64, split.width
    rooms = []
    for ours in (True, False):
        room = np.zeros(mma_tf32.queries_shape(dim, rows, split.parts), np.float32)
        code = captured(mma_tf32.store_queries, at_rows(q, 21), split, room)
        evaluate(code, HELD) if ours else code.function.twin(*code.args)
        rooms.append(room)
    code = captured(mma_tf32.scores, rooms[0], k, ONE, split)
    got = tile_of(evaluate(code, HELD), shape)
    assert_close(got, code.function.twin(rooms[1], k, ONE), 3e-6)
    stored(rng, split, mma_tf32.matmul_add, v, "float32", 16)


@pytest.mark.parametrize("name", ["columns of four", "columns of two"])
def test_scores_of_all_columns(rng, name):
    split = SPLITS[name]
    s, room = (normal(rng, shape, "float32") for shape in ((64, split.width), (64 * split.width,)))
    code = captured(column_parts.sum_of_parts, jnp.asarray(s), room, split)
    want = code.function.twin(s, room.copy())
    np.testing.assert_array_equal(tile_of(evaluate(code, HELD), s.shape), want)
    assert not np.array_equal(want, s)


@pytest.mark.parametrize("op", ["maximum", "sum"])
def test_both_halves_of_folded_scores(rng, op):
    rows = jnp.asarray(normal(rng, (64,), "float32"))
    got, want = both(mma_rowmajor.reduce_folded, rows, op, shape=(64,))
    np.testing.assert_allclose(got, want, rtol=1e-6)


# ---- portable kernels: rows in shared memory -----------------------------------------------------


def room_of(rng, rows, width, terms, dtype="bfloat16"):
    """Rows of several terms, of which the later ones are small."""
    room = normal(rng, (rows, mma_sync.pitch(width * terms)), "float32")
    for n in range(1, terms):
        room[:, n * width :] /= 256
    return room.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_portable_scores(rng, terms, in_registers, rows):
    q, k = room_of(rng, 64 + rows, 48, terms), room_of(rng, 80, 48, terms)
    sizes, first = (rows, 32, 48), np.int32(16)
    if in_registers:
        width = 48 * terms
        q, want = both(mma_sync.load_fragments, q, first, rows, width, shape=(rows, width))
        np.testing.assert_array_equal(q, want)
        q = jnp.asarray(q)
    args = (q, np.int32(0) if in_registers else first), (k, np.int32(32)), sizes, terms
    code = captured(mma_sync.scores, *args)
    got = tile_of(evaluate(code, HELD), (rows, 32))
    assert_close(got, code.function.twin(*map(np_of, code.args)))


def test_portable_scores_of_some_columns(rng):
    q, k = room_of(rng, 64, 48, 1), room_of(rng, 32, 48, 1)
    before = jnp.asarray(normal(rng, (64, 32), "float32"))
    args = (q, np.int32(0)), (k, np.int32(0)), (64, 32, 48), 1, (before, 16, 48)
    code = captured(mma_sync.scores, *args)
    got = tile_of(evaluate(code, HELD), (64, 32))
    assert_close(got, code.function.twin(*map(np_of, code.args)))


@pytest.mark.parametrize("narrow", [("float8_e4m3fn",) * 2, ("float8_e4m3fn", "float8_e5m2")])
@pytest.mark.parametrize("in_registers", [False, True])
def test_portable_scores_of_float8(rng, narrow, in_registers):
    """Two float8 lie as a 16-bit number."""
    rooms = [
        normal(rng, (n, 2 * mma_sync.pitch(32)), x) for n, x in zip((64, 48), narrow, strict=True)
    ]
    q, k = (x.view(jnp.bfloat16) for x in rooms)
    if in_registers:
        q, _ = both(mma_sync.load_fragments, q, np.int32(0), 64, 32, shape=(64, 32))
        q = jnp.asarray(q.astype(jnp.bfloat16))
    args = (q, np.int32(0)), (k, np.int32(16)), (64, 32, 32), 1, None, narrow
    got = tile_of(evaluate(captured(mma_sync.scores, *args), HELD), (64, 32))
    wanted = rooms[0][:, :64].astype(np.float32) @ rooms[1][16:, :64].astype(np.float32).T
    assert_close(got, wanted)


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("rows", [64, 128])
def test_portable_values(rng, terms, rows):
    v, acc = room_of(rng, 64, 48, terms), jnp.asarray(normal(rng, (rows, 48), "float32"))
    p = [jnp.asarray(normal(rng, (rows, 32), "bfloat16")) for _ in range(terms)]
    code = captured(mma_sync.matmul_add, acc, p, v, np.int32(16), 48)
    got = tile_of(evaluate(code, HELD), (rows, 48))
    acc, p, v, first = code.args
    assert_close(got, code.function.twin(np_of(acc), [np_of(x) for x in p], v, first))


# ---- portable backward: warps two by two ---------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("down", [2, 4])
def test_products(rng, terms, down):
    a, b = room_of(rng, 96, 48, terms), room_of(rng, 96, 48, terms)
    shape = 64, 64
    args = (a, np.int32(16)), (b, np.int32(32)), (*shape, 48), terms
    code = captured(mma_sync.scores, *args, grid=WarpGrid(down))
    got = tile_of(evaluate(code, held((shape, down))), shape, warp_places(down))
    assert_close(got, code.function.twin(*code.args))


@pytest.mark.parametrize("terms", [1, 2])
def test_products_of_registers(rng, terms):
    x, shape = room_of(rng, 64, 48, terms), (64, 48)
    acc = jnp.asarray(normal(rng, shape, "float32"))
    p = [jnp.asarray(normal(rng, (64, 32), "bfloat16")) for _ in range(terms)]
    code = captured(mma_sync.matmul_add, acc, p, x, np.int32(16), 48, WarpGrid(4))
    layouts = held((shape, 4), ((64, 32), 4))
    got = tile_of(evaluate(code, layouts), shape, warp_places(4))
    acc, p, x, first = code.args
    assert_close(got, code.function.twin(np_of(acc), [np_of(y) for y in p], x, first))


GRIDS = {"two by two": (2, 1, 0), "two warpgroups": (2, 2, 1), "one above the other": (4, 2, 1)}


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("name", GRIDS)
def test_tiles_through_shared_memory(rng, terms, name):
    grid = WarpGrid(*GRIDS[name])
    columns = 64 // grid.groups
    rooms = [np.zeros((64, mma_sync.pitch(64 * terms)), jnp.bfloat16) for _ in range(2)]
    for group in range(grid.groups):
        tile = [jnp.asarray(normal(rng, (64, columns), "bfloat16")) for _ in range(terms)]
        for room, ours in zip(rooms, (True, False), strict=True):
            code = captured(mma_2x2.store_tile, tile, room, grid._replace(group=group))
            layouts = held(((64, columns), grid.down))
            evaluate(code, layouts) if ours else code.function.twin(*code.args)
    np.testing.assert_array_equal(*rooms)
    width = 64
    x, shape = room_of(rng, 80, width, terms), (64, width // grid.groups)
    acc = jnp.asarray(normal(rng, shape, "float32"))
    right = x, np.int32(16), width
    code = captured(mma_2x2.matmul_add_shared, acc, rooms[0], right, (64, 64, terms), grid)
    got = tile_of(evaluate(code, held((shape, grid.down))), shape, warp_places(grid.down))
    assert_close(got, code.function.twin(*map(np_of, code.args)))
    args = rooms[0], x, (64, 64, width), terms, grid
    code = captured(mma_2x2.transposed_product, *args)
    got = tile_of(evaluate(code, held((shape, 2))), shape, warp_places(2))
    assert_close(got, code.function.twin(*map(np_of, code.args)))


@pytest.mark.parametrize("op", ["max", "sum"])
def test_rows_that_two_warps_share(rng, op):
    tile, shape = jnp.asarray(normal(rng, (64, 48), "float32")), (64, 48)
    rooms = [np.zeros((2, 96), np.float32) for _ in range(2)]
    for room, ours in zip(rooms, (True, False), strict=True):
        code = captured(mma_2x2.store_row_partials, tile, room, op)
        evaluate(code, held((shape, 2))) if ours else code.function.twin(*map(np_of, code.args))
    assert_close(*rooms)
    code = captured(mma_2x2.load_row_totals, rooms[0], 64, op)
    numbers, want = evaluate(code, held()), code.function.twin(*map(np_of, code.args))
    warp, lane = np.arange(128)[:, None] // 32, np.arange(128)[:, None] % 32
    row = warp // 2 * 32 + lane // 4 + 8 * np.arange(4)
    assert_close(numbers[..., 0], want[row])


def test_sums_of_a_threads_own_numbers(rng):
    tile, shape = jnp.asarray(normal(rng, (64, 64), "float32")), (64, mma_2x2.PARTIALS)
    code = captured(mma_2x2.partial_sums, tile)
    got = tile_of(evaluate(code, held(((64, 64), 2))), shape, warp_places(2))
    assert_close(got.sum(1), code.function.twin(np_of(tile)).sum(1))


# ---- rows that threads move ----------------------------------------------------------------------


def place_of(*numbers):
    return packed_rows.Place(*map(np.int32, numbers))


@pytest.mark.parametrize("rows", [None, "given"])
@pytest.mark.parametrize("dim, width", [(64, 64), (40, 64), (128, 128)])
def test_packed_queries_are_put_where_tma_would_put_them(rng, rows, dim, width):
    q = normal(rng, (50, 5, dim), "bfloat16")
    numbers = None if rows is None else rng.permutation(50).astype(np.int32)
    both_rooms = [np.ones((2, 64, width), jnp.bfloat16) for _ in range(2)]
    for room, ours in zip(both_rooms, (True, False), strict=True):
        at = place_of(7, 13, 1, 3)
        code = captured(packed_rows.load, q, room, ONE, at, (128, 16), numbers)
        evaluate(code, {}) if ours else code.function.twin(*code.args)
    got, want = both_rooms
    row, chunk = np.arange(64)[:, None], np.arange(width // 8)[None]
    tiles = got[1].reshape(8, width // 64, 8, 8, 8)
    unswizzled = tiles[row // 8, chunk // 8, row % 8, chunk % 8 ^ row % 8].reshape(64, width)
    np.testing.assert_array_equal(unswizzled, want[1])
    np.testing.assert_array_equal(got[0], want[0])


def test_packed_results_are_written_where_the_twin_writes_them(rng):
    tile, numbers = normal(rng, (64, 32), "bfloat16"), normal(rng, (64,), "float32")
    at, made = place_of(7, 13, 1, 3), []
    for ours in (True, False):
        to, of_rows = np.zeros((50, 5, 56), jnp.bfloat16), np.zeros((5, 50), np.float32)
        codes = (
            captured(packed_rows.store, tile, to, 32, at, 16),
            captured(packed_rows.store_numbers, numbers, of_rows, at, 16),
        )
        for code in codes:
            evaluate(code, HELD) if ours else code.function.twin(*code.args)
        made.append((to, of_rows))
    for got, want in zip(*made, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.any()


def test_gathered_numbers(rng):
    ref = normal(rng, (300,), "float32")
    index = rng.integers(0, 300, (64, 16)).astype(np.int32)
    got, want = both(gather.gather, ref, jnp.asarray(index), mosaic.TILE, shape=index.shape)
    np.testing.assert_array_equal(got, want)


def test_slopes_along_columns(rng):
    s, slope = normal(rng, (64, 32), "float32"), normal(rng, (64,), "float32")
    code = captured(slopes.add_slopes, jnp.asarray(s), jnp.asarray(slope))
    assert_close(tile_of(evaluate(code, HELD), s.shape), np.asarray(code.function.values(s, slope)))


# ---- atomics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before, count, last", [(0, 3, 0), (1, 3, 0), (2, 3, 1), (0, 1, 1)])
def test_the_last_block_to_arrive_knows_and_resets_the_counter(before, count, last):
    counters, answer = np.array([9, before], np.int32), np.full(1, 7, np.int32)

    def program(thread, refs, at):
        thread.arrive(refs[0], thread.index * 0 + 1, at, refs[1])

    code = captured(threads.each_thread, program, (counters, answer), np.int32(count))
    evaluate(code, {})
    assert (answer[0], counters.tolist()) == (last, [9, 0 if last else before + 1])


def test_each_thread_that_takes_gets_a_number_of_its_own():
    counters = np.array([5], np.int32)

    def program(thread, refs, _):
        return thread.take(refs[0], thread.index * 0, thread.index % 2 < 1)

    code = captured(threads.each_thread, program, (counters,), (), returns="each")
    taken = evaluate(code, {})[:, 0, 0]
    assert sorted(taken[::2].tolist()) == list(range(5, 69))
    assert counters[0] == 69 and not taken[1::2].any()


@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_words_are_loaded_where_the_condition_holds(nbytes):
    words = np.arange(1, 129 * 4).astype(np.int32)[: 32 * nbytes]
    to = np.zeros(32 * nbytes, np.int32)

    def program(thread, refs, _):
        where = thread.index >= 100
        word = thread.load_where(refs[0], thread.select(where, thread.index, -5), nbytes, where)
        thread.store(refs[1], thread.index, word, nbytes, thread.index >= 0)

    evaluate(captured(threads.each_thread, program, (words, to), ()), {})
    first = 100 * nbytes // 4
    assert not to[:first].any()
    np.testing.assert_array_equal(to[first:], words[first:])


# ---- all of it -----------------------------------------------------------------------------------

EXCUSED = {
    "kernels.mma.wgmma_float8.probabilities": "rounds to float8, which GPU tests compare",
    "kernels.mma.mma_float8.probabilities": "rounds to float8, which GPU tests compare",
    "kernels.mma.wgmma_swizzles._issue_transposed": "wgmma; GPU tests compare gradients",
    "kernels.mma.wgmma_float8.zeros": "emits one move of 0",
    "kernels.lang.mosaic.inline": "makes inline code of what it is given",
    "kernels.lang.mosaic.results_are_used": "emits nothing",
    "kernels.lang.mosaic.overwrites_what_is_masked": "emits nothing",
    "kernels.lang.thread_program.each_thread": "test_emitted_code.py has the instructions",
    "kernels.mma.packed_rows.wait": "only waits; the interpreter's copies are there at once",
    "kernels.mma.mma_2x2.sync_row_pair": "a barrier of two warps, which the interpreter has as one",
    "kernels.lang.booleans.tiles_of": "on a GPU test_key_masks.py compares it with its twin",
    "kernels.lang.booleans.numbers_at": "on a GPU test_key_masks.py compares it with its twin",
    "kernels.lang.booleans.columns": "on a GPU test_key_masks.py compares it with its twin",
    "kernels.lang.late.late": "one shuffle of a number that all threads of a warp have",
    "kernels.decode_mla.combine_latent.load_rows": "Mosaic's own load",
}


def inline_functions():
    """Functions of the package that make inline code: `module.function`."""
    root = pathlib.Path(pallas_attn.__file__).parent
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            calls = [x.func for x in ast.walk(node) if isinstance(x, ast.Call)]
            names = {getattr(f, "attr", getattr(f, "id", None)) for f in calls}
            if isinstance(node, ast.FunctionDef) and names & {"inline", "inline_mgpu"}:
                yield f"{module}.{node.name}"


def test_inline_code_is_evaluated_or_excused():
    """By name: `module.function` stands in one of the two files that evaluate inline code."""
    here = pathlib.Path(__file__).parent
    text = "\n".join(path.read_text() for path in here.glob("test_emitted_*.py"))
    text = text.replace("mla_combine.", "combine_latent.")
    names = list(inline_functions())
    assert len(names) > 30 and EXCUSED.keys() <= set(names)
    unseen = [x for x in names if ".".join(x.split(".")[-2:]) not in text]
    assert not [name for name in unseen if name not in EXCUSED]
