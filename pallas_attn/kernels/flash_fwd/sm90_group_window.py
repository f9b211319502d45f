"""The Hopper forward of short causal windows where 8 query heads or more share K and V: gpt-oss, a
window of 128 keys and 64:8 heads of 64.

The forward for any mask gives a warpgroup 64 query rows of one head, which meet 192 keys in three
kv tiles, and each of its work tiles reads half as many keys again. Here the 64 rows of a warpgroup
are 8 heads of 8 query rows: they meet 136 keys, a single tile of scores, so there is no online
softmax, and only the first and last columns need a mask. Two to four consumers take neighbouring
query rows, and their keys are one kv tile in shared memory of which each reads its own part.

Grid: one persistent block a multiprocessor. It takes units number block, block + grid, ..; a unit
is the query rows of all consumers for 8 heads. All heads of the same rows follow each other, so
that blocks at work at one time read whole rows of q.

Warpgroups: a producer loads K and V; a consumer loads its rows of q a unit ahead, and stores its
result. A consumer does not overlap its own matmuls with its softmax: the others have matmuls then.

Shared memory, and who owns it when:
  q [2, warpgroup]  the consumer's own: those of the next unit are loaded during this one
  k, v [stages]     a ring of kv tiles: `ready`, and `free` when all consumers have released it
  out [warpgroup]   the consumer's own: its result on the way to global memory
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
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import group_windows, softmax
from pallas_attn.kernels.attention.group_windows import WIDTH, GroupWindow, Unit
from pallas_attn.kernels.attention.logits import mask_columns
from pallas_attn.kernels.attention.tiles import ROWS, ForwardRefs, KernelContext
from pallas_attn.kernels.flash_fwd.sm90 import REGISTERS
from pallas_attn.kernels.flash_fwd.warpgroups import with_zeros
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import OneForAll, check
from pallas_attn.kernels.lang.mosaic import BARRIERS
from pallas_attn.kernels.lang.panels import Panel
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import head_rows, wgmma
from pallas_attn.kernels.mma.head_rows import QUERIES

# Rows of V that a consumer multiplies after its first `reach`: the 8 of its tile of scores, and 8
# whose probabilities are 0, since a matmul takes 16.
END = 16


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 4  # consumers
    stages: int = 2  # kv tiles of the ring
    grid: int = gpu_specs.multiprocessors(gpu_specs.HOPPER)  # blocks

    def __post_init__(self):
        check(
            self,
            warpgroups=(self.warpgroups in (2, 3, 4), "2, 3 or 4"),
            stages=(self.stages >= 2, "at least 2"),
            grid=(self.grid >= 1, "at least 1"),
        )


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """The static values of a launch."""

    problem: AttentionProblem
    config: Config

    @functools.cached_property
    def window(self) -> GroupWindow:
        return GroupWindow(self.problem, self.config.warpgroups * QUERIES)

    @functools.cached_property
    def keys(self) -> int:
        """Keys of a consumer's tile of scores."""
        return self.window.reach + QUERIES

    @functools.cached_property
    def spread(self) -> int:
        """Keys by which the tile of the last consumer begins after that of the first."""
        return (self.config.warpgroups - 1) * QUERIES

    @functools.cached_property
    def grid(self) -> int:
        return min(self.config.grid, self.window.units)


class WindowSmem(NamedTuple):
    """Shared memory."""

    q: Panel  # [2 * warpgroups, ROWS, 64]
    k: SmemRef  # [stages, keys, 64]
    v: SmemRef  # [stages, the first `reach` keys of each consumer, 64]
    v_end: SmemRef  # [stages, the `END` keys after those of each consumer, 64]
    out: Panel  # [warpgroups, ROWS, 64]
    q_ready: Barrier
    ready: Barrier
    free: Barrier


