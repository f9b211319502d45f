"""Prefill over quantised caches on Hopper, whose rows are widened first: who takes what, what is
done with scales, layers and rows that do not exist, and that it is right.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn._call import dispatch, selection
from pallas_attn.kernels.prefill import sm90
from pallas_attn.kernels.prefill import widened_sm90 as kernel
from tests.support import decode_cases, mosaic
from tests.support import operations as support
from tests.support.decode_cases import KINDS, Quantized
from tests.support.quantized import LARGEST, quantized

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

PROBLEM = dataclasses.replace(
    support._BASE["decode"],
    gpu="sm90",
    cache_dtype="float8_e4m3fn",
    quantized=True,
    q_len=64,
    capacities=(1024,) * support._BASE["decode"].sequences,
)


def chosen(**changes):
    problem = dataclasses.replace(PROBLEM, **changes)
    return getattr(dispatch.select(problem, None), "module", None)


def test_who_takes_what():
    ours = "prefill.widened_sm90"
    group = PROBLEM.q_heads // PROBLEM.kv_heads
    for dtype, pairs in selection.FEWEST_PAIRS_WIDENED.items():
        few = -(-pairs // group)
        assert chosen(cache_dtype=dtype, q_len=few) == ours
        assert chosen(cache_dtype=dtype, q_len=few - 1) == "prefill.narrow_sm90"
    assert chosen(q_len=1000) == ours
    assert chosen(q_len=1) == "decode.sm90"
    assert chosen(quantized=False, cache_dtype="bfloat16") == "prefill.sm90"
    assert chosen(batch_invariant=True) == "decode.sm90"
    assert chosen(gpu="sm80") == "decode.sm80"
    # A pool of pages that nobody reads is widened with the others.
    paged = {"kind": "paged", "page_size": 16, "q_len": few}
    rows = sum(PROBLEM.capacities)
    assert chosen(**paged, pages=rows // 16) == ours
    assert chosen(**paged, pages=rows // 16 + 1) == "prefill.narrow_sm90"
    long = (2**24,) * PROBLEM.sequences
    refused = kernel.limit(dataclasses.replace(PROBLEM, capacities=long, q_len=1000))
    assert refused is not None and "GiB" in str(refused)


def test_where_keys_are_split_more_queries_are_wanted():
    alone = {"sequences": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    alone |= {"capacities": (8192,)}
    pairs = selection.FEWEST_PAIRS_WIDENED[PROBLEM.cache_dtype]
    few, many = pairs // 4, -(-pairs * 3 // 8)
    for q_len in (few, many - 1, many):
        problem = dataclasses.replace(PROBLEM, **alone, q_len=q_len)
        split = kernel.Config.default(problem).prefill.splits > 1
        wide = chosen(**alone, q_len=q_len) == "prefill.widened_sm90"
        assert wide == (not split or q_len >= many)
    assert (
        kernel.Config.default(dataclasses.replace(PROBLEM, **alone, q_len=few)).prefill.splits > 1
    )


SIZES = {"lengths": (0, 37, 70), "capacity": 72, "page_size": 8, "q_len": 24, "q_heads": 16}
SIZES |= {"v_head_dim": 128, "exact": True}
ALIBI = lambda b, h, q, kv, m: -m[h] * (q - kv), np.linspace(0.01, 1, 16, dtype=np.float32)
MANY = {
    "per_sequence": Quantized("per_sequence", stored="float8_e5m2", **SIZES),
    "stacked": Quantized("stacked", layers=2, **SIZES),
    "paged": Quantized("paged", stored="float8_e4m3fn", layers=2, **SIZES),
    "scores": Quantized("stacked", layers=2, adds=ALIBI, **SIZES),
}


def interpreted(case, config):
    """The third sequence ends within a tile; past it all scales are NaN."""
    with mosaic.interpret():
        decode_cases.check(case, config)
        for missing in () if case.layers is None else (-1, case.layers):
            inputs = case.inputs()._replace(layer=jnp.int32(missing))
            lost = decode_cases.launched(case, inputs, config)
            assert all(np.isnan(np.asarray(x, np.float32)).all() for x in lost)


of_each_kind = pytest.mark.parametrize("case", [MANY[x] for x in KINDS], ids=KINDS)


@pytest.mark.guards
@of_each_kind
def test_rows_are_rounded_once_and_those_past_a_length_are_left_alone(monkeypatch, case):
    """Blocks have several chunks of a slab each, and the last one is cut."""
    monkeypatch.setattr(kernel, "BLOCKS", 12)
    to = "float16" if case.layers is None else "bfloat16"
    case = dataclasses.replace(case, dtype=to, exact=False)
    inputs, layer = case.inputs(fill=np.nan), case.layers and case.layers - 1
    with mosaic.interpret():
        result = kernel.widen(inputs, case.problem, layer)
    exact = case.widened(inputs)
    for wide, rows in zip(result, (exact.k_cache, exact.v_cache), strict=True):
        separate = case.kind == "per_sequence"
        for m, (got, want) in enumerate(
            zip(wide, rows, strict=True) if separate else [(wide, rows)]
        ):
            want = want if layer is None else want[layer][None]
            got, want = (np.asarray(jnp.asarray(x, to), np.float32) for x in (got, want))
            live = np.isfinite(want)
            np.testing.assert_array_equal(got[live], want[live])
            assert live.any() or case.lengths[m] == 0
            assert np.isnan(got[~live]).all()  # rows past a length, or of no page


@pytest.mark.parametrize("to, share", [("bfloat16", 1), ("float16", 8)])
@pytest.mark.parametrize("keys, most", [(1, 8e-3), (64, 3e-3), (512, 1e-3)])
def test_lse_of_normal_numbers_over_widened_rows(to, share, keys, most):
    """The figures of docs/accuracy.md, at head dim 256: averages over many keys are closer."""
    largest = 0.0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((n, 256)).astype(jnp.dtype(to)) for n in (256, keys))
        stored, scales = quantized(k[None, :, None], "int8")
        rows = (stored.astype(np.float32) * scales[..., None])[0, :, 0]
        exact, ours = (
            np.logaddexp.reduce(q.astype(np.float64) @ x.T.astype(np.float64) / 16, axis=1)
            for x in (rows, rows.astype(jnp.dtype(to)))
        )
        largest = max(largest, np.abs(ours - exact).max())
    assert most / 2 < largest * share < most


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("to, most", [("bfloat16", 0.4), ("float16", 0.04)])
def test_rounding_of_widened_rows_is_bounded(to, most, dtype):
    """The bound of docs/accuracy.md: logits up to 180 of rows in q's dtype and in float64."""
    unit, largest = float(jnp.finfo(to).eps) / 2, 0.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((n, 64)).astype(np.float32) for n in (16, 512))
        stored, scales = quantized(np.asarray(jnp.asarray(k, to))[None, :, None], dtype)
        rows = (stored.astype(np.float32) * scales[..., None])[0, :, 0]
        rounded = np.asarray(jnp.asarray(rows).astype(to), np.float64)
        rows = rows.astype(np.float64)
        q = np.asarray(jnp.asarray(q * 180 / np.abs(q @ rows.T).max(), to), np.float64)
        exact, ours = (q @ x.T for x in (rows, rounded))
        bound = unit * (np.abs(q) @ np.abs(rows).T)
        assert (np.abs(ours - exact) <= bound).all()
        off = np.abs(np.logaddexp.reduce(ours, axis=1) - np.logaddexp.reduce(exact, axis=1))
        assert (off <= bound.max(axis=1)).all()
        largest = max(largest, off.max())
    assert most / 2 < largest < most


