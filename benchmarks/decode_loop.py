"""`--report=FOLDER`: the time of a decode step of the model that ran, over batch sizes.

Steps of 1, 8 and as many sequences as ran are timed with the run's cache and with the stacked one.
On a GPU the same loop without this package (`decode_peer`) is timed beside ours, and the rate at
which memory is read: a row then says which share of it the step has. A model whose first two layers
are not the reference's is not timed.

Times are wall time of chunks of steps, each launched while the one before runs, as in the loop. On
a mesh a step is that of all devices, and so are bytes and the rate of memory.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decode_peer, rows, timing
from benchmarks.rows import Row
from pallas_lm import decode, decode_check, programs
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config, Params, num_bytes
from pallas_lm.options import Options
from pallas_lm.progress import Spread
from pallas_lm.session import Settings
from pallas_lm.state import State
from pallas_lm.views import View

Array = jax.Array
TURNS = 3
NO_GPU = "-: not measured without a GPU: the rate at which memory is read"
WAITS = {
    "from the start of the run to a first token": "time_to_first_token",
    "from one token of a sequence to the next": "time_between_tokens",
}


def begin(settings: Settings) -> None:
    """Makes folder and file: one that cannot be written is an error before a minute's work."""
    if jax.process_index() == 0:
        pathlib.Path(str(settings.report)).mkdir(parents=True, exist_ok=True)
        rows.append(settings.out, []) if settings.out else None


def finish(settings: Settings, run: decode.Run, params: Params, view: View, summary: Row) -> None:
    """Measures the model of a run that has ended, whose cache makes room, and shows the table. The
    first of several processes writes: rows to `settings.out` at once, all of them to report.json.
    """
    run.release()
    context, start = max(x.rows for x in run.sequences), time.perf_counter()
    name = settings.model
    if settings.checkpoint is not None:
        name = pathlib.Path(settings.checkpoint).resolve().name
    subject = Subject(name, run.config, params, run.options, context)
    slots, measured = run.options.batch, []
    provenance = dataclasses.asdict(rows.Provenance.here(settings.commit))
    for row in _measure(subject, sorted({1, min(8, slots), slots})):
        measured.append(row | provenance)
        view.note(f"report, {time.perf_counter() - start:.0f} s: {_line(row)}")
        view.record("report", measured[-1])
        if settings.out is not None and jax.process_index() == 0:
            rows.append(settings.out, measured[-1:])
    if jax.process_index() == 0:
        path = pathlib.Path(str(settings.report)) / "report.json"
        text = json.dumps({"run": summary, "rows": measured}, indent=2)
        path.write_text(text + "\n", "utf-8")
        view.say(*_table(measured, summary), f"wrote {path}")


