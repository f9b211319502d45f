"""Flash attention forward for Hopper, bfloat16, float16 and float32.

FlashAttention-3 (arXiv 2407.08608), its overlap inside a warpgroup: the scores of a key tile are
issued before the values of the tile before it, and the softmax runs while the values' matmul is
still in flight. That overlap alone was worth a seventh at head dim 128 on an H200; ordering the
warpgroups by barriers on top of it lost some of that and is not done.

Grid: one block a multiprocessor, which takes the work tiles that `tile_scheduler.schedule` gave it.
A tile is `64 * warpgroups` query rows of one head. Tiles are ordered longest first (causal: last
rows first) within sections of heads, so that K and V are read from L2; the query heads of a kv head
are neighbours. A block has `warpgroups` warpgroups that compute, 64 rows each, and one that loads.

Keys are taken from the last tile to the first: what the diagonal, a length or the end of S cuts
off lies at the end, so the masked tile is the first, whose softmax overlaps with nothing anyway,
and the loop over the rest needs no mask. A window's left edge is masked in the last tiles.

Where there are segments, tiles that one id fills need no mask either. Which those are is prepared
by a small kernel of its own, `segments`; the ids of what needs one come with q and with the keys.

What bounds it: the loop's machine code has 5.6 instructions a score, among them 1.0 ex2, 1.0 max,
1.0 multiply-add, 1.0 adds and 0.5 conversions. At head dim 64 the ex2 alone (16 a cycle; those of
bfloat16 pairs are two instructions as well) take as long as the matmuls at their peak; at 128 half
of that, at 256 a quarter. What lies between scores and exponents is latency, which two or three
warps a scheduler hide in part: see `softmax.next_step`. What lies around a tile of work counts
where T is small: the next q is asked for under its first matmul, and Mosaic's own barriers, at each
copy and store, are off. Those that are needed stand in `_finish` and where q is loaded late.

Shared memory, and who owns it when:
  q [warpgroup]   filled by TMA at the warpgroup's own request. Two of them, where there is room:
                  the next q then arrives under this tile of work. Else when it is done with q
  k, v [stages]   a ring of entries; entry e of a tile of work holds the e-th key tile and the
                  value tile before it, which is what one step needs: one wait, one release a step.
                  `ready` when both have landed, `free` when every warpgroup has let go of them
  out [warpgroup] a slice of columns at a time on its way to global memory
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn import _gpus
from pallas_attn._problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import score_mod, softmax, tma_operands
from pallas_attn.kernels.attention.plan import ROWS, Plan
from pallas_attn.kernels.attention.score_mod import Refs, Rows, Tile
from pallas_attn.kernels.flash_fwd import segments, tile_scheduler
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import wgmma

SMEM_LIMIT = _gpus.shared_memory(_gpus.HOPPER)
BARRIERS = 1024  # bytes kept for them and for alignment
LINE = 1024  # bytes: every buffer begins at a multiple
# Probabilities of float32 are spread over float16's range. They lie below 2**softmax.PATIENCE.
SPREAD = 2.0 ** (wgmma.TOP + 1 - softmax.PATIENCE)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 2  # that compute
    block_kv: int = 128
    stages: int = 2
    section: int = 0  # heads whose tiles of work are taken together; 0: see Plan.section
    ctas: int = 132  # blocks; 0: one a tile of work
    q_slots: int = 2  # 2: the next q arrives under this tile of work, where there is room for it
    early: int = 0  # quarters of a tile's exponents that are kept before the wait for its values
    chunk: int = 32  # columns of them that are taken together

    def __post_init__(self):
        check(
            self,
            warpgroups=(self.warpgroups in (1, 2, 3, 4), "1, 2, 3 or 4"),
            block_kv=(16 <= self.block_kv <= 256 and self.block_kv % 16 == 0, "16, 32, .. 256"),
            stages=(self.stages >= 2, "at least 2"),
            section=(self.section >= 0, "at least 0"),
            ctas=(self.ctas >= 0, "at least 0"),
            q_slots=(self.q_slots in (1, 2), "1 or 2"),
            early=(self.early in (0, 1, 2, 3, 4), "0 to 4"),
            chunk=(self.chunk in (8, 16, 32, 64, 128, 256), "8, 16, 32, .. 256"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What serves a problem that nobody tuned."""
        dim = max(problem.head_dim, problem.v_head_dim)
        if problem.dtype == "float32":
            return _float32(problem)
        plain = not problem.arrays and problem.softcap is None  # and so few registers
        if dim <= 64 and plain and not problem.mask.is_full and _fits(problem, 4):
            return cls(warpgroups=4, block_kv=64, stages=6)
        if dim <= 64:
            return cls(warpgroups=3, block_kv=128, stages=4, q_slots=2 if plain else 1)
        if dim <= 128 and plain and _fits(problem, 3):
            return cls(warpgroups=3, block_kv=64, stages=3)
        if dim <= 128:
            return cls(warpgroups=2, block_kv=128, stages=2)
        return cls(warpgroups=2, block_kv=64, stages=2)


