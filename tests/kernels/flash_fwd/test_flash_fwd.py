"""The forward kernels: right in the interpreter with their races watched, compiled without spills
ahead of time, and, with `-m gpu`, right on the real thing over the whole argument space.

tests/api/test_attention.py asks every implementation what attention means. Here is what only these
have: configurations, schedules, and what TMA and registers make of awkward sizes.
"""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn._call import dispatch
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import segment_spans, tile_scheduler, tma_operands
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, mask_span
from pallas_attn.kernels.flash_fwd import documents, segments
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.flash_fwd import sm90 as kernel
from pallas_attn.kernels.lang.mosaic import SMEM_LIMIT
from pallas_attn.kernels.mma import mma_sync, wgmma, wgmma_float32
from pallas_attn.masks import CAUSAL, FULL, SIDES, Mask, sliding_window
from tests.support import aot, budget, mosaic
from tests.support.problems import cases

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SMALL = kernel.Config(warpgroups=2, block_kv=64, stages=2, grid=3)
PORTABLE = flash_fwd_sm80.Config
SEGMENTS = ("q_segment_ids", "kv_segment_ids")


@functools.cache
def problem_of(case: cases.AttentionCase) -> AttentionProblem:
    there = dict.fromkeys(SEGMENTS, case.segments) | {
        "q_offset": None if isinstance(case.q_offset, int) else case.q_offset,
        **{name: getattr(case, name) for name in ("q_lengths", "kv_lengths")},
        **{"bias": case.bias_shape, "mask_array": case.mask_shape, "sinks": case.sinks or None},
    }
    if case.dtype.startswith("float8"):
        there |= {f"{name}_scale": case.scale_rows for name in "qkv"}
    if case.mask_at_run_time:
        there |= {f"mask_{side}": getattr(case.mask, side) for side in SIDES}
    arrays = [name for name in AttentionInputs._fields if there.get(name) is not None]
    return AttentionProblem(
        op="flash_forward",
        gpu="sm90",
        dtype=case.dtype,
        batch=case.batch,
        q_len=case.q_len,
        kv_len=case.kv_len,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        mask=case.arrays()["mask"].static if case.mask_at_run_time else case.mask,
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        softcap=case.softcap,
        q_offset=case.q_offset if isinstance(case.q_offset, int) else 0,
        arrays=tuple(arrays),
        bias_shape=case.bias_shape,
        bias_dtype=case.bias_dtype,
        mask_shape=case.mask_shape,
        precision=case.precision,
    )


def arguments_of(case: cases.AttentionCase, seed: int = 0, poison: bool = False) -> dict:
    arrays = case.arrays(seed, poison=poison)
    if (ids := arrays.pop("segment_ids", None)) is not None:
        arrays["q_segment_ids"], arrays["kv_segment_ids"] = ids
    if (mask := arrays.pop("mask", None)) is not None:
        bounds = mask.arrays.items()
        arrays |= {f"mask_{side}": jnp.broadcast_to(x, case.batch) for side, x in bounds}
    return arrays


def run(inputs, *, problem, config):
    """By the kernel whose configuration it is."""
    return sys.modules[type(config).__module__].run(inputs, problem, config)


def output(inputs, *, problem, config):
    """Without the log-sum-exp."""
    return run(inputs, problem=problem, config=config)[0]


@functools.lru_cache(maxsize=8)  # neighbours run one case with several Configs
def expected_of(case: cases.AttentionCase, seed: int) -> budget.Expected:
    return budget.attention(case.arguments(seed), tensor_cores=True)


def check(case, config, seed=0):
    """The kernel within its budget, with NaN past every length."""
    call = jax.jit(functools.partial(run, problem=problem_of(case), config=config))
    out, lse = call(AttentionInputs(**arguments_of(case, seed, poison=True)))
    budget.check({"out": out, "lse": lse}, expected_of(case, seed))


def in_float32(case: cases.AttentionCase, precision: str | None) -> cases.AttentionCase:
    name = "_".join(filter(None, (case.name, "float32", precision)))
    return dataclasses.replace(
        case, name=name, dtype="float32", bias_dtype="float32", precision=precision
    )


def case_named(name: str) -> cases.AttentionCase:
    (case,) = (case for case in (*cases.ATTENTION, *FLOAT32) if case.name == name)
    return case


