"""Attention of many new rows to a KV cache, for Hopper: chunked prefill and speculative decoding.

The mainloop is the dense forward's (`flash_fwd.sm90.mainloop`): wgmma, with the softmax of one kv
tile under the value matmul of the one before. What differs is where tiles come from and which rows
they hold. Rows of a q tile are pairs of query heads and query rows that share a kv head (`plan`),
so K and V are read once for the whole head group. K and V come by TMA from the cache as it lies:
one copy a kv tile, or one a page of it.

Grid: persistent blocks, `warpgroups` consumers of 64 rows each and one producer. A work unit is a q
tile and one of `splits` ranges of the kv tiles that it sees; the number of units is known
statically, where they begin and end is known from the lengths. Block i takes units i, i + blocks,
and so on: q tiles of one kv head run side by side and read K and V from L2. Where blocks have few
units each and L2 holds K and V of a whole sequence, units are taken from all its kv heads, the
longest first, and blocks count from both ends in turn, so that none has long ones only. With one
split the block writes the result. With more it writes a partial (accumulator, row max, row sum),
and `combine_shares` merges them.

Shared memory, and who owns it when:
  q [warpgroup]   the consumer's own: it loads its rows, where there are two slots those of the next
                  unit before it computes this one
  k, v [stages]   the dense forward's ring: entry e of a unit holds its e-th kv tile from the end
                  and the value tile before it; `ready` when all copies have landed, `free` when
                  every consumer has released it
  out [warpgroup] a slice of columns at a time on its way to global memory

Where blocks of the launch decode the rows of the sequences' own (`shares`), they have other buffers
in place of q, k and v, and their first warpgroup alone works. Such a kernel is lowered by lanes, as
decode's is.

A kv tile that the length cuts holds rows that do not exist. Scores of such keys are masked. For the
values the producer waits, puts zeros in their place and only then says that the entry is ready.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, functions, softmax, tma_operands
from pallas_attn.kernels.attention.plan import L2_BYTES, ROWS, Context
from pallas_attn.kernels.attention.score_mod import Rows
from pallas_attn.kernels.decode import combine_splits as decode_combine
from pallas_attn.kernels.decode import producer, scheduler
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.flash_fwd.producer import Ring
from pallas_attn.kernels.flash_fwd.sm90 import SMEM_LIMIT, Result, mainloop, no_keys
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.mma import packed_rows
from pallas_attn.kernels.prefill import (
    combine_shares,
    merge_parts,
    narrow_producer,
    shares,
    tile_count,
)
from pallas_attn.kernels.prefill.memory import Refs, bytes_of, scratch, smem_bytes
from pallas_attn.kernels.prefill.plan import BLOCKS, Plan
from pallas_attn.kernels.prefill.units import Unit, WgTile, place_of, unit_of, wg_tile_of

# Of a thread, by consumer warpgroups: (consumer, producer). A producer that looks up pages, or
# chooses between arrays, needs more.
REGISTERS = {1: (240, 32), 2: (232, 40), 3: (160, 32)}
REGISTERS_OF_TABLES = {1: (240, 64), 2: (224, 56), 3: (152, 56)}
MOST_SPLITS = 32  # a lane of `combine_shares` has one
MOST_ARRAYS = 32  # separate caches: each takes two tensor maps, which compile slowly
MERGES = True  # takes `DecodeProblem.merged`
FEW_UNITS = 12  # of a block: where it has more, long ones and short ones even out
FEW_OF_ONE = 4  # the same where packed rows may be those of one sequence
UNEVEN = 8  # new rows are one in so many, or more: below, all q tiles see nearly as many keys
FEW_ROWS = 16  # rows of a kv head up to which decoding by mma.sync is faster


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 2  # consumers
    block_kv: int = 128  # keys of a kv tile
    stages: int = 2  # entries of the ring of K and V
    q_slots: int = 2  # q tiles of a consumer; 2: the next unit's is loaded early
    splits: int = 1  # ranges that the kv tiles of a q tile are split into
    grid: int = BLOCKS  # persistent blocks
    together: int = 1  # kv heads whose q tiles are taken in turn, the longest first
    exp_before_wait: int = 0  # as in the dense forward
    in_turn: bool = False  # whether two consumers issue their matmuls in turn

    def __post_init__(self):
        check(
            self,
            warpgroups=(self.warpgroups in (1, 2, 3), "1, 2 or 3"),
            block_kv=(self.block_kv in (64, 128), "64 or 128"),
            stages=(self.stages >= 2, "at least 2"),
            q_slots=(self.q_slots in (1, 2), "1 or 2"),
            splits=(1 <= self.splits <= MOST_SPLITS, f"1 to {MOST_SPLITS}"),
            grid=(self.grid >= 1, "at least 1"),
            together=(self.together >= 1, "at least 1"),
            exp_before_wait=(self.exp_before_wait in (0, 1, 2, 3, 4), "0 to 4"),
            in_turn=(not self.in_turn or self.warpgroups == 2, "False but for two consumers"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """The number of consumers and of splits that should take the least time where all sequences
        are full, and as many stages as there is room for.
        """
        if problem.merged is not None:
            return _of_shares(problem)
        alike = problem
        if problem.tokens is not None:  # few others change much
            alike = cache_layout.of_one_sequence(problem)
        most = 1 if problem.packed and scheduler.of_single_rows(problem) else MOST_SPLITS
        found = fastest(functools.partial(Plan.of, alike), max(problem.capacities), most)
        return dataclasses.replace(found, together=_together(Plan.of(problem, found)))


def _together(plan: Plan) -> int:
    """All kv heads of a sequence where their q tiles see unequally many keys, blocks have a few
    units each, and K and V of so many heads leave half of L2 to others; else 1. Packed rows are
    taken for those of one sequence where they are few, else for as many of each.
    """
    problem, grid = plan.problem, plan.config.grid
    units, rows, most = plan.units, problem.q_len, FEW_UNITS * grid
    if plan.packed:
        units = problem.kv_heads * plan.q_tiles * plan.config.splits
        if units > FEW_OF_ONE * grid:
            rows, most = rows // problem.batch, units
    if plan.q_tiles == 1 or not grid < units <= most:
        return 1
    row = (problem.head_dim + problem.v_head_dim) * jnp.dtype(problem.dtype).itemsize
    small = problem.kv_heads * problem.kv_len * row <= L2_BYTES
    causal = problem.mask.bounds_right and not problem.mask.bounds_left
    return problem.kv_heads if small and causal and rows * UNEVEN >= problem.kv_len else 1


def _of_shares(problem: DecodeProblem) -> Config:
    """Where blocks share out kv tiles: consumers for the rows that a level has at most."""
    assert problem.merged is not None
    _, sequences, tokens = problem.merged
    rows = sequences * tokens * problem.q_heads // problem.kv_heads
    dim = max(problem.head_dim, problem.v_head_dim)
    config = _in_turn(Config(1 if rows <= ROWS else 2, 128 if dim <= 128 else 64, q_slots=1))
    deeper = (dataclasses.replace(config, stages=n) for n in range(6, 1, -1))
    return next((one for one in deeper if smem_bytes(problem, one) <= SMEM_LIMIT), config)


def fastest(plan_of: Callable[[Config], Plan], keys: int, most_splits: int = MOST_SPLITS) -> Config:
    """The configuration that should take the least time where query rows see so many keys."""
    problem = plan_of(Config()).problem
    dim = max(problem.head_dim, problem.v_head_dim)
    choices = [
        Config(1, 128 if dim <= 128 else 64, q_slots=1),
        Config(2, 128 if dim <= 128 else 64),
    ]
    if dim <= 128:
        choices.append(Config(3, 128 if dim <= 64 else 64))
    splits = [
        dataclasses.replace(config, splits=n)
        for config in choices
        for n in range(1, 1 + min(most_splits, pl.cdiv(keys, 128)))
    ]

    def fits(config: Config) -> bool:
        return bytes_of(plan_of(config)) <= SMEM_LIMIT

    config = min(splits, key=lambda config: cost(plan_of(config), keys))
    fewer = (dataclasses.replace(config, q_slots=n) for n in (config.q_slots, 1))
    config = next((one for one in fewer if fits(one)), config)
    deeper = (dataclasses.replace(config, stages=n) for n in range(6, 1, -1))
    config = next((one for one in deeper if fits(one)), config)
    return _in_turn(config)


def _in_turn(config: Config) -> Config:
    """Two consumers that begin at the same moment may stay in step to the end: both compute their
    softmax at once, while no tensor core has work. Which launches do changes from one machine and
    cache to the next. Three consumers do not fall in step, and where keys are split all wait for
    memory.
    """
    return dataclasses.replace(config, in_turn=config.warpgroups == 2 and config.splits == 1)


def cost(plan: Plan, keys: int) -> float:
    """An estimate of the time, in multiples of what a kv tile of 128 keys takes one consumer of
    several. Three consumers are faster a row than two, as measured on an H200; a single one has
    nobody to compute while it waits. A unit costs a tile and a half more than it has tiles, a
    launch of `combine_shares` three, and partials what it takes to read them once.
    """
    config = plan.config
    waves, tiles = pl.cdiv(plan.units, config.grid), pl.cdiv(keys, 128)
    speed = {1: 0.75, 2: 1.0, 3: 1.08}[config.warpgroups]
    estimate = waves * config.warpgroups / speed * (pl.cdiv(tiles, config.splits) + 1.5)
    if config.splits > 1:
        estimate += 3 + config.splits * plan.rows * plan.v_width * 4 / 2**21
    return estimate


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.dtype not in ("bfloat16", "float16") or problem.cache_dtype != problem.dtype:
        return Limit(
            f"{problem.dtype} queries over a {problem.cache_dtype} cache; it takes bfloat16 or "
            "float16 for both",
            "leave implementation=None",
        )
    if problem.own is not None and (refused := _own_limit(problem)) is not None:
        return refused
    if problem.shared_kv or problem.batch_invariant:
        return Limit("it takes no latent cache and no batch_invariant", "leave implementation=None")
    group = problem.q_heads // problem.kv_heads
    few = problem.merged is None
    if few and problem.packed and scheduler.by_rows(problem)[1] is None:
        return Limit("few packed rows are decoded in one launch", "leave implementation=None")
    if not problem.packed and problem.q_len * group <= FEW_ROWS:
        return Limit("few query rows are faster without it", "leave implementation=None")
    if (refused := tma_operands.dims_limit(problem)) is not None:
        return refused
    for name, dim in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if tma_operands.width_in_tma(dim) != dim:
            return Limit(
                f"{name} is {dim}: TMA wants a multiple of 16", "leave implementation=None"
            )
    if cache_layout.layout_of(problem).separate and problem.sequences > MOST_ARRAYS:
        return Limit(
            f"{problem.sequences} separate caches; it takes up to {MOST_ARRAYS}",
            "leave implementation=None",
        )
    sizes = problem.capacities if problem.page_size is None else (problem.page_size,)
    block = 128 if max(problem.head_dim, problem.v_head_dim) <= 128 else 64
    if problem.page_size is not None and (
        problem.page_size % 8 or (block % problem.page_size and problem.page_size % block)
    ):
        return Limit(
            f"pages of {problem.page_size} rows; it takes 8, 16, 32, .. and multiples of 128",
            "leave implementation=None",
        )
    if any(tma_operands.rows_in_tma(size) != size for size in sizes):
        return Limit("TMA wants capacities that are a multiple of 8", "leave implementation=None")
    if max(problem.capacities) >= 2**30 or min(problem.capacities) == 0 or problem.pages == 0:
        return Limit("it wants caches of 1 to 2**30 rows", "leave implementation=None")
    return None


def _own_limit(problem: DecodeProblem) -> Limit | None:
    """Why other blocks of the launch cannot decode the rows of the sequences' own, or None."""
    own, other = problem.own, "leave implementation=None"
    assert own is not None
    if own.quantized or own.q_len * own.q_heads > FEW_ROWS * own.kv_heads:
        return Limit(
            "rows of a quantised cache, or many query rows, have a launch of their own", other
        )
    if (refused := decode_sm90.limit(own)) is not None:
        return refused
    config = _of_shares(problem)
    if Plan.of(problem, config).own is None or smem_bytes(problem, config) > SMEM_LIMIT:
        return Limit("what decodes own rows does not fit in shared memory", other)
    return None


