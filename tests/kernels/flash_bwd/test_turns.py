"""dq added up in one order (flash_bwd/turns.py): right in the interpreter with its races watched,
every turn taken, no deadlock in any order of blocks, and the same bits each time on the GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import config as _config
from pallas_attn.kernels.flash_bwd import sm90, turns, work_order
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.kernels.flash_bwd.test_flash_bwd import check, default_of, problem_of
from tests.kernels.flash_fwd.test_claims import decoded, plain
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

TURNS = sm90.Config(grid=3, dq_lag=2)
CASES = {
    "causal": plain(200, 200, (2, 1), 72),
    "lengths": dataclasses.replace(plain(130, 300, (1, 1), 72, batch=2), kv_lengths=(70, 300)),
    "full": dataclasses.replace(plain(100, 300, (1, 1), 72), mask=FULL),
    "in_registers": plain(70, 200, (1, 1), 128),
}
CHANGES = {
    "causal": {"lockstep": True},
    "lengths": {"dq_lag": 1},
    "full": {},
    "in_registers": {"k_in_registers": True},
}


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    case, config = CASES[name], dataclasses.replace(TURNS, **CHANGES[name])
    problem = problem_of(case, deterministic=True)
    assert sm90.plan_of(problem, config).order.turns
    with mosaic.interpret():
        check(case, config, deterministic=True)


@pytest.mark.guards
def test_a_kv_tile_before_its_turn_waits(monkeypatch):
    """The interpreter runs blocks one after another, so work tiles in another order than that of
    turns wait for ever.
    """
    rising = work_order.schedule

    def falling(order, offsets=()):
        table = rising(order, offsets)
        return np.append(table[:, :1], table[:, :0:-1], axis=1)

    monkeypatch.setattr(work_order, "schedule", falling)
    with mosaic.interpret(), pytest.raises(Exception, match="DEADLOCK: counter"):
        check(CASES["full"], TURNS, deterministic=True)


@pytest.mark.parametrize("seed", range(12))
def test_kv_tiles_that_meet_a_query_tile_are_the_first_ones(seed):
    """And blocks claim the kv tiles of a head in that order: the first that is not finished waits
    for none.
    """
    rng = np.random.default_rng(seed)
    mask = [FULL, CAUSAL, Mask(right=int(rng.integers(-90, 90)))][seed % 3]
    rows, keys = int(rng.integers(1, 700)), int(rng.integers(1, 900))
    case = dataclasses.replace(plain(rows, keys, (4, 2), 128, batch=2), mask=mask)
    offset = int(rng.integers(-100, 300))
    problem = problem_of(case, deterministic=True, q_offset=offset)
    config = sm90.Config(lockstep=bool(seed & 1), grid=int(rng.integers(1, 9)))
    order = sm90.plan_of(problem, config).order
    assert order.turns and order.claims
    assert order.lockstep == (config.lockstep and order.tiling.allows_lockstep)
    for kv_len in (keys, int(rng.integers(0, keys + 1))):
        tiling, meets = order.tiling, []
        for first in range(0, keys, tiling.block_kv):
            span = tiling.q_span(mask, first, offset, tiling.padded_rows, kv_len)
            meets.append([span.lo <= t < span.hi for t in range(tiling.q_tiles)])
        assert (np.diff(np.array(meets, int), axis=0) <= 0).all()
    head, tile = decoded(order, work_order.schedule(order))
    for each in set(head):
        np.testing.assert_array_equal(tile[head == each], np.arange(tiling.kv_tiles))


def test_where_it_applies():
    large = problem_of(plain(8192, 8192, (64, 8), 128, batch=2), deterministic=True)
    of = functools.partial(dataclasses.replace, large)
    for problem, in_turns in (
        (large, True),
        (of(mask=FULL), True),
        (of(head_dim=96, v_head_dim=96), True),
        (of(arrays=("kv_lengths",)), True),
        (of(deterministic=False), False),
        (of(head_dim=64, v_head_dim=64), False),  # query tiles of 128, added from registers
        (of(head_dim=256, v_head_dim=256), False),
        (of(mask=sliding_window(4096)), False),
        (of(arrays=("q_segment_ids", "kv_segment_ids")), False),
        (of(batch=1, q_heads=2, kv_heads=2, mask=FULL), False),  # most of it would be waiting
    ):
        config = default_of(problem)
        is_fused = isinstance(config, sm90.Config)
        assert is_fused == (in_turns or not problem.deterministic), problem
        if is_fused:
            assert sm90.plan_of(problem, config).order.turns == in_turns
    assert not turns.applies(KeyTiling(of(mask=sliding_window(9)), sm90.sm90_fused.KEYS, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    config = dataclasses.replace(TURNS, grid=132, **CHANGES[name])
    check(CASES[name], config, deterministic=True)


REPEATED = {
    "full": (2, 4096, (16, 4), FULL),
    "causal": (1, 8192, (16, 4), CAUSAL),
    "own_heads": (1, 4096, (24, 24), CAUSAL),
    "odd": (2, 3001, (16, 4), CAUSAL),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPEATED)
def test_bits_repeat_on_the_gpu(name):
    """By any number of blocks; and near sums in no order."""
    batch, rows, heads, mask = REPEATED[name]
    case = dataclasses.replace(plain(rows, rows, heads, 128, batch=batch), mask=mask)
    arrays, cotangent = case.arrays(), case.cotangent(1)

    def gradients(deterministic, **changes):
        def loss(q, k, v, cotangent):
            out = pa.flash_attention(q, k, v, mask=mask, deterministic=deterministic)
            return (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum()

        problem = problem_of(case, deterministic=deterministic)
        config = dataclasses.asdict(sm90.Config.default(problem))
        with _config.forced("flash_bwd_sm90", config | changes):
            step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
            step = step.lower(*arrays_in_order, cotangent).compile()
        return [[np.asarray(x, np.float32) for x in step(*arrays_in_order, cotangent)]
                for _ in range(3)]  # fmt: skip

    arrays_in_order = [arrays[name] for name in ("q", "k", "v")]
    in_no_order = gradients(False)[0]
    every = [*gradients(True), *gradients(True, grid=48)]
    for got in every:
        np.testing.assert_array_equal(got[0], every[0][0])
        for x, want in zip(got, in_no_order, strict=True):
            least = 0.004 * np.sqrt(np.square(want).mean(axis=-1, keepdims=True))
            assert (np.abs(x - want) <= 2**-7 * np.abs(want) + least).all()
