"""Inline code that only a GPU runs, against its twin in NumPy, which is all that the interpreter
runs: masks, addresses, and the arithmetic of programs of one thread.
"""

import functools
import operator

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_attn.kernels.attention import logits
from pallas_attn.kernels.decode_mla import combine_latent as mla_combine
from pallas_attn.kernels.lang import asm, booleans, mosaic, thread_math, threads
from pallas_attn.kernels.mma import (
    byte_rows,
    epilogue,
    gathered_rows,
    global_accumulate,
    head_rows,
    mma_sync,
    narrow_rows,
    packed_rows,
    row_sums,
    thread_pieces,
    wgmma_float8,
)
from tests.support import emitted
from tests.support.emitted import Far, captured, evaluate

pytestmark = pytest.mark.guards

A_NUMBER_A_THREAD = plgpu.Layout.WG_STRIDED((128,), 1)


def held_by(shape, down=4):
    """Which elements of a tile, of a number a row and of a number a column a thread holds."""
    tile = emitted.places(shape, down)
    if down != 4:
        return {repr(mosaic.warp_layout(shape, down)): tile}
    return {
        repr(mosaic.TILE): tile,
        repr(mosaic.ROW): tile[:, :2, :1] // shape[1],
        repr(mosaic.COLUMN): tile[:, ::2] % shape[1],
    }


def numbers(shape, dtype="float32"):
    """All different."""
    return np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["high", "low", "low high", "rows columns", "words"])
