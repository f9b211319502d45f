"""The benchmark: for each case, check everybody, then time those who are right, in turns."""

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import _tuning
from pallas_attn import cases as known
from pallas_attn._case import AppendCase, DecodeCase
from pallas_attn.bench import peers, plots, report, rows, subjects, timing, verify
from pallas_attn.bench.rows import Row
from pallas_attn.bench.timing import Subject, Timer

# What --op says, and the name that rows carry. "backward" times what a training step does.
OPS = {
    "forward": "forward",
    "backward": "forward+backward",
    "backward_alone": "backward",
    "decode": "decode",
    "append": "append",
}


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
    plot: str | None = None  # .png to draw


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
    """Runs it; 0 where every case was right and timed, 1 where one was not.

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
    at_once = 4 if op == "decode" else 1
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
    return int(bool(failures))


def chosen_cases(op: str, wanted: str | Sequence[Any]) -> tuple[Any, ...]:
    """The cases that an operation has, as tags and globs select them."""
    if not isinstance(wanted, str):
        return tuple(wanted)
    lists: dict[str, tuple[known.Case, ...]] = {"decode": known.DECODE, "append": known.APPEND}
    return known.select(lists.get(op, known.ATTENTION), wanted)


def alike(cases: Sequence[Any]) -> list[list[Any]]:
    """Cases in groups that have the same arrays and the same results, and so the same peers: a
    decode over caches of several kinds.
    """
    groups: dict[Any, list[Any]] = {}
    for case in cases:
        groups.setdefault(getattr(case, "problem_alone", case), []).append(case)
    return list(groups.values())


class WrongError(Exception):
    """Our own result is not within budget: it is not timed."""


def _complaint_of(error: Exception) -> str:
    if isinstance(error, WrongError):
        return f"wrong, not timed: {error}"
    return f"{type(error).__name__}: {first_line(error)}"


@dataclasses.dataclass
class Entry:
    """Somebody who takes part: what is timed, and what its rows will say."""

    impl: str
    subject: Subject
    case: Any  # ours: whose; of a peer: one of those that it serves
    produced: Any = None  # by the first call, until it is checked
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Group:
    """Cases that are `alike`, while they are made ready to be timed."""

    calls: list[peers.Call]
    alone: Entry | Exception  # the first of ours, after a first call with nothing beside it
    rest: list[Future] = dataclasses.field(default_factory=list)  # the others of ours
    judge: Future | None = None
    others: list[Future] = dataclasses.field(default_factory=list)  # of each peer what it has


def measure(bench: Bench, groups: Sequence[list[Any]]) -> Iterator[tuple[str, Any]]:
    """(name, its rows, ours first; or why it has none) of each case of several groups of cases that
    are `alike`. Those of a group take turns with each other and with their peers.

    Decoding takes longer to compile than to run: there, several groups are made ready side by side.
    Nothing else runs while one is timed, nor during the first call of a group.
    """
    ready = [_begun(bench, cases) for cases in groups]
    with concurrent.futures.ThreadPoolExecutor(16 if bench.op == "decode" else 1) as pool:
        for group in ready:
            _ask(bench, group, pool)
    while ready:
        yield from _outcomes(bench, ready.pop(0)).items()
        gc.collect()
        peers.release()


def _begun(bench: Bench, cases: Sequence[Any]) -> Group:
    try:
        arrays = cases[0].arrays(bench.options.seed)
        backward = bench.op in ("backward", "forward+backward")
        cotangent = cases[0].cotangent(bench.options.seed) if backward else None
        calls = [peers.Call(case, arrays, cotangent, bench.op) for case in cases]
    except Exception as error:
        return Group([peers.Call(case, {}, None, bench.op) for case in cases], error)
    try:
        return Group(calls, _started(bench, calls[0]))
    except Exception as error:
        return Group(calls, error)


def _ask(bench: Bench, group: Group, pool: concurrent.futures.Executor) -> None:
    """Has everybody else make a first call, and the oracle its own."""
    calls = group.calls
    if isinstance(group.alone, Exception) and (len(calls) == 1 or not calls[0].arrays):
        return
    group.rest = [pool.submit(_started, bench, call) for call in calls[1:]]
    group.judge = pool.submit(judge_of, calls[0])
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
        elif complaint := judge(entry.subject, entry.produced):
            found[name] = WrongError(complaint)
        else:
            mine.append(entry)
            entry.produced = None
            if entry is not group.alone:
                del entry.facts["first_call_s"]
    try:
        if mine:
            others = _right(bench, [one.result() for one in group.others], judge)
            found |= _timed(bench, mine, others)
    except Exception as error:  # the cases after it are still worth their time
        found = {name: found.get(name, error) for name in names}
    return {name: found[name] for name in names}


def _as_exception(error: BaseException | None) -> Exception | None:
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _started(bench: Bench, call: peers.Call) -> Entry:
    """Ours, after its first call."""
    subject = ours(bench, call)
    begun = time.perf_counter()
    with _tuning.watched() as ran:
        produced = subject.launch()
        subject.wait(produced)
    facts: dict[str, Any] = {"first_call_s": round(time.perf_counter() - begun, 3)}
    facts["config"] = {one.kernel: dataclasses.asdict(one.config) for one in ran}
    kernels = "+".join(dict.fromkeys(one.kernel for one in ran))
    name = f"{rows.OURS}{kernels}" if kernels else subject.name
    return Entry(name, dataclasses.replace(subject, name=name), call.case, produced, facts)


def _candidates(bench: Bench, name: str, call: peers.Call) -> list[Entry]:
    """A peer's configurations, each after its first call; why there is none, said in a line."""
    try:
        found = []
        for subject in peers.PEERS[bench.op][name](call):
            found.append(Entry(subject.name, subject, call.case, subject.launch()))
            subject.wait(found[-1].produced)
        return found
    except Exception as error:  # a peer may fail in any way it likes
        bench.say_once(f"      {name}: {first_line(error)}")
        return []


