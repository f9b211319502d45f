"""The benchmark without a GPU: a timer that only counts, the reference as subject, small cases."""

import dataclasses
import functools
import gc
import importlib.machinery
import pathlib
import re
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from benchmarks import (
    OPS,
    Options,
    contest,
    judges,
    pages,
    peers,
    report,
    rows,
    run_bench,
    subjects,
    timing,
    verify,
)
from benchmarks.call import Call, Unavailable
from benchmarks.timing import Sample, Subject
from pallas_attn._call import config, device
from tests.support import definition, tolerance
from tests.support.problems import cases as known
from tests.support.problems.case import AttentionCase, DecodeCase

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


@pytest.fixture(autouse=True)
def nothing_to_free(monkeypatch):
    """There is no memory of a GPU's: to look for what is left of a group takes longer than it."""
    monkeypatch.setattr(contest, "gc", types.SimpleNamespace(collect=lambda: gc.collect(0)))


ROOT = pathlib.Path(__file__).parents[2]
CEILINGS = {"matmul": 800.0, "read": 4.5, "copy": 3.3}
LITTLE = {
    case.name: case
    for case in known.ATTENTION + known.DECODE + known.APPEND
    if "small" in case.tags and "edge" in case.tags
}
for kind, page in (("stacked", None), ("paged", 16)):
    name = f"prefill_{kind}_little"
    sizes = ((256,) * 2, 8, 2, 64, 64, 256)
    fields = {"q_len": 40, "kind": kind, "page_size": page}
    LITTLE[name] = DecodeCase(name, *sizes, **fields, dtype="float32")  # jax.nn mixes other dtypes

LITTLE |= {case.name: case for case in known.FLOAT8 + known.QUANTIZE if "edges" in case.name}
LITTLE["shared_little"] = DecodeCase(
    "shared_little",
    *((44, 48, 33), 8, 2, 64, 64, 48),
    **{"kind": "paged", "page_size": 4, "dtype": "float32", "shared": ((3, 16), (2, 8))},
)


class FakeTimer:
    """Every call takes what `ms` says of its subject, an error if that is one; remembers who was
    called when.
    """

    def __init__(self, **ms):
        self.ms, self.calls = ms, []

    def __call__(self, subject, times):
        self.calls.append(subject.name)
        subject.wait(subject.launch())
        ms = self.ms.get(subject.name, 1.0)
        if isinstance(ms, Exception):
            raise ms
        return [Sample(ms, 1)] * times


def bench(op, names, tmp_path, options=None, **ms):
    """Exit status, rows and lines of a benchmark of small cases."""
    out, lines, timer = tmp_path / "rows.jsonl", [], FakeTimer(**ms)
    options = dataclasses.replace(options or Options(), out=str(out), commit="abc")
    chosen = [LITTLE[name] for name in names]
    status = run_bench(op, chosen, options, timer=timer, ceilings=CEILINGS, say=lines.append)
    return status, rows.read(out), lines, timer


def change(monkeypatch, name, changed):
    """Has a public function be `changed(right, ..)`, where `right` is the function itself."""
    right = getattr(pallas_attn, name)
    monkeypatch.setattr(pallas_attn, name, functools.partial(changed, right))


def of_op(written, op):
    """The rows of an operation."""
    return [row for row in written if row["op"] == op]


def test_shapes_say_who_refuses(tmp_path):
    """Our row names the peers that do not take a case."""
    _, written, _, _ = bench("shapes", ["bias_shared"], tmp_path)
    assert of_op(written, "shapes")[0]["refused"]["cudnn"] == "no cuDNN without a GPU"


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("forward", "everything"),
        ("backward_alone", "float16_causal"),
        ("shapes", "bias_shared"),
        ("shapes", "pair_bias_dim48"),
        ("backward", "dim512_window_sinks"),
        ("float8", "float8_blocks_edges"),
        ("quantize", "quantize_edges"),
        ("jvp", "float16_causal"),
        ("decode", "decode_per_sequence_edges"),
        ("decode", "decode_stacked_latent"),
        ("decode", "decode_paged_k_is_v"),
        ("decode", "decode_paged_k_is_v_listed"),
        ("prefill", "prefill_paged_little"),
        ("shared_prefix", "shared_little"),
        ("append", "append_per_sequence_distinct"),
        ("append", "keep_paged_few"),
    ],
)
def test_every_operation_is_checked_timed_and_written(op, name, tmp_path):
    status, written, lines, _ = bench(op, [name], tmp_path)
    assert status == 0, lines
    ours, *others = [row for row in written if row["op"] != "ceiling"]
    assert ours["impl"] == "pallas_attn/reference"
    assert ours["op"] == OPS[op]
    assert ours["case"] == name
    assert ours["checked"] is True
    assert all(field in ours for field in (*rows.REQUIRED, *contest.FIRST_CALL, "l2"))
    assert ours["n"] == 15
    assert all(row["run"] == ours["run"] for row in written)
    assert {row["impl"] for row in others} <= set(peers.PEERS[OPS[op]])
    assert any(line.startswith(f"[1/1] {name}") for line in lines)


