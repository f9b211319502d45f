"""The Hopper backward of many heads whose dQ fits in shared memory: one launch makes dq, dk and dv.
Nothing is added up in global memory, so bits repeat. Five matmuls a tile, as in `sm90_fused`.

Grid: one block a multiprocessor, which takes one head at a time. It goes through the head's kv
tiles of 128 keys, and for each through all query tiles of 64 rows. Two consumer warpgroups take 64
keys each: they hold dK and dV in registers and write dS to shared memory. A third warpgroup adds
dS K to dQ, and a fourth, the producer, loads. Tiles of scores have keys as rows, see `key_tiles`;
rows past the ends are zeros in shared memory and are not stored (`panels`).

A kv tile has few steps, so the next keys are loaded and the gradients of the last are stored while
both consumers compute: K has a second slot where it fits, V is released in the last step, and dk
and dv are read from K and dS by TMA during the first step of the next kv tile.

Slower were: dQ in global memory where it does not fit in shared memory (577 rows at head dim 64,
729 at 72), added by a third warpgroup or by the consumers in turn; two consumers that make dQ in
turn, without a third warpgroup; and scores issued a step ahead.

Shared memory, and who owns it when:
  k [k slots, warpgroup]  keys of a kv tile. Its warpgroup stores dk from there when the third
                     warpgroup is done (`dq_done`), and releases it (`k_free`) in the next kv tile
  v [warpgroup]      released (`v_free`) when it is in registers, or after the last dP
  q, do [stages]     rings of query tiles with their lse and delta, released by both consumers
  ds [ds slots, warpgroup]  a ring with an entry a step. `ds_ready`: both consumers have written
                     theirs; `ds_free`: the third warpgroup has multiplied it, and has stored dq
                     from there after the last kv tile, where dq has no buffer (dS has two entries,
                     or shared memory is short). dv is stored from entry 0
  sums [query tiles] float32 dQ so far, of the third warpgroup alone
  dq, dv             panels of dq and dv that are not stored from dS
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import (
    key_masks,
    score_tiles,
    tile_logits,
    tiles,
    tma_operands,
)
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import (
    costs,
    dq_sum,
    epilogue,
    operands,
    producer,
    sm90_dbias,
    sm90_short,
    statistics,
)
from pallas_attn.kernels.flash_bwd.key_tiles import per_column
from pallas_attn.kernels.flash_bwd.operands import (
    BackwardRefs,
    Gradients,
    KeyGradients,
    Residuals,
    RowStatistics,
)
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats
from pallas_attn.kernels.flash_bwd.producer import KeyBuffers, KeyPart
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.config import OneForAll, check
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.panels import Panel, Panels, Ring, ring_slot
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma, wgmma_swizzles

WARPGROUPS = 2  # consumers
KEYS = WARPGROUPS * ROWS  # keys of a kv tile
SUMS = 160  # largest number of columns of dK and dV in a consumer's registers: 80 a thread
REGISTERS = 200, 88, 24  # a thread of consumers, of the third warpgroup, of the producer
KEYS_IN_REGISTERS = 128  # largest number of columns of k and v for consumers to hold both
RESERVED = 1024  # bytes of shared memory for barriers and for alignment


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """Tuning only: the result is the same up to rounding."""

    grid: int = MULTIPROCESSORS  # blocks; 0: one a head

    def __post_init__(self) -> None:
        check(self, grid=(self.grid >= 0, "at least 0"))


class Slots(NamedTuple):
    """Numbers of entries of the rings: tiles of K, tiles of dS, query tiles."""

    k: int
    ds: int
    stages: int
    own_dq: bool = False  # whether dq has a buffer, and is not stored from dS


# Fastest first.
_SLOTS = [
    Slots(2, 2, 4),
    Slots(2, 1, 4),
    Slots(2, 1, 2, own_dq=True),
    Slots(2, 1, 2),
    Slots(1, 1, 2, own_dq=True),
    Slots(1, 1, 2),
]


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if takes(problem):
        return tiles.limit(problem)
    return Limit(
        "it takes 16-bit floats, heads that share no keys, and no mask but one of keys; dq of a "
        "head has to fit in shared memory",
        "leave implementation=None",
    )


def slower(problem: AttentionProblem) -> Limit | None:
    """Why another kernel is faster, or None: at other than measured sizes, or with few blocks busy
    in the last wave. Up to 128 keys `sm90` writes dq at once (`dq_sum.is_written`), and is faster
    from 384 rows on.
    """
    rows, keys = problem.q_len, problem.kv_len
    measured = ROWS < rows <= 512 and ROWS < keys <= 512
    if dq_sum.is_written(problem):
        fewest = ROWS if keys > ROWS else 2 * ROWS
        measured = fewest < rows < 384 and keys >= ROWS // 2
    if measured and costs.fills_blocks(problem.batch * problem.q_heads):
        return None
    return Limit(
        f"it is for {ROWS} to 512 rows of heads for all blocks", "leave implementation=None"
    )


def takes(problem: AttentionProblem) -> bool:
    """Whether this kernel serves a problem."""
    plain = sm90_short.is_plain(without_tiles(problem)) and problem.mask.is_full
    rows = min(problem.q_len, problem.kv_len)
    return plain and rows >= 1 and _columns(problem) <= SUMS and _fitting(problem) is not None


def _columns(problem: AttentionProblem) -> int:
    """Columns of a key and a value."""
    return sum(panels.widths(problem.head_dim)) + sum(panels.widths(problem.v_head_dim))


def _has_keys_in_registers(problem: AttentionProblem) -> bool:
    """Whether consumers hold k and v of a kv tile in registers. A matmul of 64 x 64 with both
    operands in shared memory is bound by reading them.
    """
    return _columns(problem) <= KEYS_IN_REGISTERS


def without_tiles(problem: AttentionProblem) -> AttentionProblem:
    """`problem` without the arrays that this kernel takes: a bias in tiles, and a mask of keys that
    all heads share.
    """
    arrays = set(problem.arrays)
    if bias_tiles(problem):
        arrays.discard("bias")
    if problem.masks_keys and problem.mask_shape is not None and problem.mask_shape[1] == 1:
        arrays.discard("mask_array")
    return dataclasses.replace(problem, arrays=tuple(sorted(arrays)))


def bias_tiles(problem: AttentionProblem) -> score_tiles.BiasOfKeys | None:
    return score_tiles.bias_of_keys(problem, ROWS)


@functools.lru_cache(maxsize=256)
def _fitting(problem: AttentionProblem) -> Slots | None:
    """The first of `_SLOTS` that fits into shared memory."""
    most = gpu_specs.shared_memory(gpu_specs.HOPPER) - RESERVED
    sizes = ((slots, mosaic.bytes_of(_scratch(problem, slots))) for slots in _SLOTS)
    return next((slots for slots, size in sizes if size <= most), None)


def slots_of(problem: AttentionProblem) -> Slots:
    slots = _fitting(problem)
    assert slots is not None
    return slots


class HeadsSmem(NamedTuple):
    k: Panels
    v: Panels
    q: Panels
    do: Panels
    ds: Panel  # in the swizzle of k's first panel
    sums: tuple[SmemRef, ...]  # float32 [query tiles, rows, columns], a panel of q each
    dq: Panels  # panels of a tile of dq, all those that are not stored from dS: see `_staged`
    dv: Panels  # [warpgroup, ..], panels of dv, likewise; dq uses the first where they are alike
    lse: SmemRef  # [stages, rows]
    delta: SmemRef
    k_ready: Barrier
    k_free: Barrier
    v_ready: Barrier
    v_free: Barrier
    q_ready: Barrier
    do_ready: Barrier
    q_free: Barrier
    do_free: Barrier
    ds_ready: Barrier
    ds_free: Barrier
    dq_done: Barrier
    bias: Panels = None  # [stages, ..], in the ring of q

    @property
    def q_ring(self) -> Ring:
        return Ring(self.q, self.q_ready, self.q_free, self.lse)

    @property
    def do_ring(self) -> Ring:
        return Ring(self.do, self.do_ready, self.do_free, self.delta)


def _scratch(problem: AttentionProblem, slots: Slots) -> HeadsSmem:
    dtype, q_tiles = jnp.dtype(problem.dtype), pl.cdiv(problem.q_len, ROWS)
    qk, v = panels.widths(problem.head_dim), panels.widths(problem.v_head_dim)
    barrier = plgpu.Barrier

    def rows(shape: tuple[int, ...], widths: tuple[int, ...]) -> Panels:
        return tuple(panels.scratch(shape, dtype, width) for width in widths)

    def sums(width: int) -> SmemRef:
        shape = q_tiles, ROWS, width
        return mosaic.swizzled(shape, jnp.float32, tma_operands.swizzle_of(4 * width))

    def tiles_of_ds() -> Panel:
        shape = slots.ds, WARPGROUPS, ROWS
        if qk[0] == ROWS:
            return panels.scratch(shape, dtype, ROWS)
        return Panel((None, mosaic.swizzled((*shape, ROWS), dtype, 2 * qk[0])))

    keys = WARPGROUPS, ROWS
    ring: dict[str, Any] = {"num_barriers": slots.stages}
    bias = bias_tiles(problem)
    return HeadsSmem(
        k=rows((slots.k, *keys), qk),
        v=rows(keys, v),
        q=rows((slots.stages, ROWS), qk),
        do=rows((slots.stages, ROWS), v),
        ds=tiles_of_ds(),
        sums=tuple(sums(width) for width in qk),
        dq=rows((1, ROWS), _own_widths(problem, slots)),
        dv=rows(keys, _not_from_ds(problem, v)),
        lse=plgpu.SMEM((slots.stages, ROWS), jnp.float32),
        delta=plgpu.SMEM((slots.stages, ROWS), jnp.float32),
        k_ready=barrier(num_arrivals=len(qk) * WARPGROUPS, num_barriers=slots.k),
        k_free=barrier(num_arrivals=WARPGROUPS, num_barriers=slots.k),
        v_ready=barrier(num_arrivals=len(v) * WARPGROUPS),
        v_free=barrier(num_arrivals=WARPGROUPS),
        q_ready=barrier(num_arrivals=1 + len(qk) + (bias.copies if bias else 0), **ring),
        do_ready=barrier(num_arrivals=1 + len(v), **ring),
        q_free=barrier(num_arrivals=WARPGROUPS, **ring),
        do_free=barrier(num_arrivals=WARPGROUPS, **ring),
        ds_ready=barrier(num_arrivals=WARPGROUPS, num_barriers=slots.ds),
        ds_free=barrier(num_arrivals=1, num_barriers=slots.ds),
        dq_done=barrier(num_arrivals=1, num_barriers=slots.k),
        bias=bias.scratch(slots.stages) if bias else None,
    )


def _not_from_ds(problem: AttentionProblem, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Panels of a gradient that cannot be stored from dS: all but a first of 64 columns, which has
    the shape of dS.
    """
    is_wide = panels.widths(problem.head_dim)[0] == ROWS
    return widths[1:] if is_wide and widths[0] == ROWS else widths


