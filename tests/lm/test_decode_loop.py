"""The loop: continuous batching, sampling, stops, pools, what it refuses, and how it looks."""

import concurrent.futures
import functools
import io
import json
import re
import signal
import time

import jax
import jax.numpy as jnp
import matplotlib.backends.backend_agg
import matplotlib.figure
import numpy as np
import pytest

from pallas_attn import lm
from pallas_attn.bench import rows, timing
from pallas_attn.lm import (
    check,
    decode,
    findings,
    model,
    peer,
    report,
    sampling,
    session,
    text,
)
from pallas_attn.lm.hf_config import config_from
from pallas_attn.lm.options import CACHES
from tests.lm import witness

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

every_cache = pytest.mark.parametrize("kind", CACHES)
LENGTHS = (5, 12, 1, 16, 9, 3)  # all padded to 16: programs are what takes time here


@functools.cache
def small():
    """A Qwen3 with weights that make it say different things."""
    config = config_from(witness.CONFIGS["qwen3"])
    params = model.random_params(config, 0, jnp.float32)
    return config, jax.tree.map(lambda x: x * 4 if x.ndim > 2 else x, params)


def prompts(lengths=LENGTHS):
    rng = np.random.default_rng(1)
    return tuple(tuple(rng.integers(0, 96, n).tolist()) for n in lengths)


def options(**changes):
    sizes = {"slots": 3, "capacity": 48, "page_size": 8, "chunk": 4, "dtype": "float32"}
    return decode.Options(**sizes | changes)


@functools.cache
def run(what, how, wanted=10, seed=0):
    made = decode.Run(*small(), how, what, wanted, seed)
    return made, list(made)


forward = jax.jit(model.forward, static_argnums=0)


