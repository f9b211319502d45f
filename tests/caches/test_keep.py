"""`cache.keep`: which drafts stay, where they lie, and that nothing else is touched."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import pallas_attn as pa
from pallas_attn import PagedCache, PerSequenceCache, StackedCache
from pallas_attn._call import device
from pallas_attn.kernels.append import keep as append_keep
from pallas_attn.kernels.append import separate_arrays
from tests.support import append_cases, builds, fuzz, mosaic, subjects
from tests.support.fuzz_caches import Held

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KINDS = ("per_sequence", "stacked", "paged")
SIDES = ("k", "v", "k_scale", "v_scale")
every_kind = pytest.mark.parametrize("kind", KINDS)
LEAST, MOST = -(2**31), 2**31 - 1


def create(kind, heads=2, dim=8, **sizes):
    """Five sequences of 20 rows (of one 23, where capacities may differ)."""
    if kind == "per_sequence":
        return PerSequenceCache.create((20, 23, 20, 20, 20), heads, dim, **sizes)
    if kind == "stacked":
        return StackedCache.create(5, 20, heads, dim, **sizes)
    return PagedCache.create(5, 26, 4, heads, dim, capacity=20, **sizes)


def keep(cache, counts, path, implementation=None):
    return cache.keep(counts, path, implementation=implementation)


def keep_three(cache, path):
    return cache.keep(3, path)


def with_bits(rng, cache):
    """Random bits, NaN among them, in every buffer."""
    buffers = {name: getattr(cache, name) for name in SIDES}
    filled = jax.tree.map(lambda x: append_cases.random_bits(rng, x.shape, x.dtype), buffers)
    return dataclasses.replace(cache, **jax.tree.map(jnp.asarray, filled))


def expected(cache, counts, path) -> Any:
    """`cache.keep` by the model of the fuzzer, a row at a time."""
    held = Held.of_cache(cache)
    held.keep(counts, path, None if held.table is None else np.asarray(cache.holders))
    separate = cache.kind == "per_sequence"
    buffers = {name: tuple(x) if separate else x[0] for name, x in held.arrays.items()}
    return dataclasses.replace(cache, lengths=held.lengths, new_lengths=held.new_lengths, **buffers)


OPTIONS = {
    "bfloat16": {"heads": 3, "dim": 24, "v_head_dim": 72},
    "layers": {"layers": 3, "dtype": "float32"},
    "chunks": {"heads": 5, "dim": 264, "dtype": "float16", "v_head_dim": 5},
    "float8_e4m3fn": {"layers": 2, "dtype": "float8_e4m3fn"},
    "int8": {"dtype": "int8", "dim": 40},
    "within_k": {"shared_kv": True, "heads": 1, "dim": 18, "v_head_dim": 16},
}
COUNTS = np.array([4, MOST, 2, LEAST, 3], np.int32)
# Repeated, backwards, out of range; longer than the drafts that there are.
PATH = np.array(
    [[0, 2, 5, 4, 3], [3, LEAST, MOST, 1, 1], [1, 1, 0, 0, 7], [2] * 5, [0, 1, 2, 2, 2]], np.int32
)
WIDE = np.array(np.random.default_rng(0).integers(-2, 9, (5, 19)), np.int32)
NEWER_WAY = {"xla_backend_extra_options": ""}  # tests/caches/test_append.py says why


def drafts(rng, kind, **options):
    """Drafts in pages of their own and others', none in the fourth sequence; the last one has
    overflowed.
    """
    cache = with_bits(rng, create(kind, **options).extend(jnp.array([3, 5, 11, 7, 15])))
    return cache.extend(jnp.array([6, 7, 9, 0, 6]))


CASES = [(kind, name) for kind in KINDS for name in OPTIONS]
SMALL = {"kind": "paged", "page_size": 4, "capacity": 40, "lengths": (5, 0, 9, 2), "q_len": 6}
SMALL |= {"q_heads": 1, "kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "dtype": "float32"}
SMALL |= dict.fromkeys(("layers", "listed", "added", "prefix", "drafts_most", "cache_dtype"))
SMALL |= dict.fromkeys(("tree", "packed", "shared_kv", "byte_rows", "batch_invariant"), False)
SMALL |= {"shared": 0, "pool": 1.0, "keeps": 5, "rounds": 12}
FEW = CASES[2::5] + [(kind, "layers") for kind in KINDS] + [("paged", "float8_e4m3fn")]


@pytest.mark.parametrize("subject, cases", [
    pytest.param(row, FEW if row.generation or row.name == "reference" else CASES,
                 id=row.name, marks=[getattr(pytest.mark, mark) for mark in row.marks])
    for row in subjects.ROWS if row.exists("keep")
])  # fmt: skip
def test_every_byte(rng, subject, cases):
    for kind, name in cases:
        cache, path = drafts(rng, kind, **OPTIONS[name]), PATH
        if name == "layers":  # with a sequence that took more rows than it has: its length was -1
            length, new = cache.lengths.at[3].set(2), cache.new_lengths.at[3].set(3)
            cache, path = dataclasses.replace(cache, lengths=length, new_lengths=new), WIDE
        wanted = expected(cache, COUNTS, path)
        with subject.active():
            options = {"compiler_options": NEWER_WAY} if subject.name == "reference" else {}
            run = functools.partial(keep, implementation=subject.implementation)
            got = jax.jit(run, **options)(cache, COUNTS, path)
        append_cases.assert_same_bytes(got, wanted)


@every_kind
def test_without_a_path_lengths_move_alone(rng, kind):
    cache = drafts(rng, kind)
    got = jax.jit(keep)(cache, 2, None)
    np.testing.assert_array_equal(got.lengths, [5, 7, 13, 7, 21])
    np.testing.assert_array_equal(got.new_lengths, [2, 2, 2, 0, 6])
    same = [dataclasses.replace(x, lengths=0, new_lengths=0) for x in (got, cache)]
    append_cases.assert_same_bytes(*same)
    again = got.keep(jnp.array([1, 0, 9, 1, 0]))
    np.testing.assert_array_equal(again.lengths, [4, 5, 13, 7, 21])


@every_kind
@pytest.mark.parametrize("width", [0, 1, 3, 64])
def test_prompts_keep_their_rows_beside_drafts(rng, kind, width):
    """A token, drafts, nothing, a prompt and a chunk of one, in one call: the cache is the one that
    takes only what was accepted.
    """
    lead, counts = [2, 3, 0, 0, 7], [1, 5, 0, 20, 6]
    kept, path = [1, 3, 4, 20, MOST], np.tile(np.arange(width, dtype=np.int32), (5, 1))
    new = jnp.asarray(rng.standard_normal((5, 27, 1, 8)), jnp.float32)
    sizes = {"layers": 1, "dtype": "float32"}
    if kind == "per_sequence":
        empty = PerSequenceCache.create((32,) * 5, 1, 8, **sizes)
    elif kind == "stacked":
        empty = StackedCache.create(5, 32, 1, 8, **sizes)
    else:
        empty = PagedCache.create(5, 40, 4, 1, 8, capacity=32, **sizes)
    before = pa.append_kv(empty, new[:, :7], -new[:, :7], new_lengths=jnp.array(lead))
    starts = np.r_[0, np.cumsum(counts)].astype(np.int32)
    packed = jnp.concatenate([new[m, 7 : 7 + n] for m, n in enumerate(counts)])
    if width == 3:
        path[1] = [1, 2, 4]
    rows = new[:, 7:].at[1, :3].set(new[1, 7 + path[1, :3]]) if width == 3 else new[:, 7:]

    @jax.jit
    def step(cache, path):
        cache = pa.append_kv(cache, packed, -packed, starts=starts)
        return cache.keep(np.array(kept, np.int32), path)

    got = step(before, path)
    want = pa.append_kv(before, rows, -rows, new_lengths=jnp.array([1, 3, 0, 20, 6]))
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_array_equal(got.new_lengths, want.new_lengths)
    q = jnp.asarray(rng.standard_normal((5, 1, 8)), jnp.float32)
    first, other = (
        pa.decode_attention(q, pa.append_kv(x, new[:, :1], -new[:, :1])) for x in (got, want)
    )
    np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("seed", range(2))
def test_random_programs(seed):
    """Appends, keeps, forks and frees, of a cache whose pages some sequences share."""
    word = f"cache/cpu:{seed}:" + ",".join(f"{name}={x!r}" for name, x in SMALL.items())
    assert fuzz.attempt(word, fuzz.Tally()) is None


each_subject = pytest.mark.parametrize("subject", subjects.rows("keep"))


@each_subject
@pytest.mark.parametrize("path", [None, np.array([[1, 2]] * 5, np.int32)], ids=["first", "path"])
def test_a_page_of_drafts_that_another_holds_is_left_alone(rng, subject, path):
    """Forked between extend and keep: the rows are the copy's too."""
    cache = with_bits(rng, create("paged").extend(jnp.array([3, 5, 0, 0, 2])))
    cache = cache.extend(jnp.array([6, 3, 0, 0, 2])).fork(0, 2).fork(1, 3, 5)
    got = subject.call(keep, cache, 2, path)
    np.testing.assert_array_equal(got.overflowed, [True, False, False, False, False])
    np.testing.assert_array_equal(got.lengths, [MOST, 7, 9, 5, 4])
    assert int(got.num_free) - int(got.extend(3).num_free) == 2  # it takes no more
    for side in ("k", "v"):
        before, after = (np.asarray(getattr(x, side)) for x in (cache, got))
        shared = np.asarray(cache.page_table)[0]
        append_cases.assert_same_bytes(after[shared], before[shared])
    freed = got.free(jnp.arange(5))
    assert int(freed.num_free) == cache.pages and not freed.overflowed.any()
    assert not np.asarray(freed.holders).any()