def test_a_layer_over_shared_pages_compares_nothing():
    """It is timed as in the step that found them, or with the search."""
    case = LITTLE["shared_little"]
    for finding in (False, True):
        some = dataclasses.replace(case, finding=finding)
        step = subjects.decode(some, case.arrays(0), None, shared=True)
        assert "_renewed" not in str(step.jitted.trace(*step.arguments).jaxpr)


@pytest.mark.guards
@pytest.mark.parametrize("op", ["forward", "forward+backward"])
@pytest.mark.parametrize(("implementation", "name"), [("sm100", "sm100"), (None, "sm80")])
def test_a_kernel_that_only_its_name_chooses_is_timed_by_it(implementation, name, op):
    """The forward and the backward for Blackwell, on a GPU of it."""
    case = AttentionCase("plain", 1, 64, 64, 2, 1, 64, 64)
    bench = types.SimpleNamespace(options=Options(implementation=implementation), op="forward")
    arrays = case.arrays(0)
    with device.assume("sm100"), config.watched() as seen:
        subject = contest._our_subject(bench, Call(case, arrays, arrays["q"], op))
        subject.launch.jitted.trace(*subject.launch.arguments)
    wanted = [f"flash_fwd_{name}", f"flash_bwd_{name}"]
    assert [choice.kernel for choice in seen] == wanted[: len(op.split("+"))]
    assert implementation is None or subject.name == f"{rows.OURS}{implementation}"


def test_figures_follow_from_the_time(tmp_path):
    times = {"pallas_attn/reference": 0.5, "xla": 1.0}
    status, written, lines, _ = bench("forward", ["causal_32x32"], tmp_path, **times)
    assert status == 0
    ours = next(row for row in written if rows.is_ours(row))
    flops = 4 * 64 * 32 * 32 / 2
    assert ours["ms"] == 0.5
    assert ours["tflops"] == round(flops / 0.5e-3 / 1e12, 4)
    line = next(line for line in lines if line.startswith("[1/1]"))
    assert "2.00x best peer (xla" in line
    assert any(line.startswith("2.000x the best peer (geomean of 1)") for line in lines)


def test_a_wrong_result_is_not_timed_and_the_run_fails(tmp_path, monkeypatch):
    add = lambda right, *qkv, **rest: right(*qkv, **rest).at[0, -1, 0, 0].add(0.05)  # noqa: E731
    change(monkeypatch, "flash_attention", add)
    status, written, lines, timer = bench("forward", ["causal_32x32"], tmp_path)
    assert status == 1
    assert not [row for row in written if row["op"] != "ceiling"]
    assert not timer.calls
    assert any("wrong, not timed: out: positions 0 to 31: error 5.0" in line for line in lines)


def test_caches_of_all_kinds_take_turns_with_the_same_peers(tmp_path, monkeypatch):
    def wrong(right, q, cache, **rest):
        return right(q, cache, **rest) * (1.1 if cache.kind == "stacked" else 1.0)

    change(monkeypatch, "decode_attention", wrong)
    kinds = ("per_sequence", "stacked", "paged")
    names = [f"decode_{kind}_float8_e4m3fn" for kind in kinds]
    status, written, _, timer = bench("decode", names, tmp_path)
    assert status == 1
    per_sequence, stacked, paged = (
        [row["impl"] for row in written if row.get("case") == name] for name in names
    )
    assert stacked == [] and paged == per_sequence == ["pallas_attn/reference", "wide_cache"]
    assert len([name for name in timer.calls if "reference" in name]) == 10
    assert ["first_call_s" in row for row in written if rows.is_ours(row)] == [True, False]


