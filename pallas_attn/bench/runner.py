"""The benchmark: for each case, check everybody, then time those who are right, in turns."""

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from pallas_attn._call import config
from pallas_attn.bench import cases as known
from pallas_attn.bench import judges, peers, plots, report, rows, subjects, timing
from pallas_attn.bench.case import AppendCase, DecodeCase
from pallas_attn.bench.rows import Row
from pallas_attn.bench.timing import Subject, Timer

SHARED = "shared_prefix"
REFUSALS = (peers.Unavailable, ValueError, TypeError, NotImplementedError)
FIRST_CALL = ("first_call_s", "first_call_cpu_s")  # of ours: how long it took, and how much work
# What --op says, and the name that rows carry. "backward" times what a training step does.
OPS = {
    "forward": "forward",
    "backward": "forward+backward",
    "backward_alone": "backward",
    "decode": "decode",
    "prefill": "prefill",
    SHARED: SHARED,
    "append": "append",
    "mask": "mask",
}
OVER_CACHES = ("decode", "prefill", SHARED)  # one problem over all kinds of caches, in one group


@dataclasses.dataclass(frozen=True)
class Options:
    """How a benchmark runs; the defaults are those of a figure that is published."""

    implementation: str | None = None  # None: the fastest
    peers: str = "all"  # or names with commas, or "none"
    seed: int = 0
    turns: int = 5
    times: int = 3
    cold: bool = False  # empty the L2 cache before each timed call
    commit: str | None = None  # where the tree is no git checkout
    out: str | None = None  # .jsonl to add rows to
    plot: str | None = None  # .svg to draw


@dataclasses.dataclass
class Bench:
    """One benchmark run: what its cases share."""

    op: str
    options: Options
    timer: Timer
    provenance: rows.Provenance
    ceilings: dict[str, float]
    say: Callable[[str], None]
    flush: Callable[[], None] | None = None
    said: set[str] = dataclasses.field(default_factory=set)

    def say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            self.say(line)


