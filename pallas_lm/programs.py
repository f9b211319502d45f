"""The programs of the plain decode loop: `admit` prefills prompts, `steps` decodes a chunk."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_attn.cache import KVCache
from pallas_lm import drafts, model
from pallas_lm.config import Config, Params
from pallas_lm.model import Sent
from pallas_lm.options import Options
from pallas_lm.sampling import Sampling
from pallas_lm.state import NOTHING, Kept, State, forked, next_tokens, program, stops

Array = jax.Array
Result = tuple[KVCache, State, Array, Kept]  # cache, state, tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """New prompts, as the host sends them."""

    prompts: model.Prompts
    slots: Sent  # int32[n, samples]: slots of each prompt's answers, its own first; M: none
    wanted: Sent  # int32[n]: tokens wanted after each prompt
    key: Sent  # keys [n, samples]
    sampling: Sampling  # arrays [n * samples]
    vacant: Sent  # bool[M]: slots to be emptied before


@program
def admit(
    config: Config,
    options: Options,
    params: Params,
    cache: KVCache,
    state: State,
    new: Arrivals,
) -> Result:
    """Prefills prompts; the first token of each answer, int32[n * samples]."""
    cache, prompts = cache.reset(new.vacant), new.prompts
    logits, cache = model.prefill(config, params, cache, prompts, options.implementation)
    slots, key = new.slots.reshape(-1), new.key.reshape(-1)
    number = jnp.arange(slots.size, dtype=jnp.int32) // options.samples  # prompt of each answer
    if options.samples > 1:
        source = jnp.arange(options.batch, dtype=jnp.int32)
        cache = forked(cache, source.at[slots].set(prompts.slots[number], mode="drop"))
        logits = logits[number]
    token = next_tokens(new.sampling, logits, key, prompts.lengths[number])
    left = jnp.where(stops(options, token), 0, new.wanted[number] - 1)

    # Sequences that the host has ended run no more.
    state = dataclasses.replace(state, left=jnp.where(new.vacant, 0, state.left))

    def put(held: Array, x: Array) -> Array:
        return held.at[slots].set(x, mode="drop")

    text = state.text
    if text is not None:
        size = text.shape[1]
        begun = drafts.begun(prompts.tokens[number], prompts.lengths[number], token, size)
        text = put(text, begun)
    state = State(
        put(state.token, token),
        put(state.left, left),
        put(state.key, key),
        jax.tree.map(put, state.sampling, new.sampling),
        text,
    )
    return cache, state, token, Kept.of(options, logits, token)


@program
def steps(config: Config, options: Options, params: Params, cache: KVCache, state: State) -> Result:
    """A chunk of steps; tokens int32[chunk, M], NOTHING where none was due (with drafts
    int32[chunk, M, 1 + drafts]).
    """
    rotary = model.rotary_of(config, cache)
    one_step = _step if options.draft is None else drafts.step

    def body(carry: tuple[KVCache, State], _: None):
        cache, state, tokens, logits = one_step(config, options, params, rotary, *carry)
        return (cache, state), (tokens, Kept.of(options, logits, tokens))

    (cache, state), (tokens, kept) = jax.lax.scan(body, (cache, state), None, options.chunk)
    return cache, state, tokens, kept


def _step(
    config: Config,
    options: Options,
    params: Params,
    rotary: model.Tables,
    cache: KVCache,
    state: State,
) -> tuple[KVCache, State, Array, Array]:
    """The next token of each sequence that runs, int32[M], and the logits before it."""
    runs = state.left > 0
    new = state.token[:, None], runs.astype(jnp.int32)
    logits, cache = model.decode(
        config, params, cache, *new, rotary, options.implementation, options.levels
    )
    logits = logits[:, 0]
    token = next_tokens(state.sampling, logits, state.key, cache.lengths)
    left = jnp.where(stops(options, token), 0, state.left - 1)
    newest = jnp.where(runs, token, state.token)
    state = dataclasses.replace(state, token=newest, left=jnp.where(runs, left, 0))
    return cache, state, jnp.where(runs, token, NOTHING), logits