# Each function once, and the backward of one that is a score.
FUNCTIONS = [x for x in known.MASK if x.head_dim == 128 and x.kv_len == 8192]
FUNCTIONS = [x for x in FUNCTIONS if x.both == (x.function[0] in ("alibi", "t5"))]


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda x: x.name)
def test_functions_are_checked_beside_the_options_that_say_the_same(case, tmp_path, monkeypatch):
    name, n = case.function
    little = dataclasses.replace(
        case, q_len=96, kv_len=96, q_heads=4, kv_heads=2, head_dim=32, v_head_dim=32,
        dtype="float32", function=(name, min(n, 20)),
    )  # fmt: skip
    monkeypatch.setitem(LITTLE, case.name, little)
    status, written, lines, _ = bench("mask", [case.name], tmp_path, Options(turns=1))
    assert status == 0, lines
    beside = ["built_in"] if name in ("full", "causal", "window", "documents") else []
    beside += ["not_learned"] if case.learned else []
    impls = [row["impl"] for row in of_op(written, "mask")]
    assert impls == ["pallas_attn/reference", *beside]
    pairs = int(little.written_out()["mask_array"].sum()) * (1 if name == "documents" else 2)
    assert little.visible_pairs() == pairs
    assert any("torch" in line for line in lines)  # flex is not there, and said


ROTATED = [case for case in known.ATTENTION if case.rotary is not None]


def named(x):
    return getattr(x, "name", x)