# ---- producer: one warpgroup, which loads K and V -----------------------------------------------


class Target(NamedTuple):
    """What is copied, where to, and which barrier counts the copies."""

    arrays: tuple[Any, ...]  # K or V
    to: Any  # [block_kv, columns] of shared memory
    landed: Any


def _produce(ctx: Context, block_id: Any) -> None:
    """K and V of every unit of the block, in the order in which consumers use them."""
    plan, refs, smem = ctx
    stages, block, ring = plan.config.stages, plan.config.block_kv, Ring.of(ctx)
    units = tile_count.units_of(ctx, block_id)

    def one_unit(i, count):
        unit = unit_of(ctx, units.number(i), units.share)
        tiles = unit.span.hi - unit.span.lo

        def entry(e, count):
            slot, t = lax.rem(count, jnp.int32(stages)), unit.span.hi - 1 - e
            pl.when(count >= stages)(lambda: ring.wait_released(slot))
            ready = ring.ready.at[slot]
            nothing = functools.partial(_arrive, ready, plan.copies)
            keys = Target(refs.k, smem.k.at[slot], ready)
            pl.when(e < tiles)(lambda: _copy_tile(ctx, unit, keys, t))
            pl.when(e == tiles)(nothing)
            values = Target(refs.v, smem.v.at[slot], ready)
            if plan.has("kv_lengths"):
                cut = (e == 1) & ((t + 2) * block > unit.tile.kv_len)
                pl.when((e > 0) & ~cut)(lambda: _copy_tile(ctx, unit, values, t + 1))
                pl.when(cut)(lambda: _copy_cut_values(ctx, unit, values, t + 1))
            else:
                pl.when(e > 0)(lambda: _copy_tile(ctx, unit, values, t + 1))
            pl.when(e == 0)(nothing)
            return count + 1

        return lax.fori_loop(0, jnp.where(tiles > 0, tiles + 1, 0), entry, count)

    lax.fori_loop(0, units.count, one_unit, jnp.int32(0))


