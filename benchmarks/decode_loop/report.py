"""Rows of a report: where the time of a step goes, over batch sizes.

Parts are timed as programs of their own (`step_parts`). Matmuls are the time of the whole step
beyond these (norms and rotations ride along), the host is wall time that no kernel ran in. On a GPU
the time of kernels is CUPTI's, and the same loop without this package (`peer`) is timed beside
ours. Elsewhere time is the wall's, the host cannot be told apart, and no rate of memory is
measured: such rows have no share of it. Where kernels overlap their times add up to more than the
step's, and then the device is said to have worked all of it. Where parts alone take longer than the
step they are shrunk to it, and the row says by how much.

On a mesh a step is that of all devices, and so are bytes and the rate at which memory is read; the
time of kernels is the mean of the devices, and sums over devices count as matmuls. The loop beside
ours is split over the same devices.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import rows
from benchmarks.decode_loop import peer, step_parts
from benchmarks.decode_loop.step_parts import TURNS, Rate, each
from pallas_attn.cache import KVCache
from pallas_lm import check, decode, programs
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config, Params, num_bytes
from pallas_lm.options import Options
from pallas_lm.state import State

Array = jax.Array
Row = dict[str, Any]
Say = Callable[[str], None]
PARTS = ("append", "attention", "matmuls", "sampling", "host")
_PROMPTS = (8, 2048)  # number and length of the prompts of a first token


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model at a context, which is measured."""

    name: str
    config: Config
    params: Params
    options: Options
    context: int  # rows in every sequence

    @property
    def split(self) -> dict[str, int]:
        """The number of devices, if there are several."""
        mesh = self.options.mesh
        return {} if mesh is None else {"devices": mesh.size}

    @property
    def case(self) -> str:
        """The start of the names of its cases."""
        return "".join([self.name, *(f"_tp{n}" for n in self.split.values())])

    @property
    def has_peer(self) -> bool:
        config = self.config
        return step_parts.on_gpu() and not (config.windows or config.gemma or config.latent)

    @property
    def has_first_token(self) -> bool:
        return step_parts.on_gpu() and self.config.positions > _PROMPTS[1]

    def at(self, cache: str, batch: int) -> Options:
        """The options of a step of `batch` sequences."""
        capacity = room(self.context, self.options.chunk)
        plain: dict[str, Any] = {
            "keep_logits": False,
            "stop_ids": (),
            "pages": None,
            "prefill_chunk": None,
        }
        plain |= {"draft": None, "samples": 1}
        return dataclasses.replace(
            self.options, cache=cache, batch=batch, capacity=capacity, **plain
        )

    def lengths(self, options: Options) -> Array:
        """Rows at the start, so that the chunks that are timed lie around the context."""
        rows = max(self.context - (2 + TURNS // 2) * options.chunk, 1)
        return each(options.mesh, options.batch, rows)


def room(context: int, chunk: int) -> int:
    """The capacity that a context takes, with the steps that are timed."""
    return -(-(context + (2 * TURNS + 2) * chunk) // 64) * 64


def _silent(line: str) -> None:
    del line


# ---- before a run -------------------------------------------------------------------------------


def prepare(
    subject: Subject,
    batches: Sequence[int],
    say: Say = _silent,
    others: Sequence[Callable[[], Any]] = (),
) -> list[Options]:
    """Compiles the programs that `measure` times, beside `others`, and checks their results. The
    steps to measure: each batch size with the cache asked for, and with the stacked one.

    Side by side in threads it takes a third of the time.
    """
    caches = dict.fromkeys((subject.options.cache, "stacked"))
    asked = [subject.at(cache, batch) for batch in batches for cache in caches]
    jobs: list[Callable[[], Any]] = [
        functools.partial(_compile, subject, options, say) for options in reversed(asked)
    ]
    if subject.has_peer:
        peers = [subject.at("stacked", batch) for batch in batches]
        jobs += [functools.partial(_compile_peer, subject, options, say) for options in peers]
    if subject.has_first_token:
        jobs.append(functools.partial(_prompted, subject))
    jobs += [*(functools.partial(_must_hold, subject, cache, say) for cache in caches), *others]
    # Programs of several devices that run side by side would wait for each other's devices.
    threads = len(jobs) if subject.options.mesh is None else 1
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()
    return asked


def _compile(subject: Subject, options: Options, say: Say) -> None:
    config, mesh = subject.config, options.mesh
    cache = lm_mesh.shapes(mesh, functools.partial(options.create_cache, config), lm_mesh.HEADS)
    state = lm_mesh.shapes(mesh, functools.partial(State.create, options))
    lengths = lm_mesh.shapes(mesh, lambda: jax.numpy.zeros(options.batch, jax.numpy.int32))
    programs.steps.lower(config, options, _shapes_of(subject), cache, state).compile()
    for part in step_parts.parts(config, options):
        part.compile(mesh, cache)
    step_parts.hold.lower(cache, lengths).compile()
    say(f"{options.cache}, {options.batch}: compiled")


def _compile_peer(subject: Subject, options: Options, say: Say) -> None:
    mesh, alone = options.mesh, dataclasses.replace(options, mesh=None)
    create = functools.partial(peer.create, subject.config, alone, 7)
    caches = lm_mesh.shapes(mesh, create, lm_mesh.HEADS)
    numbers = lm_mesh.shapes(mesh, lambda: jax.numpy.zeros(options.batch, jax.numpy.int32))
    program = _peer_program(subject.config, options)
    program.lower(_shapes_of(subject), (caches, numbers, numbers)).compile()
    say(f"cudnn, {options.batch}: compiled")


def _shapes_of(subject: Subject) -> Any:
    """The parameters by shape; on a mesh with their places."""
    if subject.options.mesh is None:
        return jax.eval_shape(lambda: subject.params)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), subject.params
    )


def _must_hold(subject: Subject, cache: str, say: Say) -> None:
    """Compares two layers of the model with the reference: nothing is timed that is wrong."""
    config, params = subject.config, subject.params
    if not config.windows:
        config = dataclasses.replace(config, layers=min(2, config.layers))
        runs = zip(params["runs"], config.runs, strict=False)
        cut = [{name: x[:count] for name, x in run.items()} for run, (count, _) in runs]
        params = params | {"runs": tuple(cut)}
    options = dataclasses.replace(subject.at(cache, 2), capacity=128, chunk=4, keep_logits=True)
    prompts = np.random.default_rng(0).integers(0, config.vocab, (3, 33)).tolist()
    run = decode.Run(config, params, options, prompts, 9)
    for _ in run:
        pass
    for row in check.rows(run, params):
        if not row.held:
            raise ValueError(f"report: the {cache} cache decodes wrongly, nothing is timed: {row}")
    say(f"{cache}: two layers are the reference's")


# ---- measuring ----------------------------------------------------------------------------------


def measure(
    subject: Subject, asked: Sequence[Options], commit: str | None = None, say: Say = _silent
) -> Iterator[Row]:
    """A row for each step, and on a GPU the peer's beside it. Rows come as they are measured; `say`
    hears how far it is.
    """
    provenance = dataclasses.asdict(rows.Provenance.here(commit))
    for row in _measure(subject, asked, say):
        yield row | provenance


def _measure(subject: Subject, asked: Sequence[Options], say: Say) -> Iterator[Row]:
    read = None
    if step_parts.on_gpu():
        read = step_parts.read_rate(subject.options.mesh)
        yield {"op": "ceiling", "case": "read", "impl": "xla", "tbps": round(read, 4)}
    for options in asked:
        row = _row(subject, options, read, say)
        yield row
        if subject.has_peer:
            peers = _peer_row(subject, subject.at("stacked", options.batch), read)
            yield peers | {"case": row["case"]}
    if subject.has_first_token:
        yield _first_token(subject)


def _row(subject: Subject, options: Options, read: float | None, say: Say) -> Row:
    config, mesh = subject.config, options.mesh
    cache, wall, device = _step(subject, options, step_parts.filled(config, options))
    say(f"{options.cache}, {options.batch}: {wall.ms:.3f} ms a step, kernels {device:.3f}")
    held = [step_parts.hold(cache, each(mesh, options.batch, subject.context))]
    del cache
    alone = {part.name: part.ms(mesh, held) for part in step_parts.parts(config, options)}
    row = _facts(subject, options, wall, read) | {"impl": f"pallas_attn/{options.cache}"}
    row |= _shares(alone, device, wall.ms if step_parts.on_gpu() else None)
    cached = alone["append"] + alone["attention"]
    return row | {"kv_roofline": _share(row["live_kv_bytes"], read, cached)}


def _shares(alone: dict[str, float], device: float, wall: float | None) -> Row:
    """The parts of a step for which the device works so many ms, of those that each took alone;
    with the wall's ms the host's part is known. No part is longer than the step.
    """
    shrunk = min(device / sum(alone.values()), 1.0)
    ms = {name: x * shrunk for name, x in alone.items()}
    ms["matmuls"] = max(device - sum(ms.values()), 0.0)
    if wall is not None:
        ms["host"] = max(wall - device, 0.0)
    parts = {name: round(ms[name], 4) for name in PARTS if name in ms}
    return {"parts": parts} | ({"parts_shrunk": round(shrunk, 4)} if shrunk < 1 else {})


def _share(nbytes: int, read: float | None, ms: float) -> float | None:
    """The share that so many bytes in a time have of the rate at which memory is read (TB/s)."""
    return None if read is None else round(nbytes / read / 1e9 / ms, 4)


def _step(subject: Subject, options: Options, cache: KVCache) -> tuple[KVCache, Rate, float]:
    """(the cache after it, a step's wall time, ms of it that the device works)."""
    config, mesh = subject.config, options.mesh
    state = lm_mesh.made(mesh, functools.partial(State.create, options))
    state = dataclasses.replace(state, left=each(mesh, options.batch, 2**30))
    carry = [(step_parts.hold(cache, subject.lengths(options)), state)]
    del cache

    def chunk() -> Array:
        cache, state, tokens, _ = programs.steps(config, options, subject.params, *carry.pop())
        carry.append((cache, state))
        return tokens

    wall = step_parts.pace(chunk, options.chunk)
    if not step_parts.on_gpu():
        return carry.pop()[0], wall, wall.ms
    ms, count = step_parts.kernels_of("step", chunk, mesh)
    wall = wall._replace(kernels=round(count / options.chunk))
    return carry.pop()[0], wall, min(ms / options.chunk, wall.ms)


def _facts(subject: Subject, options: Options, wall: Rate, read: float | None) -> Row:
    """The facts of a row, whichever implementation made the step."""
    config, batch = subject.config, options.batch
    kv = config.kv_bytes(options.dtype) * subject.context * batch
    # A step reads next to nothing of an embedding that is no head.
    weights = num_bytes(subject.params) - (0 if config.tied else subject.params["embed"].nbytes)
    sizes = {"batch": batch, "context": subject.context, "dtype": options.dtype}
    return {
        "op": "decode_loop",
        "case": f"{subject.case}_{options.cache}_b{batch}_s{subject.context}",
        "problem": {"model": subject.name, **sizes, **subject.split, "chunk": options.chunk},
        **wall.facts(),
        "tbps": round((weights + kv) / wall.ms / 1e9, 4),
        "checked": True,
        "tokens_per_second": round(batch / wall.ms * 1e3, 1),
        "weight_bytes": weights,
        "live_kv_bytes": kv,
        "roofline": _share(weights + kv, read, wall.ms),
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def _peer_row(subject: Subject, options: Options, read: float | None) -> Row:
    """The row of `dynamic_update_slice` and cuDNN."""
    program = _peer_program(subject.config, options)
    carry = [_peer_state(subject, options)]

    def chunk() -> Array:
        state, tokens = program(subject.params, carry.pop())
        carry.append(state)
        return tokens

    wall = step_parts.pace(chunk, options.chunk)
    return _facts(subject, options, wall, read) | {"impl": "cudnn"}


@functools.cache
def _peer_program(config: Config, options: Options) -> Any:
    step = functools.partial(peer.steps, config, options, "cudnn")
    return jax.jit(step, donate_argnums=1, compiler_options=peer.COMPILER)


def _peer_state(subject: Subject, options: Options) -> peer.Carry:
    tokens = each(options.mesh, options.batch, 0)
    return peer.create(subject.config, options, 7), subject.lengths(options), tokens


def _first_token(subject: Subject) -> Row:
    count, length = _PROMPTS
    rate = Rate.of([_prompted(subject) for _ in range(TURNS + 1)][1:])
    work = 2 * count * length * sum(x.size for x in jax.tree.leaves(subject.params["runs"]))
    return {
        "op": "first_token",
        "case": f"{subject.case}_b{count}_s{length}",
        "impl": f"pallas_attn/{subject.options.cache}",
        "problem": {"model": subject.name, "batch": count, "length": length} | subject.split,
        **rate.facts(),
        "tflops": round(work / rate.ms / 1e9, 1),
        "checked": True,
    }


def _prompted(subject: Subject) -> float:
    """ms from prompts to the first token of each: one prefill."""
    count, length = _PROMPTS
    options = dataclasses.replace(subject.at(subject.options.cache, count), capacity=length + 64)
    drawn = np.random.default_rng(0).integers(0, subject.config.vocab, (count, length))
    run = decode.Run(subject.config, subject.params, options, drawn.tolist(), 1)
    start = time.perf_counter()
    for _ in run:
        pass
    return (time.perf_counter() - start) * 1e3
