"""KV append: one launch writes the new rows of every sequence, K and V, into their caches, in
place.

New rows arrive item-major, `[M, t, K, H]`, or packed, `[tokens, K, H]`, with the sequence and the
position of each; a cache is head-major, `[K, capacity, H]`. The rows of sequence m end before
position end[m]: row i goes to position end[m] - new_lengths[m] + i of every kv head, if
i < new_lengths[m] and the position exists; rows without a place are dropped and nothing else is
touched. Where rows are stored as they come there is no arithmetic
on them (a cast to the cache's dtype is left to XLA, which fuses it into the program that made the
rows), so the kernel moves words: the widest of 1 to 16 bytes that a head's row divides into, which
is also its alignment. Any K and H will do, and any dtype. Rows that are quantised, or normed and
rotated, pass through the registers of threads that share them (`quantize`, `change`).

The grid is flat: sequence x chunk, a chunk being `words` words for each of 128 threads, in the
order in which the new rows lie. A thread reads its words first (the read is always in bounds, so it
needs no length), then takes the base pointers of the sequence's own K and V by one jump, then
writes. A word is written by one thread or by none; threads never wait for each other; there is no
shared memory. The read, the lengths and the jump overlap, which is what a step of one token costs:
one trip to memory.

A launch takes 32764 bytes of parameters, 8 for a cache array: about 2040 sequences with arrays of
their own, K and V. More take as few launches as that allows. Stacked and paged caches always take
one.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AppendInputs, AppendProblem, Caches
from pallas_attn._call.special import Special
from pallas_attn.errors import Limit
from pallas_attn.kernels.append import change as append_change
from pallas_attn.kernels.append import limits, separate_arrays
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.append import quantize as append_quantize
from pallas_attn.kernels.append.plan import AppendRefs, Place, Plan
from pallas_attn.kernels.append.separate_arrays import Arrays
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.lang import mosaic, thread_program, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.config import OneForAll, check
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand

byte_rows = Special("kernels.append.byte_rows")


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """`words`: how many words of K, and as many of V, a thread keeps in flight (or rows, where it
    shares them to quantise them); short appends use fewer. On an H200 more than 2 are not faster.
    """

    words: int = 2
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`

    def __post_init__(self):
        most = append_plan.IN_FLIGHT_MOST
        check(self, words=(1 <= self.words <= most, f"1 to {most}: registers hold them"))


def limit(problem: AppendProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.quantized and (refused := append_quantize.limit(problem)) is not None:
        return refused
    if problem.change is not None and (refused := append_change.limit(problem)) is not None:
        return refused
    if (refused := limits.limit(problem)) is not None:
        return refused
    layout, most = cache_layout.layout_of(problem), 4 if problem.quantized else 2
    most = separate_arrays.most_arrays(most)
    if problem.packed and layout.separate and (problem.sequences > most or 0 in problem.capacities):
        return Limit(
            f"packed rows into {problem.sequences} separate arrays; it takes up to {most}, each "
            "with a capacity of at least 1",
            "use a StackedCache or a PagedCache, or append [M, t, K, H] without starts",
        )
    values = problem.new_rows * problem.kv_heads * max(problem.head_dim, problem.v_head_dim or 0)
    if values >= 2**31 - append_plan.CHUNK_MOST:
        return Limit(
            f"{values} new values of one sequence: they are counted in int32",
            "append them in several calls",
        )
    slabs = layout.slabs * (problem.layers or 1)
    if slabs >= 2**31:
        return Limit(
            f"{slabs} pages or sequences of all layers together, which are counted in int32",
            "keep sequences or layers in several caches",
        )
    return None


def smem_bytes(problem: AppendProblem, config: Config) -> int:
    """None: words pass through registers."""
    del problem, config
    return 0


def _append(ctx: ThreadContext) -> None:
    """The program of one thread: reads all its words, finds their places, writes them."""
    thread, _, at, plan = ctx
    first = at.chunk * (plan.in_flight * mosaic.THREADS) + thread.index
    words = [first + i * mosaic.THREADS for i in range(plan.in_flight)]
    words_read = append_plan.read_all(ctx, _read, words)
    caches = append_plan.arrays_of(ctx, words, plan.row_words)
    # K and V mostly share the shape of a row, and so their places.
    places = {n: [append_plan.place(ctx, word, n) for word in words] for n in plan.row_words}
    for array, values in enumerate(words_read):
        row_words = plan.row_words[array]
        each = zip(caches[row_words], places[row_words], values, strict=True)
        for arrays, place, value in each:
            _write(ctx, arrays[0 if plan.layout.joined else array], place, value, array)


def _read(ctx: ThreadContext, word: Index, array: int) -> Int:
    thread, refs, at, plan = ctx
    total = plan.problem.new_rows * plan.problem.kv_heads * plan.row_words[array]
    if total < plan.chunks * plan.in_flight * mosaic.THREADS:
        word = thread.minimum(word, total - 1)
    index = thread.to_int64(at.sequence) * total + thread.to_int64(word)
    return thread.load(refs.new[array], index, plan.word_bytes[array])


def _write(ctx: ThreadContext, cache: GmemRef, place: Place, value: Int, array: int) -> None:
    thread, plan = ctx.thread, ctx.plan
    row, column = plan.layout.number(thread, place.row), place.column
    before, row_words = plan.words_in_cache(array)
    column = column + before if before else column
    index = row * row_words + thread.to_int64(column)
    thread.store(cache, index, value, plan.word_bytes[array], place.exists)


def _kernel(refs: AppendRefs, plan: Plan) -> None:
    at = append_plan.block_at(KernelContext(plan, refs))

    def write() -> None:
        if plan.problem.byte_rows:
            threads.run(byte_rows.write_rows, plan, refs, at)
        elif plan.lanes:
            threads.run(append_quantize.write_rows, plan, refs, at)
        else:
            threads.run(_append, plan, refs, at)

    if refs.new_lengths is None or plan.chunks == 1:
        write()
        return
    # Ragged prefill: a block that lies past its sequence's rows reads nothing. One token must not
    # wait for its length.
    first_row = lax.div(at.chunk * plan.chunk_items, jnp.int32(plan.row_items))
    pl.when(first_row < at.rows)(write)


def run(inputs: AppendInputs, problem: AppendProblem, config: Config | None = None) -> Caches:
    """The caches with the new rows in: the same buffers where the caller donates them, inside jit
    without a copy.
    """
    caches = {name: getattr(inputs, name) for name in Caches._fields}
    new = {"k": inputs.k, "v": inputs.v}
    new = {side: rows for side, rows in new.items() if rows is not None and rows.size}
    if new and any(problem.capacities) and problem.layers != 0 and problem.pages != 0:
        if problem.quantized and problem.dtype not in append_quantize.NEW_DTYPES:
            problem = dataclasses.replace(problem, dtype="float32")
        names = [f"{side}_{array}" for array in ("cache", "scale") for side in new]
        caches |= _write_into(
            {name: caches[name] for name in names if caches[name] is not None},
            new,
            inputs._replace(**dict.fromkeys((*caches, *new))),
            problem,
            config or Config(),
        )
    return Caches(**caches)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _write_into(
    caches: dict[str, Operand],
    new: dict[str, Operand],
    rest: AppendInputs,
    problem: AppendProblem,
    config: Config,
) -> dict[str, Operand]:
    """`run` where there is something to write. Jitted, so that a model of many layers traces it
    once.
    """
    if problem.packed and cache_layout.layout_of(problem).separate:
        written = _launch(caches, new, rest, problem, config)
        return {name: written[name] for name in caches}

    def launch(caches, problem, rows_of):
        rows = {side: rows_of(x) for side, x in new.items()}
        lengths = {name: getattr(rest, name) for name in ("end", "start", "new_lengths")}
        own = rest._replace(**{name: rows_of(x) for name, x in lengths.items() if x is not None})
        return _launch(caches, rows, own, problem, config)

    return separate_arrays.by_launches(caches, problem, launch)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    caches: Arrays,
    new: dict[str, Operand],
    rest: AppendInputs,
    problem: AppendProblem,
    config: Config,
) -> Arrays:
    """One launch over all of `caches`, which it holds as refs meanwhile: that is what makes it
    write in place. Jitted, so that launches of one size are one kernel.
    """
    plan = Plan.of(problem, tuple(new), config.words)
    names = [name for name in Caches._fields if name in caches]  # jit has sorted them
    refs = {name: [jax.new_ref(array) for array in caches[name]] for name in names}
    operands = AppendRefs(
        new=tuple(rows.astype(plan.new_dtype) for rows in new.values()),
        caches=tuple(zip(*refs.values(), strict=True)),
        end=rest.end,
        start=rest.start,
        positions=rest.positions,
        new_lengths=rest.new_lengths,
        owners=rest.owners,
        cos=rest.cos,
        sin=rest.sin,
        norm_weight=rest.norm_weight,
        capacities=plan.layout.capacities_operand(),
        page_table=rest.page_table,
        layer=cache_layout.scalar_operand(rest.layer),
    )
    body = functools.partial(_kernel, plan=plan)
    grid = plan.sequences * plan.chunks
    thread_program.lane_kernel(body, grid=grid, name="append", early=config.overlaps)(operands)
    return {name: tuple(jax.freeze(ref) for ref in each) for name, each in refs.items()}


KERNEL = Kernel(Config, limit, smem_bytes, run, overlaps=True)
