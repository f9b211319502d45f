"""`pallas-attn tune`: looks for Configs of kernels that are faster on this GPU than their own.

For each call, part by part of a kernel's Config (`pallas_attn.tuning`), Configs run in a process of
their own, in turns with the default; one that hangs or fails ends that process, and the next gets a
new one. A result has to agree with the default's. The best is timed again, with more turns, and is
kept in a file if it is still more than 5 % faster: the fastest of many is partly the luckiest.

Times are wall time of batches of launches. A call that takes the GPU less time than a launch takes
the host shows no difference, and keeps the default.
"""

import contextlib
import dataclasses
import json
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn
from pallas_attn import tuning
from pallas_attn.masks import Mask
from pallas_lm import gpu_check, parity
from pallas_lm.gpu_check import FAILED, HUNG, OK, REFUSED, WRONG
from pallas_lm.presets import PRESETS

GAIN = 1.05  # a Config is kept where the default takes longer by more than this factor
TURNS, TURNS_OF_THE_BEST = 8, 24
BATCH_US = 10_000.0  # time of the launches of a batch, at least
SAMPLE = 256  # rows and keys of the problem whose errors decide what another Config may change
FEW = 7  # log2 of the rows of the first band of positions
NOISE = 16 * float(np.finfo(np.float32).eps)  # rounding of terms that cancel to 0
PASSES = {
    "forward": ("forward",),
    "backward": ("forward", "backward"),
    "decode": ("decode",),
    "prefill": ("prefill",),
}
# Rows, and keys of a cache, that models by name are tuned for, by pass.
_SIZES = {"forward": (1, 4096, 4096), "decode": (32, 1, 4096), "prefill": (1, 1024, 8192)}

Arrays = tuple[Any, ...]  # arguments of a call: arrays, and pytrees of them
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
    limit: int = 120  # seconds of a Config, with its compilation
    gpu: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """A pass of a call of attention, whose kernels are tuned."""

    kind: str  # "forward", "backward", "decode" or "prefill"
    shape: tuple[int, ...]  # B, T, N, K, H, S
    mask: str
    dtype: str
    implementation: str | None
    seed: int

    def __str__(self) -> str:
        sizes = ", ".join(f"{x} {n}" for x, n in zip("BTNKHS", self.shape, strict=True))
        return f"{self.kind}: {sizes}, {self.mask}, {self.dtype}"

    @property
    def over_cache(self) -> bool:
        return self.kind in ("decode", "prefill")

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of q, k and v; for a backward the cotangent's, too."""
        batch, rows, heads, kv_heads, dim, keys = self.shape
        q, k = (batch, rows, heads, dim), (batch, keys, kv_heads, dim)
        sizes = (q, k, k, q) if self.kind == "backward" else (q, k, k)
        return tuple(jax.ShapeDtypeStruct(size, self.dtype) for size in sizes)

    def attend(self, q: jax.Array, k: Any, v: jax.Array | None = None) -> jax.Array:
        """Attention of q; k and v, or a cache."""
        options: dict[str, Any] = {
            "mask": mask_of(self.mask),
            "implementation": self.implementation,
        }
        if v is None:
            return pallas_attn.decode_attention(q, k, **options)
        return pallas_attn.flash_attention(q, k, v, **options)

    def filled(self, k: jax.Array, v: jax.Array) -> pallas_attn.StackedCache:
        batch, _, _, kv_heads, dim, keys = self.shape
        cache = pallas_attn.StackedCache.create(batch, keys, kv_heads, dim, dtype=self.dtype)
        return pallas_attn.append_kv(cache, k, v, implementation="reference")

    def whole(self, *arrays: jax.Array) -> Any:
        """All that leads to the pass, for tracing."""
        if self.over_cache:
            return self.attend(arrays[0], self.filled(*arrays[1:]))
        if self.kind == "forward":
            return self.attend(*arrays)
        return jax.vjp(self.attend, *arrays[:3])[1](arrays[3])

    def prepared(self) -> tuple[Callable[..., Results], Arrays]:
        """The pass alone, and its arguments."""
        keys = jax.random.split(jax.random.key(self.seed), 4)
        shapes = self.shapes()
        arrays = [
            jax.random.normal(x, y.shape, y.dtype) for x, y in zip(keys, shapes, strict=False)
        ]
        if self.over_cache:
            cache = jax.jit(self.filled)(*arrays[1:])
            return lambda q, cache: (self.attend(q, cache),), (arrays[0], cache)
        if self.kind == "forward":
            return lambda *some: (self.attend(*some),), tuple(arrays)
        # A jitted function's transposed program, with its kernels, would be kept by jax.
        pullback = jax.vjp(self.attend, *arrays[:3])[1]
        return lambda pullback, cotangent: pullback(cotangent), (pullback, arrays[3])

    def choices(self, generation: str | None = None) -> list[Any]:
        """The kernels of the pass, with problems and their own Configs, on this GPU or another."""
        op = {"forward": "flash_forward", "backward": "flash_backward"}.get(self.kind, "decode")
        seen = tuning.choices(self.whole, *self.shapes(), generation=generation)
        return [choice for choice in seen if choice.problem.op == op]


