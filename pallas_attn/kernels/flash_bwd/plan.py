"""What the backward kernels over key tiles share: sizes, who does what in which order, what they
read, and the arithmetic from scores to dS.

Tiles of scores lie with keys down and queries across, S^T = K Q^T: so the probabilities come out of
one matmul in the registers from which the matmul for dV takes its left operand, and dS likewise.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._problem import AttentionInputs
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.attention.plan import Span
from pallas_attn.kernels.attention.score_mod import Place
from pallas_attn.kernels.flash_bwd import float32 as bwd_float32
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import wgmma

ROWS = attention_plan.ROWS
SECTION_BYTES = 32 * 2**20  # of what a section's heads stream and add to: some of L2
ITEM_OVERHEAD = 1.5  # of a tile of work, in steps of one query tile


class Refs(NamedTuple):
    """Global memory. None: not in this problem."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any  # [B, N, padded rows]: log2 units (see Plan.natural); inf for a row without a key
    delta: Any  # [B, N, padded rows]: rowsum(dO * O) - dLSE, 0 where lse is inf
    q_edge: Any  # [B, block_q, N, H]: the query tile that q_lengths cuts, 0 past the length
    do_edge: Any
    k_edge: Any  # [B, keys of a tile, K, H]: the key tile that kv_lengths cuts
    v_edge: Any
    q_offset: Any
    q_lengths: Any
    kv_lengths: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    segment_spans: Any  # int32[B, 4, kv_tiles]: a Span's fields, in query tiles
    bias: Any
    mask_array: Any
    dealt: Any  # int32[blocks, n]: see `tile_scheduler.assign`
    dq: Any  # float32[B, padded rows, N, width]: what dQ is added into
    units: Any = None  # float32[6, B, K]: see `bwd_float32.Units`; delta is in those of dS


