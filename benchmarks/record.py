"""`python -m benchmarks.record FILES`: adds rows that `--workers` wrote to results/."""

import collections
import pathlib
import sys

from benchmarks import first_call, runner
from benchmarks.rows import Row, append, read

RESULTS = pathlib.Path(__file__).parents[1] / "results"


def file_of(row: Row) -> pathlib.Path:
    """The file of results/ that a row belongs to."""
    gpu = row["gpu"].removeprefix("NVIDIA ").split()[0].lower()
    if row["op"] == first_call.OP:  # its rows have times of their own
        return RESULTS / first_call.OP / f"{gpu}.jsonl"
    names = {in_rows: op for op, in_rows in runner.OPS.items()}
    return RESULTS / f"{names.get(row['op'], row['op'])}_{gpu}.jsonl"


def record(files: list[pathlib.Path]) -> dict[pathlib.Path, int]:
    """{file: rows that it got}. Rows that it has already are left out."""
    new: dict[pathlib.Path, list[Row]] = collections.defaultdict(list)
    for row in (row for file in files for row in read(file)):
        path = file_of(row)
        if row not in new[path] and not (path.exists() and row in read(path)):
            new[path].append(row)
    for path, rows in new.items():
        append(path, rows)
    return {path: len(rows) for path, rows in new.items()}


if __name__ == "__main__":
    for path, count in record([pathlib.Path(name) for name in sys.argv[1:]]).items():
        sys.stdout.write(f"{path}: {count} rows\n")
