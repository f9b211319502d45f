"""The decode kernel over quantised caches: what it refuses, and its machine code. That it computes
the right thing: tests/kernels/test_every_kernel.py, tests/caches/test_decode_steps.py and
tests/api/test_cases.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.decode import sm80 as decode_sm80
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.mma import dequant
from tests.support import mosaic
from tests.support import operations as support

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

every_dtype = pytest.mark.parametrize("dtype", dequant.DTYPES)

PROBLEM = dataclasses.replace(support._BASE["decode"], cache_dtype="float8_e4m3fn", quantized=True)


@pytest.mark.parametrize("dims", [{}, {"head_dim": 256, "v_head_dim": 256}], ids=str)
def test_many_sequences_of_one_array(dims):
    """Only separate arrays take parameters of the launch."""
    many = dataclasses.replace(PROBLEM, sequences=2000, capacities=(8192,) * 2000, **dims)
    assert decode_sm90.limit(many) is None
    config = decode_sm90.Config.default(many)
    assert decode_sm90.smem_bytes(many, config) <= gpu_specs.shared_memory("sm90")


def test_two_blocks_share_a_multiprocessor():
    """Two blocks run if there is work for them."""
    many = dataclasses.replace(PROBLEM, sequences=64, capacities=(8192,) * 64)
    two, alone = (decode_sm90.Config.default(x) for x in (many, PROBLEM))
    assert (two.grid, alone.grid) == (256, 128)  # 512 heads and 64 are shared out evenly
    assert decode_sm90.smem_bytes(many, two) <= decode_sm90.SMEM_OF_TWO


def permuted(low, high, selector):
    """PTX's prmt."""
    both = np.concatenate([low.view(np.uint8), np.full_like(low, high).view(np.uint8)])
    return both[[selector >> 4 * n & 7 for n in range(4)]].view(np.float16)


@every_dtype
def test_what_the_widening_instructions_make_of_every_number(dtype):
    """`widen`, instruction by instruction, in NumPy: exact. float8_e4m3fn by integers: it has an
    instruction of its own on newer GPUs.
    """
    word = np.arange(256, dtype=np.uint8)
    numbers = word.view(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(numbers.astype(np.float16), numbers)
    for code in range(256):
        word = np.array([code, code ^ 1, code ^ 2, code ^ 3], np.uint8)
        wanted = word.view(jnp.dtype(dtype)).astype(np.float16)
        if dtype == "int8":
            biased = (word ^ 0x80).view(np.uint32)
            pairs = [permuted(biased, 0x64646464, order) for order in (0x4140, 0x4342)]
            pairs = [pair - np.uint32(0x64806480).reshape(1).view(np.float16) for pair in pairs]
        elif dtype == "float8_e5m2":
            pairs = [permuted(word.view(np.uint32), 0, order) for order in (0x1404, 0x3424)]
        else:
            halves = [permuted(word.view(np.uint32), 0, order) for order in (0x1404, 0x3424)]
            halves = [half.view(np.uint32) for half in halves]
            small = [(half & 0x7F007F00) >> 1 | half & 0x80008000 for half in halves]
            with np.errstate(over="ignore", invalid="ignore"):
                pairs = [half.view(np.float16) for half in small]
                pairs = [x * np.float16(256) + x * np.float16(36864) * np.float16(0) for x in pairs]
        np.testing.assert_array_equal(np.concatenate(pairs), wanted)


CACHES = {
    "per_sequence": lambda dtype: pa.PerSequenceCache.create((8192,) * 16, 8, 128, dtype=dtype),
    "stacked": lambda dtype: pa.StackedCache.create(16, 8192, 8, 128, dtype=dtype),
    "paged": lambda dtype: pa.PagedCache.create(
        16, 16 * 512, 16, 8, 128, capacity=8192, dtype=dtype
    ),
}


@functools.cache
def compiled(kind, dtype):
    q = jax.ShapeDtypeStruct((16, 1, 32, 128), jnp.bfloat16)
    cache = jax.eval_shape(lambda: CACHES[kind](dtype))
    return mosaic.compile_for(pa.decode_attention_with_lse, q, cache, sass=True)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("kind, dtype", list(zip(CACHES, dequant.DTYPES, strict=True)))
def test_machine_code(kind, dtype):
    """One launch, no copies, nothing spilled, as many matmuls as over bfloat16."""
    report = compiled(kind, dtype)
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)
    assert report.tensor_maps == 0
    assert report.sass.count("HMMA") == compiled(kind, "bfloat16").sass.count("HMMA") > 0


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code_of_a_gpu_that_converts_by_integers():
    q = jax.ShapeDtypeStruct((16, 1, 32, 128), jnp.bfloat16)
    cache = jax.eval_shape(lambda: CACHES["stacked"]("float8_e4m3fn"))
    report = mosaic.compile_for(pa.decode_attention_with_lse, q, cache, target="a100")
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)


@pytest.mark.gpu
def test_integers_and_the_instruction_give_the_same_bits():
    """Every number, NaN too, as if on an older GPU."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 2, 256, 64)).astype(np.uint8)
    codes[0] = np.where(codes[0] & 0x7F == 0x7F, 0, codes[0])  # a NaN in a key is one everywhere
    k, v = (jnp.asarray(x.view(jnp.float8_e4m3fn))[None] for x in codes)
    ones = jnp.ones((1, 2, 256), jnp.float32)
    q = jnp.asarray(rng.standard_normal((1, 1, 8, 64)) / 64, jnp.bfloat16)
    inputs = DecodeInputs(q, k, v, jnp.array([256]), None, None, None, ones, ones)
    sizes = {"sequences": 1, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    problem = dataclasses.replace(PROBLEM, **sizes, capacities=(256,), scale=0.125)
    made = []
    for gpu in ("sm80", "sm90"):
        call = functools.partial(
            decode_sm80.run,
            problem=dataclasses.replace(problem, gpu=gpu),
            config=decode_sm80.Config(stages=3, grid=2),
        )
        made.append(jax.jit(call)(inputs))
    out = np.asarray(made[0][0], np.float32)
    assert np.isnan(out).any() and np.isfinite(out).any() and np.isfinite(made[0][1]).all()
    made = jax.tree.map(lambda x: np.asarray(x, np.float32), made)  # NaN is equal to NaN there
    jax.tree.map(np.testing.assert_array_equal, *made)


@pytest.mark.gpu
def test_many_sequences_of_one_array_on_the_gpu():
    """2000 give what their halves give, bit for bit."""
    rng, capacity = np.random.default_rng(0), 64
    rows = [jnp.asarray(rng.standard_normal((2000, capacity, 2, 64)), jnp.bfloat16) for _ in "kv"]
    lengths = jnp.asarray(rng.integers(0, capacity + 1, 2000), jnp.int32)
    cache = pa.StackedCache.create(2000, capacity, 2, 64, dtype=jnp.int8)
    cache = jax.jit(pa.append_kv)(cache, *rows, new_lengths=lengths)
    q = jnp.asarray(rng.standard_normal((2000, 8, 64)), jnp.bfloat16)
    decode = jax.jit(functools.partial(pa.decode_attention, batch_invariant=True))
    whole = np.asarray(decode(q, cache), np.float32)
    assert np.isfinite(whole).all() and whole[np.asarray(lengths) > 0].any(axis=(1, 2)).all()
    for half in (slice(1000), slice(1000, None)):
        part = jax.tree.map(lambda x, half=half: x[half], cache)
        np.testing.assert_array_equal(whole[half], np.asarray(decode(q[half], part), np.float32))
