"""Every walk over work, for random sizes: each unit of work once, none lost. In NumPy, without a
kernel: what a block asks of its scheduler is asked here for all blocks at once.

The walks of decoding over ordinary caches and of dbias are in the tests of those kernels, and
tests/kernels/flash_fwd/test_flash_fwd.py has that of segments.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.append import copy as append_copy
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.attention import segment_spans, tile_scheduler
from pallas_attn.kernels.attention.tiles import ROWS, ForwardRefs, KernelContext
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode_mla import sm80 as mla_sm80
from pallas_attn.kernels.decode_mla import sm90 as mla_sm90
from pallas_attn.kernels.decode_mla import sm90_few_rows, sm90_plan
from pallas_attn.kernels.flash_bwd import key_tiles, sm90_two_kernels, sm90_window, work_order
from pallas_attn.kernels.flash_bwd import sm80 as bwd_sm80
from pallas_attn.kernels.flash_bwd import sm90 as bwd_sm90
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.kernels.flash_fwd import sm80 as fwd_sm80
from pallas_attn.kernels.flash_fwd import sm90 as fwd_sm90
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.prefill import merge_parts, shared_parts, shares
from pallas_attn.kernels.prefill import plan as prefill_plan
from pallas_attn.kernels.prefill import sm90 as prefill
from pallas_attn.kernels.prefill.plan import Units
from pallas_attn.kernels.prefill.queries import wg_tile_of
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from pallas_lm.kernels import linear
from tests.kernels.append import test_append_kernel
from tests.kernels.decode_mla import test_decode_mla
from tests.kernels.flash_bwd import test_flash_bwd as backward
from tests.kernels.flash_fwd import test_flash_fwd as forward
from tests.support import decode_cases
from tests.support.threads import BlockOfThreads

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def drawn_problem(seed, problem_of):
    """Sizes, heads and a mask of no particular kind."""
    rng = np.random.default_rng(seed)
    kv_heads, group = (int(x) for x in rng.integers(1, 6, 2))
    masks = (FULL, CAUSAL, sliding_window(int(rng.integers(1, 300))), Mask(40, 30))
    sizes = {"batch": int(rng.integers(1, 4)), "mask": masks[rng.integers(4)]}
    sizes |= {"q_len": int(rng.integers(1, 2000)), "kv_len": int(rng.integers(1, 2000))}
    heads = {"kv_heads": kv_heads, "q_heads": kv_heads * group}
    small = problem_of(forward.case_named("t_equals_s"))
    return rng, dataclasses.replace(small, **sizes, **heads)


def no_arrays(refs):
    return refs(**dict.fromkeys(refs._fields))


def taken(table):
    """All codes of a schedule, in order; a block may read one past its own."""
    assert table.shape[1] >= 2 + table[:, 0].max()
    return np.sort(np.concatenate([row[1 : 1 + row[0]] for row in table]))


@pytest.mark.parametrize("seed", range(6))
def test_forward(seed):
    """Some warpgroup has the rows of each head."""
    rng, problem = drawn_problem(seed, forward.problem_of)
    config = fwd_sm90.Config(
        warpgroups=int(rng.integers(1, 5)),
        l2_heads=int(rng.integers(0, 9)),
        grid=int(rng.choice((0, 1, 7, 132))),
    )
    plan = fwd_sm90.plan_of(problem, config)
    table = tile_scheduler.schedule(plan)
    codes, taken_tiles = taken(table), []
    assert len(codes) == plan.order.work_tiles and len(table) == plan.order.grid
    for wg in range(config.warpgroups):

        def of_warpgroup(code, wg=wg):
            tile = tile_scheduler.work_tile(KernelContext(plan, ForwardRefs(*[None] * 3)), code)
            return tile.batch, tile.head, tile.row + wg * ROWS

        taken_tiles += zip(
            *(x.tolist() for x in jax.vmap(of_warpgroup)(jnp.asarray(codes))), strict=True
        )
    rows = range(0, problem.q_len, ROWS)
    wanted = np.ndindex(problem.batch, problem.q_heads, len(rows))
    taken_tiles = sorted(x for x in taken_tiles if x[2] < problem.q_len)
    assert taken_tiles == sorted((b, n, i * ROWS) for b, n, i in wanted)


@pytest.mark.parametrize("module", [fwd_sm80, bwd_sm80], ids=["forward", "backward"])
def test_portable(module):
    """A block takes one work tile."""
    problem_of = forward.problem_of if module is fwd_sm80 else backward.problem_of
    for seed in range(6):
        _, problem = drawn_problem(seed, problem_of)
        config = module.Config.default(problem)
        if module is fwd_sm80:
            plan = fwd_sm80.plan_of(problem, config)
            table, count = tile_scheduler.schedule(plan), plan.order.work_tiles
        else:
            plan = bwd_sm80.plan_of(problem, config)
            table, count = work_order.schedule(plan.order), plan.order.work_tiles
        assert (table[:, 0] == 1).all()
        assert len(taken(table)) == len(set(taken(table).tolist())) == count


@pytest.mark.parametrize("seed", range(6))
def test_backward(seed):
    """Each kv tile of each kv head, and of each all query tiles that meet it, wherever the walk
    over them begins.
    """
    rng, problem = drawn_problem(seed, backward.problem_of)
    module = bwd_sm90 if rng.integers(2) else sm90_two_kernels
    config = module.Config(
        block_q=int(rng.choice((64, 128))),
        l2_heads=int(rng.integers(0, 9)),
        grid=int(rng.choice((0, 1, 7, 132))),
    )
    plan = module.plan_of(problem, config)
    codes = taken(work_order.schedule(plan.order))
    ctx = KernelContext(plan, no_arrays(BackwardRefs))
    work = jax.vmap(functools.partial(key_tiles.key_tile, ctx))(jnp.asarray(codes))
    taken_tiles = zip(
        *(np.asarray(x).tolist() for x in (work.batch, work.kv_head, work.key)), strict=True
    )
    tiles = np.ndindex(problem.batch, problem.kv_heads, plan.tiling.kv_tiles)
    assert sorted(taken_tiles) == sorted((b, n, t * plan.tiling.block_kv) for b, n, t in tiles)
    last = key_tiles.key_tile(ctx, jnp.int32(codes[-1]))
    walked = [int(last.q_tiles.tile(jnp.int32(i))) for i in range(int(last.steps))]
    assert sorted(walked) == list(range(int(last.span.lo), int(last.span.hi)))


DOCUMENTS = {
    "alike": np.arange(2**16) // 4096,
    "short": np.arange(2**16) // 1024,
    "mixed": np.searchsorted(np.random.default_rng(0).integers(0, 2**16, 12), np.arange(2**16)),
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("offsets", [(0,), (2**15,), (0, 3 * 2**14), (2**14, 2**15)], ids=str)
def test_documents_in_the_backward_are_dealt_evenly(documents, offsets):
    """One GPU, and two that share a sequence, whose chunks have offsets of their own: each kv tile
    of each head comes once, and no block has 6 % more than the mean.
    """
    ids = np.sort(DOCUMENTS[documents]).astype(np.int32)
    rows, batch = (2**16 if offsets == (0,) else 2**15 // len(offsets)), len(offsets)
    arrays = ("q_offset", "q_segment_ids", "kv_segment_ids")
    sizes = {"q_len": rows, "kv_len": 2**16, "q_heads": 32, "kv_heads": 8, "batch": batch}
    sizes |= {"head_dim": 128, "v_head_dim": 128, "share": batch, "offsets": (offsets,)}
    small = backward.problem_of(forward.case_named("t_equals_s"))
    problem = dataclasses.replace(small, mask=CAUSAL, arrays=arrays, **sizes)
    plan = bwd_sm90.plan_of(problem, bwd_sm90.Config())
    own = jnp.asarray(np.stack([ids[start : start + rows] for start in offsets]))
    fields = {"q_segment_ids": own, "kv_segment_ids": jnp.asarray(np.stack([ids] * batch))}
    sizes = plan.tiling.block_kv, plan.tiling.block_q
    spans = segment_spans.spans_of(problem, None, fields, sizes, of_keys=True)
    refs = no_arrays(BackwardRefs)._replace(
        **fields, segment_spans=spans, q_offset=jnp.asarray(offsets, jnp.int32)
    )
    ctx = KernelContext(plan, refs)
    table = np.asarray(key_tiles.schedule_by_rank(ctx))
    codes = taken(table)
    assert len(codes) == len(set(codes.tolist())) == plan.order.work_tiles

    def uneven(table):
        work = jax.vmap(functools.partial(key_tiles.key_tile, ctx))(jnp.asarray(table).ravel())
        cost = tile_scheduler.TILE_OVERHEAD + problem.group * np.asarray(work.steps)
        there = np.arange(table.shape[1])
        there = (there > 0) & (there <= table[:, :1])
        loads = np.where(there, cost.reshape(table.shape), 0).sum(axis=1)
        return loads.max() / loads.mean()

    assert uneven(table) < 1.06
    assert documents == "mixed" or uneven(work_order.schedule(plan.order)) > 1.06


@pytest.mark.parametrize("seed", range(8))
def test_short_windows(seed):
    """Each kv tile of each head is one block's own, whose walk begins with those before it that
    meet its first queries.
    """
    rng = np.random.default_rng(seed)
    rows, heads = int(rng.integers(1, 6000)), int(rng.integers(1, 40))
    problem = backward.problem_of(backward.windowed(int(rng.integers(1, 130)), 64))
    sizes = {"q_len": rows, "kv_len": rows, "q_heads": heads, "kv_heads": heads}
    problem = dataclasses.replace(problem, **sizes)
    plan = sm90_window.plan_of(problem, sm90_window.Config())
    assert sm90_window.takes(plan.problem)
    blocks = jnp.arange(plan.order.heads * sm90_window.chunks(plan), dtype=jnp.int32)
    walks = jax.vmap(functools.partial(sm90_window._walk, plan))(blocks)
    taken_tiles = []
    for batch, head, begin, end, first in zip(
        *(np.asarray(x).tolist() for x in walks), strict=True
    ):
        taken_tiles += [(batch, head, t) for t in range(begin, end)]
        if begin < end:
            assert first == max(0, begin - (sm90_window.pairs(plan.problem) - 1))
    wanted = np.ndindex(problem.batch, heads, plan.tiling.kv_tiles)
    assert sorted(taken_tiles) == sorted(wanted)


# ---- over caches ---------------------------------------------------------------------------------


def prefill_rows(plan, tiles):
    """(query head, query row) of the consumers' tiles of a unit."""
    for exists, head, left, first in zip(
        tiles.exists, tiles.head, tiles.heads_left, tiles.row, strict=True
    ):
        heads = min(plan.tiles.tile_heads, int(left)) * bool(exists)
        live = min(plan.tiles.head_rows, plan.problem.q_len - int(first))
        yield from ((int(head) + h, int(first) + t) for h, t in np.ndindex(heads, max(live, 0)))


