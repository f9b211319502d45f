"""What follows from a problem and a configuration before a forward kernel runs: sizes, and who does
what in which order.
"""

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_attn import _gpus
from pallas_attn._problem import AttentionProblem
from pallas_attn.kernels.attention import softmax, tile_range, tma_operands
from pallas_attn.kernels.attention.tile_range import Span
from pallas_attn.kernels.mma import wgmma

ROWS = 64  # of a warpgroup: what one wgmma takes
BLOCKS = _gpus.multiprocessors(_gpus.HOPPER)  # at a time, where Config does not say
TILE_OVERHEAD = 1.5  # of a tile of work, in steps of one key tile
SECTION_BYTES = 64 * 2**20  # of K and V of a section: about L2
RANK_SPREAD = 8.0  # what the first rank is taken to cost, above the last one's 1
RANKED_SECTION_BYTES = 8 * 2**20  # and where blocks that work side by side share none of it


@dataclasses.dataclass(frozen=True)
class Plan:
    """A problem and a config, and what follows from them before anything runs."""

    problem: AttentionProblem
    config: Any  # the kernel's Config

    @property
    def tile_rows(self) -> int:
        return ROWS * self.config.warpgroups

    @property
    def q_tiles(self) -> int:
        return pl.cdiv(self.problem.q_len, self.tile_rows)

    @property
    def span_rows(self) -> int:
        """Rows that have one span of key tiles."""
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
    def code_bits(self) -> int:
        """Of a tile's code in `dealt`: the low ones say which rows, those above which head."""
        return (self.q_tiles - 1).bit_length()

    @property
    def section(self) -> int:
        """Heads whose tiles of work are taken together. Where all tiles cost the same, as many as
        fill the blocks once: they walk down the same keys side by side. Else as many as keep their
        K and V in L2, in sections of one size: a short last one would begin with long tiles again.
        Tiles in order of rank lie in one document each, all of them different ones: 8 documents of
        1024 rows and 16 heads took 129 us in one section of 64 MiB, 97 us in four of 16.
        """
        problem, config = self.problem, self.config
        k_bytes = problem.head_dim * self.scores.bytes
        one = problem.kv_len * (k_bytes + problem.v_head_dim * self.values.bytes)
        if self.has("q_segment_ids"):
            fit = RANKED_SECTION_BYTES // one * problem.group
        elif config.section:
            return min(config.section, self.heads)
        elif problem.mask.right is None:
            fit = (config.ctas or BLOCKS) // self.q_tiles
        else:
            fit = SECTION_BYTES // one * problem.group
        sections = pl.cdiv(self.heads, max(fit, problem.group))
        return pl.cdiv(self.heads, sections)

    @property
    def ctas(self) -> int:
        work = self.heads * self.q_tiles
        return min(self.config.ctas or work, work)

    @property
    def natural(self) -> bool:
        """Whether a backward subtracts the lse in natural units: two numbers multiplied by log2(e)
        first would each lose a rounding of their own size, half of what float32 loses in all.
        """
        return self.problem.op == "flash_backward" and self.exact

    @property
    def scaled(self) -> bool:
        """Whether operands are multiples of powers of 2."""
        return self.problem.dtype == "float32" and not wgmma.is_plain(self.problem)

    @property
    def exact(self) -> bool:
        """Whether all that is multiplied owes float32's bits."""
        return wgmma.is_exact(self.problem)

    @property
    def unit(self) -> float | None:
        """What turns a raw score into log2 units; None where logits need more than a factor."""
        if self.problem.softcap is not None or self.has("bias") or self.natural:
            return None
        return softmax.unit_of(self.problem.scale)

    @property
    def ragged_keys(self) -> bool:
        """Whether the last key tile may hold rows that are no keys."""
        return self.has("kv_lengths") or self.problem.kv_len % self.config.block_kv != 0

    @functools.cached_property
    def parts(self) -> frozenset[str]:
        """Which parts of a warpgroup's key range occur: "empty", "first_masked", "high", "low"."""
        dynamic = {"q_offset", "q_lengths", "kv_lengths", "q_segment_ids", "mask_array"}
        if dynamic & set(self.problem.arrays):
            return tile_range.PARTS
        found: set[str] = set()
        rows = self.span_rows
        for row in range(0, self.problem.q_len, rows):
            found |= self.span(self.problem.q_offset + row, rows, self.problem.kv_len).parts()
        if self.idle_rows:
            last = self.problem.q_offset + self.problem.q_len - 1
            found |= self.span(last, 1, self.problem.kv_len).parts()
        return frozenset(found)

    @property
    def one_loop(self) -> bool:
        """Whether a branch in one loop over the key tiles decides where a mask is wanted, and not a
        loop each for those that want one and those that do not: where it is not known beforehand
        and tiles of both kinds may come in any order. Also half the code to compile.
        """
        return self.has("q_segment_ids") or self.has("mask_array")

    def span(self, position: Any, rows: Any, kv_len: Any) -> Span:
        return tile_range.of_rows(self.problem.mask, position, rows, kv_len, self.config.block_kv)

    @property
    def scores(self) -> wgmma.Kind:
        """What q and k are stored as."""
        return wgmma.of_scores(self.problem)

    @property
    def values(self) -> wgmma.Kind:
        return wgmma.of_values(self.problem)

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


