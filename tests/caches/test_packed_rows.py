"""Packed rows over caches: sequences with different numbers of new rows in one call. What each must
be is what it would be alone.
"""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, FULL, PagedCache, PerSequenceCache, StackedCache, sliding_window
from pallas_attn._call import config, device, launches
from pallas_attn.kernels.decode import packed as decode_packed
from pallas_attn.kernels.decode_mla import rows_as_sequences
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.prefill import sm90
from tests.support import budget, messages, mosaic, subjects
from tests.support import operations as support
from tests.support.decode_cases import ancestors, some_parents
from tests.support.threads import BlockOfThreads, Memory

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KINDS = ("per_sequence", "stacked", "paged")
KV_HEADS, GROUP, DIM, V_DIM = 2, 2, 64, 64
COUNTS = (1, 0, 2, 7, 8, 16, 63, 64, 65, 128, 0, 300, 1)  # rows of each sequence
HELD = (130, 9, 0, 60, 1, 0, 70, 0, 63, 5, 0, 20, 0)  # and those that it had before
FEW_COUNTS, FEW_HELD = (1, 0, 2, 40, 1, 7), (70, 9, 0, 60, 0, 0)  # for the interpreter
# With no more rows than sequences, of whom most can have one: others have few or many.
ONES, ONES_HELD = (1, 0, 1, 3, 0, 0, 0, 10, 0, 1, *(0,) * 22), (70, 9, 0, 60, 1, 20, *(5,) * 26)
LEAD, REST = 3, 2  # rows that no sequence owns, before the first and after the last


