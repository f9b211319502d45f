"""Work tiles that blocks claim (kernels/attention/claims.py): of packed documents and of long
causal rows, forward.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import config as _config
from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.attention import claims, tile_scheduler, tma_operands
from pallas_attn.kernels.flash_fwd import documents, sm90, sm90_defaults
from pallas_attn.kernels.lang.mosaic import SMEM_LIMIT
from tests.kernels.flash_fwd import test_flash_fwd as forward
from tests.support import mosaic, threads
from tests.support.problems.case import AttentionCase

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

CAUSAL, FULL = pa.CAUSAL, pa.FULL
TWO, THREE = (
    {"warpgroups": 2, "block_kv": 64, "stages": 2},
    {"warpgroups": 3, "block_kv": 64, "stages": 3},
)


def of(documents, heads, dim=64, batch=1, mask=CAUSAL, **fields):
    """A case of packed documents, which begin one further on in each batch row."""
    rows = sum(documents)
    sizes = batch, rows, rows, *heads, dim, dim
    return AttentionCase("documents", *sizes, mask=mask, segments=documents, **fields)


def plain(rows, keys, heads, dim=64, batch=1, **fields):
    """A causal case without documents."""
    return AttentionCase("plain", batch, rows, keys, *heads, dim, dim, mask=CAUSAL, **fields)


CASES = {
    "causal": (of((100, 250, 50, 300), (4, 2)), TWO | {"grid": 3}),
    "full": (of((30, 450, 1, 19, 300), (2, 2), mask=FULL), THREE | {"grid": 3}),
    "window": (of((100, 450, 150), (3, 1), mask=pa.sliding_window(70)), TWO | {"grid": 4}),
    "offset": (of((100, 450, 150), (4, 2), q_offset=(-200,)), THREE | {"grid": 2}),
    "unseen": (of((100, 450), (2, 1), kv_segments=(550,)), TWO | {"grid": 3}),
    "one block": (of((300, 400), (2, 1)), TWO | {"grid": 1}),
    "wide": (of((100, 300), (2, 1), 256), TWO | {"grid": 2, "q_slots": 1}),
    "short": (of((1,) * 40 + (3,) * 100, (2, 1)), THREE | {"grid": 2}),
    # Without documents.
    "plain": (plain(500, 500, (4, 2)), THREE | {"grid": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_claim_all_work_tiles(name):
    """Without a race, and with no work tile left out; rows of no key too."""
    case, config = CASES[name]
    config = sm90.Config(**config, claims=True)
    assert sm90.plan_of(forward.problem_of(case), config).order.claims
    with mosaic.interpret():
        forward.check(case, config)


def test_work_tiles_of_a_function_are_not_claimed():
    """Some may take no kv tile."""
    program = pa.mask_fn(lambda b, h, q, kv: q < kv).program
    problem = dataclasses.replace(forward.problem_of(plain(128, 128, (2, 1))), mask_program=program)
    assert not sm90.plan_of(problem, sm90.Config(**TWO, claims=True)).order.claims


def count_claims(monkeypatch):
    """A list, to which every claim adds how many work tiles it took."""
    counts, take = [], threads.BlockOfThreads.take

    def counted(self, counters, index, where):
        counts.append(np.count_nonzero(where))
        return take(self, counters, index, where)

    monkeypatch.setattr(threads.BlockOfThreads, "take", counted)
    return counts


def decoded(order, table):
    """Heads and tiles in the order in which blocks claim them: each work tile once."""
    count, *codes = np.asarray(table)[0].tolist()
    assert count == len(codes) == len(set(codes)) == order.work_tiles
    return np.array(codes) >> order.code_bits, np.array(codes) & ((1 << order.code_bits) - 1)


@pytest.mark.parametrize(
    "case, work_tiles",
    [(of((200, 333), (2, 1)), 10), (plain(533, 533, (2, 1)), 10)],
    ids=["documents", "plain"],
)
def test_each_claim_counts_once(monkeypatch, case, work_tiles):
    """A block claims once for each work tile that it takes: all there are, and no more."""
    claimed = count_claims(monkeypatch)
    config = sm90.Config(**TWO, grid=3, claims=True)
    with mosaic.interpret():
        forward.check(case, config)
    tiles = sm90.plan_of(forward.problem_of(case), config).order.work_tiles
    assert sum(claimed) == tiles == work_tiles


def test_the_last_head_goes_by_rank():
    """The last head of the last batch row takes its longest work tile first, by kernel and XLA."""
    case, config = of((130, 500, 70, 400), (4, 2), batch=2), sm90.Config(**TWO, claims=True)
    problem, inputs = forward.problem_of(case), AttentionInputs(**forward.arguments_of(case))
    plan = sm90.plan_of(problem, config)
    keys = tma_operands.round_up(problem.kv_len, config.block_kv)
    fields = tma_operands.segment_ids(inputs, plan.tiling.padded_rows, keys)
    records, schedule = documents.by_xla(plan, inputs, fields)
    with mosaic.interpret():
        made = jax.jit(functools.partial(documents.operands, plan))(inputs, fields)
    np.testing.assert_array_equal(made["segment_spans"], records)
    np.testing.assert_array_equal(made["schedule"], schedule)
    codes, static = np.asarray(schedule)[0, 1:], tile_scheduler.schedule(plan)[0, 1:]
    ranked = static >> plan.code_bits >= plan.order.first_ranked_head
    np.testing.assert_array_equal(codes[~ranked], static[~ranked])
    tiles = codes[ranked][:: problem.group] & ((1 << plan.code_bits) - 1)
    assert sorted(tiles) == list(range(plan.tiling.q_tiles))
    spans = np.asarray(records)[-1][:, : 4 * config.warpgroups].reshape(plan.tiling.q_tiles, -1, 4)
    causal = documents.mask_bounds(plan)[1]
    lengths = np.minimum(spans[..., 3].max(1), causal) - spans[..., 0].min(1)
    assert (np.diff(lengths[tiles]) <= 0).all() and lengths[tiles[0]] > lengths[tiles[-1]]


def problem_of(rows, heads=(32, 8), dim=128, arrays=()):
    """One causal batch row with segment ids."""
    case = of((rows,), heads, dim)
    problem = forward.problem_of(case)
    return dataclasses.replace(problem, arrays=(*arrays, *problem.arrays))


def test_claims_are_for_long_documents():
    """The default: not where rows are few, nor where a work tile may need no kv tile."""

    def config(rows, **how):
        return sm90.Config.default(problem_of(rows, **how))

    assert config(sm90_defaults.LONG).claims and config(sm90_defaults.LONG).warpgroups == 3
    assert config(sm90_defaults.LONG, arrays=("q_offset",)).claims
    assert (
        not config(sm90_defaults.LONG - 1).claims and config(sm90_defaults.LONG - 1).warpgroups == 2
    )
    assert not config(sm90_defaults.LONG, arrays=("kv_lengths",)).claims
    assert not config(sm90_defaults.LONG, heads=(32, 32)).claims


def fetching(rows, **changes):
    """Two chunks of causal rows of the first of two GPUs, in the order zigzag."""
    case = plain(rows, 4 * rows, (32, 8), 128, batch=2)
    offsets = (0, 3 * rows), (rows, 2 * rows)
    known = {"offsets": offsets, "share": 2, "zigzag": 2, "fetches": 2}
    known["arrays"] = ("q_offset", "device")
    return dataclasses.replace(forward.problem_of(case), **known | changes)


def test_claims_are_for_keys_that_l2_does_not_hold():
    """The default of causal rows, fetched or not: not where L2 holds K and V of a head, nor where
    it is not known that each work tile has a key. With the tiles that a table would deal.
    """
    rows, here = sm90_defaults.HELD_BY_L2 // (2 * 2 * 128), {"fetches": 1, "arrays": ("q_offset",)}
    assert rows // 4 > sm90_defaults.LONG
    for problem in (
        fetching(rows // 4 + 128, **here),
        fetching(rows // 4 + 128),
        forward.problem_of(plain(rows + 8, rows + 8, (8, 2), 128)),
    ):
        config = sm90.Config.default(problem)
        assert config.claims and sm90.smem_bytes(problem, config) <= SMEM_LIMIT
        assert dataclasses.replace(config, claims=False) == sm90.Config.default(fetching(rows // 4))
    for other in (
        forward.problem_of(plain(rows, rows, (8, 2), 128)),
        fetching(rows // 4),
        fetching(rows // 4, **here),
        fetching(rows // 2, **here, q_len=sm90_defaults.LONG - 64),
        fetching(rows // 2, **here, offsets=()),
        fetching(rows // 2, **here, kv_heads=32),
        fetching(rows // 2, **here, mask=pa.sliding_window(4096)),
        fetching(rows // 2, **here, mask=FULL),
        forward.problem_of(plain(rows + 8, rows + 8, (8, 2), 256)),
    ):
        assert not sm90.Config.default(other).claims


def test_chunks_that_share_keys_are_claimed_together():
    """All work tiles once: of a kv head those of both chunks, the longest first."""
    problem = fetching(960, fetches=1, zigzag=1, arrays=("q_offset",))
    plan = sm90.plan_of(problem, sm90.Config(**THREE, grid=4, claims=True))
    for offsets in problem.offsets:
        head, tile = decoded(plan.order, tile_scheduler.schedule(plan, offsets))
        of_kv, chunk = head % 32 // 4, head // 32
        assert (np.diff(of_kv) >= 0).all()
        last = np.array(offsets)[chunk] + (tile + 1) * plan.tiling.tile_rows
        for each in range(8):
            steps = -(-last[of_kv == each] // plan.config.block_kv)
            assert (np.diff(steps) <= 0).all() and set(chunk[of_kv == each]) == {0, 1}


def test_too_many_stages_for_the_ring_of_codes():
    sm90.Config(stages=claims.MOST_STAGES, claims=True)
    with pytest.raises(ValueError) as caught:
        sm90.Config(stages=claims.MOST_STAGES + 1, claims=True)
    assert str(caught.value) == "Config.claims must be False above 12 stages, got True"


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_shared_memory_is_enough(dim):
    """At every head dim, with what is fetched from another GPU too."""
    problem = problem_of(sm90_defaults.LONG, (8, 4), dim, ("q_offset",))
    config = sm90.Config.default(problem)
    assert config.claims and sm90.smem_bytes(problem, config) <= SMEM_LIMIT
    changes = {
        "arrays": (*problem.arrays, "device"),
        "kv_len": 2 * sm90_defaults.LONG,
        "fetches": 2,
    }
    fetched = dataclasses.replace(problem, **changes)
    assert sm90.fetches(fetched) and sm90.Config.default(fetched).claims


def test_neighbours_are_claimed_together():
    """All work tiles once: the heads of a group side by side, rows from the last on."""
    problem = forward.problem_of(of((1000,), (6, 2), batch=2))
    plan = sm90.plan_of(problem, sm90.Config(**TWO, grid=4, claims=True))
    head, tile = decoded(plan.order, tile_scheduler.schedule(plan))
    assert head[:4].tolist() == [0, 1, 2, 0] and tile[:4].tolist() == [7, 7, 7, 6]
    assert plan.order.first_ranked_head == 9 and tile[head >= 9][:4].tolist() == [0, 0, 0, 1]


LONG_ONES = (
    of((8192,) * 2, (8, 2)),
    of((1, 5000, 300, 11083), (8, 4)),
    of((700,) * 24, (4, 1), mask=FULL),
    of((20000,), (2, 1), mask=pa.sliding_window(1000)),
    plain(200_000, 200_000, (2, 1)),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dim, number",
    [
        (dim, number)
        for turn, dim in enumerate((64, 96, 128, 256))
        for number in range(len(LONG_ONES))
        if (number + turn) % 2 == 0
    ],
)
def test_long_rows_on_the_gpu(number, dim):
    """The bits of the same tiles by a table, in arrays that held NaN before: no row is left out."""
    case = dataclasses.replace(LONG_ONES[number], head_dim=dim, v_head_dim=dim)
    arrays = case.arrays()
    call = functools.partial(pa.flash_attention_with_lse, **case.options())

    def traced(config=None):
        """The step, and the Config that it runs with."""
        forced = _config.forced("flash_fwd_sm90", config) if config else contextlib.nullcontext()
        with forced, _config.watched() as choices:
            step = jax.jit(lambda arrays: call(**arrays)).trace(arrays)
        return step, choices[-1].config

    config = dataclasses.asdict(traced()[1])
    assert config["claims"] == (bool(case.segments) or 64 < dim <= 128)
    step, dealt = (
        traced(config | {"claims": claims})[0].lower().compile() for claims in (True, False)
    )
    want = dealt(arrays)
    for _ in range(3):
        before = [jnp.full(x.shape, jnp.nan, x.dtype) for x in want]
        jax.block_until_ready(before)
        del before
        for x, w in zip(step(arrays), want, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(w, np.float32))
