"""The Blackwell forward, which has no GPU here: right in the interpreter with its races watched,
and compiled ahead of time for both of its targets.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, FULL, sliding_window
from pallas_attn._call import device, dispatch
from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.flash_fwd import sm100 as kernel
from pallas_attn.kernels.lang import mosaic as lang
from tests.kernels.flash_fwd.test_flash_fwd import (
    arguments_of,
    check,
    problem_of,
    run,
    shape_of,
)
from tests.support import aot, mosaic
from tests.support.problems.case import AttentionCase

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def case(q_len: int, kv_len: int, dim: int = 128, **fields) -> AttentionCase:
    sizes = {"batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": dim, "v_head_dim": dim}
    return AttentionCase("sm100", q_len=q_len, kv_len=kv_len, **(sizes | {"mask": FULL} | fields))


def case192(q_len: int, kv_len: int, **fields) -> AttentionCase:
    return case(q_len, kv_len, 192, v_head_dim=128, **fields)


OF_96 = kernel.Config(block_kv=96)
ALONE = kernel.Config(q_tiles=1, stages=3, polynomials=0)
INTERPRETED = {
    "causal": (case(300, 300, mask=CAUSAL, batch=2), kernel.Config()),
    "one_key_in_a_tile": (case(257, 257, 64, mask=CAUSAL), kernel.Config(polynomials=4)),
    "dim96_alone": (case(200, 333, 96, mask=CAUSAL, q_offset=100), ALONE),
    "window": (case(400, 400, 64, mask=sliding_window(150)), kernel.Config()),
    "rows_without_keys": (case(300, 130, 64, mask=sliding_window(50), sinks=True), ALONE),
    "lengths": (
        case(256, 300, 64, mask=CAUSAL, batch=2, kv_lengths=(129, 0), q_lengths=(200, 256)),
        kernel.Config(),
    ),
    "offsets": (case(130, 300, 64, mask=CAUSAL, batch=2, q_offset=(170, -20)), kernel.Config()),
    "rescaled_each_time": (case(128, 512, 64, magnitude=4.0), kernel.Config(rescale_threshold=0)),
    "bias": (case(200, 300, 64, bias_shape=(1, 2, 200, 300)), kernel.Config()),
    "padding_mask": (case(130, 300, 64, mask_shape=(1, 1, 1, 300)), kernel.Config()),
    "documents": (case(300, 300, 64, segments=(70, 130, 100), mask=CAUSAL), kernel.Config()),
    "bounds_at_run_time": (
        case(200, 200, 64, mask=sliding_window(64), mask_at_run_time=True),
        kernel.Config(),
    ),
    "dim192": (case192(300, 420, mask=CAUSAL, q_offset=120), OF_96),
    "dim192_alone": (case192(200, 95, dtype="float16"), dataclasses.replace(OF_96, q_tiles=1)),
    "dim192_tiles_of_64": (case192(130, 257), kernel.Config(block_kv=64, stages=3, polynomials=2)),
    "dim192_lengths": (
        case192(256, 300, mask=CAUSAL, batch=2, kv_lengths=(97, 0), q_lengths=(200, 256)),
        OF_96,
    ),
    "dim192_documents": (case192(300, 300, segments=(70, 130, 100), mask=CAUSAL), OF_96),
    "dim192_bias_window": (
        case192(200, 300, bias_shape=(1, 2, 200, 300), mask=sliding_window(100)),
        OF_96,
    ),
}


@pytest.mark.guards
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name):
    with mosaic.interpret():
        check(*INTERPRETED[name])


DOCUMENTS = np.arange(300, dtype=np.int32) // 90
FUNCTIONS = {
    "mask": {"mask": pa.mask_fn(lambda b, h, q, kv: (q // 32 >= kv // 32) & ((q + kv) % 3 != h))},
    "documents": {
        "mask": CAUSAL & pa.mask_fn(lambda b, h, q, kv, ids: ids[q] == ids[kv], DOCUMENTS)
    },
    "slopes": {
        "mask": CAUSAL,
        "score": pa.score_fn(lambda s, b, h, q, kv, m: s + m[h] * (kv - q), np.ones(2, np.float32)),
    },
}


@pytest.mark.guards
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_positions(name):
    sizes = case192(300, 300) if name == "documents" else case(300, 300, 64)
    arguments = sizes.arguments() | FUNCTIONS[name]
    with device.assume("sm100"), mosaic.interpret():
        got = pa.flash_attention_with_lse(**arguments, implementation="sm100")
    want = pa.flash_attention_with_lse(**arguments, implementation="reference")
    for x, y, bound in zip(got, want, (2.0**-6, 2.0**-18), strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, y)), bound, bound)


@pytest.mark.guards
@pytest.mark.parametrize("name", ["documents", "bias", "dim192_lengths"])
def test_lowers(name):
    """Mosaic lowers less than the interpreter computes: no `not` in a warp."""
    sizes, config = INTERPRETED[name]
    call = functools.partial(run, problem=problem_of(sizes), config=config)
    shapes = jax.tree.map(shape_of, AttentionInputs(**arguments_of(sizes)))
    assert "mosaic_gpu" in mosaic.lower_for_cuda(call, shapes)


@pytest.mark.guards
def test_an_infinite_row_leaves_others_alone():
    """Row maxima rise by more than the threshold in every kv tile; one row of q holds an inf."""
    sizes, config = case(128, 384, 64), kernel.Config(q_tiles=1)
    arrays = {name: np.array(x) for name, x in sizes.arrays().items() if name in "qkv"}
    arrays["k"] *= np.repeat([1, 8, 64], 128)[None, :, None, None].astype(arrays["k"].dtype)
    call = functools.partial(run, problem=problem_of(sizes), config=config)
    results = []
    for value in (1.0, np.inf):
        arrays["q"][0, 5, :, 3] = value
        with mosaic.interpret():
            results.append(jax.jit(call)(AttentionInputs(**arrays)))
    for finite, infinite in zip(*results, strict=True):
        axis = 1 if finite.ndim == 4 else 2
        np.testing.assert_array_equal(
            *(np.delete(np.asarray(x), 5, axis) for x in (finite, infinite))
        )


@pytest.mark.guards
@pytest.mark.parametrize("sizes", [case(70, 100, 64), case192(70, 100)], ids=["h64", "h192"])
def test_by_name(sizes):
    """The public call and its gradients, by the kernels of that name."""
    arguments = dataclasses.replace(sizes, mask=CAUSAL).arguments()
    q, k, v = (arguments.pop(name) for name in "qkv")
    call = functools.partial(pa.flash_attention, **arguments, implementation="sm100")
    with device.assume("sm100"), mosaic.interpret(), pa.chosen() as names:
        out, pullback = jax.vjp(call, q, k, v)
        got = pullback(jnp.ones_like(out))
    assert names == ["sm100", "sm100"]
    want = jax.vjp(functools.partial(pa.flash_attention, **arguments), q, k, v)[1]
    for x, y in zip(got, want(jnp.ones_like(out)), strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()


@pytest.mark.parametrize("gpu", ["sm90", "sm100", "sm103"])
def test_nobody_gets_it_unasked(gpu):
    problem = dataclasses.replace(problem_of(case(1024, 1024)), gpu=gpu)
    for op in ("flash_forward", "flash_backward"):
        chosen = dispatch.select(dataclasses.replace(problem, op=op), None)
        assert chosen.implementation == ("sm90" if gpu == "sm90" else "sm80")
    if gpu == "sm90":
        with pytest.raises(pa.UnsupportedError, match="it is built for sm100 to sm103"):
            dispatch.select(problem, "sm100")
    else:
        assert dispatch.select(problem, "sm100").module == "flash_fwd.sm100"


REFUSED = {
    "it takes bfloat16 and float16, not float32": {"dtype": "float32"},
    "it takes v in the head dim of q and k, one of 64, 96, 128, or 192 and 128, not 192 and 96": {
        "head_dim": 192,
        "v_head_dim": 96,
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason):
    limit = kernel.limit(dataclasses.replace(problem_of(case(1024, 1024)), **REFUSED[reason]))
    assert limit.reason == reason and limit.remedy == 'leave implementation=None, or say "sm80"'


@pytest.mark.parametrize("q_tiles", kernel.REGISTERS)
def test_what_the_interpreter_does_not_see(q_tiles):
    """Registers are no more than a block has, and barriers at which tensor memory changes hands
    ask for the fences of tcgen05.
    """
    registers = kernel.registers_of(q_tiles)
    assert sum(registers) * lang.THREADS <= 65536 and len(registers) == q_tiles + 2
    memory = kernel.scratch(kernel.plan_of(problem_of(case(512, 512)), kernel.Config(q_tiles)))
    ordered = {name for name in memory._fields if getattr(memory, name, None) is not None}
    ordered = {n for n in ordered if getattr(getattr(memory, n), "orders_tensor_core", False)}
    assert ordered == {"k_free", "v_free", "s_ready", "p_ready", "o_ready", "o_scaled"}


@pytest.mark.parametrize("sizes", [case(512, 512), case192(512, 512), case192(128, 512)])
def test_memory(sizes):
    """A block's shared memory and columns of tensor memory are enough for the default."""
    problem = problem_of(sizes)
    config = kernel.Config.default(problem)
    assert kernel.smem_bytes(problem, config) <= 232_448
    assert config.q_tiles * (config.block_kv + sizes.v_head_dim) <= 512