def cache_of(kind, capacities, dtype, **options):
    sizes = {"kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": V_DIM, "dtype": dtype} | options
    if kind == "per_sequence":
        return PerSequenceCache.create(capacities, **sizes)
    if kind == "stacked":
        return StackedCache.create(len(capacities), max(capacities), **sizes)
    pages = sum(-(-capacity // 16) for capacity in capacities) + 2
    return PagedCache.create(
        len(capacities), pages, 16, capacity=-(-max(capacities) // 16) * 16, **sizes
    )


def spoiled(cache):
    """The same, empty, with NaN wherever nothing was written yet."""
    nan = {name: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), getattr(cache, name))
           for name in ("k", "v") if getattr(cache, name) is not None}  # fmt: skip
    return dataclasses.replace(cache, **nan)


class Mixture:
    """Sequences that hold `held` rows each and get `counts` new ones."""

    def __init__(self, rng, kind, dtype, counts, held, **options):
        self.counts, self.held = np.asarray(counts), np.asarray(held)
        self.lengths = self.counts + self.held
        self.starts = (LEAD + np.r_[0, np.cumsum(self.counts)]).astype(np.int32)
        self.tokens, most = int(self.starts[-1]) + REST, int(self.lengths.max())

        def draw(*shape):
            return rng.standard_normal(shape).astype(jnp.dtype(dtype))

        self.k, self.v = (draw(len(counts), most, KV_HEADS, dim) for dim in (DIM, V_DIM))
        self.q = np.full((self.tokens, KV_HEADS * GROUP, DIM), np.nan, jnp.dtype(dtype))
        self.q[LEAD:-REST] = draw(self.tokens - LEAD - REST, KV_HEADS * GROUP, DIM)
        capacities = [max(int(n), 1) + 16 - max(int(n), 1) % 8 for n in self.lengths]
        cache = cache_of(kind, capacities, dtype, **options)
        if not cache.quantized:
            cache = spoiled(cache)
        first = jnp.asarray(self.held, jnp.int32)
        before = (x[:, : max(self.held.max(), 1)] for x in (self.k, self.v))
        self.before = pa.append_kv(cache, *before, new_lengths=first, implementation="reference")

    def packed(self, x):
        """The new rows of k or v, NaN where nobody owns them."""
        rows = np.full((self.tokens, *x.shape[2:]), np.nan, x.dtype)
        for m, start in enumerate(self.starts[:-1]):
            rows[start : start + self.counts[m]] = x[m, self.held[m] : self.lengths[m]]
        return rows

    def arguments(self):
        """Arguments of `append_and_decode`."""
        return self.before, self.q, self.packed(self.k), self.packed(self.v), self.starts

    def expected(self, m, mask, tensor_cores, **options):
        own = slice(self.starts[m], self.starts[m + 1])
        k, v = (x[m : m + 1, : self.lengths[m]] for x in (self.k, self.v))
        arguments = {"q": self.q[None, own], "k": k, "v": v, "mask": mask}
        arguments |= {"q_offset": np.asarray([self.held[m]], np.int32)} | options
        return budget.attention(arguments, tensor_cores=tensor_cores)

    def check(self, out, lse, subject, mask=CAUSAL, but=(), seen=None, **options):
        """Every sequence against the oracle; NaN for those in `but`, 0 for rows of nobody. `seen`
        gives the `mask_array` of one.
        """
        out, lse = np.asarray(out), np.asarray(lse)
        assert out.shape == self.q.shape and lse.shape == (KV_HEADS * GROUP, self.tokens)
        owned = np.zeros(self.tokens, bool)
        owned[self.starts[0] : self.starts[-1]] = True
        assert not out[~owned].any() and np.isneginf(lse[:, ~owned]).all()
        for m in np.flatnonzero(self.counts):
            own = slice(self.starts[m], self.starts[m + 1])
            if m in but:
                assert np.isnan(out[own].astype(np.float32)).all() and np.isnan(lse[:, own]).all()
                continue
            call_options = options if seen is None else options | {"mask_array": seen(m)}
            wanted = self.expected(m, mask, subject.tensor_cores, **call_options)
            budget.check({"out": out[None, own], "lse": lse[None, :, own]}, wanted)


def append_and_decode(cache, q, k, v, starts, *, implementation, **options):
    cache = pa.append_kv(cache, k, v, starts=starts, implementation=implementation)
    results = pa.decode_attention_with_lse(
        q, cache, starts=starts, implementation=implementation, **options
    )
    return cache, *results


OPTIONS = {
    "plain": {},
    "window": {"mask": sliding_window(40)},
    "full_sinks": {"mask": FULL, "sinks": np.linspace(-1, 2, KV_HEADS * GROUP, dtype=np.float32)},
    "softcap": {"softcap": 3.0},
}
TURNS = [(kind, name) for kind in KINDS for name in OPTIONS if kind == "paged" or name == "plain"]
each_subject = pytest.mark.parametrize("subject", subjects.rows("decode", but=("interpreted",)))
INTERPRETED = [row for row in subjects.ROWS if row.name in ("interpreted", "portable")]
SOME = [
    INTERPRETED[0].param("stacked", "plain", id="stacked"),
    INTERPRETED[1].param("per_sequence", "full_sinks", id="per_sequence"),
]


@pytest.mark.parametrize("subject, kind, name", SOME)
def test_a_mixture_interpreted(rng, subject, kind, name):
    _check_mixture(rng, subject, kind, name)


def of_trees(mixture, parents, window=None, drafts_most=2**31):
    """`Mixture.check(seen=)`: what drafts see, and rows of sequences that have too many."""

    def seen(m):
        count, held = mixture.counts[m], mixture.held[m]
        own = parents[None, mixture.starts[m] : mixture.starts[m + 1]]
        if count > drafts_most:
            own = np.arange(count)[None] - 1
        known = ancestors(own)[0]
        depth, key = known.sum(axis=1) - 1, np.arange(held + count) - held
        within = np.maximum(key, 0)
        stands = np.where(key < 0, key, depth[within])
        result = (key < 0) | known[:, within]
        return (result & (depth[:, None] - stands < (window or 2**30)))[None, None]

    return seen


def some_packed_parents(tokens):
    """int32[tokens]: earlier drafts, and numbers that are none."""
    rng = np.random.default_rng(tokens)
    parents = np.where(np.arange(tokens) % 3 > 0, rng.integers(-1, 8, tokens), -1)
    parents[::11], parents[5::13] = 2**31 - 1, -(2**31)
    return parents.astype(np.int32)


TREES = [("paged", None, None), ("stacked", 6, 32)]


@pytest.mark.parametrize("kind, window, drafts_most", TREES)
@pytest.mark.parametrize("subject", subjects.rows("decode"))
def test_trees(rng, subject, kind, window, drafts_most):
    """Sequences of one draft, of many and of none; and, of more than trees may have, prompts."""
    many = subject.implementation != "reference" and not subject.generation  # a GPU
    sizes = (COUNTS, HELD) if many else (FEW_COUNTS, FEW_HELD)
    mixture = Mixture(rng, kind, subject.dtype, *sizes)
    parents = some_packed_parents(mixture.tokens)
    tree = pa.DraftTree.create(parents, mixture.starts, drafts_most=drafts_most)
    k, v = (mixture.packed(x) for x in (mixture.k, mixture.v))
    cache = pa.append_kv(mixture.before, k, v, starts=mixture.starts, implementation="reference")
    options = {} if window is None else {"mask": sliding_window(window)}
    options |= {"starts": jnp.asarray(mixture.starts), "parents": tree}
    out, lse = subject.call(pa.decode_attention_with_lse, mixture.q, cache, **options)
    seen = of_trees(mixture, parents, window, drafts_most or mixture.tokens)
    mixture.check(out, lse, subject, seen=seen)


def test_trees_of_as_many_drafts_are_those_of_rows_that_are_not_packed(rng):
    """Rotated and windowed, too; starts that are clipped own the same rows."""
    drafts, lengths = 5, np.array([9, 0, 3], np.int32)
    cache = cache_of("stacked", (32,) * 3, "float32").extend(lengths).extend(drafts)
    q, k, v = (
        jnp.asarray(rng.standard_normal((3, drafts, n, 64), np.float32)) for n in (4, KV_HEADS, 2)
    )
    parents = some_parents(3, drafts)
    options = {"rotary": pa.Rotary.create(32, 64), "norm": pa.RMSNorm(jnp.ones(64))}
    starts = np.array([-(2**31), 5, 10, 2**31 - 1], np.int32)

    def step(packed, mask):
        arguments = options | {"parents": parents}
        rows = (q, k, v)
        if packed:
            rows = [x.reshape(-1, *x.shape[2:]) for x in rows]
            arguments |= {"parents": parents.reshape(-1), "starts": starts}
        written = pa.write_kv(cache, *rows[1:], **arguments)
        out = pa.decode_attention(rows[0], written, mask=mask, **arguments)
        return written, out.reshape(q.shape)

    for mask in (CAUSAL, sliding_window(3)):
        (first, out), (other, want) = (
            jax.jit(step, static_argnums=(0, 1))(x, mask) for x in (1, 0)
        )
        np.testing.assert_allclose(first.k, other.k, atol=1e-6)
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.by_xla
def test_a_tree_of_other_starts(rng):
    """Refused where both are known; else NaN where a sequence has other rows, and only there."""
    parents = jnp.asarray([-1, 0, 0, -1, 0, -1, 0, 1], jnp.int32)
    starts, others = (jnp.asarray(x, jnp.int32) for x in ([0, 3, 5, 8], [0, 3, 6, 8]))
    angles = jnp.asarray(rng.standard_normal((2, 32, 32), np.float32))
    rotary, cache = pa.Rotary(*angles), cache_of("stacked", (32,) * 3, "float32")
    q, k, v = (jnp.asarray(rng.standard_normal((8, n, 64), np.float32)) for n in (4, 2, 2))

    def step(tree, starts):
        how = {"starts": starts, "parents": tree, "rotary": rotary}
        written = pa.write_kv(cache.extend(jnp.diff(starts)), k, v, **how)
        return [written.k, *pa.decode_attention_with_lse(q, written, **how)]

    tree = pa.DraftTree.create(parents, starts)
    want = step(tree, starts)
    for same in (
        step(parents, starts),
        jax.jit(step)(tree, starts),
        step(tree, np.asarray(starts)),
    ):
        for mine, other in zip(same, want, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)
    _, out, lse = jax.jit(step)(tree, others)
    rows = np.arange(8) >= 3
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), rows)
    np.testing.assert_array_equal(np.isnan(lse).all(axis=0), rows)
    right = jax.jit(step)(pa.DraftTree.create(parents, others), others)
    np.testing.assert_allclose(out[:3], right[1][:3], atol=1e-6)
    written = cache.extend(jnp.diff(others))
    known = (
        "parents: expected a DraftTree made with the starts of this call, [0, 3, 6, 8], got one "
    )
    known += "made with [0, 3, 5, 8]; make it with DraftTree.create(parents, starts)"
    for call in (
        lambda: pa.decode_attention(q, written, starts=others, parents=tree),
        lambda: pa.write_kv(written, k, v, starts=others, parents=tree, rotary=rotary),
        lambda: pa.append_kv(cache, k, v, starts=np.asarray(others), parents=tree),
    ):
        for run in (call, jax.jit(call)):
            with pytest.raises(ValueError, match=re.escape(known)):
                run()
    with pytest.raises(ValueError, match=r"of this call, \[4\], got one made with \[3\]"):
        shorter = pa.DraftTree.create(parents, starts[1:])
        jax.eval_shape(lambda x: pa.decode_attention(q, written, starts=x, parents=shorter), others)


