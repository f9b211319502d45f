"""The loop: a batch of prompts, continuous batching, chunks of steps inside one jit.

The cache has `slots` sequences. A prompt takes a free one, is prefilled together with the others
that wait, and leaves when it has its tokens or meets a stop token; the next prompt takes its place
and its rows are overwritten. The device works on whole chunks of steps; the host hands it the next
chunk before it reads the tokens of the last, so that neither waits for the other.
"""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import _dispatch
from pallas_attn.cache import PagedCache, PerSequenceCache, StackedCache
from pallas_attn.lm import model
from pallas_attn.lm.model import Config, Params
from pallas_attn.lm.sampling import Sampling, sample

Array = jax.Array
# XLA's Triton matmuls cannot read a layer's weights where they lie in the stack that is scanned:
# each is copied out first, three times the traffic and almost three times the time of cuBLAS on
# an H200.
# Kernels that were recorded as a CUDA graph do not begin early (see `_rows`), which costs more than
# their launches: no part of a program is large enough to be recorded.
COMPILER = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_graph_min_graph_size": 2**30}
CACHES = ("per_sequence", "stacked", "paged")
NOTHING = -1  # in place of a token, where a sequence was not running
NO_NUMBER = -2  # in place of a token whose logit is no finite number


@dataclasses.dataclass(frozen=True)
class Options:
    """How to decode. A jit key."""

    cache: str = "per_sequence"
    slots: int = 8
    capacity: int = 512  # rows of each slot
    page_size: int = 64
    pages: int | None = None  # of the whole pool; None: enough for every slot's capacity
    chunk: int = 16  # steps inside one jit
    prefill: int = 16384  # tokens that one prefill takes at most, padding counted
    dtype: str = "bfloat16"
    sampling: Sampling = Sampling()
    stop: tuple[int, ...] = ()
    implementation: str | None = None
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise ValueError(f"cache: expected one of {CACHES}, got {self.cache!r}")
        for name in ("slots", "capacity", "page_size", "chunk", "prefill"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def pool(self) -> int:
        """Pages of the pool."""
        return self.pages or self.slots * -(-self.capacity // self.page_size)

    def create_cache(self, config: Config) -> Any:
        sizes: dict[str, Any] = {
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "layers": config.layers,
            "dtype": self.dtype,
        }
        if self.cache == "per_sequence":
            return PerSequenceCache.create((self.capacity,) * self.slots, **sizes)
        if self.cache == "stacked":
            return StackedCache.create(self.slots, self.capacity, **sizes)
        return PagedCache.create(
            self.slots, self.pool, self.page_size, capacity=self.capacity, **sizes
        )


# ---- on the device ------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What the device knows of each slot between two steps."""

    token: Array  # int32[M]: the newest token, not yet in the cache
    left: Array  # int32[M]: tokens still wanted; 0: not running
    key: Array  # a key of each sequence

    @classmethod
    def create(cls, slots: int) -> "State":
        token, left = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
        return cls(token, left, jax.random.split(jax.random.key(0), slots))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """What the host sends with new prompts."""

    prompts: model.Prompts
    wanted: Array  # int32[n]: tokens wanted after each prompt
    key: Array  # keys [n]
    vacant: Array  # bool[M]: slots to be emptied before


@jax.jit(static_argnums=(0, 1), donate_argnums=(3, 4), compiler_options=COMPILER)
def admit(
    config: Config, options: Options, params: Params, cache: Any, state: State, new: Arrivals
) -> tuple[Any, State, Array, Array | None]:
    """Prefills prompts: (cache, state, the first token of each int32[n], logits or None)."""
    prompts, how = new.prompts, options.implementation
    logits, cache = model.prefill(config, params, cache.reset(new.vacant), prompts, how)
    token = _choose(options, logits, new.key, prompts.lengths)
    left = jnp.where(_stops(options, token), 0, new.wanted - 1)
    state = State(
        state.token.at[prompts.slots].set(token, mode="drop"),
        state.left.at[prompts.slots].set(left, mode="drop"),
        state.key.at[prompts.slots].set(new.key, mode="drop"),
    )
    return cache, state, token, logits if options.keep_logits else None


@jax.jit(static_argnums=(0, 1), donate_argnums=(3, 4), compiler_options=COMPILER)
def steps(
    config: Config, options: Options, params: Params, cache: Any, state: State
) -> tuple[Any, State, Array, Array | None]:
    """A chunk: (cache, state, tokens int32[chunk, M] with NOTHING where none was due, logits)."""

    def one(carry: tuple[Any, State], _: None):
        cache, state = carry
        runs = state.left > 0
        rows = runs.astype(jnp.int32)
        logits, cache = model.decode(
            config, params, cache, state.token, rows, options.implementation
        )
        # The position of a token is part of its key: a sequence draws the same tokens whenever and
        # beside whomever it runs.
        token = _choose(options, logits, state.key, cache.lengths)
        left = jnp.where(_stops(options, token), 0, state.left - 1)
        state = State(jnp.where(runs, token, state.token), jnp.where(runs, left, 0), state.key)
        given = jnp.where(runs, token, NOTHING)
        return (cache, state), (given, logits if options.keep_logits else None)

    (cache, state), (tokens, logits) = jax.lax.scan(one, (cache, state), None, options.chunk)
    return cache, state, tokens, logits


def _choose(options: Options, logits: Array, keys: Array, position: Array) -> Array:
    token = sample(logits, jax.vmap(jax.random.fold_in)(keys, position), options.sampling)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return jnp.where(jnp.isfinite(chosen), token, NO_NUMBER)


def _stops(options: Options, token: Array) -> Array:
    stop = jnp.asarray((*options.stop, NO_NUMBER), jnp.int32)
    return (token[:, None] == stop[None]).any(axis=1)


# ---- on the host --------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Generation:
    """A prompt and what came after it."""

    number: int
    prompt: list[int]
    wanted: int  # tokens
    cut: bool = False  # more were asked for than the capacity leaves room for
    tokens: list[int] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    ended: str = ""  # why: "stop", "length", "capacity"; "" while it is not over
    planned: int = 0  # tokens that the device was told to make, read or not

    @property
    def rows(self) -> int:
        """Rows of cache that it holds: all but its newest token."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)


@dataclasses.dataclass(frozen=True)
class Status:
    """Where a run stands after a chunk was read. Rates are of the time since the last."""

    running: int
    waiting: int
    ended: int
    step: int
    tokens: int
    seconds: float
    tokens_per_second: float
    live_kv_bytes: int
    tb_per_second: float  # weights and live rows, once a step


@dataclasses.dataclass(frozen=True)
class _Flight:
    """Work that the device has and the host has not read."""

    tokens: Array  # [steps, n]
    logits: Array | None
    whose: tuple[Generation | None, ...]  # of each column
    steps: int


# The implementations that the programs of a run were traced with, whichever run was the first.
_TRACED: dict[tuple[Config, Options], set[str]] = collections.defaultdict(set)


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
            Generation(n, list(prompt), min(wanted, room), cut=wanted > room)
            for n, prompt in enumerate(prompts)
            for room in (options.capacity + 1 - len(prompt),)
        ]
        self._waiting = collections.deque(self.sequences)
        self._slots: list[Generation | None] = [None] * options.slots
        self._cache = options.create_cache(config)
        self._state = State.create(options.slots)
        self._seed = jax.random.key(seed)
        self._flights: collections.deque[_Flight] = collections.deque()
        self._weights = model.num_bytes(params)
        self._step = 0
        self._steady: list[tuple[int, float, int]] = []  # tokens, seconds, bytes of a chunk
        self._undisturbed = 0  # chunks read since a prompt came

    def __iter__(self) -> Iterator[Status]:
        start = last = time.perf_counter()
        while True:
            started = self._admit()
            started |= self._launch()
            if not self._flights:
                return
            # One chunk stays with the device while the last one is read; when nothing is left to
            # start, all are read.
            while len(self._flights) > (1 if started else 0):
                flight = self._flights.popleft()
                made = self._read(flight)
                now = time.perf_counter()
                yield self._status(flight, made, now - last, now - start)
                last = now

    def prepare(self) -> None:
        """Compiles what its first prompts take."""
        first = list(self._waiting)[: self._together(self.options.slots)]
        new = self._arrivals(list(enumerate(first)), np.ones(self.options.slots, bool))
        given = self.config, self.options, self._params, self._cache, self._state
        with self._noted():
            admit.lower(*given, new).compile()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Notes which implementations are traced in this block."""
        with _dispatch.recorded() as names:
            yield
        _TRACED[self.config, self.options].update(names)

    def summary(self, seconds: float) -> dict[str, Any]:
        """What a run came to. The rates are of chunks that no prompt and no compilation held up,
        where there were several: a single one may be done before anybody looks at the clock.
        """
        tokens = sum(len(one.tokens) for one in self.sequences)
        steady = len(self._steady) > 1
        chunks = self._steady if steady else [(tokens, seconds, 0)]
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
            "device": jax.devices()[0].device_kind,
            "implementation": "+".join(sorted(_TRACED[self.config, self.options])),
            "dtype": self.options.dtype,
            "cache_bytes": self._cache.num_bytes,
            "weight_bytes": self._weights,
        }

    def wait(self) -> None:
        """Until the device has done what it was told to: a process does not end in the midst."""
        jax.block_until_ready((self._cache, self._state))

    @property
    def cache(self) -> Any:
        """The cache as it is now; the next step takes it away."""
        return self._cache

    def _admit(self) -> bool:
        """Prefills as many waiting prompts as there is room for."""
        taken: list[tuple[int, Generation]] = []
        vacant = [one is None for one in self._slots]
        for slot in np.flatnonzero(vacant)[: self._together(sum(vacant))]:
            if not self._fits(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            sequence.planned, self._slots[slot] = 1, sequence
            taken.append((int(slot), sequence))
        if not taken:
            return False
        self._undisturbed = 0
        new = self._arrivals(taken, np.array(vacant))
        with self._noted():
            self._cache, self._state, tokens, logits = admit(
                self.config, self.options, self._params, self._cache, self._state, new
            )
        whose = tuple(sequence for _, sequence in taken)
        kept = None if logits is None else logits[None]
        self._fly(_Flight(tokens[None], kept, whose, 0))
        return True

    def _together(self, free: int) -> int:
        """How many of those that wait one prefill takes, into so many free slots."""
        count = longest = 0
        for one in itertools.islice(self._waiting, free):
            longest = max(longest, len(one.prompt))
            if count and _at_least(count + 1) * self._width(longest) > self.options.prefill:
                break
            count += 1
        return count

    def _width(self, longest: int) -> int:
        """Prompts are padded to a power of two, so that few programs serve all lengths."""
        return min(_at_least(max(longest, 16)), self.options.capacity)

    def _fits(self, sequence: Generation) -> bool:
        """Whether the pool has pages for all that it will hold, beside those that run."""
        if self.options.cache != "paged":
            return True
        held = sum(self._pages(one) for one in self._slots if one is not None)
        return held + self._pages(sequence) <= self.options.pool

    def _pages(self, sequence: Generation) -> int:
        return _pages(self.options, len(sequence.prompt), sequence.wanted)

    def _arrivals(self, taken: list[tuple[int, Generation]], vacant: np.ndarray) -> Arrivals:
        n = _at_least(len(taken))
        tokens = np.zeros((n, self._width(max(len(one.prompt) for _, one in taken))), np.int32)
        lengths, wanted = np.zeros(n, np.int32), np.ones(n, np.int32)
        numbers = np.zeros(n, np.int32)
        slots = np.full(n, self.options.slots, np.int32)  # rows that are no prompt go nowhere
        for row, (slot, one) in enumerate(taken):
            tokens[row, : len(one.prompt)] = one.prompt
            lengths[row], wanted[row], slots[row] = len(one.prompt), one.wanted, slot
            numbers[row] = one.number
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(self._seed, jnp.asarray(numbers))
        prompts = model.Prompts(*map(jnp.asarray, (tokens, lengths, slots)))
        return Arrivals(prompts, jnp.asarray(wanted), keys, jnp.asarray(vacant))

    def _launch(self) -> bool:
        """The next chunk, if a sequence wants more tokens than were planned."""
        if not any(one is not None and one.planned < one.wanted for one in self._slots):
            return False
        with self._noted():
            self._cache, self._state, tokens, logits = steps(
                self.config, self.options, self._params, self._cache, self._state
            )
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

    def _read(self, flight: _Flight) -> int:
        """Hands tokens to their sequences; how many there were."""
        made, tokens = 0, np.asarray(flight.tokens)
        logits = None if flight.logits is None else np.asarray(flight.logits)
        for column, sequence in enumerate(flight.whose):
            if sequence is None or sequence.ended:
                continue
            (live,) = np.nonzero(tokens[:, column] != NOTHING)
            if NO_NUMBER in tokens[live, column]:
                raise ValueError(
                    f"sequence {sequence.number + 1}: its logits are not finite after "
                    f"{len(sequence.prompt) + len(sequence.tokens)} tokens: the weights are too "
                    f"large for {self.options.dtype}, or those of no model"
                )
            made += len(live)
            sequence.tokens += tokens[live, column].tolist()
            if logits is not None:
                sequence.logits += list(logits[live, column])
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
        if flight.steps and self._undisturbed > 1:
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


def _pages(options: Options, prompt: int, wanted: int) -> int:
    return -(-min(prompt + wanted - 1, options.capacity) // options.page_size)


def refuse(config: Config, options: Options, prompts: Sequence[Sequence[int]], wanted: int) -> None:
    """Raises what is wrong with a run, before there are weights, or anything is started."""
    if wanted < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {wanted}")
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
        if options.cache == "paged" and _pages(options, len(prompt), wanted) > options.pool:
            raise ValueError(
                f"prompt {n}: {_pages(options, len(prompt), wanted)} pages do not fit in a pool "
                f"of {options.pool}"
            )
