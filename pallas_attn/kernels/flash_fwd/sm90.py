"""Flash attention forward for Hopper: bfloat16, float16 and float32.

Algorithm: an online softmax over kv tiles, with FlashAttention-3's overlap inside a warpgroup
(arXiv 2407.08608). A step of the mainloop issues two matmuls, the scores S = Q K^T of a kv tile and
then O += P V of the tile before it, and computes the softmax of S while the second is in flight.
The paper's other overlap, barriers that order the warpgroups, was measured to be slower on an H200
and is not done.

Grid: one persistent block a multiprocessor. It takes the work tiles that `tile_scheduler.schedule`
lists for it, each of which is `64 * warpgroups` query rows of one head. They are ordered longest
first (causal: last rows first) within L2 groups, heads whose K and V fit in L2; the query heads of
a kv head are neighbours.

Warpgroups: one producer, which loads K and V by TMA for all work tiles of the block, and
`Config.warpgroups` consumers of 64 query rows each. A consumer loads its own rows of Q, computes
their result and stores it. Consumers synchronise only at the ring of K and V, in no fixed order.

Shared memory, and who owns it when:
  q [warpgroup]   the consumer's own: it loads its rows by TMA and waits for `q_ready`. Where there
                  is room there are two a consumer, and the rows of the next work tile arrive during
                  this one; else they are loaded when all kv tiles of this one are done
  k, v [stages]   a ring of entries. Entry e of a work tile holds K of its e-th kv tile and V of the
                  kv tile before that, which is what one step reads: one wait, one release a step.
                  The producer owns an entry from when all consumers have released it (`free`) until
                  both of its copies have landed (`ready`), the consumers until they release it
  bias_and_mask [stages]  tiles of bias and mask_array, in the same entries: `score_tiles`
  out [warpgroup] the consumer's own: some columns of the output on their way to global memory

Kv tiles are taken from the last to the first. Keys that the diagonal, a length or the end of S cuts
off lie at the end, so that the tile which needs a mask is the first, whose softmax overlaps with
nothing anyway, and the loop over the others needs none. A window's left edge is masked in the last
tiles.

What bounds it: the mainloop has 5.6 instructions a score, among them 1.0 ex2, 1.0 max, 1.0
multiply-add, 1.0 adds and 0.5 conversions. At head dim 64 the ex2 alone (16 a cycle; of bfloat16
pairs they are two instructions as well) take as long as the matmuls at their peak; at 128 half of
that, at 256 a quarter. The latency between scores and exponents is hidden in part by the two or
three warps of a scheduler: see `softmax.next_step`. Where T is small, the start and end of a work
tile count: the next q is loaded during the first matmul, and the barriers that Mosaic puts at each
copy and store are off. Those that are needed are written out (`plgpu.commit_smem`).

To follow a call, read `run`, `_kernel` and `_consume` here; then tile_scheduler.py, warpgroups.py,
attention/tiles.py, attention/logits.py, attention/softmax.py and mma/wgmma.py. Special cases have
files of their own (`Special`, below), which are imported where they are needed.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import FLOAT8, AttentionInputs, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import tile_scheduler, tiles, tma_operands
from pallas_attn.kernels.attention.logits import LogitRules
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import (
    MOST_STAGES,
    Distribution,
    QueryPlan,
    Turn,
    work_tile,
)
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    ForwardRefs,
    KernelContext,
    QueryTiling,
)
from pallas_attn.kernels.flash_fwd import shared_memory, sm90_defaults, warpgroups
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import (
    GmemRef,
    Index,
    KernelConfig,
)

documents = Special("kernels.flash_fwd.documents")  # segment ids
functions = Special("kernels.attention.functions")  # functions of positions
linear_scores = Special("kernels.attention.linear_scores")  # a slope and an offset a row
listed = Special("kernels.flash_fwd.listed")  # mask functions, whose kv tiles are in lists
block_tables = Special("kernels.attention.block_tables")  # heads of a group in a work tile
key_mask_ranges = Special("kernels.flash_fwd.key_mask_ranges")  # masks of keys
key_masks = Special("kernels.attention.key_masks")
score_tiles = Special("kernels.attention.score_tiles")  # bias and mask_array by tiles
claims = Special("kernels.attention.claims")  # long documents; K and V of a head beyond L2
fetch = Special("kernels.flash_fwd.fetch")  # K and V in the memory of other GPUs
fetch_producer = Special("kernels.flash_fwd.fetch_producer")
float32_mainloop = Special("kernels.flash_fwd.float32_mainloop")  # in terms of 16 bits
float8_mainloop = Special("kernels.flash_fwd.float8_mainloop")  # with scales

# Registers of a consumer's thread, by number of consumers.
REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 2  # consumers
    block_kv: int = 128  # keys of a kv tile
    stages: int = 2  # entries of the ring of K and V
    l2_heads: int = 0  # heads whose work tiles are taken together; 0: `heads_of_l2_group`
    grid: int = MULTIPROCESSORS  # blocks; 0: one a work tile
    q_slots: int = 2  # q tiles of a consumer; 2: the next is loaded early, where there is room
    fetchers: int = 16  # blocks that begin by fetching K and V of other GPUs: see `fetch`
    claims: bool = False  # blocks claim work tiles, where each has a kv tile: see `claims`
    heads_together: bool = False  # consumers take heads of a group: see `block_tables`
    float32_sums: bool = True  # float8: whether P V of kv tiles are added up in registers

    def __post_init__(self):
        check(
            self,
            warpgroups=(self.warpgroups in (1, 2, 3, 4), "1, 2, 3 or 4"),
            block_kv=(16 <= self.block_kv <= 256 and self.block_kv % 8 == 0, "16, 24, .. 256"),
            stages=(self.stages >= 2, "at least 2"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
            q_slots=(self.q_slots in (1, 2), "1 or 2"),
            fetchers=(self.fetchers >= 1, "at least 1"),
            claims=(
                not self.claims or self.stages <= MOST_STAGES,
                f"False above {MOST_STAGES} stages",
            ),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The fastest on an H200 of those that fit in registers and shared memory."""
        return sm90_defaults.config_of(problem, sm90_defaults.Configs(cls, smem_bytes))


