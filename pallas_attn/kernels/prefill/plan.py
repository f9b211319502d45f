"""What follows from a prefill problem and a configuration before the kernel runs: which rows a q
tile holds, how many work units there are, and how many splits the keys of a q tile have.

A warpgroup has 64 rows of a q tile. They are pairs (query head, query row): `tile_heads` query
heads of one kv head, each with `head_rows` consecutive query rows, so that all of them share one
pass over K and V. Row r is query head r // head_rows and query row r % head_rows. `head_rows` is a
multiple of 8, since TMA writes 8 rows of a swizzled tile at a time: groups of 5, 6 and 7 heads
leave rows idle.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import AttentionProblem, DecodeProblem
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention.plan import ROWS, Span
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.gather import gather

BLOCKS = gpu_specs.multiprocessors(gpu_specs.HOPPER)
MOST_DECODERS = 2  # warpgroups of a block that decode


def over_contiguous_keys(problem: DecodeProblem) -> AttentionProblem:
    """The same attention over contiguous keys."""
    return AttentionProblem(
        op="flash_forward",
        gpu=problem.gpu,
        dtype=problem.dtype,
        batch=problem.sequences,
        q_len=problem.q_len if problem.tokens is None else problem.tokens,
        kv_len=max(problem.capacities),
        q_heads=problem.q_heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        mask=problem.mask,
        scale=problem.scale,
        softcap=problem.softcap,
        arrays=("q_offset", "kv_lengths", *(("sinks",) if problem.sinks else ())),
        mask_program=problem.mask_program,
    )


class Own(NamedTuple):
    """How some blocks of a launch decode."""

    plan: scheduler.Plan
    warpgroups: int  # of a block, each of which does what a block of `decode.sm90` does

    @property
    def most_blocks(self) -> int:
        return max(self.plan.grid // self.warpgroups, 1)


@dataclasses.dataclass(frozen=True)
class Plan(attention_plan.Plan):
    """`problem` is that of `over_contiguous_keys`, whose mainloop computes it."""

    cache: DecodeProblem | None = None  # None: the keys are contiguous

    @classmethod
    def of(cls, problem: DecodeProblem, config: Any) -> "Plan":
        return cls(over_contiguous_keys(problem), config, problem)

    @functools.cached_property
    def layout(self) -> cache_layout.Layout:
        if self.cache is not None:
            return cache_layout.layout_of(self.cache)
        problem = self.problem
        sizes = (problem.kv_len,), problem.kv_heads, None, problem.batch, problem.kv_len
        return cache_layout.Contiguous(*sizes)

    @property
    def tile_heads(self) -> int:
        """Query heads of a warpgroup's rows."""
        return min(self.problem.group, 8)

    @property
    def head_rows(self) -> int:
        """Query rows of each of them."""
        return ROWS // self.tile_heads // 8 * 8

    @property
    def head_chunks(self) -> int:
        """Warpgroup tiles that share query rows: one where a tile holds the whole head group."""
        return pl.cdiv(self.problem.group, self.tile_heads)

    @property
    def wg_tiles(self) -> int:
        """Warpgroup tiles of a kv head of a sequence."""
        return self.head_chunks * pl.cdiv(self.problem.q_len, self.head_rows)

    @property
    def q_tiles(self) -> int:
        """Of a kv head of a sequence: what a block works on at a time."""
        return pl.cdiv(self.wg_tiles, self.config.warpgroups)

    @property
    def packed(self) -> bool:
        return self.cache is not None and self.cache.packed

    @property
    def quantized(self) -> bool:
        return self.cache is not None and self.cache.quantized

    @property
    def producers(self) -> int:
        """Warpgroups that load K and V."""
        return self.config.producers if self.quantized else 1

    @property
    def merged(self) -> bool:
        """Whether the results are merged with others, and blocks share out kv tiles (`shares`)."""
        return self.cache is not None and self.cache.merged is not None

    @functools.cached_property
    def own(self) -> Own | None:
        """Of decoding the rows of the sequences' own in the same launch, or None."""
        if self.cache is None or self.cache.own is None:
            return None
        problem, room = self.cache.own, scheduler.SMEM_LIMIT - 8 * self.table_size
        for warpgroups in range(min(self.config.warpgroups, MOST_DECODERS), 0, -1):
            config = decode_sm90.Config.beside_others(problem, warpgroups, room)
            if config is not None:
                return Own(scheduler.Plan(problem, config), warpgroups)
        return None

    @property
    def fewest(self) -> int:
        """Packed rows of a sequence that this launch serves, at least."""
        return 1 if self.cache is None else self.cache.fewest

    def wg_tiles_of(self, count: Any, div: Any) -> Any:
        """`wg_tiles` of a sequence of `count` packed rows; `div` divides."""
        return div(count + (self.head_rows - 1), self.head_rows) * self.head_chunks

    def q_tiles_of(self, count: Any, div: Any) -> Any:
        """`q_tiles` of it."""
        warpgroups = self.config.warpgroups
        return div(self.wg_tiles_of(count, div) + (warpgroups - 1), warpgroups)

    @property
    def lane_sequences(self) -> int:
        """Sequences that each lane of a warp counts."""
        return pl.cdiv(self.problem.batch, 32)

    @property
    def table_size(self) -> int:
        """Entries of the table of running sums, the first of which is 0."""
        return 32 * self.lane_sequences + 1

    @property
    def partial_tiles(self) -> tuple[int, int]:
        """What partials are stored by, and how many warpgroup tiles each has: sequence and kv head;
        of packed rows the kv head, with the q tiles of all sequences, of which there are never more
        than if each had one beside those of all rows.
        """
        if self.merged:  # no q tile and no block has one alone
            return 1, (self.most_q_tiles + self.grid) * self.config.warpgroups
        if not self.packed:
            return self.problem.batch * self.problem.kv_heads, self.padded_wg_tiles
        most = (self.wg_tiles // self.config.warpgroups) + 1
        chunks = self.problem.batch * (self.head_chunks // self.config.warpgroups + 2)
        return self.problem.kv_heads, (most + chunks) * self.config.warpgroups

    @property
    def most_q_tiles(self) -> int:
        """Of packed rows: of all sequences and kv heads, where each has as many idle rows as can
        be.
        """
        block, chunks = self.head_rows * self.config.warpgroups, self.head_chunks
        idle = (self.head_rows - 1) * chunks + block - self.head_rows
        rows = self.problem.q_len * chunks + self.problem.batch * idle
        return self.problem.kv_heads * (rows // block)

    @property
    def padded_wg_tiles(self) -> int:
        return self.q_tiles * self.config.warpgroups

    @property
    def rows(self) -> int:
        """Of the result: query rows of all heads."""
        sequences = 1 if self.packed else self.problem.batch
        return sequences * self.problem.q_len * self.problem.q_heads

    @property
    def units(self) -> int:
        """Work units: a q tile and one split of its keys. Not of packed rows, whose number is known
        at run time.
        """
        problem = self.problem
        return problem.batch * problem.kv_heads * self.q_tiles * self.config.splits

    @property
    def together(self) -> int:
        """Kv heads whose q tiles are taken in turn: q tiles see unequally many keys, and where a
        block has few of them it should not have long ones only. Their keys should fit in L2. Where
        rows are packed they are of one sequence.
        """
        if self.merged:
            return 1
        heads = self.problem.kv_heads * (1 if self.packed else self.problem.batch)
        return math.gcd(self.config.together, heads)

    @property
    def grid(self) -> int:
        return self.config.grid if self.packed else min(self.config.grid, self.units)

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """Lengths are known at run time only: all sections occur that the mask has."""
        low = {"low"} if self.problem.mask.bounds_left else set()
        return frozenset({"empty", "first_masked", "high"} | low)

    @property
    def first_may_be_whole(self) -> bool:
        """A unit begins with the newest keys, of which few rows see all."""
        return False

    def unmasked(self, span: Span, begin: Any) -> Span:
        """The span of a unit, in which tiles that a function may hide keys of are no full ones:
        all; or those of the newest rows, from `begin` on, where it is a tree of drafts.
        """
        if not self.is_listed:
            return span
        if self.cache is None or not self.cache.tree:
            return span._replace(full_lo=span.lo, full_hi=span.lo)
        before = lax.div(jnp.maximum(begin, 0), jnp.int32(self.config.block_kv))
        return span._replace(full_hi=jnp.minimum(span.full_hi, before))

    def words(self, refs: Any, place: Any, width: int) -> tuple[Any, ...] | None:
        """The bits of a tree of drafts: a few loads a row, and for a logit what a bound costs."""
        if self.cache is None or not self.cache.tree:
            return None
        assert self.problem.mask_program is not None
        ((*_, drafts, words), _), column = self.problem.mask_program.arrays[0], place.key
        column = column - place.q_offset  # of the tile's first key, from the first draft on
        query = refs.starts[place.batch] + place.query if self.packed else place.query
        row = jnp.minimum(self.row_positions(ROWS, query), drafts - 1)
        line = (row if self.packed else row + place.batch * drafts) * words
        first, shift = lax.shift_right_arithmetic(column, jnp.int32(5)) + 1, column & 31

        def word(n):
            return gather(refs.mask_aux[0], line + jnp.clip(first + n, 0, words - 1), mosaic.ROW)

        def same(x):  # in all rows
            return mosaic.filled((ROWS,), x, jnp.int32)

        found = [word(n) for n in range(width // 32 + 1)]
        return tuple(
            lax.shift_right_logical(low, same(shift))
            | lax.shift_left(lax.shift_left(high, same(1)), same(31 - shift))
            for low, high in itertools.pairwise(found)
        )

    def placed(self, place: Any) -> Any:
        """With the head and the position of each row, or None for what the function does not ask:
        what nobody uses sends Mosaic on a search for its layout.
        """
        head: Any = None
        position: Any = None
        if self.problem.uses_position:
            position = self.row_positions(ROWS, place.q_offset + place.query)
        if self.problem.uses_head:
            rows = mosaic.filled((ROWS,), self.head_rows, jnp.int32)
            head = lax.div(mosaic.positions((ROWS,), 0, 0), rows) + place.head
        return place._replace(rows=(head, position))

    @property
    def page_rows(self) -> int:
        """Rows of a kv tile that lie together in memory."""
        return self.layout.contiguous_rows(self.config.block_kv)

    @property
    def copies(self) -> int:
        """Copies that bring a tile of K, and as many for V."""
        return self.config.block_kv // self.page_rows

    def in_rows(self, lse: Any) -> Any:
        """[M, K, warpgroup tiles, 64] -> [M, N, t]."""
        (m, kv_heads), heads, rows = lse.shape[:2], self.tile_heads, self.head_rows
        lse = lse[:, :, : self.wg_tiles, : heads * rows]
        lse = lse.reshape(m, kv_heads, -1, self.head_chunks, heads, rows)
        lse = lse.transpose(0, 1, 3, 4, 2, 5).reshape(m, kv_heads, self.head_chunks * heads, -1)
        lse = lse[:, :, : self.problem.group, : self.problem.q_len]
        return lse.reshape(m, -1, self.problem.q_len)

    def row_positions(self, rows: int, first: Any) -> Any:
        within = mosaic.filled((rows,), self.head_rows - 1, jnp.int32)  # of a power of 2
        return (mosaic.positions((rows,), 0, 0) & within) + first