def _right(bench: Bench, others: list[list[Entry]], judge: "Judge") -> list[Entry]:
    """Of each peer that is right, its fastest."""
    found = []
    for candidates in others:
        good = []
        for entry in candidates:
            if complaint := judge(entry.subject, entry.produced):
                bench.say(f"      {entry.impl}: left out, {complaint}")
            else:
                good.append(entry)
            entry.produced = None
        if good:
            fastest = timing.quickest(bench.timer, [entry.subject for entry in good])
            found += [entry for entry in good if entry.subject is fastest]
    return found


def _timed(bench: Bench, mine: list[Entry], others: list[Entry]) -> dict[str, list[Row]]:
    options = bench.options
    names: dict[str, Entry] = {}
    for entry in (*mine, *others):
        name = entry.impl if entry.impl not in names else f"{entry.impl} {entry.case.name}"
        entry.subject = dataclasses.replace(entry.subject, name=name)
        names[name] = entry
    turns: dict[str, Any] = {"turns": options.turns, "times": options.times, "flush": bench.flush}
    subjects_of_all = [entry.subject for entry in names.values()]
    timings = timing.interleave(bench.timer, subjects_of_all, **turns)

    def row(entry: Entry, case: Any) -> Row:
        facts = bench.op, entry.impl, timings[entry.subject.name], bench.provenance
        l2 = {"l2": "cold" if options.cold else "warm"}
        memory = getattr(entry.subject.launch, "memory_mib", None)
        held = {} if memory is None else {"memory_mib": memory}
        return rows.measured(case, *facts) | l2 | held | entry.facts

    return {
        entry.case.name: [row(entry, entry.case)]
        + [
            row(one, peers.case_of(entry.case))
            for one in others
            if one.case is entry.case or one.impl not in peers.BY_KIND
        ]
        for entry in mine
    }


def ours(bench: Bench, call: peers.Call) -> Subject:
    case, implementation = call.case, bench.options.implementation
    if isinstance(case, DecodeCase):
        launch = subjects.decode(case, call.arrays, implementation)
    elif isinstance(case, AppendCase):
        launch = subjects.Append(case, call.arrays, implementation)
    else:
        launch = subjects.attention(case, call.arrays, call.cotangent, bench.op, implementation)
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


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:160]


