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
from pallas_attn import PagedCache, PerSequenceCache, StackedCache
from tests.kernels.flash_fwd.test_flash_fwd import small
from tests.support import budget, subjects
from tests.support.problems import cases
from tests.support.subjects import cotangents, forward_and_backward

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

EDGES = cases.select(cases.ATTENTION, "edge")
# Quantised caches, and those with V within K: tests/caches/test_quantized.py.
DECODES = cases.select(cases.DECODE, "edge,-quantized,-shared_kv")
APPENDS = cases.select(cases.APPEND, "edge,-quantized,-kept")
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
    if case.kind == "paged" or case.name.endswith(("_edges", "_empty", "_chunk", "_dims_128_64"))
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


def cache_of(case, k, v, lengths):
    """The case's cache with k, v [M, K, capacity, H] in it, pages in a shuffled order."""
    sizes = {"kv_heads": case.kv_heads, "head_dim": case.head_dim, "v_head_dim": case.v_head_dim}
    sizes |= {"dtype": case.dtype}
    lengths = jnp.asarray(lengths, jnp.int32)
    counts = {"lengths": lengths, "new_lengths": jnp.zeros_like(lengths)}
    if case.kind == "per_sequence":
        return PerSequenceCache(tuple(jnp.asarray(k)), tuple(jnp.asarray(v)), **counts)
    if case.kind == "stacked":
        return StackedCache(jnp.asarray(k), jnp.asarray(v), **counts)
    m, _, capacity, _ = k.shape
    width = capacity // case.page_size
    cache = PagedCache.create(m, m * width, case.page_size, capacity=capacity, **sizes)
    order = np.random.default_rng(0).permutation(m * width).reshape(m, width).astype(np.int32)

    def pool(dense):
        pages = np.asarray(dense).reshape(m, case.kv_heads, width, case.page_size, -1)
        shuffled = np.empty((m * width, *pages.shape[1:2], *pages.shape[3:]), pages.dtype)
        shuffled[order] = np.moveaxis(pages, 2, 1)
        return jnp.asarray(shuffled)

    return PagedCache(
        pool(k),
        pool(v),
        page_table=jnp.asarray(order),
        free_list=cache.free_list,
        num_free=jnp.int32(0),
        holders=jnp.ones_like(cache.holders),
        **counts,
    )


def decode_arguments(case):
    arrays = case.arrays(poison=True)
    cache = cache_of(case, np.asarray(arrays["k"]), np.asarray(arrays["v"]), case.lengths)
    return decoded(case, arrays, cache)


def decoded(case, arrays, cache):
    """The function, and its arguments."""
    arguments = {"q": arrays["q"], "cache": cache} | case.options()
    arguments |= {"sinks": arrays["sinks"]} if case.sinks else {}
    arguments |= {"score": case.score()} if case.alibi else {}
    arguments |= {"kv_indices": jnp.asarray(case.indices())} if case.listed else {}
    return pa.decode_attention_with_lse, arguments


# The kernel interpreted, which takes seconds a case, has its own file and test_decode.py.
@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs(
        "decode", DECODES, decode_arguments, but=("interpreted",), reference=REFERENCE_DECODES
    ),
)
def test_decode(subject, case):
    arrays = case.arrays()
    held = [jnp.swapaxes(arrays[name], 1, 2) for name in ("k", "v")]
    check_decode(subject, case, decode_arguments(case), held)


def check_decode(subject, case, call, held):
    """`call`: a function and its arguments; `held`: the rows of K and of V [M, S, K, H]."""
    out, lse = subject.call(call[0], **call[1])
    arrays = case.arrays()
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


def drawn_decode_arguments(case):
    """A cache filled as by the benchmark, with NaN past the lengths."""
    arrays = case.arrays(poison=True)
    return decoded(case, arrays, bench_subjects.filled_cache(case, arrays))


@pytest.mark.by_xla
@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs(
        "decode",
        DRAWN_DECODES,
        drawn_decode_arguments,
        but=("interpreted",),
        reference=DRAWN_DECODES[:4],
    ),
)
def test_drawn_decodes(subject, case):
    held = bench_subjects.held_rows(case, case.arrays())
    check_decode(subject, case, drawn_decode_arguments(case), held)


def append_arguments(case):
    arrays = case.arrays()
    rng = np.random.default_rng(1)
    most = max(case.capacities)
    capacities = np.resize(case.capacities, case.sequences)
    k, v = (
        rng.standard_normal((case.sequences, case.kv_heads, most, dim)).astype(case.dtype)
        for dim in (case.head_dim, case.v_head_dim)
    )
    if case.kind == "per_sequence":
        cache = PerSequenceCache(
            tuple(jnp.asarray(x[:, :c]) for x, c in zip(k, capacities, strict=True)),
            tuple(jnp.asarray(x[:, :c]) for x, c in zip(v, capacities, strict=True)),
            arrays["lengths"],
            jnp.zeros_like(arrays["lengths"]),
        )
    else:
        cache = cache_of(case, k, v, case.lengths)
    arguments = {"cache": cache, "k": arrays["k"], "v": arrays["v"]}
    if case.new_lengths is not None:
        arguments["new_lengths"] = arrays["new_lengths"]
    return pa.append_kv, arguments


def dense(cache):
    """(k, v), each a list of M arrays [K, capacity, H]."""
    if cache.kind != "paged":
        return [[np.asarray(x) for x in side] for side in (cache.k, cache.v)]
    table = np.asarray(cache.page_table)
    pools = (np.moveaxis(np.asarray(pool), 1, 0) for pool in (cache.k, cache.v))
    return [[p[:, row].reshape(p.shape[0], -1, p.shape[-1]) for row in table] for p in pools]


@pytest.mark.parametrize("subject, case", subjects.pairs("append", APPENDS, append_arguments))
def test_append(subject, case):
    function, arguments = append_arguments(case)
    got = subject.call(function, **arguments)
    before = dense(arguments["cache"])
    for side, have, rows in zip(before, dense(got), (arguments["k"], arguments["v"]), strict=True):
        rows = np.asarray(rows)
        for m, wanted in enumerate(side):
            wanted = wanted.copy()
            count = case.new_rows if case.new_lengths is None else case.new_lengths[m]
            for i in range(count):
                wanted[:, case.lengths[m] + i] = rows[m, i]
            np.testing.assert_array_equal(have[m], wanted)
