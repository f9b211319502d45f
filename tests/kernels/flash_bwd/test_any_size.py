"""The Hopper backward of sequences and head dims that no tile divides, and of short sequences by
one launch: no array is copied around the kernels.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_attn.kernels.flash_bwd import sm90_heads, sm90_short
from pallas_attn.masks import CAUSAL, FULL, Mask
from tests.kernels.flash_bwd.test_flash_bwd import (
    APART,
    ONE,
    SMALL,
    case_named,
    check,
    default_of,
    problem_of,
    run,
    shapes_of,
)
from tests.support import mosaic
from tests.support.problems import cases

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def sized(rows: int, keys: int, dim: int, **changes) -> cases.AttentionCase:
    changes = {"mask": FULL, "v_head_dim": dim} | changes
    sizes = {"q_len": rows, "kv_len": keys, "head_dim": dim}
    return dataclasses.replace(case_named("t_equals_s"), **sizes, **changes)


SHORT = {
    "one_tile": sized(49, 49, 32),
    "two_key_tiles": sized(13, 77, 40),
    "two_query_tiles": sized(77, 10, 40, **ONE),
    "causal": sized(77, 70, 24, mask=CAUSAL, dtype="float16", v_head_dim=40, **ONE),
    "two_swizzles": sized(49, 70, 72, v_head_dim=88, **ONE),
    "rows_without_keys": sized(100, 70, 64, mask=Mask(right=-30), softcap=20.0, sinks=True, **ONE),
    "one_wide_tile": sized(49, 60, 128, **ONE),
    "wide_with_sinks": sized(64, 33, 104, mask=CAUSAL, v_head_dim=72, sinks=True, **ONE),
    "joined": sized(17, 17, 40, **ONE | {"batch": 6}),
    "joined_causal": sized(16, 16, 128, batch=4, mask=CAUSAL, sinks=True),
    "joined_window": sized(21, 21, 64, mask=Mask(4, -2), q_offset=5, **ONE | {"batch": 3}),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", SHORT)
def test_short(name, where):
    case = SHORT[name]
    assert isinstance(default_of(problem_of(case)), sm90_short.Config)
    with where():
        check(case)


def test_problems_that_one_launch_does_not_take():
    problem = problem_of(SHORT["one_tile"])
    assert sm90_short.takes(problem)
    for changes in (
        {"q_len": 129},
        {"kv_len": 129},
        {"kv_heads": 1},
        {"head_dim": 136},
        {"q_len": 65, "head_dim": 128},
        {"dtype": "float32"},
        {"arrays": ("kv_lengths",)},
    ):
        assert not sm90_short.takes(dataclasses.replace(problem, **changes)), changes
    assert sm90_short.limit(dataclasses.replace(problem, q_len=129))


HALVES, ROWS = dataclasses.replace(SMALL, dq_lag=2), dataclasses.replace(SMALL, block_q=128)
ANY_SIZE = {
    "halves": (sized(77, 150, 40, **ONE), HALVES),
    "halves_of_16": (sized(77, 150, 24, mask=CAUSAL, **ONE), SMALL),
    "halves_with_rest": (sized(150, 141, 72, v_head_dim=24, **ONE), SMALL),
    "rest_of_two_slots": (
        sized(129, 257, 80, mask=CAUSAL, **ONE),
        dataclasses.replace(SMALL, kv_slots=2, grid=1, k_in_registers=True),
    ),
    "halves_of_two_slots": (
        sized(70, 300, 32, v_head_dim=72, **ONE),
        dataclasses.replace(SMALL, kv_slots=2, grid=1),
    ),
    "halves_in_registers": (
        sized(70, 130, 104, **ONE),
        dataclasses.replace(HALVES, k_in_registers=True),
    ),
    "rows": (sized(150, 130, 48, dtype="float16", **ONE), ROWS),
    "rows_of_two_swizzles": (sized(141, 70, 72, v_head_dim=24, **ONE | {"q_heads": 3}), ROWS),
    "apart": (sized(77, 150, 88, **ONE), APART),
    "wide": (sized(141, 70, 136, v_head_dim=24, **ONE), APART),
    "wide_values": (sized(70, 77, 24, v_head_dim=200, mask=CAUSAL, **ONE), APART),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", ANY_SIZE)
def test_any_size(name, where):
    case, config = ANY_SIZE[name]
    with where():
        check(case, config)


# Rows, keys, head dims, kernels, and arrays of 16 bits that XLA writes: dq, which is rounded from
# float32 where the kernel adds it up.
COPIED = [
    (49, 49, 32, 32, 1, 0),
    (77, 77, 64, 64, 2, 0),
    (64, 49, 72, 72, 1, 0),
    (197, 197, 64, 64, 2, 0),
    (200, 384, 40, 24, 2, 0),
    (256, 256, 72, 72, 2, 0),
    (512, 300, 64, 64, 2, 0),
    (577, 577, 64, 64, 3, 0),
    (729, 729, 72, 72, 2, 1),
    (1500, 77, 40, 40, 2, 0),
    (1001, 1001, 104, 104, 2, 1),
    (577, 577, 192, 128, 3, 0),
    (77, 300, 136, 24, 3, 0),
]


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [*((sizes, "bfloat16") for sizes in COPIED), *((sizes, "float16") for sizes in COPIED[1:6:2])],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x[:4])),
)
def test_nothing_is_copied(sizes, dtype):
    rows, keys, dim, v_dim, launches, rounded = sizes
    case = sized(rows, keys, dim, v_head_dim=v_dim, dtype=dtype, batch=33, q_heads=8, kv_heads=8)
    problem = problem_of(case)
    config = default_of(problem)
    call = functools.partial(run, problem=problem, config=config)
    out = jax.ShapeDtypeStruct((33, rows, 8, v_dim), jnp.dtype(dtype))
    report = mosaic.compile_for(call, _residuals(case, out))
    assert report.launches == launches
    entry = report.hlo[report.hlo.index("\nENTRY") :]
    name = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    written = re.findall(rf"= {name}\[[\d,]+\]\S* (?:fusion|copy|pad|slice|transpose)\(", entry)
    assert len(written) == rounded, report.others
    if isinstance(config, sm90_heads.Config | sm90_short.Config):
        assert not report.others


def _residuals(case: cases.AttentionCase, out: jax.ShapeDtypeStruct) -> tuple:
    inputs, _, lse, *_ = shapes_of(case)
    return inputs, out, lse, out, lse
