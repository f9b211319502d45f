"""Many new rows over a cache by the portable forward, to which XLA copies the rows: who takes what,
what becomes of layers, pages, scales and rows that do not exist, and that it is right.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import CAUSAL, FULL, Mask, sliding_window
from pallas_attn._call import dispatch, selection
from pallas_attn._call.kernel import Kernel
from pallas_attn.kernels.flash_fwd import sm80, sm90_wide
from pallas_attn.kernels.prefill import gathered, gathered_packed_sm90
from pallas_attn.masks import AT_RUN_TIME
from tests.kernels.prefill import test_prefill_widened
from tests.support import decode_cases, mosaic
from tests.support import operations as support
from tests.support.decode_cases import Case

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KERNELS = {"gathered_sm80": gathered.over(sm80.KERNEL)}
KERNELS["gathered_sm90"] = gathered.over(sm90_wide.KERNEL)
PROBLEM = dataclasses.replace(support._BASE["decode"], gpu="sm80", q_len=1024)


def chosen(implementation=None, **changes):
    problem = dataclasses.replace(PROBLEM, **changes)
    return getattr(dispatch.select(problem, implementation), "module", None)


def test_who_takes_what():
    ours = "prefill.gathered_sm80"
    few = selection.FEWEST_PAIRS_GATHERED // (PROBLEM.q_heads // PROBLEM.kv_heads)
    assert chosen(q_len=few) == ours and chosen(q_len=few - 1) == "decode.sm80"
    for gpu in ("sm86", "sm100"):
        assert chosen(gpu=gpu) == ours
    assert chosen(gpu="sm90") == "prefill.sm90" and chosen("sm80", gpu="sm90") == ours
    assert chosen(quantized=True, cache_dtype="int8") == ours
    assert chosen(dtype="float32", cache_dtype="float32") == ours
    assert chosen(tokens=4096) == chosen(batch_invariant=True) == "decode.sm80"
    long = dataclasses.replace(PROBLEM, capacities=(2**24,) * PROBLEM.sequences)
    assert "GiB" in str(KERNELS["gathered_sm80"].limit(long))


# Several tiles of rows, and of keys; lengths that end in the first, within and past a sequence.
LENGTHS = (0, 3, 130, 200, 500)
SOME = {
    "stacked": Case(lengths=LENGTHS, q_len=70, sinks=True, softcap=3.0),
    "per_sequence": Case("per_sequence", LENGTHS, 9, layers=3, mask=sliding_window(37)),
    "paged": Case("paged", LENGTHS, 9, page_size=8, v_head_dim=128, layers=2, mask=Mask(20, -2)),
    "paged_full": Case("paged", LENGTHS, 9, page_size=24, head_dim=72, mask=FULL),
    "float32": Case("paged", (70, 5), 9, dtype="float32", precision="highest"),
}


def launched(case, inputs, kernel: Kernel = KERNELS["gathered_sm80"], gpu: str = "sm80"):
    config = kernel.config.default(dataclasses.replace(case.problem, gpu=gpu))
    return jax.jit(functools.partial(kernel.run, problem=case.problem, config=config))(inputs)


def agree(case, kernel: Kernel = KERNELS["gathered_sm80"], gpu: str = "sm80"):
    """With the oracle; what lies past a length, and in other layers, is NaN."""
    got = launched(case, case.inputs(0, fill=np.nan), kernel, gpu)
    want = decode_cases.of_definition(case, case.inputs(0, fill=0.0))
    step = 2.0**-14 if case.dtype == "float32" else float(jnp.finfo(case.dtype).eps)
    for g, w, close in zip(got, want, (2 * step, 1e-4), strict=True):
        decode_cases.close(g, w, close, close)


@pytest.mark.guards
@pytest.mark.parametrize("name", SOME)
def test_interpreted(name):
    with mosaic.interpret():
        agree(SOME[name])


@pytest.mark.guards
def test_a_window_that_arrives_at_run_time_interpreted():
    case = Case(lengths=(0, 3, 130), q_len=9, mask=sliding_window(37))
    kernel, inputs = KERNELS["gathered_sm80"], case.inputs(0, fill=np.nan)
    problem = dataclasses.replace(case.problem, mask=CAUSAL.filled(left=AT_RUN_TIME))
    config = kernel.config.default(problem)
    run = jax.jit(functools.partial(kernel.run, problem=problem, config=config))
    with mosaic.interpret():
        got, want = run(inputs._replace(mask_left=jnp.int32(36))), launched(case, inputs)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(*(np.asarray(z, np.float32) for z in (x, y)))


def packed_agree(case, counts):
    """Sequences of many rows and of few, after rows and before rows that nobody owns."""
    before, after = 3, 2
    starts = before + np.r_[0, np.cumsum(counts)]
    own = [(m, case.q_len - count + n) for m, count in enumerate(counts) for n in range(count)]

    def packed(x):  # [M, t, ..] to [tokens, ..]; row i of t stands at position length - t + i
        rows = [x[place] for place in own]
        nothing = np.zeros_like(rows[0])
        return np.stack([*before * [nothing], *rows, *after * [nothing]])

    tokens = int(starts[-1]) + after
    problem = dataclasses.replace(case.problem, tokens=tokens, q_len=tokens)
    inputs = case.inputs(0, fill=np.nan)
    inputs = inputs._replace(
        q=jnp.asarray(packed(np.asarray(inputs.q))),
        starts=jnp.asarray(starts, jnp.int32),
    )
    kernel = gathered_packed_sm90.KERNEL
    assert kernel.limit(problem) is None
    config = dataclasses.replace(kernel.config.default(problem), most=6)
    got = jax.jit(functools.partial(kernel.run, problem=problem, config=config))(inputs)
    out, lse = decode_cases.of_definition(case, case.inputs(0, fill=0.0))
    want = packed(np.asarray(out)), packed(np.swapaxes(np.asarray(lse), 1, 2)).T
    decode_cases.close(got[0], want[0], 2.0**-6, 2.0**-6)
    rows = slice(before, tokens - after)
    decode_cases.close(got[1][:, rows], want[1][:, rows], 1e-2, 1e-2)


def test_who_takes_wide_heads():
    wide = {"gpu": "sm90", "head_dim": 512, "v_head_dim": 512}
    assert chosen(**wide) == "prefill.gathered_sm90" and chosen(**wide, q_len=1) == "decode.sm90"
    ours = "prefill.gathered_packed_sm90"
    few = selection.rows_gathered(PROBLEM)
    assert chosen(**wide, tokens=few) == ours and chosen(**wide, tokens=few - 1) == "decode.sm90"
    assert chosen(**wide, tokens=few, quantized=True, cache_dtype="int8") == ours
    separate = {"kind": "per_sequence", "page_size": None, "pages": None}
    assert chosen(**wide, tokens=few, **separate) == "decode.sm90"
    assert "256" in str(KERNELS["gathered_sm90"].limit(dataclasses.replace(PROBLEM, gpu="sm90")))


@pytest.mark.guards
@pytest.mark.parametrize("kind", decode_cases.KINDS)
def test_quantised_interpreted(kind):
    case = test_prefill_widened.MANY[kind]
    with mosaic.interpret():
        got = launched(case, case.inputs(fill=np.nan))
    want = decode_cases.of_definition(case, case.widened(case.inputs()))
    for g, w, close in zip(got, want, (2.0**-6, 1e-3), strict=True):
        decode_cases.close(g, w, close, close)


def test_layers_and_sequences_that_do_not_exist():
    case = SOME["per_sequence"]
    inputs = case.inputs(0)._replace(new_lengths=jnp.int32([-1, 3, 9, 9, 9]))
    with mosaic.interpret():
        out, lse = launched(case, inputs)
        lost = np.isnan(np.asarray(lse)).all(axis=(1, 2)).tolist()
        assert lost == [True, False, False, False, True]
        ends = inputs._replace(lengths=jnp.int32([-(2**31), -1, 2**31 - 1, 9, 209]))
        out, lse = launched(case, ends)
        lost = np.isnan(np.asarray(lse)).all(axis=(1, 2)).tolist()
        assert lost == [True, False, True, False, False]
        assert not np.asarray(out, np.float32)[1].any() and (np.asarray(lse)[1] == -np.inf).all()
        for layer in (-1, 3, 2**31 - 1):
            out, lse = launched(case, inputs._replace(layer=jnp.int32(layer)))
            assert np.isnan(np.asarray(out, np.float32)).all() and np.isnan(np.asarray(lse)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", decode_cases.KINDS)
@pytest.mark.parametrize("name", ["plain", "window", "float32"])
def test_on_the_gpu(kind, name):
    options = {
        "plain": {"sinks": True, "softcap": 20.0},
        "window": {"mask": sliding_window(300), "layers": 2},
        "float32": {"dtype": "float32"},
    }[name]
    sizes = {"capacity": 1600, "head_dim": 128, "v_head_dim": 128}
    agree(Case(kind, (1500, 0, 7, 1111, 1700), 300, **sizes, **options))
