"""The three caches: what they hold, how they grow and overflow, and who holds which page."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import PagedCache, PerSequenceCache, StackedCache
from pallas_attn.cache import LOST, NO_PAGE, NOT_EXTENDED
from tests.support import witness

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def create(kind, **options):
    """Three sequences of capacity 8 (the first of 6 where capacities may differ)."""
    if kind == "per_sequence":
        return PerSequenceCache.create((6, 8, 8), 2, 4, **options)
    if kind == "stacked":
        return StackedCache.create(3, 8, 2, 4, **options)
    return PagedCache.create(3, 7, 2, 2, 4, capacity=8, **options)


KINDS = ("per_sequence", "stacked", "paged")
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("layers", [None, 1, 5])
def test_what_a_new_cache_says_of_itself(kind, layers):
    cache = create(kind, layers=layers, v_head_dim=3, dtype=jnp.float16)
    assert cache.kind == kind
    assert cache.num_sequences == 3
    assert cache.layers == layers
    assert (cache.kv_heads, cache.head_dim, cache.v_head_dim) == (2, 4, 3)
    assert cache.dtype == jnp.float16
    assert cache.capacities == ((6, 8, 8) if kind == "per_sequence" else (8, 8, 8))
    rows = {"per_sequence": 22, "stacked": 24, "paged": 14}[kind]
    assert cache.num_bytes == rows * 2 * (4 + 3) * 2 * (layers or 1)
    assert cache.num_bytes == sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v)))
    np.testing.assert_array_equal(cache.lengths, [0, 0, 0])
    assert cache.lengths.dtype == jnp.int32
    np.testing.assert_array_equal(cache.overflowed, [False] * 3)
    assert (cache.page_size, cache.pages) == ((2, 7) if kind == "paged" else (None, None))


def test_a_pool_of_more_rows_than_a_length_counts():
    cache = jax.eval_shape(lambda: PagedCache.create(1, 2**13, 2**20, 1, 1))
    assert cache.capacities == (2**31 - 2**20,) and cache.pages == 2**13


def test_defaults():
    assert StackedCache.create(1, 8, 2, 4).dtype == jnp.bfloat16
    assert StackedCache.create(1, 8, 2, 4).v_head_dim == 4
    whole_pool = PagedCache.create(2, 5, 3, 1, 4)
    assert whole_pool.capacities == (15, 15)
    assert PagedCache.create(2, 5, 3, 1, 4, capacity=7).capacities == (9, 9)  # pages are whole
    assert pa.PerSequenceCache.create(np.array([4, 8]), 2, 4).capacities == (4, 8)


@every_kind
def test_a_cache_has_2_m_buffers_at_most_whatever_its_depth(kind):
    for layers in (None, 48):
        buffers = jax.tree.leaves((create(kind, layers=layers).k, create(kind, layers=layers).v))
        assert len(buffers) == (6 if kind == "per_sequence" else 2)


@every_kind
def test_caches_are_frozen_pytrees(kind):
    cache = create(kind)
    with pytest.raises(AttributeError):
        cache.lengths = None
    leaves, structure = jax.tree.flatten(cache)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(cache) and again.capacities == cache.capacities
    assert jax.tree.structure(jax.tree.map(lambda x: x + x, cache)) == structure
    shapes = jax.eval_shape(lambda c: c.extend(1), cache)
    assert shapes.lengths.shape == (3,) and shapes.capacities == cache.capacities


@every_kind
def test_extend_by_a_number_and_by_counts(kind):
    cache = create(kind).extend(2)
    np.testing.assert_array_equal(cache.lengths, [2, 2, 2])
    np.testing.assert_array_equal(cache.new_lengths, [2, 2, 2])
    cache = cache.extend(jnp.asarray([0, 3, -4], jnp.int32))
    np.testing.assert_array_equal(cache.lengths, [2, 5, 2])
    np.testing.assert_array_equal(cache.new_lengths, [0, 3, 0])
    cache = cache.extend(np.array([1, 0, 0], np.uint32))
    np.testing.assert_array_equal(cache.lengths, [3, 5, 2])
    assert cache.lengths.dtype == cache.new_lengths.dtype == jnp.int32
    cache = cache.extend(np.int64(0))
    np.testing.assert_array_equal(cache.lengths, [3, 5, 2])
    cache = jax.jit(lambda cache, rows: cache.extend(rows))(cache, 1)
    np.testing.assert_array_equal(cache.lengths, [4, 6, 3])


@every_kind
def test_overflow_is_counted_and_stays(kind):
    roomy = kind != "paged"  # 7 pages of 2 do not hold 3 * 8 rows
    cache = create(kind).extend(jnp.asarray([6, 4, 2], jnp.int32))
    np.testing.assert_array_equal(cache.overflowed, [False] * 3)
    cache = cache.extend(jnp.asarray([0, 4, 0], jnp.int32))
    np.testing.assert_array_equal(cache.overflowed, [False, not roomy, False])
    cache = cache.extend(jnp.asarray([3, 1, 0], jnp.int32))
    np.testing.assert_array_equal(cache.lengths, [9, 9, 2])
    np.testing.assert_array_equal(cache.overflowed, [True, True, False])
    for _ in range(2):  # more than an int32 can count
        cache = cache.extend(jnp.asarray([2**31 - 1, 2**30, 0], jnp.int32))
    np.testing.assert_array_equal(cache.lengths, [2**31 - 1, 2**31 - 1, 2])
    np.testing.assert_array_equal(cache.overflowed, [True, True, False])
    cache = cache.reset(jnp.asarray([0, 1]))
    np.testing.assert_array_equal(cache.overflowed, [False] * 3)


@every_kind
@pytest.mark.parametrize(
    "which, left",
    [
        (1, [3, 0, 3]),
        (np.int32(1), [3, 0, 3]),
        (jnp.int32(1), [3, 0, 3]),
        ([0, 2], [0, 3, 0]),
        (jnp.asarray([2, 2]), [3, 3, 0]),
        (np.array([], np.int32), [3, 3, 3]),
        ([], [3, 3, 3]),
        (jnp.asarray([3, -1, 0]), [0, 3, 3]),
        (np.array([True, False, False]), [0, 3, 3]),
        (jnp.asarray([True, True, True]), [0, 0, 0]),
    ],
    ids=repr,
)
def test_reset(kind, which, left):
    cache = create(kind).extend(3)
    got = cache.reset(which)
    np.testing.assert_array_equal(got.lengths, left)
    np.testing.assert_array_equal(got.new_lengths, np.where(np.equal(left, 0), NOT_EXTENDED, left))
    index = np.asarray(which, np.int32) if isinstance(which, list) else which
    traced = jax.jit(lambda cache, index: cache.reset(index))(cache, index)
    np.testing.assert_array_equal(traced.lengths, left)
    for before, after in zip(jax.tree.leaves(cache.k), jax.tree.leaves(got.k), strict=True):
        assert before is after  # buffers stay as they are


# ---- pages ---------------------------------------------------------------------------------------


def rows_of(cache, m):
    """(k, v) of the rows that sequence m has pages for, in order: [rows]; one head of dim 1."""
    pages = [page for page in np.asarray(cache.page_table)[m] if page >= 0]
    k, v = (np.asarray(pool)[pages].reshape(-1) for pool in (cache.k, cache.v))
    return k, v


def check_invariants(cache):
    """Every page is free or held, never both; holders counts table entries."""
    table, pages = np.asarray(cache.page_table), cache.pages
    free = np.asarray(cache.free_list)[: int(cache.num_free)]
    held = np.bincount(table[table >= 0].ravel(), minlength=pages)
    assert table.max(initial=-1) < pages and table.min(initial=0) >= LOST
    np.testing.assert_array_equal(cache.holders, held)
    assert len(set(free.tolist())) == len(free)
    assert set(free.tolist()) == set(np.flatnonzero(held == 0).tolist())
    for row in table:  # pages in front, then nothing, or what was lost
        kinds = [0 if page >= 0 else 1 if page == LOST else 2 for page in row]
        assert kinds == sorted(kinds)
        assert len({page for page in row if page >= 0}) == kinds.count(0)


class Pair:
    """A PagedCache and its model, driven by the same operations."""

    sequences, most = 4, 4

    def __init__(self, pages, page_size, width):
        self.cache = PagedCache.create(
            self.sequences, pages, page_size, 1, 1, capacity=width * page_size, dtype="float32"
        )
        self.model = witness.PagedModel.create(self.sequences, pages, page_size, width)
        self.token = 0

    def allocate(self, counts):
        self.cache, granted = _allocate(self.cache, counts)
        assert granted.tolist() == self.model.allocate(counts.tolist())

    def append(self, counts):
        tokens = self.token + np.arange(self.sequences * self.most, dtype=np.float32)
        tokens = tokens.reshape(self.sequences, self.most)
        self.token += tokens.size
        self.cache = _append(self.cache, tokens[..., None, None], counts)
        self.model.extend(counts.tolist())
        self.model.write([row[:n].tolist() for row, n in zip(tokens, counts, strict=True)])

    def free(self, sequence):
        self.cache = _free(self.cache, sequence)
        self.model.free(sequence)

    def fork(self, source, target, length):
        self.cache = _fork(self.cache, source, target, length)
        self.model.fork(source, target, length)

    def check(self):
        check_invariants(self.cache)
        np.testing.assert_array_equal(self.cache.lengths, self.model.counts)
        assert int(self.cache.num_free) == self.model.pages - self.model.in_use
        for m in range(self.sequences):
            assert bool(self.cache.overflowed[m]) == self.model.overflowed(m)
            rows = self.model.rows[m]
            assert len(self.model.held[m]) == (np.asarray(self.cache.page_table)[m] >= 0).sum()
            k, v = rows_of(self.cache, m)
            np.testing.assert_array_equal(k[: len(rows)], rows)
            np.testing.assert_array_equal(v[: len(rows)], np.asarray(rows) + 0.5)
        for first, other in itertools.combinations(range(self.sequences), 2):
            shared = len(set(self.model.held[first]) & set(self.model.held[other]))
            table = np.asarray(self.cache.page_table)
            assert len(set(table[first][table[first] >= 0]) & set(table[other])) == shared


_allocate = jax.jit(lambda cache, counts: cache.allocate(counts))
_append = jax.jit(lambda cache, rows, n: pa.append_kv(cache, rows, rows + 0.5, new_lengths=n))
_free = jax.jit(lambda cache, m: cache.free(m))
_fork = jax.jit(lambda cache, source, target, n: cache.fork(source, target, n))


@pytest.mark.parametrize("round_", range(2))
@pytest.mark.parametrize("sizes", [(7, 3, 3), (12, 2, 4), (3, 4, 2)], ids=str)
def test_random_operations_against_the_model(seed, sizes, round_):
    rng = np.random.default_rng((seed, round_, *sizes))
    pair = Pair(*sizes)
    done = []
    for _ in range(60):
        kind = rng.choice(["append", "append", "append", "allocate", "free", "fork", "fork"])
        if kind in ("append", "allocate"):
            arguments = (rng.integers(0, pair.most + 1, 4).astype(np.int32),)
        elif kind == "free":
            arguments = (int(rng.integers(4)),)
        else:
            arguments = (*(int(x) for x in rng.integers(0, 4, 2)), int(rng.integers(-1, 14)))
        done.append((kind, arguments))
        getattr(pair, kind)(*arguments)
        try:
            pair.check()
        except AssertionError as error:
            raise AssertionError(f"after {done[-6:]} (of {len(done)})") from error


def filled(rows, **options):
    """A paged cache (7 pages of 2) whose first sequence holds `rows` numbered rows."""
    cache = PagedCache.create(3, 7, 2, 1, 1, capacity=8, dtype="float32", **options)
    new = np.arange(24, dtype=np.float32).reshape(3, 8, 1, 1)
    return pa.append_kv(cache, new, new + 0.5, new_lengths=jnp.asarray([rows, 0, 0]))


def test_fork_copies_the_page_in_every_layer():
    cache = PagedCache.create(2, 4, 2, 1, 1, layers=3, dtype="float32").extend(
        jnp.asarray([3, 0], jnp.int32)
    )
    for layer in range(3):
        new = 10 * layer + np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1)
        cache = pa.write_kv(cache, new, new, layer=layer)
    cache = cache.fork(0, 1)
    pages = np.asarray(cache.page_table)[1, :2]
    got = np.asarray(cache.k)[:, pages].reshape(3, 4)[:, :3]
    np.testing.assert_array_equal(got, [[0, 1, 2], [10, 11, 12], [20, 21, 22]])


@pytest.mark.parametrize("source, target", [(0, 3), (0, -1), (3, 1), (-1, 1)])
def test_fork_of_or_to_no_sequence_changes_nothing(source, target):
    """Traced indices, which no check sees: no page is lost, and nobody else's row is written."""
    cache = filled(5)
    got = jax.jit(lambda cache, *ends: cache.fork(*ends))(cache, source, target)
    for first, other in zip(jax.tree.leaves(got), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(first, other)


def test_an_empty_pool_gives_a_clear_answer_and_touches_nobody():
    cache = filled(8).extend(jnp.asarray([0, 6, 0], jnp.int32))
    before = np.asarray(cache.k)
    cache, granted = cache.allocate(jnp.asarray([0, 0, 1], jnp.int32))
    np.testing.assert_array_equal(granted, [True, True, False])
    np.testing.assert_array_equal(cache.overflowed, [False] * 3)  # nothing was taken
    new = np.full((3, 1, 1, 1), -9, np.float32)
    cache = pa.append_kv(cache, new, new, new_lengths=jnp.asarray([0, 0, 1]))
    np.testing.assert_array_equal(cache.overflowed, [False, False, True])
    np.testing.assert_array_equal(cache.k, before)
    cache = cache.free(0)
    np.testing.assert_array_equal(cache.overflowed, [False, False, True])  # its row is still lost
    cache = pa.append_kv(cache.free(2), new, new, new_lengths=jnp.asarray([0, 0, 1]))
    np.testing.assert_array_equal(cache.overflowed, [False] * 3)
    np.testing.assert_array_equal(rows_of(cache, 2)[0][:1], [-9])


def test_the_shortest_ask_comes_first():
    cache = PagedCache.create(3, 4, 2, 1, 1, capacity=8)
    cache, granted = cache.allocate(jnp.asarray([8, 2, 3], jnp.int32))
    np.testing.assert_array_equal(granted, [False, True, True])
    assert int(cache.num_free) == 1
    np.testing.assert_array_equal((np.asarray(cache.page_table) >= 0).sum(1), [0, 1, 2])
    check_invariants(cache)


def test_reset_of_a_paged_cache_gives_its_pages_back():
    cache = filled(5)
    assert int(cache.num_free) == 4
    cache = cache.reset(0)
    assert int(cache.num_free) == 7 and (np.asarray(cache.page_table) == NO_PAGE).all()


def test_page_operations_in_a_scan():
    """Allocation, appends and frees in one compiled loop give what they give one by one."""
    steps = jnp.asarray([[2, 0, 1], [1, 1, 1], [0, 3, 2], [1, 0, 0]], jnp.int32)

    def step(cache, counts):
        new = jnp.broadcast_to(counts[:, None, None, None], (3, 3, 1, 1)).astype(jnp.float32)
        cache = pa.append_kv(cache, new, new, new_lengths=counts)
        return cache.free(counts == 3), cache.lengths

    start = PagedCache.create(3, 7, 2, 1, 1, dtype="float32")
    once = functools.partial(jax.lax.scan, step)
    scanned, lengths = jax.jit(once)(start, steps)
    cache = start
    for i, counts in enumerate(steps):
        cache, alone = step(cache, counts)
        np.testing.assert_array_equal(lengths[i], alone)
    for first, other in zip(jax.tree.leaves(scanned), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(first, other)
    check_invariants(scanned)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (
            lambda: PerSequenceCache.create([8, 16], 2, 64),
            "PerSequenceCache(2 sequences of 8 to 16 rows, 2 kv heads of 64, bfloat16)",
        ),
        (
            lambda: StackedCache.create(3, 8, 1, 72, v_head_dim=64, shared_kv=True, layers=4),
            "StackedCache(3 sequences of 8 rows, 4 layers, 1 kv heads of 72, V of 64 within K, "
            "bfloat16)",
        ),
        (
            lambda: PagedCache.create(3, 9, 4, 2, 64, dtype=jnp.int8, v_head_dim=128),
            "PagedCache(3 sequences of 36 rows, 2 kv heads of 64, V of 128, int8 with scales, "
            "9 pages of 4 rows)",
        ),
    ],
)
def test_a_cache_is_printed_by_its_sizes(cache, said):
    assert repr(cache()) == repr(jax.eval_shape(cache)) == said
    assert repr(jax.tree.map(lambda x: None, cache())).endswith("Cache(...)")