def scratch(plan: WindowPlan) -> WindowSmem:
    config, dtype, barrier = plan.config, jnp.dtype(plan.problem.dtype), plgpu.Barrier

    def tiles(*shape: int, swizzle: int = 2 * WIDTH) -> Any:
        return mosaic.swizzled((*shape, WIDTH), dtype, swizzle)

    return WindowSmem(
        q=group_windows.scratch((2 * config.warpgroups,), dtype),
        k=tiles(config.stages, plan.spread + plan.keys),
        v=tiles(config.stages, plan.spread + plan.window.reach),
        v_end=tiles(config.stages, plan.spread + END, swizzle=2 * END),
        out=group_windows.scratch((config.warpgroups,), dtype),
        q_ready=barrier(num_barriers=2 * config.warpgroups),
        ready=barrier(num_barriers=config.stages, num_arrivals=3),
        free=barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(WindowPlan(problem, config))) + BARRIERS + mosaic.REDUCTION_BYTES


# ---- the producer --------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block: Index) -> None:
    plan, refs, smem = ctx

    def one_unit(i: Index, carry: tuple[()]) -> tuple[()]:
        unit = plan.window.unit(block + i * plan.grid)
        slot = lax.rem(i, jnp.int32(plan.config.stages))
        released, ready = smem.free.at[slot], smem.ready.at[slot]
        pl.when(i >= plan.config.stages)(functools.partial(plgpu.barrier_wait, released))
        first = plan.window.first_key(unit.row)
        for source, start, to in (
            (refs.k, first, smem.k),
            (refs.v, first, smem.v),
            (refs.v, first + plan.window.reach, smem.v_end),
        ):
            there = source.at[unit.batch, pl.ds(start, to.shape[1]), unit.kv_head]
            plgpu.copy_gmem_to_smem(there, to.at[slot], ready)
        return carry

    lax.fori_loop(0, plan.window.count(block, plan.grid), one_unit, ())


# ---- consumers -----------------------------------------------------------------------------------


def _consume(ctx: KernelContext, block: Index, wg: Index) -> None:
    """8 query rows of 8 heads of all units of a block."""
    plan, refs, smem = ctx
    count = plan.window.count(block, plan.grid)

    def q_slot(i: Index) -> Index:
        return wg + (i & 1) * plan.config.warpgroups

    def load_q(i: Index) -> None:
        unit, slot = plan.window.unit(block + i * plan.grid), q_slot(i)
        row, ready = unit.row + wg * QUERIES, smem.q_ready.at[slot]
        group_windows.load_rows(refs.q, unit, row, smem.q, slot, ready)

    def one_unit(i: Index, carry: tuple[()]) -> tuple[()]:
        # All warps have read the slot: they met in the epilogue of the unit before.
        pl.when(i + 1 < count)(functools.partial(load_q, i + 1))
        unit, slot = (
            plan.window.unit(block + i * plan.grid),
            lax.rem(i, jnp.int32(plan.config.stages)),
        )
        plgpu.barrier_wait(smem.q_ready.at[q_slot(i)])
        plgpu.barrier_wait(smem.ready.at[slot])
        _attend(ctx, unit, unit.row + wg * QUERIES, wg, q_slot(i), slot)
        return carry

    load_q(jnp.int32(0))
    lax.fori_loop(0, count, one_unit, ())
    plgpu.wait_smem_to_gmem(0)


