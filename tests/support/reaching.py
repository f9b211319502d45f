"""Random problems that reach branches of kernels which no run of the tests reached.

After the runs with `pytest --reached=FOLDER`, `python -m tests.support.reaching FOLDER SECONDS
[SEED]` lowers problems of the fuzzer for that long. Those that reach more are written to `FILE`, a
word of `-m fuzz --case=` on each line; tests/guards/test_reached.py lowers them. Words that say
`interpreted` are written by hand: those are run, and compared with the oracle.

Lowering traces a kernel and runs nothing: a variant that no interpreted case runs is at least one
that Mosaic takes.
"""

import itertools
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping

from tests.support import fuzz, reached

FILE = pathlib.Path(__file__).parents[1] / "recorded" / "reaching.txt"
KEPT = 20  # problems whose compiled programs stay in memory


def words() -> list[str]:
    return FILE.read_text().splitlines()


def attempt(word: str) -> None:
    """Runs or lowers the problem of a word, as it says, by a kernel at least."""
    tally = fuzz.Tally()
    wrong = fuzz.attempt(word, tally)
    assert wrong is None, f"{fuzz.command(word)}\n    {wrong}"
    assert tally.calls, f"no kernel takes {word}"


def search(known: Mapping[str, set[str]], seconds: float, seed: int) -> Iterator[str]:
    """Words of problems, each of which reaches a branch that neither `known` has nor a problem
    before it reached.
    """
    known, end = {file: set(names) for file, names in known.items()}, time.monotonic() + seconds
    missing, seen = len(reached.unreached(known)), 0
    watch = reached.Watch()
    watch.start()
    kinds = tuple(fuzz.kinds())
    for index in itertools.count():
        if time.monotonic() > end:
            break
        word = f"{kinds[index % len(kinds)]}/lowered:{seed * 2**24 + index}"
        if fuzz.attempt(word, fuzz.Tally()) is None and watch.count > seen:
            seen = watch.count
            for file, names in watch.branches().items():
                known.setdefault(file, set()).update(names)
            if (left := len(reached.unreached(known))) < missing:
                missing = left
                yield word
        if index % KEPT == 0:
            fuzz.forget()
    watch.stop()


def main(folder: str, seconds: str, seed: str = "0") -> None:
    known = reached.read(pathlib.Path(folder))
    with FILE.open("a") as file:
        for word in search(known, float(seconds), int(seed)):
            file.write(f"{word}\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
