"""dK and dV of the Hopper backward where dK and dV of 64 keys do not fit in one warpgroup's
registers together: head dims above 128, and float32, where 128 keys would not fit in shared memory
either. dQ is then computed by a kernel of its own, `sm90_dq`.

A block owns 64 keys. Its two consumer warpgroups share the matmuls instead of the keys: the first
computes S^T, P^T and dV, the second dP^T, dS^T and dK. Only P passes between them, through shared
memory and one way: the first may be ahead by a query tile or two, so that one computes exponentials
while the matmuls of the other run. In each, the matmul for its gradient is a query tile behind, see
`_mainloop`.

Grid, work tiles and rings of query tiles are those of `sm90_fused`.

Tried at head dims 192/128, and left out (`results/shapes/training_h200.jsonl`): k and v in
registers, and dO in `sm90_dq` (10 % faster without a mask, 3 % with a causal one); beside these,
pairs of blocks that load q and dO by multicast (4 % faster here, slower in `sm90_dq`), S issued a
query tile ahead (5 % slower), query tiles in one order for all blocks (1 % faster).

Shared memory, and who owns it when:
  k, v               k is read by the first warpgroup, which then stores dv from there; v by the
                     second, which then stores dk. In float32 dk and dv go straight from registers
                     to global memory
  q, do [stages]     rings of query tiles, released by both warpgroups
  p [1 or 2]         a ring of P^T in float32, from the first warpgroup to the second, in the order
                     in which threads hold it
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import tile_logits, tma_operands
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.flash_bwd import float32, key_tiles, producer, step_parts
from pallas_attn.kernels.flash_bwd.float32 import scaled
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, KeyGradients
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.producer import KeyBuffers, KeyPart
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels, Ring
from pallas_attn.kernels.lang.types import (
    Barrier,
    Carry,
    GmemRef,
    Index,
    RegisterTile,
    RegisterTiles,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma, wgmma_float32

KEYS = ROWS  # keys of a work tile
ROOM = 228 * 1024  # bytes of shared memory for k, v, q, do and p


class DkDvSmem(NamedTuple):
    k: Panels
    v: Panels
    q: Panels
    do: Panels
    p: SmemRef
    lse: SmemRef
    delta: SmemRef
    k_ready: Barrier
    v_ready: Barrier
    k_free: Barrier
    v_free: Barrier
    q_ready: Barrier
    do_ready: Barrier
    q_free: Barrier
    do_free: Barrier
    p_ready: Barrier
    p_free: Barrier

    @property
    def q_ring(self) -> Ring:
        return Ring(self.q, self.q_ready, self.q_free, self.lse)

    @property
    def do_ring(self) -> Ring:
        return Ring(self.do, self.do_ready, self.do_free, self.delta)

    @property
    def p_ring(self) -> Ring:
        return Ring(self.p, self.p_ready, self.p_free)


def scratch(plan: KeyPlan) -> DkDvSmem:
    """Shared memory, described once: `dk_dv` launches it, `smem_bytes` adds it up."""
    config, form, barrier = plan.config, plan.format, plgpu.Barrier
    stages, block = config.stages, config.block_q
    row_stats = plgpu.SMEM((stages, max(block, 32)), jnp.float32)  # TMA writes to whole 128 bytes
    row = sum(x.columns * x.itemsize for x in form[:2])
    room = ROOM - (mosaic.REDUCTION_BYTES if plan.exact else 0)
    p_stages = 2 if 2 * 4 * KEYS * block <= room - (KEYS + stages * block) * row else 1
    ring = functools.partial(barrier, num_barriers=stages)
    qk, v = form.qk, form.v
    return DkDvSmem(
        k=qk.scratch(1, KEYS),
        v=v.scratch(1, KEYS),
        q=qk.scratch(stages, block),
        do=v.scratch(stages, block),
        p=mosaic.swizzled((p_stages, KEYS, block), jnp.float32, 128 if block % 32 == 0 else 64),
        lse=row_stats,
        delta=row_stats,
        k_ready=barrier(num_arrivals=qk.copies),
        v_ready=barrier(num_arrivals=v.copies),
        k_free=barrier(),
        v_free=barrier(),
        q_ready=ring(num_arrivals=1 + qk.copies),
        do_ready=ring(num_arrivals=1 + v.copies),
        q_free=ring(num_arrivals=2),
        do_free=ring(num_arrivals=2),
        p_ready=barrier(num_barriers=p_stages),
        p_free=barrier(num_barriers=p_stages),
    )


def buffer_bytes(plan: KeyPlan) -> int:
    return mosaic.bytes_of(scratch(plan)) + (mosaic.REDUCTION_BYTES if plan.exact else 0)


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block_id: Index) -> None:
    """The producer warpgroup: keys and query tiles of every work tile, in order."""
    smem = ctx.smem
    k = KeyBuffers(smem.k_free, [KeyPart("k", 0, smem.k, 0, smem.k_ready)])
    v = KeyBuffers(smem.v_free, [KeyPart("v", 0, smem.v, 0, smem.v_ready)])
    producer.produce(ctx, block_id, [k, v])


# ---- the consumers ------------------------------------------------------------------------------


class Role(NamedTuple):
    """One of the two consumer warpgroups: it multiplies its keys with the tiles of one ring, makes
    P or dS of the product, and multiplies that with the tiles of the other ring for its gradient.
    """

    keys: Panels  # k or v, [1, KEYS, columns]
    product: Ring  # q or dO
    product_form: OperandFormat
    gradient: Ring  # dO or q
    gradient_form: OperandFormat
    left_scale: float  # factor of the left operand of the gradient's matmul
    gradient_first: bool  # order in which matmuls are issued: see `_mainloop`


class QTile(NamedTuple):
    """A query tile of a work tile."""

    head: Index
    t: Index
    count: Index  # its number, over all work tiles
    number: Index  # its number among the head's


def _two_matmuls(
    acc: RegisterTiles, shape: tuple[int, int], start: Callable[[Any, Any], None]
) -> tuple[RegisterTiles, RegisterTile]:
    """Two matmuls to their end: acc with the result of one added, and the result of the other;
    start(other, acc) issues them.
    """

    def body(state: Carry) -> None:
        acc_ref, out = state

        def matmuls(other: Any) -> RegisterTile:
            start(other, acc_ref)
            return other[...]

        out[...] = pl.run_scoped(matmuls, plgpu.ACC(shape, jnp.float32))

    accs = jax.tree.map(plgpu.ACC.init, acc)
    return pl.run_state(body)((accs, mosaic.filled(shape, 0.0)))


def _keys_of(role: Role, count: Index) -> wgmma.Terms:
    """The left operand of the product: panels, or terms."""
    tiles = panels.tiles(role.keys, 0)
    if role.product_form.panels:
        return tiles
    if tiles[0].shape[-1] > 256:  # else addresses are computed early and spilled
        tiles = panels.tiles(role.keys, mosaic.opaque_zero(count))
    return wgmma.terms_of_smem(tiles[0], role.product_form.kind)


def _product_tiles(role: Role, slot: Index) -> tuple[SmemRef, ...]:
    """The right operand of the product: panels, or transposed terms."""
    role.product.wait(slot)
    tiles = panels.tiles(role.product.tiles, slot)
    if role.product_form.panels:
        return tiles
    return wgmma.transposed(wgmma.terms_of_smem(tiles[0], role.product_form.kind))


def _gradient_tiles(role: Role, slot: Index) -> tuple[SmemRef, ...]:
    """The right operand of the gradient's matmul: panels, or terms."""
    role.gradient.wait(slot)
    tiles = panels.tiles(role.gradient.tiles, slot)
    if role.gradient_form.panels:
        return tiles
    return wgmma.terms_of_smem(tiles[0], role.gradient_form.kind)


