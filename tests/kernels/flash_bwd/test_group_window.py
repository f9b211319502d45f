"""The Hopper backward of short windows where 8 heads or more share K and V."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.flash_bwd import sm90_group_window as kernel
from tests.kernels.flash_bwd.test_flash_bwd import check, problem_of
from tests.kernels.flash_fwd.test_group_window import windowed
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

CASES = {
    # Chunks of two tiles and of one, the last tile not whole.
    "window128": (windowed(296, 128, sinks=True, batch=1), kernel.Config(chunks=3)),
    "window8": (windowed(88, 8, (16, 2), dtype="float16", batch=1), kernel.Config(chunks=1)),
    # Kv tiles follow each other in the same place.
    "long_chunk": (windowed(456, 120, batch=1), kernel.Config(chunks=1)),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name, where):
    with where():
        check(*CASES[name])


@pytest.mark.parametrize("rows, chunks", [(1544, 0), (456, 3), (8, 1)])
def test_chunks_have_each_tile_once(rows, chunks):
    problem = problem_of(windowed(rows, 128, (32, 2), batch=2))
    plan = kernel.GroupWindowPlan(problem, kernel.Config(chunks=chunks))
    owned = np.zeros((2, 2, plan.tiles), int)
    for block in range(plan.kv_heads * plan.chunks):
        walk = kernel.chunk_walk(plan, jnp.int32(block))
        owned[int(walk.batch), int(walk.kv_head), int(walk.begin) : int(walk.begin + walk.own)] += 1
        last, after = int(walk.begin + walk.own), min(int(walk.begin + walk.own + 2), plan.tiles)
        for steps, end in ((walk.own_steps, last), (walk.steps, after)):
            assert int(steps) == 2 * (min(8 * end, rows // 8) - 8 * int(walk.begin))
        unit = walk.unit(walk.own_steps - 1)
        assert int(unit.row) == min(last * 64, rows) - 8 and int(unit.head) % 16 == 8
    assert (owned == 1).all()


def test_many_chunks_of_a_long_sequence_are_counted_in_32_bits():
    problem = problem_of(windowed(2**23, 128, batch=1))
    plan = kernel.GroupWindowPlan(problem, kernel.Config(chunks=2**20))
    assert plan.chunks * plan.tiles < 2**31
    walk = kernel.chunk_walk(plan, jnp.int32(plan.chunks - 1))
    assert int(walk.begin) + int(walk.own) == plan.tiles and int(walk.own) >= 1
