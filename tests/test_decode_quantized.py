"""The decode kernel over quantised caches: what it refuses, and its machine code. That it computes
the right thing: tests/test_quantized.py, test_decode_steps.py, the drawn problems of test_cases.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._problem import DecodeProblem
from pallas_attn.kernels import decode_sm90, widen
from pallas_attn.masks import CAUSAL
from tests import mosaic

needs_aot = pytest.mark.skipif(not mosaic.available(), reason="the aot extra is not installed")
every_dtype = pytest.mark.parametrize("dtype", widen.DTYPES)

PROBLEM = DecodeProblem(
    gpu="sm90",
    kind="stacked",
    dtype="bfloat16",
    cache_dtype="float8_e4m3fn",
    sequences=8,
    q_len=1,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    capacities=(1024,) * 8,
    mask=CAUSAL,
    scale=128**-0.5,
    quantized=True,
)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"dtype": "float16"}, "a quantised cache under float16 queries"),
        ({"head_dim": 96}, "a quantised cache of head dim 96; it takes multiples of 64"),
        ({"v_head_dim": 72}, "rows are copied 16 bytes at a time, scales too"),
        ({"capacities": (1022,) * 8}, "rows are copied 16 bytes at a time, scales too"),
        ({"sequences": 1001}, "1001 sequences; it takes up to 1000"),
        ({"quantized": False}, "a float8_e4m3fn cache under bfloat16 queries"),
    ],
)
def test_limits(fields, reason):
    assert decode_sm90.limit(PROBLEM) is None
    assert decode_sm90.limit(dataclasses.replace(PROBLEM, **fields)).reason == reason


def permuted(low, high, selector):
    """PTX's prmt."""
    both = np.concatenate([low.view(np.uint8), np.full_like(low, high).view(np.uint8)])
    return both[[selector >> 4 * n & 7 for n in range(4)]].view(np.uint32)


@every_dtype
def test_what_the_widening_instructions_make_of_every_number(dtype):
    """`widen`, instruction by instruction, in NumPy: exact, for all but NaN and infinity."""
    numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    for code in np.flatnonzero(np.isfinite(numbers)):
        word = np.array([code, code ^ 1, code ^ 2, code ^ 3], np.uint8)
        wanted = word.view(jnp.dtype(dtype)).astype(np.float32)
        got = []
        for low in (0, 2):
            if dtype == "int8":
                biased = (word ^ 0x80).view(np.uint32)
                pair = [permuted(biased, 0x4B000000, 0x7440 + low + n) for n in (0, 1)]
                pair = np.concatenate(pair).view(np.float32) - np.float32(2**23 + 128)
            else:
                spread = permuted(word.view(np.uint32), 0, 0x3322 if low else 0x1100)
                shift = widen._SHIFT[dtype]
                kept = spread >> shift & np.uint32(0x7F007F00 >> shift)
                kept = kept | spread & np.uint32(0x80008000)
                bias = np.array([widen._BIAS[dtype]], np.uint32).view(jnp.bfloat16)
                pair = kept.view(jnp.bfloat16).astype(np.float32) * bias.astype(np.float32)
            got += list(pair)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(np.array(got)[finite], wanted[finite])
        np.testing.assert_array_equal(np.array(got).astype(jnp.bfloat16)[finite], wanted[finite])


CACHES = {
    "per_sequence": lambda dtype: pa.PerSequenceCache.create((8192,) * 16, 8, 128, dtype=dtype),
    "stacked": lambda dtype: pa.StackedCache.create(16, 8192, 8, 128, dtype=dtype),
    "paged": lambda dtype: pa.PagedCache.create(
        16, 16 * 512, 16, 8, 128, capacity=8192, dtype=dtype
    ),
}


@needs_aot
@pytest.mark.guards
@pytest.mark.parametrize("kind, dtype", list(zip(CACHES, widen.DTYPES, strict=True)))
def test_machine_code(kind, dtype):
    """One launch, no copies, nothing spilled, as many matmuls as over bfloat16."""
    q = jax.ShapeDtypeStruct((16, 1, 32, 128), jnp.bfloat16)
    made = {}
    for name in (dtype, "bfloat16"):
        cache = jax.eval_shape(lambda name=name: CACHES[kind](name))
        made[name] = mosaic.compile_for(pa.decode_attention_with_lse, q, cache)
    report = made[dtype]
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)
    assert report.tensor_maps == 0
    assert report.sass.count("HMMA") == made["bfloat16"].sass.count("HMMA") > 0
