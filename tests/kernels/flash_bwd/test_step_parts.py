"""Work tiles of keys in parts that different blocks take: `step_parts`."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import costs, key_tiles, sm80, sm90, step_parts, work_order
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.masks import CAUSAL, FULL
from tests.kernels.flash_bwd.test_flash_bwd import (
    APART,
    ONE,
    SMALL,
    check,
    default_of,
    problem_of,
    residuals_of,
    run,
)
from tests.kernels.flash_fwd.test_flash_fwd import case_named, small
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

NO_REFS = BackwardRefs(*[None] * 4)


def config(parts, **changes):
    return dataclasses.replace(SMALL, parts=parts, **changes)


def apart(parts, **changes):
    return dataclasses.replace(APART, parts=parts, **changes)


def few_steps():
    """One query tile for each of two kv tiles, of which a causal mask hides the second."""
    sizes = {"q_len": 64, "kv_len": 200, "mask": CAUSAL, "head_dim": 64, "v_head_dim": 64}
    return dataclasses.replace(case_named("t_equals_s"), **sizes, **ONE)


CASES = {
    "group": ("group7_kv1", config(3, block_q=128)),
    "lockstep_claims": ("group7_kv1", config(5, block_q=128, lockstep=True, claims=True)),
    "band_apart": ("band", apart(2)),
    "narrow_panel": ("dim72_24", config(3, stages=3, dq_lag=2)),
    "wide_lockstep": ("dim192_128", apart(2, lockstep=True, l2_heads=1)),
    "float32": (
        "dim72_24_float32_highest",
        apart(3, block_q=16, dq_block_kv=32),
    ),
    "empty_parts": (few_steps(), config(5)),
    "empty_parts_portable": (few_steps(), sm80.Config(parts=5)),
    "empty_parts_wide": (
        dataclasses.replace(few_steps(), head_dim=136, v_head_dim=136),
        apart(3),
    ),
}


def case_of(name):
    case = CASES[name][0]
    return small(case) if isinstance(case, str) else case


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    with mosaic.interpret():
        check(case_of(name), CASES[name][1])


def on_a_gpu(name):
    """The Config of a case, for blocks of which each takes a part or two."""
    config = CASES[name][1]
    return config if isinstance(config, sm80.Config) else dataclasses.replace(config, grid=132)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    check(case_of(name), on_a_gpu(name))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_bits_repeat_on_the_gpu(name):
    """Bits of dk and dv, and of dq where it is not added up in global memory."""
    case, config = case_of(name), on_a_gpu(name)
    residuals, problem = residuals_of(case)[0], problem_of(case)
    step = jax.jit(functools.partial(run, problem=problem, config=config))
    first, again = (jax.tree.map(np.asarray, step(residuals)) for _ in range(2))
    adds_dq = isinstance(config, sm90.Config | sm80.Config)
    for name in ("k", "v", *["q"] * (not adds_dq)):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))


@pytest.mark.parametrize("parts", [1, 5, 16])
@pytest.mark.parametrize("lockstep", [False, True])
def test_parts_take_each_step_once(parts, lockstep):
    """Every step of each work tile once, parts as many as others up to one; each part is dealt to
    one block.
    """
    sizes = {"q_len": 260, "kv_len": 300, "batch": 1, "q_heads": 6, "kv_heads": 2}
    problem = problem_of(dataclasses.replace(case_named("t_equals_s"), mask=CAUSAL, **sizes))
    plan = sm90.plan_of(problem, config(parts, lockstep=lockstep))
    order, ctx = plan.order, KernelContext(plan, NO_REFS)
    table = work_order.schedule(order)
    codes = np.concatenate([row[1 : row[0] + 1] for row in table])
    assert len(set(codes.tolist())) == codes.size == order.work_tiles == 2 * 3 * parts
    taken = {}
    for code in codes.tolist():
        work = key_tiles.key_tile(ctx, jnp.int32(code))
        first, end = map(int, key_tiles.steps_of(plan, work))
        where = int(work.batch), int(work.kv_head), int(work.key)
        total = 3 * int(work.steps)
        assert total // parts <= end - first <= -(-total // parts)
        for i in range(first, end):
            step = tuple(map(int, key_tiles.step_of(plan, work, jnp.int32(i))))
            assert step not in taken.setdefault(where, set())
            taken[where].add(step)
        taken.setdefault(where, set())
    for where, steps in taken.items():
        q_tiles = max(0, -(-260 // 64) - where[2] // 64)
        assert len(steps) == 3 * q_tiles
    assert len(taken) == 2 * 3


def test_pieces_differ():
    """Each part of each 64 keys has a piece of its own."""
    problem = problem_of(dataclasses.replace(case_named("group7_kv1"), kv_len=300, batch=2))
    plan = sm90.plan_of(problem, config(3))
    pieces = {
        step_parts.of_keys(plan).number(head, rows, part)
        for head in range(2)
        for rows in range(6)
        for part in range(3)
    }
    assert pieces == set(range(2 * 6 * 3))


def problem(rows, heads, dim=128, mask=CAUSAL, **changes):
    sizes = {"batch": 1, "q_heads": heads[0], "kv_heads": heads[1], "q_len": rows, "kv_len": rows}
    case = dataclasses.replace(case_named("t_equals_s"), head_dim=dim, v_head_dim=dim, mask=mask)
    return dataclasses.replace(problem_of(case), **sizes | changes)


DEFAULTS = {
    "one sequence, heads share keys": (problem(1024, (14, 2), 64), True),
    "one kv head": (problem(2048, (48, 1), mask=FULL), True),
    "rows that L2 does not hold": (problem(8192, (64, 1)), True),
    "few rows": (problem(300, (4, 1), 64, batch=4), True),
    "bits": (problem(8192, (64, 1), deterministic=True), True),
    "one kv head, wide": (problem(2048, (8, 1), 256), True),
    "blocks are busy": (problem(8192, (32, 8), batch=2), False),
    "many heads": (problem(1024, (16, 16), batch=16), False),
    "in turns": (problem(16384, (64, 8), deterministic=True), False),
    "few steps": (problem(60, (4, 4), 128), False),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_parts_by_default(name):
    """Parts where blocks would be idle; sums are no larger than they may be."""
    asked, divides = DEFAULTS[name]
    config = default_of(asked)
    module = sys.modules[type(config).__module__]
    assert (getattr(config, "parts", 1) > 1) == divides
    assert module.smem_bytes(asked, config) <= sm90.SMEM_LIMIT
    order = module.plan_of(asked, config).order
    assert not (divides and (order.lockstep or order.claims or order.turns))
    nbytes = 4 * order.heads * order.tiling.padded_keys * (asked.head_dim + asked.v_head_dim)
    assert not divides or nbytes <= costs.MOST_BYTES
    if divides:
        whole = costs.busiest(dataclasses.replace(order, parts=1))
        assert costs.busiest(order) < 0.75 * whole


def test_portable_parts_by_default():
    """Parts for all multiprocessors that would be idle."""
    few, many = problem(1024, (14, 2), 64, gpu="sm80"), problem(8192, (32, 8), gpu="sm80")
    configs = [sm80.Config.default(x) for x in (few, many)]
    assert [x.parts for x in configs] == [6, 1]
    order = sm80.plan_of(few, configs[0]).order
    assert 108 // 2 < order.work_tiles <= 108


def test_what_has_no_parts():
    with pytest.raises(ValueError, match=r"^Config\.parts must be from 1 to 64, got 65"):
        config(65)
    in_turns = problem(16384, (64, 8), deterministic=True)
    with pytest.raises(ValueError, match=r"^Config\.block_q must be 64 and Config\.parts 1 for "):
        sm90.plan_of(in_turns, config(2))
