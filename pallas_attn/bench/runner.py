"""The benchmark: for each case, check everybody, then time those who are right, in turns."""

import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import _tuning
from pallas_attn import cases as known
from pallas_attn._case import AppendCase, DecodeCase
from pallas_attn.bench import peers, report, rows, subjects, timing, verify
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
    timer = timer or timing.CuptiTimer()
    provenance = rows.Provenance.here(options.commit)
    say(f"{provenance.gpu}, jax {provenance.jax}, commit {provenance.commit}")
    ceilings = timing.ceilings(timer) if ceilings is None else ceilings
    say(", ".join(f"{name} {value:.4g}" for name, value in ceilings.items()) + " (TFLOP/s, TB/s)")
    flush = timing.cache_flusher() if options.cold else None
    bench = Bench(OPS[op], options, timer, provenance, ceilings, say, flush)
    if options.out:
        rows.append(options.out, rows.ceiling_rows(ceilings, provenance))
    groups, failures = [], {}
    for number, case in enumerate(chosen, 1):
        try:
            found = measure(bench, case)
        except WrongError as error:
            failures[case.name] = f"wrong, not timed: {error}"
        except Exception as error:  # the cases after it are still worth their time
            failures[case.name] = f"{type(error).__name__}: {first_line(error)}"
        else:
            say(report.case_line(number, len(chosen), found, ceilings))
            groups.append(found)
            if options.out:
                rows.append(options.out, found)
            continue
        say(f"[{number}/{len(chosen)}] {case.name:<34}  {failures[case.name]}")
    for line in report.summary(groups, failures):
        say(line)
    if options.plot and groups:
        from pallas_attn.bench import plots

        plots.bars(groups, ceilings, options.plot)
    return int(bool(failures))


def chosen_cases(op: str, wanted: str | Sequence[Any]) -> tuple[Any, ...]:
    """The cases that an operation has, as tags and globs select them."""
    if not isinstance(wanted, str):
        return tuple(wanted)
    lists: dict[str, tuple[known.Case, ...]] = {"decode": known.DECODE, "append": known.APPEND}
    return known.select(lists.get(op, known.ATTENTION), wanted)


class WrongError(Exception):
    """Our own result is not within budget: nothing of the case is timed."""


def measure(bench: Bench, case: Any) -> list[Row]:
    """The rows of one case, ours first."""
    options = bench.options
    arrays = case.arrays(options.seed)
    attention = bench.op not in ("decode", "append")
    backward = attention and bench.op != "forward"
    cotangent = case.cotangent(options.seed) if backward else None
    call = peers.Call(case, arrays, cotangent, bench.op)
    subject = ours(bench, call)
    begun = time.perf_counter()
    with _tuning.watched() as ran:
        produced = subject.launch()
        subject.wait(produced)
    first_call = time.perf_counter() - begun
    kernels = "+".join(dict.fromkeys(one.kernel for one in ran))
    subject = dataclasses.replace(subject, name=f"{rows.OURS}{kernels}") if kernels else subject
    judge = judge_of(call)
    complaint = judge(subject, produced)
    if complaint:
        raise WrongError(complaint)
    del produced
    others = _peers(bench, call, judge)
    del judge
    turns: dict[str, Any] = {"turns": options.turns, "times": options.times, "flush": bench.flush}
    timings = timing.interleave(bench.timer, [subject, *others], **turns)
    found = [
        rows.measured(
            case if name == subject.name else peers.case_of(case),
            *(bench.op, name, taken, bench.provenance),
        )
        | {"l2": "cold" if options.cold else "warm"}
        for name, taken in timings.items()
    ]
    for row, one in zip(found, (subject, *others), strict=True):
        if (memory := getattr(one.launch, "memory_mib", None)) is not None:
            row["memory_mib"] = memory
    found[0]["first_call_s"] = round(first_call, 3)
    found[0]["config"] = {one.kernel: dataclasses.asdict(one.config) for one in ran}
    del subject, others, call
    gc.collect()
    peers.release()
    return found


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


def _peers(bench: Bench, call: peers.Call, judge: "Judge") -> list[Subject]:
    """Those that are here and right, each at its fastest; why not, said in a line."""
    table = peers.PEERS[bench.op]
    found = []
    for name in wanted_peers(bench.op, bench.options.peers):
        try:
            candidates = [one for one in table[name](call) if _is_right(bench, one, judge)]
        except Exception as error:  # a peer may fail in any way it likes
            bench.say_once(f"      {name}: {first_line(error)}")
            continue
        if candidates:
            found.append(timing.quickest(bench.timer, candidates))
    return found


def _is_right(bench: Bench, candidate: Subject, judge: "Judge") -> bool:
    produced = candidate.launch()
    candidate.wait(produced)
    complaint = judge(candidate, produced)
    if complaint:
        bench.say(f"      {candidate.name}: left out, {complaint}")
    return complaint is None


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
