"""Addresses of programs of single threads in arrays that no machine here could hold: the last block
reads and writes their last words. tests/guards/test_emitted_code.py has those of inline code,
tests/kernels/append/test_append_kernel.py those of append.
"""

import dataclasses
import functools
import math
import types

import numpy as np
import pytest

from pallas_attn.kernels.attention import cache_layout, partials
from pallas_attn.kernels.decode import combine_splits, packed
from pallas_attn.kernels.flash_bwd import statistics
from pallas_attn.kernels.flash_fwd import fetch, float8_values
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.prefill import (
    combine_partials,
    float8_tiles,
    narrow_sm90,
    slabs,
    widened_sm90,
    widening_producer,
)
from pallas_attn.kernels.prefill import sm90 as prefill_sm90
from pallas_attn.kernels.quantize import blocks
from tests.support import mosaic
from tests.support import operations as support
from tests.support.threads import Ledger

pytestmark = pytest.mark.guards


def last_words(program, refs, at, plan):
    """{array: (the first word that the block touches, the one after the last)}, in bytes."""
    ledger = Ledger()
    with np.errstate(all="ignore"):
        program(ThreadContext(mosaic.BlockOfThreads(0, ledger), refs, at, plan))
    ends: dict[str, list[int]] = {}
    for name, index, nbytes in ledger.loaded + ledger.stored:
        ends.setdefault(name, []).extend((index * nbytes, (index + 1) * nbytes))
    return {name: (min(x), max(x)) for name, x in ends.items()}


def scalar(number):
    return np.full(128, number, np.int32)


@pytest.mark.parametrize("side", range(3))
def test_rounding(side):
    """Rows with a scale each: a block has some of the last ones."""
    batch, rows, heads, dim = 3, 2**22, 64, 128
    sizes = {"batch": batch, "q_len": rows, "kv_len": rows, "q_heads": heads, "kv_heads": heads}
    problem = dataclasses.replace(support._BASE["quantize"], **sizes, blocks=(rows,) * 3)
    plan = blocks.Plan.of(problem, side, blocks.Config.default(problem))
    refs = blocks.QuantizeRefs("x", None, None, "numbers", "scales")
    ends = last_words(blocks._quantize, refs, scalar(plan.grid - 1), plan)
    numbers = batch * rows * heads * dim
    held = 128 // plan.share * dim  # numbers of a block
    assert ends["x"] == (2 * (numbers - held), 2 * numbers)
    assert ends["numbers"] == (numbers - held, numbers)
    assert ends["scales"][1] == 4 * batch * rows * heads


def test_values_of_float8():
    batch, rows, heads, dim = 2**6, 2**17, 2**6, 128
    sizes = float8_values.Sizes(batch, rows, heads, dim, dim, rows)
    refs = float8_values.Refs("v", None, "out")
    first = (sizes.share - 1) * 128
    at = float8_values._Place(*map(scalar, (batch - 1, heads - 1, first, rows)))
    ends = last_words(float8_values._transpose, refs, at, sizes)
    numbers = batch * rows * heads * dim
    assert {name: last for name, (_, last) in ends.items()} == {"v": numbers, "out": numbers}
    assert ends["out"][0] >= numbers - rows * dim  # the last head
    assert ends["v"][0] >= numbers - rows * heads * dim  # the last batch row


def test_tiles_of_a_float8_cache():
    sequences, layers, capacity, heads, dim = 2**6, 4, 2**23, 8, 128
    problem = dataclasses.replace(
        support._BASE["decode"],
        cache_dtype="float8_e4m3fn",
        quantized=True,
        sequences=sequences,
        layers=layers,
        capacities=(capacity,) * sequences,
    )
    layout = cache_layout.layout_of(problem)
    plan = float8_tiles.Tiles(layout, "float8_e4m3fn", (dim, dim))
    tables = (("k", "v", "k_scale", "v_scale"),)
    refs = slabs.CacheRefs(tables, None, None, None, None, ("K", "V", "units"))
    place = (sequences - 1, heads - 1, plan.tiles - 1, capacity, layers - 1)
    at = float8_tiles._Place(*map(scalar, place), None)
    ends = last_words(float8_tiles._make, refs, at, plan)
    rows = layers * sequences * heads * capacity
    for name, size in (("k", dim), ("v", dim), ("k_scale", 4), ("v_scale", 4)):
        assert ends[name] == ((rows - float8_tiles.KEYS) * size, rows * size)
    rows //= layers
    assert ends["K"] == ((rows - float8_tiles.KEYS) * dim, rows * dim)
    assert ends["V"][1] == rows * dim and ends["V"][0] >= (rows - capacity) * dim
    assert ends["units"][1] == 16 * sequences * heads * plan.tiles