Judge = Callable[[Subject, Any], str | None]


def judge_of(call: peers.Call) -> Judge:
    """What checks a subject's result for this call; the oracle runs once."""
    case, arrays = call.case, call.arrays
    if isinstance(case, AppendCase):
        return _AppendJudge(call)
    options = case.options()
    if isinstance(case, DecodeCase):
        k, v = subjects.held_rows(case, arrays)
        lengths = arrays["lengths"]
        place = {"kv_lengths": lengths, "q_offset": lengths - case.q_len}
        arrays = {"q": arrays["q"], "k": k, "v": v, "sinks": arrays.get("sinks"), **place}
    elif "q_offset" in options:
        arrays = arrays | {"q_offset": options["q_offset"]}
    oracle, naive = verify.expected(arrays, options, call.cotangent)
    axis = 0 if isinstance(case, DecodeCase) else 1

    def judge(subject: Subject, produced: Any) -> str | None:
        return verify.judge(subject.outputs(produced), oracle, naive, axis=axis)

    return judge


class _AppendJudge:
    """Every element of every buffer, bit for bit, beside the same rows looked up one by one."""

    def __init__(self, call: peers.Call):
        case, arrays = call.case, call.arrays
        cache = subjects.noisy(subjects.empty_cache(case)).extend(arrays["lengths"])
        cache = cache.extend(arrays.get("new_lengths", case.new_rows))
        new = {"k": arrays["k"], "v": arrays["v"]}
        if case.cache_dtype:
            for side in ("k", "v"):
                pair = verify.quantized(new[side], case.cache_dtype)
                new[side], new[f"{side}_scale"] = (jnp.asarray(x) for x in pair)
        owners = None if cache.page_table is None else _owners(cache)
        place = jax.jit(functools.partial(_placed, case.kind))
        rest = arrays["lengths"], cache.new_lengths, owners
        buffers = subjects.buffers(cache)
        self.expected = {name: place(x, new[name], *rest) for name, x in buffers.items()}

    def __call__(self, subject: Subject, produced: Any) -> str | None:
        got = produced if isinstance(produced, dict) else subjects.buffers(produced)
        same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
        if all(bool(x) for x in jax.tree.leaves(same(got, self.expected))):
            return None
        return "a buffer differs from the same rows written one at a time"


def _owners(cache: Any) -> Any:
    """(sequence, position of its first row) of each page; sequence -1 where it has none."""
    table = np.asarray(cache.page_table)
    found = np.full((cache.pages, 2), -1, np.int32)
    for m, slot in zip(*np.nonzero(table >= 0), strict=True):
        found[table[m, slot]] = m, slot * cache.page_size
    return jnp.asarray(found)


def _placed(kind: str, cache: Any, new: Any, start: Any, count: Any, owners: Any) -> Any:
    """A buffer with the new rows in, each place asking whether there is a row for it: no scatter,
    which is what XLA's own append is made of.
    """
    if kind == "per_sequence":
        rows = zip(cache, new, start, count, strict=True)
        return tuple(_looked_up(*one) for one in rows)
    if kind == "stacked":
        return jax.lax.map(lambda one: _looked_up(*one), (cache, new, start, count))

    def page(one):
        held, (m, first) = one
        rows = jnp.where(m >= 0, count[m], 0)
        return _looked_up(held, new[m], start[m] - first, rows)

    return jax.lax.map(page, (cache, owners))


def _looked_up(cache: Any, new: Any, start: Any, count: Any) -> Any:
    """[K, rows, ...] with new [t, K, ...] at start, start + 1, ..."""
    row = jnp.arange(cache.shape[1], dtype=jnp.int32) - start
    here = ((row >= 0) & (row < count)).reshape(1, -1, *[1] * (cache.ndim - 2))
    fresh = jnp.swapaxes(new[jnp.clip(row, 0, new.shape[0] - 1)], 0, 1)
    return jnp.where(here, fresh, cache)