OF_EIGHT = (0, 1, 4, 7)  # rows of a batch whose lengths are both sides of a tile's edge


def small(name: str) -> cases.AttentionCase:
    """A named problem for the interpreter, whose time is that of its tiles: of batch rows that are
    alike the first, four of eight that differ, and half the heads where there are two groups.
    """
    case = case_named(name)
    rows = {}
    for field in ("q_offset", "q_lengths", "kv_lengths", "shown_keys"):
        if isinstance(value := getattr(case, field), tuple):
            rows[field] = tuple(value[n] for n in OF_EIGHT) if len(value) == 8 else value
    batch = max(map(len, rows.values()), default=1)
    groups = 1 if case.q_heads == 4 or case.batch == 8 else case.kv_heads
    heads = (4, 2) if case.q_heads == 8 else (case.q_heads // case.kv_heads * groups, groups)
    for field in ("bias_shape", "mask_shape"):
        if (shape := getattr(case, field)) is not None:
            rows[field] = (min(shape[0], batch), min(shape[1], heads[0]), *shape[2:])
    return dataclasses.replace(case, batch=batch, q_heads=heads[0], kv_heads=heads[1], **rows)


INTERPRETED = {
    "t_equals_s": SMALL,  # a block with several work tiles, T and S no multiple of anything
    "t_above_s": kernel.Config(warpgroups=3, block_kv=64, stages=2, grid=0),  # rows past T alone
    # Masked tiles on both sides.
    "band": dataclasses.replace(SMALL, stages=4, l2_heads=1),
    "window_t_above_s": dataclasses.replace(SMALL, warpgroups=3),  # warpgroups without a key
    "everything": SMALL,
    "documents": SMALL,
    "documents_unseen": dataclasses.replace(SMALL, warpgroups=3),  # with whole blocks
    "dim72_24": dataclasses.replace(SMALL, warpgroups=1),
    "bias_shared": SMALL,  # tiles of a bias by TMA, over the ends of T and S
    "mask_array_by_row": dataclasses.replace(SMALL, block_kv=128),
    # Hidden, whole and cut kv tiles, a batch row that sees all, a warpgroup of rows past T.
    "padding": dataclasses.replace(SMALL, warpgroups=4),
    "everything_float32": SMALL,
    "q_lengths_float32_highest": dataclasses.replace(SMALL, block_kv=32),
    "dim72_24_float32_highest": dataclasses.replace(SMALL, warpgroups=1, block_kv=16),
}


PORTABLE_INTERPRETED = {
    "dim264": PORTABLE(1, 32),  # values in two launches
    "dim72_320": PORTABLE(1, 16),
    "band": PORTABLE(block_kv=32, stages=3),
    "window_t_above_s": PORTABLE(row_blocks=1, block_kv=32, stages=2, q_in_registers=True),
    "everything": PORTABLE(row_blocks=1),
    "dim72_24": PORTABLE(row_blocks=2, block_kv=64),
    "float32_highest": PORTABLE(row_blocks=1, block_kv=32),
    "padding_ragged": PORTABLE(2, 64, 2),
    "dim72_24_float32_highest": PORTABLE(1, 32, columns=32),  # an odd number of parts
    "bias_by_row": PORTABLE(1, 64, columns_before_v=16),
}


@pytest.mark.guards
@pytest.mark.parametrize(
    "name, config", [*INTERPRETED.items(), *PORTABLE_INTERPRETED.items()], ids=str
)
def test_interpreted(name, config):
    with mosaic.interpret():
        check(small(name), config)


@pytest.mark.guards
def test_half_a_tile_of_keys_interpreted():
    """192 keys are whole tiles of 64 and not of 128."""
    sizes = {"q_len": 64, "kv_len": 192, "batch": 1, "q_heads": 1, "kv_heads": 1}
    case = dataclasses.replace(case_named("t_equals_s"), mask=FULL, **sizes)
    with mosaic.interpret():
        check(case, dataclasses.replace(SMALL, warpgroups=1, block_kv=128))


@pytest.mark.guards
@pytest.mark.parametrize(
    "name, dims, rows, config",
    [
        ("t_equals_s", (24, 40), (77, 49), dataclasses.replace(SMALL, block_kv=56)),
        ("t_equals_s", (88, 136), (13, 77), dataclasses.replace(SMALL, warpgroups=1, block_kv=40)),
        ("kv_lengths_causal", (64, 64), None, dataclasses.replace(SMALL, block_kv=72)),
        ("bias_shared", (16, 16), None, dataclasses.replace(SMALL, warpgroups=1)),
    ],
    ids=str,
)
def test_any_size_interpreted(name, dims, rows, config):
    """No size is a multiple of anything, tiles are not of whole swizzles, NaN past lengths."""
    case = small(name)
    q_len, kv_len = rows or (case.q_len, case.kv_len)
    sizes = {"q_len": q_len, "kv_len": kv_len, "head_dim": dims[0], "v_head_dim": dims[1]}
    with mosaic.interpret():
        check(dataclasses.replace(case, **sizes), config)


@pytest.mark.guards
@pytest.mark.parametrize(
    "rows, keys, dims, changes, in_eights",
    [
        (13, 77, (64, 64), {}, 16),
        (130, 65, (40, 24), {}, 8),
        (70, 185, (72, 72), {"sinks": True, "softcap": 20.0}, 64),
        (130, 100, (64, 128), {"q_lengths": (0, 70, 130)}, 40),
        (70, 77, (64, 64), {"mask": CAUSAL, "q_offset": 7}, 64),
    ],
    ids=str,
)
def test_last_keys_in_eights_interpreted(rows, keys, dims, changes, in_eights):
    """The scores of the last kv tile are of the keys that exist; rows past T take only that."""
    case = dataclasses.replace(of_size(rows, keys, dims), batch=3, **changes)
    config = kernel.Config(2, 64, 3, grid=5)
    assert kernel.plan_of(problem_of(case), config).last_keys == in_eights
    with mosaic.interpret():
        check(case, config)


@pytest.mark.guards
def test_a_mask_of_few_columns_interpreted():
    """40 bytes of a row are no multiple of what TMA swizzles, so threads load them."""
    case = dataclasses.replace(of_size(64, 80, (64, 64)), mask_shape=(1, 1, 64, 80))
    with mosaic.interpret():
        check(case, dataclasses.replace(SMALL, warpgroups=1, block_kv=40))


def plan_of(name, config):
    return kernel.plan_of(problem_of(case_named(name)), config)


EDGE = [
    case
    for case in cases.ATTENTION
    if "edge" in case.tags and case.batch * case.q_len * case.kv_len and "wide" not in case.labels
]
FLOAT32 = [
    in_float32(case, precision)
    for case in EDGE
    if case.dtype == "bfloat16"
    for precision in (None, "highest")
]


def shape_of(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


GRID = [case for case in cases.ATTENTION if "grid" in case.tags]
IN_FLOAT32 = [
    "f32_h64_causal_t2048",
    "f32_h128_causal_t4096_highest",
    "f32_h256_full_t2048",
    "f32_h256_full_t2048_highest",
]
COMPILED = [case.name for case in GRID if case.q_len == 8192] + [
    *IN_FLOAT32,
    "h64_window128_t8192",
    "h80_causal_t4096",
    "h96_causal_t4096",
    "h192_hv128_causal_t4096",
    "h128_causal_t3000_n28k4",
]


def compiled(name, target="h100", chooser=kernel.Config):
    """(the case, the configuration, what became of it)"""
    return compiled_case(case_named(name), target, chooser)


def compiled_case(case, target="h100", chooser=kernel.Config, of=run):
    problem = problem_of(dataclasses.replace(case, batch=1, q_len=8, kv_len=8))
    sizes = {"batch": case.batch, "q_len": case.q_len, "kv_len": case.kv_len}
    gpu = aot.GENERATIONS.get(target, target)
    problem = dataclasses.replace(problem, gpu=gpu, **sizes)
    sizes = {
        "q": (case.batch, case.q_len, case.q_heads, case.head_dim),
        "k": (case.batch, case.kv_len, case.kv_heads, case.head_dim),
        "v": (case.batch, case.kv_len, case.kv_heads, case.v_head_dim),
    }
    inputs = AttentionInputs(
        **{name: jax.ShapeDtypeStruct(size, jnp.dtype(case.dtype)) for name, size in sizes.items()}
    )
    config = chooser.default(problem)
    call = functools.partial(of, problem=problem, config=config)
    return case, config, mosaic.compile_for(call, inputs, target=target)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "rows, dim, dtype",
    [
        *((197, 64, dtype) for dtype in ("bfloat16", "float16")),
        *((577, 40, "bfloat16"), (729, 72, "float16"), (1500, 88, "bfloat16")),
        *((49, 24, "float16"), (77, 104, "bfloat16")),
    ],
)
def test_any_size_without_copies(rows, dim, dtype):
    _, _, report = compiled_case(of_size(rows, rows, (dim, dim), dtype=dtype))
    assert (report.launches, report.others, report.spill_bytes) == (1, (), 0)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("target", ["a100", "sm89"])
@pytest.mark.parametrize("rows, dim", [(197, 40), (577, 72)])
def test_any_size_without_copies_by_portable_kernels(rows, dim, target):
    case = of_size(rows, rows, (dim, dim))
    _, _, report = compiled_case(case, target, PORTABLE)
    assert (report.launches, report.others, report.spill_bytes) == (1, (), 0)


# At the highest precision 64 keys with spills are faster than 32 without. Bytes, with either JAX.
SPILLED = {"f32_h128_causal_t4096_highest": 112, "f32_h256_full_t2048_highest": 72}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills_or_serialised_matmuls(name):
    _, _, report = compiled(name)
    assert report.launches == 1
    assert report.copies == 0
    assert report.spill_bytes <= SPILLED.get(name, 0)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "name, target",
    [
        ("h128_causal_b2_t8192_n16", "h100"),
        ("h64_causal_b2_t8192_n32", "a100"),
        ("h256_full_b2_t8192_n8", "sm89"),
        ("h256_full_b2_t8192_n8", "h100"),
        ("h256_causal_b2_t8192_n8", "h100"),
        ("h128_causal_b2_t8192_n16", "b200"),
        ("f32_h128_full_t2048", "b200"),
    ],
)
def test_the_portable_kernel_compiles_for_every_gpu(name, target):
    _, _, report = compiled(name, target, PORTABLE)
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_float32_is_the_sum_of_its_parts(parts):
    x = np.random.default_rng(0).standard_normal((2, 3, 1, 16)).astype(np.float32)
    x.flat[:4] = np.inf, -np.inf, np.nan, np.finfo(np.float32).max
    pieces = np.asarray(mma_sync.split(jnp.asarray(x), parts), np.float64)
    got = pieces.reshape(2, 3, 1, parts, 16).sum(3)
    live = np.abs(x) < 1e30
    np.testing.assert_allclose(got[live], x[live], rtol=2.0 ** (-8 * parts), atol=0)
    np.testing.assert_array_equal(got.flat[:3], x.flat[:3])


