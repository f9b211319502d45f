"""Calls in which any two values of two options that a kernel takes together meet, for each row of
tests/support/kernels.py. Options are fields of a case and of a Config; what goes together is what
the kernel's `limit` and its Config say.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pallas_attn._call import device
from pallas_attn._call.config import fits
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.kernels.decode_listed import test_decode_listed
from tests.kernels.decode_mla import test_decode_mla
from tests.support import decode_cases, kernels
from tests.support.problems.case import AttentionCase

Value = Mapping[str, Any]  # fields of the case, or of the Config
Options = Mapping[str, tuple[Value, ...]]
Choice = dict[str, int]  # the number of a value, by option
Pair = frozenset[tuple[str, int]]

TILE = 64
WINDOWS = (8, 127, 128, 129)  # both sides of the widest that kernels for short ones take
NUMBERS = (0, 1, 2, 3, 4, 16, 32, TILE, 96, 128)  # values for an integer of a Config
OF_BLOCKS = (1, 3)  # blocks are simulated one after the other
FIRST = 2  # calls of a kernel that the suite runs; `-m fuzz` draws others
TRIES = 4  # orders in which options are chosen around a pair


def _each(name: str, *values: Any) -> tuple[Value, ...]:
    return tuple({name: value} for value in values)


def _together(names: str, *rows: tuple[Any, ...]) -> tuple[Value, ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


DTYPES = _together(
    "dtype precision",
    *(("bfloat16", None), ("float16", None), ("float32", None), ("float32", "highest")),
)
ATTENTION: Options = {
    "dtype": DTYPES,
    "mask": _each("mask", FULL, CAUSAL, Mask(70, 20), *map(sliding_window, WINDOWS)),
    "rows": _together("q_len kv_len", (70, 130), (64, 128), (1, 129), (77, 77)),
    "dims": _together(
        "head_dim v_head_dim", (64, 64), (72, 40), (24, 88), (128, 128), (136, 64), (264, 264)
    ),
    "heads": _together("q_heads kv_heads", (2, 2), (2, 1), (8, 1)),
    "softcap": _each("softcap", None, 3.0),
    "sinks": _each("sinks", False, True),
    "scale": _each("scale", None, -0.1),
    "offset": _each("q_offset", 0, 60, (-3, 60)),
    "q_lengths": _each("q_lengths", None, (63, 1)),
    "kv_lengths": _each("kv_lengths", None, (TILE, 129)),
    "segments": _each("segments", None, 3),
    "bias": _together(
        "bias_shape bias_dtype",
        *((None, "float32"), ((1, 1, 1, -1), "bfloat16"), ((2, -1, -1, -1), "float32")),
    ),
    "mask_array": _each("mask_shape", None, (2, 1, 1, -1), (1, -1, -1, -1)),
}
ROWS = (0, 1, TILE - 1, TILE + 1, 200)
BY_KEYS = (lambda b, h, q, kv: (h + 1) * -0.01 * kv,)  # rows before the first key see some, too
CACHES: Options = {
    "dtype": DTYPES,
    "cache": _together(
        "kind page_size layers",
        *(("stacked", 16, None), ("per_sequence", 16, 2), ("paged", 8, 2), ("paged", TILE, None)),
    ),
    "mask": _each("mask", CAUSAL, FULL, sliding_window(100), Mask(90, 2)),
    "lengths": _together("lengths capacity", (ROWS, 208), ((130, 3), 192), ((640,), 640)),
    "q_len": _each("q_len", 1, 2, 5, 20),
    "heads": _together("q_heads kv_heads", (2, 2), (4, 1), (6, 2), (16, 1), (40, 1)),
    "dims": _together(
        "head_dim v_head_dim",
        *((64, 64), (72, 40), (128, 128), (192, 128), (200, 112), (264, 264), (576, 512)),
    ),
    "softcap": _each("softcap", None, 3.0),
    "sinks": _each("sinks", False, True),
    "batch_invariant": _each("batch_invariant", False, True),
    "hides": _each("hides", None, "tree"),
    "adds": _each("adds", (), BY_KEYS),
}


def _config_options(config: Any) -> Options:
    """Values of the fields of a flat Config. A value that it does not take is left out later."""
    if not dataclasses.is_dataclass(config):
        return {}
    options = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool):
            options[field.name] = _each(field.name, False, True)
        elif isinstance(value, int):
            numbers = set(OF_BLOCKS) if field.name == "grid" else {*NUMBERS, value}
            options[field.name] = _each(field.name, *sorted(numbers))
    return options


@dataclasses.dataclass(frozen=True, eq=False)
class Space:
    """The calls of a kernel: `takes(case, config)`, and a case and a Config to begin with."""

    takes: Callable[[Any, Any], bool]
    case: Any
    config: Any

    @functools.cached_property
    def options(self) -> Options:
        """Without values that nothing goes with. Of the numbers that a field of the Config may
        have beside the others of `config`, the least, the most and the one that it has.
        """
        of_case = ATTENTION if isinstance(self.case, AttentionCase) else CACHES
        known = {field.name for field in dataclasses.fields(self.case)}
        options = {n: x for n, x in of_case.items() if set(x[0]) <= known}
        if hasattr(self.case, "listed"):  # its oracle knows no mask functions, and less of float32
            options |= {"dtype": DTYPES[:2], "hides": CACHES["hides"][:1]}
            options |= {"q_len": CACHES["q_len"][:2]}  # which computes row by row
        for name, values in _config_options(self.config).items():
            some = [x for x in values if self._serves(x)]
            own = {name: getattr(self.config, name)}
            ends = [x for x in some if x in (some[0], own, some[-1])]
            options[f"config.{name}"] = tuple(ends)
        return options

    def _serves(self, value: Value) -> bool:
        try:
            return self.takes(self.case, dataclasses.replace(self.config, **value))
        except ValueError:
            return False

    def call(self, choice: Choice) -> tuple[Any, Any]:
        """The case and the Config; ValueError for a Config that says no."""
        case, config = {}, {}
        for name, number in choice.items():
            (config if name.startswith("config.") else case).update(self.options[name][number])
        changed = dataclasses.replace(self.case, **case)
        if isinstance(changed, AttentionCase):
            changed = _sized(changed)
        if config:
            return changed, dataclasses.replace(self.config, **config)
        return changed, self.config

    def allows(self, choice: Choice) -> bool:
        try:
            return self.takes(*self.call(choice))
        except ValueError:
            return False

    def calls(self, seed: int = 0) -> Iterator[tuple[Any, Any]]:
        """Calls in which every pair of values that goes with the base occurs, as many new pairs in
        each as some tries find.
        """
        pick = random.Random(seed)
        values = {name: range(len(x)) for name, x in self.options.items()}
        pairs = [
            frozenset(((a, i), (b, j)))
            for a, b in itertools.combinations(values, 2)
            for i, j in itertools.product(values[a], values[b])
        ]
        pick.shuffle(pairs)
        left = set(pairs)
        for pair in pairs:
            if pair not in left or not self.allows(dict(pair)):
                continue
            best = max(
                (self._around(pair, left, pick) for _ in range(TRIES)),
                key=lambda x: len(_pairs_of(x) & left),
            )
            left -= _pairs_of(best)
            yield self.call(best)

    def _around(self, pair: Pair, left: set[Pair], pick: random.Random) -> Choice:
        choice = dict(pair)
        for name in pick.sample(list(self.options), len(self.options)):
            if name not in choice:
                self._add(choice, name, range(len(self.options[name])), left, pick)
        return choice

    def _add(
        self, choice: Choice, name: str, values: range, left: set[Pair], pick: random.Random
    ) -> None:
        """The value that meets most pairs which are left, of those that go with the others."""

        def new(number: int) -> int:
            return sum(frozenset(((name, number), x)) in left for x in choice.items())

        for number in sorted(values, key=lambda x: (-new(x), pick.random())):
            if self.allows(choice | {name: number}):
                choice[name] = number
                return


@functools.cache
def space_of(module: str) -> Space:
    """The calls of a kernel, around its first one on hard data."""
    row = kernels.named(module)
    case, config = next(iter(row.hard.values()))
    if isinstance(case, AttentionCase):
        alone = {"batch": 2, "q_offset": 0, "q_lengths": None, "kv_lengths": None}
        case = kernels.remade(AttentionCase, case, **alone)
    else:
        hard = kernels.HardDecode, kernels.HardLatent, kernels.HardListed
        plain = decode_cases.Case, test_decode_mla.Case, test_decode_listed.Case
        kinds = dict(zip(hard, plain, strict=True))
        case = kernels.remade(kinds.get(type(case), type(case)), case)

    def takes(case: Any, config: Any) -> bool:
        problem, kernel = kernels.problem_of(row, case), row.kernel
        # Two kernels for latent rows have one Config, and the number of rows chooses.
        slower = row.candidate.slower if module.startswith("decode_mla") else lambda _: None
        if kernel.limit(problem) is not None or slower(problem) is not None:
            return False
        return not dataclasses.is_dataclass(config) or fits(kernel, problem, config)

    return Space(takes, case, config)


# ---- problems of the fuzzer ----------------------------------------------------------------------

MODULES = tuple(row.module for row in kernels.KERNELS if "pairs" not in row.lacks)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a kernel: the first of a seed."""

    module: str
    seed: int