def little_rotated(case):
    """A quarter of the columns, 40 rows."""
    sizes = {"batch": 1, "q_len": 40, "kv_len": 40, "q_heads": 4, "kv_heads": 2, "head_dim": 48}
    first, dims, interleaved = case.rotary
    rotary = (first // 4, dims // 4, interleaved)
    return dataclasses.replace(case, **sizes, v_head_dim=32, rotary=rotary, dtype="float32")


@pytest.mark.parametrize(
    "op, case", [("forward", ROTATED[0]), *(("backward", x) for x in ROTATED)], ids=named
)
def test_rotation_is_checked_beside_that_of_a_model(op, case, tmp_path, monkeypatch):
    monkeypatch.setitem(LITTLE, case.name, little_rotated(case))
    status, written, lines, _ = bench(op, [case.name], tmp_path, Options(turns=1))
    assert status == 0, "\n".join(lines)
    impls = [row["impl"] for row in of_op(written, {"forward": op}.get(op, "forward+backward"))]
    assert {"pallas_attn/reference", "in_model"} <= set(impls), lines


def little_mixture(name, kind="paged"):
    """A case of cases.py with its rows and lengths in a small cache."""
    case = next(x for x in known.PREFILL if x.name == name)
    most = max(case.lengths)
    shrunk = lambda counts: tuple(-(-n * 192 // most) for n in counts[-5:])  # noqa: E731
    rows = None if case.rows is None else shrunk(case.rows)
    if rows and max(case.rows) == 1:
        rows = (1,) * 5
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "v_head_dim": 32, "capacity": 192}
    sizes |= {"q_len": -(-case.q_len * 192 // most) if case.q_len > 1 else 1}
    return dataclasses.replace(
        case, lengths=shrunk(case.lengths), rows=rows, dtype="float32", **sizes
    )


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("mixed_paged16", set()),
        ("mixed_stacked_tokens_alone", set()),
        ("mixed_paged64_chunk_alone", {"dense", "xla"}),
        ("packed_stacked_16_lognormal", {"dense"}),
        ("packed_paged16_one_token", {"unpacked"}),
        ("packed_stacked_one_token_lognormal", {"unpacked"}),
    ],
)
def test_packed_rows_are_checked_and_meet_their_parts(name, others, tmp_path, monkeypatch):
    monkeypatch.setitem(LITTLE, name, little_mixture(name))
    status, written, lines, _ = bench("prefill", [name], tmp_path, Options(turns=1))
    assert status == 0, lines
    impls = {row["impl"] for row in of_op(written, "prefill")}
    assert impls == {"pallas_attn/reference", *others}


def test_a_result_that_cannot_be_judged_is_one_case_s_failure(tmp_path, monkeypatch):
    right = verify.judge

    def breaks(got, *rest, **more):
        if got[0].shape[1] == 16:
            raise RuntimeError("the result never came")
        return right(got, *rest, **more)

    monkeypatch.setattr(verify, "judge", breaks)
    names = ["attention_16x16", "causal_32x32"]
    status, written, lines, _ = bench("forward", names, tmp_path, Options(peers="none"))
    assert status == 1
    assert [row["case"] for row in of_op(written, "forward")] == ["causal_32x32"]
    assert lines[-2:] == [
        "FAILED attention_16x16: RuntimeError: the result never came",
        "1 of 2 cases failed, and 0 times a peer",
    ]


def test_a_case_that_fails_in_its_turn_leaves_the_others_theirs(tmp_path):
    names = [f"decode_{kind}_float8_e4m3fn" for kind in ("stacked", "paged")]
    late = {f"pallas_attn/reference {names[1]}": RuntimeError("gone")}
    status, written, lines, timer = bench("decode", names, tmp_path, Options(turns=2), **late)
    assert status == 1
    assert {row["case"] for row in of_op(written, "decode")} == {names[0]}
    assert f"FAILED {names[1]}: RuntimeError: gone" in lines
    assert timer.calls.count("pallas_attn/reference") == 3  # one turn before the failure, two anew


def _breaks(*_):
    raise RuntimeError("stream capture\nat length")


def test_a_peer_that_fails_is_said_in_the_row_and_the_run_fails(tmp_path, monkeypatch):
    here = lambda name, **more: lambda asked: [Subject(name, peers.xla(asked)[0].launch, **more)]  # noqa: E731
    table = {
        "made": _breaks,
        "called": lambda call: [Subject("called", _breaks)],
        "read": here("read", outputs=_breaks),
        "timed": here("timed"),
        "zeros": lambda call: [Subject("zeros", lambda: (jnp.zeros_like(call.arrays["q"]),))],
        "xla": peers.xla,
    }
    monkeypatch.setitem(peers.PEERS, "forward", table)
    ms = {"timed": RuntimeError("stream capture"), "xla": 2.0}
    status, written, lines, _ = bench("forward", ["float32_causal"], tmp_path, **ms)
    assert status == 1
    ours, *others = of_op(written, "forward")
    assert [row["impl"] for row in others] == ["xla"]
    reason = "RuntimeError: stream capture"
    assert ours["failed"] == dict.fromkeys(("made", "called", "read", "timed"), reason)
    assert list(ours["wrong"]) == ["zeros"]
    assert f"FAILED timed at float32_causal: {reason}" in lines
    assert any(line.startswith("LEFT OUT zeros at float32_causal: wrong, not ") for line in lines)
    assert lines[-1] == "0 of 1 cases failed, and 4 times a peer"


def test_an_append_that_touches_another_row_is_wrong(tmp_path, monkeypatch):
    def stray(right, cache, k, v, **rest):
        cache = right(cache, k, v, **rest)
        return dataclasses.replace(cache, v=cache.v.at[0, 0, -1, 0].add(1))

    change(monkeypatch, "write_kv", stray)
    status, _, lines, _ = bench("append", ["append_stacked_distinct"], tmp_path)
    assert status == 1
    assert any("a buffer differs" in line for line in lines)


def test_a_peer_that_is_wrong_or_missing_is_left_out_and_said(tmp_path, monkeypatch):
    def zeros(call):
        return [Subject("zeros", lambda: (jnp.zeros_like(call.arrays["q"]),))]

    def missing(call):
        raise Unavailable("not for sale")

    table = {"zeros": zeros, "missing": missing, "xla": peers.xla}
    monkeypatch.setitem(peers.PEERS, "forward", table)
    status, written, lines, _ = bench("forward", ["float32_causal"], tmp_path)
    assert status == 0
    impls = [row["impl"] for row in of_op(written, "forward")]
    assert impls == ["pallas_attn/reference", "xla"]
    assert any("zeros: wrong, not timed: out: positions" in line for line in lines)
    assert any("missing: not for sale" in line for line in lines)


@pytest.mark.parametrize(
    ("peer", "name", "reason"),
    [
        ("cudnn", "causal_32x32", "no float32"),
        ("cudnn", "softcap", "no softcap"),
        ("attention_mgpu", "dim72", "head dims 72"),
        ("attention_mgpu", "documents", "no segments"),
        ("xla", "sinks", "no sinks"),
    ],
)
def test_peers_refuse_what_they_cannot_express(peer, name, reason):
    case = LITTLE[name]
    with pytest.raises(Unavailable, match=reason):
        peers.PEERS["forward"][peer](Call(case, case.arrays(), None, "forward"))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("forward", name) for name in ("group4_kv2", "window_of_one", "band")),
        ("forward+backward", "group4_kv2"),
        ("jvp", "band"),
    ],
)
def test_fa4_jax_is_asked_for_the_same(op, name, monkeypatch):
    """Its keywords, and what they mean, as it documents them (0.1.0)."""
    asked = []

    def flash_attn(q, k, v, *, causal=False, window_size=None, scale=None):
        asked.append((causal, window_size))
        mask = pallas_attn.CAUSAL if causal else pallas_attn.FULL
        if window_size is not None:
            mask = pallas_attn.Mask(*window_size)
        return pallas_attn.flash_attention(q, k, v, mask=mask, scale=scale)

    spec = importlib.machinery.ModuleSpec("fa4_jax", None)
    monkeypatch.setitem(sys.modules, "fa4_jax", types.ModuleType("fa4_jax"))
    sys.modules["fa4_jax"].__spec__, sys.modules["fa4_jax"].flash_attn = spec, flash_attn
    case = dataclasses.replace(LITTLE[name], dtype="float16", q_offset=0)
    case = dataclasses.replace(case, kv_len=case.q_len)
    directions = {"forward+backward": case.cotangent, "jvp": case.tangents}.get(op, lambda: None)
    call = Call(case, case.arrays(), directions(), op)
    (subject,) = peers.fa4_jax(call)
    assert judges.judge_of(call)(subject, subject.launch()) is None
    band = None if case.mask.left is None else (case.mask.left, case.mask.right)
    assert asked[0] == (case.mask == pallas_attn.CAUSAL, band)