@functools.lru_cache(maxsize=256)
def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The static values of a launch; kept, since all calls with the same facts share them."""
    if config.heads_together:
        plan = plan_of(problem, dataclasses.replace(config, heads_together=False))
        with_heads: QueryPlan = block_tables.with_heads(dataclasses.replace(plan, config=config))
        return with_heads
    linear, claimed = False, False
    rows = ROWS * config.warpgroups
    tiling = QueryTiling(problem.q_len, problem.kv_len, rows, config.block_kv)
    if problem.score_program is not None:
        linear = problem.dtype not in FLOAT8 and linear_scores.takes(problem)
    if config.claims:
        claimed = claims.is_possible(problem, tiling)
    return QueryPlan(
        problem,
        config,
        tiling,
        Distribution.of(problem, tiling, (config.grid, config.l2_heads), claimed),
        LogitRules.of(problem, config.block_kv, linear=linear),
        *_work_tiles_of(problem, claimed),
        _ranges_of(problem),
        _producer_of(problem),
        _mainloop_of(problem),
        score_tiles=_score_tiles_of(problem, config),
        claimed_order=claims.schedule if claimed else None,
        busy_before=fetch.busy_before if problem.fetches > 1 else None,
        panels=tma_operands.takes_panels(problem),
    )


def _work_tiles_of(
    problem: AttentionProblem, claimed: bool
) -> tuple[tile_scheduler.WorkTiles, tile_scheduler.WorkTiles]:
    """The sources of work tiles of the producer and of consumers, who load q a work tile ahead."""
    if claimed:
        return claims.Claiming(early="q_segment_ids" in problem.arrays), claims.Claimed()
    return tile_scheduler.StaticList(ahead=1), tile_scheduler.StaticList(ahead=2)


def _ranges_of(problem: AttentionProblem) -> type[tile_scheduler.Ranges]:
    """The class that decides which kv tiles a work tile needs."""
    if problem.mask_program is not None:
        return listed.Ranges
    if "q_segment_ids" in problem.arrays:
        return documents.Ranges
    if problem.masks_keys:
        return key_mask_ranges.Ranges
    return tile_scheduler.Ranges


def _producer_of(problem: AttentionProblem) -> tile_scheduler.Produce:
    if problem.fetches > 1:
        return fetch_producer.produce
    if problem.mask_program is not None:
        return listed.produce
    return warpgroups.produce


def _mainloop_of(problem: AttentionProblem) -> tile_scheduler.Mainloop:
    if problem.dtype in FLOAT8:
        return float8_mainloop.mainloop
    if problem.dtype == "float32":
        return float32_mainloop.mainloop
    return warpgroups.mainloop


def _score_tiles_of(problem: AttentionProblem, config: Config) -> tuple[Any, ...]:
    """The arrays (bias, mask_array, scales of float8) that TMA loads by tiles."""
    loaded = {"bias", "mask_array"} & set(problem.arrays) or max(problem.scale_blocks[1:]) > 1
    if not loaded or problem.dtype == "float32" or problem.fetches > 1:
        return ()
    return score_tiles.of_problem(problem, config.block_kv, config.float32_sums)


# ---- limits --------------------------------------------------------------------------------------


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the kernel cannot take a problem, or None."""
    if problem.dtype in FLOAT8:
        return float8_mainloop.limit(problem)
    return tiles.limit(problem)


