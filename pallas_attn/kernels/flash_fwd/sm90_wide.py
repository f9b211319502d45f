"""Flash attention forward for Hopper at head dims above 256: Gemma 4's global layers have 512.

An output of 64 x 512 numbers fills the registers of two warpgroups, so a block has 64 query rows
and loads, for each row, twice the bytes of K and V that a block of 128 rows loads at half the head
dim. Clusters of two blocks that share K and V by TMA multicast were as fast on an H200 without a
mask, and 3 % slower with a causal one, and are not used.

Grid: one persistent block a multiprocessor, each with the work tiles that
`tile_scheduler.schedule` lists for it, 64 query rows of a head.

Warpgroups, and the barriers that they arrive at:
  0, 1  P V, half of the columns each: `v_free` when a block of V has been multiplied, `p_free`
        when the probabilities of a tile have been, `factor_free`
  2     scores and softmax: `k_free` when a block of K or q has been read, `q_free`, `p_ready` when
        the probabilities of a tile and the row max that they are relative to are in shared memory,
        `factor_ready`
  3     the producer: `k_ready`, `v_ready`, `q_ready`

Shared memory: warpgroups 0, 1 and 2 have a ring each, of blocks of 64 rows by 128 columns. The ring
of warpgroup 2 holds the first columns of q, on their way to registers, and then K of each kv tile,
from the last to the first; those of warpgroups 0 and 1 hold their columns of V. The other columns
of q have a buffer of their own. A block is filled again when its reader has released it.

While warpgroup 2 computes the softmax of a tile, warpgroups 0 and 1 multiply the tile before by V.
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

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import logits, softmax, tile_scheduler, tiles, tma_operands
from pallas_attn.kernels.attention.tile_scheduler import (
    QueryPlan,
    Ranges,
    StaticList,
    Turn,
    work_tile,
)
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    ForwardRefs,
    KernelContext,
    QueryRows,
    Span,
    WorkTile,
)
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import OneForAll, check
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.panels import Block
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile, SmemRef

KEYS = 64  # keys of a kv tile
WIDTH = 128  # columns of a block of the ring
V_DIM = 512
V_WARPGROUPS, SCORES, PRODUCER = 2, 2, 3
V_BLOCKS = V_DIM // WIDTH // V_WARPGROUPS  # blocks of V of a warpgroup
IN_REGISTERS = 2  # largest number of blocks of q that stay in registers
P_SLOTS = 2
OUT_WIDTH = 32  # columns of the output that a warpgroup stores at a time
# Registers of a thread in warpgroups 0 and 1, in 2, and in the producer.
REGISTERS = (160, 168, 24)
SUPPORTED = {"q_offset", "q_lengths", "kv_lengths", "mask_left", "mask_right", "sinks", "bias"}


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """Tuning only: the result is the same up to rounding."""

    k_ring: int = 6  # blocks of the ring of warpgroup 2
    v_ring: int = 2  # blocks of the rings of warpgroups 0 and 1
    grid: int = MULTIPROCESSORS  # persistent blocks
    l2_heads: int = 0  # see `flash_fwd.sm90`

    block_kv, warpgroups = KEYS, 1  # a work tile has one warpgroup of rows

    def __post_init__(self) -> None:
        check(
            self,
            k_ring=(self.k_ring >= 1, "at least 1"),
            v_ring=(self.v_ring >= V_BLOCKS, f"at least {V_BLOCKS}"),
            grid=(self.grid >= 1, "at least 1"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
        )


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := tiles.limit(problem, V_DIM)) is not None:
        return refused
    other = "leave implementation=None"
    if problem.dtype == "float32":
        return Limit("it takes bfloat16 and float16, not float32", other)
    if max(problem.head_dim, problem.v_head_dim) <= 256:
        return Limit("it takes head dims above 256", other)
    functions = problem.mask_program is not None or problem.score_program is not None
    odd = set(problem.arrays) - SUPPORTED
    if functions or odd or problem.fetches > 1 or problem.share > 1 or problem.zigzag > 1:
        what = ", ".join(sorted(odd)) or "functions of positions or rows of several GPUs"
        return Limit(f"it does not take {what}", other)
    return None


# ---- shared memory -------------------------------------------------------------------------------


class WideSmem(NamedTuple):
    q: SmemRef  # [ROWS, ..]: the columns that are not in registers; None if there are none
    k: SmemRef  # [k_ring, KEYS, WIDTH]
    v: SmemRef  # [V_WARPGROUPS * v_ring, KEYS, WIDTH]
    p: SmemRef  # [P_SLOTS, ROWS, KEYS]: probabilities of two tiles, alternately
    out: SmemRef  # [V_WARPGROUPS, ROWS, OUT_WIDTH]
    row_max: SmemRef  # float32[P_SLOTS, ROWS]: the row max that probabilities are relative to
    factor: SmemRef  # float32[ROWS]: the last factor of each row of the output
    q_ready: Barrier
    q_free: Barrier
    k_ready: Barrier  # one for each block of the ring
    k_free: Barrier
    v_ready: Barrier
    v_free: Barrier
    p_ready: Barrier  # one for each slot
    p_free: Barrier
    factor_ready: Barrier
    factor_free: Barrier


def k_blocks(plan: QueryPlan) -> int:
    """Blocks of columns in a tile of K, or of q."""
    return pl.cdiv(plan.problem.head_dim, WIDTH)


def _q_in_smem(plan: QueryPlan) -> int:
    """Columns of q that lie in shared memory."""
    return max(k_blocks(plan) - IN_REGISTERS, 0) * WIDTH


def scratch(plan: QueryPlan) -> WideSmem:
    """Shared memory, described once: `run` allocates it, `smem_bytes` adds up its bytes."""
    config, dtype, barrier = plan.config, plan.problem.dtype, plgpu.Barrier
    columns = _q_in_smem(plan)
    if config.k_ring < k_blocks(plan):
        raise ValueError(
            f"Config.k_ring must be at least {k_blocks(plan)}, a kv tile, for {plan.problem}"
        )
    return WideSmem(
        q=mosaic.swizzled((ROWS, columns), dtype, 128) if columns else None,
        k=mosaic.swizzled((config.k_ring, KEYS, WIDTH), dtype, 128),
        v=mosaic.swizzled((V_WARPGROUPS * config.v_ring, KEYS, WIDTH), dtype, 128),
        p=mosaic.swizzled((P_SLOTS, ROWS, KEYS), dtype, 128),
        out=mosaic.swizzled((V_WARPGROUPS, ROWS, OUT_WIDTH), dtype, 2 * OUT_WIDTH),
        row_max=plgpu.SMEM((P_SLOTS, ROWS), jnp.float32),
        factor=plgpu.SMEM((ROWS,), jnp.float32),
        q_ready=barrier(),
        q_free=barrier(),
        k_ready=barrier(num_barriers=config.k_ring),
        k_free=barrier(num_barriers=config.k_ring),
        v_ready=barrier(num_barriers=V_WARPGROUPS * config.v_ring),
        v_free=barrier(num_barriers=V_WARPGROUPS * config.v_ring),
        p_ready=barrier(num_barriers=P_SLOTS),
        p_free=barrier(num_barriers=P_SLOTS, num_arrivals=V_WARPGROUPS),
        factor_ready=barrier(),
        factor_free=barrier(num_arrivals=V_WARPGROUPS),
    )


def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    return QueryPlan.of(problem, config, (config.grid, config.l2_heads))


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    buffers = mosaic.bytes_of(scratch(plan_of(problem, config)))
    return buffers + mosaic.BARRIERS + mosaic.REDUCTION_BYTES


# ---- the ring ------------------------------------------------------------------------------------


class Position(NamedTuple):
    """Numbers of ring blocks and kv tiles that this block of threads took before a work tile."""

    k: Index  # blocks of q and K
    tiles: Index  # kv tiles

    def after(self, ctx: KernelContext, kv_tiles: Index) -> "Position":
        """The position of the next work tile."""
        blocks = k_blocks(ctx.plan)
        return Position(self.k + _q_blocks(ctx.plan) + kv_tiles * blocks, self.tiles + kv_tiles)


def _q_blocks(plan: QueryPlan) -> int:
    """Blocks of q that stay in registers."""
    return min(k_blocks(plan), IN_REGISTERS)


def _k_block(ctx: KernelContext, number: Index) -> Block:
    smem, slot = ctx.smem, lax.rem(number, jnp.int32(ctx.plan.config.k_ring))
    return Block(smem.k.at[slot], smem.k_ready.at[slot], smem.k_free.at[slot])


def _key_blocks(ctx: KernelContext, position: Position, e: Index) -> list[tuple[Index, Block]]:
    """K of the e-th kv tile of a work tile: its blocks, numbered since the launch began."""
    count = k_blocks(ctx.plan)
    first = position.k + _q_blocks(ctx.plan) + e * count
    return [(first + n, _k_block(ctx, first + n)) for n in range(count)]


def _value_blocks(
    ctx: KernelContext, position: Position, e: Index, wg: Index
) -> list[tuple[Index, Block]]:
    """V of the e-th kv tile in a warpgroup's columns, likewise."""
    smem, ring, blocks = ctx.smem, ctx.plan.config.v_ring, []
    for n in range(V_BLOCKS):
        number = (position.tiles + e) * V_BLOCKS + n
        slot = wg * ring + lax.rem(number, jnp.int32(ring))
        block = Block(smem.v.at[slot], smem.v_ready.at[slot], smem.v_free.at[slot])
        blocks.append((number, block))
    return blocks