def test_turns_interleave_and_rotate():
    timer = FakeTimer(a=1.0, b=2.0, c=3.0)
    timings = timing.interleave(timer, [Subject(x, lambda: ()) for x in "abc"], turns=3, times=2)
    assert "".join(timer.calls) == "abc" + "bca" + "cab"
    assert timings["b"] == timing.Timing(2.0, 2.0, 6, 1)


def test_ceilings_count_operations_and_bytes():
    timer = FakeTimer(matmul=1.0, read=2.0, copy=4.0)
    rates = timing.ceilings(timer, matmul=64, nbytes=2**16)
    assert rates["matmul"] == pytest.approx(2 * 64**3 / 1e9)
    assert rates["read"] == pytest.approx(2**16 / 2e9)
    assert rates["copy"] == pytest.approx(2 * 2**16 / 4e9)


def test_a_benchmark_without_a_gpu_says_so():
    with pytest.raises(ValueError, match="a benchmark times a GPU and jax found none"):
        run_bench("forward", "grid")
    with pytest.raises(ValueError, match="op: expected one of forward, backward"):
        run_bench("sideways", "grid")
    with pytest.raises(ValueError, match="peers: expected names of cudnn, .*, got 'cudn'"):
        run_bench("forward", "grid", Options(peers="xla,cudn"))
    with pytest.raises(ValueError, match="cases: expected tags or globs that leave a case, got ''"):
        run_bench("forward", "")


def test_a_plot_that_cannot_be_is_said_before_anything_is_measured(tmp_path):
    timer = FakeTimer()
    (tmp_path / "file").touch()
    for plot, wrong in (("a.gif", ValueError), ("file/a.svg", OSError)):
        with pytest.raises(wrong):
            run_bench("append", "m1", Options(plot=str(tmp_path / plot)), timer=timer)
    assert not timer.calls


@pytest.mark.parametrize("name", ["kv_lengths_causal", "documents", "offsets_by_row", "sinks"])
def test_verify_catches_a_small_fault_everywhere(name):
    case = LITTLE[name]
    arrays = case.arrays()
    if isinstance(case.q_offset, int):
        arrays["q_offset"] = case.q_offset
    oracle, naive = verify.expected(arrays, case.options())
    out = pallas_attn.flash_attention(**case.arguments())
    assert verify.judge((out,), oracle, naive) is None
    assert "error" in verify.judge(((out * 1.03).astype(out.dtype),), oracle, naive)
    assert "error" in verify.judge((out.at[:, -1].set(jnp.nan),), oracle, naive)


def test_verify_catches_a_gradient_of_the_wrong_head():
    case = LITTLE["group4_kv2"]
    do = case.cotangent()
    arrays = case.arrays() | {"q_offset": case.q_offset}
    oracle, naive = verify.expected(arrays, case.options(), do)
    launch = subjects.attention(case, case.arrays(), do, "forward+backward", None)
    out, dq, dk, dv = launch()
    assert 0 < launch.memory_mib < 100
    assert verify.judge((out, dq, dk, dv), oracle, naive) is None
    assert verify.judge((out, dq, dk[:, :, ::-1], dv), oracle, naive).startswith("dk: positions")