FIRST, ALL_ROWS = np.array([[1, 4]] * 3, np.int32), np.arange(6, dtype=np.int32)[None].repeat(3, 0)


@pytest.mark.parametrize(
    ("counts", "path"),
    [(2, None), (6, None), (2, FIRST), (0, FIRST), (6, ALL_ROWS)],
    ids=["first", "all", "path", "none of a path", "all of a path"],
)
@pytest.mark.parametrize("forked", [5, 7, 8, 11])
def test_keep_after_a_fork_of_some_drafts(forked, counts, path):
    """`KVCache.keep`: drafts in the page that a fork copies are no obstacle, in a page that it
    shares they are; but for a call that changes nothing.
    """
    cache = PagedCache.create(3, 20, 4, 1, 2, capacity=24, dtype="float32")
    cache = cache.extend(jnp.array([5, 0, 0])).extend(jnp.array([6, 0, 0])).fork(0, 1, forked)
    got = keep(cache, counts, path)
    shared = forked >= 8  # the second page, which has the first three of six drafts
    overflows = shared and not (path is None and counts == 6)
    assert got.overflowed.tolist() == [overflows, False, False]
    assert got.lengths.tolist() == [MOST if overflows else 5 + counts, forked, 0]
    assert got.new_lengths.tolist() == [0 if overflows else counts, -1, 0]
    assert got.extend(1).new_lengths.tolist() == [0 if overflows else 1, 1, 1]
    assert got.free(0).lengths.tolist() == [0, forked, 0]


