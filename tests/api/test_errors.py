"""Every message, word for word: the argument, what was wanted, what came, what to do."""

import dataclasses
import functools
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
from tests.caches.test_quantized import ERRORS as QUANTIZED
from tests.parallel import test_sharded_caches as rows

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def z(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def q(*shape, **options):
    return z(*shape or (2, 5, 4, 8), **options)


def k(*shape, **options):
    return z(*shape or (2, 7, 2, 8), **options)


TABLES = pa.Rotary.create(16, 8)
CACHE_DTYPES = "numbers in bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2 or int8"


def attend(q=None, k=None, v=None, **options):
    default = z(2, 7, 2, 8)
    return lambda: pa.flash_attention(
        z(2, 5, 4, 8) if q is None else q,
        default if k is None else k,
        default if v is None else v,
        **options,
    )


def narrow_over_two(dtype, **options):
    """Rows that two devices have, in a narrow dtype."""

    def local(x):
        return pa.flash_attention(x, x, x, context=pa.Context("cp"), **options)

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
    return lambda: pa.flash_attention(z(5, 4, 8), z(7, 2, 8), z(7, 2, 8), **starts, **options)


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


CACHE = "expected a PerSequenceCache, StackedCache or PagedCache, got tuple"
ROW = z(2, 1, 2, 8)
ATTENTION = {
    # ---- shapes and types of q, k, v
    "q: expected an array, got list": attend(q=[1.0]),
    "q: expected an array of numbers, got ndarray of object": attend(q=np.array([None])),
    "q: expected an array of numbers, got ShapeDtypeStruct of float32": (
        attend(q=jax.ShapeDtypeStruct((2, 5, 4, 8), "float32"))
    ),
    "q: expected 4 axes [B, T, N, H], got 3 in shape (5, 4, 8); add a batch axis of 1 or use "
    "jax.vmap": attend(q=z(5, 4, 8)),
    "k: expected 4 axes [B, S, K, H], got 2 in shape (7, 8); add a batch axis of 1 or use "
    "jax.vmap": attend(k=z(7, 8)),
    "v: expected 4 axes [B, S, K, Hv], got 5 in shape (1, 2, 7, 2, 8); add a batch axis of 1 or "
    "use jax.vmap": attend(v=z(1, 2, 7, 2, 8)),
    "k: expected batch 2 as in q (2, 5, 4, 8), got 3 in k (3, 7, 2, 8)": attend(k=z(3, 7, 2, 8)),
    "k: expected head dim 8 as in q (2, 5, 4, 8), got 16 in k (2, 7, 2, 16)": attend(
        k=z(2, 7, 2, 16)
    ),
    "v: expected [B, S, K, ...] = (2, 7, 2) as in k (2, 7, 2, 8), got (2, 6, 2) in v "
    "(2, 6, 2, 8)": attend(v=z(2, 6, 2, 8)),
    "v: expected [B, S, K, ...] = (2, 7, 2) as in k (2, 7, 2, 8), got (2, 7, 1) in v "
    "(2, 7, 1, 4)": attend(v=z(2, 7, 1, 4)),
    "q, v: head dims must be at least 1, got q (2, 5, 4, 8) and v (2, 7, 2, 0)": attend(
        v=z(2, 7, 2, 0)
    ),
    "q: expected a number of query heads N that is a multiple of the 2 kv heads K, got N = 3": (
        attend(q=z(2, 5, 3, 8))
    ),
    "q: expected a number of query heads N that is a multiple of the 0 kv heads K, got N = 4": (
        attend(k=z(2, 7, 0, 8), v=z(2, 7, 0, 8))
    ),
    "q: expected a floating-point dtype, got int32": attend(q=z(2, 5, 4, 8, dtype="int32")),
    # ---- float8
    "float8: expected bfloat16 or float16 q, k and v, got float32; cast them, or leave float8 "
    "out": attend(float8=True),
    "float8: expected True or False, got 1; it is static": attend(float8=1),
    "context: expected None with float8; leave one of them out": (
        narrow_over_two("bfloat16", float8=True)
    ),
    "context: expected None for float8_e4m3fn q, k and v; dequantise them, "
    "x.astype(jnp.bfloat16) * scale": narrow_over_two("float8_e4m3fn"),
    "context: expected None for float8_e5m2 q, k and v; dequantise them, "
    "x.astype(jnp.bfloat16) * scale": narrow_over_two("float8_e5m2"),
    "k: expected dtype float32 as in q, got bfloat16; cast one of them": attend(
        k=z(2, 7, 2, 8, dtype="bfloat16")
    ),
    "v: expected dtype float32 as in q, got float16; cast one of them": attend(
        v=z(2, 7, 2, 8, dtype="float16")
    ),
    # ---- static options
    "mask: expected a Mask (FULL, CAUSAL, sliding_window(n), Mask(left, right)), got ArrayImpl; a "
    "boolean array goes in as mask_array, a function of positions as mask_fn(f)": attend(
        mask=z(5, 7, dtype="bool")
    ),
    "mask: expected a Mask (FULL, CAUSAL, sliding_window(n), Mask(left, right)), got str; a "
    "boolean array goes in as mask_array, a function of positions as mask_fn(f)": attend(
        mask="causal"
    ),
    "scale: expected a Python float, got str; multiply q by it instead": attend(scale="big"),
    "scale: expected a Python float, got a traced array; multiply q by it instead": traced(
        lambda x: attend(scale=x)()
    ),
    "scale: expected a Python float, got bool; multiply q by it instead": attend(scale=True),
    "scale: expected a finite float32, got inf": attend(scale=10**400),
    "scale: expected a finite float32, got -1e+39": attend(scale=-1e39),
    "softcap: expected a Python float, got a traced array; softcap is part of the compiled "
    "kernel": traced(lambda x: attend(softcap=x)()),
    "softcap: expected a positive float or None, got 0; None turns it off": attend(softcap=0.0),
    "softcap: expected a positive float or None, got -2.5; None turns it off": attend(softcap=-2.5),
    "softcap: expected a positive float or None, got 1e-40; None turns it off": (
        attend(softcap=1e-40)
    ),
    "softcap: expected a finite float32, got nan": attend(softcap=float("nan")),
    "precision: expected one of 'bfloat16', 'bfloat16_3x', 'default', 'fastest', 'float32', "
    "'high', 'highest', 'tensorfloat32', a jax.lax.Precision or None, got 'double'": attend(
        precision="double"
    ),
    "precision: expected one of 'bfloat16', 'bfloat16_3x', 'default', 'fastest', 'float32', "
    "'high', 'highest', 'tensorfloat32', a jax.lax.Precision or None, got ['highest']": attend(
        precision=["highest"]
    ),
    "deterministic: expected True or False, got 1; it is static": attend(deterministic=1),
    # A wrong name is wrong also where there is nothing to compute.
    "implementation: expected one of 'sm90', 'sm80', 'reference' or None (the fastest), got "
    "'triton'": attend(k=z(2, 0, 2, 8), v=z(2, 0, 2, 8), implementation="triton"),
    "implementation: expected one of 'sm90', 'sm80', 'reference' or None (the fastest), got "
    "'cudnn'": attend(implementation="cudnn"),
    # ---- lengths, offsets, segments
    "q_lengths: expected int32[2] (one length a batch row), got int32[3]": attend(
        q_lengths=z(3, dtype="int32")
    ),
    "kv_lengths: expected int32[2] (one length a batch row), got float32[2]": attend(
        kv_lengths=z(2)
    ),
    "kv_lengths: expected int32[2] (one length a batch row), got int32[]": attend(kv_lengths=3),
    "q_offset: expected int32[2] (the position of query row 0, one a batch row, or one int), got "
    "int32[5]": attend(q_offset=z(5, dtype="int32")),
    "q_offset: expected int32[2] (the position of query row 0, one a batch row, or one int), got "
    "float32[2]": attend(q_offset=z(2)),
    "q_offset: expected -2**29 to 2**29, got 536870913: positions are int32": (
        attend(q_offset=2**29 + 1)
    ),
    "q: expected 3 axes [tokens, N, H] with q_starts (packed rows), got 4 in shape (2, 5, 4, "
    "8)": attend(q_starts=z(3, dtype="int32")),
    "q_starts: expected int32[M + 1] with kv_starts, got None": attend(
        kv_starts=z(3, dtype="int32")
    ),
    "q_starts: expected int32[M + 1] (where each sequence's rows start, and where the last one's "
    "end), got float32[3]": attend_packed(q_starts=z(3)),
    "q_starts: expected int32[M + 1] (where each sequence's rows start, and where the last one's "
    "end), got int32[0]": attend_packed(q_starts=z(0, dtype="int32")),
    "kv_starts: expected int32[3] (where each sequence's rows start, and where the last one's "
    "end), got int32[4]": attend_packed(
        q_starts=z(3, dtype="int32"), kv_starts=z(4, dtype="int32")
    ),
    "kv_starts: expected int32[M + 1], since q has 5 packed rows and k 7; without it keys are "
    "packed as queries are": attend_packed(q_starts=z(3, dtype="int32")),
    "q_lengths: expected None with q_starts, which say where sequences begin and end; leave it "
    "out": attend_packed(
        *(z(3, dtype="int32"), z(3, dtype="int32")), q_lengths=z(1, dtype="int32")
    ),
    "q_offset: expected int32[2] (the position of query row 0, one a sequence, or one int), got "
    "int32[3]": attend_packed(
        *(z(3, dtype="int32"), z(3, dtype="int32")), q_offset=z(3, dtype="int32")
    ),
    "mask, score: expected a Mask and no function of positions with q_starts, since packed rows "
    "have other positions; give each sequence a batch row": attend_packed(
        *(z(3, dtype="int32"), z(3, dtype="int32")), score=pa.score_fn(lambda s, b, h, q, kv: s)
    ),
    "segment_ids: expected a pair (of q, of kv) or one array for both, got 3 arrays": attend(
        segment_ids=(z(2, 5), z(2, 7), z(2, 7))
    ),
    "segment_ids: expected int32[2, 7] for kv, got int32[2, 5]; pass a pair (of q, of kv) where T "
    "and S differ": attend(segment_ids=z(2, 5, dtype="int32")),
    "segment_ids: expected int32[2, 5] for q, got NoneType; pass a pair (of q, of kv) where T "
    "and S differ": attend(segment_ids=(None, z(2, 7, dtype="int32"))),
    "kv_lengths: expected int32[2] (one length a batch row), got str": attend(kv_lengths="3, 4"),
    "kv_lengths: expected int32[2] (one length a batch row), got list": (
        attend(kv_lengths=[2**40, 1])
    ),
    "segment_ids: expected int32[2, 5] for q, got float32[2, 5]": attend(
        segment_ids=(z(2, 5), z(2, 7))
    ),
    # ---- rotation
    "base: expected a number that is known now, got a traced float32; write Rotary(cos, sin) with "
    "tables of your own": traced(lambda x: pa.Rotary.create(16, 8, base=x)),
    **{
        f"base: expected a positive number, got {got}": lambda x=x: pa.Rotary.create(16, 8, base=x)
        for got, x in {"None": None, "'1'": "1", "float64[2]": np.ones(2), "-1": -1}.items()
    },
    "positions: expected an int of at least 1, got True": lambda: pa.Rotary.create(True, 8),
    "rotary_positions: expected None without rotary": attend(rotary_positions=z(5, dtype="int32")),
    "rotary: expected a Rotary or None, got list": attend(rotary=[]),
    "rotary.cos, rotary.sin: expected float[positions, pairs], positions at least the 7 at which "
    "rows of q and k stand, got [6, 4] and [6, 4]": attend(rotary=pa.Rotary(z(6, 4), z(6, 4))),
    "rotary.cos, rotary.sin: expected float[positions, pairs], positions at least the 9 at which "
    "rows of q and k stand, got [8, 4] and [8, 4]": attend(
        rotary=pa.Rotary(z(8, 4), z(8, 4)), q_offset=4
    ),
    "rotary.cos, rotary.sin: expected float[positions, pairs], positions at least the 1 at which "
    "rows of q and k stand, got [0, 4] and [0, 4]": attend_packed(
        *(z(3, dtype="int32"), z(3, dtype="int32")), rotary=pa.Rotary(z(0, 4), z(0, 4))
    ),
    "rotary: expected columns within the 8 of a row, got 8 from column 2 on": attend(
        rotary=pa.Rotary(z(9, 4), z(9, 4), first=2)
    ),
    "q_offset: expected at least 0 with rotary, whose tables begin at position 0, got -1; pass "
    "rotary_positions": attend(rotary=TABLES, q_offset=-1),
    "rotary_positions: expected a pair (of q, of k) or one array for both, got 3 arrays": attend(
        rotary=TABLES, rotary_positions=(z(5, dtype="int32"),) * 3
    ),
    "rotary_positions: expected int32[7] or int32[2, 7] for k, got int32[5]; pass a pair (of q, of "
    "k) where T and S differ": attend(rotary=TABLES, rotary_positions=z(5, dtype="int32")),
    "rotary_positions: expected int32[5] or int32[2, 5] for q, got float32[2, 5]": attend(
        rotary=TABLES, rotary_positions=(z(2, 5), z(2, 7))
    ),
    "rotary_positions: expected int32[5], got int32[7]; pass a pair (of q, of k) where T and S "
    "differ": attend_packed(
        *(z(3, dtype="int32"), z(3, dtype="int32")),
        rotary=TABLES,
        rotary_positions=z(7, dtype="int32"),
    ),
    # ---- arrays over the scores
    "bias: expected a shape that broadcasts to [B, N, T, S] = [2, 4, 5, 7], got [5, 5]": attend(
        bias=z(5, 5)
    ),
    "bias: expected a shape that broadcasts to [B, N, T, S] = [2, 4, 5, 7], got [1, 2, 4, 5, "
    "7]": attend(bias=z(1, 2, 4, 5, 7)),
    "bias: expected a floating-point dtype, got bool; did you mean mask_array?": attend(
        bias=z(5, 7, dtype="bool")
    ),
    "bias: expected an array, got float": attend(bias=1.0),
    "bias: expected a floating-point dtype, got int32; cast it": attend(
        bias=z(5, 7, dtype="int32")
    ),
    "mask_array: expected bool (True: may be seen), got float32; pass x != 0 where 1 means that; "
    "what is added to the logits (0 and -inf) goes in as bias": attend(mask_array=z(5, 7)),
    "mask_array: expected bool (True: may be seen), got int32; pass x != 0 where 1 means "
    "that": attend(mask_array=z(5, 7, dtype="int32")),
    "mask_array: expected a shape that broadcasts to [B, N, T, S] = [2, 4, 5, 7], got [2, 5, "
    "7]": attend(mask_array=z(2, 5, 7, dtype="bool")),
    "sinks: expected float[4] (one logit a query head), got float32[2]": attend(sinks=z(2)),
    "sinks: expected float[4] (one logit a query head), got int32[4]": attend(
        sinks=z(4, dtype="int32")
    ),
    # ---- dot_product_attention names its own arguments
    "query: expected an array, got float": lambda: pa.dot_product_attention(1.0, ROW, ROW),
    "key: expected dtype float32 as in query, got bfloat16; cast one of them": (
        lambda: pa.dot_product_attention(ROW, ROW.astype("bfloat16"), ROW)
    ),
    "key: expected head dim 8 as in query (1, 5, 4, 8), got 6 in key (1, 7, 2, 6) (a batch axis "
    "of 1 was added; what came: query (5, 4, 8), key (7, 2, 6), value (7, 2, 6))": (
        lambda: pa.dot_product_attention(z(5, 4, 8), z(7, 2, 6), z(7, 2, 6))
    ),
    "query: expected a number of query heads N that is a multiple of the 3 kv heads K, got N = 4": (
        lambda: pa.dot_product_attention(z(2, 5, 4, 8), z(2, 7, 3, 8), z(2, 7, 3, 8))
    ),
    "value: expected [B, S, K, ...] = (2, 7, 2) as in key (2, 7, 2, 8), got (2, 6, 2) in value "
    "(2, 6, 2, 8)": (lambda: pa.dot_product_attention(z(2, 5, 4, 8), z(2, 7, 2, 8), z(2, 6, 2, 8))),
    "bias: expected a floating-point dtype, got bool; did you mean mask?": (
        lambda: pa.dot_product_attention(ROW, ROW, ROW, bias=z(1, 1, dtype="bool"))
    ),
    "local_window_size: expected an int, or a pair of ints (left, right), both of at least 0, or "
    "traced integer scalars, got a traced array that is none": traced(
        lambda x: pa.dot_product_attention(ROW, ROW, ROW, local_window_size=x)
    ),
    "scale: expected a number, got float32[3]": traced(
        lambda x: pa.dot_product_attention(ROW, ROW, ROW, scale=x * z(3))
    ),
    "key_value_seq_lengths: expected int32[2] (one length a batch row), got int32[3]": (
        lambda: pa.dot_product_attention(ROW, ROW, ROW, key_value_seq_lengths=[1, 1, 1])
    ),
    "mask: expected bool (True: may be seen), got float32; pass x != 0 where 1 means that; what is "
    "added to the logits (0 and -inf) goes in as bias": (
        lambda: pa.dot_product_attention(ROW, ROW, ROW, mask=z(1, 1))
    ),
    "is_causal: expected True or False, got 'yes'; it is static": (
        lambda: pa.dot_product_attention(ROW, ROW, ROW, is_causal="yes")
    ),
    "local_window_size: expected an int, or a pair of ints (left, right), both of at least 0, or "
    "traced integer scalars, got (1, 2, 3)": lambda: pa.dot_product_attention(
        ROW, ROW, ROW, local_window_size=(1, 2, 3)
    ),
    "local_window_size: expected an int, or a pair of ints (left, right), both of at least 0, or "
    "traced integer scalars, got 1.5": lambda: pa.dot_product_attention(
        ROW, ROW, ROW, local_window_size=1.5
    ),
}
MASKS = {
    "sliding_window(n) wants an int of at least 1 (n counts the query's own key), or a traced "
    "integer scalar, got 0.": lambda: pa.sliding_window(0),
    "sliding_window(n) wants an int of at least 1 (n counts the query's own key), or a traced "
    "integer scalar, got True.": lambda: pa.sliding_window(True),
    "sliding_window(n) wants an int of at least 1 (n counts the query's own key), or a traced "
    "integer scalar, got 2.0.": lambda: pa.sliding_window(2.0),
    "Mask(right=...) wants less than 2**30 either way, got 1073741824: positions are int32. None "
    "leaves the side unbounded.": lambda: Mask(right=2**30),
    "Mask(left=...) wants less than 2**30 either way, got -1099511627776: positions are int32. "
    "None leaves the side unbounded.": lambda: Mask(left=-(2**40)),
    **{
        f"{what} wants an int or a traced integer scalar, got a traced {got}: one bound serves all "
        "sequences and heads": traced(call)
        for what, got, call in (
            ("Mask(left=...)", "int32[1]", lambda x: Mask(left=x.astype("int32").reshape(1))),
            ("Mask(right=...)", "float32[]", lambda x: Mask(right=x)),
            ("sliding_window(n)", "bool[]", lambda x: pa.sliding_window(x > 0)),
            ("mask.right", "float32[1]", lambda x: attend(mask=band(right=x.reshape(1)))()),
        )
    },
    "Mask(left=1, right=-2) hides every key from every query: left + right must be at least 0.": (
        lambda: Mask(1, -2)
    ),
}
CACHES = {
    "capacities: expected a sequence of ints, one capacity a sequence, got ()": (
        lambda: PerSequenceCache.create((), 2, 8)
    ),
    "capacities: expected a sequence of ints, one capacity a sequence, got 64": (
        lambda: PerSequenceCache.create(64, 2, 8)
    ),
    "context: expected order 'contiguous' for a cache, whose rows arrive one after the other, got "
    "'zigzag'": lambda: rows.create("stacked", 8, context=pa.Context("cp", "zigzag")),
    "capacity: expected a multiple of the 2 devices that rows are split over, got 9": (
        lambda: rows.local(lambda _: rows.create("stacked", 9, context=rows.CONTEXT).lengths)
    ),
    "sequences: expected None for a PerSequenceCache, whose sequences are no axis of an array, got "
    "'dp'": lambda: rows.create("per_sequence", 8).specs(sequences="dp"),
    f"dtype: expected {CACHE_DTYPES}, got 'bf16'": (
        lambda: StackedCache.create(2, 6, 2, 8, dtype="bf16")
    ),
    f"dtype: expected {CACHE_DTYPES}, got None": lambda: paged_of(None),
    f"dtype: expected {CACHE_DTYPES}, got int16": lambda: paged_of(jnp.int16),
    f"dtype: expected {CACHE_DTYPES}, got float8_e4m3fnuz": lambda: paged_of("float8_e4m3fnuz"),
    "shared_kv: expected True or False, got 1; it is static": lambda: stacked(shared_kv=1),
    "scales: expected True or False, got 'no'; it is static": lambda: stacked(scales="no"),
    "scales: 128, a scale for so many columns of V, goes with dtype float8_e4m3fn, head_dim 576, "
    "v_head_dim 512 and shared_kv=True (FlashMLA's rows of 656 bytes), got int8, 576, 512 and "
    "shared_kv=True; leave scales out for a scale a row": lambda: StackedCache.create(
        2, 16, 1, 576, v_head_dim=512, shared_kv=True, dtype="int8", scales=128
    ),
    f"dtype: expected {CACHE_DTYPES}, got bool": lambda: paged_of(bool),
    "capacities: expected an int of at least 1, got 0": lambda: PerSequenceCache.create(
        (4, 0), 2, 8
    ),
    "capacity: expected at most 2146435072 rows, which an int32 counts, in pages of 1048576, got "
    "2147483647": lambda: PagedCache.create(1, 1, 2**20, 1, 1, capacity=2**31 - 1),
    "page_size: expected at most 2147483647 rows, which an int32 counts, got 2147483648": (
        lambda: PagedCache.create(1, 1, 2**31, 1, 1)
    ),
    "num_sequences: expected an int of at least 1, got None": (
        lambda: StackedCache.create(None, 6, 1, 1)
    ),
    "capacity: expected at most 2147483647 rows, which an int32 counts, got 2147483648": (
        lambda: StackedCache.create(1, 2**31, 2, 8)
    ),
    "kv_heads: expected an int of at least 1, got 0": lambda: StackedCache.create(2, 6, 0, 8),
    "head_dim: expected an int of at least 1, got -1": lambda: StackedCache.create(2, 6, 2, -1),
    "capacity: expected an int of at least 1, got 2.5": lambda: StackedCache.create(2, 2.5, 2, 8),
    "num_sequences: expected an int of at least 1, got 0": lambda: PagedCache.create(0, 5, 2, 2, 8),
    "pages: expected an int of at least 1, got 0": lambda: PagedCache.create(2, 0, 2, 2, 8),
    "page_size: expected an int of at least 1, got '2'": lambda: PagedCache.create(2, 5, "2", 2, 8),
    "layers: expected an int of at least 1, got 0": lambda: stacked(layers=0),
    "v_head_dim: expected an int of at least 1, got 0": lambda: paged(v_head_dim=0),
    "rows: expected at least 0, got -1": lambda: stacked().extend(-1),
    "rows: 7 new rows do not fit in sequence 0, whose capacity is 6; create the cache with a "
    "larger capacity or append fewer rows": lambda: separate().extend(7),
    "rows: 9 new rows do not fit in sequence 0, whose capacity is 6; create the cache with a "
    "larger capacity or append fewer rows": lambda: pa.append_kv(
        paged(), z(2, 9, 2, 8), z(2, 9, 2, 8)
    ),
    "rows: expected int32[2] (one count a sequence, or one int), got int32[3]": (
        lambda: stacked().extend(z(3, dtype="int32"))
    ),
    "rows: expected int32[2] (one count a sequence, or one int), got NoneType": (
        lambda: separate().extend(None)
    ),
    "rows: expected int32[2] (one count a sequence, or one int), got float32[2]": (
        lambda: paged().allocate(z(2))
    ),
    "sequences: expected bool[2], got bool[3]": lambda: stacked().reset(z(3, dtype="bool")),
    "sequences: expected an index, indices or bool[M], got float32": lambda: paged().free(z(2)),
    "sequences: expected an index, indices or bool[M], got str": lambda: paged().free("0"),
    "sequences: expected 0 to 1, got 2": lambda: separate().reset(2),
    "sequences: expected 0 to 1, got 1099511627776": lambda: separate().reset(2**40),
    "source: expected 0 to 1, got 5": lambda: paged().fork(5, 0),
    "source: expected 0 to 1, got 2": lambda: paged().fork(jnp.int32(2), 0),
    "target: expected 0 to 1, got -1": lambda: paged().fork(0, -1),
    "source: expected the index of a sequence, got float32[]": lambda: paged().fork(0.0, 1),
    "target: expected the index of a sequence, got int32[2]": lambda: paged().fork(0, [1, 0]),
    "length: expected an int, got float32[]": lambda: paged().fork(0, 1, 1.5),
}


def changed(rotary=None, norm=None):
    return lambda: pa.append_kv(stacked(v_head_dim=8), ROW, ROW, rotary=rotary, norm=norm)


APPENDS = {
    "new_lengths: expected None beside starts, whose differences are the counts": (
        lambda: pa.append_kv(
            stacked(), z(3, 2, 8), z(3, 2, 8), starts=np.zeros(3, np.int32), new_lengths=[1, 1]
        )
    ),
    "norm: expected an RMSNorm or None, got float": changed(norm=1.0),
    "norm.weight: expected float[8], a number a column, got float32[4]": changed(
        norm=pa.RMSNorm(z(4))
    ),
    "norm.eps: expected a number of at least 0, got -1": changed(norm=pa.RMSNorm(z(8), -1)),
    "rotary: expected a Rotary or None, got tuple": changed(rotary=(z(9, 4), z(9, 4))),
    "rotary.cos: expected float[positions, pairs], got int32[9, 4]; Rotary.create(positions, dims) "
    "makes tables": changed(pa.Rotary(*(z(9, 4, dtype="int32"),) * 2)),
    "rotary.cos, rotary.sin: expected float[positions, pairs], positions at least the 6 rows that "
    "a sequence of this cache may have, got [5, 4] and [5, 4]": changed(
        pa.Rotary(z(5, 4), z(5, 4))
    ),
    "rotary: expected columns within the 8 of a row, got 8 from column 1 on": changed(
        pa.Rotary(z(9, 4), z(9, 4), first=1)
    ),
    "rotary.sin: expected float[positions, pairs], got int32[9, 4]; Rotary.create(positions, dims) "
    "makes tables": changed(pa.Rotary(z(9, 4), z(9, 4, dtype="int32"))),
    "rotary.interleaved: expected True or False, got 1; it is static": changed(
        pa.Rotary(z(9, 4), z(9, 4), interleaved=1)
    ),
    f"cache: {CACHE}": lambda: pa.append_kv((), ROW, ROW),
    "layer: expected 0 to 2 for a cache of 3 layers, got None; take the rows once with "
    "cache.extend(t), then write_kv(cache, k, v, layer=l) for each layer": (
        lambda: pa.append_kv(stacked(layers=3), ROW, ROW)
    ),
    "k: expected [M, t, K, H] = [2, t, 2, 8] (or without t), got [3, 1, 2, 8]": (
        lambda: pa.append_kv(stacked(), z(3, 1, 2, 8), ROW)
    ),
    "v: expected [M, t, K, H] = [2, t, 2, 4] (or without t), got [2, 1, 2, 8]": (
        lambda: pa.append_kv(stacked(v_head_dim=4), ROW, ROW)
    ),
    "k: expected [M, t, K, H] = [2, t, 2, 8] (or without t), got [5, 2, 8]; packed rows take "
    "starts": lambda: pa.append_kv(stacked(), z(5, 2, 8), ROW),
    "k: expected [M, t, K, H] = [2, t, 2, 8] (or without t), got [2, 8]": (
        lambda: pa.append_kv(paged(), z(2, 8), ROW)
    ),
    "v: expected 1 rows a sequence as in k, got 2": (
        lambda: pa.append_kv(separate(), ROW, z(2, 2, 2, 8))
    ),
    "k: expected float32 rows for a float32 cache, got int32; quantise first": (
        lambda: pa.append_kv(stacked(), ROW.astype("int32"), ROW)
    ),
    "k: expected an array, got int": lambda: pa.append_kv(stacked(), 3, ROW),
    "k: expected at least the rows that the latest extend took of each sequence, [2, 2], got 1 of "
    "each; extend the cache by as many as are written": (
        lambda: pa.write_kv(stacked().extend(2), ROW, ROW)
    ),
    "k: expected at least the rows that the latest extend took of each sequence, [0, 1], got 0 of "
    "each; extend the cache by as many as are written": (
        lambda: pa.write_kv(paged().extend(jnp.arange(2)), z(2, 0, 2, 8), z(2, 0, 2, 8))
    ),
    "starts: expected as many rows of each sequence as the latest extend took, [1, 2], got [2, 1]; "
    "call cache.extend(jnp.diff(starts)) first": lambda: pa.write_kv(
        stacked().extend(jnp.asarray([1, 2])), z(3, 2, 8), z(3, 2, 8), starts=[0, 2, 3]
    ),
    "starts: expected as many rows of each sequence as the latest extend took, [2, 2], got [2, 1]; "
    "call cache.extend(jnp.diff(starts)) first": lambda: pa.write_kv(
        stacked().extend(2), z(3, 2, 8), z(3, 2, 8), starts=np.array([0, 2, 4])
    ),
    "layer: expected 0 to 2 for a cache of 3 layers, got 7": lambda: pa.write_kv(
        stacked(layers=3).extend(1), ROW, ROW, layer=jnp.int32(7)
    ),
    "new_lengths: expected int32[2] (rows of each sequence), got int32[1]": (
        lambda: pa.append_kv(stacked(), ROW, ROW, new_lengths=z(1, dtype="int32"))
    ),
    **{
        "cache: write_kv fills the rows that the latest extend took, and there was none since "
        f"sequences {which} were made, emptied or forked into; call cache.extend(rows) first, "
        "with 0 for a sequence that gets no rows": (
            lambda change=change: pa.write_kv(change(stacked()), ROW, ROW)
        )
        for which, change in (
            ([0, 1], lambda cache: cache),
            ([1], lambda cache: cache.extend(1).reset(1)),
        )
    },
    "layer: expected 0 to 2 for a cache of 3 layers, got 3": (
        lambda: pa.write_kv(stacked(layers=3), ROW, ROW, layer=3)
    ),
    "layer: expected 0 to 0 for a cache of 1 layers, got -1": (
        lambda: pa.write_kv(stacked(), ROW, ROW, layer=-1)
    ),
    "layer: the cache has no layer axis; leave layer out, or create the cache with layers=...": (
        lambda: pa.write_kv(stacked(), ROW, ROW, layer=jnp.int32(0))
    ),
    "layer: expected an int or an int32 scalar, got int32[2]": (
        lambda: pa.write_kv(stacked(layers=3), ROW, ROW, layer=jnp.zeros(2, jnp.int32))
    ),
    "v_caches, v: give both, or neither to append to one array alone": (
        lambda: pa.append_kv_arrays(z(2, 2, 6, 8), None, ROW, ROW, z(2, dtype="int32"))
    ),
    "k_caches: expected at least one array, got none": (
        lambda: pa.append_kv_arrays((), None, ROW, None, z(0, dtype="int32"))
    ),
    "k_caches: expected 4 axes (stacked, without layers), got (2, 6, 8)": (
        lambda: pa.append_kv_arrays(z(2, 6, 8), None, ROW, None, z(2, dtype="int32"))
    ),
    "k_caches: expected 4 axes (per_sequence, with layers), got (2, 6, 8)": (
        lambda: pa.append_kv_arrays([z(2, 6, 8)], None, ROW[:1], None, z(1, dtype="int32"), layer=0)
    ),
    "k_caches: expected every array to differ from the first (2, 6, 8) float32 in nothing but its "
    "capacity, got (3, 6, 8) float32": (
        lambda: pa.append_kv_arrays([z(2, 6, 8), z(3, 6, 8)], None, ROW, None, [0, 0])
    ),
    # Each of these would have a kernel write past the end of an array.
    "k_caches: expected every array to differ from the first (3, 2, 6, 8) float32 in nothing but "
    "its capacity, got (1, 2, 6, 8) float32": lambda: pa.append_kv_arrays(
        [z(3, 2, 6, 8), z(1, 2, 6, 8)], None, ROW, None, [0, 0], layer=2
    ),
    "v_caches: expected 2 arrays as in k_caches, got 1": lambda: pa.append_kv_arrays(
        [z(2, 6, 8)] * 2, [z(2, 6, 8)], ROW, ROW, [0, 0]
    ),
    "v_caches: expected float32[2, 6, 8] as in k_caches, but for the last axis, got float32[2, 5, "
    "8]": lambda: pa.append_kv_arrays([z(2, 6, 8)], [z(2, 5, 8)], ROW[:1], ROW[:1], [0]),
    "v_caches: expected float32[2, 2, 6, 8] as in k_caches, but for the last axis, got "
    "bfloat16[2, 2, 6, 8]": lambda: pa.append_kv_arrays(
        z(2, 2, 6, 8), z(2, 2, 6, 8, dtype="bfloat16"), ROW, ROW, [0, 0]
    ),
    "v_caches: expected a tuple of arrays as in k_caches, got ArrayImpl": (
        lambda: pa.append_kv_arrays([z(2, 6, 8)] * 2, z(2, 2, 6, 8), ROW, ROW, [0, 0])
    ),
    "cache.v: expected float32[2, 2, 6, 8] as in cache.k, but for the last axis, got float32[2, 2, "
    "5, 8]": lambda: pa.append_kv(of(stacked(), v=z(2, 2, 5, 8)), ROW, ROW),
    "page_table: expected k_caches to be one pool of pages, got separate arrays": (
        lambda: pa.append_kv_arrays(
            [z(2, 6, 8)],
            None,
            ROW,
            None,
            z(2, dtype="int32"),
            page_table=z(2, 3, dtype="int32"),
        )
    ),
    "page_table: expected int32[M, W], got float32[2, 3]": (
        lambda: pa.append_kv_arrays(
            z(5, 2, 2, 8), None, ROW, None, z(2, dtype="int32"), page_table=z(2, 3)
        )
    ),
    "v: expected [M, t, K] = (2, 1, 2) as in k, got (2, 2, 2)": (
        lambda: pa.append_kv_arrays(
            z(2, 2, 6, 8), z(2, 2, 6, 8), ROW, z(2, 2, 2, 8), z(2, dtype="int32")
        )
    ),
    f"kv_pages: expected {CACHE_DTYPES}, got uint8": (
        lambda: update(kv_pages=z(3, 4, 4, 8, dtype="uint8"))
    ),
    f"kv_pages: expected {CACHE_DTYPES}, got int32": (
        lambda: ragged(kv_pages=z(3, 4, 4, 8, dtype="int32"))
    ),
    f"kv_pages: expected {CACHE_DTYPES}, got bool": (
        lambda: ragged(kv_pages=z(3, 4, 4, 8, dtype="bool"))
    ),
    f"k_caches: expected {CACHE_DTYPES}, got float8_e8m0fnu": (
        lambda: pa.append_kv_arrays(
            z(2, 2, 6, 8, dtype="float8_e8m0fnu"), None, ROW, None, z(2, dtype="int32")
        )
    ),
    f"cache.k: expected {CACHE_DTYPES}, got int4": lambda: pa.decode_attention(
        z(2, 4, 8), of(stacked(), k=z(2, 2, 6, 8, dtype="int4"), v=z(2, 2, 6, 8, dtype="int4"))
    ),
    "q: expected a floating-point dtype, got int32": lambda: ragged(q=z(6, 4, 8, dtype="int32")),
    "kv_pages: expected [pages, page_size, 2 * K, H], K and V interleaved by head, got "
    "[3, 4, 5, 8]": lambda: ragged(kv_pages=z(3, 4, 5, 8)),
    "q: expected packed rows [tokens, N, H] = [tokens, a multiple of 2, 8] for these pages, got "
    "[6, 3, 8]": lambda: ragged(q=z(6, 3, 8)),
    "page_indices: expected int32[M, pages of a sequence] (the pages of each sequence in order), "
    "got int32[2]": lambda: ragged(page_indices=z(2, dtype="int32")),
    "kv_lens: expected int32[2] (rows of each sequence), got float32[2]": (
        lambda: ragged(kv_lens=z(2))
    ),
    "cu_q_lens: expected int32[3] (where each sequence's rows of q start, and the last end), got "
    "int32[2]": lambda: ragged(cu_q_lens=z(2, dtype="int32")),
    "num_seqs: expected int32[1] (how many sequences there are), got int32[]": (
        lambda: ragged(num_seqs=2)
    ),
    "sliding_window: expected an int of at least 1 or None, got 0": (
        lambda: ragged(sliding_window=0)
    ),
    "soft_cap: expected a float other than 0 or None, got 0": lambda: ragged(soft_cap=0.0),
    "soft_cap: expected a Python float, got ArrayImpl; soft_cap is part of the compiled kernel": (
        lambda: ragged(soft_cap=z(2))
    ),
    "mask_value: expected None or a float of at most -10000, since hidden keys have a weight of 0, "
    "got -5.0": lambda: ragged(mask_value=-5.0),
    "k_scale: expected at least 2**-100 or None, got -1": lambda: ragged(k_scale=-1.0),
    "v_scale: expected at least 2**-100 or None, got 1e-40": lambda: update(v_scale=1e-40),
    "v_scale: expected a Python float, got ArrayImpl; multiply q or the result instead": (
        lambda: ragged(v_scale=z(2))
    ),
    "sm_scale: expected a Python float, got NoneType; multiply q by it instead": (
        lambda: ragged(sm_scale=None)
    ),
    "k: expected packed rows of a float dtype, [tokens, K, H] = [tokens, 2, 8], for these pages, "
    "got int32[6, 2, 8]": lambda: update(k=z(6, 2, 8, dtype="int32")),
    "v: expected 6 rows as in k, got 5": lambda: update(v=z(5, 2, 8)),
    "k_caches: expected an array, got NoneType": (
        lambda: pa.append_kv_arrays(None, None, ROW, None, [0, 0])
    ),
    "lengths_before: expected int32[2] (rows held before the append), got NoneType": (
        lambda: pa.append_kv_arrays(z(2, 2, 6, 8), None, ROW, None, None)
    ),
    "layer: expected 0 to 2 for a cache of 3 layers, got None; pass layer=l": (
        lambda: pa.write_kv(stacked(layers=3).extend(1), ROW, ROW)
    ),
    "lengths_before: expected int32[2] (rows held before the append), got int32[]": (
        lambda: pa.append_kv_arrays(z(2, 2, 6, 8), None, ROW, None, 4)
    ),
}
UNREACHED = (
    "{}: expected sequences with rows, or that extend gave none, but there was no extend since "
    "sequences {} were made or emptied; call cache.extend(rows) first, with 0 for a sequence that "
    "gets no rows, and write_kv"
)
DECODES = {
    UNREACHED.format("cache", [0, 1]): lambda: pa.decode_attention(z(2, 4, 8), stacked()),
    UNREACHED.format("cache", [1]): (
        lambda: pa.decode_attention(z(2, 4, 8), paged().extend(0).reset(1))
    ),
    UNREACHED.format("prefix.cache", [1]): lambda: pa.decode_attention(
        z(2, 4, 8),
        stacked().extend(0),
        prefix=pa.Prefix(paged().extend(1).reset(jnp.arange(1, 2)), jnp.asarray([1, -1])),
    ),
    f"cache: {CACHE}": lambda: pa.decode_attention(z(2, 1, 4, 8), ()),
    "batch_invariant: expected True or False, got 1; it is static": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), batch_invariant=1)
    ),
    "softcap: expected a positive float or None, got -1; None turns it off": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), softcap=-1)
    ),
    "scale: expected a Python float, got str; multiply q by it instead": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), scale="1")
    ),
    "mask: expected a Mask (FULL, CAUSAL, sliding_window(n), Mask(left, right)), got int; a "
    "boolean array goes in as mask_array, a function of positions as mask_fn(f)": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), mask=5)
    ),
    "sinks: expected float[4] (one logit a query head), got float32[2]": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), sinks=z(2))
    ),
    # A kernel would go by these past the end of an array.
    "cache.lengths: expected int32[2] (one a sequence), got int32[3]": (
        lambda: pa.decode_attention(z(3, 1, 4, 8), of(stacked(), lengths=z(3, dtype="int32")))
    ),
    "cache.lengths: expected int32[2] (one a sequence), got float32[2]": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), of(separate(), lengths=z(2)))
    ),
    "cache.new_lengths: expected int32[2] (one a sequence), got NoneType": (
        lambda: pa.write_kv(of(paged(), new_lengths=None), ROW, ROW)
    ),
    "cache.lengths: expected numbers that all devices have whole, got int32[2] split as P('x',); "
    "place the cache by cache.specs()": lambda: with_split_lengths(paged()).extend(1),
    "cache.page_table: expected int32[M, W], got int16[2, 3]": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), of(paged(), page_table=z(2, 3, dtype="int16")))
    ),
    "q: expected [M, t, N, H] = [2, t, N, 8] (or without t) for this cache, got [3, 1, 4, 8]": (
        lambda: pa.decode_attention(z(3, 1, 4, 8), stacked())
    ),
    "q: expected [M, t, N, H] = [2, t, N, 8] (or without t) for this cache, got [5, 4, 8]; packed "
    "rows take starts": lambda: pa.decode_attention(z(5, 4, 8), stacked()),
    "q: expected [M, t, N, H] = [2, t, N, 8] (or without t) for this cache, got [2, 4, 16]": (
        lambda: pa.decode_attention(z(2, 4, 16), paged())
    ),
    "q: expected a number of query heads N that is a multiple of the 2 kv heads K, got N = 5": (
        lambda: pa.decode_attention(z(2, 1, 5, 8), separate())
    ),
    "q: expected a floating-point dtype, got int32": (
        lambda: pa.decode_attention(z(2, 1, 4, 8, dtype="int32"), stacked())
    ),
}
_OF_9 = pa.mask_fn(lambda b, h, q, kv, i: i[q] == i[kv], np.zeros(10, np.int32)).blocks(9, 9)
_SIZES_OF_THIS_CALL = (
    "call mask.blocks with the sizes of this call, or pass the mask without blocks"
)


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
        return pa.flash_attention(x, x, x, mask=mask_here, context=context, **options)

    def call():  # the mesh is made here: tests are collected where there is one device, too
        devices, auto = jax.devices()[:2], jax.sharding.AxisType.Auto
        mesh, rows = jax.make_mesh((2,), ("cp",), (auto,), devices=devices), P(None, "cp")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
        return jax.eval_shape(mapped, z(1, 10, 2, 8))

    return call