@pytest.mark.parametrize("seed", range(5))
def test_prefill(seed):
    """Each row of each query head; and the splits of its keys, one behind the other, hold all that
    it sees.
    """
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice((1, 2, 3, 7, 8, 12, 16)))
    case = decode_cases.Case(
        lengths=tuple(rng.integers(0, 900, 3).tolist()),
        capacity=904,
        q_len=int(rng.integers(1, 150)),
        kv_heads=kv_heads,
        q_heads=kv_heads * group,
        mask=(CAUSAL, FULL, sliding_window(100))[seed % 3],
    )
    config = prefill.Config(
        warpgroups=int(rng.integers(1, 4)), block_kv=64, splits=int(rng.integers(1, 6))
    )
    grid, together = (int(rng.integers(1, most)) for most in (140, 5))
    config = dataclasses.replace(config, grid=grid, together=together)
    plan = prefill.plan_of(case.problem, config)
    refs = no_arrays(prefill_plan.PrefillRefs)._replace(
        lengths=jnp.asarray(case.lengths, jnp.int32)
    )
    ctx = KernelContext(plan, refs, None)

    def of_block(block):
        own, turns = plan.queries.units_of(ctx, block), jnp.arange(plan.units // plan.grid + 2)
        return own.number(turns), turns < own.count

    taken, there = map(np.asarray, jax.vmap(of_block)(jnp.arange(plan.grid, dtype=jnp.int32)))
    assert sorted(taken[there]) == list(range(plan.units))
    of_unit = functools.partial(plan.queries.unit_of, ctx, None)
    units = jax.vmap(of_unit)(jnp.arange(plan.units, dtype=jnp.int32))
    of_tile = functools.partial(wg_tile_of, plan)
    wgs = jnp.arange(config.warpgroups, dtype=jnp.int32)
    tiles = jax.vmap(lambda unit: jax.vmap(lambda wg: of_tile(unit, wg))(wgs))(units)
    units, tiles = jax.tree.map(np.asarray, (units, tiles))
    split_keys, rows = {}, []
    for n in range(plan.units):
        key = int(units.m[n]), int(units.kv_head[n]), int(units.q_tile[n])
        span = range(int(units.span.lo[n]), int(units.span.hi[n]))
        split_keys.setdefault(key, {})[int(units.split[n])] = span
        if units.split[n] == 0:
            own = type(tiles)(*(x[n] for x in tiles))
            rows += [(key[0], *row) for row in prefill_rows(plan, own)]
    assert sorted(rows) == sorted(np.ndindex(3, case.q_heads, case.q_len))
    for (m, _, q_tile), splits in split_keys.items():
        assert sorted(splits) == list(range(config.splits))
        taken_tiles = [t for split in range(config.splits) for t in splits[split]]
        assert taken_tiles == sorted(set(taken_tiles))  # one behind the other
        first = q_tile * config.warpgroups // plan.tiles.head_chunks * plan.tiles.head_rows
        end = min((q_tile + 1) * config.warpgroups, plan.tiles.wg_tiles) - 1
        end = min((end // plan.tiles.head_chunks + 1) * plan.tiles.head_rows, case.q_len)
        length = case.lengths[m]
        seen = case.mask.dense(end - first, length, q_offset=length - case.q_len + first)
        assert set(np.flatnonzero(seen.any(axis=0)) // 64) <= set(taken_tiles)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_shared_parts(seed, paired):
    """Each kv tile of each q tile of each part once, in partials of different numbers, which are
    those that `merge_parts` reads; no block has much more than another. In pairs of blocks, where
    each part has an even number of q tiles.
    """
    rng = np.random.default_rng(seed)
    parts, kv_heads, group = 11, int(rng.integers(1, 4)), int(rng.choice((1, 4, 7, 12)))
    case = decode_cases.Case(
        kind="paged", lengths=(0,) * parts, capacity=904, page_size=8,
        kv_heads=kv_heads, q_heads=kv_heads * group, mask=FULL,
    )  # fmt: skip
    grid = int(rng.choice((40, 132) if paired else (1, 7, 40, 132)))
    config = prefill.Config(int(rng.integers(1, 4)), 64, grid=grid)
    tiles_of = prefill.plan_of(case.problem, config).tiles.q_tiles_of
    sizes = [n for n in range(2, 80) if not (paired and tiles_of(n) % 2)]
    counts = rng.choice(sizes, parts) * (rng.random(parts) < 0.7) * (seed < 3)
    lengths = rng.integers(-5, 900, parts)
    tokens = int(counts.sum()) + 5
    merged = {"tokens": tokens, "q_len": tokens, "merged": (1, tokens, 1)}
    plan = prefill.plan_of(dataclasses.replace(case.problem, **merged), config)
    starts = np.cumsum([0, *counts])
    q_tiles = np.array([plan.tiles.q_tiles_of(int(n)) for n in counts])
    kv_tiles = -(-np.maximum(lengths, 1) // 64)
    before = [np.cumsum([0, *x]) for x in (q_tiles, q_tiles * kv_tiles)]
    pair = int(plan.grid >= shares.PAIRED_FROM and not (q_tiles % 2).any())
    assert pair == paired or seed == 3
    dealing = shares.Dealing(plan.grid >> pair, pair, int(q_tiles.max() <= 1 + pair))
    sums = shares.Sums(*(jnp.asarray(x, jnp.int32) for x in (*before, dealing)))
    refs = no_arrays(prefill_plan.PrefillRefs)._replace(
        lengths=jnp.asarray(lengths, jnp.int32), starts=jnp.asarray(starts, jnp.int32)
    )
    ctx = KernelContext(plan, refs, types.SimpleNamespace(tables=sums))
    grid = plan.grid

    @jax.jit
    def of_blocks(blocks):
        share = jax.vmap(functools.partial(shares.share_of, ctx))(blocks)

        def unit(n, share):
            units = Units(share.q_tile, 1 << pair, share.units, share=share)
            return shared_parts.unit_of(ctx, units, units.number(n))

        numbers = jnp.arange(int(q_tiles.sum()) * kv_heads + 1, dtype=jnp.int32)
        return share, jax.vmap(
            lambda block_share: jax.vmap(lambda n: unit(n, block_share))(numbers)
        )(share)

    share, units = jax.tree.map(np.asarray, of_blocks(jnp.arange(grid, dtype=jnp.int32)))
    taken_tiles, partials = [], {}
    for block, number in ((b, n) for b in range(grid) for n in range(share.units[b])):
        unit_here = jax.tree.map(lambda x: x[block, number], (units.m, units.kv_head, units.q_tile))  # noqa: B023
        line = int(units.line[block, number])
        assert line not in partials and line < shared_parts.most_q_tiles(plan) + plan.grid
        partials[line] = (tuple(map(int, unit_here)), block)
        lo, hi = units.span.lo[block, number], units.span.hi[block, number]
        taken_tiles += [(*map(int, unit_here), t) for t in range(lo, hi)]
    assert sorted(taken_tiles) == sorted(
        (m, head, q, t)
        for m in range(parts)
        for head, q, t in np.ndindex(kv_heads, q_tiles[m], -(-max(lengths[m], 0) // 64))
    )
    steps = share.end - share.first
    assert steps.sum() == kv_heads * before[1][-1]
    assert not steps.any() or np.ptp(steps[steps > 0]) <= 1
    thread = types.SimpleNamespace(select=np.where, maximum=np.maximum)
    blocks = grid
    all_q_tiles, total = ((x[-1] * kv_heads) >> pair for x in before)
    if total:
        blocks = shares.blocks_of(dealing, all_q_tiles, total)
    each, more = divmod(total, blocks)
    every = [(m, *x) for m in range(parts) for x in np.ndindex(kv_heads, q_tiles[m])]
    for m, head, q in every:
        number = head * q_tiles[m] + q
        begin = ((before[1][m] * kv_heads) >> pair) + (number >> pair) * kv_tiles[m]
        first, last = (
            int(merge_parts._block_of(thread, x, max(each, 1), more))
            for x in (begin, begin + kv_tiles[m] - 1)
        )
        line, of_pair = int(before[0][m] * kv_heads + number), number & pair
        own = (m, head, q_tiles[m] - 1 - q)
        read = {partials.get(line + (n << pair)) for n in range(first, last + 1)}
        assert read == {(own, (n << pair) + of_pair) for n in range(first, last + 1)}


LATENT = {
    "sm90": (sm90_plan.plan_of, mla_sm90.Config, 70),
    "few_rows": (sm90_few_rows.plan_of, mla_sm90.Config, 8),
    "portable": (mla_sm80.plan_of, mla_sm80.Config, 70),
}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", LATENT)
def test_latent(name, batch_invariant):
    """Each kv tile of each chunk of query rows of each sequence, by the scheduler's groups of
    blocks and their members.
    """
    make, config, heads = LATENT[name]
    rng = np.random.default_rng(heads)
    lengths = tuple(rng.integers(0, 640, 5).tolist())
    case = test_decode_mla.Case(
        lengths=lengths, capacity=640, q_heads=heads, q_len=2, batch_invariant=batch_invariant
    )
    plan = make(case.problem, config(grid=13, split_tiles=2))
    groups = sm90_plan.groups_of(plan) if name == "sm90" else plan
    units = [groups.keys.units_of(case.mask, n, 2) for n in lengths]
    (size,) = scheduler.table_scratch(groups).sums.shape
    sums = np.full(size, sum(units), np.int32)
    sums[: len(units)] = np.cumsum([0, *units[:-1]])
    filled = np.zeros(size, np.int32)
    filled[: len(lengths)] = lengths
    table = scheduler.Table(jnp.asarray(sums), jnp.asarray(filled), None)

    @jax.jit
    def work_of(group, unit, m):
        share = scheduler.share_of(groups, table, group)
        unit = jnp.where(unit < 0, share.first, unit)
        m = jnp.where(m < 0, scheduler.begin(groups, table, share)[1], m)
        return share.end, scheduler.work_at(groups, table, share, unit, m)

    taken_tiles = []
    for block in range(plan.grid):
        group, number, neighbours = block, 0, 1
        if name == "sm90":
            group, number = (int(x) for x in sm90_plan.member_of(plan, jnp.int32(block)))
            neighbours = sm90_plan.neighbours(plan)
        unit = m = -1
        while True:
            end, work = work_of(group, unit, m)
            if unit >= end or work.first_unit >= end:
                break
            head = int(work.head) * neighbours + number
            taken_tiles += [
                (int(work.sequence), head, t) for t in range(int(work.tile), int(work.end))
            ]
            unit, m = int(work.next_unit), int(work.sequence)
    tiles = [max(1, -(-n // plan.keys.tile)) for n in lengths]
    assert sorted(taken_tiles) == sorted(
        (m, head, t)
        for m, count in enumerate(tiles)
        for head, t in np.ndindex(plan.queries.chunks, count)
    )


@pytest.mark.parametrize("seed", range(6))
def test_append(seed):
    """Each word of each new row that a sequence takes, by all blocks of a launch."""
    rng = np.random.default_rng(seed)
    heads, dim, new_rows = (int(rng.integers(1, n)) for n in (5, 9, 40))
    capacity, rows = new_rows + 10, int(rng.integers(0, new_rows + 1))
    problem = dataclasses.replace(
        test_append_kernel.support._BASE["append"],
        kind="stacked",
        sequences=3,
        capacities=(capacity,) * 3,
        new_rows=new_rows,
        kv_heads=heads,
        head_dim=8 * dim,
        v_head_dim=8 * int(rng.integers(1, 9)),
        layers=None,
    )
    plan = append_plan.Plan.of(problem, ("k", "v"), append_copy.Config().words)
    refs = append_plan.AppendRefs(("k", "v"), (("k cache", "v cache"),), "end", *[None] * 5)
    ledger = test_append_kernel.Ledger(0)
    for sequence, chunk in np.ndindex(3, plan.chunks):
        scalars = (np.full(128, n, np.int32) for n in (sequence, chunk, 7, rows))
        at = append_plan.At(*scalars, None, None)
        append_copy._append(ThreadContext(BlockOfThreads(0, ledger), refs, at, plan))
    for side, words in zip("kv", plan.row_words, strict=True):
        stored = sorted(place for ref, place, _ in ledger.stored if ref == f"{side} cache")
        m, head, row, column = np.ogrid[:3, :heads, 7 : 7 + rows, :words]
        wanted = ((m * heads + head) * capacity + row) * words + column
        assert stored == sorted(wanted.ravel().tolist())


@pytest.mark.by_xla  # single operations, which are compiled once
@pytest.mark.parametrize("seed", range(6))
def test_linear(seed):
    """Each part of each column of the result; its steps hold all columns of the weight."""
    rng = np.random.default_rng(seed)
    out, inner = (64 * int(n) for n in rng.integers(1, 60, 2))
    problem = linear.Problem(8, out, inner, "bfloat16", "bfloat16", bool(seed % 2))
    plan = linear.Plan(problem, linear.Config.default(problem))
    config, taken_tiles = plan.config, []
    for block in range(min(config.grid, plan.tiles * config.splits)):
        for n in range(int(linear._units(plan, jnp.int32(block)))):
            taken_tiles.append(
                tuple(int(x) for x in linear._unit(plan, jnp.int32(block), jnp.int32(n)))
            )
    assert sorted(taken_tiles) == [
        (i * plan.width, split) for i in range(plan.tiles) for split in range(config.splits)
    ]
    assert plan.tiles * plan.width >= out and plan.steps * config.splits * config.block_in >= inner
