"""What follows from a problem and a Config before a kernel runs: sizes, and which kv tiles query
rows need. Who sees whom is `Mask`'s to say; here it becomes tiles, in plain arithmetic on Python
numbers or on traced ones.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import AttentionProblem, bounds_of
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import linear_scores, softmax, tile_lists, tma_operands
from pallas_attn.kernels.attention.tile_lists import DYNAMIC
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import wgmma
from pallas_attn.masks import FULL, Mask

ROWS = 64  # of a warpgroup: what one wgmma takes
BLOCKS = gpu_specs.multiprocessors(gpu_specs.HOPPER)  # at a time, where Config does not say
L2_BYTES = 32 * 2**20  # of K and V of the heads of an L2 group: a part of L2
RANKED_L2_BYTES = 8 * 2**20  # the same where blocks at work at one time share no K and V


class Span(NamedTuple):
    """Kv tiles [lo, hi) that some row sees; [full_lo, full_hi) every row sees whole."""

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any

    def within(self, other: "Span") -> "Span":
        """The intersection of two spans."""
        return Span(
            jnp.maximum(self.lo, other.lo),
            jnp.maximum(self.full_lo, other.full_lo),
            jnp.minimum(self.full_hi, other.full_hi),
            jnp.minimum(self.hi, other.hi),
        )

    def sections(self) -> set[str]:
        """Of a span of Python numbers, some of `SECTIONS`; kv tiles are taken from the last on."""
        if self.hi <= self.lo:
            return {"empty"}
        first = self.hi - 1
        named = {
            "first_masked": not self.full_lo <= first < self.full_hi,
            "high": self.full_hi < first,
            "low": self.lo < self.full_lo,
        }
        return {name for name, there in named.items() if there}


# Of a span: it has no tile; its first tile, which is the one at the end, needs a mask; others after
# the full tiles do; and tiles before them.
SECTIONS = frozenset(("empty", "first_masked", "high", "low"))


def known_offsets(problem: AttentionProblem) -> set[int]:
    """Every offset that rows may have; none where an array decides which keys rows see."""
    if DYNAMIC & set(problem.arrays) == {"q_offset"}:
        return {offset for each in problem.offsets for offset in each}
    return set() if DYNAMIC & set(problem.arrays) else {problem.q_offset}


def rows_span(mask: Mask, position: Any, rows: Any, kv_len: Any, block: int) -> Span:
    """The kv tiles of `block` keys that `rows` queries from a position on need."""
    lo, hi = mask.kv_range(position, position + rows, kv_len)
    full_lo, full_hi = mask.kv_full_range(position, position + rows, kv_len)
    return Span(
        lo=_floor(lo, block),
        full_lo=_floor(full_lo + block - 1, block),
        full_hi=_floor(_at_least(full_hi, 0), block),
        hi=_floor(_at_least(hi, 0) + block - 1, block),
    )


def segment_spans(q_ids: Any, kv_ids: Any, rows: int, block: int, seen: Any = None) -> Any:
    """int32[B, 4, tiles of `rows` queries]: a Span's fields, by segment ids [B, n] in whole tiles,
    and by `seen`: which pairs of tiles the mask leaves, and leaves whole (None: all).

    A tile's ids lie between its least and its greatest: a kv tile is needed where the two intervals
    intersect, and needs no mask where both tiles hold a single id, the same. Exact for packed
    documents, and safe for any ids: where the full tiles are not contiguous, none counts as full.
    In as few steps as XLA needs kernels for, since each costs as much as a work tile: one over the
    ids, one over pairs of tiles, one to finish.
    """
    q_least, q_most, kv_least, kv_most = _extremes(q_ids, kv_ids, rows, block)
    q_least, q_most = q_least[:, :, None], q_most[:, :, None]
    kv_least, kv_most = kv_least[:, None, :], kv_most[:, None, :]
    common = (q_least <= kv_most) & (kv_least <= q_most)
    same = (q_least == q_most) & (kv_least == kv_most) & (q_least == kv_least)
    if seen is not None:
        common, same = common & seen[0], same & seen[1]
    begins = same & ~jnp.pad(same[..., :-1], ((0, 0), (0, 0), (1, 0)))
    count = common.shape[-1]
    at = jnp.arange(count, dtype=jnp.int32)[None, None]
    found = jnp.stack(
        [  # the least of each is what is asked for
            jnp.where(common, at, count),
            jnp.where(same, at, count),
            jnp.where(begins, -at, 1),
            jnp.where(same, -1 - at, 0),
            jnp.where(common, -1 - at, 0),
        ]
    ).min(axis=-1)
    lo, full_lo, last_begin, full_hi, hi = found[0], found[1], -found[2], -found[3], -found[4]
    one_run = last_begin == full_lo
    fields = (jnp.minimum(lo, hi), full_lo, jnp.where(one_run, full_hi, full_lo), hi)
    return jnp.stack(fields, axis=1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A problem and a config, and what follows from them before anything runs."""

    problem: AttentionProblem
    config: Any  # the kernel's Config
    _: dataclasses.KW_ONLY
    takes_offsets: bool = False  # whether the kernel's softmax adds them: see `linear_scores`
    joins_heads: bool = False  # whether it knows `last_heads`
    knows_claims: bool = False  # whether it knows `claims`

    @property
    def tile_rows(self) -> int:
        return ROWS * self.config.warpgroups

    @property
    def q_tiles(self) -> int:
        return pl.cdiv(self.problem.q_len, self.tile_rows)

    @property
    def tile_sizes(self) -> tuple[int, int]:
        """Rows of a q tile and of a kv tile."""
        return self.tile_rows, self.config.block_kv

    @property
    def span_rows(self) -> int:
        """Rows that share one span of kv tiles."""
        return ROWS

    @property
    def padded_rows(self) -> int:
        return self.q_tiles * self.tile_rows

    @property
    def idle_rows(self) -> bool:
        """Whether some span is of rows past T only."""
        return self.padded_rows - self.problem.q_len >= self.span_rows

    @property
    def heads(self) -> int:
        return self.problem.batch * self.problem.q_heads

    @property
    def last_warpgroups(self) -> int:
        """Warpgroups that have rows in a head's last work tile."""
        rows = self.problem.q_len - (self.q_tiles - 1) * self.tile_rows
        return pl.cdiv(rows, ROWS)

    @property
    def last_heads(self) -> int:
        """Heads of a group whose last rows are one work tile: as many as it has room for, since
        all see the same kv tiles, and a step takes little less time where warpgroups have no rows.
        """
        problem, fit = self.problem, self.config.warpgroups // self.last_warpgroups
        if not self.joins_heads or self.is_listed or self.has("q_segment_ids"):
            return 1
        return pl.cdiv(problem.group, pl.cdiv(problem.group, fit))

    @property
    def work_tiles(self) -> int:
        """Of all heads, as `tile_scheduler.schedule` deals them."""
        kv_heads = self.problem.batch * self.problem.kv_heads
        last = kv_heads * pl.cdiv(self.problem.group, self.last_heads)
        return self.heads * (self.q_tiles - 1) + last

    @property
    def code_bits(self) -> int:
        """Bits of a code in the schedule that say which rows; those above say which head."""
        return (self.q_tiles - 1).bit_length()

    @property
    def l2_heads(self) -> int:
        """Heads of an L2 group, whose work tiles are taken together. Where all tiles cost the same,
        as many as fill the blocks once: those read the same keys at the same time. Else as many as
        keep their K and V in L2, twice as many where rows see a part of them, in groups of one
        size: a short last one would begin with long tiles again. Work tiles in order of rank
        (segments) share no K and V with their neighbours, so there L2 holds fewer heads.

        K and V that come from L2 save energy too, and an H200 at its power limit then runs at a
        higher clock.
        """
        problem, config = self.problem, self.config
        row = problem.head_dim * self.scores.bytes + problem.v_head_dim * self.values.bytes
        ranked = self.is_listed and self.static_lists is None
        if self.has("q_segment_ids") or ranked:
            fit = heads_in(RANKED_L2_BYTES, problem, row)
        elif config.l2_heads:
            return min(config.l2_heads, self.heads)
        elif not (problem.mask.bounds_right or self.is_listed):
            fit = (config.grid or BLOCKS) // self.q_tiles
        else:
            in_part = problem.mask.bounds_left or self.is_listed
            fit = heads_in(L2_BYTES * (2 if in_part else 1), problem, row)
        groups = pl.cdiv(self.heads, max(fit, problem.group))
        return pl.cdiv(self.heads, groups)

    @property
    def grid(self) -> int:
        return min(self.config.grid or self.work_tiles, self.work_tiles)

    @property
    def never_empty(self) -> bool:
        """Whether rows without a key take one kv tile all the same, which is masked whole: a branch
        around the mainloop would cost every work tile a hundred moves of registers.
        """
        others = set(self.problem.arrays) - {"q_offset", "device"}
        return others == {"q_segment_ids", "kv_segment_ids"}

    @property
    def claims(self) -> bool:
        """Whether blocks claim their work tiles one by one (see `flash_fwd.claims`): where each is
        known to take a kv tile.
        """
        if not (self.knows_claims and self.config.claims):
            return False
        return not self.is_listed and (self.never_empty or "empty" not in self.sections)

    @property
    def first_ranked_head(self) -> int:
        """Where there are segments, the head from which on work tiles go by rank."""
        return self.heads - self.problem.group if self.claims else 0

    @property
    def fetches(self) -> bool:
        """Whether the kernel fetches K and V of other devices."""
        return self.problem.fetches > 1

    @property
    def natural(self) -> bool:
        """Whether a backward subtracts the lse in natural units: two numbers multiplied by log2(e)
        first would each lose a rounding of their own size, half of what float32 loses in all.
        """
        return self.problem.op == "flash_backward" and self.exact

    @property
    def scaled(self) -> bool:
        """Whether operands are multiples of powers of 2."""
        return self.problem.dtype == "float32" and not wgmma.is_unscaled(self.problem)

    @property
    def exact(self) -> bool:
        """Whether all products are to have float32's accuracy."""
        return wgmma.is_exact(self.problem)

    @property
    def unit(self) -> float | None:
        """What turns a raw score into log2 units; None where logits need more than a factor."""
        adds = self.adds_to_logits and not self.linear_score
        if self.problem.softcap is not None or adds or self.natural:
            return None
        return softmax.unit_of(self.problem.scale)

    @property
    def adds_to_logits(self) -> bool:
        """Whether logits are anything but a monotone function of scores."""
        return self.has("bias") or self.problem.score_program is not None

    @functools.cached_property
    def linear_score(self) -> bool:
        """Whether the score function is taken as slopes and offsets of rows."""
        problem = self.problem
        if problem.score_program is None or not self.takes_offsets:
            return False
        others = problem.softcap is not None or self.has("bias") or problem.dtype == "float32"
        fits = not others and softmax.unit_of(problem.scale) is not None
        return fits and linear_scores.is_linear(problem.score_program)

    @property
    def is_listed(self) -> bool:
        """Whether kv tiles are numbers in a list: see `tile_lists.tiles`."""
        return self.problem.mask_program is not None

    @property
    def row_blocks(self) -> int:
        """Blocks of a work tile's rows, each of which has a span of the listed tiles."""
        return self.tile_rows // self.span_rows

    @property
    def list_sizes(self) -> tile_lists.Sizes:
        """The sizes of `tile_lists.tiles`."""
        return *self.tile_sizes, False, self.row_blocks

    @property
    def static_lists(self) -> np.ndarray | None:
        """The lists of tiles, where they are known before anything runs."""
        return tile_lists.static(self.problem, *self.list_sizes)

    @functools.cached_property
    def lists_are_runs(self) -> bool:
        """Whether the tiles of each list are known to follow each other, as those of a band do."""
        found = self.static_lists
        return found is not None and tile_lists.are_runs(found, self.list_sizes[-1])

    @property
    def first_may_be_whole(self) -> bool:
        """Whether the listed tile that a consumer begins with may need no mask: of a table of
        blocks, most tiles are whole.
        """
        program = self.problem.mask_program
        if program is None or self.static_lists is not None:
            return False
        return tile_lists.reads_pairs(program)

    @property
    def reads_ahead(self) -> bool:
        """Whether all tiles ask which they are and lists say it: each is read a step before."""
        return self.is_listed and self.adds_to_logits and not self.lists_are_runs

    @functools.cached_property
    def _sections_of_lists(self) -> frozenset[str]:
        """`sections` where kv tiles are listed."""
        found = self.static_lists
        if found is None:
            return SECTIONS - {"empty"}
        spans = tile_lists.spans(found, self.row_blocks).tolist()
        return frozenset(one for span in spans for one in Span(*span).sections())

    @property
    def ragged_keys(self) -> bool:
        """Whether the last kv tile may hold rows that are no keys."""
        return self.has("kv_lengths") or self.problem.kv_len % self.config.block_kv != 0

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """Which of `SECTIONS` occur among the spans of all rows."""
        if self.is_listed:
            return self._sections_of_lists
        offsets = known_offsets(self.problem)
        if not offsets:
            return SECTIONS
        mask, keys, rows = self.problem.mask, self.problem.kv_len, self.span_rows
        found: set[str] = set()
        for offset in offsets:
            for row in range(0, self.problem.q_len, rows):
                found |= self.span(mask, offset + row, rows, keys).sections()
            if self.idle_rows:
                found |= self.span(mask, offset + self.problem.q_len - 1, 1, keys).sections()
        return frozenset(found)

    @property
    def one_loop(self) -> bool:
        """Whether one loop goes over all kv tiles, with a branch for those that need a mask; not a
        loop each for those that do and those that do not. So where it is not known beforehand and
        tiles of both kinds come in any order. It is also half the code to compile.
        """
        return not self.is_listed and (self.has("q_segment_ids") or self.has("mask_array"))

    def span(self, mask: Mask, position: Any, rows: Any, kv_len: Any) -> Span:
        return rows_span(self.span_mask(mask), position, rows, kv_len, self.config.block_kv)

    def mask_of(self, refs: Any, batch: Any) -> Mask:
        """The mask of a batch row, with the bounds that arrive at run time."""
        bounds = {side: ref[batch] for side, ref in bounds_of(refs).items()}
        return self.problem.mask.filled(**bounds)

    def span_mask(self, mask: Mask) -> Mask:
        """By which spans are computed from a row's number. Where rows have positions of their own,
        what the mask leaves of a span is in `segment_spans`.
        """
        return FULL if self.has("q_positions") else mask

    def segment_spans(
        self, inputs: Any, fields: dict[str, Any], rows: int, block: int, of_keys: bool = False
    ) -> Any:
        """`segment_spans` of a kernel's operands: of tiles of `rows` queries the tiles of `block`
        keys; or (`of_keys`) of tiles of `rows` keys those of `block` queries.
        """
        ids = fields["q_segment_ids"], fields["kv_segment_ids"]
        if not of_keys:
            return segment_spans(*ids, rows, block, self._seen_tiles(inputs, fields, rows, block))
        seen = self._seen_tiles(inputs, fields, block, rows)
        turned = seen and tuple(x.swapaxes(1, 2) for x in seen)
        return segment_spans(*ids[::-1], rows, block, turned)

    def _seen_tiles(self, inputs: Any, fields: dict[str, Any], rows: int, block: int) -> Any:
        """Where rows have positions of their own: two bool[B, tiles of `rows` queries, tiles of
        `block` keys], whether some query of a tile may see some key, and whether all see all, by
        the mask and the least and greatest position of a tile.
        """
        if not self.has("q_positions"):
            return None
        keys = fields["kv_segment_ids"].shape[1]
        positions = fields["q_positions"]
        positions = positions.reshape(positions.shape[0], -1, rows)
        least, end = positions.min(axis=2)[..., None], positions.max(axis=2)[..., None] + 1
        first = jnp.arange(0, keys, block, dtype=jnp.int32)[None, None]
        bounds = {side: x[:, None, None] for side, x in bounds_of(inputs).items()}
        mask = self.problem.mask.filled(**bounds)
        lo, hi = mask.kv_range(least, end, keys)
        some = jnp.maximum(lo, first) < jnp.minimum(hi, first + block)
        lo, hi = mask.kv_full_range(least, end, keys)
        return some, (lo <= first) & (first + block <= hi)

    @property
    def scores(self) -> wgmma.Kind:
        """What q and k are stored as."""
        return wgmma.score_kind(self.problem)

    @property
    def values(self) -> wgmma.Kind:
        return wgmma.value_kind(self.problem)

    @property
    def k_width(self) -> int:
        """Columns of q and k in shared memory, of one term."""
        return tma_operands.width_in_smem(self.problem.head_dim, self.problem.dtype)

    @property
    def v_width(self) -> int:
        return tma_operands.width_in_smem(self.problem.v_head_dim, self.problem.dtype)

    @property
    def k_swizzle(self) -> int:
        if self.problem.dtype != "float32":
            return tma_operands.swizzle(self.problem.head_dim)
        return tma_operands.swizzle_of(self.k_width * self.scores.itemsize)

    @property
    def v_swizzle(self) -> int:
        """Matmuls take probabilities by whole swizzles."""
        if self.problem.dtype != "float32":
            return tma_operands.swizzle(self.problem.v_head_dim)
        rows = self.config.block_kv * self.values.itemsize
        return min(
            tma_operands.swizzle_of(self.v_width * self.values.itemsize),
            tma_operands.swizzle_of(rows),
        )

    def has(self, name: str) -> bool:
        return name in self.problem.arrays

    def placed(self, place: Any) -> Any:
        """A `score_mod.Place` as functions of positions are to have it."""
        return place

    def words(self, refs: Any, place: Any, width: int) -> tuple[Any, ...] | None:
        """What the mask function shows of a tile of that width, where it is known as bits: for each
        32 columns int32[64], one a row. None: it is to be computed.
        """
        del refs, place, width
        return None

    def row_positions(self, rows: int, first: Any) -> Any:
        """The positions of a warpgroup's rows, the first of which is at position `first`."""
        return mosaic.positions((rows,), 0, first)