_QKV_OF_LISTS = (("q", 5, 4), ("k", 7, 2), ("v", 7, 2))
_BLOCKS = z(1, 1, 1, 2, dtype="int32")
_LISTS = z(2, 1, 5, 3, dtype="int32")
ATTENTION |= {
    **{
        f"{name}: expected its default beside kv_blocks, got both": call
        for name, call in {
            "q_starts": attend_packed(z(2, dtype="int32"), kv_blocks=_BLOCKS),
            "context": attend(kv_blocks=_BLOCKS, context=pa.Context("cp")),
        }.items()
    },
    **{
        "kv_blocks: expected int32[B, heads, 1, n], B 2 or 1, heads 4, 2 or 1 (a list of blocks of "
        f"128 keys for each 128 query rows, -1 for none), got {got}": attend(kv_blocks=x)
        for got, x in {
            "int32[1, 1, 2, 2]": z(1, 1, 2, 2, dtype="int32"),
            "int32[3, 1, 1, 2]": z(3, 1, 1, 2, dtype="int32"),
            "float32[1, 1, 1, 2]": z(1, 1, 1, 2),
            "int32[2, 4, 1, 0]": z(2, 4, 1, 0, dtype="int32"),
        }.items()
    },
    **{
        "kv_indices: expected int32[2, heads, 5, n], heads 2 or 1 (n >= 1 positions a query row, "
        f"-1 for none), got {got}": attend(kv_indices=x)
        for got, x in {
            "int32[2, 4, 5, 3]": z(2, 4, 5, 3, dtype="int32"),
            "int32[2, 1, 5, 0]": z(2, 1, 5, 0, dtype="int32"),
            "float32[2, 1, 5, 3]": z(2, 1, 5, 3),
        }.items()
    },
    "bias: expected None beside kv_indices, got 'zeros'; leave it out": attend(
        kv_indices=_LISTS, bias="zeros"
    ),
    "deterministic: expected False beside kv_indices, got True; leave it out": attend(
        kv_indices=_LISTS, deterministic=True
    ),
    "q_starts: expected None beside kv_indices, got int32[3]; give each sequence a batch row": (
        attend_packed(z(3, dtype="int32"), z(3, dtype="int32"), kv_indices=_LISTS)
    ),
    "mask: expected a Mask beside kv_indices, got MaskFunction; leave hidden positions out of the "
    "lists": attend(kv_indices=_LISTS, mask=pa.mask_fn(lambda b, h, q, kv: kv > q)),
    "q_offset: expected -2**29 to 2**29, got 2147483647: positions are int32": attend(
        kv_indices=_LISTS, q_offset=2**31 - 1
    ),
    "q, k, v: expected floating-point numbers of 16 bits or more beside kv_indices, got "
    "float8_e4m3fn; cast them": attend(
        **{name: z(2, n, h, 8, dtype="float8_e4m3fn") for name, n, h in _QKV_OF_LISTS},
        kv_indices=_LISTS,
    ),
    "k: expected B * S * K below 2**31 beside kv_indices, whose rows are counted in 32 bits, got "
    "2 * 536870912 * 2; split the batch or the kv heads": lambda: jax.eval_shape(
        lambda k: pa.flash_attention(z(2, 5, 4, 8), k, k, kv_indices=_LISTS),
        jax.ShapeDtypeStruct((2, 2**29, 2, 8), "float32"),
    ),
    "block_size: expected None without kv_blocks, got 64": attend(block_size=64),
    "q_offset: expected an int beside kv_blocks, got an array; lists are of rows of q": attend(
        kv_blocks=_BLOCKS, q_offset=z(2, dtype="int32")
    ),
    f"block_size: expected an int of at least 1, or a pair (query rows, keys) of them, got {2**40}"
    "; it is static": attend(kv_blocks=_BLOCKS, block_size=2**40),
    "q, k: expected 4 axes beside kv_blocks, got 3 and 4": attend(q=z(5, 4, 8), kv_blocks=_BLOCKS),
    "block_size: expected an int of at least 1, or a pair (query rows, keys) of them, got 0; it is "
    "static": attend(kv_blocks=_BLOCKS, block_size=0),
    "block_size: expected an int of at least 1, or a pair (query rows, keys) of them, got (64, 1.5)"
    "; it is static": attend(kv_blocks=_BLOCKS, block_size=(64, 1.5)),
    "mask: expected blocks of (T, S, q_offset, context) = (5, 5, 0, Context(axis='cp', "
    "order='contiguous', method='gather', overlap=True)), got those of (9, 9, 0); "
    f"{_SIZES_OF_THIS_CALL}": over_two(mask=_OF_9),
    "mask: expected blocks of no window, since a bias or mask_array lies over all keys, which all "
    f"move, got those of a mask within a static band; {_SIZES_OF_THIS_CALL}": (
        over_two(band=pa.sliding_window(2), mask_array=np.ones((1, 1, 5, 10), bool))
    ),
    "heads: expected a multiple of the 2 devices of 'cp' for method 'heads', got 3; say how many "
    "query heads the call has": over_two(method="heads"),
    "mask: expected blocks of batch = 2 and heads = 4, on which the mask depends, got those of "
    f"other numbers; {_SIZES_OF_THIS_CALL}": attend(mask=_BY_ROW),
    "mask: expected blocks of (T, S, q_offset) = (5, 7, 0), got those of (9, 9, 0); "
    f"{_SIZES_OF_THIS_CALL}": attend(mask=_OF_9),
    "mask: expected blocks of an int q_offset, got those of (9, 9, 0); "
    f"{_SIZES_OF_THIS_CALL}": attend(mask=_OF_9, q_offset=z(2, dtype="int32")),
    "score: expected what score_fn(f, *aux) makes, or None, got float": attend(score=1.0),
    "score: expected what the function reads at h to have 4 numbers there, one for each h, got "
    "shape [1], whose axis 0 has 1; give it whole, or read it at jnp.minimum(h, 0)": attend(
        score=pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), np.ones(1, np.float32))
    ),
    "context: expected a Context, or None where rows are not split, got 'cp'": (
        attend(context="cp")
    ),
}
CACHES |= {
    f"{name}: expected a mesh axis's name, a tuple of names or None, got {axes!r}": (
        lambda name=name, axes=axes: stacked().specs(**{name: axes})
    )
    for name, axes in (("heads", 3), ("heads", ""), ("heads", ("a", None)), ("sequences", 3))
}


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