def _fits(problem: AttentionProblem, warpgroups: int) -> bool:
    """Whether tiles of work of so many leave few rows idle, beside those of one fewer."""
    wider, narrower = (
        tma_operands.round_up(problem.q_len, ROWS * n) for n in (warpgroups, warpgroups - 1)
    )
    return wider <= 1.1 * narrower


# The first that fits in shared memory, and its three warpgroups in registers.
_FLOAT32 = (
    Config(warpgroups=3, block_kv=64, stages=3),
    Config(warpgroups=2, block_kv=64, stages=3),
    Config(warpgroups=2, block_kv=64, stages=2),
    Config(warpgroups=2, block_kv=32, stages=2),
    Config(warpgroups=1, block_kv=32, stages=2),
    Config(warpgroups=1, block_kv=16, stages=2),
)


def _float32(problem: AttentionProblem) -> Config:
    few = max(problem.head_dim, problem.v_head_dim) <= 64 and problem.precision is None
    return next(
        config
        for config in _FLOAT32
        if (few or config.warpgroups < 3) and smem_bytes(problem, config) <= SMEM_LIMIT
    )


def limit(problem: AttentionProblem) -> Limit | None:
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        return Limit(
            f"it takes bfloat16, float16 and float32, not {problem.dtype}",
            "cast q, k and v to one of them",
        )
    if (refused := tma_operands.dims_limit(problem)) is not None:
        return refused
    if problem.batch * problem.q_heads * (problem.q_len + 256) >= 2**31:
        return Limit("it counts query rows of all heads in 32 bits", "split the batch")
    return None


# ---- shared memory ------------------------------------------------------------------------------


