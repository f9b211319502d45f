"""Flash attention forward for Hopper: bfloat16, float16 and float32.

Algorithm: an online softmax over kv tiles, with FlashAttention-3's overlap inside a warpgroup
(arXiv 2407.08608). A step of the mainloop issues two matmuls, the scores S = Q K^T of a kv tile and
then O += P V of the tile before it, and computes the softmax of S while the second is in flight.
The paper's other overlap, barriers that order the warpgroups, was measured to be slower on an H200
and is not done.

Grid: one persistent block a multiprocessor. It takes the work tiles that `tile_scheduler.schedule`
lists for it, each of which is `64 * warpgroups` query rows of one head; of the last rows, where
they are fewer, those of several heads that share K and V (`Plan.last_heads`). They are ordered
longest first (causal: last rows first) within L2 groups, heads whose K and V fit in L2; the query
heads of a kv head are neighbours. Of long packed documents, and where L2 does not hold K and V of a
head, blocks claim work tiles instead (`claims`).

Warpgroups: one producer, which loads K and V by TMA for all work tiles of the block, and
`Config.warpgroups` consumers of 64 query rows each. A consumer loads its own rows of Q, computes
them and stores the result. Consumers meet only at the ring of K and V, and are not ordered among
themselves.

Shared memory, and who owns it when:
  q [warpgroup]   the consumer's own: it loads its rows by TMA and waits for `q_ready`. Where there
                  is room there are two a consumer, and the rows of the next work tile arrive during
                  this one; else they are loaded when all kv tiles of this one are done
  k, v [stages]   a ring of entries. Entry e of a work tile holds K of its e-th kv tile and V of the
                  kv tile before that, which is what one step reads: one wait, one release a step.
                  The producer owns an entry from when all consumers have released it (`free`) until
                  both of its copies have landed (`ready`), the consumers until they release it
  out [warpgroup] the consumer's own: some columns of the output on their way to global memory

Kv tiles are taken from the last to the first; of those that other GPUs have, the whole ones as they
arrive (`fetch`). What the diagonal, a length or the end of S cuts off
lies at the end, so that the tile which needs a mask is the first, whose softmax overlaps with
nothing anyway, and the loop over the others needs none. A window's left edge is masked in the last
tiles. Where there are segment ids, tiles that one id fills need no mask either; which those are is
computed by a small kernel before this one (`segments`).

What bounds it: the mainloop has 5.6 instructions a score, among them 1.0 ex2, 1.0 max, 1.0
multiply-add, 1.0 adds and 0.5 conversions. At head dim 64 the ex2 alone (16 a cycle; of bfloat16
pairs they are two instructions as well) take as long as the matmuls at their peak; at 128 half of
that, at 256 a quarter. Between scores and exponents lies latency, which two or three warps a
scheduler hide in part: see `softmax.next_step`. Where T is small, what lies around a work tile
counts: the next q is loaded under the first matmul, and the barriers that Mosaic puts at each copy
and store are off. Those that are needed are written out (`plgpu.commit_smem`).

To follow a call, read `run`, `_kernel` and `_consume` here; then producer.py, attention/plan.py
(sizes, and the kv tiles of query rows), attention/tma_operands.py (arrays in sizes that TMA takes),
tile_scheduler.py, mma/wgmma.py, attention/score_mod.py and attention/softmax.py.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import functions, score_mod, softmax, tile_lists, tma_operands
from pallas_attn.kernels.attention.plan import (
    BLOCKS,
    ROWS,
    Context,
    Plan,
    has_no_scores,
    of_no_scores,
)
from pallas_attn.kernels.attention.plan import limit as limit
from pallas_attn.kernels.attention.score_mod import Refs, Rows, Tile
from pallas_attn.kernels.flash_fwd import claims, fetch, producer, segments, tile_scheduler
from pallas_attn.kernels.flash_fwd.producer import Ring
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import wgmma

SMEM_LIMIT = gpu_specs.shared_memory(gpu_specs.HOPPER)
BARRIERS = 1024  # bytes kept for them and for alignment
# Registers of a consumer's thread, by how many consumers there are.
REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
LONG = 16384  # rows from which blocks claim work tiles; few are then of two packed documents
HELD_BY_L2 = 48 * 2**20  # bytes of K and V of a kv head up to which L2 holds them
# Probabilities of float32 are spread over float16's range; they lie below 2**RESCALE_THRESHOLD.
SPREAD = 2.0 ** (wgmma.EXPONENT + 1 - softmax.RESCALE_THRESHOLD)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 2  # consumers
    block_kv: int = 128  # keys of a kv tile
    stages: int = 2  # entries of the ring of K and V
    l2_heads: int = 0  # heads whose work tiles are taken together; 0: see Plan.l2_heads
    grid: int = 132  # blocks; 0: one a work tile
    q_slots: int = 2  # q tiles of a consumer; 2: the next is loaded early, where there is room
    exp_before_wait: int = 0  # quarters of a tile's exponents, computed before the wait for P V
    fetchers: int = 16  # blocks that begin by fetching what other GPUs have: see `fetch`
    claims: bool = False  # blocks claim work tiles, where each has a kv tile: see `claims`

    def __post_init__(self):
        check(
            self,
            warpgroups=(self.warpgroups in (1, 2, 3, 4), "1, 2, 3 or 4"),
            block_kv=(16 <= self.block_kv <= 256 and self.block_kv % 16 == 0, "16, 32, .. 256"),
            stages=(self.stages >= 2, "at least 2"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
            q_slots=(self.q_slots in (1, 2), "1 or 2"),
            exp_before_wait=(self.exp_before_wait in (0, 1, 2, 3, 4), "0 to 4"),
            fetchers=(self.fetchers >= 1, "at least 1"),
            claims=(
                not self.claims or self.stages <= claims.MOST_STAGES,
                f"False above {claims.MOST_STAGES} stages",
            ),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What was fastest on an H200, of what fits in registers and shared memory."""
        if problem.dtype == "float32":
            return _float32(problem)
        mask, dim = problem.mask, max(problem.head_dim, problem.v_head_dim)
        l2_heads = tile_scheduler.l2_heads(problem, dim)
        some = mask.is_causal and not mask.bounds_left or problem.mask_program is not None
        alone = problem.score_program is None and not _is_window(problem)
        early = 4 if some and problem.q_len >= 4096 and alone else 0
        if dim <= 128 and problem.mask_program and tile_lists.reads_pairs(problem.mask_program):
            # A table of blocks, which are of 128 as a rule: each is a tile, whole or empty.
            return cls(2, block_kv=128, stages=2 if dim > 64 else 4, l2_heads=l2_heads)
        segments, claimed = "q_segment_ids" in problem.arrays, _gains_by_claims(problem)
        made = functools.partial(cls, l2_heads=l2_heads, claims=claimed)
        if dim <= 64 and _fits(problem, 4) and not _takes_wide_tiles(problem):
            return made(4, block_kv=64, stages=6, exp_before_wait=early)
        if dim <= 64:
            return made(3, block_kv=128, stages=4)
        bias = problem.bias_shape is not None and problem.bias_shape[:2] != (1, 1)
        if dim <= 128 and not bias and (claimed or not segments) and _fits(problem, 3):
            stages, early = (4, 0) if dim <= 96 else (3, 0 if segments else early)
            return made(3, block_kv=64, stages=stages, exp_before_wait=early)
        narrow = problem.head_dim <= 192 and problem.v_head_dim <= 128 and not segments
        if dim <= 128 or narrow:
            return made(2, block_kv=128, stages=2)
        config = made(2, block_kv=64, stages=2)
        fits = smem_bytes(problem, config) <= SMEM_LIMIT
        return config if fits else dataclasses.replace(config, q_slots=1)