def test_rows_of_a_sequence_with_too_many_drafts_see_what_causal_rows_do():
    parents, starts = np.full(100, -1, np.int32), np.array([2, 3, 70, 70, 99], np.int32)
    tree = pa.DraftTree.create(parents, starts, drafts_most=33)
    bits, depth = (np.asarray(x) for x in (tree.bits, tree.depth))
    assert bits.shape == (100, 3) and (bits[3:70] == -1).all()
    np.testing.assert_array_equal(depth[3:70], np.arange(67))
    assert not depth[70:].any() and (bits[:, 0] == -1).all()
    np.testing.assert_array_equal(bits[70:99, 1], np.left_shift(np.int32(1), np.arange(29)))
    none = pa.DraftTree.create(np.zeros(0, np.int32), np.zeros(4, np.int32))
    assert none.bits.shape == (0, 2) and none.depth.shape == (0,)
    cache = cache_of("stacked", (32,) * 3, "float32").extend(0)
    out = pa.decode_attention(
        np.zeros((0, 4, 64), np.float32), cache, starts=np.zeros(4, np.int32), parents=none,
        mask=sliding_window(3),
    )  # fmt: skip
    assert out.shape == (0, 4, 64)


@pytest.mark.guards
@pytest.mark.parametrize("changes", [{"splits": 2}, {"together": 2}], ids=["splits", "together"])
def test_dealing_interpreted(rng, changes):
    """A chunk whose keys several blocks share, combined into the rows of the others; or whose kv
    heads are taken in turn.
    """
    few = {"block_kv": 64, "grid": 3} | changes
    with config.forced("prefill_sm90", few):
        _check_mixture(rng, INTERPRETED[0], "paged", "full_sinks")


