"""jit, vmap, scan, remat, donation, devices, export: what people wrap around these functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn import CAUSAL, PagedCache, PerSequenceCache, StackedCache

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KINDS = ("per_sequence", "stacked", "paged")
every_kind = pytest.mark.parametrize("kind", KINDS)
close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def same(got, want):
    for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(have, wanted)


def draw(rng, batch=2, q_len=6, kv_len=6, q_heads=4, kv_heads=2, dim=8):
    shapes = (batch, q_len, q_heads, dim), (batch, kv_len, kv_heads, dim)
    return [jnp.asarray(rng.standard_normal(shapes[i], np.float32)) for i in (0, 1, 1)]


def create(kind, sequences=2, layers=None, dtype="float32"):
    sizes = {"kv_heads": 2, "head_dim": 8, "layers": layers, "dtype": dtype}
    if kind == "per_sequence":
        return PerSequenceCache.create([10 + m % 3 for m in range(sequences)], **sizes)
    if kind == "stacked":
        return StackedCache.create(sequences, 10, **sizes)
    return PagedCache.create(sequences, 5 * sequences, 2, capacity=10, **sizes)


# ---- jit and vmap --------------------------------------------------------------------------------


@pytest.mark.by_xla
def test_jit_gives_what_eager_gives(rng):
    arrays = draw(rng)
    run = functools.partial(pa.flash_attention_with_lse, mask=CAUSAL, softcap=3.0)
    same(jax.jit(run)(*arrays), run(*arrays))


def test_masks_may_be_static_arguments(rng):
    run = jax.jit(pa.flash_attention, static_argnames=("mask", "scale", "softcap"))
    arrays = draw(rng)
    same(run(*arrays, mask=CAUSAL), pa.flash_attention(*arrays, mask=CAUSAL))


def looped(run, in_axes, *arrays):
    """`jax.vmap(run, in_axes)(*arrays)`, one at a time."""
    size = next(x.shape[a] for x, a in zip(arrays, in_axes, strict=True) if a is not None)
    pick = lambda x, a, i: x if a is None else np.take(x, i, axis=a)  # noqa: E731
    outs = [
        run(*(pick(x, a, i) for x, a in zip(arrays, in_axes, strict=True))) for i in range(size)
    ]
    return jax.tree.map(lambda *xs: np.stack(xs), *outs)


@pytest.mark.parametrize(
    "in_axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 0, None)], ids=str
)
def test_vmap(rng, in_axes):
    sets = [draw(rng) for _ in range(3)]
    arrays = [
        each[0] if axis is None else np.stack(each, axis)
        for each, axis in zip(zip(*sets, strict=True), in_axes, strict=True)
    ]
    run = functools.partial(pa.flash_attention_with_lse, mask=CAUSAL)
    same(jax.jit(jax.vmap(run, in_axes))(*arrays), looped(jax.jit(run), in_axes, *arrays))


def test_vmap_over_every_array_option(rng):
    q, k, v = draw(rng)
    ids = jnp.asarray(rng.integers(0, 2, (3, 2, 6)), jnp.int32)
    options = {
        "q_offset": jnp.asarray(rng.integers(-1, 3, (3, 2)), jnp.int32),
        "kv_lengths": jnp.asarray(rng.integers(0, 7, (3, 2)), jnp.int32),
        "segment_ids": (ids, ids),
        "bias": jnp.asarray(rng.standard_normal((3, 2, 1, 6, 6), np.float32)),
        "mask_array": jnp.asarray(rng.random((3, 1, 4, 6, 1)) < 0.8),
        "sinks": jnp.asarray(rng.standard_normal((3, 4), np.float32)),
    }

    def run(options):
        return pa.flash_attention_with_lse(q, k, v, mask=CAUSAL, **options)

    wanted = [jax.jit(run)(jax.tree.map(lambda x, i=i: x[i], options)) for i in range(3)]
    same(jax.jit(jax.vmap(run))(options), jax.tree.map(lambda *xs: np.stack(xs), *wanted))


def test_vmap_of_grad(rng):
    sets = [draw(rng) for _ in range(3)]
    arrays = [np.stack(each) for each in zip(*sets, strict=True)]
    loss = lambda q, k, v: (pa.flash_attention(q, k, v, mask=CAUSAL) * q).sum()  # noqa: E731
    grad = jax.grad(loss, (0, 1, 2))
    same(jax.jit(jax.vmap(grad))(*arrays), looped(jax.jit(grad), (0, 0, 0), *arrays))


@every_kind
def test_vmap_of_decode_over_nothing_but_q(rng, kind):
    _, k, v = draw(rng)
    cache = pa.append_kv(create(kind), k, v)
    q = jnp.asarray(rng.standard_normal((3, 2, 1, 4, 8), np.float32))
    run = lambda q: pa.decode_attention(q, cache)  # noqa: E731
    same(jax.jit(jax.vmap(run))(q), np.stack([jax.jit(run)(query) for query in q]))


@every_kind
def test_vmap_of_append_and_decode_over_caches(rng, kind):
    sets = [draw(rng, q_len=2, kv_len=2) for _ in range(3)]
    caches = [create(kind).extend(jnp.asarray([i, 1], jnp.int32)) for i in range(3)]

    def run(cache, q, k, v):
        cache = pa.append_kv(cache, k, v)
        return cache, pa.decode_attention(q, cache)

    stack = lambda *xs: jnp.stack(xs)  # noqa: E731
    got = jax.jit(jax.vmap(run))(
        jax.tree.map(stack, *caches), *(stack(*x) for x in zip(*sets, strict=True))
    )
    alone = [jax.jit(run)(cache, *each) for cache, each in zip(caches, sets, strict=True)]
    same(got, jax.tree.map(stack, *alone))


def test_remat_and_custom_policies(rng):
    arrays = draw(rng)
    loss = lambda *x: (pa.flash_attention(*x, mask=CAUSAL) ** 2).sum()  # noqa: E731
    wanted = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    for policy in (None, jax.checkpoint_policies.nothing_saveable):
        again = jax.checkpoint(loss, policy=policy)
        same(jax.jit(jax.grad(again, (0, 1, 2)))(*arrays), wanted)


def test_grad_through_a_scan_over_layers(rng):
    """Stacked weights, scanned: what a transformer's training step does."""
    q, k, v = draw(rng)
    weights = jnp.asarray(rng.standard_normal((3, 8, 8), np.float32)) / 3

    def layer(x, w):
        heads = jnp.einsum("btnh,hd->btnd", x, w)
        return x + pa.flash_attention(heads, k, v, mask=CAUSAL), None

    def scanned(weights):
        return (jax.lax.scan(jax.checkpoint(layer), q, weights)[0] ** 2).sum()

    def unrolled(weights):
        x = q
        for w in weights:
            x = layer(x, w)[0]
        return (x**2).sum()

    same(jax.jit(jax.grad(scanned))(weights), jax.jit(jax.grad(unrolled))(weights))


