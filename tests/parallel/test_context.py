"""Context parallelism on eight CPU devices: every option, order and method against one device,
forward and gradients; and what it refuses.
"""

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
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from benchmarks import context as bench_context
from benchmarks import rows
from pallas_attn._call import batching, dispatch
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._context_parallel import gather, layout
from pallas_attn.kernels.attention import tile_scheduler
from pallas_attn.kernels.flash_bwd import sm90 as flash_bwd_sm90
from pallas_attn.kernels.flash_bwd import sm90_two_kernels, work_order
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd_sm90
from tests.parallel.test_kernels_batched_and_sharded import REFERENCE
from tests.parallel.test_sharded_sequences import seen as kernels_that_differentiate  # noqa: F401
from tests.support import hard_data, messages, mosaic
from tests.support.problems import by_name

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

B, T, N, K, H = 2, 32, 8, 8, 8
# The axis of rows.
ROWS = {"q": 1, "k": 1, "v": 1, "segment_ids": 1, "bias": 2, "mask_array": 2, "rotary_positions": 1}


def normal(seed, *shape):
    """By NumPy: jax's would be compiled into every program that draws."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def documents(mean):
    """Ids [B, T] of documents of uneven lengths."""
    starts = np.random.default_rng(0).random((B, T)) < 1 / mean
    return jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


QKV = {"q": normal(0, B, T, N, H), "k": normal(1, B, T, K, H), "v": normal(2, B, T, K, H)}
GROUPED = {**QKV, "k": normal(1, B, T, 4, H), "v": normal(2, B, T, 4, H)}
SINKS = {"sinks": jnp.asarray(hard_data.sinks_without_end(normal(4, N)))}
HIDDEN = {"mask_array": jnp.asarray(np.random.default_rng(0).random((B, 1, T, T)) < 0.3)}
LENGTHS = {
    "q_lengths": jnp.asarray([30, 3], jnp.int32),
    "kv_lengths": jnp.asarray([29, 0], jnp.int32),  # rows that see nothing
}
OPTIONS = {
    "causal": ({"mask": pa.CAUSAL}, {**GROUPED, **SINKS}),
    "window": ({"mask": pa.sliding_window(4)}, GROUPED),
    "band": ({"mask": pa.Mask(3, 2), "q_offset": 1, "kv_lengths": LENGTHS["kv_lengths"]}, QKV),
    "lengths": ({"mask": pa.CAUSAL, "softcap": 3.0, **LENGTHS}, {**QKV, **SINKS}),
    "documents": ({"segment_ids": documents(5)}, {**QKV, "bias": normal(8, 1, N, T, T)}),
    "few": (
        {"mask": pa.sliding_window(3), "segment_ids": documents(6)},
        {**GROUPED, "bias": normal(8, B, 1, 1, 1)},
    ),
    "offset": (
        {"mask": pa.CAUSAL, "q_offset": jnp.asarray([5, -9], jnp.int32), **HIDDEN},
        {**QKV, "bias": normal(8, B, 1, 1, T)},
    ),
}
IDS = documents(5)
LIMITS = jnp.asarray([3, 20], jnp.int32)
SLOPES = {"slopes": normal(9, N), "table": normal(10, N, 16)}


def documents_and_more(ids, limits):
    """By batch row, head and position, on both sides of the diagonal."""
    same = pa.mask_fn(lambda b, h, q, kv, i: i[b, q] == i[b, kv], ids)
    prefix = pa.mask_fn(lambda b, h, q, kv, n: kv < n[b] - h, limits)
    return (same & pa.CAUSAL) | prefix & ~pa.Mask(0, 0)


def parity(ids):
    """A function that a static band bounds on both sides."""
    return pa.mask_fn(lambda b, h, q, kv, i: (i[b, q] + i[b, kv]) % 2 == 0, ids) & pa.Mask(5, 2)


def relative(slopes, table):
    def score(s, b, h, q, kv, slopes, table):
        near = jnp.clip(q - kv + 8, 0, 15)
        return 9 * jnp.tanh((s - slopes[h] * jnp.abs(q - kv) + b) / 9) + table[h, near]

    return pa.score_fn(score, slopes, table)


def attend(**options):
    """With functions of what they read in place of that."""
    if "limits" in options:
        options["mask"] = documents_and_more(options.pop("ids"), options.pop("limits"))
    elif "ids" in options:
        options["mask"] = parity(options.pop("ids"))
    if "slopes" in options:
        options["score"] = relative(options.pop("slopes"), options.pop("table"))
    return by_name.flash_attention_with_lse(**options)


OPTIONS |= {
    "functions": (
        {
            "ids": IDS,
            "limits": LIMITS,
            "segment_ids": documents(9),
            "kv_lengths": LENGTHS["kv_lengths"],
        },
        {**QKV, **SLOPES, **SINKS},
    ),
    "score": (
        {"mask": pa.CAUSAL, "q_offset": 2, "segment_ids": IDS, "q_lengths": LENGTHS["q_lengths"]},
        {**GROUPED, **SLOPES},
    ),
    "within": (
        {"ids": IDS, "segment_ids": documents(9), "kv_lengths": LENGTHS["kv_lengths"]},
        {**GROUPED, **SINKS},
    ),
    "near": ({"mask": pa.sliding_window(4)}, {**QKV, **SLOPES}),
    "end": ({"mask": pa.Mask(1, 2)}, GROUPED),  # which shows keys behind the last one
    "far": (
        {"ids": IDS, "limits": LIMITS, "q_offset": jnp.asarray([5, -9], jnp.int32), **HIDDEN},
        {**GROUPED, "bias": normal(8, 1, N, T, T)},
    ),
}
TURNED = pa.Rotary.create(80, 4, base=100.0, first=2)
PLACES = jnp.asarray(np.random.default_rng(3).permuted(np.tile(np.arange(T), (B, 1)), axis=1))
OPTIONS |= {
    "rotary": (
        {"mask": pa.CAUSAL, "q_offset": 3, "rotary": TURNED, "segment_ids": documents(9)},
        {**GROUPED, **SINKS},
    ),
    "rotary at run time": (
        {"mask": pa.CAUSAL, "q_offset": jnp.asarray([5, 2], jnp.int32), "rotary": TURNED},
        QKV,
    ),
    "rotary_positions": ({"rotary": TURNED, "rotary_positions": PLACES}, GROUPED),
}
SPREAD = [  # all options, methods and orders, on 2, 4 and 8 devices; not each with each
    ("causal", 4, "zigzag", "ring"),
    ("causal", 4, "zigzag", "heads"),
    ("window", 8, "contiguous", "gather"),
    ("band", 4, "zigzag", "gather"),
    ("lengths", 2, "contiguous", "heads"),
    ("documents", 2, "zigzag", "heads"),
    ("documents", 2, "zigzag", "ring"),
    ("few", 4, "zigzag", "gather"),
    ("offset", 2, "zigzag", "gather"),
    ("offset", 8, "contiguous", "ring"),
    ("functions", 4, "zigzag", "gather"),
    ("functions", 4, "contiguous", "heads"),
    ("score", 2, "contiguous", "gather"),
    ("score", 4, "zigzag", "ring"),
    ("within", 4, "zigzag", "gather"),
    ("near", 8, "contiguous", "gather"),
    ("end", 2, "contiguous", "gather"),
    ("far", 8, "contiguous", "ring"),
    ("rotary", 4, "zigzag", "gather"),
    ("rotary", 2, "contiguous", "heads"),
    ("rotary at run time", 4, "zigzag", "ring"),
    ("rotary_positions", 2, "zigzag", "gather"),
]
BY_XLA = SPREAD[0], SPREAD[2], SPREAD[4]  # every method, and every order


def weights(out, lse):
    """Cotangents of random sums over out and lse, in the order of positions."""
    return normal(5, *out.shape), normal(6, *lse.shape)


def loss(call, floats):
    out, lse = call(floats)
    of_out, of_lse = weights(out, lse)
    total = (of_out * out).sum() + jnp.where(jnp.isfinite(lse), of_lse * lse, 0).sum()
    return total, (out, lse)


def value_and_gradients(call, floats):
    return jax.jit(jax.value_and_grad(functools.partial(loss, call), has_aux=True))(floats)


@functools.cache
def on_one_device(name):
    options, floats = OPTIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.TABLES, "flash_forward", (REFERENCE,))
        return value_and_gradients(lambda floats: attend(**floats, **options), floats)


def is_split(name, x):
    return name in ROWS and x.shape[ROWS[name]] > 1


def spec_of(name, x):
    return P(*(None,) * ROWS[name], "cp") if is_split(name, x) else P()


def over(context, shards, options, check_vma=True):
    """The call over so many devices, of and with arrays in the order of positions."""
    arrays = {name: x for name, x in options.items() if hasattr(x, "shape")}
    static = {name: x for name, x in options.items() if name not in arrays}
    mesh = jax.make_mesh(
        (shards,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:shards]
    )

    def local(values):
        return attend(**values, **static, context=context)

    def call(floats):
        numbers = {
            name: context.reorder(x, shards, ROWS[name]) if is_split(name, x) else x
            for name, x in {**floats, **arrays}.items()
        }
        specs = {name: spec_of(name, x) for name, x in numbers.items()}
        out, lse = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(P(None, "cp"), P(None, None, "cp")),
            check_vma=check_vma,
        )(numbers)
        return context.restore(out, shards), context.restore(lse, shards, 2)

    return call


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shards", "order", "method"),
    [pytest.param(*x, marks=pytest.mark.by_xla if x in BY_XLA else ()) for x in SPREAD],
)
def test_as_on_one_device(name, shards, order, method):
    options, floats = OPTIONS[name]
    call = over(pa.Context("cp", order, method), shards, options)
    assert_same(value_and_gradients(call, floats), on_one_device(name))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [pa.CAUSAL, pa.FULL], ids=["causal", "full"])
def test_documents_move_what_they_need(monkeypatch, order, mask):
    """Rows of four devices, of documents that end with chunks, that begin a quarter of one before
    them or farther away, and whose ids fall; whatever moves, the result is that of all.
    """
    rows = np.arange(64)
    chunk = 16 if order == "contiguous" else 8
    quarters = (rows + chunk // 4) // (chunk // 2)  # one of two lies across an end
    ids = {
        "whole chunks": (rows // chunk, 0),
        "a quarter": (quarters, 1),
        "a chunk": ((rows + chunk // 2) // chunk, 2),
        "falling": (-(rows // chunk), 0),
        "one of all": (rows * 0, 3),
        "all of one, in turn": (rows % 2, 3),
    }
    context, splits = pa.Context("cp", order), []
    mesh = jax.make_mesh((4,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    asked = gather._narrowest

    def narrowest(split, *arguments):
        splits.append(split)
        return asked(split, *arguments)

    monkeypatch.setattr(layout, "WORTH_ASKING", 0)
    monkeypatch.setattr(gather, "_narrowest", narrowest)
    floats = {x: normal(n, 1, 64, 2, 8) for n, x in enumerate("qkv")}

    def there(floats, numbers):
        return over(context, 4, {"mask": mask, "segment_ids": numbers})(floats)

    def here(floats, numbers):
        return attend(**floats, mask=mask, segment_ids=numbers)

    def both(call):
        """One program for all ids."""

        def differentiated(floats, numbers):
            total = functools.partial(loss, lambda floats: call(floats, numbers))
            return jax.value_and_grad(total, has_aux=True)(floats)

        return jax.jit(differentiated)

    split, alone = both(there), both(here)
    way_of = jax.jit(
        jax.shard_map(
            lambda x: asked(splits[0], x, x)[None],
            mesh=mesh,
            in_specs=P(None, "cp"),
            out_specs=P("cp"),
        )
    )
    for values, way in ids.values():
        numbers = jnp.asarray(values, jnp.int32)[None]
        assert_same(split(floats, numbers), alone(floats, numbers))
        np.testing.assert_array_equal(way_of(context.reorder(numbers, 4)), way)
    narrow = {name: x.astype(jnp.bfloat16) for name, x in floats.items()}

    def total(floats):
        return there(floats, numbers)[0].astype(jnp.float32).sum()

    of_narrow = jax.eval_shape(jax.grad(total), narrow)  # branches agree in their dtypes
    assert {x.dtype for x in of_narrow.values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("name", "method", "check_vma"),
    [("causal", "gather", True), ("lengths", "ring", False), ("functions", "ring", False)],
)
def test_by_kernels_as_on_one_device(kernels_that_differentiate, name, method, check_vma):  # noqa: F811
    """Backward kernels get the out and lse of all keys, whichever keys they have."""
    options, floats = OPTIONS[name]
    call = over(pa.Context("cp", "zigzag", method), 2, options, check_vma)
    got = value_and_gradients(call, floats)
    assert kernels_that_differentiate
    assert_same(got, on_one_device(name))


def test_a_window_moves_its_rows_and_no_more():
    """By a fixed number of permutations, without a gather; on the device at the start, none of the
    rows that it lacks is anyone's.
    """
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in GROUPED.items()}

    def moved(mask, order):
        context = pa.Context("cp", order)
        program = jax.jit(over(context, 4, {"mask": mask})).lower(shapes).as_text()
        return program.count("stablehlo.all_gather"), program.count("stablehlo.collective_permute")

    assert moved(pa.sliding_window(4), "contiguous") == (0, 2)  # k and v of one neighbour
    assert moved(pa.sliding_window(12), "contiguous") == (0, 4)
    assert moved(pa.CAUSAL, "contiguous") == (2, 0)
    assert moved(parity(IDS), "contiguous") == (0, 4)  # rows of a neighbour on either side
    assert moved(parity(IDS) | pa.Mask(0, 0), "contiguous") == (2, 0)


def test_orders_and_positions():
    zigzag, plain = pa.Context("cp", "zigzag"), pa.Context("cp")
    order = np.arange(16)[None]
    assert zigzag.reorder(order, 4).tolist() == [
        [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    ]
    np.testing.assert_array_equal(zigzag.restore(zigzag.reorder(order, 4), 4), order)
    np.testing.assert_array_equal(plain.reorder(order, 4), order)
    assert isinstance(zigzag.reorder(order, 4), np.ndarray)
    mesh = jax.make_mesh((4,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    for context in (zigzag, plain):
        result = jax.shard_map(
            lambda c=context: c.positions(4), mesh=mesh, in_specs=(), out_specs=P("cp")
        )()
        np.testing.assert_array_equal(result[None], context.reorder(order, 4))


@pytest.mark.by_xla
@pytest.mark.parametrize("small", [False, True])
def test_segment_ids_of_64_bits(small):
    """The ids of one device are compared with those of the other by all of their bits."""
    ids = np.array([[1, 2**32 + 1, 2**33, 1, 2**32 + 1, 1, 2**33, 0]])
    ids = ids % 7 if small else ids
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("cp",), (auto,), devices=jax.devices()[:2])
    x, values = jnp.zeros((1, 8, 1, 8)), jnp.eye(8)[None, :, None]

    def local(q, v, ids):
        return by_name.flash_attention(q, q, v, segment_ids=ids, context=pa.Context("cp"))

    with jax.enable_x64(True):
        rows = P(None, "cp")
        call = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
        out = jax.jit(call)(x, values, jnp.asarray(ids.copy()))
    np.testing.assert_array_equal(np.asarray(out)[0, :, 0] > 0, ids[0][:, None] == ids[0])


def whole(name, method="gather"):
    """A call that is handed one of q, k and v as it is on every device."""
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("cp",), (auto,), devices=jax.devices()[:2])
    specs = {x: P() if x == name else P(None, "cp") for x in "qkv"}

    def local(arrays):
        return by_name.flash_attention(**arrays, context=pa.Context("cp", method=method))

    call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(None, "cp"))
    rows = {x: 4 if x == name else 8 for x in "qkv"}  # one device has them, or both
    return jax.eval_shape(call, {x: jnp.zeros((1, n, 2, 8)) for x, n in rows.items()})


def mapped(shards=2, options=(), **fields):
    context = pa.Context("cp", **fields)
    return jax.eval_shape(over(context, shards, dict(options)), GROUPED)


REFUSED = (
    lambda: pa.Context(("a", "b")),
    lambda: pa.Context(""),
    lambda: pa.Context("a", "striped"),
    lambda: pa.Context("a", method="tree"),
    lambda: pa.Context("a", overlap=1),
    lambda: by_name.flash_attention(**QKV, context="cp"),
    lambda: by_name.flash_attention(**QKV, context=pa.Context("cp")),
    lambda: jax.vmap(
        lambda x: by_name.flash_attention(x, x, x, context=pa.Context("cp")), axis_name="cp"
    )(np.zeros((2, 1, 4, 2, 8), np.float32)),
    lambda: pa.Context("cp").positions(4),
    *(
        lambda shards=shards: pa.Context("cp").reorder(np.zeros((1, 6)), shards)
        for shards in (0, 2.0)
    ),
    lambda: mapped(8, method="heads"),
    lambda: pa.Context("cp", "zigzag").reorder(np.zeros((1, 6)), 2),
    *(functools.partial(whole, name) for name in "qkv"),
    lambda: mapped(options={"mask": documents_and_more(IDS[:, : T // 2], LIMITS)}),
)
MESSAGES = {"context": REFUSED}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_what_is_refused(call, message):
    messages.check(call, message)


def test_an_odd_number_of_rows_has_no_zigzag():
    context = pa.Context("cp", "zigzag")
    mesh = jax.make_mesh((2,), ("cp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    odd = [x[:, :30] for x in QKV.values()]

    def local(q, k, v):
        return by_name.flash_attention(q, k, v, context=context)

    call = jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    with pytest.raises(ValueError, match="q: expected an even number of rows a device for order"):
        jax.eval_shape(call, *odd)


# ---- kernels whose batch rows share k and v, and who computes what when --------------------------


def zigzag_problem(op):
    shards, rows = 4, 8192
    offsets = tuple((n * rows, (2 * shards - 1 - n) * rows) for n in range(shards))
    return AttentionProblem(
        op=op,
        gpu="sm90",
        dtype="bfloat16",
        batch=2,
        q_len=rows,
        kv_len=2 * shards * rows,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        mask=pa.CAUSAL,
        scale=1.0,
        share=2,
        offsets=offsets,
        arrays=("q_offset",),
    )


@pytest.mark.parametrize("op", ["flash_forward", "flash_backward"])
def test_zigzag_gives_every_block_the_same_work(op):
    """Each device's table has every work tile once, and no block has 3 % more than the mean (of
    the forward .3 %); dealt as if all offsets were 0 it is half as much again.
    """
    problem = zigzag_problem(op)
    if op == "flash_forward":
        plan = flash_fwd_sm90.plan_of(problem, flash_fwd_sm90.Config.default(problem))
        make, tiles = tile_scheduler.schedule, plan.tiling.q_tiles
        heads = 32
    else:
        assert flash_bwd_sm90.slower(problem) is None  # keys meet many rows, wherever these are
        config = flash_bwd_sm90.Config.default(problem)
        plan = flash_bwd_sm90.plan_of(problem, config).order
        make, tiles = work_order.schedule, plan.tiling.kv_tiles
        heads = 8

    def cost(code, offsets):
        head, tile = code >> plan.code_bits, code & ((1 << plan.code_bits) - 1)
        offset = offsets[head // heads]
        if op == "flash_forward":
            row = tile * plan.tiling.tile_rows
            part = 0.82 if tile == tiles - 1 else 1  # two of three warpgroups have rows
            return (offset + row + plan.tiling.tile_rows / 2) * part
        return max(0, min(8192, offset + 8192 - tile * plan.tiling.block_kv)) + 32

    def uneven(table, offsets):
        loads = [sum(cost(code, offsets) for code in row[1 : row[0] + 1]) for row in table]
        return max(loads) / np.mean(loads)

    for offsets in problem.offsets:
        table = make(plan, offsets)
        codes = [code for row in table.tolist() for code in row[1 : row[0] + 1]]
        assert len(set(codes)) == len(codes) == 2 * heads * tiles
        assert uneven(table.tolist(), offsets) < (1.003 if op == "flash_forward" else 1.03)
    offset = jnp.asarray(problem.offsets[2], jnp.int32)
    inputs = AttentionInputs(*(None,) * 3, q_offset=offset)
    picked = tile_scheduler.table(make, plan, inputs)["schedule"]
    table = make(plan, problem.offsets[2])
    np.testing.assert_array_equal(picked[:, : table.shape[1]], table)


@pytest.mark.guards
@pytest.mark.parametrize("op", ["flash_forward", "flash_backward"])
def test_rows_that_share_keys_as_if_each_had_its_own(op):
    """By kernels in the interpreter; keys end within a tile, and so do one batch row's queries."""
    count, keys = 64, 192
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    q, do = (draw(jax.random.key(n), (2, count, 2, 64)) for n in (0, 3))
    k, v = (draw(jax.random.key(n), (1, keys, 1, 64)) for n in (1, 2))
    ends = jnp.full((2,), 150, jnp.int32)
    k, v = (jnp.where(jnp.arange(keys)[None, :, None, None] < 150, x, jnp.nan) for x in (k, v))
    arrays = AttentionInputs(
        q, k, v, jnp.asarray([0, 100], jnp.int32), jnp.asarray([64, 40], jnp.int32), ends
    )
    problem = dataclasses.replace(
        zigzag_problem(op), q_heads=2, kv_heads=1, head_dim=64, v_head_dim=64, scale=0.125
    )
    problem = batching.resized(dataclasses.replace(problem, offsets=((0, 100),)), arrays)
    repeated = arrays._replace(k=jnp.repeat(k, 2, axis=0), v=jnp.repeat(v, 2, axis=0))
    alone = dataclasses.replace(problem, share=1, offsets=())
    kernel = flash_fwd_sm90 if op == "flash_forward" else sm90_two_kernels
    assert kernel.KERNEL.shares_keys(problem)

    def run(problem, inputs):
        config = kernel.Config.default(problem)
        if op == "flash_forward":
            return kernel.run(inputs, problem, dataclasses.replace(config, grid=2))
        lse = jnp.zeros((2, 2, count), jnp.float32)
        config = dataclasses.replace(config, grid=2)
        return kernel.run((inputs, do, lse, do, lse), problem, config)[:3]

    with mosaic.interpret():
        got, want = (
            jax.jit(run, static_argnums=0)(*x) for x in ((problem, arrays), (alone, repeated))
        )
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and np.isfinite(np.asarray(w, np.float32)).any()
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


