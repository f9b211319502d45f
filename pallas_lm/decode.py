"""The decode loop on the host: a batch of prompts, continuous batching, chunks of steps in one jit.

The cache has `batch` sequences. A prompt takes a vacant one (`slots`), is prefilled together with
the others that wait, and leaves when it has its tokens or meets a stop token; the next prompt takes
its place and its rows are overwritten. The device works on whole chunks of steps (`programs`); the
host hands it the next chunk before it reads the tokens of the last, so that neither waits for the
other.

Two options make a step larger: speculative decoding (`drafts`) and `chunked_prefill`.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_attn.cache import KVCache
from pallas_attn.devices import chosen
from pallas_lm import chunked_prefill
from pallas_lm import mesh as lm_mesh
from pallas_lm.buckets import bucket, power_of_two
from pallas_lm.config import Config, Params, num_bytes
from pallas_lm.options import Call, Options
from pallas_lm.programs import Arrivals, admit, steps
from pallas_lm.progress import Generation, Spread, Status
from pallas_lm.slots import Slots, arrivals, pages_of
from pallas_lm.state import DROPPED, NO_NUMBER, NOTHING, Kept, Program, State

Array = jax.Array
New = Arrivals | chunked_prefill.Chunks


@dataclasses.dataclass(frozen=True)
class _Flight:
    """Work that the device has and the host has not read."""

    tokens: Array  # [steps, n], with drafts [steps, n, 1 + drafts]
    kept: Kept  # axes as those of the tokens
    owners: tuple[Generation | None, ...]  # sequence of each column
    steps: int
    prompted: bool = False  # rows of prompts are in it


# Names of the implementations that a program was traced with, in whichever run was the first.
_TRACED: dict[tuple[Program, Config, Options], set[str]] = collections.defaultdict(set)


@jax.jit
def _fold(key: Array, numbers: Array) -> Array:
    """A key for each sequence's number, in the shape of the numbers."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers.reshape(-1))
    return keys.reshape(numbers.shape)


def _no_larger(options: Options, prompts: Sequence[Sequence[int]], wanted: int) -> Options:
    """The options with `chunk` and `prefill_chunk` cut to what the prompts need, rounded up to a
    bucket: empty rows and steps take as long as full ones.
    """
    chunk = min(options.chunk, power_of_two(max(wanted - 1, 1)))
    rows = options.prefill_chunk
    if rows is not None:
        together = sorted(map(len, prompts))[-options.batch :]
        rows = min(rows, bucket(sum(together), least=16))
    return dataclasses.replace(options, chunk=chunk, prefill_chunk=rows)