# ---- a cache in the carry ------------------------------------------------------------------------


@pytest.mark.by_xla
@every_kind
def test_scan_over_steps_and_layers(rng, kind):
    """A decode loop: a scan over tokens around a scan over layers, the cache in both carries."""
    q, k, v = (jnp.asarray(rng.standard_normal((5, 3, 2, n, 8), np.float32)) for n in (4, 2, 2))

    def layer(cache, inputs):
        index, q, k, v = inputs
        cache = pa.write_kv(cache, k, v, layer=index)
        return cache, pa.decode_attention(q, cache, layer=index)

    def step(cache, inputs):
        cache = cache.extend(1)
        return jax.lax.scan(layer, cache, (jnp.arange(3, dtype=jnp.int32), *inputs))

    loop = jax.jit(lambda cache: jax.lax.scan(step, cache, (q, k, v)), donate_argnums=0)
    start = create(kind, layers=3)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((start.k, start.v))]
    cache, out = loop(start)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((cache.k, cache.v))] == pointers
    np.testing.assert_array_equal(cache.lengths, [5, 5])
    for index in range(3):  # [steps, layers, M, N, H]
        whole = [jnp.swapaxes(x[:, index], 0, 1) for x in (q, k, v)]
        wanted = pa.flash_attention(*whole, mask=CAUSAL)
        close(jnp.swapaxes(out[:, index], 0, 1), wanted)


