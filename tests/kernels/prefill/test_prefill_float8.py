"""Prefill over float8 caches on Hopper by matmuls on 8 bits: who takes what, that it is right
beside the oracle on the rows that it multiplies (q with a scale a row, K and V with one for 128
rows), and the launch that makes these.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import dispatch
from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.mma.wgmma_float8 import ORDER, UNIT
from pallas_attn.kernels.prefill import float8_sm90 as kernel
from pallas_attn.kernels.prefill import float8_tiles, sm90
from pallas_attn.kernels.prefill.float8_tiles import Units
from tests.support import budget, float8_rows, fuzz, mosaic, subjects
from tests.support import operations as support
from tests.support.float8_rows import dense, expected, of_tiles
from tests.support.fuzz_prefill import Case, run

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

FLOAT8 = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
FAST = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
PROBLEM = dataclasses.replace(
    support._BASE["decode"],
    gpu="sm90",
    cache_dtype="float8_e4m3fn",
    quantized=True,
    precision="float8",
    q_len=256,
    capacities=(1024,) * support._BASE["decode"].sequences,
)


def chosen(**changes):
    problem = dataclasses.replace(PROBLEM, **changes)
    return getattr(dispatch.select(problem, None), "module", None)


def test_who_takes_what():
    ours = "prefill.float8_sm90"
    few = -(-kernel.FEWEST_PAIRS * PROBLEM.kv_heads // PROBLEM.q_heads)
    assert chosen() == chosen(q_len=few) == ours
    assert chosen(q_len=few - 1) == "prefill.narrow_sm90"
    assert chosen(q_len=1) == "decode.sm90"
    assert chosen(gpu="sm80") == "prefill.gathered_sm80"
    many = {"q_len": 1000}
    for changes in (
        {"precision": None},
        {"cache_dtype": "int8"},
        {"v_head_dim": 192},
        {"head_dim": 64},
        {"tokens": 1000 * PROBLEM.sequences},
        {"score_program": support._SLOPES},
    ):
        assert chosen(**many, **changes) == "prefill.widened_sm90"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e5m2"])
def test_precision_allows_it_over_float8_caches_alone(dtype):
    """And says nothing over others, as `flash_attention` with 16 bits takes it."""
    cache = pa.StackedCache.create(1, 64, 2, 64, dtype=dtype).extend(4)
    rows = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    cache = pa.write_kv(cache, rows, rows)
    want = {None: None, FLOAT8: "float8", FAST: "float8", "ANY_F8_ANY_F8_F32": "float8"}
    for precision, name in want.items():
        options = pa._cache.bind.DecodeCall(precision=precision)
        problem, _ = pa._cache.bind.decode(rows, cache, options)
        assert problem.precision == (name if dtype == "float8_e5m2" else None)
    pa.decode_attention(rows, cache, precision=FLOAT8)


# ---- the oracle ----------------------------------------------------------------------------------


def drawn(rng, kind, dtype, layers=None, rows=(0, 70, 150), dims=(64, 64)):
    """A cache whose buffers hold NaN where nobody wrote, and queries of its last 24 rows."""
    options = {"dtype": dtype, "layers": layers, "v_head_dim": dims[1]}
    cache = {
        "per_sequence": lambda: pa.PerSequenceCache.create((72, 88, 160), 2, dims[0], **options),
        "stacked": lambda: pa.StackedCache.create(3, 160, 2, dims[0], **options),
        "paged": lambda: pa.PagedCache.create(3, 36, 16, 2, dims[0], capacity=160, **options),
    }[kind]()
    nan = {
        name: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), getattr(cache, name))
        for name in ("k_scale", "v_scale")
    }
    cache = dataclasses.replace(cache, **nan).extend(jnp.asarray(rows, jnp.int32))
    new = [rng.standard_normal((3, max(rows), 2, dim)) for dim in dims]
    factors = np.ones(max(rows))
    factors[5:20] = 0.0  # values without a scale of their own
    factors[40:60] = 128.0
    layer = {} if layers is None else {"layer": layers - 1}
    new = [float8_rows.off_ties(rng, x) for x in new]
    new[1] = new[1] * jnp.asarray(factors, "bfloat16")[None, :, None, None]
    cache = pa.write_kv(cache, *new, **layer, implementation="reference")
    q = rng.standard_normal((3, 24, 16, dims[0]))
    return float8_rows.off_ties(rng, q, float8_rows.PRIMES[:1]), cache, layer


def inputs_of(q, cache, layer, sinks=None):
    return DecodeInputs(
        *(q, cache.k, cache.v, cache.lengths, cache.page_table),
        jnp.int32(layer["layer"]) if layer else None,
        sinks=sinks,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        new_lengths=cache.new_lengths,
    )


def problem_of(q, cache, **changes):
    """24 queries a sequence over a cache of `drawn`."""
    fields = {"kind": cache.kind, "cache_dtype": str(cache.dtype), "sequences": 3, "q_len": 24}
    fields |= {"q_heads": 16, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "scale": 0.125}
    fields |= {"capacities": cache.held, "page_size": cache.page_size, "pages": cache.pages}
    return dataclasses.replace(PROBLEM, **(fields | {"layers": cache.layers} | changes))


# A cache, the problem's options, and the Config: splits, one consumer, tiles of 64 and 128 keys.
CASES = {
    "stacked": (("stacked", "float8_e4m3fn", 2), {}, {"block_kv": 64, "grid": 3, "in_turn": True}),
    "per_sequence": (
        ("per_sequence", "float8_e5m2", None),
        {"softcap": 4.0},
        {"warpgroups": 1, "q_slots": 1},
    ),
    "paged": (
        ("paged", "float8_e4m3fn", 2),
        {"mask": pa.sliding_window(100), "sinks": True},
        {"block_kv": 64, "splits": 2},
    ),
}


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(rng, name):
    of_cache, options, tuning = CASES[name]
    q, cache, layer = drawn(rng, *of_cache)
    sinks = jnp.asarray(rng.standard_normal(16), jnp.float32) if "sinks" in options else None
    problem, inputs = problem_of(q, cache, **options), inputs_of(q, cache, layer, sinks)
    assert kernel.limit(problem) is None
    slower = dispatch.TABLES["decode_quantized"][0].slower
    assert slower(problem) is None
    reason = "precision does not ask for matmuls on float8"
    assert slower(dataclasses.replace(problem, precision=None)).reason == reason
    config = kernel.Config(sm90.Config(**tuning))
    run = jax.jit(lambda inputs: kernel.run(inputs, problem, config))
    with mosaic.interpret():
        got = run(inputs)
        for missing in () if name != "stacked" else (-1, 2):
            lost = run(inputs._replace(layer=jnp.int32(missing)))
            assert all(np.isnan(np.asarray(x, np.float32)).all() for x in lost)
    told = {k: v for k, v in options.items() if k in ("mask", "softcap")} | {"sinks": sinks}
    wanted = expected(q, cache, layer.get("layer"), **{"mask": pa.CAUSAL} | told)
    budget.check(dict(zip(("out", "lse"), got, strict=True)), wanted)


@pytest.mark.guards
def test_tiles(rng):
    """K and V with a scale for 128 rows, zeros past lengths; one is past the end, one negative."""
    _, cache, _ = drawn(rng, "stacked", "float8_e4m3fn", rows=(160, 70, 150))
    scales = [x.at[0, 1, 3].set(jnp.nan) for x in (cache.k_scale, cache.v_scale)]
    cache = dataclasses.replace(cache, k_scale=scales[0], v_scale=scales[1])
    layout = cache_layout.layout_of(problem_of(None, cache))
    plan = float8_tiles.Tiles(layout, "float8_e4m3fn", (64, 64))
    lengths = jnp.asarray([2**31 - 1, 70, -5], jnp.int32)
    inputs = inputs_of(None, cache, {})._replace(lengths=lengths)
    with mosaic.interpret():
        k, v, units = float8_tiles.tiles_of(plan, inputs)
    held, units = (160, 70, 0), np.asarray(units).reshape(3, 2, 2, 4)
    values = np.asarray(v.astype(jnp.float32)).reshape(3, 2, 64, -1, UNIT)
    v = np.empty_like(values)
    v[..., ORDER] = values
    v = v.reshape(3, 2, 64, 256).swapaxes(2, 3)
    k = np.asarray(k.astype(jnp.float32)).reshape(3, 2, 256, 64)
    columns = ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale))
    for side, (got, numbers, of_row) in enumerate(columns):
        rows, of_row = dense(cache, numbers, None, held), dense(cache, of_row, None, held)
        want, largest = of_tiles(rows, of_row)
        want, largest = want.astype(np.float32).swapaxes(1, 2), largest.swapaxes(1, 2)
        for m, tiles in enumerate((2, 1, 0)):
            written = tiles * float8_tiles.KEYS
            np.testing.assert_array_equal(got[m, :, :written], want[m, :, :written])
            known = largest[m, :, :tiles]
            if side == 0:
                np.testing.assert_array_equal(units[m, :, :tiles, Units.SCORE], known)
                continue
            logarithm, inverse = units[m, :, :tiles, Units.VALUE], units[m, :, :tiles, Units.SUM]
            np.testing.assert_allclose(logarithm, np.log2(known), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(inverse, 1 / known, rtol=1e-6)


def launched(inputs, *, problem, config):
    """`kernel.run` as a function that travels by pickle."""
    return kernel.run(inputs, problem, config)


# Bytes that registers spill: two accumulators and a tile of scores leave few for anything else.
SPILLS = {"stacked": 0, "per_sequence": 0, "paged": 0}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_machine_code(rng, name):
    """Two launches, no copy of a cache, and no wgmma that ptxas serialises."""
    of_cache, options, _ = CASES[name]
    q, cache, layer = drawn(rng, *of_cache, dims=(128, 128))
    dims = {"head_dim": 128, "v_head_dim": 128}
    problem = problem_of(q, cache, **dims, **options | {"sinks": False})
    config = kernel.Config(sm90.Config())
    call = functools.partial(launched, problem=problem, config=config)
    report = mosaic.compile_for(call, inputs_of(q, cache, layer))
    assert (report.launches, report.copies) == (2, 0)
    assert report.spill_bytes <= SPILLS[name]


SIZES = {"sequences": 3, "q_len": 24, "q_heads": 16, "kv_heads": 2}
SIZES |= {"head_dim": 128, "v_head_dim": 128, "capacity": 160, "layers": 2}
ON_A_GPU = {
    "stacked": Case("stacked", "float8_e4m3fn", **SIZES),
    "paged": Case("paged", "float8_e5m2", page_size=16, softcap=5.0, fast=True, **SIZES),
    "per_sequence": Case("per_sequence", "float8_e4m3fn", mask=pa.sliding_window(100), **SIZES),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_on_a_gpu(name):
    """By dispatch; lengths and layers in and out of range."""
    fuzz.prove(run, ON_A_GPU[name], subjects.Subject("gpu", None), rounds=4)