def in_both_orders(operation, rows, begins, **more):
    """(problem, inputs) of two chunks of query rows and 512 keys, in the order of positions and as
    two devices have them in the order zigzag.
    """
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    q, k, v = (
        draw(jax.random.key(n), (batch, size, heads, 64))
        for n, (batch, size, heads) in enumerate(((2, rows, 2), (1, 512, 1), (1, 512, 1)))
    )
    inputs = AttentionInputs(q, k, v, jnp.asarray(begins, jnp.int32))._replace(**more)
    problem = dataclasses.replace(
        zigzag_problem(operation), q_heads=2, kv_heads=1, head_dim=64, v_head_dim=64
    )
    problem = dataclasses.replace(problem, scale=0.125, offsets=(begins,))
    problem = batching.resized(problem, inputs)
    context = pa.Context("cp", "zigzag")
    lying = inputs._replace(k=context.reorder(k, 2), v=context.reorder(v, 2))
    return (problem, inputs), (dataclasses.replace(problem, zigzag=2), lying)


@pytest.mark.guards
@pytest.mark.parametrize("segments", [False, True])
def test_keys_in_the_order_zigzag_as_in_that_of_positions(segments):
    """By the kernel in the interpreter: of two devices, chunks of two kv tiles."""
    rows, begins, kernel, more = 64, (150, 448), flash_fwd_sm90, {}
    if segments:
        ids = jnp.arange(512, dtype=jnp.int32)[None] // 180
        q_ids = jnp.concatenate([ids[:, begin : begin + rows] for begin in begins])
        more = {"q_segment_ids": q_ids, "kv_segment_ids": jnp.repeat(ids, 2, axis=0)}
    both = in_both_orders("flash_forward", rows, begins, **more)
    (problem, _), (moved, lying) = both
    assert kernel.reads_zigzag(moved)

    def run(problem, inputs):
        config = dataclasses.replace(kernel.Config.default(problem), grid=2)
        return kernel.run(inputs, problem, config)

    with mosaic.interpret():
        want, got = (jax.jit(run, static_argnums=0)(*x) for x in both)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))
    config = dataclasses.replace(kernel.Config.default(problem), block_kv=192)
    with pytest.raises(ValueError, match="block_kv must divide the 128 keys of a chunk"):
        jax.eval_shape(lambda x: kernel.run(x, moved, config), lying)