def mask_of(name: str) -> Mask:
    kind, _, width = name.partition(":")
    if kind == "window" and width.isascii() and width.isdigit() and int(width) > 0:
        return pallas_attn.sliding_window(int(width))
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
    same = settings.mask, settings.dtype, settings.implementation, settings.seed
    return [Call(kind, shape, *same) for shape in shapes for kind in PASSES[settings.op]]


def _shape(text: str, op: str) -> tuple[int, ...]:
    sizes = text.split(",")
    good = all(x.isascii() and x.isdigit() and int(x) > 0 for x in sizes)
    least = 6 if op in ("decode", "prefill") else 5
    if not good or not least <= len(sizes) <= 6:
        wanted = "B,T,N,K,H,S" if least == 6 else "B,T,N,K,H or B,T,N,K,H,S"
        raise ValueError(
            f"shape: expected {wanted} (batch, query rows, query heads, kv heads, head dim, keys), "
            f"as 1,4096,32,8,128{',8192' * (least == 6)}, got {text!r}"
        )
    numbers = tuple(map(int, sizes))
    batch, rows, heads, kv_heads, dim, keys = (*numbers, numbers[1])[:6]
    if heads % kv_heads:
        raise ValueError(f"shape: query heads are a multiple of kv heads, got {text!r}")
    if least == 6 and rows > keys:
        raise ValueError(f"shape: the newest T rows are among the S of the cache, got {text!r}")
    return batch, rows, heads, kv_heads, dim, keys


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


# ---- the search ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a Config. `gain`: by how much the default takes longer, in three of four turns."""

    config: dict[str, Any]
    verdict: str
    gain: float = 0.0
    microseconds: float = 0.0
    default_microseconds: float = 0.0
    note: str = ""

    def line(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in self.config.items())
        times = f"{self.microseconds:>10.1f}{self.default_microseconds:>10.1f}{self.gain:>7.2f}"
        shown = times if self.verdict == OK else " " * 27
        note = f": {self.note}" if self.note else ""
        return f"  {shown}  {self.verdict:<8} {fields}{note}"


Measure = Callable[[Any, int], Result]  # (Config, number of turns) -> its result


def search(choice: Any, measure: Measure, say: Callable[[str], None]) -> Result | None:
    """The Config that is kept, or None: the best of each part, and then of the next part around it,
    timed again.
    """
    config, best = choice.config, None
    for part in tuning.parts(choice):
        better = None
        for candidate in tuning.around(choice, config, part):
            result = measure(candidate, TURNS)
            say(result.line())
            if result.verdict == OK and result.gain > (best.gain if best else 1.0):
                best, better = result, candidate
        config = better or config
    if best is None or best.gain <= GAIN:
        return None
    again = measure(config, TURNS_OF_THE_BEST)
    say(again.line())
    return again if again.verdict == OK and again.gain > GAIN else None