def test_separate_caches_of_several_launches_interpreted(rng, monkeypatch):
    """Each writes its sequences' rows into the results of those before."""
    monkeypatch.setattr(sm90, "CACHES_OF_A_LAUNCH", 2)
    _check_mixture(rng, INTERPRETED[0], "per_sequence", "full_sinks")


@pytest.mark.guards
@pytest.mark.parametrize("subject", [row.param() for row in INTERPRETED])
def test_two_neighbours_that_are_split_interpreted(rng, subject):
    """Blocks combine the keys of each."""
    mixture = Mixture(rng, "stacked", "bfloat16", (1, 1), (300, 270))
    _, *results = subject.call(append_and_decode, *mixture.arguments())
    mixture.check(*results, subject)


@each_subject
@pytest.mark.parametrize("kind, name", TURNS)
def test_a_mixture(rng, subject, kind, name):
    """Prompts, chunks, single tokens and sequences without rows, with NaN past every length and in
    rows that nobody owns.
    """
    _check_mixture(rng, subject, kind, name)


@pytest.mark.parametrize("subject", subjects.rows("decode"))
def test_no_more_rows_than_sequences(rng, subject):
    """Kernels then take it that most sequences have one row; those that have more are right too."""
    _check_mixture(rng, subject, "stacked", "window", (ONES, ONES_HELD))


