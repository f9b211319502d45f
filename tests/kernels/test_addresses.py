"""Addresses of programs of single threads in arrays that no machine here could hold: the last block
reads and writes their last words. tests/guards/test_emitted_code.py has those of inline code,
tests/kernels/append/test_append_kernel.py those of append.
"""

import dataclasses

import numpy as np
import pytest

from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.flash_fwd import float8_values
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.prefill import float8_tiles
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
    refs = float8_tiles.TileRefs(tables, None, None, None, None, ("K", "V", "units"))
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
