"""dq added up in slots and rounded by the fused kernel (flash_bwd/dq_slots.py): right in the
interpreter with its races watched where heads wait for slots, and on the GPU at sizes of models.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.flash_bwd import dq_slots, sm90
from pallas_attn.masks import CAUSAL, FULL
from tests.kernels.flash_bwd.test_flash_bwd import check, problem_of
from tests.kernels.flash_fwd.test_claims import plain
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

IN_SLOTS = sm90.Config(grid=2, l2_heads=1)
CASES = {
    "by_columns": dataclasses.replace(plain(100, 150, (4, 4), 72), mask=FULL),
    "by_rows": dataclasses.replace(plain(150, 140, (8, 4), 40), mask=CAUSAL),
}
CHANGES = {"by_columns": {"dq_lag": 2}, "by_rows": {"block_q": 128}}


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    config = dataclasses.replace(IN_SLOTS, **CHANGES[name])
    order = sm90.plan_of(problem_of(CASES[name]), config).order
    assert order.dq_slots and order.claims and dq_slots.number(order) == 2 < order.heads
    with mosaic.interpret():
        check(CASES[name], config)
