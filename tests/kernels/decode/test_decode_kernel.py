"""The Hopper decode kernel: right in the interpreter with its races watched, compiled without
spills ahead of time, and, with `-m gpu`, right on the real thing over the whole argument space.

tests/caches/test_decode.py asks every implementation what decoding means. Here is what only this
one has: how work is dealt, how parts are merged, its limits, and how long many arrays take to
lower.
"""

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import FULL, Mask, sliding_window
from pallas_attn._call import config as _config
from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import DecodeProblem
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode import sm80 as decode_sm80
from pallas_attn.kernels.decode import sm90 as kernel
from pallas_attn.kernels.decode.plan import ZERO_BYTES
from pallas_attn.kernels.decode.sm90 import plan_of
from tests.support import mosaic
from tests.support.decode_cases import (
    KINDS,
    Case,
    check,
    close,
    every_kind,
    launched,
    of_definition,
    run,
    shapes_of,
    turns,
)

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

# ---- in the interpreter --------------------------------------------------------------------------

SMALL = kernel.Config(stages=2, grid=3)
MANY = dataclasses.replace(SMALL, many_heads=True, head_overhead=32, load_first=True)
# A function of every argument, and of an array. Some rows see nothing.
SOME = pallas_attn.mask_fn(
    lambda b, h, q, kv, table: table[h, q - kv] & ((b + kv) % 5 < 3),
    np.random.default_rng(0).random((8, 150)) < 0.3,
)
ALIBI = lambda b, h, q, kv, m: -m[h] * (q - kv), 2.0 ** -np.linspace(1, 8, 128, dtype=np.float32)
OF_QUERIES = lambda b, h, q, kv, x: x[q % 4], np.arange(4, dtype=np.float32)
# Every argument adds something, by an array by distance and one by key; some keys are hidden.
ADDED = (
    lambda b, h, q, kv, t, x: t[h, (q - kv).clip(0, 149)] + x[b, kv],
    np.random.default_rng(0).standard_normal((24, 150)).astype(np.float32),
    np.where(np.random.default_rng(1).random((7, 256)) < 0.1, -np.inf, 0.25).astype(np.float32),
)
INTERPRETED = {
    "plain": (Case(), SMALL),
    "chunk_window": (
        Case(q_len=3, mask=sliding_window(37)),
        dataclasses.replace(MANY, stages=4, grid=7, head_overhead=80),
    ),
    "full_softcap_sinks": (Case(q_len=2, mask=FULL, softcap=3.0, sinks=True), SMALL),
    "layers": (Case(layers=3), SMALL),
    "overflow": (
        Case(lengths=(5, 500, 7, 64, 0, 200, 225)), dataclasses.replace(MANY, stages=3, grid=17)
    ),
    "batch_invariant": (Case(batch_invariant=True), kernel.Config(stages=3, grid=4, split_tiles=2)),
    "group7_odd_dims": (
        Case(q_len=2, q_heads=7, kv_heads=1, head_dim=72, v_head_dim=40, dtype="float16"), SMALL
    ),
    "48_rows_wide_tile": (Case(q_heads=24, q_len=4), kernel.Config(tile=128, stages=3, grid=4)),
    "wider_tile_window": (
        Case(q_heads=8, kv_heads=1, mask=sliding_window(70)),
        dataclasses.replace(MANY, tile=256, grid=4),
    ),
    "72_rows": (Case(q_heads=16, q_len=9, page_size=4), MANY),
    "160_rows": (Case(q_heads=8, kv_heads=1, q_len=20, v_head_dim=128, page_size=24), SMALL),
    "float32_chunk_window": (
        Case(
            lengths=(7, 70), q_len=3, dtype="float32", precision="highest", mask=sliding_window(37)
        ),
        kernel.Config(tile=32, stages=3, grid=3),
    ),
    "float32_40_rows_odd_dims": (
        Case(
            lengths=(70,), q_heads=8, kv_heads=1, q_len=5, head_dim=72, v_head_dim=40,
            dtype="float32",
        ),
        SMALL,
    ),
    "tree": (Case(lengths=(70, 65, 68, 2), q_len=5, hides="tree"), MANY),
    "tree_float32": (
        Case(lengths=(3, 3, 66), q_len=33, q_heads=1, kv_heads=1, dtype="float32", hides="tree"),
        SMALL,
    ),
    "function_window": (
        Case(lengths=(65, 100), q_len=3, mask=sliding_window(37), hides=SOME), MANY
    ),
    "alibi": (Case(adds=ALIBI), MANY),
    "alibi_72_rows": (Case(q_heads=16, q_len=9, adds=ALIBI, softcap=3.0), SMALL),
    "scores_window": (
        Case(lengths=(65, 100), q_len=3, mask=sliding_window(37), sinks=True, adds=ADDED), SMALL
    ),
    "scores_float32": (Case(lengths=(5, 130), q_len=2, dtype="float32", adds=ADDED), SMALL),
    "scores_wide": (
        Case(lengths=(5, 70), head_dim=512, v_head_dim=512, q_len=2, adds=ALIBI),
        kernel.Config(tile=32, grid=3, stages=2),
    ),
    # Warps share out the columns.
    "wide": (
        Case(lengths=(5, 70), head_dim=512, v_head_dim=512),
        kernel.Config(tile=32, grid=3, stages=2),
    ),
    "wide_24_rows_odd_dims": (
        Case(lengths=(40,), q_heads=8, kv_heads=1, q_len=5, head_dim=264, v_head_dim=72),
        kernel.Config(tile=16, grid=2, stages=3),
    ),
    "wide_v_window": (
        Case(lengths=(45, 3), q_len=3, head_dim=72, v_head_dim=328, mask=sliding_window(20)),
        kernel.Config(tile=32, grid=3, stages=2, load_first=True),
    ),
    "scores_of_queries": (Case(lengths=(65, 3), q_len=2, adds=OF_QUERIES), SMALL),
}  # fmt: skip