def _nothing(form: OperandFormat) -> RegisterTiles:
    """A gradient before anything is added, a tile a panel."""
    if form.panels:
        return tuple(mosaic.filled((KEYS, width), 0.0) for width in form.panels)
    return mosaic.filled((KEYS, form.width), 0.0)


def _issue_gradient(
    form: OperandFormat, acc: RegisterTiles, left: wgmma.Terms, tiles: wgmma.Terms
) -> None:
    """Issues acc += left @ tiles."""
    if form.panels:
        return wgmma.value_panels(acc, left[0], tiles)
    return wgmma.multiply(acc, left, tiles)


def _add_gradient(
    plan: KeyPlan, form: OperandFormat, acc: RegisterTiles, left: wgmma.Terms, tiles: wgmma.Terms
) -> RegisterTiles:
    """acc + left @ tiles."""
    if form.panels:
        return wgmma.add_value_panels(acc, left[0], tiles)
    return float32.matmul_add(plan.problem, acc, left, tiles, form.swizzle)


def _mainloop(
    plan: KeyPlan, role: Role, work: KeyTile, count: Index, make_left: Callable[..., RegisterTile]
) -> tuple[RegisterTiles, Index]:
    """The gradient of the keys over all query tiles, and the new count of query tiles.
    make_left(q_tile, product, row_stats) makes the left operand of its matmul, float32.

    `role.gradient_first`: the gradient of the tile before is issued ahead of this tile's product,
    and the tile that it is made of released at once. Else it runs under the arithmetic on this
    tile, but is in use until that is done, which in the second warpgroup waits for the first: at
    head dim 256, with room for two query tiles, the one after next then came late for every step.
    Where float32's bits are owed the gradient comes first, too, and the product behind its last
    part.
    """
    group, form = plan.problem.group, role.gradient_form
    first_step, end_step = key_tiles.steps_of(plan, work)
    shape = KEYS, plan.config.block_q
    multiply_keys = wgmma.score_panels if role.product_form.panels else wgmma.multiply
    to_left = functools.partial(float32.left_operand, plan.problem, by=role.left_scale)
    keys = functools.partial(_keys_of, role)
    product = functools.partial(_product_tiles, role)
    gradient = functools.partial(_gradient_tiles, role)
    slot_of, release = role.product.slot, role.gradient.release

    def left_of(i: Index, count: Index, value: RegisterTile) -> RegisterTile:
        g, number = key_tiles.step_of(plan, work, i)
        slot = slot_of(count)
        stats = role.product.row_stats.at[slot, pl.ds(0, shape[1])]
        row_stats = mosaic.load(stats, mosaic.COLUMN)
        q_tile = QTile(work.kv_head * group + g, work.q_tiles.tile(number), count, number)
        left = make_left(q_tile, value, row_stats)
        role.product.release(slot)
        return left

    def all_steps(count: Index) -> tuple[RegisterTiles, Index]:
        slot = slot_of(count)
        first = wgmma.matmul(shape, keys(count), product(slot), issue=multiply_keys)
        left, acc = to_left(left_of(first_step, count, first)), _nothing(form)

        def step(i: Index, carry: Carry) -> Any:
            acc, left, count = carry
            slot, before = slot_of(count), slot_of(count - 1)

            def product_first(product_acc: RegisterTile, acc_ref: RegisterTile) -> None:
                multiply_keys(product_acc, keys(count), product(slot))
                _issue_gradient(form, acc_ref, left, gradient(before))

            def gradient_first(product_acc: RegisterTile, acc_ref: RegisterTile) -> None:
                _issue_gradient(form, acc_ref, left, gradient(before))
                multiply_keys(product_acc, keys(count), product(slot))
                plgpu.wgmma_wait(role.product_form.copies)
                release(before)

            finish = functools.partial(left_of, i, count)
            if role.gradient_first:
                acc, value = _two_matmuls(acc, shape, gradient_first)
                return acc, to_left(finish(value)), count + 1
            if plan.exact:
                (*terms, powers), both = left, lambda: (keys(count), product(slot))
                some = (acc, terms, gradient(before), form.swizzle, (None, powers))
                acc, value = wgmma_float32.exact_matmul_add_overlapped(*some, shape, both)
                release(before)
                return acc, to_left(finish(value)), count + 1
            behind = form.copies * wgmma.products(plan.format.v.terms, form.terms)
            zeros = mosaic.filled(shape, 0.0)
            acc, left = wgmma.overlapped(acc, zeros, product_first, finish, behind)
            release(before)
            return acc, to_left(left), count + 1

        start = acc, left, count + 1
        acc, left, end = lax.fori_loop(first_step + 1, end_step, step, start)
        last = slot_of(end - 1)
        acc = _add_gradient(plan, form, acc, left, gradient(last))
        release(last)
        return acc, end

    def no_step(count: Index) -> tuple[RegisterTiles, Index]:
        return _nothing(form), count

    some = end_step > first_step if plan.order.parts > 1 else work.steps > 0
    return lax.cond(some, all_steps, no_step, count)


