"""Flash attention backward for Hopper at head dims above 256: a launch each for dV, dK and dQ.

The registers of two warpgroups hold 64 rows of one gradient, 64 x 512 numbers, and no second one
beside it. Each launch therefore computes the scores again: eight matmuls a tile in all where a
backward of narrow heads has five or seven. Nothing is added up in global memory, so bits repeat.

| launch | work tile | its matmuls for each tile of 64 rows that it meets |
|---|---|---|
| dV | keys | S^T = K Q^T, dV += P^T dO |
| dK | keys | S^T = K Q^T, dP^T = V dO^T, dK += dS^T Q |
| dQ | query rows | S = Q K^T, dP = dO V^T, dQ += dS K |

A `Gradient` names the arrays of a launch: the `held` ones, of which a block has the rows of its
work tile; the `streamed` ones, which it reads by tiles; and `values`, with which the `weights` of a
tile, P or dS, are multiplied.

Grid: one persistent block a multiprocessor, which takes the work tiles of its list one by one.

Warpgroups, and the barriers that they arrive at:
  0, 1  weights @ values in half of the columns each: `weights_free`. Each loads its own blocks of
        the value array: nobody else reads them, so it needs no barrier to fill one again
  2     products and weights: `ring_free`, `held_free`, `stats_free`, `weights_ready`
  3     the producer: `ring_ready`, `held_ready`, `stats_ready`

Shared memory:
  held     the columns of the held arrays that are not in registers, for a whole work tile
  ring     blocks of 64 rows by 128 columns: the first columns of the first held array, on their
           way to registers, then the streamed arrays of each tile
  values   blocks of 32 rows by half of the columns, of warpgroups 0 and 1
  weights  weights of two tiles, alternately
  stats    lse and delta of the query rows of two tiles, where work tiles are keys

Warpgroup 2 computes P of a tile under dP, or, for dV, under S of the next tile. Warpgroups 0 and 1
multiply the weights of the tile before.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import logits, tile_logits, tile_scheduler, tma_operands
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import (
    costs,
    operands,
    producer,
    sm90_dq,
    step_parts,
    wide_rows,
    work_order,
)
from pallas_attn.kernels.flash_bwd.operands import (
    BackwardRefs,
    Gradients,
    Residuals,
    RowStatistics,
    row_statistics,
)
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.wide_rows import KeyRows, Rows, WideRows
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.flash_fwd import sm90_wide as flash_fwd_sm90_wide
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.late import late
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.panels import Block, ring_slot
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    RegisterTile,
    RegisterTiles,
    SmemRef,
)

WIDTH = 128  # columns of a block of the ring, and at most of an accumulator
PART = 32  # rows of a block of the value array
PARTS = ROWS // PART
HALVES, WEIGHTS, PRODUCER = 2, 2, 3
IN_REGISTERS = 2  # blocks of the first held array that are in registers, at most
SLOTS = 2  # tiles whose weights and row statistics are in shared memory
ROOM = 225 * 1024  # bytes of shared memory; the others are left for barriers
# Registers of a thread in warpgroups 0 and 1, in 2, and in the producer.
REGISTERS = (160, 168, 24)
SUPPORTED = flash_fwd_sm90_wide.SUPPORTED - {"bias"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    ring: int = 0  # blocks, a tile at least; 0: as many as there is room for, up to three tiles
    grid: int = MULTIPROCESSORS  # persistent blocks
    parts: int = 1  # into which the steps of a work tile of keys are divided: see `step_parts`

    block_kv, block_q, warpgroups = ROWS, ROWS, 1  # for plans

    def __post_init__(self) -> None:
        check(
            self,
            ring=(self.ring >= 0, "at least 0"),
            grid=(self.grid >= 1, "at least 1"),
            parts=(1 <= self.parts <= step_parts.MOST, f"from 1 to {step_parts.MOST}"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        order = key_plan(problem, cls()).order  # dV and dK take as many products as with dQ
        return cls(parts=costs.parts(order, adds_dq=True))


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := flash_fwd_sm90_wide.limit(problem)) is not None:
        return refused
    if odd := set(problem.arrays) - SUPPORTED:
        return Limit(f"it does not take {', '.join(sorted(odd))}", "leave implementation=None")
    return None


# ---- static values ------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """A launch, by the names of its arrays."""

    name: str
    held: tuple[str, ...]  # multiplied by the streamed ones: their products are S and dP
    streamed: tuple[str, ...]
    values: str  # multiplied by weights
    is_of_keys: bool  # whether rows of a work tile are keys

    @property
    def has_dp(self) -> bool:
        return len(self.held) > 1


DV = Gradient("dv", ("k",), ("q",), "do", is_of_keys=True)
DK = Gradient("dk", ("k", "v"), ("q", "do"), "q", is_of_keys=True)
DQ = Gradient("dq", ("q", "do"), ("k", "v"), "k", is_of_keys=False)


def columns_of(problem: AttentionProblem, name: str) -> int:
    """Columns of an array in global memory: whole blocks of the ring."""
    dim = problem.head_dim if name in ("q", "k") else problem.v_head_dim
    return tma_operands.round_up(dim, WIDTH)


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The blocks of a launch in shared memory."""

    problem: AttentionProblem
    config: Config
    gradient: Gradient

    @property
    def products(self) -> list[int]:
        """Blocks of columns that S takes, and dP."""
        dims = self.problem.head_dim, self.problem.v_head_dim
        return [pl.cdiv(dim, WIDTH) for dim in dims[: len(self.gradient.held)]]

    @property
    def step_blocks(self) -> int:
        """Blocks of the ring that a tile takes."""
        return sum(self.products)

    @property
    def in_registers(self) -> int:
        """Blocks of the first held array that are in registers."""
        return min(IN_REGISTERS, self.products[0])

    @property
    def in_smem(self) -> int:
        """Blocks of held arrays in shared memory."""
        return self.step_blocks - self.in_registers

    @property
    def out_columns(self) -> int:
        """Columns of the gradient that each of two warpgroups makes."""
        return columns_of(self.problem, self.gradient.values) // HALVES

    @property
    def acc_columns(self) -> int:
        """Columns of each accumulator of these."""
        return self.out_columns // pl.cdiv(self.out_columns, WIDTH)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the accumulators of both warpgroups."""
        return (self.acc_columns,) * (HALVES * self.out_columns // self.acc_columns)

    @property
    def value_bytes(self) -> int:
        """Bytes of a block of the value array."""
        return 2 * PART * self.out_columns

    @property
    def room(self) -> int:
        """Bytes for the ring and the value array."""
        held = 2 * ROWS * WIDTH * self.in_smem
        return ROOM - held - 2 * ROWS * ROWS * SLOTS - 1024

    @property
    def value_blocks(self) -> int:
        """Blocks of the value array that each of two warpgroups has: all of a tile, or one."""
        streamed = 2 * ROWS * WIDTH * self.step_blocks
        return PARTS if self.room - HALVES * PARTS * self.value_bytes >= streamed else 1

    @property
    def ring(self) -> int:
        """Blocks of the ring."""
        if self.config.ring:
            return self.config.ring
        rest = self.room - HALVES * self.value_blocks * self.value_bytes
        return min(rest // (2 * ROWS * WIDTH), 3 * max(self.products))


class WideSmem(NamedTuple):
    held: SmemRef  # [blocks, ROWS, WIDTH]; None: all columns are in registers
    ring: SmemRef  # [ring, ROWS, WIDTH]
    values: SmemRef  # [HALVES * value_blocks, PART, out_columns]
    weights: SmemRef  # [SLOTS * PARTS, ROWS, PART]
    stats: SmemRef  # float32[SLOTS, 2, ROWS]: lse and delta; None where work tiles are queries
    held_ready: Barrier
    held_free: Barrier
    ring_ready: Barrier  # one for each block
    ring_free: Barrier
    values_ready: Barrier  # one for each block
    weights_ready: Barrier  # one for each slot
    weights_free: Barrier
    stats_ready: Barrier
    stats_free: Barrier


def scratch(buffers: Buffers) -> WideSmem:
    """Shared memory, described once: `gradient_of` launches it, `smem_bytes` adds it up."""
    dtype, barrier = buffers.problem.dtype, plgpu.Barrier
    slots, each = functools.partial(barrier, num_barriers=SLOTS), buffers.value_blocks * HALVES
    if buffers.ring < (least := max(buffers.products)):
        raise ValueError(f"Config.ring must be at least {least}, a tile, for {buffers.problem}")
    held = mosaic.swizzled((buffers.in_smem, ROWS, WIDTH), dtype, 128) if buffers.in_smem else None
    return WideSmem(
        held=held,
        ring=mosaic.swizzled((buffers.ring, ROWS, WIDTH), dtype, 128),
        values=mosaic.swizzled((each, PART, buffers.out_columns), dtype, 2 * PART),
        weights=mosaic.swizzled((SLOTS * PARTS, ROWS, PART), dtype, 2 * PART),
        stats=plgpu.SMEM((SLOTS, 2, ROWS), jnp.float32) if buffers.gradient.is_of_keys else None,
        held_ready=barrier(num_arrivals=max(buffers.in_smem, 1)),
        held_free=barrier(),
        ring_ready=barrier(num_barriers=buffers.ring),
        ring_free=barrier(num_barriers=buffers.ring),
        values_ready=barrier(num_barriers=each),
        weights_ready=slots(),
        weights_free=slots(num_arrivals=HALVES),
        stats_ready=slots(num_arrivals=len(buffers.gradient.held)),
        stats_free=slots(),
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the launch that needs most, barriers included."""
    launches = [Buffers(problem, config, gradient) for gradient in (DV, DK, DQ)]
    return max(mosaic.bytes_of(scratch(buffers)) for buffers in launches) + mosaic.BARRIERS


class WideContext(NamedTuple):
    """The first argument of the functions of a launch."""

    ctx: KernelContext  # its plan: a KeyPlan, or dQ's QueryPlan
    buffers: Buffers


# ---- the ring -----------------------------------------------------------------------------------


class Position(NamedTuple):
    """A place in the order of a block's work."""

    work_tile: Index  # work tiles before this one
    tiles: Index  # tiles that these met

    def held_block(self, buffers: Buffers, n: int) -> Index:
        """The number of the n-th block of the first held array, among all of the ring."""
        return self.work_tile * buffers.in_registers + self.tiles * buffers.step_blocks + n

    def blocks(self, buffers: Buffers, i: Index) -> list[Index]:
        """The numbers of the blocks of the i-th tile."""
        first = self.held_block(buffers, buffers.in_registers) + i * buffers.step_blocks
        return [first + n for n in range(buffers.step_blocks)]


def _ring_block(wide: WideContext, number: Index) -> Block:
    smem, slot = wide.ctx.smem, ring_slot(number, wide.buffers.ring)
    return Block(smem.ring.at[slot], smem.ring_ready.at[slot], smem.ring_free.at[slot])


# ---- the producer -------------------------------------------------------------------------------


def _produce(wide: WideContext, block_id: Index) -> None:
    """Loads the held arrays of all work tiles, and the streamed ones with row statistics."""
    ctx, buffers = wide
    names = _columns(buffers, buffers.gradient.streamed)

    def fill(number: Index, name: str, rows: Rows, column: int) -> None:
        block = _ring_block(wide, number)
        block.acquire(number >= buffers.ring)
        wide_rows.load(ctx, name, rows, column, (block.ref, block.ready))

    def work_tile(n: Index, tiles_before: Index, code: Index) -> Index:
        work, position = wide_rows.rows_of(ctx, code), Position(n, tiles_before)
        for block in range(buffers.in_registers):
            number = position.held_block(buffers, block)
            fill(number, buffers.gradient.held[0], work.rows, block * WIDTH)
        _load_held(wide, work, n)

        def step(i: Index, tiles: Index) -> Index:
            rows = work.met(ctx.plan, i)
            if buffers.gradient.is_of_keys:
                _load_stats(wide, rows, tiles)
            for number, (name, column) in zip(position.blocks(buffers, i), names, strict=True):
                fill(number, name, rows, column)
            return tiles + 1

        return lax.fori_loop(0, work.steps(ctx.plan), step, tiles_before)

    producer.each_work_tile(ctx, block_id, work_tile)


def _columns(buffers: Buffers, names: Sequence[str]) -> list[tuple[str, int]]:
    """(name, first column) of the blocks of arrays whose products are S and dP."""
    return [
        (name, n * WIDTH)
        for name, count in zip(names, buffers.products, strict=True)
        for n in range(count)
    ]


def _load_held(wide: WideContext, work: WideRows, n: Index) -> None:
    """Loads the columns of held arrays that stay in shared memory."""
    (ctx, buffers), smem = wide, wide.ctx.smem
    if not buffers.in_smem:
        return
    pl.when(n > 0)(lambda: plgpu.barrier_wait(smem.held_free))
    blocks = _columns(buffers, buffers.gradient.held)[buffers.in_registers :]
    for place, (name, column) in enumerate(blocks):
        wide_rows.load(ctx, name, work.rows, column, (smem.held.at[place], smem.held_ready))


def _load_stats(wide: WideContext, rows: Rows, tiles: Index) -> None:
    """Loads the row statistics of query rows, as those of tile number `tiles`."""
    refs, smem, slot = wide.ctx.refs, wide.ctx.smem, tiles & (SLOTS - 1)
    pl.when(tiles >= SLOTS)(lambda: plgpu.barrier_wait(smem.stats_free.at[slot]))
    for n, ref in enumerate((refs.lse, refs.delta)[: len(wide.buffers.gradient.held)]):
        source = ref.at[rows.batch, rows.head, pl.ds(rows.row, ROWS)]
        plgpu.copy_gmem_to_smem(source, smem.stats.at[slot, n], smem.stats_ready.at[slot])


# ---- products and weights -----------------------------------------------------------------------


def _weigh(wide: WideContext, block_id: Index) -> None:
    """Warpgroup 2: the weights of all tiles."""
    (ctx, buffers), smem = wide, wide.ctx.smem

    def work_tile(n: Index, tiles_before: Index, code: Index) -> Index:
        work, position = _with_stats(wide, wide_rows.rows_of(ctx, code)), Position(n, tiles_before)
        held = _held_in_registers(wide, position)
        steps = work.steps(ctx.plan)

        def tile(i: Index) -> Tile:
            return Tile(work, i, tiles_before + i, held, position.blocks(buffers, i))

        every = _every_ds if buffers.gradient.has_dp else _every_p
        pl.when(steps > 0)(lambda: every(wide, tile, steps))
        if buffers.in_smem:
            plgpu.barrier_arrive(smem.held_free)
        return tiles_before + steps

    producer.each_work_tile(ctx, block_id, work_tile)


class Tile(NamedTuple):
    """A tile that a work tile meets."""

    work: WideRows
    i: Index  # its number among those of the work tile
    number: Index  # its number among those of the block
    held: list[RegisterTile]  # the first blocks of the held array
    blocks: list[Index]  # numbers of the blocks that it takes of the ring


def _with_stats(wide: WideContext, work: WideRows) -> WideRows:
    """Query rows of a work tile with their row statistics."""
    if isinstance(work, KeyRows):
        return work
    refs, (batch, head, row, _) = wide.ctx.refs, work.rows
    arrays = refs.lse, refs.delta
    stats = (mosaic.load(x.at[batch, head, pl.ds(row, ROWS)], mosaic.ROW) for x in arrays)
    return work._replace(row_stats=tuple(stats))


def _held_in_registers(wide: WideContext, position: Position) -> list[RegisterTile]:
    """The first blocks of the held arrays; the others are there in shared memory, too."""
    buffers, smem, blocks = wide.buffers, wide.ctx.smem, list[RegisterTile]()
    for n in range(buffers.in_registers):
        block = _ring_block(wide, position.held_block(buffers, n))
        plgpu.barrier_wait(block.ready)
        blocks.append(plgpu.load(block.ref, layout=mosaic.TILE))
        plgpu.commit_smem()  # all warps have read the block before TMA writes to it again
        block.release()
    if buffers.in_smem:
        plgpu.barrier_wait(smem.held_ready)
    return blocks


def _issue(wide: WideContext, tile: Tile, acc: RegisterTile, n: int) -> None:
    """Issues the matmul of block n of the ring."""
    plgpu.barrier_wait(_ring_block(wide, tile.blocks[n]).ready)
    block, rows = _ring_block(wide, late(tile.blocks[n])), tile.held[n : n + 1]
    if not rows:
        place = n - len(tile.held) + mosaic.opaque_zero(late(tile.number))
        rows = [wide.ctx.smem.held.at[place]]
    plgpu.wgmma(acc, rows[0], block.ref.transpose((1, 0)))


def _release(wide: WideContext, tile: Tile, n: int, in_flight: int) -> None:
    """Releases block n of the ring when at most so many matmuls are in flight."""
    plgpu.wgmma_wait(in_flight)
    _ring_block(wide, tile.blocks[n]).release()


def _every_p(wide: WideContext, tile: Callable[[Index], Tile], steps: Index) -> None:
    """P of all tiles that a work tile meets, each computed under S of the next one."""
    blocks = wide.buffers.step_blocks
    early = blocks // 2  # blocks that are released before P is computed

    def scores(i: Index, meanwhile: Callable[[], None]) -> RegisterTile:
        def body(s: RegisterTile) -> RegisterTile:
            for n in range(blocks):
                _issue(wide, tile(i), s, n)
            for n in range(early):
                _release(wide, tile(i), n, blocks - 1 - n)
            meanwhile()
            for n in range(early, blocks):
                _release(wide, tile(i), n, blocks - 1 - n)
            return s[...]

        return pl.run_scoped(body, plgpu.ACC((ROWS, ROWS), jnp.float32))

    def hand_over(i: Index, s: RegisterTile) -> None:
        _hand_over(wide, tile(i), _probabilities(wide, tile(i), s)[0])

    def step(i: Index, before: RegisterTile) -> RegisterTile:
        return scores(i, lambda: hand_over(i - 1, before))

    last = lax.fori_loop(1, steps, step, scores(0, lambda: None))
    hand_over(steps - 1, last)


def _every_ds(wide: WideContext, tile: Callable[[Index], Tile], steps: Index) -> None:
    """dS of all tiles that a work tile meets. P is computed under dP. Registers do not suffice to
    compute dS under S of the next tile: matmuls would wait for each
    other.
    """
    count, blocks = wide.buffers.products[0], wide.buffers.step_blocks
    middle = (count + blocks) // 2  # dP's blocks before it are issued before P is computed

    def body(i: Index, s: RegisterTile, dp: RegisterTile) -> None:
        for n in range(count):
            _issue(wide, tile(i), s, n)
        for n in range(count - 1):
            _release(wide, tile(i), n, count - 1 - n)
        for n in range(count, middle):
            _issue(wide, tile(i), dp, n)
        _release(wide, tile(i), count - 1, middle - count)
        scores = plgpu.wgmma_accumulator_load(s, wait_n=middle - count)
        p, slope, delta = _probabilities(wide, tile(i), scores)
        for n in range(middle, blocks):
            _issue(wide, tile(i), dp, n)
        for n in range(count, blocks):
            _release(wide, tile(i), n, blocks - 1 - n)
        _hand_over(wide, tile(i), tile_logits.d_scores(p, dp[...], delta, slope))

    @pl.loop(0, steps)
    def _(i: Index) -> None:
        accs = [plgpu.ACC((ROWS, ROWS), jnp.float32)] * 2
        pl.run_scoped(functools.partial(body, i), *accs)


def _probabilities(
    wide: WideContext, tile: Tile, s: RegisterTile
) -> tuple[RegisterTile, RegisterTile | None, RegisterTile | None]:
    """P of a tile, the slope of logits, and delta spread over it; None: 1, and not needed."""
    ctx, smem, slot = wide.ctx, wide.ctx.smem, tile.number & (SLOTS - 1)
    place, masked = tile.work.logits(ctx.plan, tile.i)
    stats = tile.work.row_stats
    if not stats:
        plgpu.barrier_wait(smem.stats_ready.at[slot])
        count = range(len(wide.buffers.gradient.held))
        stats = tuple(mosaic.load(smem.stats.at[slot, n], mosaic.COLUMN) for n in count)
    slope = None
    if ctx.plan.logit_rules.unit is None:
        s, slope = logits.scaled(ctx, place, s)
    if masked is not False:
        s = lax.cond(masked, functools.partial(_masked, ctx, place), lambda s: s, s)
    lse = lax.broadcast_in_dim(stats[0], s.shape, [place.q_axis])
    p = tile_logits.exponentials(ctx.plan, s, lse)
    if not wide.buffers.gradient.has_dp:
        return p, slope, None
    return p, slope, lax.broadcast_in_dim(stats[1], p.shape, [place.q_axis])


def _masked(ctx: KernelContext, place: LogitTile, s: RegisterTile) -> RegisterTile:
    """Logits with -inf wherever a query does not see a key, by the range of columns that each row
    keeps. Positions of a whole tile (`tile_logits.apply_mask`) would be held in registers, and
    spill.
    """
    row, column = place.q_offset + place.query, place.key
    mask = place.mask
    if place.q_axis:
        row, column, mask = column, row, mask.transposed
    low, high = None, None
    if not mask.is_full:
        low, high = mask.row_bounds(mosaic.positions((ROWS,), 0, row - column))
    if ctx.plan.logit_rules.ragged_keys:
        end = mosaic.filled((ROWS,), place.kv_len - column, jnp.int32)
        if place.q_axis:  # no query sees a key that does not exist
            exists = mosaic.positions((ROWS,), 0, row) < place.kv_len
            end = jnp.where(exists, ROWS, 0)
        high = end if high is None else jnp.minimum(high, end)
    return logits.mask_columns(s, low, high)


def _hand_over(wide: WideContext, tile: Tile, weights: RegisterTile) -> None:
    """Weights of a tile to warpgroups 0 and 1."""
    smem, slot = wide.ctx.smem, tile.number & (SLOTS - 1)
    pl.when(tile.number >= SLOTS)(lambda: plgpu.barrier_wait(smem.weights_free.at[slot]))
    for n in range(PARTS):
        part = lax.slice(weights, (0, n * PART), (ROWS, (n + 1) * PART))
        smem.weights.at[slot * PARTS + n][...] = part.astype(smem.weights.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.weights_ready.at[slot])
    if wide.buffers.gradient.is_of_keys:
        plgpu.barrier_arrive(smem.stats_free.at[slot])


# ---- the gradient -------------------------------------------------------------------------------


def _accumulate(wide: WideContext, out: GmemRef, block_id: Index, wg: Index) -> None:
    """Warpgroup 0 or 1: its columns of the gradient of all work tiles."""
    ctx, buffers = wide

    def work_tile(n: Index, tiles_before: Index, code: Index) -> Index:
        del n
        work = wide_rows.rows_of(ctx, code)
        _store(wide, work, out, wg, _sum(wide, work, wg, tiles_before))
        return tiles_before + work.steps(ctx.plan)

    producer.each_work_tile(ctx, block_id, work_tile)


def _sum(wide: WideContext, work: WideRows, wg: Index, tiles_before: Index) -> RegisterTiles:
    """weights @ values in a warpgroup's columns, over all tiles that a work tile meets."""
    (ctx, buffers), smem = wide, wide.ctx.smem
    steps, blocks, width = work.steps(ctx.plan), buffers.value_blocks, buffers.acc_columns
    zeros = (mosaic.filled((ROWS, width), 0.0),) * (buffers.out_columns // width)

    def load(i: Index, part: int) -> None:
        slot = wg * blocks + part % blocks
        to = smem.values.at[slot], smem.values_ready.at[slot]
        rows = work.met(ctx.plan, i)
        wide_rows.load(
            ctx, buffers.gradient.values, rows, wg * buffers.out_columns, to, part * PART
        )

    def refill(i: Index, done: int, in_flight: int) -> None:
        """Fills the block of a part that has been multiplied."""
        plgpu.wgmma_wait(in_flight * len(zeros))
        plgpu.commit_smem()  # all warps have, and TMA will write there
        if (following := done + blocks) < PARTS:
            return load(i, following)
        return pl.when(i + 1 < steps)(lambda: load(i + 1, following - PARTS))

    def multiply(i: Index, accs: RegisterTiles) -> None:
        weights = (tiles_before + i) & (SLOTS - 1)
        plgpu.barrier_wait(smem.weights_ready.at[weights])
        for part in range(PARTS):
            slot = wg * blocks + part % blocks
            plgpu.barrier_wait(smem.values_ready.at[slot])
            for n, acc in enumerate(accs):
                columns = smem.values.at[slot, :, pl.ds(n * width, width)]
                plgpu.wgmma(acc, smem.weights.at[weights * PARTS + part], columns)
            if part >= blocks - 1:
                refill(i, part - blocks + 1, blocks - 1)
        for part in range(PARTS - blocks + 1, PARTS):
            refill(i, part, PARTS - 1 - part)
        plgpu.barrier_arrive(smem.weights_free.at[weights])

    def step(i: Index, accs: RegisterTiles) -> RegisterTiles:
        return pl.run_state(functools.partial(multiply, i))(tuple(map(plgpu.ACC.init, accs)))

    for part in range(blocks):
        pl.when(steps > 0)(functools.partial(load, 0, part))
    return lax.fori_loop(0, steps, step, zeros)


def _store(wide: WideContext, work: WideRows, out: GmemRef, wg: Index, sums: RegisterTiles) -> None:
    """Stores a warpgroup's columns of a gradient, or of a part. Rows past a query length may have
    met NaN: zeros are selected in their place.
    """
    (ctx, buffers), (batch, head, row, _), width = wide, work.rows, wide.buffers.acc_columns
    if buffers.gradient.has_dp:
        sums = tuple(value * ctx.plan.problem.scale for value in sums)
    if isinstance(work, KeyRows) and ctx.plan.order.parts > 1:
        return step_parts.store_part(ctx.plan, out, work.work, 0, sums, wg * buffers.out_columns)
    for n, value in enumerate(sums):
        if work.length is not None:
            inside = mosaic.positions((ROWS,), 0, row) < work.length
            value = jnp.where(mosaic.broadcast_rows(inside, value.shape), value, 0.0)
        columns = pl.ds(wg * buffers.out_columns + n * width, width)
        mosaic.store(out.at[batch, pl.ds(row, ROWS), head, columns], value.astype(out.dtype))
    return None


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(
    refs: BackwardRefs,
    out: GmemRef,
    smem: WideSmem,
    *,
    plan: KeyPlan | QueryPlan,
    buffers: Buffers,
) -> None:
    wide = WideContext(KernelContext(plan, refs, smem), buffers)
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    sums, weights, loader = REGISTERS

    mosaic.take_role(wg == PRODUCER, loader, functools.partial(_produce, wide, block_id))
    mosaic.take_role(wg == WEIGHTS, weights, functools.partial(_weigh, wide, block_id), more=True)
    accumulate = functools.partial(_accumulate, wide, out, block_id, wg)
    mosaic.take_role(wg < HALVES, sums, accumulate, more=True)


def gradient_of(plan: KeyPlan | QueryPlan, gradient: Gradient, refs: BackwardRefs) -> jax.Array:
    """dv, dk or dq, in whole tiles of rows and blocks of columns; or the parts of dv or dk."""
    problem, buffers = plan.problem, Buffers(plan.problem, plan.config, gradient)
    rows, heads = plan.tiling.padded_rows, problem.q_heads
    if gradient.is_of_keys:
        rows, heads = plan.tiling.padded_keys, problem.kv_heads
    sizes = problem.batch, rows, heads, columns_of(problem, gradient.values)
    out = jax.ShapeDtypeStruct(sizes, problem.dtype)
    if isinstance(plan, KeyPlan) and plan.order.parts > 1:
        (out,) = step_parts.outputs(plan, [buffers.widths])
    kernel = mosaic.persistent_kernel(
        functools.partial(_kernel, plan=plan, buffers=buffers),
        f"flash_bwd_wide_{gradient.name}_sm90",
        out,
        scratch(buffers),
        (plan.order.grid, PRODUCER + 1),
    )
    return kernel(refs)


def key_plan(problem: AttentionProblem, config: Config) -> KeyPlan:
    """The plan of the launches for dV and dK. Causal ones are in lockstep: all three launches took
    4 % less at 8192 rows of 32:4 heads of 512, and 14 % less at 8 x 2048.
    """
    tiling = KeyTiling(problem, ROWS, ROWS)
    in_lockstep = tiling.allows_lockstep and config.parts == 1
    order = WorkOrder(tiling, blocks=config.grid, lockstep=in_lockstep, parts=config.parts)
    return KeyPlan(problem, config, order, format=None)


def _operands(plan: KeyPlan, residuals: Residuals, stats: RowStatistics) -> BackwardRefs:
    """The operands of the launches for dV and dK. XLA pads q, k, v and dO where T or S is above 8
    and no multiple of 8, or a head dim no multiple of 128.
    """
    problem, inputs = plan.problem, residuals.inputs
    fields: dict[str, Any] = operands.over_tiles(plan, inputs) | stats._asdict()
    for name, x in zip(("q", "k", "v", "do"), (*inputs[:3], residuals.d_out), strict=True):
        sizes = {1: tma_operands.rows_in_tma(x.shape[1]), 3: columns_of(problem, name)}
        fields[name] = tma_operands.padded(x, sizes)
    fields |= operands.edges(problem, inputs, fields, (ROWS, ROWS))
    fields |= tile_scheduler.table(work_order.schedule, plan.order, inputs)
    return BackwardRefs(**fields)


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs. XLA cuts them where T or S is
    no multiple of 64, or a head dim none of 128.
    """
    residuals, plan = Residuals(*residuals), key_plan(problem, config)
    inputs = residuals.inputs
    stats = row_statistics(False, plan.tiling.padded_rows, residuals)
    refs = _operands(plan, residuals, stats)
    dv = gradient_of(plan, DV, refs)
    refs = operands.ordered_after(refs, dv)
    dk = gradient_of(plan, DK, refs)
    if plan.order.parts > 1:
        widths = [Buffers(problem, config, gradient).widths for gradient in (DK, DV)]
        dk, dv = step_parts.added(step_parts.of_dk_dv(plan, (dk, dv), widths))
    dq_plan = QueryPlan.of(problem, config, (config.grid, 0))
    refs = operands.ordered_after(refs, dk)
    dq = gradient_of(dq_plan, DQ, sm90_dq.by_rows(dq_plan, inputs, refs))
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    return operands.cotangents(residuals, stats, Gradients(dq, dk, dv), {})


KERNEL = Kernel(Config, limit, smem_bytes, run)
