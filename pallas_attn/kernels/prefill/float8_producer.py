"""Operands of the float8 mainloop: K of a quantised cache by TMA from where it lies, V^T and the
units of keys from where a launch before made them (`float8_values`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_fwd.producer import Ring
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, SmemRef
from pallas_attn.kernels.prefill import float8_values, tma_producer
from pallas_attn.kernels.prefill.float8_values import KEYS, Transposition, Units
from pallas_attn.kernels.prefill.plan import Plan
from pallas_attn.kernels.prefill.queries import Unit
from pallas_attn.kernels.prefill.tma_producer import Target

Q_DTYPE = jnp.float8_e4m3fn  # also beside K of float8_e5m2, which has one bit less

warpgroups = tma_producer.warpgroups


class Buffers(NamedTuple):
    """Shared memory."""

    q: SmemRef  # [warpgroups, ROWS, ..], float8: a consumer's rows as matmuls take them
    units: SmemRef  # [stages, 3, block_kv], float32: `Units` of the K of a ring entry


def transposition(plan: Plan) -> Transposition:
    block = plan.config.block_kv
    keys = tma_operands.round_up(max(plan.layout.capacities), math.lcm(block, KEYS))
    return Transposition(plan.layout, plan.problem.v_head_dim, keys, block)


def operands(plan: Plan, inputs: DecodeInputs) -> dict[str, Any]:
    """Fields of `plan.PrefillRefs`."""
    values, units = float8_values.transposed(transposition(plan), inputs)
    tables = plan.layout.tables(inputs.k_cache)
    return {
        "k": tuple([plan.layout.view(table[0]) for table in tables]),
        "v": (values,),
        "key_units": units,
    }


def arrivals(plan: Plan) -> int:
    """Arrivals that complete the barrier of an entry: copies of K, of its units and of V^T."""
    return plan.copies + 2


def registers(plan: Plan) -> tuple[int, int]:
    return (240, 24)


def buffers(plan: Plan) -> Buffers:
    config = plan.config
    return Buffers(
        mosaic.swizzled((config.warpgroups, ROWS, plan.qk.width), Q_DTYPE, plan.qk.swizzle),
        plgpu.SMEM((config.stages, len(Units), config.block_kv), jnp.float32),
    )


def programs(ctx: KernelContext, block_id: Index) -> list[Callable[[], None]]:
    """The program of each warpgroup."""
    return [functools.partial(_produce, ctx, block_id)]


def _produce(ctx: KernelContext, block_id: Index) -> None:
    """K and V^T of every unit of the block, in the order in which consumers use them."""
    (plan, refs, smem), ring = ctx, Ring.of(ctx)
    units = plan.queries.units_of(ctx, block_id)

    def one_unit(i, count):
        unit = plan.queries.unit_of(ctx, units, units.number(i))
        tiles = unit.span.hi - unit.span.lo

        def entry(e, count):
            slot, t = ring.acquire(count), unit.span.hi - 1 - e
            ready = ring.ready.at[slot]

            def load_keys():
                keys = Target(refs.k, smem.k.at[slot], ready)
                tma_producer.copy_tile(ctx, unit, keys, t)
                own = refs.key_units.at[_head(plan, unit), :, _keys(plan, t)]
                plgpu.copy_gmem_to_smem(own, smem.producer.units.at[slot], ready)

            def load_values():
                own = refs.v[0].at[_head(plan, unit), :, _keys(plan, t + 1)]
                plgpu.copy_gmem_to_smem(own, smem.v.at[slot], ready)

            pl.when(e < tiles)(load_keys)
            pl.when(e == tiles)(lambda: tma_producer.arrive(ready, plan.copies + 1))
            pl.when(e > 0)(load_values)
            pl.when(e == 0)(lambda: tma_producer.arrive(ready, 1))
            return count + 1

        return lax.fori_loop(0, jnp.where(tiles > 0, tiles + 1, 0), entry, count)

    lax.fori_loop(0, units.count, one_unit, jnp.int32(0))


def _head(plan: Plan, unit: Unit) -> Index:
    """The kv head of a unit among those of all sequences."""
    return unit.m * plan.problem.kv_heads + unit.kv_head


def _keys(plan: Plan, t: Index) -> Any:
    return pl.ds(t * plan.config.block_kv, plan.config.block_kv)