def test_kv_tiles_of_128_keys_are_too_large_for_head_dim_192():
    assert kernel.smem_bytes(problem_of(case192(512, 512)), kernel.Config()) > 232_448


def test_registers_that_a_block_does_not_have():
    with pytest.raises(AssertionError):
        lang.take_roles(jnp.int32(0), [lambda: None] * 4, (184, 184, 88, 64))


def test_exponentials_by_a_polynomial():
    x = np.linspace(-130, 8, 100_001, dtype=np.float32)
    got = np.asarray(jax.jit(kernel.exp2_by_polynomial)(x), np.float64)
    want = np.exp2(np.maximum(x, -125).astype(np.float64))
    assert np.abs(got / want - 1).max() < 4e-7
    assert np.isnan(kernel.exp2_by_polynomial(jnp.float32(np.nan)))


def compiled(sizes: AttentionCase, target: str, config: kernel.Config | None = None):
    gpu = aot.GENERATIONS[target]
    problem = problem_of(dataclasses.replace(sizes, q_len=8, kv_len=8))
    facts = {"gpu": gpu, "q_len": sizes.q_len, "kv_len": sizes.kv_len}
    problem = dataclasses.replace(problem, **facts)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(sizes.dtype))
    inputs = AttentionInputs(
        *(
            shape((sizes.batch, rows, heads, dim))
            for rows, heads, dim in (
                (sizes.q_len, sizes.q_heads, sizes.head_dim),
                (sizes.kv_len, sizes.kv_heads, sizes.head_dim),
                (sizes.kv_len, sizes.kv_heads, sizes.v_head_dim),
            )
        )
    )
    config = config or kernel.Config.default(problem)
    call = functools.partial(run, problem=problem, config=config)
    return mosaic.compile_for(call, inputs, target=target, sass=True)


LONG = {"causal": case(8192, 8192, mask=CAUSAL, q_heads=8, kv_heads=2)}
LONG["h64"] = case(4096, 4096, 64, dtype="float16", q_heads=8)
LONG["h96"] = case(4096, 4096, 96, mask=CAUSAL, q_heads=8)
LONG["h192"] = case192(4096, 4096, mask=CAUSAL, q_heads=8)
SPILLS = 96  # bytes stored: scalars, and states of barriers


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "name, target, arch",
    [*((name, "b200", "sm_100a") for name in LONG), ("causal", "b300", "sm_103a")],
)
def test_machine_code(name, target, arch):
    report = compiled(LONG[name], target)
    assert (report.launches, report.others, report.copies) == (1, (), 0)
    assert f".target {arch}\n" in report.ptx
    assert report.registers <= 128 and report.spill_bytes <= SPILLS
    sizes = LONG[name]
    keys = kernel.Config.default(problem_of(sizes)).block_kv
    steps = 2 * sizes.head_dim + keys  # scores are twice in the code
    counts = {what: len(re.findall(rf"\b{what}\b", report.sass)) for what in ("UTCHMMA", "LDTM")}
    assert counts["UTCHMMA"] == 2 * steps // 16 and counts["LDTM"]