def kv_batch(problem: AttentionProblem, batch: Any) -> Any:
    """The batch row of k and v that one of q reads."""
    return batch if problem.share == 1 else lax.div(batch, jnp.int32(problem.share))


def kv_row(problem: AttentionProblem, block: int, position: Any) -> Any:
    """The row of k and v that has the first key of a kv tile of `block`, of which the position is
    given.
    """
    devices = problem.zigzag
    if devices == 1:
        return position
    size = problem.kv_len // (2 * devices)
    if size % block:
        raise ValueError(
            f"Config.block_kv must divide the {size} keys of a chunk where k and v lie in the "
            f"order zigzag, got {block}"
        )
    chunk = lax.div(position, jnp.int32(size))
    owner, which = owner_of(chunk, devices)
    return position + (2 * owner + which - chunk) * size


def heads_in(nbytes: int, problem: AttentionProblem, row_bytes: int) -> int:
    """Query heads whose K and V, of so many bytes a row, take `nbytes`; those of one kv head at
    least.
    """
    return max(nbytes // max(problem.kv_len * row_bytes, 1), 1) * problem.group


def owner_of(chunk: Any, devices: int) -> tuple[Any, Any]:
    """Which device has a chunk in the order zigzag, and as which of its own (`context.owner`, of
    NumPy's numbers or traced ones).
    """
    late = chunk >= devices
    where: Any = np.where if isinstance(chunk, np.ndarray) else jnp.where
    return where(late, 2 * devices - 1 - chunk, chunk), where(late, 1, 0)


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the forward kernels, and so the backward ones, cannot take a problem, or None."""
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        return Limit(
            f"it takes bfloat16, float16 and float32, not {problem.dtype}",
            "cast q, k and v to one of them",
        )
    if (refused := tma_operands.dims_limit(problem)) is not None:
        return refused
    if problem.batch * problem.q_heads * (problem.q_len + 256) >= 2**31:
        return Limit("it counts query rows of all heads in 32 bits", "split the batch")
    programs = filter(None, (problem.mask_program, problem.score_program))
    read = [shape for program in programs for shape, _ in program.arrays]
    if any(math.prod(shape) >= 2**31 for shape in read):
        return Limit(
            "it counts numbers of an array that a function reads in 32 bits",
            "give each batch row or head a call of its own, or compute more of it in the function",
        )
    return None


def has_no_scores(problem: AttentionProblem) -> bool:
    """Whether there is nothing to launch."""
    return 0 in (problem.batch, problem.q_len, problem.kv_len, problem.q_heads)


def of_no_scores(problem: AttentionProblem) -> tuple[Any, Any]:
    """out and lse of rows that see no key."""
    heads, rows = problem.q_heads, problem.q_len
    out = jnp.zeros((problem.batch, rows, heads, problem.v_head_dim), problem.dtype)
    return out, jnp.full((problem.batch, heads, rows), -jnp.inf, jnp.float32)


class Context(NamedTuple):
    """What every function of a kernel is given, as `ctx`."""

    plan: Any
    refs: Any  # global memory
    smem: Any = None  # shared memory


def _extremes(q_ids: Any, kv_ids: Any, rows: int, block: int) -> list[Any]:
    """Least and greatest id of each tile: of `rows` queries, then of `block` keys."""
    unit = math.gcd(rows, block)
    ids = jnp.concatenate([q_ids, kv_ids], axis=1)
    ids = ids.reshape(ids.shape[0], -1, unit)
    queries = q_ids.shape[1] // unit
    results = []
    for some, tile in ((slice(queries), rows), (slice(queries, None), block)):
        for reduce, pick in ((jnp.min, jnp.minimum), (jnp.max, jnp.maximum)):
            units = reduce(ids, axis=-1)[:, some]
            step = tile // unit
            results.append(functools.reduce(pick, [units[:, i::step] for i in range(step)]))
    return results


def _floor(n: Any, by: int) -> Any:
    return n // by if isinstance(n, int) else lax.div(n, jnp.int32(by))


def _at_least(n: Any, least: int) -> Any:
    return max(n, least) if isinstance(n, int) else jnp.maximum(n, least)