def _shares_dv(problem: AttentionProblem, slots: Slots) -> bool:
    """Whether dq's last panels are stored from where dv's are: not at the same time."""
    qk, v = panels.widths(problem.head_dim), panels.widths(problem.v_head_dim)
    rest = _not_from_ds(problem, qk)
    return slots.own_dq and 0 < len(rest) < len(qk) and rest == _not_from_ds(problem, v)


def _own_widths(problem: AttentionProblem, slots: Slots) -> tuple[int, ...]:
    """Panels of dq that have a buffer."""
    qk = panels.widths(problem.head_dim)
    rest = _not_from_ds(problem, qk)
    first = qk[: len(qk) - len(rest)] if slots.own_dq else ()
    return first if _shares_dv(problem, slots) else first + rest


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    order = WorkOrder(KeyTiling(problem, KEYS, ROWS), config.grid)
    form = RowFormats.of(problem, ROWS)
    return KeyPlan(problem, config, order, form, bias_tiles=bias_tiles(problem))


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the kernel that needs most."""
    del config
    own = mosaic.bytes_of(_scratch(problem, slots_of(problem))) + RESERVED
    return max(own, sm90_dbias.smem_bytes(problem))


# ---- work of a block ----------------------------------------------------------------------------


class HeadTile(NamedTuple):
    """A kv tile of a head: the `n`-th kv tile of its block."""

    n: Index
    batch: Index
    head: Index
    j: Index
    steps: Index  # query tiles; 0 where a mask hides all keys
    first: Index  # first and last kv tile of the head that has steps; there is always one
    last: Index
    is_whole: Index | bool  # whether the mask shows all of its keys

    @property
    def q_len(self) -> None:
        """All rows count: `producer` asks."""

    @property
    def kv_head(self) -> Index:
        return self.head

    @property
    def key(self) -> Index:
        """The first of its keys."""
        return self.j * KEYS

    @property
    def is_first(self) -> Index:
        return self.j == self.first

    @property
    def is_last(self) -> Index:
        return self.j == self.last


class HeadWalk(NamedTuple):
    """The kv tiles of a block: those of heads `block`, `block + grid`, .. in this order."""

    ctx: KernelContext
    block: Index

    @property
    def grid(self) -> int:
        return grid_of(self.ctx.plan)

    @property
    def kv_tiles(self) -> int:
        tiles: int = self.ctx.plan.tiling.kv_tiles
        return tiles

    @property
    def tiles(self) -> Index:
        """The number of kv tiles of this block."""
        heads = self.ctx.plan.problem.batch * self.ctx.plan.problem.q_heads
        own = lax.div(jnp.int32(heads - 1 + self.grid) - self.block, jnp.int32(self.grid))
        return own * self.kv_tiles

    def tile(self, n: Index) -> HeadTile:
        problem, kv_tiles = self.ctx.plan.problem, jnp.int32(self.kv_tiles)
        number, heads = self.block + lax.div(n, kv_tiles) * self.grid, jnp.int32(problem.q_heads)
        batch, head, j = lax.div(number, heads), lax.rem(number, heads), lax.rem(n, kv_tiles)
        q_tiles, codes = self.ctx.plan.tiling.q_tiles, self.ctx.refs.key_tiles
        if codes is None:
            return HeadTile(n, batch, head, j, q_tiles, 0, self.kv_tiles - 1, True)
        row = jnp.minimum(batch, problem.batch - 1) if codes.shape[0] > 1 else 0
        first, last = jnp.int32(self.kv_tiles), jnp.int32(0)
        for tile in range(self.kv_tiles):
            shows = codes[row, 0, tile] > 0
            first = jnp.where(shows & (first == self.kv_tiles), tile, first)
            last = jnp.where(shows, tile, last)
        first = jnp.where(first == self.kv_tiles, 0, first)  # some tile must write dq
        code = codes[row, 0, j]
        steps = jnp.where((code > 0) | (j == first), q_tiles, 0)
        return HeadTile(n, batch, head, j, steps, first, last, code == 2)


def grid_of(plan: KeyPlan) -> int:
    """The number of blocks."""
    heads = plan.problem.batch * plan.problem.q_heads
    return min(plan.config.grid or heads, heads)


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: KernelContext, walk: HeadWalk) -> None:
    """The producer warpgroup. It loads the keys of a kv tile after the first query tile, since
    their slot is released later than that of the query tile.
    """
    smem, slots, both = ctx.smem, slots_of(ctx.plan.problem).k, range(WARPGROUPS)
    places = [wg if slots > 1 else (0, wg) for wg in both]
    k = [KeyPart("k", wg * ROWS, smem.k, places[wg], smem.k_ready) for wg in both]
    v = [KeyPart("v", wg * ROWS, smem.v, wg, smem.v_ready) for wg in both]
    buffers = [KeyBuffers(smem.k_free, k, slots), KeyBuffers(smem.v_free, v)]

    def kv_tile(n: Index, count: Index) -> Index:
        tile = walk.tile(n)
        own_keys = functools.partial(producer.load_keys, ctx, buffers, n, tile)

        def step(t: Index, count: Index) -> Index:
            producer.load_query_tile(ctx, tile, tile.head, t, count)
            pl.when(t == 0)(own_keys)
            return count + 1

        count = lax.fori_loop(0, tile.steps, step, count)
        if ctx.refs.key_tiles is not None:
            pl.when(tile.steps == 0)(own_keys)
        return count

    lax.fori_loop(0, walk.tiles, kv_tile, jnp.int32(0))


# ---- dK and dV: the consumers -------------------------------------------------------------------


class HeadStep(NamedTuple):
    """Query tile t of a kv tile: the `count`-th step of the block."""

    ctx: KernelContext
    tile: HeadTile
    wg: Index
    t: Index
    count: Index
    k: wgmma.Terms  # the warpgroup's keys, in panels; v likewise
    v: wgmma.Terms

    @property
    def slot(self) -> Index:
        return self.ctx.smem.q_ring.slot(self.count)

    @property
    def q(self) -> tuple[SmemRef, ...]:
        return panels.tiles(self.ctx.smem.q, self.slot)

    @property
    def do(self) -> tuple[SmemRef, ...]:
        return panels.tiles(self.ctx.smem.do, self.slot)

    def statistic(self, numbers: SmemRef) -> RegisterTile:
        """lse or delta of every query."""
        return mosaic.load(numbers.at[self.slot], mosaic.COLUMN)

    @property
    def keys(self) -> tuple[Index, Index]:
        """Indices of the warpgroup's keys in `HeadsSmem.k`: the slot and the warpgroup."""
        return ring_slot(self.tile.n, slots_of(self.ctx.plan.problem).k), self.wg

    @property
    def place(self) -> LogitTile:
        problem, tile = self.ctx.plan.problem, self.tile
        key = tile.j * KEYS + self.wg * ROWS
        where = tile.batch, tile.head, self.t * ROWS, key, problem.q_offset, problem.kv_len
        place, tiles = LogitTile(*where, problem.mask, q_axis=1), self.ctx.plan.bias_tiles
        if tiles is None:
            return place
        bias = tiles.of_warpgroup(self.ctx.smem.bias, self.slot, self.wg)
        return place._replace(in_smem={"bias": bias})

    @property
    def is_masked(self) -> Index | bool:
        """Whether some of the keys lie past the end or are hidden by the mask."""
        problem, whole = self.ctx.plan.problem, self.tile.is_whole
        key = self.tile.j * KEYS + self.wg * ROWS
        is_cut = key + ROWS > problem.kv_len if problem.kv_len % KEYS else False
        return is_cut if whole is True else is_cut | jnp.logical_not(whole)