@dataclasses.dataclass(frozen=True)
class Plan(attention_plan.Plan):
    """A problem and a config, and what follows from them, where the tiles of work are keys."""

    keys: int = 2 * ROWS  # of a tile of work
    section_bytes = SECTION_BYTES

    @property
    def kv_tiles(self) -> int:
        return pl.cdiv(self.problem.kv_len, self.keys)

    @property
    def q_tiles(self) -> int:
        return pl.cdiv(self.problem.q_len, self.config.block_q)

    @property
    def padded_rows(self) -> int:
        return self.q_tiles * self.config.block_q

    @property
    def k_swizzle(self) -> int:
        return self._swizzle(self.problem.head_dim)

    @property
    def v_swizzle(self) -> int:
        return self._swizzle(self.problem.v_head_dim)

    def _swizzle(self, dim: int) -> int:
        """Matmuls take query tiles by whole swizzles too."""
        whole = tma_operands.swizzle(dim)
        if self.problem.dtype == "float32":
            whole = tma_operands.swizzle_of(2 * tma_operands.width_in_smem(dim, "float32"))
        return min(whole, tma_operands.swizzle_of(2 * self.config.block_q))

    @property
    def padded_keys(self) -> int:
        return self.kv_tiles * self.keys

    @property
    def heads(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @property
    def code_bits(self) -> int:
        return (self.kv_tiles - 1).bit_length()

    @property
    def ctas(self) -> int:
        work = self.heads * self.kv_tiles
        return min(self.config.ctas or work, work)

    @property
    def section(self) -> int:
        """Heads whose tiles of work are taken together: see `attention_plan.Plan.section`. Here
        they stream q and dO, and add into a float32 dq.
        """
        problem, config = self.problem, self.config
        if config.section:
            return min(config.section, self.heads)
        blocks = config.ctas or 132
        if self.few:
            # Few tiles of work a block: long ones that begin late, in a later section, leave the
            # others idle. About as many as there are blocks at a time.
            fit = 3 * blocks // (4 * self.kv_tiles)
        elif problem.mask.right is None:
            fit = blocks // self.kv_tiles
        else:
            limit = self.section_bytes * (1 if problem.mask.left is None else 2)
            fit = max(limit // self.head_bytes, blocks // self.kv_tiles)
        sections = pl.cdiv(self.heads, max(fit, 1))
        return pl.cdiv(self.heads, sections)

    @property
    def head_bytes(self) -> int:
        """Of what the query heads of one kv head stream and add to."""
        problem = self.problem
        return problem.q_len * (6 * problem.head_dim + 2 * problem.v_head_dim) * problem.group

    @property
    def few(self) -> bool:
        """Whether tiles of work are so few a block that who is idle at the end depends on how they
        are dealt.
        """
        return self.heads * self.kv_tiles < 4 * (self.config.ctas or 132)

    @property
    def packed(self) -> bool:
        """Whether `tile_scheduler.assign_packed` deals them, in no order of heads. Not where dQ is
        added up in global memory: what that saves, L2 loses.
        """
        alone = not self.config.fused or self.problem.deterministic
        pieces = self.heads * self.kv_tiles
        return alone and self.few and not self.config.section and self.ctas < pieces

    @property
    def scattered(self) -> bool:
        """Whether blocks cannot all be busy with heads that stay in L2 together."""
        return self.few and self.heads * self.head_bytes > 8 * SECTION_BYTES

    @property
    def ragged_keys(self) -> bool:
        return self.has("kv_lengths") or self.problem.kv_len % self.keys != 0

    @property
    def always_masked(self) -> bool:
        """Where tiles that need no mask are few, or not known."""
        return self.has("mask_array") or self.has("q_segment_ids")

    @property
    def in_step(self) -> bool:
        """Whether all tiles of work meet all query tiles. Those of one head are taken at one time:
        each begins elsewhere, or all would add to the same dQ.
        """
        return self.problem.mask.is_full and not (self.has("q_lengths") or self.always_masked)

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Which parts of a key tile's queries occur: "low" and "high" need a mask, "full" none."""
        if self.always_masked:
            return frozenset(("low",))
        if {"q_offset", "q_lengths", "kv_lengths"} & set(self.problem.arrays):
            return frozenset(("low", "full", "high"))
        found: set[str] = set()
        for key in range(0, self.problem.kv_len, self.keys):
            lo, full_lo, full_hi, hi = self.q_span(
                key, self.problem.q_offset, self.padded_rows, self.problem.kv_len
            )
            named = {"low": lo < full_lo, "full": full_lo < full_hi, "high": full_hi < hi}
            found |= {name for name, there in named.items() if there}
        return frozenset(found)

    @property
    def reach(self) -> float:
        """Query rows that meet a key, on average, as far as the mask says."""
        rows, spans_of = self.padded_rows, range(0, self.problem.kv_len, self.keys)
        found = [
            self.q_span(key, self.problem.q_offset, rows, self.problem.kv_len) for key in spans_of
        ]
        return self.config.block_q * sum(span.hi - span.lo for span in found) / len(found)

    def q_span(self, key: Any, q_offset: Any, q_len: Any, kv_len: Any) -> Span:
        """The query tiles that meet the keys from `key` on, ordered lo <= full_lo <= full_hi <= hi.

        Rows past T carry an lse of inf: the end of the queries needs no mask.
        """
        low, high = (min, max) if isinstance(key, int) else (jnp.minimum, jnp.maximum)
        band = self.problem.mask.transposed
        span = attention_plan.rows_span(band, key - q_offset, self.keys, q_len, self.config.block_q)
        live = kv_len > key
        cut = key + self.keys > kv_len
        if isinstance(key, int):
            hi = max(span.lo, span.hi) if live else span.lo
            full_lo = hi if cut else low(high(span.full_lo, span.lo), hi)
        else:
            hi = jnp.where(live, jnp.maximum(span.lo, span.hi), span.lo)
            full_lo = jnp.where(cut, hi, low(high(span.full_lo, span.lo), hi))
        return Span(span.lo, full_lo, low(high(span.full_hi, full_lo), hi), hi)


class Item(NamedTuple):
    """A tile of work: the keys of one kv head, and the query tiles of each of its heads."""

    batch: Any
    kv_head: Any
    key: Any  # the first of its keys
    q_offset: Any
    q_len: Any  # None: all rows count
    kv_len: Any
    span: Span
    turn: Any  # how far into its query tiles a walk begins

    @property
    def steps(self) -> Any:
        """Query tiles of one head."""
        return self.span.hi - self.span.lo

    def tile(self, i: Any) -> Any:
        """The query tile of step i of a head."""
        t = self.span.lo + i + self.turn
        return t if isinstance(self.turn, int) else jnp.where(t < self.span.hi, t, t - self.steps)


def across(columns: Any, shape: tuple[int, int]) -> Any:
    """One number a column, spread over the rows."""
    return lax.broadcast_in_dim(columns, shape, [1])


def ring(count: Any, size: int) -> Any:
    """count modulo size."""
    return count & (size - 1) if size & (size - 1) == 0 else lax.rem(count, jnp.int32(size))


def item_of(plan: Plan, refs: Refs, code: Any) -> Item:
    problem = plan.problem
    head = lax.shift_right_logical(code, jnp.int32(plan.code_bits))
    batch = lax.div(head, jnp.int32(problem.kv_heads))
    tile = code & ((1 << plan.code_bits) - 1)
    key = tile * plan.keys
    kv_len: Any = problem.kv_len
    if plan.has("kv_lengths"):
        kv_len = refs.kv_lengths[batch]
    q_offset: Any = refs.q_offset[batch] if plan.has("q_offset") else problem.q_offset
    q_len, rows = None, plan.padded_rows
    if plan.has("q_lengths"):
        block = plan.config.block_q
        q_len = refs.q_lengths[batch]
        rows = lax.div(q_len + (block - 1), jnp.int32(block)) * block
    span = plan.q_span(key, q_offset, rows, kv_len)
    if plan.has("q_segment_ids"):
        lo, _, _, hi = (refs.segment_spans[batch, i, tile] for i in range(4))
        lo = jnp.maximum(span.lo, lo)
        hi = jnp.maximum(jnp.minimum(span.hi, hi), lo)
        span = Span(lo, hi, hi, hi)
    if plan.has("mask_array"):
        span = span._replace(full_lo=span.hi, full_hi=span.hi)
    kv_head = lax.rem(head, jnp.int32(problem.kv_heads))
    turn: Any = 0
    if plan.in_step:
        turn = lax.div(tile * plan.q_tiles, jnp.int32(plan.kv_tiles))
    return Item(batch, kv_head, key, q_offset, q_len, kv_len, span, turn)


def place_of(
    item: Item, head: Any, t: Any, key: Any, block_q: int, layout: Any = mosaic.TILE
) -> Place:
    """Where the tile of logits of keys from `key` on and query tile t stands."""
    where = (item.batch, head, t * block_q, key, item.q_offset, item.kv_len)
    return Place(*where, q_axis=1, layout=layout)


@functools.lru_cache(maxsize=64)
def dealt(plan: Plan) -> np.ndarray:
    """Which tiles of work each block takes: by section of heads, then longest first."""
    costs = np.full(plan.kv_tiles, ITEM_OVERHEAD)
    problem = plan.problem
    for tile in range(0 if plan.has("q_segment_ids") else plan.kv_tiles):
        span = plan.q_span(tile * plan.keys, problem.q_offset, plan.padded_rows, problem.kv_len)
        costs[tile] += problem.group * (span.hi - span.lo)
    order = np.argsort(-costs, kind="stable")
    section = plan.section
    codes = []
    for first in range(0, plan.heads, section):
        heads = np.arange(first, min(first + section, plan.heads))
        codes.append(((heads[None] << plan.code_bits) + order[:, None]).ravel())
    work = np.concatenate(codes)
    deal = tile_scheduler.assign_packed if plan.packed else tile_scheduler.assign
    return deal(work, costs[work & ((1 << plan.code_bits) - 1)], plan.ctas)


def masked(plan: Plan, item: Item, t: Any) -> Any:
    """Whether a query tile needs a mask: True, False, or traced where it depends on the tile."""
    if "full" not in plan.parts or len(plan.parts) == 1:
        return "full" not in plan.parts
    return (t < item.span.full_lo) | (t >= item.span.full_hi)


def row_numbers(plan: Plan, rows: int, arrays: Any, residuals: Any) -> Any:
    """(lse, delta) as in `Refs`, for `rows` rows: what XLA makes of out, lse and their cotangents.

    P = exp(S - lse) and dS = P * (dP - delta); a gradient that arrives through the lse adds itself
    to all logits' gradients alike, by delta.
    """
    problem, unit = plan.problem, 1.0 if plan.natural else softmax.to_log2(1.0)
    out, lse, d_out, d_lse = residuals
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - d_lse
    dead = lse == -jnp.inf
    if arrays.q_lengths is not None:
        row = jnp.arange(problem.q_len, dtype=jnp.int32)
        dead |= row[None, None] >= arrays.q_lengths[:, None, None]
    pad = ((0, 0), (0, 0), (0, rows - problem.q_len))
    lse = jnp.pad(jnp.where(dead, jnp.inf, lse * unit), pad, constant_values=jnp.inf)
    return lse, jnp.pad(jnp.where(dead, 0.0, delta), pad)


def dsinks(sinks: Any, lse: Any, delta: Any) -> Any:
    """A sink is one more logit with a probability of its own and no value: its dS is P (0 - delta),
    in every row that sees a key.
    """
    p = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse))
    return -(p * delta).sum(axis=(0, 2)).astype(sinks.dtype)


