"""The tile scheduler: which work tiles a block takes, and which kv tiles each of them needs.

A work tile is `plan.tile_rows` query rows of one head. `schedule` is a table of which block takes
which work tiles in which order; it is made before anything runs, so that a block can read ahead. A
work tile is a number in it, which `tile_of` decodes. Where there are segment ids, which are arrays,
`schedule_by_rank` completes the table on the GPU; or it is the order in which blocks claim work
tiles (`claims`).

`rows_span` are the kv tiles of one warpgroup's rows, `block_span` those that the block loads.
"""

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import functions, tile_lists, tma_operands
from pallas_attn.kernels.attention.plan import L2_BYTES, ROWS, Context, Plan, Span, heads_in
from pallas_attn.kernels.attention.score_mod import Tile
from pallas_attn.kernels.flash_fwd import fetch, listed_tiles

RECORD = 32  # int32 a work tile; TMA writes to whole 128 bytes
TILE_OVERHEAD = 1.5  # of a work tile, in steps of one kv tile
STEP_OVERHEAD = 3  # of a step: n warpgroups with rows take as long as n + 3 such parts of it
Offsets = tuple[int, ...]  # of the batch rows that follow each other, where they are known
RANK_SPREAD = 8.0  # what the first rank is taken to cost, above the last one's 1


# ---- which block takes which work tiles ---------------------------------------------------------


# Heads of an L2 group, by mask and widest head dim, from a query length on; 0: see Plan.l2_heads.
_L2_HEADS = {
    ("causal", 64): ((0, 32), (1024, 16), (4096, 8)),
    ("causal", 80): ((0, 16),),
    ("causal", 128): ((0, 16), (1536, 32), (3584, 8), (12288, 0)),
    ("causal", 256): ((0, 8), (4096, 0)),
    ("window", 64): ((0, 64),),
    ("full", 64): ((0, 48), (4096, 12)),
    ("full", 128): ((0, 1), (4096, 0)),
    ("full", 256): ((0, 4), (4096, 3)),
}