CACHES |= {
    "rows: expected an int of at least 0, got -1": lambda: paged().pages_for(-1),
    "rows: expected an int of at least 0, got 1.5": lambda: paged().pages_for(1.5),
}
DECODES |= {
    **{
        f"layer: expected 0 to {n - 1} for a cache of {n} layers, got None; pass layer=l": (
            lambda n=n, options=options: pa.decode_attention(
                z(2, 4, 8), stacked(layers=n), **options
            )
        )
        for n, options in ((2, {}), (4, {"starts": z(3, dtype="int32")}))
    },
    "shared_prefixes: expected those of a cache with pages of 2 rows, as this call's, got those of "
    "pages of 3; make them by this cache's shared_prefixes()": (
        lambda: pa.decode_attention(
            z(2, 4, 8),
            paged(),
            shared_prefixes=PagedCache.create(2, 5, 3, 2, 8, capacity=9).shared_prefixes(),
        )
    ),
    "shared_prefixes: expected None beside prefix, got both; pass one of them": (
        lambda: pa.decode_attention(
            z(2, 1, 4, 8),
            paged(),
            shared_prefixes=paged().shared_prefixes(),
            prefix=pa.Prefix(stacked(), z(2, dtype="int32")),
        )
    ),
    **{
        "kv_indices: expected int32[2, 3, n] (n >= 1 positions a query row, -1 for none), got "
        f"{got}": (lambda x=x: pa.decode_attention(z(2, 3, 4, 8), stacked(), kv_indices=x))
        for got, x in {
            "int32[2, 3]": z(2, 3, dtype="int32"),
            "int32[2, 3, 0]": z(2, 3, 0, dtype="int32"),
            "float32[2, 3, 5]": z(2, 3, 5),
            "str": "first",
        }.items()
    },
    "kv_indices: expected None beside parents, which say what drafts see, got both; list the "
    "ancestors of each draft in kv_indices instead": (
        lambda: pa.decode_attention(
            z(2, 1, 4, 8),
            stacked(),
            parents=z(2, 1, dtype="int32"),
            kv_indices=z(2, 1, 5, dtype="int32"),
        )
    ),
    "kv_indices: expected None beside a cache whose rows are split over devices, got both; use a "
    "cache without context": (
        lambda: over_a_whole_cache(
            lambda cache: pa.decode_attention(
                z(2, 1, 4, 8), cache, kv_indices=z(2, 1, 5, dtype="int32")
            )
        )()
    ),
    **{
        f"{name}: expected None beside kv_indices, got both; pass one of them": (
            lambda name=name, x=x: pa.decode_attention(
                z(2, 1, 4, 8), paged(), kv_indices=z(2, 1, 5, dtype="int32"), **{name: x()}
            )
        )
        for name, x in {
            "prefix": lambda: pa.Prefix(stacked(), z(2, dtype="int32")),
            "shared_prefixes": lambda: paged().shared_prefixes(),
        }.items()
    },
    "parents: expected int32[2, 1] (one a draft) or a DraftTree of them, got int32[2]": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), parents=z(2, dtype="int32"))
    ),
    "parents: expected int32[2, 1] (one a draft) or a DraftTree of them, got a DraftTree of "
    "int32[2, 3]": (
        lambda: pa.decode_attention(
            z(2, 1, 4, 8), stacked(), parents=pa.DraftTree.create(z(2, 3, dtype="int32"))
        )
    ),
    "parents: expected int32[2, 1] (one a draft) or a DraftTree of them, got a DraftTree of "
    "NoneType[]": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), parents=pa.DraftTree(None, None))
    ),
    **{
        "mask: expected CAUSAL or a window, Mask(left=.., right=0), beside parents, which say what "
        f"drafts see, got {got}": (
            lambda mask=mask: pa.decode_attention(
                z(2, 1, 4, 8), stacked(), parents=z(2, 1, dtype="int32"), mask=mask
            )
        )
        for got, mask in {"full": pa.FULL, "MaskFunction": ~pa.FULL}.items()
    },
    **{
        f"cache.k: expected arrays, got {got}; where nothing but shapes is known, pass the cache "
        "to the function that jax.eval_shape calls": (
            lambda cache=cache: pa.decode_attention(z(2, 1, 4, 8), cache)
        )
        for got, cache in {
            "ShapeDtypeStruct": jax.eval_shape(stacked),
            "NoneType": jax.tree.map(lambda _: None, separate()),
        }.items()
    },
}
_SCORE = pa.score_fn(lambda s, b, h, q, kv, x: s + x[b], np.ones(1, np.float32))
DECODES |= {
    "score: expected what score_fn(f, *aux) makes, or None, got float": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), score=1.0)
    ),
    "score: expected what the function reads at b to have 2 numbers there, one for each b, got "
    "shape [1], whose axis 0 has 1; give it whole, or read it at jnp.minimum(b, 0)": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(), score=_SCORE)
    ),
    "score: expected None beside parents, by whose depth drafts stand, got both; verify one path "
    "of drafts at a time": (
        lambda: pa.decode_attention(
            z(2, 1, 4, 8), stacked(), parents=z(2, 1, dtype="int32"), score=_SCORE
        )
    ),
    "score: expected None beside a cache whose rows are split over devices, got both; use a cache "
    "without context": (
        lambda: pa.decode_attention(z(2, 1, 4, 8), stacked(context=pa.Context("cp")), score=_SCORE)
    ),
    "parents: expected int32[3] (one a packed row) or a DraftTree of them, made with starts, got "
    "int32[2, 3]": (
        lambda: pa.decode_attention(
            z(3, 4, 8), stacked(), starts=z(3, dtype="int32"), parents=z(2, 3, dtype="int32")
        )
    ),
    "mask: expected a Mask over a cache whose rows are split over devices, got a mask function; "
    "use a cache without context": (
        lambda: pa.decode_attention(
            z(2, 1, 4, 8), stacked(context=pa.Context("cp")), mask=pa.CAUSAL | pa.CAUSAL
        )
    ),
}
APPENDS |= {
    "parents: expected int32[3] (one a packed row) or a DraftTree of them, made with starts, got a "
    "DraftTree of int32[2, 3]": lambda: pa.append_kv(
        stacked(),
        *(z(3, 2, 8),) * 2,
        starts=z(3, dtype="int32"),
        parents=pa.DraftTree.create(z(2, 3, dtype="int32")),
    ),
    "drafts_most: expected an int of at least 1, got 0": (
        lambda: pa.DraftTree.create(z(3, dtype="int32"), z(2, dtype="int32"), drafts_most=0)
    ),
    "drafts_most: expected None without starts, where each sequence has t drafts, got 3": (
        lambda: pa.DraftTree.create(z(2, 3, dtype="int32"), drafts_most=3)
    ),
}
DEVICE = {
    "generation: expected None or a name like \"sm90\", got 'h100'": (
        lambda: device.assume("h100").__enter__()
    ),
}
EVERY = [
    pytest.param(call, message, id=f"{group}-{number}")
    for group, table in {
        "attention": ATTENTION,
        "masks": MASKS,
        "caches": CACHES,
        "appends": APPENDS,
        "decodes": DECODES,
        "device": DEVICE,
    }.items()
    for number, (message, call) in enumerate(table.items())
]