@functools.lru_cache(maxsize=64)
def dealt(plan: Plan) -> np.ndarray:
    """Which tiles of work each block takes, in codes for `score_mod.tile_of`: by section, then by
    rows, then by head; see `tile_range.deal`. Lengths and offsets are not known here: as if there
    were none. Where there are segments a code's rows are a rank, which `ranked` turns into rows.
    """
    problem, q_tiles = plan.problem, np.arange(plan.q_tiles)
    if plan.has("q_segment_ids"):
        costs = 1 + RANK_SPREAD * (1 - q_tiles / plan.q_tiles)
    else:
        if problem.mask.right is not None:
            q_tiles = q_tiles[::-1]  # the last rows see most
        costs = np.full(plan.q_tiles, TILE_OVERHEAD)
        for tile in q_tiles:
            position = problem.q_offset + int(tile) * plan.tile_rows
            span = plan.span(position, plan.tile_rows, problem.kv_len)
            costs[tile] += max(span.hi - span.lo, 0)
    codes = []
    for first in range(0, plan.heads, plan.section):
        heads = np.arange(first, min(first + plan.section, plan.heads))
        codes.append((heads[None] << plan.code_bits) + q_tiles[:, None])
    order = np.concatenate([code.ravel() for code in codes])
    return tile_range.deal(order, costs[order & ((1 << plan.code_bits) - 1)], plan.ctas)


def mask_bounds(plan: Plan) -> np.ndarray:
    """int32[2, q_tiles]: a tile of work's first key tile and the one after its last: the mask."""
    position, rows = plan.problem.q_offset, plan.tile_rows
    found = [
        plan.span(position + tile * rows, rows, plan.problem.kv_len) for tile in range(plan.q_tiles)
    ]
    return np.array([[span.lo for span in found], [span.hi for span in found]], np.int32)


def ranked(plan: Plan, segment_spans: Any) -> Any:
    """`dealt` where there are segments: rank r of a batch row stands for its tile of work with the
    r-th most key tiles. Packed documents repeat, and dealt in order of rows a block met the same
    place of every document: 8 documents of 1024 rows took 1.77 times what 8 batch rows do.
    """
    problem = plan.problem
    table = jnp.asarray(dealt(plan))
    lo, hi = mask_bounds(plan)[:, None]
    # Units one by one, not a reduction, which would be a launch of its own.
    units = range(plan.tile_rows // plan.span_rows)
    firsts, lasts = ([segment_spans[:, i, n :: len(units)] for n in units] for i in (0, 3))
    begin = jnp.maximum(lo, functools.reduce(jnp.minimum, firsts))
    end = jnp.minimum(hi, functools.reduce(jnp.maximum, lasts))
    order = jnp.argsort(begin - end, axis=1).astype(jnp.int32)
    low_bits = (1 << plan.code_bits) - 1
    batch = (table >> plan.code_bits) // problem.q_heads
    codes = (table & ~low_bits) | order[batch, table & low_bits]
    return jnp.concatenate([table[:, :1], codes[:, 1:]], axis=1)