def operands_of(plan: Plan, inputs: AttentionInputs, d_out: Any, stats: Any) -> Refs:
    """What a kernel over key tiles reads, but for dq. Copied where `operands` says it must be; bias
    and mask_array always, to lie with keys down, since Mosaic loads no transposed tile.
    """
    problem, config = plan.problem, plan.config
    rows, keys = plan.padded_rows, plan.padded_keys
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in problem.arrays}
    fields["lse"], fields["delta"] = stats
    powers: dict[str, Any] = {}
    if problem.dtype == "float32":
        powers = bwd_float32.powers_of(problem, inputs, d_out, stats[1])
        fields["units"] = bwd_float32.units(plan, powers)
        by = wgmma.inverse(jnp.repeat(powers["ds"], problem.group, axis=1))
        fields["delta"] = stats[1] * by[:, :, None]
    for name, x, kind, width in (
        ("q", inputs.q, plan.scores, plan.k_width),
        ("k", inputs.k, plan.scores, plan.k_width),
        ("v", inputs.v, plan.values, plan.v_width),
        ("do", d_out, plan.values, plan.v_width),
    ):
        fields[name] = tma_operands.stored(x, kind, width, powers.get(name))
    given = tma_operands.over_scores(inputs, rows, keys)
    fields |= {name: array.swapaxes(2, 3) for name, array in given.items()}
    fields |= tma_operands.segment_ids(inputs, rows, keys)
    fields["dealt"] = jnp.asarray(dealt(plan))
    if plan.has("q_segment_ids"):
        ids = fields["kv_segment_ids"], fields["q_segment_ids"]
        fields["segment_spans"] = attention_plan.segment_spans(*ids, plan.keys, config.block_q)
    for name, lengths, block in (
        ("q", "q_lengths", config.block_q),
        ("do", "q_lengths", config.block_q),
        ("k", "kv_lengths", plan.keys),
        ("v", "kv_lengths", plan.keys),
    ):
        if plan.has(lengths):
            fields[f"{name}_edge"] = tma_operands.edge(
                fields[name], getattr(inputs, lengths), block
            )
    return Refs(**{name: fields.get(name) for name in Refs._fields})