class Smem(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    q_ids: Any  # segments of the queries, None where there are none
    kv_ids: Any
    spans: Any  # of a tile of work: see `tile_scheduler.record`
    q_ready: Any
    ready: Any
    free: Any


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, out = plan.config, plan.problem.dtype
    whole = plan.v_swizzle // plan.values.itemsize
    if config.block_kv % whole:
        raise ValueError(
            f"Config.block_kv must be a multiple of {whole} where v_head_dim is "
            f"{plan.problem.v_head_dim}: matmuls take probabilities by whole swizzles. "
            f"Got {config.block_kv}"
        )
    barrier = plgpu.Barrier
    k_columns, v_columns = plan.scores.terms * plan.k_width, plan.values.terms * plan.v_width
    q_tiles, ids = _q_slots(plan) * config.warpgroups, plan.has("q_segment_ids")
    return Smem(
        q=mosaic.swizzled((q_tiles, ROWS, k_columns), plan.scores.dtype, plan.k_swizzle),
        k=mosaic.swizzled(
            (config.stages, config.block_kv, k_columns), plan.scores.dtype, plan.k_swizzle
        ),
        v=mosaic.swizzled(
            (config.stages, config.block_kv, v_columns), plan.values.dtype, plan.v_swizzle
        ),
        out=mosaic.swizzled((config.warpgroups, ROWS, _out_width(plan)), out, _out_swizzle(plan)),
        q_ids=plgpu.SMEM((q_tiles, ROWS), jnp.int32) if ids else None,
        kv_ids=plgpu.SMEM((config.stages, _ids_loaded(plan)), jnp.int32) if ids else None,
        spans=plgpu.SMEM((q_tiles, tile_scheduler.RECORD), jnp.int32) if ids else None,
        q_ready=barrier(num_barriers=q_tiles, num_arrivals=3 if ids else 1),
        ready=barrier(num_barriers=config.stages, num_arrivals=3 if ids else 2),
        free=barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
    )


def _out_swizzle(plan: Plan) -> int:
    if plan.problem.dtype != "float32":
        return plan.v_swizzle
    return tma_operands.swizzle_of(plan.v_width * 4)


def _ids_loaded(plan: Plan) -> int:
    """Of a key tile: TMA writes to whole 128 bytes."""
    return max(plan.config.block_kv, 32)


def _room(plan: Plan, q_slots: int) -> int:
    """Bytes of shared memory that q, k, v, segments and barriers leave for the output."""
    config = plan.config
    q_tiles = q_slots * config.warpgroups
    k_row, v_row = plan.k_width * plan.scores.bytes, plan.v_width * plan.values.bytes
    taken = [q_tiles * ROWS * k_row, *(config.stages * config.block_kv * n for n in (k_row, v_row))]
    if plan.has("q_segment_ids"):
        ids = q_tiles * ROWS, config.stages * _ids_loaded(plan), q_tiles * tile_scheduler.RECORD
        taken += [4 * n for n in ids]
    return SMEM_LIMIT - BARRIERS - sum(tma_operands.round_up(n, LINE) for n in taken)


def _q_slots(plan: Plan) -> int:
    """As many as were asked for, where there is room."""
    whole = plan.config.warpgroups * ROWS * plan.v_width * jnp.dtype(plan.problem.dtype).itemsize
    return plan.config.q_slots if _room(plan, 2) >= whole // 2 else 1


def _out_width(plan: Plan) -> int:
    """Columns of the output that leave at once: as many as there is room for."""
    config, itemsize = plan.config, jnp.dtype(plan.problem.dtype).itemsize
    rest, swizzle = _room(plan, _q_slots(plan)), _out_swizzle(plan) // itemsize
    for width in range(plan.v_width, 0, -swizzle):
        if plan.v_width % width == 0 and itemsize * config.warpgroups * ROWS * width <= rest:
            return width
    return swizzle


def smem_bytes(problem: AttentionProblem, config: Any) -> int:
    return mosaic.bytes_of(scratch(Plan(problem, config))) + BARRIERS


# ---- producer: one warpgroup, which loads k and v -----------------------------------------------


def next_slot(plan: Plan, slot: Any) -> Any:
    return jnp.where(slot == plan.config.stages - 1, 0, slot + 1)


def load(plan: Plan, refs: Refs, smem: Smem, cta: Any) -> None:
    """The loading warpgroup: K and V of every tile of work, in the order in which they are used."""

    def known(code):
        return tile_scheduler.record_ends(plan, refs, tile_scheduler.tile_of(plan, refs, code))

    def one_tile(i, carry):
        count, code, ends = carry
        following = refs.schedule[cta, i + 2]
        tile = tile_scheduler.tile_of(plan, refs, code)
        record = None if ends is None else lambda i: ends.get(i, 0)
        lo, hi = tile_scheduler.block_span(plan, record, tile)
        ends = known(following)  # asked for long before it is needed

        def entry(e, count):
            slot = lax.rem(count, jnp.int32(plan.config.stages))
            pl.when(count >= plan.config.stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            _load_entry(plan, refs, smem, tile, (e, hi - lo, hi - 1 - e, slot))
            return count + 1

        count = lax.fori_loop(0, jnp.where(hi > lo, hi - lo + 1, 0), entry, count)
        return count, following, ends

    first = refs.schedule[cta, 1]
    lax.fori_loop(0, refs.schedule[cta, 0], one_tile, (jnp.int32(0), first, known(first)))


def _load_entry(plan: Plan, refs: Refs, smem: Smem, tile: Tile, entry: tuple[Any, ...]) -> None:
    """Key tile t and the value tile before it; the first entry has no values, the last no keys."""
    e, last, t, slot = entry
    block, ready = plan.config.block_kv, smem.ready.at[slot]
    head = lax.div(tile.head, jnp.int32(plan.problem.group))

    def copy(ref, first, width, to):
        src = ref.at[tile.batch, pl.ds(first, block), head, mosaic.columns(ref, 0, width, head)]
        plgpu.copy_gmem_to_smem(src, to, ready)

    k_columns, v_columns = (ref.shape[-1] for ref in (smem.k, smem.v))

    def values():
        if not plan.has("kv_lengths"):
            return copy(refs.v, (t + 1) * block, v_columns, smem.v.at[slot])
        cut = (t + 2) * block > tile.kv_len  # only the last tile may be
        pl.when(cut)(lambda: copy(refs.v_edge, 0, v_columns, smem.v.at[slot]))
        whole = functools.partial(copy, refs.v, (t + 1) * block, v_columns, smem.v.at[slot])
        return pl.when(jnp.logical_not(cut))(whole)

    nothing = functools.partial(plgpu.barrier_arrive, ready)

    @pl.when(e < last)
    def _():
        copy(refs.k, t * block, k_columns, smem.k.at[slot])
        if smem.kv_ids is not None:
            ids = refs.kv_segment_ids.at[tile.batch, pl.ds(t * block, smem.kv_ids.shape[1])]
            plgpu.copy_gmem_to_smem(ids, smem.kv_ids.at[slot], ready)

    @pl.when(e == last)
    def _():
        nothing()
        if smem.kv_ids is not None:
            nothing()

    pl.when(e > 0)(values)
    pl.when(e == 0)(nothing)


def load_q(plan: Plan, refs: Refs, smem: Smem, tile: Tile, to: tuple[Any, Any]) -> None:
    """The rows of a warpgroup, and what is known of them."""
    wg, slot = to
    at, ready = smem.q.at[slot], smem.q_ready.at[slot]
    rows = pl.ds(tile.row + wg * ROWS, ROWS)
    columns = mosaic.columns(refs.q, 0, smem.q.shape[-1], tile.head)
    plgpu.copy_gmem_to_smem(refs.q.at[tile.batch, rows, tile.head, columns], at, ready)
    if smem.q_ids is not None:
        ids = refs.q_segment_ids.at[tile.batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.q_ids.at[slot], ready)
        number = lax.div(tile.row, jnp.int32(plan.tile_rows))
        record = refs.segment_spans.at[tile.batch, number]
        plgpu.copy_gmem_to_smem(record, smem.spans.at[slot], ready)


# ---- mainloop: each consumer warpgroup, over the kv tiles of its 64 query rows ------------------


class State(NamedTuple):
    """What is carried from key tile to key tile."""

    acc: Any  # [ROWS, v_width]: the output before it is divided
    total: Any  # [ROWS, PARTS]
    top: Any  # [ROWS]
    p: Any  # [ROWS, block_kv], its terms: of the tile whose values are still to come
    shrink: Any = None  # [ROWS]: what acc is still to be multiplied by; None: nothing


def _units(plan: Plan, refs: Refs, tile: score_mod.Tile) -> tuple[Any, Any]:
    """(what raw scores are multiplied by, what turns logits into log2 units); None: 1."""
    if refs.units is None:
        return None, plan.unit
    by = refs.units[0, tile.batch, lax.div(tile.head, jnp.int32(plan.problem.group))]
    return (by, None) if plan.unit is None else (None, by * plan.unit)


def _left(plan: Plan, p: Any) -> tuple[Any, ...]:
    """Probabilities as the matmul with the values takes them."""
    p = p * SPREAD if plan.scaled else p
    return wgmma.of_registers(p, plan.values)


def _q_and_k(plan: Plan, smem: Smem, rows: Rows, slot: Any) -> tuple[Any, Any]:
    """The operands of a tile of scores."""
    at = rows.q
    if plan.k_width * plan.scores.bytes > 512:
        # 0, which only we know: or else addresses in q would be computed early and spilled.
        at = at + lax.shift_right_logical(slot, jnp.int32(31))
    q = wgmma.of_memory(smem.q.at[at], plan.scores)
    return q, wgmma.transposed(wgmma.of_memory(smem.k.at[slot], plan.scores))


def _ids_at(smem: Smem, slot: Any) -> Any:
    return None if smem.kv_ids is None else smem.kv_ids.at[slot]


def _first(
    plan: Plan, refs: Refs, smem: Smem, rows: Rows, slot: Any, more: tuple[Any, Any]
) -> State:
    """The last tile of keys; `more` is (`_units`, what to do meanwhile)."""
    ((by, unit), meanwhile), shape = more, (ROWS, plan.config.block_kv)
    plgpu.barrier_wait(smem.ready.at[slot])
    s = wgmma.matmul(shape, *_q_and_k(plan, smem, rows, slot), meanwhile)
    release = functools.partial(plgpu.barrier_arrive, smem.free.at[slot])
    if smem.kv_ids is None:
        release()
    masked, ids = "first_masked" in plan.parts, _ids_at(smem, slot)
    s = s if by is None else s * by
    given = score_mod.of_own_scores(plan, refs, rows, rows.span.hi - 1, s, masked, ids)
    if smem.kv_ids is not None:
        release()
    new = softmax.step(given, unit, mosaic.filled((ROWS,), -jnp.inf), guarded=True)
    acc = mosaic.filled((ROWS, plan.v_width), 0.0)
    shrink = new.shrink if plan.exact else None
    return State(acc, new.total, new.top, _left(plan, new.p), shrink)


def attend(
    plan: Plan, refs: Refs, smem: Smem, rows: Rows, slot: Any, meanwhile: Any
) -> tuple[State, Any]:
    """All keys of a warpgroup's rows, from the last tile to the first. `meanwhile`: what else there
    is to do, under the first matmul.
    """
    span, config = rows.span, plan.config
    shape = (ROWS, config.block_kv)
    guarded = plan.has("bias")
    by, unit = units = _units(plan, refs, rows.tile)
    state = _first(plan, refs, smem, rows, slot, (units, meanwhile))

    def step(masked, i, carry):
        t = -1 - i  # loops count up
        state, slot = carry
        plgpu.barrier_wait(smem.ready.at[slot])

        values = wgmma.of_memory(smem.v.at[slot], plan.values)

        def matmuls(scores, out):
            wgmma.multiply(scores, *_q_and_k(plan, smem, rows, slot))
            wgmma.multiply(out, state.p, values)

        def work(s):
            s = s if by is None else s * by
            given = score_mod.of_own_scores(
                plan, refs, rows, t, s, masked, _ids_at(smem, slot), (low, high)
            )
            top, unsure = state.top, masked is not False or guarded
            return softmax.next_step(given, unit, top, guarded=unsure, early=config.early)

        like = softmax.Step(
            mosaic.filled(shape, 0.0), state.top, state.top, state.total, jnp.int32(0) + slot
        )
        if plan.exact:
            q_and_k = functools.partial(_q_and_k, plan, smem, rows, slot)
            some = (state.acc, state.p, values, plan.v_swizzle, (state.shrink, None))
            acc, s = wgmma.exact_matmul_add_overlapped(*some, shape, q_and_k)
            new = work(s)
            total = state.total * mosaic.down_rows(new.shrink, state.total.shape)
        else:
            behind = wgmma.products(plan.values.terms, plan.values.terms)
            acc, new = wgmma.overlapped(state.acc, like, matmuls, work, behind)
        plgpu.barrier_arrive(smem.free.at[slot])
        if not plan.exact:
            acc, total = _rescale(acc, state.total, new)
        # p is rounded after the wait: before it, ptxas takes the registers for operands of the
        # matmul in flight and serialises both (C7513)
        p = _left(plan, new.p)
        shrink = new.shrink if plan.exact else None
        new_state = State(acc, total + new.total, new.top, p, shrink)
        return new_state, next_slot(plan, slot)

    carry, first = (state, next_slot(plan, slot)), span.hi - 1
    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), first)  # full tiles end here
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)  # and begin here
    if plan.one_loop:
        carry = lax.fori_loop(-first, -span.lo, functools.partial(step, None), carry)
    else:
        if "high" in plan.parts:
            carry = lax.fori_loop(-first, -high, functools.partial(step, True), carry)
        carry = lax.fori_loop(-high, -low, functools.partial(step, False), carry)
        if "low" in plan.parts:
            carry = lax.fori_loop(-low, -span.lo, functools.partial(step, True), carry)

    state, slot = carry
    plgpu.barrier_wait(smem.ready.at[slot])
    values = wgmma.of_memory(smem.v.at[slot], plan.values)
    if plan.exact:
        acc = wgmma.exact_matmul_add(
            state.acc, state.p, values, plan.v_swizzle, (state.shrink, None)
        )
    else:
        acc = wgmma.matmul_add(state.acc, state.p, values)
    plgpu.barrier_arrive(smem.free.at[slot])
    return state._replace(acc=acc), next_slot(plan, slot)