def _arrive(barrier: Any, times: int) -> None:
    def one(_, carry):
        plgpu.barrier_arrive(barrier)
        return carry

    lax.fori_loop(0, times, one, None)


def _copy_tile(ctx: Context, unit: Unit, target: Target, t: Any) -> None:
    """Asks for kv tile t of K or of V. A page of which no row exists is not read."""
    plan, layout = ctx.plan, ctx.plan.layout
    first, layer = t * plan.config.block_kv, None
    if plan.cache is not None and plan.cache.layers is not None:
        layer = jnp.clip(ctx.refs.layer[0], 0, plan.cache.layers - 1)
    row = cache_layout.Row(unit.m, unit.kv_head, first, layer)

    def copy(array, row, to):
        columns = mosaic.columns(array, 0, to.shape[-1], row.position)
        source = array.at[*layout.rows_from(row, to.shape[0]), columns]
        plgpu.copy_gmem_to_smem(source, to, target.landed)

    if layout.separate:
        copies = [functools.partial(copy, array, row, target.to) for array in target.arrays]
        lax.switch(unit.m, copies)
    elif isinstance(layout, cache_layout.Paged):
        _copy_pages(ctx, unit, target, row, copy)
    else:
        copy(target.arrays[0], row, target.to)


def _copy_pages(ctx: Context, unit: Unit, target: Target, row: Any, copy: Any) -> None:
    """A kv tile, page by page, which the producer's warps share out: a copy costs each warp that
    asks for it some 45 instructions and an arrival of every thread.
    """
    plan, layout, size = ctx.plan, ctx.plan.layout, ctx.plan.page_rows
    last = jnp.maximum(unit.tile.kv_len - 1, 0)

    @pl.kernel(out_type=(), mesh=plgpu.WarpMesh(axis_name="warp"))
    def copies():
        warp = lax.axis_index("warp")
        numbers = [warp + n for n in range(0, plan.copies, threads.WARPS)]
        starts = [row.position + n * size for n in numbers]
        entries = [layout.entry(jnp.clip(start, 0, last)) for start in starts]
        pages = [ctx.refs.page_table[unit.m, entry] for entry in entries]
        for n, start, page in zip(numbers, starts, pages, strict=True):
            page = jnp.where(layout.lacks_page(page), 0, page)  # any: the result will be NaN
            to = target.to.at[pl.ds(n * size, size)]
            one = row._replace(position=start, page=page)

            @pl.when(n < plan.copies)
            def _(start=start, one=one, to=to):
                length, nothing = unit.tile.kv_len, plgpu.barrier_arrive
                pl.when(start < length)(functools.partial(copy, target.arrays[0], one, to))
                pl.when(start >= length)(functools.partial(nothing, target.landed))

    copies()