def plan_of(problem: AttentionProblem, config: Any) -> Plan:
    """Of this kernel."""
    return Plan(problem, config, takes_offsets=True, joins_heads=True, knows_claims=True)


def _gains_by_claims(problem: AttentionProblem) -> bool:
    """Whether blocks are to claim work tiles: see `claims`. Where no heads share K and V they gain
    little or lose. Causal rows were measured at head dim 128.
    """
    if problem.q_len < LONG or problem.group == 1:
        return False
    dims = problem.head_dim, problem.v_head_dim
    causal = problem.mask.bounds_right and not problem.mask.bounds_left and 64 < max(dims) <= 128
    many = 2 * problem.kv_len * sum(dims) > HELD_BY_L2
    gains = "q_segment_ids" in problem.arrays or (causal and many)
    return gains and plan_of(problem, Config(claims=True)).claims


def _is_window(problem: AttentionProblem) -> bool:
    """Whether rows are known to need a mask at both ends of their keys, by a function."""
    return problem.mask_program is not None and tile_lists.has_two_ends(problem)


def _takes_wide_tiles(problem: AttentionProblem) -> bool:
    """Whether tiles of 128 keys are faster than more warpgroups, up to head dim 64: where every
    tile is whole and there is little else to do, or where rows past `q_lengths` end in whole tiles.
    """
    arrays = set(problem.arrays)
    if problem.softcap is not None or arrays - {"q_lengths", "kv_lengths"}:
        return False
    hides = not problem.mask.is_full or problem.mask_program is not None
    return "q_lengths" in arrays or not (hides or arrays)