def _rescale(acc: Any, total: Any, new: softmax.Step) -> tuple[Any, Any]:
    """Sums and outputs so far, in terms of the new tops."""

    def scaled():
        return (
            acc * mosaic.down_rows(new.shrink, acc.shape),
            total * mosaic.down_rows(new.shrink, total.shape),
        )

    return lax.cond(new.moved != 0, scaled, lambda: (acc, total))


def _skip(plan: Plan, smem: Smem, entries: Any, slot: Any) -> Any:
    """Lets go of entries of the ring that only other warpgroups want."""

    def one(_, slot):
        plgpu.barrier_wait(smem.ready.at[slot])
        plgpu.barrier_arrive(smem.free.at[slot])
        return next_slot(plan, slot)

    return lax.fori_loop(0, entries, one, slot)


def _of_record(smem: Smem, q: Any, i: Any) -> Any:
    return smem.spans[q, i]


def _compute(plan: Plan, refs: Refs, smem: Smem, outs: Any, who: tuple[Any, Any]) -> None:
    """A computing warpgroup: every tile of work of its block."""
    cta, wg = who
    count, first, second = (refs.schedule[cta, i] for i in range(3))
    slots = smem.q.shape[0] // plan.config.warpgroups

    def place(i):
        return wg, (wg if slots == 1 else wg + (i & 1) * plan.config.warpgroups)

    load_q(plan, refs, smem, tile_scheduler.tile_of(plan, refs, first), place(0))

    def one_tile(i, carry):
        slot, code, following = carry
        after = refs.schedule[cta, i + 3]  # asked for long before it is needed

        def load_next():
            tile = tile_scheduler.tile_of(plan, refs, following)
            pl.when(i + 1 < count)(lambda: load_q(plan, refs, smem, tile, place(i + 1)))

        branches = "empty" in plan.parts and not tile_scheduler.never_empty(plan)
        if slots > 1 and branches:
            load_next()
        q = place(i)[1]
        tile = tile_scheduler.tile_of(plan, refs, code)
        plgpu.barrier_wait(smem.q_ready.at[q])
        ids, record, alike = None, None, None
        if smem.q_ids is not None:
            ids, record = smem.q_ids.at[q], functools.partial(_of_record, smem, q)
            alike = record(4 * wg + 1), record(4 * wg + 2)
        lo, hi = tile_scheduler.block_span(plan, record, tile)
        span = tile_scheduler.at_least_one(
            plan, tile_scheduler.rows_span(plan, record, tile, wg), hi
        )
        rows = Rows(tile, tile.row + wg * ROWS, wg, span, q, ids, alike)

        def some(slot):
            slot = _skip(plan, smem, hi - rows.span.hi, slot)
            meanwhile = load_next if slots > 1 and not branches else None
            state, slot = attend(plan, refs, smem, rows, slot, meanwhile)
            slot = _skip(plan, smem, rows.span.lo - lo, slot)
            return state.acc, state.total, state.top, slot

        def none(slot):
            slot = _skip(plan, smem, jnp.where(hi > lo, hi - lo + 1, 0), slot)
            acc = mosaic.filled((ROWS, plan.v_width), 0.0)
            total = mosaic.filled((ROWS, softmax.PARTS), 0.0)
            return acc, total, mosaic.filled((ROWS,), -jnp.inf), slot

        if branches:
            *result, slot = lax.cond(rows.span.hi > rows.span.lo, some, none, slot)
        else:
            *result, slot = some(slot)

        if slots == 1:
            plgpu.commit_smem()  # by now all warps have read it, and TMA will write there
            load_next()
        _finish(plan, refs, smem, outs, rows, result)
        return slot, following, after

    lax.fori_loop(0, count, one_tile, (jnp.int32(0), first, second))
    plgpu.wait_smem_to_gmem(0)