def _rows_of(ctx: KernelContext, turn: Turn) -> QueryRows:
    """The rows of a work tile, with the span of kv tiles that they need; hi <= lo: none."""
    return Ranges.of_rows(ctx, work_tile(ctx, turn.code), jnp.int32(0), None, None)[1]


def _count(span: Span) -> Index:
    """The number of kv tiles of a span."""
    return jnp.maximum(span.hi - span.lo, 0)


# ---- the producer --------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block_id: Index) -> None:
    """Loads q, K and V of all work tiles."""

    def one_tile(turn: Turn, position: Position) -> Position:
        rows = _rows_of(ctx, turn)
        tile, last, count = rows.tile, rows.span.hi - 1, _count(rows.span)
        _load_q(ctx, turn, tile, position)

        @pl.loop(0, count)
        def _(e: Index) -> None:
            for n, (number, block) in enumerate(_key_blocks(ctx, position, e)):
                block.acquire(number >= ctx.plan.config.k_ring)
                _load_block(ctx, tile, ("k", last - e, n), block)
            _load_values(ctx, tile, last - e, e, position)

        return position.after(ctx, count)

    _for_each_tile(ctx, block_id, one_tile, Position(jnp.int32(0), jnp.int32(0)))


def _for_each_tile(
    ctx: KernelContext, block_id: Index, body: Callable[[Turn, Any], Any], carry: Any
) -> None:
    """carry = body(turn, carry) for each work tile of a block."""
    work_tiles = StaticList(ahead=1)
    work_tiles.for_each_tile(ctx, block_id, work_tiles.start(ctx, block_id), body, carry)


