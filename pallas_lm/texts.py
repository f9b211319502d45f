"""The texts of a run as its tokens come, and the stop strings at which they end."""

from collections.abc import Sequence
from typing import NamedTuple

from pallas_lm.decode import Run
from pallas_lm.progress import Generation
from pallas_lm.text import Stream, Tokenizer


class Piece(NamedTuple):
    """New tokens of a sequence, and the text that they finish.

    A text may lag behind its tokens: a token may end within a character, and text that may be the
    start of a stop string is held back until that is decided. The pieces of a sequence make up its
    whole text.
    """

    prompt: int  # its place in the list of prompts, from 0
    sample: int  # its place among the answers to this prompt, from 0
    text: str
    tokens: list[int]
    logprobs: list[float] | None  # one a token, if they were asked for
    finish_reason: str | None  # "stop" or "length" with the last piece, else None


class Cursor:
    """Text of one sequence, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._stream, self._stop = Stream(tokenizer), stop
        self._held = ""  # the end of the text, which may be the start of a stop string

    def add(self, tokens: Sequence[int], last: bool = False) -> tuple[str, int | None]:
        """The text that is final after these tokens; and how many of them there are up to the end
        of a stop string, None where there is none. The stop string is no part of the text.
        """
        if not self._stop:
            return self._stream.add(tokens, last), None
        pieces = [self._stream.add([token]) for token in tokens]
        if last:
            pieces.append(self._stream.add([], last=True))
        text = ""
        for count, piece in enumerate(pieces, 1):
            self._held += piece
            if (end := cut(self._held, self._stop)) is not None:
                return text + self._held[:end], min(count, len(tokens))
            sure = len(self._held) - self._begun()
            text, self._held = text + self._held[:sure], self._held[sure:]
        if last:
            text, self._held = text + self._held, ""
        return text, None

    def _begun(self) -> int:
        """The number of characters at the end of the text that are the start of a stop string."""
        longest = min(max(map(len, self._stop)) - 1, len(self._held))
        ends = (count for count in range(longest, 0, -1) if self._begins(self._held[-count:]))
        return next(ends, 0)

    def _begins(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)


def cut(text: str, stop: Sequence[str]) -> int | None:
    """The place where the first stop string in a text begins, None where there is none."""
    places = [place for place in map(text.find, stop) if place >= 0]
    return min(places, default=None)


class Texts:
    """Reads the texts of a run's sequences, and ends a sequence that makes a stop string."""

    def __init__(self, run: Run, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.run, self.tokenizer = run, tokenizer
        self._open = {sequence: Cursor(tokenizer, stop) for sequence in run.sequences}
        self._taken = dict.fromkeys(run.sequences, 0)  # tokens
        self.whole = dict.fromkeys(run.sequences, "")  # the text of each, so far

    def read(self, over: bool = False) -> list[Piece]:
        """New pieces, in the order of the sequences. `over`: no more tokens will come."""
        pieces = []
        for sequence, cursor in list(self._open.items()):
            taken = self._taken[sequence]
            if len(sequence.tokens) == taken and not (sequence.ended or over):
                continue
            text, count = cursor.add(sequence.tokens[taken:], bool(sequence.ended) or over)
            if count is not None:
                self.run.stop(sequence, taken + count)
            self._taken[sequence] = len(sequence.tokens)
            self.whole[sequence] += text
            if sequence.ended or over:
                del self._open[sequence]
            pieces.append(self._piece(sequence, text, taken))
        return pieces

    def _piece(self, sequence: Generation, text: str, taken: int) -> Piece:
        options = self.run.options
        return Piece(
            sequence.number // options.samples,
            sequence.sample,
            text,
            sequence.tokens[taken:],
            sequence.logprobs[taken:] if options.logprobs else None,
            finish_reason(sequence),
        )


def finish_reason(sequence: Generation) -> str | None:
    """The reason: "stop" for a stop token or a stop string; "length" where no more tokens were
    wanted, or the capacity was full; None while more come.
    """
    return "length" if sequence.ended == "capacity" else sequence.ended or None
