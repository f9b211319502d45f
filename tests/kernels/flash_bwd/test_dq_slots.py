"""dq added up in slots and rounded by the fused kernel (flash_bwd/dq_slots.py): right in the
interpreter with its races watched where heads wait for slots, and on the GPU at sizes of models.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn.kernels.flash_bwd import dq_slots, sm90, work_order
from pallas_attn.masks import CAUSAL, FULL, sliding_window
from tests.kernels.flash_bwd.test_flash_bwd import check, problem_of
from tests.kernels.flash_fwd.test_claims import decoded, plain
from tests.support import mosaic, threads

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

IN_SLOTS = sm90.Config(grid=2, l2_heads=1)
CASES = {
    "by_columns": dataclasses.replace(plain(100, 150, (8, 4), 72), mask=FULL),
    "by_rows": dataclasses.replace(plain(150, 140, (8, 4), 72), mask=CAUSAL),
}
CHANGES = {"by_columns": {"dq_lag": 2}, "by_rows": {"block_q": 128}}


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    config = dataclasses.replace(IN_SLOTS, **CHANGES[name])
    order = sm90.plan_of(problem_of(CASES[name]), config).order
    assert order.dq_slots and order.claims and dq_slots.number(order) == 3 < order.heads
    with mosaic.interpret():
        check(CASES[name], config)


@pytest.mark.guards
def test_a_kv_head_waits_for_the_one_before_it_in_its_slot(monkeypatch):
    """For ever, where work tiles of both come by turns."""
    monkeypatch.setattr(dq_slots, "number", lambda order: 1)
    monkeypatch.setattr(threads.BlockOfThreads, "PATIENCE", 0.5)
    config = dataclasses.replace(IN_SLOTS, l2_heads=2)
    with mosaic.interpret(), pytest.raises(Exception, match="DEADLOCK: counter"):
        check(CASES["by_columns"], config)


@pytest.mark.parametrize("seed", range(12))
def test_a_kv_head_comes_after_the_one_before_it_in_its_slot(seed):
    """With all of its work tiles: the first that is not finished waits for none."""
    rng = np.random.default_rng(seed)
    rows, keys = (int(n) for n in rng.integers(1, 900, 2))
    case = plain(rows, keys, (6, 3), (64, 72)[seed % 2], batch=int(rng.integers(5, 30)))
    mask = [FULL, CAUSAL, sliding_window(int(rng.integers(1, 300)))][seed % 3]
    config = sm90.Config(
        grid=int(rng.integers(1, 9)),
        l2_heads=int(rng.integers(0, 4)),
        lockstep=bool(seed & 1),
        block_q=(64, 128)[seed // 2 % 2],
    )
    order = sm90.plan_of(problem_of(dataclasses.replace(case, mask=mask)), config).order
    head, tile = decoded(order, work_order.schedule(order))
    assert sorted(zip(head, tile, strict=True)) == [
        (h, t) for h in range(order.heads) for t in range(order.tiling.kv_tiles)
    ]
    if not order.dq_slots:
        return
    assert order.claims_first and order.claims
    slots, place = dq_slots.number(order), np.arange(head.size)
    for before, after in zip(range(order.heads), range(slots, order.heads), strict=False):
        assert place[head == before].max() < place[head == after].min()


def test_where_it_applies():
    siglip = problem_of(dataclasses.replace(plain(729, 729, (16, 16), 72, batch=64), mask=FULL))
    of = functools.partial(dataclasses.replace, siglip)
    long = of(q_len=8192, kv_len=8192, head_dim=128, v_head_dim=128)
    for problem, in_slots in (
        (siglip, True),
        (of(mask=CAUSAL, q_len=1500, kv_len=1500), True),
        (of(head_dim=64, v_head_dim=64), True),
        (of(arrays=("bias",), bias_shape=(1, 16, 729, 729), bias_dtype="bfloat16"), True),
        (of(deterministic=True), False),
        (of(arrays=("q_segment_ids", "kv_segment_ids")), False),
        (of(arrays=("kv_lengths",)), False),
        (of(batch=2), False),  # few work tiles
        (dataclasses.replace(long, batch=1), False),  # few kv heads
        (dataclasses.replace(long, batch=4), True),
    ):
        plan = sm90.plan_of(problem, sm90.Config.default(problem))
        assert plan.order.dq_slots == in_slots, problem


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    config = dataclasses.replace(IN_SLOTS, **CHANGES[name])
    check(CASES[name], config)


LARGE = {
    "dim72": (64, 729, (4, 4), 72, FULL),
    "dim64": (64, 577, (8, 4), 64, FULL),
    "causal": (12, 1500, (6, 6), 128, CAUSAL),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_as_with_sums_in_memory_on_the_gpu(name, monkeypatch):
    """And again in the same program: nothing is left in the slots."""
    batch, rows, heads, dim, mask = LARGE[name]
    case = dataclasses.replace(plain(rows, rows, heads, dim, batch=batch), mask=mask)
    arrays, cotangent = case.arrays(), case.cotangent(1)

    def gradients():
        def loss(q, k, v, cotangent):
            out = pa.flash_attention(q, k, v, mask=mask)
            return (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum()

        every = [arrays[name] for name in ("q", "k", "v")]
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*every, cotangent).compile()
        return [[np.asarray(x, np.float32) for x in step(*every, cotangent)] for _ in range(3)]

    problem = problem_of(case)
    assert sm90.plan_of(problem, sm90.Config.default(problem)).order.dq_slots
    in_slots = gradients()
    monkeypatch.setattr(dq_slots, "applies", lambda order: False)
    jax.clear_caches()
    want = gradients()[0]
    for got in in_slots:
        for x, y in zip(got, want, strict=True):
            least = 0.004 * np.sqrt(np.square(y).mean(axis=-1, keepdims=True))
            assert (np.abs(x - y) <= 2**-7 * np.abs(y) + least).all()