@pytest.mark.guards
@pytest.mark.parametrize("claims", [False, True])
def test_gradients_of_keys_in_the_order_zigzag(claims):
    """Lie as the keys do."""
    kernel, context = flash_bwd_sm90, pa.Context("cp", "zigzag")
    (problem, inputs), (moved, lying) = in_both_orders("flash_backward", 128, (128, 384))
    shape = inputs.q.shape
    out, d_out = (jax.random.normal(jax.random.key(n), shape, dtype=jnp.bfloat16) for n in (3, 4))
    lse = jnp.full((2, 2, 128), 3.0)
    rows = out, lse, d_out, jnp.zeros(lse.shape)

    def run(problem, inputs):
        config = kernel.Config.default(problem)
        config = dataclasses.replace(config, grid=2, lockstep=False, claims=claims)
        return kernel.run((inputs, *rows), problem, config)

    with mosaic.interpret():
        got, want = (
            jax.jit(run, static_argnums=0)(*x) for x in ((moved, lying), (problem, inputs))
        )
    for name in ("q", "k", "v"):
        first, other = getattr(got, name), getattr(want, name)
        assert np.abs(np.asarray(other, np.float32)).max() > 0.01
        if name != "q":  # rows of each batch row of q
            other = context.reorder(other, 2)
        np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(other, np.float32))
    dims = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    large = dataclasses.replace(problem, q_len=4096, kv_len=32768, zigzag=4, **dims)
    large = dataclasses.replace(large, offsets=((0, 28672), (12288, 16384)))
    assert kernel.reads_zigzag(large)
    for changes in ({"deterministic": True}, {"dtype": "float32"}):
        chosen = dispatch.select(dataclasses.replace(large, **changes), "sm90")
        assert chosen.name == "flash_bwd_sm90_two_kernels"
        assert not chosen.kernel.reads_zigzag(large)