@functools.cache
def greedy_by_the_full_forward(prompt, wanted):
    """Without cache and loop: the whole text through the model for every token."""
    config, params = small()
    ids = list(prompt)
    for _ in range(wanted):
        padded = jnp.asarray([ids + [0] * (48 - len(ids))], jnp.int32)
        ids.append(int(forward(config, params, padded)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


# ---- what it computes ---------------------------------------------------------------------------


@every_cache
def test_a_sequence_in_a_batch_is_the_sequence_alone(kind):
    """Six prompts through three slots: each takes the place of one that has ended, and gives what
    its text alone gives, through the model in one piece and through one slot.
    """
    made, _ = run(prompts(), options(cache=kind))
    if kind == "paged":
        alone, _ = run(prompts()[3:4], options(cache=kind, slots=1))
        assert made.sequences[3].tokens == alone.sequences[0].tokens
    for one, prompt in zip(made.sequences, prompts(), strict=True):
        assert one.tokens == greedy_by_the_full_forward(prompt, 10)
        assert (one.ended, len(one.tokens)) == ("length", 10)
    assert len({tuple(one.tokens) for one in made.sequences}) > 3


def test_sampled_tokens_do_not_depend_on_the_batch():
    """Over one cache: what is drawn knows of none. So hot that logits hardly count: what makes a
    sequence's tokens differ from one another is that a token's position is part of its key.
    """
    kind = "paged"
    how = sampling.Sampling(1e6, top_k=90, top_p=0.95)
    found = [
        [
            one.tokens
            for one in run(prompts(), options(slots=n, sampling=how, cache=kind))[0].sequences
        ]
        for n in (1, 3)
    ]
    assert found[0] == found[1]
    assert min(len(set(tokens)) for tokens in found[0]) > 5
    again, _ = run(prompts(), options(sampling=how, cache=kind), seed=1)
    assert found[0] != [one.tokens for one in again.sequences]


def test_chunks_only_change_when_the_host_looks():
    made, plain = run(prompts(), options(chunk=1))[0], run(prompts(), options())[0]
    assert [one.tokens for one in made.sequences] == [one.tokens for one in plain.sequences]


def test_a_stop_token_ends_a_sequence_and_is_its_last():
    whole, _ = run(prompts(), options())
    tokens = [one.tokens for one in whole.sequences]
    at_once, places = tokens[0][0], [(m, n) for m in range(len(tokens)) for n in range(2, 8)]
    # Another one ends a sequence in the midst of a chunk.
    number, place = next(
        (m, n)
        for m, n in places
        if at_once not in tokens[m][: n + 1] and tokens[m][n] not in tokens[m][:n]
    )
    stops = at_once, tokens[number][place]
    made, _ = run(prompts(), options(stop=stops))
    for one, other in zip(made.sequences, whole.sequences, strict=True):
        ends = [n for n, token in enumerate(other.tokens) if token in stops]
        wanted = other.tokens[: ends[0] + 1] if ends else other.tokens
        assert (one.tokens, one.ended) == (wanted, "stop" if ends else "length")
    # The device needs no host to stop: what it drew last is the stop, and nothing is left to do.
    for n, stop in zip((0, number), stops, strict=True):
        assert made.sequences[n].ended == "stop"
        alone, _ = run(prompts()[n : n + 1], options(stop=stops))
        assert (alone._state.token[0], alone._state.left[0]) == (stop, 0)
        assert alone._cache.lengths[0] == LENGTHS[n] + len(alone.sequences[0].tokens) - 1


def test_a_first_token_may_be_the_last():
    made, _ = run(prompts(), options(), wanted=1)
    whole, _ = run(prompts(), options())
    assert [one.tokens for one in made.sequences] == [one.tokens[:1] for one in whole.sequences]
    assert made._step == 0  # nothing but prefills


@every_cache
def test_capacity_ends_a_sequence(kind):
    """The last token needs no row: a prompt as long as the capacity still gets one."""
    made, _ = run(prompts((48, 45)), options(cache=kind))
    assert [(len(one.tokens), one.ended) for one in made.sequences] == [
        (1, "capacity"),
        (4, "capacity"),
    ]
    for one, prompt in zip(made.sequences, prompts((48, 45)), strict=True):
        assert one.tokens[:1] == greedy_by_the_full_forward(prompt, 1)


def test_prompts_wait_for_pages_and_nobody_loses_a_row():
    """Four pages of eight rows: 16 + 9 rows take them all, so the longest prompts run alone."""
    made, statuses = run(prompts(), options(cache="paged", pages=4))
    full, _ = run(prompts(), options(cache="paged"))
    assert [one.tokens for one in made.sequences] == [one.tokens for one in full.sequences]
    assert not made.cache.overflowed.any()
    assert min(status.running for status in statuses if status.waiting) <= 1


def test_long_prompts_are_prefilled_a_few_at_a_time():
    made, statuses = run(prompts(), options(prefill=32))
    whole, at_once = run(prompts(), options())
    assert [one.tokens for one in made.sequences] == [one.tokens for one in whole.sequences]
    assert len(statuses) > len(at_once)


def test_prompts_in_chunks_give_the_same_tokens():
    """One prompt in a step and several, in the midst of others and alone; a stop among them."""
    stop = run(prompts(), options())[0].sequences[4].tokens[-1:]
    whole, _ = run(prompts(), options(stop=tuple(stop)))
    made, statuses = run(prompts(), options(stop=tuple(stop), prefill_chunk=7))
    told = [[(one.tokens, one.ended) for one in made.sequences] for made in (made, whole)]
    assert told[0] == told[1] and {one.ended for one in made.sequences} == {"stop", "length"}
    assert made._step > len(statuses)  # mixed steps, and chunks of steps where no prompt is left
    assert {status.running for status in statuses} >= {0, 3} and statuses[-1].waiting == 0


def test_sampled_tokens_are_the_same_in_chunks():
    how = {"sampling": sampling.Sampling(1e6, top_k=90, top_p=0.95), "cache": "paged"}
    whole, made = (run(prompts(), options(**how, **x))[0] for x in ({}, {"prefill_chunk": 5}))
    assert [one.tokens for one in made.sequences] == [one.tokens for one in whole.sequences]
    assert not made.cache.overflowed.any()


def test_decoding_goes_on_while_a_long_prompt_comes_in():
    what, how = prompts((3, 40)), options(prefill_chunk=7, keep_logits=True, cache="paged")
    made, statuses = run(what, how)
    # The short prompt and 4 rows of the long one; then 6 steps, with a token of the first in each.
    assert [status.tokens for status in statuses[:7]] == [1, 2, 3, 4, 5, 6, 8]
    assert [status.live_kv_bytes for status in statuses[:2]] == [
        rows * 2 * 3 * 2 * 16 * 4 for rows in (3 + 11, 4 + 18)
    ]
    assert all(row.held for row in check.rows(made, small()[1]))
    plain, _ = run(what, options())
    assert [one.tokens for one in made.sequences] == [one.tokens for one in plain.sequences]


@pytest.mark.parametrize("changes", [{}, {"prefill_chunk": 7}], ids=str)
def test_the_time_of_every_token_is_known(changes):
    made, statuses = run(prompts(), options(**changes))
    for one in made.sequences:
        assert len(one.times) == len(one.tokens) and one.times == sorted(one.times)
        assert one.times[0] > 0 and one.times[-1] <= statuses[-1].seconds
    summary = made.summary(2.0)
    first, between = summary["time_to_first_token"], summary["time_between_tokens"]
    assert first["worst"] == max(one.times[0] for one in made.sequences)
    assert first["median"] == np.median([one.times[0] for one in made.sequences])
    gaps = np.concatenate([np.diff(one.times) for one in made.sequences])
    assert between == {"median": np.median(gaps), "worst": gaps.max()}
    assert str(decode.Spread(0.0042, 0.31)) == "4.2 ms (worst 310 ms)"
    assert decode.Spread.of([]) is None


def test_status_says_what_is_going_on():
    made, statuses = run(prompts(), options())
    assert [status.step for status in statuses] == sorted(status.step for status in statuses)
    assert {status.running for status in statuses} >= {0, 3}
    last = statuses[-1]
    assert (last.waiting, last.ended, last.tokens) == (0, 6, 60)
    prefilled = statuses[0]
    assert prefilled.live_kv_bytes == (5 + 12 + 1) * 2 * 3 * 2 * 16 * 4
    summary = made.summary(2.0)
    assert (summary["sequences"], summary["tokens"], summary["seconds"]) == (6, 60, 2.0)
    assert summary["tokens_per_second"] > 0


# ---- sampling -----------------------------------------------------------------------------------


def test_top_k_and_top_p_leave_out_what_they_say(rng):
    logits = rng.standard_normal((1, 20)).astype(np.float32) * 2
    order = np.argsort(-logits[0])
    weights = np.exp(logits[0][order])

    def seen(**how):
        draw = functools.partial(sampling.sample, sampling=sampling.Sampling(1.0, **how))
        keys = jax.random.split(jax.random.key(0), 4000)
        tokens = draw(jnp.broadcast_to(jnp.asarray(logits), (4000, 20)), keys)
        return np.bincount(np.asarray(tokens), minlength=20)[order] / 4000

    def reach(count, share):
        return 1 + int((np.cumsum(weights[:count] / weights[:count].sum()) < share).sum())

    for how, kept in (
        ({}, 20),
        ({"top_k": 5}, 5),
        ({"top_p": 0.8}, reach(20, 0.8)),
        ({"top_k": 5, "top_p": 0.5}, reach(5, 0.5)),
        ({"top_k": 99, "top_p": 1e-6}, 1),
    ):
        wanted = np.where(np.arange(20) < kept, weights, 0)
        np.testing.assert_allclose(seen(**how), wanted / wanted.sum(), atol=0.03)
        assert (seen(**how)[kept:] == 0).all()


def test_temperature_flattens_and_zero_is_the_largest(rng):
    logits = jnp.asarray(rng.standard_normal((500, 30)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 500)
    cold, warm, hot = (
        sampling.sample(logits, keys, sampling.Sampling(t)) == logits.argmax(-1)
        for t in (0.0, 0.3, 5.0)
    )
    assert cold.all() and not warm.all() and warm.mean() > 2 * hot.mean()


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1.2e-38, 1e-30])
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_next_to_no_temperature_is_greedy(rng, temperature, how):
    logits = jnp.asarray(rng.standard_normal((50, 30)), jnp.float32) * 100
    keys = jax.random.split(jax.random.key(0), 50)
    drawn = sampling.sample(logits, keys, sampling.Sampling(temperature, **how))
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected at least 0, got -1.0"),
        ({"top_k": -1}, "top_k: expected at least 0 (0: all), got -1"),
        ({"top_k": 1.5}, "top_k: expected an int, got 1.5"),
        ({"temperature": "0.7"}, "temperature: expected a number, got '0.7'"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, got 0.0"),
    ],
)
def test_sampling_refuses(how, message):
    with pytest.raises(ValueError) as caught:
        sampling.Sampling(**how)
    assert str(caught.value) == message