# Caches differ in how their rows are found, and in nothing after that: what does not ask where a
# row lies takes turns among them.
OF_EVERY_KIND = ("plain", "layers", "overflow")


@pytest.mark.guards
@pytest.mark.parametrize("name, kind", turns(INTERPRETED, OF_EVERY_KIND))
def test_interpreted(name, kind):
    case, config = INTERPRETED[name]
    with mosaic.interpret():
        check(dataclasses.replace(case, kind=kind), config)


PORTABLE = decode_sm80.Config
SHORT = (5, 130, 64)
OF_THREADS = {  # cases that differ if threads copy: lookup of rows, and number of copies in flight
    "separate": (Case("per_sequence", SHORT, 3, mask=Mask(20, -2)), PORTABLE(stages=4, grid=5)),
    "pages": (
        Case("paged", SHORT, page_size=8, head_dim=72, v_head_dim=40), PORTABLE(stages=3, grid=3)
    ),
    "pages_of_one": (Case("paged", (5, 70), page_size=1, capacity=80), PORTABLE(stages=2, grid=2)),
    "one_stage_float32": (
        Case(lengths=(70, 5), q_len=3, kv_heads=1, head_dim=256, v_head_dim=128, dtype="float32"),
        PORTABLE(tile=32, stages=1, grid=3, load_first=True, q_rows=4),
    ),
    "tree": (Case("per_sequence", (2, 2, 70), 9, hides="tree"), PORTABLE(stages=2, grid=3)),
    "wide": (
        Case("paged", (5, 40), 3, page_size=8, head_dim=512, v_head_dim=264),
        PORTABLE(tile=16, stages=1, grid=2, load_first=True, q_rows=8),
    ),
}  # fmt: skip


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", OF_THREADS)
def test_copies_by_threads(name, where):
    with where():
        check(*OF_THREADS[name])