def _consume(ctx: KernelContext, outs: KeyGradients, walk: HeadWalk, wg: Index) -> None:
    problem, smem = ctx.plan.problem, ctx.smem
    slots = slots_of(problem)
    qk_widths, v_widths = panels.widths(problem.head_dim), panels.widths(problem.v_head_dim)

    def kv_tile(n: Index, count: Index) -> Index:
        tile, slot = walk.tile(n), ring_slot(n, slots.k)
        plgpu.barrier_wait(smem.k_ready.at[slot])
        plgpu.barrier_wait(smem.v_ready)
        k: wgmma.Terms = panels.tiles(smem.k, (slot, wg))
        v: wgmma.Terms = panels.tiles(smem.v, wg)
        if _has_keys_in_registers(problem):
            k, v = ([mosaic.load(x, mosaic.TILE) for x in terms] for terms in (k, v))
            plgpu.commit_smem()  # v has been read, and TMA will write there
            plgpu.barrier_arrive(smem.v_free)

        def all_steps(*accs: RegisterTile) -> list[list[RegisterTile]]:
            sums = KeyGradients(accs[: len(qk_widths)], accs[len(qk_widths) :])

            def step(t: Index, count: Index) -> Index:
                _step(HeadStep(ctx, tile, wg, t, count, k, v), sums)
                return count + 1

            lax.fori_loop(0, tile.steps, step, count)
            return [[acc[...] for acc in accs] for accs in sums]

        accs = [plgpu.ACC((ROWS, width), jnp.float32) for width in qk_widths + v_widths]
        grads = KeyGradients(*pl.run_scoped(all_steps, *accs))
        last = smem.q_ring.slot(count + (tile.steps - 1))
        pl.when(jnp.int32(tile.steps) > 0)(lambda: smem.q_ring.release(last))
        if ctx.refs.key_tiles is not None:
            hidden = HeadStep(ctx, tile, wg, jnp.int32(0), count, k, v)
            pl.when(tile.steps == 0)(functools.partial(_release, hidden, True))
        _store_dk_dv(ctx, outs, HeadStep(ctx, tile, wg, 0, count, k, v), grads)
        return count + tile.steps

    lax.fori_loop(0, walk.tiles, kv_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _step(now: HeadStep, sums: KeyGradients) -> None:
    """Adds to `sums`, the accumulators of dK and dV; dK still runs when this returns."""
    now = now._replace(wg=now.wg + mosaic.opaque_zero(now.count))
    pl.run_scoped(functools.partial(_scores, now, sums), plgpu.ACC((ROWS, ROWS), jnp.float32))


def _scores(now: HeadStep, sums: KeyGradients, s_acc: RegisterTile) -> None:
    smem, slot = now.ctx.smem, now.slot
    smem.q_ring.wait(slot)
    wgmma.score_panels(s_acc, now.k, now.q)
    plgpu.wgmma_wait(len(now.k))
    before = smem.q_ring.slot(now.count - 1)
    pl.when(now.t > 0)(lambda: smem.q_ring.release(before))
    smem.do_ring.wait(slot)
    body = functools.partial(_dv_and_dk, now, sums, s_acc)
    pl.run_scoped(body, plgpu.ACC((ROWS, ROWS), jnp.float32))


def _dv_and_dk(
    now: HeadStep, sums: KeyGradients, s_acc: RegisterTile, dp_acc: RegisterTile
) -> None:
    plan, _, smem = now.ctx
    dtype, ds_slots = jnp.dtype(plan.problem.dtype), slots_of(plan.problem).ds
    do = now.do
    wgmma.score_panels(dp_acc, now.v, do)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(do))
    lse = now.statistic(smem.lse)
    p, slope = tile_logits.probabilities(now.ctx, now.place, s, lse, now.is_masked)
    wgmma.value_panels(sums.dv, p.astype(dtype), do)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=len(do))
    _release(now, now.t == now.tile.steps - 1)
    delta = per_column(now.statistic(smem.delta), dp.shape)
    ds = tile_logits.d_scores(p, dp, delta, slope).astype(dtype)
    to = ring_slot(now.count, ds_slots)
    pl.when(now.count >= ds_slots)(lambda: plgpu.barrier_wait(smem.ds_free.at[to]))
    smem.ds.tile[to, now.wg] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.ds_ready.at[to])
    wgmma.value_panels(sums.dk, ds, now.q)
    plgpu.wgmma_wait(len(sums.dk))
    smem.do_ring.release(now.slot)