# ---- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "how", "wanted", "message"),
    [
        ([], {}, 4, "prompt: expected at least one, got none"),
        ([[1], []], {}, 4, "prompt 2 is empty"),
        ([[1] * 49], {}, 4, "prompt 1: 49 tokens do not fit in a capacity of 48"),
        ([[1, 96]], {}, 4, "prompt 1: expected tokens from 0 to 95, got 1 to 96"),
        ([[1]], {}, 0, "max_new_tokens: expected at least 1, got 0"),
        (
            [[1]],
            {"capacity": 257},
            4,
            "capacity: the model was made for 256 positions, got 257; ask for fewer tokens, or "
            "give a smaller capacity",
        ),
        (
            [[1] * 20],
            {"cache": "paged", "pages": 2},
            9,
            "prompt 1: 4 pages do not fit in a pool of 2",
        ),
    ],
)
def test_what_cannot_be_run_is_said_before_it_starts(what, how, wanted, message):
    with pytest.raises(ValueError) as caught:
        decode.Run(*small(), options(**how), what, wanted)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"cache": "ring"},
            "cache: expected one of ('per_sequence', 'stacked', 'paged'), got 'ring'",
        ),
        ({"chunk": 0}, "chunk: expected at least 1, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected at least 1, got 0"),
        ({"chunk": 1.5}, "chunk: expected an int of at least 1, got 1.5"),
        ({"slots": "3"}, "slots: expected an int of at least 1, got '3'"),
        ({"samples": True}, "samples: expected an int of at least 1, got True"),
        ({"pages": 0}, "pages: expected at least 1, got 0"),
        ({"stop": [3]}, "stop: expected a tuple of tokens, ints, got [3]"),
        ({"sampling": 0.7}, "sampling: expected a Sampling, got 0.7"),
        (
            {"mesh": "tp:2"},
            "mesh: expected a mesh with the axis 'tp', as lm.mesh.make('tp:2', ('tp',)) makes it, "
            "or None, got 'tp:2'",
        ),
    ],
)
def test_options_refuse(how, message):
    with pytest.raises(ValueError) as caught:
        options(**how)
    assert str(caught.value) == message


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_logits_that_are_no_numbers_are_an_error(drawn):
    """Of weights that are finite, in a prefill and in a step."""
    config, params = small()
    how = options(sampling=sampling.Sampling(**drawn))
    huge = params | {"norm": params["norm"] * 1e38, "embed": params["embed"] * 1e3}
    run = decode.Run(config, huge, how, prompts(), 10)
    line = (
        "sequence 1: its logits are not finite after 5 tokens: the weights are too large for float"
    )
    with pytest.raises(ValueError, match=line):
        list(run)
    run = decode.Run(config, params, how, prompts(), 10)
    run._params, after = params, iter(run)
    next(after)
    run._params = huge
    with pytest.raises(
        ValueError, match=r"sequence \d: its logits are not finite after \d+ tokens"
    ):
        list(after)


