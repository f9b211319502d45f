"""Chunked prefill: no sequence waits for a long prompt.

As long as prompts come in, each step takes up to `Options.prefill_chunk` of their rows, packed
beside the newest token, and the drafts, of every sequence that decodes.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.cache import KVCache
from pallas_lm import drafts, model
from pallas_lm.config import Config, Params
from pallas_lm.model import Sent
from pallas_lm.options import Options
from pallas_lm.programs import Result
from pallas_lm.sampling import Sampling
from pallas_lm.slots import Slots
from pallas_lm.state import Kept, State, forked, program

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """The next rows of prompts, as the host sends them."""

    tokens: Sent  # int32[prefill_chunk]: rows of all prompts, in the order of slots
    rows: Sent  # int32[M]: how many of them each slot gets
    last: Sent  # bool[M]: the prompt ends with them
    source: Sent  # int32[M]: the slot whose rows these are; another's where its prompt is forked
    wanted: Sent  # int32[M]: tokens wanted after the prompt
    key: Sent  # keys [M]
    sampling: Sampling  # arrays [M]
    vacant: Sent  # bool[M]: slots to be emptied before


@program
def mixed(
    config: Config, options: Options, params: Params, cache: KVCache, state: State, new: Chunks
) -> Result:
    """One step of every sequence that runs, beside rows of prompts; tokens int32[M, 1 + drafts],
    NOTHING where none was due.
    """
    cache = cache.reset(new.vacant)
    # Sequences that the host has ended run no more.
    state = dataclasses.replace(state, left=jnp.where(new.vacant, 0, state.left))
    (guesses, newest), begins = drafts.proposed(options, cache, state), cache.lengths
    prompted, count = new.rows > 0, newest.shape[1]
    rows = jnp.where(prompted, new.rows, jnp.where(state.left > 0, count, 0))
    starts, sent = (jnp.pad(jnp.cumsum(x), (1, 0)) for x in (rows, new.rows))
    owners = model.owners_of(starts, new.tokens.size + newest.size)
    row = jnp.arange(owners.size, dtype=jnp.int32)
    within = row - starts[owners]
    of_prompts = jnp.take(new.tokens, sent[owners] + within, mode="clip")
    of_steps = newest[owners, jnp.minimum(within, count - 1)]
    tokens = jnp.where(prompted[owners], of_prompts, of_steps)
    rotary, implementation = model.rotary_of(config, cache), options.implementation
    # The logits after a prompt's last row count, and those after each row of a step.
    first = jnp.where(prompted, starts[1:] - 1, starts[:-1])
    after = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    packed = model.Packed(tokens, starts, after)
    logits, cache = model.mixed(
        config, params, cache, packed, rotary, implementation, options.levels
    )
    text = state.text
    if text is not None:
        place = jnp.where(prompted[owners] & (row < starts[-1]), begins[owners] + within, text.size)
        text = text.at[owners, place].set(tokens, mode="drop")
    known = begins + jnp.where(prompted, new.rows, 1)
    begun = prompted
    if options.samples > 1:  # the other answers begin where their prompt ends
        known, logits, begun = (x[new.source] for x in (known, logits, prompted))
        text = None if text is None else text[new.source]
    left = jnp.where(new.last, new.wanted, state.left)
    new_ones = functools.partial(jnp.where, begun)
    key, sampling = jax.tree.map(new_ones, (new.key, new.sampling), (state.key, state.sampling))
    state = State(state.token, left, key, sampling, text)
    state, counts, tokens = drafts.verified(options, state, logits, guesses, known)
    if options.draft is not None:
        cache = cache.keep(jnp.where(begun, new.rows, counts), implementation=implementation)
    if options.samples > 1:
        cache = forked(cache, new.source)
    return cache, state, tokens, Kept.of(options, logits, tokens)


def feed(slots: Slots) -> dict[int, int]:
    """{slot: rows of its prompt in the next step}; vacant slots are given to prompts that wait.

    Prompts take turns in their order, so that at most one is partly in. The first of several
    answers takes the rows; the others hold their slots and wait until it has all.
    """
    options, held = slots.options, slots.held
    free = np.flatnonzero(slots.vacant).tolist()
    room, fed = options.prefill_chunk or 0, dict[int, int]()
    for slot, sequence in enumerate(held):
        if sequence is not None and sequence.unfed and not sequence.sample:
            fed[slot] = min(room, sequence.unfed)
            room -= fed[slot]
    for places in itertools.batched(free, options.samples):
        enough = len(places) == options.samples
        if not (room and enough and slots.waiting and slots.fits()):
            break
        fed[places[0]] = min(room, slots.waiting[0].unfed)
        room -= fed[places[0]]
        for place in places:
            held[place] = slots.waiting.popleft()
    return fed


def sources(slots: Slots, fed: dict[int, int]) -> np.ndarray:
    """int32[M]: each slot's own number, or the slot whose prompt, which it waits for, ends now."""
    source, ends = np.arange(slots.options.batch, dtype=np.int32), dict[int, int]()
    for slot, sequence in enumerate(slots.held):
        if sequence is not None and slot in fed and sequence.unfed == fed[slot]:
            ends[sequence.number] = slot
    for slot, sequence in enumerate(slots.held):
        if sequence is not None and sequence.sample and not sequence.fed:
            source[slot] = ends.get(sequence.number - sequence.sample, slot)
    return source


def chunks(slots: Slots, fed: dict[int, int], source: np.ndarray, vacant: np.ndarray) -> Chunks:
    """The rows that are `fed`. In place of keys it has the sequences' numbers, and no sampling."""
    count = slots.options.batch
    tokens = np.zeros(slots.options.prefill_chunk or 0, np.int32)
    rows, wanted, numbers = np.zeros((3, count), np.int32)
    last, used = source != np.arange(count), 0
    for slot, sequence in enumerate(slots.held):
        if sequence is None or not (slot in fed or last[slot]):
            continue
        wanted[slot], numbers[slot] = sequence.wanted, sequence.number
        if slot in fed:
            rows[slot], last[slot] = fed[slot], sequence.unfed == fed[slot]
            part = sequence.prompt[sequence.fed : sequence.fed + fed[slot]]
            tokens[used : used + fed[slot]] = part
            used += fed[slot]
    return Chunks(tokens, rows, last, source, wanted, numbers, Sampling(), vacant)


def advance(slots: Slots, fed: dict[int, int], source: np.ndarray) -> None:
    """Notes that the device was told to take these rows."""
    for slot, sequence in enumerate(slots.held):
        if sequence is not None:
            sequence.fed += len(sequence.prompt) if source[slot] != slot else fed.get(slot, 0)
            sequence.planned += not sequence.unfed