def _make_dv(ctx: KernelContext, work: KeyTile, count: Index) -> tuple[RegisterTiles, Index]:
    """The first warpgroup: P, for the other too, and dV."""
    (plan, refs, smem), form = ctx, ctx.plan.format
    units, ring = float32.units_of(refs.units, work.batch, work.kv_head), smem.p_ring
    role = Role(
        keys=smem.k,
        product=smem.q_ring,
        product_form=form.qk,
        gradient=smem.do_ring,
        gradient_form=form.v,
        left_scale=float32.SPREAD,
        gradient_first=form.v.terms == 1 and not plan.problem.mask.is_full,  # by measurement
    )

    def make_p(q_tile: QTile, s: RegisterTile, lse: RegisterTile) -> RegisterTile:
        slot = ring.slot(q_tile.count)
        place = work.place(q_tile.head, q_tile.t, work.key, plan.config.block_q)
        masked = key_tiles.needs_mask(plan.tiling, work, q_tile.t, q_tile.number)
        s = scaled(s, units.scores)
        p, slope = tile_logits.probabilities(ctx, place, s, lse, masked)
        ring.acquire(q_tile.count, slot)
        smem.p[slot] = p if slope is None else p * slope
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.p_ready.at[slot])
        return p

    dv, count = _mainloop(plan, role, work, count, make_p)
    return jax.tree.map(lambda part: scaled(part, units.dv), dv), count