def _copy_cut_values(ctx: Context, unit: Unit, target: Target, t: Any) -> None:
    """`_copy_tile` of the value tile that the length cuts, with zeros in place of rows past it:
    whatever lies there, NaN too, has a probability of 0.
    """
    plan, landed = ctx.plan, ctx.smem.landed
    _copy_tile(ctx, unit, target._replace(landed=landed), t)
    plgpu.barrier_wait(landed)
    wide = plan.v_swizzle // 2
    for row in range(0, plan.config.block_kv, ROWS):
        live = unit.tile.kv_len - t * plan.config.block_kv - row
        for column in range(0, plan.v_width, wide):
            part = target.to.at[pl.ds(row, ROWS), pl.ds(column, wide)]
            inside = mosaic.positions((ROWS, wide), 0, 0) < live
            part[...] = jnp.where(inside, plgpu.load(part, layout=mosaic.TILE), 0)
    plgpu.commit_smem()
    _arrive(target.landed, plan.copies)


# ---- consumers ----------------------------------------------------------------------------------


class _Pages(NamedTuple):
    """What `_find_lost` reads, and what it writes."""

    table: Any
    lost: Any  # `Smem.lost`


class _Needed(NamedTuple):
    """The pages that a unit needs: the first so many of its sequence."""

    m: Any
    wg: Any
    pages: Any


