"""Prefill over quantised caches on Hopper, whose rows are widened first: who takes what, what is
done with scales, layers and rows that do not exist, and that it is right.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import dispatch, selection
from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.prefill import sm90
from pallas_attn.kernels.prefill import widened_sm90 as kernel
from tests.caches.test_quantized import KINDS, LARGEST, quantized
from tests.support import in_numpy, mosaic
from tests.support import operations as support

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

REFERENCE = dispatch.TABLES["decode_quantized"][-1]
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


def never_too_few(monkeypatch):
    """The widened kernel takes every quantised cache."""
    monkeypatch.setattr(selection, "FEWEST_PAIRS_WIDENED", {})
    alone = dispatch.Candidate("prefill.widened_sm90", dispatch.HOPPER)
    monkeypatch.setitem(dispatch.TABLES, "decode_quantized", (alone, REFERENCE))


def drawn(rng, kind, dtype, layers=None, rows=(0, 37, 70)):
    """A cache whose buffers hold NaN where nobody wrote, and queries of its last 24 rows."""
    options = {"dtype": dtype, "layers": layers, "v_head_dim": 128}
    cache = {
        "per_sequence": lambda: pa.PerSequenceCache.create((72, 64, 80), 2, 64, **options),
        "stacked": lambda: pa.StackedCache.create(3, 72, 2, 64, **options),
        "paged": lambda: pa.PagedCache.create(3, 30, 8, 2, 64, capacity=72, **options),
    }[kind]()
    nan = {
        name: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), getattr(cache, name))
        for name in ("k_scale", "v_scale")
    }
    cache = dataclasses.replace(cache, **nan).extend(jnp.asarray(rows, jnp.int32))
    shape = (3, max(rows), 2)
    new = [jnp.asarray(rng.standard_normal((*shape, dim)), "bfloat16") for dim in (64, 128)]
    layer = {} if layers is None else {"layer": layers - 1}
    cache = pa.write_kv(cache, *new, **layer, implementation="reference")
    return jnp.asarray(rng.standard_normal((3, 24, 16, 64)), "bfloat16"), cache, layer


def agree(filled, **options):
    """One program on several inputs, with the reference in NumPy, to which rows in q's dtype make
    the difference of a rounding.
    """
    call = functools.partial(pa.decode_attention_with_lse, **options)
    program = jax.jit(functools.partial(call, implementation="sm90"))
    for q, cache in filled:
        got = program(q, cache)
        want = in_numpy.call(functools.partial(call, implementation="reference"), q, cache)
        for g, w, close in zip(got, want, (0.03, 0.02), strict=True):
            g, w = (np.asarray(x, np.float32) for x in (g, w))
            np.testing.assert_allclose(g, w, rtol=close, atol=close)


MANY = [
    ("per_sequence", "float8_e5m2", None),
    ("stacked", "int8", 2),
    ("paged", "float8_e4m3fn", 2),
]


def problem_of(cache, **changes):
    """24 queries a sequence over a cache of `drawn`."""
    fields = {"kind": cache.kind, "cache_dtype": str(cache.dtype), "sequences": 3, "q_len": 24}
    fields |= {"q_heads": 16, "kv_heads": 2, "head_dim": 64, "v_head_dim": 128, "scale": 0.125}
    fields |= {"capacities": cache.held, "page_size": cache.page_size, "pages": cache.pages}
    return dataclasses.replace(PROBLEM, **(fields | {"layers": cache.layers} | changes))


def inputs_of(q, cache, layer):
    return DecodeInputs(
        *(q, cache.k, cache.v, cache.lengths, cache.page_table),
        jnp.int32(layer["layer"]) if layer else None,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        new_lengths=cache.new_lengths,
    )


ALIBI = pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), jnp.linspace(0.01, 1, 16))


def interpreted(rng, kernel, config, many, score=None):
    """One of `MANY`. The third sequence ends within a tile, and past it all scales are NaN."""
    kind, dtype, layers = many
    q, cache, layer = drawn(rng, kind, dtype, layers)
    problem, inputs = problem_of(cache), inputs_of(q, cache, layer)
    options = layer | {"implementation": "reference"}
    if score is not None:
        problem = dataclasses.replace(problem, score_program=score.program)
        inputs, options["score"] = inputs._replace(score_aux=score.aux), score
    assert kernel.limit(problem) is None
    run = jax.jit(lambda inputs: kernel.run(inputs, problem, config))
    want = pa.decode_attention_with_lse(q, cache, **options)
    with mosaic.interpret():
        got = run(inputs)
        for missing in () if layers is None else (-1, layers):
            lost = run(inputs._replace(layer=jnp.int32(missing)))
            assert all(np.isnan(np.asarray(x, np.float32)).all() for x in lost)
    for g, w in zip(got, want, strict=True):
        g, w = (np.asarray(x, np.float32) for x in (g, w))
        np.testing.assert_allclose(g, w, rtol=0.02, atol=0.02)


@pytest.mark.guards
@pytest.mark.parametrize("many", MANY, ids=lambda many: many[0])
def test_rows_are_rounded_once_and_those_past_a_length_are_left_alone(rng, monkeypatch, many):
    """Blocks have several chunks of a slab each, and the last one is cut."""
    monkeypatch.setattr(kernel, "BLOCKS", 12)
    (kind, dtype, layers), to = many, jnp.float16 if many[2] is None else jnp.bfloat16
    _, cache, layer = drawn(rng, kind, dtype, layers)
    problem = problem_of(cache, dtype=str(jnp.dtype(to)))
    with mosaic.interpret():
        result = kernel.widen(inputs_of(None, cache, layer), problem, layer.get("layer"))
    arguments = (cache.k, cache.k_scale), (cache.v, cache.v_scale)
    for wide, (rows, scales) in zip(result, arguments, strict=True):
        separate = isinstance(rows, tuple)
        triples = zip(wide, rows, scales, strict=True) if separate else [(wide, rows, scales)]
        for m, (got, narrow, scale) in enumerate(triples):
            if layers is not None:
                narrow, scale = (x[layer["layer"]][None] for x in (narrow, scale))
            want = (narrow.astype(jnp.float32) * scale[..., None]).astype(to)
            got, want = (np.asarray(x, np.float32) for x in (got, want))
            live = np.isfinite(want)
            np.testing.assert_array_equal(got[live], want[live])
            assert live.any() or cache.lengths[m] == 0
            assert np.isnan(got[~live]).all()  # unwritten rows, or rows of no page


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
@pytest.mark.parametrize(
    "many", [each for each in MANY if each[0] != "paged"], ids=lambda single: single[0]
)
def test_lengths_out_of_range_widen_no_row_that_is_not_there(rng, many):
    """None of a negative length, and all rows of one past the end."""
    kind, dtype, layers = many
    _, cache, layer = drawn(rng, kind, dtype, layers)
    problem, lengths = problem_of(cache), jnp.asarray([-(2**31), 2**31 - 1, -1], jnp.int32)
    arguments = inputs_of(None, cache, layer)._replace(lengths=lengths)
    with mosaic.interpret():
        result = kernel.widen(arguments, problem, layer.get("layer"))
    for wide, scales in zip(result, (cache.k_scale, cache.v_scale), strict=True):
        for m in range(3):
            whole = wide[m] if kind == "per_sequence" else wide[0, m]
            scale = scales[m] if kind == "per_sequence" else scales[layer["layer"], m]
            there = np.isfinite(np.asarray(scale)) & (m == 1)
            made = np.isfinite(np.asarray(whole, np.float32))
            np.testing.assert_array_equal(made.all(axis=-1), there)
            np.testing.assert_array_equal(made.any(axis=-1), there)
            assert there.any() == (m == 1)


def launched(inputs, *, problem, config):
    """`kernel.run` as a function that travels by pickle."""
    return kernel.run(inputs, problem, config)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("many", MANY, ids=lambda many: many[0])
def test_machine_code(rng, many):
    """Two launches, no copy of a cache, no register spilled; words as wide as they can be."""
    kind, dtype, layers = many
    q, cache, layer = drawn(rng, kind, dtype, layers)
    problem, inputs = problem_of(cache), inputs_of(q, cache, layer)
    config = kernel.Config.default(problem)
    call = functools.partial(launched, problem=problem, config=config)
    report = mosaic.compile_for(call, inputs, sass=True)
    assert (report.launches, report.copies, report.spill_bytes) == (2, 0, 0)
    assert "LDG.E.64" in report.sass and "STG.E.128" in report.sass


@pytest.mark.guards
@pytest.mark.parametrize("many", MANY, ids=lambda many: many[0])
def test_interpreted(rng, monkeypatch, many):
    never_too_few(monkeypatch)
    interpreted(rng, kernel, kernel.Config(sm90.Config(2, block_kv=64, grid=3)), many)


@pytest.mark.guards
def test_a_score_function_interpreted(rng):
    interpreted(rng, kernel, kernel.Config(sm90.Config(2, block_kv=64, grid=3)), MANY[1], ALIBI)


# Each kind with two dtypes, each dtype with two kinds; in a window and packed in turns.
IN_A_WINDOW, PACKED = (
    [(dtype, KINDS[(number + turn) % 3]) for number, dtype in enumerate(LARGEST)] for turn in (0, 1)
)
ON_A_GPU = [*IN_A_WINDOW, *PACKED]


def on_a_gpu(rng, kind, dtype):
    """A cache without and with an overflow, by one program: plain, and in a window or packed."""
    both = [drawn(rng, kind, dtype, 2, rows) for rows in ((0, 37, 70), (17, 72, 300))]
    filled, layer = [some[:2] for some in both], both[0][2]
    agree(filled, **layer)
    if (dtype, kind) in IN_A_WINDOW:
        agree(filled, **layer, mask=pa.sliding_window(20), softcap=5.0)
    else:
        starts = jnp.asarray([0, 0, 30, 72], jnp.int32)
        packed = [(q.reshape(72, 16, 64), cache) for q, cache in filled]
        agree(packed, **layer, starts=starts, score=ALIBI)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, kind", ON_A_GPU)
def test_on_a_gpu(rng, monkeypatch, kind, dtype):
    never_too_few(monkeypatch)
    on_a_gpu(rng, kind, dtype)