TINY = {"rows": 64, "q_heads": 2, "kv_heads": 1, "head_dim": 8}
BENCHED = (
    bench_context.Case("all", both=True, **TINY),
    bench_context.Case("documents", both=False, order="contiguous", document=24, **TINY),
)
WINDOW = bench_context.Case("window", both=False, order="contiguous", window=9, **TINY)
CACHED = bench_context.CacheCase("rows", 1024, q_heads=2, kv_heads=1, head_dim=8)


@pytest.mark.parametrize("case", (*BENCHED, CACHED), ids=lambda case: case.name)
def test_the_benchmark_of_contexts(monkeypatch, case):
    """On eight CPU devices: who is right gets a row, with what a row needs."""
    monkeypatch.setattr(bench_context, "TURN_MS", 0)  # CPU devices stop if many programs wait
    monkeypatch.setattr(bench_context, "REST_S", 0)
    result, wrong = bench_context.time_case(case, 0, 1, rows.Provenance.here("none"))
    assert wrong == 0
    others = ("rows",) if case is CACHED else ("gather", "ring")
    assert [row["impl"] for row in result] == [f"pallas_attn/{x}" for x in ("one", *others)]
    for row in result:
        assert not set(rows.REQUIRED) - row.keys() and row["efficiency"] > 0
        assert len(row["alone_ms"]) == 8 and row["alone_ms"][0] == result[0]["ms"]
    assert result[0]["efficiency"] == 1