def _make_dk(ctx: KernelContext, work: KeyTile, count: Index) -> tuple[RegisterTiles, Index]:
    """The second warpgroup: dS and dK."""
    (plan, refs, smem), form = ctx, ctx.plan.format
    units, ring = float32.units_of(refs.units, work.batch, work.kv_head), smem.p_ring
    role = Role(
        keys=smem.v,
        product=smem.do_ring,
        product_form=form.v,
        gradient=smem.q_ring,
        gradient_form=form.qk,
        left_scale=1.0,
        gradient_first=form.v.terms == 1,
    )

    def make_ds(q_tile: QTile, dp: RegisterTile, delta: RegisterTile) -> RegisterTile:
        slot = ring.slot(q_tile.count)
        ring.wait(slot)
        p = mosaic.load(smem.p.at[slot], mosaic.TILE)
        plgpu.commit_smem()  # delta has been read, and TMA will write there
        ring.release(slot)
        return tile_logits.d_scores(p, scaled(dp, units.dp), key_tiles.per_column(delta, dp.shape))

    dk, count = _mainloop(plan, role, work, count, make_ds)
    unit = plan.problem.scale if units.dk is None else units.dk
    return jax.tree.map(lambda part: part * unit, dk), count


# ---- the epilogue -------------------------------------------------------------------------------


class Consumer(NamedTuple):
    """A consumer warpgroup: the gradient that it makes, and where that goes."""

    make: Callable[..., tuple[RegisterTiles, Index]]
    keys: Panels  # from where the gradient is stored
    ready: Barrier
    free: Barrier
    out: GmemRef


def _consume(ctx: KernelContext, block_id: Index, consumer: Consumer) -> None:
    """Every work tile of a block."""

    def work_tile(n: Index, count: Index, code: Index) -> Index:
        work = key_tiles.key_tile(ctx, code)
        plgpu.barrier_wait(consumer.ready)
        value, count = consumer.make(ctx, work, count)
        if ctx.plan.order.parts > 1:
            plgpu.commit_smem()  # keys have been read, and TMA will write there
            plgpu.barrier_arrive(consumer.free)
            step_parts.store_part(ctx.plan, consumer.out, work, 0, jax.tree.leaves(value))
        elif ctx.plan.problem.dtype == "float32":
            plgpu.barrier_arrive(consumer.free)
            where = (work.batch, pl.ds(work.key, KEYS), work.kv_head, pl.ds(0, value.shape[1]))
            mosaic.store(consumer.out.at[where], value)
        else:
            _store(consumer, work, jax.tree.leaves(value))
        return count

    producer.each_work_tile(ctx, block_id, work_tile)
    plgpu.wait_smem_to_gmem(0)