def test_verify_expects_the_rounding_of_sums_that_cancel():
    """dP and delta are equal where a row sees one key; a kernel adds them up in orders of its own,
    and a tensor core rounds its sums towards 0.
    """
    case = known._attention("cancel", (512, 2), (8, 8), 64, mask=pallas_attn.CAUSAL)
    arrays, do = case.arrays(), case.cotangent()
    oracle, naive = verify.expected(arrays, case.options(), do)
    k, v, first = (np.asarray(x[:, 0], np.float32) for x in (arrays["k"], arrays["v"], do))
    turned = np.random.default_rng(1).permutation(64)
    rows, columns = first[..., None, :], v[..., None]
    dp = definition.towards_zero(rows, columns)
    delta = definition.one_by_one(rows[..., turned], columns[..., turned, :])

    def with_dq(delta):
        out, dq, *others = oracle
        first_row = (dp - delta)[..., 0] * np.float32(64**-0.5) * k
        return out, dq.at[:, 0].set(first_row), *others

    assert np.abs(with_dq(delta)[1][:, 0]).max() > tolerance.NOISE
    assert verify.judge(with_dq(delta), oracle, naive) is None
    wrong = delta * np.float32(1 + 2.0**-17)
    assert verify.judge(with_dq(wrong), oracle, naive).startswith("dq: positions 0 to 0")


def test_paged_caches_hold_what_the_dense_arrays_say():
    case = LITTLE["decode_paged_edges"]
    arrays = case.arrays()
    cache = subjects.filled_cache(case, arrays)
    assert not jnp.array_equal(cache.page_table[-1], jnp.sort(cache.page_table[-1]))
    pages = jnp.moveaxis(cache.k[cache.page_table[-1]], 0, 1)
    assert jnp.array_equal(pages.reshape(arrays["k"].shape[1:]), arrays["k"][-1])


def fake_rows():
    here = rows.Provenance("run1", "NVIDIA H200", "0.11.2", "abc", "2026-11-20T20:00:00Z")
    later = dataclasses.replace(here, run="run2", date="2026-11-21T20:00:00Z")
    latest = dataclasses.replace(here, run="run3", date="2026-11-22T20:00:00Z")
    case = next(case for case in known.ATTENTION if case.name == "h128_causal_b2_t8192_n16")
    decode = next(case for case in known.DECODE if "paged" in case.tags)
    append = known.APPEND[0]

    def row(case, op, impl, ms, where=here):
        return rows.measured(case, op, impl, timing.Timing(ms, ms, 15, 1), where)

    return [
        *rows.ceiling_rows(CEILINGS, here),
        *rows.ceiling_rows(CEILINGS, later),
        row(case, "forward", "pallas_attn/sm90", 2.0),
        row(case, "forward", "cudnn", 1.0),
        row(case, "forward", "pallas_attn/sm90", 0.8, later),
        row(case, "forward", "cudnn", 0.9, later),
        row(case, "forward", "pallas_attn/flash_fwd_sm80", 1.6, latest),
        row(case, "forward", "torch_flash2", 2.0, latest),
        row(decode, "decode", "pallas_attn/sm90", 0.01),
        row(append, "append", "pallas_attn/sm80", 0.001),
        row(append, "append", "xla", 0.005),
    ]


def test_a_section_shows_the_newest_run_and_ratios_within_it():
    text = pages.every_case(fake_rows())
    lines = [line.split() for line in text.splitlines()]
    assert ["case", "ours", "cudnn", "over", "best"] in lines
    assert lines.count(["h128_causal_b2_t8192_n16", "687", "611", "1.12"]) == 1
    assert "H200 4.50 TB/s reading memory, H200 800 TFLOP/s in a large matmul." in text
    assert ["append_m1", "1.00", "5.00", "5.00"] in lines
    assert f"## Forward, TFLOP/s{report.PORTABLE}\n" in text
    assert ["h128_causal_b2_t8192_n16", "344", "275", "1.25"] in lines
    assert pages.every_case([]) == pages.benchmarks([]) == "Nothing is measured yet."
    summary = pages.benchmarks(fake_rows())
    case = "`h128_causal_b2_t8192_n16`"
    assert f"| Forward | cudnn | 1.12 | 1.12 | {case} | 1 |" in summary
    assert f"| Forward, portable kernels | torch_flash2 | 1.25 | 1.25 | {case} | 1 |" in summary
    assert "| Append | xla | 5.00 |" in summary and "| Decode |" not in summary  # has no peer


