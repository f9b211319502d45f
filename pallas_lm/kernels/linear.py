"""The product of a few rows x [rows, in] and a weight [out, in] on Hopper, for the steps of
decoding, whose time goes mostly into reading the weights.

The rows are the M side of the matmul, padded to 64 (at no cost, since the kernel waits for memory);
48 to 128 rows of the weight are its N side. So the weight can be divided into almost equal parts
for all multiprocessors whatever its size. A unit of work is `block_out` rows of the weight by one
of `splits` parts of its columns; the caller adds up the results of the splits, in order. With few
rows a unit x is read from L2 more often, with many splits there are more partial sums:
`Config.default` balances the two. Measured on an H200 and not faster: x for two blocks by one
multicast, two smaller blocks a multiprocessor, a longer prefetch of the weight to L2, a shorter
ring for x, and a ring small enough to be resident beside decode attention.

A weight may be one layer of a stack, so that no layer is copied out of it. It may also be two, of
which one gates the other (`Problem.gated`).

The launch begins while the one before it ends: the producer fills the ring with the weight before
it waits for x.

Shared memory, and who owns it when:
  w, x [stages]  a ring, which the producer fills by TMA, a part of a unit at a time; the consumer
                 releases an entry when the matmul that reads it is done
  out            the consumer's own: a unit's result on its way to global memory
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn import devices
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Barrier, DType, GmemRef, Index, Operand, SmemRef

ROWS = 64  # rows of x in one matmul
SMS = devices.multiprocessors("sm90")
_SMEM = devices.shared_memory("sm90") - 2048  # less what barriers and alignment take


@dataclasses.dataclass(frozen=True)
class Problem:
    """y[rows, out] = x[rows, inner] @ w[layer, out, inner].T"""

    rows: int
    out: int
    inner: int
    dtype: str
    out_dtype: str
    # y = silu(x @ first.T) * (x @ second.T), by the halves of a weight of 2 * out rows
    gated: bool = False


def takes(problem: Problem) -> bool:
    """Whether the kernel serves it; XLA's matmul serves the rest."""
    narrow = problem.dtype in ("bfloat16", "float16")
    return narrow and 1 <= problem.rows <= ROWS and not (problem.inner % 64 or problem.out % 64)


@dataclasses.dataclass(frozen=True)
class Config:
    block_out: int  # rows of the weight in a unit
    splits: int
    block_in: int = 64  # columns that pass by at a time
    stages: int = 0  # 0: as many as fit
    grid: int = SMS

    @classmethod
    def default(cls, problem: Problem, splits: int | None = None) -> "Config":
        """The least time by a count of bytes: the slowest SM's share of the weight; x, which comes
        from L2 and costs little; partial sums, which are written and read.
        """
        configs = [config for config in _candidates(problem) if splits in (None, config.splits)]
        return min(configs, key=lambda config: _cost(problem, config))