class Subject(NamedTuple):
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
    def has_peer(self) -> bool:
        config = self.config
        return _on_gpu() and not (config.windows or config.gemma or config.latent)

    def at(self, cache: str, batch: int, **sizes: Any) -> Options:
        """The options of plain steps of `batch` sequences, with room for those that are timed."""
        room = self.context + (2 * TURNS + 2) * self.options.chunk
        plain: dict[str, Any] = {"keep_logits": False, "stop_ids": (), "pages": None, "samples": 1}
        plain |= {"capacity": -(-room // 64) * 64, "prefill_chunk": None, "draft": None}
        return dataclasses.replace(self.options, cache=cache, batch=batch, **plain | sizes)

    def lengths(self, options: Options) -> Array:
        """Rows at the start, so that the chunks that are timed lie around the context."""
        count = max(self.context - (2 + TURNS // 2) * options.chunk, 1)
        return _each(options, count)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _each(options: Options, number: int) -> Array:
    """int32[M] of one number."""
    return lm_mesh.everywhere(options.mesh, np.full(options.batch, number, np.int32))


# ---- measuring ----------------------------------------------------------------------------------


def _measure(subject: Subject, batches: Sequence[int]) -> Iterator[Row]:
    """A row for each step, and on a GPU the peer's beside it."""
    read = None
    if _on_gpu():
        read = timing.ceilings(timing.CuptiTimer())["read"] * subject.split.get("devices", 1)
        yield {"op": "ceiling", "case": "read", "impl": "xla", "tbps": round(read, 4)}
    caches = dict.fromkeys((subject.options.cache, "stacked"))
    for cache in caches:
        _must_hold(subject, cache)
    for batch, cache in itertools.product(batches, caches):
        options = subject.at(cache, batch)
        yield row_of(subject, options, f"{rows.OURS}{cache}", our_chunk(subject, options), read)
        if subject.has_peer:
            other = subject.at("stacked", batch)
            chunk = peer_chunk(subject, other, "cudnn")
            yield row_of(subject, options, "cudnn", chunk, read)


def _must_hold(subject: Subject, cache: str) -> None:
    """Compares two layers of the model with the reference: nothing is timed that is wrong."""
    config, params = subject.config, subject.params
    if not config.windows:
        config = dataclasses.replace(config, layers=min(2, config.layers))
        runs = zip(params["runs"], config.runs, strict=False)
        cut = [{name: x[:count] for name, x in run.items()} for run, (count, _) in runs]
        params = params | {"runs": tuple(cut)}
    options = subject.at(cache, 2, capacity=128, chunk=4, keep_logits=True)
    prompts = np.random.default_rng(0).integers(0, config.vocab, (3, 33)).tolist()
    run = decode.Run(config, params, options, prompts, 9)
    for _ in run:
        pass
    for row in decode_check.rows(run, params):
        if not row.held:
            raise ValueError(f"report: the {cache} cache decodes wrongly, nothing is timed: {row}")


def our_chunk(subject: Subject, options: Options) -> Callable[[], Array]:
    """A call of the next chunk of our steps, over a cache full of random numbers."""
    config, mesh = subject.config, options.mesh

    @jax.jit
    def create() -> Any:
        leaves, tree = jax.tree.flatten(options.create_cache(config))
        for n, x in enumerate(leaves):
            if jnp.issubdtype(x.dtype, jnp.floating):
                leaves[n] = jax.random.normal(jax.random.key(n), x.shape, x.dtype)
        return jax.tree.unflatten(tree, leaves)

    extend = jax.jit(lambda cache, rows: cache.extend(rows), donate_argnums=0)
    cache = extend(lm_mesh.made(mesh, create, lm_mesh.HEADS), subject.lengths(options))
    state = lm_mesh.made(mesh, functools.partial(State.create, options))
    carry = [(cache, dataclasses.replace(state, left=_each(options, 2**30)))]

    def chunk() -> Array:
        cache, state, tokens, _ = programs.steps(config, options, subject.params, *carry.pop())
        carry.append((cache, state))
        return tokens

    return chunk


def peer_chunk(
    subject: Subject, options: Options, implementation: decode_peer.Name
) -> Callable[[], Array]:
    """A call of the next chunk of the same steps by `dynamic_update_slice` and jax.nn."""
    step = functools.partial(decode_peer.steps, subject.config, options, implementation)
    program = jax.jit(step, donate_argnums=1, compiler_options=decode_peer.COMPILER)
    caches = decode_peer.create(subject.config, options, 7)
    carry = [(caches, subject.lengths(options), _each(options, 0))]

    def chunk() -> Array:
        state, tokens = program(subject.params, carry.pop())
        carry.append(state)
        return tokens

    return chunk


def row_of(
    subject: Subject,
    options: Options,
    impl: str,
    chunk: Callable[[], Array],
    read: float | None,
) -> Row:
    """The row of a step, whichever implementation makes it."""
    config, batch, wall = subject.config, options.batch, _pace(chunk, options.chunk)
    kv = config.kv_bytes(options.dtype) * subject.context * batch
    # A step reads next to nothing of an embedding that is no head.
    weights = num_bytes(subject.params) - (0 if config.tied else subject.params["embed"].nbytes)
    sizes = {"batch": batch, "context": subject.context, "dtype": options.dtype}
    ms, tbps = statistics.median(wall), (weights + kv) / statistics.median(wall) / 1e9
    start = "".join([subject.name, *(f"_tp{n}" for n in subject.split.values())])
    return {
        "op": "decode_loop",
        "case": f"{start}_{options.cache}_b{batch}_s{subject.context}",
        "impl": impl,
        "problem": {"model": subject.name, **sizes, **subject.split, "chunk": options.chunk},
        "ms": round(ms, 5),
        "ms_min": round(min(wall), 5),
        "n": len(wall),
        "kernels": 0,
        "tbps": round(tbps, 4),
        "checked": True,
        "tokens_per_second": round(batch / ms * 1e3, 1),
        "weight_bytes": weights,
        "live_kv_bytes": kv,
        "roofline": None if read is None else round(tbps / read, 4),
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def _pace(chunk: Callable[[], Array], steps: int) -> list[float]:
    """Wall times of a step, in ms, in chunks of so many."""
    chunk().block_until_ready()
    ahead, ends = chunk(), []
    for _ in range(TURNS + 1):
        now, ahead = ahead, chunk()
        now.block_until_ready()
        ends.append(time.perf_counter() * 1e3 / steps)
    ahead.block_until_ready()
    return [after - before for before, after in itertools.pairwise(ends)]


# ---- the table that a report shows --------------------------------------------------------------


def _table(measured: Sequence[Row], run: Row) -> list[str]:
    """The measured rows as a table; `run`: the summary of the run before."""
    head = f"{'impl':<26}{'batch':>6}{'ms a step':>11}{'tokens/s':>10}{'of memory':>11}"
    waits = [
        f"{words}: median {Spread(**run[name])}" for words, name in WAITS.items() if run.get(name)
    ]
    lines = [_line(row) for row in measured if row["op"] != "ceiling"]
    return [head, *lines, *waits, *([] if _on_gpu() else [NO_GPU])]


def _line(row: Row) -> str:
    """One row as a line."""
    if row["op"] == "ceiling":
        return f"memory is read at {row['tbps']:.2f} TB/s"
    start = f"{row['impl']:<26}{row['problem']['batch']:>6}{row['ms']:>11.3f}"
    share = "-" if row["roofline"] is None else f"{row['roofline']:.1%}"
    return start + f"{row['tokens_per_second']:>10.0f}{share:>11}"