def _load_q(ctx: KernelContext, turn: Turn, tile: WorkTile, position: Position) -> None:
    """Loads the rows of q: the first columns to the ring, the others to their buffer."""
    plan, refs, smem = ctx
    where = tile.batch, pl.ds(tile.row, ROWS), tile.head
    for n in range(_q_blocks(plan)):
        block = _k_block(ctx, position.k + n)
        block.acquire(position.k + n >= plan.config.k_ring)
        source = refs.q.at[(*where, pl.ds(n * WIDTH, WIDTH))]
        plgpu.copy_gmem_to_smem(source, block.ref, block.ready)
    if columns := _q_in_smem(plan):
        pl.when(turn.index > 0)(lambda: plgpu.barrier_wait(smem.q_free))
        source = refs.q.at[(*where, pl.ds(IN_REGISTERS * WIDTH, columns))]
        plgpu.copy_gmem_to_smem(source, smem.q, smem.q_ready)


def _load_values(
    ctx: KernelContext, tile: WorkTile, t: Index, e: Index, position: Position
) -> None:
    """Loads kv tile t of V. The tile that a length cuts comes from `v_edge`, a copy with zeros past
    the length.
    """

    def load(name: str, t: Index) -> None:
        for n in range(V_BLOCKS):
            for wg in range(V_WARPGROUPS):
                number, block = _value_blocks(ctx, position, e, jnp.int32(wg))[n]
                block.acquire(number >= ctx.plan.config.v_ring)
                _load_block(ctx, tile, (name, t, wg * V_BLOCKS + n), block)

    if "kv_lengths" not in ctx.plan.problem.arrays:
        return load("v", t)
    cut = (t + 1) * KEYS > tile.kv_len
    pl.when(cut)(lambda: load("v_edge", jnp.int32(0)))
    return pl.when(jnp.logical_not(cut))(lambda: load("v", t))


