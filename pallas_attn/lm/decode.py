"""The loop: a batch of prompts, continuous batching, chunks of steps inside one jit.

The cache has `slots` sequences. A prompt takes a free one, is prefilled together with the others
that wait, and leaves when it has its tokens or meets a stop token; the next prompt takes its place
and its rows are overwritten. The device works on whole chunks of steps; the host hands it the next
chunk before it reads the tokens of the last, so that neither waits for the other.

With drafts (`draft`) a step takes the newest token of a sequence and some guesses of what follows
it. The guesses that the model would have made itself are kept, with the token after the last of
them; the rows of the others are dropped.

With chunked prefill (`prefill_chunk`) nobody waits for a prompt: as long as prompts come in, each
step takes some of their rows, packed beside the newest token, and the drafts, of every sequence
that decodes.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import dispatch
from pallas_attn.lm import drafts as lm_drafts
from pallas_attn.lm import mesh as lm_mesh
from pallas_attn.lm import model
from pallas_attn.lm.model import Config, Params
from pallas_attn.lm.options import Options
from pallas_attn.lm.progress import Generation, Spread, Status
from pallas_attn.lm.sampling import at_least_1, likeliest, sample

Array = jax.Array
# XLA's Triton matmuls cannot read a layer's weights where they lie in the stack that is scanned:
# each is copied out first, three times the traffic and almost three times the time of cuBLAS on
# an H200.
# Kernels that were recorded as a CUDA graph do not begin early (see `_rows`), which costs more than
# their launches: no part of a program is large enough to be recorded.
COMPILER = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_graph_min_graph_size": 2**30}
NOTHING = -1  # in place of a token, where a sequence was not running
NO_NUMBER = -2  # in place of a token whose logit is no finite number
DROPPED = -3  # in place of a token, where there was a draft that was not kept


# ---- on the device ------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the device knows of each slot between two steps."""

    token: Array  # int32[M]: the newest token, not yet in the cache
    left: Array  # int32[M]: tokens still wanted; 0: not running
    key: Array  # a key of each sequence
    text: Array | None = None  # int32[M, rows + 1]: its tokens, where drafts are looked up in them

    @classmethod
    def create(cls, options: Options) -> "State":
        slots = options.slots
        token, left = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
        text = jnp.zeros((slots, options.rows + 1), jnp.int32) if options.draft else None
        return cls(token, left, jax.random.split(jax.random.key(0), slots), text)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """What the host sends with new prompts."""

    prompts: model.Prompts
    slots: Array  # int32[n, samples]: of each prompt's answers, the first its own; M: none
    wanted: Array  # int32[n]: tokens wanted after each prompt
    key: Array  # keys [n, samples]
    vacant: Array  # bool[M]: slots to be emptied before


def _program(body: Callable[..., Any]) -> Any:
    """`body(config, options, params, cache, state, ...)`, jitted; on each device of a mesh."""

    @jax.jit(static_argnums=(0, 1), donate_argnums=(3, 4), compiler_options=COMPILER)
    @functools.wraps(body)
    def program(config: Config, options: Options, *given: Any) -> Any:
        def run(config: Config, *given: Any) -> Any:
            return body(config, options, *given)

        return lm_mesh.over(options.mesh, config, run, *given)

    return program