@every_kind
def test_while_loop_until_every_sequence_is_done(rng, kind):
    q, k, v = draw(rng, q_len=1, kv_len=1)
    wanted = jnp.asarray([3, 7], jnp.int32)

    def more(cache):
        return (cache.lengths < wanted).any()

    def step(cache):
        return pa.append_kv(cache, k, v, new_lengths=(cache.lengths < wanted).astype(jnp.int32))

    cache = jax.jit(lambda cache: jax.lax.while_loop(more, step, cache))(create(kind))
    np.testing.assert_array_equal(cache.lengths, wanted)


def test_a_cache_is_one_jit_key_whatever_it_holds(rng):
    traces = []

    @jax.jit
    def step(cache, q, k, v):
        traces.append(cache.kind)
        cache = pa.append_kv(cache, k, v)
        return cache, pa.decode_attention(q, cache)

    q, k, v = draw(rng, q_len=1, kv_len=1)
    for kind in KINDS:
        cache = create(kind)
        for _ in range(3):
            cache, _ = step(cache, q, k, v)
        step(create(kind).reset(1), q, k, v)
    assert traces == list(KINDS)


# ---- eight devices -------------------------------------------------------------------------------

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def assert_silent(compiled):
    text = compiled.as_text()
    assert not [name for name in COLLECTIVES if name in text]


def test_eight_devices_are_there():
    assert len(jax.devices()) >= 8 or jax.default_backend() != "cpu"


SPECS = {"batch": P("data"), "heads": P(None, None, "model"), "both": P("data", None, "model")}


@pytest.mark.parametrize("over", SPECS)
def test_sharded_jit_of_attention_and_its_gradient(rng, over):
    arrays = draw(rng, batch=4)
    do = draw(rng, batch=4)[0]
    loss = lambda q, k, v, do: (pa.flash_attention(q, k, v, mask=CAUSAL) * do).sum()  # noqa: E731
    run = lambda *x: (pa.flash_attention(*x[:3], mask=CAUSAL), jax.grad(loss, (0, 1, 2))(*x))  # noqa: E731
    place = NamedSharding(mesh(), SPECS[over])
    placed = [jax.device_put(x, place) for x in (*arrays, do)]
    compiled = jax.jit(run).lower(*placed).compile()
    assert_silent(compiled)
    got = compiled(*placed)
    assert got[0].sharding.is_equivalent_to(place, 4)
    same(got, jax.jit(run)(*arrays, do))


DECODES = [("per_sequence", "heads"), ("stacked", "heads"), ("paged", "heads")]
DECODES += [("stacked", "batch"), ("stacked", "both")]
DECODES = [(*row, "float32") for row in DECODES]
DECODES += [("per_sequence", "heads", "int8"), ("stacked", "both", "float8_e4m3fn")]
DECODES += [("paged", "heads", "float8_e4m3fn")]


def decode_step(cache, q, k, v):
    cache = pa.append_kv(cache, k, v)
    return cache, pa.decode_attention(q, cache)


@pytest.mark.parametrize(
    "kind, over, dtype",
    [pytest.param(*x, marks=pytest.mark.by_xla if x == DECODES[0] else ()) for x in DECODES],
)
def test_a_loop_over_steps_inside_shard_map(rng, kind, over, dtype):
    """The loop carry keeps its type, also if all devices take equally many rows."""
    q, k, v = draw(rng, batch=4, q_len=1, kv_len=1)

    def loop(cache, q, k, v):
        step = lambda cache, _: decode_step(cache, q, k, v)  # noqa: E731
        return jax.lax.scan(step, cache, None, length=3)

    cache = create(kind, 4, dtype=dtype)
    wanted = jax.jit(loop)(cache, q, k, v)
    heads = {"heads": "model" if over != "batch" else None}
    specs = cache.specs(**heads, **({"sequences": "data"} if over != "heads" else {}))
    rows = SPECS[over]
    split = jax.shard_map(
        loop, mesh=mesh(), in_specs=(specs, rows, rows, rows), out_specs=(specs, P(None, *rows))
    )
    same(jax.jit(split)(cache, q, k, v), wanted)