class Run:
    """Decodes prompts. Iterate over it; `sequences` holds the tokens made so far, at any time."""

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
        options = _no_larger(options, prompts, wanted)
        self.config, self.options, self._params = config, options, params
        self.sequences: list[Generation] = []
        for prompt in prompts:
            room = options.capacity + 1 - len(prompt)
            for sample in range(options.samples):
                number, count = len(self.sequences), min(wanted, room)
                self.sequences.append(
                    Generation(number, list(prompt), count, sample, cut=wanted > room)
                )
        self._slots = Slots(options, self.sequences)
        create = functools.partial(lm_mesh.made, options.mesh)
        self._cache = create(functools.partial(options.create_cache, config), lm_mesh.HEADS)
        self._state = create(functools.partial(State.create, options))
        self._seed = create(functools.partial(jax.random.key, seed))
        self._flights: collections.deque[_Flight] = collections.deque()
        self._weights = num_bytes(params)
        self._step = 0
        self._steady: list[tuple[int, float, int]] = []  # tokens, seconds, bytes of a chunk
        self._undisturbed = 0  # chunks read since a prompt came
        self._ran: set[Any] = set()  # keys of _TRACED
        self._gaps: list[float] = []  # seconds between two tokens of one sequence
        self._drafts = np.zeros(2, int)  # drafts made, drafts kept

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
            while len(self._flights) > int(started):
                flight = self._flights.popleft()
                tokens = np.asarray(flight.tokens)
                now = time.perf_counter() - start
                made = self._read(flight, tokens, last, now)
                yield self._status(flight, made, now - last, now)
                last = now

    # ---- work for the device

    def _admit(self) -> bool:
        """Prefills as many waiting prompts as there is room for."""
        vacant = self._slots.vacant
        filled = self._slots.fill()
        if not filled:
            return False
        self._undisturbed = 0
        results = self._call(admit, self.options, arrivals(self.options, filled, vacant))
        tokens, kept = jax.tree.map(lambda x: x[None], results)
        self._fly(_Flight(tokens, kept, tuple(sequence for _, sequence in filled), 0))
        return True

    def _launch(self) -> bool:
        """The next chunk of steps, if a sequence wants more tokens than were planned."""
        owners = tuple(self._slots.held)
        running = [sequence for sequence in owners if sequence is not None]
        if all(sequence.planned >= sequence.wanted for sequence in running):
            return False
        # Whether prompts come in whole or in chunks, steps are the same program.
        tokens, kept = self._call(steps, dataclasses.replace(self.options, prefill_chunk=None))
        for sequence in running:
            sequence.planned += self.options.chunk
        self._fly(_Flight(tokens, kept, owners, self.options.chunk))
        return True

    def _mix(self) -> bool:
        """One step beside the next rows of prompts, if a prompt is left."""
        slots, vacant = self._slots, self._slots.vacant
        fed = chunked_prefill.feed(slots)
        if not fed:
            return False
        self._undisturbed = 0
        source = chunked_prefill.sources(slots, fed)
        new = chunked_prefill.chunks(slots, fed, source, vacant)
        results = self._call(chunked_prefill.mixed, self.options, new)
        chunked_prefill.advance(slots, fed, source)
        tokens, kept = jax.tree.map(lambda x: x[None], results)
        self._fly(_Flight(tokens, kept, tuple(slots.held), 1, prompted=True))
        return True

    def _call(self, program: Program, options: Options, *new: New) -> tuple[Array, Kept]:
        """Tokens of a program and what it kept; the cache and the state are then those after it.
        Notes which implementations it is traced with.
        """
        key = program, self.config, options
        self._ran.add(key)
        with chosen() as names:
            operands = self.config, options, self._params, self._cache, self._state
            results = program(*operands, *map(self._sent, new))
        _TRACED[key].update(names)
        self._cache, self._state, tokens, kept = results
        return tokens, kept

    def _sent(self, new: New) -> New:
        """The host's arrays on their way to the device, or to all of a mesh, with keys and with
        numbers for sampling.
        """
        prompt = np.asarray(new.key).reshape(-1) // self.options.samples
        new = dataclasses.replace(new, sampling=self.options.sampling.of(prompt))
        sent = jax.tree.map(functools.partial(lm_mesh.everywhere, self.options.mesh), new)
        return dataclasses.replace(sent, key=_fold(self._seed, sent.key))

    def _fly(self, flight: _Flight) -> None:
        """Starts the copies of the results to the host."""
        flight.tokens.copy_to_host_async()
        self._flights.append(flight)
        self._slots.leave()

    # ---- results

    def _read(self, flight: _Flight, tokens: np.ndarray, last: float, now: float) -> int:
        """Hands tokens to their sequences and counts them. Those of a chunk of steps, which came
        together, are taken as made at even times since the last read.
        """
        made, count = 0, len(tokens)
        tokens = tokens.reshape(*tokens.shape[:2], -1)  # [steps, n, tokens of a step]
        kept = jax.tree.map(lambda x: np.asarray(x).reshape(*tokens.shape, -1), flight.kept)
        for column, sequence in enumerate(flight.owners):
            if sequence is None or sequence.ended:
                continue
            own = tokens[:, column]
            there = (own != NOTHING) & (own != DROPPED)
            if NO_NUMBER in own[there]:
                raise ValueError(
                    f"sequence {sequence.number + 1}: its logits are not finite after "
                    f"{len(sequence.prompt) + len(sequence.tokens)} tokens: the weights are too "
                    f"large for {self.options.dtype}, or those of no model"
                )
            made += int(there.sum())
            self._drafts += [(own[:, 1:] != NOTHING).sum(), there[:, 1:].sum()]
            sequence.tokens += own[there].tolist()
            # The tokens of a step are made one after the other in its time.
            share = np.cumsum(there, axis=1) / np.maximum(there.sum(axis=1, keepdims=True), 1)
            step = np.arange(count)[:, None] + share
            times = (last + (now - last) * step[there] / max(count, 1)).tolist()
            self._gaps += np.diff([*sequence.times[-1:], *times]).tolist()
            sequence.times += times
            if kept.logits is not None:
                sequence.logits += list(kept.logits[:, column][there])
            if kept.logprobs is not None:
                sequence.logprobs += kept.logprobs[:, column, :, 0][there].tolist()
            self._end(sequence)
        self._step += flight.steps
        return made

    def _end(self, sequence: Generation) -> None:
        """Ends a sequence that met a stop token or has the tokens it wants."""
        if sequence.tokens and sequence.tokens[-1] in self.options.stop_ids:
            sequence.ended = "stop"
        elif len(sequence.tokens) >= sequence.wanted:
            sequence.ended = "capacity" if sequence.cut else "length"
        if sequence.ended:
            self._slots.end(sequence)

    def stop(self, sequence: Generation, count: int) -> None:
        """Ends a sequence after its first `count` tokens. What the device still makes for it is
        dropped.
        """
        for made in (sequence.tokens, sequence.logits, sequence.logprobs, sequence.times):
            del made[count:]
        sequence.ended = "stop"
        self._slots.end(sequence)

    def _status(self, flight: _Flight, made: int, took: float, seconds: float) -> Status:
        running = [sequence for sequence in flight.owners if sequence is not None]
        kv = self.config.kv_bytes(self.options.dtype) * sum(x.rows for x in running)
        moved = (self._weights + kv) * flight.steps
        # The first read after a prompt came waited for its prefill, and for compilations.
        self._undisturbed += 1
        if flight.steps and not flight.prompted and self._undisturbed > 1:
            self._steady.append((made, took, moved))
        return Status(
            running=sum(not sequence.ended for sequence in running),
            waiting=len(self._slots.waiting),
            ended=self._ended(),
            step=self._step,
            tokens=self._tokens(),
            seconds=seconds,
            tokens_per_second=made / took,
            live_kv_bytes=kv,
            tb_per_second=moved / took / 1e12,
        )

    def _ended(self) -> int:
        return sum(bool(sequence.ended) for sequence in self.sequences)

    def _tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def summary(self, seconds: float) -> dict[str, Any]:
        """The results of a run as facts. Rates are those of chunks that no prompt and no
        compilation held up, if there were several: a single one may be done before anybody looks at
        the clock.
        """
        tokens, steady = self._tokens(), len(self._steady) > 1
        chunks = self._steady if steady else [(tokens, seconds, 0)]
        made, took, moved = (sum(column) for column in zip(*chunks, strict=True))
        names = {name for key in self._ran for name in _TRACED[key]}
        waits = self.to_first_token(), self.between_tokens()
        first, between = (None if wait is None else dataclasses.asdict(wait) for wait in waits)
        facts = {
            "sequences": len(self.sequences),
            "ended": self._ended(),
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
            "time_to_first_token": first,
            "time_between_tokens": between,
        }
        if self.options.draft is not None:
            drafts, kept = self._drafts.tolist()
            facts |= {"draft": self.options.draft, "drafts": drafts, "kept": kept}
            facts["acceptance"] = self.acceptance
        return facts

    @property
    def acceptance(self) -> float | None:
        """The share of the drafts that were kept, so far."""
        drafts, kept = self._drafts.tolist()
        return round(kept / drafts, 4) if drafts else None

    def to_first_token(self) -> Spread | None:
        """Times from the start of the run, with all prompts, to each sequence's first token."""
        return Spread.of([sequence.times[0] for sequence in self.sequences if sequence.times])

    def between_tokens(self) -> Spread | None:
        """Times from each token of a sequence to its next."""
        return Spread.of(self._gaps)

    # ---- the end

    @property
    def cache(self) -> KVCache:
        """The cache as it is now; the next step donates it."""
        return self._cache

    def wait(self) -> None:
        """Waits until the device has done all its work: a process must not end in the midst."""
        jax.block_until_ready((self._cache, self._state))

    def release(self) -> None:
        """Gives back the memory of the cache. It is the last thing that a run does."""
        for x in jax.tree.leaves(self._cache):
            x.delete()


def refuse(config: Config, options: Options, prompts: Sequence[Sequence[int]], wanted: int) -> None:
    """Raises ValueError for a run that is not possible, before weights are loaded."""
    Call(max_new_tokens=wanted)  # raises ValueError
    if options.capacity > config.positions:
        raise ValueError(
            f"capacity: the model was made for {config.positions} positions, got "
            f"{options.capacity}; ask for fewer tokens, or give a smaller capacity"
        )
    if not prompts:
        raise ValueError("prompt: expected at least one, got none")
    options.sampling.check_rows(len(prompts), "prompts")
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
        pages = options.samples * pages_of(options, len(prompt), wanted)
        if options.cache == "paged" and pages > options.pool:
            raise ValueError(f"prompt {n}: {pages} pages do not fit in a pool of {options.pool}")
