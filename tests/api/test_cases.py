"""Every implementation on the named problems: the edges that cases.py lists, and drawn ones.

Forward, LSE and all gradients at once, with a random dO and dLSE, held to the one tolerance. What
lies past a length is NaN for the subject and 0 for the oracle. A kernel's own file of tests has its
schedule; this one has its contract.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from benchmarks import subjects as bench_subjects
from pallas_attn import Mask
from tests.kernels.flash_fwd.test_flash_fwd import small
from tests.support import budget, subjects
from tests.support.problems import cases
from tests.support.subjects import cotangents, forward_and_backward

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

EDGES = cases.select(cases.ATTENTION, "edge")
# Rows of bytes: tests/caches/test_byte_rows.py.
DECODES = cases.select(cases.DECODE, "edge,-*_latent_bytes")
DECODES += tuple(
    dataclasses.replace(case, name=f"{case.name}_{name}", **changes)
    for of, name, changes in (
        ("stacked_int8", "e5m2", {"cache_dtype": "float8_e5m2"}),
        ("stacked_int8", "float32", {"dtype": "float32"}),
        ("paged_float8_e4m3fn", "page64", {"page_size": 64}),
        ("paged_latent", "float8", {"cache_dtype": "float8_e4m3fn"}),
        ("per_sequence_int8", "dim128", {"head_dim": 128, "v_head_dim": 128, "dtype": "float16"}),
        ("paged_chunk", "band", {"mask": Mask(7, -1)}),
        ("paged_edges", "scale_negative", {"scale": -0.1}),
        ("paged_window", "scale_tiny", {"scale": 1e-45}),  # 0 to a GPU: not to meet -inf
    )
    for case in cases.select(cases.DECODE, f"decode_{of}")
)
# The reference is one einsum at every head dim and for every group, one comparison for every mask
# (tests/api/test_attention.py goes through them), and reads caches of every kind as the same rows.
ALIKE = (
    *("t_below_s", "bottom_right", "strictly_causal", "lookahead", "window_of_one"),
    *("window_t_below_s", "window_t_above_s", "kv_lengths", "documents_full", "scale"),
    *("bias_by_head", "mask_array_by_batch", "float16_full", "float32_full"),
    *("attention_16x16", "causal_32x32", "attention_8x24", "t_equals_s", "kv_lengths_causal"),
    *("documents", "band", "sinks"),  # segments_mixed, band_at_run_time, sinks_empty_rows
)
REFERENCE = tuple(
    case
    for case in EDGES
    if "dims" not in case.labels or case.name in ("dim72", "dim40_256")
    if not case.name.startswith("group") or case.name == "group7_kv2"
    if case.name not in ALIKE
)
# It is the same for every head and row, and these are held to many naive runs: fewer of them.
FEWER = {
    "padding": dataclasses.replace(small("padding"), q_len=70),
    "padding_ragged": dataclasses.replace(small("padding_ragged"), q_len=70),
    "bias_shared": small("bias_shared"),
}
REFERENCE = tuple(FEWER.get(case.name, case) for case in REFERENCE)
REFERENCE_DECODES = tuple(
    case
    for case in DECODES
    if case.kind == "paged"
    or case.name.endswith(("_edges", "_empty", "_chunk", "_dims_128_64", "_e5m2", "_dim128"))
)
DRAWN = tuple(cases.draw_attention(seed) for seed in range(8))
DRAWN_DECODES = tuple(cases.draw_decode(seed) for seed in range(8))


@functools.lru_cache(maxsize=1)  # subjects of one case run one after the other
def expected(case, tensor_cores):
    # Rows that see few keys get more naive runs: a single one says little about a single number.
    grids = budget.GRIDS if case.shown_keys is None else budget.MANY_GRIDS
    options = {"tensor_cores": tensor_cores, "grids": grids}
    return budget.attention(case.arguments(), *cotangents(case), **options)


def backward_arguments(case):
    do, dlse = cotangents(case)
    return forward_and_backward, case.arguments(poison=True) | {"do": do, "dlse": dlse}


def live(case, got, expected):
    """The results that have elements; for an empty axis only shapes are compared."""
    return {name: x for name, x in got.items() if name in expected.oracle}


def check_forward_and_backward(subject, case):
    function, arguments = backward_arguments(case)
    got = subject.call(function, **arguments)
    wanted = expected(case, subject.tensor_cores)
    budget.check(live(case, got, wanted), wanted)


@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs(
        "flash_backward", EDGES, backward_arguments, but=("interpreted",), reference=REFERENCE
    ),
)
def test_forward_and_backward(subject, case):
    check_forward_and_backward(subject, case)


@pytest.mark.by_xla
@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs(
        "flash_backward", DRAWN, backward_arguments, but=("interpreted",), reference=DRAWN[4:]
    ),
)
def test_drawn_forward_and_backward(subject, case):
    check_forward_and_backward(subject, case)


# ---- caches --------------------------------------------------------------------------------------


def decoded(case, arrays, cache):
    """The function, and its arguments."""
    arguments = {"q": arrays["q"], "cache": cache} | case.options()
    arguments |= {"sinks": arrays["sinks"]} if case.sinks else {}
    arguments |= {"score": case.score()} if case.alibi else {}
    arguments |= {"kv_indices": jnp.asarray(case.indices())} if case.listed else {}
    return pa.decode_attention_with_lse, arguments


def asked(case):
    """The call over a cache that holds nothing."""
    return decoded(case, case.arrays(), bench_subjects.empty_cache(case))


# The kernel interpreted, which takes seconds a case, has its own file and test_decode.py.
@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs("decode", DECODES, asked, but=("interpreted",), reference=REFERENCE_DECODES),
)
def test_decode(subject, case):
    check_decode(subject, case)


def check_decode(subject, case):
    """Over a cache filled as by the benchmark, with NaN past the lengths."""
    arrays = case.arrays(poison=True)
    function, arguments = decoded(case, arrays, bench_subjects.filled_cache(case, arrays))
    out, lse = subject.call(function, **arguments)
    arrays = case.arrays()
    held = bench_subjects.held_rows(case, arrays)
    lengths = np.asarray(case.lengths, np.int32)
    plain = {"q": arrays["q"], "kv_lengths": lengths, "q_offset": lengths - case.q_len}
    plain |= dict(zip(("k", "v"), held, strict=True))
    plain |= {name: x for name, x in case.options().items() if name != "batch_invariant"}
    plain |= {"sinks": arrays["sinks"]} if case.sinks else {}
    plain |= {"bias": jnp.asarray(case.added())} if case.alibi else {}
    plain |= {"mask_array": case.seen_in_lists()} if case.listed else {}
    make = budget.over_quantized if case.cache_dtype else budget.attention
    wanted = make(plain, tensor_cores=subject.tensor_cores)
    budget.check({"out": out, "lse": lse}, wanted)


@pytest.mark.by_xla
@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs(
        "decode", DRAWN_DECODES, asked, but=("interpreted",), reference=DRAWN_DECODES[:4]
    ),
)
def test_drawn_decodes(subject, case):
    check_decode(subject, case)
