"""One round of the benchmark: our call and its peers, checked and then timed in turns.

Cases that are `alike` form a group. Each participant is an `Entry`; it makes a first call, a judge
checks the result, and entries that are right take turns. An entry that fails is lost, with the
reason; all others go on.
"""

import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import float8, judges, peers, rows, subjects, timing, torch_peers
from benchmarks.call import Call, Unavailable
from benchmarks.rows import Row
from benchmarks.timing import Subject, Timer, Timing
from benchmarks.together import Together
from pallas_attn._call import config
from tests.support.problems.case import AppendCase, DecodeCase
from tests.support.problems.cases import Case

SHARED = "shared_prefix"
REFUSALS = (Unavailable, ValueError, TypeError, NotImplementedError)
FIRST_CALL = ("first_call_s", "first_call_cpu_s")  # seconds and CPU seconds of our first call
Outcome = list[Row] | Exception  # a case's rows, ours first; or the reason why it has none


@dataclasses.dataclass(frozen=True)
class Options:
    """The way a benchmark runs; the defaults are those of a figure that is published."""

    implementation: str | None = None  # None: the fastest
    peers: str = "all"  # or names with commas, or "none"
    seed: int = 0
    turns: int = 5
    times: int = 3
    cold: bool = False  # empty the L2 cache before each timed call
    commit: str | None = None  # named in rows if the tree is no git checkout
    out: str | None = None  # .jsonl to add rows to; with several workers a folder of them
    plot: str | None = None  # .svg to draw
    settled: float | None = None  # spread at which turns end early: `timing.interleave`


@dataclasses.dataclass
class Bench:
    """One benchmark run: everything that its cases share."""

    op: str
    options: Options
    timer: Timer
    provenance: rows.Provenance
    say: Callable[[str], None]
    flush: Callable[[], None] | None = None
    said: set[str] = dataclasses.field(default_factory=set)
    together: Together = dataclasses.field(default_factory=Together)
    refusals: dict[str, dict[str, str]] = dataclasses.field(
        default_factory=dict
    )  # {case: {peer: reason}}

    def say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            self.say(line)


class WrongError(Exception):
    """A result is not within budget: it is not timed."""


@dataclasses.dataclass
class Entry:
    """A participant: the subject that is timed, and the facts of its rows."""

    impl: str
    subject: Subject
    case: Any  # ours, or one of the cases that a peer serves
    produced: Any = None  # by the first call, until it is checked
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    lost: Exception | None = None  # the reason why it has no figure

    def serves(self, case: Case) -> bool:
        return self.case is case or self.impl not in peers.BY_KIND


@dataclasses.dataclass
class Checked:
    """A group whose results are checked."""

    names: list[str]
    outcomes: dict[str, Outcome]  # cases that are lost
    ours: list[Entry]  # entries that are right
    peers: list[list[Entry]]  # each peer's configurations


