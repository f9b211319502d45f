"""K and V that other GPUs have, fetched by the kernel that reads them.

Where a sequence is split over the GPUs of one process (`AttentionProblem.fetches`), the kernel is
given the rows of K and V of its own GPU. The first blocks of the grid, `Config.fetchers` of them,
begin by copying what it needs of the others' rows into arrays here, while the other blocks begin
with the keys that are here. Nothing is gathered before the launch, and no multiprocessor but those
of the fetchers waits for NVLink.

GPUs read from different ones at each time (`tiles_in_order`): two that read from one GPU each get
half of its links, and those behind them are late as well, until all wait for all. A work tile takes
the kv tiles that need a mask first, and then the whole ones in the order in which they arrive, this
GPU's own before them (`in_order_of_arrival`): a softmax may take its keys in any order, so no row
waits for keys while others are here. Documents and windows, which need little of others, and what
adds to logits by position, take theirs from the last to the first (`takes_any_order`); the tiles of
documents are fetched in that order too.

Rows are copied in pieces, all heads of some rows of K and of V. A piece passes through the shared
memory of the ring of K and V, which is not in use yet: from the other GPU by a bulk copy, and on to
global memory by another. One thread issues all copies of a block; so many are in flight as the ring
has room for. It signals once for a run of pieces: a release takes as long as the copy of a piece.

Who waits for whom: a producer waits for the `TILE` rows that it is about to load until all of their
pieces have arrived (`wait_for`). XLA has all GPUs arrive before it launches any, so what is fetched
is there; and no kernel ends before all others have fetched what they need of it (`wait_for_peers`),
so it stays. No block waits for one with a greater number, here or there: the fetchers are the first
to run.

A GPU finds an array of another one by its address there, which XLA tells the kernel. Tensor maps
would hold such addresses from before the launch, and a CUDA graph would keep them: so the copies
between GPUs are by plain pointers.

What bounds it: the links, which 16 fetchers fill; copies and loads that meet in L2 while keys
arrive; and power. The time of the fetchers is in the schedule (`busy_before`, by `COPY_RATE`).
Measured on four H100 and not faster: 12 fetchers. And, while GPUs still read from one at the same
time: 8, 24 and 32 fetchers; pieces of half the size; fewer fetchers where less is fetched; work
tiles that blocks claim, below the length from which they always do; head by head, in lines of 256
bytes, since the first work tiles want one head only.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem, bounds_of, owner_of_chunk
from pallas_attn.kernels.attention import segment_spans, tma_operands
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.lang import peer_memory, thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.lang.types import Index

TILE = 128  # rows that a producer waits for at a time
PIECE = 16384  # bytes of K, or of V, that are copied at a time, if a row is no longer
WORD = 16  # bytes of a word of a bulk copy
LEAST_SLOTS, MOST_SLOTS = 3, 8  # pieces of a block that are in flight
# Counters: of fetchers here that are done, and of fetchers of other GPUs that have read what they
# need of this one; those of tiles follow.
DONE, READ, FIRST_TILE = 0, 1, 2
BEHIND = 2  # pieces that may still be on their way to global memory when the next one is
CHUNK_BITS, CHUNKS = 4, 8  # bits of the number of a chunk, and chunks in a word of a `ChunkOrder`
RUN = 8  # pieces of a tile, side by side, that a fetcher copies and signals together
# For the schedule: bytes a second that a fetcher copies, and floating point operations a second of
# a multiprocessor.
COPY_RATE, MATH_RATE = 15e9, 5.0e12


def takes(problem: AttentionProblem) -> bool:
    """Whether the kernel may fetch: chunks in whole `TILE`s, and rows that fit in a piece."""
    rows = problem.kv_len // (problem.fetches * _chunks(problem))
    listed = problem.mask_program is not None
    if listed or problem.dtype == "float32" or "kv_lengths" in problem.arrays:
        return False
    dims = problem.head_dim, problem.v_head_dim
    row = problem.kv_heads * 2 * max(map(tma_operands.width_in_tma, dims))
    return problem.fetches <= peer_memory.MOST_DEVICES and rows % TILE == 0 and row <= PIECE


def _chunks(problem: AttentionProblem) -> int:
    """Runs of consecutive rows that a GPU has."""
    return 2 if problem.zigzag > 1 else 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that follow from a problem and a config."""

    devices: int
    chunks: int
    batch: int  # batch rows of k and v
    keys: int  # keys of a GPU
    k_words: int  # words of a row of all heads
    v_words: int
    slots: int  # pieces in flight
    rows: int  # rows of a piece
    fetchers: int

    @classmethod
    def of(cls, plan: QueryPlan) -> "Sizes":
        problem, config = plan.problem, plan.config
        words = [
            problem.kv_heads * tma_operands.width_in_tma(dim) * 2 // WORD
            for dim in (problem.head_dim, problem.v_head_dim)
        ]
        widths = plan.qk.width, plan.v.width
        room = [config.stages * config.block_kv * width * 2 // WORD for width in widths]

        def slots_of(rows: int) -> int:
            return min(area // (rows * row) for area, row in zip(room, words, strict=True))

        rows = 1
        while 2 * rows <= TILE and 2 * rows * max(words) * WORD <= PIECE:
            if slots_of(2 * rows) < LEAST_SLOTS:
                break
            rows *= 2
        return cls(
            devices=problem.fetches,
            chunks=_chunks(problem),
            batch=problem.batch // problem.share,
            keys=problem.kv_len // problem.fetches,
            k_words=words[0],
            v_words=words[1],
            slots=min(MOST_SLOTS, slots_of(rows)),
            rows=rows,
            fetchers=min(config.fetchers, plan.order.grid),
        )

    @property
    def chunk(self) -> int:
        """Rows of a chunk."""
        return self.keys // self.chunks

    @property
    def tiles(self) -> int:
        """The tiles of a batch row, of all GPUs."""
        return self.devices * self.keys // TILE

    @property
    def pieces(self) -> int:
        """The pieces of a tile."""
        return TILE // self.rows

    @property
    def run(self) -> int:
        """Pieces that are signalled together."""
        return min(RUN, self.pieces)

    @property
    def counters(self) -> int:
        return FIRST_TILE + self.batch * self.tiles


def check(plan: QueryPlan) -> None:
    """Raises where a Config leaves no room to fetch, or kv tiles that lie in two `TILE`s."""
    config = plan.config
    if TILE % config.block_kv:
        raise ValueError(
            f"Config.block_kv must divide {TILE} where the kernel fetches k and v of other "
            f"devices, got {config.block_kv}"
        )
    if Sizes.of(plan).slots < 2:
        raise ValueError(
            "Config.stages * Config.block_kv must be at least twice the number of kv heads, "
            f"{plan.problem.kv_heads}, where the kernel fetches k and v of other devices, got "
            f"{config.stages} * {config.block_kv}"
        )


def scratch() -> Any:
    """Shared memory: barriers, as words."""
    return plgpu.SMEM((2 * MOST_SLOTS,), jnp.int32)


class Operands(NamedTuple):
    """The arrays that the kernel reads and writes beside `Refs`, in global memory."""

    device: Any  # int32[1]: which of the GPUs this is
    order: Any  # int32[1 + n]: see `order`
    chunks: Any  # int32[3]: a `ChunkOrder`; None where kv tiles are taken from last to first
    counters: Any  # int32[Sizes.counters], written here and by other GPUs
    k: Any = None  # [devices * B, S of a GPU, K, H], written: what is fetched; its own are not here
    v: Any = None


# ---- fetched tiles and their order ---------------------------------------------------------------


def takes_any_order(plan: QueryPlan) -> bool:
    """Whether a work tile may take whole kv tiles in any order: those before the ones that need a
    mask, of which nothing but their keys and values counts.
    """
    problem = plan.problem
    adds = plan.logit_rules.adds
    return problem.fetches > 1 and not (plan.one_loop or problem.mask.bounds_left or adds)


def operands(plan: QueryPlan, inputs: AttentionInputs, spans: Any) -> Operands:
    """`spans`: `documents.records` where there are segment ids, else None."""
    counters = jax.new_ref(jnp.zeros((Sizes.of(plan).counters,), jnp.int32))
    device: Any = inputs.device
    chunks = chunk_order(plan, device) if takes_any_order(plan) else None
    return Operands(device, order(plan, device, inputs, spans), chunks, counters)


def fetched_shapes(plan: QueryPlan, *arrays: Any) -> list[Any]:
    """The shapes of `Operands.k` and `v`, from k and v as the kernel reads them."""
    devices = plan.problem.fetches
    return [jax.ShapeDtypeStruct((devices * x.shape[0], *x.shape[1:]), x.dtype) for x in arrays]


def order(plan: QueryPlan, device: Index, inputs: AttentionInputs, spans: Any) -> Any:
    """int32[1 + n]: how many tiles are fetched, and which, the first to be used first. A tile is
    b * Sizes.tiles + its number in the order of positions.
    """
    sizes = Sizes.of(plan)
    if spans is not None:
        return _order_of_segments(plan, device, inputs, spans)
    table = np.zeros((sizes.devices, 1 + sizes.batch * sizes.tiles), np.int32)
    for number, row in enumerate(table):
        firsts = np.arange(sizes.batch, dtype=np.int32)[:, None] * sizes.tiles
        every = (firsts + tiles_in_order(plan, number)[None]).ravel()
        row[: 1 + every.size] = [every.size, *every]
    return _row(table, device)


def _row(table: np.ndarray, device: Index) -> Any:
    return lax.dynamic_index_in_dim(jnp.asarray(table), device[0], keepdims=False)


def chunk_order(plan: QueryPlan, device: Index) -> Any:
    """int32[3]: the `chunks_in_order` of a GPU as a `ChunkOrder` has them."""
    table = np.zeros((Sizes.of(plan).devices, 3), np.int64)
    for number, row in enumerate(table):
        chunks = chunks_in_order(plan, number).astype(np.int64)
        row[0] = chunks.size
        for n, chunk in enumerate(chunks):
            row[1 + n // CHUNKS] |= chunk << n % CHUNKS * CHUNK_BITS
    return _row(table.astype(np.uint32).view(np.int32), device)


def tiles_in_order(plan: QueryPlan, device: int) -> np.ndarray:
    """int32[n]: tiles of a batch row that a GPU's rows may see and another has; all that others
    have where offsets are not known. First a chunk of each other GPU, from the one before this one
    backwards, then what is left in the reverse order, so that at no time two GPUs read from the
    same one. The last tile of a chunk comes first.
    """
    sizes = Sizes.of(plan)
    offsets: tuple[Any, ...] = (plan.problem.offsets[device : device + 1] or [(None,)])[0]
    by_offset = [_tiles_of_others(plan, device, offset) for offset in offsets]
    tiles = np.unique(np.concatenate(by_offset))
    chunks = tiles * TILE // sizes.chunk
    owners = owner_in(sizes, chunks)[0]
    last = np.zeros(sizes.devices, int)
    np.maximum.at(last, owners, chunks)
    left, before = chunks < last[owners], (device - owners) % sizes.devices
    return tiles[np.lexsort((-tiles, np.where(left, -before, before), left))].astype(np.int32)


def chunks_in_order(plan: QueryPlan, device: int) -> np.ndarray:
    """int32[n]: the chunks of the sequence that a GPU's rows may see, in the order in which all of
    their keys are here: its own, the last first, and those of others as they are fetched.
    """
    sizes = Sizes.of(plan)
    every = np.arange(sizes.devices * sizes.chunks)[::-1]
    fetched = tiles_in_order(plan, device) * TILE // sizes.chunk
    begins = np.diff(fetched, prepend=-1) != 0
    return np.concatenate([every[owner_in(sizes, every)[0] == device], fetched[begins]])


def _tiles_of_others(plan: QueryPlan, device: int, offset: int | None) -> np.ndarray:
    """Tiles that a chunk of a GPU's rows may see and another GPU has."""
    sizes, problem = Sizes.of(plan), plan.problem
    lo, hi = 0, problem.kv_len
    if offset is not None:
        lo, hi = problem.mask.widest.kv_range(offset, offset + _rows(plan), problem.kv_len)
    tiles = np.arange(max(int(lo), 0) // TILE, -(-max(int(hi), 0) // TILE))
    return tiles[owner_in(sizes, tiles * TILE // sizes.chunk)[0] != device]


def _rows(plan: QueryPlan) -> int:
    """The rows of a chunk, with those past T of a warpgroup whose rows begin before: it takes the
    kv tiles of all of them.
    """
    return tma_operands.round_up(plan.problem.q_len, ROWS)


def _order_of_segments(plan: QueryPlan, device: Index, inputs: AttentionInputs, spans: Any) -> Any:
    """`order` by what segments and the mask leave: the kv tiles of all work tiles of a chunk of
    rows lie between the first and the last of any.
    """
    sizes, problem = Sizes.of(plan), plan.problem
    offset: Any = problem.q_offset if inputs.q_offset is None else inputs.q_offset
    mask = problem.mask.filled(**bounds_of(inputs))
    low, high = mask.kv_range(offset, offset + _rows(plan), problem.kv_len)
    fields = spans[:, :, : 4 * plan.config.warpgroups].reshape(*spans.shape[:2], -1, 4)
    some = fields[..., 3] > fields[..., 0]
    first = jnp.where(some, fields[..., 0], 2**20).min(axis=(1, 2))
    end = jnp.where(some, fields[..., 3], 0).max(axis=(1, 2))
    block = plan.config.block_kv
    lo = jnp.maximum(first * block, low) // TILE
    hi = -(-jnp.minimum(end * block, high) // TILE)
    at = np.arange(sizes.tiles - 1, -1, -1, dtype=np.int32)
    others = jnp.asarray(owner_in(sizes, at * TILE // sizes.chunk)[0]) != device[0]
    lo, hi = (x.reshape(sizes.batch, -1, 1) for x in (lo, hi))
    needed = ((at[None, None] >= lo) & (at[None, None] < hi)).any(axis=1)
    if segment_spans.never_empty(
        problem
    ):  # the first kv tile is what work tiles take that need none
        needed |= at[None] == 0
    needed &= others[None]
    every = (np.arange(sizes.batch, dtype=np.int32)[:, None] * sizes.tiles + at[None]).reshape(-1)
    needed = needed.reshape(-1)
    places = jnp.where(needed, jnp.cumsum(needed, dtype=jnp.int32), every.size + 1)
    count = needed.sum(dtype=jnp.int32)
    return (
        jnp.zeros((1 + every.size,), jnp.int32).at[places].set(every, mode="drop").at[0].set(count)
    )


def owner_in(sizes: Sizes, chunk: Index) -> tuple[Any, Any]:
    """Which GPU has a chunk of the sequence, and as which of its own."""
    return (chunk, 0 * chunk) if sizes.chunks == 1 else owner_of_chunk(chunk, sizes.devices)


def busy_before(plan: QueryPlan, device: int) -> list[float]:
    """How long each fetcher of a GPU is busy before it takes work tiles, in steps of one kv tile.
    Nothing where segments say what is fetched: that is little.
    """
    sizes, problem = Sizes.of(plan), plan.problem
    if "q_segment_ids" in plan.problem.arrays:
        return [0.0] * sizes.fetchers
    tile = TILE * WORD * (sizes.k_words + sizes.v_words)
    nbytes = tiles_in_order(plan, device).size * sizes.batch * tile
    dims = problem.head_dim + problem.v_head_dim
    step = 2 * plan.tiling.tile_rows * plan.config.block_kv * dims / MATH_RATE
    return [nbytes / (sizes.fetchers * COPY_RATE) / step] * sizes.fetchers


# ---- the copies of a fetcher ---------------------------------------------------------------------


class _At(NamedTuple):
    """The place of a program, and the facts it knows there."""

    block: Any
    device: Any


class _Refs(NamedTuple):
    here: Operands
    peers: tuple[tuple[Any, Any, Any], ...]  # k, v and counters, of the next GPU, the one after, ..
    k: Any  # shared memory
    v: Any
    barriers: Any


def fetch(ctx: KernelContext, fetching: Operands, block: Index) -> None:
    """The work of a fetcher before it loads for work tiles of its own."""
    plan, refs, smem = ctx
    sizes = Sizes.of(plan)
    device, arrays = fetching.device[0], (refs.k, refs.v, fetching.counters)
    peers: Any = peer_memory.on_peers(arrays, device, sizes.devices)
    all_refs = _Refs(fetching, peers, smem.k, smem.v, smem.fetched)
    swizzles: Any = jax.tree.map(lambda _: (), all_refs)
    swizzles = swizzles._replace(
        k=(plan.qk.dtype, plan.qk.swizzle), v=(plan.v.dtype, plan.v.swizzle)
    )
    program = thread_program.in_context(_fetch, sizes)
    threads.each_thread(program, all_refs, _At(block, device), swizzles=swizzles)


class _Piece(NamedTuple):
    """The source and the destination of a piece, in rows."""

    peer: Any  # how many GPUs away it is
    source: Any
    target: Any


def _piece(ctx: ThreadContext, number: Index, entry: Index) -> _Piece:
    """A piece of a tile, which `order` names in `entry`."""
    thread, _, at, sizes = ctx
    batch, tile = entry // sizes.tiles, entry % sizes.tiles
    position = tile * TILE + number % sizes.pieces * sizes.rows
    chunk = position // sizes.chunk
    row, owner = position % sizes.chunk, chunk
    if sizes.chunks == 2:
        late = chunk < sizes.devices
        owner = thread.select(late, chunk, chunk * -1 + (2 * sizes.devices - 1))
        row = thread.select(late, row, row + sizes.chunk)
    away = (owner + sizes.devices - at.device) % sizes.devices
    source = thread.to_int64(batch * sizes.keys + row)
    target = thread.to_int64(owner * (sizes.batch * sizes.keys)) + source
    return _Piece(thread.maximum(away - 1, 0), source, target)


def _fetch(ctx: ThreadContext) -> None:
    thread, refs, at, sizes = ctx
    first, slots, zero = thread.index < 1, sizes.slots, thread.index * 0
    nbytes = [zero + sizes.rows * words * WORD for words in (sizes.k_words, sizes.v_words)]
    staged = refs.k, refs.v
    words = sizes.k_words, sizes.v_words
    thread.make_barriers(refs.barriers, slots)
    pieces = thread.load(refs.here.order, zero, 4) * sizes.pieces
    runs = pieces // sizes.run
    mine = (runs + (sizes.fetchers - 1) - at.block) // sizes.fetchers * sizes.run

    def piece_of(number):
        """Among all pieces, of which the last stands for those past it."""
        number, last = thread.maximum(number, 0), thread.maximum(pieces - 1, 0)
        run = number // sizes.run * sizes.fetchers + at.block
        return thread.minimum(run * sizes.run + number % sizes.run, last)

    def entry_of(number):
        return thread.load(refs.here.order, piece_of(number) // sizes.pieces + 1, 4)

    def load(number, entry):
        slot, there = number % slots, first & (number < mine)
        piece = _piece(ctx, piece_of(number), entry)
        arrays = thread.pick(piece.peer, [peer[:2] for peer in refs.peers])
        thread.announce(refs.barriers, slot, nbytes[0] + nbytes[1], there)
        for array, stage, count, size in zip(arrays, staged, nbytes, words, strict=True):
            to = Word(stage, slot * (sizes.rows * size))
            source = Word(array, piece.source * size)
            thread.copy(to, source, count, Word(refs.barriers, slot), there)

    def arrived(number, entry):
        last = (number + 1) % sizes.run < 1
        thread.signal(refs.here.counters, entry + FIRST_TILE, first & (number >= 0) & last)

    # Offsets of the pieces that a step loads, stores and signals; read a step ahead.
    offsets = slots - 1, 0, -BEHIND

    def store(number, entries):
        slot, (loaded, stored, signalled) = number % slots, entries
        following = [entry_of(number + 1 + offset) for offset in offsets]
        thread.wait(refs.barriers, slot, number // slots % 2)
        piece = _piece(ctx, piece_of(number), stored)
        for array, stage, count, size in zip(
            (refs.here.k, refs.here.v), staged, nbytes, words, strict=True
        ):
            source = Word(stage, slot * (sizes.rows * size))
            thread.copy_back(Word(array, piece.target * size), source, count, first)
        thread.commit_copies_back()
        thread.wait_copies_back(1, read=True)  # the slot of the one before is free
        thread.sync()
        load(number + (slots - 1), loaded)
        thread.wait_copies_back(BEHIND)
        arrived(number - BEHIND, signalled)
        return following

    for number in range(slots - 1):
        load(zero + number, entry_of(zero + number))
    thread.loop(mine, [entry_of(zero + offset) for offset in offsets], store)
    thread.wait_copies_back(0)
    for behind in range(BEHIND, 0, -1):
        arrived(mine - behind, entry_of(mine - behind))
    thread.signal(refs.here.counters, zero + DONE, first)
    for *_, counters in refs.peers:
        thread.signal(counters, zero + READ, first, remote=True)
    thread.sync()


# ---- waits ---------------------------------------------------------------------------------------


class _Until(NamedTuple):
    counter: Any
    least: Any


def is_done(ctx: KernelContext, fetching: Operands) -> Any:
    """Whether all that is fetched is here."""
    sizes = Sizes.of(ctx.plan)
    until = _Until(jnp.int32(DONE), jnp.int32(sizes.fetchers))
    program = thread_program.in_context(_reached, sizes)
    return threads.each_thread(program, (fetching.counters,), until, returns="one") > 0


def begins_tile(ctx: KernelContext, tile: Index) -> Any:
    """Whether a kv tile is the last of a `TILE`, and so the first of it that is taken."""
    each = jnp.int32(TILE // ctx.plan.config.block_kv)
    return lax.rem(tile, each) == each - 1


def wait_for(ctx: KernelContext, fetching: Operands, batch: Index, tile: Index) -> None:
    """Until the rows of a kv tile, which another GPU has, are here."""
    sizes = Sizes.of(ctx.plan)
    tile = lax.div(tile, jnp.int32(TILE // ctx.plan.config.block_kv))
    runs = jnp.int32(sizes.pieces // sizes.run)
    until = _Until(FIRST_TILE + batch * sizes.tiles + tile, runs)
    threads.each_thread(thread_program.in_context(_wait, sizes), (fetching.counters,), until)


def wait_for_peers(ctx: KernelContext, fetching: Operands) -> None:
    """Until all other GPUs have fetched what they need of this one."""
    sizes = Sizes.of(ctx.plan)
    until = _Until(jnp.int32(READ), jnp.int32((sizes.devices - 1) * sizes.fetchers))
    program = thread_program.in_context(_wait, sizes, remote=True)
    threads.each_thread(program, (fetching.counters,), until)


def _wait(ctx: ThreadContext, remote: bool = False) -> None:
    ctx.thread.wait_until(*ctx.refs, *ctx.at, remote=remote)


def _reached(ctx: ThreadContext) -> Any:
    return ctx.thread.reached(*ctx.refs, *ctx.at)