@every_kind
def test_new_lengths_after_an_overflow(kind):
    """They stay the rows that `extend` was asked for, also after `keep`, until `reset`."""
    cache = create(kind)
    rows = max(cache.capacities)
    cache = cache.extend(jnp.full(5, rows - 1)).extend(3)
    for got in (cache, keep(cache, 1, None), keep(cache, 1, np.array([[2]] * 5, np.int32))):
        assert got.overflowed.all() and got.new_lengths.tolist() == [3] * 5
        assert got.lengths.tolist() == [rows + 2] * 5
        assert got.extend(2).new_lengths.tolist() == [2] * 5
    assert cache.reset(0).new_lengths.tolist() == [-1, 3, 3, 3, 3]


@each_subject
def test_every_page_is_looked_at(rng, subject):
    """A page that is missing far from the drafts, or shared far behind their first row: of a table
    longer than what a block looks at together.
    """
    cache = PagedCache.create(6, 60, 1, 1, 2, capacity=1300, dtype="float32")
    new = jnp.array([9, 200, 200, 200, 7, 9], jnp.int32)
    lengths = jnp.full(6, 1290, jnp.int32).at[4].set(7)
    table = jnp.asarray(rng.integers(0, 50, (6, 1300)), jnp.int32)
    table = table.at[0, 1290].set(-1)  # behind its end
    table = table.at[1, 1289].set(55).at[2, 1150].set(55).at[3, 100].set(55).at[4, 3].set(60)
    table = table.at[5, 1030].set(-(2**31)).at[5, 1285].set(55)  # missing and shared: missing
    # pages of the rows that move
    table = table.at[0, 1281:1283].set([56, 57]).at[3, 1090:1092].set([58, 59])
    cache = with_bits(rng, dataclasses.replace(
        cache, page_table=table, lengths=lengths, new_lengths=new,
        holders=jnp.where(jnp.arange(60) == 55, 2, 1),
    ))  # fmt: skip
    for count in (0, 2):
        got = subject.call(keep, cache, jnp.full(6, count), jnp.zeros((6, 2), jnp.int32))
        after = [1281 + count, MOST, MOST, 1090 + count, 7, 1290]
        np.testing.assert_array_equal(got.lengths, after)
        np.testing.assert_array_equal(got.new_lengths, [count, 0, 0, count, 7, 9])
    wanted = cache.k.at[np.array([57, 59])].set(cache.k[np.array([56, 58])])
    append_cases.assert_same_bytes(got.k, wanted)