def test_what_few_rows_are():
    """One where there are no more rows than sequences, but for bits that depend on nobody else."""
    base = dataclasses.replace(
        support._BASE["decode"], gpu="sm90", tokens=64, q_len=64, q_heads=32, kv_heads=8
    )
    base = dataclasses.replace(base, sequences=64, capacities=(8192,) * 64)
    for changes, few in (
        ({}, 1),
        ({"tokens": 65}, 2),
        ({"batch_invariant": True}, 2),
        ({"kv_heads": 32, "tokens": 65}, 8),
        ({"tokens": 63}, 1),
    ):
        of_few, rest = launches.by_rows(dataclasses.replace(base, **changes))
        assert (of_few.q_len, rest.fewest) == (few, few + 1)
    fewer = dataclasses.replace(base, sequences=63, capacities=(8192,) * 63)
    splits = [sm90.Config.default(problem).splits for problem in (base, fewer)]
    assert splits[0] == 1 < splits[1]


@pytest.mark.parametrize("sequences", [1, 31, 32, 33, 64, 100])
def test_which_sequence_is_the_next_that_has_work(rng, sequences):
    plan = types.SimpleNamespace(problem=types.SimpleNamespace(sequences=sequences))
    thread, each = BlockOfThreads(0, Memory()), -(-sequences // 32)
    ctx = ThreadContext(thread, None, None, plan)
    places = [thread.index % 32 * each + i for i in range(each)]
    for share in np.linspace(0, 1, 9):
        some = rng.random(32 * each) < share
        some[sequences:] = False
        result = decode_packed._following(ctx, places, [some[m] for m in places])
        for m, following in zip(
            np.stack(places).T.ravel(), np.stack(result).T.ravel(), strict=True
        ):
            later = np.flatnonzero(some[m + 1 :])
            assert following == (m + 1 + later[0] if later.size else sequences - 1)


def _check_mixture(rng, subject, kind, name, sizes=None):
    few = "gpu" not in subject.marks
    counts, held = sizes or ((FEW_COUNTS, FEW_HELD) if few else (COUNTS, HELD))
    mixture = Mixture(rng, kind, subject.dtype, counts, held)
    cache, out, lse = subject.call(append_and_decode, *mixture.arguments(), **OPTIONS[name])
    np.testing.assert_array_equal(cache.lengths, mixture.lengths)
    mixture.check(out, lse, subject, **OPTIONS[name])


# ---- starts of any kind --------------------------------------------------------------------------


def owners_of(starts, tokens):
    """Which sequence owns each row, -1 for none: a loop over the definition."""
    owners, last = np.full(tokens, -1), 0
    ends = []
    for start in starts:
        last = max(last, min(max(int(start), 0), tokens))
        ends.append(last)
    for m, (first, end) in enumerate(zip(ends, ends[1:], strict=False)):
        owners[first:end] = m
    return owners


LOW, HIGH = -(2**31), 2**31 - 1
STARTS = ((0, 3, 3, 9), (2, 5, 4, 7), (LOW, HIGH, LOW, HIGH), (5, 0, 0, 9), (HIGH, 0, 1, 2),
          (-3, 1, LOW, 8), (9, 9, 9, 9), (3, HIGH, 4, 5))  # fmt: skip


def _of_starts(row):
    return STARTS[1:2] if row.generation else STARTS


@pytest.mark.parametrize(
    "subject, starts",
    [
        row.param(starts, id=str(starts))
        for row in subjects.ROWS
        if row.exists("append") and row.exists("decode")
        for starts in _of_starts(row)
    ],
)
def test_starts_mean_something_over_all_of_int32(rng, subject, starts):
    """Rows of a sequence go behind what it has and see what is before them."""
    tokens, held, kind = 9, (2, 0, 20), KINDS[len(STARTS) % 2 + 1]
    owners = owners_of(starts, tokens)
    draw = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(subject.dtype))  # noqa: E731
    old_k, old_v = (draw(3, 20, KV_HEADS, dim) for dim in (DIM, V_DIM))
    q = draw(tokens, KV_HEADS * GROUP, DIM)
    k, v = (draw(tokens, KV_HEADS, dim) for dim in (DIM, V_DIM))
    cache = spoiled(cache_of(kind, (40,) * 3, subject.dtype))
    cache = pa.append_kv(
        cache, old_k, old_v, new_lengths=jnp.asarray(held), implementation="reference"
    )
    inputs = cache, q, k, v, np.asarray(starts, np.int32)
    after, out, lse = subject.call(append_and_decode, *inputs)
    np.testing.assert_array_equal(
        after.lengths, [n + (owners == m).sum() for m, n in enumerate(held)]
    )
    assert not np.asarray(out)[owners < 0].any()
    assert np.isneginf(np.asarray(lse)[:, owners < 0]).all()
    for m, n in enumerate(held):
        mine = np.flatnonzero(owners == m)
        if len(mine):
            keys, values = (np.concatenate([x[m, :n], y[mine]])[None]
                            for x, y in ((old_k, k), (old_v, v)))  # fmt: skip
            arguments = {"q": q[None, mine], "k": keys, "v": values, "mask": CAUSAL}
            arguments["q_offset"] = np.asarray([n], np.int32)
            wanted = budget.attention(arguments, tensor_cores=subject.tensor_cores)
            got = {"out": np.asarray(out)[None, mine], "lse": np.asarray(lse)[None, :, mine]}
            budget.check(got, wanted)