def _release(now: HeadStep, is_last: Index | bool) -> None:
    """In the first step of a kv tile: the buffers from which the tile before is being stored. In
    the last: v, unless registers hold it.
    """
    problem, smem, n = now.ctx.plan.problem, now.ctx.smem, now.tile.n
    slots = slots_of(problem)

    def stored() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if slots.k > 1:
            plgpu.barrier_arrive(smem.k_free.at[ring_slot(n - 1, slots.k)])

    pl.when((now.t == 0) & (n > 0))(stored)
    if not _has_keys_in_registers(problem):
        pl.when(is_last)(lambda: plgpu.barrier_arrive(smem.v_free))


def _store_dk_dv(ctx: KernelContext, outs: KeyGradients, at: HeadStep, grads: KeyGradients) -> None:
    """Stores dk and dv of a warpgroup's keys, from k and from dS, when the third warpgroup has read
    both. They are read from there during the next kv tile, but before its K is loaded if that has
    no other slot.
    """
    plan, _, smem = ctx
    tile, slot = at.tile, at.keys[0]
    where = tile.batch, pl.ds(tile.j * KEYS + at.wg * ROWS, ROWS), tile.head
    scale = plan.problem.scale
    dk = [part if scale == 1.0 else part * scale for part in grads.dk]
    plgpu.barrier_wait(smem.dq_done.at[slot])
    buffers: list[tuple[Panels, epilogue.Place]] = [((panel,), at.wg) for panel in smem.dv]
    if len(buffers) < len(grads.dv):
        buffers.insert(0, ((smem.ds,), (0, at.wg)))
    staged = [epilogue.Staged([x], *there) for x, there in zip(grads.dv, buffers, strict=True)]
    of_k = [epilogue.Staged(dk, smem.k, at.keys)]
    epilogue.write([*staged, *of_k])
    epilogue.store(staged, outs.dv, where)
    epilogue.store(of_k, outs.dk, where)
    if slots_of(plan.problem).k == 1:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem.k_free.at[slot])


