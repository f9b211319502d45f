"""Decoding over the three caches: the same as attention over the whole sequence, token by token.

Kernels in the interpreter have the same options and lengths in
tests/kernels/decode/test_decode_kernel.py and test_cases.py, so most tests here leave them out.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import (
    CAUSAL,
    FULL,
    Mask,
    PagedCache,
    PerSequenceCache,
    StackedCache,
)
from tests.support import budget, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KINDS = ("per_sequence", "stacked", "paged")
every_kind = pytest.mark.parametrize("kind", KINDS)
each_subject = pytest.mark.parametrize("subject", subjects.rows("decode", but=("interpreted",)))
each_subject_interpreted_too = pytest.mark.parametrize("subject", subjects.rows("decode"))
CAPACITY, KV_HEADS, GROUP, DIM, V_DIM, PAGE = 24, 2, 2, 64, 64, 4


def rows(rng, sequences, count, dtype, heads=KV_HEADS, dims=(DIM, V_DIM)):
    """q, k and v of `count` tokens, [M, count, ..., H]."""
    shapes = ((heads * GROUP, dims[0]), (heads, dims[0]), (heads, dims[1]))
    return [
        jnp.asarray(rng.standard_normal((sequences, count, *shape)).astype(jnp.dtype(dtype)))
        for shape in shapes
    ]


def empty(kind, sequences, dtype, layers=None):
    sizes = {"kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": V_DIM}
    sizes |= {"dtype": dtype, "layers": layers}
    if kind == "per_sequence":
        return PerSequenceCache.create([CAPACITY + 2 * m for m in range(sequences)], **sizes)
    if kind == "stacked":
        return StackedCache.create(sequences, CAPACITY, **sizes)
    pages = sequences * CAPACITY // PAGE
    return PagedCache.create(sequences, pages, PAGE, capacity=CAPACITY, **sizes)


def holding(kind, k, v, lengths, *, layers=None, poison=None):
    """A cache whose sequence m holds the first lengths[m] rows of k, v [M, S, K, H], in the last
    layer if there are some. `poison`, an rng: NaN wherever nothing is written, and pages in an
    order of its own.
    """
    cache = empty(kind, len(lengths), k.dtype, layers)
    if poison is not None:
        filled = lambda x: jnp.full_like(x, jnp.nan)  # noqa: E731
        changes = {name: jax.tree.map(filled, getattr(cache, name)) for name in "kv"}
        if kind == "paged":
            changes["free_list"] = jnp.asarray(poison.permutation(np.asarray(cache.free_list)))
        cache = dataclasses.replace(cache, **changes)
    cache = cache.extend(jnp.asarray(lengths, jnp.int32))
    layer = {} if layers is None else {"layer": layers - 1}
    return pa.write_kv(cache, k, v, **layer, implementation="reference")


def expected(q, k, v, lengths, mask=CAUSAL, *, tensor_cores=False, **options):
    """Attention over each whole sequence, the last rows of it; see budget."""
    lengths = np.asarray(lengths, np.int32)
    arguments = {"q": q, "k": k, "v": v, "kv_lengths": lengths, "mask": mask}
    arguments |= {"q_offset": lengths - q.shape[1]} | options
    return budget.attention(arguments, tensor_cores=tensor_cores)


@each_subject_interpreted_too
@every_kind
def test_rows_written_without_extend_show(rng, subject, kind):
    """Inside jit, where no error can: NaN, in the sequences that extend has not reached."""
    q, k, v = rows(rng, 3, 2, subject.dtype)

    @jax.jit
    def write_and_decode(cache):
        cache = pa.write_kv(cache, k, v, implementation=subject.implementation)
        return pa.decode_attention_with_lse(q, cache, implementation=subject.implementation)

    fresh = empty(kind, 3, subject.dtype)
    emptied = fresh.extend(jnp.asarray([2, 0, 2], jnp.int32)).reset(2)
    with subject.active():
        result = jax.block_until_ready([write_and_decode(cache) for cache in (fresh, emptied)])
    for of_cache, reached in zip(result, ([False] * 3, [True, True, False]), strict=True):
        for x in of_cache:
            x = np.asarray(x, np.float32)
            lost = np.isnan(x).all(axis=tuple(range(1, x.ndim)))
            np.testing.assert_array_equal(lost, np.logical_not(reached))
            assert not np.isnan(x[np.array(reached)]).any()


@pytest.mark.by_xla
@each_subject
@every_kind
@pytest.mark.parametrize("traced", [False, True])
def test_layers(rng, subject, kind, traced):
    lengths = (0, 9, CAPACITY)
    _, k, v = rows(rng, 3, CAPACITY, subject.dtype)
    q = rows(rng, 3, 1, subject.dtype)[0]
    alone = holding(kind, k, v, lengths)
    wanted = subject.call(pa.decode_attention_with_lse, q, alone)
    deep = holding(kind, k, v, lengths, layers=3)
    layer = jnp.int32(2) if traced else 2
    got = subject.call(pa.decode_attention_with_lse, q, deep, layer=layer)
    for have, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(have, want)


@each_subject_interpreted_too
@pytest.mark.parametrize(
    "kind, layer", [("per_sequence", -1), ("stacked", 2), ("paged", 2**31 - 1), ("paged", -1)]
)
def test_a_traced_layer_that_is_none_of_the_caches_gives_nan(rng, subject, kind, layer):
    q, k, v = rows(rng, 2, CAPACITY, subject.dtype)
    deep = holding(kind, k, v, (3, CAPACITY), layers=2)
    out, lse = subject.call(
        pa.decode_attention_with_lse, q[:, :1], deep, layer=jnp.asarray(layer, jnp.int32)
    )
    assert np.isnan(np.asarray(out, np.float32)).all() and np.isnan(lse).all()


@pytest.mark.by_xla
@each_subject
@every_kind
def test_one_token_may_leave_its_axis_out(rng, subject, kind):
    _, k, v = rows(rng, 3, CAPACITY, subject.dtype)
    q = rows(rng, 3, 1, subject.dtype)[0]
    cache = holding(kind, k, v, (1, 8, 20))
    long = subject.call(pa.decode_attention_with_lse, q, cache)
    short = subject.call(pa.decode_attention_with_lse, q[:, 0], cache)
    np.testing.assert_array_equal(short[0], long[0][:, 0])
    np.testing.assert_array_equal(short[1], long[1][..., 0])
    np.testing.assert_array_equal(subject.call(pa.decode_attention, q, cache), long[0])


@each_subject
@every_kind
def test_batch_invariant(rng, subject, kind):
    """The bits of a sequence do not move when its neighbours change."""
    _, k, v = rows(rng, 3, CAPACITY, subject.dtype)
    q = rows(rng, 3, 1, subject.dtype)[0]
    few, many = (
        subject.call(
            pa.decode_attention_with_lse,
            q,
            holding(kind, k, v, (other, 11, other)),
            batch_invariant=True,
        )
        for other in (1, CAPACITY)
    )
    for first, two in zip(few, many, strict=True):
        np.testing.assert_array_equal(first[1], two[1])


@pytest.mark.parametrize("mask", [FULL, Mask(2, 3)], ids=str)
def test_a_mask_that_looks_ahead_sees_the_whole_chunk(rng, mask):
    _, k, v = rows(rng, 2, CAPACITY, "float32")
    q = rows(rng, 2, 3, "float32")[0]
    cache = holding("stacked", k, v, (3, 17))
    got = pa.decode_attention(q, cache, mask=mask)
    budget.check({"out": got}, expected(q, k, v, (3, 17), mask))


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_the_cache_may_have_a_dtype_of_its_own(rng, q_dtype):
    _, k, v = rows(rng, 2, CAPACITY, "float16")
    q = rows(rng, 2, 1, q_dtype)[0]
    out = pa.decode_attention(q, holding("stacked", k, v, (5, 20)))
    assert out.dtype == q_dtype
    wide = (x.astype("float32") for x in (q, k, v))
    wanted = expected(*wide, (5, 20)).oracle["out"]
    tolerance = 1e-5 if q_dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layers", [None, 2])
@every_kind
@each_subject_interpreted_too
def test_a_cache_without_any_row(subject, kind, layers):
    """Nothing is launched: NaN for a sequence that should have rows, or was never extended; and for
    all where the cache has no such layer. `create` makes no such cache.
    """
    cache = empty(kind, 3, "float32", layers)
    if kind == "paged":
        no_rows = lambda x: x[:0] if layers is None else x[:, :0]  # noqa: E731
    else:
        no_rows = lambda x: x[..., :0, :]  # noqa: E731
    lengths = {"lengths": jnp.array([0, 3, 0]), "new_lengths": jnp.array([0, 0, -1])}
    arrays = {name: jax.tree.map(no_rows, getattr(cache, name)) for name in "kv"}
    cache = dataclasses.replace(cache, **arrays, **lengths)
    q = jnp.ones((3, 2, KV_HEADS * GROUP, DIM), jnp.float32)
    packed = {"starts": jnp.array([0, 1, 3, 4])}  # two rows without a sequence behind them
    calls = [({}, q, [False, True, True])]
    calls += [(packed, q.reshape(6, *q.shape[2:]), [False, True, True, True, False, False])]
    if kind != "per_sequence":
        calls += [({"kv_indices": jnp.zeros((3, 2, 5), jnp.int32)}, q, [False, True, True])]
    for options, rows_of_q, lost in calls:
        for layer in (None,) if layers is None else (0, 2, -1):
            at = {} if layer is None else {"layer": jnp.int32(layer)}
            out, lse = subject.call(pa.decode_attention_with_lse, rows_of_q, cache, **options, **at)
            all_lost = layer not in (None, 0)
            owned = np.array([True] * 4 + [False] * 2 if options is packed else [True] * 3)
            want = np.where(owned & all_lost, True, lost)
            each = np.isnan(np.asarray(out)).reshape(len(rows_of_q), -1)
            np.testing.assert_array_equal(each.all(axis=1), want)
            np.testing.assert_array_equal(each.any(axis=1), want)
            by_row = np.asarray(lse).T if options is packed else np.asarray(lse)[..., 0]
            np.testing.assert_array_equal(np.isnan(by_row).all(axis=1), want)
            assert not np.asarray(out)[~want].any() and (by_row[~want] == -np.inf).all()