@pytest.mark.by_xla
@each_subject
def test_lost_sequences_spoil_their_rows_alone(rng, subject):
    """One that overflowed, one whose first page is missing, one that was never extended."""
    held, counts = (70, 5, 0, 40), (1, 30, 3, 20)
    mixture = Mixture(rng, "paged", subject.dtype, counts, held)
    cache, *_ = subject.call(append_and_decode, *mixture.arguments())
    decode = pa.decode_attention_with_lse
    table = cache.page_table.at[3, 0].set(-2)
    lengths = cache.lengths.at[1].set(10**6).at[2].set(0)
    new_lengths = cache.new_lengths.at[2].set(-1)
    lost = dataclasses.replace(cache, page_table=table, lengths=lengths, new_lengths=new_lengths)
    out, lse = subject.call(decode, mixture.q, lost, starts=jnp.asarray(mixture.starts))
    mixture.check(out, lse, subject, but=(1, 2, 3))


@pytest.mark.parametrize("subject", subjects.rows("decode", but=("interpreted", "reference")))
def test_bits_do_not_depend_on_the_others(rng, subject):
    """`batch_invariant`: a sequence of one row and one of 40, among others of other sizes. The
    reference is left out: matmuls of XLA on a CPU may round by the number of rows.
    """
    held, cache = (60, 33, 0, 90), None
    results = []
    for counts in ((1, 0, 40, 2), (1, 23, 40, 0)):
        mixture = Mixture(np.random.default_rng(3), "stacked", subject.dtype, counts, held)
        if cache is None:
            cache, q, k = mixture.before, mixture.q, rng.standard_normal((41, KV_HEADS, DIM))
        mine = np.r_[mixture.starts[0], mixture.starts[2] : mixture.starts[3]]
        rows = np.zeros((2 * mixture.tokens, KV_HEADS, DIM), jnp.dtype(subject.dtype))[
            : mixture.tokens
        ]
        rows[mine] = k.astype(rows.dtype)
        queries = np.ones((mixture.tokens, *q.shape[1:]), q.dtype)
        queries[mine] = k.astype(rows.dtype).repeat(GROUP, axis=1)
        arguments = cache, queries, rows, rows, mixture.starts
        options = {"batch_invariant": True}
        _, out, lse = subject.call(append_and_decode, *arguments, **options)
        results.append((np.asarray(out)[mine], np.asarray(lse)[:, mine]))
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_rows_that_extend_did_not_take(rng):
    """`write_kv` fills what `extend` took, the first rows first, and nothing where it has not been;
    the others stay where they are.
    """
    cache = cache_of("stacked", (8,) * 3, "float32")
    rows = rng.standard_normal((2, 6, KV_HEADS, DIM)).astype("float32")
    starts = jnp.asarray([0, 3, 5, 6])
    taken = cache.extend(jnp.asarray([2, 3, 0])).reset(2)
    with pytest.raises(ValueError, match=r"none since sequences \[2\]"):
        pa.write_kv(taken, *rows, starts=starts)
    got = jax.jit(pa.write_kv)(taken, *rows, starts=starts)
    for buffer, new in ((got.k, rows[0]), (got.v, rows[1])):
        wanted = np.zeros(buffer.shape, np.float32)
        wanted[0, :, :2] = new[:2].swapaxes(0, 1)
        wanted[1, :, :2] = new[3:5].swapaxes(0, 1)
        np.testing.assert_array_equal(buffer, wanted)


