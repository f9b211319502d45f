"""`pallas-attn check`: whether the kernels work on this machine's GPU.

Each case of `gpu_check_cases` runs in a process of its own, under a time limit: a kernel that
hangs, or that takes its process along, is one row of the table, and the others still run. Several
processes compile side by side. Then three calls are timed, one after the other, beside cuDNN's.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_attn
from pallas_lm import gpu_check_cases

REPORT = "pallas_attn_check.json"
SIDE_BY_SIDE = 4  # processes that compile at a time
OK, WRONG, REFUSED, HUNG, FAILED = "ok", "wrong", "refused", "hung", "failed"
BAD = WRONG, HUNG, FAILED


@dataclasses.dataclass(frozen=True)
class Settings:
    """The checks, and the time that a case may take."""

    implementation: str | None = None
    dtype: str = "bfloat16"
    seed: int = 0
    limit: int = 120  # seconds of a case, jax's start and compilation among them
    gpu: int = 0  # its number among those that jax sees


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a case. `note`: why it was refused or failed."""

    operation: str
    case: str
    verdict: str
    implementation: str = ""
    error: float | None = None
    budget: float | None = None
    note: str = ""

    def line(self) -> str:
        start = f"{self.operation:<18}{self.case:<40}{self.implementation:<12}"
        known = self.error is not None
        figures = f"{self.error:>9.1e}{self.budget:>9.1e}" if known else " " * 18
        return f"{start}{figures}  {self.verdict}{_below(self.note)}"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of a call. `cudnn`: by `jax.nn.dot_product_attention`; None where cuDNN does not
    take it.
    """

    call: str
    ours: float | None
    cudnn: float | None
    note: str = ""

    def line(self) -> str:
        times = (f"{'-' if x is None else f'{x:.0f}':>12}" for x in (self.ours, self.cudnn))
        return f"{self.call:<58}{''.join(times)}{_below(self.note)}"


def _below(note: str) -> str:
    """The lines of a note, below a row of the table."""
    return "".join(f"\n  {line}" for line in note.splitlines())


# ---- the processes ------------------------------------------------------------------------------


def outcomes(settings: Settings) -> Iterator[Outcome]:
    """The cases, in their order."""
    jobs = [_process("case", str(n), settings) for n in range(len(gpu_check_cases.CHECKS))]
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        ran = pool.map(lambda job: answer(job, settings.limit), jobs)
        for check, (row, verdict, note) in zip(gpu_check_cases.CHECKS, ran, strict=True):
            if row is None:
                yield Outcome(check.operation, check.case, verdict, note=note)
            else:
                yield Outcome(**row)


def timings(settings: Settings) -> Iterator[Timing]:
    """The timed calls, one at a time."""
    for name in _CALLS:
        job = _process("time", name, settings)
        row, verdict, note = answer(job, settings.limit)
        yield Timing(name, None, None, f"{verdict}: {note}") if row is None else Timing(**row)


def start(gpu: int) -> str:
    """The start of the program of a process, which imports what this one does, and sees one GPU: by
    its number among those that this process sees.
    """
    return (
        f"import os, sys; sys.path[:] = {sys.path!r}; "
        "seen = os.environ.get('CUDA_VISIBLE_DEVICES', '').split(','); "
        f"number = ''.join(seen[{gpu}:{gpu + 1}]) or '{gpu}'; "
        "os.environ['CUDA_VISIBLE_DEVICES'] = number; "
    )


def command(gpu: int, module: str, *arguments: str) -> list[str]:
    """The command of a process in which `work` of a module of this package gets arguments."""
    program = f"{start(gpu)}from pallas_lm import {module}; {module}.work(sys.argv[1:])"
    return [sys.executable, "-c", program, *arguments]


def _process(kind: str, name: str, settings: Settings) -> list[str]:
    fields = json.dumps(dataclasses.asdict(settings))
    return command(settings.gpu, "gpu_check", kind, name, fields)


def answer(process: Sequence[str], limit: int) -> tuple[dict[str, Any] | None, str, str]:
    """The JSON object that a process prints last; else None, "hung" or "failed", and why."""
    try:
        ran = subprocess.run(process, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return None, HUNG, f"no answer within {limit} s"
    printed = ran.stdout.strip().splitlines()
    with contextlib.suppress(json.JSONDecodeError):
        if ran.returncode == 0 and printed:
            return json.loads(printed[-1]), OK, ""
    said = (ran.stderr.strip().splitlines() or ["there is no answer"])[-1]
    return None, FAILED, f"exit status {ran.returncode}: {said[:300]}"


def work(argv: Sequence[str]) -> None:
    """The program of a process: prints the outcome of a case, or the times of a call."""
    # Otherwise the last line of an error is jax's note on frames that it has left out.
    jax.config.update("jax_traceback_filtering", "off")
    kind, name, settings = argv[0], argv[1], Settings(**json.loads(argv[2]))
    result = outcome(int(name), settings) if kind == "case" else timing(name, settings)
    sys.stdout.write(json.dumps(dataclasses.asdict(result)) + "\n")


def outcome(number: int, settings: Settings) -> Outcome:
    """Runs a case here."""
    how = gpu_check_cases.How(settings.implementation, settings.dtype, settings.seed)
    row = gpu_check_cases.row_of(gpu_check_cases.CHECKS[number], how)
    if row.error is None:
        return Outcome(row.operation, row.case, REFUSED, note=row.note)
    verdict = OK if row.held else WRONG
    return Outcome(row.operation, row.case, verdict, row.implementation, row.error, row.budget)


# ---- the times ----------------------------------------------------------------------------------

Arrays = tuple[jax.Array, ...]


def _forward(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    return attend


def _forward_and_backward(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(*arrays: jax.Array) -> jax.Array:
        return attend(*arrays).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


# The name of a call: the shape of q, that of k and v, and what is timed of it.
_CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[..., Any]]] = {
    "forward, 4096 rows, 16 heads of 128, causal": (
        (1, 4096, 16, 128), (1, 4096, 16, 128), _forward,
    ),
    "both passes, 4096 rows, 16 heads of 128, causal": (
        (1, 4096, 16, 128), (1, 4096, 16, 128), _forward_and_backward,
    ),
    "forward, 4 x 2048 rows, 32:8 heads of 64, causal": (
        (4, 2048, 32, 64), (4, 2048, 8, 64), _forward,
    ),
}  # fmt: skip


def timing(name: str, settings: Settings) -> Timing:
    """Times a call here."""
    of_q, of_kv, wrap = _CALLS[name]
    keys = jax.random.split(jax.random.key(settings.seed), 3)
    shapes = of_q, of_kv, of_kv
    arrays = tuple(
        jax.random.normal(key, shape, settings.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        how = settings.implementation
        return pallas_attn.flash_attention(q, k, v, mask=pallas_attn.CAUSAL, implementation=how)

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    try:
        peer, note = _microseconds(wrap(cudnn), arrays), ""
    except Exception as error:  # cuDNN is not there, or does not take the call
        peer, note = None, f"cuDNN: {str(error).splitlines()[0][:200]}"
    return Timing(name, _microseconds(wrap(ours), arrays), peer, note)


def _microseconds(call: Callable[..., Any], arrays: Arrays) -> float:
    """Wall time of a call: the best of five batches."""
    run = jax.jit(call)
    jax.block_until_ready(run(*arrays))
    return min(microseconds(run, arrays, 20) for _ in range(5))


def microseconds(run: Callable[..., Any], arrays: tuple[Any, ...], calls: int) -> float:
    """Wall time of a compiled call: of a batch of calls, for which the host waits once."""
    start = time.perf_counter()
    for _ in range(calls):
        result = run(*arrays)
    jax.block_until_ready(result)
    return 1e6 * (time.perf_counter() - start) / calls


# ---- the report ---------------------------------------------------------------------------------


def chosen_gpu(gpu: int) -> contextlib.AbstractContextManager[Any]:
    """The block in which calls are traced for a GPU; ValueError where there is none of its number.
    Without any GPU, number 0 is the machine as it is.
    """
    devices = jax.devices()
    if gpu and gpu >= len(devices):
        raise ValueError(f"gpu: jax sees {len(devices)} devices here, from 0 on; got {gpu}")
    return jax.default_device(devices[gpu])


def machine(gpu: int = 0) -> dict[str, Any]:
    """Facts of this machine for the reader of a report, in which one GPU has a number."""
    devices = jax.devices()
    with chosen_gpu(gpu):
        generation, kind = pallas_attn.gpu_generation(), devices[gpu].device_kind
    return {
        "pallas_attn": pallas_attn.__version__,
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "devices": [device.device_kind for device in devices],
        "device": f"GPU {gpu}, {kind}" if generation else kind,
        "generation": generation,
        "driver": _driver(),
        "platform": devices[0].client.platform_version,  # with a GPU, CUDA's version, too
    }


def _driver() -> str | None:
    """The version of the GPU's driver, None where nobody says."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(ran.stdout.split()), None)