def test_pages_for_rows():
    cache = pa.PagedCache.create(2, 8, 4, kv_heads=1, head_dim=8)
    assert [cache.pages_for(rows) for rows in (0, 1, 4, 5, np.int64(9))] == [0, 1, 1, 2, 3]


@pytest.mark.by_xla
@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.extend(1),
        lambda cache: cache.keep(1),
        lambda cache: cache.reset(0),
        lambda cache: cache.overflowed,
        lambda cache: cache.allocate(1),
        lambda cache: cache.fork(0, 1),
        lambda cache: cache.shared_prefixes(),
        lambda cache: pa.write_kv(cache, *(jnp.zeros((2, 1, 2, 8)),) * 2),
        lambda cache: pa.append_kv(cache, *(jnp.zeros((2, 1, 2, 8)),) * 2),
        lambda cache: pa.decode_attention(jnp.zeros((2, 4, 8)), cache),
        lambda cache: pa.decode_attention(
            jnp.zeros((2, 4, 8)),
            StackedCache.create(2, 8, 2, 8, dtype="float32").extend(1),
            prefix=pa.Prefix(cache, jnp.zeros(2, jnp.int32)),
        ),
    ],
)
def test_a_cache_that_was_donated(call):
    cache = PagedCache.create(2, 4, 4, 2, 8, dtype="float32").extend(1)
    new = jax.jit(lambda cache: cache.extend(1), donate_argnums=0)(cache)
    text = r"^cache: its arrays k, v, .* were donated to a jitted function \(donate_argnums\), and "
    with pytest.raises(ValueError, match=text + "are gone; use the cache that this function retu"):
        call(cache)
    np.testing.assert_array_equal(new.lengths, [2, 2])