# ---- generate -----------------------------------------------------------------------------------


def test_generate_continues_texts():
    loaded = lm.load()
    texts = lm.generate(loaded, ["ROMEO:", "The sea"], max_new_tokens=20)
    assert texts == ["\nWhat say'st thou? i", "l of the seasons and"]
    both = ["ROMEO:", "The sea"]
    assert lm.generate(loaded, both, max_new_tokens=20, cache="stacked", prefill_chunk=4) == texts
    drawn = lm.generate(
        loaded, ["The sea"], max_new_tokens=20, sampling=lm.Sampling(2.0), seed=3, slots=1
    )
    assert drawn != texts[1:] and len(drawn) == 1
    stopped = lm.generate(loaded, ["The sea"], max_new_tokens=20, stop=(ord(" "),), cache="paged")
    assert stopped == ["l "]


@pytest.mark.parametrize(
    ("given", "how", "message"),
    [
        ("ROMEO:", {}, "prompts: expected a list of texts, got one; did you mean ['ROMEO:']?"),
        ([], {}, "prompt: expected at least one, got none"),
        (["a", ""], {}, "prompt 2 is empty"),
        (
            ["a"],
            {"cache": "x"},
            "cache: expected one of ('per_sequence', 'stacked', 'paged'), got 'x'",
        ),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        (["a"], {"max_new_tokens": "5"}, "max_new_tokens: expected an int of at least 1, got '5'"),
        (["a"], {"seed": 2**64}, f"seed: expected an int of 64 bits, got {2**64}"),
        (["a"], {"samples": "3"}, "samples: expected an int of at least 1, got '3'"),
        (["a", None], {}, "prompts: expected a list of texts, got ['a', None]"),
        (None, {}, "prompts: expected a list of texts, got None"),
    ],
)
def test_generate_refuses(given, how, message):
    with pytest.raises(ValueError) as caught:
        lm.generate(lm.load(), given, **how)
    assert str(caught.value) == message


