"""Random programs over the three caches: sequences are emptied, forked and extended, rows written
into every layer, attention decoded, some of the newest rows kept; then the same with lengths, page
tables and layers that are out of range.

Two models in NumPy follow. One knows what rows each sequence has taken, and which pages
(`witness.PagedModel`); the other what every byte of every buffer must be after rows are written or
kept, and what decoding makes of those bytes.
"""

import dataclasses
import functools
import types
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from pallas_attn import PagedCache
from pallas_attn.masks import CAUSAL, FULL
from tests.support import append_cases, budget, fuzz, hard_data, witness
from tests.support.byte_rows import as_bytes, as_floats
from tests.support.decode_cases import ancestors, seen_in_tree, some_parents
from tests.support.fuzz import LEAST, MOST
from tests.support.fuzz_cache_cases import Case
from tests.support.fuzz_positions import ADDED, POSITIONS
from tests.support.quantized import quantized
from tests.support.subjects import Subject

SIDES = ("k", "v", "k_scale", "v_scale")


# ---- programs -----------------------------------------------------------------------------------


@jax.jit
def manage(cache: Any, emptied: Any, fork: Any, counts: Any) -> Any:
    """Changes between steps. `fork`: source, target, length; a target of -1 does nothing."""
    cache = cache.reset(emptied)
    if cache.kind == "paged":
        cache = cache.fork(*fork)
    return cache.extend(counts)


def keep(cache, counts, path=None, *, implementation):
    return cache.keep(counts, path, implementation=implementation)


forked = jax.jit(PagedCache.fork)


def work(cache, new, q=None, *, implementation, layer=None, extra=None, levels=0, **options):
    """Rows into every layer, once more into `extra`, which may be none of them, and attention of
    `q` to `layer`: what a model does in a step. `levels`: of prefixes that are read once.
    """
    for number in range(cache.layers or 1):
        rows = [x[number] for x in new]
        cache = pa.write_kv(cache, *rows, layer=number, implementation=implementation)
    if extra is not None:
        rows = [x[0] for x in new]
        cache = pa.write_kv(cache, *rows, layer=extra, implementation=implementation)
    if q is None:
        return cache
    at = {} if layer is None else {"layer": layer}
    options |= at | {"implementation": implementation}
    if levels:
        how = {"tokens": q.shape[0 if "starts" in options else 1], "starts": options.get("starts")}
        options["shared_prefixes"] = cache.shared_prefixes(**how, levels=levels)
    return cache, *pa.decode_attention_with_lse(q, cache, **options)


class Dense:
    """Model of a cache without pages, like `witness.PagedModel`."""

    def __init__(self, capacities: tuple[int, ...]):
        self.capacities = capacities
        self.rows: list[list] = [[] for _ in capacities]
        self.counts = [0] * len(capacities)

    def extend(self, rows: list[int]) -> None:
        self.counts = [n + more for n, more in zip(self.counts, rows, strict=True)]

    def write(self, tokens: list[list]) -> None:
        for m, new in enumerate(tokens):
            self.rows[m] += new[: max(self.capacities[m] - len(self.rows[m]), 0)]

    def free(self, m: int) -> None:
        self.rows[m], self.counts[m] = [], 0

    def overflowed(self, m: int) -> bool:
        return self.counts[m] > self.capacities[m]


# ---- model of the buffers ------------------------------------------------------------------------


