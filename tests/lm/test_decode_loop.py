"""The loop: continuous batching, stops, pools, chunks, what it refuses, and its check."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_lm as lm
from benchmarks import decode_peer
from pallas_lm import decode, decode_check, session
from pallas_lm.options import CACHES
from pallas_lm.sampling import Sampling
from tests.lm.loops import (
    LENGTHS,
    ends,
    forward,
    options,
    plain_run,
    prompts,
    refuses,
    run,
    shown,
    small,
    tokens,
)

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

every_cache = pytest.mark.parametrize("kind", CACHES)
HOT = Sampling(1e6, top_k=90, top_p=0.95)  # logits hardly count
A_ROW = 2 * 3 * 2 * 16 * 4  # bytes of a row of cache


@functools.cache
def greedy_by_the_full_forward(prompt, wanted):
    """Without cache and loop: the whole text through the model for every token."""
    config, params = small()
    ids = list(prompt)
    for _ in range(wanted):
        padded = jnp.asarray([ids + [0] * (48 - len(ids))], jnp.int32)
        ids.append(int(forward(config, params, padded)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


# ---- sizes ---------------------------------------------------------------------------------------


def test_steps_are_no_larger_than_what_there_is_to_do():
    """A step of a million rows, or a chunk of as many steps, for a few tokens takes minutes."""
    config, params = small()
    asked = options(batch=2, prefill_chunk=10**6, chunk=2**16)
    few = ((1, 2, 3), (4,), (5, 6, 7, 8))
    ours = decode.Run(config, params, asked, few, 5)
    assert (ours.options.prefill_chunk, ours.options.chunk) == (16, 4)
    kept = decode.Run(config, params, options(batch=2, prefill_chunk=2, chunk=3), few, 5)
    assert (kept.options.prefill_chunk, kept.options.chunk) == (2, 3)
    whole, _ = run(few, options(batch=2))
    assert tokens(run(few, asked)[0]) == tokens(whole)


# ---- results ------------------------------------------------------------------------------------


@every_cache
def test_a_sequence_in_a_batch_is_the_sequence_alone(kind):
    """Six prompts through three slots: each takes the place of one that has ended, and gives what
    its text alone gives, through the model in one piece and through one slot.
    """
    made = plain_run(cache=kind)
    if kind == "paged":
        alone, _ = run(prompts()[3:4], options(cache=kind, batch=1))
        assert tokens(made)[3] == tokens(alone)[0]
    wanted = [(greedy_by_the_full_forward(prompt, 10), "length") for prompt in prompts()]
    assert ends(made) == wanted
    assert len(set(map(tuple, tokens(made)))) > 3


def test_sampled_tokens_do_not_depend_on_the_batch():
    """Over one cache: draws know of none. A sequence's tokens differ from one another since a
    token's position is part of its key.
    """
    drawn, alone = (tokens(plain_run(batch=n, sampling=HOT, cache="paged")) for n in (3, 1))
    assert drawn == alone
    assert min(len(set(each)) for each in drawn) > 5
    again, _ = run(prompts(), options(sampling=HOT, cache="paged"), seed=1)
    assert drawn != tokens(again)


def test_a_stop_token_ends_a_sequence_and_is_its_last():
    whole = tokens(plain_run())
    at_once, places = whole[0][0], [(m, n) for m in range(len(whole)) for n in range(2, 8)]
    # Another one ends a sequence in the midst of a chunk.
    number, place = next(
        (m, n)
        for m, n in places
        if at_once not in whole[m][: n + 1] and whole[m][n] not in whole[m][:n]
    )
    stops = at_once, whole[number][place]
    made = plain_run(stop_ids=stops)
    for (some, ended), every in zip(ends(made), whole, strict=True):
        places = [n for n, token in enumerate(every) if token in stops]
        wanted = every[: places[0] + 1] if places else every
        assert (some, ended) == (wanted, "stop" if places else "length")
    # The device needs no host to stop: the token that it drew last is the stop.
    for n, stop in zip((0, number), stops, strict=True):
        assert made.sequences[n].ended == "stop"
        alone, _ = run(prompts()[n : n + 1], options(stop_ids=stops))
        assert (alone._state.token[0], alone._state.left[0]) == (stop, 0)
        assert alone.cache.lengths[0] == LENGTHS[n] + len(tokens(alone)[0]) - 1


def test_a_first_token_may_be_the_last():
    made = plain_run(wanted=1)
    assert tokens(made) == [each[:1] for each in tokens(plain_run())]
    assert made._step == 0  # nothing but prefills


@every_cache
def test_capacity_ends_a_sequence(kind):
    """The last token needs no row: a prompt as long as the capacity still gets one."""
    made, _ = run(prompts((48, 45)), options(cache=kind))
    assert [(len(each), ended) for each, ended in ends(made)] == [(1, "capacity"), (4, "capacity")]
    for each, prompt in zip(tokens(made), prompts((48, 45)), strict=True):
        assert each[:1] == greedy_by_the_full_forward(prompt, 1)


def test_prompts_wait_for_pages_and_nobody_loses_a_row():
    """Four pages of eight rows: 16 + 9 rows take them all, so the longest prompts run alone."""
    made, statuses = run(prompts(), options(cache="paged", pages=4))
    assert tokens(made) == tokens(plain_run(cache="paged"))
    assert not made.cache.overflowed.any()
    assert min(status.running for status in statuses if status.waiting) <= 1


# ---- prompts in chunks --------------------------------------------------------------------------


def test_prompts_in_chunks_give_the_same_tokens():
    """One prompt in a step and several, in the midst of others and alone; a stop among them."""
    stop = tuple(tokens(plain_run())[4][-1:])
    made, statuses = run(prompts(), options(stop_ids=stop, prefill_chunk=7))
    assert ends(made) == ends(plain_run(stop_ids=stop))
    assert {ended for _, ended in ends(made)} == {"stop", "length"}
    assert made._step > len(statuses)  # mixed steps, and chunks of steps once all prompts are in
    assert {status.running for status in statuses} >= {0, 3} and statuses[-1].waiting == 0


def test_decoding_goes_on_while_a_long_prompt_comes_in():
    texts, how = prompts((3, 40)), options(prefill_chunk=7, keep_logits=True, cache="paged")
    made, statuses = run(texts, how)
    # The short prompt and 4 rows of the long one; then 6 steps, with a token of the first in each.
    assert [status.tokens for status in statuses[:7]] == [1, 2, 3, 4, 5, 6, 8]
    assert [status.live_kv_bytes for status in statuses[:2]] == [14 * A_ROW, 22 * A_ROW]
    assert all(row.held for row in decode_check.rows(made, small()[1]))
    assert tokens(made) == tokens(run(texts, options())[0])


# ---- status and times ---------------------------------------------------------------------------


def test_status_says_what_is_going_on():
    made, statuses = run(prompts(), options())
    assert [status.step for status in statuses] == sorted(status.step for status in statuses)
    assert {status.running for status in statuses} >= {0, 3}
    last = statuses[-1]
    assert (last.waiting, last.ended, last.tokens) == (0, 6, 60)
    assert statuses[0].live_kv_bytes == (5 + 12 + 1) * A_ROW
    summary = made.summary(2.0)
    assert (summary["sequences"], summary["tokens"], summary["seconds"]) == (6, 60, 2.0)
    assert summary["tokens_per_second"] > 0


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "how", "wanted", "message"),
    [
        ([], {}, 4, "prompt: expected at least one, got none"),
        ([[1], []], {}, 4, "prompt 2 is empty"),
        ([[1] * 49], {}, 4, "prompt 1: 49 tokens do not fit in a capacity of 48"),
        ([[1, 96]], {}, 4, "prompt 1: expected tokens from 0 to 95, got 1 to 96"),
        ([[1]], {}, 0, "max_new_tokens: expected at least 1, got 0"),
        ([[1]], {"capacity": 257}, 4,
         "capacity: the model was made for 256 positions, got 257; ask for fewer tokens, or give a "
         "smaller capacity"),
        ([[1] * 20], {"cache": "paged", "pages": 2}, 9,
         "prompt 1: 4 pages do not fit in a pool of 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_said_before_it_starts(texts, how, wanted, message):
    refuses(message, decode.Run, *small(), options(**how), texts, wanted)


SAMPLES = {"cache": "paged", "sampling": Sampling(0.3), "samples": 3}
NO_CACHE = "cache: expected one of ('per_sequence', 'stacked', 'paged'), got 'ring'"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"cache": "ring"}, NO_CACHE),
        ({"chunk": 0}, "chunk: expected at least 1, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected at least 1, got 0"),
        ({"chunk": 1.5}, "chunk: expected an int of at least 1, got 1.5"),
        ({"batch": "3"}, "batch: expected an int of at least 1, got '3'"),
        ({"samples": True}, "samples: expected an int of at least 1, got True"),
        ({"pages": 0}, "pages: expected at least 1, got 0"),
        ({"stop_ids": [3]}, "stop_ids: expected a tuple of tokens, ints, got [3]"),
        ({"sampling": 0.7}, "sampling: expected a Sampling, got 0.7"),
        ({"draft": "tree"}, "draft: expected one of ('ngram',) or None, got 'tree'"),
        ({"draft": "ngram", "drafts": 0}, "drafts: expected at least 1, got 0"),
        (SAMPLES | {"samples": 0}, "samples: expected at least 1, got 0"),
        (SAMPLES | {"cache": "stacked"},
         "cache: expected 'paged', whose pages are forked, for 3 samples of a prompt, got "
         "'stacked'"),
        (SAMPLES | {"sampling": Sampling()},
         "samples: expected 1, or a temperature, for 3 samples of a prompt, got 3"),
        (SAMPLES | {"batch": 2}, "batch: expected at least 3 for 3 samples of a prompt, got 2"),
        ({"mesh": "tp:2"},
         "mesh: expected a mesh with the axis 'tp', as lm.mesh.make('tp:2', ('tp',)) makes it, or "
         "None, got 'tp:2'"),
    ],
)  # fmt: skip
def test_options_refuse(how, message):
    refuses(message, options, **how)


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_logits_that_are_no_numbers_are_an_error(drawn):
    """Weights are finite; in a prefill and in a step."""
    config, params = small()
    how = options(sampling=Sampling(**drawn))
    huge = params | {"norm": params["norm"] * 1e38, "embed": params["embed"] * 1e3}
    line = "sequence 1: its logits are not finite after 5 tokens: the weights are too large for flo"
    with pytest.raises(ValueError, match=line):
        list(decode.Run(config, huge, how, prompts(), 10))
    run = decode.Run(config, params, how, prompts(), 10)
    after = iter(run)
    next(after)
    run._params = huge
    line = r"sequence \d: its logits are not finite after \d+ tokens"
    with pytest.raises(ValueError, match=line):
        list(after)


# ---- generate -----------------------------------------------------------------------------------


NO_DTYPE = "dtype: expected one of ('bfloat16', 'float16', 'float32'), got '{}'"


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8", "foo"])
def test_load_refuses_a_dtype_in_which_no_model_runs(dtype):
    refuses(NO_DTYPE.format(dtype), lm.load, dtype=dtype)


@pytest.mark.parametrize("dtype", [jnp.float16, np.dtype("float16"), np.float16, "float16"])
def test_load_takes_a_dtype_as_jax_does(dtype):
    model = lm.load(dtype=dtype)
    assert model.dtype == "float16" and model.params["norm"].dtype == np.float16
    assert lm.generate(model, ["a"], max_new_tokens=2, dtype=dtype)
    refuses(NO_DTYPE.format("x").replace("'x'", repr(jnp.int8)), lm.load, dtype=jnp.int8)


def test_load_takes_a_folder(tmp_path):
    """Not the name of a model on a hub, nor a file."""
    (tmp_path / "model.bin").write_text("")
    wanted = "folder: expected a folder with config.json, weights and tokenizer.json, got "
    remedy = (
        "a model that a hub names is downloaded first: huggingface_hub.snapshot_download(name) "
        "returns its folder"
    )
    line = f"{wanted}'org/name' (No such file or directory); {remedy}"
    refuses(line, lm.load, "org/name")
    refuses(line.replace("folder:", "checkpoint:", 1), shown, checkpoint="org/name")
    path = tmp_path / "model.bin"
    refuses(f"{wanted}{str(path)!r} (no folder); {remedy}", lm.load, str(path))
    with pytest.raises(ValueError, match=r"^folder: expected a folder .*, got 2.5 \("):
        lm.load(2.5)


@pytest.mark.parametrize(
    ("texts", "how", "message"),
    [
        ("ROMEO:", {}, "prompts: expected a list of texts, got one; did you mean ['ROMEO:']?"),
        (["a", ""], {}, "prompt 2 is empty"),
        (["a"], {"seed": "1"}, "seed: expected an int of at least 0, got '1'"),
        (["a"], {"samples": "3"}, "samples: expected an int of at least 1, got '3'"),
        (None, {}, "prompts: expected a list of texts, got None"),
        (["a"], {"dtype": "int8"}, NO_DTYPE.format("int8")),
    ],
)
def test_generate_refuses(texts, how, message):
    refuses(message, lm.generate, lm.load(), texts, **how)


def test_float32_is_float32_in_every_thread_unless_something_else_is_asked_for(monkeypatch):
    seen = []

    def stood_in(*_):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            seen.append(pool.submit(lambda: jax.config.jax_default_matmul_precision).result())
        return 0

    monkeypatch.setattr(session, "_decode", stood_in)
    for changes in ({}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"precision": "high"}):
        shown(**changes)
    assert seen == ["highest", "highest", "default", "high"]
    assert jax.config.jax_default_matmul_precision is None


# ---- the check ----------------------------------------------------------------------------------


def test_the_check_holds_and_sees_a_wrong_logit_and_a_wrong_token():
    config, params = small()
    made = decode.Run(config, params, options(cache="paged", keep_logits=True), prompts(), 10)
    assert list(made)
    rows = list(decode_check.rows(made, params))
    assert [(row.steps, row.same, row.ties, row.held) for row in rows] == [(10, 10, 0, True)] * 6
    made.sequences[2].logits[4] = made.sequences[2].logits[4] + 0.01
    made.sequences[5].logits[7] = -made.sequences[5].logits[7].copy()
    broken = list(decode_check.rows(made, params))
    assert [row.held for row in broken] == [True, True, False, True, True, False]
    largest = np.abs(np.stack(made.sequences[0].logits)).max()
    assert broken[0].budget < 2e-5 * largest  # float32: sums in another order, no more
    assert (broken[2].same, broken[2].at) == (10, 4)
    assert (broken[5].same, broken[5].at) == (9, 7)


def test_the_check_of_bfloat16_has_the_budget_of_bfloat16():
    config, params = small()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    how = options(dtype="bfloat16", keep_logits=True)
    made = decode.Run(config, params, how, prompts(), 10)
    assert list(made)
    rms = np.sqrt(np.mean(np.square(made.sequences[0].logits)))
    assert all(row.held and 0.001 * rms < row.budget for row in decode_check.rows(made, params))


def test_a_tie_is_two_logits_within_twice_the_budget():
    """The decode and the reference may each be off by the budget."""
    truth = np.zeros((3, 8), np.float32)
    truth[:, 0] = 1.0
    got = truth.copy()
    for step, below in enumerate((0.03, 0.05, 0.0)):
        truth[step, 1], got[step, 1] = 1 - below, 1 + 1e-3 * (step < 2)
    sequence = decode.Generation(0, [1], 3, tokens=[1, 1, 0], logits=list(got))
    row = decode_check._row(sequence, truth, truth + np.float32(0.01), eps=0.0)
    assert abs(row.budget - 0.02) < 1e-6
    assert (row.same, row.ties, row.held) == (1, 1, False)


def test_the_peer_of_the_report_computes_the_same_tokens():
    """From one token each, over caches that are full of something else."""
    config, params = small()
    how = options(chunk=10)
    start = jnp.asarray([3, 50, 7], jnp.int32)
    carry = (decode_peer.create(config, how, 0), jnp.zeros(3, jnp.int32), start)
    program = jax.jit(functools.partial(decode_peer.steps, config, how, "xla"))
    (_, lengths, _), got = program(params, carry)
    wanted = [greedy_by_the_full_forward((token,), 10) for token in start.tolist()]
    assert got.T.tolist() == wanted and lengths.tolist() == [10] * 3