def _load_block(
    ctx: KernelContext, tile: WorkTile, what: tuple[str, Index, int], block: Block
) -> None:
    """Loads a block of columns; `what`: name of the array, kv tile, number of the block."""
    (name, t, n), plan = what, ctx.plan
    head, ref = lax.div(tile.head, jnp.int32(plan.problem.group)), getattr(ctx.refs, name)
    source = ref.at[tile.batch, pl.ds(t * KEYS, KEYS), head, pl.ds(n * WIDTH, WIDTH)]
    plgpu.copy_gmem_to_smem(source, block.ref, block.ready)


# ---- scores --------------------------------------------------------------------------------------


class Sums(NamedTuple):
    row_max: RegisterTile  # [ROWS]
    row_sum: RegisterTile  # [ROWS, softmax.PARTIALS]
    used: Index  # number of tiles since the launch began, which gives the slot of P


def _score(ctx: KernelContext, block_id: Index) -> None:
    """Warpgroup 2: probabilities and row maxima of all tiles, and the last factor of outputs."""
    smem, none = ctx.smem, jnp.int32(0)

    def one_tile(turn: Turn, carry: tuple[Position, Index]) -> tuple[Position, Index]:
        (position, used), rows = carry, _rows_of(ctx, turn)
        q = _queries(ctx, position)
        nothing = mosaic.filled((ROWS,), -jnp.inf)
        sums = Sums(nothing, mosaic.filled((ROWS, softmax.PARTIALS), 0.0), used)
        step = functools.partial(_score_tile, ctx, rows, q, position)

        sums = lax.fori_loop(0, _count(rows.span), step, sums)
        if smem.q is not None:
            plgpu.barrier_arrive(smem.q_free)
        _finish(ctx, turn, rows, sums)
        return position.after(ctx, _count(rows.span)), sums.used

    _for_each_tile(ctx, block_id, one_tile, (Position(none, none), none))


def _queries(ctx: KernelContext, position: Position) -> list[RegisterTile]:
    """Reads the columns of q that stay in registers."""
    loaded = []
    for n in range(_q_blocks(ctx.plan)):
        block = _k_block(ctx, position.k + n)
        block.wait()
        loaded.append(plgpu.load(block.ref, layout=mosaic.TILE))
        plgpu.commit_smem()  # all warps have read the block before TMA writes to it again
        block.release()
    if ctx.smem.q is not None:
        plgpu.barrier_wait(ctx.smem.q_ready)
    return loaded


def _score_tile(
    ctx: KernelContext,
    rows: QueryRows,
    q: list[RegisterTile],
    position: Position,
    e: Index,
    sums: Sums,
) -> Sums:
    """The scores and probabilities of the e-th kv tile of a work tile."""
    plan, smem = ctx.plan, ctx.smem
    s = _product(ctx, q, position, e)
    span, unit = rows.span, plan.logit_rules.unit
    t = span.hi - 1 - e
    masked = None if plan.sections - {"empty"} else False
    whole = (span.full_lo, span.full_hi)
    s, _ = logits.masked_logits(ctx, rows, t, jnp.int32(0), s, masked, whole)
    new = softmax.next_step(s, unit, sums.row_max, empty_ok=True)
    row_sum = softmax.rescaled(new, sums.row_sum) + new.row_sum
    slot = sums.used & 1
    pl.when(sums.used >= P_SLOTS)(lambda: plgpu.barrier_wait(smem.p_free.at[slot]))
    smem.p.at[slot][...] = new.p.astype(plan.problem.dtype)
    smem.row_max.at[slot][...] = new.row_max
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.p_ready.at[slot])
    return Sums(new.row_max, row_sum, sums.used + 1)