def test_peers_of_a_few_cases_share_a_column():
    ours = next(row for row in fake_rows() if row["op"] == "append")
    rows_of = [ours | {"case": f"h{n}", "ms": 1.0} for n in range(5)]
    rows_of += [row | {"impl": "cudnn"} for row in rows_of]
    rows_of += [rows_of[0] | {"impl": name, "ms": 2.0} for name in ("flashinfer", "chain")]
    lines = [line.split() for line in pages.every_case(rows_of).splitlines()]
    assert ["case", "ours", "cudnn", "over", "best", "others"] in lines
    others = ["chain", "2000.00,", "flashinfer", "2000.00"]
    assert ["h0", "1000.00", "1000.00", "1.00", *others] in lines
    assert ["h4", "1000.00", "1000.00", "1.00"] in lines
    summary = pages.benchmarks(rows_of)
    assert "| Append | cudnn | 1.00 | 1.00 | `h0` | 5 |" in summary
    assert "| flashinfer |" in summary and "| chain |" not in summary  # a call of our own


def test_the_table_of_the_readme_counts_no_other_gpu():
    rows_of = fake_rows()
    elsewhere = [row | {"gpu": "NVIDIA H100 80GB HBM3", "date": "2099-01-01"} for row in rows_of]
    assert pages.overview([*rows_of, *elsewhere]) == pages.overview(rows_of)
    assert pages.overview(rows_of) != pages.overview(elsewhere)


def test_rows_of_older_commits_are_marked():
    """A line without a mark has rows of the newest commit alone."""
    of = lambda rows_of, **facts: [row | facts for row in rows_of]  # noqa: E731
    before, second = fake_rows(), next(x.name for x in known.ATTENTION if "grid" in x.tags)
    assert not re.search("†|older", pages.overview(before) + pages.benchmarks(before))
    assert "Commit `abc`, 2026-11-21." in pages.overview(before)
    again = of(before, case=second, commit="0123456", date="2026-11-23", run="new")
    again = [row for row in again if row["op"] == "forward" and "sm80" not in row["impl"]]
    del again[:2]  # the older pair
    mixed = [*before, *again]
    assert "| Forward † |" in pages.overview(mixed)
    line = "Commit `0123456`, 2026-11-23. † With cases of 1 older commit, 2026-11-21."
    assert line in pages.overview(mixed)
    assert "| Forward † | cudnn |" in pages.benchmarks(mixed)
    text = pages.every_case(mixed)
    assert re.search(r"^h128_causal_b2_t8192_n16 †  ", text, re.M)
    assert re.search(rf"^{second}  +\d", text, re.M)
    decode = text.partition("## Decode")[2].partition("##")[0]  # all lines are old: one mark
    assert "\ncase †  " in decode and decode.count("†") == 1
    newer = of(before, commit="0123456789ab", date="2026-11-24", run="newest")
    newer = [row for row in newer if row["op"] == "forward" and row["ms"] in (0.8, 0.9)]
    whole = pages.overview([*mixed, *newer])
    assert "| Forward |" in whole and "Commit `0123456789ab`, 2026-11-24.\n" in f"{whole}\n"


def test_the_first_table_has_what_a_reader_compares():
    case = "h128_causal_b2_t8192_n16"
    peer = {"op": "forward", "case": case, "impl": "flash_attention_4", "tflops": 613.0}
    text = pages.benchmarks(fake_rows(), [peer])
    table, *_ = text.split("\n\n")
    assert table.splitlines() == [
        "| operation | case | **ours** | cuDNN | FlashAttention-4 |",
        "| --- | --- | ---: | ---: | ---: |",
        f"| forward | `{case}` | **687** | 611 | *613* |",
        "| decode | `decode_paged_b1_s8192_n32k8_h128` | **3.36** |||",
    ]
    assert text.index("![forward]") < text.index("python run.py") < text.index("## Every")
    beside = next(row for row in fake_rows() if row["impl"] == "cudnn" and row["run"] == "run2")
    text = pages.benchmarks([*fake_rows(), beside | {"impl": "fa4_jax"}])
    assert "| **ours** | cuDNN | fa4-jax |" in text


def test_only_the_marked_part_of_a_page_changes():
    text = f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter"
    made = pages.between_markers(text, "new")
    assert made == f"before\n{pages.BEGIN}\nnew\n{pages.END}\nafter"
    with pytest.raises(ValueError, match="expected the markers"):
        pages.between_markers("no markers", "new")