@dataclasses.dataclass
class Held:
    """A cache in NumPy: every byte, and where rows lie."""

    case: Any  # a `Case`, or its kind and layers
    arrays: dict[str, list[np.ndarray]]
    lengths: np.ndarray
    new_lengths: np.ndarray
    table: np.ndarray | None
    capacities: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, case: Any, cache: Any) -> "Held":
        arrays = {
            side: [np.array(x) for x in jax.tree.leaves(getattr(cache, side))]
            for side in SIDES
            if getattr(cache, side) is not None
        }
        small = (np.array(cache.lengths), np.array(cache.new_lengths))
        table = None if cache.page_table is None else np.array(cache.page_table)
        return cls(case, arrays, *small, table, cache.capacities, str(cache.dtype))

    @classmethod
    def of_cache(cls, cache: Any) -> "Held":
        """Without a case; rows are not bytes."""
        return cls.of(
            types.SimpleNamespace(kind=cache.kind, layers=cache.layers, byte_rows=False), cache
        )

    def write(self, new: tuple[np.ndarray, ...], layer: int | None = None) -> None:
        """Rows [M, t, K, H] of each side to where `write_kv` puts them."""
        case = self.case
        if layer is not None and not 0 <= layer < (case.layers or 1):
            return
        counts, ends = self.new_lengths.astype(np.int64), self.lengths.astype(np.int64)
        start = np.where(ends >= 0, ends - counts, -1)
        shape = self.arrays["k"][0].shape
        pages = (self.table, shape[-2], 0 if self.table is None else shape[-4])
        wanted = append_cases.rows_from(start, np.minimum(counts, new[0].shape[1]))
        places = append_cases.places(case.kind, self.capacities, wanted, *pages)
        at = None if case.layers is None else layer
        for side, rows in self._stored(new).items():
            append_cases.write(self.arrays[side], places, rows, at)

    def keep(self, counts: np.ndarray, path: np.ndarray | None, holders: Any) -> list[Any]:
        """Applies `cache.keep`. Returns for each sequence the newest rows that stay, by their old
        numbers, None if it stays as it is, MOST if it overflows. `holders`: of each page.
        """
        stay: list[Any] = []
        for m, (count, new) in enumerate(zip(counts, self.new_lengths.tolist(), strict=True)):
            length, stays = int(self.lengths[m]), int(np.clip(count, 0, max(new, 0)))
            moves = path is not None and path.shape[1] > 0
            stay.append(None)
            if not (0 < new <= length <= self.capacities[m]) or (not moves and stays == new):
                continue
            if self.table is not None:
                page = self.arrays["k"][0].shape[-2]
                needed = self.table[m, : -(-length // page)]
                if not ((needed >= 0) & (needed < len(holders))).all():
                    continue
                if (holders[needed[(length - new) // page :]] > 1).any():
                    self.lengths[m], self.new_lengths[m], stay[m] = MOST, 0, MOST
                    continue
            rows = np.arange(new)
            if path is not None:
                width = min(path.shape[1], new)
                rows[:width] = np.clip(path[m, :width].astype(np.int64), 0, new - 1)
            stay[m] = rows[:stays].tolist()
            for side in self.arrays:
                held = [self._row(side, m, length - new + row).copy() for row in stay[m]]
                for to, row in enumerate(held):
                    self._row(side, m, length - new + to)[...] = row
            self.lengths[m], self.new_lengths[m] = length - new + stays, stays
        return stay

    def _row(self, side: str, m: int, position: int) -> np.ndarray:
        """A view of a row, of all layers and heads."""
        layers = (slice(None),) * (self.case.layers is not None)
        if self.case.kind == "per_sequence":
            return self.arrays[side][m][*layers, :, position]
        slab = m
        if self.table is not None:
            entry, position = divmod(position, self.arrays["k"][0].shape[-2])
            slab = self.table[m, entry]
        return self.arrays[side][0][*layers, slab, :, position]

    def _stored(self, new: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
        stored = {}
        for side, rows in zip("kv", new, strict=False):
            if self.case.byte_rows:
                stored[side] = as_bytes(rows)
                continue
            lacking = self.arrays[side][0].shape[-1] - rows.shape[-1]
            rows = np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, lacking)))
            stored[side] = rows
            if f"{side}_scale" in self.arrays:
                stored[side], stored[f"{side}_scale"] = quantized(rows, self.dtype)
        return stored

    def dense(self, side: str, layer: int) -> np.ndarray:
        """[M, S, K, ...] of one side in float64; 0 where no row can be."""
        case = self.case
        arrays = [x if case.layers is None else x[layer] for x in self.arrays[side]]
        arrays = [as_floats(x) for x in arrays] if case.byte_rows else arrays
        wide = [x.astype(np.float32).astype(np.float64) for x in arrays]
        if case.kind == "per_sequence":
            most = max(self.capacities)
            rest = [(0, 0)] * (wide[0].ndim - 2)
            wide = [np.stack([np.pad(x, [(0, 0), (0, most - x.shape[1]), *rest]) for x in wide])]
        (x,) = wide
        if self.table is not None:
            there = (self.table >= 0) & (self.table < len(x))
            x = x[np.where(there, self.table, 0)]  # [M, W, K, page, ...]
            x = np.where(there.reshape(*there.shape, *[1] * (x.ndim - 2)), x, 0)
            x = np.moveaxis(x, 2, 1)
            return np.moveaxis(x.reshape(*x.shape[:2], -1, *x.shape[4:]), 1, 2)
        return np.moveaxis(x, 1, 2)

    def rows(self, layer: int) -> list[np.ndarray]:
        """Rows of K and V as read, [M, S, K, H]."""
        sides = []
        for side, dim in zip("kv", (self.case.head_dim, self.case.v_head_dim), strict=True):
            if side not in self.arrays:
                sides.append(sides[0][..., :dim])
                continue
            x = self.dense(side, layer)[..., :dim]
            if f"{side}_scale" in self.arrays:
                x = x * self.dense(f"{side}_scale", layer)[..., None]
            sides.append(x)
        return sides

    def live(self, layer: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """K and V of a layer, 0 past the lengths, and the lengths that there can be. Of a layer
        that there is not, another's.
        """
        k, v = self.rows(layer if layer is not None and 0 <= layer < (self.case.layers or 1) else 0)
        lengths = np.clip(self.lengths, 0, k.shape[1])
        there = (np.arange(k.shape[1]) < lengths[:, None])[..., None, None]
        return np.where(there, k, 0), np.where(there, v, 0), lengths

    def lost(self, layer: int | None) -> np.ndarray:
        """bool[M]: which sequences give NaN."""
        if layer is not None and not 0 <= layer < (self.case.layers or 1):
            return np.full(len(self.lengths), True)
        held = np.array(self.capacities, np.int64)
        if self.table is not None:
            pool, page = self.arrays["k"][0].shape[-4], self.arrays["k"][0].shape[-2]
            there = (self.table >= 0) & (self.table < pool)
            held = np.cumprod(there, axis=1).sum(axis=1) * page
        return (self.lengths > held) | ((self.lengths < 1) & (self.new_lengths < 0))


def group_of(groups: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` groups each sequence has, -1 for none."""
    return np.where((groups >= 0) & (groups < count), groups, -1)


def poisoned(case: Case, cache: Any, rng: np.random.Generator) -> Any:
    """NaN wherever a row may be, but for columns that nobody asked for; pages in any order."""

    def fill(x, dim):
        if case.byte_rows:  # NaN in each of its formats
            return jnp.full(x.shape, 255, jnp.uint8)
        bits = np.zeros(x.nbytes, np.uint8).view(x.dtype).reshape(x.shape)
        # The NaN of the type: XLA's older way to LLVM (see conftest.py) makes it of all others.
        nan = -1 if x.dtype == np.int8 else np.nan
        bits[... if dim is None else (..., slice(0, dim))] = nan
        return jnp.asarray(bits)

    dims = {"k": case.head_dim, "v": case.v_head_dim, "k_scale": None, "v_scale": None}
    changes = {
        side: jax.tree.map(functools.partial(fill, dim=dim), getattr(cache, side))
        for side, dim in dims.items()
    }
    if case.kind == "paged":
        changes["free_list"] = jnp.asarray(rng.permutation(cache.pages).astype(np.int32))
    return dataclasses.replace(cache, **changes)


# ---- a problem -----------------------------------------------------------------------------------


class Program:
    """A cache, its models, and who is tried on it."""

    def __init__(self, case: Case, place: fuzz.Place, tally: fuzz.Tally):
        self.case, self.place, self.tally = case, place, tally
        self.rng = np.random.default_rng(zlib.crc32(str(case).encode()))
        options = {name: x for name, x in case.options().items() if x is not None}
        if case.sinks:
            sinks = self._normal("float32", case.q_heads)
            if self.rng.random() < 0.3:
                sinks = jnp.asarray(hard_data.sinks_without_end(sinks))
            options["sinks"] = sinks
        self.parents, t = some_parents(case.sequences, case.q_len), case.q_len
        self.counts = np.full(case.sequences, t)  # query rows of each sequence
        own = np.s_[:]
        if case.packed:
            self.counts = self.rng.integers(0, t + 1, case.sequences)
            self.counts[0] += not self.counts.any()  # or nothing is launched
            own = np.arange(t)[None] < self.counts[:, None]
            options["starts"] = jnp.asarray(np.r_[0, np.cumsum(self.counts)], jnp.int32)
        if case.tree:
            options["parents"] = jnp.asarray(self.parents[own])
        if case.listed:
            options["kv_indices"] = self.as_taken(jnp.asarray(self.lists()))
        if case.added:
            self.added, *arrays = self._adds()
            options["score"] = pa.score_fn(lambda s, *at: s + self.added(*at), *arrays)
        if case.drafts_most:
            options["parents"] = pa.DraftTree.create(
                options["parents"], options["starts"], drafts_most=case.drafts_most
            )
        self.options = options
        self.before = None if case.prefix is None else Program(case.before, place, tally)
        with place.active():
            cache = poisoned(case, case.create(), self.rng)
            self.subjects = [subject for subject in place.subjects if self._taken(subject, cache)]
        self.cache = cache
        self.model: Any = Dense(cache.capacities)
        if case.kind == "paged":
            sizes = (cache.pages, cache.page_size, cache.page_table.shape[1])
            self.model = witness.PagedModel.create(case.sequences, *sizes)
        self.written: list[tuple[np.ndarray, ...]] = []  # all new rows, by step

    def _taken(self, subject: Subject, cache: Any) -> bool:
        new = [x[0] for x in self.new_rows(1)]
        layer = {} if self.case.layers is None else {"layer": jnp.int32(0)}
        appends = {"cache": cache, **dict(zip("kv", new, strict=False)), **layer}
        decodes = {"q": self.as_taken(self.queries()), "cache": cache, **layer, **self.options}
        keeps = {"cache": cache, **self.none_kept()}
        return (
            fuzz.takes(subject, "append", pa.write_kv, appends)
            and fuzz.takes(subject, "decode", pa.decode_attention_with_lse, decodes)
            and (not self.case.keeps or fuzz.takes(subject, "keep", keep, keeps))
            and (self.before is None or self._reads_prefix(subject))
        )

    def _reads_prefix(self, subject: Subject) -> bool:
        assert self.before is not None
        decodes = fuzz.takes(subject, "decode", pa.decode_attention_with_lse, self.parts())
        return decodes and subject in self.before.subjects

    def parts(self) -> dict[str, Any]:
        """The call that reads the rows of a prefix, in which all queries are packed."""
        assert self.before is not None
        names = ("scale", "softcap", "precision")
        options = {name: x for name, x in self.options.items() if name in names}
        cache, q = self.before.cache, self.queries()
        options |= {"starts": jnp.zeros(cache.num_sequences + 1, jnp.int32), "mask": FULL}
        layer = {} if self.case.layers is None else {"layer": jnp.int32(0)}
        return {"q": q.reshape(-1, *q.shape[2:]), "cache": cache, **options, **layer}

    def prefixes(self, *, spoil: bool) -> tuple[pa.Prefix, Held, np.ndarray]:
        """A prefix, its rows, and the group of each sequence, -1 for none."""
        assert self.before is not None
        before, rng, m = self.before, self.rng, self.case.sequences
        cache = before._spoilt() if spoil else before.cache
        count = cache.num_sequences
        edges = rng.choice([LEAST, -count - 1, -2, -1, count, count + 1, MOST], m)
        groups = np.where(rng.random(m) < 0.3, edges, rng.integers(0, count, m)).astype(np.int32)
        prefix = pa.Prefix(cache, jnp.asarray(groups))
        return prefix, Held.of(before.case, cache), group_of(groups, count)

    def lists(self) -> np.ndarray:
        """int32[M, t, n]: positions of each query row, no two of them equal; some of no row."""
        case, rng = self.case, self.rng
        many = case.capacity + case.listed + 9
        order = rng.random((case.sequences, case.q_len, many)).argsort(axis=-1)
        indices = order[..., : case.listed] - 4
        odd = rng.choice([LEAST, LEAST + 1, -1, MOST - 1, MOST], indices.shape)
        return np.where(rng.random(indices.shape) < 0.1, odd, indices).astype(np.int32)

    def _adds(self) -> tuple[Any, ...]:
        """The function of positions that is added to scores, and the arrays that it reads."""
        case, normal = self.case, functools.partial(self.rng.standard_normal, dtype=np.float32)
        heads = case.q_heads
        arrays = {
            "slopes": self.rng.random(heads, dtype=np.float32) / 8,
            "table": normal((heads, 2 * POSITIONS)),
            "few": normal(16),
            "by_sequence": normal((case.sequences, 16)),
        }
        by_sequence = (lambda b, h, q, kv, t: t[b, kv % 16], ("by_sequence",))
        function, names = (ADDED | {"sequences": by_sequence})[case.added or ""]
        return function, *(arrays[name] for name in names)

    def _added(self, some: np.ndarray, lengths: np.ndarray, keys: int) -> np.ndarray:
        """float32[some, N, t, keys]: what the score function adds, by NumPy."""
        arrays, case = self.options["score"].aux, self.case
        sizes = (len(some), case.q_heads, case.q_len, keys)
        n, h, t, kv = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, sizes))])
        q = t + (lengths.astype(np.int32) - case.q_len)[:, None, None, None]
        result = self.added(some.astype(np.int32)[n], h, q, kv, *map(np.asarray, arrays))
        return np.broadcast_to(np.asarray(result, np.float32), sizes)

    def none_kept(self) -> dict[str, jax.Array]:
        """Arguments of `keep`."""
        sizes = (self.case.sequences,), (self.case.sequences, self.case.keeps or 0)
        return {
            name: jnp.zeros(n, jnp.int32) for name, n in zip(("counts", "path"), sizes, strict=True)
        }

    def _normal(self, dtype: str, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))

    def queries(self) -> jax.Array:
        case = self.case
        return self._normal(case.dtype, case.sequences, case.q_len, case.q_heads, case.head_dim)

    @property
    def placed(self) -> np.ndarray:
        """bool[M, t]: which of the queries there are, the last ones of each sequence."""
        t = self.case.q_len
        return np.arange(t)[None] >= t - self.counts[:, None]

    def as_taken(self, q: jax.Array) -> jax.Array:
        """Queries [M, t, N, H] as the call takes them."""
        return q[self.placed] if self.case.packed else q

    def unpacked(self, results: list[Any], lost: np.ndarray) -> list[Any]:
        """[M, t, N, Hv] and [M, N, t] of what a call gives; rows that are not there are those of a
        query that sees nothing, or lost.
        """
        if not self.case.packed:
            return results
        here = self.placed
        out, lse = (np.asarray(x) for x in (results[0], results[1].T))
        rows = [
            np.full((*here.shape, *x.shape[1:]), n, x.dtype) for x, n in ((out, 0), (lse, -np.inf))
        ]
        for row, x in zip(rows, (out, lse), strict=True):
            row[lost] = np.nan
            row[here] = x
        return [rows[0], np.moveaxis(rows[1], 1, 2)]

    def new_rows(self, count: int) -> tuple[jax.Array, ...]:
        """Rows of K, and of V where it is not within K: [layers, M, t, K, H]."""
        case = self.case
        shape = (case.layers or 1, case.sequences, count, case.kv_heads)
        dims = (case.head_dim,) if case.shared_kv else (case.head_dim, case.v_head_dim)
        return tuple(self._normal(case.dtype, *shape, dim) for dim in dims)

    # ---- between steps ---------------------------------------------------------------------------

    def manage(self, counts: np.ndarray, most: int) -> None:
        """Some sequences are emptied, one is forked, all are extended; `most`: new rows that will
        be written.
        """
        rng, m, model = self.rng, self.case.sequences, self.model
        emptied = rng.random(m) < 0.15
        emptied |= np.array(model.counts) > 2**20
        source, target = rng.integers(0, m, 2)
        if rng.random() < 0.5:
            target = rng.choice([-1, m, LEAST, MOST])
        length = int(rng.choice([MOST, -5, 0, 1, *rng.integers(0, self.case.capacity + 2, 3)]))
        fork = tuple(jnp.int32(x) for x in (source, target, length))
        self.cache = manage(self.cache, jnp.asarray(emptied), fork, jnp.asarray(counts))
        for sequence in np.flatnonzero(emptied).tolist():
            model.free(sequence)
        if self.case.kind == "paged" and 0 <= target < m:
            model.fork(int(source), int(target), length)
        before = list(model.counts)
        taken = [min(max(int(n), 0), MOST - have) for n, have in zip(counts, before, strict=True)]
        model.extend(taken)
        tokens = [
            [(len(self.written), sequence, i) for i in range(min(taken[sequence], most))]
            if len(model.rows[sequence]) == before[sequence]
            else []
            for sequence in range(m)
        ]
        model.write(tokens)
        np.testing.assert_array_equal(self.cache.lengths, model.counts)
        overflowed = [model.overflowed(sequence) for sequence in range(m)]
        np.testing.assert_array_equal(self.cache.overflowed, overflowed)
        if self.case.kind == "paged":
            assert int(self.cache.num_free) == model.pages - model.in_use

    def remembered(self, held: Held) -> None:
        """Checks that every written row is where its sequence, or a fork of it, has it."""
        layer = int(self.rng.integers(self.case.layers or 1))
        rows = held.rows(layer)
        for m, tokens in enumerate(self.model.rows):
            for side, got in enumerate(rows[: len(self.written[0])]):
                wanted = [
                    self.written[step][side][layer, sequence, i] for step, sequence, i in tokens
                ]
                if wanted:
                    np.testing.assert_array_equal(got[m, : len(wanted)], np.stack(wanted))

    # ---- a step ----------------------------------------------------------------------------------

    def step(self, count: int, turn: int, *, decode: bool, spoil: bool = False) -> None:
        """`count` new rows of each sequence, by every subject on the same cache. `spoil`: what an
        array says at run time is out of range; nobody goes on from there.
        """
        case = self.case
        cache = self._spoilt() if spoil else self.cache
        arguments: dict[str, Any] = {"cache": cache, "new": self.new_rows(count)}
        layer = extra = None
        if case.layers is not None:
            within = int(self.rng.integers(case.layers))
            beyond = int(self.rng.choice([LEAST, -1, case.layers, MOST]))
            layer = beyond if spoil and turn % 3 == 2 else within
            extra = beyond if self.rng.random() < 0.7 else within
            arguments["extra"] = jnp.int32(extra)
        if decode:
            queries = self.queries()
            arguments |= {"q": self.as_taken(queries), **self.options}
            arguments |= {} if layer is None else {"layer": jnp.int32(layer)}
            arguments["levels"] = case.shared
        lists = self.lists() if decode and case.listed else None
        if lists is not None:
            arguments["kv_indices"] = self.as_taken(jnp.asarray(lists))
        before = None
        if decode and self.before is not None:
            arguments["prefix"], *before = self.prefixes(spoil=spoil)
        after = Held.of(case, cache)
        new = [np.asarray(x) for x in arguments["new"]]
        for number in range(case.layers or 1):
            after.write(tuple(x[number] for x in new), number)
        if extra is not None:
            after.write(tuple(x[0] for x in new), extra)
        if not spoil:
            self._write_down(after, new, extra)
        expected = None
        for subject in self.subjects:
            self.tally.calls[subject.name] += 1
            got = subject.call(work, **arguments)
            cache_after, *results = got if decode else (got,)
            with fuzz.by(subject, turn):
                buffers = {side: getattr(cache_after, side) for side in after.arrays}
                append_cases.assert_same_bytes(buffers, after.arrays)
                if decode:
                    expected = expected or self._expected(after, queries, layer, before, lists)
                    self._check(self.unpacked(results, expected[2]), *expected)
                if decode and turn == 0 and not spoil and subject.marks:
                    fuzz.same_bits(results, subject.call(work, **arguments)[1:])
            if not spoil and subject is self.subjects[0]:
                self.cache = cache_after
        if not spoil:
            self.remembered(after)

    def keep(self, turn: int, *, spoil: bool = False) -> None:
        """Some of the newest rows stay, by every subject; of a cache that was perhaps forked since
        they were taken, or that is spoilt.
        """
        case, rng, m = self.case, self.rng, self.case.sequences
        cache = self._spoilt() if spoil else self.cache
        if case.kind == "paged" and not spoil and rng.random() < 0.4:
            fork = [int(rng.integers(n)) for n in (m, m, case.capacity + 1)]
            self.model.fork(*fork)
            cache = forked(cache, *map(jnp.int32, fork))
        edges, some = rng.choice([LEAST, -1, 0, MOST], m), rng.integers(0, case.q_len + 2, m)
        counts = np.where(rng.random(m) < 0.3, edges, some).astype(np.int32)
        path = rng.integers(-2, case.q_len + 2, (m, case.keeps or 0))
        path = np.where(rng.random(path.shape) < 0.1, rng.choice([LEAST, MOST], path.shape), path)
        arguments: dict[str, Any] = {"counts": jnp.asarray(counts)}
        if rng.random() < 0.8:
            arguments["path"] = jnp.asarray(path.astype(np.int32))
        after = Held.of(case, cache)
        holders = None if after.table is None else np.array(cache.holders)
        stay = after.keep(counts, path if "path" in arguments else None, holders)
        for subject in self.subjects:
            self.tally.calls[subject.name] += 1
            got = subject.call(keep, cache=cache, **arguments)
            with fuzz.by(subject, turn):
                buffers = {side: getattr(got, side) for side in after.arrays}
                append_cases.assert_same_bytes(buffers, after.arrays)
                np.testing.assert_array_equal(got.lengths, after.lengths)
                np.testing.assert_array_equal(got.new_lengths, after.new_lengths)
            if not spoil and subject is self.subjects[0]:
                self.cache = got
        if not spoil:
            self._stay(stay, np.array(cache.new_lengths).tolist())
            self.remembered(after)

    def _stay(self, stay: list[Any], new: list[int]) -> None:
        """Updates the model's rows; `stay` says which of the `new` ones stay."""
        model = self.model
        for m, rows in enumerate(stay):
            if rows == MOST:
                model.counts[m] = MOST
            elif rows is not None:
                begin, known = model.counts[m] - new[m], model.rows[m]
                model.counts[m] = begin + len(rows)
                # A row that nobody wrote ends what is known.
                end = next(
                    (n for n, row in enumerate(rows) if begin + row >= len(known)), len(rows)
                )
                model.rows[m] = known[:begin] + [known[begin + row] for row in rows[:end]]

    def _write_down(self, after: Held, new: list[np.ndarray], extra: int | None) -> None:
        """The rows as they come back, for `remembered`."""
        rows = [x.copy() for x in new]
        if extra is not None and 0 <= extra < (self.case.layers or 1):
            for x in rows:
                x[extra] = x[0]
        back = []
        for x in rows:
            wide = x.astype(np.float32).astype(np.float64)
            if self.case.byte_rows:
                wide = as_floats(as_bytes(x)).astype(np.float64)
            elif self.case.cache_dtype:
                numbers, scales = quantized(x, after.dtype)
                wide = numbers.astype(np.float32).astype(np.float64) * scales[..., None]
            back.append(wide)
        self.written.append(tuple(back))

    def _spoilt(self) -> Any:
        """The cache with some integers out of range, of those that arrive at run time."""
        rng, cache, m = self.rng, self.cache, self.case.sequences
        lengths, new = np.array(cache.lengths), np.array(cache.new_lengths)
        table, changes = None, {}
        if cache.page_table is not None:
            table = np.array(cache.page_table)
            holes = rng.random(table.shape) < 0.2
            table = np.where(holes, rng.choice([LEAST, -2, -1, cache.pages, MOST]), table)
            changes["page_table"] = jnp.asarray(table.astype(np.int32))
            pages = table[(table >= 0) & (table < cache.pages)]
        if table is None or len(set(pages.tolist())) == pages.size:  # or two write the same row
            some = rng.random(m) < 0.5
            edges = [LEAST, LEAST + 1, -1, 0, 1, self.case.capacity, MOST]
            lengths = np.where(some, rng.choice(edges, m), lengths)
            some = rng.random(m) < 0.3
            new = np.where(some, rng.choice([LEAST, -1, 0, 1, MOST - 1, MOST], m), new)
        changes["lengths"] = jnp.asarray(lengths.astype(np.int32))
        changes["new_lengths"] = jnp.asarray(new.astype(np.int32))
        return dataclasses.replace(cache, **changes)

    # ---- expected results of a step --------------------------------------------------------------

    def _expected(
        self,
        held: Held,
        q: jax.Array,
        layer: int | None,
        before: Any = None,
        lists: np.ndarray | None = None,
    ) -> tuple[Any, ...]:
        """(expected, which sequences it is of, which are lost). Those that hold rows that nobody
        wrote are neither. `before`: what a prefix holds, and which group each sequence has.
        """
        lost = held.lost(layer)
        k, v, lengths = held.live(layer)
        own = {"q": np.asarray(q), "k": k, "v": v, "lengths": lengths}
        if lists is not None:
            own["lists"] = lists
        if before is not None:
            other, group = before
            lost |= (group >= 0) & other.lost(layer)[group]
            own |= self._behind(other.live(layer), group, own)
        strange = np.isnan(own["k"]).any(axis=(1, 2, 3)) | np.isnan(own["v"]).any(axis=(1, 2, 3))
        some = np.flatnonzero(~lost & ~strange)
        if not some.size:
            return None, some, lost
        own = {name: x[some] for name, x in own.items()}
        return functools.cache(functools.partial(self._wanted, own, some)), some, lost

    def _behind(self, rows: Any, group: np.ndarray, own: dict[str, Any]) -> dict[str, Any]:
        """K and V with rows of a prefix before them, and which of all keys each query sees."""
        *arrays, lengths = rows
        front = np.where(group >= 0, lengths[group], 0)
        sizes, own_lengths = (self.case.q_len, own["k"].shape[1]), own["lengths"]
        first = np.arange(arrays[0].shape[1]) < front[:, None]  # [M, P]
        query = (own_lengths - sizes[0])[:, None, None] + np.arange(sizes[0])[:, None]
        near = self.case.mask.allows(query, np.arange(sizes[1]), own_lengths[:, None, None])
        seen = [np.repeat(first[:, None], sizes[0], axis=1)]
        seen += [np.broadcast_to(near, (len(group), *sizes))]
        joined = {"seen": np.concatenate(seen, axis=2)[:, None]}
        for name, x in zip("kv", arrays, strict=True):
            x = np.where(first[..., None, None], x[group], 0)
            joined[name] = np.concatenate([x, own[name]], axis=1)
        return joined

    def _wanted(
        self, own: dict[str, Any], some: Any, *, grids: tuple[float, ...]
    ) -> budget.Expected:
        """Expected results of the sequences `some`, whose queries and rows are in `own`."""
        case = self.case
        q, k, v, lengths = (own[name] for name in ("q", "k", "v", "lengths"))
        plain = {"q": q, "k": k, "v": v, "kv_lengths": lengths}
        plain |= {"q_offset": lengths - case.q_len, "precision": "highest"}
        names = ("mask", "scale", "softcap", "sinks")
        plain |= {name: self.options[name] for name in names if name in self.options}
        if case.added:
            plain["bias"] = self._added(some, lengths, k.shape[1])
        if "lists" in own:
            listed = own["lists"][..., None] == np.arange(k.shape[1], dtype=np.int32)
            plain["mask_array"] = (listed.any(axis=2) & self.placed[some][..., None])[:, None]
        elif case.tree or case.packed:
            seen = np.zeros((len(some), 1, case.q_len, k.shape[1]), bool)
            for n, (m, length) in enumerate(zip(some, lengths, strict=True)):
                count = self.counts[m]
                by = self._in_tree(m, length, k.shape[1]) if case.tree else True
                seen[n, :, case.q_len - count :] = by
            plain["mask_array"] = seen
            if case.tree:
                plain["mask"] = CAUSAL
        if "seen" in own:
            plain = {name: x for name, x in plain.items() if name not in ("kv_lengths", "q_offset")}
            plain |= {"mask": FULL, "mask_array": own["seen"]}
        cores = any(subject.tensor_cores for subject in self.subjects)
        quantised = case.cache_dtype or (case.prefix and case.prefix_dtype)
        make = budget.over_quantized if quantised else budget.attention
        expected = make(plain, tensor_cores=cores, grids=grids)
        by_kernels = any(x.implementation != "reference" for x in self.subjects)
        return budget.by_8_bits(expected, plain) if case.byte_rows and by_kernels else expected

    def _in_tree(self, m: int, length: int, keys: int) -> np.ndarray:
        """bool[1, t, keys]: what the drafts of a sequence see; prompts, rows before them."""
        count, left = int(self.counts[m]), self.case.mask.left
        own = self.parents[m : m + 1, :count]
        if self.case.drafts_most and count > self.case.drafts_most:
            own = np.arange(count)[None] - 1
        depth = ancestors(own)[0].sum(axis=1) - 1
        if not count:
            return np.zeros((1, 0, keys), bool)
        within = np.arange(keys) - (length - count)
        stands = np.where(within < 0, within, depth[np.clip(within, 0, count - 1)])
        near = depth[:, None] - stands <= (MOST if left is None else left)
        return seen_in_tree(own, [length], keys)[0] & near

    def _check(self, results: list[Any], expected: Any, some: np.ndarray, lost: np.ndarray) -> None:
        out, lse = (np.asarray(x) for x in results)
        assert np.isnan(out[lost].astype(np.float32)).all(), "a lost sequence is not NaN: out"
        assert np.isnan(lse[lost]).all(), "a lost sequence is not NaN: lse"
        if some.size:
            fuzz.check({"out": out[some], "lse": lse[some]}, expected, self.tally)


def run(case: Case, place: fuzz.Place, tally: fuzz.Tally) -> None:
    if place.lowered:
        _lower(case, place, tally)
        return
    program = Program(case, place, tally)
    if not program.subjects:
        return
    m, t = case.sequences, case.q_len
    with place.active():
        before = program.before
        for each in [program, *([] if before is None else [before])]:
            each.manage(np.array(each.case.lengths, np.int32), each.case.capacity)
            each.step(each.case.capacity, 0, decode=False)
        for turn in fuzz.turns(place, tally):
            if before is not None and turn:
                more = before.rng.choice([LEAST, -1, 0, 0, 0, 1, 2, 5, MOST], len(case.prefix))
                before.manage(more.astype(np.int32), before.case.capacity)
                before.step(before.case.capacity, turn, decode=False)
            edges = program.rng.choice([LEAST, -1, 0, t, *([MOST] if turn % 3 == 2 else [])], m)
            within = program.rng.integers(0, t + 1, m)
            counts = np.where(program.rng.random(m) < 0.4, edges, within)
            program.manage(counts.astype(np.int32), t)
            program.step(t, turn, decode=True)
            if turn % 2 == 0:
                program.step(t, turn, decode=True, spoil=True)
            if case.keeps is not None:
                program.keep(turn, spoil=True)
                program.keep(turn)


def _lower(case: Case, place: fuzz.Place, tally: fuzz.Tally) -> None:
    with fuzz.pretended(case, place) as generation:
        program = Program(case, place, tally)
        layer = {} if case.layers is None else {"layer": jnp.int32(0)}
        new = dict(zip("kv", (x[0] for x in program.new_rows(case.q_len)), strict=False))
        write = {"cache": program.cache.extend(0), **new, **layer}
        read = {
            "q": program.as_taken(program.queries()),
            "cache": program.cache,
            **layer,
            **program.options,
        }
        also = None
        if program.before is not None:
            read["prefix"], also = program.prefixes(spoil=False)[0], program.parts()
        fuzz.lower("append", pa.write_kv, write, generation, tally)
        fuzz.lower("decode", pa.decode_attention_with_lse, read, generation, tally, also)
        if case.keeps:
            arguments = {"cache": program.cache, **program.none_kept()}
            fuzz.lower("keep", keep, arguments, generation, tally)
