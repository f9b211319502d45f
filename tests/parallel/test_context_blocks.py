"""Blocks that a mask carries (`MaskFunction.blocks`) where several devices have the rows: what is
in them, and that every launch of a call goes by them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn._call import batching, dispatch
from pallas_attn._call.problem import OPTIONAL
from pallas_attn._context_parallel import launch
from pallas_attn._functions import program, tile_bounds
from pallas_attn._mesh import sharding
from pallas_attn.kernels.attention import tile_lists
from tests.parallel import test_context as contexts
from tests.parallel.test_kernels_batched_and_sharded import REFERENCE

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

B, T, N, BLOCK = contexts.B, contexts.T, contexts.N, 4
PLACES = [
    ("functions", 2, "contiguous", "gather"),
    ("within", 4, "zigzag", "gather"),
    ("functions", 8, "contiguous", "ring"),
    ("within", 2, "zigzag", "ring"),
    ("functions", 4, "zigzag", "heads"),
]


class ByTiles:
    """A kernel that goes by the tiles that lists are made of, and by nothing else: it hides those
    that are empty, and the mask function hides no pair of those that are whole.
    """

    name = implementation = "kernel"

    def __init__(self):
        self.carried = []

    def takes(self, problem):
        return True

    def run(self, inputs, problem):
        if not hasattr(inputs, "q"):
            return self.backward(inputs, problem)
        self.carried.append(problem.mask_blocks)
        sizes = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
        result = tile_lists._bounds(problem, inputs, BLOCK, BLOCK)
        b, h, q, kv = np.ogrid[tuple(map(slice, sizes))]
        offset = problem.q_offset
        if inputs.q_offset is not None:
            offset = inputs.q_offset.reshape(-1, 1, 1, 1)
        where = (b, h, q + offset, kv)
        aux = inputs.mask_aux
        seen = program.evaluate(problem.mask_program, where, aux, program.Broadcasting())

        def spread(tiles):
            each = jnp.repeat(jnp.repeat(tiles, BLOCK, 2), BLOCK, 3)[:, :, : sizes[2], : sizes[3]]
            return jnp.broadcast_to(each, sizes)

        seen = spread(result.some) & (jnp.broadcast_to(seen, sizes) | spread(result.whole))
        if inputs.mask_array is not None:
            seen = seen & inputs.mask_array
        held = inputs._replace(mask_array=seen, mask_aux=())
        arrays = (*(x for x in problem.arrays if x != "mask_array"), "mask_array")
        alone = {"mask_program": None, "arrays": arrays, "mask_shape": sizes, "mask_blocks": None}
        return REFERENCE.run(held, dataclasses.replace(problem, **alone))

    def backward(self, residuals, problem):
        inputs, *rows = residuals
        floats = {name: getattr(inputs, name) for name in batching.FLOATS}
        varying = {
            n: sharding.varying_like(x, inputs.q) for n, x in floats.items() if x is not None
        }
        result = launch.derivative(self, problem, inputs._replace(**varying), rows)
        return inputs._replace(**dict.fromkeys(OPTIONAL) | result)


@pytest.fixture
def kernel(monkeypatch):
    """One that takes every call; blocks are of 4 by 4."""
    by_tiles = ByTiles()
    monkeypatch.setattr(tile_bounds, "GRANULE", BLOCK)
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (by_tiles,))
    monkeypatch.setitem(dispatch.TABLES, "flash_backward", (by_tiles,))
    return by_tiles


def carrying(mask, shards, context, **sizes):
    return mask.blocks(T // shards, T // shards, batch=B, heads=N, context=context, **sizes)


def attend(options, shards, context, floats):
    """`test_context.attend` with a mask that carries blocks."""
    arguments = {**options, **floats}
    ids, limits = arguments.pop("ids"), arguments.pop("limits", None)
    mask = contexts.parity(ids)
    mask = mask if limits is None else contexts.documents_and_more(ids, limits)
    mask = carrying(mask, shards, context)
    return pa.flash_attention_with_lse(**arguments, mask=mask, context=context)


WANTED = {
    "functions": (
        {"ids": contexts.IDS, "limits": contexts.LIMITS, **contexts.LENGTHS, **contexts.HIDDEN},
        {**contexts.GROUPED, **contexts.SINKS},
    ),
    "within": (
        {"ids": contexts.IDS, "kv_lengths": contexts.LENGTHS["kv_lengths"]},
        contexts.GROUPED,
    ),
}


@pytest.mark.parametrize(("name", "shards", "order", "method"), PLACES)
def test_every_launch_goes_by_them(kernel, monkeypatch, name, shards, order, method):
    options, floats = WANTED[name]
    floats = floats | contexts.QKV if method == "heads" else floats  # equally many kv heads
    context = pa.Context("cp", order, method)
    monkeypatch.setattr(
        contexts, "attend", lambda context, **arguments: attend({}, shards, context, arguments)
    )
    call = contexts.over(context, shards, options)
    got = contexts.value_and_gradients(call, floats)
    assert kernel.carried and None not in kernel.carried
    monkeypatch.undo()
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (REFERENCE,))
    want = contexts.value_and_gradients(lambda floats: contexts.attend(**floats, **options), floats)
    contexts.assert_same(got, want)


def over(shards, local, out):
    mesh = jax.make_mesh(
        (shards,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:shards]
    )
    return jax.shard_map(local, mesh=mesh, in_specs=(P(),) * 2, out_specs=out)


def blocks_of(seen):
    """`tile_bounds.stored` of bool[B, N, rows, keys]."""
    tiles = seen.reshape(*seen.shape[:2], seen.shape[2] // BLOCK, BLOCK, -1, BLOCK)
    return tiles.any((3, 5)).astype(int) + tiles.all((3, 5))


@pytest.mark.parametrize(
    ("shards", "order", "method"),
    [(4, "zigzag", "gather"), (2, "zigzag", "ring"), (4, "contiguous", "heads")],
)
def test_what_is_in_them(monkeypatch, shards, order, method):
    """Blocks of a device's own rows or heads: bounds hold all tiles that are needed, pairs just
    those.
    """
    monkeypatch.setattr(tile_bounds, "GRANULE", BLOCK)
    context, rows = pa.Context("cp", order, method), T // shards
    table = jnp.asarray(np.random.default_rng(1).random((N, T, T)) < 0.1)

    def masks(ids, limits):
        by_pairs = pa.mask_fn(lambda b, h, q, kv, seen: seen[h, q, kv], table) & pa.CAUSAL
        return contexts.documents_and_more(ids, limits), by_pairs

    def local(ids, limits):
        return [carrying(mask, shards, context).kinds for mask in masks(ids, limits)]

    spec = (None, "cp") if method == "heads" else (None, None, "cp")
    out = P(None, *spec) if method == "ring" else P(*spec)
    arguments = (contexts.IDS, contexts.LIMITS)
    both = jax.jit(over(shards, local, [out, out]))(*arguments)
    for mask, blocks, batch in zip(masks(*arguments), map(np.asarray, both), (B, 1), strict=True):
        want = mask.dense(T, T, batch=batch, heads=N)
        if method != "heads":
            chunks = (shards, context.chunks, rows // context.chunks, T)
            want = context.reorder(want, shards, axis=2).reshape(batch, N, *chunks)
            want = np.moveaxis(want, 3, 1).reshape(-1, N, T // context.chunks, T)
        want = blocks_of(want)
        if method == "ring":  # by chunks of keys
            blocks = np.concatenate(list(blocks), axis=-1)
        assert blocks.shape == want.shape
        assert (blocks > 0)[want > 0].all() and (want == 2)[blocks == 2].all()
        assert (blocks == 0).mean() > 0.2
        if batch == 1 and method != "heads":  # a static offset, so that tables have bounds
            np.testing.assert_array_equal(blocks, want)


def test_found_once_for_all_layers_and_both_passes(kernel, monkeypatch):
    """Also under vmap, where the mapped axis becomes a part of the batch, and in a scan."""
    searches, kinds = [], tile_bounds.kinds
    monkeypatch.setattr(
        tile_bounds, "kinds", lambda *arguments: searches.append(0) or kinds(*arguments)
    )
    context = pa.Context("cp", "zigzag")
    q = contexts.normal(0, 3, B, T, 2, 8)

    def layers(x, ids, context, rows):
        mask = pa.mask_fn(lambda b, h, q, kv, i: i[q] == i[kv], ids) & pa.CAUSAL
        mask = mask.blocks(rows, rows, context=context)

        @jax.checkpoint
        def layer(x, _):
            attend = functools.partial(pa.flash_attention, mask=mask, context=context)
            return jax.vmap(lambda x: attend(x, x, x))(x), None

        return jax.lax.scan(layer, x, length=2)[0]

    def local(x, ids):
        return layers(x, ids, context, T // 2)

    rows = P(None, None, "cp")
    mesh = jax.make_mesh((2,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    call = jax.shard_map(local, mesh=mesh, in_specs=(rows, P()), out_specs=rows)

    def loss(call, x):
        return (call(x, contexts.IDS[0]) ** 2).sum()

    got = jax.jit(jax.grad(functools.partial(loss, call)))(context.reorder(q, 2, 2))
    assert len(searches) == 1 and kernel.carried and None not in kernel.carried
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (REFERENCE,))
    want = jax.jit(jax.grad(functools.partial(loss, lambda *x: layers(*x, None, T))))(q)
    contexts.assert_same(context.restore(got, 2, 2), want)
