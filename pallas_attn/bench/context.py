"""Attention over a sequence that all GPUs of this machine share, beside one of them.

Wall time of jitted steps, since what counts is when the last device has finished. Steps follow each
other without a wait, as those of a training loop do, for TURN_MS a turn. Turns begin with all GPUs
at rest: at work, a GPU reaches its power limit within a turn and slows down, and one that rested in
the turn before would be ahead. `efficiency` is the time of one GPU, the first, over n times that of
n. GPUs of one kind are not equally fast and a step ends with the slowest, so each of them is timed
alone: `alone_ms`. Who else is timed: the ring of our own kernels (plain ppermutes of K and V), and,
forward, a ring of cuDNN's. Of a cache whose rows are split a step is TOKENS new tokens of one
sequence, in a loop within the program.
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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import pallas_attn as pa
from pallas_attn.bench import rows
from pallas_attn.bench.rows import Row

ROWS = PartitionSpec(None, "cp")
LOSSES = 0.01  # relative, of the root mean square, of who differs from one GPU
TURN_MS = 100
REST_S = 0.25  # before each turn
TOKENS = 32


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
        """Of all devices; the backward counts 2.5 times as much as the forward."""
        documents, last = divmod(self.rows, self.document or self.rows)
        pairs = documents * _pairs(self.document or self.rows, self.window) + _pairs(
            last, self.window
        )
        return (3.5 if self.both else 1) * 4 * self.q_heads * self.head_dim * pairs

    def attend(self, q: Any, k: Any, v: Any, *ids: Any, context: pa.Context | None = None) -> Any:
        """`ids`: int32[1, rows], which document each row belongs to, where the case has some."""
        mask = pa.CAUSAL if self.window is None else pa.sliding_window(self.window)
        segments = ids[0] if ids else None
        return pa.flash_attention(q, k, v, mask=mask, segment_ids=segments, context=context)

    def subjects(self, seed: int) -> dict[str, Any]:
        """Programs with their arrays, of one GPU and of all, by name."""
        devices = len(jax.devices())
        mesh, context = _mesh(), pa.Context("cp", self.order)
        heads = (self.q_heads, self.kv_heads, self.kv_heads, self.q_heads)
        whole = [
            jax.random.normal(key, (1, self.rows, n, self.head_dim), jnp.bfloat16)
            for key, n in zip(jax.random.split(jax.random.key(seed), 4), heads, strict=True)
        ]
        if self.document is not None:
            whole.append(jnp.arange(self.rows, dtype=jnp.int32)[None] // self.document)
        where = NamedSharding(mesh, ROWS)
        split = [jax.device_put(context.reorder(x, devices), where) for x in whole]
        found = {"one": (_step(self, self.attend), whole)}
        for name, local in _locals(self, context).items():
            checked = name.startswith(rows.OURS)  # cuDNN's results do not say how they vary
            call = jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=checked)
            found[name] = (_step(self, call), split)
        return found

    def in_order(self, result: Any) -> Any:
        """Of all GPUs, as one has it."""
        return pa.Context("cp", self.order).restore(result, len(jax.devices()))

    def rate(self, ms: float, devices: int) -> dict[str, float]:
        return {"tflops": round(self.flops() / devices / ms / 1e9, 1)}


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """New tokens of one sequence whose rows in a stacked cache are split over the devices."""

    name: str
    rows: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def subjects(self, seed: int) -> dict[str, Any]:
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
        filled = functools.partial(_filled, keys=keys)
        specs = jax.eval_shape(lambda: create(context=context)).specs()
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        local = jax.shard_map(
            _decode_tokens,
            mesh=mesh,
            in_specs=(specs, *(PartitionSpec(),) * 3),
            out_specs=PartitionSpec(),
        )
        cache = jax.jit(lambda: filled(create()))()
        split = jax.jit(lambda: filled(create(context=context)), out_shardings=where)()
        return {
            "one": (jax.jit(_decode_tokens), (cache, *new)),
            f"{rows.OURS}rows": (jax.jit(local), (split, *new)),
        }

    def in_order(self, result: Any) -> Any:
        return result

    def rate(self, ms: float, devices: int) -> dict[str, float]:
        read = 2 * self.rows * self.kv_heads * self.head_dim * 2 * TOKENS
        return {"tbps": round(read / devices / ms / 1e9, 3)}


def _mesh() -> Any:
    return jax.make_mesh((len(jax.devices()),), ("cp",), (jax.sharding.AxisType.Auto,))


def _filled(cache: Any, keys: Any) -> Any:
    """With random rows, but for TOKENS at the end."""
    k, v = (
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys[1:], (cache.k, cache.v), strict=True)
    )
    lengths = jnp.asarray(cache.capacities, jnp.int32) - TOKENS
    return dataclasses.replace(cache, k=k, v=v, lengths=lengths)


def _decode_tokens(cache: Any, q: Any, k: Any, v: Any) -> Any:
    """The outputs of TOKENS steps, each of which appends a token and attends."""

    def step(cache, row):
        cache = pa.append_kv(cache, *row[1:])
        return cache, pa.decode_attention(row[0], cache)

    return (lax.scan(step, cache, (q, k, v))[1],)


def _pairs(rows: int, window: int | None) -> float:
    """(query, key) that a causal sequence of so many rows sees."""
    span = min(window or rows, rows)
    return rows * span - span * (span - 1) / 2


BOTH = ("forward", "both")
CASES: tuple[Case | CacheCase, ...] = (
    *(
        Case(f"zigzag_{what}_t{size}", size, what == "both")
        for size in (32768, 65536, 131072)
        for what in BOTH
    ),
    # 8192 rows a GPU, of two and of four.
    *(
        Case(f"zigzag_forward_t{size}_n64k8", size, both=False, q_heads=64)
        for size in (16384, 32768)
    ),
    # Whose work is as large on every device as its rows are.
    *(
        Case(f"{name}_{what}_t131072", 131072, what == "both", order="contiguous", **bound)
        for name, bound in (("window4096", {"window": 4096}), ("documents8192", {"document": 8192}))
        for what in BOTH
    ),
    CacheCase("rows_decode_t131072", 131072),
    CacheCase("rows_decode_t1048576", 1048576),
)
Step = Any  # a jitted function, or one that is compiled


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
    wrong = 0
    here = rows.Provenance.here(commit)
    for case in chosen:
        found, lost = time_case(case, seed, turns, here)
        wrong += lost
        for row in found:
            line = f"{row['case']:<29}{row['impl']:<20}{row['ms']:>9.2f} ms"
            rates = {"tflops": "TFLOP/s", "tbps": "TB/s"}
            rate = "".join(f"{row[x]:>8.4g} {unit}" for x, unit in rates.items() if x in row)
            sys.stdout.write(f"{line}{row['efficiency']:>8.3f}{rate}\n")
        sys.stdout.write(f"{'':<29}{'each GPU alone':<20}{found[0]['alone_ms']} ms\n")
        sys.stdout.flush()
        if out is not None:
            rows.append(out, found)
    return int(wrong > 0)


def time_case(
    case: Case | CacheCase, seed: int, turns: int, provenance: rows.Provenance
) -> tuple[list[Row], int]:
    """A row for each of those who are right, and how many are not."""
    devices = len(jax.devices())
    made = case.subjects(seed)
    step, whole = made["one"]
    others = {f"one on {d}": (step, jax.device_put(whole, d)) for d in jax.devices()[1:]}
    subjects, given = ({name: x[n] for name, x in (made | others).items()} for n in (0, 1))
    checked = [name for name in made if name != "one"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = {name: step.lower(*given[name]) for name, step in subjects.items()}
        subjects = dict(
            zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True)
        )
    want = subjects["one"](*whole)
    wrong = [n for n in checked if not _same(case, want, subjects[n](*given[n]))]
    for name in wrong:
        sys.stderr.write(f"{case.name}: {name} differs from one GPU\n")
        del subjects[name]
    del want
    times = _interleaved({n: functools.partial(s, *given[n]) for n, s in subjects.items()}, turns)
    alone = times.pop("one")
    each_alone = [statistics.median(x) for x in (alone, *(times.pop(name) for name in others))]
    problem = dataclasses.asdict(case) | {"devices": devices}
    found = []
    for name, each in {"pallas_attn/one": alone, **times}.items():
        count = 1 if each is alone else devices
        ms = statistics.median(each)
        row: Row = {"op": "context", "case": case.name, "impl": name, "problem": problem}
        row |= {"ms": round(ms, 4), "ms_min": round(min(each), 4), "n": len(each), "kernels": 0}
        row |= case.rate(ms, count) | {"checked": True}
        row["efficiency"] = round(statistics.median(alone) / (count * ms), 4)
        row["alone_ms"] = [round(ms, 4) for ms in each_alone]
        found.append(row | dataclasses.asdict(provenance))
    return found, len(wrong)


def _locals(case: Case, context: pa.Context) -> dict[str, Step]:
    """What a device computes, by name."""
    ring = dataclasses.replace(context, method="ring")
    found: dict[str, Step] = {
        f"pallas_attn/{c.method}": functools.partial(case.attend, context=c)
        for c in (context, ring)
    }
    causal = case.order == "zigzag" and case.window is None and case.document is None
    if causal and not case.both and jax.devices()[0].platform == "gpu":  # its lse has no derivative
        found["cudnn_ring"] = _cudnn_ring
    return found


def _cudnn_ring(q: Any, k: Any, v: Any) -> Any:
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

    def some(rows: Any, keys: Any, values: Any, causal: bool = False) -> Any:
        out, lse = attend(rows, keys, values, is_causal=causal)
        return out, lse.swapaxes(1, 2).astype(jnp.float32)

    found: list[list[Any]] = [[], []]
    for step, slot, row in itertools.product(range(shards), (0, 1), (0, 1)):
        source = (device - step) % shards
        there = (source, 2 * shards - 1 - source)[slot]
        keys, values = (x[:, slot * size : (slot + 1) * size] for x in (k, v))
        given = (queries[row], keys, values)
        if step == 0 and slot == row:
            found[row].append(some(*given, causal=True))
        else:
            found[row].append(lax.cond(there < numbers[row], some, _nothing, *given))
        if (slot, row) == (1, 1):
            k, v = (lax.ppermute(x, "cp", pairs) for x in (k, v))
    parts = [pa.merge_attention(*zip(*each, strict=True))[0] for each in found]
    return jnp.concatenate(parts, axis=1)


def _nothing(rows: Any, keys: Any, values: Any) -> Any:
    """What queries get who see none of the keys."""
    del keys, values
    lse = rows[..., 0].swapaxes(1, 2).astype(jnp.float32)
    return jnp.zeros_like(rows), jnp.full_like(lse, -jnp.inf)


def _step(case: Case, call: Step) -> Step:
    """The jitted step: (q, k, v, do, *ids) -> (out,), or (out, dq, dk, dv)."""

    def step(q: Any, k: Any, v: Any, do: Any, *ids: Any) -> Any:
        if not case.both:
            return (call(q, k, v, *ids),)
        out, back = jax.vjp(lambda *x: call(*x, *ids), q, k, v)
        return (out, *back(do))

    return jax.jit(step)


def _same(case: Case | CacheCase, want: Any, found: Any) -> bool:
    """Whether all results are within LOSSES of one GPU's."""
    for w, f in zip(want, found, strict=True):
        if not _close(w, case.in_order(jax.device_put(f, w.sharding))):
            return False
    return True


@jax.jit
def _close(want: Any, found: Any) -> Any:
    want, found = (x.astype(jnp.float32) for x in (want, found))
    return jnp.square(want - found).mean() < LOSSES**2 * jnp.square(want).mean()


def _interleaved(steps: dict[str, Step], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turns of TURN_MS and of three calls at least, after REST_S each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    counts = dict.fromkeys(steps, 3)
    for turn in range(turns + 1):
        for name, step in steps.items():
            time.sleep(REST_S)
            start, count = time.perf_counter(), counts[name]
            for _ in range(count):
                result = step()
            jax.block_until_ready(result)
            ms = (time.perf_counter() - start) / count * 1e3
            if turn:
                times[name].append(ms)
            else:  # the first one warms up
                counts[name] = max(count, math.ceil(TURN_MS / ms))
    return times
