"""examples/prefix_cache.py: which pages are shared, which prompts go, and that a pool that is too
small for a prompt is an error.
"""

import pathlib
import runpy

import numpy as np
import pytest

import pallas_lm as lm

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "prefix_cache.py"
PAGE, WANTED = 8, 6


@pytest.fixture(scope="module")
def example():
    names = runpy.run_path(str(EXAMPLE))
    assert (names["PAGE_SIZE"], names["WANTED"], names["SLOTS"]) == (PAGE, WANTED, 2)
    return names


@pytest.fixture(scope="module")
def model():
    return lm.load(dtype="float32")


def tokens(*numbers):
    """A prompt: for each number a page of tokens, and one token more."""
    return [number for number in numbers for _ in range(PAGE)] + [99]


def computed(store, *prompts):
    """Takes prompts in as a server does: admitted, written, kept and released."""
    for prompt in prompts:
        rows = store.admit(0, prompt)
        new = np.array([len(prompt) - rows] + [0] * (store.cache.num_sequences - 1), np.int32)
        store.cache = store.cache.extend(new)
        assert not store.cache.overflowed.any()
        store.keep(0, prompt)
        store.cache = store.cache.free(0)
    return store


def pages(store):
    """The pages of each kept prompt, and the number of sequences that hold each page."""
    table = np.asarray(store.cache.page_table)
    return {s: table[s][table[s] >= 0].tolist() for s in store.kept}, np.asarray(
        store.cache.holders
    )


def test_whole_pages_that_prompts_begin_with_are_shared(example, model):
    store = computed(example["PrefixCache"](model, 3, 20), tokens(1, 2, 3), tokens(1, 2, 4))
    kept, holders = pages(store)
    first, second = kept.values()
    assert first[:2] == second[:2] and first[2] != second[2]
    assert [holders[page] for page in (*first, second[2])] == [2, 2, 1, 1]
    assert store.cache.num_free == 20 - 4
    # The page with the last token of a prompt is computed, kept or not: that token makes the next.
    assert store.admit(1, tokens(1, 2, 3)[:-1]) == 2 * PAGE
    store.cache = store.cache.free(1)
    assert store.admit(1, tokens(1, 2, 3)) == 3 * PAGE and store.admit(0, tokens(2, 1)) == 0


def test_the_prompt_that_was_used_longest_ago_goes_and_shared_pages_stay(example, model):
    store = computed(example["PrefixCache"](model, 3, 20), tokens(1, 2), tokens(1, 3), tokens(4))
    (_, other, _), free = pages(store)[0].values(), store.cache.num_free
    assert store.admit(1, tokens(1, 2)) == 2 * PAGE  # used: now [1, 3] is the oldest
    store.cache = store.cache.free(1)
    computed(store, tokens(5))
    assert store.evicted == [tokens(1, 3)[:-1]]
    _, holders = pages(store)
    assert holders[other[0]] == 1 and store.cache.num_free == free  # page 3 for page 5
    assert list(store.kept.values()) == [tokens(4)[:-1], tokens(1, 2)[:-1], tokens(5)[:-1]]


def test_a_full_pool_evicts_what_is_not_pinned(example, model):
    store = computed(example["PrefixCache"](model, 4, 7), tokens(1, 2))
    store.pinned |= set(store.kept)
    computed(store, tokens(3, 4), tokens(5))
    assert store.cache.num_free == 2 and not store.evicted
    assert store.admit(0, tokens(6, 7)) == 0  # 3 pages, with its answer
    assert store.evicted == [tokens(3, 4)[:-1]] and store.cache.num_free == 1
    assert store.admit(1, tokens(1, 2, 8)) == 2 * PAGE  # [5] makes room for its two pages
    assert list(store.kept.values()) == [tokens(1, 2)[:-1]] and store.cache.num_free == 0
    store.cache = store.cache.free(1)
    assert store.admit(1, tokens(9, 9, 9)) is None  # the pinned prompt stays: it has to wait
    assert list(store.kept.values()) == [tokens(1, 2)[:-1]] and store.cache.num_free == 2
    assert store.cache.lengths[1] == 0 and not store.cache.overflowed.any()


def test_a_prompt_that_was_matched_may_go_while_its_request_runs(example, model):
    store = computed(example["PrefixCache"](model, 2, 5), tokens(1, 2))
    assert store.admit(0, tokens(1, 2, 3)) == 2 * PAGE and len(store.kept) == 1
    kept, holders = pages(store)
    (held,) = kept.values()
    assert store.cache.num_free == 1 and [holders[page] for page in held] == [2, 2]
    assert store.evict() and store.cache.num_free == 1  # the request holds its pages
    assert not store.evict()


def test_a_pool_that_is_too_small_is_an_error(example, model):
    store = example["PrefixCache"](model, 1, 2)
    with pytest.raises(AssertionError, match="too few pages"):
        example["serve"](model, [tokens(1, 2)], store)
    assert store.cache.num_free == 2


def test_the_tokens_are_those_of_prompts_that_share_nothing(example, model):
    prompts = [tokens(1, 2, 3), tokens(1, 2, 4), tokens(1, 2, 3), tokens(5), tokens(1, 2, 4)]
    store = example["PrefixCache"](model, 1, 12)
    made, rows = example["serve"](model, prompts, store)
    alone, all_rows = example["serve"](model, prompts, example["PrefixCache"](model, 0, 12))
    assert made == alone and rows < all_rows and store.evicted
    assert all_rows == sum(map(len, prompts)) + len(prompts) * (WANTED - 1)
    assert not store.cache.overflowed.any()