def test_float32_is_float32_in_every_thread_unless_something_else_is_asked_for(monkeypatch):
    seen = []

    def stood_in(*_):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            seen.append(pool.submit(lambda: jax.config.jax_default_matmul_precision).result())
        return 0

    monkeypatch.setattr(session, "_decode", stood_in)
    for changes in ({}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"precision": "high"}):
        shown(io.StringIO(), io.StringIO(), **changes)
    assert seen == ["highest", "highest", "default", "high"]
    assert jax.config.jax_default_matmul_precision is None


# ---- the check ----------------------------------------------------------------------------------


def test_the_check_holds_and_sees_a_wrong_logit_and_a_wrong_token():
    config, params = small()
    made = decode.Run(config, params, options(cache="paged", keep_logits=True), prompts(), 10)
    assert list(made)
    found = list(check.rows(made, params))
    assert [(row.steps, row.same, row.ties, row.held) for row in found] == [(10, 10, 0, True)] * 6
    made.sequences[2].logits[4] = made.sequences[2].logits[4] + 0.01
    other = made.sequences[5].logits[7].copy()
    made.sequences[5].logits[7] = -other
    broken = list(check.rows(made, params))
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
    for _ in made:
        pass
    found = list(check.rows(made, params))
    assert all(row.held for row in found)
    rms = np.sqrt(np.mean(np.square(made.sequences[0].logits)))
    assert all(0.001 * rms < row.budget for row in found)


def test_a_tie_is_two_logits_within_twice_the_budget():
    """What the decode says and what the reference says may each be off by the budget."""
    truth = np.zeros((3, 8), np.float32)
    truth[:, 0] = 1.0
    got = truth.copy()
    for step, below in enumerate((0.03, 0.05, 0.0)):
        truth[step, 1], got[step, 1] = 1 - below, 1 + 1e-3 * (step < 2)
    one = decode.Generation(0, [1], 3, tokens=[1, 1, 0], logits=list(got))
    row = check._row(one, truth, truth + np.float32(0.01), eps=0.0)
    assert abs(row.budget - 0.02) < 1e-6
    assert (row.same, row.ties, row.held) == (1, 1, False)


# ---- text ---------------------------------------------------------------------------------------


