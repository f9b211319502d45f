"""The backward kernels: right in the interpreter with their races watched, compiled ahead of
time with what they may spill, and, with `-m gpu`, right on the real thing over the whole argument
space, with gradients that arrive through out and through the lse.
"""

import dataclasses
import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import config as _config
from pallas_attn._call import dispatch, gpu_specs
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import tile_logits
from pallas_attn.kernels.attention.logits import LogitRules
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import (
    dbias,
    sm90_dbias,
    sm90_two_kernels,
    sm90_window,
)
from pallas_attn.kernels.flash_bwd import sm80 as flash_bwd_sm80
from pallas_attn.kernels.flash_bwd import sm90 as kernel
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.kernels.flash_bwd.plan import is_wide
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.kernels.flash_fwd.test_flash_fwd import (
    COMPILED,
    arguments_of,
    case_named,
    in_turns,
    shape_of,
    small,
)
from tests.kernels.flash_fwd.test_flash_fwd import problem_of as forward_problem_of
from tests.support import aot, budget, mosaic
from tests.support.problems import cases

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SMALL, APART = kernel.Config(grid=3), sm90_two_kernels.Config(grid=3)
PORTABLE = flash_bwd_sm80.Config
WIDE = PORTABLE(warp_rows=2, warpgroups=2, do_stages=2)


def problem_of(case: cases.AttentionCase, **changes) -> AttentionProblem:
    return dataclasses.replace(forward_problem_of(case), op="flash_backward", **changes)


def default_of(problem: AttentionProblem):
    """The Config of the Hopper kernel that a problem gets."""
    return _config.default(dispatch.select(problem, "sm90").kernel, problem)


@functools.lru_cache(maxsize=8)  # neighbours run one case with several Configs
def expected_of(
    case: cases.AttentionCase, seed: int
) -> tuple[jax.Array, jax.Array, budget.Expected]:
    """Cotangents of out and lse, and the results for them."""
    rng = np.random.default_rng(seed)
    shape = (case.batch, case.q_heads, case.q_len)
    do = case.cotangent(seed + 1)
    dlse = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    how = {"tensor_cores": True, "handed": True}
    return do, dlse, budget.attention(case.arguments(seed), do, dlse, **how)


def residuals_of(case: cases.AttentionCase, seed: int = 0) -> tuple[tuple, budget.Expected]:
    """The inputs of the kernel, NaN past every length, and its expected results. out is the naive
    one, and so is lse unless all is float32: the forward kernel is not needed here.
    """
    do, dlse, expected = expected_of(case, seed)
    inputs = AttentionInputs(**arguments_of(case, seed, poison=True))
    out = jnp.asarray(expected.naive["out"]).astype(case.dtype)
    lse = jnp.asarray(expected.lse, jnp.float32)
    if case.q_lengths is not None:
        live = np.arange(case.q_len)[None] < np.array(case.q_lengths)[:, None]
        do = jnp.where(live[..., None, None], do, jnp.nan).astype(do.dtype)
    return (inputs, out, lse, do, dlse), expected


def run(residuals, *, problem, config):
    """By the kernel whose configuration it is."""
    return sys.modules[type(config).__module__].run(residuals, problem, config)


def check(case, config=None, seed=0, **changes):
    """The kernel within its budget."""
    problem = problem_of(case, **changes)
    config = config or default_of(problem)
    residuals, expected = residuals_of(case, seed)
    got = jax.jit(functools.partial(run, problem=problem, config=config))(residuals)
    names = [name for name in ("q", "k", "v", "bias", "sinks") if name in arguments_of(case)]
    assert [name for name, x in got._asdict().items() if jax.tree.leaves(x)] == names
    for name in names:
        assert getattr(got, name).dtype == getattr(residuals[0], name).dtype
    budget.check({f"d{name}": getattr(got, name) for name in names}, expected)
    return got