def say_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_bench(
    op: str,
    cases: str | Sequence[Any] = "grid",
    options: Options = Options(),  # noqa: B008
    *,
    timer: Timer | None = None,
    ceilings: dict[str, float] | None = None,
    say: Callable[[str], None] = say_line,
) -> int:
    """Runs it; 0 where every case was right and timed beside every peer that takes it, 1 where
    something was not. A peer that gives a wrong result is left out, and said; it fails nothing.

    `cases`: tags and globs (`cases.select`), or the cases themselves. `timer` and `ceilings` are
    measured with CUPTI on this machine's GPU where they are not given.
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    chosen = chosen_cases(op, cases)
    wanted_peers(OPS[op], options.peers)
    if timer is None and jax.devices()[0].platform != "gpu":
        raise ValueError(
            "a benchmark times a GPU and jax found none; see python run.py for what runs here"
        )
    if options.plot:
        plots.ready(options.plot)
    timer = timer or timing.CuptiTimer()
    provenance = rows.Provenance.here(options.commit)
    say(f"{provenance.gpu}, jax {provenance.jax}, commit {provenance.commit}")
    ceilings = timing.ceilings(timer) if ceilings is None else ceilings
    say(", ".join(f"{name} {value:.4g}" for name, value in ceilings.items()) + " (TFLOP/s, TB/s)")
    flush = timing.cache_flusher() if options.cold else None
    bench = Bench(OPS[op], options, timer, provenance, ceilings, say, flush)
    if options.out:
        rows.append(options.out, rows.ceiling_rows(ceilings, provenance))
    groups, failures, number = [], {}, 0
    at_once = 4 if op in OVER_CACHES else 1
    for some in itertools.batched(alike(chosen), at_once):
        for name, found in measure(bench, some):
            number += 1
            if isinstance(found, Exception):
                failures[name] = _complaint_of(found)
                say(f"[{number}/{len(chosen)}] {name:<34}  {failures[name]}")
                continue
            say(report.case_line(number, len(chosen), found, ceilings))
            groups.append(found)
            if options.out:
                rows.append(options.out, found)
    for line in report.summary(groups, failures):
        say(line)
    if options.plot and groups:
        plots.bars(groups, ceilings, options.plot)
    return int(bool(failures) or any(row.get("failed") for rows_of in groups for row in rows_of))


def chosen_cases(op: str, wanted: str | Sequence[Any]) -> tuple[Any, ...]:
    """The cases that an operation has, as tags and globs select them."""
    if not isinstance(wanted, str):
        return tuple(wanted)
    return known.select(known.LISTS.get(op, known.ATTENTION), wanted)


def alike(cases: Sequence[Any]) -> list[list[Any]]:
    """Cases in groups that have the same arrays and the same results, and so the same peers: a
    decode or a prefill over caches of several kinds.
    """
    groups: dict[Any, list[Any]] = {}
    for case in cases:
        groups.setdefault(getattr(case, "problem_alone", case), []).append(case)
    return list(groups.values())


class WrongError(Exception):
    """A result is not within budget: it is not timed."""


def _complaint_of(error: BaseException) -> str:
    if isinstance(error, WrongError):
        return f"wrong, not timed: {error}"
    if isinstance(error, timing.TimingError) and error.__cause__:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


@dataclasses.dataclass
class Entry:
    """Somebody who takes part: what is timed, and what its rows will say."""

    impl: str
    subject: Subject
    case: Any  # ours: whose; of a peer: one of those that it serves
    produced: Any = None  # by the first call, until it is checked
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    lost: Exception | None = None  # why it has no figure

    def serves(self, case: Any) -> bool:
        return self.case is case or self.impl not in peers.BY_KIND


@dataclasses.dataclass
class Group:
    """Cases that are `alike`, while they are made ready to be timed."""

    calls: list[peers.Call]
    alone: Entry | Exception  # the first of ours, after a first call with nothing beside it
    rest: list[Future] = dataclasses.field(default_factory=list)  # the others of ours
    judge: Future | None = None
    others: list[Future] = dataclasses.field(default_factory=list)  # of each peer what it compiled


def measure(bench: Bench, groups: Sequence[list[Any]]) -> Iterator[tuple[str, Any]]:
    """(name, its rows, ours first; or why it has none) of each case of several groups of cases that
    are `alike`. Those of a group take turns with each other and with their peers.

    Over caches it takes longer to compile than to run: there, several groups are made ready side by
    side.
    Nothing else runs while one is timed, nor during the first call of a group or of a peer: cuDNN's
    records, and throws away, whatever anyone launches meanwhile on the stream that all share.
    """
    ready = [_begun(bench, cases) for cases in groups]
    with concurrent.futures.ThreadPoolExecutor(16 if bench.op in OVER_CACHES else 1) as pool:
        for group in ready:
            _ask(bench, group, pool)
    while ready:
        yield from _outcomes(bench, ready.pop(0)).items()
        gc.collect()
        peers.release()


def _begun(bench: Bench, cases: Sequence[Any]) -> Group:
    try:
        arrays = cases[0].arrays(bench.options.seed)
        op = subjects.measure_of(bench.op, cases[0])
        backward = op in ("backward", "forward+backward")
        cotangent = cases[0].cotangent(bench.options.seed) if backward else None
        calls = [peers.Call(case, arrays, cotangent, op) for case in cases]
    except Exception as error:
        return Group([peers.Call(case, {}, None, bench.op) for case in cases], error)
    try:
        return Group(calls, _started(bench, calls[0]))
    except Exception as error:
        return Group(calls, error)


def _ask(bench: Bench, group: Group, pool: concurrent.futures.Executor) -> None:
    """Has the rest of ours and the oracle make a first call, and peers compile theirs."""
    calls = group.calls
    if isinstance(group.alone, Exception) and (len(calls) == 1 or not calls[0].arrays):
        return
    group.rest = [pool.submit(_started, bench, call) for call in calls[1:]]
    group.judge = pool.submit(judges.judge_of, calls[0])
    for name in wanted_peers(bench.op, bench.options.peers):
        for call in calls if name in peers.BY_KIND else calls[:1]:
            group.others.append(pool.submit(_candidates, bench, name, call))


def _outcomes(bench: Bench, group: Group) -> dict[str, list[Row] | Exception]:
    """What came of each case of a group."""
    names = [call.case.name for call in group.calls]
    found: dict[str, list[Row] | Exception] = {}
    if group.judge is None:  # nobody was asked
        assert isinstance(group.alone, Exception)
        return found | dict.fromkeys(names, group.alone)
    try:
        judge = group.judge.result()
    except Exception as error:
        return found | dict.fromkeys(names, error)
    mine: list[Entry] = []
    entries = [group.alone, *(_as_exception(x.exception()) or x.result() for x in group.rest)]
    for name, entry in zip(names, entries, strict=True):
        if isinstance(entry, Exception):
            found[name] = entry
        elif lost := _checked(entry, judge):
            found[name] = lost
        else:
            mine.append(entry)
            if entry is not group.alone:
                entry.facts = {key: x for key, x in entry.facts.items() if key not in FIRST_CALL}
    try:
        if mine:
            others = [one for each in group.others for one in _right(bench, each.result(), judge)]
            found |= _timed(bench, mine, others)
    except Exception as error:  # the cases after it are still worth their time
        found = {name: found.get(name, error) for name in names}
    return {name: found[name] for name in names}


def _checked(entry: Entry, judge: judges.Judge) -> Exception | None:
    """Why an entry is not to be timed: its result is wrong, or is none."""
    try:
        complaint = judge(entry.subject, entry.produced)
    except Exception as error:
        return error
    finally:
        entry.produced = None
    return WrongError(complaint) if complaint else None


def _as_exception(error: BaseException | None) -> Exception | None:
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _started(bench: Bench, call: peers.Call) -> Entry:
    """Ours, after its first call."""
    subject = ours(bench, call)
    begun, worked = time.perf_counter(), _seconds_of_work()
    with config.watched() as ran:
        produced = subject.launch()
        subject.wait(produced)
    took = time.perf_counter() - begun, _seconds_of_work() - worked
    facts: dict[str, Any] = dict(zip(FIRST_CALL, (round(s, 3) for s in took), strict=True))
    facts["config"] = {one.kernel: dataclasses.asdict(one.config) for one in ran}
    kernels = "+".join(dict.fromkeys(one.kernel for one in ran))
    name = f"{rows.OURS}{kernels}" if kernels else subject.name
    return Entry(name, dataclasses.replace(subject, name=name), call.case, produced, facts)


def _seconds_of_work() -> float:
    """Of this process on all its CPUs, and of the compilers that it started and that are done."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _candidates(bench: Bench, name: str, call: peers.Call) -> list[Entry]:
    """A peer's configurations, compiled where that can be done without a call; a line says why it
    takes no such case.
    """
    found = []
    try:
        for subject in peers.PEERS[bench.op][name](call):
            if isinstance(subject.launch, subjects.Step):
                _ = subject.launch.compiled
            found.append(Entry(subject.name, subject, call.case))
    except REFUSALS as error:
        bench.say_once(f"      {name}: {first_line(error)}")
    except Exception as error:
        found.append(Entry(name, Subject(name, tuple), call.case, lost=error))
    return found