def test_the_benchmark_counts_the_pairs_that_are_seen():
    for case in (*BENCHED, WINDOW):
        q, kv = np.arange(case.rows)[:, None], np.arange(case.rows)[None]
        seen = (kv <= q) & (q - kv < (case.window or case.rows))
        seen &= q // (case.document or case.rows) == kv // (case.document or case.rows)
        assert case.flops() == (3.5 if case.both else 1) * 4 * 2 * 8 * seen.sum()


# ---- processes ----------------------------------------------------------------------------------

_PROCESS = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import pallas_attn as pa

context = pa.Context("cp", "zigzag", sys.argv[3])
mesh = jax.make_mesh((4,), ("cp",), (jax.sharding.AxisType.Auto,))
where = NamedSharding(mesh, P(None, "cp"))
rng = np.random.default_rng(0)
whole = [rng.standard_normal((1, 16, n, 8), np.float32) for n in (2, 1, 1)]

def loss(call, q, k, v):
    return (call(q, k, v) ** 2).sum()

def local(q, k, v):
    return pa.flash_attention(q, k, v, mask=pa.CAUSAL, context=context)

def one(q, k, v):
    return pa.flash_attention(q, k, v, mask=pa.CAUSAL)

def placed(x):
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

call = jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
over = jax.jit(jax.grad(lambda *x: loss(call, *x), (0, 1, 2)))
got = over(*(placed(context.reorder(x, 4)) for x in whole))
want = jax.jit(jax.grad(lambda *x: loss(one, *x), (0, 1, 2)))(*whole)
for g, w in zip(got, want):
    w = context.reorder(np.asarray(w), 4)
    for shard in g.addressable_shards:
        np.testing.assert_allclose(shard.data, w[shard.index], rtol=1e-4, atol=1e-4)
print("the same on process", jax.process_index())
"""


def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    root = pathlib.Path(pa.__file__).parent.parent
    # Flags of conftest.py, but for the number of devices: code that runs once is not optimised.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = os.environ | {"PYTHONPATH": str(root), "XLA_FLAGS": flags}
    command = [sys.executable, "-c", _PROCESS, address]
    running = [
        subprocess.Popen(
            [*command, str(n), "gather"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for n in (0, 1)
    ]
    said = [process.communicate(timeout=120) for process in running]
    for n, (out, _) in enumerate(said):
        assert f"the same on process {n}\n" in out, said