WRONG = (
    {"starts": jnp.zeros(3, jnp.int32)},
    {"q": jnp.zeros((3, 2, 4, 64))},
    {"k": jnp.zeros((3, 2, 2, 64))},
    {"v": jnp.zeros((5, 2, 64))},
    {"new_lengths": jnp.ones(3, jnp.int32)},
)


def wrong(change):
    rows = jnp.zeros((6, 2, 64))
    arguments = {"q": jnp.zeros((6, 4, 64)), "k": rows, "v": rows, "starts": jnp.arange(4)} | change
    new_lengths, q = arguments.pop("new_lengths", None), arguments.pop("q")
    cache = cache_of("stacked", (8,) * 3, "float32")
    after = pa.append_kv(cache, **arguments, new_lengths=new_lengths)
    pa.decode_attention(q, after, starts=arguments["starts"])


MESSAGES = {"packed_rows": tuple(functools.partial(wrong, change) for change in WRONG)}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_messages(call, message):
    messages.check(call, message)


@each_subject
@pytest.mark.parametrize("kind", ["stacked", "paged"])
def test_latent_rows_are_as_those_of_equal_numbers(rng, subject, kind):
    """Two rows of each sequence, packed or not."""
    rows = {"kv_heads": 1, "head_dim": 192, "v_head_dim": 128, "shared_kv": True}
    cache = cache_of(kind, (72, 72, 72), "bfloat16", **rows)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    held, latent, q = jnp.asarray([40, 0, 63]), draw(3, 63, 1, 192), draw(3, 2, 16, 192)
    cache = pa.append_kv(cache, latent, new_lengths=held, implementation="reference")
    cache = pa.append_kv(cache, draw(3, 2, 1, 192), implementation="reference")
    decode = pa.decode_attention_with_lse
    want, want_lse = subject.call(decode, q, cache)
    starts = jnp.asarray([0, 2, 4, 6])
    got, lse = subject.call(decode, q.reshape(6, 16, 192), cache, starts=starts)
    want, got = (np.asarray(x, np.float32).reshape(6, 16, 128) for x in (want, got))
    np.testing.assert_allclose(got, want, atol=0.03)
    want_lse = np.asarray(want_lse).transpose(1, 0, 2).reshape(16, 6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-2)


def softmax_of_rows(mixture, m, seen, q, latent):
    """out [t, N, 128] and lse [t, N] of a sequence whose K is `latent`, in float64."""
    own, length = slice(mixture.starts[m], mixture.starts[m + 1]), mixture.lengths[m]
    k = np.asarray(latent[m, :length, 0], np.float64)
    logits = np.einsum("tnh,sh->tns", np.asarray(q[own], np.float64), k) * 192**-0.5
    logits = np.where(seen[0, 0], logits, -np.inf)
    top = np.maximum(logits.max(axis=2, initial=-1e30), -1e30)
    p = np.exp(logits - top[..., None])
    total = p.sum(axis=2)
    with np.errstate(divide="ignore"):
        return p @ k[:, :128] / np.maximum(total, 1e-30)[..., None], np.log(total) + top


LATENT_HIDES = {
    "tree": ("paged", None, None),
    "window": ("stacked", 4, 8),
    "function": ("paged", None, None),
}


def parity(b, h, q, kv, several):
    """A mask function that uses all its arguments."""
    return (kv % 3 != several[b]) | (q - kv < 2 + h)


