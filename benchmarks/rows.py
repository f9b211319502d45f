"""A measurement as one flat JSON object, and files of them."""

import dataclasses
import datetime
import json
import pathlib
import subprocess
import uuid
from collections.abc import Iterable
from typing import Any

import jax

from benchmarks.timing import Timing
from pallas_attn.masks import Mask
from tests.support.problems.case import AttentionCase, DecodeCase
from tests.support.problems.cases import Case

Row = dict[str, Any]
OURS = "pallas_attn/"
# Operations of the benchmark whose cases say whether a backward belongs to them.
OF_CASES = ("mask", "shapes", "few_tiles")
REQUIRED: tuple[str, ...]
REQUIRED = ("run", "op", "case", "impl", "problem", "ms", "ms_min", "n", "kernels", "checked")
REQUIRED += ("gpu", "jax", "commit", "date")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Facts that all rows of one process share."""

    run: str
    gpu: str
    jax: str
    commit: str
    date: str

    @classmethod
    def here(cls, commit: str | None = None) -> "Provenance":
        """This machine, now; `commit` for a tree that is no git checkout."""
        now = datetime.datetime.now(datetime.UTC)
        gpu = jax.devices()[0].device_kind
        commit = commit or _commit()
        return cls(uuid.uuid4().hex[:12], gpu, jax.__version__, commit, f"{now:%Y-%m-%dT%H:%M:%SZ}")


def _commit() -> str:
    root = pathlib.Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        # Results and notes beside the code do not make it another version.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
    except OSError:
        return "unknown"
    return (head or "unknown") + ("-dirty" if changed else "")


def problem(case: Case) -> dict[str, Any]:
    """The sizes and options of a case, without what was left at its default."""
    facts: dict[str, Any] = {}
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name in ("name", "labels", "dtype") or value == field.default:
            continue
        if isinstance(value, tuple) and len(set(value)) == 1 and len(value) > 1:
            value = {"each": value[0], "count": len(value)}
        facts[field.name] = str(value) if isinstance(value, Mask) else value
    return facts | {"dtype": case.dtype}


def work(case: Case, op: str) -> tuple[str, float]:
    """("tflops" or "tbps", the work of a case in 10**12 operations or bytes)."""
    if isinstance(case, DecodeCase) and op == "prefill":
        case, op = case.dense(), "forward"
    if isinstance(case, AttentionCase) and op == "quantize":
        return "tbps", case.rounded_bytes() / 1e12
    if isinstance(case, AttentionCase):
        if op in OF_CASES:
            op = "forward+backward" if case.both else "forward"
        factor = {
            "forward": 1.0,
            "backward": 2.5,
            "forward+backward": 3.5,
            "jvp": 3.0,
            "float8": 1.0,
        }[op]
        return "tflops", factor * case.flops() / 1e12
    moved = case.live_bytes() if isinstance(case, DecodeCase) else case.moved_bytes()
    return "tbps", moved / 1e12


def measured(case: Case, op: str, impl: str, timing: Timing, provenance: Provenance) -> Row:
    """The row of one timing of one checked implementation."""
    unit, amount = work(case, op)
    row: Row = {"op": op, "case": case.name, "impl": impl, "problem": problem(case)}
    row |= dataclasses.asdict(timing)
    row |= {unit: round(amount / timing.ms * 1e3, 4), "checked": True}
    if isinstance(case, DecodeCase):
        row["tokens_per_s"] = round(sum(case.each) / timing.ms * 1e3)
    return row | dataclasses.asdict(provenance)


def ceiling_rows(ceilings: dict[str, float], provenance: Provenance) -> list[Row]:
    """The machine's own rates, as rows of the same run."""
    rows = []
    for name, rate in ceilings.items():
        unit = "tflops" if name == "matmul" else "tbps"
        row = {"op": "ceiling", "case": name, "impl": "xla", unit: round(rate, 4)}
        rows.append(row | dataclasses.asdict(provenance))
    return rows


def append(path: str | pathlib.Path, rows: Iterable[Row]) -> None:
    """Adds rows to a file at once, so that a run that dies keeps what it had."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(where: str | pathlib.Path) -> list[Row]:
    """The rows of a file, or of every *.jsonl in a folder, in order."""
    where = pathlib.Path(where)
    files = sorted(where.glob("*.jsonl")) if where.is_dir() else [where]
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def rate(row: Row) -> float:
    """TFLOP/s or TB/s, whichever the row counts."""
    return row["tflops"] if "tflops" in row else row["tbps"]


def is_ours(row: Row) -> bool:
    return row["impl"].startswith(OURS)