@pytest.mark.parametrize("call, message", EVERY)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == message
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("value", [1.0, True, "2"])
def test_mask_bounds_are_ints(side, value):
    with pytest.raises(ValueError) as caught:
        Mask(**{side: value})
    assert str(caught.value).startswith(f"Mask({side}=") and repr(value) in str(caught.value)
    assert str(caught.value).endswith("Pass lengths and offsets as arrays beside the mask.")


def test_every_check_of_the_package_is_in_a_table():
    """No `raise ValueError` of the argument checks that nobody here has seen."""
    messages = "\n".join(m for t in (ATTENTION, CACHES, APPENDS, DECODES, QUANTIZED) for m in t)
    root = pathlib.Path(pa.__file__).parent
    for name in ("_call/checks", "append", "cache", "decode"):
        source = (root / f"{name}.py").read_text()
        for raised in re.findall(r"raise ValueError\(\s*((?:f?\".*?\"\s*)+)", source, re.S):
            text = "".join(re.findall(r'f?"(.*?)"', raised, re.S))
            pattern = ".*?".join(re.escape(part) for part in re.split(r"\{.*?\}", text))
            assert re.search(pattern, messages), f"{name}: {text!r} is not tested"


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
        '    -> it is the oracle; ask for it by name: implementation="reference"',
    ]
    assert set(error.limits) >= {"reference"}
    for name, limit in error.limits.items():
        at = lines.index(f"  {name}: {limit.reason}")
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
        "  append_copy: it needs an NVIDIA GPU and the default device is none\n"
        '    -> leave implementation=None, or say "reference"; check_for("sm80", f, *args) says '
        "what a GPU would refuse"
    )