def after(refs: Refs, result: Any) -> Refs:
    """Operands that are there when another kernel's result is: each kernel fills the GPU, and the
    interpreter simulates one at a time.
    """
    return refs._replace(delta=lax.optimization_barrier((refs.delta, result))[0])


def load_all(plan: Plan, refs: Refs, smem: Any, cta: Any, keys: Any) -> None:
    """A loading warpgroup: query tiles of every tile of work, in order, and after the first of them
    its keys, by keys(n, item): their place is still taken when the rings have room again.
    """
    group, stages = plan.problem.group, plan.config.stages

    def one_item(n, carry):
        count, code = carry
        following = refs.dealt[cta, n + 2]
        item = item_of(plan, refs, code)

        def step(i, count):
            g = lax.div(i, item.steps)
            head, t = item.kv_head * group + g, item.tile(i - g * item.steps)
            slot = ring(count, stages)
            for name, to, numbers, ready, free in (
                ("q", smem.q, smem.lse, smem.q_ready, smem.q_free),
                ("do", smem.do, smem.delta, smem.do_ready, smem.do_free),
            ):
                wait = functools.partial(plgpu.barrier_wait, free.at[slot])
                pl.when(count >= stages)(wait)
                place = (head, t, to.at[slot], numbers.at[slot], ready.at[slot])
                load_queries(plan, refs, item, name, place)
            pl.when(i == 0)(functools.partial(keys, n, item))
            return count + 1

        count = lax.fori_loop(0, group * item.steps, step, count)
        pl.when(item.steps == 0)(functools.partial(keys, n, item))
        return count, following

    lax.fori_loop(0, refs.dealt[cta, 0], one_item, (jnp.int32(0), refs.dealt[cta, 1]))