@pytest.mark.guards
@every_kind
def test_parts_and_splits_do_not_depend_on_the_rest_of_the_batch(kind):
    case = Case(kind, (5, 130, 7), batch_invariant=True)
    config = kernel.Config(stages=2, grid=2, split_tiles=1)
    other = dataclasses.replace(case, lengths=(200, 130, 190))
    with mosaic.interpret():
        whole = launched(case, case.inputs(), config)
    with mosaic.interpret():
        two = launched(other, other.inputs(), config)
    for have, want in zip(whole, two, strict=True):
        np.testing.assert_array_equal(have[1], want[1])


@pytest.mark.guards
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_separate_caches_of_several_launches(dtype, monkeypatch):
    monkeypatch.setattr(kernel, "CACHES_OF_A_LAUNCH", 2)
    with mosaic.interpret():
        check(Case("per_sequence", (5, 130, 0, 64, 7), dtype=dtype), SMALL)


@pytest.mark.guards
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_infinity_in_a_value_is_no_nan(dtype):
    """Nor where parts of three blocks are merged."""
    case = Case(lengths=(200,), kv_heads=1, dtype=dtype)
    inputs = case.inputs()
    inputs = inputs._replace(v_cache=inputs.v_cache.at[0, 0, 5, 3].set(jnp.inf))
    with mosaic.interpret():
        out, _ = launched(case, inputs, SMALL)
    want, _ = of_definition(case, inputs)
    assert np.isposinf(np.asarray(out[..., 3], np.float32)).all()
    close(out, want, 2**-7, 2**-7)


@pytest.mark.guards
@pytest.mark.parametrize("parts", [19, 33])
def test_many_parts_of_one_row_interpreted(parts):
    """More than a lane loads in one batch, and than a warp has lanes."""
    case = Case(lengths=(64 * parts,), q_heads=1, kv_heads=1, capacity=64 * parts)
    with mosaic.interpret():
        check(case, dataclasses.replace(SMALL, grid=parts))


@pytest.mark.parametrize("page_size, widest", [(1, 128), (3, 128), (6, 256), (16, 256)])
def test_a_tile_has_as_many_pieces_as_there_are_threads(page_size, widest):
    """One more would never be copied, and waited for."""
    case = large("paged", sequences=64, head_dim=64, v_head_dim=64, page_size=page_size)
    case = dataclasses.replace(case, capacity=8190, lengths=(8190,) * 64)
    assert kernel.Config.default(case.problem).tile == widest
    if widest < 256:
        with pytest.raises(
            ValueError, match=f"at most 128 over pages of {page_size} rows, got 256"
        ):
            plan_of(case.problem, kernel.Config(tile=256))


def test_narrow_tiles_are_for_float32():
    with pytest.raises(
        ValueError, match=r"Config\.tile must be at least 64 of 16-bit numbers, got 32"
    ):
        plan_of(Case().problem, kernel.Config(tile=32))


# ---- lowered and compiled ------------------------------------------------------------------------


def large(kind="stacked", sequences=64, rows=8192, **fields) -> Case:
    sizes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "capacity": rows}
    return Case(kind, (rows,) * sequences, **{**sizes, **fields})


