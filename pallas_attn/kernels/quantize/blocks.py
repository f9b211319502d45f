"""q, k and v rounded to float8 with a scale for each block of rows of a head, in one launch.

`lanes` neighbouring threads share a row of a head, with every so manyth word of it (16 bytes where
the head dim allows). Threads hold their words in registers, agree on the largest magnitude of a
block of rows, by shuffles and, where the whole thread block shares it, through shared memory, and
round: numbers are read once and written once. Short blocks of rows lie several in a thread block.

Where registers do not hold a block of rows (a scale for a whole head), XLA finds its largest
magnitude first, and thread blocks share its rows: numbers are read twice.

Grid: thread blocks of q, then of k, then of v; heads vary fastest, as they do in memory.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import QuantizeInputs, QuantizeProblem, live, rows_of_scale
from pallas_attn.errors import Limit
from pallas_attn.kernels.lang import mosaic, thread_program, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import THREADS
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import LANES, WARPS
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, Predicate, SmemRef
from pallas_attn.kernels.mma import scales

FEW = 32  # registers of a thread up to which the threads of a row take a block of rows alone


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning."""

    registers: int = 128  # registers of a thread that hold numbers, at most

    def __post_init__(self) -> None:
        if self.registers < 1:
            raise ValueError(f"registers: expected at least 1, got {self.registers}")

    @classmethod
    def default(cls, problem: QuantizeProblem) -> "Config":
        del problem
        return cls()


def limit(problem: QuantizeProblem) -> Limit | None:
    """Why the kernel cannot take a problem, or None."""
    largest = max(problem.head_dim, problem.v_head_dim)
    if largest > scales.HEAD_DIM_MOST:
        return Limit(
            f"head dim {largest}: a warp holds a row in registers",
            f'use head dims up to {scales.HEAD_DIM_MOST}, or say implementation="reference"',
        )
    return None


def smem_bytes(problem: QuantizeProblem, config: Config) -> int:
    """Shared memory of a block."""
    del problem, config
    return mosaic.bytes_of(_scratch())