def _fits(problem: AttentionProblem, warpgroups: int) -> bool:
    """Whether work tiles of so many consumers leave few rows idle, beside those of one fewer; where
    they do so by joining heads, also whether blocks are done as soon.
    """
    wider, narrower = (
        tma_operands.round_up(problem.q_len, ROWS * n) for n in (warpgroups, warpgroups - 1)
    )
    if wider <= 1.1 * narrower:
        return True
    wide, narrow = (plan_of(problem, Config(n)) for n in (warpgroups, warpgroups - 1))
    taken = [pl.cdiv(x.work_tiles, BLOCKS) * x.tile_rows for x in (wide, narrow)]
    return wide.last_heads > 1 and taken[0] <= 1.1 * taken[1]


# The first that fits in shared memory, and its three warpgroups in registers.
_FLOAT32 = (
    Config(warpgroups=3, block_kv=64, stages=3),
    Config(warpgroups=2, block_kv=64, stages=3),
    Config(warpgroups=2, block_kv=64, stages=2),
    Config(warpgroups=2, block_kv=32, stages=2),
    Config(warpgroups=1, block_kv=32, stages=2),
    Config(warpgroups=1, block_kv=16, stages=2),
)


def _float32(problem: AttentionProblem) -> Config:
    few = max(problem.head_dim, problem.v_head_dim) <= 64 and problem.precision is None
    return next(
        config
        for config in _FLOAT32
        if (few or config.warpgroups < 3) and smem_bytes(problem, config) <= SMEM_LIMIT
    )


# ---- shared memory ------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory; at the top of this file, who owns it when."""

    q: Any  # [q tiles, ROWS, ..]
    k: Any  # [stages, block_kv, ..]
    v: Any  # [stages, block_kv, ..]
    out: Any  # [warpgroups, ROWS, ..]
    q_ids: Any  # [q tiles, ROWS]: segments of the queries; None where there are none
    kv_ids: Any  # [stages, ..]
    spans: Any  # [q tiles, RECORD]: see `tile_scheduler.records`
    q_ready: Any  # barriers, one a q tile
    ready: Any  # barriers, one an entry of the ring: see `Ring`
    free: Any
    fetched: Any = None  # barriers of `fetch`, as words; None where nothing is fetched
    claims: Any = None  # `claims.Smem` where blocks claim work tiles


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    whole = plan.v_swizzle // plan.values.itemsize
    if plan.config.block_kv % whole:
        raise ValueError(
            f"Config.block_kv must be a multiple of {whole} where v_head_dim is "
            f"{plan.problem.v_head_dim}: matmuls take probabilities by whole swizzles. "
            f"Got {plan.config.block_kv}"
        )
    q_slots = _q_slots(plan)
    return _scratch(plan, q_slots, _out_width(plan, q_slots))


def _scratch(plan: Plan, q_slots: int, out_width: int) -> Smem:
    config, out = plan.config, (plan.config.warpgroups, ROWS, out_width)
    barrier = plgpu.Barrier
    k_columns, v_columns = plan.scores.terms * plan.k_width, plan.values.terms * plan.v_width
    q_tiles, ids = q_slots * config.warpgroups, plan.has("q_segment_ids")
    return Smem(
        q=mosaic.swizzled((q_tiles, ROWS, k_columns), plan.scores.dtype, plan.k_swizzle),
        k=mosaic.swizzled(
            (config.stages, config.block_kv, k_columns), plan.scores.dtype, plan.k_swizzle
        ),
        v=mosaic.swizzled(
            (config.stages, config.block_kv, v_columns), plan.values.dtype, plan.v_swizzle
        ),
        out=mosaic.swizzled(out, plan.problem.dtype, _out_swizzle(plan)) if out_width else None,
        q_ids=plgpu.SMEM((q_tiles, ROWS), jnp.int32) if ids else None,
        kv_ids=plgpu.SMEM((config.stages, _ids_loaded(plan)), jnp.int32) if ids else None,
        spans=plgpu.SMEM((q_tiles, tile_scheduler.RECORD), jnp.int32) if ids else None,
        q_ready=barrier(num_barriers=q_tiles, num_arrivals=3 if ids else 1),
        ready=barrier(num_barriers=config.stages, num_arrivals=3 if ids else 2),
        free=barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
        fetched=plgpu.SMEM((2 * fetch.MOST_SLOTS,), jnp.int32) if plan.fetches else None,
        claims=claims.scratch() if plan.claims else None,
    )


