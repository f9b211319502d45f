"""dK and dV of the Hopper backward where dK and dV of 64 keys do not fit in one warpgroup's
registers together: head dims above 128, and float32, where 128 keys would not fit in shared memory
either. dQ is a kernel of its own there, `sm90_dq`.

A block owns 64 keys. Its two computing warpgroups share the matmuls instead of the keys: the first
makes S^T, P^T and dV, the second dP^T, dS^T and dK. All that passes between them is P, through
shared memory, one way: they drift apart by up to a query tile or two, so that one is busy with
exponents while the other's matmuls run. In each, the matmul for its gradient is a query tile
behind, see `_walk`.

Grid, tiles of work and rings of query tiles are those of `flash_bwd_sm90`.

Shared memory, and who owns it when:
  k, v               k is read by the first warpgroup and then carries dv off, v by the second and
                     then carries dk; each is `free` when it has. In float32 dk and dv go straight
                     from registers to global memory
  q, do [stages]     rings of query tiles; both warpgroups let go of each
  p [1 or 2]         P^T in float32, as the threads of the one hold it and the other's want it
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.flash_bwd import float32 as bwd_float32
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.float32 import times
from pallas_attn.kernels.flash_bwd.plan import ROWS, Item, Plan, Refs, across
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import wgmma

KEYS = ROWS  # of a tile of work
ROOM = 228 * 1024  # of shared memory, but for what is small


class Smem(NamedTuple):
    k: Any
    v: Any
    q: Any
    do: Any
    p: Any
    lse: Any
    delta: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    q_ready: Any
    do_ready: Any
    q_free: Any
    do_free: Any
    p_ready: Any
    p_free: Any


def scratch(plan: Plan) -> Smem:
    config, barrier = plan.config, plgpu.Barrier
    stages, block = config.stages, config.block_q
    numbers = plgpu.SMEM((stages, max(block, 32)), jnp.float32)  # TMA writes to whole 128 bytes
    row = plan.scores.bytes * plan.k_width + plan.values.bytes * plan.v_width
    room = ROOM - (mosaic.REDUCTION_BYTES if plan.exact else 0)
    turns = 2 if 2 * 4 * KEYS * block <= room - (KEYS + stages * block) * row else 1
    k_columns, v_columns = plan.scores.terms * plan.k_width, plan.values.terms * plan.v_width
    k_dtype, v_dtype = plan.scores.dtype, plan.values.dtype
    return Smem(
        k=mosaic.swizzled((1, KEYS, k_columns), k_dtype, plan.k_swizzle),
        v=mosaic.swizzled((1, KEYS, v_columns), v_dtype, plan.v_swizzle),
        q=mosaic.swizzled((stages, block, k_columns), k_dtype, plan.k_swizzle),
        do=mosaic.swizzled((stages, block, v_columns), v_dtype, plan.v_swizzle),
        p=mosaic.swizzled((turns, KEYS, block), jnp.float32, 128 if block % 32 == 0 else 64),
        lse=numbers,
        delta=numbers,
        k_ready=barrier(),
        v_ready=barrier(),
        k_free=barrier(),
        v_free=barrier(),
        q_ready=barrier(num_barriers=stages, num_arrivals=2),
        do_ready=barrier(num_barriers=stages, num_arrivals=2),
        q_free=barrier(num_barriers=stages, num_arrivals=2),
        do_free=barrier(num_barriers=stages, num_arrivals=2),
        p_ready=barrier(num_barriers=turns),
        p_free=barrier(num_barriers=turns),
    )


def buffer_bytes(plan: Plan) -> int:
    buffers = scratch(plan)[:7]
    whole = sum(math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers)
    return whole + (mosaic.REDUCTION_BYTES if plan.exact else 0)


# ---- loading ------------------------------------------------------------------------------------


def _load(plan: Plan, refs: Refs, smem: Smem, cta: Any) -> None:
    """The loading warpgroup: keys and query tiles of every tile of work, in order."""

    def keys(n, item):
        for name, to, ready, free in (
            ("k", smem.k.at[0], smem.k_ready, smem.k_free),
            ("v", smem.v.at[0], smem.v_ready, smem.v_free),
        ):
            pl.when(n > 0)(functools.partial(plgpu.barrier_wait, free))
            shared.load_keys(plan, refs, item, name, (0, to, ready))

    shared.load_all(plan, refs, smem, cta, keys)


# ---- computing ----------------------------------------------------------------------------------


class Side(NamedTuple):
    """What one of the two warpgroups works with."""

    keys: Any  # k or v, [1, KEYS, columns]
    first: Any  # the ring whose tiles meet the keys: q or dO
    first_ready: Any
    first_free: Any
    second: Any  # the ring whose tiles the gradient is made of: dO or q
    second_ready: Any
    second_free: Any
    numbers: Any  # that come with the first ring: lse or delta
    kinds: tuple[wgmma.Kind, wgmma.Kind]  # of what the first ring and the second hold
    swizzle: int  # of the second ring
    spread: float  # of the gradient's left operand
    early: bool  # in which order its matmuls are issued: see `_walk`


def _both(acc: Any, shape: tuple[int, int], start: Any) -> tuple[Any, Any]:
    """Two matmuls to their end: acc with one's result added, and the other's; start(other, one)."""

    def body(state):
        one, out = state

        def matmuls(other):
            start(other, one)
            return other[...]

        out[...] = pl.run_scoped(matmuls, plgpu.ACC(shape, jnp.float32))

    return pl.run_state(body)((plgpu.ACC.init(acc), mosaic.filled(shape, 0.0)))


def _keys_of(side: Side, number: Any) -> tuple[Any, ...]:
    at: Any = 0
    if side.keys.shape[-1] > 256:
        at = mosaic.opaque_zero(number)  # else addresses are computed early and spilled
    return wgmma.terms_of_smem(side.keys.at[at], side.kinds[0])


def _walk(plan: Plan, side: Side, item: Item, count: Any, work: Any) -> tuple[Any, Any]:
    """Gradient of the keys over all query tiles; work((head, t, number), product, numbers) makes
    the left operand of its matmul, float32.

    `side.early`: the gradient of the tile before is issued ahead of this tile's product, and the
    query tile that it is made of let go of at once. Else it runs under the arithmetic on this tile,
    but holds its own until that is done, which in the second warpgroup waits for the first: at head
    dim 256, with room for two query tiles, the one after next then came late for every step. Where
    float32's bits are owed the gradient comes first, too, and the product behind its last part.
    """
    group, (kind, gradient_kind) = plan.problem.group, side.kinds
    shape, columns = (KEYS, plan.config.block_q), side.second.shape[-1] // gradient_kind.terms
    left_of = functools.partial(bwd_float32.left, plan, spread=side.spread)
    added = functools.partial(bwd_float32.added, plan)
    keys = functools.partial(_keys_of, side)

    def slot_of(number):
        return shared.ring(number, plan.config.stages)

    def arithmetic(i, number, value):
        g = lax.div(i, item.steps)
        slot = slot_of(number)
        numbers = mosaic.load(side.numbers.at[slot, pl.ds(0, shape[1])], mosaic.COLUMN)
        at = item.kv_head * group + g, item.tile(i - g * item.steps), number
        left = work(at, value, numbers)
        plgpu.barrier_arrive(side.first_free.at[slot])
        return left

    def product(slot):
        plgpu.barrier_wait(side.first_ready.at[slot])
        return wgmma.transposed(wgmma.terms_of_smem(side.first.at[slot], kind))

    def gradient(slot):
        plgpu.barrier_wait(side.second_ready.at[slot])
        return wgmma.terms_of_smem(side.second.at[slot], gradient_kind)

    def some(count):
        slot = slot_of(count)
        first = wgmma.matmul(shape, keys(count), product(slot))
        left = left_of(arithmetic(0, count, first))
        acc = mosaic.filled((KEYS, columns), 0.0)

        def step(i, carry):
            acc, left, number = carry
            slot, before = slot_of(number), slot_of(number - 1)

            def start(product_acc, acc_ref):
                wgmma.multiply(product_acc, keys(number), product(slot))
                wgmma.multiply(acc_ref, left, gradient(before))

            finish = functools.partial(arithmetic, i, number)
            if side.early:

                def started(product_acc, acc_ref):
                    wgmma.multiply(acc_ref, left, gradient(before))
                    wgmma.multiply(product_acc, keys(number), product(slot))
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(side.second_free.at[before])

                acc, value = _both(acc, shape, started)
                return acc, left_of(finish(value)), number + 1
            if plan.exact:
                (*parts, powers), both = left, lambda: (keys(number), product(slot))
                some = (acc, parts, gradient(before), side.swizzle, (None, powers))
                acc, value = wgmma.exact_matmul_add_overlapped(*some, shape, both)
                plgpu.barrier_arrive(side.second_free.at[before])
                return acc, left_of(finish(value)), number + 1
            behind = wgmma.products(plan.values.terms, gradient_kind.terms)
            acc, left = wgmma.overlapped(acc, mosaic.filled(shape, 0.0), start, finish, behind)
            plgpu.barrier_arrive(side.second_free.at[before])
            return acc, left_of(left), number + 1

        acc, left, end = lax.fori_loop(1, group * item.steps, step, (acc, left, count + 1))
        last = slot_of(end - 1)
        acc = added(acc, left, gradient(last), side.swizzle)
        plgpu.barrier_arrive(side.second_free.at[last])
        return acc, end

    def none(count):
        return mosaic.filled((KEYS, columns), 0.0), count

    return lax.cond(item.steps > 0, some, none, count)


def _values(plan: Plan, refs: Refs, smem: Smem, item: Item, count: Any) -> tuple[Any, Any]:
    """The first warpgroup: P, for the other too, and dV."""
    units = bwd_float32.units_of(refs, item.batch, item.kv_head)
    side = Side(
        *(smem.k, smem.q, smem.q_ready, smem.q_free, smem.do, smem.do_ready, smem.do_free),
        numbers=smem.lse,
        kinds=(plan.scores, plan.values),
        swizzle=plan.v_swizzle,
        spread=bwd_float32.SPREAD,
        early=plan.values.terms == 1 and not plan.problem.mask.is_full,  # by measurement
    )

    def work(at, s, lse):
        head, t, number = at
        turns = smem.p.shape[0]
        turn = shared.ring(number, turns)
        place = shared.place_of(item, head, t, item.key, plan.config.block_q)
        s, masked = times(s, units.scores), shared.masked(plan, item, t)
        p, slope = score_mod.probabilities(plan, refs, place, s, lse, masked)
        pl.when(number >= turns)(lambda: plgpu.barrier_wait(smem.p_free.at[turn]))
        smem.p[turn] = p if slope is None else p * slope
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.p_ready.at[turn])
        return p

    dv, count = _walk(plan, side, item, count, work)
    return times(dv, units.dv), count


def _keys(plan: Plan, refs: Refs, smem: Smem, item: Item, count: Any) -> tuple[Any, Any]:
    """The second warpgroup: dS and dK."""
    units = bwd_float32.units_of(refs, item.batch, item.kv_head)
    side = Side(
        *(smem.v, smem.do, smem.do_ready, smem.do_free, smem.q, smem.q_ready, smem.q_free),
        numbers=smem.delta,
        kinds=(plan.values, plan.scores),
        swizzle=plan.k_swizzle,
        spread=1.0,
        early=plan.values.terms == 1,
    )

    def work(at, dp, delta):
        _, _, number = at
        turns = smem.p.shape[0]
        turn = shared.ring(number, turns)
        plgpu.barrier_wait(smem.p_ready.at[turn])
        p = mosaic.load(smem.p.at[turn], mosaic.TILE)
        plgpu.commit_smem()  # delta has been read, and TMA will write there
        plgpu.barrier_arrive(smem.p_free.at[turn])
        return p * (times(dp, units.dp) - across(delta, dp.shape))

    dk, count = _walk(plan, side, item, count, work)
    return dk * (plan.problem.scale if units.dk is None else units.dk), count


def _compute(plan: Plan, refs: Refs, smem: Smem, cta: Any, role: Any) -> None:
    """A computing warpgroup: every tile of work of its block."""
    gradient, ready, staged, free, out = role

    def one_item(n, carry):
        count, code = carry
        following = refs.dealt[cta, n + 2]  # asked for long before it is needed
        item = shared.item_of(plan, refs, code)
        plgpu.barrier_wait(ready)
        value, count = gradient(plan, refs, smem, item, count)
        if plan.problem.dtype == "float32":
            plgpu.barrier_arrive(free)
            where = (item.batch, pl.ds(item.key, KEYS), item.kv_head, pl.ds(0, value.shape[1]))
            mosaic.store(out.at[where], value)
            return count, following
        columns = staged.shape[1]  # the other head dim: parts are made as wide
        for column in range(0, value.shape[1], columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = lax.slice(value, (0, column), (KEYS, min(column + columns, value.shape[1])))
            if part.shape[1] < columns:
                nothing = mosaic.filled((KEYS, columns - part.shape[1]), 0.0)
                part = lax.concatenate([part, nothing], 1)
            staged[...] = part.astype(staged.dtype)
            plgpu.commit_smem()
            where = mosaic.columns(out, column, columns, item.kv_head)
            there = out.at[item.batch, pl.ds(item.key, KEYS), item.kv_head, where]
            plgpu.copy_smem_to_gmem(staged, there)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(free)
        return count, following

    lax.fori_loop(0, refs.dealt[cta, 0], one_item, (jnp.int32(0), refs.dealt[cta, 1]))
    plgpu.wait_smem_to_gmem(0)


def _kernel(refs: Refs, dk_ref: Any, dv_ref: Any, smem: Smem, *, plan: Plan) -> None:
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _load(plan, refs, smem, cta)

    @pl.when(wg == 0)
    def _():
        plgpu.set_max_registers(240, action="increase")
        role = (_values, smem.k_ready, smem.k.at[0], smem.k_free, dv_ref)
        _compute(plan, refs, smem, cta, role)

    @pl.when(wg == 1)
    def _():
        plgpu.set_max_registers(240, action="increase")
        role = (_keys, smem.v_ready, smem.v.at[0], smem.v_free, dk_ref)
        _compute(plan, refs, smem, cta, role)


# ---- the call -----------------------------------------------------------------------------------


def dk_dv(plan: Plan, refs: Refs) -> tuple[Any, Any]:
    """dk and dv, padded as refs.k and refs.v are; in float32 to whole tiles."""
    outs: list[Any] = []
    for x, width, swizzle in (
        (refs.k, plan.k_width, plan.v_swizzle),
        (refs.v, plan.v_width, plan.k_swizzle),
    ):
        columns = x.shape[3]
        if plan.problem.dtype == "float32":
            sizes = (x.shape[0], plan.padded_keys, x.shape[2], width)
            outs.append(jax.ShapeDtypeStruct(sizes, jnp.float32))
            continue
        if columns > swizzle // 2:  # they leave by tiles of the other array's
            columns = tma_operands.round_up(columns, swizzle // 2)
        outs.append(jax.ShapeDtypeStruct((*x.shape[:3], columns), x.dtype))
    params = plgpu.CompilerParams(approx_math=True)
    if plan.problem.dtype != "float32":
        params = mosaic.without_barriers()
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(outs),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=params,
        kernel_name="flash_bwd_wide_sm90",
    )
    return kernel(refs)
