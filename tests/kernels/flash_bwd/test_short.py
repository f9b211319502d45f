"""The backward of short sequences by one launch."""

import dataclasses

import pytest

from pallas_attn.kernels.flash_bwd import sm90 as kernel
from pallas_attn.kernels.flash_bwd import sm90_short
from pallas_attn.masks import CAUSAL, FULL, Mask
from tests.kernels.flash_bwd.test_flash_bwd import ONE, case_named, check, problem_of
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def short(rows: int, keys: int, dim: int, **changes):
    changes = {"mask": FULL, "v_head_dim": dim} | changes
    sizes = {"q_len": rows, "kv_len": keys, "head_dim": dim}
    return dataclasses.replace(case_named("t_equals_s"), **sizes, **changes)


SHORT = {
    "one_tile": short(49, 49, 32),
    "two_key_tiles": short(13, 77, 40),
    "two_query_tiles": short(77, 10, 40, **ONE),
    "causal": short(77, 70, 24, mask=CAUSAL, dtype="float16", v_head_dim=40, **ONE),
    "two_swizzles": short(49, 70, 72, v_head_dim=88, **ONE),
    "rows_without_keys": short(100, 70, 64, mask=Mask(right=-30), softcap=20.0, sinks=True, **ONE),
}


@pytest.mark.guards
@pytest.mark.parametrize("name", SHORT)
def test_interpreted(name):
    case = SHORT[name]
    assert sm90_short.takes(problem_of(case))
    with mosaic.interpret():
        check(case, kernel.Config(short=True))
