"""Which warp of a block has which query rows and which keys of a tile, and where these lie."""

from typing import Any, NamedTuple

from pallas_attn.kernels.lang import threads


class Heads(NamedTuple):
    """kv heads side by side in a tile: `rows` keys of the first, as many of the next, and so on;
    then the next keys.
    """

    number: int
    rows: int


class Split:
    """Who takes what of a tile of `keys` keys.

    `row_blocks` (1, 2 or 4) groups of 16 query rows go to as many warps; what warps are left over
    share out the keys. Column c of a warp's scores is key `first_key(warp) + c` of the tile.

    `folded`: of 8 query rows or less. Where rows 8 to 15 of scores would be, lie those of rows 0 to
    7 and every second group of 8 keys: half as many numbers for a thread to work on.
    `integers`: how keys of 8 bits are made 16 (`dequant.by_integers`). `heads`: each group of query
    rows is that of a kv head, of so many side by side.
    """

    def __init__(
        self,
        row_blocks: int,
        keys: int,
        folded: bool = False,
        integers: bool = False,
        heads: Heads | None = None,
    ):
        self.row_blocks, self.keys, self.folded = row_blocks, keys, folded
        self.integers, self.heads = integers, heads
        self.groups = threads.WARPS // row_blocks  # of keys
        self.columns = keys // self.groups
        self.width = self.columns // 2 if folded else self.columns

    @property
    def lines(self) -> int:
        """Rows of the tile."""
        return self.keys * (1 if self.heads is None else self.heads.number)

    def row_block(self, warp: Any) -> Any:
        return warp % self.row_blocks

    def first_key(self, warp: Any) -> Any:
        """The key of a warp's column 0."""
        return warp // self.row_blocks * self.columns

    def first(self, warp: Any) -> Any:
        """Where that lies: a row of the tile."""
        key = self.first_key(warp)
        if self.heads is None:
            return key
        heads, rows = self.heads
        return key // rows * (heads * rows) + self.row_block(warp) * rows + key % rows

    def line(self, column: Any) -> Any:
        """How many rows behind that a column's key lies."""
        if self.heads is None or self.columns <= self.heads.rows:
            return column
        heads, rows = self.heads
        return column // rows * (heads * rows) + column % rows

    def key(self, row: Any, column: Any) -> Any:
        """Of the warp's: which one a score of its row and column is for."""
        return column // 8 * 16 + row // 8 * 8 + column % 8 if self.folded else column

    def query(self, row: Any) -> Any:
        """Of the warp's 16: which one a row of scores is for."""
        return row % 8 if self.folded else row
