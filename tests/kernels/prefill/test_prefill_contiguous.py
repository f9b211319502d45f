"""`flash_attention` of few query rows over many keys, by the prefill kernel: right in the
interpreter with its races watched, compiled ahead of time without spills, chosen where it is
faster, and, with `-m gpu`, right on the real thing.
"""

import dataclasses
import functools

import jax
import pytest

from pallas_attn._call import dispatch
from pallas_attn.kernels.prefill import contiguous_sm90 as kernel
from pallas_attn.kernels.prefill import sm90
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.kernels.flash_fwd.test_flash_fwd import check, problem_of, run
from tests.support import mosaic
from tests.support.problems import cases

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SMALL = kernel.Config(sm90.Config(2, block_kv=64, grid=3))
SPLIT = kernel.Config(sm90.Config(2, block_kv=64, grid=3, splits=3))
SPLIT_IN_TWO = kernel.Config(sm90.Config(2, block_kv=64, grid=3, splits=2))
ONE = kernel.Config(sm90.Config(1, block_kv=64, q_slots=1, grid=2))


def case(name, sizes, heads, dims=64, **fields):
    return cases._attention(name, sizes, heads, dims, **fields)


def lengths(name, **fields):
    """Lengths that end inside a tile, at its end and before the first row."""
    return case(
        *(name, (5, 21, 200), (8, 2)),
        mask=CAUSAL,
        q_offset=(179, -3, 100, 43, 20),
        q_lengths=(21, 20, 0, 7, 9),
        kv_lengths=(200, 10, 130, 64, 0),
        **fields,
    )


CASES = [
    (lengths("lengths", sinks=True), SMALL),
    (lengths("lengths_splits", sinks=True), SPLIT),
    (case("odd_rows", (2, 9, 203), (3, 1), (64, 128), mask=sliding_window(90), q_offset=190), ONE),
    (case("one_row", (2, 1, 300), (2, 2), mask=FULL), SPLIT),
    (
        case(
            *("group7", (1, 70, 300), (7, 1), 80),
            mask=Mask(120, 30),
            q_offset=200,
            softcap=9.0,
            dtype="float16",
        ),
        SPLIT_IN_TWO,
    ),
]


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("case, config", CASES, ids=lambda x: getattr(x, "name", ""))
def test_cases(case, config, where):
    with where():
        check(case, config)


def large(batch, q_len, heads=(32, 8), **fields):
    name = f"m{batch}_t{q_len}"
    sizes = batch, q_len, 8192
    return case(name, sizes, heads, 128, mask=CAUSAL, q_offset=8192 - q_len, **fields)


def problem_at(case):
    """`problem_of`, without drawing arrays of its size."""
    drawn = problem_of(dataclasses.replace(case, batch=1, q_len=8, kv_len=8, bias_shape=None))
    arrays = drawn.arrays + (("bias",) if case.bias_shape else ())
    sizes = {"batch": case.batch, "q_len": case.q_len, "kv_len": case.kv_len, "arrays": arrays}
    return dataclasses.replace(drawn, **sizes, bias_shape=case.bias_shape)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("rows", [(8, 64), (1, 256), (8, 16)])
def test_machine_code(rows):
    """No copy of K and V, one launch, or two where keys are split; no matmul waits for another."""
    problem = problem_at(large(*rows))
    config = kernel.Config.default(problem)
    call = functools.partial(run, problem=problem, config=config)
    arrays = {"q": (*rows, 32, 128), "k": (rows[0], 8192, 8, 128), "v": (rows[0], 8192, 8, 128)}
    inputs = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in arrays.items()}
    report = mosaic.compile_for(call, kernel.AttentionInputs(**inputs))
    assert (report.launches, report.copies, report.spill_bytes) == (
        1 + (config.prefill.splits > 1),
        0,
        0,
    )


@pytest.mark.parametrize(
    "case, taken",
    [
        (large(8, 64), True),
        (large(8, 16), True),
        (large(1, 256), True),
        (large(1, 1), True),
        (large(8, 4096), False),  # T is not small
        (large(8, 1024), False),  # the forward has rows for all blocks
        (large(1, 1024), False),
        (large(1, 64, dtype="float32"), False),
        (large(1, 64, bias_shape=(1, 1, 1, 8192)), False),
        (large(1, 64, segments=(30, 34), kv_segments=(8192,)), False),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_taken_where_it_is_faster(case, taken):
    problem = problem_at(case)
    chosen = dispatch.select(problem, None)
    want = "prefill_contiguous_sm90" if taken else "flash_fwd_sm90"
    assert (chosen.name, chosen.implementation) == (want, "sm90")


Q_LENS, DIMS = (1, 16, 65, 250), (64, 128, 256, (192, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_on_a_gpu(q_len, dims):
    """In the configuration that it takes by default, T and S no multiple of anything. Options take
    turns: each meets every q_len and all dims but one.
    """
    ends, rows = (0, 1, 500, 1001), (q_len, q_len // 2, q_len, q_len)
    plain = case(f"t{q_len}", (4, q_len, 1001), (28, 4), dims, mask=CAUSAL, q_offset=1001 - q_len)
    window = dataclasses.replace(plain, mask=sliding_window(300), sinks=True, softcap=20.0)
    every = (plain, window, dataclasses.replace(plain, q_lengths=rows, kv_lengths=ends))
    each = every[(Q_LENS.index(q_len) + DIMS.index(dims)) % 3]
    check(each, kernel.Config.default(problem_of(each)))