def _out_swizzle(plan: Plan) -> int:
    if plan.problem.dtype != "float32":
        return plan.v_swizzle
    return tma_operands.swizzle_of(plan.v_width * 4)


def _ids_loaded(plan: Plan) -> int:
    """Of a kv tile: TMA writes to whole 128 bytes."""
    return max(plan.config.block_kv, 32)


def _room(plan: Plan, q_slots: int) -> int:
    """Bytes of shared memory that are left for the output."""
    return SMEM_LIMIT - BARRIERS - mosaic.REDUCED - mosaic.bytes_of(_scratch(plan, q_slots, 0))


def _q_slots(plan: Plan) -> int:
    """As many as were asked for, where there is room."""
    whole = plan.config.warpgroups * ROWS * plan.v_width * jnp.dtype(plan.problem.dtype).itemsize
    return plan.config.q_slots if _room(plan, 2) >= whole // 2 else 1


def _out_width(plan: Plan, q_slots: int) -> int:
    """Columns of the output that are stored at a time: as many as there is room for."""
    itemsize = jnp.dtype(plan.problem.dtype).itemsize
    row, room = itemsize * plan.config.warpgroups * ROWS, _room(plan, q_slots)
    swizzle = _out_swizzle(plan) // itemsize
    widths = [n for n in range(plan.v_width, 0, -swizzle) if plan.v_width % n == 0]
    return next((n for n in widths if row * n <= room), swizzle)


def shares_keys(problem: AttentionProblem) -> bool:
    """Whether batch rows may share k and v; the units of float32 are of each batch row."""
    return problem.dtype != "float32"


def reads_zigzag(problem: AttentionProblem) -> bool:
    """Whether k and v may lie in the order zigzag: a kv tile lies in one chunk."""
    chunk = problem.kv_len // (2 * problem.zigzag)
    return problem.dtype != "float32" and "kv_lengths" not in problem.arrays and chunk % 128 == 0


def fetches(problem: AttentionProblem) -> bool:
    """Whether k and v may be those of this GPU alone: see `fetch`."""
    if not fetch.takes(problem):
        return False
    config = Config.default(problem)
    fits = smem_bytes(problem, config) <= SMEM_LIMIT
    return fits and fetch.Sizes.of(plan_of(problem, config)).slots >= fetch.LEAST_SLOTS


def smem_bytes(problem: AttentionProblem, config: Any) -> int:
    return mosaic.bytes_of(scratch(plan_of(problem, config))) + BARRIERS + mosaic.REDUCED


# ---- consumers: a warpgroup each, 64 query rows of every work tile -------------------------------