def test_bytes_go_both_ways():
    line = "héllo €\n"
    assert text.Bytes().decode(text.Bytes().encode(line)) == line


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stream_gives_whole_characters_only(size):
    line = "aé€😀 end"
    ids = text.Bytes().encode(line)
    stream = text.Stream(text.Bytes())
    pieces = [stream.add(ids[n : n + size]) for n in range(0, len(ids), size)]
    assert "".join(pieces) == line and not any("\ufffd" in piece for piece in pieces)
    cut = text.Stream(text.Bytes())
    assert cut.add(ids[:2]) == ""
    assert cut.add([], last=True) == "a\ufffd"


def test_a_tokenizer_json_is_read_by_its_package(tmp_path):
    import tokenizers

    words = {"<s>": 0, "the": 1, "sea": 2, "was": 3, "[UNK]": 4}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    built.add_special_tokens(["<s>"])
    built.enable_padding(length=500)  # for batches of others: not for a prompt
    built.enable_truncation(2)
    built.save(str(tmp_path / "tokenizer.json"))
    found = text.tokenizer_of(tmp_path)
    assert found.encode("the sea was") == [0, 1, 2, 3]
    assert found.decode([0, 1, 2]) == "the sea"
    stream = text.Stream(found)
    assert "".join(stream.add([one]) for one in (1, 2, 3)) == "the sea was"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokenizer.json: "):
        text.tokenizer_of(tmp_path)


def test_a_prompt_that_is_no_text_is_named(tmp_path):
    """As a shell hands over bytes that are no UTF-8; a tokenizer of bytes takes them."""
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(ValueError, match="^prompt 3: not UTF-8 at character 2$"):
        text.encoded(text.tokenizer_of(tmp_path), "a\udcff", 3)
    with pytest.raises(ValueError, match="^prompt 1: without a tokenizer a prompt is token numb"):
        text.encoded(text.Numbers(), "one", 1)
    assert text.encoded(text.Bytes(), "a\udcff", 3) == [97, 255]