def alike(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases in groups that have the same arrays, results and peers: a decode or a prefill over
    caches of several kinds.
    """
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        groups.setdefault(getattr(case, "problem_alone", case), []).append(case)
    return list(groups.values())


def measure(bench: Bench, cases: Sequence[Case]) -> Iterator[tuple[str, Outcome]]:
    """(name, outcome) of each case of a group; they take turns with each other and with peers."""
    yield from timed(bench, checked(bench, cases)).items()
    release()


def release() -> None:
    """Gives back the memory of groups that are done."""
    gc.collect()
    torch_peers.release()


# ---- first calls, and checks ---------------------------------------------------------------------


def checked(bench: Bench, cases: Sequence[Case]) -> Checked:
    """A group, made ready to be timed: each of ours and of the peers makes a first call, and its
    result is checked. Where none of ours is right no peer is asked.
    """
    made = Checked([case.name for case in cases], {}, [], [])
    calls = _attempt(_calls, bench, cases)
    first = calls if isinstance(calls, Exception) else _attempt(_start, bench, calls[0])
    judge = first
    if not isinstance(calls, Exception) and (len(calls) > 1 or isinstance(first, Entry)):
        judge = _attempt(_judge, bench, calls[0])
    if isinstance(judge, Exception):
        made.outcomes = dict.fromkeys(made.names, judge)
        return made
    for call in calls:
        entry = first if call is calls[0] else _attempt(_start, bench, call)
        if isinstance(entry, Entry):
            entry = _attempt(_right, bench, entry, judge)
        if isinstance(entry, Exception):
            made.outcomes[call.case.name] = entry
            continue
        if call is not calls[0]:  # the first call compiled for this one, too
            entry.facts = {key: x for key, x in entry.facts.items() if key not in FIRST_CALL}
        made.ours.append(entry)
    for name in peers.wanted(bench.op, bench.options.peers) if made.ours else ():
        for call in calls if name in peers.BY_KIND else calls[:1]:
            made.peers.append(_peer(bench, name, call, judge))
    return made


def _attempt(run: Callable[..., Any], *rest: Any) -> Any:
    """The result, or the error."""
    try:
        return run(*rest)
    except Exception as error:
        return error


def _calls(bench: Bench, cases: Sequence[Case]) -> list[Call]:
    """The calls of a group, which share arrays."""
    op, seed = subjects.measure_of(bench.op, cases[0]), bench.options.seed
    with bench.together.beside():
        arrays = cases[0].arrays(seed)
        cotangent: subjects.Directions = None
        if "backward" in op:
            cotangent = cases[0].cotangent(seed)  # type: ignore[union-attr]
        elif op == "jvp":
            cotangent = cases[0].tangents(seed)  # type: ignore[union-attr]
    return [Call(case, arrays, cotangent, op) for case in cases]


def _judge(bench: Bench, call: Call) -> judges.Judge:
    with bench.together.beside():
        return judges.judge_of(call)


def _start(bench: Bench, call: Call) -> Entry:
    """Our entry, after its first call."""
    with bench.together.beside():
        subject = _our_subject(bench, call)
    begun, worked = time.perf_counter(), _cpu_seconds()
    with config.watched() as ran:
        if isinstance(subject.launch, subjects.Step):
            _ = subject.launch.compiled  # without the GPU: others may time
        with bench.together.beside():
            produced = subject.launch()
            subject.wait(produced)
    took = time.perf_counter() - begun, _cpu_seconds() - worked
    facts: dict[str, Any] = {}
    if not bench.together.shares:  # other processes would be part of it
        facts = dict(zip(FIRST_CALL, (round(s, 3) for s in took), strict=True))
    facts["config"] = {used.kernel: dataclasses.asdict(used.config) for used in ran}
    kernels = "+".join(dict.fromkeys(used.kernel for used in ran))
    name = f"{rows.OURS}{kernels}" if kernels else subject.name
    return Entry(name, dataclasses.replace(subject, name=name), call.case, produced, facts)


def _our_subject(bench: Bench, call: Call) -> Subject:
    case, arrays, implementation = call.case, call.arrays, bench.options.implementation
    launch: Callable[[], Any]
    if isinstance(case, DecodeCase):
        launch = subjects.decode(case, arrays, implementation, shared=call.op == SHARED)
    elif isinstance(case, AppendCase):
        launch = subjects.writes(case, arrays, implementation)
    elif bench.op == "quantize":
        launch = float8.rounding(case, arrays, implementation)
    else:
        launch = subjects.attention(case, arrays, call.cotangent, call.op, implementation)
    return Subject(f"{rows.OURS}{implementation or _generation()}", launch)


def _generation() -> str:
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return "reference" if capability is None else "sm" + str(capability).replace(".", "")


def _cpu_seconds() -> float:
    """CPU time of this process, and of the compilers that it started and that are done."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _peer(bench: Bench, name: str, call: Call, judge: judges.Judge) -> list[Entry]:
    """A peer's configurations after their first calls; those that are wrong or fail are lost. None,
    and a line that says why, where it does not take the case.
    """
    try:
        with bench.together.beside():  # XLA tries matmuls while it compiles
            made = peers.PEERS[bench.op][name](call)
            for step in (subject.launch for subject in made):
                _ = step.compiled if isinstance(step, subjects.Step) else None
    except REFUSALS as error:
        bench.say_once(f"      {name}: {first_line(error)}")
        bench.refusals.setdefault(call.case.name, {})[name] = first_line(error)
        return []
    except Exception as error:
        return [Entry(name, Subject(name, tuple), call.case, lost=error)]
    entries = [Entry(subject.name, subject, call.case) for subject in made]
    for entry in entries:
        right = _attempt(_right, bench, entry, judge)
        entry.lost = right if isinstance(right, Exception) else None
    return entries


def _right(bench: Bench, entry: Entry, judge: judges.Judge) -> Entry:
    """The entry, whose first result is checked: WrongError where it is wrong."""
    with bench.together.beside():
        try:
            if entry.produced is None:
                entry.produced = entry.subject.launch()
                entry.subject.wait(entry.produced)
            complaint = judge(entry.subject, entry.produced)
        finally:
            entry.produced = None
    if complaint:
        raise WrongError(complaint)
    return entry


# ---- turns --------------------------------------------------------------------------------------


def timed(bench: Bench, group: Checked) -> dict[str, Outcome]:
    """The outcome of each case of a group."""
    outcomes = dict(group.outcomes)
    try:
        if group.ours:
            others = [x for each in group.peers for x in _quickest(bench, each)]
            outcomes |= _time_turns(bench, group.ours, others)
    except Exception as error:  # the cases after it are still worth their time
        outcomes = {name: outcomes.get(name, error) for name in group.names}
    return {name: outcomes[name] for name in group.names}


def _quickest(bench: Bench, entries: list[Entry]) -> list[Entry]:
    """The fastest of a peer's configurations that are right, and those that are lost."""
    if sum(not entry.lost for entry in entries) < 2:
        return entries
    fastest = _time(bench, entries, functools.partial(timing.quickest, bench.timer))
    return [entry for entry in entries if entry.lost or entry.subject is fastest]


def _time[Result](
    bench: Bench, entries: list[Entry], measure: Callable[[list[Subject]], Result]
) -> Result | None:
    """`measure` of all entries that are not lost. An entry that fails in its turn is; then the
    others have all of their turns anew.
    """
    while left := [entry for entry in entries if not entry.lost]:
        try:
            with bench.together.alone():
                return measure([entry.subject for entry in left])
        except timing.TimingError as error:
            (failed,) = (entry for entry in left if entry.subject is error.subject)
            failed.lost = error
    return None


def _time_turns(bench: Bench, ours: list[Entry], others: list[Entry]) -> dict[str, Outcome]:
    """The outcomes of our entries; their rows name the peers that were lost."""
    names: dict[str, Entry] = {}
    for entry in (*ours, *(peer for peer in others if not peer.lost)):
        name = entry.impl if entry.impl not in names else f"{entry.impl} {entry.case.name}"
        entry.subject = dataclasses.replace(entry.subject, name=name)
        names[name] = entry
    options = bench.options
    turns: dict[str, Any] = {"turns": options.turns, "times": options.times, "flush": bench.flush}
    turns["settled"] = options.settled
    timings = _time(
        bench, list(names.values()), functools.partial(timing.interleave, bench.timer, **turns)
    )
    for peer in others:
        if peer.lost:
            bench.say(f"      {peer.impl}: {complaint_of(peer.lost)}")
    return {
        entry.case.name: entry.lost or _rows(bench, entry, others, timings or {}) for entry in ours
    }


def _rows(bench: Bench, entry: Entry, others: list[Entry], timings: dict[str, Timing]) -> list[Row]:
    """Our row, which names the peers that were lost, and the rows of the other peers."""
    met = [peer for peer in others if peer.serves(entry.case)]
    row = _row(bench, entry, entry.case, timings)
    for peer in met:
        if peer.lost:
            kind = "wrong" if isinstance(peer.lost, WrongError) else "failed"
            row.setdefault(kind, {})[peer.impl] = complaint_of(peer.lost)
    case = peers.case_of(entry.case)
    return [row, *(_row(bench, peer, case, timings) for peer in met if not peer.lost)]


def _row(bench: Bench, entry: Entry, case: Case, timings: dict[str, Timing]) -> Row:
    launch = entry.subject.launch
    notes: dict[str, Any] = {"l2": "cold" if bench.options.cold else "warm"}
    if bench.op in ("forward+backward", "jvp") and isinstance(launch, subjects.Step):
        notes["memory_mib"] = launch.memory_mib
    if bench.op == "shapes" and entry.impl.startswith(rows.OURS) and case.name in bench.refusals:
        notes["refused"] = bench.refusals[case.name]
    timed = timings[entry.subject.name]
    row = rows.measured(case, bench.op, entry.impl, timed, bench.provenance)
    return row | notes | entry.facts


def complaint_of(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, WrongError):
        return f"wrong, not timed: {error}"
    if isinstance(error, timing.TimingError) and error.__cause__:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:160]