@_program
def admit(
    config: Config, options: Options, params: Params, cache: Any, state: State, new: Arrivals
) -> tuple[Any, State, Array, Array | None]:
    """Prefills prompts: (cache, state, the first token of each answer int32[n * samples], logits
    or None).
    """
    prompts, how = new.prompts, options.implementation
    logits, cache = model.prefill(config, params, cache.reset(new.vacant), prompts, how)
    slots, key = new.slots.reshape(-1), new.key.reshape(-1)
    of = jnp.arange(slots.size, dtype=jnp.int32) // options.samples  # which prompt
    if options.samples > 1:

        def fork(n: Array, cache: Any) -> Any:
            first = n % options.samples < 1
            return cache.fork(prompts.slots[of[n]], jnp.where(first, options.slots, slots[n]))

        cache = jax.lax.fori_loop(0, slots.size, fork, cache)
        logits = logits[of]
    token = _choose(options, logits, key, prompts.lengths[of])
    left = jnp.where(_stops(options, token), 0, new.wanted[of] - 1)
    text = state.text
    if text is not None:
        begun = lm_drafts.begun(prompts.tokens[of], prompts.lengths[of], token, text.shape[1])
        text = text.at[slots].set(begun, mode="drop")
    state = State(
        state.token.at[slots].set(token, mode="drop"),
        state.left.at[slots].set(left, mode="drop"),
        state.key.at[slots].set(key, mode="drop"),
        text,
    )
    return cache, state, token, logits if options.keep_logits else None


@_program
def steps(
    config: Config, options: Options, params: Params, cache: Any, state: State
) -> tuple[Any, State, Array, Array | None]:
    """A chunk: (cache, state, tokens int32[chunk, M] with NOTHING where none was due, logits); with
    drafts, tokens int32[chunk, M, 1 + drafts].
    """
    rotary = model.rotary_of(config, cache)

    def one(carry: tuple[Any, State], _: None):
        cache, state = carry
        if options.draft is not None:
            cache, state, given, logits = _ahead(config, options, params, rotary, *carry)
            return (cache, state), (given, logits if options.keep_logits else None)
        runs = state.left > 0
        rows = runs.astype(jnp.int32)
        tokens, how = state.token[:, None], options.implementation
        # On a mesh the likeliest token is known without all logits in one place.
        apart = None if options.keep_logits or options.sampling.draws else config.over
        more: dict[str, Any] = {"levels": options.levels, "whole": apart is None}
        logits, cache = model.decode(config, params, cache, tokens, rows, rotary, how, **more)
        logits = logits[:, 0]
        # The position of a token is part of its key: a sequence draws the same tokens whenever and
        # beside whomever it runs.
        token = _choose(options, logits, state.key, cache.lengths, apart)
        left = jnp.where(_stops(options, token), 0, state.left - 1)
        state = State(jnp.where(runs, token, state.token), jnp.where(runs, left, 0), state.key)
        given = jnp.where(runs, token, NOTHING)
        return (cache, state), (given, logits if options.keep_logits else None)

    (cache, state), (tokens, logits) = jax.lax.scan(one, (cache, state), None, options.chunk)
    return cache, state, tokens, logits


def _ahead(
    config: Config, options: Options, params: Params, rotary: Any, cache: Any, state: State
) -> tuple[Any, State, Array, Array]:
    """One step with drafts: (cache, state, tokens int32[M, 1 + drafts], logits)."""
    (guesses, tokens), known = _guesses(options, cache, state), cache.lengths + 1
    rows, how = jnp.where(state.left > 0, tokens.shape[1], 0), options.implementation
    logits, cache = model.decode(
        config, params, cache, tokens, rows, rotary, how, levels=options.levels
    )
    state, made, given = _made(options, state, logits, guesses, known)
    return cache.keep(made, implementation=how), state, given, logits


def _guesses(options: Options, cache: Any, state: State) -> tuple[Array, Array]:
    """The drafts of sequences that run, int32[M, drafts], NONE where there is none; and what a step
    takes of each, int32[M, 1 + drafts].
    """
    guesses = jnp.zeros((options.slots, 0), jnp.int32)
    if state.text is not None:
        guesses = lm_drafts.propose(state.text, cache.lengths + 1, options.drafts)
        guesses = jnp.where(state.left[:, None] > 0, guesses, lm_drafts.NONE)
    return guesses, jnp.concatenate([state.token[:, None], jnp.maximum(guesses, 0)], axis=1)