def _product(
    ctx: KernelContext, q: list[RegisterTile], position: Position, e: Index
) -> RegisterTile:
    """q @ K^T; each block of K is released as soon as it has been multiplied."""
    blocks = [block for _, block in _key_blocks(ctx, position, e)]

    def body(acc: RegisterTile) -> RegisterTile:
        for n, block in enumerate(blocks):
            block.wait()
            rest = pl.ds((n - IN_REGISTERS) * WIDTH, WIDTH)
            rows = q[n] if n < len(q) else ctx.smem.q.at[:, rest]
            plgpu.wgmma(acc, rows, block.ref.transpose((1, 0)))
        for n, block in enumerate(blocks):
            plgpu.wgmma_wait(len(blocks) - 1 - n)
            block.release()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, KEYS), jnp.float32))


def _finish(ctx: KernelContext, turn: Turn, rows: QueryRows, sums: Sums) -> None:
    """Stores the log-sum-exp, and the last factor of the output for warpgroups 0 and 1."""
    (plan, refs, smem), tile = ctx, rows.tile
    sink = None if refs.sinks is None else refs.sinks[tile.head]
    factor, lse = softmax.finish(sums.row_max, sums.row_sum, sink)
    if tile.q_len is not None:
        lse, _ = softmax.without_dead_rows(lse, (), rows.row, tile.q_len)
    pl.when(turn.index > 0)(lambda: plgpu.barrier_wait(smem.factor_free))
    smem.factor[...] = factor
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.factor_ready)
    where = tile.batch, tile.head, rows.row
    mosaic.store_rows(lse, refs.lse, where, plan.tiling.whole_rows)


# ---- values --------------------------------------------------------------------------------------


class Output(NamedTuple):
    """A warpgroup's columns of the output, before the division by row sums."""

    accs: tuple[RegisterTile, ...]  # [ROWS, WIDTH] each
    row_max: RegisterTile  # [ROWS]: the row max that they are relative to
    used: Index  # the same as `Sums.used`


def _weigh(ctx: KernelContext, block_id: Index, wg: Index) -> None:
    """Warpgroup 0 or 1: P V of all tiles in its half of the columns, and the store."""
    smem, none = ctx.smem, jnp.int32(0)

    def one_tile(turn: Turn, carry: tuple[Position, Index]) -> tuple[Position, Index]:
        (position, used), rows = carry, _rows_of(ctx, turn)
        accs = tuple(mosaic.filled((ROWS, WIDTH), 0.0) for _ in range(V_BLOCKS))
        out = Output(accs, mosaic.filled((ROWS,), -jnp.inf), used)

        def one_kv_tile(e: Index, out: Output) -> Output:
            blocks = [block for _, block in _value_blocks(ctx, position, e, wg)]
            return _weigh_tile(ctx, blocks, out)

        out = lax.fori_loop(0, _count(rows.span), one_kv_tile, out)
        plgpu.barrier_wait(smem.factor_ready)
        factor = plgpu.load(smem.factor, layout=mosaic.ROW)
        plgpu.barrier_arrive(smem.factor_free)
        result = list(softmax.scaled(out.accs, factor))
        if (q_len := rows.tile.q_len) is not None:  # the rows past a length may be NaN
            inside = mosaic.positions((ROWS,), 0, rows.row) < q_len
            result = [jnp.where(mosaic.broadcast_rows(inside, x.shape), x, 0.0) for x in result]
        _store(ctx, rows, wg, result)
        return position.after(ctx, _count(rows.span)), out.used

    _for_each_tile(ctx, block_id, one_tile, (Position(none, none), none))
    plgpu.wait_smem_to_gmem(0)