INTERPRETED = {
    "t_equals_s": {"config": dataclasses.replace(SMALL, dq_lag=2)},
    "t_above_s": {"config": dataclasses.replace(SMALL, block_q=128)},
    "band": {"deterministic": True},
    "q_lengths": {"config": dataclasses.replace(SMALL, block_q=128)},
    "softcap": {"config": dataclasses.replace(SMALL, dq_lag=2)},
    "documents": {"config": dataclasses.replace(APART, dq_block_kv=128, dq_stages=3)},
    "everything": {"config": dataclasses.replace(SMALL, block_q=128)},
    "bias_float32": {},  # two query heads a kv head
    "dim72_24": {"config": dataclasses.replace(SMALL, stages=3, dq_lag=2)},
    "dim192_128": {},
    "bias_shared": {"deterministic": True},
    "padding": {"config": dataclasses.replace(SMALL, block_q=128)},
    "dim72_24_float32_highest": {"config": dataclasses.replace(APART, block_q=16, dq_block_kv=32)},
}


PORTABLE_INTERPRETED = {
    "dim264": {"config": PORTABLE(block_q=32, dq_block_kv=32, columns=64)},
    "dim72_320": {"config": PORTABLE(block_q=32, dq_block_kv=32, columns=64)},
    "documents": {"config": PORTABLE(kv_blocks=2, block_q=32, dq_block_kv=64)},
    "bias_by_row": {"config": WIDE},
    "padding_ragged": {"config": PORTABLE(block_q=32, dq_block_kv=32)},
    "strictly_causal": {"config": PORTABLE(block_q=32, warpgroups=2, parts=3)},
    "group7_kv1": {"config": PORTABLE(kv_blocks=2, block_q=32, parts=5)},
    "dim72_24": {"config": PORTABLE(block_q=16, dq_block_kv=16, dq_stages=1)},
    "dim72_24_float32_highest": {"config": PORTABLE(block_q=32, dq_block_kv=32, columns=32)},
    "bias_by_row_float32_highest": {"config": PORTABLE(block_q=32, dq_block_kv=32, columns=64)},
}


@pytest.mark.guards
@pytest.mark.parametrize(
    "name, changes", [*INTERPRETED.items(), *PORTABLE_INTERPRETED.items()], ids=str
)
def test_interpreted(name, changes):
    with mosaic.interpret():
        check(small(name), **changes)


@pytest.mark.guards
def test_keys_held_in_registers_interpreted():
    case = dataclasses.replace(
        case_named("kv_lengths_causal"), head_dim=128, v_head_dim=128, batch=1
    )
    with mosaic.interpret():
        check(
            dataclasses.replace(case, kv_lengths=(70,)),
            dataclasses.replace(SMALL, k_in_registers=True),
        )


@pytest.mark.guards
def test_one_stage_of_the_walk_of_a_bias_interpreted(monkeypatch):
    """Wide rows of float32 leave room for no more."""
    for name in ("SMEM_BYTES", "SMEM_LIMIT"):
        monkeypatch.setattr(sm90_dbias, name, 0)
    case = small("bias_float32")
    assert sm90_dbias.plan_of(problem_of(case)).config.stages == 1
    with mosaic.interpret():
        check(case)


def lengths_over_scores() -> cases.AttentionCase:
    """NaN past a length in what is read by row and by column, in tiles that lengths cut."""
    return dataclasses.replace(
        case_named("q_lengths"),
        name="lengths_over_scores",
        batch=2,
        q_lengths=(70, 129),
        kv_lengths=(110, 65),
        bias_shape=(2, 1, 130, 130),
        mask_shape=(1, 2, 130, 130),
        segments=(80, 50),
    )


@pytest.mark.guards
@pytest.mark.parametrize("config", [APART, PORTABLE()], ids=["sm90", "sm80"])
def test_past_a_length_nothing_is_read_interpreted(config):
    with mosaic.interpret():
        check(lengths_over_scores(), config)


def unmasked(dim: int, **changes) -> cases.AttentionCase:
    return dataclasses.replace(case_named(f"dim{dim}"), mask=FULL, **changes)


