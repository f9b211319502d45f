"""Attention over a sequence that all GPUs of this machine share, beside one of them.

Wall time of jitted steps, since what counts is when the last device has finished. `efficiency` is
the time of one GPU over that of n, times n. Who else is timed: the ring of our own kernels (plain
ppermutes of K and V), and, forward, a ring of cuDNN's.
"""

import concurrent.futures
import dataclasses
import fnmatch
import functools
import itertools
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


def _pairs(rows: int, window: int | None) -> float:
    """(query, key) that a causal sequence of so many rows sees."""
    span = min(window or rows, rows)
    return rows * span - span * (span - 1) / 2


BOTH = ("forward", "both")
CASES = (
    *(
        Case(f"zigzag_{what}_t{size}", size, what == "both")
        for size in (32768, 65536, 131072)
        for what in BOTH
    ),
    Case("zigzag_forward_t16384_n64k8", 16384, both=False, q_heads=64),
    # Whose work is as large on every device as its rows are.
    *(
        Case(f"{name}_{what}_t131072", 131072, what == "both", order="contiguous", **bound)
        for name, bound in (("window4096", {"window": 4096}), ("documents8192", {"document": 8192}))
        for what in BOTH
    ),
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
            line = f"{row['case']:<24}{row['impl']:<28}{row['ms']:>9.2f} ms"
            sys.stdout.write(f"{line}{row['efficiency']:>8.3f}{row['tflops']:>8.0f} TFLOP/s\n")
        sys.stdout.flush()
        if out is not None:
            rows.append(out, found)
    return int(wrong > 0)


def time_case(
    case: Case, seed: int, turns: int, provenance: rows.Provenance
) -> tuple[list[Row], int]:
    """A row for each of those who are right, and how many are not."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("cp",), (jax.sharding.AxisType.Auto,))
    context = pa.Context("cp", case.order)
    heads = (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads)
    keys = jax.random.split(jax.random.key(seed), 4)
    whole = [
        jax.random.normal(key, (1, case.rows, n, case.head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]
    if case.document is not None:
        whole.append(jnp.arange(case.rows, dtype=jnp.int32)[None] // case.document)
    where = NamedSharding(mesh, ROWS)
    split = [jax.device_put(context.reorder(x, len(devices)), where) for x in whole]
    subjects = {"one": _step(case, case.attend)}
    for name, local in _locals(case, context).items():
        checked = name.startswith(rows.OURS)  # cuDNN's results do not say how they vary
        mapped = jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=checked)
        subjects[name] = _step(case, mapped)
    given = {name: whole if name == "one" else split for name in subjects}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = {name: step.lower(*given[name]) for name, step in subjects.items()}
        subjects = dict(
            zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True)
        )
    results = {name: step(*given[name]) for name, step in subjects.items()}
    wrong = [
        name
        for name, found in results.items()
        if name != "one" and not _same(context, len(devices), results["one"], found)
    ]
    for name in wrong:
        sys.stderr.write(f"{case.name}: {name} differs from one GPU\n")
        del subjects[name]
    del results
    times = _interleaved({n: functools.partial(s, *given[n]) for n, s in subjects.items()}, turns)
    alone = times.pop("one")
    problem = dataclasses.asdict(case) | {"devices": len(devices)}
    found = []
    for name, each in {"pallas_attn/one": alone, **times}.items():
        count = 1 if each is alone else len(devices)
        ms = statistics.median(each)
        row: Row = {"op": "context", "case": case.name, "impl": name, "problem": problem}
        row |= {"ms": round(ms, 4), "ms_min": round(min(each), 4), "n": len(each), "kernels": 0}
        row |= {"tflops": round(case.flops() / count / ms / 1e9, 1), "checked": True}
        row["efficiency"] = round(statistics.median(alone) / (count * ms), 4)
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


def _same(context: pa.Context, shards: int, want: Any, found: Any) -> bool:
    """Whether all results are within LOSSES of one GPU's."""
    for w, f in zip(want, found, strict=True):
        here = jax.device_put(f, w.sharding)
        if not _close(w, context.restore(here, shards)):
            return False
    return True


@jax.jit
def _close(want: Any, found: Any) -> Any:
    want, found = (x.astype(jnp.float32) for x in (want, found))
    return jnp.square(want - found).mean() < LOSSES**2 * jnp.square(want).mean()


def _interleaved(steps: dict[str, Step], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turns, three calls of one after the other a turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(3):
                result = step()
            jax.block_until_ready(result)
            if turn:  # the first one warms up
                times[name].append((time.perf_counter() - start) / 3 * 1e3)
    return times