class Worker:
    """A process that runs Configs of a kernel, one after another; a new one after one that hung or
    failed.
    """

    def __init__(self, call: Call, kernel: str, settings: Settings):
        asked = [json.dumps(dataclasses.asdict(call)), kernel]
        program = (
            gpu_check.start(settings.gpu) + "from pallas_lm import tune; tune.work(sys.argv[1:])"
        )
        self.command = [sys.executable, "-c", program, *asked]
        self.limit = settings.limit
        self.process: subprocess.Popen[str] | None = None

    def measure(self, config: Any, turns: int) -> Result:
        fields = dataclasses.asdict(config)
        self._start()
        process = self.process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and says why below
            process.stdin.write(json.dumps([fields, turns]) + "\n")
            process.stdin.flush()
        try:
            while (line := self.lines.get(timeout=self.limit)) is not None:
                if line.startswith("{"):
                    return Result(**json.loads(line))
        except queue.Empty:
            self.end()
            return Result(fields, HUNG, note=f"no answer within {self.limit} s")
        status = process.wait()
        self.errors.seek(0)
        said = (self.errors.read().strip().splitlines() or ["there is no answer"])[-1]
        self.end()
        return Result(fields, FAILED, note=f"exit status {status}: {said[:300]}")

    def _start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.end()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        reads = self.process.stdout, self.lines
        self.reader = threading.Thread(target=_read, args=reads, daemon=True)
        self.reader.start()

    def end(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.errors.close()
        with contextlib.suppress(OSError):  # nobody reads what is left to write
            if self.process.stdin is not None:
                self.process.stdin.close()
        self.process = None


def _read(lines: IO[str], into: queue.Queue[str | None]) -> None:
    with lines:
        for line in lines:
            into.put(line)
    into.put(None)


# ---- within the process --------------------------------------------------------------------------


def work(argv: Sequence[str]) -> None:
    """The program of a process: reads Configs, prints results. It ends where one fails, since a GPU
    may compute nothing after that.
    """
    fields = json.loads(argv[0])
    jax.config.update("jax_traceback_filtering", "off")  # the last line is that of the error
    call = Call(**fields | {"shape": tuple(fields["shape"])})
    choice = next(x for x in call.choices() if x.kernel == argv[1])
    bench = Bench(call, choice)
    for line in sys.stdin:
        config, turns = json.loads(line)
        result = bench.measure(tuning.changed(choice.config, config), turns)
        sys.stdout.write(json.dumps(dataclasses.asdict(result)) + "\n")
        sys.stdout.flush()
        if result.verdict == FAILED:
            return


class Bench:
    """A pass with its arrays, and the default's program and results."""

    def __init__(self, call: Call, choice: Any):
        self.choice, (self.function, self.arrays) = choice, call.prepared()
        self.default, self.expected = self._run(choice.config)
        self.allowed = Allowed.of(call)
        once = gpu_check.microseconds(self.default, self.arrays, 5)
        self.calls = max(5, int(BATCH_US / once))

    def _run(self, config: Any) -> tuple[Any, Results]:
        run = jax.jit(
            lambda *arrays: self.function(*arrays)
        )  # jax keeps what it traced by function
        with tuning.trying(self.choice, config):
            return run, jax.block_until_ready(run(*self.arrays))

    def measure(self, config: Any, turns: int) -> Result:
        fields = dataclasses.asdict(config)
        try:
            run, results = self._run(config)
        except jax.errors.JaxRuntimeError as error:
            return Result(fields, FAILED, note=_first_line(error))
        except Exception as error:  # it cannot be lowered
            return Result(fields, REFUSED, note=_first_line(error))
        if (wrong := self.allowed.complaint(results, self.expected)) is not None:
            return Result(fields, WRONG, note=wrong)
        pairs = []
        for turn in range(turns):
            both = [run, self.default]
            order = both if turn % 2 else both[::-1]  # nobody always runs in the other's wake
            took = {id(x): gpu_check.microseconds(x, self.arrays, self.calls) for x in order}
            pairs.append(tuple(took[id(x)] for x in both))
        return judged(fields, pairs)


def judged(fields: dict[str, Any], pairs: Sequence[tuple[float, ...]]) -> Result:
    """The result of turns of (time, default's time): medians, and the gain of three of four."""
    gains = sorted(default / took for took, default in pairs)
    took, default = (float(np.median(x)) for x in zip(*pairs, strict=True))
    return Result(fields, OK, gains[len(gains) // 4], took, default)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """By how much results of two Configs may differ: twice the error of the same mathematics with
    operands rounded to the dtype, and a rounding. The error is that of a small problem, in bands of
    positions, and is taken relative to the values of a band.
    """

    exact: tuple[np.ndarray, ...]
    naive: tuple[np.ndarray, ...]
    eps: float

    @classmethod
    def of(cls, call: Call) -> "Allowed":
        _, rows, heads, kv_heads, dim, keys = call.shape
        rows, keys = min(rows, SAMPLE), min(keys, SAMPLE)
        rng = np.random.default_rng(call.seed)
        sizes = (rows, heads // kv_heads), (keys, 1), (keys, 1), (rows, heads // kv_heads)
        *arrays, do = (rng.standard_normal((1, *size, dim)) for size in sizes)
        *arrays, do = (parity.rounded(x, jnp.dtype(call.dtype)) for x in (*arrays, do))
        rules: dict[str, Any] = {"mask": mask_of(call.mask)}
        rules["do"] = do if call.kind == "backward" else None
        if call.over_cache:
            rules["offset"] = np.array([keys - rows])
        exact = parity.definition(*arrays, **rules)
        in_dtype = lambda x: parity.rounded(x, jnp.dtype(call.dtype))  # noqa: E731
        naive = parity.definition(*arrays, rounded=in_dtype, **rules)
        some = slice(1, None) if call.kind == "backward" else slice(None)
        return cls(exact[some], naive[some], float(jnp.finfo(call.dtype).eps))

    def complaint(self, results: Results, expected: Results) -> str | None:
        """None where results agree, else the first band that does not."""
        for got, held, exact, naive in zip(results, expected, self.exact, self.naive, strict=True):
            off, values = _by_band(naive - exact), _by_band(exact)
            wide, other = (x.astype(jnp.float32) for x in (held, got))
            bands = zip(_by_band(other - wide), _by_band(wide), strict=True)
            for band, (difference, here) in enumerate(bands):
                n = min(band, len(off) - 1)
                rounding = self.eps * values[n].worst
                pairs = (
                    (
                        difference.worst,
                        (2 * off[n].worst + rounding) * here.worst / values[n].worst,
                    ),
                    (difference.rms, (2 * off[n].rms + rounding / 8) * here.rms / values[n].rms),
                )
                if not all(x <= budget + NOISE for x, budget in pairs):  # a NaN, too
                    said = " and ".join(f"{x:.1e} of {budget:.1e}" for x, budget in pairs)
                    return f"off by {said} (the worst, the root mean square) in band {band} of rows"
        return None


class Band(NamedTuple):
    """The largest and the root mean square of the numbers of some positions."""

    worst: float
    rms: float


def _by_band(x: Any) -> list[Band]:
    """Bands of positions of [B, rows, heads, dim]: 128 rows, 128 more, 256 more, and so on."""
    worst = np.asarray(abs(x).max(axis=(0, 2, 3)), np.float64)
    squares = np.asarray((x * x).mean(axis=(0, 2, 3)), np.float64)
    numbers = np.maximum(np.frexp(np.arange(len(worst)))[1], FEW)
    some = [numbers == number for number in range(FEW, int(numbers.max()) + 1)]
    return [Band(float(worst[x].max()), float(np.sqrt(squares[x].mean()))) for x in some]


# ---- the command ---------------------------------------------------------------------------------


def run(settings: Settings, out: str | None, say: Callable[[str], None], as_json: bool) -> int:
    """Tunes the kernels of the calls, and keeps what is faster. The exit status: 0; 1 where the
    default of a kernel could not be timed; 2 without a GPU, where it says what it would time.
    """
    calls, table = calls_of(settings), (lambda line: None) if as_json else say
    with gpu_check.chosen_gpu(settings.gpu):
        report = gpu_check.machine(settings.gpu) | {"settings": dataclasses.asdict(settings)}
        if report["generation"] is None:
            return _say_what_would_run(calls, settings, report, say, as_json)
        path = tuning.default_file() if out is None else pathlib.Path(out)
        if path is None:
            raise ValueError("out: jax keeps no programs on disk here; name the file: --out=FILE")
        if path.exists():
            tuning.read(path)  # another file is refused before anything runs
        table(f"pallas_attn {report['pallas_attn']}, jax {report['jax']}, {report['device']}")
        rows = [row for call in calls for row in _tuned(call, settings, path, table)]
    report |= {"file": str(path), "kernels": rows}
    kept = sum(row["kept"] is not None for row in rows)
    table(f"{kept} of {len(rows)} kernels have a faster Config, in {path}: pa.tuned({str(path)!r})")
    if as_json:
        say(json.dumps(report))
    return int(any(row["note"] for row in rows))


def _tuned(
    call: Call, settings: Settings, path: pathlib.Path, table: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each kernel of a call, whose Config is in the file when it comes."""
    for choice in call.choices():
        row: dict[str, Any] = {"call": str(call), "kernel": choice.kernel, "kept": None, "note": ""}
        key = tuning.key_of(choice.kernel, choice.problem)
        if key is None:
            yield row | {"note": "a fact of the problem has no text"}
            continue
        table(f"{call}\n  {choice.kernel}\n  {'us':>10}{'default':>10}{'gain':>7}")
        worker = Worker(call, choice.kernel, settings)
        tried: list[Result] = []
        try:
            own = worker.measure(choice.config, TURNS)
            table(own.line())
            if own.verdict != OK:
                yield row | {"note": f"the default: {own.verdict}: {own.note}"}
                continue
            best = search(choice, _recorded(worker.measure, tried), table)
        finally:
            worker.end()
        entry = None
        if best is not None:
            gpu, version, kernel, problem = key
            times = best.microseconds, best.default_microseconds
            entry = tuning.Entry(gpu, version, kernel, problem, best.config, *times)
        tuning.write(path, {key: entry})
        kept = None if best is None else dataclasses.asdict(best)
        table(f"  kept: {best.line().strip()}" if best else "  the default stays")
        yield row | {"kept": kept, "tried": [dataclasses.asdict(x) for x in tried]}


def _recorded(measure: Measure, into: list[Result]) -> Measure:
    def measured(config: Any, turns: int) -> Result:
        into.append(measure(config, turns))
        return into[-1]

    return measured


def _say_what_would_run(
    calls: Sequence[Call],
    settings: Settings,
    report: dict[str, Any],
    say: Callable[[str], None],
    as_json: bool,
) -> int:
    """Without a GPU: the Configs around each default, on the GPU that the implementation is for."""
    generation = settings.implementation or "sm90"
    if generation == "reference":
        raise ValueError("implementation: the reference has no Configs; leave it out, or say sm90")
    verdict = "there is no NVIDIA GPU here that jax can use: nothing was timed"
    would = []
    for call, choice in ((x, y) for x in calls for y in x.choices(generation)):
        configs = [choice.config]
        for part in tuning.parts(choice):
            configs += tuning.around(choice, choice.config, part)
        fields = [dataclasses.asdict(config) for config in configs]
        would.append({"call": str(call), "kernel": choice.kernel, "configs": fields})
        if not as_json:
            say(f"would time  {call}\n  {choice.kernel} on {generation}, the default first")
            say("\n".join(f"    {config}" for config in configs))
    say(json.dumps(report | {"would_time": would, "verdict": verdict}) if as_json else verdict)
    return 2
