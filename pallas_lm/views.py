"""Views of a run: text as it comes, or JSON lines, and a status line."""

import json
import shutil
from typing import Any, TextIO

import jax

from pallas_lm.decode import Run
from pallas_lm.progress import Status
from pallas_lm.texts import Texts


class View:
    """Output of a run."""

    quiet = False  # no text: it would be noise

    def __init__(self, texts: Texts, out: TextIO, err: TextIO):
        self.texts, self._run, self._out, self._err = texts, texts.run, out, err
        self._first: float | None = None

    def show(self, status: Status) -> None:
        """Called after every chunk."""
        if self._first is None:
            self._first = status.seconds

    def finish(self, seconds: float) -> dict[str, Any]:
        """Called after the last chunk, also of a run that was interrupted: the summary."""
        summary = self._run.summary(seconds)
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return summary | {"first_token_seconds": self._first, "peak_bytes": peak}

    def say(self, *lines: str) -> None:
        """Shows lines of a table."""

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        """Shows the same to machines."""

    def note(self, line: str) -> None:
        """Tells how far it is."""
        self._err.write(line + "\n")
        self._err.flush()


class Json(View):
    """A line for each sequence as it ends, the summary, then a line for each row of each table."""

    def __init__(self, texts: Texts, out: TextIO, err: TextIO):
        super().__init__(texts, out, err)
        self._untold = list(texts.run.sequences)

    def show(self, status: Status) -> None:
        super().show(status)
        self._tell(interrupted=False)

    def finish(self, seconds: float) -> dict[str, Any]:
        self._tell(interrupted=True)
        summary = super().finish(seconds)
        self.record("summary", summary)
        return summary

    def _tell(self, interrupted: bool) -> None:
        self.texts.read(over=interrupted)
        told = [x for x in self._untold if x.ended or interrupted]
        self._untold = [x for x in self._untold if x not in told]
        for sequence in told:
            facts = {
                "number": sequence.number + 1,
                "prompt": self.texts.tokenizer.decode(sequence.prompt),
                "text": self.texts.whole[sequence],
                "tokens": sequence.tokens,
                "ended": sequence.ended or "interrupted",
            }
            if self._run.options.logprobs:
                facts["logprobs"] = sequence.logprobs
            if (samples := self._run.options.samples) > 1:
                of_prompt = sequence.number // samples + 1
                facts |= {"of_prompt": of_prompt, "sample": sequence.sample + 1}
            self.record("sequence", facts)

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        self._out.write(json.dumps({kind: facts}) + "\n")
        self._out.flush()


class Text(View):
    """Text in the order of the prompts, as it comes; beneath it, on a terminal, a status line."""

    def __init__(self, texts: Texts, out: TextIO, err: TextIO):
        super().__init__(texts, out, err)
        self._unwritten = [""] * len(texts.run.sequences)  # text of each sequence
        self._front = 0  # the sequence that is being written
        self._titled = False  # whether its title is written
        self._live = err.isatty()
        self._both = self._live and out.isatty()
        self._held = ""  # a line that is not full yet: the status line stands in its place

    def show(self, status: Status) -> None:
        super().show(status)
        self._erase()
        self._stream(over=False)
        if self._live:
            self._err.write(_status_line(status, self._run))
            self._err.flush()

    def finish(self, seconds: float) -> dict[str, Any]:
        self._erase()
        self._stream(over=True)
        summary = super().finish(seconds)
        rate = summary["tokens_per_second"]
        rates = f"{rate:,.{int(rate < 10)}f} tokens/s"
        if summary["tb_per_second"]:
            rates += f", {_rate(summary['tb_per_second'])}"
        count, left = summary["sequences"], summary["sequences"] - summary["ended"]
        cut = sum(sequence.ended == "capacity" for sequence in self._run.sequences)
        drafts = ""
        if summary.get("drafts"):
            kept, share = summary["kept"], summary["acceptance"]
            drafts = f"; {kept} of {summary['drafts']} drafts kept ({share:.0%})"
        self.say(
            f"{count} sequence{'s' * (count != 1)}, {summary['tokens']} tokens in "
            f"{summary['seconds']:.1f} s ({rates}{' once compiled' if summary['steady'] else ''})"
            f" on {summary['device']}, {summary['implementation']}, {summary['dtype']}"
            + drafts
            + (f"; {cut} filled the capacity of {self._run.options.capacity}" if cut else "")
            + (f"; interrupted, {left} not ended" if left else "")
        )
        return summary

    def say(self, *lines: str) -> None:
        self._out.writelines(f"{line}\n" for line in lines)
        self._out.flush()

    def _stream(self, over: bool) -> None:
        """Writes new text of the first sequence that has not ended, and of those after it."""
        samples, pieces = self._run.options.samples, self.texts.read(over)
        if self.quiet:
            return
        for piece in pieces:
            self._unwritten[piece.prompt * samples + piece.sample] += piece.text
        while self._front < len(self._unwritten):
            n, sequence = self._front, self._run.sequences[self._front]
            last = bool(sequence.ended) or over
            if not sequence.tokens and not last:
                break
            if not self._titled:
                self._write(f"--- {self._title(n)} ---\n")
                self._write(self.texts.tokenizer.decode(sequence.prompt))
            self._write(self._unwritten[n])
            self._unwritten[n], self._titled = "", not last
            if not last:
                break
            self._write("\n\n")
            self._front += 1
        self._out.flush()

    def _title(self, n: int) -> str:
        samples = self._run.options.samples
        title = f"{n // samples + 1} of {len(self._unwritten) // samples}"
        return title if samples == 1 else f"{title}, sample {n % samples + 1} of {samples}"

    def _write(self, piece: str) -> None:
        if not self._both:
            self._out.write(piece)
            return
        width = shutil.get_terminal_size().columns - 1
        *whole, self._held = (self._held + piece).split("\n")
        while len(self._held) > width:
            cut = self._held.rfind(" ", 0, width) + 1 or width
            whole.append(self._held[:cut])
            self._held = self._held[cut:]
        self._out.writelines(f"{line}\n" for line in whole)

    def _erase(self) -> None:
        if self._live:
            self._err.write("\r\x1b[K")
            self._err.flush()


def _status_line(status: Status, run: Run) -> str:
    kept = "" if run.acceptance is None else f"{run.acceptance:.0%} of drafts kept | "
    spreads = {"first token": run.to_first_token(), "between": run.between_tokens()}
    line = (
        f"{status.running} running, {status.waiting} waiting, {status.ended} done | step "
        f"{status.step} | {status.tokens_per_second:,.0f} tokens/s | {kept}"
        + "".join(f"{name} {spread} | " for name, spread in spreads.items() if spread)
        + f"{status.live_kv_bytes / 2**20:,.1f} MiB of live KV | {_rate(status.tb_per_second)}"
    )
    return line[: shutil.get_terminal_size().columns - 1]


def _rate(tb: float) -> str:
    return f"{tb:.2f} TB/s" if tb >= 0.1 else f"{tb * 1e3:.1f} GB/s"