def _scratch() -> list[Any]:
    """The largest magnitude of each warp."""
    return [plgpu.SMEM((WARPS,), jnp.int32)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static facts of the launch for one of the arrays."""

    batch: int
    rows: int
    heads: int
    dtype: str  # dtype of the array
    to: str  # dtype of the result
    by_hand: bool  # whether it is rounded in integers
    word: int  # bytes of a word
    words: int  # words of a row of a head
    lanes: int  # neighbouring threads that share a row of a head
    blocks: int  # blocks of rows, each with a scale
    block: int  # rows of one
    share: int  # threads that share a block of rows: `lanes`, or all
    chunks: int  # thread blocks that share it
    steps: int  # rows of a thread

    @classmethod
    def of(cls, problem: QuantizeProblem, side: int, config: Config) -> "Plan":
        """The plan of q, k or v (`side` 0, 1 or 2)."""
        rows = problem.kv_len if side else problem.q_len
        dim = problem.v_head_dim if side == 2 else problem.head_dim
        nbytes = dim * jnp.dtype(problem.dtype).itemsize
        word = math.gcd(nbytes, 16)
        lanes = scales.lanes_of(nbytes // word)
        held = pl.cdiv(nbytes // word, lanes) * pl.cdiv(word, 4)  # registers of a row in a thread
        blocks = problem.blocks[side]
        block = rows_of_scale(rows, blocks)
        share = lanes if block * held <= FEW else THREADS
        steps = pl.cdiv(block, share // lanes)
        if steps * held > config.registers:
            steps = max(FEW // held, 1)
        return cls(
            batch=problem.batch,
            rows=rows,
            heads=problem.kv_heads if side else problem.q_heads,
            dtype=problem.dtype,
            to=problem.to,
            by_hand=scales.rounds_by_hand(problem.to, problem.gpu),
            word=word,
            words=nbytes // word,
            lanes=lanes,
            blocks=blocks,
            block=block,
            share=share,
            chunks=pl.cdiv(block, steps * (share // lanes)),
            steps=steps,
        )

    @property
    def at_once(self) -> int:
        """Rows that the threads of a block of rows take at a time."""
        return self.share // self.lanes

    @property
    def items(self) -> int:
        """Blocks of rows of all heads, times `chunks`."""
        return self.batch * self.blocks * self.chunks * self.heads

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return pl.cdiv(self.items * self.share, THREADS)


class QuantizeRefs(NamedTuple):
    """Global memory; numbers and scales are written."""

    x: GmemRef  # [B, rows, heads, dim]
    lengths: GmemRef | None  # int32[B]
    # int32[B, blocks, heads], bits of largest magnitudes; None where the launch finds them
    tops: GmemRef | None
    numbers: GmemRef | None = None  # [B, rows, heads, dim]
    scales: GmemRef | None = None  # float32[B, blocks, heads]
    warps: SmemRef | None = None  # shared memory: int32[WARPS]


class _Place(NamedTuple):
    """The block of rows of a thread, and its first word there."""

    there: Predicate  # whether there is such a block of rows
    leads: Predicate  # whether the thread writes the scale
    scale: Index  # index of the scale
    row: Index  # the thread's first row
    stop: Index  # the row after the last of the block of rows, or of the thread block's part of it
    live: Index  # the same, but before the length
    column: Index  # the thread's first word in a row
    word: Index  # index of the first word


def _place(ctx: ThreadContext) -> _Place:
    thread, refs, block, plan = ctx
    item = block * (THREADS // plan.share) + thread.index // plan.share
    there = item < plan.items
    item = thread.minimum(item, plan.items - 1)
    head, rest = item % plan.heads, item // plan.heads
    chunk, rest = rest % plan.chunks, rest // plan.chunks
    number, batch = rest % plan.blocks, rest // plan.blocks
    mine = thread.index % plan.share
    column = mine % plan.lanes
    begin = number * plan.block + chunk * (plan.steps * plan.at_once)
    stop = thread.minimum(begin + plan.steps * plan.at_once, (number + 1) * plan.block)
    stop = live_stop = thread.minimum(stop, plan.rows)
    if refs.lengths is not None:
        live_stop = thread.minimum(stop, thread.load(refs.lengths, batch, 4))
    row, row_words = begin + mine // plan.lanes, plan.heads * plan.words
    word = thread.to_int64(batch) * (plan.rows * row_words) + thread.to_int64(row) * row_words
    return _Place(
        there=there,
        leads=there & (mine + chunk < 1),
        scale=rest * plan.heads + head,
        row=row,
        stop=stop,
        live=live_stop,
        column=column,
        word=word + thread.to_int64(head * plan.words + column),
    )


def _quantize(ctx: ThreadContext) -> None:
    """The program of one thread: reads its words, agrees on a scale, rounds, writes."""
    thread, refs, _, plan = ctx
    place = _place(ctx)
    columns = range(0, plan.words, plan.lanes)
    places = [(step * plan.at_once, column) for step in range(plan.steps) for column in columns]

    def inside(row: int, column: int, stop: Index) -> Predicate:
        exists = place.there & (place.row + row < stop)
        whole = column + plan.lanes <= plan.words
        return exists if whole else exists & (place.column + column < plan.words)

    indices = [place.word + (row * plan.heads * plan.words + column) for row, column in places]
    words = [
        thread.load_where(refs.x, index, plan.word, inside(*at, place.live))
        for index, at in zip(indices, places, strict=True)
    ]
    scale = scales.of_magnitude(thread, _top(ctx, place, words), plan.to)
    inverse = thread.reciprocal(thread.as_float(scale.bits))
    for index, at, word in zip(indices, places, words, strict=True):
        values = [x * inverse for x in thread.numbers(word, plan.word, plan.dtype)]
        packed = scales.narrowed(thread, values, plan.to, plan.by_hand)
        packed = thread.select(scale.finite, packed, 0)
        thread.store(refs.numbers, index, packed, len(values), inside(*at, place.stop))
    thread.store(refs.scales, place.scale, scales.stored(thread, scale), 4, place.leads)


def _top(ctx: ThreadContext, place: _Place, words: list[Int]) -> Int:
    """The bits of the largest magnitude in the thread's block of rows."""
    thread, refs, _, plan = ctx
    if refs.tops is not None:
        return thread.load(refs.tops, place.scale, 4)
    top = scales.magnitude(thread, words, plan.word, plan.dtype)
    top = thread.most_of_lanes(top, min(plan.share, LANES))
    if plan.share == THREADS:
        thread.shared_store(refs.warps, thread.index // LANES, top, thread.index % LANES < 1)
        thread.sync()
        tops = [thread.shared_load(refs.warps, thread.index * 0 + warp) for warp in range(WARPS)]
        top = functools.reduce(thread.maximum, tops)
    return top


def _kernel(refs: tuple[QuantizeRefs, ...], *results: GmemRef, plans: tuple[Plan, ...]) -> None:
    *arrays, warps = results
    block, begin = lax.axis_index("block"), 0
    for side, plan in enumerate(plans):
        each = refs[side]._replace(numbers=arrays[side], scales=arrays[side + 3], warps=warps)

        @pl.when((block >= begin) & (block < begin + plan.grid))
        def _(each=each, plan=plan, begin=begin):
            threads.run(_quantize, plan, each, block - begin)

        begin += plan.grid


def _tops(x: Operand, lengths: Operand | None, plan: Plan) -> Operand | None:
    """The bits of the largest magnitudes, where the launch does not find them."""
    if plan.chunks == 1:
        return None
    x = live(x, lengths).astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    past = plan.blocks * plan.block - plan.rows
    bits = jnp.pad(bits, ((0, 0), (0, past), (0, 0), (0, 0)))
    shape = plan.batch, plan.blocks, plan.block, plan.heads, x.shape[3]
    return bits.reshape(shape).max(axis=(2, 4))


def run(inputs: QuantizeInputs, problem: QuantizeProblem, config: Config) -> tuple[jax.Array, ...]:
    """q, k and v in float8, and their scales."""
    plans = tuple([Plan.of(problem, side, config) for side in range(3)])
    arrays = inputs[:3]
    ends = inputs.q_lengths, inputs.kv_lengths, inputs.kv_lengths
    refs = tuple(
        [
            QuantizeRefs(x, end, _tops(x, end, plan))
            for x, end, plan in zip(arrays, ends, plans, strict=True)
        ]
    )
    numbers = [jax.ShapeDtypeStruct(x.shape, problem.to) for x in arrays]
    of_scales = [
        jax.ShapeDtypeStruct((plan.batch, plan.blocks, plan.heads), jnp.float32) for plan in plans
    ]
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, plans=plans),
        grid=sum(plan.grid for plan in plans),
        name="quantize_blocks",
        out_type=[*numbers, *of_scales],
        scratch=_scratch(),
    )
    return kernel(refs)


KERNEL = Kernel(Config, limit, smem_bytes, run)