def test_no_tokenizer_is_said(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json: not there; without it prompts cannot"):
        text.tokenizer_of(tmp_path)


# ---- how it looks -------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stdout, stderr, **changes):
    settings = {"prompts": ("ROMEO:\n", "The sea"), "max_new_tokens": 20, "chunk": 4}
    return session.decode(session.Settings(**settings | changes), stdout, stderr)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ({"stop": (-1,)}, "stop_ids: expected tokens from 0 to 255, got [-1]"),
        ({"out": "x"}, "out: the rows are those of a report; say --report=FOLDER as well"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(flag, message):
    with pytest.raises(ValueError) as caught:
        shown(io.StringIO(), io.StringIO(), **flag)
    assert str(caught.value) == message


def test_text_comes_in_the_order_of_the_prompts():
    out, err = io.StringIO(), io.StringIO()
    assert shown(out, err, batch=1) == 0
    first, second = out.getvalue().split("--- 2 of 2 ---\n")
    assert first.startswith("--- 1 of 2 ---\nROMEO:\n") and second.startswith("The sea")
    assert "2 sequences, 40 tokens in " in second and err.getvalue() == ""


def test_a_terminal_gets_a_status_line_beneath_the_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, err = Terminal(), Terminal()
    assert shown(out, err) == 0
    plain = io.StringIO()
    shown(plain, io.StringIO())
    wanted = plain.getvalue().rsplit("\n", 2)[0]  # all but the line with the rates
    assert out.getvalue().rsplit("\n", 2)[0] == wanted
    assert re.search(r"\| first token \S+ m?s \(worst .*\) \| between \S+ ms", err.getvalue())
    line = err.getvalue().split("\r\x1b[K")[2]
    assert line.startswith("2 running, 0 waiting, 0 done | step ") and "tokens/s" in line
    assert err.getvalue().endswith("\r\x1b[K")  # and leaves nothing behind


def test_ctrl_c_waits_for_a_chunk_and_the_second_does_not():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with session._asked_to_stop() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGINT)
            assert stopped()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_json_is_an_object_a_line():
    out = io.StringIO()
    assert shown(out, io.StringIO(), json=True, check=True) == 0
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [next(iter(line)) for line in lines]
    assert sorted(kinds) == ["check"] * 2 + ["sequence"] * 2 + ["summary"]
    for line in lines:
        if "sequence" in line:
            one = line["sequence"]
            assert one["text"] == bytes(one["tokens"]).decode() and one["ended"] == "length"
    assert all(line["check"]["held"] for line in lines if "check" in line)


def test_random_prompts_show_no_text():
    out = io.StringIO()
    assert shown(out, io.StringIO(), random_prompts=2, prompt_length=7, check=True) == 0
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("2 sequences, 40 tokens in ") and "---" not in lines[0]
    assert len(lines) == 5 and lines[-1].startswith("every step is the reference's")


def test_a_report_says_where_the_time_goes(tmp_path, monkeypatch):
    out, error, freed = io.StringIO(), io.StringIO(), []
    release, rate = decode.Run.release, report.read_rate

    def released(run):
        release(run)
        freed.extend(x.is_deleted() for x in jax.tree.leaves(run.cache))

    def first_of_all(mesh):
        assert freed and all(freed)  # the run's cache would take the place of those that are timed
        return rate(mesh)

    monkeypatch.setattr(decode.Run, "release", released)
    monkeypatch.setattr(report, "read_rate", first_of_all)
    paths = {"report": str(tmp_path / "out"), "out": str(tmp_path / "rows.jsonl")}
    assert shown(out, error, commit="abc", batch=1, check=True, **paths) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert rows.read(tmp_path / "rows.jsonl") == found
    steps = [row for row in found if row["op"] == "decode_loop"]
    assert [row["case"] for row in steps] == [
        f"tiny_{kind}_b1_s26" for kind in ("per_sequence", "stacked")
    ]
    for row in steps:
        assert not set(rows.REQUIRED) - row.keys()
        assert set(row["parts"]) == {"append", "attention", "matmuls", "sampling", "host"}
        assert sum(row["parts"].values()) >= row["ms"] * 0.99
        assert 0 < row["roofline"] < 1.5 and row["commit"] == "abc" and row["checked"]
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path}/out/report.png" in out.getvalue()
    waits = json.loads((tmp_path / "out" / "report.json").read_text())["run"]
    assert all(waits[name]["worst"] > 0 for name in findings.WAITS.values())
    assert "from one token of a sequence to the next: median " in out.getvalue()
    assert all(line.startswith("report, ") for line in error.getvalue().splitlines())
    assert error.getvalue().count(" s: pallas_attn/") == len(steps)


@pytest.mark.parametrize("batches", [[1], [256], [1, 8, 64], [1, 2, 8, 32, 64]], ids=str)
def test_the_rates_can_be_read_off_a_report(batches):
    """There are numbers beside the axis, and all words lie within it and beside one another."""
    rate = {"roofline": 0.8}
    found = [{"problem": {"batch": n}, "tokens_per_second": 188.0 * n} | rate for n in batches]
    figure = matplotlib.figure.Figure((10, 4.2), layout="constrained", dpi=150)
    _, axis = figure.subplots(1, 2)
    findings._draw_rates(axis, found)
    canvas = matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    canvas.draw()
    low, high = axis.get_ylim()
    seen = [tick.label1.get_text() for tick in axis.yaxis.get_major_ticks()
            if low <= tick.get_loc() <= high]  # fmt: skip
    assert seen and all(re.fullmatch(r"[\d,]+", text) for text in seen)
    within = axis.get_window_extent()
    boxes = [text.get_window_extent() for text in axis.texts]
    for n, box in enumerate(boxes):
        assert within.x0 < box.x0 and box.x1 < within.x1 and within.y0 < box.y0
        assert not any(box.overlaps(other) for other in boxes[:n])


class _Wall:
    """In place of CUPTI."""

    def __call__(self, subject, times):
        start = time.perf_counter()
        for _ in range(times):
            produced = subject.launch()
        subject.wait(produced)
        return [timing.Sample((time.perf_counter() - start) * 1e3 / times, 7)] * times