# ---- epilogue -----------------------------------------------------------------------------------


def _finish(plan: Plan, refs: Refs, smem: Smem, outs: Any, rows: Rows, result: Any) -> None:
    (acc, total, top), (out_ref, lse_ref) = result, outs
    sink = refs.sinks[rows.tile.head] if plan.has("sinks") else None
    factor, lse = softmax.finish(top, total, sink)
    if refs.units is not None:
        head = lax.div(rows.tile.head, jnp.int32(plan.problem.group))
        factor = factor * refs.units[1, rows.tile.batch, head]
    acc = acc * mosaic.down_rows(factor, acc.shape)
    if rows.tile.q_len is not None:
        inside = mosaic.positions((ROWS,), 0, rows.row) < rows.tile.q_len
        lse = jnp.where(inside, lse, -jnp.inf)
        acc = jnp.where(mosaic.down_rows(inside, acc.shape), acc, 0.0)
    mosaic.store(lse_ref.at[rows.tile.batch, rows.tile.head, pl.ds(rows.row, ROWS)], lse)
    width, staged = smem.out.shape[-1], smem.out.at[rows.wg]
    for column in range(0, plan.v_width, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = lax.slice(acc, (0, column), (ROWS, column + width))
        staged[...] = part.astype(staged.dtype)
        plgpu.commit_smem()
        head = rows.tile.head
        columns = mosaic.columns(out_ref, column, width, head)
        where = (rows.tile.batch, pl.ds(rows.row, ROWS), head, columns)
        plgpu.copy_smem_to_gmem(staged, out_ref.at[where])


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: Refs, out_ref: Any, lse_ref: Any, smem: Smem, *, plan: Plan) -> None:
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    computing = plan.config.warpgroups
    ours = {1: 240, 2: 240, 3: 160, 4: 112}[computing]
    load_all = functools.partial(load, plan, refs, smem, cta)
    compute = functools.partial(_compute, plan, refs, smem, (out_ref, lse_ref), (cta, wg))
    mosaic.share_registers(wg, computing, load_all, compute, ours)