def _weigh_tile(ctx: KernelContext, blocks: list[Block], out: Output) -> Output:
    smem, slot = ctx.smem, out.used & 1
    for block in blocks:
        block.wait()
    plgpu.barrier_wait(smem.p_ready.at[slot])
    row_max = plgpu.load(smem.row_max.at[slot], layout=mosaic.ROW)
    rescale = jnp.exp2(out.row_max - softmax.base_of(row_max, empty_ok=True))
    accs = lax.cond(
        mosaic.any_in_warp(row_max - out.row_max, 0.0) != 0,
        lambda: softmax.scaled(out.accs, rescale),
        lambda: out.accs,
    )

    def matmuls(refs: tuple[Any, ...]) -> None:
        for acc, block in zip(refs, blocks, strict=True):
            plgpu.wgmma(acc, smem.p.at[slot], block.ref)
        for n, block in enumerate(blocks):
            plgpu.wgmma_wait(len(blocks) - 1 - n)
            block.release()

    accs = pl.run_state(matmuls)(tuple(plgpu.ACC.init(acc) for acc in accs))
    plgpu.barrier_arrive(smem.p_free.at[slot])
    return Output(accs, row_max, out.used + 1)


def _store(ctx: KernelContext, rows: QueryRows, wg: Index, accs: list[RegisterTile]) -> None:
    """Stores a warpgroup's columns of the output, OUT_WIDTH at a time, through shared memory."""
    refs, tile, staged = ctx.refs, rows.tile, ctx.smem.out.at[wg]
    for n, acc in enumerate(accs):
        for column in range(0, WIDTH, OUT_WIDTH):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = lax.slice(acc, (0, column), (ROWS, column + OUT_WIDTH))
            staged[...] = part.astype(staged.dtype)
            plgpu.commit_smem()
            first = (wg * V_BLOCKS + n) * WIDTH + column
            where = tile.batch, pl.ds(rows.row, ROWS), tile.head, pl.ds(first, OUT_WIDTH)
            plgpu.copy_smem_to_gmem(staged, refs.out.at[where])


# ---- the kernel and its call ---------------------------------------------------------------------


def _kernel(
    refs: ForwardRefs, out: GmemRef, lse: GmemRef, smem: WideSmem, *, plan: QueryPlan
) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    ctx = KernelContext(plan, refs._replace(out=out, lse=lse), smem)
    values, scores, loader = REGISTERS

    @pl.when(wg == PRODUCER)
    def _() -> None:
        plgpu.set_max_registers(loader, action="decrease")
        _produce(ctx, block_id)

    @pl.when(wg == SCORES)
    def _() -> None:
        plgpu.set_max_registers(scores, action="increase")
        _score(ctx, block_id)

    @pl.when(wg < V_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(values, action="increase")
        _weigh(ctx, block_id, wg)


def run(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]. XLA pads q, k and v where T or
    S is above 8 and no multiple of 8, H is no multiple of 128, or Hv is not 512.
    """
    plan = plan_of(problem, config)
    rows, shape = tma_operands.rows_in_tma(problem.q_len), jax.ShapeDtypeStruct
    out_type = (
        shape((problem.batch, rows, problem.q_heads, V_DIM), problem.dtype),
        shape((problem.batch, problem.q_heads, problem.q_len), jnp.float32),
    )
    body, size = functools.partial(_kernel, plan=plan), (plan.order.grid, PRODUCER + 1)
    kernel = mosaic.persistent_kernel(body, "flash_fwd_wide_sm90", out_type, scratch(plan), size)
    out, lse = kernel(_operands(plan, inputs))
    return out[:, : problem.q_len, :, : problem.v_head_dim], lse


def _operands(plan: QueryPlan, inputs: AttentionInputs) -> ForwardRefs:
    problem = plan.problem
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in problem.arrays}
    for name, width in (("q", k_blocks(plan) * WIDTH), ("k", k_blocks(plan) * WIDTH), ("v", V_DIM)):
        array = getattr(inputs, name)
        fields[name] = tma_operands.padded(
            array, {1: tma_operands.rows_in_tma(array.shape[1]), 3: width}
        )
    fields |= tile_scheduler.operands(plan, inputs)
    if "kv_lengths" in problem.arrays:
        fields["v_edge"] = tma_operands.edge(fields["v"], jnp.asarray(inputs.kv_lengths), KEYS)
    return ForwardRefs(**{name: fields[name] for name in ForwardRefs._fields if name in fields})


KERNEL = Kernel(Config, limit, smem_bytes, run)
