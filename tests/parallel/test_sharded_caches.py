"""Caches whose rows are split over devices, on eight of the CPU's: whatever is written and decoded
there is what one device has, bit for bit where rows are stored.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn._call import device, dispatch
from tests.caches import test_keep
from tests.support import append_cases, decode_cases, messages, mosaic, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

N, K, H, LAYERS = 4, 2, 8, 2
SINKS = jnp.asarray([0.5, np.inf, 2.0, -np.inf])
CONTEXT = pa.Context("cp")


def mesh_of(shards):
    return jax.make_mesh((shards,), ("cp",), (AxisType.Auto,), devices=jax.devices()[:shards])


def create(kind, capacity, sequences=3, context=None, **options):
    sizes = {"kv_heads": K, "head_dim": H, "dtype": jnp.float32, "context": context} | options
    if kind == "stacked":
        return pa.StackedCache.create(sequences, capacity, **sizes)
    capacities = (capacity, 2 * capacity, capacity)[:sequences]
    return pa.PerSequenceCache.create(capacities, **sizes)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def tables(positions):
    angle = jnp.outer(jnp.arange(positions, dtype=jnp.float32), 100.0 ** -jnp.linspace(0, 1, 3))
    return pa.Rotary(jnp.cos(angle), jnp.sin(angle), first=1)


def program(cache, counts, rows, options, packed=False):
    """Rows are taken and written three times, with counts for each sequence; after each time,
    every layer is decoded: (out, lse), and the cache.
    """
    change = {}
    if options.get("change"):
        norm = pa.RMSNorm(jnp.linspace(0.5, 2, H), 1e-5)
        change = {"rotary": tables(64), "norm": norm}
    how = {name: x for name, x in options.items() if name != "change"} | change
    if options.get("parents") is not None:
        change["parents"] = options["parents"]

    def step(cache, arrays):
        counts, q, k, v = arrays
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)])

        def of_layer(cache, new):
            layer, k, v = new
            if packed:
                k, v = (x.reshape(-1, *x.shape[2:])[:-1] for x in (k, v))
                cache = pa.write_kv(cache, k, v, starts=starts, layer=layer, **change)
            else:
                values = () if cache.shared_kv else (v,)
                cache = pa.write_kv(cache, k, *values, layer=layer, **change)
            return cache, pa.decode_attention_with_lse(q, cache, layer=layer, **how)

        layers = jnp.arange(LAYERS, dtype=jnp.int32)
        return jax.lax.scan(of_layer, cache.extend(counts), (layers, k, v))

    cache, result = jax.lax.scan(step, cache, (counts, *(rows[name] for name in "qkv")))
    return result, cache


def drawn(sequences, t, kv_heads=K, v_dim=H):
    return {
        "q": draw(0, 3, sequences, t, N, H),
        "k": draw(1, 3, LAYERS, sequences, t, kv_heads, H),
        "v": draw(2, 3, LAYERS, sequences, t, kv_heads, v_dim),
    }


def both(kind, shards, capacity, counts, rows, options, packed=False, **sizes):
    """The cache of one device, and that of `shards`."""
    counts = jnp.asarray(counts, jnp.int32)
    sequences = counts.shape[1]
    run = functools.partial(program, options=options, packed=packed)
    sizes = {"sequences": sequences, "layers": LAYERS} | sizes
    want = jax.jit(run)(create(kind, capacity, **sizes), counts, rows)
    cache = create(kind, capacity, context=CONTEXT, **sizes)
    mesh, specs = mesh_of(shards), cache.specs()
    placed = jax.device_put(cache, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    split = jax.shard_map(run, mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs))
    return jax.jit(split)(placed, counts, rows), want


def assert_same(got, want):
    (result, cache), (wanted, other) = got, want
    for g, w in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)
    other = dataclasses.replace(other, context=cache.context)
    assert jax.tree.structure(cache) == jax.tree.structure(other)
    for g, w in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))
    np.testing.assert_array_equal(cache.overflowed, other.overflowed)


ONE = [[1, 1, 0], [1, 1, 0], [1, 0, 0]]  # some devices have nothing, and one sequence never has
FEW = [[4, 3, 1], [4, 0, 4], [3, 4, 2]]  # over the edges of blocks
FULL = [[4, 4, 4], [4, 4, 1], [4, 1, 0]]  # the first overflows a capacity of 8
TREE = {"parents": decode_cases.some_parents(3, 4), "change": True}
CASES = {
    "tree": ("stacked", 4, 16, 4, FEW, TREE | {"sinks": SINKS}, {}),
    "tree of separate": ("per_sequence", 2, 8, 4, FEW, TREE | {"softcap": 3.0}, {}),
    "tree in a window": ("stacked", 8, 16, 4, FEW, TREE | {"mask": pa.sliding_window(3)}, {}),
    "tree lost": ("stacked", 2, 8, 4, FULL, TREE, {"dtype": jnp.int8}),
    "one token": ("stacked", 8, 16, 1, ONE, {"sinks": SINKS}, {}),
    "few": ("stacked", 4, 16, 4, FEW, {"softcap": 3.0, "sinks": SINKS}, {}),
    "full": ("stacked", 2, 8, 4, FULL, {"mask": pa.FULL}, {}),
    "window": ("stacked", 8, 16, 4, FEW, {"mask": pa.sliding_window(3)}, {}),
    "separate": ("per_sequence", 2, 8, 4, FEW, {"mask": pa.Mask(5, -1)}, {}),
    "quantised": ("stacked", 2, 16, 4, FEW, {"change": True}, {"dtype": jnp.int8}),
    "one sequence": ("stacked", 8, 16, 4, [[4], [3], [4]], {"mask": pa.sliding_window(6)}, {}),
    "shared": ("stacked", 2, 16, 1, ONE, {}, {"shared_kv": True, "v_head_dim": 4, "kv_heads": 1}),
}


BY_XLA = ("few", "separate")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.by_xla if x in BY_XLA else ()) for x in CASES]
)
def test_as_on_one_device(name):
    kind, shards, capacity, t, counts, options, sizes = CASES[name]
    rows = drawn(len(counts[0]), t, sizes.get("kv_heads", K), sizes.get("v_head_dim", H))
    got, want = both(kind, shards, capacity, counts, rows, options, **sizes)
    assert_same(got, want)
    lost = np.asarray(got[1].overflowed)
    assert lost.any() == (name in ("full", "separate", "tree of separate", "tree lost"))
    out = np.asarray(got[0][0][-1])  # [layers, sequences, ..]
    assert np.isnan(out[:, lost]).all() and np.isfinite(out[:, ~lost]).all()


@pytest.mark.by_xla
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_collective_a_step(dtype):
    """Out and lse travel together: of one token a collective is what takes long."""
    cache = create("stacked", 16, context=CONTEXT, dtype=jnp.dtype(dtype)).extend(9)
    mesh, specs = mesh_of(4), cache.specs()
    local = jax.shard_map(
        pa.decode_attention_with_lse, mesh=mesh, in_specs=(P(), specs), out_specs=P()
    )
    compiled = jax.jit(local).lower(draw(0, 3, N, H).astype(dtype), cache).compile()
    assert compiled.as_text().count(" all-gather(") == 1


def test_packed_rows_are_written_where_they_live():
    counts = [[4, 3, 1], [4, 0, 4], [3, 4, 2]]
    assert_same(*both("stacked", 4, 16, counts, drawn(3, 4), {}, packed=True))


KEEPS = {
    "stacked": ("stacked", 8, {"dtype": jnp.bfloat16, "v_head_dim": 24}),
    "separate": ("per_sequence", 2, {"dtype": jnp.float8_e4m3fn}),
    "one layer": ("stacked", 4, {"dtype": jnp.int8, "layers": None}),
    "within k": ("per_sequence", 2, {"layers": None, "dtype": jnp.float16, "head_dim": 5}),
}
KEEPS["within k"][2].update({"shared_kv": True, "v_head_dim": 3, "kv_heads": 1})


def drafts(rng, name, context=CONTEXT):
    """A cache of random bits, in which drafts begin and end within a block and at its edges, over
    several blocks and behind the last one; counts and a path, of all int32.
    """
    kind, shards, options = KEEPS[name]
    cache = create(kind, 32, 5 if kind == "stacked" else 3, **{"layers": LAYERS} | options)
    sequences = cache.num_sequences
    lengths, new = ([3, 12, 30, 5, 2], [9, 6, 15, 0, 30])
    cache = cache.extend(jnp.asarray(lengths[:sequences])).extend(jnp.asarray(new[:sequences]))
    cache = dataclasses.replace(test_keep.with_bits(rng, cache), context=context)
    counts = np.asarray([4, 2**31 - 1, 2, 1, 5][:sequences], np.int32)
    path = rng.integers(-3, 12, (sequences, 6)).astype(np.int32)
    path[0, :4], path[1, :3], path[-1, :5] = (
        [8, -(2**31), 1, 2],
        [5, 2**31 - 1, 0],
        [29, 2, 9, 9, 0],
    )
    return cache, counts, path, shards


@pytest.mark.by_xla
@pytest.mark.parametrize("name", KEEPS)
def test_a_path_is_kept_as_on_one_device(rng, name):
    """Bit for bit and in place, twice in one program; one sum over devices each time."""
    cache, counts, path, shards = drafts(rng, name)

    def twice(cache, counts, path):
        return cache.keep(counts, path).extend(3).keep(2, 2 - path)

    want = dataclasses.replace(cache, context=None)
    want = jax.tree.map(jnp.asarray, test_keep.expected(want, counts, path))
    want = test_keep.expected(want.extend(3), np.full_like(counts, 2), 2 - path)
    specs, mesh = cache.specs(), mesh_of(shards)
    cache = jax.device_put(cache, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    split = jax.shard_map(twice, mesh=mesh, in_specs=(specs, P(), P()), out_specs=specs)
    compiled = jax.jit(split, donate_argnums=0).lower(cache, counts, path).compile()
    assert compiled.as_text().count(" all-reduce(") == 2
    before = places_of(cache)
    got = compiled(cache, counts, path)
    assert places_of(got) == before
    append_cases.assert_same_bytes(dataclasses.replace(got, context=None), want)


def places_of(cache):
    """Places of the devices' blocks of the numbers."""
    return [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves((cache.k, cache.v))
        for shard in x.addressable_shards
    ]