@pytest.mark.parametrize("subject", subjects.rows("keep"))
def test_the_last_page_is_looked_at(rng, subject):
    """The sequence has only some rows of that page."""
    cache = PagedCache.create(2, 8, 4, 1, 2, capacity=16, dtype="float32")
    table = jnp.array([[0, 1, 2, -1], [3, 4, -1, -1]], jnp.int32)
    fields = {"lengths": jnp.full(2, 10, jnp.int32), "new_lengths": jnp.full(2, 3, jnp.int32)}
    holders = jnp.ones(8, jnp.int32)
    cache = dataclasses.replace(cache, page_table=table, holders=holders, **fields)
    cache = with_bits(rng, cache)
    got = subject.call(keep, cache, jnp.full(2, 1), jnp.array([[0, 0]] * 2, jnp.int32))
    np.testing.assert_array_equal(got.lengths, [8, 10])  # a lost sequence stays as it is
    np.testing.assert_array_equal(got.new_lengths, [1, 3])
    append_cases.assert_same_bytes(got.k, cache.k)


@every_kind
@pytest.mark.by_xla
def test_in_loops_and_under_vmap(rng, kind):
    cache = with_bits(rng, create(kind, layers=2, dtype="float32").extend(4))

    def loop(cache, paths):
        return jax.lax.scan(lambda c, path: (c.extend(4).keep(3, path), 0), cache, paths)[0]

    paths = rng.integers(0, 4, (2, 5, 3)).astype(np.int32)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((cache.k, cache.v))]
    wanted = cache
    for path in paths:
        wanted = expected(wanted.extend(4), np.full(5, 3), path)
        wanted = jax.tree.map(jnp.asarray, wanted)
    both = jax.vmap(lambda path: keep(cache.extend(4), 3, path))(paths)
    for n, path in enumerate(paths):
        got = jax.tree.map(lambda x: x[n], both)  # noqa: B023
        append_cases.assert_same_bytes(got, expected(cache.extend(4), np.full(5, 3), path))
    copied = jax.tree.map(jnp.copy, cache)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((copied.k, copied.v))]
    got = jax.jit(loop, donate_argnums=0)(copied, paths)
    append_cases.assert_same_bytes(got, wanted)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((got.k, got.v))] == pointers


@every_kind
def test_kv_heads_over_devices(rng, kind):
    cache = with_bits(rng, create(kind, heads=4, dtype="int8").extend(6))
    path = rng.integers(0, 6, (5, 4)).astype(np.int32)
    wanted = expected(cache, np.full(5, 3), path)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = cache.specs(heads="x")
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    placed = jax.device_put(cache, where)
    plain = jax.P()
    split = jax.shard_map(keep, mesh=mesh, in_specs=(specs, plain, plain), out_specs=specs)
    for call in (split, keep):
        got = jax.jit(call, out_shardings=where)(placed, jnp.int32(3), path)
        append_cases.assert_same_bytes(got, wanted)