def _consume(ctx: Context, block_id: Any, wg: Any) -> None:
    """All work tiles of a block."""
    plan, refs, smem = ctx
    q_tiles = smem.q.shape[0] // plan.config.warpgroups

    def q_slot(i):
        return wg if q_tiles == 1 else wg + (i & 1) * plan.config.warpgroups

    def listed_rows(code):
        return tile_scheduler.listed_rows(ctx, tile_scheduler.tile_of(ctx, code), wg)

    def compute(i, code, own, slot, next_one):
        """`next_one`: the code of the work tile after this one, and `there()`: is there one?"""
        following, there = next_one

        def load_next():
            tile = tile_scheduler.tile_of(ctx, following)
            pl.when(there())(lambda: _load_q(ctx, tile, wg, q_slot(i + 1)))

        branches = "empty" in plan.sections and not plan.never_empty
        if q_tiles > 1 and branches:
            load_next()
        q = q_slot(i)
        tile = tile_scheduler.tile_of(ctx, code)
        plgpu.barrier_wait(smem.q_ready.at[q])
        ids, record, same_segment = None, None, None
        if smem.q_ids is not None:
            ids, record = smem.q_ids.at[q], functools.partial(_read_record, smem, q)
            same_segment = record(4 * wg + 1), record(4 * wg + 2)
        lo, listed, last = 0, None, None
        if own is not None:
            hi, span, last = own
            listed = tile_scheduler.listed(ctx, tile, (span.hi, last))
        else:
            lo, hi = tile_scheduler.block_span(plan, record, tile)
            span = tile_scheduler.rows_span(plan, record, tile, wg)
            span = tile_scheduler.at_least_one(plan, span, hi)
        tile, row = tile_scheduler.own_rows(plan, tile, wg)
        rows = Rows(tile, row, wg, span, q, ids, same_segment, listed, last)

        def some(slot):
            slot = _release_unused(ctx, hi - rows.span.hi, slot)
            meanwhile = load_next if q_tiles > 1 and not branches else None
            state, slot = mainloop(ctx, rows, slot, meanwhile)
            slot = _release_unused(ctx, rows.span.lo - lo, slot)
            return Result(state.acc, state.row_sum, state.row_max), slot

        def none(slot):
            slot = _release_unused(ctx, jnp.where(hi > lo, hi - lo + 1, 0), slot)
            return no_keys(plan), slot

        if branches:
            result, slot = lax.cond(rows.span.hi > rows.span.lo, some, none, slot)
        else:
            result, slot = some(slot)

        if q_tiles == 1:
            plgpu.commit_smem()  # by now all warps have read it, and TMA will write there
            load_next()
        own = listed_rows(following)  # read under the epilogue
        _epilogue(ctx, rows, result)
        return slot, own

    def first_q(code):
        _load_q(ctx, tile_scheduler.tile_of(ctx, code), wg, q_slot(0))

    if plan.claims:
        claims.consume(ctx, block_id, first_q, compute)
    else:
        _scheduled(ctx, block_id, first_q, listed_rows, compute)
    plgpu.wait_smem_to_gmem(0)


def _scheduled(ctx: Context, block_id: Any, first_q: Any, listed_rows: Any, compute: Any) -> None:
    """The work tiles of a block by `tile_scheduler.schedule`."""
    schedule = ctx.refs.schedule
    count, first, second = (schedule[block_id, i] for i in range(3))
    first_q(first)

    def one_tile(i, carry):
        slot, code, following, own = carry
        after = schedule[block_id, i + 3]  # read long before it is used
        slot, own = compute(i, code, own, slot, (following, lambda: i + 1 < count))
        return slot, following, after, own

    lax.fori_loop(0, count, one_tile, (jnp.int32(0), first, second, listed_rows(first)))


def _read_record(smem: Smem, q: Any, i: Any) -> Any:
    return smem.spans[q, i]


def _load_q(ctx: Context, tile: Tile, wg: Any, slot: Any) -> None:
    """The rows of a consumer, and where there are segments what `segments` has found of them."""
    plan, refs, smem = ctx
    at, ready = smem.q.at[slot], smem.q_ready.at[slot]
    own, row = tile_scheduler.own_rows(plan, tile, wg)
    rows, columns = pl.ds(row, ROWS), mosaic.columns(refs.q, 0, smem.q.shape[-1], own.head)
    plgpu.copy_gmem_to_smem(refs.q.at[own.batch, rows, own.head, columns], at, ready)
    if smem.q_ids is not None:
        ids = refs.q_segment_ids.at[tile.batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.q_ids.at[slot], ready)
        number = lax.div(tile.row, jnp.int32(plan.tile_rows))
        record = refs.segment_spans.at[tile.batch, number]
        plgpu.copy_gmem_to_smem(record, smem.spans.at[slot], ready)


def _release_unused(ctx: Context, entries: Any, slot: Any) -> Any:
    """Releases entries of the ring that only other consumers need; the slot after them."""
    ring = Ring.of(ctx)

    def one(_, slot):
        ring.wait(slot)
        ring.release(slot)
        return ring.after(slot)

    return lax.fori_loop(0, entries, one, slot)


# ---- mainloop -----------------------------------------------------------------------------------


class State(NamedTuple):
    """What is carried from kv tile to kv tile."""

    acc: Any  # [ROWS, v_width]: the output before it is divided
    row_sum: Any  # [ROWS, PARTIALS]
    row_max: Any  # [ROWS]
    p: Any  # [ROWS, block_kv], its terms: of the tile whose values are still to come
    rescale: Any = None  # [ROWS]: what acc is still to be multiplied by; None: nothing