def _store(consumer: Consumer, work: KeyTile, parts: Sequence[RegisterTile]) -> None:
    """Stores as many panels at a time as there are of the other head dim, in the widest."""
    places = panels.tiles(consumer.keys, 0)
    width = places[0].shape[1]
    count = sum(place.shape[1] == width for place in places)
    pieces: list[RegisterTile] = []
    for part in parts:
        starts = range(0, part.shape[1], width)
        pieces += [lax.slice(part, (0, n), (KEYS, min(n + width, part.shape[1]))) for n in starts]
    at = work.batch, work.kv_head, work.key
    for first in range(0, len(pieces), count):
        some = pieces[first : first + count]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for piece, staged in zip(some, places, strict=False):
            if piece.shape[1] < width:  # the last: TMA leaves out columns past the head dim
                nothing = mosaic.filled((KEYS, width - piece.shape[1]), 0.0)
                piece = lax.concatenate([piece, nothing], 1)
            staged[...] = piece.astype(staged.dtype)
        plgpu.commit_smem()
        rows = consumer.keys[: len(some)] if isinstance(consumer.keys, tuple) else consumer.keys
        producer.store_rows(rows, 0, consumer.out, at, first * width)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(consumer.free)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(
    refs: BackwardRefs, dk_ref: GmemRef, dv_ref: GmemRef, smem: DkDvSmem, *, plan: KeyPlan
) -> None:
    ctx = KernelContext(plan, refs, smem)
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")

    dv = Consumer(_make_dv, smem.k, smem.k_ready, smem.k_free, dv_ref)
    dk = Consumer(_make_dk, smem.v, smem.v_ready, smem.v_free, dk_ref)
    mosaic.take_role(wg == 2, 24, functools.partial(_produce, ctx, block_id))
    for number, consumer in enumerate((dv, dk)):
        consume = functools.partial(_consume, ctx, block_id, consumer)
        mosaic.take_role(wg == number, 240, consume, more=True)


def dk_dv(plan: KeyPlan, refs: BackwardRefs) -> KeyGradients:
    """dk and dv, in the sizes of refs.k and refs.v; in float32 in whole tiles."""
    form = plan.format
    if plan.order.parts > 1:
        widths = [x.panels or (x.width,) for x in form[:2]]
        pieces = _kernel_of(plan, step_parts.outputs(plan, widths))(refs)
        return KeyGradients(*step_parts.added(step_parts.of_dk_dv(plan, pieces, widths)))
    outs: list[jax.ShapeDtypeStruct] = []
    for x, width, swizzle in (
        (refs.k, form.qk.width, form.v.swizzle),
        (refs.v, form.v.width, form.qk.swizzle),
    ):
        if form.qk.panels:
            sizes = (plan.problem.batch, *x.shape[1:])
            outs.append(jax.ShapeDtypeStruct(sizes, x.dtype))
            continue
        columns = x.shape[3]
        if plan.problem.dtype == "float32":
            sizes = (x.shape[0], plan.tiling.padded_keys, x.shape[2], width)
            outs.append(jax.ShapeDtypeStruct(sizes, jnp.float32))
            continue
        if columns > swizzle // 2:  # stored by tiles of the other array's
            columns = tma_operands.round_up(columns, swizzle // 2)
        sizes = (plan.problem.batch, *x.shape[1:3], columns)
        outs.append(jax.ShapeDtypeStruct(sizes, x.dtype))
    return KeyGradients(*_kernel_of(plan, outs)(refs))


def _kernel_of(plan: KeyPlan, outs: Sequence[jax.ShapeDtypeStruct]) -> Callable[..., Any]:
    return mosaic.persistent_kernel(
        functools.partial(_kernel, plan=plan),
        "flash_bwd_dkdv_sm90",
        tuple(outs),
        scratch(plan),
        (plan.order.grid, 3),
        barriers=plan.problem.dtype == "float32",
    )
