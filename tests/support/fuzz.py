"""Random problems for every implementation, with run-time inputs in and out of range, against the
oracle of the tests: what `pytest -m fuzz` runs.

A problem is one word, `attention/gpu:123`: what is called, where, and the seed that everything
follows from. Where it was made simpler after it failed, the changed fields follow, as in
`attention/gpu:123:softcap=None,batch=1`. Several rounds of inputs (lengths, offsets, segments,
numbers) go through the programs of a problem, since those take most of the time.
"""

import collections
import contextlib
import dataclasses
import functools
import random
import re
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import device, gpu_specs
from pallas_attn.masks import FULL, Mask
from tests.support import budget, hard_data, subjects
from tests.support.problems import case as _case
from tests.support.problems import cases
from tests.support.subjects import Subject

LEAST, MOST = -(2**31), 2**31 - 1
FARTHEST = 2**29  # largest position of a query
ELEMENTS = 2**19  # scores: what the oracle takes a tenth of a second for
SHRINKING = 60  # seconds that making a failed problem simpler may take
KEPT = 12  # problems after which compiled programs are forgotten


@dataclasses.dataclass
class Tally:
    """Counts of problems and calls, and the failures."""

    problems: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    calls: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    rounds: int = 0  # inputs that went through the programs of a problem
    vague: int = 0  # results whose budget is too wide to prove much
    failures: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        of = [f"{count} {name}" for name, count in sorted(self.problems.items())]
        by = [f"{count} by {name}" for name, count in sorted(self.calls.items())]
        inputs = f"{self.rounds} rounds of inputs"
        return f"{', '.join(of)}; {inputs}; calls: {', '.join(by)}; {self.vague} vague budgets"


@dataclasses.dataclass(frozen=True)
class Place:
    """The implementations that run problems, and the number of rounds."""

    subjects: tuple[Subject, ...]
    rounds: int  # at least
    most: int = 40  # rounds
    share: float = 1.0  # time of later rounds, in that of the first
    exact: bool = False  # `rounds` and no more of them
    tiny: bool = False  # small problems, since a call takes seconds
    lowered: tuple[str, ...] = ()  # GPU generations for which kernels are only lowered
    # Fields that calls of attention get, so that a kernel of few sizes takes them.
    fields: tuple[tuple[str, Any], ...] = ()

    def active(self) -> contextlib.AbstractContextManager[None]:
        """The context in which caches are made and used."""
        return self.subjects[0].active() if self.subjects else contextlib.nullcontext()


