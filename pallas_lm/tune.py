"""`pallas-attn tune`: looks for Configs of kernels that are faster on this GPU than their own.

First Configs run that differ from the kernel's own in one field, then the best of them in pairs
(`pallas_attn.tuning`): each in a process under a time limit, in turns with the kernel's own. A
result has to agree with that. The best is timed again, with more turns, and is kept in a file if it
is still more than 5 % faster: the fastest of many is partly the luckiest.

Times are wall time of batches of launches. A call that takes the GPU less time than a launch takes
the host shows no difference, and keeps the default.
"""

import dataclasses
import functools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn
from pallas_attn import tuning
from pallas_attn.masks import Mask
from pallas_attn.tuning import Fields
from pallas_lm import gpu_check, machine
from pallas_lm.gpu_check import OK, WRONG
from pallas_lm.presets import PRESETS

GAIN = 1.05  # a Config is kept where the default takes longer by more than this factor
TURNS, TURNS_OF_THE_BEST = 8, 24
BEST = 4  # fields whose best values are tried in pairs
BATCH_US = 10_000.0  # time of the launches of a batch, at least
NOISE = 64 * float(np.finfo(np.float32).eps)  # rounding of terms that cancel to 0
TF32 = 2.0**-10  # a rounding of what matmuls of float32 read
PASSES = {
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "decode": ("decode",),
    "prefill": ("prefill",),
}
# Rows, and keys of a cache, that models by name are tuned for, by pass.
_SIZES = {"forward": (1, 4096, 4096), "decode": (32, 1, 4096), "prefill": (1, 1024, 8192)}

