"""Appends to try, and what every byte of both buffers must be afterwards: an item, a row, a head at
a time, in NumPy.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_attn._call.problem import AppendInputs, AppendProblem

# Starts that matter, for a cache of `capacity` rows: one of these each sequence, in turn.
STARTS = (
    lambda capacity: 0,
    lambda capacity: 1,
    lambda capacity: capacity - 1,
    lambda capacity: capacity,
    lambda capacity: capacity + 3,
    lambda capacity: capacity // 2,
    lambda capacity: -1,
    lambda capacity: 2**31 - 1,
    lambda capacity: -(2**31),
)


class Place(NamedTuple):
    """Destination of a new row."""

    index: tuple[int, ...]  # the row, among the new ones
    array: int  # number of the cache's array
    slab: tuple[int, ...]  # in the array: of a sequence, of a page, or ()
    row: int  # in the slab


@dataclasses.dataclass(frozen=True)
class Case:
    """One append. `v_head_dim` 0: K alone. `spread`: capacities differ by up to so many rows."""

    kind: str
    sequences: int = 3
    new_rows: int = 1
    kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int | None = None  # None: as head_dim
    dtype: str = "bfloat16"  # dtype of the caches
    new_dtype: str | None = None  # None: the same
    capacity: int = 12
    spread: int = 5
    page_size: int = 4
    layers: int | None = None
    layer: int = 1
    ragged: bool = False  # counts of rows differ: some are none, some more than there are
    packed: bool = False  # `new_rows` of all sequences, in any order, each with its position

    def __str__(self) -> str:
        default = {f.name: f.default for f in dataclasses.fields(self)}
        facts = {k: v for k, v in dataclasses.asdict(self).items() if v != default[k]}
        return "-".join(str(v) if k == "kind" else f"{k}{v}" for k, v in facts.items())

    @property
    def capacities(self) -> tuple[int, ...]:
        spread = self.spread if self.kind == "per_sequence" else 0
        return tuple(self.capacity + m % (spread + 1) for m in range(self.sequences))

    @property
    def pages(self) -> int:
        return self.sequences * (self.capacity // self.page_size) + 2

    @property
    def problem(self) -> AppendProblem:
        dims = (
            self.head_dim,
            self.head_dim if self.v_head_dim is None else self.v_head_dim or None,
        )
        paged = self.kind == "paged"
        return AppendProblem(
            gpu="sm90",
            kind=self.kind,
            dtype=self.new_dtype or self.dtype,
            cache_dtype=self.dtype,
            sequences=self.sequences,
            new_rows=self.new_rows,
            kv_heads=self.kv_heads,
            head_dim=dims[0],
            v_head_dim=dims[1],
            capacities=self.capacities,
            page_size=self.page_size if paged else None,
            pages=self.pages if paged else None,
            layers=self.layers,
            packed=self.packed,
        )

    def cache_shapes(self, dim: int) -> list[tuple[int, ...]]:
        lead = () if self.layers is None else (self.layers,)
        if self.kind == "per_sequence":
            return [(*lead, self.kv_heads, capacity, dim) for capacity in self.capacities]
        slabs, rows = self.sequences, self.capacity
        if self.kind == "paged":
            slabs, rows = self.pages, self.page_size
        return [(*lead, slabs, self.kv_heads, rows, dim)]

    def draw(self, rng: np.random.Generator) -> AppendInputs:
        """Random inputs, in NumPy; the caches hold random bits."""
        problem = self.problem
        sides = [(dim, self._caches(rng, dim), self._rows(rng, dim)) for dim in _dims(problem)]
        sides += [(None, None, None)] * (2 - len(sides))
        turn = rng.integers(len(STARTS))
        start = [STARTS[(turn + m) % len(STARTS)](c) for m, c in enumerate(self.capacities)]
        some = (0, 1, self.new_rows, self.new_rows - 1, -2, self.new_rows + 9)
        some = some if self.ragged else (self.new_rows,)
        new_lengths, table = np.resize(some, self.sequences).astype(np.int32), None
        if self.kind == "paged":
            width = self.capacity // self.page_size
            table = rng.permutation(self.pages)[: self.sequences * width].astype(np.int32)
            table[rng.random(table.size) < 0.15] = rng.choice([-1, self.pages, -(2**31), 2**31 - 1])
            table = table.reshape(self.sequences, width)
        layer = None if self.layers is None else np.int32(self.layer)
        (_, k_cache, k), (_, v_cache, v) = sides
        if self.packed:
            return AppendInputs(k_cache, v_cache, k, v, None, None, table, layer)._replace(
                **self._places(rng, np.asarray(start, np.int32))
            )
        end = (np.asarray(start, np.int64) + new_lengths).astype(np.int32)
        return AppendInputs(k_cache, v_cache, k, v, end, new_lengths, table, layer)

    def _places(self, rng: np.random.Generator, starts: np.ndarray) -> dict[str, np.ndarray]:
        """A sequence and a position for each row, no place twice: from these starts on, and some
        that do not exist.
        """
        owners = rng.integers(0, self.sequences, self.new_rows).astype(np.int32)
        nth = [(owners[:i] == owner).sum() for i, owner in enumerate(owners)]
        start = np.where(starts < 0, -1, np.minimum(starts, 2**30))[owners] + nth
        start = np.where((starts[owners] < 0) | (rng.random(self.new_rows) < 0.1), -(2**31), start)
        return {"owners": owners, "positions": start.astype(np.int32)}

    def _caches(self, rng: np.random.Generator, dim: int) -> Any:
        arrays = tuple(random_bits(rng, shape, self.dtype) for shape in self.cache_shapes(dim))
        return arrays if self.kind == "per_sequence" else arrays[0]

    def _rows(self, rng: np.random.Generator, dim: int) -> np.ndarray:
        shape = (self.sequences, self.new_rows, self.kv_heads, dim)[self.packed :]
        if self.new_dtype is None:
            return random_bits(rng, shape, self.dtype)
        return np.asarray(rng.standard_normal(shape, np.float32)).astype(jnp.dtype(self.new_dtype))

    def expected(self, inputs: AppendInputs) -> tuple[Any, Any]:
        """The caches afterwards: `inputs` untouched but for the rows that have a place."""
        return tuple(
            None if cache is None else self._expected(inputs, cache, new)
            for cache, new in ((inputs.k_cache, inputs.k), (inputs.v_cache, inputs.v))
        )

    def _expected(self, inputs: AppendInputs, cache: Any, new: np.ndarray) -> Any:
        separate = isinstance(cache, tuple)
        after = [array.copy() for array in (cache if separate else (cache,))]
        if self.packed:
            rows = zip(inputs.owners, inputs.positions.tolist(), strict=True)
            wanted = [((n,), m, at) for n, (m, at) in enumerate(rows)]
        else:
            end, counts = (x.astype(np.int64) for x in (inputs.end, inputs.new_lengths))
            start = np.where(end >= 0, end - counts, -1)
            wanted = rows_from(start, np.minimum(counts, self.new_rows))
        layer = 0 if self.layers is None else int(inputs.layer)
        if 0 <= layer < (self.layers or 1):
            places = self.places(wanted, inputs.page_table)
            write(after, places, np.asarray(jnp.asarray(new).astype(self.dtype)), inputs.layer)
        return tuple(after) if separate else after[0]

    def places(self, wanted: Iterable[Any], page_table: np.ndarray | None) -> list[Place]:
        """Destinations of the new rows that have one."""
        return places(self.kind, self.capacities, wanted, page_table, self.page_size, self.pages)


def rows_from(start: np.ndarray, counts: np.ndarray) -> list[Any]:
    """`wanted` of `places`: `counts` rows of each sequence from `start` on, if that exists."""
    ends = zip(start.tolist(), counts.tolist(), strict=True)
    return [((m, i), m, at + i) for m, (at, n) in enumerate(ends) if at >= 0 for i in range(n)]


def places(
    kind: str,
    capacities: Sequence[int],
    wanted: Iterable[Any],
    page_table: np.ndarray | None,
    page_size: int,
    pages: int,
) -> list[Place]:
    """Destinations of new rows (index, sequence, position), for those that have one."""
    existing = []
    for index, m, position in wanted:
        if not 0 <= position < capacities[m]:
            continue
        slot, row = divmod(int(position), page_size) if kind == "paged" else (0, int(position))
        page = int(page_table[m, slot]) if kind == "paged" else 0
        slab = {"per_sequence": (), "stacked": (m,), "paged": (page,)}[kind]
        if kind != "paged" or 0 <= page < pages:
            existing.append(Place(index, m if kind == "per_sequence" else 0, slab, row))
    return existing


def write(arrays: list[np.ndarray], places: list[Place], rows: np.ndarray, layer: Any) -> None:
    """`rows` to their places; `layer`: None where the arrays have no such axis."""
    lead = () if layer is None else (int(layer),)
    for place in places:
        arrays[place.array][(*lead, *place.slab)][:, place.row] = rows[place.index]


def _dims(problem: AppendProblem) -> list[int]:
    return [dim for dim in (problem.head_dim, problem.v_head_dim) if dim is not None]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = jnp.dtype(dtype)
    raw = rng.integers(0, 256, (int(np.prod(shape)) * dtype.itemsize,), np.uint8)
    return raw.view(dtype).reshape(shape)


def assert_same_bytes(got: Any, want: Any) -> None:
    """Every byte of every array, in one tree and the other."""
    import jax

    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wrong = np.argwhere(np.atleast_1d(_bytes(a) != _bytes(b)))
        assert not len(wrong), f"array {number}: {len(wrong)} bytes differ, first at {wrong[0]}"


def _bytes(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.reshape(*array.shape, 1).view(np.uint8)


def _every(*sizes: int, **fields: Any) -> list[Case]:
    return [Case(kind, *sizes, **fields) for kind in ("per_sequence", "stacked", "paged")]


# 16, 8, 4, 2 and 1 bytes a word; rows of more words than a chunk; K and V of different shapes.
_SHAPES = ((8, 128), (1, 1), (3, 5), (2, 20), (1, 6), (5, 72), (40, 256), (3, 8, 24), (2, 24, 7))

CASES: tuple[Case, ...] = (
    *(case for m in (1, 2, 31) for case in _every(sequences=m)),
    *(case for t in (2, 7) for m in (1, 3) for case in _every(sequences=m, new_rows=t)),
    *(case for t in (2, 7) for case in _every(new_rows=t, ragged=True, sequences=9)),
    *_every(ragged=True, sequences=9),
    *_every(new_rows=300, capacity=288, sequences=2, kv_heads=2, head_dim=16, page_size=16),
    *_every(new_rows=300, capacity=400, sequences=5, ragged=True, kv_heads=3, page_size=8),
    *(Case(kind, 3, 2, *shape) for shape in _SHAPES for kind in ("per_sequence", "paged")),
    *(
        case
        for dtype in ("float32", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
        for case in _every(dtype=dtype, new_rows=2)
    ),
    *(
        Case("per_sequence", dtype=dtype, new_dtype=new, new_rows=2)
        for dtype, new in (
            ("bfloat16", "float32"),
            ("float32", "bfloat16"),
            ("float8_e4m3fn", "bfloat16"),
            ("float8_e5m2", "float32"),
            ("float16", "float32"),
        )
    ),
    *(case for layer in (0, 2, 3, -1) for case in _every(layers=3, layer=layer, new_rows=2)),
    *_every(v_head_dim=0, new_rows=2),
    *_every(9, 40, packed=True, layers=2),
    *_every(3, 7, 3, 5, packed=True),
    *_every(1, 1, packed=True),
    *_every(40, 70, 1, 16, packed=True, v_head_dim=24),
    *_every(sequences=8, spread=0),
    *_every(page_size=1, capacity=3, new_rows=2),
    *_every(page_size=12, capacity=12, new_rows=7),
)