@pytest.mark.guards
@pytest.mark.parametrize("subject", [x for x in subjects.rows("keep") if x.values[0].generation])
def test_kernels_write_the_rows_of_a_path(rng, subject):
    """The blocks of a cache as rows of a `vmap` that names its axis; layers, and scales."""
    cache, counts, path, shards = drafts(rng, "separate")
    want = test_keep.expected(dataclasses.replace(cache, context=None), counts, path)
    rows = {side: -2 + side.endswith("scale") for side in test_keep.SIDES}
    blocks = {
        side: jax.tree.map(
            lambda x, axis=axis: jnp.stack(jnp.split(x, shards, axis)), getattr(cache, side)
        )
        for side, axis in rows.items()
    }

    def local(blocks, implementation):
        return dataclasses.replace(cache, **blocks).keep(
            counts, path, implementation=implementation
        )

    def call(blocks, implementation):
        run = functools.partial(local, implementation=implementation)
        return jax.vmap(run, axis_name="cp")(blocks)

    got = subject.call(call, blocks)
    for side, axis in rows.items():
        joined = jax.tree.map(
            lambda x, axis=axis: jnp.concatenate(list(x), axis), getattr(got, side)
        )
        append_cases.assert_same_bytes(joined, getattr(want, side))
    np.testing.assert_array_equal(got.lengths, np.tile(want.lengths, (shards, 1)))


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 2**31 - 1])
def test_lengths_out_of_range_have_defined_results(length):
    """Results of one device: empty below 0, NaN past the capacity, and nothing is written."""

    def step(cache, q, k):
        cache = cache.extend(1)
        cache = pa.write_kv(cache, k, k)
        return pa.decode_attention(q, cache, mask=pa.Mask(2**30 - 1, 2**30 - 1)), cache

    q, k = draw(0, 2, 2, N, H), draw(1, 2, 2, K, H)
    lengths = jnp.asarray([length, 3], jnp.int32)
    alone = create("stacked", 8, sequences=2)
    alone = dataclasses.replace(alone, lengths=lengths)
    want, other = jax.jit(step)(alone, q, k)
    cache = dataclasses.replace(alone, context=CONTEXT)
    specs = cache.specs()
    split = jax.shard_map(step, mesh=mesh_of(2), in_specs=(specs, P(), P()), out_specs=(P(), specs))
    got, cache = jax.jit(split)(cache, q, k)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(cache.k, other.k)


