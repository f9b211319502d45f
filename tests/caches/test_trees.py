"""Drafts that form a tree, and mask functions over caches: what both mean, by the public API.

Kernels in the interpreter have both in tests/kernels/decode/test_decode_kernel.py,
test_prefill_kernel.py and test_decode_latent.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import trees
from tests.caches.test_decode import CAPACITY, GROUP, KV_HEADS, expected, holding, rows
from tests.support import budget, builds, mosaic, subjects, tolerance
from tests.support.decode_cases import ancestors, seen_in_tree, some_parents

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

LENGTHS = (CAPACITY, 17, 12, 3, 0)
each_subject = pytest.mark.parametrize("subject", subjects.rows("decode", but=("interpreted",)))


@pytest.mark.parametrize("drafts", [1, 33, 70])
def test_ancestors(drafts):
    parents = some_parents(6, drafts)
    tree, known = pa.DraftTree.create(parents), ancestors(parents)
    bits = np.asarray(tree.bits)
    at = np.arange(drafts)
    np.testing.assert_array_equal(bits[..., 1 + at // 32] >> at % 32 & 1, known)
    assert bits.shape[2] == 1 + -(-drafts // 32) and (bits[..., 0] == -1).all()
    np.testing.assert_array_equal(tree.depth, known.sum(axis=2) - 1)


@pytest.mark.by_xla
@each_subject
@pytest.mark.parametrize("kind, drafts", [("per_sequence", 9), ("stacked", 5), ("paged", 9)])
def test_a_tree(rng, subject, kind, drafts):
    """Drafts see themselves and their ancestors; a chain gives what a causal mask gives: the same
    bits by kernels, while XLA rounds another program of the reference in its own way.
    """
    options = {"softcap": 3.0} if kind == "paged" else {}
    _, k, v = rows(rng, len(LENGTHS), CAPACITY, subject.dtype)
    q = rows(rng, len(LENGTHS), drafts, subject.dtype)[0]
    cache = holding(kind, k, v, LENGTHS, poison=rng)
    parents = some_parents(len(LENGTHS), drafts)
    more = options | {"sinks": np.linspace(-1, 2, KV_HEADS * GROUP, dtype=np.float32)}
    call = subject.call
    out, lse = call(pa.decode_attention_with_lse, q, cache, parents=jnp.asarray(parents), **more)
    seen = seen_in_tree(parents, LENGTHS, CAPACITY)
    more |= {"mask_array": seen, "tensor_cores": subject.tensor_cores}
    budget.check({"out": out, "lse": lse}, expected(q, k, v, LENGTHS, **more))
    chain = np.broadcast_to(np.arange(drafts, dtype=np.int32) - 1, parents.shape)
    result = call(pa.decode_attention, q, cache, parents=pa.DraftTree.create(chain), **options)
    causal = call(pa.decode_attention, q, cache, **options)
    rounding = tolerance.NOISE if subject.implementation == "reference" else 0
    np.testing.assert_allclose(result, causal, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("subject", subjects.rows("decode"))
@pytest.mark.parametrize(
    "kind, drafts, window, traced",
    [("paged", 9, 3, False), ("stacked", 5, 6, False), ("per_sequence", 6, 2, True)],
)
def test_a_tree_in_a_window(rng, subject, kind, drafts, window, traced):
    """A draft stands where its depth puts it: keys are as far from it as they would be from a token
    that follows its ancestors; windows shorter than the tree is deep among them.
    """
    _, k, v = rows(rng, len(LENGTHS), CAPACITY, subject.dtype)
    q = rows(rng, len(LENGTHS), drafts, subject.dtype)[0]
    cache = holding(kind, k, v, LENGTHS, poison=rng)
    parents = some_parents(len(LENGTHS), drafts)

    def call(q, cache, left, implementation=None):
        mask = pa.Mask(left=left if traced else window - 1, right=0)
        options = {"mask": mask, "parents": jnp.asarray(parents)}
        return pa.decode_attention_with_lse(q, cache, **options, implementation=implementation)

    out, lse = subject.call(call, q, cache, jnp.int32(window - 1))
    depth = ancestors(parents).sum(axis=2) - 1
    begin = np.asarray(LENGTHS)[:, None, None, None] - drafts
    key = np.arange(CAPACITY)[None, None, None]
    of_draft = np.take_along_axis(depth, np.clip(key - begin, 0, drafts - 1)[:, 0, 0], axis=1)
    at = np.where(key < begin, key, begin + of_draft[:, None, None])
    near = begin + depth[:, None, :, None] - at < window
    seen = seen_in_tree(parents, LENGTHS, CAPACITY) & near
    arguments = {"mask_array": seen, "tensor_cores": subject.tensor_cores}
    budget.check({"out": out, "lse": lse}, expected(q, k, v, LENGTHS, **arguments))


@pytest.mark.parametrize("subject", subjects.rows("decode"))
@pytest.mark.parametrize("kind, window", [("stacked", None), ("per_sequence", 3)])
def test_a_tree_of_which_a_device_has_some_rows(rng, subject, kind, window):
    """A tree may begin before the block of rows, within it or behind it, and end there, too."""
    drafts, ends = 5, np.array([CAPACITY + 2, 17, 3, -4, CAPACITY + 30])
    held = np.clip(ends, 0, CAPACITY).astype(np.int32)
    _, k, v = rows(rng, len(ends), CAPACITY, subject.dtype)
    q = rows(rng, len(ends), drafts, subject.dtype)[0]
    cache = holding(kind, k, v, tuple(held.tolist()), poison=rng)
    parents = some_parents(len(ends), drafts)
    begins = tuple(jnp.asarray(x - drafts, jnp.int32) for x in (held, ends))
    left = None if window is None else window - 1
    function = trees.split(pa.DraftTree.create(parents), left, begins)
    out, lse = subject.call(pa.decode_attention_with_lse, q, cache, mask=function)
    key = np.arange(CAPACITY) - (ends - drafts)[:, None]  # from the first draft on
    known, within = ancestors(parents), np.clip(key, 0, drafts - 1)
    depth = known.sum(axis=2) - 1
    seen = np.take_along_axis(known, within[:, None], axis=2) | (key < 0)[:, None]
    at = np.where(key < 0, key, np.take_along_axis(depth, within, axis=1))
    seen &= depth[:, :, None] - at[:, None] < (window or 2**20)
    arguments = {"mask_array": seen[:, None], "mask": pa.FULL, "tensor_cores": subject.tensor_cores}
    budget.check({"out": out, "lse": lse}, expected(q, k, v, held, **arguments))


def test_a_window_of_any_int32(rng):
    """A traced window wider than the sequence is none; one that is negative shows nothing."""
    _, k, v = rows(rng, len(LENGTHS), CAPACITY, "float32")
    q, parents = rows(rng, len(LENGTHS), 5, "float32")[0], some_parents(len(LENGTHS), 5)
    cache = holding("stacked", k, v, LENGTHS, poison=rng)

    @jax.jit
    def call(left):
        mask = pa.Mask(left=left, right=0)
        return pa.decode_attention(q, cache, mask=mask, parents=jnp.asarray(parents))

    wide = np.asarray(call(jnp.int32(CAPACITY)))
    assert wide.any()
    for left in (2**29, 2**30, 2**31 - 1):
        np.testing.assert_array_equal(call(jnp.int32(left)), wide)
    for left in (-1, -(2**30), -(2**31)):
        assert not np.asarray(call(jnp.int32(left))).any()


@pytest.mark.parametrize("window", [4, 100])
def test_a_window_over_more_drafts_than_a_word_has_bits(window):
    drafts, lengths = 70, np.array([200, 75, 70, 40])
    parents, at = some_parents(4, drafts), (lengths - drafts).astype(np.int32)
    tree = pa.DraftTree.create(parents)
    band, function = trees.windowed(tree, window - 1, jnp.asarray(at))
    key, row = np.arange(200, dtype=np.int32), np.arange(drafts, dtype=np.int32)
    b, q = np.arange(4, dtype=np.int32)[:, None, None], at[:, None, None] + row[:, None]
    shown = function.allows(b, np.int32(0), q, key) & band.allows(q, key, lengths[:, None, None])
    depth, within = np.asarray(tree.depth), key - at[:, None]
    of_draft = np.take_along_axis(depth, np.clip(within, 0, drafts - 1), axis=1)
    stands = np.where(within < 0, within, of_draft)[:, None]
    near = depth[:, :, None] - stands < window
    seen = seen_in_tree(parents, lengths, 200)[:, 0] & near
    held = q >= 0  # drafts that the cache has
    np.testing.assert_array_equal(shown & held, seen & held)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("rows_of_q, bytes_spilled", [(64, 24), (4, 0), (None, 84)])
def test_machine_code_of_a_tree_in_a_window(rows_of_q, bytes_spilled):
    """The bits of a draft are read once a row: to read them for each logit spills 600 bytes. Packed
    rows (None) are two launches.
    """
    options = {"parents": True, "mask": pa.sliding_window(1024)}
    build = builds._decode("h100", "paged", rows=rows_of_q, **options)
    report = mosaic.compile_for(build.call, *build.shapes)
    assert (report.launches, report.copies) == (1 + (rows_of_q is None), 0)
    assert report.spill_bytes <= bytes_spilled


def test_positions_of_a_tree(rng):
    """K and q are rotated by their depth; one tree serves a scan over layers, and vmap."""
    lengths, drafts, layers = (9, 3), 5, 2
    parents = some_parents(4, drafts)[2:]
    rotary = pa.Rotary.create(CAPACITY, 64)
    q, k, v = rows(rng, 2, drafts, "float32")
    cache = pa.StackedCache.create(2, CAPACITY, KV_HEADS, 64, dtype="float32", layers=layers)
    cache = cache.extend(jnp.asarray(lengths)).extend(drafts)

    @jax.jit
    def step(cache, parents):
        tree = pa.DraftTree.create(parents)

        def of_layer(cache, layer):
            cache = pa.write_kv(cache, k, v, layer=layer, parents=tree, rotary=rotary)
            return cache, pa.decode_attention(q, cache, layer=layer, parents=tree, rotary=rotary)

        return jax.lax.scan(of_layer, cache, jnp.arange(layers))

    held, outs = step(cache, parents)
    depth = ancestors(parents).sum(axis=2) - 1
    at = np.asarray(lengths)[:, None] + depth

    def turned(x):
        cos, sin = (np.asarray(table)[at][:, :, None] for table in (rotary.cos, rotary.sin))
        a, b = x[..., :32], x[..., 32:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    plain = pa.write_kv(cache, turned(k), v, layer=0)
    np.testing.assert_allclose(held.k[0], plain.k[0], atol=1e-6)
    want = pa.decode_attention(turned(q), plain, layer=0, parents=parents)
    np.testing.assert_allclose(outs[0], want, atol=1e-5)
    np.testing.assert_array_equal(outs[0], outs[1])
    both = jax.vmap(lambda p: pa.decode_attention(q, held, layer=0, parents=p, rotary=rotary))
    twice = both(jnp.stack([parents, np.full_like(parents, -1)]))
    np.testing.assert_allclose(twice[0], outs[0], atol=1e-6)
    assert np.abs(np.asarray(twice[1] - twice[0])).max() > 0.1


FUNCTION = pa.mask_fn(
    lambda b, h, q, kv, ends: (kv < ends[b]) | ((q - kv) % 3 == h % 3), np.array([0, 4, 30, 1, 2])
)


@each_subject
@pytest.mark.parametrize(
    "kind, band",
    [("per_sequence", pa.CAUSAL), ("stacked", pa.sliding_window(7)), ("paged", pa.FULL)],
    ids=str,
)
def test_a_mask_function(rng, subject, kind, band):
    """A function of sequence, head and positions, within a band; packed rows too."""
    drafts, mask = 6, FUNCTION if band == pa.FULL else band & FUNCTION
    _, k, v = rows(rng, len(LENGTHS), CAPACITY, subject.dtype)
    q = rows(rng, len(LENGTHS), drafts, subject.dtype)[0]
    cache = holding(kind, k, v, LENGTHS, poison=rng)
    out, lse = subject.call(pa.decode_attention_with_lse, q, cache, mask=mask)
    sizes = (len(LENGTHS), KV_HEADS * GROUP, drafts, CAPACITY)
    b, h, t, kv = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, sizes))])
    at = t + (np.asarray(LENGTHS, np.int32) - drafts)[:, None, None, None]
    seen = np.broadcast_to(FUNCTION.allows(b, h, at, kv), sizes)
    arguments = {"mask": band, "mask_array": seen, "tensor_cores": subject.tensor_cores}
    budget.check({"out": out, "lse": lse}, expected(q, k, v, LENGTHS, **arguments))
    starts = np.arange(len(LENGTHS) + 1, dtype=np.int32) * drafts
    packed = q.reshape(-1, *q.shape[2:])
    result = subject.call(pa.decode_attention, packed, cache, mask=mask, starts=jnp.asarray(starts))
    close = {"atol": 0.02 if subject.dtype == "bfloat16" else 1e-5}
    apart = result.reshape(out.shape).astype(jnp.float32)
    np.testing.assert_allclose(apart, out.astype(jnp.float32), **close)


def test_the_band_of_a_function():
    """A band that shows all that the function shows: keys outside of it are not read."""
    window, f = pa.sliding_window(9), FUNCTION
    assert (window & f).within == window == (f & window & pa.FULL).within
    assert (window & f & pa.CAUSAL).within == window
    assert f.within == (window | f).within == (~(window & f)).within == pa.FULL
    nothing = pa.Mask(right=-5) & (pa.Mask(left=2) & f)  # which no band says
    assert nothing.within in (pa.Mask(right=-5), pa.Mask(left=2))
    traced = jax.eval_shape(lambda n: pa.CAUSAL.filled(left=n) & f, jnp.int32(3))
    assert traced.within == pa.CAUSAL