def draw(seed: int, tiny: bool) -> Call:
    del tiny
    return Call(MODULES[random.Random(f"pairs {seed}").randrange(len(MODULES))], seed)


def run(drawn: Call, place: Any, tally: Any) -> None:
    """On a GPU, or interpreted wherever else a kernel runs; the reference has no kernels."""
    row = kernels.named(drawn.module)
    subject = next((x for x in place.subjects if x.implementation != "reference"), None)
    if subject is None or not (subject.generation or row.runs_on(device.gpu_generation())):
        return
    tally.calls[drawn.module] += 1
    with subject.active():
        row.check(*next(space_of(drawn.module).calls(drawn.seed)))


def _pairs_of(choice: Choice) -> set[Pair]:
    return set(map(frozenset, itertools.combinations(choice.items(), 2)))


def _sized(case: AttentionCase) -> AttentionCase:
    """Shapes and lengths that fit the case's sizes."""
    sizes = np.array([case.batch, case.q_heads, case.q_len, case.kv_len])
    changes: dict[str, Any] = {}
    for name in ("bias_shape", "mask_shape"):
        if (shape := getattr(case, name)) is not None:
            changes[name] = tuple(np.where(np.array(shape) == 1, 1, sizes).tolist())
    for name, most in (("q_lengths", case.q_len), ("kv_lengths", case.kv_len)):
        if (lengths := getattr(case, name)) is not None:
            changes[name] = tuple(min(n, most) for n in lengths)
    return dataclasses.replace(case, **changes)