def test_peers_of_other_processes_enter_no_ratio():
    case = "h128_causal_b2_t8192_n16"
    peer = {"op": "forward", "case": case, "impl": "flash_attention_4", "tflops": 613.0}
    peer |= {"version": "4", "date": "2026-11-20", "method": "events", "ours_tflops": 770}
    text = pages.every_case(fake_rows(), [peer])
    assert "| cudnn | 1.12 |" in pages.benchmarks(fake_rows())
    assert ["Forward", "ours", "flash_attention_4", "4"] in [x.split() for x in text.splitlines()]
    assert [case, "687", "613", "(ours", "770)"] in [x.split() for x in text.splitlines()]
    assert "- flash_attention_4 4, 2026-11-20: events." in text
    later = peer | {"version": "5", "date": "2026-11-22", "method": "graphs; a process of its own"}
    earlier = peer | {"method": "events; a process of its own"}
    text = pages.every_case(fake_rows(), [earlier, later])  # shared facts stand once
    assert text.count("a process of its own") == 1 and "2026-11-22: graphs." in text
    picture = pages.pictures(fake_rows(), [peer])["forward"]
    assert "1.12 times the best peer" in picture and "flash_attention_4" in picture


def test_rows_on_disk_are_whole():
    for row in rows.read(ROOT / "results"):
        if row["op"] == "ceiling":
            continue
        assert not set(rows.REQUIRED) - row.keys(), row
        assert row["checked"] is True


def test_rows_of_other_processes_say_how_they_were_taken():
    for row in rows.read(ROOT / "results" / "separate"):
        wanted = {"op", "case", "impl", "version", "method", "gpu", "date"}
        assert not wanted - row.keys() and ("tflops" in row) != ("tbps" in row), row
        assert not rows.is_ours(row)


@pytest.mark.parametrize("wanted", ["grid", "windows,odd", "grid+causal,-h256", "h64_*", "twin"])
def test_the_same_names_select_for_every_kind(wanted):
    chosen = known.select(known.ATTENTION, wanted)
    assert chosen
    if "h256" in wanted:
        assert all("causal" in case.tags and case.head_dim != 256 for case in chosen)


def test_a_tag_that_nothing_has_lists_those_that_are():
    with pytest.raises(ValueError, match="No case matches 'gird'. Tags: .*grid"):
        known.select(known.ATTENTION, "gird")


def test_names_are_unique():
    everything = known.ATTENTION + known.DECODE + known.PREFILL + known.APPEND + known.MASK
    assert len({case.name for case in everything}) == len(everything)


def test_prefill_counts_the_pairs_that_its_rows_see():
    rows_of = {case.name: rows.work(case, "prefill") for case in known.PREFILL}
    assert rows_of["prefill_stacked_m8_t4096"] == ("tflops", pytest.approx(3.2989, rel=1e-4))
    assert len(rows_of) == 108 and len(contest.alike(known.PREFILL)) == 39
    parts = ("mixed_stacked_tokens_alone", "mixed_stacked_chunk_alone")
    assert rows_of["mixed_stacked"][1] == pytest.approx(sum(rows_of[name][1] for name in parts))
    prompts = next(
        case.rows for case in known.PREFILL if case.name == "packed_paged16_16_lognormal"
    )
    pairs = sum(n * (n + 1) // 2 for n in prompts)
    assert rows_of["packed_paged16_16_lognormal"][1] == pytest.approx(4 * 128 * 32 * pairs / 1e12)


def test_work_is_counted_as_published():
    by_name = {case.name: case for case in known.ATTENTION}
    plain = by_name["h128_causal_b2_t8192_n16"]
    assert plain.flops() == 4 * 2 * 16 * 8192 * 8192 * 128 / 2
    assert rows.work(plain, "forward+backward")[1] == pytest.approx(3.5 * plain.flops() / 1e12)
    window = by_name["h64_window128_t8192"]
    assert window.visible_pairs() == 2 * (8192 * 128 - 127 * 128 // 2)
    packed, separate = by_name["documents_8x1024"], by_name["rows_8x1024"]
    assert packed.visible_pairs() == pytest.approx(separate.visible_pairs(), rel=2e-3)
    half, whole = by_name["lengths_half_of_8192"], by_name["lengths_none_of_8192"]
    assert 2 * half.flops() == whole.flops()


@pytest.mark.parametrize("name", ["segments_mixed", "everything", "q_lengths", "offsets_by_row"])
def test_visible_pairs_are_those_of_the_dense_mask(name):
    case = dataclasses.replace(LITTLE[name], sinks=False, bias_shape=None, mask_shape=None)
    arrays = case.arrays() | {"q": jnp.zeros_like(case.arrays()["q"])}
    eye = jnp.eye(case.kv_len, dtype=case.dtype)[None, :, None]
    arrays["v"] = jnp.broadcast_to(eye, (case.batch, case.kv_len, case.kv_heads, case.kv_len))
    out = pallas_attn.flash_attention(**arrays, **case.options())
    assert int((out[:, :, 0] != 0).sum()) == case.visible_pairs()