def test_on_a_gpu_the_peer_and_the_first_token_are_measured_too(monkeypatch):
    """The path of a machine with a GPU, with what it lacks here stood in for."""
    config, params = small()
    steps = peer.steps
    monkeypatch.setattr(peer, "steps", lambda a, b, how, *rest: steps(a, b, "xla", *rest))
    monkeypatch.setattr(timing, "CuptiTimer", _Wall)
    monkeypatch.setattr(report, "_on_gpu", lambda: True)
    monkeypatch.setattr(report, "read_rate", lambda _: 0.01)
    monkeypatch.setattr(report, "_PROMPTS", (2, 32))
    subject = report.Subject("small", config, params, options(cache="stacked"), 20)
    found = list(report.measure(subject, report.prepare(subject, [2]), "abc"))
    assert [(row["op"], row["impl"]) for row in found] == [
        ("ceiling", "xla"),
        ("decode_loop", "pallas_attn/stacked"),
        ("decode_loop", "cudnn"),
        ("first_token", "pallas_attn/stacked"),
    ]
    assert {row["case"] for row in found[1:3]} == {"small_stacked_b2_s20"}
    assert all(not set(rows.REQUIRED) - row.keys() for row in found[1:])
    spread = {"median": 0.0123, "worst": 1.5}
    lines = findings.table(found, {"time_to_first_token": spread, "time_between_tokens": None})
    assert len(lines) == 5
    assert lines[-1] == "from the start of the run to a first token: median 12.3 ms (worst 1.50 s)"


def test_a_wrong_decode_is_not_measured(monkeypatch):
    config, params = small()
    monkeypatch.setattr(check, "_ROUNDINGS", 0)
    monkeypatch.setattr(report, "_compile", lambda *_: None)
    subject = report.Subject("small", config, params, options(cache="stacked"), 20)
    with pytest.raises(ValueError, match="report: the stacked cache decodes wrongly, nothing"):
        report.prepare(subject, [2])


def test_the_peer_of_the_report_computes_the_same_tokens():
    """From one token each, over caches that are full of something else."""
    config, params = small()
    how = options(chunk=10)
    tokens = jnp.asarray([3, 50, 7], jnp.int32)
    carry = (peer.create(config, how, 0), jnp.zeros(3, jnp.int32), tokens)
    program = jax.jit(functools.partial(peer.steps, config, how, "xla"))
    (_, lengths, _), got = program(params, carry)
    wanted = [greedy_by_the_full_forward((token,), 10) for token in tokens.tolist()]
    assert got.T.tolist() == wanted and lengths.tolist() == [10] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "gpt"},
            "model: expected one of tiny, llama2_7b, llama3_8b, llama3_70b, llama3.1_8b, "
            "mistral_7b, qwen2_7b, qwen3_8b, got 'gpt'",
        ),
        ({"prompts": ("",)}, "prompt 1 is empty"),
        (
            {"implementation": "sm90"},
            "implementation: a model runs several operations, which no kernel does alone; expected "
            "reference or nothing, got 'sm90'",
        ),
        (
            {"prompts": ("a" * 600,)},
            "prompt 1: 600 tokens do not fit in a capacity of 512",
        ),
    ],
)
def test_a_session_refuses(changes, message):
    with pytest.raises(ValueError) as caught:
        shown(io.StringIO(), io.StringIO(), **changes)
    assert str(caught.value) == message


def test_what_does_not_fit_in_memory_is_said_before_it_is_made(monkeypatch):
    monkeypatch.setattr(session, "memory", lambda: 10**9)
    line = "model: weights take 16.1 GB and the cache 0.0 GB as bfloat16, there are 1.0 GB; give"
    with pytest.raises(ValueError, match=re.escape(line)):
        shown(io.StringIO(), io.StringIO(), model="llama3_8b", prompts=("1",), dtype="bfloat16")


def test_numbers_are_the_tokens_of_random_weights():
    assert text.Numbers().encode("3 1 4") == [3, 1, 4]
    with pytest.raises(ValueError, match="without a tokenizer a prompt is token numbers, got 'a'"):
        text.Numbers().encode("a")