@pytest.mark.parametrize("count", [1, 2])
def test_float32_is_a_power_of_two_times_its_terms(rng, count):
    x = rng.standard_normal((2, 30, 4, 16)).astype(np.float32)
    x[:, :, 2:] *= 1e-20  # another kv head's numbers do not count
    x[0, 20:] = 1e30  # nor does what lies past a length
    odd = np.inf, -np.inf, np.nan
    x[1, 0, 0, :3] = odd
    power = wgmma_float32.power_of_two(
        wgmma_float32.largest(jnp.asarray(x), 2, jnp.asarray([20, 30]))
    )
    live = np.ones(x.shape, bool)
    live[0, 20:], live[1, 0, 0, :3] = False, False
    split = wgmma_float32.split(jnp.asarray(x), power, wgmma.Kind("float16", count), 24)
    pieces = np.asarray(split, np.float64).reshape(*x.shape[:3], count, 24)
    np.testing.assert_array_equal(pieces[1, 0, 0, -1, :3], odd)
    assert not pieces[..., 16:].any() and not pieces[1, 0, 0, :-1, :3].any()
    size = np.abs(np.where(live, pieces[..., 0, :16], 0)).max(axis=(1, 3)).reshape(2, 2, 2).max(2)
    assert np.all(
        (size >= 2.0**wgmma_float32.EXPONENT) & (size <= 2.0 ** (wgmma_float32.EXPONENT + 1))
    )
    pieces = np.where(live[..., None, :], pieces[..., :16], 0)
    got = pieces.sum(3) * np.repeat(np.asarray(power), 2, axis=1)[:, None, :, None]
    largest = np.abs(np.where(live, x, 0)).max(axis=(1, 3)).reshape(2, 2, 2).max(2)
    lost = np.repeat(largest, 2, axis=1)[:, None, :, None] * 2.0**-39
    off = np.abs(np.where(live, got - x, 0))
    assert np.all(off <= np.where(live, np.abs(x), 0) * 2.0 ** (1 - 12 * count) + lost)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_all_head_dims_of_float32_are_hoppers(precision):
    """Forward and backward have scores of the same bits."""
    problem = problem_of(case_named("one_row"))
    facts = {"dtype": "float32", "precision": precision, "q_len": 2048, "kv_len": 2048}
    for dim in range(8, 257, 8):
        sizes = {"head_dim": dim, "v_head_dim": dim, **facts}
        for op in ("forward", "backward"):
            some = dataclasses.replace(problem, op=f"flash_{op}", **sizes)
            chosen = dispatch.select(some, None)
            assert chosen.implementation == "sm90"
            need = chosen.kernel.smem_bytes(some, chosen.kernel.config.default(some))
            assert need <= SMEM_LIMIT