def _made(
    options: Options, state: State, logits: Array, guesses: Array, known: Array
) -> tuple[State, Array, Array]:
    """The tokens of the sequences that want some, by logits [M, 1 + drafts, vocab] after the first
    `known` int32[M] tokens of each text and after each draft: (state, how many int32[M], tokens
    int32[M, 1 + drafts]).
    """
    due, shape = state.left > 0, logits.shape[:2]
    within = jnp.arange(shape[1], dtype=jnp.int32)[None]
    keys = state.key[jnp.arange(shape[0] * shape[1]) // shape[1]]
    position = (known[:, None] + within).reshape(-1)
    found = _choose(options, logits.reshape(keys.size, -1), keys, position)
    stops, found = _stops(options, found).reshape(shape), found.reshape(shape)
    made, over = lm_drafts.accepted(guesses, found, stops, state.left)
    new, text = within < made[:, None], state.text
    if text is not None:
        place = jnp.where(new, known[:, None] + within, text.shape[1])
        sequence = jnp.arange(options.slots, dtype=jnp.int32)[:, None]
        text = text.at[sequence, place].set(found, mode="drop")
    token = jnp.take_along_axis(found, jnp.maximum(made - 1, 0)[:, None], axis=1)[:, 0]
    token, left = jnp.where(due, token, state.token), jnp.where(over, 0, state.left - made)
    guessed = jnp.pad(guesses != lm_drafts.NONE, ((0, 0), (1, 0)))
    given = jnp.where(new, found, jnp.where(guessed, DROPPED, NOTHING))
    return State(token, left, state.key, text), made, given


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """What the host sends with the next rows of prompts."""

    tokens: Array  # int32[prefill_chunk]: of every slot that gets some, in the order of slots
    rows: Array  # int32[M]: how many
    last: Array  # bool[M]: the prompt ends with them
    source: Array  # int32[M]: the slot whose rows these are; another's where its prompt is forked
    wanted: Array  # int32[M]: tokens wanted after the prompt
    key: Array  # keys [M]
    vacant: Array  # bool[M]: slots to be emptied before


@_program
def mixed(
    config: Config, options: Options, params: Params, cache: Any, state: State, new: Chunks
) -> tuple[Any, State, Array, Array | None]:
    """One step of every sequence that runs, beside rows of prompts: (cache, state, tokens
    int32[M, 1 + drafts] with NOTHING where none was due, logits or None).
    """
    cache = cache.reset(new.vacant)
    (guesses, each), begins = _guesses(options, cache, state), cache.lengths
    prompted, count = new.rows > 0, each.shape[1]
    rows = jnp.where(prompted, new.rows, jnp.where(state.left > 0, count, 0))
    starts, sent = (jnp.pad(jnp.cumsum(x), (1, 0)) for x in (rows, new.rows))
    owners = model.owners_of(starts, new.tokens.size + each.size)
    row = jnp.arange(owners.size, dtype=jnp.int32)
    within = row - starts[owners]
    of_prompts = jnp.take(new.tokens, sent[owners] + within, mode="clip")
    of_steps = each[owners, jnp.minimum(within, count - 1)]
    tokens = jnp.where(prompted[owners], of_prompts, of_steps)
    rotary, how = model.rotary_of(config, cache), options.implementation
    # Of a prompt, the logits after its last row count.
    first = jnp.where(prompted, starts[1:] - 1, starts[:-1])
    after = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    logits, cache = model.mixed(config, params, cache, tokens, starts, after, rotary, how)
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
    state = State(state.token, left, jnp.where(begun, new.key, state.key), text)
    state, made, given = _made(options, state, logits, guesses, known)
    if options.draft is not None:
        cache = cache.keep(jnp.where(begun, new.rows, made), implementation=how)
    if options.samples > 1:
        cache = _forked(cache, new.source)
    return cache, state, given, logits if options.keep_logits else None


def _forked(cache: Any, source: Array) -> Any:
    """Each slot that has another's number as its source becomes a fork of that."""
    slot = jnp.arange(source.size, dtype=jnp.int32)
    others = source != slot
    targets = jnp.nonzero(others, size=source.size, fill_value=0)[0].astype(jnp.int32)
    fork = lambda n, cache: cache.fork(source[targets[n]], targets[n])  # noqa: E731
    return jax.lax.fori_loop(0, others.sum(), fork, cache)


def _choose(
    options: Options, logits: Array, keys: Array, position: Array, apart: str | None = None
) -> Array:
    """`apart`: the mesh axis whose devices have a part of the logits each; then none is drawn."""
    if options.sampling.draws:
        token = sample(logits, jax.vmap(jax.random.fold_in)(keys, position), options.sampling)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    else:
        token, chosen = likeliest(logits, apart)
    return jnp.where(jnp.isfinite(chosen), token, NO_NUMBER)


def _stops(options: Options, token: Array) -> Array:
    stop = jnp.asarray((*options.stop, NO_NUMBER), jnp.int32)
    return (token[:, None] == stop[None]).any(axis=1)


# ---- on the host --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Flight:
    """Work that the device has and the host has not read."""

    tokens: Array  # [steps, n]
    logits: Array | None
    whose: tuple[Generation | None, ...]  # of each column
    steps: int
    prompted: bool = False  # rows of prompts are in it


# The implementations that a program was traced with, in whichever run was the first.
_TRACED: dict[tuple[Any, Config, Options], set[str]] = collections.defaultdict(set)


@jax.jit
def _fold(key: Array, numbers: Array) -> Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


class Run:
    """Decodes prompts. Iterate over it; `sequences` holds all that was made, at any time."""

    def __init__(
        self,
        config: Config,
        params: Params,
        options: Options,
        prompts: Sequence[Sequence[int]],
        wanted: int,
        seed: int = 0,
    ):
        refuse(config, options, prompts, wanted)
        self.config, self.options, self._params = config, options, params
        self.sequences = [
            Generation(0, list(prompt), min(wanted, room), sample, cut=wanted > room)
            for prompt in prompts
            for room in (options.capacity + 1 - len(prompt),)
            for sample in range(options.samples)
        ]
        for n, one in enumerate(self.sequences):
            one.number = n
        self._waiting = collections.deque(self.sequences)
        self._slots: list[Generation | None] = [None] * options.slots
        create = functools.partial(options.create_cache, config)
        self._cache = lm_mesh.made(options.mesh, create, lm_mesh.HEADS)
        self._state = lm_mesh.made(options.mesh, functools.partial(State.create, options))
        create = functools.partial(jax.random.key, seed)
        self._seed = lm_mesh.made(options.mesh, create)
        self._flights: collections.deque[_Flight] = collections.deque()
        self._weights = model.num_bytes(params)
        self._step = 0
        self._steady: list[tuple[int, float, int]] = []  # tokens, seconds, bytes of a chunk
        self._undisturbed = 0  # chunks read since a prompt came
        self._ran: set[Any] = set()  # keys of _TRACED
        self._gaps: list[float] = []  # seconds between two tokens of one sequence
        self._drafts = np.zeros(2, int)  # that there were, and that were kept

    def __iter__(self) -> Iterator[Status]:
        start, last = time.perf_counter(), 0.0
        while True:
            if self.options.prefill_chunk is not None:
                started = self._mix() or self._launch()
            else:
                started = self._admit()
                started |= self._launch()
            if not self._flights:
                return
            # One chunk stays with the device while the last one is read; when nothing is left to
            # start, all are read.
            while len(self._flights) > (1 if started else 0):
                flight = self._flights.popleft()
                tokens = np.asarray(flight.tokens)
                now = time.perf_counter() - start
                made = self._read(flight, tokens, last, now)
                yield self._status(flight, made, now - last, now)
                last = now

    def prepare(self) -> None:
        """Compiles what its first prompts take."""
        if self.options.prefill_chunk is not None:
            slots = self.options.slots
            none = self._chunks({}, np.arange(slots, dtype=np.int32), np.ones(slots, bool))
            self._compile(mixed, none)
            return
        first = list(self._waiting)[: self._together(self.options.slots)]
        new = self._arrivals(list(enumerate(first)), np.ones(self.options.slots, bool))
        self._compile(admit, new)

    def _compile(self, program: Any, new: Any) -> None:
        with self._noted(program, self.options) as given:
            program.lower(*given, new).compile()

    def _call(self, program: Any, options: Options, *new: Any) -> tuple[Array, Array | None]:
        """Tokens and logits; the cache and the state are then those after it."""
        with self._noted(program, options) as given:
            self._cache, self._state, tokens, logits = program(*given, *new)
        return tokens, logits

    @contextlib.contextmanager
    def _noted(self, program: Any, options: Options) -> Iterator[tuple[Any, ...]]:
        """What a program is given first; notes which implementations it is traced with."""
        key = program, self.config, options
        self._ran.add(key)
        with dispatch.recorded() as names:
            yield self.config, options, self._params, self._cache, self._state
        _TRACED[key].update(names)

    def summary(self, seconds: float) -> dict[str, Any]:
        """What a run came to. The rates are of chunks that no prompt and no compilation held up,
        where there were several: a single one may be done before anybody looks at the clock.
        """
        tokens = sum(len(one.tokens) for one in self.sequences)
        steady = len(self._steady) > 1
        chunks = self._steady if steady else [(tokens, seconds, 0)]
        names = {name for key in self._ran for name in _TRACED[key]}
        made, took, moved = (sum(column) for column in zip(*chunks, strict=True))
        return {
            "sequences": len(self.sequences),
            "ended": sum(bool(one.ended) for one in self.sequences),
            "tokens": tokens,
            "steps": self._step,
            "seconds": round(seconds, 3),
            "steady": steady,
            "tokens_per_second": round(made / took, 1) if took else 0.0,
            "tb_per_second": round(moved / took / 1e12, 4) if took else 0.0,
            "device": lm_mesh.devices(self.options.mesh),
            "implementation": "+".join(sorted(names)),
            "dtype": self.options.dtype,
            "cache_bytes": self._cache.num_bytes,
            "weight_bytes": self._weights,
            "time_to_first_token": _seconds_of(self.to_first_token()),
            "time_between_tokens": _seconds_of(self.between_tokens()),
            **self._drafted(),
        }

    def _drafted(self) -> dict[str, Any]:
        """What became of the drafts, where there are any."""
        if self.options.draft is None:
            return {}
        drafts, kept = self._drafts.tolist()
        return {"draft": self.options.draft, "drafts": drafts, "kept": kept} | {
            "acceptance": self.acceptance
        }

    @property
    def acceptance(self) -> float | None:
        """The share of the drafts that were kept, so far."""
        drafts, kept = self._drafts.tolist()
        return round(kept / drafts, 4) if drafts else None

    def to_first_token(self) -> Spread | None:
        """Of the sequences that have one: from the start of the run, which has all prompts."""
        return Spread.of([one.times[0] for one in self.sequences if one.times])

    def between_tokens(self) -> Spread | None:
        """Of all tokens of all sequences, but the first of each."""
        return Spread.of(self._gaps)

    def wait(self) -> None:
        """Until the device has done what it was told to: a process does not end in the midst."""
        jax.block_until_ready((self._cache, self._state))

    def release(self) -> None:
        """Gives back the memory of the cache. It is the last thing that a run does."""
        for x in jax.tree.leaves(self._cache):
            x.delete()

    @property
    def cache(self) -> Any:
        """The cache as it is now; the next step takes it away."""
        return self._cache

    def _admit(self) -> bool:
        """Prefills as many waiting prompts as there is room for."""
        taken: list[tuple[int, Generation]] = []
        vacant = [one is None for one in self._slots]
        free = iter(np.flatnonzero(vacant)[: self._together(sum(vacant))].tolist())
        for slot in free:
            if not self._fits(self._waiting[0]):
                break
            for place in (slot, *itertools.islice(free, self.options.samples - 1)):
                sequence = self._waiting.popleft()
                sequence.planned, sequence.fed = 1, len(sequence.prompt)
                self._slots[place] = sequence
                taken.append((place, sequence))
        if not taken:
            return False
        self._undisturbed = 0
        new = self._arrivals(taken, np.array(vacant))
        tokens, logits = self._call(admit, self.options, new)
        whose = tuple(sequence for _, sequence in taken)
        kept = None if logits is None else logits[None]
        self._fly(_Flight(tokens[None], kept, whose, 0))
        return True

    def _together(self, free: int) -> int:
        """How many of those that wait one prefill takes, into so many free slots: all the answers
        to some prompts.
        """
        count = longest = 0
        samples = self.options.samples
        for one in itertools.islice(self._waiting, 0, free - free % samples, samples):
            longest = max(longest, len(one.prompt))
            if count and _at_least(count + 1) * self._width(longest) > self.options.prefill:
                break
            count += 1
        return count * samples

    def _width(self, longest: int) -> int:
        """Prompts are padded to a power of two, so that few programs serve all lengths."""
        return min(_at_least(max(longest, 16)), self.options.capacity)

    def _fits(self, sequence: Generation) -> bool:
        """Whether the pool has pages for all that it will hold, beside those that run."""
        if self.options.cache != "paged":
            return True
        held = sum(self._pages(one) for one in self._slots if one is not None)
        return held + self.options.samples * self._pages(sequence) <= self.options.pool

    def _pages(self, sequence: Generation) -> int:
        return _pages(self.options, len(sequence.prompt), sequence.wanted)

    def _arrivals(self, taken: list[tuple[int, Generation]], vacant: np.ndarray) -> Arrivals:
        samples = self.options.samples
        n = _at_least(len(taken) // samples)
        tokens = np.zeros((n, self._width(max(len(one.prompt) for _, one in taken))), np.int32)
        lengths, wanted = np.zeros(n, np.int32), np.ones(n, np.int32)
        numbers = np.zeros((n, samples), np.int32)
        # Rows that are no prompt go nowhere.
        slots = np.full((n, samples), self.options.slots, np.int32)
        for place, (slot, one) in enumerate(taken):
            row, sample = divmod(place, samples)
            tokens[row, : len(one.prompt)] = one.prompt
            lengths[row], wanted[row], slots[row, sample] = len(one.prompt), one.wanted, slot
            numbers[row, sample] = one.number
        return Arrivals(
            prompts=model.Prompts(*map(self._sent, (tokens, lengths, slots[:, 0]))),
            slots=self._sent(slots),
            wanted=self._sent(wanted),
            key=self._keys(numbers.reshape(-1)).reshape(numbers.shape),
            vacant=self._sent(vacant),
        )

    def _mix(self) -> bool:
        """One step of what decodes beside the next rows of prompts; none where no prompt is left.

        Prompts take turns in their order, so that one at most is in the midst of its own. The first
        of several answers takes the rows; the others have their slots and wait until it has all.
        """
        vacant = np.array([one is None for one in self._slots])
        room, fed = self.options.prefill_chunk or 0, dict[int, int]()
        for slot, one in enumerate(self._slots):
            if one is not None and one.fed < len(one.prompt) and not one.sample:
                fed[slot] = min(room, len(one.prompt) - one.fed)
                room -= fed[slot]
        free = np.flatnonzero(vacant).tolist()
        for slot, *others in itertools.batched(free, self.options.samples):
            enough = len(others) + 1 == self.options.samples
            if not (room and enough and self._waiting and self._fits(self._waiting[0])):
                break
            one = self._waiting[0]
            for place in (slot, *others):
                self._slots[place] = self._waiting.popleft()
            fed[slot] = min(room, len(one.prompt))
            room -= fed[slot]
        if not fed:
            return False
        self._undisturbed = 0
        source = self._sources(fed)
        new = self._chunks(fed, source, vacant)
        tokens, logits = self._call(mixed, self.options, new)
        whose = tuple(self._slots)
        for slot, one in enumerate(whose):
            if one is not None:
                one.fed += len(one.prompt) if source[slot] != slot else fed.get(slot, 0)
                one.planned += one.fed == len(one.prompt)
        kept = None if logits is None else logits[None]
        self._fly(_Flight(tokens[None], kept, whose, 1, prompted=True))
        return True

    def _sources(self, fed: dict[int, int]) -> np.ndarray:
        """Of each slot its own number, or the slot whose prompt ends in this step where it waits
        for that.
        """
        source, ends = np.arange(self.options.slots, dtype=np.int32), dict[int, int]()
        for slot, count in fed.items():
            one = self._slots[slot]
            assert one is not None
            if one.fed + count == len(one.prompt):
                ends[one.number] = slot
        for slot, one in enumerate(self._slots):
            if one is not None and one.sample and not one.fed:
                source[slot] = ends.get(one.number - one.sample, slot)
        return source

    def _chunks(self, fed: dict[int, int], source: np.ndarray, vacant: np.ndarray) -> Chunks:
        """`fed`: how many rows of its prompt each slot gets; `source`: see `_sources`."""
        slots = self.options.slots
        tokens = np.zeros(self.options.prefill_chunk or 0, np.int32)
        rows, wanted, numbers = np.zeros((3, slots), np.int32)
        last, used = source != np.arange(slots), 0
        for slot, count in sorted(fed.items()):
            one = self._slots[slot]
            assert one is not None
            tokens[used : used + count] = one.prompt[one.fed : one.fed + count]
            rows[slot] = count
            last[slot] = one.fed + count == len(one.prompt)
            used += count
        for slot, one in enumerate(self._slots):
            if one is not None and (slot in fed or last[slot]):
                wanted[slot], numbers[slot] = one.wanted, one.number
        return Chunks(
            tokens=self._sent(tokens),
            rows=self._sent(rows),
            last=self._sent(last),
            source=self._sent(source),
            wanted=self._sent(wanted),
            key=self._keys(numbers),
            vacant=self._sent(vacant),
        )

    def _keys(self, numbers: np.ndarray) -> Array:
        """Of the sequences of these numbers."""
        return _fold(self._seed, self._sent(numbers))

    def _sent(self, x: np.ndarray) -> Array:
        """An array of the host's, on its way to the device, or to all of a mesh."""
        return lm_mesh.everywhere(self.options.mesh, x)

    def _launch(self) -> bool:
        """The next chunk, if a sequence wants more tokens than were planned."""
        if not any(one is not None and one.planned < one.wanted for one in self._slots):
            return False
        # However prompts come in: steps are the same program.
        tokens, logits = self._call(steps, dataclasses.replace(self.options, prefill_chunk=None))
        whose = tuple(self._slots)
        for one in whose:
            if one is not None:
                one.planned += self.options.chunk
        self._fly(_Flight(tokens, logits, whose, self.options.chunk))
        return True

    def _fly(self, flight: _Flight) -> None:
        """Its results start on their way to the host; slots that it finishes are free from now on:
        the device does things in order.
        """
        flight.tokens.copy_to_host_async()
        self._flights.append(flight)
        for slot, one in enumerate(self._slots):
            if one is not None and one.planned >= one.wanted:
                self._slots[slot] = None

    def _read(self, flight: _Flight, tokens: np.ndarray, last: float, now: float) -> int:
        """Hands tokens to their sequences; how many there were. Those of a chunk of steps, which
        came together, are taken as made at even times since the last read.
        """
        made, count = 0, len(tokens)
        tokens = tokens.reshape(*tokens.shape[:2], -1)
        logits = None
        if flight.logits is not None:
            logits = np.asarray(flight.logits).reshape(*tokens.shape, -1)
        for column, sequence in enumerate(flight.whose):
            if sequence is None or sequence.ended:
                continue
            mine = tokens[:, column]
            there = (mine != NOTHING) & (mine != DROPPED)
            if NO_NUMBER in mine[there]:
                raise ValueError(
                    f"sequence {sequence.number + 1}: its logits are not finite after "
                    f"{len(sequence.prompt) + len(sequence.tokens)} tokens: the weights are too "
                    f"large for {self.options.dtype}, or those of no model"
                )
            made += int(there.sum())
            self._drafts += [(mine[:, 1:] != NOTHING).sum(), there[:, 1:].sum()]
            sequence.tokens += mine[there].tolist()
            # Those of a step are made one after the other in its time.
            share = np.cumsum(there, axis=1) / np.maximum(there.sum(axis=1, keepdims=True), 1)
            step = np.arange(count)[:, None] + share
            when = (last + (now - last) * step[there] / max(count, 1)).tolist()
            self._gaps += np.diff([*sequence.times[-1:], *when]).tolist()
            sequence.times += when
            if logits is not None:
                sequence.logits += list(logits[:, column][there])
            self._end(sequence)
        self._step += flight.steps
        return made

    def _end(self, sequence: Generation) -> None:
        if sequence.tokens and sequence.tokens[-1] in self.options.stop:
            sequence.ended = "stop"
        elif len(sequence.tokens) >= sequence.wanted:
            sequence.ended = "capacity" if sequence.cut else "length"
        if sequence.ended and sequence in self._slots:
            self._slots[self._slots.index(sequence)] = None

    def _status(self, flight: _Flight, made: int, took: float, seconds: float) -> Status:
        ended = sum(bool(one.ended) for one in self.sequences)
        live = [one for one in flight.whose if one is not None]
        per_row = self.config.kv_bytes(self.options.dtype)
        kv = per_row * sum(one.rows for one in live)
        moved = (self._weights + kv) * flight.steps
        # The first read after a prompt came waited for its prefill, and for compilations.
        self._undisturbed += 1
        if flight.steps and not flight.prompted and self._undisturbed > 1:
            self._steady.append((made, took, moved))
        return Status(
            running=sum(not one.ended for one in live),
            waiting=len(self._waiting),
            ended=ended,
            step=self._step,
            tokens=sum(len(one.tokens) for one in self.sequences),
            seconds=seconds,
            tokens_per_second=made / took,
            live_kv_bytes=kv,
            tb_per_second=moved / took / 1e12,
        )


def _at_least(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _seconds_of(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else dataclasses.asdict(spread)


def _pages(options: Options, prompt: int, wanted: int) -> int:
    rows = min(prompt + wanted - 1, options.capacity) + options.ahead
    return -(-rows // options.page_size)


def refuse(config: Config, options: Options, prompts: Sequence[Sequence[int]], wanted: int) -> None:
    """Raises what is wrong with a run, before there are weights, or anything is started."""
    at_least_1("max_new_tokens", wanted)
    if options.capacity > config.positions:
        raise ValueError(
            f"capacity: the model was made for {config.positions} positions, got "
            f"{options.capacity}; ask for fewer tokens, or give a smaller capacity"
        )
    if not prompts:
        raise ValueError("prompt: expected at least one, got none")
    for n, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {n} is empty")
        if len(prompt) > options.capacity:
            raise ValueError(
                f"prompt {n}: {len(prompt)} tokens do not fit in a capacity of {options.capacity}"
            )
        if min(prompt) < 0 or max(prompt) >= config.vocab:
            raise ValueError(
                f"prompt {n}: expected tokens from 0 to {config.vocab - 1}, got "
                f"{min(prompt)} to {max(prompt)}"
            )
        pages = options.samples * _pages(options, len(prompt), wanted)
        if options.cache == "paged" and pages > options.pool:
            raise ValueError(f"prompt {n}: {pages} pages do not fit in a pool of {options.pool}")