class Result(NamedTuple):
    """What is known of rows when all of their keys have been taken."""

    acc: Any  # [ROWS, v_width]
    row_sum: Any  # [ROWS, PARTIALS]
    row_max: Any  # [ROWS]


def no_keys(plan: Any) -> Result:
    """Of rows that need no kv tile."""
    acc = mosaic.filled((ROWS, plan.v_width), 0.0)
    row_sum = mosaic.filled((ROWS, softmax.PARTIALS), 0.0)
    return Result(acc, row_sum, mosaic.filled((ROWS,), -jnp.inf))


class _Scale(NamedTuple):
    """How scores become logits in log2 units."""

    raw: Any  # what they are multiplied by first, or None: 1
    unit: Any  # what turns logits into log2 units; None: they are


def _scale_of(ctx: Context, tile: Tile) -> _Scale:
    plan, refs = ctx.plan, ctx.refs
    if refs.units is None:
        return _Scale(None, plan.unit)
    by = refs.units[0, tile.batch, lax.div(tile.head, jnp.int32(plan.problem.group))]
    return _Scale(by, None) if plan.unit is None else _Scale(None, by * plan.unit)


def _p_operand(plan: Plan, p: Any) -> tuple[Any, ...]:
    """Probabilities, as the left operand of the matmul with the values."""
    p = p * SPREAD if plan.scaled else p
    return wgmma.terms_of_registers(p, plan.values)


def _score_operands(ctx: Context, rows: Rows, slot: Any) -> tuple[Any, Any]:
    """Q and K^T of a tile of scores."""
    plan, smem = ctx.plan, ctx.smem
    at = rows.q_slot
    if plan.k_width * plan.scores.bytes > 512:
        # Else addresses in q are computed before the loop and spilled.
        at = at + mosaic.opaque_zero(slot)
    q = wgmma.terms_of_smem(smem.q.at[at], plan.scores)
    return q, wgmma.transposed(wgmma.terms_of_smem(smem.k.at[slot], plan.scores))


def _ids_at(smem: Smem, slot: Any) -> Any:
    return None if smem.kv_ids is None else smem.kv_ids.at[slot]


def _prologue(ctx: Context, rows: Rows, slot: Any, scale: _Scale, meanwhile: Any) -> State:
    """The last kv tile, whose scores overlap with nothing but `meanwhile`."""
    plan, smem = ctx.plan, ctx.smem
    ring, shape = Ring.of(ctx), (ROWS, plan.config.block_kv)
    ring.wait(slot)
    s = wgmma.matmul(shape, *_score_operands(ctx, rows, slot), meanwhile)
    if smem.kv_ids is None:
        ring.release(slot)
    masked: Any = "first_masked" in plan.sections
    masked = None if masked and plan.first_may_be_whole else masked
    s = s if scale.raw is None else s * scale.raw
    here, ids, span = rows.knowing(rows.last), _ids_at(smem, slot), rows.span
    whole = span.full_lo, span.full_hi
    given, offset = score_mod.logits_by_row_bounds(ctx, here, span.hi - 1, s, masked, ids, whole)
    if smem.kv_ids is not None:
        ring.release(slot)
    nothing = mosaic.filled((ROWS,), -jnp.inf)
    new = softmax.step(given, scale.unit, nothing, empty_ok=True, offset=offset)
    acc = mosaic.filled((ROWS, plan.v_width), 0.0)
    rescale = new.rescale if plan.exact else None
    return State(acc, new.row_sum, new.row_max, _p_operand(plan, new.p), rescale)