@pytest.mark.guards
def test_wide_without_a_mask_interpreted():
    with mosaic.interpret():
        check(unmasked(160, q_heads=1, kv_len=64))


@pytest.mark.guards
@pytest.mark.parametrize("rows", [64, 61], ids=["one_buffer", "panels"])
def test_wide_key_tiles_of_a_block_interpreted(rows):
    """Gradients of a tile of keys are stored by TMA from where the next tile's keys are loaded."""
    sizes = {"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": rows, "kv_len": 128}
    with mosaic.interpret():
        check(unmasked(160, **sizes), dataclasses.replace(APART, grid=1))


def windowed(window: int, rows: int, **changes) -> cases.AttentionCase:
    sizes = {"mask": sliding_window(window), "q_len": rows, "kv_len": rows}
    return dataclasses.replace(case_named("t_equals_s"), **sizes, **changes)


ONE = {"batch": 1, "q_heads": 1, "kv_heads": 1}


@pytest.mark.guards
@pytest.mark.parametrize(
    "case",
    [
        windowed(129, 135, **ONE, head_dim=40, v_head_dim=32, softcap=20.0, dtype="float16"),
        windowed(1, 135, **ONE, sinks=True),
    ],
    ids=["three_tiles", "one_tile"],
)
def test_short_windows_interpreted(case):
    assert isinstance(default_of(problem_of(case)), sm90_window.Config)
    with mosaic.interpret():
        check(case)


@pytest.mark.guards
@pytest.mark.parametrize("window", [129, 1])
def test_a_block_walks_over_a_window_interpreted(monkeypatch, window):
    """One block has all tiles, each in the place of one whose gradients TMA has stored."""
    monkeypatch.setattr(sm90_window, "BLOCKS", 1)
    with mosaic.interpret():
        check(windowed(window, 250, **ONE))


@pytest.mark.guards
def test_dq_of_many_keys_interpreted():
    """The sum of what 32 work tiles add to the same 64 rows, in float32."""
    sizes = {"q_len": 64, "kv_len": 4096, "mask": FULL, "head_dim": 64, "v_head_dim": 64}
    with mosaic.interpret():
        check(dataclasses.replace(case_named("t_equals_s"), **sizes, **ONE), SMALL)


# Their budgets prove nothing: gradients of a saturated softmax are what its rounding leaves.
VAGUE = ("saturated", "softcap_huge_logits")


@pytest.mark.guards
@pytest.mark.parametrize("dim", [72, 120])
def test_dq_that_is_no_whole_swizzle_lowers(dim):
    case = dataclasses.replace(case_named("t_equals_s"), head_dim=dim, v_head_dim=dim)
    problem = problem_of(case)
    config = kernel.Config.default(problem)
    shapes = jax.tree.map(shape_of, shapes_of(case))
    text = mosaic.lower_for_cuda(functools.partial(run, problem=problem, config=config), shapes)
    assert "mosaic_gpu" in text


def shapes_of(case):
    """Residuals of a case that may be large: of the dtypes and sizes that count."""
    out = jax.ShapeDtypeStruct(
        (case.batch, case.q_len, case.q_heads, case.v_head_dim), jnp.dtype(case.dtype)
    )
    lse = jax.ShapeDtypeStruct((case.batch, case.q_heads, case.q_len), jnp.float32)
    small = (
        dataclasses.replace(case, batch=1, q_len=8, kv_len=8) if "edge" not in case.tags else case
    )
    arrays = arguments_of(small)
    if small is not case:
        heads = {"q": case.q_heads, "k": case.kv_heads, "v": case.kv_heads}
        lengths = {"q": case.q_len, "k": case.kv_len, "v": case.kv_len}
        arrays = {
            name: jax.ShapeDtypeStruct(
                (case.batch, lengths[name], heads[name], x.shape[3]), x.dtype
            )
            for name, x in arrays.items()
        }
    return AttentionInputs(**arrays), out, lse, out, lse


