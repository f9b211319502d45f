"""Every public operation with arrays split over a mesh: by batch, heads, rows, buffers of a cache,
or at random, over explicit axes (what `jax.make_mesh` makes) and automatic ones: results are those
of one device.

A program over explicit axes is refused when it is traced, if jax cannot say how a result is split.
So most calls are traced over a mesh and computed in NumPy, by the reference and with the reference
in a kernel's place; XLA compiles a few, and with `-m fuzz` as many as there is time for.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn._call import axes, dispatch
from pallas_attn._mesh import sharding
from tests.parallel import test_kernels_batched_and_sharded as in_place
from tests.support import in_numpy, operations
from tests.support.public_calls import CALLS, KINDS, OF_EACH_KIND, cache_of, draw

PLACES = {"b": "x", "B": "x", "t": "x", "h": "y", "H": "y"}  # mesh axes, by letter
SPLITS = ("", "b", "h", "bh", "t", "B", "H", "Hh", "Bb", "BHbh")  # letters that are split together
AXES = {
    "automatic": (AxisType.Auto,) * 2,
    "explicit": None,
    "both": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(kind="explicit", sizes=(2, 2)):
    """A mesh of few devices, its axes "explicit" as jax makes them where nothing is said."""
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, ("x", "y"), AXES[kind], devices=devices)


def by_letters(call, letters):
    """The PartitionSpecs of the arguments where these letters are split."""

    def spec(axes):
        return P(*(PLACES[x] if x in letters else None for x in axes))

    specs = {}
    for name, tree in call.arrays.items():
        specs[name] = jax.tree.map(lambda _, name=name: spec(call.axes.get(name, "")), tree)
        if isinstance(tree, pa.KVCache):
            over = {"heads": "y" if "H" in letters and tree.kv_heads > 1 else None}
            over |= {"sequences": "x"} if "B" in letters and tree.kind == "stacked" else {}
            specs[name] = tree.specs(**over)
    return specs


def at_random(call, rng):
    """PartitionSpecs of the arguments, any axis split that can be."""

    def spec(x):
        names = [None] * x.ndim
        for name in rng.sample(("x", "y"), 2):
            free = [n for n, size in enumerate(x.shape) if not (names[n] or size % 2) and size]
            if free and rng.random() < 0.5:
                names[rng.choice(free)] = name
        return P(*names)

    specs = {name: jax.tree.map(spec, tree) for name, tree in call.arrays.items()}
    for name, tree in call.arrays.items():
        if isinstance(tree, pa.PagedCache):  # which refuses others
            specs[name] = tree.specs(heads=rng.choice((None, "y")) if tree.kv_heads > 1 else None)
        elif isinstance(tree, pa.KVCache):
            split = dataclasses.replace(specs[name], new_lengths=specs[name].lengths)
            specs[name] = split
    return specs


def drawn(name, seed):
    """Specs of a call: by letters, and at random."""
    call, rng = CALLS[name], random.Random(f"{name} {seed}")
    sets = sorted({"".join(sorted(call.letters.intersection(x))) for x in SPLITS})
    return by_letters(call, rng.choice(sets)), at_random(call, rng)


def placed(arrays, specs, mesh):
    where = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P)
    )
    return jax.device_put(arrays, where)


def assert_same(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(z).astype(np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def specs_of(tree):
    """How the types of arrays say that they are split."""
    return [tuple(jax.typeof(x).sharding.spec) for x in jax.tree.leaves(tree)]


def caches_in(tree):
    is_cache = lambda x: isinstance(x, pa.KVCache)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_cache) if is_cache(x)]


def check_in_numpy(name, specs, want, mesh):
    """A call over explicit axes; caches that it returns are split as they came."""
    call, seen = CALLS[name], []
    arrays = placed(call.arrays, specs, mesh)

    def run(arrays):
        results = call.run(arrays)
        seen.extend(map(specs_of, caches_in(results)))
        return results

    assert_same(in_numpy.call(run, arrays), want)
    if seen and "vmap" not in name:
        assert seen[-1] == specs_of(arrays["cache"])


@pytest.mark.parametrize("name", CALLS)
def test_explicit_axes(name, seed):
    by_letters, at_random = drawn(name, seed)
    want = in_numpy.call(CALLS[name].run, CALLS[name].arrays)
    check_in_numpy(name, by_letters, want, mesh_of())
    if name != "vmap":  # which maps an axis of q, k and v
        check_in_numpy(name, at_random, want, mesh_of())


def as_kernels(monkeypatch):
    in_place.as_kernels(monkeypatch)
    for table in ("flash_forward", "quantize", "keep"):
        monkeypatch.setitem(dispatch.TABLES, table, (in_place.InPlaceOfAKernel(table),))
    backward = in_place.BackwardInPlaceOfAKernel()
    monkeypatch.setitem(dispatch.TABLES, "flash_backward", (backward,))


@pytest.fixture
def kernels(monkeypatch):
    """The reference in the place of kernels."""
    as_kernels(monkeypatch)


REFERENCE = [x for x in CALLS if x == "kv_indices tangents" or x.endswith(": decode gradient")]
LOOPS = [x for x in CALLS if "vmap" in x or x.endswith(": loop")]  # NumPy computes no refs there
# Kinds of caches take turns.
TURNS = [f"{kind}: {x}" for x, kind in zip(OF_EACH_KIND, itertools.cycle(KINDS))]
OF_KERNELS = [*(x for x in CALLS if ": " not in x or x.split(": ")[1] not in OF_EACH_KIND), *TURNS]


@pytest.mark.parametrize("name", [x for x in OF_KERNELS if x not in (*REFERENCE, *LOOPS)])
def test_kernels_over_explicit_axes(name, seed, request):
    want = in_numpy.call(CALLS[name].run, CALLS[name].arrays)
    request.getfixturevalue("kernels")
    check_in_numpy(name, drawn(name, f"kernels {seed}")[0], want, mesh_of())


# ---- compiled by XLA -----------------------------------------------------------------------------

WAYS = ("jit", "set_mesh", "outside of jit")
COMPILED = [  # call, axes, way, in a kernel's place
    ("gradients of all", "automatic", "jit", True),
    ("kv_indices gradients", "both", "jit", False),
    ("kv_indices of one kv head", "automatic", "jit", True),
    ("rotary_positions", "explicit", "outside of jit", False),
    ("packed rotary", "both", "set_mesh", True),
    ("float8", "automatic", "set_mesh", False),
    ("ragged narrow", "both", "jit", True),
    ("update_kv_pages", "explicit", "outside of jit", False),
    ("stacked: loop", "explicit", "set_mesh", True),
    ("paged: loop", "automatic", "set_mesh", True),
    ("stacked: append int8", "automatic", "jit", True),
    ("separate: decode one head", "explicit", "jit", True),
    ("paged: decode packed shared", "both", "jit", False),
]


def computed(name, specs, kind, way):
    call, mesh = CALLS[name], mesh_of(kind)
    run = call.run if way == "outside of jit" else jax.jit(lambda arrays: call.run(arrays))
    with jax.set_mesh(mesh) if way == "set_mesh" else contextlib.nullcontext():
        return run(placed(call.arrays, specs, mesh))


@pytest.mark.parametrize(("name", "kind", "way", "by_kernels"), COMPILED)
def test_compiled(name, kind, way, by_kernels, seed, request):
    want = in_numpy.call(CALLS[name].run, CALLS[name].arrays)
    if by_kernels:
        request.getfixturevalue("kernels")
    assert_same(computed(name, drawn(name, seed)[seed % 2], kind, way), want)


@pytest.mark.fuzz
def test_fuzz_placements(request, seed, monkeypatch):
    """Calls, axes and placements at random, for as long as `--seconds` says."""
    rng, tried = random.Random(f"placements {seed}"), 0
    end = time.monotonic() + request.config.getoption("--seconds")
    while time.monotonic() < end:
        name, kind, way = (rng.choice(tuple(x)) for x in (CALLS, AXES, WAYS))
        derivative = any(x in name for x in ("grad", "deriv", "check"))
        if way == "outside of jit" and (kind == "both" or derivative and kind == "explicit"):
            way = "set_mesh"  # without which jax scatters, or differentiates, nothing there
        want = in_numpy.call(CALLS[name].run, CALLS[name].arrays)
        specs = drawn(name, rng.random())[rng.randrange(2) if name != "vmap" else 0]
        with monkeypatch.context() as patch:
            if by_kernels := (name not in REFERENCE and rng.random() < 0.5):
                as_kernels(patch)
            try:
                assert_same(computed(name, specs, kind, way), want)
            except Exception as error:
                error.add_note(f"{name}, {kind} axes, {way}, {by_kernels=}, {specs}")
                raise
        tried += 1
        jax.clear_caches()
    request.node.user_properties.append(("fuzz", f"{tried} placements"))


# ---- types, transforms, devices of other maps ----------------------------------------------------


def spec(*names):
    return NamedSharding(mesh_of(), P(*names))


def test_results_are_split_as_q_or_else_as_keys():
    calls = {
        ("q", "k", "v"): (P("x", None, "y"), (("x", None, "y", None), ("x", "y", None))),
        ("q",): (P(None, "x", "y"), ((None, "x", "y", None), (None, "y", "x"))),
        ("k", "v"): (P("x", None, "y"), (("x", None, "y", None), ("x", "y", None))),
        ("v",): (P(None, None, None, "x"), ((None,) * 4, (None,) * 3)),
    }
    for names, (where, expected) in calls.items():
        specs = {name: where if name in names else P() for name in "qkv"}
        arrays = placed(CALLS["causal"].arrays, specs, mesh_of())
        assert tuple(specs_of(jax.eval_shape(CALLS["causal"].run, arrays))) == expected
    cache = placed(cache_of("stacked"), cache_of("stacked").specs(heads="y"), mesh_of())
    q = jax.device_put(CALLS["stacked: decode"].arrays["q"], spec())
    out = jax.eval_shape(pa.decode_attention, q, cache)
    assert out.sharding.spec == P(None, None, "y", None)


@pytest.mark.parametrize("operation", ["append", "keep", "decode"])
def test_a_device_has_the_capacities_of_its_own_sequences(operation):
    """Kernels that widen a cache count its sequences by them."""
    problem = operations._BASE[operation]
    split = sharding.Split((("m", "k"),), (), ("m", "k"))
    local = axes.local_problem(problem, split, ((problem.sequences // 4, 2),))
    assert (local.sequences, local.kv_heads) == (problem.sequences // 4, 2)
    assert local.capacities == problem.capacities[: problem.sequences // 4]


MAPPED = ["kv_indices", "rotary_positions", "packed rotary", "ragged", "stacked: append tree"]
MAPPED += ["paged: decode shared", "separate: decode changed"]


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_over_a_split_axis(name):
    call = CALLS[name]
    want = in_numpy.call(call.run, call.arrays)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), call.arrays)
    with jax.set_mesh(mesh_of()):
        got = in_numpy.call(jax.vmap(call.run), jax.device_put(many, spec("x")))
    for n in range(2):
        assert_same(jax.tree.map(lambda x, n=n: x[n], got), want)


def test_vmap_of_a_kernel_over_a_split_axis(kernels):
    call = CALLS["stacked: decode"]
    want = in_numpy.call(call.run, call.arrays)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), call.arrays)
    got = jax.jit(jax.vmap(call.run))(jax.device_put(many, spec("x")))
    assert_same(jax.tree.map(lambda x: np.asarray(x)[1], got), want)


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_query_heads_of_one_kv_head_need_no_communication(kernels, kind):
    call, mesh = CALLS["stacked: decode one head"], mesh_of(kind)
    where = {"q": P(None, None, "y"), "cache": call.arrays["cache"].specs()}
    arrays = placed(call.arrays, where, mesh)
    compiled = jax.jit(call.run).lower(arrays).compile()
    assert_same(compiled(arrays), in_numpy.call(call.run, call.arrays))
    assert "all-gather(" not in compiled.as_text()


def test_kernels_where_the_caller_makes_axes_automatic(kernels):
    """XLA asks for the kernel's program while explicit axes are set."""
    call = CALLS["causal"]
    arrays = jax.device_put(call.arrays, spec("x"))
    run = jax.sharding.auto_axes(call.run, out_sharding=(spec("x"), spec("x")))
    with jax.set_mesh(mesh_of()):
        got = jax.jit(run)(arrays)
    assert_same(got, in_numpy.call(call.run, call.arrays))