def shares_keys(problem: AttentionProblem) -> bool:
    """Whether batch rows may share k and v: not with float32 and float8, whose units differ from
    batch row to batch row.
    """
    return problem.dtype not in ("float32", *FLOAT8)


def reads_zigzag(problem: AttentionProblem) -> bool:
    """Whether k and v may lie in the order zigzag: a kv tile lies in one chunk."""
    chunk = problem.kv_len // (2 * problem.zigzag)
    return shares_keys(problem) and "kv_lengths" not in problem.arrays and chunk % 128 == 0


def fetches(problem: AttentionProblem) -> bool:
    """Whether k and v may be those of this GPU alone: see `fetch`."""
    if not fetch.takes(problem):
        return False
    config = Config.default(problem)
    fits = gpu_specs.fits(smem_bytes(problem, config), problem.gpu)
    return fits and fetch.Sizes.of(plan_of(problem, config)).slots >= fetch.LEAST_SLOTS


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    return shared_memory.bytes_of(plan_of(problem, config))


# ---- consumers: a warpgroup each, 64 query rows of every work tile -------------------------------


def _consume(ctx: KernelContext, block: Index, wg: Index) -> None:
    """All work tiles of a block."""
    plan, smem, consumers = ctx.plan, ctx.smem, ctx.plan.config.warpgroups
    work_tiles: tile_scheduler.WorkTiles = plan.consumer_tiles
    ranges: type[tile_scheduler.Ranges] = plan.ranges
    mainloop: tile_scheduler.Mainloop = plan.mainloop
    double_buffered = smem.q_ready.shape[0] > consumers
    may_be_empty = "empty" in plan.sections and not ranges.never_empty(plan.problem)

    def q_slot(i: Index) -> Index:
        return wg + (i & 1) * consumers if double_buffered else wg

    def one_tile(turn: Turn, carry: tuple[Index, Any]) -> tuple[Index, Any]:
        slot, record = carry

        def load_next_q() -> None:
            following = work_tile(ctx, turn.following)
            load = functools.partial(warpgroups.load_q, ctx, following, wg)
            pl.when(turn.has_next())(lambda: load(q_slot(turn.index + 1)))

        if double_buffered and may_be_empty:
            load_next_q()
        tile = work_tile(ctx, turn.code)
        q = q_slot(turn.index)
        plgpu.barrier_wait(smem.q_ready.at[q])
        (lo, hi), rows = ranges.of_rows(ctx, tile, wg, q, record)

        def attend(slot: Index) -> tuple[OutputSums, Index]:
            slot = _release_unused(ctx, hi - rows.span.hi, slot)
            meanwhile = load_next_q if double_buffered and not may_be_empty else None
            result, slot = mainloop(ctx, rows, slot, meanwhile)
            return result, _release_unused(ctx, rows.span.lo - lo, slot)

        def skip(slot: Index) -> tuple[OutputSums, Index]:
            nothing = OutputSums.nothing(warpgroups.no_values(plan.v), ROWS)
            return nothing, _release_unused(ctx, jnp.where(hi > lo, hi - lo + 1, 0), slot)

        if may_be_empty:
            result, slot = lax.cond(rows.span.hi > rows.span.lo, attend, skip, slot)
        else:
            result, slot = attend(slot)
        if not double_buffered:
            plgpu.commit_smem()  # by now all warps have read it, and TMA will write there
            load_next_q()
        record = ranges.read_for_rows(ctx, turn.following, wg)  # under the epilogue
        warpgroups.store_result(ctx, rows, result)
        return slot, record

    start = work_tiles.start(ctx, block)
    warpgroups.load_q(ctx, work_tile(ctx, start.codes[0]), wg, q_slot(0))
    record = ranges.read_for_rows(ctx, start.codes[0], wg)
    work_tiles.for_each_tile(ctx, block, start, one_tile, (jnp.int32(0), record))
    plgpu.wait_smem_to_gmem(0)