COMPILED = {
    **{kind: large(kind) for kind in KINDS},
    "h64": large(q_heads=64, head_dim=64, v_head_dim=64),
    "h256": large(head_dim=256, v_head_dim=256),
    "one_sequence": large(sequences=1, rows=131072),
    "layers": large("per_sequence", sequences=8, layers=32),
    "window_softcap_sinks": large(mask=sliding_window(100), softcap=30.0, sinks=True),
    "float16_chunk": large(dtype="float16", q_len=4),
    "alibi": large(kv_heads=32, adds=ALIBI),
    "64_rows": large(q_heads=128, q_len=4),
    "float32": large(dtype="float32"),
    "float32_h256": large(dtype="float32", head_dim=256, v_head_dim=256),
    "wide": large(sequences=32, kv_heads=4, head_dim=512, v_head_dim=512),
    "wide_chunk": large(sequences=32, kv_heads=4, q_len=5, head_dim=512, v_head_dim=328),
    "wide_float32": large(kv_heads=4, dtype="float32", head_dim=512, v_head_dim=512),
}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("name", COMPILED)
def test_machine_code(name):
    case = COMPILED[name]
    config = kernel.Config.default(case.problem)
    call = functools.partial(run, problem=case.problem, config=config)
    report = mosaic.compile_for(call, shapes_of(case), sass=True)
    assert (report.launches, report.copies, report.tensor_maps) == (1, 0, 0)
    assert report.spill_bytes <= (64 if name in ("float32_h256", "wide_chunk") else 8)
    assert "fusion(" not in report.hlo  # nothing of XLA's before it: not even zeros for counters
    matmul = "HMMA.1688.F32.TF32" if case.dtype == "float32" else "HMMA.16816.F32"
    for instruction in ("UBLKCP", matmul, "LDS.128"):
        assert instruction in report.sass
    assert ("LDSM" in report.sass) == (case.dtype == "float32")  # loads of queries


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code_of_copies_by_threads():
    case = COMPILED["float16_chunk"]
    problem = dataclasses.replace(case.problem, gpu="sm80")
    config = PORTABLE.default(problem)
    call = functools.partial(run, problem=problem, config=config)
    report = mosaic.compile_for(call, shapes_of(case), target="a100", sass=True)
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)
    assert "LDGSTS" in report.sass


def two_calls(problem, config, inputs):
    again = inputs._replace(q=inputs.q * 2)
    return [run(x, problem=problem, config=config) for x in (inputs, again)]


@pytest.mark.machine_code
@pytest.mark.guards
def test_calls_do_not_share_counters():
    """They count in a constant; two calls have two, and nobody copies or clears them."""
    case = large(sequences=3, rows=1024)
    call = functools.partial(two_calls, case.problem, kernel.Config.default(case.problem))
    report = mosaic.compile_for(call, shapes_of(case))
    assert report.launches == 2
    kind = rf"s32\[{ZERO_BYTES // 4 + 3 * 8 + 1}\]\{{0\}}"
    assert len(re.findall(rf"= {kind} constant\(", report.hlo)) == 2
    assert not re.search(rf"{kind} (copy|fusion|broadcast)", report.hlo)


@pytest.mark.guards
def test_many_arrays_lower_in_time():
    """The time of a first call grows little with the number of caches: seconds of this process,
    which a loaded machine leaves as they are.
    """
    case = large("per_sequence", 256, rows=1024)
    config = kernel.Config.default(case.problem)
    call = functools.partial(run, problem=case.problem, config=config)
    mosaic.lower_for_cuda(call, shapes_of(large("per_sequence", 2, rows=1024)))  # warm
    start = time.process_time()
    text = mosaic.lower_for_cuda(call, shapes_of(case))
    assert time.process_time() - start < 5
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


# ---- refusals ------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("module", [kernel, decode_sm80], ids=["sm90", "sm80"])
def test_how_keys_are_cut_does_not_depend_on_the_batch(kind, dtype, module):
    """With batch_invariant: neither on how many sequences there are nor on what they can hold."""
    cuts = set()
    for sequences, rows in ((1, 512), (1, 131072), (40, 1024), (256, 8192), (900, 128)):
        problem = large(kind, sequences, rows, batch_invariant=True).problem
        narrow = {"cache_dtype": dtype, "quantized": dtype == "int8"}
        wide = {"dtype": dtype, "cache_dtype": dtype}
        problem = dataclasses.replace(problem, **(narrow if dtype == "int8" else wide))
        config = _config.default(module.KERNEL, problem)
        assert module.limit(problem) is None and _config.fits(module, problem, config)
        cuts.add(dataclasses.replace(config, stages=2))
    assert len(cuts) == 1