Results = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The calls, and how to time them."""

    op: str = "forward"
    shape: tuple[str, ...] = ()
    model: str | None = None
    mask: str = "causal"
    dtype: str = "bfloat16"
    implementation: str | None = None
    seed: int = 0
    limit: int = 120  # seconds of a Config, jax's start and compilation among them
    gpu: int = 0


class Call(NamedTuple):
    """A pass of a call of attention, whose kernels are tuned."""

    kind: str  # "forward", "backward", "decode" or "prefill"
    shape: tuple[int, ...]  # B, T, N, K, H, S
    settings: Settings

    def __str__(self) -> str:
        sizes = ", ".join(f"{x} {n}" for x, n in zip("BTNKHS", self.shape, strict=True))
        return f"{self.kind}: {sizes}, {self.settings.mask}, {self.settings.dtype}"

    def prepared(self, exact: bool = False) -> tuple[Callable[..., Results], tuple[Any, ...]]:
        """The pass alone, and its arguments; exact: the same numbers in float32, by the oracle."""
        batch, rows, heads, kv_heads, dim, length = self.shape
        how = "reference" if exact else self.settings.implementation
        options: dict[str, Any] = {"mask": mask_of(self.settings.mask), "implementation": how}
        keys = jax.random.split(jax.random.key(self.settings.seed), 4)
        some = (rows, heads), (length, kv_heads), (length, kv_heads), (rows, heads)
        shapes = zip(keys, [(batch, *size, dim) for size in some], strict=True)
        arrays = [jax.random.normal(key, shape, self.settings.dtype) for key, shape in shapes]
        q, k, v, cotangent = [x.astype(jnp.float32) for x in arrays] if exact else arrays
        if self.kind in ("decode", "prefill"):
            cache = pallas_attn.StackedCache.create(batch, length, kv_heads, dim, dtype=k.dtype)
            append = functools.partial(pallas_attn.append_kv, implementation="reference")
            decode = functools.partial(pallas_attn.decode_attention, **options)
            return lambda *some: (decode(*some),), (q, jax.jit(append)(cache, k, v))
        attend = functools.partial(pallas_attn.flash_attention, **options)
        if self.kind == "forward":
            return lambda *some: (attend(*some),), (q, k, v)
        # A jitted function's transposed program, with its kernels, would be kept by jax.
        pullback = jax.vjp(attend, q, k, v)[1]
        return lambda pullback, cotangent: pullback(cotangent), (pullback, cotangent)

    def choices(self, generation: str | None = None) -> list[Any]:
        """The kernels of the pass, with problems and their own Configs, on this GPU or another."""
        op = {"forward": "flash_forward", "backward": "flash_backward"}.get(self.kind, "decode")

        def whole() -> Results:
            function, arguments = self.prepared()
            return function(*arguments)

        return [x for x in tuning.choices(whole, generation) if x.problem.op == op]


def mask_of(name: str) -> Mask:
    if window := re.fullmatch("window:([1-9][0-9]*)", name):
        return pallas_attn.sliding_window(int(window[1]))
    named = {"full": pallas_attn.FULL, "causal": pallas_attn.CAUSAL}
    if name not in named:
        raise ValueError(f"mask: expected full, causal or window:N, as window:1024, got {name!r}")
    return named[name]


def calls_of(settings: Settings) -> list[Call]:
    """The calls that settings name, or those of the models by name."""
    if settings.op not in PASSES:
        raise ValueError(f"op: tune takes {', '.join(PASSES)}, got {settings.op!r}")
    mask_of(settings.mask)
    shapes = [_shape(text, settings.op) for text in settings.shape]
    if settings.shape and settings.model is not None:
        raise ValueError("model: --shape has the sizes; give one of the two")
    if not settings.shape:
        shapes = list(dict.fromkeys(_shapes_of_models(settings)))
    return [Call(kind, shape, settings) for shape in shapes for kind in PASSES[settings.op]]


def _shape(text: str, op: str) -> tuple[int, ...]:
    """B, T, N, K, H, S of a text in which S may be missing where it is T."""
    over_cache = op in ("decode", "prefill")
    sizes = [int(x) if re.fullmatch("[1-9][0-9]*", x) else 0 for x in text.split(",")]
    good = all(sizes) and len(sizes) in ((6,) if over_cache else (5, 6))
    if not good or sizes[2] % sizes[3] or (over_cache and sizes[1] > sizes[5]):
        wanted = "B,T,N,K,H,S, T up to S" if over_cache else "B,T,N,K,H or B,T,N,K,H,S"
        raise ValueError(
            f"shape: expected {wanted}, N a multiple of K (batch, query rows, query heads, kv "
            f"heads, head dim, keys), as 1,64,32,8,128,8192; got {text!r}"
        )
    return tuple([*sizes, sizes[1]][:6])


def _shapes_of_models(settings: Settings) -> Iterator[tuple[int, ...]]:
    """Shapes of the models by name whose heads are of one size."""
    known = {name: x for name, x in PRESETS.items() if "kv_lora_rank" not in x}
    if settings.model not in (None, *known):
        raise ValueError(
            f"model: expected one of {', '.join(known)}, got {settings.model!r}; --shape says any "
            "other"
        )
    batch, rows, keys = _SIZES["forward" if settings.op == "backward" else settings.op]
    for name, preset in known.items():
        if settings.model in (None, name):
            heads = preset["num_attention_heads"]
            dim = preset.get("head_dim", preset["hidden_size"] // heads)
            yield batch, rows, heads, preset["num_key_value_heads"], dim, keys


# ---- a process -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a Config. `gain`: by how much the default takes longer, in three of four turns."""

    fields: Fields  # in which it differs from the default
    verdict: str
    gain: float = 0.0
    microseconds: float = 0.0
    default_microseconds: float = 0.0
    note: str = ""

    def line(self) -> str:
        fields = ", ".join(f"{name}={x}" for name, x in self.fields.items()) or "the default"
        times = f"{self.microseconds:>10.1f}{self.default_microseconds:>10.1f}{self.gain:>7.2f}"
        note = f": {self.note}" if self.note else ""
        return f"  {times if self.verdict == OK else '':<27}  {self.verdict:<8} {fields}{note}"