def mainloop(
    ctx: Context, rows: Rows, slot: Any, meanwhile: Any, turns: Any = None
) -> tuple[State, Any]:
    """All kv tiles of a consumer's rows, from the last to the first, and the slot after them. Where
    some are fetched, a whole one may be another than its number says: nothing reads that then.
    `meanwhile`: what else there is to do, under the first matmul. `turns`: what makes consumers
    issue their matmuls in turn (`take`, `give`); None: whenever they can.
    """
    plan, smem = ctx.plan, ctx.smem
    span, config, ring = rows.span, plan.config, Ring.of(ctx)
    shape = (ROWS, config.block_kv)
    empty_ok = plan.adds_to_logits
    scale = _scale_of(ctx, rows.tile)
    state = _prologue(ctx, rows, slot, scale, meanwhile)

    def step(masked, i, carry):
        t = -1 - i  # loops count up
        state, slot, number = carry
        here, following = rows, None
        if number is not None:
            here, following = rows.knowing(number), rows.kv_tile(t - 1)
        ring.wait(slot)
        if turns is not None:
            turns.take()
        values = wgmma.terms_of_smem(smem.v.at[slot], plan.values)

        def matmuls(scores, out):
            wgmma.multiply(scores, *_score_operands(ctx, rows, slot))
            wgmma.multiply(out, state.p, values)
            if turns is not None:
                turns.give()

        def softmax_step(s):
            s = s if scale.raw is None else s * scale.raw
            given, offset = score_mod.logits_by_row_bounds(
                ctx, here, t, s, masked, _ids_at(smem, slot), (low, high)
            )
            how = {"empty_ok": masked is not False or empty_ok, "offset": offset}
            return softmax.next_step(
                given, scale.unit, state.row_max, before_wait=config.exp_before_wait, **how
            )

        if plan.exact:
            operands = functools.partial(_score_operands, ctx, rows, slot)
            some = (state.acc, state.p, values, plan.v_swizzle, (state.rescale, None))
            acc, s = wgmma.exact_matmul_add_overlapped(*some, shape, operands)
            new = softmax_step(s)
            row_sum = state.row_sum * mosaic.broadcast_rows(new.rescale, state.row_sum.shape)
        else:
            behind = wgmma.products(plan.values.terms, plan.values.terms)
            like = softmax.Step(
                mosaic.filled(shape, 0.0),
                state.row_max,
                state.row_max,
                state.row_sum,
                jnp.int32(0) + slot,
            )
            acc, new = wgmma.overlapped(state.acc, like, matmuls, softmax_step, behind)
        ring.release(slot)
        if not plan.exact:
            acc, row_sum = softmax.rescaled(new, (acc, state.row_sum))
        # P is rounded after the wait: before it, ptxas takes the registers for operands of the
        # matmul in flight and serialises both (C7513)
        p = _p_operand(plan, new.p)
        rescale = new.rescale if plan.exact else None
        new_state = State(acc, row_sum + new.row_sum, new.row_max, p, rescale)
        return new_state, ring.after(slot), following

    first = span.hi - 1
    ahead = rows.kv_tile(first - 1) if plan.reads_ahead else None
    carry = state, ring.after(slot), ahead
    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), first)  # full tiles end here
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)  # and begin here
    if plan.one_loop:
        carry = lax.fori_loop(-first, -span.lo, functools.partial(step, None), carry)
    else:
        if "high" in plan.sections:
            carry = lax.fori_loop(-first, -high, functools.partial(step, True), carry)
        carry = lax.fori_loop(-high, -low, functools.partial(step, False), carry)
        if "low" in plan.sections:
            carry = lax.fori_loop(-low, -span.lo, functools.partial(step, True), carry)

    state, slot, _ = carry
    return _last_values(ctx, state, slot)


def _last_values(ctx: Context, state: State, slot: Any) -> tuple[State, Any]:
    """The state with the values of the first kv tile, which the steps leave, and the next slot."""
    (plan, _, smem), ring = ctx, Ring.of(ctx)
    ring.wait(slot)
    values = wgmma.terms_of_smem(smem.v.at[slot], plan.values)
    if plan.exact:
        factors = (state.rescale, None)
        acc = wgmma.exact_matmul_add(state.acc, state.p, values, plan.v_swizzle, factors)
    else:
        acc = wgmma.matmul_add(state.acc, state.p, values)
    ring.release(slot)
    return state._replace(acc=acc), ring.after(slot)


# ---- epilogue -----------------------------------------------------------------------------------