_BY_NAME = {row.name: row for row in subjects.ROWS}
PLACES = {
    "cpu": Place((_BY_NAME["reference"],), 3, exact=True),
    "interpreted": Place((_BY_NAME["interpreted"],), 1, exact=True, tiny=True),
    "portable": Place((_BY_NAME["portable"],), 1, exact=True, tiny=True),
    "blackwell": Place(
        (Subject("blackwell", "sm100", generation="sm100"),),
        1,
        exact=True,
        tiny=True,
        fields=(("dtype", "bfloat16"), ("precision", None), ("head_dim", 64), ("v_head_dim", 64)),
    ),
    "lowered": Place((), 1, lowered=("sm90", "sm80", "sm90", "sm86", "sm90", "sm89", "sm100")),
    "gpu": Place(
        tuple(_BY_NAME[name] for name in ("kernels", "portable_kernels", "reference_on_gpu")),
        rounds=6,
        most=100,
        share=2.0,
    ),
}
# In turn: of eight problems on a CPU two take kernels.
ON_CPU = ("cpu", "cpu", "lowered", "cpu", "cpu", "cpu", "interpreted", "cpu") * 3 + (
    *("cpu", "cpu", "lowered", "cpu", "cpu", "cpu", "portable", "cpu"),
    *("cpu", "cpu", "lowered", "cpu", "cpu", "cpu", "blackwell", "cpu"),
)
ON_GPU = ("gpu",)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of problem."""

    draw: Callable[[int, bool], Any]  # (seed, whether it is to be tiny) -> case
    run: Callable[[Any, Place, Tally], None]  # an error says what is wrong
    simpler: Callable[[Any], Iterator[dict[str, Any]]]  # fields that make the case simpler


# ---- attention -----------------------------------------------------------------------------------


def draw_attention(seed: int, tiny: bool) -> _case.AttentionCase:
    case, pick = cases.draw_attention(seed), random.Random(f"fuzz {seed}")
    dtype = pick.choice((case.dtype, case.dtype, case.dtype, "float32"))
    odd = pick.choice((4, 20, 36, 100))
    case = dataclasses.replace(
        case,
        dtype=dtype,
        precision=pick.choice((None, "highest")) if dtype == "float32" else None,
        deterministic=pick.random() < 0.25,
        magnitude=pick.choice((1.0, 1.0, 1.0, 0.05, 3.0)),
        **_drawn_dims(case, odd, pick),
        bias_dtype=pick.choice(("float32", "bfloat16", "float16")),
    )
    if tiny:
        sizes = {"q_len": pick.choice((1, 17, 40, 65)), "kv_len": pick.choice((1, 17, 40, 70))}
        dims = {"head_dim": min(case.head_dim, 64), "v_head_dim": min(case.v_head_dim, 64)}
        case = resized(dataclasses.replace(case, **dims), batch=2, kv_heads=1, **sizes)
    for small in ({"kv_heads": 1}, {"batch": 1}, {"q_len": 129}, {"q_heads": 1}):
        if case.batch * case.q_heads * case.q_len * case.kv_len > ELEMENTS:
            case = resized(case, **small)
    return dataclasses.replace(case, **_drawn_rotary(case, random.Random(f"rotary {seed}")))


def _drawn_dims(case: _case.AttentionCase, odd: int, pick: random.Random) -> dict[str, int]:
    """Head dims that no kernel takes as they are, or wide ones, now and then."""
    chance = pick.random()
    if chance > 0.95:
        dims = (264, 320, 512, 512)
        return {"head_dim": pick.choice(dims), "v_head_dim": pick.choice((64, *dims))}
    return {"head_dim": odd} if chance < 0.1 else {}


def _drawn_rotary(case: _case.AttentionCase, pick: random.Random) -> dict[str, Any]:
    """Columns that are rotated, if any; positions of their own where offsets have no table's."""
    if pick.random() < 0.75:
        return {}
    dims = 2 * pick.randint(1, min(case.head_dim, 64) // 2)
    first = pick.choice((0, 0, min(case.head_dim, 64) - dims))
    on_rows = isinstance(case.q_offset, int) and case.q_offset >= 0
    return {
        "rotary": (first, dims, pick.random() < 0.5),
        "rotary_positions": not on_rows or pick.random() < 0.3,
    }


def resized(case: _case.AttentionCase, **sizes: int) -> _case.AttentionCase:
    """The case at other sizes, none larger than its own; query heads go with their kv heads."""
    sizes = {name: min(size, getattr(case, name)) for name, size in sizes.items()}
    if "q_heads" not in sizes:
        group = case.q_heads // case.kv_heads
        sizes["q_heads"] = group * sizes.get("kv_heads", case.kv_heads)
    else:
        sizes["kv_heads"] = 1
    new = dataclasses.replace(case, **sizes)
    scores = (new.batch, new.q_heads, new.q_len, new.kv_len)
    changes: dict[str, Any] = {}
    for name in ("bias_shape", "mask_shape"):
        if (shape := getattr(case, name)) is not None:
            changes[name] = tuple(min(pair) for pair in zip(shape, scores, strict=True))
    for name, most in (("q_lengths", new.q_len), ("kv_lengths", new.kv_len)):
        if (lengths := getattr(case, name)) is not None:
            changes[name] = tuple(min(n, most) for n in lengths[: new.batch])
    if not isinstance(case.q_offset, int):
        changes["q_offset"] = case.q_offset[: new.batch]
    return dataclasses.replace(new, **changes)


def _edges(rng: np.random.Generator, size: int, end: int) -> np.ndarray:
    """int32: some within 0 .. end, some at its edges, some anywhere."""
    edges = [LEAST, -1, 0, 1, end - 1, end, end + 1, end + 70, MOST]
    within = rng.integers(0, end + 1, size)
    chosen = np.where(rng.random(size) < 0.5, rng.choice(edges, size), within)
    return chosen.astype(np.int32)


def attention_inputs(case: _case.AttentionCase, turn: int) -> tuple[dict, dict]:
    """Inputs of the call, and those of the oracle: all in range, and finite past every length. Both
    with `do` and `dlse`.
    """
    rng = np.random.default_rng((turn, case.batch, case.q_len, case.kv_len))
    raw: dict[str, np.ndarray] = {}
    held: dict[str, Any] = {}
    for name, end in (("q_lengths", case.q_len), ("kv_lengths", case.kv_len)):
        if turn and getattr(case, name) is not None:
            raw[name] = _edges(rng, case.batch, end)
            held[name] = tuple(raw[name].clip(0, end).tolist())
    if turn and not isinstance(case.q_offset, int):
        edges = [LEAST, -FARTHEST - 1, -case.q_len, case.kv_len, FARTHEST + 1, MOST]
        near = rng.integers(-case.q_len, case.kv_len + 1, case.batch)
        chosen = np.where(rng.random(case.batch) < 0.3, rng.choice(edges, case.batch), near)
        raw["q_offset"] = chosen.astype(np.int32)
        held["q_offset"] = tuple(chosen.clip(-FARTHEST, FARTHEST).tolist())
    case = dataclasses.replace(case, **held)
    plain, handed = (case.arrays(turn, poison=poison) for poison in (False, True))
    do, dlse = subjects.cotangents(case, turn)
    plain |= {"do": do, "dlse": dlse}
    handed |= {
        "do": _case._poison(do, case.q_lengths, axis=1),
        "dlse": _case._poison(dlse, case.q_lengths, axis=2),
    }
    for arrays in (plain, handed):
        if "segment_ids" in arrays and turn % 2:  # ids at both ends of int32
            far = np.arange(64, dtype=np.int32)
            far[:4] = LEAST, MOST, -1, 0
            arrays["segment_ids"] = tuple(jnp.asarray(far[x]) for x in arrays["segment_ids"])
        if "sinks" in arrays and turn % 3 == 1:
            arrays["sinks"] = jnp.asarray(hard_data.sinks_without_end(arrays["sinks"]))
        if "bias" in arrays and turn % 3 == 2:
            hidden = np.random.default_rng(turn).random(arrays["bias"].shape) < 0.2
            arrays["bias"] = jnp.where(hidden, -jnp.inf, arrays["bias"])
    return handed | {name: jnp.asarray(x) for name, x in raw.items()}, plain


def run_attention(case: _case.AttentionCase, place: Place, tally: Tally) -> None:
    options = {name: x for name, x in case.options().items() if x is not None}
    function = subjects.forward_and_backward
    if place.lowered:
        with pretended(case, place) as generation:
            arguments = attention_inputs(case, 0)[0] | options
            lower("flash_backward", function, arguments, generation, tally)
        return
    for turn in turns(place, tally):
        handed, plain = attention_inputs(case, turn)
        arguments = handed | options
        expected = functools.cache(functools.partial(attention_expected, plain, options))
        for subject in place.subjects:
            if takes(subject, "flash_backward", function, arguments):
                _try_attention(subject, arguments, expected, turn, tally)


def _try_attention(
    subject: Subject, arguments: dict, expected: Any, turn: int, tally: Tally
) -> None:
    tally.calls[subject.name] += 1
    function = subjects.forward_and_backward
    with by(subject, turn):
        got = subject.call(function, **arguments)
        check(got, functools.partial(expected, subject.tensor_cores), tally)
        if turn == 0 and subject.marks:
            again = subject.call(function, **arguments)
            names = got if arguments.get("deterministic") else ("out", "lse")
            same_bits([got[name] for name in names], [again[name] for name in names])


def attention_expected(
    plain: dict,
    options: dict,
    tensor_cores: bool,
    grids: tuple[float, ...],
    **how: Any,
) -> budget.Expected:
    arguments = plain | {name: x for name, x in options.items() if name != "deterministic"}
    do, dlse = arguments.pop("do"), arguments.pop("dlse")
    with np.errstate(all="ignore"):
        return budget.attention(
            arguments, do, dlse, tensor_cores=tensor_cores, random=True, grids=grids, **how
        )


def simpler_attention(case: _case.AttentionCase) -> Iterator[dict[str, Any]]:
    plain = {"softcap": None, "sinks": False, "bias_shape": None, "mask_shape": None}
    plain |= {"segments": None, "q_lengths": None, "kv_lengths": None, "q_offset": 0}
    plain |= {"scale": None, "mask": FULL, "deterministic": False, "magnitude": 1.0}
    plain |= {"rotary": None}
    plain |= {"precision": None, "dtype": "bfloat16", "head_dim": 64, "v_head_dim": 64}
    yield from ({name: value} for name, value in plain.items())
    small = ({"batch": 1}, {"kv_heads": 1}, {"q_heads": 1})
    halves = ({"q_len": case.q_len // 2}, {"kv_len": case.kv_len // 2})
    for sizes in (*small, *halves):
        if min(sizes.values()) > 0:
            yield vars(resized(case, **sizes))


# ---- attention under vmap ------------------------------------------------------------------------

MAPPED = 2  # calls that are mapped together


def draw_mapped(seed: int, tiny: bool) -> _case.AttentionCase:
    return dataclasses.replace(draw_attention(seed, tiny), rotary=None, rotary_positions=False)


def _mapped(*, implementation: str | None, **arguments: Any) -> dict[str, Any]:
    static, arrays = subjects.split(arguments)
    call = functools.partial(subjects.forward_and_backward, implementation=implementation, **static)
    return jax.vmap(lambda arrays: call(**arrays))(arrays)


def run_mapped(case: _case.AttentionCase, place: Place, tally: Tally) -> None:
    """Calls with all arrays of their own, as one; each has the results that it has alone."""
    options = {name: x for name, x in case.options().items() if x is not None}
    for turn in range(1) if place.lowered else turns(place, tally):
        both = [attention_inputs(case, MAPPED * turn + n) for n in range(MAPPED)]
        handed = jax.tree.map(lambda *x: jnp.stack(x), *(handed for handed, _ in both))
        arguments = handed | options
        if place.lowered:
            with pretended(case, place) as generation:
                lower("flash_backward", _mapped, arguments, generation, tally)
            return
        alone = [functools.partial(attention_expected, plain, options) for _, plain in both]
        for subject in place.subjects:
            if takes(subject, "flash_backward", _mapped, arguments):
                _try_mapped(subject, arguments, alone, turn, tally)


def _try_mapped(
    subject: Subject, arguments: dict, alone: list[Any], turn: int, tally: Tally
) -> None:
    tally.calls[subject.name] += 1
    with by(subject, turn):
        got = subject.call(_mapped, **arguments)
        for n, expected in enumerate(alone):
            some = {name: x[n] for name, x in got.items()}
            check(some, functools.partial(expected, subject.tensor_cores), tally)


# ---- shared by all kinds -------------------------------------------------------------------------


def turns(place: Place, tally: Tally) -> Iterator[int]:
    """The rounds of a problem, each with other inputs: for as long as its first one took, which
    compiles its programs.
    """
    begun = time.monotonic()
    for turn in range(place.rounds if place.exact else place.most):
        tally.rounds += 1
        yield turn
        if turn == 0:
            compiled = time.monotonic()
            end = compiled + place.share * (compiled - begun)
        elif turn + 1 >= place.rounds and time.monotonic() > end:
            return


class WrongResultError(AssertionError):
    """A wrong result of one implementation."""


@contextlib.contextmanager
def by(subject: Subject, turn: int) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise WrongResultError(f"{subject.name}, round {turn}: {error}") from error


def check(got: dict[str, Any], expected: Callable[..., budget.Expected], tally: Tally) -> None:
    """Everything within its budget, also where that is wide; `expected(grids=...)` is by so many
    naive runs.
    """
    try:
        _check(got, expected(grids=budget.GRIDS), tally)
    except AssertionError:  # some of many calls are farther off than a few naive runs
        _check(got, expected(grids=budget.MANY_GRIDS), tally)


def _check(got: dict[str, Any], expected: budget.Expected, tally: Tally) -> None:
    for name, value in got.items():
        try:
            budget.check({name: value}, expected)
        except budget.VacuousError:
            tally.vague += 1


def same_bits(first: Any, other: Any) -> None:
    for have, want in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        have, want = (np.ascontiguousarray(x).view(np.uint8) for x in (have, want))
        assert (have == want).all(), "not the same bits the second time"


def takes(subject: Subject, operation: str, function: Any, arguments: dict[str, Any]) -> bool:
    if subject.implementation == "reference":
        return True
    return subject.takes(operation, function, **arguments)


@contextlib.contextmanager
def pretended(case: Any, place: Place) -> Iterator[str]:
    """A GPU generation for a case; caches that are made in here are made for it."""
    generation = place.lowered[zlib.crc32(str(case).encode()) % len(place.lowered)]
    with device.assume(generation):
        yield generation


def lower(
    operation: str,
    function: Any,
    arguments: dict[str, Any],
    generation: str,
    tally: Tally,
    also: dict[str, Any] | None = None,
) -> None:
    """By every kernel of that generation that takes the call; and another one, `also`, which the
    first comes to make.
    """
    static, arrays = subjects.split(arguments)
    for name in ("sm90", "sm80"):
        subject = Subject("lowered", name, generation)
        calls = (arguments,) if also is None else (arguments, also)
        if not all(subject.takes(operation, function, **each) for each in calls):
            continue
        call = functools.partial(function, implementation=name, **static)
        lowered(lambda arrays, call=call: call(**arrays), arrays, generation)
        tally.calls[f"lowering for {generation}"] += 1


def lowered(call: Callable[..., Any], arrays: dict[str, Any], generation: str) -> None:
    """Lowers a call for a GPU with the shared memory of that generation."""
    from tests.support import mosaic

    room = gpu_specs.shared_memory(generation)
    assert "mosaic_gpu" in mosaic.lower_for_cuda(call, arrays, smem_bytes=room)


# ---- problems ------------------------------------------------------------------------------------


def kinds() -> dict[str, Kind]:
    from tests.support import (
        fuzz_cache_cases,
        fuzz_caches,
        fuzz_derivatives,
        fuzz_float8,
        fuzz_listed,
        fuzz_positions,
        fuzz_prefill,
        fuzz_ragged,
        pairs,
        shared_memory,
    )

    return {
        "attention": Kind(draw_attention, run_attention, simpler_attention),
        "cache": Kind(fuzz_cache_cases.draw, fuzz_caches.run, fuzz_cache_cases.simpler),
        "functions": Kind(fuzz_positions.draw, fuzz_positions.run, fuzz_positions.simpler),
        "packed": Kind(
            fuzz_positions.draw_rows, fuzz_positions.run_rows, fuzz_positions.simpler_rows
        ),
        "listed": Kind(fuzz_listed.draw, fuzz_listed.run, fuzz_listed.simpler),
        "ragged": Kind(fuzz_ragged.draw, fuzz_ragged.run, fuzz_ragged.simpler),
        "float8": Kind(fuzz_float8.draw, fuzz_float8.run, fuzz_float8.simpler),
        "rounding": Kind(
            fuzz_float8.draw_rounding, fuzz_float8.run_rounding, fuzz_float8.simpler_rounding
        ),
        "tangents": Kind(
            fuzz_derivatives.draw_tangents,
            fuzz_derivatives.run_tangents,
            fuzz_derivatives.simpler_tangents,
        ),
        "second": Kind(
            fuzz_derivatives.draw_second,
            fuzz_derivatives.run_second,
            fuzz_derivatives.simpler_tangents,
        ),
        "learned": Kind(
            fuzz_derivatives.draw_learned,
            fuzz_derivatives.run_learned,
            fuzz_derivatives.simpler_learned,
        ),
        "prefill": Kind(fuzz_prefill.draw, fuzz_prefill.run, fuzz_prefill.simpler),
        "mapped": Kind(draw_mapped, run_mapped, simpler_attention),
        "pairs": Kind(pairs.draw, pairs.run, lambda case: iter(())),
        "memory": Kind(shared_memory.draw, shared_memory.run, shared_memory.simpler),
    }


def parsed(word: str) -> tuple[Kind, Place, Any]:
    """The kind, the place and the case that a word says."""
    head, seed, *changes = word.split(":", 2)
    name, where = head.split("/")
    kind, place = kinds()[name], PLACES[where]
    if int(seed) % 8 > 1:  # it is the slowest, and the oracle is another
        some = tuple(subject for subject in place.subjects if subject.name != "reference_on_gpu")
        place = dataclasses.replace(place, subjects=some)
    case = kind.draw(int(seed), place.tiny)
    if type(case) is _case.AttentionCase:
        case = dataclasses.replace(case, **dict(place.fields))
    if changes:
        fields = eval(f"dict({changes[0]})", {"Mask": Mask})  # fields as written by `word_of`
        if "rounds" in fields:
            place = dataclasses.replace(place, rounds=fields.pop("rounds"), exact=True)
        case = dataclasses.replace(case, **fields)
    return kind, place, case


def word_of(head: str, place: Place, case: Any) -> str:
    """`head` with what differs from the case that it says."""
    _, usual, drawn = parsed(head)
    changed = [
        f"{f.name}={getattr(case, f.name)!r}"
        for f in dataclasses.fields(case)
        if f.init and getattr(case, f.name) != getattr(drawn, f.name)
    ]
    if place.rounds != usual.rounds:
        changed.append(f"rounds={place.rounds}")
    return ":".join([head, *([",".join(changed)] if changed else [])])


def attempt(word: str, tally: Tally) -> str | None:
    """Runs a problem: None, or what is wrong with it."""
    kind, place, case = parsed(word)
    return _attempt(kind, place, case, tally)


def _attempt(kind: Kind, place: Place, case: Any, tally: Tally) -> str | None:
    try:
        kind.run(case, place, tally)
    except Exception as error:  # whatever it is, a problem that is drawn is a valid one
        where = "" if isinstance(error, WrongResultError) else f" at {_last_line(error)}"
        return f"{type(error).__name__}: {str(error).strip()[:600]}{where}"
    return None


def prove(
    run: Callable[[Any, Place, Tally], None], case: Any, subject: Subject, rounds: int = 1
) -> None:
    """Rounds of a problem by one implementation that takes it; no budget is vacuous."""
    tally = Tally()
    run(case, Place((subject,), rounds, exact=True), tally)
    assert tally.calls[subject.name] == rounds and not tally.vague


def _last_line(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def shrunk(word: str, wrong: str, seconds: float) -> tuple[str, str]:
    """The word of a simpler problem that fails, too, if one is found in time, and what is wrong
    with that.
    """
    kind, place, case = parsed(word)
    end = time.monotonic() + seconds
    failed = re.search(r", round (\d+):", wrong)
    rounds = max(place.rounds, int(failed[1]) + 1 if failed else 1)
    place = dataclasses.replace(place, rounds=rounds, exact=rounds > place.rounds)
    progress = True
    while progress:
        progress = False
        for fields in kind.simpler(case):
            simpler = dataclasses.replace(case, **fields_of(case, fields))
            if simpler == case:
                continue
            if time.monotonic() > end:
                break
            if (still := _attempt(kind, place, simpler, Tally())) is not None:
                case, wrong, progress = simpler, still, True
    return word_of(word, place, case), wrong


def fields_of(case: Any, values: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(case)}
    return {name: value for name, value in values.items() if name in names}


def command(word: str) -> str:
    """The line that runs one problem again."""
    marks = "fuzz and gpu" if "/gpu:" in word else "fuzz"
    return f"python -m pytest -m '{marks}' --case=\"{word}\""  # names in a word are in '


def run(
    places: tuple[str, ...],
    *,
    seed: int = 0,
    seconds: float | None = None,
    most: int | None = None,
    first: int = 0,
    step: int = 1,
) -> Tally:
    """Problems `first`, `first + step`, ... of a seed, until the time is over or `most` of them are
    done. What fails is made simpler, written down, and the next one is tried.
    """
    tally, index, end = Tally(), first, time.monotonic() + (seconds or 0)
    while (most is None or index < first + most * step) and (
        seconds is None or time.monotonic() < end
    ):
        names = tuple(kinds())
        name, turn = names[index % len(names)], index // len(names)
        word = f"{name}/{places[turn % len(places)]}:{seed * 2**24 + index}"
        print(word, file=sys.stderr, flush=True)  # noqa: T201 - what a deadlock ends says where
        tally.problems[name] += 1
        wrong = attempt(word, tally)
        if wrong is not None:
            word, wrong = shrunk(word, wrong, min(SHRINKING, (seconds or SHRINKING) / 3))
            tally.failures.append(f"{command(word)}\n    {wrong}")
            print(tally.failures[-1], file=sys.stderr, flush=True)  # noqa: T201
        index += step
        if index // step % KEPT == 0:
            forget()
    return tally


def forget() -> None:
    """Compiled programs fill a process: they are those of problems that are over."""
    subjects.forget()
    jax.clear_caches()