SPILLED = {  # bytes, of each kernel, with either JAX
    "h64_full_b2_t8192_n32": 28,
    "h64_causal_b2_t8192_n32": 36,
    "h128_full_b2_t8192_n16": 96,
    "h128_causal_b2_t8192_n16": 108,
    "h128_causal_b2_t8192_n32k8": 132,
    "h256_full_b2_t8192_n8": 72,
    "h256_causal_b2_t8192_n8": 676,
    "f32_h64_causal_t2048": 0,
    "f32_h128_causal_t4096_highest": 732,
    "f32_h256_full_t2048": 208,
}


@pytest.mark.parametrize("name", ["block_q", "dq_block_kv"])
def test_narrow_tiles_of_two_kernels_are_for_float32(name):
    config = sm90_two_kernels.Config(**{name: 32})
    problem = problem_of(case_named("f32_h64_causal_t2048"))
    assert sm90_two_kernels.smem_bytes(problem, config) > 0
    with pytest.raises(
        ValueError, match=rf"^Config\.{name} must be at least 64 of 16-bit numbers, got 32$"
    ):
        sm90_two_kernels.smem_bytes(dataclasses.replace(problem, dtype="bfloat16"), config)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_serialised_matmuls(name):
    case = case_named(name)
    problem = problem_of(dataclasses.replace(case, batch=1, q_len=8, kv_len=8))
    problem = dataclasses.replace(problem, batch=case.batch, q_len=case.q_len, kv_len=case.kv_len)
    config = default_of(problem)
    call = functools.partial(run, problem=problem, config=config)
    report = mosaic.compile_for(call, shapes_of(case))
    by_rows = isinstance(config, kernel.Config) and config.block_q == 128
    one_launch = isinstance(config, sm90_window.Config)
    two_kernels = isinstance(config, sm90_two_kernels.Config) and case.dtype != "float32"
    assert report.launches == (3 if by_rows or two_kernels else 1 if one_launch else 2)
    for one_kernel in report.kernels:  # dq at head dim 256: addresses, between tiles of work
        wide_dq = is_wide(problem) and "dq" in one_kernel.name
        most = SPILLED.get(name, 1200 if wide_dq else 400)
        assert one_kernel.spill_bytes <= most


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "name, target", [("h128_full_b2_t8192_n16", "a100"), ("h256_full_b2_t8192_n8", "h100")]
)
def test_the_portable_kernel_compiles_for_every_gpu(name, target):
    case, gpu = case_named(name), aot.GENERATIONS[target]
    problem = problem_of(dataclasses.replace(case, batch=1, q_len=8, kv_len=8), gpu=gpu)
    problem = dataclasses.replace(problem, batch=case.batch, q_len=case.q_len, kv_len=case.kv_len)
    call = functools.partial(run, problem=problem, config=PORTABLE.default(problem))
    report = mosaic.compile_for(call, shapes_of(case), target=target)
    assert report.launches == 2  # one reads dq out
    assert report.spill_bytes <= 32  # dK and dV take 128 of 255 registers


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_wide_heads_compile_in_parts(op):
    call, arguments = call_of(small_problem(512, "bfloat16", None, op))
    report = mosaic.compile_for(call, arguments, target="sm86")
    assert report.launches == (2 if op == "forward" else 6)
    assert report.spill_bytes <= 200  # dK of 64 rows takes 128 of 255 registers


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("op, most", [("forward", 300), ("backward", 500)])
def test_what_comes_by_columns_compiles_for_the_smallest_gpus(op, most):
    """Spills that another card of the same registers would have too: nobody who wants speed has so
    little shared memory.
    """
    call, arguments = call_of(small_problem(256, "float32", "highest", op))
    report = mosaic.compile_for(call, arguments, target="sm86")
    assert report.launches == (1 if op == "forward" else 3)
    assert all(one_kernel.spill_bytes <= most for one_kernel in report.kernels)