# ---- machine code --------------------------------------------------------------------------------


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("target", ["h100", "a100"])
@every_kind
def test_machine_code(kind, target):
    build = builds._keep(target, kind, 8, layers=3)
    report = mosaic.compile_for(
        build.call, *build.shapes, target=target, donate_argnums=0, sass=True
    )
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)
    assert report.aliases >= len(jax.tree.leaves((build.shapes[0].k, build.shapes[0].v)))
    assert len(report.others) == 1, report.others  # which makes the new lengths
    assert report.registers <= (112 if kind == "paged" else 80)
    # K and V, eight rows each, 16 bytes a thread, and how many rows stay; the eight indices of a
    # path are two loads more, of K's threads and V's or of both.
    assert report.sass.count("STG.E") - 1 == report.sass.count("STG.E.128") == 16
    assert report.sass.count("LDG.E.128") == 16 + (4 if kind == "paged" else 2)


@pytest.mark.machine_code
@pytest.mark.guards
def test_a_count_for_all_sequences_is_no_launch():
    build = builds._keep("h100", "paged", 8)
    cache, _, path = build.shapes
    report = mosaic.compile_for(keep_three, cache, path, donate_argnums=0)
    assert (report.launches, len(report.others)) == (1, 1), report.others


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code_of_the_longest_path():
    build = builds._keep("h100", "paged", append_keep.ROWS_MOST, dtype="float32")
    report = mosaic.compile_for(build.call, *build.shapes, donate_argnums=0)
    assert (report.launches, report.spill_bytes) == (1, 0)


@pytest.mark.guards
def test_a_sequence_without_a_row(rng):
    """An array that holds nothing is in no launch."""
    cache = PerSequenceCache.create((20, 23, 20), 2, 8).extend(4)
    cut = {name: tuple(x[:, :0] if m == 1 else x for m, x in enumerate(getattr(cache, name)))
           for name in "kv"}  # fmt: skip
    cache = with_bits(rng, dataclasses.replace(cache, **cut))
    cache = dataclasses.replace(cache, lengths=jnp.asarray([4, 0, 9], jnp.int32))
    path = jnp.asarray([[2, 3], [0, 1], [3, 0]], jnp.int32)
    subject = next(x for x in subjects.ROWS if x.name == "interpreted")
    got, want = subject.call(keep, cache, 2, path), keep(cache, 2, path, "reference")
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(*(np.asarray(z).view(np.uint8) for z in (x, y)))


@pytest.mark.guards
def test_more_sequences_take_a_second_launch(monkeypatch):
    monkeypatch.setattr(separate_arrays, "ARRAYS_OF_A_LAUNCH", 2 * 20)
    cache = jax.eval_shape(lambda: PerSequenceCache.create((8,) * 21, 1, 8))
    shapes = jax.ShapeDtypeStruct((21,), "int32"), jax.ShapeDtypeStruct((21, 2), "int32")
    with device.assume("sm90"):
        text = mosaic.lower_for_cuda(keep, cache, *shapes)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


# ---- refusals ------------------------------------------------------------------------------------


def test_messages():
    cache = create("stacked").extend(2)
    for call, message in (
        (lambda: cache.keep(1.0), r"counts: expected int32\[5\] \(rows to keep of each sequence"),
        (
            lambda: cache.keep(1, jnp.zeros((4, 2), jnp.int32)),
            r"path: expected int32\[5, p\] \(the rows to keep, of those that extend took\), got "
            r"int32\[4, 2\]",
        ),
        (lambda: cache.keep(1, implementation="fast"), "implementation: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    split = StackedCache.create(2, 8, 1, 8, context=pa.Context("cp")).extend(4)
    with pytest.raises(ValueError, match="context: no mesh axis 'cp' is mapped here"):
        split.keep(1, jnp.zeros((2, 2), jnp.int32))
    np.testing.assert_array_equal(split.keep(1).lengths, [1, 1])
