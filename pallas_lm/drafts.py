"""Speculative decoding by prompt lookup.

The tokens that followed the newest ones where these stood before, in the prompt or in the text made
since, are drafts of the tokens that follow now. A step takes the newest token of a sequence and its
drafts. It keeps the drafts that the model would have made itself, with the token after the last of
them, and drops the cache rows of the others.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_attn.cache import KVCache
from pallas_lm import model
from pallas_lm.config import Config, Params
from pallas_lm.options import Options
from pallas_lm.state import DROPPED, NOTHING, State, next_tokens, stops

Array = jax.Array

LONGEST = 8  # tokens that are looked up
NONE = -1  # in place of a draft


def step(
    config: Config,
    options: Options,
    params: Params,
    rotary: model.Tables,
    cache: KVCache,
    state: State,
) -> tuple[KVCache, State, Array, Array]:
    """One step with drafts: (cache, state, tokens int32[M, 1 + drafts], logits)."""
    (guesses, tokens), known = proposed(options, cache, state), cache.lengths + 1
    rows = jnp.where(state.left > 0, tokens.shape[1], 0)
    logits, cache = model.decode(
        config, params, cache, tokens, rows, rotary, options.implementation, options.levels
    )
    state, counts, tokens = verified(options, state, logits, guesses, known)
    return cache.keep(counts, implementation=options.implementation), state, tokens, logits


def proposed(options: Options, cache: KVCache, state: State) -> tuple[Array, Array]:
    """(drafts int32[M, drafts], NONE where there is none; the newest token of each sequence and its
    drafts, int32[M, 1 + drafts]).
    """
    guesses = jnp.zeros((options.batch, 0), jnp.int32)
    if state.text is not None:
        guesses = propose(state.text, cache.lengths + 1, options.drafts)
        guesses = jnp.where(state.left[:, None] > 0, guesses, NONE)
    return guesses, jnp.concatenate([state.token[:, None], jnp.maximum(guesses, 0)], axis=1)


def propose(text: Array, lengths: Array, count: int) -> Array:
    """int32[M, count]: drafts of the tokens after the first `lengths` int32[M] of each row of
    `text` int32[M, size]; NONE where the newest token is new.

    They are read at the place where most of the newest tokens, up to `LONGEST`, stood before; the
    latest of several such places. Drafts go round where they would pass the newest token.
    """
    size = text.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)[None]
    newest = lengths[:, None] - 1
    run, agree = jnp.ones(text.shape, bool), jnp.zeros(text.shape, jnp.int32)
    for back in range(LONGEST):
        token = jnp.take_along_axis(text, jnp.maximum(newest - back, 0), axis=1)
        before = jnp.pad(text, ((0, 0), (back, 0)))[:, :size]
        run &= (before == token) & (place >= back) & (newest >= back)
        agree += run.astype(jnp.int32)
    agree = jnp.where(place < newest, agree, 0)
    best = jnp.argmax(agree * size + place, axis=1).astype(jnp.int32)[:, None]
    seen = jnp.take_along_axis(agree, best, axis=1) > 0
    ahead = jnp.arange(count, dtype=jnp.int32)[None] % jnp.maximum(newest - best, 1)
    guesses = jnp.take_along_axis(text, jnp.minimum(best + 1 + ahead, size - 1), axis=1)
    return jnp.where(seen, guesses, NONE)


def verified(
    options: Options, state: State, logits: Array, guesses: Array, known: Array
) -> tuple[State, Array, Array]:
    """The tokens of the sequences that want some, by logits [M, 1 + drafts, vocab] after the first
    `known` int32[M] tokens of each text and after each draft: (state, how many int32[M], tokens
    int32[M, 1 + drafts]).
    """
    shape = logits.shape[:2]
    within = jnp.arange(shape[1], dtype=jnp.int32)[None]
    row = jnp.arange(shape[0] * shape[1]) // shape[1]
    sampling, keys = jax.tree.map(lambda x: x[row], (state.sampling, state.key))
    positions = known[:, None] + within
    tokens = next_tokens(sampling, logits.reshape(keys.size, -1), keys, positions.reshape(-1))
    ends, tokens = stops(options, tokens).reshape(shape), tokens.reshape(shape)
    counts, over = accepted(guesses, tokens, ends, state.left)
    new, text = within < counts[:, None], state.text
    if text is not None:
        sequence = jnp.arange(options.batch, dtype=jnp.int32)[:, None]
        place = jnp.where(new, positions, text.shape[1])
        text = text.at[sequence, place].set(tokens, mode="drop")
    token = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    token = jnp.where(state.left > 0, token, state.token)
    left = jnp.where(over, 0, state.left - counts)
    guessed = jnp.pad(guesses != NONE, ((0, 0), (1, 0)))
    tokens = jnp.where(new, tokens, jnp.where(guessed, DROPPED, NOTHING))
    state = dataclasses.replace(state, token=token, left=left, text=text)
    return state, counts, tokens


def accepted(guesses: Array, tokens: Array, ends: Array, left: Array) -> tuple[Array, Array]:
    """(how many of `tokens` int32[M, 1 + count], the model's own after the newest token and after
    each draft, are those of plain decoding, int32[M]; whether the last of them ends the text).

    A token after a draft counts if the model's own token was that draft. `ends` bool[M, 1 + count]:
    tokens that end a text; `left` int32[M]: tokens still wanted.
    """
    within = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    agree = (guesses == tokens[:, :-1]).astype(jnp.int32)
    right = jnp.cumprod(agree, axis=1).sum(axis=1, dtype=jnp.int32)
    ends = ends & (within < jnp.minimum(1 + right, left)[:, None])
    over = ends.any(axis=1)
    last = jnp.argmax(ends, axis=1).astype(jnp.int32)
    counts = jnp.where(over, last, jnp.minimum(right, left - 1)) + 1
    return jnp.where(left > 0, counts, 0), over


def begun(prompts: Array, lengths: Array, token: Array, size: int) -> Array:
    """int32[n, size]: prompts int32[n, t] of these lengths, and the token after each."""
    row = jnp.zeros((len(prompts), size), jnp.int32).at[:, : prompts.shape[1]].set(prompts)
    return row.at[jnp.arange(len(prompts)), lengths].set(token)
