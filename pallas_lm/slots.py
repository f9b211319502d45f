"""Continuous batching on the host: which prompt fills which sequence of the cache, and when."""

import collections
import itertools
from collections.abc import Sequence

import numpy as np

from pallas_lm.buckets import bucket, power_of_two
from pallas_lm.model import Prompts
from pallas_lm.options import Options
from pallas_lm.programs import Arrivals
from pallas_lm.progress import Generation
from pallas_lm.sampling import Sampling


class Slots:
    """The sequences of the cache, `held` by generations, and the generations that wait for one.

    All answers to a prompt stand next to each other in `waiting` and begin together.
    """

    def __init__(self, options: Options, sequences: Sequence[Generation]):
        self.options = options
        self.held: list[Generation | None] = [None] * options.batch
        self.waiting = collections.deque(sequences)

    @property
    def vacant(self) -> np.ndarray:
        """bool[M]"""
        return np.array([sequence is None for sequence in self.held])

    def fill(self) -> list[tuple[int, Generation]]:
        """Gives vacant slots to prompts that wait, as many as one prefill takes."""
        filled = []
        count = self.prompts_together(int(self.vacant.sum())) * self.options.samples
        free = np.flatnonzero(self.vacant)[:count].tolist()
        for places in itertools.batched(free, self.options.samples):
            if not self.fits():
                break
            for place in places:
                sequence = self.held[place] = self.waiting.popleft()
                sequence.planned, sequence.fed = 1, len(sequence.prompt)
                filled.append((place, sequence))
        return filled

    def prompts_together(self, free: int) -> int:
        """Prompts that wait and that one prefill into so many free slots takes."""
        count = longest = 0
        samples = self.options.samples
        for sequence in itertools.islice(self.waiting, 0, free - free % samples, samples):
            longest = max(longest, len(sequence.prompt))
            rows = power_of_two(count + 1) * padded_length(self.options, longest)
            if count and rows > self.options.prefill:
                break
            count += 1
        return count

    def fits(self) -> bool:
        """Whether the pool has pages for all answers to the next prompt, beside those that run."""
        if self.options.cache != "paged":
            return True
        running = [sequence for sequence in self.held if sequence is not None]
        wanted = [self.waiting[0]] * self.options.samples
        pages = sum(
            pages_of(self.options, len(sequence.prompt), sequence.wanted)
            for sequence in running + wanted
        )
        return pages <= self.options.pool

    def leave(self) -> None:
        """Vacates the slots whose tokens are all planned: the device works in order."""
        for slot, sequence in enumerate(self.held):
            if sequence is not None and sequence.planned >= sequence.wanted:
                self.held[slot] = None

    def end(self, sequence: Generation) -> None:
        """Vacates the slot of a sequence that has ended, if it has not left already."""
        if sequence in self.held:
            self.held[self.held.index(sequence)] = None


def arrivals(
    options: Options, filled: Sequence[tuple[int, Generation]], vacant: np.ndarray
) -> Arrivals:
    """Prompts for slots, padded to few sizes, so that few programs serve all. In place of keys it
    has the sequences' numbers, and no sampling.
    """
    samples = options.samples
    n = power_of_two(len(filled) // samples)
    longest = max(len(sequence.prompt) for _, sequence in filled)
    tokens = np.zeros((n, padded_length(options, longest)), np.int32)
    lengths, wanted = np.zeros(n, np.int32), np.ones(n, np.int32)
    numbers = np.zeros((n, samples), np.int32)
    slots = np.full((n, samples), options.batch, np.int32)  # rows that are no prompt go nowhere
    for place, (slot, sequence) in enumerate(filled):
        row, sample = divmod(place, samples)
        prompt = sequence.prompt
        tokens[row, : len(prompt)] = prompt
        lengths[row], wanted[row], slots[row, sample] = len(prompt), sequence.wanted, slot
        numbers[row, sample] = sequence.number
    prompts = Prompts(tokens, lengths, slots[:, 0])
    return Arrivals(prompts, slots, wanted, numbers, Sampling(), vacant)


def padded_length(options: Options, longest: int) -> int:
    """The bucket that prompts are padded to."""
    return min(bucket(longest, least=16), options.capacity)


def pages_of(options: Options, prompt: int, wanted: int) -> int:
    """Pages that a prompt of so many tokens and `wanted` tokens after it take."""
    rows = min(prompt + wanted - 1, options.capacity) + options.ahead
    return -(-rows // options.page_size)