def test_without_extend_nothing_is_written_and_decoding_gives_nan():
    def step(cache, q, k):
        cache = pa.write_kv(cache, k, k)
        return pa.decode_attention(q, cache), cache.k

    cache = create("stacked", 8, context=CONTEXT)
    specs = cache.specs()
    split = jax.shard_map(
        step, mesh=mesh_of(4), in_specs=(specs, P(), P()), out_specs=(P(), specs.k)
    )
    out, k = jax.jit(split)(cache, draw(0, 3, N, H), draw(1, 3, K, H))
    assert np.isnan(out).all() and not k.any()


def test_a_loop_beside_heads_made_where_it_runs():
    """Rows over one axis and heads over another, the cache made on the devices, in a loop."""
    mesh = jax.make_mesh((2, 4), ("tp", "cp"), (AxisType.Auto,) * 2)
    q, k = draw(0, 5, 2, N, H), draw(1, 5, 2, K, H)

    def loop(context, kv_heads, q, k):
        cache = pa.StackedCache.create(2, 8, kv_heads, H, dtype=jnp.float32, context=context)
        assert cache.capacities == (8, 8) and cache.held == ((2, 2) if context else (8, 8))
        if context is not None:  # varies along the axis of heads, like q and k
            to = {"to": "varying"}
            cache = dataclasses.replace(
                cache, k=jax.lax.pcast(cache.k, "tp", **to), v=jax.lax.pcast(cache.v, "tp", **to)
            )

        def step(cache, rows):
            cache = pa.append_kv(cache, rows[1], rows[1])
            return cache, pa.decode_attention(rows[0], cache)

        return jax.lax.scan(step, cache, (q, k))[1]

    heads = P(None, None, "tp")
    split = jax.shard_map(
        functools.partial(loop, CONTEXT, K // 2), mesh=mesh, in_specs=heads, out_specs=heads
    )
    want = jax.jit(functools.partial(loop, None, K))(q, k)
    np.testing.assert_allclose(jax.jit(split)(q, k), want, rtol=2e-5, atol=2e-5)


@pytest.mark.guards
@pytest.mark.parametrize(
    ("options", "check_vma"),
    [
        ({}, True),
        ({}, False),
        ({"mask": pa.sliding_window(64)}, True),
        ({"parents": np.zeros((2, 1), np.int32)}, True),
    ],
    ids=["causal", "unchecked", "window", "tree"],
)
def test_kernels_take_it(options, check_vma):
    """One launch where queries see all keys before them; else one a sequence, over its own rows."""
    with device.assume("sm90"):
        made = functools.partial(
            pa.StackedCache.create, 2, 1024, K, 64, layers=LAYERS, context=CONTEXT
        )
        cache = jax.eval_shape(made)
        rows = [jax.ShapeDtypeStruct((2, 1, n, 64), jnp.bfloat16) for n in (N, K)]

        def step(cache, q, k):
            cache = pa.write_kv(cache.extend(1), k, k, layer=1)
            return pa.decode_attention(q, cache, layer=1, **options)

        specs = (cache.specs(), P(), P())
        split = jax.shard_map(
            step, mesh=mesh_of(2), in_specs=specs, out_specs=P(), check_vma=check_vma
        )
        with dispatch.chosen() as launched:
            assert "mosaic_gpu" in mosaic.lower_for_cuda(split, cache, *rows)
    assert launched == ["sm80", "sm90", "sm90"][: 3 if "mask" in options else 2]


def local(call, **options):
    cache = create("stacked", 8, context=CONTEXT, **options)
    split = jax.shard_map(call, mesh=mesh_of(2), in_specs=(cache.specs(),), out_specs=P())
    return jax.eval_shape(split, cache)


Q = jnp.zeros((3, N, H))


REFUSED = (
    lambda: create("stacked", 8, context="cp"),
    lambda: pa.decode_attention(Q, create("stacked", 8, context=CONTEXT)),
    lambda: pa.append_kv(create("stacked", 8, context=CONTEXT), *(Q[:, :K],) * 2),
    lambda: local(
        lambda cache: pa.decode_attention(Q, cache, starts=jnp.arange(4, dtype=jnp.int32))
    ),
    lambda: local(lambda cache: cache.extend(9).lengths),
)
MESSAGES = {"sharded_caches": REFUSED}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_what_is_refused(call, message):
    messages.check(call, message)


def test_it_says_so():
    assert repr(create("stacked", 8, context=CONTEXT)).endswith("rows split over 'cp')")