def of_smallest(**changes) -> DecodeProblem:
    """For a GPU with 99 KiB of shared memory a block."""
    return dataclasses.replace(large(**changes).problem, gpu="sm86")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_the_smallest_gpus_take_all_head_dims(dtype, rows):
    for dim in range(8, 257, 8):
        sizes = {"head_dim": dim, "v_head_dim": dim, "q_heads": 8 * rows}
        problem = of_smallest(dtype=dtype, **sizes)
        assert decode_sm80.limit(problem) is None
        config = PORTABLE.default(problem)
        assert decode_sm80.smem_bytes(problem, config) <= gpu_specs.shared_memory("sm86")


# ---- the plan ------------------------------------------------------------------------------------


@pytest.mark.by_xla  # it is called often
@pytest.mark.parametrize("seed", range(3, 9))
def test_every_unit_is_taken_once(seed):
    """Shares and works, computed in NumPy for every block."""
    rng = np.random.default_rng(seed)
    m, grid = int(rng.integers(1, 70)), int(rng.integers(1, 140))
    case = Case("stacked", tuple(rng.integers(0, 2000, m).tolist()), capacity=2000)
    case = dataclasses.replace(case, batch_invariant=bool(seed % 2))
    config = kernel.Config(
        grid=grid, split_tiles=3, many_heads=seed % 3 > 0, head_overhead=seed % 3 * 32
    )
    plan = plan_of(case.problem, config)
    (size,) = scheduler.table_scratch(plan).sums.shape
    lengths = np.zeros(size, np.int32)
    lengths[:m] = case.lengths
    mask = case.problem.mask
    units = [plan.keys.units_of(mask, int(n), 1) for n in lengths[:m]]
    sums = np.zeros(size, np.int32)
    sums[1 : m + 1] = np.cumsum(np.asarray(units))
    sums[m + 1 :] = sums[m]
    table = scheduler.Table(jnp.asarray(sums), jnp.asarray(lengths), None)
    seen = {}
    taken = {}

    @jax.jit
    def begin(block_id):
        share = scheduler.share_of(plan, table, block_id)
        begun, at = scheduler.begin(plan, table, share)
        return share, begun.first, at

    @jax.jit
    def one_work(block_id, share, unit, at):
        work = scheduler.work_at(plan, table, share, unit, at)
        return work, scheduler.partials_of(plan, share, work, block_id)

    for block_id in range(plan.grid):
        share, unit, at = begin(np.int32(block_id))
        while unit < share.end:
            work, partials = one_work(np.int32(block_id), share, unit, at)
            where = int(work.sequence), int(work.head)
            for tile in range(int(work.tile), int(work.end)):
                assert seen.setdefault((*where, tile), block_id) == block_id
            slots = taken.setdefault(where, [int(partials.count), []])
            assert slots[0] == partials.count
            slots[1].append(int(partials.own))
            unit, at = work.next_unit, work.sequence
    for i, length in enumerate(case.lengths):
        for head in range(plan.heads):
            tiles = [tile for n, h, tile in seen if (n, h) == (i, head)]
            assert sorted(tiles) == list(range(max(1, -(-length // plan.keys.tile))))
            count, slots = taken[i, head]
            assert count == len(slots) == len(set(slots))


# ---- on the GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [128, 192, 256])
@pytest.mark.parametrize("rows", [3, 16])
def test_what_the_smallest_gpus_run_on_the_gpu(dtype, dim, rows):
    case = Case(lengths=(700, 5, 64), capacity=720, q_heads=2 * rows, dtype=dtype, q_len=2,
                head_dim=dim, v_head_dim=dim)  # fmt: skip
    check(case, PORTABLE.default(dataclasses.replace(case.problem, gpu="sm86")))


@pytest.mark.gpu
@pytest.mark.parametrize("name, kind", turns(INTERPRETED, (*OF_EVERY_KIND, "float32")))
def test_cases_on_the_gpu(kind, name):
    case, config = INTERPRETED[name]
    case = dataclasses.replace(case, kind=kind)
    check(case, config)
    check(case)


@pytest.mark.gpu
def test_hundreds_of_separate_caches():
    lengths = tuple(int(n) for n in np.random.default_rng(0).permutation(300))
    check(Case("per_sequence", lengths, q_heads=4, kv_heads=1, capacity=304))