def run(inputs: AttentionInputs, problem: AttentionProblem, config: Config) -> tuple[Any, Any]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    batch, q_len = problem.batch, problem.q_len
    out_shape = (batch, q_len, problem.q_heads, problem.v_head_dim)
    if 0 in (batch, q_len, problem.kv_len, problem.q_heads):
        lse = jnp.full((batch, problem.q_heads, q_len), -jnp.inf, jnp.float32)
        return jnp.zeros(out_shape, problem.dtype), lse
    plan = Plan(problem, config)
    refs = _operands(plan, inputs)
    width = plan.v_width if problem.dtype == "float32" else problem.v_head_dim
    padded_shape = (*refs.q.shape[:3], tma_operands.width_in_tma(width))
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct(padded_shape, problem.dtype),
            jax.ShapeDtypeStruct((batch, problem.q_heads, plan.padded_rows), jnp.float32),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_fwd_sm90",
    )
    out, lse = kernel(refs)
    return out[:, :q_len, :, : problem.v_head_dim], lse[:, :, :q_len]


def _operands(plan: Plan, inputs: AttentionInputs) -> Refs:
    """What the kernel reads. Copied are: q, k and v where they are float32 (see `terms`); they (and
    the output, afterwards) where T or S is above 8 and no multiple of 8, or a head dim above 64 and
    no multiple of 16, which Mosaic's TMA would clip; bias and mask_array where T or S is no
    multiple of a tile; segment ids; one value tile a sequence where there are kv_lengths.
    """
    problem, block = plan.problem, plan.config.block_kv
    rows, keys = plan.padded_rows, tma_operands.round_up(problem.kv_len, block)
    fields = {name: getattr(inputs, name) for name in problem.arrays}
    powers: dict[str, Any] = {}
    if plan.scaled:
        powers = wgmma.powers(inputs, problem.group)
        products = (powers["q"] * powers["k"], powers["v"] * (1 / SPREAD))
        fields["units"] = jnp.stack(products)
    for name, kind, width in (
        ("q", plan.scores, plan.k_width),
        ("k", plan.scores, plan.k_width),
        ("v", plan.values, plan.v_width),
    ):
        fields[name] = tma_operands.stored(getattr(inputs, name), kind, width, powers.get(name))
    fields |= tma_operands.over_scores(inputs, rows, keys) | tma_operands.segment_ids(
        inputs, rows, keys
    )
    fields["schedule"] = jnp.asarray(tile_scheduler.schedule(plan))
    if plan.has("q_segment_ids"):
        if segments.fits(plan):
            made = segments.prepare(plan, inputs.q_segment_ids, inputs.kv_segment_ids)
        else:
            made = segments.by_xla(plan, fields["q_segment_ids"], fields["kv_segment_ids"])
        fields["segment_spans"], fields["schedule"] = made
    if plan.has("kv_lengths"):
        fields["v_edge"] = tma_operands.edge(fields["v"], inputs.kv_lengths, block)
    return Refs(**{name: fields.get(name) for name in Refs._fields})
