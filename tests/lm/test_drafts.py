"""Drafts and answers by the number: the tokens are those of plain decoding."""

import itertools
import random

import numpy as np
import pytest

from pallas_attn import PagedCache, prefixes
from pallas_lm import decode, decode_check, drafts
from pallas_lm.options import CACHES
from pallas_lm.sampling import Sampling
from tests.lm.loops import (
    ends,
    options,
    plain_run,
    prompts,
    run,
    small,
    times_are_known,
    tokens,
)

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

LOOKED_UP = {"draft": "ngram", "drafts": 3}


def looked_up(text, count):
    """The result of `propose`, one place at a time."""
    best = (0, -1)
    for place in range(len(text) - 1):
        pairs = zip(text[place::-1], text[::-1], strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        best = max(best, (min(len(list(same)), drafts.LONGEST), place))
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


def test_what_stays_of_the_drafts(rng):
    """Up to the first that is wrong, to a stop, to the tokens that are wanted."""
    guesses, own = rng.integers(-1, 2, (400, 4)), rng.integers(0, 2, (400, 5))
    stops, left = rng.random((400, 5)) < 0.15, rng.integers(0, 7, 400)
    counts, over = drafts.accepted(*(np.asarray(x) for x in (guesses, own, stops, left)))
    for m in range(400):
        stay, stopped = 0, False
        while stay < left[m] and not stopped:
            if stay and (stay == 5 or guesses[m, stay - 1] != own[m, stay - 1]):
                break
            stopped = stops[m, stay]
            stay += 1
        assert (counts[m], over[m]) == (stay, stopped)


def a_stop():
    """A token that ends one of the texts."""
    return (tokens(plain_run(wanted=44))[4][7],)


def test_the_tokens_are_those_of_plain_decoding():
    """Six prompts through three slots, a stop among them; the last tokens fill the capacity."""
    stop = a_stop()
    plain = plain_run(wanted=44, stop_ids=stop)
    made, statuses = run(prompts(), options(cache="paged", stop_ids=stop, **LOOKED_UP), wanted=44)
    assert ends(made) == ends(plain)
    assert {ended for _, ended in ends(made)} >= {"stop", "capacity"}
    facts = made.summary(1.0)
    assert 0 < facts["kept"] < facts["drafts"] and facts["acceptance"] == made.acceptance
    # Kept drafts save steps: of three sequences at a time, at least the longest's.
    assert made._step < plain._step and not made.cache.overflowed.any()
    times_are_known(made)
    assert statuses[-1].tokens == sum(map(len, tokens(made)))


def test_drafts_beside_prompts_that_come_in_chunks():
    """Prompts of several chunks, and several in one; a stop among the tokens, and the last ones
    fill the capacity. Some drafts are kept in a step that takes rows of a prompt, too.
    """
    stop = a_stop()
    plain = plain_run(wanted=44, stop_ids=stop)
    how = {"stop_ids": stop, "prefill_chunk": 3, "keep_logits": True}
    made, statuses = run(prompts(), options(**how, **LOOKED_UP), wanted=44)
    assert ends(made) == ends(plain)
    pairs = [(a, b) for a, b in itertools.pairwise(statuses) if b.step == a.step + 1]
    assert max(b.tokens - a.tokens for a, b in pairs) > 3  # more than there are slots
    assert made._step < plain._step and not made.cache.overflowed.any()
    assert made.cache.capacities == (56,) * 3  # 48 and those of drafts, as kernels want it
    # Drafts are looked up in texts that the chunks have put together.
    alone = plain_run(wanted=44, cache="paged", stop_ids=stop, **LOOKED_UP)
    facts, others = made.summary(1.0), alone.summary(1.0)
    assert all(facts[name] == others[name] > 0 for name in ("drafts", "kept", "acceptance"))
    times_are_known(made)
    assert all(len(x.times) == len(x.logits) for x in made.sequences)
    assert all(row.held for row in decode_check.rows(made, small()[1]))


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_gives_the_tokens_of_plain_decoding(seed):
    """Any options beside drafts and chunks; layers with windows; the texts repeat themselves."""
    pick = random.Random(seed)
    weights = small(("qwen3", "qwen2")[seed % 2])
    texts = [[pick.randrange(4) for _ in range(pick.randint(1, 30))] for _ in range(5)]
    how = {"sampling": pick.choice((Sampling(), Sampling(0.4, top_k=9)))}
    how |= {"stop_ids": (pick.randrange(96),), "capacity": pick.choice((32, 48))}
    more = {"cache": CACHES[seed % 3], "batch": pick.randint(1, 4)}
    more |= {"chunk": pick.randint(1, 5), "page_size": pick.choice((4, 8)), "draft": "ngram"}
    more |= {"drafts": pick.randint(1, 5), "prefill_chunk": pick.randint(1, 20)}
    more |= {"pages": 16} if more["cache"] == "paged" else {}
    told = []
    for changes in ({}, more):
        made = decode.Run(*weights, options(**how | changes), texts, 16)
        assert list(made)
        told.append(ends(made))
    assert told[0] == told[1] and made.acceptance is not None


# ---- several answers to a prompt -----------------------------------------------------------------

DRAWN = {"cache": "paged", "sampling": Sampling(0.3, top_k=20)}


@pytest.mark.parametrize(
    "changes", [{}, {"prefill_chunk": 6, "chunk": 5}], ids=["whole", "in_chunks"]
)
def test_samples_are_those_of_the_prompt_given_again(monkeypatch, changes):
    """A key each, by their number; prefilled once, beside others, in slots that others left; with
    drafts, which are kept if they are drawn; shared rows are read once.
    """
    looked, find = [], PagedCache.shared_prefixes
    monkeypatch.setattr(
        PagedCache, "shared_prefixes", lambda cache, **how: looked.append(how) or find(cache, **how)
    )
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 16)  # rows, which two of the prompts have
    texts, how = prompts((5, 16, 9)), DRAWN | {"batch": 4}
    again = tuple(text for text in texts for _ in range(3))
    made, statuses = run(texts, options(**how, **LOOKED_UP, **changes, samples=3), wanted=20)
    wanted, _ = run(again, options(**how), wanted=20)
    assert tokens(made) == tokens(wanted) and len(set(map(tuple, tokens(made)))) > 5
    assert made.acceptance and [x.sample for x in made.sequences] == [0, 1, 2] * 3
    assert max(status.running for status in statuses) == 3  # a prompt's answers begin together
    assert not made.cache.overflowed.any()
    packed = looked[:-1]  # steps beside rows of prompts; traced once, not for a single answer
    assert (
        looked[-1] == {"tokens": 4, "levels": 1, "starts": None}
        and len(packed) == len(changes) // 2
    )
    assert all(how["tokens"] == 6 + 4 * 4 and how["levels"] == 1 for how in packed)


@pytest.mark.parametrize("changes", [{}, {"prefill_chunk": 12}], ids=["whole", "in_chunks"])
def test_samples_share_the_pages_of_their_prompt(changes):
    how = options(**DRAWN, samples=3, **changes)
    made = decode.Run(*small(), how, prompts((20,)), 10)
    if changes:
        made._mix()
        assert int(made.cache.num_free) == made.cache.pages - 2
        made._mix()
    else:
        made._admit()
    table = np.asarray(made.cache.page_table)[:, :3]
    assert (table[:, :2] == table[:1, :2]).all() and len(set(table[:, 2])) == 3
    assert int(made.cache.num_free) == made.cache.pages - 5