def _right(bench: Bench, candidates: list[Entry], judge: judges.Judge) -> list[Entry]:
    """Of a peer's candidates the fastest that is right, and those that are lost."""
    for entry in candidates:
        if entry.lost:
            continue
        try:
            entry.produced = entry.subject.launch()
            entry.subject.wait(entry.produced)
            entry.lost = _checked(entry, judge)
        except Exception as error:
            entry.lost = error
    fastest = _time(candidates, functools.partial(timing.quickest, bench.timer))
    return [entry for entry in candidates if entry.lost or entry.subject is fastest]


def _time[Found](entries: list[Entry], by: Callable[[list[Subject]], Found]) -> Found | None:
    """What `by` finds of the entries that are not lost. Who fails in his turn is; then the others
    have all of theirs anew.
    """
    while there := [entry for entry in entries if not entry.lost]:
        try:
            return by([entry.subject for entry in there])
        except timing.TimingError as error:
            (failed,) = (entry for entry in there if entry.subject is error.subject)
            failed.lost = error
    return None


def _timed(bench: Bench, mine: list[Entry], others: list[Entry]) -> dict[str, Any]:
    """Of each case of ours its rows, or why it has none; ours say whom they could not meet."""
    options = bench.options
    names: dict[str, Entry] = {}
    for entry in (*mine, *(one for one in others if not one.lost)):
        name = entry.impl if entry.impl not in names else f"{entry.impl} {entry.case.name}"
        entry.subject = dataclasses.replace(entry.subject, name=name)
        names[name] = entry
    turns: dict[str, Any] = {"turns": options.turns, "times": options.times, "flush": bench.flush}
    by = functools.partial(timing.interleave, bench.timer, **turns)
    timings = _time(list(names.values()), by) or {}
    for one in others:
        if one.lost:
            bench.say(f"      {one.impl}: {_complaint_of(one.lost)}")

    def row(entry: Entry, case: Any) -> Row:
        facts = bench.op, entry.impl, timings[entry.subject.name], bench.provenance
        notes: dict[str, Any] = {"l2": "cold" if options.cold else "warm"}
        if bench.op == "forward+backward" and isinstance(entry.subject.launch, subjects.Step):
            notes["memory_mib"] = entry.subject.launch.memory_mib
        return rows.measured(case, *facts) | notes | entry.facts

    def rows_of(entry: Entry) -> list[Row]:
        met = [one for one in others if one.serves(entry.case)]
        alone = row(entry, entry.case) | _losses([one for one in met if one.lost])
        return [alone, *(row(one, peers.case_of(entry.case)) for one in met if not one.lost)]

    return {entry.case.name: entry.lost or rows_of(entry) for entry in mine}


def _losses(lost: list[Entry]) -> dict[str, dict[str, str]]:
    """Which peers were wrong and which failed, as a row says it."""
    found: dict[str, dict[str, str]] = {}
    for one in lost:
        assert one.lost
        what = "wrong" if isinstance(one.lost, WrongError) else "failed"
        found.setdefault(what, {})[one.impl] = _complaint_of(one.lost)
    return found


def ours(bench: Bench, call: peers.Call) -> Subject:
    case, implementation = call.case, bench.options.implementation
    if isinstance(case, DecodeCase):
        launch = subjects.decode(case, call.arrays, implementation, apart=call.op == SHARED)
    elif isinstance(case, AppendCase):
        launch = subjects.writes(case, call.arrays, implementation)
    else:
        launch = subjects.attention(case, call.arrays, call.cotangent, call.op, implementation)
    return subjects.as_subject(implementation or generation(), launch)


def generation() -> str:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return "reference" if capability is None else "sm" + str(capability).replace(".", "")


def wanted_peers(op: str, names: str) -> list[str]:
    """The peers of an operation that "all", "none" or a list of names asks for."""
    table = list(peers.PEERS[op])
    if names in ("all", "none"):
        return table if names == "all" else []
    wanted = names.split(",")
    for name in wanted:
        if name not in table:
            raise ValueError(f"peers: expected names of {', '.join(table)}, got {name!r}")
    return wanted


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:160]
