"""Limits and checks of Configs, word for word, that no other table of a kernel's tests has."""

import dataclasses

import pytest

import pallas_attn as pa
from pallas_attn._call.problem import DecodeProblem
from pallas_attn.kernels.decode import plan as decode_plan
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.flash_fwd import batch_rows, sm90_wide
from pallas_attn.kernels.prefill import gathered_sm80, narrow_sm90
from pallas_attn.kernels.prefill import sm90 as prefill_sm90
from tests.support import operations as support

FORWARD = dataclasses.replace(support._BASE["flash_forward"], gpu="sm90")
WIDE = dataclasses.replace(FORWARD, head_dim=512, v_head_dim=512)
PREFILL = dataclasses.replace(support._BASE["decode"], gpu="sm90", q_len=1024)
NARROW = dataclasses.replace(PREFILL, quantized=True, cache_dtype="int8")
PACKED = {"sequences": 4, "capacities": (1024,) * 4, "tokens": 100, "q_len": 1}
OF_WIDE = "it does not take "
OF_GATHERED = "it takes no packed rows, trees, functions or K and V in one array"

LIMITS = [
    (sm90_wide, WIDE, {"dtype": "float32"}, "it takes bfloat16 and float16, not float32"),
    (sm90_wide, WIDE, {"head_dim": 256, "v_head_dim": 256}, "it takes head dims above 256"),
    (sm90_wide, WIDE, {"arrays": ("mask_array", "bias")}, f"{OF_WIDE}mask_array"),
    *(
        (sm90_wide, WIDE, changes, f"{OF_WIDE}functions of positions or rows of several GPUs")
        for changes in ({"fetches": 2}, {"share": 2}, {"zigzag": 2})
    ),
    (gathered_sm80.KERNEL, PREFILL, PACKED, OF_GATHERED),
    (gathered_sm80.KERNEL, PREFILL, {"kind": "interleaved"}, OF_GATHERED),
    (
        gathered_sm80.KERNEL,
        PREFILL,
        {"batch_invariant": True},
        "batch_invariant is kept by the kernel for few rows",
    ),
    (
        gathered_sm80.KERNEL,
        PREFILL,
        {"sequences": 2, "capacities": (2**24,) * 2, "kv_heads": 8},
        "contiguous rows would take 128.0 GiB",
    ),
    (narrow_sm90, PREFILL, {}, "the cache is not quantised"),
    (narrow_sm90, NARROW, {"cache_dtype": "float16"}, "the cache is not quantised"),
    (narrow_sm90, NARROW, {"unscaled": True}, "it takes 8-bit caches with scales only"),
    (
        narrow_sm90,
        NARROW,
        {"merged": (1, 4, 1)},
        "it does not merge results of packed rows with others",
    ),
    (narrow_sm90, NARROW, {"head_dim": 96}, "head_dim is 96; it takes multiples of 64"),
    (narrow_sm90, NARROW, {"v_head_dim": 48}, "v_head_dim is 48; it takes multiples of 64"),
    (
        prefill_sm90,
        PREFILL,
        {"kind": "interleaved", "head_dim": 96, "v_head_dim": 96},
        "head_dim is 96; of K and V in one array it takes multiples of 64",
    ),
]


@pytest.mark.parametrize("kernel, problem, changes, reason", LIMITS, ids=[x[3] for x in LIMITS])
def test_a_limit_says_why_and_what_to_do(kernel, problem, changes, reason):
    said = kernel.limit(dataclasses.replace(problem, **changes))
    assert said == pa.Limit(reason, "leave implementation=None")


def test_the_problems_of_the_limits_are_taken():
    for kernel, problem in ((sm90_wide, WIDE), (gathered_sm80.KERNEL, PREFILL)):
        assert kernel.limit(problem) is None
    assert narrow_sm90.limit(NARROW) is None and prefill_sm90.limit(PREFILL) is None


def test_batch_rows_divide_what_a_tile_holds():
    problem = dataclasses.replace(FORWARD, batch=64, q_len=16, kv_len=16, mask=pa.FULL)
    with pytest.raises(ValueError) as caught:
        batch_rows.joined(problem, 3)
    assert str(caught.value) == f"Config.batch_rows must divide 4 for {problem}, got 3"


def plan_of(problem: DecodeProblem, tile: int):
    return decode_sm90.plan_of(problem, decode_sm90.Config(tile=tile))


@pytest.mark.parametrize(
    "changes, tile, want",
    [
        ({"dtype": "float32", "cache_dtype": "float32"}, 16, "32 for head dims up to 256"),
        ({}, 16, "32 for head dims up to 256"),
        ({}, 32, "64 of 16-bit numbers"),
    ],
    ids=str,
)
def test_tiles_of_decode(changes, tile, want):
    problem = dataclasses.replace(PREFILL, q_len=1, **changes)
    assert not decode_plan.is_wide(problem)
    with pytest.raises(ValueError) as caught:
        plan_of(problem, tile)
    assert str(caught.value) == f"Config.tile must be at least {want}, got {tile}"