def call_of(problem, config=None, bias_shape=None):
    """(the call, shapes of its arguments) of a problem whose q, k and v are alike but for heads."""
    module = flash_fwd_sm80 if problem.op == "flash_forward" else flash_bwd_sm80
    heads, rows, bias = (problem.q_heads, problem.kv_heads), problem.q_len, None
    q, k = (
        jax.ShapeDtypeStruct((1, rows, n, problem.head_dim), jnp.dtype(problem.dtype))
        for n in heads
    )
    lse = jax.ShapeDtypeStruct((1, problem.q_heads, rows), jnp.float32)
    if bias_shape is not None:
        problem = dataclasses.replace(problem, arrays=("bias",), bias_shape=bias_shape)
        bias = jax.ShapeDtypeStruct(bias_shape, jnp.float32)
    inputs = AttentionInputs(q, k, k, bias=bias)
    config = config or module.Config.default(problem)
    call = functools.partial(module.run, problem=problem, config=config)
    return call, inputs if module is flash_fwd_sm80 else (inputs, q, lse, q, lse)


def small_problem(dim, dtype, precision, op):
    """For a GPU with 99 KiB of shared memory a block."""
    facts = {"q_heads": 4, "kv_heads": 2, "head_dim": dim, "v_head_dim": dim, "q_len": 300}
    facts |= {"kv_len": 300, "dtype": dtype, "precision": precision, "op": f"flash_{op}"}
    return dataclasses.replace(problem_of(case_named("one_row"), gpu="sm86"), **facts, batch=1)


@pytest.mark.parametrize(
    "dtype, precision", [("float16", None), ("float32", None), ("float32", "highest")]
)
def test_the_smallest_gpus_take_all_head_dims(dtype, precision):
    for op, module in (("forward", flash_fwd_sm80), ("backward", flash_bwd_sm80)):
        for dim in (*range(8, 257, 8), 264, 320, 512):
            problem = small_problem(dim, dtype, precision, op)
            config = module.Config.default(problem)
            assert module.smem_bytes(problem, config) <= gpu_specs.shared_memory("sm86")
            assert module.limit(problem) is None


# ---- refusals ------------------------------------------------------------------------------------


def test_query_tiles_of_128_lag_one_step():
    with pytest.raises(ValueError, match=r"Config\.dq_lag must be 1, got 2"):
        kernel.Config(block_q=128, dq_lag=2)


def test_the_window_kernel_is_for_short_causal_windows():
    refused = sm90_window.limit(problem_of(case_named("h128_full_b2_t8192_n16")))
    assert refused and "causal windows of up to 129 keys" in str(refused)


# ---- the schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_spans_hold_what_the_mask_says(seed):
    """The query tiles of a key tile, against the dense mask."""
    rng = np.random.default_rng(seed)
    left, right = int(rng.integers(0, 90)), int(rng.integers(0, 90))
    mask = [FULL, CAUSAL, sliding_window(left + 1), Mask(left, right), Mask(right=-5)][seed % 5]
    rows, keys = int(rng.integers(1, 400)), int(rng.integers(1, 400))
    offset, kv_len = int(rng.integers(-100, 300)), int(rng.integers(0, keys + 1))
    case = dataclasses.replace(case_named("one_row"), q_len=rows, kv_len=keys, mask=mask)
    tiling = KeyTiling(problem_of(case), 128, 64)
    seen = np.zeros((tiling.padded_rows, tiling.padded_keys), bool)
    seen[:rows, :kv_len] = mask.dense(rows, kv_len, q_offset=offset)
    for first in range(0, keys, tiling.block_kv):
        rows_of_tiles = tiling.padded_rows
        span = tiling.q_span(mask, first, offset, rows_of_tiles, kv_len)
        traced = tiling.q_span(mask, jnp.int32(first), jnp.int32(offset), rows_of_tiles, kv_len)
        assert [int(x) for x in traced] == list(span)
        assert span.lo <= span.full_lo <= span.full_hi <= span.hi
        for t in range(tiling.q_tiles):
            tile = seen[t * 64 : min(t * 64 + 64, rows), first : first + tiling.block_kv]
            if tile.any():
                assert span.lo <= t < span.hi
            if span.full_lo <= t < span.full_hi:
                assert tile.all()