# ---- the schedule -------------------------------------------------------------------------------


def test_every_work_tile_is_assigned_once():
    rng = np.random.default_rng(0)
    for pieces, hands in ((1, 1), (7, 7), (100, 8), (1000, 132)):
        costs = np.sort(rng.uniform(1, 30, pieces))[::-1]
        table = tile_scheduler.assign(np.arange(pieces), costs, hands)
        assigned = [row[1 : 1 + row[0]] for row in table]
        np.testing.assert_array_equal(np.sort(np.concatenate(assigned)), np.arange(pieces))
        loads = [costs[pieces].sum() for pieces in assigned]
        assert max(loads) <= costs.sum() / hands + costs.max()
        assert table.shape[1] >= 2 + table[:, 0].max()  # a block reads one ahead


@pytest.mark.parametrize("seed", range(20))
def test_spans_hold_what_the_mask_says(seed):
    rng = np.random.default_rng(seed)
    left, right = int(rng.integers(0, 90)), int(rng.integers(0, 90))
    mask = [FULL, CAUSAL, sliding_window(left + 1), Mask(left, right), Mask(right=-5)][seed % 5]
    block, rows, kv_len = int(rng.choice((16, 64))), 64, int(rng.integers(1, 400))
    start = int(rng.integers(-100, 400))
    span = mask_span(mask, start, rows, kv_len, block)
    tiles = -(-kv_len // block)
    seen = np.zeros((rows, tiles * block), bool)
    seen[:, :kv_len] = mask.dense(rows, kv_len, q_offset=start)
    seen = seen.reshape(rows, tiles, block)
    for t in range(tiles):
        if seen[:, t].any():
            assert span.lo <= t < span.hi
        if span.full_lo <= t < span.full_hi and span.lo <= t < span.hi:
            assert seen[:, t].all()


def test_documents_are_assigned_once_and_evenly():
    """By what the segment ids leave of each work tile, which is known on the device alone."""
    sizes = {"q_len": 8192, "kv_len": 8192, "q_heads": 16, "kv_heads": 16, "batch": 1}
    small = problem_of(case_named("t_equals_s"))
    problem = dataclasses.replace(small, mask=CAUSAL, arrays=SEGMENTS, head_dim=128, **sizes)
    plan = QueryPlan.of(problem, kernel.Config(), (132, 0))
    ids = jnp.repeat(jnp.arange(8, dtype=jnp.int32), 1024)[None]
    result = segment_spans.segment_spans(ids, ids, (ROWS, plan.config.block_kv))
    table = np.asarray(documents.schedule_by_rank(plan, result))
    assigned = [row[1 : 1 + row[0]] for row in table]
    tiles = (np.arange(16)[:, None] << plan.code_bits) + np.arange(plan.tiling.q_tiles)
    np.testing.assert_array_equal(np.sort(np.concatenate(assigned)), tiles.ravel())
    # A tile of 128 rows needs the kv tiles of its document up to its own.
    loads = [(codes % 8 + 1 + tile_scheduler.TILE_OVERHEAD).sum() for codes in assigned]
    assert max(loads) <= 1.1 * np.mean(loads), (max(loads), np.mean(loads))


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize(
    "sizes, config, mask",
    [
        ((2, 260, 200, 3), SMALL, CAUSAL),
        ((1, 130, 1000, 2), kernel.Config(3, 32, 2, 0, 0), FULL),
        ((2, 700, 700, 40), kernel.Config(1, 16, 2, 0, 7), sliding_window(100)),
    ],
    ids=str,
)
def test_segments_are_prepared_as_jax_numpy_says(sizes, config, mask, where):
    """Ids of packed documents, and ids in no order at all."""
    batch, q_len, kv_len, heads = sizes
    changes = {"q_len": q_len, "kv_len": kv_len, "q_heads": heads, "kv_heads": heads}
    problem = dataclasses.replace(
        problem_of(case_named("t_equals_s")), batch=batch, mask=mask, arrays=SEGMENTS, **changes
    )
    plan = kernel.plan_of(problem, config)
    rng = np.random.default_rng(q_len)
    arguments = [
        rng.integers(-(2**31), 2**31 - 1, 5)[rng.integers(0, 5, (batch, n))] for n in sizes[1:3]
    ]
    arguments[0][0], arguments[1][0] = np.arange(q_len) // 50, np.arange(kv_len) // 70
    ids = [jnp.asarray(x, jnp.int32) for x in arguments]
    bounds = documents.mask_bounds(plan)
    with where():
        records, codes = jax.jit(functools.partial(segments.prepare, plan, bounds))(*ids)
    lengths = plan.tiling.padded_rows, tma_operands.round_up(kv_len, config.block_kv)
    padded = map(tma_operands.extended, ids, lengths)
    want_records, want_codes = documents.by_xla(
        plan, None, dict(zip(SEGMENTS, padded, strict=True))
    )
    np.testing.assert_array_equal(records, want_records)
    np.testing.assert_array_equal(codes, want_codes)


def test_segments_of_long_rows_and_of_positions_are_left_to_xla():
    problem = dataclasses.replace(problem_of(case_named("t_equals_s")), arrays=SEGMENTS)

    def fits(rows, **changes):
        changed = dataclasses.replace(problem, q_len=rows, kv_len=rows, **changes)
        return segments.fits(kernel.plan_of(changed, kernel.Config(2, 128, 2)))

    assert fits(46_336) and not fits(46_464)  # 724 units by 362 kv tiles, and 726 by 363
    assert fits(256) and not fits(256, arrays=(*SEGMENTS, "q_positions"))


@pytest.mark.parametrize("seed", range(6))
def test_spans_of_segments(seed):
    rng = np.random.default_rng(seed)
    q_ids, kv_ids = rng.integers(0, 5, (2, 256)), rng.integers(0, 5, (2, 192))
    if seed % 2:
        q_ids, kv_ids = np.sort(q_ids), np.sort(kv_ids)
    result = np.asarray(
        segment_spans.segment_spans(jnp.asarray(q_ids), jnp.asarray(kv_ids), (64, 32))
    )
    same = q_ids.reshape(2, 4, 64, 1, 1) == kv_ids.reshape(2, 1, 1, 6, 32)
    for b, i, t in np.ndindex(2, 4, 6):
        lo, full_lo, full_hi, hi = result[b, :, i]
        if same[b, i, :, t].any():
            assert lo <= t < hi
        if full_lo <= t < full_hi:
            assert same[b, i, :, t].all()


def test_what_tma_would_clip_is_padded():
    assert [tma_operands.rows_in_tma(n) for n in (1, 8, 9, 130, 136)] == [1, 8, 16, 136, 136]
    assert [tma_operands.width_in_tma(n) for n in (8, 64, 72, 80, 200)] == [8, 64, 80, 80, 208]
    assert [tma_operands.width_in_smem(n) for n in (8, 32, 40, 72, 96, 192)] == [
        64,
        32,
        64,
        80,
        96,
        192,
    ]
    x = jnp.ones((1, 16, 2, 64))
    assert tma_operands.for_tma(x) is x


# ---- on the GPU ---------------------------------------------------------------------------------


# tests/api/test_cases.py has all of EDGE, both ways; here are those in 16 bits for which it chooses
# another kernel, and some to begin with (tests/support/gpu_cases.py).
ALONE = ("one_query_many_keys", "t_equals_s", "documents", "float16_causal", "float32_causal")
ALONE += ("float32_highest",)


def in_turns(turn: int, step: int = 1) -> list[cases.AttentionCase]:
    """FLOAT32: of each case (or each second) a precision, in turns; both of each head dimension.
    Masks and the rest are functions that all dtypes and precisions share.
    """
    pairs = list(itertools.batched(FLOAT32, 2))[::step]
    return [
        case
        for number, pair in enumerate(pairs)
        for case in (pair if "dims" in pair[0].labels else (pair[(number + turn) % 2],))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [*(case for case in EDGE if case.name in ALONE), *in_turns(0)],
    ids=lambda case: case.name,
)
def test_edges_on_the_gpu(case):
    check(case, kernel.Config.default(problem_of(case)))


def of_size(rows, keys, dims, mask=FULL, dtype="bfloat16", heads=(4, 2)):
    """A case whose sizes are no multiple of anything."""
    fields = {"q_len": rows, "kv_len": keys, "mask": mask, "dtype": dtype, "batch": 3}
    fields |= {"head_dim": dims[0], "v_head_dim": dims[1]}
    return dataclasses.replace(
        case_named("t_equals_s"), q_heads=heads[0], kv_heads=heads[1], **fields
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize(
    "rows, keys, dims",
    [
        (17, 17, (16, 24)),
        (49, 49, (32, 32)),
        (64, 64, (64, 64)),
        (77, 77, (64, 64)),
        (100, 100, (24, 32)),
        (197, 197, (72, 72)),
        (257, 77, (40, 40)),
        (300, 120, (80, 72)),
        (577, 577, (88, 88)),
        (16, 16, (40, 40)),
        (729, 333, (128, 104)),
        (1025, 1025, (136, 200)),
        (1500, 1500, (64, 64)),
    ],
)
def test_any_size_on_the_gpu(rows, keys, dims, mask, dtype):
    """Few heads, and as many as have consumers apart."""
    many = (192, 192) if rows <= 32 else (64, 64)
    for heads in ((4, 2), many) if rows <= 300 else ((4, 2),):
        case = of_size(rows, keys, dims, mask, dtype, heads)
        # Logits of a few units: a mean of all keys would be small beside the errors of first rows.
        case = dataclasses.replace(case, scale=0.25)
        check(case, kernel.Config.default(problem_of(case)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["h64_causal_b2_t8192_n32", "h128_causal_t3000_n28k4"])
def test_same_bits_twice(name):
    case = case_named(name)
    problem = problem_of(case)
    call = jax.jit(functools.partial(run, problem=problem, config=kernel.Config.default(problem)))
    inputs = AttentionInputs(**arguments_of(case))
    first = jax.tree.map(np.asarray, call(inputs))
    for _ in range(3):
        again = jax.tree.map(np.asarray, call(inputs))
        jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.gpu
def test_a_row_of_nan_leaves_the_others_alone():
    """Also the row eight above or below it, which is the same threads': keys grow from the last
    tile to the first, so that every row's maximum moves in every step.
    """
    case = dataclasses.replace(case_named("t_equals_s"), q_len=192, kv_len=512, mask=FULL)
    config = dataclasses.replace(SMALL, warpgroups=3)
    arrays = arguments_of(case)
    growth = jnp.linspace(30, 0, case.kv_len, dtype=jnp.float32).astype(case.dtype)
    arrays["k"] = arrays["k"] * growth[None, :, None, None]
    call = jax.jit(functools.partial(run, problem=problem_of(case), config=config))
    clean = [np.asarray(x, np.float32) for x in call(AttentionInputs(**arrays))]
    for row in (0, 9, 100, 191):
        arrays["q"] = arrays["q"].at[:, row].set(jnp.nan)
    out, lse = (np.asarray(x, np.float32) for x in call(AttentionInputs(**arrays)))
    others = np.setdiff1d(np.arange(case.q_len), (0, 9, 100, 191))
    np.testing.assert_array_equal(out[:, others], clean[0][:, others])
    np.testing.assert_array_equal(lse[..., others], clean[1][..., others])
    assert np.isnan(np.delete(out, others, axis=1)).all()
