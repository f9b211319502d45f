"""Attention over a sequence that all GPUs of this machine share, beside a single GPU.

Wall time of jitted steps, since a result is there when the last device has finished. Steps follow
each other without a wait, as those of a training loop do, for TURN_MS a turn. Turns begin with all
GPUs at rest: at work, a GPU reaches its power limit within a turn and slows down, and one that
rested in the turn before would be ahead. `efficiency` is the time of one GPU, the first, over n
times that of n. GPUs of one kind are not equally fast and a step ends with the slowest, so each of
them is timed alone: `alone_ms`. Beside ours are timed the ring of our own kernels (plain ppermutes
of K and V), and, forward, a ring of cuDNN's. For a cache whose rows are split a step is TOKENS new
tokens of one sequence, in a loop within the program.
"""

import concurrent.futures
import dataclasses
import fnmatch
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_attn as pa
from benchmarks import rows
from benchmarks.rows import Row
from benchmarks.subjects import Cache

Array = jax.Array
Step = Any  # a jitted function, or one that is compiled
Results = tuple[Array, ...]
ROWS = PartitionSpec(None, "cp")
LOSSES = 0.01  # relative, of the root mean square, from which a result differs from one GPU's
TURN_MS = 100
REST_S = 0.25  # before each turn
TOKENS = 32
_UNITS = {"tflops": "TFLOP/s", "tbps": "TB/s"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A causal sequence of bfloat16 whose rows are split over the devices."""

    name: str
    rows: int
    both: bool  # with the backward
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    order: str = "zigzag"
    window: int | None = None  # keys that a row sees, its own among them
    document: int | None = None  # rows of each document

    def flops(self) -> float:
        """All devices' together; the backward counts 2.5 times as much as the forward."""
        documents, last = divmod(self.rows, self.document or self.rows)
        pairs = documents * _pairs(self.document or self.rows, self.window)
        pairs += _pairs(last, self.window)
        return (3.5 if self.both else 1) * 4 * self.q_heads * self.head_dim * pairs

    def attend(
        self, q: Array, k: Array, v: Array, *ids: Array, context: pa.Context | None = None
    ) -> Array:
        """`ids`: int32[1, rows], the document of each row, if the case has some."""
        mask = pa.CAUSAL if self.window is None else pa.sliding_window(self.window)
        segments = ids[0] if ids else None
        return pa.flash_attention(q, k, v, mask=mask, segment_ids=segments, context=context)

    def subjects(self, seed: int) -> dict[str, tuple[Step, Any]]:
        """Programs with their arrays, of one GPU and of all, by name."""
        devices, mesh, context = len(jax.devices()), _mesh(), pa.Context("cp", self.order)
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        whole = [
            jax.random.normal(key, (1, self.rows, n, self.head_dim), jnp.bfloat16)
            for key, n in zip(jax.random.split(jax.random.key(seed), 4), heads, strict=True)
        ]
        if self.document is not None:
            whole.append(jnp.arange(self.rows, dtype=jnp.int32)[None] // self.document)
        sharding = NamedSharding(mesh, ROWS)
        split = [jax.device_put(context.reorder(x, devices), sharding) for x in whole]
        programs = {"one": (_step(self, self.attend), whole)}
        for name, local in self._locals(context).items():
            checked = name.startswith(rows.OURS)  # cuDNN's results do not say how they vary
            call = jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=checked)
            programs[name] = (_step(self, call), split)
        return programs

    def _locals(self, context: pa.Context) -> dict[str, Callable[..., Array]]:
        """The function of each device, by name."""
        ring = dataclasses.replace(context, method="ring")
        local: dict[str, Callable[..., Array]] = {
            f"{rows.OURS}{c.method}": functools.partial(self.attend, context=c)
            for c in (context, ring)
        }
        causal = self.order == "zigzag" and self.window is None and self.document is None
        if causal and not self.both and jax.devices()[0].platform == "gpu":
            local["cudnn_ring"] = _cudnn_ring  # its lse has no derivative
        return local

    def in_sequence_order(self, result: Array) -> Array:
        """The result of all GPUs in the order of one."""
        return pa.Context("cp", self.order).restore(result, len(jax.devices()))

    def rate(self, ms: float, devices: int) -> dict[str, float]:
        return {"tflops": round(self.flops() / devices / ms / 1e9, 1)}


def _pairs(rows: int, window: int | None) -> float:
    """(query, key) pairs that a causal sequence of so many rows sees."""
    span = min(window or rows, rows)
    return rows * span - span * (span - 1) / 2


def _step(case: Case, call: Callable[..., Array]) -> Step:
    """The jitted step: (q, k, v, do, *ids) -> (out,), or (out, dq, dk, dv)."""

    def step(q: Array, k: Array, v: Array, do: Array, *ids: Array) -> Results:
        if not case.both:
            return (call(q, k, v, *ids),)
        out, back = jax.vjp(lambda *x: call(*x, *ids), q, k, v)
        return (out, *back(do))

    return jax.jit(step)


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """New tokens of one sequence whose rows in a stacked cache are split over the devices."""

    name: str
    rows: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def subjects(self, seed: int) -> dict[str, tuple[Step, Any]]:
        keys = jax.random.split(jax.random.key(seed), 3)
        sizes = (self.q_heads, self.kv_heads, self.kv_heads)
        new = [
            jax.random.normal(key, (TOKENS, 1, n, self.head_dim), jnp.bfloat16)
            for key, n in zip(keys, sizes, strict=True)
        ]
        mesh, context = _mesh(), pa.Context("cp")
        create = functools.partial(
            pa.StackedCache.create, 1, self.rows, self.kv_heads, self.head_dim, dtype=jnp.bfloat16
        )
        specs = jax.eval_shape(lambda: create(context=context)).specs()
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        ins, outs = (specs, *(PartitionSpec(),) * 3), PartitionSpec()
        local = jax.shard_map(_decode_tokens, mesh=mesh, in_specs=ins, out_specs=outs)
        cache = jax.jit(lambda: _filled(create(), keys))()
        fill = jax.jit(lambda: _filled(create(context=context), keys), out_shardings=shardings)
        return {
            "one": (jax.jit(_decode_tokens), (cache, *new)),
            f"{rows.OURS}rows": (jax.jit(local), (fill(), *new)),
        }

    def in_sequence_order(self, result: Array) -> Array:
        return result

    def rate(self, ms: float, devices: int) -> dict[str, float]:
        read = 2 * self.rows * self.kv_heads * self.head_dim * 2 * TOKENS
        return {"tbps": round(read / devices / ms / 1e9, 3)}


def _mesh() -> Mesh:
    return jax.make_mesh((len(jax.devices()),), ("cp",), (jax.sharding.AxisType.Auto,))


def _filled(cache: Cache, keys: Array) -> Cache:
    """The cache with random rows, but for TOKENS at the end."""
    k, v = (
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys[1:], (cache.k, cache.v), strict=True)
    )
    lengths = jnp.asarray(cache.capacities, jnp.int32) - TOKENS
    return dataclasses.replace(cache, k=k, v=v, lengths=lengths)