def within_shard_map(run, axes, specs, out, arrays):
    """`run(*arrays)` in a jax.shard_map over some axes; the others split heads or rows."""
    split = functools.partial(jax.shard_map, mesh=mesh_of(), axis_names=axes)
    return jax.jit(split(run, in_specs=specs, out_specs=out))(*arrays)


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_context_beside_explicit_axes(method):
    """Rows over one axis, which shard_map maps; kv heads over another."""
    q, k, v = (draw(n, 2, 8, 4, 8) for n in range(3))
    context = pa.Context("x", "zigzag", method=method)

    def gradients(context, *arrays):
        def loss(q, k, v):
            out = pa.flash_attention(q, k, v, mask=pa.CAUSAL, context=context)
            return (out * jnp.cos(out)).sum(), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    want = in_numpy.call(functools.partial(gradients, None), q, k, v)
    arrays = jax.device_put((q, k, v), spec(None, "x", "y"))
    arrays = [context.reorder(x, 2) for x in arrays]
    assert specs_of(arrays) == [(None, "x", "y", None)] * 3
    rows = P(None, "x")
    got = within_shard_map(functools.partial(gradients, context), {"x"}, rows, rows, arrays)
    assert set(specs_of(got)) == {(None, "x", "y", None)}
    assert_same(jax.tree.map(lambda x: context.restore(x, 2), got), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_beside_explicit_axes(kernels, check_vma):
    """Sequences over one axis, which shard_map maps; heads over another."""

    def step(q, k, v):
        cache = pa.StackedCache.create(len(q), 16, 2, 8, dtype=jnp.float32)
        cache = pa.append_kv(cache, k, v)
        gradient = jax.grad(lambda *x: (pa.flash_attention(*x) ** 2).sum(), (0, 1, 2))(q, k, v)
        return pa.decode_attention(q, cache), gradient

    arrays = tuple(CALLS["causal"].arrays.values())
    want = in_numpy.call(step, *arrays)
    split = jax.shard_map(
        step,
        mesh=mesh_of(),
        axis_names={"x"},
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    got = jax.jit(split)(*jax.device_put(arrays, spec("x", None, "y")))
    assert set(specs_of(got)) == {("x", None, "y", None)}
    assert_same(got, want)


def test_gradients_of_lists_within_shard_map():
    call = CALLS["kv_indices gradients"]
    batch = P("x")
    split = jax.shard_map(
        lambda arrays: call.run(arrays), mesh=mesh_of(), in_specs=batch, out_specs=batch
    )
    want = in_numpy.call(call.run, call.arrays)
    assert_same(in_numpy.call(split, jax.device_put(call.arrays, spec("x"))), want)


@pytest.mark.parametrize("method", ["extend", "free", "shared_prefixes", "fork"])
def test_pages_are_found_by_whole_numbers(method):
    cache = cache_of("paged")
    cache = dataclasses.replace(cache, lengths=jax.device_put(cache.lengths, spec("x")))
    arguments = {"extend": (1,), "free": (0,), "fork": (0, 1)}.get(method, ())
    with pytest.raises(ValueError, match="cache.lengths: expected numbers that all devices have"):
        getattr(cache, method)(*arguments)


ON_GPUS = ["causal", "gradients of all", "kv_indices gradients", "rotary_positions", "float8"]
ON_GPUS += ["ragged", "update_kv_pages", "stacked: loop"]
ON_GPUS += ["stacked: append int8", "separate: decode changed", "paged: append packed"]
ON_GPUS += ["paged: decode packed shared", "paged: keep path"]


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["explicit", "automatic"])
@pytest.mark.parametrize("name", ON_GPUS)
def test_kernels_over_two_gpus(name, kind):
    """Batch and sequences split, and heads."""
    if len(jax.devices()) < 2:
        pytest.skip("there are not two GPUs")
    call, run = CALLS[name], jax.jit(lambda arrays: CALLS[name].run(arrays))
    with jax.default_matmul_precision("highest"):
        want = run(call.arrays)
        for letters, sizes in (("bB", (2, 1)), ("hH", (1, 2))):
            got = run(placed(call.arrays, by_letters(call, letters), mesh_of(kind, sizes)))
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                x, y = (np.asarray(z).astype(np.float32) for z in (x, y))
                np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_heads_of_latent_rows_over_two_gpus(kind, rng):
    """Query heads of one kv head, of sizes and a dtype that kernels take."""
    if len(jax.devices()) < 2:
        pytest.skip("there are not two GPUs")

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    cache = pa.StackedCache.create(3, 64, 1, head_dim=576, v_head_dim=512, shared_kv=True)
    cache, q = pa.append_kv(cache, draw(3, 40, 1, 576)), draw(3, 2, 16, 576)
    run = jax.jit(functools.partial(pa.decode_attention_with_lse, scale=192**-0.5))
    want, mesh = run(q, cache), mesh_of(kind, (1, 2))
    where = P(None, None, "y"), jax.tree.map(lambda _: P(), cache)
    got = run(*placed((q, cache), where, mesh))
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(z).astype(np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-2)