@pytest.mark.parametrize("keys, warpgroup", [(16, 0), (128, 2)])
def test_masks(names, keys, warpgroup, rng):
    """Bounds at every place of a thread's columns, and past both ends of the tile."""
    s = rng.standard_normal((64, keys)).astype(np.float32)
    low, high = (rng.permutation(np.arange(64) % (keys + 6) - 3).astype(np.int32) for _ in range(2))
    ids = [rng.integers(0, 3, n).astype(np.int32) for n in (64, keys)]
    bounds = {"low": low, "high": high}
    bounds = {name: jnp.asarray(bounds[name]) if name in names else None for name in bounds}
    ids = tuple(map(jnp.asarray, ids)) if "rows" in names else None
    words = rng.integers(-(2**31), 2**31, (-(-keys // 32), 64)).astype(np.int32)
    words = tuple(map(jnp.asarray, words)) if "words" in names else ()
    code = captured(logits.mask_columns, jnp.asarray(s), *bounds.values(), ids, words)
    got = evaluate(code, held_by(s.shape), warpgroup)
    want = np.asarray(code.function.values(*code.args))
    assert np.isneginf(want).any() and np.isfinite(want).any()
    np.testing.assert_array_equal(got, want.reshape(-1)[emitted.places(s.shape, 4)])


@pytest.mark.parametrize("rows, keys", [(70, 516), (64, 518), (40, 131)])
def test_masks_become_bits(rows, keys, rng):
    """The last words of a mask, whose ends lie within them."""
    mask = rng.random((2, 3, rows, keys)) < 0.5
    for line, row, key in ((5, 32, 0), (3, 0, keys - 131), (5, 64, 512)):
        key -= key % 4
        code = captured(booleans.words, mask, *map(np.int32, (line, row, key)))
        want = code.function.twin(*code.args)
        got = evaluate(code, {})
        np.testing.assert_array_equal(got.reshape(want.shape), want)


def test_masks_of_8_heads_of_8_query_rows(rng):
    s = rng.standard_normal((64, 64)).astype(np.float32)
    bounds = [jnp.asarray(rng.integers(-3, 12, 64), np.int32) for _ in range(2)]
    code = captured(head_rows.mask_queries, jnp.asarray(s), *bounds)
    got = evaluate(code, held_by(s.shape))
    want = np.asarray(code.function.values(*code.args))
    assert np.isneginf(want).any() and np.isfinite(want).any()
    np.testing.assert_array_equal(got, want.reshape(-1)[emitted.places(s.shape, 4)])


def test_sums_that_stay_in_their_place(rng):
    a, b = (rng.standard_normal((64, 16)).astype(np.float32) for _ in range(2))
    code = captured(wgmma_float8.added, jnp.asarray(a), jnp.asarray(b))
    want = (a + b).reshape(-1)[emitted.places(a.shape, 4)]
    np.testing.assert_array_equal(evaluate(code, held_by(a.shape)), want)


@pytest.mark.parametrize("bound", [0.0, 8.0])
def test_votes(bound):
    """Each warp votes for itself; a row of NaN has no vote."""
    rows = np.zeros(64, np.float32)
    rows[[3, 21, 60]] = np.nan, bound + 1, bound
    code = captured(mosaic.any_in_warp, jnp.asarray(rows), bound)
    got = evaluate(code, held_by((64, 8)))
    np.testing.assert_array_equal(got.reshape(4, 32)[:, 0], [0, 1, 0, 0])
    assert (got.reshape(4, 32) == got.reshape(4, 32)[:, :1]).all()


@pytest.mark.parametrize("numbers", [{}, {50: 8.0}, {50: 8.5}, {50: np.nan}, {50: 9, 51: np.nan}])
def test_all_warps_are_told_of_a_number_above(numbers, monkeypatch):
    """NaN is above nothing, and silences no other number of its thread."""
    monkeypatch.setattr(utils, "warpgroup_barrier_idx", lambda sync: utils.c(1, asm.i32()))
    tile = np.full((64, 16), -np.inf, np.float32)
    for column, number in numbers.items():
        tile[50, column - 50] = number
    code = captured(byte_rows.any_above, jnp.asarray(tile), 8.0)
    got = evaluate(code, held_by(tile.shape))
    assert (
        np.unique(got) == [code.function.twin(tile)] == [int(max(numbers.values(), default=0) > 8)]
    )


# ---- rows that a list names ----------------------------------------------------------------------


@pytest.mark.parametrize("column, columns", [(64, 128), (0, 64)])
def test_listed_rows_are_copied_where_tma_would_put_them(column, columns, rng):
    """From one layer; zeros where it has no such row."""
    kv = rng.standard_normal((3, 50, 192)).astype(jnp.bfloat16)
    rows = rng.integers(-3, 54, 64).astype(np.int32)
    rows[:4] = -1, 50, 49, -(2**31)
    spread = [np.repeat(x, gathered_rows.ACROSS) for x in rows.reshape(gathered_rows.EACH, -1)]
    layer, both = gathered_rows.Layer(np.int32(1), 50), []
    for ours in (True, False):
        to = np.zeros((3, 64, columns), jnp.bfloat16)
        code = captured(gathered_rows.copy, kv, layer, spread, column, to, (np.int32(2),))
        if ours:
            evaluate(code, {repr(A_NUMBER_A_THREAD): np.arange(128)[:, None, None]})
        else:
            code.function.twin(*code.args)
        both.append(to)
    got, want = both
    row, chunk = np.arange(64)[:, None], np.arange(columns // 8)[None]
    tiles = got[2].reshape(8, columns // 64, 8, 8, 8)
    placed = tiles[row // 8, chunk // 8, row % 8, chunk % 8 ^ row % 8].reshape(64, columns)
    np.testing.assert_array_equal(placed, want[2])
    assert want[2].any() and not got[:2].any()
    there = (rows >= 0) & (rows < 50)
    np.testing.assert_array_equal(want[2][there], kv[1, rows[there], column : column + columns])
    assert not want[2][~there].any()


def test_listed_rows_past_two_to_the_31():
    """The last rows of a cache of 2**32."""
    layers, rows = 2**15, 2**17
    kv, to = Far((layers, rows, 512), "bfloat16"), np.zeros((1, 64, 64), jnp.bfloat16)
    last = np.arange(rows - 64, rows, dtype=np.int32).reshape(gathered_rows.EACH, -1)
    spread = [np.repeat(x, gathered_rows.ACROSS) for x in last]
    layer = gathered_rows.Layer(np.int32(layers - 1), rows)
    code = captured(gathered_rows.copy, kv, layer, spread, 448, to, (np.int32(0),))
    evaluate(code, {repr(A_NUMBER_A_THREAD): np.arange(128)[:, None, None]})
    line = (layers - 1) * rows + last.astype(np.int64).reshape(-1, 1)
    want = (line * 512 + 448 + np.arange(0, 64, 8)) * 2
    np.testing.assert_array_equal(np.sort(np.concatenate(kv.loads)), want.ravel())


# ---- results in global memory --------------------------------------------------------------------


def written(make, shape, grid=None):
    """Arrays [B, rows, heads, dim] after code and twin wrote a tile to some rows of a head."""
    down = 4 if grid is None else grid.down
    both = []
    for ours in (True, False):
        to = np.full((2, 150, 3, 40), -1, jnp.dtype("bfloat16"))
        tile = numbers(shape, "bfloat16")
        code = captured(make, tile, to, tuple(map(np.int32, (1, 2, 70, 50))))
        if ours:
            evaluate(code, held_by(shape, down))
        else:
            code.function.twin(*code.args)
        both.append(to)
    np.testing.assert_array_equal(*both)
    assert (both[0] != -1).sum() == min(50, shape[0]) * 40


def staged(tile, to, at, grid=mma_sync.BLOCKS):
    """`epilogue.write`, with shared memory of its own."""
    room = np.zeros((tile.shape[0], tile.shape[1] + 8), jnp.dtype("bfloat16"))
    epilogue.write(tile, to, at, (room, np.int32(0)), grid)


TWO_BY_TWO = mma_sync.WarpGrid(2)
WRITERS = {
    "rowmajor": (mma_sync.write, (64, 64), None),
    "two_by_two": (functools.partial(mma_sync.write, grid=TWO_BY_TWO), (64, 64), TWO_BY_TWO),
    "staged": (staged, (64, 64), None),
    "staged_two_by_two": (functools.partial(staged, grid=TWO_BY_TWO), (64, 64), TWO_BY_TWO),
}


@pytest.mark.parametrize("name", WRITERS)
def test_results_are_written_where_the_twin_writes_them(name):
    written(*WRITERS[name])


@pytest.mark.parametrize("name", WRITERS)
def test_results_past_two_to_the_31(name):
    """Writes the last rows of an array of 2**37 bytes."""
    make, shape, grid = WRITERS[name]
    batch, rows, heads, dim = 2**6, 2**16, 2**7, 2**7
    to = Far((batch, rows, heads, dim), "bfloat16")
    tile = numbers(shape, "bfloat16")
    at = tuple(map(np.int32, (batch - 1, heads - 1, rows - 64, 64)))
    evaluate(captured(make, tile, to, at), held_by(shape, 4 if grid is None else 2))
    got = np.sort(
        np.concatenate(
            [
                (offset[:, None] + np.arange(0, value.shape[1], 2)).ravel()
                for offset, value in to.stores
            ]
        )
    )
    row, column = np.arange(rows - 64, rows)[:, None], np.arange(64)
    want = ((((batch - 1) * rows + row) * heads + heads - 1) * dim + column) * 2
    np.testing.assert_array_equal(got, want.ravel())


@pytest.mark.parametrize("row", [0, 64, 77, 140, 150])
@pytest.mark.parametrize("count", [64, 128])
def test_numbers_of_rows_end_where_rows_end(row, count):
    tops = np.arange(count).reshape(-1, 4, 2, 8).transpose(1, 3, 0, 2)  # 16 a warp in turn
    held = {repr(mosaic.ROW): tops.reshape(4, 8, -1).repeat(4, 1).reshape(128, -1, 1)}
    both = [np.full((2, 3, 150), -1, np.float32) for _ in range(2)]
    for to, ours in zip(both, (True, False), strict=True):
        at = (np.int32(1), np.int32(2), np.int32(row))
        code = captured(mosaic.store_rows, numbers((count,)), to, at)
        if ours:
            evaluate(code, held)
        else:
            code.function.twin(*code.args)
    np.testing.assert_array_equal(*both)
    assert (both[0] != -1).sum() == min(count, 150 - row)


@pytest.mark.parametrize("row", [3, 144])
def test_numbers_of_8_heads_of_8_query_rows(row):
    held = held_by((64, 16))
    both = [np.full((2, 24, 150), -1, np.float32) for _ in range(2)]
    for to, ours in zip(both, (True, False), strict=True):
        at = (np.int32(1), np.int32(8), np.int32(row))
        code = captured(head_rows.store, numbers((64,)), to, *at)
        if ours:
            evaluate(code, held)
        else:
            code.function.twin(*code.args)
    np.testing.assert_array_equal(*both)
    rows = min(8, 150 - row)
    expected = np.arange(64).reshape(8, 8)[:rows].T
    np.testing.assert_array_equal(both[0][1, 8:16, row : row + rows], expected)
    assert (both[0] != -1).sum() == 8 * rows
    code = captured(head_rows.load, numbers((24,)), np.int32(8))
    loaded = evaluate(code, held).view(np.float32)
    np.testing.assert_array_equal(loaded, 8 + held[repr(mosaic.ROW)] % 8)


@pytest.mark.parametrize("width", [32, 64])
def test_rows_are_added_to_the_rows_that_a_list_names(width, rng):
    """Some twice, some nowhere."""
    tile, column = numbers((64, width)), 128 - width
    rows = rng.integers(-1, 20, 64).astype(np.int32)
    both = [np.zeros((20, 128), np.float32) for _ in range(2)]
    for to, ours in zip(both, (True, False), strict=True):
        code = captured(row_sums.add, to, rows, column, tile)
        if ours:
            evaluate(code, held_by(tile.shape))
        else:
            code.function.twin(*code.args)
    np.testing.assert_array_equal(*both)
    assert both[0][:, column:].any() and not both[0][:, :column].any()


# ---- tiles in the order of their threads ---------------------------------------------------------


@pytest.mark.parametrize("vectors", [True, False])
def test_what_portable_blocks_add_up_is_read_in_the_order_in_which_it_was_added(vectors):
    shape, to = (64, 32), np.zeros((3, 64 * 32), np.float32)
    tile, held = numbers(shape), held_by((64, 32), 2)
    for _ in range(2):
        evaluate(captured(global_accumulate.add, tile, to, np.int32(1), vectors), held)
    assert not to[[0, 2]].any()
    got = evaluate(captured(global_accumulate.load, to, np.int32(1), shape, vectors), held)
    np.testing.assert_array_equal(got, 2 * tile.reshape(-1)[emitted.places(shape, 2)])


def test_latent_partials_are_read_in_the_order_in_which_they_were_written():
    shape, ref = (64, 32), np.zeros((3, 64 * 32), np.float32)
    tile, held = numbers(shape), held_by(shape)
    code = captured(mla_combine.store, ref, np.int32(1), tile)
    evaluate(code, held)
    assert not ref[[0, 2]].any()
    by_twin = np.zeros_like(ref)
    code.function.twin(tile, by_twin, np.int32(1))
    np.testing.assert_array_equal(by_twin, ref)
    got = evaluate(captured(mla_combine.load, ref, np.int32(1), shape), held)
    np.testing.assert_array_equal(got, tile.reshape(-1)[emitted.places(shape, 4)])


@pytest.mark.parametrize("where", [0, 1])
def test_dq_is_added_as_the_twin_adds_it(where):
    both = [np.zeros(3 * 64 * 64, np.float32) for _ in range(2)]
    for to, ours in zip(both, (True, False), strict=True):
        tile = numbers((64, 64))
        code = captured(thread_pieces.add, to, np.int32(1), tile, np.int32(where))
        if ours:
            evaluate(code, held_by((64, 64)))
        else:
            code.function.twin(*code.args)
    np.testing.assert_array_equal(*both)
    assert both[0].any() == where


def test_pieces_are_read_in_the_order_in_which_they_were_added():
    shape, ref = (64, 80), np.zeros(3 * 64 * 80, np.float32)
    tile, held = numbers(shape), held_by((64, 80))
    evaluate(captured(thread_pieces.add, ref, np.int32(1), tile, np.int32(1)), held)
    code = captured(thread_pieces.load, ref, np.int32(1), shape)
    np.testing.assert_array_equal(code.function.twin(*code.args), tile)
    got = evaluate(code, held)
    np.testing.assert_array_equal(got, tile.reshape(-1)[emitted.places(shape, 4)])


def test_pieces_are_written_as_the_twin_writes_them():
    """In the order in which they are read; a piece is also several of fewer columns."""
    shape, tile = (64, 128), numbers((64, 128))
    both = [np.zeros(3 * 64 * 128, np.float32) for _ in range(2)]
    for to, ours in zip(both, (True, False), strict=True):
        code = captured(thread_pieces.store, to, np.int32(1), tile)
        if ours:
            evaluate(code, held_by(shape))
        else:
            code.function.twin(*code.args)
    np.testing.assert_array_equal(*both)
    assert not both[0][: 64 * 128].any() and not both[0][-64 * 128 :].any()
    code = captured(thread_pieces.load, both[0], np.int32(1), shape)
    np.testing.assert_array_equal(code.function.twin(*code.args), tile)
    code = captured(thread_pieces.load, both[0], np.int32(3), (64, 64))
    np.testing.assert_array_equal(code.function.twin(*code.args), tile[:, 64:])


def test_pieces_past_two_to_the_31():
    to = Far((2**24 * 64 * 32,), "float32")
    evaluate(captured(thread_pieces.store, to, np.int32(2**24 - 1), numbers((64, 32))),
             held_by((64, 32)))  # fmt: skip
    got = np.concatenate([offset for offset, _ in to.stores])
    want = (2**24 - 1) * 64 * 32 * 4 + np.arange(0, 64 * 32 * 4, 16)
    np.testing.assert_array_equal(np.sort(got), want)


def test_packed_rows_past_two_to_the_31():
    """The last rows, of the last head."""
    tokens, heads, dim = 2**22, 2**6, 2**7
    to, last = Far((tokens, heads, dim), "bfloat16"), (tokens - 64, 64, heads - 1, 1)
    at = tuple(map(np.int32, last))
    evaluate(captured(packed_rows.store, numbers((64, 64), "bfloat16"), to, 64, at, 64),
             held_by((64, 64)))  # fmt: skip
    got = np.sort(np.concatenate([offset for offset, _ in to.stores]))
    line = np.arange(tokens - 64, tokens)[:, None] * heads + heads - 1
    np.testing.assert_array_equal(got, ((line * dim + 64 + np.arange(0, 64, 2)) * 2).ravel())


def test_latent_partials_past_two_to_the_31():
    to = Far((2**24, 64 * 32), "float32")
    evaluate(
        captured(mla_combine.store, to, np.int32(2**24 - 1), numbers((64, 32))), held_by((64, 32))
    )
    got = np.concatenate([offset for offset, _ in to.stores])
    want = (2**24 - 1) * 64 * 32 * 4 + np.arange(0, 64 * 32 * 4, 16)
    np.testing.assert_array_equal(np.sort(got), want)


# ---- programs of one thread ----------------------------------------------------------------------

OPERATORS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "lt", "le", "gt", "ge")
}


def a_program(operation):
    """One Int of each thread."""

    def program(thread, refs, numbers):
        result = operation(thread, *numbers)
        return (
            result
            if result.value.type == asm.i32()
            else thread.select(result, thread.index * 0 + 1, 0)
        )

    return program


def of_threads(operation, *arguments):
    code = captured(threads.each_thread, a_program(operation), (), arguments, returns="each")
    held = {repr(A_NUMBER_A_THREAD): np.arange(128)[:, None, None]}
    return evaluate(code, held)[:, 0, 0]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_integers(name, rng):
    a, b = rng.integers(0, 40, (2, 128)).astype(np.int32)
    if name not in ("floordiv", "mod"):  # which want none that are negative
        a, b = a - 20, b - 20
    b = np.where(b == 0, 1, b).astype(np.int32) if name in ("floordiv", "mod") else b
    b[:5] = np.maximum(a[:5], 1)
    got = of_threads(lambda _, x, y: OPERATORS[name](x, y), a, b)
    np.testing.assert_array_equal(got, OPERATORS[name](a, b).astype(np.int32))


TOGETHER = {
    "minimum": (lambda t, x: t.minimum(x, 7), lambda x: np.minimum(x, 7)),
    "maximum": (lambda t, x: t.maximum(x, 7), lambda x: np.maximum(x, 7)),
    "running_sum": (lambda t, x: t.running_sum(x), lambda x: np.cumsum(x.reshape(4, 32), 1)),
    "total_of_lanes": (
        lambda t, x: t.total_of_lanes(x),
        lambda x: np.repeat(x.reshape(4, 32).sum(1), 32),
    ),
    "most_of_lanes": (
        lambda t, x: t.most_of_lanes(x, 8),
        lambda x: np.repeat(x.reshape(16, 8).max(1), 8),
    ),
    "of_lane": (
        lambda t, x: t.of_lane(x, t.index % 32 // 4),
        lambda x: np.repeat(x.reshape(4, 32)[:, :8], 4, axis=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_what_threads_do_together(name, rng):
    x = rng.integers(-30, 30, 128).astype(np.int32)
    ours, want = TOGETHER[name]
    np.testing.assert_array_equal(of_threads(ours, x), np.ravel(want(x)))


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8])
def test_words_are_stored_where_the_condition_holds(nbytes):
    """And wide offsets are taken as they are."""
    to = Far((2**40,), "int8")

    def program(thread, refs, _):
        word = thread.load(refs[0], thread.index, nbytes)
        index = thread.to_int64(thread.index) + 2**33
        thread.store(refs[1], index, word, nbytes, thread.index >= 100)

    words = numbers(128, f"int{8 * nbytes}")
    evaluate(captured(threads.each_thread, program, (words, to), ()), {})
    ((offset, value),) = to.stores
    np.testing.assert_array_equal(offset, (np.arange(100, 128) + 2**33) * nbytes)
    np.testing.assert_array_equal(value.view(words.dtype)[:, 0], words[100:])


# ---- rows of a quantised cache -------------------------------------------------------------------


def float16_of_e5m2(words, *_):
    """The results that `thread_math.to_16_bits` must give, without PTX: upper halves of float16."""
    constant = lambda x: utils.c(x, ir.IntegerType.get_signless(32))  # noqa: E731
    halves = []
    for word in words:
        for part in (word, arith.shrui(word, constant(16))):
            low = arith.shli(arith.andi(part, constant(0xFF)), constant(8))
            high = arith.shli(arith.andi(part, constant(0xFF00)), constant(16))
            halves.append(arith.ori(low, high))
    return halves


@pytest.mark.parametrize("dim, block", [(64, 64), (128, 128), (192, 64), (256, 64)])
def test_narrow_rows_are_stored_where_tma_would_put_them(rng, monkeypatch, dim, block):
    monkeypatch.setattr(thread_math, "to_16_bits", float16_of_e5m2)
    numbers = rng.standard_normal((2, block * dim)).astype(jnp.float8_e5m2)
    scales = rng.standard_normal((2, block)).astype(np.float32)
    both = [np.zeros((3, block, dim), jnp.bfloat16) for _ in range(2)]
    for to, ours in zip(both, (True, False), strict=True):
        arguments = numbers, scales, np.int32(1), to, np.int32(2), 128, 3
        code = captured(narrow_rows.widen, *arguments)
        if ours:
            evaluate(code, {})
        else:
            code.function.twin(*code.args)
    got, want = both
    row, chunk = np.arange(block)[:, None], np.arange(dim // 8)[None]
    tiles = got[2].reshape(block // 8, dim // 64, 8, 8, 8)
    rows = tiles[row // 8, chunk // 8, row % 8, chunk % 8 ^ row % 8].reshape(block, dim)
    np.testing.assert_array_equal(rows, want[2])
    assert want[2].any() and not got[:2].any()


def rows_of_bytes(rng):
    """Two tiles."""
    numbers = rng.standard_normal((2, 64, 512)).astype(jnp.float8_e4m3fn)
    scales = rng.standard_normal((2, 64, 4)).astype(np.float32)
    rest = rng.standard_normal((2, 64, 64)).astype(jnp.bfloat16)
    return np.concatenate([x.view(np.uint8) for x in (numbers, scales, rest)], axis=-1)


def bytes_of_a_thread():
    """Which elements of [64, 128] a thread has in a left operand of 8 bits."""
    thread, n = np.arange(128)[:, None], np.arange(16)[None]
    row = thread // 32 * 16 + thread % 32 // 4 + n % 2 * 8
    return (row * 128 + n // 2 * 16 + thread % 4 * 4)[..., None] + np.arange(4)


OPERANDS = {
    "keys": lambda raw: byte_rows.keys(raw, 2),
    "rest": lambda raw: byte_rows.rest(raw, "bfloat16"),
    "rest_rounded": lambda raw: byte_rows.rest(raw, "float16"),
    "values": lambda raw: byte_rows.values(raw, 3, np.int32(37)),
    "scales": lambda raw: byte_rows.flat_scales(raw, np.int32(37)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_from_rows_of_bytes(name, rng):
    code = captured(OPERANDS[name], byte_rows.Raw(rows_of_bytes(rng), np.int32(1)))
    made, want = evaluate(code, {}), code.function.twin(*code.args)
    several = made if isinstance(made, tuple) else (made,)
    for got, tile in zip(several, want if isinstance(made, tuple) else (want,), strict=True):
        tile, got = np.asarray(tile), np.asarray(got)
        if tile.ndim == 2:
            places = bytes_of_a_thread() if name == "keys" else emitted.places(tile.shape, 4)
        else:
            row = emitted.places((64, 8), 4)[:, :2, :1] // 8
            places = row if tile.ndim else np.zeros((128, 1), int)
        np.testing.assert_array_equal(
            got.astype(np.float32), tile.astype(np.float32).reshape(-1)[places]
        )


@pytest.mark.parametrize("rows, dtype", [(16, "bfloat16"), (24, "float16")])
def test_queries_of_rows_of_bytes(rows, dtype, rng):
    """Their terms lie where TMA would put them, and add up to the queries."""
    q = (rng.standard_normal((rows, 576)) * 2.0 ** rng.integers(-9, 9, (rows, 1))).astype(dtype)
    q[3] = 0
    both, terms = [], byte_rows.terms_of(dtype)
    for ours in (True, False):
        to = byte_rows.Queries(
            np.zeros((terms * rows, 512), jnp.float8_e4m3fn),
            np.zeros((rows, 64), q.dtype),
            np.zeros(rows, np.float32),
        )
        code = captured(byte_rows.split, q, to)
        if ours:
            evaluate(code, {})
        else:
            code.function.twin(*code.args)
        both.append(to)
    got, want = both
    np.testing.assert_array_equal(got.units, want.units)
    shape = terms, rows, 512
    got, want = (x._replace(terms=x.terms.reshape(shape)) for x in both)
    for x, y, width in ((got.terms, want.terms, 16), (got.rest[None], want.rest[None], 8)):
        row, chunk = np.arange(rows)[:, None], np.arange(y.shape[-1] // width)[None]
        tiles = x.reshape(len(y), rows // 8, -1, 8, 8, width)
        placed = tiles[:, row // 8, chunk // 8, row % 8, chunk % 8 ^ row % 8].reshape(y.shape)
        np.testing.assert_array_equal(placed, y)
    sums = want.terms.astype(np.float32).sum(axis=0) * want.units[:, None]
    exact = q[:, :512].astype(np.float32)
    most = np.abs(exact).max(axis=1, keepdims=True)
    error = 0 if dtype == "bfloat16" else 2.0**-12
    assert (np.abs(sums - exact) <= np.abs(exact) * error + most * 2.0**-17).all()


def test_columns_of_rows_of_bytes_are_stored_in_order():
    tiles = tuple(numbers((64, 16)) + 1024 * n for n in range(2))
    both = [np.zeros((40, 512), np.float16) for _ in range(2)]
    for out, ours in zip(both, (True, False), strict=True):
        code = captured(byte_rows.store_columns, out, np.int32(16), 1, tiles)
        if ours:
            evaluate(code, held_by((64, 16)))
        else:
            code.function.twin(*code.args)
    np.testing.assert_array_equal(*both)
    assert len(np.unique(both[0])) == 2048


def test_terms_of_rows_of_bytes_are_added_up():
    code = captured(byte_rows.folded, numbers((64, 48)), 16)
    got, want = evaluate(code, held_by((64, 48))), code.function.twin(*code.args)
    np.testing.assert_array_equal(got, want.reshape(-1)[emitted.places((64, 16), 4)])


def test_units_of_rows_of_bytes():
    to = np.zeros(8, np.float32)
    units = [np.float32(x) for x in (1, 2, 4, 8)]
    evaluate(captured(byte_rows.store_units, to, np.int32(1), units), {})
    np.testing.assert_array_equal(to, [0, 0, 0, 0, 1, 2, 4, 8])
