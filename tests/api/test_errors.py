"""Every message, word for word: the argument, what was wanted, what came, what to do."""

import dataclasses
import functools
import itertools
import pathlib
import pickle
import re
import threading
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn import Limit, Mask, PagedCache, PerSequenceCache, StackedCache
from pallas_attn._call import device
from tests.parallel import test_sharded_caches as rows
from tests.support import messages
from tests.support.problems import by_name

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def z(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def q(*shape, **options):
    return z(*shape or (2, 5, 4, 8), **options)


def k(*shape, **options):
    return z(*shape or (2, 7, 2, 8), **options)


TABLES = pa.Rotary.create(16, 8)


def attend(q=None, k=None, v=None, **options):
    default = z(2, 7, 2, 8)
    return lambda: by_name.flash_attention(
        z(2, 5, 4, 8) if q is None else q,
        default if k is None else k,
        default if v is None else v,
        **options,
    )


def narrow_over_two(dtype, **options):
    """Rows that two devices have, in a narrow dtype."""

    def local(x):
        return by_name.flash_attention(x, x, x, context=pa.Context("cp"), **options)

    def call():
        devices, auto = jax.devices()[:2], jax.sharding.AxisType.Auto
        mesh, rows = jax.make_mesh((2,), ("cp",), (auto,), devices=devices), P(None, "cp")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
        return jax.eval_shape(mapped, z(1, 8, 2, 8, dtype=dtype))

    return call


def with_split_lengths(cache):
    """The cache where explicit mesh axes split its lengths."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split = jax.device_put(cache.lengths, jax.NamedSharding(mesh, P("x")))
    return dataclasses.replace(cache, lengths=split)


def ragged(**changes):
    arguments = {
        "q": z(6, 4, 8),
        "kv_pages": z(3, 4, 4, 8),
        "kv_lens": z(2, dtype="int32"),
        "page_indices": z(2, 1, dtype="int32"),
        "cu_q_lens": z(3, dtype="int32"),
        "num_seqs": z(1, dtype="int32"),
    }
    return pa.ragged_paged_attention(**arguments | changes)


def update(**changes):
    small = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    shapes = {"kv_lens": (2,), "page_indices": (2, 1), "cu_q_lens": (3,), "num_seqs": (1,)}
    arguments = {name: z(*shapes[name], dtype="int32") for name in small}
    arguments |= {"kv_pages": z(3, 4, 4, 8), "k": z(6, 2, 8), "v": z(6, 2, 8)}
    return pa.update_kv_pages(**arguments | changes)


def band(**bounds):
    """A mask whose bounds were not checked, as one out of a pytree."""
    return pa.FULL.filled(**bounds)


def attend_packed(q_starts, kv_starts=None, **options):
    starts = {"q_starts": q_starts, "kv_starts": kv_starts}
    return lambda: by_name.flash_attention(z(5, 4, 8), z(7, 2, 8), z(7, 2, 8), **starts, **options)


def traced(call):
    """`call(x)` with x traced."""
    return lambda: jax.jit(call)(jnp.float32(2.0))


def stacked(**options):
    return StackedCache.create(2, 6, 2, 8, dtype="float32", **options)


def paged(**options):
    return PagedCache.create(2, 5, 2, 2, 8, capacity=6, dtype="float32", **options)


def paged_of(dtype):
    return PagedCache.create(2, 5, 2, 2, 8, dtype=dtype)


def separate(**options):
    return PerSequenceCache.create((6, 8), 2, 8, dtype="float32", **options)


def of(cache, **fields):
    return dataclasses.replace(cache, **fields)


ROW = z(2, 1, 2, 8)
ATTENTION = (
    # ---- shapes and types of q, k, v
    attend(q=[1.0]),
    attend(q=np.array([None])),
    attend(q=jax.ShapeDtypeStruct((2, 5, 4, 8), "float32")),
    attend(q=z(5, 4, 8)),
    attend(k=z(7, 8)),
    attend(v=z(1, 2, 7, 2, 8)),
    attend(k=z(3, 7, 2, 8)),
    attend(k=z(2, 7, 2, 16)),
    attend(v=z(2, 6, 2, 8)),
    attend(v=z(2, 7, 1, 4)),
    attend(v=z(2, 7, 2, 0)),
    attend(q=z(2, 5, 3, 8)),
    attend(k=z(2, 7, 0, 8), v=z(2, 7, 0, 8)),
    attend(q=z(2, 5, 4, 8, dtype="int32")),
    # ---- float8
    attend(float8=True),
    attend(float8=1),
    narrow_over_two("bfloat16", float8=True),
    narrow_over_two("float8_e4m3fn"),
    narrow_over_two("float8_e5m2"),
    attend(k=z(2, 7, 2, 8, dtype="bfloat16")),
    attend(v=z(2, 7, 2, 8, dtype="float16")),
    # ---- static options
    attend(mask=z(5, 7, dtype="bool")),
    attend(mask="causal"),
    attend(scale="big"),
    traced(lambda x: attend(scale=x)()),
    attend(scale=True),
    attend(scale=10**400),
    attend(scale=-1e39),
    traced(lambda x: attend(softcap=x)()),
    attend(softcap=0.0),
    attend(softcap=-2.5),
    attend(softcap=1e-40),
    attend(softcap=float("nan")),
    attend(precision="double"),
    attend(precision=["highest"]),
    attend(deterministic=1),
    # A wrong name is wrong also where there is nothing to compute.
    attend(k=z(2, 0, 2, 8), v=z(2, 0, 2, 8), implementation="triton"),
    attend(implementation="cudnn"),
    # ---- lengths, offsets, segments
    attend(q_lengths=z(3, dtype="int32")),
    attend(kv_lengths=z(2)),
    attend(kv_lengths=3),
    attend(q_offset=z(5, dtype="int32")),
    attend(q_offset=z(2)),
    attend(q_offset=2**29 + 1),
    attend(q_starts=z(3, dtype="int32")),
    attend(kv_starts=z(3, dtype="int32")),
    attend_packed(q_starts=z(3)),
    attend_packed(q_starts=z(0, dtype="int32")),
    attend_packed(q_starts=z(3, dtype="int32"), kv_starts=z(4, dtype="int32")),
    attend_packed(q_starts=z(3, dtype="int32")),
    attend_packed(*(z(3, dtype="int32"), z(3, dtype="int32")), q_lengths=z(1, dtype="int32")),
    attend_packed(*(z(3, dtype="int32"), z(3, dtype="int32")), q_offset=z(3, dtype="int32")),
    attend_packed(
        *(z(3, dtype="int32"), z(3, dtype="int32")), score=pa.score_fn(lambda s, b, h, q, kv: s)
    ),
    attend(segment_ids=(z(2, 5), z(2, 7), z(2, 7))),
    attend(segment_ids=z(2, 5, dtype="int32")),
    attend(segment_ids=(None, z(2, 7, dtype="int32"))),
    attend(kv_lengths="3, 4"),
    attend(kv_lengths=[2**40, 1]),
    attend(segment_ids=(z(2, 5), z(2, 7))),
    # ---- rotation
    traced(lambda x: pa.Rotary.create(16, 8, base=x)),
    *(lambda x=x: pa.Rotary.create(16, 8, base=x) for x in (None, "1", np.ones(2), -1)),
    lambda: pa.Rotary.create(True, 8),
    attend(rotary_positions=z(5, dtype="int32")),
    attend(rotary=[]),
    attend(rotary=pa.Rotary(z(6, 4), z(6, 4))),
    attend(rotary=pa.Rotary(z(8, 4), z(8, 4)), q_offset=4),
    attend_packed(*(z(3, dtype="int32"), z(3, dtype="int32")), rotary=pa.Rotary(z(0, 4), z(0, 4))),
    attend(rotary=pa.Rotary(z(9, 4), z(9, 4), first=2)),
    attend(rotary=TABLES, q_offset=-1),
    attend(rotary=TABLES, rotary_positions=(z(5, dtype="int32"),) * 3),
    attend(rotary=TABLES, rotary_positions=z(5, dtype="int32")),
    attend(rotary=TABLES, rotary_positions=(z(2, 5), z(2, 7))),
    attend_packed(
        *(z(3, dtype="int32"), z(3, dtype="int32")),
        rotary=TABLES,
        rotary_positions=z(7, dtype="int32"),
    ),
    # ---- arrays over the scores
    attend(bias=z(5, 5)),
    attend(bias=z(1, 2, 4, 5, 7)),
    attend(bias=z(5, 7, dtype="bool")),
    attend(bias=1.0),
    attend(bias=z(5, 7, dtype="int32")),
    attend(mask_array=z(5, 7)),
    attend(mask_array=z(5, 7, dtype="int32")),
    attend(mask_array=z(2, 5, 7, dtype="bool")),
    attend(sinks=z(2)),
    attend(sinks=z(4, dtype="int32")),
    # ---- dot_product_attention names its own arguments
    lambda: pa.dot_product_attention(1.0, ROW, ROW),
    lambda: pa.dot_product_attention(ROW, ROW.astype("bfloat16"), ROW),
    lambda: pa.dot_product_attention(z(5, 4, 8), z(7, 2, 6), z(7, 2, 6)),
    lambda: pa.dot_product_attention(z(2, 5, 4, 8), z(2, 7, 3, 8), z(2, 7, 3, 8)),
    lambda: pa.dot_product_attention(z(2, 5, 4, 8), z(2, 7, 2, 8), z(2, 6, 2, 8)),
    lambda: pa.dot_product_attention(ROW, ROW, ROW, bias=z(1, 1, dtype="bool")),
    lambda: pa.dot_product_attention(ROW, ROW, ROW, mask=pa.CAUSAL),
    traced(lambda x: pa.dot_product_attention(ROW, ROW, ROW, local_window_size=x)),
    traced(lambda x: pa.dot_product_attention(ROW, ROW, ROW, scale=x * z(3))),
    lambda: pa.dot_product_attention(ROW, ROW, ROW, key_value_seq_lengths=[1, 1, 1]),
    lambda: pa.dot_product_attention(ROW, ROW, ROW, mask=z(1, 1)),
    lambda: pa.dot_product_attention(ROW, ROW, ROW, is_causal="yes"),
    lambda: pa.dot_product_attention(ROW, ROW, ROW, local_window_size=(1, 2, 3)),
    lambda: pa.dot_product_attention(ROW, ROW, ROW, local_window_size=1.5),
)
MASKS = (
    lambda: pa.sliding_window(0),
    lambda: pa.sliding_window(True),
    lambda: pa.sliding_window(2.0),
    lambda: Mask(right=2**30),
    lambda: Mask(left=-(2**40)),
    *(
        traced(call)
        for what, got, call in (
            ("Mask(left=...)", "int32[1]", lambda x: Mask(left=x.astype("int32").reshape(1))),
            ("Mask(right=...)", "float32[]", lambda x: Mask(right=x)),
            ("sliding_window(n)", "bool[]", lambda x: pa.sliding_window(x > 0)),
            ("mask.right", "float32[1]", lambda x: attend(mask=band(right=x.reshape(1)))()),
        )
    ),
    lambda: Mask(1, -2),
)
CACHES = (
    lambda: PerSequenceCache.create((), 2, 8),
    lambda: PerSequenceCache.create(64, 2, 8),
    lambda: rows.create("stacked", 8, context=pa.Context("cp", "zigzag")),
    lambda: rows.local(lambda _: rows.create("stacked", 9, context=rows.CONTEXT).lengths),
    lambda: rows.create("per_sequence", 8).specs(sequences="dp"),
    lambda: StackedCache.create(2, 6, 2, 8, dtype="bf16"),
    lambda: paged_of(None),
    lambda: paged_of(jnp.int16),
    lambda: paged_of("float8_e4m3fnuz"),
    lambda: stacked(shared_kv=1),
    lambda: stacked(scales="no"),
    lambda: StackedCache.create(
        2, 16, 1, 576, v_head_dim=512, shared_kv=True, dtype="int8", scales=128
    ),
    lambda: paged_of(bool),
    lambda: PerSequenceCache.create((4, 0), 2, 8),
    lambda: PagedCache.create(1, 1, 2**20, 1, 1, capacity=2**31 - 1),
    lambda: PagedCache.create(1, 1, 2**31, 1, 1),
    lambda: StackedCache.create(None, 6, 1, 1),
    lambda: StackedCache.create(1, 2**31, 2, 8),
    lambda: StackedCache.create(2, 6, 0, 8),
    lambda: StackedCache.create(2, 6, 2, -1),
    lambda: StackedCache.create(2, 2.5, 2, 8),
    lambda: PagedCache.create(0, 5, 2, 2, 8),
    lambda: PagedCache.create(2, 0, 2, 2, 8),
    lambda: PagedCache.create(2, 5, "2", 2, 8),
    lambda: stacked(layers=0),
    lambda: paged(v_head_dim=0),
    lambda: stacked().extend(-1),
    lambda: separate().extend(7),
    lambda: pa.append_kv(paged(), z(2, 9, 2, 8), z(2, 9, 2, 8)),
    lambda: stacked().extend(z(3, dtype="int32")),
    lambda: separate().extend(None),
    lambda: paged().allocate(z(2)),
    lambda: stacked().reset(z(3, dtype="bool")),
    lambda: paged().free(z(2)),
    lambda: paged().free("0"),
    lambda: separate().reset(2),
    lambda: separate().reset(2**40),
    lambda: paged().fork(5, 0),
    lambda: paged().fork(jnp.int32(2), 0),
    lambda: paged().fork(0, -1),
    lambda: paged().fork(0.0, 1),
    lambda: paged().fork(0, [1, 0]),
    lambda: paged().fork(0, 1, 1.5),
)


def changed(rotary=None, norm=None):
    return lambda: pa.append_kv(stacked(v_head_dim=8), ROW, ROW, rotary=rotary, norm=norm)


APPENDS = (
    lambda: pa.append_kv(
        stacked(), z(3, 2, 8), z(3, 2, 8), starts=np.zeros(3, np.int32), new_lengths=[1, 1]
    ),
    changed(rotary=TABLES.at(z(3, dtype="int32"))),
    changed(norm=1.0),
    changed(norm=pa.RMSNorm(z(4))),
    changed(norm=pa.RMSNorm(z(8), -1)),
    changed(rotary=(z(9, 4), z(9, 4))),
    changed(pa.Rotary(*(z(9, 4, dtype="int32"),) * 2)),
    changed(pa.Rotary(z(5, 4), z(5, 4))),
    changed(pa.Rotary(z(9, 4), z(9, 4), first=1)),
    changed(pa.Rotary(z(9, 4), z(9, 4, dtype="int32"))),
    changed(pa.Rotary(z(9, 4), z(9, 4), interleaved=1)),
    lambda: pa.append_kv((), ROW, ROW),
    lambda: pa.append_kv(stacked(layers=3), ROW, ROW),
    lambda: pa.append_kv(stacked(), z(3, 1, 2, 8), ROW),
    lambda: pa.append_kv(stacked(v_head_dim=4), ROW, ROW),
    lambda: pa.append_kv(stacked(), z(5, 2, 8), ROW),
    lambda: pa.append_kv(paged(), z(2, 8), ROW),
    lambda: pa.append_kv(separate(), ROW, z(2, 2, 2, 8)),
    lambda: pa.append_kv(stacked(), ROW.astype("int32"), ROW),
    lambda: pa.append_kv(stacked(), 3, ROW),
    lambda: pa.write_kv(stacked().extend(2), ROW, ROW),
    lambda: pa.write_kv(paged().extend(jnp.arange(2)), z(2, 0, 2, 8), z(2, 0, 2, 8)),
    lambda: pa.write_kv(
        stacked().extend(jnp.asarray([1, 2])), z(3, 2, 8), z(3, 2, 8), starts=[0, 2, 3]
    ),
    lambda: pa.write_kv(stacked().extend(2), z(3, 2, 8), z(3, 2, 8), starts=np.array([0, 2, 4])),
    lambda: pa.write_kv(stacked(layers=3).extend(1), ROW, ROW, layer=jnp.int32(7)),
    lambda: pa.append_kv(stacked(), ROW, ROW, new_lengths=z(1, dtype="int32")),
    *(
        lambda change=change: pa.write_kv(change(stacked()), ROW, ROW)
        for which, change in (
            ([0, 1], lambda cache: cache),
            ([1], lambda cache: cache.extend(1).reset(1)),
        )
    ),
    lambda: pa.write_kv(stacked(layers=3), ROW, ROW, layer=3),
    lambda: pa.write_kv(stacked(), ROW, ROW, layer=-1),
    lambda: pa.write_kv(stacked(), ROW, ROW, layer=jnp.int32(0)),
    lambda: pa.write_kv(stacked(layers=3), ROW, ROW, layer=jnp.zeros(2, jnp.int32)),
    lambda: pa.append_kv_arrays(z(2, 2, 6, 8), None, ROW, ROW, z(2, dtype="int32")),
    lambda: pa.append_kv_arrays((), None, ROW, None, z(0, dtype="int32")),
    lambda: pa.append_kv_arrays(z(2, 6, 8), None, ROW, None, z(2, dtype="int32")),
    lambda: pa.append_kv_arrays([z(2, 6, 8)], None, ROW[:1], None, z(1, dtype="int32"), layer=0),
    lambda: pa.append_kv_arrays([z(2, 6, 8), z(3, 6, 8)], None, ROW, None, [0, 0]),
    # Each of these would have a kernel write past the end of an array.
    lambda: pa.append_kv_arrays([z(3, 2, 6, 8), z(1, 2, 6, 8)], None, ROW, None, [0, 0], layer=2),
    lambda: pa.append_kv_arrays([z(2, 6, 8)] * 2, [z(2, 6, 8)], ROW, ROW, [0, 0]),
    lambda: pa.append_kv_arrays([z(2, 6, 8)], [z(2, 5, 8)], ROW[:1], ROW[:1], [0]),
    lambda: pa.append_kv_arrays(z(2, 2, 6, 8), z(2, 2, 6, 8, dtype="bfloat16"), ROW, ROW, [0, 0]),
    lambda: pa.append_kv_arrays([z(2, 6, 8)] * 2, z(2, 2, 6, 8), ROW, ROW, [0, 0]),
    lambda: pa.append_kv(of(stacked(), v=z(2, 2, 5, 8)), ROW, ROW),
    lambda: pa.append_kv_arrays(
        [z(2, 6, 8)],
        None,
        ROW,
        None,
        z(2, dtype="int32"),
        page_table=z(2, 3, dtype="int32"),
    ),
    lambda: pa.append_kv_arrays(
        z(5, 2, 2, 8), None, ROW, None, z(2, dtype="int32"), page_table=z(2, 3)
    ),
    lambda: pa.append_kv_arrays(
        z(2, 2, 6, 8), z(2, 2, 6, 8), ROW, z(2, 2, 2, 8), z(2, dtype="int32")
    ),
    lambda: update(kv_pages=z(3, 4, 4, 8, dtype="uint8")),
    lambda: ragged(kv_pages=z(3, 4, 4, 8, dtype="int32")),
    lambda: ragged(kv_pages=z(3, 4, 4, 8, dtype="bool")),
    lambda: pa.append_kv_arrays(
        z(2, 2, 6, 8, dtype="float8_e8m0fnu"), None, ROW, None, z(2, dtype="int32")
    ),
    lambda: pa.decode_attention(
        z(2, 4, 8), of(stacked(), k=z(2, 2, 6, 8, dtype="int4"), v=z(2, 2, 6, 8, dtype="int4"))
    ),
    lambda: ragged(q=z(6, 4, 8, dtype="int32")),
    lambda: ragged(kv_pages=z(3, 4, 5, 8)),
    lambda: ragged(q=z(6, 3, 8)),
    lambda: ragged(page_indices=z(2, dtype="int32")),
    lambda: ragged(kv_lens=z(2)),
    lambda: ragged(cu_q_lens=z(2, dtype="int32")),
    lambda: ragged(num_seqs=2),
    lambda: ragged(sliding_window=0),
    lambda: ragged(soft_cap=0.0),
    lambda: ragged(soft_cap=z(2)),
    lambda: ragged(mask_value=-5.0),
    lambda: ragged(k_scale=-1.0),
    lambda: update(v_scale=1e-40),
    lambda: ragged(v_scale=z(2)),
    lambda: ragged(sm_scale=None),
    lambda: update(k=z(6, 2, 8, dtype="int32")),
    lambda: update(v=z(5, 2, 8)),
    lambda: pa.append_kv_arrays(None, None, ROW, None, [0, 0]),
    lambda: pa.append_kv_arrays(z(2, 2, 6, 8), None, ROW, None, None),
    lambda: pa.write_kv(stacked(layers=3).extend(1), ROW, ROW),
    lambda: pa.append_kv_arrays(z(2, 2, 6, 8), None, ROW, None, 4),
)
DECODES = (
    lambda: pa.decode_attention(z(2, 4, 8), stacked()),
    lambda: pa.decode_attention(z(2, 4, 8), paged().extend(0).reset(1)),
    lambda: pa.decode_attention(
        z(2, 4, 8),
        stacked().extend(0),
        prefix=pa.Prefix(paged().extend(1).reset(jnp.arange(1, 2)), jnp.asarray([1, -1])),
    ),
    lambda: pa.decode_attention(z(2, 1, 4, 8), ()),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), batch_invariant=1),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), softcap=-1),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), scale="1"),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), mask=5),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), sinks=z(2)),
    # A kernel would go by these past the end of an array.
    lambda: pa.decode_attention(z(3, 1, 4, 8), of(stacked(), lengths=z(3, dtype="int32"))),
    lambda: pa.decode_attention(z(2, 1, 4, 8), of(separate(), lengths=z(2))),
    lambda: pa.write_kv(of(paged(), new_lengths=None), ROW, ROW),
    lambda: with_split_lengths(paged()).extend(1),
    lambda: pa.decode_attention(z(2, 1, 4, 8), of(paged(), page_table=z(2, 3, dtype="int16"))),
    lambda: pa.decode_attention(z(3, 1, 4, 8), stacked()),
    lambda: pa.decode_attention(z(5, 4, 8), stacked()),
    lambda: pa.decode_attention(z(2, 4, 16), paged()),
    lambda: pa.decode_attention(z(2, 1, 5, 8), separate()),
    lambda: pa.decode_attention(z(2, 1, 4, 8, dtype="int32"), stacked()),
)
_OF_9 = pa.mask_fn(lambda b, h, q, kv, i: i[q] == i[kv], np.zeros(10, np.int32)).blocks(9, 9)
_BY_ROW = pa.mask_fn(lambda b, h, q, kv, n: kv < n[b], np.zeros(2, np.int32)).blocks(5, 7)


def over_two(mask=None, band=pa.FULL, method="gather", **options):
    """Rows that two devices have; without a mask one that carries blocks, within a band."""

    def local(x):
        context, mask_here = pa.Context("cp", method=method), mask
        if mask_here is None:
            ids = pa.mask_fn(
                lambda b, h, q, kv, i: i[h, q] == i[h, kv], np.zeros((3, 10), np.int32)
            )
            mask_here = (ids & band).blocks(
                5, 5, heads=3 if method == "heads" else 2, context=context
            )
        return by_name.flash_attention(x, x, x, mask=mask_here, context=context, **options)

    def call():  # the mesh is made here: tests are collected where there is one device, too
        devices, auto = jax.devices()[:2], jax.sharding.AxisType.Auto
        mesh, rows = jax.make_mesh((2,), ("cp",), (auto,), devices=devices), P(None, "cp")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
        return jax.eval_shape(mapped, z(1, 10, 2, 8))

    return call


_QKV_OF_LISTS = (("q", 5, 4), ("k", 7, 2), ("v", 7, 2))
_BLOCKS = z(1, 1, 1, 2, dtype="int32")
_LISTS = z(2, 1, 5, 3, dtype="int32")
ATTENTION += (
    attend_packed(z(2, dtype="int32"), kv_blocks=_BLOCKS),
    attend(kv_blocks=_BLOCKS, context=pa.Context("cp")),
    attend(kv_blocks=z(1, 1, 2, 2, dtype="int32")),
    attend(kv_blocks=z(3, 1, 1, 2, dtype="int32")),
    attend(kv_blocks=z(1, 1, 1, 2)),
    attend(kv_blocks=z(2, 4, 1, 0, dtype="int32")),
    attend(kv_indices=z(2, 4, 5, 3, dtype="int32")),
    attend(kv_indices=z(2, 1, 5, 0, dtype="int32")),
    attend(kv_indices=z(2, 1, 5, 3)),
    attend(kv_indices=_LISTS, bias="zeros"),
    attend(kv_indices=_LISTS, deterministic=True),
    attend_packed(z(3, dtype="int32"), z(3, dtype="int32"), kv_indices=_LISTS),
    attend(kv_indices=_LISTS, mask=pa.mask_fn(lambda b, h, q, kv: kv > q)),
    attend(kv_indices=_LISTS, q_offset=2**31 - 1),
    attend(
        **{name: z(2, n, h, 8, dtype="float8_e4m3fn") for name, n, h in _QKV_OF_LISTS},
        kv_indices=_LISTS,
    ),
    lambda: jax.eval_shape(
        lambda k: by_name.flash_attention(z(2, 5, 4, 8), k, k, kv_indices=_LISTS),
        jax.ShapeDtypeStruct((2, 2**29, 2, 8), "float32"),
    ),
    attend(block_size=64),
    attend(kv_blocks=_BLOCKS, q_offset=z(2, dtype="int32")),
    attend(kv_blocks=_BLOCKS, block_size=2**40),
    attend(q=z(5, 4, 8), kv_blocks=_BLOCKS),
    attend(kv_blocks=_BLOCKS, block_size=0),
    attend(kv_blocks=_BLOCKS, block_size=(64, 1.5)),
    over_two(mask=_OF_9),
    over_two(band=pa.sliding_window(2), mask_array=np.ones((1, 1, 5, 10), bool)),
    over_two(method="heads"),
    attend(mask=_BY_ROW),
    attend(mask=_OF_9),
    attend(mask=_OF_9, q_offset=z(2, dtype="int32")),
    attend(score=1.0),
    attend(
        score=pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), np.ones(1, np.float32))
    ),
    attend(context="cp"),
)
CACHES += tuple(
    lambda name=name, axes=axes: stacked().specs(**{name: axes})
    for name, axes in (("heads", 3), ("heads", ""), ("heads", ("a", None)), ("sequences", 3))
)


def over_a_whole_cache(step):
    """`step(cache)` within `jax.shard_map`, the cache as it is on every device."""

    def call():  # the mesh is made here: tests are collected where there is one device, too
        devices, auto = jax.devices()[:2], jax.sharding.AxisType.Auto
        mesh = jax.make_mesh((2,), ("cp",), (auto,), devices=devices)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
        return jax.eval_shape(mapped, stacked(context=pa.Context("cp")))

    return call


_WHOLE_CACHE = (
    "cache: expected the rows of this device, since context splits them over mesh axis 'cp', got "
    "an array that is the same on all of its devices; split it by in_specs, cache.specs()"
)
_OF_WHOLE_CACHES = [
    lambda cache: pa.decode_attention(z(2, 1, 4, 8), cache),
    lambda cache: pa.append_kv(cache, ROW, ROW),
    lambda cache: cache.extend(1).keep(1, z(2, 1, dtype="int32")),
]


@pytest.mark.parametrize("step", _OF_WHOLE_CACHES)
def test_a_cache_that_comes_whole_where_its_rows_are_split(step):
    with pytest.raises(ValueError) as caught:
        over_a_whole_cache(step)()
    assert str(caught.value) == _WHOLE_CACHE


CACHES += (
    lambda: paged().pages_for(-1),
    lambda: paged().pages_for(1.5),
)
DECODES += (
    *(
        lambda n=n, options=options: pa.decode_attention(z(2, 4, 8), stacked(layers=n), **options)
        for n, options in ((2, {}), (4, {"starts": z(3, dtype="int32")}))
    ),
    lambda: pa.decode_attention(
        z(2, 4, 8),
        paged(),
        shared_prefixes=PagedCache.create(2, 5, 3, 2, 8, capacity=9).shared_prefixes(),
    ),
    lambda: pa.decode_attention(
        z(2, 1, 4, 8),
        paged(),
        shared_prefixes=paged().shared_prefixes(),
        prefix=pa.Prefix(stacked(), z(2, dtype="int32")),
    ),
    lambda: pa.decode_attention(z(2, 3, 4, 8), stacked(), kv_indices=z(2, 3, dtype="int32")),
    lambda: pa.decode_attention(z(2, 3, 4, 8), stacked(), kv_indices=z(2, 3, 0, dtype="int32")),
    lambda: pa.decode_attention(z(2, 3, 4, 8), stacked(), kv_indices=z(2, 3, 5)),
    lambda: pa.decode_attention(z(2, 3, 4, 8), stacked(), kv_indices="first"),
    lambda: pa.decode_attention(
        z(2, 1, 4, 8),
        stacked(),
        parents=z(2, 1, dtype="int32"),
        kv_indices=z(2, 1, 5, dtype="int32"),
    ),
    lambda: over_a_whole_cache(
        lambda cache: pa.decode_attention(
            z(2, 1, 4, 8), cache, kv_indices=z(2, 1, 5, dtype="int32")
        )
    )(),
    *(
        lambda name=name, x=x: pa.decode_attention(
            z(2, 1, 4, 8), paged(), kv_indices=z(2, 1, 5, dtype="int32"), **{name: x()}
        )
        for name, x in {
            "prefix": lambda: pa.Prefix(stacked(), z(2, dtype="int32")),
            "shared_prefixes": lambda: paged().shared_prefixes(),
        }.items()
    ),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), parents=z(2, dtype="int32")),
    lambda: pa.decode_attention(
        z(2, 1, 4, 8), stacked(), parents=pa.DraftTree.create(z(2, 3, dtype="int32"))
    ),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), parents=pa.DraftTree(None, None)),
    lambda: pa.decode_attention(
        z(2, 1, 4, 8), stacked(), parents=z(2, 1, dtype="int32"), mask=pa.FULL
    ),
    lambda: pa.decode_attention(
        z(2, 1, 4, 8), stacked(), parents=z(2, 1, dtype="int32"), mask=~pa.FULL
    ),
    lambda: pa.decode_attention(z(2, 1, 4, 8), jax.eval_shape(stacked)),
    lambda: pa.decode_attention(z(2, 1, 4, 8), jax.tree.map(lambda _: None, separate())),
)
_SCORE = pa.score_fn(lambda s, b, h, q, kv, x: s + x[b], np.ones(1, np.float32))
DECODES += (
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), score=1.0),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), score=_SCORE),
    lambda: pa.decode_attention(
        z(2, 1, 4, 8), stacked(), parents=z(2, 1, dtype="int32"), score=_SCORE
    ),
    lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(context=pa.Context("cp")), score=_SCORE),
    lambda: pa.decode_attention(
        z(3, 4, 8), stacked(), starts=z(3, dtype="int32"), parents=z(2, 3, dtype="int32")
    ),
    lambda: pa.decode_attention(
        z(2, 1, 4, 8), stacked(context=pa.Context("cp")), mask=pa.CAUSAL | pa.CAUSAL
    ),
)
APPENDS += (
    lambda: pa.append_kv(
        stacked(),
        *(z(3, 2, 8),) * 2,
        starts=z(3, dtype="int32"),
        parents=pa.DraftTree.create(z(2, 3, dtype="int32")),
    ),
    lambda: pa.DraftTree.create(z(3, dtype="int32"), z(2, dtype="int32"), drafts_most=0),
    lambda: pa.DraftTree.create(z(2, 3, dtype="int32"), drafts_most=3),
)
DEVICE = tuple(lambda n=n: device.assume(n).__enter__() for n in ("h100", "sm91"))
MESSAGES = {
    "attention": ATTENTION,
    "masks": MASKS,
    "caches": CACHES,
    "appends": APPENDS,
    "decodes": DECODES,
    "device": DEVICE,
}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_wrong_arguments(call, message):
    messages.check(call, message)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("value", [1.0, True, "2"])
def test_mask_bounds_are_ints(side, value):
    with pytest.raises(ValueError) as caught:
        Mask(**{side: value})
    assert str(caught.value).startswith(f"Mask({side}=") and repr(value) in str(caught.value)
    assert str(caught.value).endswith("; pass lengths and offsets as arrays beside the mask")


def test_every_check_of_the_package_is_in_a_table():
    """No `raise ValueError` of the argument checks that nobody here has seen."""
    recorded = "\n".join(itertools.chain(*messages.recorded().values()))
    root = pathlib.Path(pa.__file__).parent
    for name in ("_call/checks", "append", "cache", "decode"):
        source = (root / f"{name}.py").read_text()
        for raised in re.findall(r"raise ValueError\(\s*((?:f?\".*?\"\s*)+)", source, re.S):
            text = "".join(re.findall(r'f?"(.*?)"', raised, re.S))
            pattern = ".*?".join(re.escape(part) for part in re.split(r"\{.*?\}", text))
            assert re.search(pattern, recorded), f"{name}: {text!r} is not tested"


# ---- UnsupportedError: on a GPU, which is pretended ----------------------------------------------


def refusal(generation, call):
    with device.assume(generation), pytest.raises(pa.UnsupportedError) as caught:
        jax.eval_shape(call)
    return caught.value


def test_the_error_is_an_exception_of_its_own():
    error = pa.UnsupportedError("Nobody does.", {"one": Limit("it is Monday", "wait")})
    assert isinstance(error, NotImplementedError) and not isinstance(error, ValueError)
    assert str(error) == "Nobody does.\n  one: it is Monday\n    -> wait"
    assert error.limits == {"one": Limit("it is Monday", "wait")}
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.limits == error.limits
    limits = dict.fromkeys(("one", "two"), Limit("it is Monday", "wait")) | {
        "three": Limit("it is Monday", "go on")
    }
    assert str(pa.UnsupportedError("Nobody does.", limits)).splitlines()[1:] == [
        "  one, two: it is Monday",
        "    -> wait",
        "  three: it is Monday",
        "    -> go on",
    ]


def test_no_fallback_on_a_gpu():
    """A GPU too old for every kernel: each candidate, its reason, the remedy; never the oracle."""
    error = refusal("sm75", attend(mask=pa.CAUSAL, softcap=2.0))
    lines = str(error).splitlines()
    assert lines[0] == (
        "No implementation takes flash_forward on sm75: float32 q[2,5,4,8], k[2,7,2,8], "
        "v[...,8], mask causal, softcap 2"
    )
    assert lines[-2:] == [
        "  reference: it would write every score to memory (T*S = 35)",
        '    -> ask for it by name: implementation="reference"',
    ]
    assert set(error.limits) >= {"reference"}
    for name, limit in error.limits.items():
        (at,) = (
            at
            for at, line in enumerate(lines)
            if line.endswith(f": {limit.reason}") and name in re.findall(r"\w+", line.split(":")[0])
        )
        assert lines[at + 1] == f"    -> {limit.remedy}"


def test_what_a_refusal_says_of_the_problem():
    q = z(2, 5, 4, 8, dtype="float32")
    wide = refusal("sm75", attend(q, precision="highest", deterministic=True, sinks=z(4)))
    assert str(wide).splitlines()[0].endswith(", sinks, precision highest, deterministic")


def test_the_oracle_runs_on_a_gpu_when_it_is_named():
    with device.assume("sm75"):
        got = attend(mask=pa.CAUSAL, implementation="reference")()
        append = pa.append_kv(stacked(), ROW, ROW, implementation="reference")
        pa.decode_attention(z(2, 1, 4, 8), append, implementation="reference")
    np.testing.assert_array_equal(got, attend(mask=pa.CAUSAL)())


def test_append_and_decode_refuse_too():
    error = refusal("sm75", lambda: pa.append_kv(stacked(), ROW, ROW))
    assert str(error).startswith(
        "No implementation takes append on sm75: float32 k[2,1,2,8] into stacked float32 caches of "
        "6 rows\n"
    )
    assert error.limits["reference"].reason == "it is one scatter a cache"
    error = refusal(
        "sm75", lambda: pa.decode_attention(z(2, 1, 4, 8), paged(), precision="float32")
    )
    assert str(error).startswith(
        "No implementation takes decode on sm75: float32 q[2,1,4,8] over paged float32 caches of 6 "
        "rows, 2 kv heads, mask causal, precision highest\n"
    )
    assert error.limits["reference"].reason == "it would copy every cache to a dense array"


def test_a_kernel_without_a_gpu_says_so():
    with pytest.raises(pa.UnsupportedError) as caught:
        pa.append_kv(stacked(), ROW, ROW, implementation="sm80")
    assert str(caught.value) == (
        "sm80 does not take append on a machine without a GPU: float32 k[2,1,2,8] into stacked "
        "float32 caches of 6 rows\n"
        "  append_copy: it needs an NVIDIA GPU, which the default device is not\n"
        '    -> leave implementation=None, or say "reference"; check_for("sm80", f, *args) says '
        "what a GPU would refuse"
    )


def wide_heads():
    x = z(1, 8, 2, 513, dtype="bfloat16")
    return by_name.flash_attention(x, x, x)


def wide_float8():
    x = z(1, 8, 2, 512, dtype="float8_e4m3fn")
    return by_name.flash_attention(x, x, x)


def decode_of_another_dtype():
    cache = paged().extend(1)
    return pa.decode_attention(z(2, 1, 4, 8, dtype="bfloat16"), cache)


def append_of_float64():
    with jax.enable_x64(True):
        row = z(2, 1, 2, 8, dtype="float64")
        return pa.append_kv(StackedCache.create(2, 6, 2, 8, dtype="float64"), row, row)


def ragged_of_another_dtype():
    return ragged(q=z(6, 4, 8, dtype="bfloat16"))


def gradient_of_float8():
    x = z(1, 8, 2, 64, dtype="float8_e4m3fn")
    loss = lambda scale: by_name.flash_attention(x, x, x, q_scale=scale).astype(jnp.float32).sum()  # noqa: E731
    return jax.grad(loss)(jnp.float32(1))


def gradient_of_float64():
    with jax.enable_x64(True):
        x = z(1, 8, 2, 64, dtype="float64")
        return jax.grad(lambda x: jax.lax.scan(lambda c, _: (pa.flash_attention(c, x, x), None),
                                               x, None, length=2)[0].sum())(x)  # fmt: skip


@pytest.mark.by_xla
@pytest.mark.parametrize(
    "call",
    [
        wide_heads,
        wide_float8,
        decode_of_another_dtype,
        append_of_float64,
        ragged_of_another_dtype,
        gradient_of_float8,
        gradient_of_float64,
    ],
)
def test_check_for(call):
    """Without a GPU what runs there is refused in the words of a GPU, though jax has traced it."""
    on_the_gpu = str(refusal("sm90", lambda: call()))
    jitted = jax.jit(call)
    without = jax.eval_shape(jitted)
    for function in (call, jitted, lambda: jax.eval_shape(jitted)):
        with pytest.raises(pa.UnsupportedError) as caught:
            pa.check_for("sm90", function)
        assert str(caught.value) == on_the_gpu
    assert jax.eval_shape(jitted) == without
    with pytest.raises(pa.UnsupportedError, match="on sm86: "):
        pa.check_for("sm86", jitted)


@pytest.mark.by_xla
def test_check_for_what_kernels_take():
    """The types of results, of a function with a static argument; and the results afterwards."""
    x = jnp.ones((1, 64, 2, 64), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def loss(x, mask):
        return jax.grad(
            lambda x: by_name.flash_attention(x, x, x, mask=mask).astype("float32").sum()
        )(x)

    before = loss(x, pa.CAUSAL)
    types = pa.check_for("sm90", loss, x, pa.CAUSAL)
    assert (types.shape, types.dtype) == (x.shape, x.dtype)
    assert pa.check_for("sm80", loss, jax.ShapeDtypeStruct(x.shape, x.dtype), pa.FULL) == types
    np.testing.assert_array_equal(np.float32(loss(x, pa.CAUSAL)), np.float32(before))
    for other in ("H100", 90, "sm91", "sm900"):
        with pytest.raises(ValueError, match=rf"generation: expected .*, got {other!r}$"):
            pa.check_for(other, loss, x, pa.CAUSAL)


def test_a_name_that_an_operation_does_not_have():
    error = refusal("sm90", lambda: pa.append_kv(stacked(), ROW, ROW, implementation="sm90"))
    assert str(error) == (
        "append has no implementation 'sm90'\n"
        "  sm90: it does not exist\n"
        "    -> there is 'sm80', 'reference'"
    )


def test_a_kernel_of_another_generation_says_who_serves_this_one():
    x = z(2, 5, 4, 64, dtype="bfloat16")
    for gpu, remedy in (
        ("sm75", 'say implementation="reference"'),
        ("sm80", 'leave implementation=None, or say "reference"'),
        ("sm100", 'leave implementation=None, or say "reference"'),
    ):
        error = refusal(gpu, attend(x, x, x, implementation="sm90"))
        names = ("prefill_contiguous_sm90", "flash_fwd_sm90_group_window")
        names += ("flash_fwd_sm90_one_tile", "flash_fwd_sm90", "flash_fwd_sm90_wide")
        assert error.limits == dict.fromkeys(names, Limit("it is built for sm90", remedy))


def test_float64_on_a_gpu_is_refused_with_a_remedy():
    with jax.enable_x64(True):
        wide = z(2, 5, 4, 64, dtype="float64")
        error = refusal("sm90", attend(wide, wide, wide))
    kernels = {name: limit for name, limit in error.limits.items() if name != "reference"}
    assert kernels and all("float64" in limit.reason for limit in kernels.values())


def test_remedies_for_head_dims():
    pads = "make the cache by create() where a GPU is the default device: it pads its buffers"
    for dim, remedy in {20: pads, 520: 'say implementation="reference"'}.items():
        q = z(2, 1, 4, dim, dtype="bfloat16")
        cache = StackedCache.create(2, 8, 2, dim, v_head_dim=8)  # without a GPU
        calls = [lambda q=q, c=cache: pa.decode_attention(q, c)]
        for call in calls if dim == 20 else [*calls, attend(q, q, q)]:
            limits = refusal("sm90", call).limits
            kernels = [name for name in limits if name.startswith(("decode_", "flash_fwd_"))]
            count = 2 if any(name.startswith("decode_") for name in kernels) else 6
            assert len(kernels) == count and {limits[name].remedy for name in kernels} == {remedy}


def test_assume_is_undone_and_stays_in_its_thread():
    seen = []
    with device.assume("sm90"):
        assert device.gpu_generation() == "sm90"
        with device.assume(None):
            assert device.gpu_generation() is None
        thread = threading.Thread(target=lambda: seen.append(device.gpu_generation()))
        thread.start()
        thread.join()
    assert seen == [device.gpu_generation()]


def test_a_mesh_of_cpus_beside_a_gpu():
    """Calls on the mesh are not compiled for the GPU, which is the default device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    gpu, seen = types.SimpleNamespace(platform="gpu", compute_capability="9.0"), []

    def look(x):
        seen.append(device.gpu_generation())
        return x

    spec = P("x")
    mapped = jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec)
    cpus = jax.devices()
    with mock.patch.object(jax, "devices", lambda name="gpu": [gpu] if name == "gpu" else cpus):
        jax.jit(look)(jnp.ones(2))
        jax.jit(mapped)(jnp.ones(2))
        with jax.set_mesh(mesh):
            jax.jit(look)(jnp.ones(2))
            look(jnp.ones(2))
    assert seen == ["sm90", None, None, None]