def _decode_tokens(cache: Cache, q: Array, k: Array, v: Array) -> Results:
    """The outputs of TOKENS steps, each of which appends a token and attends."""

    def step(cache: Cache, row: Results) -> tuple[Cache, Array]:
        cache = pa.append_kv(cache, *row[1:])
        return cache, pa.decode_attention(row[0], cache)

    return (lax.scan(step, cache, (q, k, v))[1],)


_BOTH = ("forward", "both")
CASES: tuple[Case | CacheCase, ...] = (
    *(
        Case(f"zigzag_{what}_t{size}", size, what == "both")
        for size in (32768, 65536, 131072)
        for what in _BOTH
    ),
    # 8192 rows a GPU, of two and of four.
    Case("zigzag_forward_t16384_n64k8", 16384, both=False, q_heads=64),
    Case("zigzag_forward_t32768_n64k8", 32768, both=False, q_heads=64),
    # Work is as large on every device as its rows are.
    *(
        Case(f"{name}_{what}_t131072", 131072, what == "both", order="contiguous", **bound)
        for name, bound in (("window4096", {"window": 4096}), ("documents8192", {"document": 8192}))
        for what in _BOTH
    ),
    CacheCase("rows_decode_t131072", 131072),
    CacheCase("rows_decode_t1048576", 1048576),
)


# ---- the run ------------------------------------------------------------------------------------


def run(wanted: str, seed: int, turns: int, commit: str | None, out: str | None) -> int:
    """Times the cases whose names match, with commas between patterns; "grid" is all of them."""
    patterns = ["*"] if wanted == "grid" else wanted.split(",")
    chosen = [c for c in CASES if any(fnmatch.fnmatch(c.name, p) for p in patterns)]
    if not chosen:
        raise ValueError(f"cases: {wanted!r} matches none of {', '.join(c.name for c in CASES)}")
    devices = jax.devices()
    if devices[0].platform != "gpu":
        raise ValueError("op: context times a GPU and jax found none, of the two that it wants")
    if len(devices) < 2:
        raise ValueError("op: context wants at least two GPUs and jax found one")
    wrong, here = 0, rows.Provenance.here(commit)
    for case in chosen:
        timed, lost = time_case(case, seed, turns, here)
        wrong += lost
        for row in timed:
            line = (
                f"{row['case']:<29}{row['impl']:<20}{row['ms']:>9.2f} ms{row['efficiency']:>8.3f}"
            )
            rate = "".join(f"{row[x]:>8.4g} {unit}" for x, unit in _UNITS.items() if x in row)
            sys.stdout.write(f"{line}{rate}\n")
        sys.stdout.write(f"{'':<29}{'each GPU alone':<20}{timed[0]['alone_ms']} ms\n")
        sys.stdout.flush()
        if out is not None:
            rows.append(out, timed)
    return int(wrong > 0)