# ---- dQ -----------------------------------------------------------------------------------------


class DqStep(NamedTuple):
    """Query tile t of a kv tile: the `count`-th step of the block."""

    ctx: KernelContext
    dq: GmemRef
    tile: HeadTile
    t: Index
    count: Index


def _sum_dq(ctx: KernelContext, dq: GmemRef, walk: HeadWalk) -> None:
    """The third warpgroup: dQ of all query tiles of the block's heads."""
    smem, slots = ctx.smem, slots_of(ctx.plan.problem)

    def kv_tile(n: Index, count: Index) -> Index:
        tile, slot = walk.tile(n), ring_slot(n, slots.k)
        plgpu.barrier_wait(smem.k_ready.at[slot])

        def step(t: Index, count: Index) -> Index:
            _add_dq(DqStep(ctx, dq, tile, t, count))
            return count + 1

        count = lax.fori_loop(0, tile.steps, step, count)
        if _shares_dv(ctx.plan.problem, slots):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem.dq_done.at[slot])
        return count

    lax.fori_loop(0, walk.tiles, kv_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _add_dq(now: DqStep) -> None:
    plan, smem, tile = now.ctx.plan, now.ctx.smem, now.tile
    slots, qk = slots_of(plan.problem), panels.widths(plan.problem.head_dim)
    kv_slot, slot = ring_slot(tile.n, slots.k), ring_slot(now.count, slots.ds)

    def nothing() -> list[RegisterTile]:
        return [mosaic.filled((ROWS, width), 0.0) for width in qk]

    def before() -> list[RegisterTile]:
        return [mosaic.load(sums.at[now.t], mosaic.TILE) for sums in smem.sums]

    def operands(wg: int) -> wgmma_swizzles.Pair:
        ds, k = smem.ds.tile.at[slot, wg], panels.tiles(smem.k, (kv_slot, wg))
        return wgmma_swizzles.Pair(ds, k)

    def matmuls(acc: RegisterTile) -> None:
        for ds, k in map(operands, range(WARPGROUPS)):
            plgpu.wgmma(acc, ds.transpose((1, 0)), k[0])

    first, *rest = lax.cond(tile.is_first, nothing, before)
    plgpu.barrier_wait(smem.ds_ready.at[slot])
    rest = wgmma_swizzles.issue_rest(rest, map(operands, range(WARPGROUPS)))
    parts = [pl.run_state(matmuls)(plgpu.ACC.init(first)), *rest]

    if slots.own_dq:
        plgpu.barrier_arrive(smem.ds_free.at[slot])
    pl.when(tile.is_last)(functools.partial(_store_dq, now, slot, parts))
    if not slots.own_dq:
        plgpu.barrier_arrive(smem.ds_free.at[slot])

    @pl.when(jnp.logical_not(tile.is_last))
    def _():
        for part, sums in zip(parts, smem.sums, strict=True):
            sums[now.t] = part
        plgpu.commit_smem()


def _store_dq(now: DqStep, slot: Index, parts: Sequence[RegisterTile]) -> None:
    """Stores a tile of dq, from dS in `slot` or from a buffer."""
    problem, smem, tile = now.ctx.plan.problem, now.ctx.smem, now.tile
    slots = slots_of(problem)
    buffers: list[tuple[Panels, epilogue.Place]] = [((panel,), 0) for panel in smem.dq]
    if _shares_dv(problem, slots):
        buffers += [((panel,), 0) for panel in smem.dv]
    uses_ds = len(buffers) < len(parts)
    if uses_ds:
        buffers.insert(0, ((smem.ds,), (slot, 0)))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if uses_ds:
        plgpu.commit_smem()  # all warps have finished matmuls that read dS
    parts = [part * problem.scale for part in parts]
    staged = [epilogue.Staged([x], *there) for x, there in zip(parts, buffers, strict=True)]
    epilogue.write(staged)
    epilogue.store(staged, now.dq, (tile.batch, pl.ds(now.t * ROWS, ROWS), tile.head))
    if uses_ds:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: BackwardRefs, *rest: GmemRef, plan: KeyPlan) -> None:
    dq_ref, dk_ref, dv_ref, smem = rest
    ctx, wg = KernelContext(plan, refs, smem), lax.axis_index("wg")
    walk, (ours, of_dq, of_producer) = HeadWalk(ctx, lax.axis_index("block")), REGISTERS

    consume = functools.partial(_consume, ctx, KeyGradients(dk_ref, dv_ref), walk, wg)
    mosaic.take_role(wg == WARPGROUPS + 1, of_producer, functools.partial(_produce, ctx, walk))
    mosaic.take_role(wg == WARPGROUPS, of_dq, functools.partial(_sum_dq, ctx, dq_ref, walk))
    mosaic.take_role(wg < WARPGROUPS, ours, consume, more=True)


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan, others = Residuals(*residuals), plan_of(problem, config), {}
    stats, _ = statistics.of_rows(problem, residuals)
    grads = _dq_dk_dv(plan, residuals, stats)
    if problem.bias_shape is not None:
        refs = operands.ordered_after(operands.for_tma(plan, residuals, stats), grads.dq)
        others = sm90_dbias.gradients(KernelContext(plan, refs), residuals.inputs)
    return operands.cotangents(residuals, stats, grads, others)


def _dq_dk_dv(plan: KeyPlan, residuals: Residuals, stats: RowStatistics) -> Gradients:
    """dq, dk and dv, by one launch."""
    inputs, d_out = residuals.inputs, residuals.d_out
    refs = BackwardRefs(*inputs[:3], d_out, **stats._asdict())
    if plan.bias_tiles is not None:
        refs = refs._replace(bias=plan.bias_tiles.operand(inputs.bias))
    if plan.has("mask_array"):
        codes = key_masks.codes(inputs.mask_array, KEYS)
        refs = refs._replace(mask_array=inputs.mask_array, key_tiles=codes)
    body, size = functools.partial(_kernel, plan=plan), (grid_of(plan), WARPGROUPS + 2)
    buffers = _scratch(plan.problem, slots_of(plan.problem))
    return operands.launched(body, "flash_bwd_heads_sm90", refs, buffers, size)


KERNEL = Kernel(Config, limit, smem_bytes, run, slower)