def _attend(
    ctx: KernelContext, unit: Unit, row: Index, wg: Index, q_slot: Index, slot: Index
) -> None:
    """8 query rows of 8 heads from a row on, whose keys are in the ring."""
    plan, refs, smem = ctx
    window = plan.window
    first = window.first_key(row)
    skipped = first - window.first_key(unit.row)
    k, *v = (
        tile.at[slot, pl.ds(skipped, rows)]
        for tile, rows in ((smem.k, plan.keys), (smem.v, window.reach), (smem.v_end, END))
    )
    s = wgmma.matmul((ROWS, plan.keys), (smem.q.tile.at[q_slot],), (k,), issue=wgmma.score_panels)
    s = lax.cond(
        row >= window.reach,
        functools.partial(_masked_at_edges, window),
        functools.partial(_masked, window, row - first),
        s,
    )
    nothing = mosaic.filled((ROWS,), -jnp.inf)
    new = softmax.step(s, softmax.unit_of(plan.problem.scale), nothing, empty_ok=True)
    p = with_zeros(new.p.astype(plan.problem.dtype), window.reach + END)
    p = [
        lax.slice(p, (0, n), (ROWS, m)) for n, m in ((0, window.reach), (window.reach, p.shape[1]))
    ]

    def values(acc: RegisterTile) -> RegisterTile:
        for some, keys in zip(p, v, strict=True):
            plgpu.wgmma(acc, some, keys)
        return acc[...]

    acc = pl.run_scoped(values, plgpu.ACC((ROWS, WIDTH), jnp.float32))
    plgpu.barrier_arrive(smem.free.at[slot])
    sinks = None if refs.sinks is None else head_rows.load(refs.sinks, unit.head)
    factor, lse = softmax.finish(new.row_max, new.row_sum, sinks)
    head_rows.store(lse, refs.lse, unit.batch, unit.head, row)
    out = softmax.scaled(acc, factor)
    staged = smem.out.tile.at[wg]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staged[...] = out.astype(staged.dtype)
    plgpu.commit_smem()
    group_windows.store_rows(smem.out, wg, refs.out, unit, row)


def _masked_at_edges(window: GroupWindow, s: RegisterTile) -> RegisterTile:
    """Scores with -inf where a query does not see a key. Column 0 is the key `reach` before the
    first query row: keys in the middle are seen by all.
    """
    keys, query = s.shape[1], head_rows.query_rows()
    low = query + (window.reach - window.width + 1)
    left = 8 * pl.cdiv(window.reach - window.width + QUERIES, 8)
    parts = [mask_columns(lax.slice(s, (0, 0), (ROWS, left)), low, None)]
    if left < window.reach:
        parts.append(lax.slice(s, (0, left), (ROWS, window.reach)))
    last = lax.slice(s, (0, window.reach), (ROWS, keys))
    parts.append(mask_columns(last, None, query + 1))
    return lax.concatenate(parts, 1)


def _masked(window: GroupWindow, position: Index, s: RegisterTile) -> RegisterTile:
    """The same for the first `reach` rows of a sequence, where column 0 is key 0. `position`: that
    of the first query row.
    """
    query = head_rows.query_rows() + position
    return mask_columns(s, query - (window.width - 1), query + 1)


# ---- the kernel and its call ---------------------------------------------------------------------


def _kernel(
    refs: ForwardRefs, out: GmemRef, lse: GmemRef, smem: WindowSmem, *, plan: WindowPlan
) -> None:
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    ctx = KernelContext(plan, refs._replace(out=out, lse=lse), smem)
    consumers = plan.config.warpgroups
    mosaic.share_registers(
        wg,
        consumers,
        functools.partial(_produce, ctx, block),
        functools.partial(_consume, ctx, block, wg),
        REGISTERS[consumers],
    )


def run(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] in q's dtype, log-sum-exp float32 [B, N, T]."""
    plan = WindowPlan(problem, config)
    heads = problem.batch, problem.q_heads, problem.q_len
    kernel = mosaic.persistent_kernel(
        functools.partial(_kernel, plan=plan),
        "flash_fwd_group_window_sm90",
        (
            jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
            jax.ShapeDtypeStruct(heads, jnp.float32),
        ),
        scratch(plan),
        (plan.grid, config.warpgroups + 1),
    )
    return kernel(ForwardRefs(inputs.q, inputs.k, inputs.v, sinks=inputs.sinks))


KERNEL = Kernel(Config, group_windows.limit, smem_bytes, run)