def time_case(
    case: Case | CacheCase, seed: int, turns: int, provenance: rows.Provenance
) -> tuple[list[Row], int]:
    """(a row for each program that is right, how many are not)."""
    devices = len(jax.devices())
    programs = case.subjects(seed)
    step, whole = programs["one"]
    others = {f"one on {d}": (step, jax.device_put(whole, d)) for d in jax.devices()[1:]}
    steps, arrays = ({name: x[n] for name, x in (programs | others).items()} for n in (0, 1))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = [step.lower(*arrays[name]) for name, step in steps.items()]
        compiled = pool.map(lambda x: x.compile(), lowered)
        steps = dict(zip(steps, compiled, strict=True))
    truth = steps["one"](*whole)
    compared = [name for name in programs if name != "one"]
    wrong = [name for name in compared if not _same(case, truth, steps[name](*arrays[name]))]
    for name in wrong:
        sys.stderr.write(f"{case.name}: {name} differs from one GPU\n")
        del steps[name]
    del truth
    calls = {name: functools.partial(step, *arrays[name]) for name, step in steps.items()}
    times = _interleaved(calls, turns)
    alone = times.pop("one")
    each_alone = [statistics.median(x) for x in (alone, *(times.pop(name) for name in others))]
    timed = []
    for name, each in {"pallas_attn/one": alone, **times}.items():
        count = 1 if each is alone else devices
        ms = statistics.median(each)
        problem = dataclasses.asdict(case) | {"devices": devices}
        row: Row = {"op": "context", "case": case.name, "impl": name, "problem": problem}
        row |= {"ms": round(ms, 4), "ms_min": round(min(each), 4), "n": len(each), "kernels": 0}
        row |= case.rate(ms, count) | {"checked": True}
        row["efficiency"] = round(statistics.median(alone) / (count * ms), 4)
        row["alone_ms"] = [round(ms, 4) for ms in each_alone]
        timed.append(row | dataclasses.asdict(provenance))
    return timed, len(wrong)


def _same(case: Case | CacheCase, truth: Results, results: Results) -> bool:
    """Whether all results are within LOSSES of one GPU's."""
    pairs = zip(truth, results, strict=True)
    return all(_close(x, case.in_sequence_order(jax.device_put(y, x.sharding))) for x, y in pairs)


@jax.jit
def _close(truth: Array, result: Array) -> Array:
    truth, result = (x.astype(jnp.float32) for x in (truth, result))
    return jnp.square(truth - result).mean() < LOSSES**2 * jnp.square(truth).mean()


def _interleaved(calls: Mapping[str, Callable[[], Results]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turns of TURN_MS and of three calls at least, after REST_S each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = dict.fromkeys(calls, 3)
    for turn in range(turns + 1):
        for name, call in calls.items():
            time.sleep(REST_S)
            start, count = time.perf_counter(), counts[name]
            for _ in range(count):
                result = call()
            jax.block_until_ready(result)
            ms = (time.perf_counter() - start) / count * 1e3
            if turn:
                times[name].append(ms)
            else:  # the first one warms up
                counts[name] = max(count, math.ceil(TURN_MS / ms))
    return times


# ---- cuDNN's ring -------------------------------------------------------------------------------


def _cudnn_ring(q: Array, k: Array, v: Array) -> Array:
    """Zigzag chunks of keys pass from device to device, each half attended by the halves of the
    queries that see it.
    """
    shards, device = lax.axis_size("cp"), lax.axis_index("cp")
    size = q.shape[1] // 2
    queries = [q[:, :size], q[:, size:]]
    numbers = [device, 2 * shards - 1 - device]
    pairs = [(n, (n + 1) % shards) for n in range(shards)]
    attend = functools.partial(
        jax.nn.dot_product_attention, implementation="cudnn", return_residual=True
    )

    def some(rows: Array, keys: Array, values: Array, causal: bool = False) -> Results:
        out, lse = attend(rows, keys, values, is_causal=causal)
        return out, lse.swapaxes(1, 2).astype(jnp.float32)

    parts: list[list[Any]] = [[], []]
    for step, slot, row in itertools.product(range(shards), (0, 1), (0, 1)):
        source = (device - step) % shards
        number = (source, 2 * shards - 1 - source)[slot]
        keys, values = (x[:, slot * size : (slot + 1) * size] for x in (k, v))
        operands = (queries[row], keys, values)
        if step == 0 and slot == row:
            parts[row].append(some(*operands, causal=True))
        else:
            parts[row].append(lax.cond(number < numbers[row], some, _nothing, *operands))
        if (slot, row) == (1, 1):
            k, v = (lax.ppermute(x, "cp", pairs) for x in (k, v))
    merged = [pa.merge_attention(*zip(*each, strict=True))[0] for each in parts]
    return jnp.concatenate(merged, axis=1)


def _nothing(rows: Array, keys: Array, values: Array) -> Results:
    """The partial result of queries that see none of the keys."""
    del keys, values
    lse = rows[..., 0].swapaxes(1, 2).astype(jnp.float32)
    return jnp.zeros_like(rows), jnp.full_like(lse, -jnp.inf)