# ---- rows of caches, of queries and of their partials --------------------------------------------

SEQUENCES, HEADS, ROWS, DIM, LAYERS = 64, 8, 2**24, 128, 2
LINES = SEQUENCES * HEADS * ROWS  # rows of a layer: 2**33


def far_cache(kind, **changes):
    """A problem over a cache of 2**41 numbers."""
    paged = {"page_size": 64, "pages": SEQUENCES * ROWS // 64} if kind == "paged" else {}
    sizes = {"sequences": SEQUENCES, "kv_heads": HEADS, "head_dim": DIM, "v_head_dim": DIM}
    sizes |= {"capacities": (ROWS,) * SEQUENCES, "q_heads": 32, "q_len": 64, "layers": LAYERS}
    return dataclasses.replace(support._BASE["decode"], kind=kind, **(sizes | paged | changes))


@pytest.mark.parametrize("kind", ["stacked", "paged"])
def test_a_widened_cache(kind):
    rows, layers = 2**17, 2**9  # few of a layer, which is all that it widens
    sizes = {"capacities": (rows,) * SEQUENCES, "layers": layers}
    sizes |= {"pages": SEQUENCES * rows // 64} if kind == "paged" else {}
    problem = far_cache(kind, quantized=True, cache_dtype="int8", kv_heads=1, **sizes)
    assert widened_sm90.limit(problem) is None
    plan = widened_sm90.Widening(problem)
    refs = slabs.CacheRefs((("k", "v", "ks", "vs"),), None, None, None, None, (("K", "V"),))
    slab = plan.layout.capacities[0]
    place = (len(plan.layout.capacities) - 1, 0, slab - plan.rows, slab, layers - 1)
    at = widened_sm90._Chunk(*map(scalar, place), None)
    ends = last_words(widened_sm90._widen, refs, at, plan)
    lines = SEQUENCES * rows
    for name, size in {"k": DIM, "v": DIM, "ks": 4, "vs": 4}.items():
        assert ends[name] == ((layers * lines - plan.rows) * size, layers * lines * size)
    for name in ("K", "V"):
        assert ends[name] == (2 * (lines - plan.rows) * DIM, 2 * lines * DIM)


@pytest.mark.parametrize("side", range(2))
def test_a_tile_that_is_widened_on_its_way(side):
    problem = far_cache("stacked", quantized=True, cache_dtype="int8")
    plan = narrow_sm90.plan_of(problem, narrow_sm90.Config(prefill_sm90.Config(2, block_kv=64)))
    memory = widening_producer._Memory(
        (("k", "v", "ks", "vs"),), None, widening_producer.Slots("slot", "scales")
    )
    place = (SEQUENCES - 1, HEADS - 1, ROWS - 64, 64, 0, LAYERS - 1)
    at = widening_producer._Tile(*map(scalar, place), None)
    program = functools.partial(widening_producer._copy, side=side)
    ends = last_words(program, memory, at, plan)
    assert ends["kv"[side]] == ((LAYERS * LINES - 64) * DIM, LAYERS * LINES * DIM)
    assert ends[("ks", "vs")[side]] == ((LAYERS * LINES - 64) * 4, LAYERS * LINES * 4)


def test_statistics_of_the_last_rows():
    batch, heads, rows, dim = 4, 2**6, 2**22, 128
    sizes = {"batch": batch, "q_heads": heads, "q_len": rows, "v_head_dim": dim}
    problem = dataclasses.replace(support._BASE["flash_backward"], **sizes)
    refs = statistics.StatisticsRefs("out", "do", "lse", "d_lse", "to_lse", "to_delta")
    place = (batch - 1, heads - 1, rows // 64 - 1, 0)
    at = statistics.QueryTileAt(*map(scalar, place))
    ends = last_words(statistics._write, refs, at, (problem, 1, (1.0, 1.0)))
    lines = batch * rows * heads
    for name in ("out", "do"):
        assert ends[name] == (2 * dim * (lines - 63 * heads - 1), 2 * dim * lines)
    for name in ("lse", "d_lse"):
        assert ends[name] == (4 * (lines - 64), 4 * lines)


def test_partials_of_splits():
    """The last row's, of the last split."""
    sizes = {"sequences": 2**10, "q_len": 2**13, "capacities": (2**14,) * 2**10}
    problem = far_cache("stacked", **sizes)
    config = prefill_sm90.Config(2, block_kv=64, splits=4)
    plan = prefill_sm90.plan_of(problem, config)
    refs = combine_partials.CombineRefs("accs", "maxes", "sums", None, None, "out", "lse")
    block = scalar(plan.result_rows // threads.WARPS - 1)
    ends = last_words(combine_partials._row, refs, block, plan)
    lines = math.prod((config.splits, *plan.queries.partial_tiles(plan), 64))
    rows = plan.result_rows
    assert lines * DIM > 2**31 and rows * DIM > 2**31
    assert ends["accs"][1] == 4 * lines * DIM
    assert ends["maxes"][1] == ends["sums"][1] == 4 * lines
    assert ends["out"] == (2 * (rows - threads.WARPS) * DIM, 2 * rows * DIM)
    assert ends["lse"][1] == 4 * rows


def test_results_of_decode():
    """The last row of the last sequence."""
    sequences, tokens, heads = 2**17, 8, 2**7
    sizes = {"sequences": sequences, "q_len": tokens, "q_heads": heads, "layers": None}
    problem = far_cache("stacked", **sizes, capacities=(64,) * sequences)
    plan = types.SimpleNamespace(
        problem=problem,
        queries=types.SimpleNamespace(chunk_rows=128, group=heads // HEADS, chunks_of=lambda _: 1),
    )
    at = types.SimpleNamespace(
        sequence=scalar(sequences - 1), head=scalar(HEADS - 1), queries=scalar(tokens), row=None
    )
    column = np.arange(128, dtype=np.int32) % (DIM // 4)
    place = combine_splits._Place(scalar(tokens * heads // HEADS - 1), column, column < DIM)
    zero = np.zeros(128, np.float32)
    partial = partials.Partial(zero, zero + 1, [zero] * 4)
    refs = combine_splits.Results("out", "lse", None, None, None, None, None)
    program = functools.partial(combine_splits._write, results=refs, place=place, partial=partial)
    ends = last_words(program, None, at, plan)
    rows = sequences * tokens * heads
    assert ends["out"] == (2 * (rows - 1) * DIM, 2 * rows * DIM)
    assert ends["lse"] == (4 * (rows - 1), 4 * rows)


def test_packed_rows_that_nothing_serves():
    tokens, heads = 2**20, 2**7
    problem = dataclasses.replace(far_cache("stacked"), tokens=tokens, q_len=tokens, q_heads=heads)
    refs = combine_splits.Results("out", "lse", None, None, None, None, None)
    at = packed.Unowned(*map(scalar, (0, 0, tokens - 1, tokens)))
    ends = last_words(packed.write_unowned, refs, at, types.SimpleNamespace(problem=problem))
    rows = tokens * heads
    assert ends["out"] == (2 * (rows - heads) * DIM, 2 * rows * DIM)
    assert ends["lse"][1] == 4 * rows


def test_pieces_that_are_fetched():
    """The last rows of the last GPU's keys, in words of 16 bytes."""
    sizes = fetch.Sizes(8, 1, 8, 2**23, 2**7, 2**7, 2, 64, 1)
    at = types.SimpleNamespace(device=scalar(0))
    thread = mosaic.BlockOfThreads(0, Ledger())
    entry, number = scalar(sizes.batch * sizes.tiles - 1), scalar(sizes.pieces - 1)
    piece = fetch._piece(ThreadContext(thread, None, at, sizes), number, entry)
    rows = sizes.devices * sizes.batch * sizes.keys
    assert set((piece.target * sizes.k_words).tolist()) == {(rows - sizes.rows) * sizes.k_words}
    assert set(piece.source.tolist()) == {sizes.batch * sizes.keys - sizes.rows}
