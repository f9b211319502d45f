"""Drafts and answers by the number: the tokens are those of plain decoding."""

import io
import re

import numpy as np
import pytest

from pallas_attn.lm import check, drafts, sampling
from tests.test_lm_decode import options, prompts, run, shown, small

LOOKED_UP = {"draft": "ngram", "drafts": 3}


def looked_up(text, count):
    """What `propose` says, one place at a time."""
    best = (0, -1)
    for place in range(len(text) - 1):
        pairs = zip(text[place::-1], text[::-1], strict=False)
        agree = 0
        for one, other in list(pairs)[: drafts.LONGEST]:
            if one != other:
                break
            agree += 1
        best = max(best, (agree, place))
    agree, place = best
    if not agree:
        return [drafts.NONE] * count
    made = list(text)
    for n in range(count):
        made.append(made[place + 1 + n])
    return made[len(text) :]


def test_drafts_are_what_followed_the_newest_tokens_before(rng):
    size, texts = 30, []
    for n in range(64):
        letters = rng.integers(0, (2, 3, 5, 40)[n % 4], 30)
        texts.append(letters[: rng.integers(1, 30)].tolist())
    padded = np.full((len(texts), size), 1, np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    got = drafts.propose(padded, np.array([len(text) for text in texts], np.int32), 7)
    np.testing.assert_array_equal(got, [looked_up(text, 7) for text in texts])


def test_the_tokens_are_those_of_plain_decoding():
    """Six prompts through three slots, a stop among them; the last tokens fill the capacity."""
    whole, _ = run(prompts(), options(), wanted=44)
    stop = (whole.sequences[4].tokens[7],)
    how = {"cache": "paged", "stop": stop, "keep_logits": True}
    plain, _ = run(prompts(), options(stop=stop), wanted=44)
    made, statuses = run(prompts(), options(**how, **LOOKED_UP), wanted=44)
    told = [[(one.tokens, one.ended) for one in of.sequences] for of in (made, plain)]
    assert told[0] == told[1]
    assert {ended for _, ended in told[0]} >= {"stop", "capacity"}
    facts = made.summary(1.0)
    assert 0 < facts["kept"] < facts["drafts"] and facts["acceptance"] == made.acceptance
    # What is kept saves steps: of three sequences at a time, at least the longest's.
    assert made._step < plain._step and not made.cache.overflowed.any()
    for one in made.sequences:
        assert len(one.times) == len(one.tokens) and one.times == sorted(one.times)
    assert statuses[-1].tokens == sum(len(one.tokens) for one in made.sequences)
    assert all(row.held for row in check.rows(made, small()[1]))


def test_what_is_drawn_is_what_plain_decoding_draws():
    how = {"sampling": sampling.Sampling(0.3, top_k=5), "cache": "stacked"}
    plain, made = (run(prompts(), options(**how, **x), wanted=25)[0] for x in ({}, LOOKED_UP))
    assert [one.tokens for one in made.sequences] == [one.tokens for one in plain.sequences]
    assert made.acceptance


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"draft": "tree"}, "draft: expected one of ('ngram',) or None, got 'tree'"),
        ({"draft": "ngram", "drafts": 0}, "drafts: expected at least 1, got 0"),
        (
            {"draft": "ngram", "prefill_chunk": 4},
            "draft: expected None where prompts come in chunks (prefill_chunk), whose steps take "
            "one token of a sequence, got 'ngram'",
        ),
    ],
)
def test_options_refuse(how, message):
    with pytest.raises(ValueError) as caught:
        options(**how)
    assert str(caught.value) == message


def test_a_session_says_how_many_drafts_were_kept_and_what_they_save():
    out = io.StringIO()
    assert shown(out, io.StringIO(), check=True, **LOOKED_UP) == 0
    assert re.search(r"; \d+ of \d+ drafts kept \(\d+%\)\n", out.getvalue())
    last = out.getvalue().splitlines()[-1]
    assert re.match(r"without drafts .* tokens/s, with them .* times as many; the same", last)
    assert last.endswith("the same tokens in 2 of 2 sequences")
