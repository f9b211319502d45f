"""Functions of positions over a cache: masks and scores of a user's, or a tree of drafts."""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn._functions.program import Program
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, Span
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.gather import gather
from pallas_attn.kernels.lang.types import Index, RegisterTile


def without_full_tiles(span: Span, drafts: Index | None, block_kv: int) -> Span:
    """The span of a unit, in which no tile is full whose keys the function may hide: in a tree of
    drafts, which begin at position `drafts`, those from there on; else all.
    """
    if drafts is None:
        return span._replace(full_lo=span.lo, full_hi=span.lo)
    before = lax.div(jnp.maximum(drafts, 0), jnp.int32(block_kv))
    return span._replace(full_hi=jnp.minimum(span.full_hi, before))


class RowMapping(NamedTuple):
    """The rows of a tile as `logits` and `functions` ask for them."""

    problem: AttentionProblem
    tiles: Any  # plan.RowTiles
    packed: bool
    tree: bool

    def row_positions(self, rows: int, first: Index) -> RegisterTile:
        return self.tiles.row_positions(rows, first)

    def words(self, refs: Any, tile: LogitTile, width: int) -> tuple[RegisterTile, ...] | None:
        """int32[64] for each 32 columns of a tile of logits: the bits of the keys that a row sees
        in a tree of drafts, which cost a few loads a row, and as much as a bound for a logit. None:
        the function is evaluated.
        """
        if not self.tree:
            return None
        assert self.problem.mask_program is not None
        ((*_, drafts, words), _), column = self.problem.mask_program.arrays[0], tile.key
        column = column - tile.q_offset  # the tile's first key, counted from the first draft
        query = refs.starts[tile.batch] + tile.query if self.packed else tile.query
        row = jnp.minimum(self.row_positions(ROWS, query), drafts - 1)
        line = (row if self.packed else row + tile.batch * drafts) * words
        first, shift = lax.shift_right_arithmetic(column, jnp.int32(5)) + 1, column & 31

        def word(n):
            index = line + jnp.clip(first + n, 0, words - 1)
            return gather(refs.mask_aux[0], index, mosaic.ROW)

        def in_all_rows(x):
            return mosaic.filled((ROWS,), x, jnp.int32)

        loaded = [word(n) for n in range(width // 32 + 1)]
        return tuple(
            lax.shift_right_logical(low, in_all_rows(shift))
            | lax.shift_left(lax.shift_left(high, in_all_rows(1)), in_all_rows(31 - shift))
            for low, high in itertools.pairwise(loaded)
        )

    def placed(self, tile: LogitTile, program: Program) -> LogitTile:
        """The tile with the head and the position of each row, if the function asks for them: what
        nobody uses sends Mosaic on a search for its layout.
        """
        head: Any = None
        position: Any = None
        if program.depends_on(program.inputs - 2):
            position = self.row_positions(ROWS, tile.q_offset + tile.query)
        if program.depends_on(program.inputs - 3):
            head = self.tiles.row_heads() + tile.head
        return tile._replace(rows=(head, position))
