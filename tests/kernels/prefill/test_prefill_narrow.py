"""Prefill over quantised caches on Hopper, whose producer widens rows on their way to the mainloop:
who takes what, what is done with scales, layers and rows that do not exist, and that it is right.
"""

import dataclasses

import pytest

from pallas_attn._call import selection
from pallas_attn.kernels.lang.mosaic import SMEM_LIMIT
from pallas_attn.kernels.prefill import narrow_sm90 as kernel
from pallas_attn.kernels.prefill import sm90, widening_producer
from tests.kernels.prefill.test_prefill_widened import MANY, PROBLEM, chosen, interpreted

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def test_who_takes_what():
    ours = "prefill.narrow_sm90"
    group = PROBLEM.q_heads // PROBLEM.kv_heads
    few = selection.DECODED_ROWS_QUANTIZED // group
    many = selection.FEWEST_PAIRS_WIDENED[PROBLEM.cache_dtype] // group
    assert chosen(q_len=few + 1) == chosen(q_len=many - 1) == ours
    assert chosen(q_len=many) == "prefill.widened_sm90"
    assert chosen(q_len=many, capacities=(2**24,) * PROBLEM.sequences) == ours
    rows = {"tokens": 100, "q_len": 1, "sequences": 4, "capacities": (1024,) * 4}
    assert chosen(**rows) == ours and chosen(**(rows | {"tokens": 4})) == "decode.sm90"
    assert chosen(q_len=few) == chosen(q_len=1) == "decode.sm90"
    assert chosen(quantized=False, cache_dtype="bfloat16") == "prefill.sm90"
    assert chosen(batch_invariant=True) == "decode.sm90"
    assert chosen(gpu="sm80") == "decode.sm80"
    refused = kernel.limit(dataclasses.replace(PROBLEM, head_dim=96, v_head_dim=96))
    assert refused is not None and "multiples of 64" in str(refused)
    for wrong in ({"slots": 3}, {"prefill": sm90.Config(2), "producers": 2}):
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            kernel.Config(**wrong)
    for (workers, loaders), (ours, loader) in widening_producer.REGISTERS.items():
        assert (workers * ours + loaders * loader) * 128 <= 65536


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("rows", [9, 64, 256])
def test_the_default_fits(dim, rows):
    problem = dataclasses.replace(PROBLEM, head_dim=dim, v_head_dim=dim, q_len=rows)
    assert kernel.limit(problem) is None
    config = kernel.Config.default(problem)
    assert kernel.smem_bytes(problem, config) <= SMEM_LIMIT
    assert config.producers == (2 if config.prefill.warpgroups == 1 and dim <= 128 else 1)
    assert config.prefill.together == 1


@pytest.mark.guards
@pytest.mark.parametrize("name", MANY)
def test_interpreted(name):
    """Two consumers; or, over a cache of one layer, one, keys that are split, and two producers."""
    config = kernel.Config(sm90.Config(2, block_kv=64, grid=3), slots=4)
    if MANY[name].layers is None:
        config = kernel.Config(sm90.Config(1, block_kv=64, grid=3, splits=2), producers=2)
    interpreted(MANY[name], config)
