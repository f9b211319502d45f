"""Finding configurations: of all that compile and are right, the fastest becomes a row.

The search walks one setting at a time from the configuration in force, twice around at most:
settings interact little enough that this finds what a full grid finds, in a tenth of the compile
time. The best few then meet the incumbent in turns, and a row is written where one of them wins by
more than noise, or where the problem had no row.
"""

import dataclasses
import importlib.resources
import json
import math
import pathlib
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_attn import _problem, _tuning
from pallas_attn.bench import judges, peers, rows, runner, timing
from pallas_attn.bench.timing import Subject, Timer
from pallas_attn.masks import Mask

Settings = dict[str, Any]

# What is worth trying, by kernel and setting, in the order that matters most first. A kernel that
# is not here is searched around the configuration in force: half and double of every number, both
# sides of every choice.
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "flash_fwd_sm90": {
        "block_kv": (64, 128, 192, 256),
        "warpgroups": (2, 3, 4),
        "stages": (2, 3, 4, 6),
        "section": (0, 1, 4, 12, 32),
        "ctas": (132, 0),
        "q_slots": (1, 2),
        "exp_before_wait": (0, 2, 4),
    },
    "flash_bwd_sm90": {
        "fused": (True, False),
        "block_q": (64, 128),
        "lag": (1, 2),
        "held": (False, True),
        "section": (0, 1, 4, 12, 32),
        "stages": (2, 3),
        "dq_block_kv": (64, 128),
        "dq_stages": (2, 3),
        "ctas": (132, 0),
    },
    "flash_fwd_sm80": {
        "row_blocks": (1, 2),
        "block_kv": (32, 64, 128),
        "stages": (1, 2, 3),
        "q_in_registers": (False, True),
        "warp_rows": (4, 2),
        "scores_ahead": (False, True),
        "split_rows": (False, True),
        "columns_before_v": (0, 16, 32),
        "section": (0, 1, 4, 12, 32),
    },
    "flash_bwd_sm80": {
        "fused": (True, False),
        "row_blocks": (1, 2),
        "block_q": (16, 32, 64),
        "down": (4, 2),
        "warpgroups": (1, 2),
        "apart": (False, True),
        "do_stages": (1, 2),
        "ctas": (0, 132),
        "dq_row_blocks": (1, 2),
        "dq_block_kv": (16, 32, 64),
        "section": (0, 1, 4, 12, 32),
    },
}
WIN = 0.99  # of the incumbent's time: less is noise, and rows that move with noise say nothing
FINALISTS = 3
_OPS = {"flash_fwd": "forward", "flash_bwd": "backward", "decode": "decode", "append": "append"}


def run_tune(
    kernel: str,
    cases: str | Sequence[Any],
    options: runner.Options = runner.Options(),  # noqa: B008
    *,
    commit: str | None = None,
    timer: Timer | None = None,
    path: str | pathlib.Path | None = None,
    say: Callable[[str], None] = runner.say_line,
) -> int:
    """Tunes a kernel module on cases that it serves; 0 where each came out right, else 1.

    Rows go to `path`: by default the package's own `tuning/<gpu>.toml`.
    """
    op = next((op for start, op in _OPS.items() if kernel.startswith(start)), None)
    if op is None:
        raise ValueError(
            f"kernel: expected a name that starts with {', '.join(_OPS)}, got {kernel!r}"
        )
    chosen = runner.chosen_cases(op, cases)
    if timer is None and jax.devices()[0].platform != "gpu":
        raise ValueError("tuning times a GPU and jax found none")
    provenance = rows.Provenance.here(commit or options.commit)
    bench = runner.Bench(runner.OPS[op], options, timer or timing.CuptiTimer(), provenance, {}, say)
    failed = 0
    for number, case in enumerate(chosen, 1):
        try:
            row = tune(bench, kernel, case)
        except runner.WrongError as error:
            failed += 1
            say(f"[{number}/{len(chosen)}] {case.name:<34}  {error}")
            continue
        if row is not None:
            gpu = runner.generation()
            write_row(pathlib.Path(path) if path else _file(gpu), kernel, row)
        said = "kept as it is" if row is None else f"{row['ms']:.4f} ms with {row['config']}"
        say(f"[{number}/{len(chosen)}] {case.name:<34}  {said}")
    return int(failed > 0)


def tune(bench: runner.Bench, kernel: str, case: Any) -> dict[str, Any] | None:
    """The new row, or None where what is in force stays."""
    arrays = case.arrays(bench.options.seed)
    backward = "backward" in bench.op
    cotangent = case.cotangent(bench.options.seed) if backward else None
    call = peers.Call(case, arrays, cotangent, bench.op)
    with _tuning.watched() as looked_up:
        incumbent = runner.ours(bench, call)
        incumbent.wait(incumbent.launch())
    serving = [one for one in looked_up if one.kernel == kernel]
    if not serving:
        raise runner.WrongError(f"{kernel} does not serve it: nothing to tune")
    found = serving[-1]
    start = dataclasses.asdict(found.config)

    def subject_of(settings: Settings) -> Subject | None:
        return _subject(bench, call, found, settings)

    def time_of(settings: Settings) -> float:
        subject = subject_of(settings)
        if subject is None:
            return math.inf
        return timing.interleave(bench.timer, [subject], turns=2)[subject.name].ms

    ranked = search(space_of(found.kernel, start), start, time_of)
    bench.say(
        f"      {len(ranked)} configurations tried, {_ms(ranked[0][1])} to {_ms(ranked[-1][1])}"
    )
    judge = judges.judge_of(call)
    finalists: list[tuple[Settings, Subject]] = []
    for settings, ms in ranked:
        subject = subject_of(settings) if math.isfinite(ms) else None
        if subject is None or len(finalists) == FINALISTS:
            break
        complaint = judge(subject, subject.launch())
        if complaint:
            bench.say(f"      {subject.name} is fast and wrong: {complaint}")
        else:
            finalists.append((settings, subject))
    if not finalists:
        raise runner.WrongError("no configuration gives a right result")
    named = [dataclasses.replace(incumbent, name="incumbent"), *(one for _, one in finalists)]
    timings = timing.interleave(bench.timer, named, turns=bench.options.turns)
    settings, winner = min(finalists, key=lambda pair: timings[pair[1].name].ms)
    ms, old = timings[winner.name].ms, timings["incumbent"].ms
    facts = _tuning.describe(found.problem)
    tuned = any(row["problem"] == facts for row in _tuning.rows(found.problem.gpu, found.kernel))
    if tuned and (settings == start or ms > WIN * old):
        return None
    return _row(bench, case, facts, settings, ms)