def load_queries(plan: Plan, refs: Refs, item: Item, name: str, place: Any) -> None:
    """One query tile of q or dO, and its numbers: place is (head, t, to, numbers to, ready)."""
    head, t, to, numbers, ready = place
    block = plan.config.block_q
    ref, row = getattr(refs, name), getattr(refs, {"q": "lse", "do": "delta"}[name])
    some = pl.ds(t * block, numbers.shape[0])
    plgpu.copy_gmem_to_smem(row.at[item.batch, head, some], numbers, ready)

    def copy(ref, first):
        columns = mosaic.columns(ref, 0, to.shape[-1], head)
        plgpu.copy_gmem_to_smem(ref.at[item.batch, pl.ds(first, block), head, columns], to, ready)

    if item.q_len is None:
        return copy(ref, t * block)
    cut = (t + 1) * block > item.q_len  # only the last tile may be
    pl.when(cut)(lambda: copy(getattr(refs, f"{name}_edge"), 0))
    return pl.when(jnp.logical_not(cut))(lambda: copy(ref, t * block))


def load_keys(plan: Plan, refs: Refs, item: Item, name: str, place: Any) -> None:
    """The keys of k or v from `first` on within a tile of work: place is (first, to, ready)."""
    first, to, ready = place

    def copy(ref, start):
        rows = pl.ds(start + first, to.shape[0])
        columns = mosaic.columns(ref, 0, to.shape[-1], item.kv_head)
        plgpu.copy_gmem_to_smem(ref.at[item.batch, rows, item.kv_head, columns], to, ready)

    if not plan.has("kv_lengths"):
        return copy(getattr(refs, name), item.key)
    cut = item.key + plan.keys > item.kv_len
    pl.when(cut)(lambda: copy(getattr(refs, f"{name}_edge"), 0))
    return pl.when(jnp.logical_not(cut))(lambda: copy(getattr(refs, name), item.key))
