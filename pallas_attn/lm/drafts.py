"""Drafts by prompt lookup: what followed the newest tokens where they stood before, in the prompt
or in what was made since, is what is guessed to follow them now; and which of the guesses stay.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

LONGEST = 8  # tokens that are looked up
NONE = -1  # in place of a draft


def propose(text: Array, lengths: Array, count: int) -> Array:
    """int32[M, count]: drafts of what follows the first `lengths` int32[M] tokens of each row of
    `text` int32[M, size]; NONE where the newest token is new.

    Of all places where the newest tokens stood before, up to `LONGEST` of them, the one where most
    of them did, and of several the latest. Drafts go round where they would pass the newest token.
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
    found = jnp.take_along_axis(agree, best, axis=1) > 0
    ahead = jnp.arange(count, dtype=jnp.int32)[None] % jnp.maximum(newest - best, 1)
    drafts = jnp.take_along_axis(text, jnp.minimum(best + 1 + ahead, size - 1), axis=1)
    return jnp.where(found, drafts, NONE)


def accepted(guesses: Array, found: Array, stops: Array, left: Array) -> tuple[Array, Array]:
    """How many of the tokens `found` int32[M, 1 + count] after the newest one and after each draft
    are those of plain decoding, int32[M], of `left` that are wanted; and whether the last of them
    is one that `stops`, bool[M].

    What follows a draft counts where the model itself would have said the draft.
    """
    within = jnp.arange(found.shape[1], dtype=jnp.int32)[None]
    agree = (guesses == found[:, :-1]).astype(jnp.int32)
    right = jnp.cumprod(agree, axis=1).sum(axis=1, dtype=jnp.int32)
    ends = stops & (within < jnp.minimum(1 + right, left)[:, None])
    over = ends.any(axis=1)
    last = jnp.argmax(ends, axis=1).astype(jnp.int32)
    made = jnp.where(over, last, jnp.minimum(right, left - 1)) + 1
    return jnp.where(left > 0, made, 0), over


def begun(prompts: Array, lengths: Array, token: Array, size: int) -> Array:
    """int32[n, size]: prompts int32[n, t] of these lengths, and the token after each."""
    row = jnp.zeros((len(prompts), size), jnp.int32).at[:, : prompts.shape[1]].set(prompts)
    return row.at[jnp.arange(len(prompts)), lengths].set(token)
