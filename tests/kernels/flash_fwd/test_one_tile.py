"""The Hopper forward of heads whose keys are one kv tile; one or more batch rows in a work tile."""

import dataclasses

import pytest

from pallas_attn._call import dispatch
from pallas_attn.kernels.flash_fwd import batch_rows
from pallas_attn.kernels.flash_fwd import sm90_one_tile as kernel
from pallas_attn.masks import CAUSAL, FULL, mask_fn, sliding_window
from tests.kernels.flash_fwd.test_flash_fwd import (
    case_named,
    check,
    compiled_case,
    of_size,
    output,
    problem_of,
    small,
)
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

CONFIG = kernel.Config(warpgroups=3, block_kv=136, grid=2)
CASES = (
    *("q_lengths", "kv_lengths_causal", "sinks_empty_rows", "bias_by_head", "softcap"),
    *("strictly_causal", "dim72_24"),
)


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    """More warpgroups than work tiles in the last block."""
    with mosaic.interpret():
        check(small(name), CONFIG)


# Rows and keys of a batch row, batch rows in a tile, head dims, mask and dtype
JOINED = {
    "frames16": (16, 4, (64, 64), FULL, "bfloat16"),
    "causal20": (20, 3, (40, 40), CAUSAL, "float16"),
    "frames32": (32, 2, (80, 128), FULL, "float16"),
    "window7": (7, 9, (32, 24), sliding_window(3), "bfloat16"),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", JOINED)
def test_batch_rows(name, where):
    """Each sees its own keys, whatever others hold."""
    rows, joined, dims, mask, dtype = JOINED[name]
    case = of_size(rows, rows, dims, mask, dtype, (4, 2))
    case = dataclasses.replace(case, batch=3 * joined)
    assert batch_rows.most_joined(problem_of(case)) == joined
    with where():
        check(case, kernel.Config(2, 64, grid=3, batch_rows=joined))


@pytest.mark.parametrize(
    "changes, rows",
    [
        ({}, 4),
        ({"batch": 15}, 3),
        ({"batch": 7}, 1),
        ({"q_len": 33, "kv_len": 33}, 1),
        ({"kv_len": 20}, 1),
        ({"kv_lengths": (3,) * 64}, 1),
        ({"dtype": "float32"}, 1),
    ],
    ids=str,
)
def test_batch_rows_that_fill_a_tile(changes, rows):
    case = dataclasses.replace(of_size(16, 16, (64, 64), FULL, "bfloat16", (16, 16)), batch=64)
    problem = problem_of(dataclasses.replace(case, **changes))
    assert batch_rows.most_joined(problem) == rows
    if kernel.limit(problem) is None:
        assert kernel.Config.default(problem).batch_rows == (rows if problem.batch == 64 else 1)


@pytest.mark.parametrize("name, keys", [("t_equals_s", 136), ("documents_full", 200)])
def test_a_tile_has_all_keys(name, keys):
    """Not of 300 keys, nor of documents."""
    with pytest.raises(ValueError, match=f"block_kv must hold all keys of .*, got {keys}$"):
        kernel.plan_of(problem_of(case_named(name)), dataclasses.replace(CONFIG, block_kv=keys))


@pytest.mark.parametrize(
    "changes, config",
    [
        ({}, kernel.Config(4, 64, 48)),
        ({"head_dim": 128, "v_head_dim": 128}, kernel.Config(2, 64, 0)),
        (
            {"q_len": 128, "kv_len": 128, "head_dim": 32, "v_head_dim": 32},
            kernel.Config(4, 128, 48),
        ),
        ({"q_len": 16, "kv_len": 16}, kernel.Config(4, 64, 48, batch_rows=4)),
        ({"q_len": 16, "kv_len": 16, "batch": 32}, kernel.Config(4, 64, 48)),
        ({"q_len": 128, "kv_len": 128}, None),
        ({"q_len": 56, "head_dim": 72}, None),
        ({"batch": 16, "q_len": 16}, None),
        ({"head_dim": 136, "v_head_dim": 136}, None),
        ({"mask_program": mask_fn(lambda b, h, q, kv: kv > h).program}, None),
        ({"dtype": "float32"}, None),
        ({"arrays": ("q_segment_ids", "kv_segment_ids")}, None),
    ],
    ids=str,
)
def test_problems_of_this_kernel(changes, config):
    """Its Config, or None where `sm90` is the faster one."""
    problem = problem_of(of_size(49, 49, (64, 64), FULL, "bfloat16", (8, 8)))
    problem = dataclasses.replace(problem, **({"batch": 512} | changes))
    chosen = dispatch.select(problem, None)
    assert chosen.name == ("flash_fwd_sm90_one_tile" if config else "flash_fwd_sm90")
    assert config is None or kernel.Config.default(problem) == config


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("rows, dim", [(16, 40), (20, 64), (32, 128)])
def test_batch_rows_are_not_copied(rows, dim):
    case = dataclasses.replace(of_size(rows, rows, (dim, dim), heads=(16, 16)), batch=960)
    _, config, report = compiled_case(case, chooser=kernel.Config, of=output)
    assert config.batch_rows == 64 // rows
    assert (report.launches, report.others, report.spill_bytes) == (1, (), 0)