@pytest.mark.guards
@pytest.mark.parametrize("kind", ["per_sequence", "stacked"])
def test_lengths_out_of_range_widen_no_row_that_is_not_there(kind):
    """None of a negative length, and all rows of one past the end."""
    case, lengths = MANY[kind], jnp.asarray([-(2**31), 2**31 - 1, -1], jnp.int32)
    inputs, layer = case.inputs(), case.layers and case.layers - 1
    with mosaic.interpret():
        result = kernel.widen(inputs._replace(lengths=lengths), case.problem, layer)
    for wide in result:
        for m in range(3):
            rows = wide[m] if kind == "per_sequence" else wide[0, m]
            assert (np.isfinite(np.asarray(rows, np.float32)) == (m == 1)).all()


def launched(inputs, *, problem, config):
    """`kernel.run` as a function that travels by pickle."""
    return kernel.run(inputs, problem, config)


@pytest.mark.machine_code
@pytest.mark.guards
@of_each_kind
def test_machine_code(case):
    """Two launches, no copy of a cache, no register spilled; words as wide as they can be."""
    config = kernel.Config.default(case.problem)
    call = functools.partial(launched, problem=case.problem, config=config)
    report = mosaic.compile_for(call, case.inputs(), sass=True)
    assert (report.launches, report.copies, report.spill_bytes) == (2, 0, 0)
    assert "LDG.E.64" in report.sass and "STG.E.128" in report.sass


@pytest.mark.guards
@pytest.mark.parametrize("name", MANY)
def test_interpreted(name):
    interpreted(MANY[name], kernel.Config(sm90.Config(2, block_kv=64, grid=3)))