def wide_heads():
    x = z(1, 8, 2, 513, dtype="bfloat16")
    return pa.flash_attention(x, x, x)


def wide_float8():
    x = z(1, 8, 2, 512, dtype="float8_e4m3fn")
    return pa.flash_attention(x, x, x)


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
    loss = lambda scale: pa.flash_attention(x, x, x, q_scale=scale).astype(jnp.float32).sum()  # noqa: E731
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
        return jax.grad(lambda x: pa.flash_attention(x, x, x, mask=mask).astype("float32").sum())(x)

    before = loss(x, pa.CAUSAL)
    types = pa.check_for("sm90", loss, x, pa.CAUSAL)
    assert (types.shape, types.dtype) == (x.shape, x.dtype)
    assert pa.check_for("sm80", loss, jax.ShapeDtypeStruct(x.shape, x.dtype), pa.FULL) == types
    np.testing.assert_array_equal(np.float32(loss(x, pa.CAUSAL)), np.float32(before))
    with pytest.raises(ValueError) as caught:
        pa.check_for("H100", loss, x, pa.CAUSAL)
    assert str(caught.value) == "generation: expected None or a name like \"sm90\", got 'H100'"


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
        names += ("flash_fwd_sm90", "flash_fwd_sm90_wide")
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
            count = 2 if any(name.startswith("decode_") for name in kernels) else 5
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