def measured(call: Call, kernel: str, fields: Fields, turns: int) -> Result:
    """The result of a Config, in a process of its own."""
    folder = jax.config.jax_compilation_cache_dir  # with what the default and the oracle compile to
    settings = dataclasses.asdict(call.settings)
    asked = [call.kind, call.shape, settings, kernel, fields, turns, folder]
    process = gpu_check.command(call.settings.gpu, "tune", json.dumps(asked))
    row, verdict, note = gpu_check.answer(process, call.settings.limit)
    return Result(fields, verdict, note=note) if row is None else Result(**row)


def work(argv: Sequence[str]) -> None:
    """The program of a process: prints the result of a Config."""
    jax.config.update("jax_traceback_filtering", "off")  # the last line is that of the error
    kind, shape, settings, kernel, fields, turns, folder = json.loads(argv[0])
    if folder is not None:
        machine.keep_programs(folder)
    call = Call(kind, tuple(shape), Settings(**settings))
    sys.stdout.write(json.dumps(dataclasses.asdict(timed(call, kernel, fields, turns))) + "\n")


def timed(call: Call, kernel: str, fields: Fields, turns: int) -> Result:
    """Runs a Config here, beside the default."""
    choice = next(x for x in call.choices() if x.kernel == kernel)
    function, arrays = call.prepared()

    def compiled(fields: Fields) -> tuple[Any, Results]:
        run = jax.jit(lambda *some: function(*some))  # jax keeps what it traced by function
        with tuning.trying(choice, fields):
            return run, jax.block_until_ready(run(*arrays))

    (default, expected), (run, results) = compiled({}), compiled(fields)
    oracle, exact = call.prepared(exact=True)
    if (wrong := complaint(results, expected, jax.jit(oracle)(*exact))) is not None:
        return Result(fields, WRONG, note=wrong)
    calls = max(5, int(BATCH_US / gpu_check.microseconds(default, arrays, 5)))
    pairs = []
    for turn in range(turns):
        order = (run, default) if turn % 2 else (default, run)  # nobody is always in one's wake
        times = [gpu_check.microseconds(x, arrays, calls) for x in order]
        pairs.append(times if turn % 2 else times[::-1])
    return judged(fields, pairs)


