"""Operands of the float8 mainloop: K and V^T by TMA from where a launch before made them
(`float8_tiles`).
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import Index, SmemRef
from pallas_attn.kernels.prefill import float8_tiles
from pallas_attn.kernels.prefill.float8_tiles import Tiles
from pallas_attn.kernels.prefill.plan import Plan, Producer, Unit

Q_DTYPE = jnp.float8_e4m3fn  # also beside K of float8_e5m2, which has one bit less


class Buffers(NamedTuple):
    """Shared memory."""

    q: SmemRef  # [warpgroups, ROWS, ..], float8: a consumer's rows as matmuls take them


def producer_of(plan: Plan) -> Producer:
    q = plan.config.warpgroups, ROWS, plan.qk.width
    buffers = Buffers(mosaic.swizzled(q, Q_DTYPE, plan.qk.swizzle))
    return Producer(operands, (_produce,), arrivals=2, registers=(240, 24), buffers=buffers)


def operands(plan: Plan, inputs: DecodeInputs) -> dict[str, Any]:
    problem = plan.problem
    dims = problem.head_dim, problem.v_head_dim
    k, v, units = float8_tiles.tiles_of(Tiles(plan.layout, problem.dtype, dims), inputs)
    return {"k": (k,), "v": (v,), "tile_units": units}


def _produce(ctx: KernelContext, block_id: Index) -> None:
    """K and V^T of every unit of the block, in the order in which consumers use them."""
    (plan, refs, smem), ring = ctx, Ring.of(ctx)
    units, block = plan.queries.units_of(ctx, block_id), plan.config.block_kv

    def one_unit(i, count):
        unit = plan.queries.unit_of(ctx, units, units.number(i))
        tiles, head = unit.span.hi - unit.span.lo, kv_head(plan, unit)

        def entry(e, count):
            slot, t = ring.acquire(count), unit.span.hi - 1 - e
            ready = ring.ready.at[slot]

            def load_keys():
                keys = refs.k[0].at[head, pl.ds(t * block, block)]
                plgpu.copy_gmem_to_smem(keys, smem.k.at[slot], ready)

            def load_values():
                values = refs.v[0].at[head, :, pl.ds((t + 1) * block, block)]
                plgpu.copy_gmem_to_smem(values, smem.v.at[slot], ready)

            pl.when(e < tiles)(load_keys)
            pl.when(e > 0)(load_values)
            pl.when((e == 0) | (e == tiles))(lambda: plgpu.barrier_arrive(ready))
            return count + 1

        return lax.fori_loop(0, jnp.where(tiles > 0, tiles + 1, 0), entry, count)

    lax.fori_loop(0, units.count, one_unit, jnp.int32(0))


def kv_head(plan: Plan, unit: Unit) -> Index:
    """The kv head of a unit among those of all sequences."""
    return unit.m * plan.problem.kv_heads + unit.kv_head