def _find_lost(ctx: ThreadContext) -> None:
    """lost[wg] becomes 1 where one of the needed pages is missing, else 0."""
    thread, (table, lost), (m, wg, pages), plan = ctx
    thread.shared_store(lost, wg, thread.index * 0, thread.index < 1)
    thread.sync()
    plan.layout.note_missing(thread, table, m, pages, (lost, wg))
    thread.sync()


def _is_lost(ctx: Context, unit: Unit, wg: Any) -> Any:
    """Whether the unit's sequence has no valid result, which is NaN then."""
    plan, refs, smem = ctx
    if not isinstance(layout := plan.layout, cache_layout.Paged):
        return unit.bad
    pages = layout.entry(unit.tile.kv_len + (layout.page_size - 1))
    refs, needed = _Pages(refs.page_table, smem.lost), _Needed(unit.m, wg, pages)
    threads.each_thread(mosaic.in_context(_find_lost, plan), refs, needed)
    return unit.bad | (smem.lost[wg] == 1)


class Turns(NamedTuple):
    """How two consumers that have as many steps issue their matmuls in turn: while one computes its
    softmax, the tensor cores have the other's matmuls. Barrier n completes when consumer n may
    issue those of its next step; the first consumer begins.
    """

    barriers: Any
    wg: Any

    def begin(self) -> None:
        """What is done once, before all steps of a launch."""
        pl.when(self.wg == 1)(self.give)

    def take(self) -> None:
        plgpu.barrier_wait(self.barriers.at[self.wg])

    def give(self) -> None:
        plgpu.barrier_arrive(self.barriers.at[1 - self.wg])


def _load_q(ctx: Context, unit: Unit, wg: Any, slot: Any) -> None:
    """The rows of a consumer: of each of its query heads, so many query rows."""
    plan, refs, smem = ctx
    own, rows = wg_tile_of(plan, unit, wg), plan.head_rows
    if plan.packed:
        packed_rows.load(refs.q, smem.q, slot, place_of(plan, unit, own), plan, refs.rows)
        return
    for n in range(plan.tile_heads):
        head = jnp.minimum(own.head + n, plan.problem.q_heads - 1)
        columns = mosaic.columns(refs.q, 0, plan.k_width, head)
        source = refs.q.at[unit.m, pl.ds(own.row, rows), head, columns]
        to = smem.q.at[slot, pl.ds(n * rows, rows)]
        plgpu.copy_gmem_to_smem(source, to, smem.q_ready.at[slot])