@pytest.mark.parametrize("subject, hides", [
    pytest.param(*row.values, hides, id=f"{row.id}-{hides}", marks=row.marks)
    for row in subjects.rows("decode", but=("kernels_float32",)) for hides in LATENT_HIDES
    if hides != "window" or not row.values[0].generation
])  # fmt: skip
def test_what_hides_keys_from_packed_latent_rows(rng, monkeypatch, subject, hides):
    """Trees, prompts beside them, and functions; more rows than a launch takes."""
    kind, window, drafts_most = LATENT_HIDES[hides]
    monkeypatch.setattr(rows_as_sequences, "ROWS_AT_ONCE", 16)
    mixture, heads = Mixture(rng, "stacked", "bfloat16", (1, 0, 7, 2, 12), (70, 9, 60, 0, 0)), 4
    rows = {"kv_heads": 1, "head_dim": 192, "v_head_dim": 128, "shared_kv": True}
    cache = spoiled(cache_of(kind, (72,) * 5, "bfloat16", **rows))
    draw = lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)  # noqa: E731
    latent, q = draw(5, 72, 1, 192), draw(mixture.tokens, heads, 192)
    first = jnp.asarray(mixture.held, jnp.int32)
    cache = pa.append_kv(cache, latent, new_lengths=first, implementation="reference")
    new = mixture.packed(latent)
    cache = pa.append_kv(cache, new, starts=mixture.starts, implementation="reference")
    parents = some_packed_parents(mixture.tokens)
    several = np.array([0, 1, 2, 0, 1], np.int32)
    options = {"starts": jnp.asarray(mixture.starts)}
    if hides == "function":
        options["mask"] = CAUSAL & pa.mask_fn(parity, several)
    else:
        options["parents"] = pa.DraftTree.create(parents, mixture.starts, drafts_most=drafts_most)
        options["mask"] = CAUSAL if window is None else sliding_window(window)
    out, lse = subject.call(pa.decode_attention_with_lse, q, cache, **options)
    out, lse = np.asarray(out, np.float64), np.asarray(lse).T
    in_tree = of_trees(mixture, parents, window, drafts_most or mixture.tokens)
    for m in np.flatnonzero(mixture.counts):
        if hides == "function":
            at = mixture.held[m] + np.arange(mixture.counts[m])[:, None]
            key = np.arange(mixture.lengths[m])
            seen = np.stack([parity(m, n, at, key, several) for n in range(heads)], axis=1)
            seen = (seen & (key <= at)[:, None])[None, None]
        else:
            seen = in_tree(m)[:, :, :, None]
        own = slice(mixture.starts[m], mixture.starts[m + 1])
        want, want_lse = softmax_of_rows(mixture, m, seen, q, latent)
        np.testing.assert_allclose(out[own], want, atol=0.03)
        np.testing.assert_allclose(lse[own], want_lse, atol=1e-2)
    assert not out[: mixture.starts[0]].any() and not out[mixture.starts[-1] :].any()


@pytest.mark.by_xla
@pytest.mark.parametrize(  # decode's kernel, and prefill's beside it
    "function, tokens, gpu", [("parents", 5, "sm80"), ("mask", 5, "sm90"), ("parents", 200, "sm90")]
)
def test_one_sequence_and_a_function_that_reads_its_number(function, tokens, gpu):
    """It lowers: the number of the only sequence is no constant to Pallas, which takes none into a
    loop's state.
    """
    limits = jnp.full(1, 7, jnp.int32)
    options: dict = {"mask": pa.mask_fn(lambda b, h, q, kv, limits: kv < limits[b], limits)}
    if function == "parents":
        options = {"parents": jnp.full(tokens, -1, jnp.int32)}
    cache = StackedCache.create(1, 512, 2, 64).extend(tokens)
    q, starts = jnp.zeros((tokens, 4, 64), jnp.bfloat16), jnp.asarray([0, tokens], jnp.int32)
    with device.assume(gpu):
        text = mosaic.lower_for_cuda(
            lambda q, cache: pa.decode_attention(q, cache, starts=starts, **options), q, cache
        )
    assert "mosaic_gpu" in text