@pytest.mark.parametrize(
    "batch, shape",
    [
        (2, (2, 4, 130, 200)),
        (2, (1, 4, 1, 200)),
        (2, (2, 1, 130, 1)),
        (2, (1, 1, 1, 1)),
        (13, (1, 1, 1, 1)),  # chunks of three tiles of scores, the last ones past the end
    ],
)
def test_every_tile_of_scores_is_summed_once(batch, shape):
    """The walks of the kernel for dbias, all of them together."""
    problem = problem_of(dataclasses.replace(case_named("bias"), bias_shape=shape))
    plan = sm90_dbias.plan_of(dataclasses.replace(problem, batch=batch))
    walk, refs = dbias.walk_of(plan), BackwardRefs(*[None] * 4)
    tiles, steps = np.prod(walk.bias_tiles), walk.chunks * walk.steps
    tile, n = (jnp.asarray(x.ravel(), jnp.int32) for x in np.mgrid[:tiles, :steps])
    step = jax.vmap(functools.partial(dbias.bias_step, KernelContext(plan, refs), walk))(tile, n)
    where = np.stack([np.asarray(x) for x in step[:4]], axis=1)[np.asarray(step.live)]
    rows, keys = plan.tiling.tile_rows, plan.config.block_kv
    wanted = np.ndindex(batch, 4, -(-130 // rows), -(-200 // keys))
    assert sorted(where.tolist()) == sorted([b, h, q * rows, k * keys] for b, h, q, k in wanted)


# ---- on the GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [case for case in in_turns(1, 2) if not case.name.startswith(VAGUE)],
    ids=lambda case: case.name,
)
def test_float32_on_the_gpu(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [160, 192, 256])
def test_wide_without_a_mask_on_the_gpu(dim):
    check(unmasked(dim, batch=2, q_len=700, kv_len=600, q_heads=6))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        windowed(128, 1100),
        windowed(128, 300, batch=5, q_heads=60, kv_heads=60),  # longer walks
        windowed(100, 190, sinks=True),
        windowed(64, 321, batch=20, q_heads=16, kv_heads=16, dtype="float16"),
        windowed(129, 255, head_dim=40, v_head_dim=64, softcap=30.0),
        windowed(90, 500, head_dim=24, v_head_dim=8),
        windowed(2, 190, scale=-0.1),
    ],
    ids=lambda case: f"{case.mask}_{case.q_len}",
)
def test_short_windows_on_the_gpu(case):
    assert isinstance(default_of(problem_of(case)), sm90_window.Config)
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["h64_causal_b2_t8192_n32", "h256_causal_b8_t2048_n8"])
def test_same_bits_twice(name):
    case = case_named(name)
    arrays, do = case.arrays(), case.cotangent()

    @jax.jit
    def gradients(arrays):
        def attend(arrays):
            return pa.flash_attention(**arrays, mask=case.mask, deterministic=True)

        return jax.vjp(attend, arrays)[1](do)

    first = jax.tree.map(np.asarray, gradients(arrays))
    for _ in range(3):
        again = jax.tree.map(np.asarray, gradients(arrays))
        jax.tree.map(np.testing.assert_array_equal, again, first)


def test_no_probability_is_above_1_whatever_a_bias_rounds_to():
    problem = types.SimpleNamespace(arrays=("bias",))
    plan = types.SimpleNamespace(problem=problem, logit_rules=LogitRules(unit=None, adds=True))
    numbers = jnp.asarray([128.0, 0.0, -1.0, -np.inf, np.nan])
    result = tile_logits.exponentials(plan, numbers - 1e3, jnp.full(5, -1e3))
    np.testing.assert_array_equal(result, [1.0, 1.0, 0.5, 0.0, np.nan])