def _consume(ctx: Context, block_id: Any, wg: Any) -> None:
    """A consumer warpgroup: every unit of its block."""
    plan, smem = ctx.plan, ctx.smem
    config, units = plan.config, tile_count.units_of(ctx, block_id)

    def q_slot(i):
        return wg if config.q_slots == 1 else wg + (i & 1) * config.warpgroups

    def load_q(i):
        last = tile_count.all_units(ctx) - 1
        last = jnp.maximum(last, 0) if plan.packed else last
        unit = unit_of(ctx, jnp.minimum(units.number(i), last), units.share)
        if plan.packed or (config.splits > 1 and config.q_slots > 1):
            # So that all warps have read what lies there. Elsewhere they meet where a result is
            # stored, or before the only slot is loaded again.
            plgpu.commit_smem()
        if plan.packed:  # also where there is none: groups of copies are counted
            none = jnp.where(i < units.count, unit.count, 0)
            _load_q(ctx, unit._replace(count=none), wg, q_slot(i))
            return
        pl.when(i < units.count)(lambda: _load_q(ctx, unit, wg, q_slot(i)))

    load_q(jnp.int32(0))
    turns = Turns(smem.turns, wg) if config.in_turn else None
    if turns is not None:
        turns.begin()

    def one_unit(i, slot):
        unit = unit_of(ctx, units.number(i), units.share)
        own, lost = wg_tile_of(plan, unit, wg), _is_lost(ctx, unit, wg)
        if config.q_slots > 1:
            load_q(i + 1)
        q = q_slot(i)
        if plan.packed:
            packed_rows.wait(config.q_slots - 1)
        else:
            plgpu.barrier_wait(smem.q_ready.at[q])
        rows = Rows(unit.tile._replace(head=own.head), own.row, wg, unit.span, q)

        def some(slot):
            state, slot = mainloop(ctx, rows, slot, None, turns)
            return Result(state.acc, state.row_sum, state.row_max), slot

        result, slot = lax.cond(
            unit.span.hi > unit.span.lo, some, lambda slot: (no_keys(plan), slot), slot
        )
        if config.q_slots == 1:
            plgpu.commit_smem()  # by now all warps have read it, and TMA will write there
            load_q(i + 1)
        if plan.has("q_lengths"):
            result = _live_rows(plan, unit, own, result)
        whole = _store_packed if plan.packed else _store
        epilogue = _store_partial if config.splits > 1 or plan.merged else whole
        end = Ending(unit, own, wg, jnp.where(lost, jnp.nan, 0.0))
        pl.when(own.there)(lambda: epilogue(ctx, end, result))
        return slot

    lax.fori_loop(0, units.count, one_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


# ---- epilogue -----------------------------------------------------------------------------------


class Ending(NamedTuple):
    """Whose result is stored."""

    unit: Unit
    own: WgTile
    wg: Any
    spoil: Any  # NaN where the sequence is lost, else 0: is added to what is stored


def _live_rows(plan: Plan, unit: Unit, own: WgTile, result: Result) -> Result:
    """The result, where rows that do not count, which may be NaN, see no key."""
    live, none = plan.row_positions(ROWS, own.row) < unit.tile.q_len, no_keys(plan)

    def chosen(some, nothing):
        inside = live if some.ndim == 1 else mosaic.broadcast_rows(live, some.shape)
        return jnp.where(inside, some, nothing)

    return Result(*(chosen(*both) for both in zip(result, none, strict=True)))


def _store_partial(ctx: Context, end: Ending, result: Result) -> None:
    """The accumulator, the row max and the row sum, for `combine_shares`."""
    accs, row_maxes, row_sums = ctx.refs.results[:3]
    head = 0 if ctx.plan.merged else end.unit.kv_head
    if not ctx.plan.packed:
        head = head + end.unit.m * ctx.plan.problem.kv_heads
    at = (end.unit.split, head, end.own.number)
    mosaic.store(accs.at[at], result.acc)
    mosaic.store(row_maxes.at[at], result.row_max)
    mosaic.store(row_sums.at[at], result.row_sum.sum(axis=1) + end.spoil)


def _row_sinks(ctx: Context, own: WgTile) -> Any:
    """float32[64]: the sink of each row's query head."""
    plan, sinks = ctx.plan, ctx.refs.sinks
    rows = mosaic.filled((ROWS,), plan.head_rows, jnp.int32)
    head, found = lax.div(mosaic.positions((ROWS,), 0, 0), rows), mosaic.filled((ROWS,), 0.0)
    for n in range(plan.tile_heads):
        sink = sinks[jnp.minimum(own.head + n, plan.problem.q_heads - 1)]
        found = jnp.where(head == n, mosaic.broadcast_scalar(sink, (ROWS,)), found)
    return found


def _store_packed(ctx: Context, end: Ending, result: Result) -> None:
    """`_store` of packed rows, which may begin anywhere."""
    plan, (out, lse_of_rows) = ctx.plan, ctx.refs.results
    place = place_of(plan, end.unit, end.own)
    sink = None if ctx.refs.sinks is None else _row_sinks(ctx, end.own)
    factor, lse = softmax.finish(result.row_max, result.row_sum, sink)
    packed_rows.store_numbers(lse + end.spoil, lse_of_rows, place, plan)
    acc = result.acc * mosaic.broadcast_rows(factor + end.spoil, result.acc.shape)
    width = plan.v_swizzle // 2
    for column in range(0, plan.v_width, width):
        part = lax.slice(acc, (0, column), (ROWS, column + width)).astype(plan.problem.dtype)
        packed_rows.store(part, out, column, place, plan)


def _store(ctx: Context, end: Ending, result: Result) -> None:
    """The output, divided by the row sums, and the log-sum-exp."""
    plan, smem, (out, lse_of_tiles) = ctx.plan, ctx.smem, ctx.refs.results
    unit, own = end.unit, end.own
    sink = None if ctx.refs.sinks is None else _row_sinks(ctx, own)
    factor, lse = softmax.finish(result.row_max, result.row_sum, sink)
    mosaic.store(lse_of_tiles.at[unit.m, unit.kv_head, own.number], lse + end.spoil)
    acc = result.acc * mosaic.broadcast_rows(factor + end.spoil, result.acc.shape)
    width, staged, rows = smem.out.shape[-1], smem.out.at[end.wg], plan.head_rows
    for column in range(0, plan.v_width, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = lax.slice(acc, (0, column), (ROWS, column + width))
        staged[...] = part.astype(staged.dtype)
        plgpu.commit_smem()
        for n in range(plan.tile_heads):
            columns = mosaic.columns(out, column, width, unit.m)
            to = out.at[unit.m, pl.ds(own.row, rows), own.head + n, columns]
            copy = functools.partial(plgpu.copy_smem_to_gmem, staged.at[pl.ds(n * rows, rows)], to)
            if plan.problem.group % plan.tile_heads == 0:
                copy()
            else:  # the last chunk of a group has fewer heads
                pl.when(n < own.heads_left)(copy)


# ---- the kernel and its call --------------------------------------------------------------------


def _or_decode(  # noqa: PLR0913
    decodes: Any, mine: Any, produce: Any, consume: Any, decode: Any
) -> tuple[Any, Any]:
    """What producers and consumers do of a block that may decode, as some consumers do then."""
    others = jnp.logical_not(decodes)

    def either() -> None:
        pl.when(others)(consume)
        pl.when(decodes & mine)(decode)

    return lambda: pl.when(others)(produce), either


def _decode(own: Context, results: Any, at: Any) -> None:
    """What a warpgroup of a block does that decodes rows of the sequences' own."""
    block_id, blocks, wg, count = at
    own = own._replace(smem=jax.tree.map(lambda ref: ref.at[wg], own.smem))
    decode_sm90.decode_block(own, results, block_id * count + wg, blocks * count)


def _kernel(refs: Refs, *rest: Any, plan: Plan) -> None:
    *results, smem = rest
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    own_smem: Any = None
    if plan.own is not None:
        *results, out, lse, accs, row_maxes, row_sums = results
        smem, union = smem
        (q, k, v), own_smem = union
        smem = smem._replace(q=q, k=k, v=v)
        partials = decode_combine.Results(
            out, lse, accs, row_maxes, row_sums, refs.own.counters, refs.own.sinks
        )
    ctx = Context(plan, refs._replace(results=tuple(results)), smem)
    if plan.packed:
        tile_count.fill(ctx, wg, block_id)
    whole_block = block_id
    if plan.own is not None:
        decoding = smem.sums.dealing[shares.AT.decoding]
        block_id = block_id - decoding
    produce: Any = functools.partial(_produce, ctx, block_id)
    consume: Any = functools.partial(_consume, ctx, block_id, wg)
    consumers = plan.config.warpgroups
    simple = not plan.layout.paged and not plan.layout.separate
    registers = (REGISTERS if simple else REGISTERS_OF_TABLES)[consumers]
    if plan.quantized:
        produce = narrow_producer.programs(ctx, block_id)
        registers = narrow_producer.REGISTERS[consumers, plan.producers]
    if plan.own is not None:
        own, decoders = plan.own
        at = whole_block, decoding, wg, decoders
        decode = functools.partial(_decode, Context(own, refs.own, own_smem), partials, at)
        produce, consume = _or_decode(block_id < 0, wg < decoders, produce, consume, decode)
    mosaic.share_registers(wg, consumers, produce, consume, *registers)


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Any, Any]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N, Hv]
    and [N, tokens]: sequences of few rows by decoding, the others by this kernel, which leaves
    those alone.
    """
    if not problem.packed:
        return _launch(inputs, None, problem, config)
    if problem.merged is not None:
        counters = None
        if (own := Plan.of(problem, config).own) is not None:
            counters = decode_combine.counters(own.plan)
        return _launch(inputs._replace(into=None), inputs.into, problem, config, counters)
    few, rest = scheduler.by_rows(problem)
    results = decode_sm90.launch(inputs, few, decode_sm90.Config.default(few))
    return _launch(inputs, results, rest, config)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, into: Any, problem: DecodeProblem, config: Config, counters: Any = None
) -> tuple[Any, Any]:
    """Jitted, so that a model of many layers traces it once. `into`: where rows are packed, the
    results of the others.
    """
    plan = Plan.of(problem, config)
    refs = _refs(plan, inputs)
    if plan.own is not None:
        own = plan.own.plan
        queries = inputs.q.reshape(*own.problem.out_shape, -1)
        same = inputs._replace(q=queries, starts=None, rows=None, **inputs.own._asdict())
        refs = refs._replace(own=producer.refs_of(same, counters, own))
    return launch(plan, refs, into)


def launch(plan: Plan, refs: Refs, into: Any = None) -> tuple[Any, Any]:
    """The results of `run`; of packed rows in `into`, which has the others."""
    problem, config = plan.problem, plan.config
    of, tiles = jax.ShapeDtypeStruct, (problem.batch, problem.kv_heads, plan.padded_wg_tiles)
    results: tuple[Any, ...]
    if config.splits > 1 or plan.merged:
        slots = (config.splits, *plan.partial_tiles, ROWS)
        shapes = ((*slots, plan.v_width), slots, slots)
        results = tuple(of(shape, jnp.float32) for shape in shapes)
        if plan.merged:
            results += (of((shares.kept_size(plan),), jnp.int32),)
        if plan.own is not None:
            *whole, partials = decode_combine.out_types(plan.own.plan)
            results += (*whole, *partials)
    elif plan.packed:
        results = ()
    else:
        out = of((*refs.q.shape[:3], problem.v_head_dim), problem.dtype)
        results = (out, of((*tiles, ROWS), jnp.float32))
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=results,
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        num_threads=config.warpgroups + plan.producers,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(by_lane=plan.own is not None),
        kernel_name="prefill_sm90",
    )
    if plan.merged:
        made = kernel(refs)
        if plan.own is not None:
            made, (out, lse, *_) = made[:4], made[4:]
            into = into._replace(out=out, lse=lse)
        return merge_parts.run(plan, made, refs.starts, into)
    if config.splits > 1:
        return combine_shares.run(plan, kernel(refs), refs, into)
    if into is not None:
        written = [jax.new_ref(x) for x in into]
        kernel(refs, *written)
        return jax.freeze(written[0]), jax.freeze(written[1])
    out, lse = kernel(refs)
    return out[:, : problem.q_len], plan.in_rows(lse)


def _refs(plan: Plan, inputs: DecodeInputs) -> Refs:
    """What the kernel reads. q is copied where t is above 8 and no multiple of 8, which Mosaic's
    TMA would clip.
    """
    layout = plan.layout

    def views(arrays):
        return tuple(layout.view(x) for x in (arrays if layout.separate else (arrays,)))

    caches = inputs.k_cache, inputs.v_cache
    tables = layout.tables(*caches, inputs.k_scale, inputs.v_scale) if plan.quantized else None
    k, v = ((), ()) if plan.quantized else map(views, caches)
    return Refs(
        q=inputs.q if plan.packed else tma_operands.for_tma(inputs.q),
        k=k,
        v=v,
        tables=tables,
        lengths=inputs.lengths,
        new_lengths=inputs.new_lengths,
        capacities=layout.capacities_operand(),
        page_table=inputs.page_table,
        layer=cache_layout.scalar_operand(inputs.layer),
        sinks=None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
        mask_left=cache_layout.scalar_operand(inputs.mask_left),
        mask_right=cache_layout.scalar_operand(inputs.mask_right),
        starts=inputs.starts,
        mask_aux=functions.flat(inputs.mask_aux),
        rows=inputs.rows,
    )