def judged(fields: Fields, pairs: Sequence[Sequence[float]]) -> Result:
    """The result of turns of (time, default's time): medians, and the gain of three of four."""
    gains = sorted(default / took for took, default in pairs)
    took, default = (float(np.median(x)) for x in zip(*pairs, strict=True))
    return Result(fields, OK, gains[len(gains) // 4], took, default)


def complaint(results: Results, expected: Results, exact: Results) -> str | None:
    """None where each position of results of [B, rows, heads, dim] is right, else the first that
    is not: it is off by more than twice what the default is, and a rounding.
    """
    for n, (got, own, truth) in enumerate(zip(results, expected, exact, strict=True)):
        oracle, *off = (np.asarray(x, np.float32) for x in (truth, got, own))
        sizes = (off[0] - oracle, off[1] - oracle, oracle)
        error, of_own, size = (abs(x).max(axis=(0, 2, 3)) for x in sizes)  # a NaN stays in NumPy's
        budget = 2 * of_own + max(float(jnp.finfo(got.dtype).eps), TF32) * size + NOISE
        for row in np.flatnonzero(~(error <= budget))[:1]:  # a NaN, too
            return f"row {row} of result {n} is off by {error[row]:.1e} of {budget[row]:.1e}"
    return None


# ---- the command ---------------------------------------------------------------------------------


def search(choice: Any, measure: Callable[[Fields, int], Result]) -> Result | None:
    """The Config that is kept, or None."""
    tried = [measure(fields, TURNS) for fields in tuning.singles(choice)]
    faster = sorted((x for x in tried if x.verdict == OK and x.gain > 1), key=lambda x: x.gain)
    best = {next(iter(x.fields)): x for x in faster}  # the best value of a field
    some = sorted(best.values(), key=lambda x: x.gain)[-BEST:]
    more = tuning.pairs(choice, [x.fields for x in some])
    faster += [x for fields in more if (x := measure(fields, TURNS)).verdict == OK]
    top = max(faster, key=lambda x: x.gain, default=None)
    if top is None or top.gain <= GAIN:
        return None
    again = measure(top.fields, TURNS_OF_THE_BEST)
    return again if again.verdict == OK and again.gain > GAIN else None


def run(settings: Settings, out: str | None, say: Callable[[str], None], as_json: bool) -> int:
    """Tunes the kernels of the calls, and keeps what is faster. The exit status: 0; 1 where the
    default of a kernel could not be timed; 2 without a GPU, where it says what it would time.
    """
    calls, table = calls_of(settings), (lambda line: None) if as_json else say
    with gpu_check.chosen_gpu(settings.gpu):
        report = gpu_check.machine(settings.gpu) | {"settings": dataclasses.asdict(settings)}
        if report["generation"] is None:
            would = list(_would_time(calls, settings.implementation or "sm90"))
            for row in would:
                table(f"would time  {row['call']}\n  {row['kernel']}: {row['default']}, and with")
                table("\n".join(f"    {fields}" for fields in row["configs"]))
            verdict = "there is no NVIDIA GPU here that jax can use: nothing was timed"
            report |= {"would_time": would, "verdict": verdict}
            say(json.dumps(report) if as_json else verdict)
            return 2
        path = tuning.default_file() if out is None else pathlib.Path(out)
        if path is None:
            raise ValueError("out: jax keeps no programs on disk here; name the file: --out=FILE")
        if path.exists():
            tuning.read(path)  # another file is refused before anything runs
        table(f"pallas_attn {report['pallas_attn']}, jax {report['jax']}, {report['device']}")
        rows = [_tuned(call, choice, path, table) for call in calls for choice in call.choices()]
    kept = sum(row["kept"] is not None for row in rows)
    table(f"{kept} of {len(rows)} kernels have a faster Config, in {path}: pa.tuned({str(path)!r})")
    if as_json:
        say(json.dumps(report | {"file": str(path), "kernels": rows}))
    return int(any(row["tried"][0]["verdict"] != OK for row in rows))


def _tuned(call: Call, choice: Any, path: pathlib.Path, table: Callable[[str], None]) -> Fields:
    """The row of a kernel of a call, whose Config is in the file when it comes."""
    tried: list[Result] = []

    def measure(fields: Fields, turns: int) -> Result:
        tried.append(measured(call, choice.kernel, fields, turns))
        table(tried[-1].line())
        return tried[-1]

    table(f"{call}\n  {choice.kernel}\n  {'us':>10}{'default':>10}{'gain':>7}")
    best = None
    if measure({}, TURNS).verdict == OK:
        best = search(choice, measure)
        faster = None
        if best is not None:
            faster = {"config": best.fields, "microseconds": best.microseconds}
            faster["default_microseconds"] = best.default_microseconds
        tuning.write(path, tuning.key_of(choice.kernel, choice.problem), faster)
        table(f"  kept: {best.line().strip()}" if best else "  the default stays")
    row = {"call": str(call), "kernel": choice.kernel, "kept": best and dataclasses.asdict(best)}
    return row | {"tried": [dataclasses.asdict(x) for x in tried]}


def _would_time(calls: Sequence[Call], generation: str) -> Iterator[dict[str, Any]]:
    """Without a GPU: the Configs beside each default, on the GPU that the implementation is for."""
    if generation == "reference":
        raise ValueError("implementation: the reference has no Configs; leave it out, or say sm90")
    for call, choice in ((x, y) for x in calls for y in x.choices(generation)):
        row = {"call": str(call), "kernel": choice.kernel, "generation": generation}
        yield row | {"default": str(choice.config), "configs": tuning.singles(choice)}