def l2_heads(problem: AttentionProblem, dim: int) -> int:
    """Of an L2 group, what was fastest on an H200; 0: see `Plan.l2_heads`."""
    mask, widths = problem.mask, (64, 80, 96, 128, 256)
    full = mask.is_full and problem.mask_program is None
    kind = "full" if full else "window" if mask.bounds_left else "causal"
    dim = next((width for width in widths if dim <= width), 0)
    found = _L2_HEADS.get((kind, dim), ((0, 0),))
    wanted = next(heads for start, heads in reversed(found) if problem.q_len >= start)
    group = problem.group  # whole ones: their heads share K and V
    if kind == "causal":  # few rows may see many keys
        row = 2 * (problem.head_dim + problem.v_head_dim)
        wanted = min(wanted, heads_in(L2_BYTES, problem, row))
    return max(wanted // group, 1) * group if wanted else 0


@functools.lru_cache(maxsize=64)
def schedule(plan: Plan, offsets: Offsets = ()) -> np.ndarray:
    """int32[blocks, n]: for each block how many work tiles it takes, and their codes for `tile_of`;
    see `assign`. Work tiles are ordered by L2 group of heads, then by rows, then by head. Lengths,
    offsets and bounds that are arrays are not known here: the costs are those of none, or of
    `offsets` (see `at_offset`). Where there are segments a code has a rank in place of rows, and
    `schedule_by_rank` replaces it; where blocks claim work tiles there is one row: see `claimed`.
    """
    problem, q_tiles = plan.problem, np.arange(plan.q_tiles)
    if plan.claims:
        return claimed(plan, offsets)
    if plan.is_listed:
        costs = _listed_costs(plan)[None]
        q_tiles = np.argsort(-costs[0], kind="stable")
    elif plan.has("q_segment_ids"):
        costs = (1 + RANK_SPREAD * (1 - q_tiles / plan.q_tiles))[None]
    else:
        costs = _costs(plan, offsets)
        if problem.mask.bounds_right:
            q_tiles = q_tiles[::-1]  # the last rows see most
    groups = range(0, plan.heads, plan.l2_heads)
    heads = [np.arange(first, min(first + plan.l2_heads, plan.heads)) for first in groups]
    codes = [_codes(plan, some, q_tiles) for some in heads]
    found = [costs_of(code, plan.code_bits, costs, problem.q_heads) for code in codes]
    ordered, kinds = in_order(codes, found, len(costs)), len(costs)
    if not plan.fetches:
        return assign(*ordered, plan.grid, evenly=kinds > 1)
    busy = fetch.busy_before(plan, _device_of(plan, offsets))
    return assign(*ordered, plan.grid, busy, evenly=kinds > 1)


def _device_of(plan: Plan, offsets: Offsets) -> int:
    known = plan.problem.offsets
    return known.index(offsets) if offsets in known else 0


def _codes(plan: Plan, heads: np.ndarray, q_tiles: np.ndarray) -> np.ndarray:
    """Codes of the work tiles of some heads in the order of `q_tiles`, those of the same rows side
    by side; of last rows that several heads share one code.
    """
    heads, tiles = np.broadcast_arrays(heads[None], q_tiles[:, None])
    taken = (tiles < plan.q_tiles - 1) | (heads % plan.problem.group % plan.last_heads == 0)
    return (heads[taken] << plan.code_bits) + tiles[taken]


def claimed(plan: Plan, offsets: Offsets = ()) -> np.ndarray:
    """int32[1, n]: how many work tiles there are, and their codes in the order in which blocks
    claim them: one kv head after the other. Where there are segments, each from its last rows to
    its first, and the last kv head by rank. Else the longest first, and if several batch rows share
    K and V, the work tiles of all of them together.
    """
    problem, group = plan.problem, plan.problem.group
    heads, tiles = np.arange(plan.heads, dtype=np.int32), np.arange(plan.q_tiles, dtype=np.int32)
    if plan.has("q_segment_ids"):
        codes = [_codes(plan, some, tiles[::-1]) for some in heads.reshape(-1, group)]
        codes[-1] = _codes(plan, heads[-group:], tiles)
    else:
        by_kv = heads.reshape(-1, problem.share, problem.kv_heads, group).swapaxes(1, 2)
        codes = [_codes(plan, x, tiles[::-1]) for x in by_kv.reshape(-1, problem.share * group)]
        costs = _costs(plan, offsets)
        of_codes = [costs_of(code, plan.code_bits, costs, problem.q_heads) for code in codes]
        codes = [x[np.argsort(-c, kind="stable")] for x, c in zip(codes, of_codes, strict=True)]
    every = np.concatenate(codes)
    return np.append(np.int32(every.size), every)[None]


def _costs(plan: Plan, offsets: Offsets) -> np.ndarray:
    """[kinds, q_tiles]: of work tiles, in steps of one kv tile, by the mask; a kind of batch rows
    for each of `offsets`, or one.
    """
    problem = plan.problem
    costs = np.full((max(1, len(offsets)), plan.q_tiles), TILE_OVERHEAD)
    for n, offset in enumerate(offsets or (problem.q_offset,)):
        for tile in range(plan.q_tiles):
            position = offset + tile * plan.tile_rows
            span = plan.span(problem.mask.widest, position, plan.tile_rows, problem.kv_len)
            costs[n, tile] += max(span.hi - span.lo, 0) * step_cost(plan, tile)
    return costs


def step_cost(plan: Plan, tile: int) -> float:
    """Of one kv tile of a work tile: 1, or less of the last one, if it has idle warpgroups."""
    most = plan.tile_rows // ROWS
    busy = plan.last_warpgroups * plan.last_heads if tile == plan.q_tiles - 1 else most
    return (busy + STEP_OVERHEAD) / (most + STEP_OVERHEAD)


def costs_of(codes: np.ndarray, bits: int, costs: np.ndarray, heads: int) -> np.ndarray:
    """Of work tiles by their codes: costs [n, tiles], of batch rows that repeat after n."""
    return costs[(codes >> bits) // heads % len(costs), codes & ((1 << bits) - 1)]


def in_order(
    codes: list[np.ndarray], costs: list[np.ndarray], kinds: int
) -> tuple[np.ndarray, np.ndarray]:
    """L2 groups of work tiles as one list, and their costs. Where there are batch rows of several
    kinds, those of the dearest come first: the cheap ones fill what these leave at the end.
    """
    if kinds > 1:
        orders = [np.argsort(-cost, kind="stable") for cost in costs]
        codes = [code[order] for code, order in zip(codes, orders, strict=True)]
        costs = [cost[order] for cost, order in zip(costs, orders, strict=True)]
        groups = sorted(range(len(codes)), key=lambda n: -costs[n][0])
        codes, costs = [codes[n] for n in groups], [costs[n] for n in groups]
    return np.concatenate(codes), np.concatenate(costs)


def _listed_costs(plan: Plan) -> np.ndarray:
    """Of the tiles of a head, by the mask function where it is known beforehand; else of ranks."""
    found = plan.static_lists
    if found is None:
        return 1 + RANK_SPREAD * (1 - np.arange(plan.q_tiles) / plan.q_tiles)
    return TILE_OVERHEAD + found[..., 0].mean(axis=(0, 1))


def listed(ctx: Context, tile: Tile, ends: Any = None) -> Any:
    """The kv tiles that a mask function leaves of a work tile. `ends`: how many of them there are,
    and the last.
    """
    plan, refs, _ = ctx
    if ends is not None and plan.lists_are_runs:
        return functions.Run(ends[1] - (ends[0] - 1))
    row = lax.div(tile.row, jnp.int32(plan.tile_rows))
    return functions.Listed.of(refs.tiles, tile.batch, tile.head, row, plan.row_blocks)


def table(make: Callable[[Any, Offsets], np.ndarray], plan: Any, inputs: Any) -> dict[str, Any]:
    """`make`, a `schedule`, for the offset in the problem; and the lists of tiles, if there are,
    by which a table of ranks becomes one of work tiles.
    """
    if not plan.is_listed:
        return {"schedule": at_offset(make, plan, inputs.q_offset)}
    if plan.static_lists is not None:
        lists = tile_lists.tiles(plan.problem, inputs, *plan.list_sizes)
        return {"tiles": lists, "schedule": at_offset(make, plan, inputs.q_offset)}
    ranked, heads = make(plan, ()), plan.heads // plan.problem.batch
    *_, by_keys, row_blocks = plan.list_sizes
    found = tile_lists.kinds(plan.problem, inputs, plan.list_sizes)
    if listed_tiles.fits(found):
        of_codes = plan.code_bits, heads
        codes = tile_lists.codes(found)
        made = listed_tiles.prepare(codes, ranked, row_blocks, not by_keys, of_codes)
    else:
        lists = tile_lists.of_kinds(found, never_empty=not by_keys)
        made = lists, by_length(ranked, plan.code_bits, heads, lists)
    return dict(zip(("tiles", "schedule"), made, strict=True))


def by_length(table: np.ndarray, bits: int, heads: int, lists: Any) -> Any:
    """A table of codes in which rank r of a head stands for its work tile with the r-th longest
    list. `lists`: `tile_lists.tiles`.
    """
    order = longest_first(lists[..., 0])
    head, low = table >> bits, (1 << bits) - 1
    batch = head // heads if order.shape[0] > 1 else 0 * head
    head = head % heads if order.shape[1] > 1 else 0 * head
    codes = (table & ~low) | order[batch, head, table & low]
    return jnp.concatenate([table[:, :1], codes[:, 1:]], axis=1)


def longest_first(count: Any) -> Any:
    """Which work tiles of a head come first, along the last axis, by how many steps each takes."""
    n, axes = count.shape[-1], (1,) * (count.ndim - 1)
    down, across = (tile_lists.numbers((*axes, *shape)) for shape in ((n, 1), (1, n)))
    longer = count[..., None, :] > count[..., :, None]
    tie = (count[..., None, :] == count[..., :, None]) & (across < down)
    return tile_lists.in_order(longer | tie)[1]


class ListedRows(NamedTuple):
    """What a list says of a warpgroup's rows of a work tile."""

    loaded: Any  # kv tiles that the block loads
    span: Span  # of them, those of the rows
    last: Any  # of these, the last


def listed_rows(ctx: Context, tile: Tile, wg: Any) -> ListedRows | None:
    """None where there is no list."""
    if not ctx.plan.is_listed:
        return None
    found = listed(ctx, tile)
    return ListedRows(found.count, *found.of_row_block(wg))


def schedule_by_rank(plan: Plan, segment_spans: Any) -> Any:
    """`schedule` where there are segments: rank r of a batch row stands for its work tile with the
    r-th most kv tiles. Packed documents repeat: assigned in the order of rows, a block would take
    the same rows of every document, and blocks with late rows would finish last.
    """
    problem = plan.problem
    table, first = jnp.asarray(schedule(plan)), plan.first_ranked_head
    lo, hi = mask_bounds(plan)[:, None]
    # Units one by one, not a reduction, which would be a launch of its own.
    units = range(plan.tile_rows // plan.span_rows)
    firsts, lasts = ([segment_spans[:, i, n :: len(units)] for n in units] for i in (0, 3))
    begin = jnp.maximum(lo, functools.reduce(jnp.minimum, firsts))
    end = jnp.minimum(hi, functools.reduce(jnp.maximum, lasts))
    order = jnp.argsort(begin - end, axis=1).astype(jnp.int32)
    low_bits = (1 << plan.code_bits) - 1
    head = table >> plan.code_bits
    codes = (table & ~low_bits) | order[head // problem.q_heads, table & low_bits]
    codes = jnp.where(head >= first, codes, table) if first else codes
    return jnp.concatenate([table[:, :1], codes[:, 1:]], axis=1)


def at_offset(make: Callable[[Any, Offsets], np.ndarray], plan: Any, q_offset: Any) -> Any:
    """`make(plan, offsets)`, an int32 table, for the offset in the problem. Where offsets are
    arrays and yet known (`AttentionProblem.offsets`), a table is made for each device's, and that
    of the nearest ones is taken on the GPU.
    """
    known = plan.problem.offsets
    if q_offset is None or not known:
        return jnp.asarray(make(plan, ()))
    tables = [make(plan, offsets) for offsets in known]
    width = max(table.shape[1] for table in tables)
    padded = np.stack([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in tables])
    away = jnp.abs(jnp.asarray(known, jnp.int32) - q_offset[None, : len(known[0])]).sum(axis=1)
    return lax.dynamic_index_in_dim(jnp.asarray(padded), away.argmin(), keepdims=False)


def operands(plan: Plan, inputs: AttentionInputs) -> dict[str, Any]:
    """What any kernel whose work tiles are query rows reads by tiles: bias, mask_array and segment
    ids in whole tiles, the lists of kv tiles, and the schedule.
    """
    rows, keys = plan.padded_rows, tma_operands.round_up(plan.problem.kv_len, plan.config.block_kv)
    fields = tma_operands.over_scores(inputs, rows, keys)
    fields |= tma_operands.segment_ids(inputs, rows, keys)
    return fields | table(schedule, plan, inputs)


def mask_bounds(plan: Plan) -> np.ndarray:
    """int32[2, q_tiles]: the first kv tile of a work tile and the one after its last, by the mask
    alone.
    """
    problem, rows = plan.problem, plan.tile_rows
    found = [
        plan.span(problem.mask.widest, problem.q_offset + tile * rows, rows, problem.kv_len)
        for tile in range(plan.q_tiles)
    ]
    return np.array([[span.lo for span in found], [span.hi for span in found]], np.int32)


def assign(
    tiles: np.ndarray,
    costs: np.ndarray,
    blocks: int,
    busy: Sequence[float] = (),
    evenly: bool = False,
) -> np.ndarray:
    """Work tiles, in the order in which they should begin, each given to the block that is free
    first: int32[blocks, n], how many, which, and zeros, two at least, so that a block may read
    ahead. `busy`: how long the first blocks are before. `evenly`: see `_rebalance`; where the last
    work tiles are not the cheap ones, as those of chunks in the midst of a sequence.

    Known beforehand it needs no counter in global memory, and a block can load the next q tile
    during this one. Measured on an H200 it is faster than one block a work tile, and that than
    every multiprocessor taking each 132nd work tile.
    """
    assigned: list[list[int]] = [[] for _ in range(blocks)]
    free = [(0.0, block) for block in range(len(busy), blocks)]
    free += [(when, block) for block, when in enumerate(busy)]
    heapq.heapify(free)
    for number, cost in enumerate(costs.tolist()):
        when, block = free[0]
        assigned[block].append(number)
        heapq.heapreplace(free, (when + cost, block))
    if evenly:
        _rebalance(assigned, costs, {block: when for when, block in free})
    return table_of([tiles[numbers].tolist() for numbers in assigned])


MOST_UNEVEN = 1.001  # of what the last block to end takes, to the mean
EXCHANGED = 24  # the last work tiles of a block, of which one may change places


def _rebalance(assigned: list[list[int]], costs: np.ndarray, ends: dict[int, float]) -> None:
    """The block that ends last gives one of its last work tiles to another, for a cheaper one or
    for nothing, until all end at nearly the same time. Blocks take theirs in the same order.
    """
    mean = sum(ends.values()) / len(ends)
    costs = np.append(costs, 0.0)  # of nothing, the number -1
    for _ in range(4 * len(assigned)):
        last = max(ends, key=ends.__getitem__)
        ours, others = np.array(assigned[last][-EXCHANGED:], int), [x for x in ends if x != last]
        offers = [(block, n) for block in others for n in (*assigned[block][-EXCHANGED:], -1)]
        if ends[last] <= MOST_UNEVEN * mean or not (ours.size and offers):
            return
        blocks, theirs = np.array(offers).T
        gains = costs[ours][:, None] - costs[theirs][None]
        later = np.maximum(ends[last] - gains, np.array([ends[x] for x in blocks])[None] + gains)
        one, other = np.unravel_index(later.argmin(), later.shape)
        if later[one, other] >= ends[last]:
            return
        away, here, block = int(ours[one]), int(theirs[other]), int(blocks[other])
        assigned[last] = sorted({*assigned[last], here} - {away, -1})
        assigned[block] = sorted({*assigned[block], away} - {here})
        gain = float(gains[one, other])
        ends[last], ends[block] = ends[last] - gain, ends[block] + gain


def assign_packed(tiles: np.ndarray, costs: np.ndarray, blocks: int) -> np.ndarray:
    """As `assign`, in no order but longest first: for so few work tiles that the time which the
    last ones leave idle counts. Each goes to the first block that has room for it, and room is as
    little as suffices (Coffman, Garey and Johnson's MULTIFIT).
    """
    order = np.argsort(-costs, kind="stable")
    tiles, sizes = tiles[order], costs[order].tolist()
    least = max(sizes[0], sum(sizes) / blocks)
    enough, assigned = 2 * least, None
    for _ in range(12):
        room = (least + enough) / 2
        found = _first_fit(sizes, blocks, room)
        least, enough, assigned = (least, room, found) if found else (room, enough, assigned)
    if assigned is None:  # never: twice the least is room for all
        return assign(tiles, costs[order], blocks)
    return table_of([tiles[places].tolist() for places in assigned])


def _first_fit(sizes: list[float], blocks: int, room: float) -> list[list[int]] | None:
    """Which work tiles each block takes; None where there is no room for all."""
    rooms = [room] * blocks
    assigned: list[list[int]] = [[] for _ in range(blocks)]
    for tile, size in enumerate(sizes):
        block = next((block for block, left in enumerate(rooms) if left >= size), None)
        if block is None:
            return None
        rooms[block] -= size
        assigned[block].append(tile)
    return assigned


def table_of(assigned: list[list[int]]) -> np.ndarray:
    table = np.zeros((len(assigned), 3 + max(map(len, assigned))), np.int32)
    for row, tiles in zip(table, assigned, strict=True):
        row[: len(tiles) + 1] = [len(tiles), *tiles]
    return table


def tile_of(ctx: Context, code: Any) -> Tile:
    """The work tile that a code of `schedule` stands for."""
    plan, refs, _ = ctx
    problem = plan.problem
    head = lax.shift_right_logical(code, jnp.int32(plan.code_bits))
    batch = lax.div(head, jnp.int32(problem.q_heads))
    kv_len: Any = problem.kv_len
    if plan.has("kv_lengths"):
        kv_len = refs.kv_lengths[batch]
    return Tile(
        batch=batch,
        head=lax.rem(head, jnp.int32(problem.q_heads)),
        row=(code & ((1 << plan.code_bits) - 1)) * plan.tile_rows,
        q_offset=refs.q_offset[batch] if plan.has("q_offset") else problem.q_offset,
        q_len=refs.q_lengths[batch] if plan.has("q_lengths") else None,
        kv_len=kv_len,
        mask=plan.mask_of(refs, batch),
    )


def own_rows(plan: Plan, tile: Tile, wg: Any) -> tuple[Tile, Any]:
    """The tile of a warpgroup's rows, and the first of them: the next ones of its head, or, in the
    last work tile, those of the next head of the group (`Plan.last_heads`).
    """
    row: Any = tile.row + wg * ROWS
    if plan.last_heads == 1:
        return tile, row
    each = jnp.int32(plan.last_warpgroups)
    further = lax.div(wg + 0 * tile.row, each)
    within = lax.rem(tile.head, jnp.int32(plan.problem.group)) + further
    last = tile.row == (plan.q_tiles - 1) * plan.tile_rows
    joined = last & (further < plan.last_heads) & (within < plan.problem.group)
    head = jnp.where(joined, tile.head + further, tile.head)
    return tile._replace(head=head), row - jnp.where(joined, further * each * ROWS, 0)


# ---- which kv tiles a work tile needs -----------------------------------------------------------


def records(plan: Plan, segment_spans: Any) -> Any:
    """What segments leave of each work tile: int32[B, q_tiles, RECORD], the fields of a Span for
    the rows of each warpgroup, then zeros. `segment_spans`: `plan.segment_spans`.
    """
    units = plan.config.warpgroups
    by_unit = segment_spans.swapaxes(1, 2).reshape(-1, plan.q_tiles, 4 * units)
    return jnp.pad(by_unit, ((0, 0), (0, 0), (0, RECORD - 4 * units)))


def record_ends(ctx: Context, tile: Tile) -> Any:
    """What `block_span` reads of a work tile's record, from global memory; where kv tiles are
    listed how many there are, and the last; None where there is neither.
    """
    plan, refs, _ = ctx
    if plan.is_listed:
        found = listed(ctx, tile)
        return found.count, found.last
    if not plan.has("q_segment_ids"):
        return None
    at = lax.div(tile.row, jnp.int32(plan.tile_rows))
    fields = [4 * wg + field for wg in range(plan.config.warpgroups) for field in (0, 3)]
    return {field: refs.segment_spans[tile.batch, at, field] for field in fields}


def rows_span(plan: Plan, record: Any, tile: Tile, wg: Any) -> Span:
    """The kv tiles of one warpgroup's rows; lo == hi == 0 where there is none."""
    row: Any = own_rows(plan, tile, wg)[1]
    rows: Any = ROWS
    if plan.idle_rows:  # all of them past T: as if they were the last one, and of one kv tile only
        idle = row >= plan.problem.q_len
        row, rows = jnp.where(idle, plan.problem.q_len - 1, row), jnp.where(idle, 1, ROWS)
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - row)
    span = plan.span(tile.mask, tile.q_offset + row, rows, tile.kv_len)
    if record is not None:  # rows past T have the last one's id
        span = span.within(Span(*(record(4 * wg + i) for i in range(4))))
    if plan.has("mask_array"):
        span = span._replace(full_hi=span.full_lo)
    if plan.idle_rows:
        span = span._replace(lo=jnp.where(idle, jnp.maximum(span.hi - 1, span.lo), span.lo))
    return empty_as_zero(plan, tile, rows, span)


def empty_as_zero(plan: Plan, tile: Tile, rows: Any, span: Span) -> Span:
    """A span of some rows of a work tile, lo == hi == 0 where there are no such keys or rows."""
    if "empty" not in plan.sections:
        return span
    none = span.hi <= span.lo
    if tile.q_len is not None:
        none = none | (rows <= 0)
    return span._replace(lo=jnp.where(none, 0, span.lo), hi=jnp.where(none, 0, span.hi))


def block_span(plan: Plan, record: Any, tile: Tile) -> tuple[Any, Any]:
    """Kv tiles [lo, hi) that the block loads: all that some warpgroup needs."""
    spans = [rows_span(plan, record, tile, wg) for wg in range(plan.config.warpgroups)]
    if "empty" not in plan.sections:
        lo = functools.reduce(jnp.minimum, [span.lo for span in spans])
        return lo, functools.reduce(jnp.maximum, [span.hi for span in spans])
    lows = [jnp.where(span.hi > span.lo, span.lo, 2**30) for span in spans]
    hi = functools.reduce(jnp.maximum, [span.hi for span in spans])
    if plan.never_empty:
        hi = jnp.maximum(hi, 1)
        return jnp.minimum(functools.reduce(jnp.minimum, lows), hi - 1), hi
    return jnp.minimum(functools.reduce(jnp.minimum, lows), hi), hi


def block_whole(plan: Plan, tile: Tile, ends: tuple[Any, Any]) -> Any:
    """Of the kv tiles `ends` that a block loads the end of those which all of its rows see whole;
    where there are no segments and no mask is bounded on the left.
    """
    spans = [rows_span(plan, None, tile, wg) for wg in range(plan.config.warpgroups)]
    whole = [jnp.where(span.hi > span.lo, span.full_hi, ends[1]) for span in spans]
    return jnp.clip(functools.reduce(jnp.minimum, whole), *ends)


def at_least_one(plan: Plan, span: Span, hi: Any) -> Span:
    """`rows_span`; or where that is empty, and `Plan.never_empty` says so, the last kv tile before
    `hi`, masked.
    """
    if not plan.never_empty:
        return span
    none = span.hi <= span.lo
    picked = (span.lo, hi - 1), (span.full_lo, hi), (span.full_hi, 0), (span.hi, hi)
    return Span(*(jnp.where(none, there, own) for own, there in picked))