def _release_unused(ctx: KernelContext, entries: Index, slot: Index) -> Index:
    """Releases entries of the ring that only other consumers need; returns the slot after them."""
    ring = Ring.of(ctx)

    def release(_: Index, slot: Index) -> Index:
        ring.wait(slot)
        ring.release(slot)
        return ring.after(slot)

    return lax.fori_loop(0, entries, release, slot)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: ForwardRefs, out: GmemRef, lse: GmemRef, *rest: Any, plan: QueryPlan) -> None:
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    *fetched, smem = rest
    if fetched:
        refs = refs._replace(fetching=refs.fetching._replace(k=fetched[0], v=fetched[1]))
    ctx = KernelContext(plan, refs._replace(out=out, lse=lse), smem)
    assert plan.produce is not None
    produce = functools.partial(plan.produce, ctx, block)
    consume = functools.partial(_consume, ctx, block, wg)
    consumers = plan.config.warpgroups
    return mosaic.share_registers(wg, consumers, produce, consume, REGISTERS[consumers])


def run(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    plan = plan_of(problem, config)
    refs, fetched = operands(plan, inputs), []
    if problem.fetches > 1:
        fetched = fetch.fetched_shapes(plan, refs.k, refs.v)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(*results(plan), *fetched),
        scratch_types=(shared_memory.scratch(plan),),
        grid=(plan.order.grid,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_fwd_sm90",
    )
    if plan.skips_keys:
        refs = key_masks.with_spans(KernelContext(plan, refs))
    out, lse, *_ = kernel(refs)
    return out[:, : problem.q_len, :, : problem.v_head_dim], lse


@functools.lru_cache(maxsize=256)
def results(plan: QueryPlan) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The output, without panels in sizes that TMA writes whole, and the log-sum-exp."""
    problem = plan.problem
    width = problem.v_head_dim if shares_keys(problem) else plan.v.width
    rows, columns = tma_operands.rows_in_tma(problem.q_len), tma_operands.width_in_tma(width)
    if plan.panels:
        rows, columns = problem.q_len, width
    out, lse = (rows, problem.q_heads, columns), (problem.q_heads, problem.q_len)
    return (
        jax.ShapeDtypeStruct((problem.batch, *out), problem.result_dtype),
        jax.ShapeDtypeStruct((problem.batch, *lse), jnp.float32),
    )


def operands(plan: QueryPlan, inputs: AttentionInputs) -> ForwardRefs:
    """Global memory that the kernel reads. XLA copies: q, k and v where they are float32 (see
    mma/wgmma.py), or those of several GPUs in sizes that `lang.panels` is for; mask_array, to
    int8, unless it masks keys; segment ids; one value tile a sequence where there are kv_lengths.
    """
    problem = plan.problem
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in (*"qkv", *problem.arrays)}
    if problem.dtype == "float32":
        fields |= float32_mainloop.operands(plan, inputs)
    elif problem.dtype in FLOAT8:
        fields |= float8_mainloop.operands(plan, inputs)
    elif plan.is_padded and not plan.panels:
        fields |= {name: tma_operands.for_tma(getattr(inputs, name)) for name in "qkv"}
    if problem.mask_program is not None or problem.score_program is not None:
        fields |= functions.operands(inputs)
    fields |= tile_scheduler.operands(plan, inputs)
    if "q_segment_ids" in problem.arrays:
        fields |= documents.operands(plan, inputs, fields)
    if plan.order.claims:
        fields["counter"] = claims.counter()
    if problem.fetches > 1:
        fetch.check(plan)
        fields["fetching"] = fetch.operands(plan, inputs, fields.get("segment_spans"))
    if "kv_lengths" in problem.arrays and not plan.v.transposed:
        lengths = jnp.asarray(inputs.kv_lengths)[:: problem.share]
        fields["v_edge"] = tma_operands.edge(fields["v"], lengths, plan.config.block_kv)
    return ForwardRefs(**{name: fields[name] for name in ForwardRefs._fields if name in fields})


KERNEL = Kernel(
    Config,
    limit,
    smem_bytes,
    run,
    shares_keys=shares_keys,
    reads_zigzag=reads_zigzag,
    fetches=fetches,
)