def _epilogue(ctx: Context, rows: Rows, result: Result) -> None:
    """Divides by the row sums, and stores the output and the log-sum-exp."""
    plan, refs, smem = ctx
    acc, tile = result.acc, rows.tile
    sink = refs.sinks[tile.head] if plan.has("sinks") else None
    factor, lse = softmax.finish(result.row_max, result.row_sum, sink)
    if refs.units is not None:
        head = lax.div(tile.head, jnp.int32(plan.problem.group))
        factor = factor * refs.units[1, tile.batch, head]
    acc = acc * mosaic.broadcast_rows(factor, acc.shape)
    if tile.q_len is not None:
        inside = mosaic.positions((ROWS,), 0, rows.row) < tile.q_len
        lse = jnp.where(inside, lse, -jnp.inf)
        acc = jnp.where(mosaic.broadcast_rows(inside, acc.shape), acc, 0.0)
    mosaic.store(refs.lse.at[tile.batch, tile.head, pl.ds(rows.row, ROWS)], lse)
    width, staged = smem.out.shape[-1], smem.out.at[rows.wg]
    for column in range(0, plan.v_width, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = lax.slice(acc, (0, column), (ROWS, column + width))
        staged[...] = part.astype(staged.dtype)
        plgpu.commit_smem()
        columns = mosaic.columns(refs.out, column, width, tile.head)
        where = (tile.batch, pl.ds(rows.row, ROWS), tile.head, columns)
        plgpu.copy_smem_to_gmem(staged, refs.out.at[where])


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: Refs, *rest: Any, plan: Plan) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    out, lse, *fetched, smem = rest
    if plan.fetches:
        refs = refs._replace(fetching=refs.fetching._replace(k=fetched[0], v=fetched[1]))
    ctx = Context(plan, refs._replace(out=out, lse=lse), smem)
    produce = functools.partial(producer.produce, ctx, block_id)
    consume = functools.partial(_consume, ctx, block_id, wg)
    consumers = plan.config.warpgroups
    mosaic.share_registers(wg, consumers, produce, consume, REGISTERS[consumers])


def run(inputs: AttentionInputs, problem: AttentionProblem, config: Config) -> tuple[Any, Any]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    batch, q_len = problem.batch, problem.q_len
    if has_no_scores(problem):
        return of_no_scores(problem)
    plan = plan_of(problem, config)
    if plan.fetches:
        fetch.check(plan)
    refs = _operands(plan, inputs)
    width = plan.v_width if problem.dtype == "float32" else problem.v_head_dim
    padded_shape = (*refs.q.shape[:3], tma_operands.width_in_tma(width))
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct(padded_shape, problem.dtype),
            jax.ShapeDtypeStruct((batch, problem.q_heads, plan.padded_rows), jnp.float32),
            *(fetch.fetched_shapes(plan, refs.k, refs.v) if plan.fetches else ()),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_fwd_sm90",
    )
    out, lse, *_ = kernel(refs)
    return out[:, :q_len, :, : problem.v_head_dim], lse[:, :, :q_len]


def _operands(plan: Plan, inputs: AttentionInputs) -> Refs:
    """What the kernel reads. XLA copies: q, k and v where they are float32 (see mma/wgmma.py); they
    (and the output, afterwards) where T or S is above 8 and no multiple of 8, or a head dim above
    64 and no multiple of 16, which Mosaic's TMA would clip; bias and mask_array where T or S is no
    multiple of a tile; segment ids; one value tile a sequence where there are kv_lengths.
    """
    problem = plan.problem
    fields = {name: getattr(inputs, name) for name in problem.arrays}
    powers: dict[str, Any] = {}
    if plan.scaled:
        powers = wgmma.powers(inputs, problem.group)
        products = (powers["q"] * powers["k"], powers["v"] * (1 / SPREAD))
        fields["units"] = jnp.stack(products)
    for name, kind, width in (
        ("q", plan.scores, plan.k_width),
        ("k", plan.scores, plan.k_width),
        ("v", plan.values, plan.v_width),
    ):
        fields[name] = tma_operands.stored(getattr(inputs, name), kind, width, powers.get(name))
    fields |= functions.operands(inputs) | tile_scheduler.operands(plan, inputs)
    if plan.has("q_segment_ids"):
        if segments.fits(plan):
            made = segments.prepare(plan, inputs.q_segment_ids, inputs.kv_segment_ids)
        else:
            made = segments.by_xla(plan, inputs, fields)
        fields["segment_spans"], fields["schedule"] = made
    if plan.claims:
        fields["counter"] = claims.counter()
    if plan.fetches:
        fields["fetching"] = fetch.operands(plan, inputs, fields.get("segment_spans"))
    if plan.has("kv_lengths"):
        lengths = jnp.asarray(inputs.kv_lengths)[:: problem.share]
        fields["v_edge"] = tma_operands.edge(fields["v"], lengths, plan.config.block_kv)
    return Refs(**{name: fields.get(name) for name in Refs._fields})
