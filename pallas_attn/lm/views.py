"""What a run looks like from outside: text as it comes, or JSON lines, and a status line."""

import json
import shutil
from typing import Any, TextIO

import jax

from pallas_attn.lm import text
from pallas_attn.lm.decode import Run
from pallas_attn.lm.progress import Status


class View:
    """What a run looks like from outside."""

    quiet = False  # no text: it would be noise

    def __init__(self, run: Run, tokenizer: text.Tokenizer, out: TextIO, err: TextIO):
        self._run, self._tokenizer, self._out, self._err = run, tokenizer, out, err
        self._first: float | None = None

    def show(self, status: Status) -> None:
        """After every chunk."""
        if self._first is None:
            self._first = status.seconds

    def finish(self, seconds: float) -> dict[str, Any]:
        """After the last, also when it was interrupted: the summary."""
        summary = self._run.summary(seconds)
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return summary | {"first_token_seconds": self._first, "peak_bytes": peak}

    def say(self, *lines: str) -> None:
        """Lines of a table."""

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        """The same for machines."""

    def note(self, line: str) -> None:
        """How far it is."""
        self._err.write(line + "\n")
        self._err.flush()


class Json(View):
    """A line a sequence as it ends, then the summary, then a line a row of each table."""

    def __init__(self, *everything: Any):
        super().__init__(*everything)
        self._told: set[int] = set()

    def show(self, status: Status) -> None:
        super().show(status)
        self._tell(interrupted=False)

    def finish(self, seconds: float) -> dict[str, Any]:
        self._tell(interrupted=True)
        summary = super().finish(seconds)
        self.record("summary", summary)
        return summary

    def _tell(self, interrupted: bool) -> None:
        for one in self._run.sequences:
            if one.number in self._told or not (one.ended or interrupted):
                continue
            self._told.add(one.number)
            facts = {
                "number": one.number + 1,
                "prompt": self._tokenizer.decode(one.prompt),
                "text": self._tokenizer.decode(one.tokens),
                "tokens": one.tokens,
                "ended": one.ended or "interrupted",
            }
            if (samples := self._run.options.samples) > 1:
                facts |= {"of_prompt": one.number // samples + 1, "sample": one.sample + 1}
            self.record("sequence", facts)

    def record(self, kind: str, facts: dict[str, Any]) -> None:
        self._out.write(json.dumps({kind: facts}) + "\n")
        self._out.flush()


class Text(View):
    """Text in the order of the prompts, as it comes; beneath it, on a terminal, a status line."""

    def __init__(self, *everything: Any):
        super().__init__(*everything)
        self._streams = [text.Stream(self._tokenizer) for _ in self._run.sequences]
        self._given = [0] * len(self._streams)
        self._front = 0  # the sequence that is being written
        self._live = self._err.isatty()
        self._both = self._live and self._out.isatty()
        self._held = ""  # of a line that is not full, where the status line takes its place

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
        cut = sum(one.ended == "capacity" for one in self._run.sequences)
        self.say(
            f"{count} sequence{'s' * (count != 1)}, {summary['tokens']} tokens in "
            f"{summary['seconds']:.1f} s ({rates}{' once compiled' if summary['steady'] else ''})"
            f" on {summary['device']}, {summary['implementation']}, {summary['dtype']}"
            + _drafts(summary)
            + (f"; {cut} filled the capacity of {self._run.options.capacity}" if cut else "")
            + (f"; interrupted, {left} not ended" if left else "")
        )
        return summary

    def say(self, *lines: str) -> None:
        self._out.writelines(f"{line}\n" for line in lines)
        self._out.flush()

    def _stream(self, over: bool) -> None:
        """What is new, of the first sequence that has not ended, and of those that follow."""
        while not self.quiet and self._front < len(self._streams):
            n, one = self._front, self._run.sequences[self._front]
            last = bool(one.ended) or over
            if not one.tokens and not last:
                break
            if not self._given[n]:
                self._write(f"--- {self._name(n)} ---\n")
                self._write(self._tokenizer.decode(one.prompt))
            self._write(self._streams[n].add(one.tokens[self._given[n] :], last))
            self._given[n] = max(len(one.tokens), 1)
            if not last:
                break
            self._write("\n\n")
            self._front += 1
        self._out.flush()

    def _name(self, n: int) -> str:
        """Of a sequence, as it stands above its text."""
        samples = self._run.options.samples
        name = f"{n // samples + 1} of {len(self._streams) // samples}"
        return name if samples == 1 else f"{name}, sample {n % samples + 1} of {samples}"

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


def _drafts(summary: dict[str, Any]) -> str:
    """What became of them, and of a summary without any nothing."""
    if not summary.get("drafts"):
        return ""
    return f"; {summary['kept']} of {summary['drafts']} drafts kept ({summary['acceptance']:.0%})"


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