def test_no_keys_at_all_in_a_loop_over_devices(rng):
    """The loop carry keeps its type, also if there are no keys."""
    q = draw(rng, batch=4, kv_heads=4)[0]

    def loop(q):
        step = lambda q, _: (pa.flash_attention(q, q[:, :0], q[:, :0]), None)  # noqa: E731
        return jax.lax.scan(step, q, None, length=2)[0]

    split = jax.shard_map(loop, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    assert not jax.jit(split)(q).any()
    typed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(typed):
        assert not jax.jit(loop)(jax.device_put(q, NamedSharding(typed, SPECS["both"]))).any()


# ---- export --------------------------------------------------------------------------------------


def test_export_of_attention(rng):
    run = jax.jit(functools.partial(pa.flash_attention_with_lse, mask=CAUSAL))
    arrays = draw(rng)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    for platforms in (None, ("cpu", "cuda")):  # the reference is the same program anywhere
        exported = jax.export.export(run, platforms=platforms)(*shapes)
        same(exported.call(*arrays), run(*arrays))


def test_export_with_symbolic_sizes(rng):
    """One exported program for every batch and length."""
    run = jax.jit(functools.partial(pa.flash_attention, mask=CAUSAL))
    batch, length = jax.export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((batch, length, n, 8), "float32") for n in (4, 2, 2)]
    exported = jax.export.export(run)(*shapes)
    for sizes in ((2, 6, 6), (3, 5, 5)):
        arrays = draw(rng, *sizes)
        same(exported.call(*arrays), run(*arrays))


def test_export_of_appends_to_any_number_of_sequences(rng):
    """Arrays of caches, stacked and in pages, whose number of sequences is open."""
    (number,) = jax.export.symbolic_shape("m")
    stacked = (("m", 2, 6, 8), ("m", 1, 2, 8), ("m",), None)
    paged = ((9, 2, 4, 8), ("m", 1, 2, 8), ("m",), ("m", 3))
    for cache, rows, lengths, table in (stacked, paged):

        def run(k_cache, k, lengths_before, page_table=None):
            return pa.append_kv_arrays(
                k_cache, None, k, None, lengths_before, page_table=page_table
            )[0]

        def shaped(shape, dtype, number=number):
            return jax.ShapeDtypeStruct([number if n == "m" else n for n in shape], dtype)

        tables = () if table is None else (shaped(table, "int32"),)
        shapes = shaped(cache, "float32"), shaped(rows, "float32"), shaped(lengths, "int32")
        exported = jax.export.export(jax.jit(run))(*shapes, *tables)
        for count in (1, 3):
            arrays = [
                jnp.asarray(
                    rng.standard_normal([count if n == "m" else n for n in shape]), "float32"
                )
                for shape in (cache, rows)
            ]
            arrays.append(jnp.arange(count, dtype=jnp.int32))
            if table is not None:
                arrays.append(jnp.arange(3 * count, dtype=jnp.int32).reshape(count, 3))
            same(exported.call(*arrays), run(*arrays))


@every_kind
def test_export_of_a_decode_step(rng, kind):
    q, k, v = draw(rng, q_len=1, kv_len=1)
    cache = pa.append_kv(create(kind), *draw(rng)[1:])
    structure = jax.tree.structure(cache)

    def flat(leaves, q, k, v):
        return jax.tree.leaves(decode_step(jax.tree.unflatten(structure, leaves), q, k, v))

    leaves = jax.tree.leaves(cache)
    exported = jax.export.export(jax.jit(flat))(leaves, q, k, v)
    same(exported.call(leaves, q, k, v), flat(leaves, q, k, v))
