"""Several GPUs together, four of them or, if there are fewer, two: context parallelism, merged
parts, caches split by heads and by rows, the demo on a mesh, in one process and in two.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
import pallas_lm as lm
from pallas_attn._call import config as _config
from pallas_attn._context_parallel import layout
from pallas_lm import decode, decode_check, model, train
from tests.caches import test_keep
from tests.parallel import test_context as contexts
from tests.parallel import test_sharded_caches as rows_of_caches
from tests.support import append_cases, stored_kernels

pytestmark = pytest.mark.multigpu
ROOT = pathlib.Path(pa.__file__).parent.parent


@pytest.fixture(autouse=True)
def two_devices():
    if len(jax.devices()) < 2:
        pytest.skip("there are not two GPUs")
    with jax.default_matmul_precision("highest"):  # float32, and not TF32
        yield


def count():
    """Over how many GPUs."""
    return 4 if len(jax.devices()) >= 4 else 2


def mesh_of(name):
    return jax.make_mesh((count(),), (name,), (AxisType.Auto,), devices=jax.devices()[: count()])


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-3, atol=1e-3)


SHAPES = ((1, 512, 8, 64), (1, 512, 4, 64), (1, 512, 4, 64))


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
@pytest.mark.parametrize("mask", [pa.CAUSAL, pa.sliding_window(100)], ids=["causal", "window"])
def test_context(mask, method):
    q, k, v = (draw(i, *shape) for i, shape in enumerate(SHAPES))
    floats = {"q": q, "k": k, "v": v, "sinks": draw(3, 8)}
    call = contexts.over(pa.Context("cp", "zigzag", method), count(), {"mask": mask})

    def alone(floats):
        return pa.flash_attention_with_lse(**floats, mask=mask)

    got, want = (contexts.value_and_gradients(x, floats) for x in (call, alone))
    close(got, want)


# batch, heads, head dim, options
FETCHED: dict[str, tuple] = {
    "causal": (1, 4, 2, 128, {"mask": pa.CAUSAL}),
    "full": (2, 4, 4, 64, {}),
    "window": (1, 4, 2, 128, {"mask": pa.sliding_window(300)}),
    "ahead": (1, 4, 2, 128, {"mask": pa.Mask(right=700)}),
    "documents": (2, 4, 1, 128, {"mask": pa.CAUSAL}),
    "claimed": (1, 8, 2, 128, {"mask": pa.CAUSAL}),
    "claimed documents": (1, 8, 2, 128, {"mask": pa.CAUSAL}),
    "wide": (1, 2, 2, 256, {"mask": pa.CAUSAL, "softcap": 20.0, "q_offset": 1}),
}


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", FETCHED)
def test_keys_that_the_kernel_fetches(name, order):
    """Results of keys that are gathered before the launch, but for rounding: those may be cut into
    splits by the number of GPUs. Layer after layer in a loop, mapped, new data each time.
    """
    batch, heads, kv_heads, dim, options = FETCHED[name]
    rows, mesh, context = 4096, mesh_of("cp"), pa.Context("cp", order)
    documents = name.endswith("documents")
    # Blocks claim work tiles, of the same tiles as those without claims: bits differ with tiles.
    tiles = {"warpgroups": 3, "block_kv": 64, "stages": 3, "grid": 40}

    def layers(context, q, kvs, *ids):
        ids = (ids[0], ids[0]) if ids else None
        call = functools.partial(
            pa.flash_attention, **options, segment_ids=ids, context=context, implementation="sm90"
        )

        def layer(q, kv):
            out = jax.vmap(call, (3, None, None), 3)(jnp.stack([q, -q], 3), *kv)
            return -q, out  # no result in q: its rounding would grow from layer to layer

        return jax.lax.scan(layer, q, kvs)

    def over(context):
        local = functools.partial(layers, context)
        stacked = P(None, None, "cp")
        specs = (P(None, "cp"), stacked, *([P(None, "cp")] if documents else []))
        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(specs[0], stacked))
        )

    def run(call, claims, arrays):
        """Traced in here, the first time."""
        forced = contextlib.nullcontext()
        if name.startswith("claimed"):
            forced = _config.forced("flash_fwd_sm90", tiles | {"claims": claims})
        with forced:
            return jax.tree.map(np.asarray, call(*arrays))

    fetching, gathering = (over(dataclasses.replace(context, overlap=x)) for x in (True, False))
    for seed in range(4):
        shapes = ((batch, rows, heads, dim), *((3, batch, rows, kv_heads, dim),) * 2)
        q, k, v = (
            draw(4 * seed + n, *shape).astype(jnp.bfloat16) for n, shape in enumerate(shapes)
        )
        more = []
        if documents:
            ends = np.random.default_rng(seed).integers(0, 5, (batch, rows))
            more = [context.reorder(jnp.asarray(np.sort(ends, 1), jnp.int32), count())]
        kvs = tuple(context.reorder(x, count(), 2) for x in (k, v))
        arguments = (context.reorder(q, count()), kvs, *more)
        got, want = (
            run(call, claims, arguments) for call, claims in ((fetching, True), (gathering, False))
        )
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            g, w = (x.astype(np.float32) for x in (g, w))
            np.testing.assert_allclose(g, w, rtol=0.02, atol=0.005)


@pytest.mark.parametrize("overlap", [True, False], ids=["fetched", "gathered"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [256, 300, 100, 1024], ids="documents of {}".format)
def test_documents_in_bfloat16(monkeypatch, order, size, overlap):
    """They end with the rows of a GPU, with others a quarter of a chunk away, or nowhere within:
    collectives in a branch that is taken at run time, of the backward and, where the forward does
    not fetch, of it too. Keys lie in the order zigzag.
    """
    monkeypatch.setattr(layout, "WORTH_ASKING", 0)
    shapes = ((1, 1024, 4, 128), (1, 1024, 2, 128), (1, 1024, 2, 128))
    floats = {x: draw(i, *shapes[i]).astype(jnp.bfloat16) for i, x in enumerate("qkv")}
    options = {"mask": pa.CAUSAL, "segment_ids": jnp.arange(1024, dtype=jnp.int32)[None] // size}
    call = contexts.over(pa.Context("cp", order, overlap=overlap), count(), options)

    def alone(floats):
        return pa.flash_attention_with_lse(**floats, **options)

    def gradients(call):
        def loss(floats):
            out, lse = call(floats)
            return jnp.square(out.astype(jnp.float32)).sum() + jnp.sin(lse).sum(), (out, lse)

        return jax.jit(jax.grad(loss, has_aux=True))(floats)

    got, want = gradients(call), gradients(alone)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(x, np.float32) for x in (g, w))
        np.testing.assert_allclose(g, w, rtol=0.05, atol=0.02 * np.abs(w).max())


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_blocks_that_a_mask_carries(method):
    """Documents by a mask function: every launch uses the blocks that each GPU has found once."""
    q, k, v = (draw(i, *shape) for i, shape in enumerate(SHAPES))
    floats, context = {"q": q, "k": k, "v": v}, pa.Context("cp", "zigzag", method)
    ids, mesh = jnp.arange(512, dtype=jnp.int32) // 150, mesh_of("cp")

    def attend(ids, floats, rows, context=None):
        mask = pa.mask_fn(lambda b, h, q, kv, i: i[q] == i[kv], ids) & pa.CAUSAL
        mask = mask.blocks(rows, rows, context=context)
        return pa.flash_attention_with_lse(**floats, mask=mask, context=context)

    def split(floats):
        local = functools.partial(attend, rows=512 // count(), context=context)
        outs = (P(None, "cp"), P(None, None, "cp"))
        call = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "cp")), out_specs=outs)
        out, lse = call(ids, {name: context.reorder(x, count()) for name, x in floats.items()})
        return context.restore(out, count()), context.restore(lse, count(), 2)

    alone = functools.partial(attend, ids, rows=512)
    close(*(contexts.value_and_gradients(x, floats) for x in (split, alone)))


def test_merge():
    """Each GPU attends to its own keys."""
    q, k, v = (draw(i, *shape) for i, shape in enumerate(SHAPES))

    def local(q, k, v):
        parts = pa.flash_attention_with_lse(q, k, v)
        return pa.merge_attention(*(jax.lax.all_gather(x, "cp", to="invarying") for x in parts))

    rows = P(None, "cp")
    call = jax.shard_map(local, mesh=mesh_of("cp"), in_specs=(P(), rows, rows), out_specs=P())
    close(jax.jit(call)(q, k, v), pa.flash_attention_with_lse(q, k, v))


@pytest.mark.parametrize(
    "name", ["one token", "few", "full", "separate", "tree", "tree in a window"]
)
def test_caches_split_by_rows(name):
    kind, _, capacity, t, counts, options, sizes = rows_of_caches.CASES[name]
    rows = rows_of_caches.drawn(len(counts[0]), t)
    got, want = rows_of_caches.both(kind, count(), capacity, counts, rows, options, **sizes)
    close(got[0], want[0])
    np.testing.assert_array_equal(got[1].lengths, want[1].lengths)
    for g, w in zip(jax.tree.leaves(got[1].k), jax.tree.leaves(want[1].k), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("name", ["stacked", "separate"])
def test_a_path_of_rows_that_are_split(rng, name):
    cache, counts, path, _ = rows_of_caches.drafts(rng, name)
    wanted = test_keep.expected(dataclasses.replace(cache, context=None), counts, path)
    mesh, specs = mesh_of("cp"), cache.specs()
    cache = jax.device_put(cache, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    split = jax.shard_map(test_keep.keep, mesh=mesh, in_specs=(specs, P(), P()), out_specs=specs)
    got = jax.jit(split, donate_argnums=0)(cache, counts, path)
    append_cases.assert_same_bytes(dataclasses.replace(got, context=None), wanted)


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_a_model_whose_sums_are_over_devices(batch):
    sizes = {"vocab": 1000, "hidden": 1024, "layers": 3, "mlp": 2048, "positions": 1024}
    config = model.Config(**sizes, heads=8, kv_heads=4, head_dim=128)
    mesh = lm.mesh.make(f"tp:{count()}", ("tp",))
    params = lm.mesh.random_params(config, 0, jnp.bfloat16, mesh)
    options = decode.Options(batch=batch, capacity=64, chunk=8, keep_logits=True, mesh=mesh)
    prompts = np.random.default_rng(0).integers(0, 1000, (batch, 9)).tolist()
    run = decode.Run(config, params, options, prompts, 20)
    for _ in run:
        pass
    for row in decode_check.rows(run, params):
        assert row.held, row


@functools.cache
def told():
    model = lm.load(dtype="float32")
    return lm.generate(model, ["ROMEO:", "The sea"], max_new_tokens=20)


def test_kernels_that_are_kept_on_disk(tmp_path):
    """The same bits on an automatic mesh and within shard_map, by a process that has lowered the
    kernels and one that has not.
    """
    mesh = mesh_of("x")
    x = jax.device_put(draw(0, 4, 256, 4, 64).astype(jnp.bfloat16), NamedSharding(mesh, P("x")))

    @jax.grad
    def gradient(x):
        return pa.flash_attention(x, x, x, mask=pa.CAUSAL).astype(jnp.float32).sum()

    def both(x):
        mapped = jax.shard_map(gradient, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return gradient(x), mapped(x)

    results, counts = [], []
    for folder in (None, tmp_path, tmp_path):
        with stored_kernels.kept_in(folder, pretend=False) as lowered:
            results.append(jax.tree.map(np.asarray, jax.jit(both)(x)))
            counts.append(len(lowered))
    assert counts[0] == counts[2] == 0 < counts[1]
    for plain, filling, filled in zip(*results, strict=True):
        np.testing.assert_array_equal(filling, plain)
        np.testing.assert_array_equal(filled, plain)


@pytest.mark.parametrize("cache", ["per_sequence", "stacked", "paged"])
def test_the_demo(cache):
    model = lm.load(dtype="float32", mesh=lm.mesh.make("tp:2", ("tp",)))
    texts = lm.generate(model, ["ROMEO:", "The sea"], max_new_tokens=20, cache=cache)
    assert texts == told()


@pytest.mark.parametrize("axes", ["cp:{0}", "dp:{0}", "cp:2,dp:{1}"])
def test_training(tmp_path, axes):
    axes = axes.format(count(), count() // 2)
    text = bytes(np.random.default_rng(0).integers(97, 107, 4000, np.uint8))
    losses = []
    for mesh in (None, lm.mesh.make(axes, ("cp", "dp"))):
        recipe = train.Recipe(steps=4, batch=4, context=128, every=4, warmup=1, mesh=mesh)
        (line,) = train.train(text, str(tmp_path / str(len(losses))), recipe)
        losses.append(line[1:3])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "run.py", "--prompt=ROMEO:", "--max_new_tokens=20", "--mesh=tp:2"]
    command += ["--dtype=float32", f"--coordinator={address}", "--processes=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    running = []
    for n in (0, 1):
        environment = os.environ | {"XLA_FLAGS": "", "CUDA_VISIBLE_DEVICES": str(n)}
        running.append(subprocess.Popen([*command, f"--process={n}"], env=environment, **pipes))
    said = [process.communicate(timeout=110) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert f"ROMEO:{told()[0]}" in said[0][0], said[0]