def run(settings: Settings, out: str, say: Callable[[str], None], as_json: bool) -> int:
    """Checks this machine, says so line by line, and writes the report. The exit status: 0 where
    `is_well` says so, else 1; 2 without a GPU, where nothing runs.
    """
    report: dict[str, Any] = machine(settings.gpu) | {"settings": dataclasses.asdict(settings)}
    table = (lambda line: None) if as_json else say
    table(f"pallas_attn {report['pallas_attn']}, jax {report['jax']}, {report['device']}")
    if report["generation"] is None and settings.implementation != "reference":
        would = [*(f"{check.operation}: {check.case}" for check in gpu_check_cases.CHECKS), *_CALLS]
        verdict = "there is no NVIDIA GPU here that jax can use: nothing was checked"
        table("\n".join([*(f"would run  {line}" for line in would), verdict]))
        if as_json:
            say(json.dumps(report | {"would_run": would, "verdict": verdict}))
        return 2
    table(f"{'operation':<18}{'case':<40}{'runs on':<12}{'error':>9}{'budget':>9}")
    cases = []
    for each in outcomes(settings):
        cases.append(each)
        table(each.line())
    times = []
    if report["generation"] is not None:
        table(f"\n{'microseconds a call':<58}{'pallas_attn':>12}{'cuDNN':>12}")
        for timed in timings(settings):
            times.append(timed)
            table(timed.line())
    verdict = verdict_of(cases, times)
    report |= {
        "cases": [dataclasses.asdict(each) for each in cases],
        "timings": [dataclasses.asdict(each) for each in times],
        "verdict": verdict,
    }
    with open(out, "w") as file:
        file.write(json.dumps(report, indent=1) + "\n")
    table(f"\n{verdict}; {out} has it all, to attach to a report")
    if as_json:
        say(json.dumps(report))
    return int(not is_well(cases, times))


def is_well(cases: Sequence[Outcome], times: Sequence[Timing]) -> bool:
    """Whether some cases hold, none is bad, and each timed call has a time."""
    verdicts = {each.verdict for each in cases}
    timed = all(each.ours is not None for each in times)
    return OK in verdicts and not verdicts & set(BAD) and timed


def verdict_of(cases: Sequence[Outcome], times: Sequence[Timing]) -> str:
    """One line for all cases and calls."""
    counts = {kind: sum(each.verdict == kind for each in cases) for kind in (OK, *BAD, REFUSED)}
    if not any(counts[kind] for kind in (OK, *BAD)):
        return "not well: every case was refused, and nothing was checked"
    if is_well(cases, times):
        refused = f", {counts[REFUSED]} refused: no kernel takes them here" * bool(counts[REFUSED])
        return f"all is well: {counts[OK]} cases are within their budgets{refused}"
    said = [f"{counts[kind]} {kind} of {len(cases)} cases" for kind in BAD if counts[kind]]
    said += [f"no time of: {each.call}" for each in times if each.ours is None]
    return f"not well: {'; '.join(said)}"