def _candidates(problem: Problem) -> list[Config]:
    # 128 columns: memory gives two cache lines of a row faster than a line of each of two rows. 48
    # rows or more: fewer are there before the wait for them is over.
    block_in = 64 if problem.inner % 128 else 128
    unit, most = (16, 1) if problem.gated else (8, 8)
    return [
        Config(block, splits, block_in)
        for block in range(48, 129, unit)
        for splits in (1, 2, 4, 8)
        if splits <= most and (splits == 1 or problem.inner // block_in >= 4 * splits)
    ]


def _cost(problem: Problem, config: Config) -> float:
    units = Plan(problem, config).tiles * config.splits
    steps = -(-problem.inner // (config.block_in * config.splits))
    shared = 2 * steps * config.block_in * (config.block_out + _padded(problem) / 16)
    partial = 8 * problem.rows * problem.out * config.splits * (config.splits > 1) / SMS
    filling = 2 * config.block_out * config.block_in  # until the first matmul
    return -(-units // config.grid) * shared + partial + filling


def _width(problem: Problem, config: Config) -> int:
    """Columns of the result in a unit."""
    return config.block_out // (1 + problem.gated)


def _padded(problem: Problem) -> int:
    """Rows of x that TMA brings; the other rows of a tile give results that are not stored."""
    return tma_operands.round_up(problem.rows, 8)


def _stages(problem: Problem, config: Config) -> int:
    left = _SMEM - ROWS * _width(problem, config) * _out_dtype(problem, config).itemsize
    return min(left // (2 * config.block_in * (config.block_out + ROWS)), 16)


def _out_dtype(problem: Problem, config: Config) -> DType:
    return jnp.dtype(problem.out_dtype if config.splits == 1 else jnp.float32)


class LinearSmem(NamedTuple):
    w: SmemRef  # [stages, block_out, block_in]
    x: SmemRef  # [stages, ROWS, block_in]
    out: SmemRef  # [ROWS, width]
    ready: Barrier
    free: Barrier


class LinearRefs(NamedTuple):
    x: GmemRef  # [rows, inner]
    w: GmemRef  # [layers, out, inner]
    layer: GmemRef  # [1]
    out: GmemRef = None  # [splits, rows, out]


@dataclasses.dataclass(frozen=True)
class Plan:
    problem: Problem
    config: Config

    @property
    def tiles(self) -> int:
        return -(-self.problem.out // self.width)

    @property
    def width(self) -> int:
        return _width(self.problem, self.config)

    @property
    def steps(self) -> int:
        """Parts of a unit: whole ones; what lies past the last column is zeros."""
        return -(-self.problem.inner // (self.config.block_in * self.config.splits))

    def scratch(self) -> LinearSmem:
        config, dtype = self.config, jnp.dtype(self.problem.dtype)
        stages = config.stages or _stages(self.problem, config)
        out_dtype = _out_dtype(self.problem, config)
        return LinearSmem(
            w=mosaic.swizzled((stages, config.block_out, config.block_in), dtype, 128),
            x=mosaic.swizzled((stages, ROWS, config.block_in), dtype, 128),
            out=plgpu.SMEM((ROWS, self.width), out_dtype),
            ready=plgpu.Barrier(num_barriers=stages, num_arrivals=2 + self.problem.gated),
            free=plgpu.Barrier(num_barriers=stages),
        )


def _units(plan: Plan, block_id: Index) -> Index:
    """Number of a block's units: block_id, block_id + grid, ..."""
    return lax.div(
        plan.tiles * plan.config.splits - block_id + plan.config.grid - 1,
        plan.config.grid,
    )


def _unit(plan: Plan, block_id: Index, n: Index) -> tuple[Index, Index]:
    """(first column of the result, split)."""
    unit, splits = block_id + n * plan.config.grid, jnp.int32(plan.config.splits)
    return lax.div(unit, splits) * plan.width, lax.rem(unit, splits)


def _load(ctx: KernelContext, block_id: Index) -> None:
    """The producer: fills the ring with the weight, waits for x, and goes on with both."""
    plan, refs, smem = ctx
    config, stages, rows = plan.config, jnp.int32(smem.w.shape[0]), _padded(plan.problem)
    layer, matrices = refs.layer[0], 1 + plan.problem.gated
    total = _units(plan, block_id) * plan.steps

    def place(count):
        """(slot, first row of the weight, columns) of a part."""
        row, split = _unit(plan, block_id, lax.div(count, jnp.int32(plan.steps)))
        step = split * plan.steps + lax.rem(count, jnp.int32(plan.steps))
        columns = pl.ds(step * config.block_in, config.block_in)
        return lax.rem(count, stages), row, columns

    def weight(count):
        slot, row, columns = place(count)
        for n in range(matrices):  # gate, and up
            w = refs.w.at[layer, pl.ds(row + n * plan.problem.out, plan.width), columns]
            tile = smem.w.at[slot, pl.ds(n * plan.width, plan.width)]
            plgpu.copy_gmem_to_smem(w, tile, smem.ready.at[slot])

    def step(count, carry):
        del carry
        slot, _, columns = place(count)

        @pl.when(count >= stages)
        def refill():
            plgpu.barrier_wait(smem.free.at[slot])
            weight(count)

        x = refs.x.at[pl.ds(0 * block_id, rows), columns]
        plgpu.copy_gmem_to_smem(x, smem.x.at[slot, pl.ds(0, rows)], smem.ready.at[slot])

    # Only x is made by the kernel before this one.
    plgpu.griddepcontrol_launch_dependents()
    lax.fori_loop(0, lax.min(total, stages), lambda count, _: weight(count), None)
    plgpu.griddepcontrol_wait()
    lax.fori_loop(0, total, step, None)


def _compute(ctx: KernelContext, block_id: Index) -> None:
    """The consumer: multiplies, and stores a unit's result while the next one is computed."""
    plan, refs, smem = ctx
    stages = jnp.int32(smem.w.shape[0])

    def unit(n, count):
        row, split = _unit(plan, block_id, n)

        def matmuls(acc):
            def step(i, count):
                slot = lax.rem(count, stages)
                plgpu.barrier_wait(smem.ready.at[slot])
                plgpu.wgmma(acc, smem.x.at[slot], smem.w.at[slot].transpose((1, 0)))

                @pl.when(i > 0)
                def _():
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(smem.free.at[lax.rem(count - 1, stages)])

                return count + 1

            end = lax.fori_loop(0, plan.steps, step, count)
            value = acc[...]
            plgpu.barrier_arrive(smem.free.at[lax.rem(end - 1, stages)])
            return value, end

        shape = (ROWS, plan.config.block_out)
        value, count = pl.run_scoped(matmuls, plgpu.ACC(shape, jnp.float32))
        if plan.problem.gated:
            gate, up = (value[:, n * plan.width : (n + 1) * plan.width] for n in range(2))
            value = gate / (1 + jnp.exp(-gate)) * up
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out[...] = value.astype(smem.out.dtype)
        plgpu.commit_smem()
        tile = refs.out.at[split, pl.ds(0 * block_id, ROWS), pl.ds(row, plan.width)]
        plgpu.copy_smem_to_gmem(smem.out, tile)
        return count

    lax.fori_loop(0, _units(plan, block_id), unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the launch is over when all is written


def _kernel(refs: LinearRefs, out: GmemRef, smem: LinearSmem, *, plan: Plan) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    ctx = KernelContext(plan, refs._replace(out=out), smem)
    pl.when(wg == 1)(functools.partial(_load, ctx, block_id))
    pl.when(wg == 0)(functools.partial(_compute, ctx, block_id))


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(x: Operand, w: Operand, layer: Operand, problem: Problem, config: Config) -> Operand:
    """[splits, rows, out]: partial sums of the result, to be added, in float32, or with one
    split the result.
    """
    plan = Plan(problem, config)
    rows = tma_operands.rows_in_tma(problem.rows)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(
            (config.splits, rows, problem.out), _out_dtype(problem, config)
        ),
        scratch_types=(plan.scratch(),),
        grid=(min(config.grid, plan.tiles * config.splits),),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name="linear_sm90",
    )
    x = tma_operands.padded(x, {0: rows})
    return kernel(LinearRefs(x, w, jnp.asarray(layer, jnp.int32).reshape(1)))[:, : problem.rows]


def smem_bytes(plan: Plan) -> int:
    return mosaic.bytes_of(plan.scratch())