def _subject(
    bench: runner.Bench, call: peers.Call, found: _tuning.Lookup, settings: Settings
) -> Subject | None:
    """Ours with these settings, compiled; None where they do not build or do not fit."""
    try:
        config = found.module.Config(**settings)
        if not _tuning.fits(found.module, found.problem, config):
            return None
        with _tuning.forced(found.kernel, settings), _tuning.watched() as looked_up:
            subject = runner.ours(bench, call)
            subject.wait(subject.launch())
    except Exception as error:  # compilers refuse in many ways, all of them an answer
        bench.say_once(f"      {settings}: {runner.first_line(error)}")
        return None
    if config not in [one.config for one in looked_up]:
        raise RuntimeError(f"{found.kernel} was compiled without asking for its settings")
    return dataclasses.replace(subject, name=json.dumps(settings))


def _row(
    bench: runner.Bench, case: Any, facts: dict[str, Any], settings: Settings, ms: float
) -> dict[str, Any]:
    unit, amount = rows.work(case, bench.op)
    known = dataclasses.asdict(bench.provenance)
    where = {"device": known["gpu"], **{name: known[name] for name in ("jax", "commit", "date")}}
    measured = {"ms": round(ms, 5), unit: round(amount / ms * 1e3, 3)}
    return {"case": case.name, "problem": facts, "config": settings, **measured, **where}


def space_of(kernel: str, start: Settings) -> dict[str, tuple[Any, ...]]:
    """The values to try of every setting."""
    if kernel in SPACES:
        return SPACES[kernel]
    around: dict[str, tuple[Any, ...]] = {}
    for name, value in start.items():
        if isinstance(value, bool):
            around[name] = (False, True)
        elif isinstance(value, int):
            around[name] = tuple(sorted({max(value // 2, 1), value, 2 * value}))
    return around


def search(
    space: dict[str, tuple[Any, ...]],
    start: Settings,
    time_of: Callable[[Settings], float],
    rounds: int = 2,
) -> list[tuple[Settings, float]]:
    """Settings and their times, fastest first; at least `start`."""
    tried: dict[str, tuple[Settings, float]] = {}

    def attempt(settings: Settings) -> None:
        key = json.dumps(settings, sort_keys=True)
        if key not in tried:
            tried[key] = settings, time_of(settings)

    def best() -> Settings:
        return min(tried.values(), key=lambda pair: pair[1])[0]

    attempt(start)
    for _ in range(rounds):
        before = best()
        for name, values in space.items():
            here = best()
            for value in values:
                attempt(here | {name: value})
        if best() == before:
            break
    return sorted(tried.values(), key=lambda pair: pair[1])


def problem_of(kernel: str, facts: dict[str, Any], gpu: str) -> Any:
    """The problem that a tuning row of a kernel (its module name) describes."""
    facts = {name: tuple(x) if isinstance(x, list) else x for name, x in facts.items()}
    if "mask" in facts:
        facts["mask"] = Mask(**facts["mask"])
    if kernel.startswith("flash"):
        op = "flash_backward" if "bwd" in kernel else "flash_forward"
        return _problem.AttentionProblem(op=op, gpu=gpu, scale=facts["head_dim"] ** -0.5, **facts)
    capacity = facts.pop("capacity")
    copies = facts["sequences"] if facts["kind"] == "per_sequence" else 1
    facts["capacities"] = (capacity,) * copies
    if kernel.startswith("append"):
        return _problem.AppendProblem(gpu=gpu, **facts)
    return _problem.DecodeProblem(gpu=gpu, scale=facts["head_dim"] ** -0.5, **facts)


HEADER = "# Written by `run.py --task=tune`; every row says where it is known from.\n"


def write_row(path: pathlib.Path, kernel: str, row: dict[str, Any]) -> None:
    """Puts the row in its place: instead of the one for the same problem, else as one more."""
    tables = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    kept = [one for one in tables.get(kernel, []) if one["problem"] != row["problem"]]
    tables[kernel] = sorted([*kept, row], key=lambda one: one["case"])
    path.write_text(HEADER + "".join(map(_table, *zip(*_flat(tables), strict=True))), "utf-8")
    _tuning.reload()


def _flat(tables: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(kernel, row) for kernel in sorted(tables) for row in tables[kernel]]


def _table(kernel: str, row: dict[str, Any]) -> str:
    lines = (f"{name} = {_toml(value)}\n" for name, value in row.items())
    return f"\n[[{kernel}]]\n" + "".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{name} = {_toml(x)}" for name, x in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _file(gpu: str) -> pathlib.Path:
    folder = importlib.resources.files("pallas_attn").joinpath("tuning")
    return pathlib.Path(str(folder)) / f"{gpu}.toml"


def _ms(ms: float) -> str:
    return f"{ms:.4f} ms" if math.isfinite(ms) else "not at all"
