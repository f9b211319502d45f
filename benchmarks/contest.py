"""One round of the benchmark: our call and its peers, checked and then timed in turns.

Cases that are `alike` form a group. Each participant is an `Entry`; it makes a first call, a judge
checks the result, and entries that are right take turns. An entry that fails is lost, with the
reason; all others go on.
"""

import concurrent.futures
import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
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
OVER_CACHES = ("decode", "prefill", SHARED)  # one problem over all kinds of caches, in one group
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
class Group:
    """Cases that are `alike`, while they are made ready to be timed."""

    cases: Sequence[Case]
    ours: list[Future]  # an Entry each, after its first call
    judge: Future
    peers: list[Future]  # a list of Entries each, compiled


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


def groups_at_once(bench: Bench) -> int:
    return 4 if bench.op in OVER_CACHES else 1


def measure(bench: Bench, groups: Sequence[Sequence[Case]]) -> Iterator[tuple[str, Outcome]]:
    """(name, outcome) of each case of several groups. Cases of a group take turns with each other
    and with their peers.

    Over caches it takes longer to compile than to run: there several groups are made ready side by
    side. Nothing else runs while an entry is timed, nor during the first call of a group or of a
    peer: cuDNN's records, and throws away, all that is launched meanwhile on the shared stream.
    """
    begun = [_begin(bench, cases) for cases in groups]
    with concurrent.futures.ThreadPoolExecutor(16 if bench.op in OVER_CACHES else 1) as pool:
        ready = [_ask(bench, *some, pool) for some in zip(groups, begun, strict=True)]
    del begun
    while ready:
        yield from timed(bench, _checked(bench, ready.pop(0))).items()
        release()


def checked(bench: Bench, cases: Sequence[Case]) -> Checked:
    """One group, made ready to be timed, one step after the other in this thread."""
    return _checked(bench, _ask(bench, cases, _begin(bench, cases), _AtOnce()))


class _AtOnce(concurrent.futures.Executor):
    """Does what it is given before it returns."""

    def submit(self, function: Callable[..., Any], /, *rest: Any, **more: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*rest, **more))
        except Exception as error:
            future.set_exception(error)
        return future


def release() -> None:
    """Gives back the memory of groups that are done."""
    gc.collect()
    torch_peers.release()


# ---- first calls --------------------------------------------------------------------------------


def _begin(bench: Bench, cases: Sequence[Case]) -> tuple[list[Call] | Exception, Future]:
    """The calls of a group, and our entry for the first, after a call with nothing beside it."""
    try:
        op, seed = subjects.measure_of(bench.op, cases[0]), bench.options.seed
        with bench.together.beside():
            arrays = cases[0].arrays(seed)
            cotangent: subjects.Directions = None
            if "backward" in op:
                cotangent = cases[0].cotangent(seed)  # type: ignore[union-attr]
            elif op == "jvp":
                cotangent = cases[0].tangents(seed)  # type: ignore[union-attr]
        calls = [Call(case, arrays, cotangent, op) for case in cases]
    except Exception as error:
        return error, _failed(error)
    try:
        entry: Future = Future()
        entry.set_result(_start(bench, calls[0]))
    except Exception as error:
        entry = _failed(error)
    return calls, entry


def _ask(
    bench: Bench,
    cases: Sequence[Case],
    begun: tuple[list[Call] | Exception, Future],
    pool: concurrent.futures.Executor,
) -> Group:
    """Has the rest of ours and the oracle make a first call, and peers compile theirs."""
    calls, first = begun
    error = first.exception()
    if isinstance(calls, Exception) or (error and len(calls) == 1):  # nobody is asked
        assert error is not None
        return Group(cases, [first] * len(cases), _failed(error), [])
    ours = [first, *(pool.submit(_start, bench, call) for call in calls[1:])]
    judge, others = pool.submit(_judge, bench, calls[0]), []
    for name in peers.wanted(bench.op, bench.options.peers):
        for call in calls if name in peers.BY_KIND else calls[:1]:
            others.append(pool.submit(_compile_peer, bench, name, call))
    return Group(cases, ours, judge, others)


def _failed(error: BaseException) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future


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


def _compile_peer(bench: Bench, name: str, call: Call) -> list[Entry]:
    """A peer's configurations, compiled if that takes no call; none, and a line that says why, if
    it does not take the case.
    """
    entries = []
    try:
        with bench.together.beside():  # XLA tries matmuls while it compiles
            made = peers.PEERS[bench.op][name](call)
            for step in (subject.launch for subject in made):
                _ = step.compiled if isinstance(step, subjects.Step) else None
        entries = [Entry(subject.name, subject, call.case) for subject in made]
    except REFUSALS as error:
        bench.say_once(f"      {name}: {first_line(error)}")
        bench.refusals.setdefault(call.case.name, {})[name] = first_line(error)
    except Exception as error:
        entries = [Entry(name, Subject(name, tuple), call.case, lost=error)]
    return entries


# ---- checks, then turns -------------------------------------------------------------------------


def _checked(bench: Bench, group: Group) -> Checked:
    """The group with the entries that are right."""
    names = [case.name for case in group.cases]
    made = Checked(names, {}, [], [])
    try:
        judge = group.judge.result()
    except Exception as error:
        made.outcomes = dict.fromkeys(names, error)
        return made
    for name, future in zip(names, group.ours, strict=True):
        try:
            entry = future.result()
            with bench.together.beside():
                _check(entry, judge)
        except Exception as error:
            made.outcomes[name] = error
            continue
        made.ours.append(entry)
        if future is not group.ours[0]:  # others made it beside each other
            entry.facts = {key: x for key, x in entry.facts.items() if key not in FIRST_CALL}
    if made.ours:
        made.peers = [_right(bench, each.result(), judge) for each in group.peers]
    return made


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


def _check(entry: Entry, judge: judges.Judge) -> None:
    """Raises WrongError where the first result of an entry is wrong."""
    try:
        complaint = judge(entry.subject, entry.produced)
    finally:
        entry.produced = None
    if complaint:
        raise WrongError(complaint)


def _right(bench: Bench, entries: list[Entry], judge: judges.Judge) -> list[Entry]:
    """A peer's configurations after their first calls; those that are wrong or fail are lost."""
    for entry in entries:
        if entry.lost:
            continue
        try:
            with bench.together.beside():
                entry.produced = entry.subject.launch()
                entry.subject.wait(entry.produced)
                _check(entry, judge)
        except Exception as error:
            entry.lost = error
    return entries


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
