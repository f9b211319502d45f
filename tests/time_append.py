"""Device times of the append kernel on this GPU, beside XLA's own updates, as rows of JSON.

    python -m tests.time_append --out results/append_h200.jsonl

Every subject is first checked, byte for byte, on the inputs that it is then timed on. XLA and the
kernel take turns in one process. A long append runs over a flushed L2, and is compared with an
elementwise pass over as many bytes and with one over 4 GiB.
"""

import argparse
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.bench import rows, timing
from pallas_attn.kernels import append
from tests.append_cases import Case, assert_same_bytes

KINDS = ("per_sequence", "stacked", "paged")
SHORT = tuple(("per_sequence", m) for m in (1, 32, 128, 256)) + (("stacked", 128), ("paged", 128))


def ours(problem, config, k_cache, v_cache, rest):
    return append.run(rest._replace(k_cache=k_cache, v_cache=v_cache), problem, config)[:2]


def xla(problem, config, k_cache, v_cache, rest):
    """What a program without a kernel writes: an update a sequence, or one scatter."""
    del config
    span = rest.start[:, None] + jnp.arange(problem.new_rows, dtype=jnp.int32)

    def update(cache, new):
        if problem.kind == "per_sequence":
            zero = jnp.int32(0)
            return tuple(
                lax.dynamic_update_slice(array, new[m].swapaxes(0, 1), (zero, rest.start[m], zero))
                for m, array in enumerate(cache)
            )
        slab, row = jnp.arange(problem.sequences)[:, None], span
        if problem.kind == "paged":
            slab = jnp.take_along_axis(rest.page_table, span // problem.page_size, axis=1)
            row = span % problem.page_size
        return cache.at[slab, :, row].set(new, unique_indices=True, indices_are_sorted=False)

    return update(k_cache, rest.k), update(v_cache, rest.v)


class Runner:
    """A compiled append over sets of buffers, which it owns and hands on from call to call."""

    def __init__(self, case: Case, f: Any, sets: list[Any], config: append.Config | None = None):
        given = [jax.tree.map(jnp.array, inputs) for inputs in sets]
        self.rests = [one._replace(k_cache=None, v_cache=None) for one in given]
        self.caches = [(one.k_cache, one.v_cache) for one in given]
        step = functools.partial(f, case.problem, config)
        step.__name__ = f.__name__
        begin = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*self.caches[0], self.rests[0])
        self.step = lowered.compile()
        self.first_call_s = time.perf_counter() - begin
        self.turn = 0

    def __call__(self) -> Any:
        i = self.turn % len(self.caches)
        self.turn += 1
        self.caches[i] = self.step(*self.caches[i], self.rests[i])
        return self.caches[i]

    def check(self, wanted: list[Any]) -> None:
        for _ in self.caches:
            self()
        for got, want in zip(self.caches, wanted, strict=True):
            assert_same_bytes(got, want)


def inside(case: Case, rng: np.random.Generator) -> Any:
    """Inputs all of whose rows have a place: XLA's update would clamp the others."""
    inputs = case.draw(rng)
    capacities = np.resize(case.capacities, case.sequences)
    start = rng.integers(0, capacities - case.new_rows + 1).astype(np.int32)
    if case.kind == "paged":
        width = case.capacity // case.page_size
        table = rng.permutation(case.pages)[: case.sequences * width]
        inputs = inputs._replace(page_table=table.astype(np.int32).reshape(-1, width))
    counts = None
    if case.ragged:
        counts = np.full(case.sequences, case.new_rows, np.int32)
    return inputs._replace(start=start, new_lengths=counts)


def moved_bytes(case: Case) -> int:
    """Read and written."""
    size = jnp.dtype(case.dtype).itemsize
    return 2 * 2 * case.sequences * case.new_rows * case.kv_heads * case.head_dim * size


def measure(case: Case, runners: dict[str, Runner], sets: list[Any], **how: Any) -> list[dict]:
    wanted = [case.expected(inputs) for inputs in sets]
    for runner in runners.values():
        runner.check(wanted)
    subjects = [timing.Subject(name, runner) for name, runner in runners.items()]
    found = timing.interleave(timing.CuptiTimer(), subjects, **how)
    problem = {
        "kind": case.kind,
        "sequences": case.sequences,
        "new_rows": case.new_rows,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "capacity": case.capacity,
        "dtype": case.dtype,
        "ragged": case.ragged,
    }
    name = f"append_{case.kind}_m{case.sequences}_t{case.new_rows}" + (
        "_ragged" if case.ragged else ""
    )
    return [
        {
            "op": "append",
            "case": name,
            "impl": impl,
            "problem": problem,
            "ms": t.ms,
            "ms_min": t.ms_min,
            "n": t.n,
            "tbps": moved_bytes(case) / t.ms / 1e9,
            "kernels": t.kernels,
            "checked": True,
            "first_call_s": round(runners[impl].first_call_s, 3),
        }
        for impl, t in found.items()
    ]


def short(rng: np.random.Generator) -> list[dict]:
    found = []
    for kind, m in SHORT:
        case = Case(kind, m, 1, 8, 128, capacity=1024, spread=0, page_size=16)
        sets = [inside(case, rng)]
        runners = {
            "pallas_attn/append": Runner(case, ours, sets),
            "xla": Runner(case, xla, sets),
        }
        found += measure(case, runners, sets, turns=5, times=8)
        show(found[-2:])
    return found


def long(rng: np.random.Generator, words: tuple[int, ...]) -> list[dict]:
    found = []
    for ragged in (False, True):
        for kind in KINDS:
            case = Case(kind, 8, 2048, 8, 128, capacity=2560, spread=0, page_size=16, ragged=ragged)
            sets = [inside(case, rng)]
            runners = {}
            for n in words:
                name = "pallas_attn/append" + (f"[words={n}]" if len(words) > 1 else "")
                runners[name] = Runner(
                    case, ours, sets, append.Config(n) if len(words) > 1 else None
                )
            if not ragged:
                runners["xla"] = Runner(case, xla, sets)
            found += measure(case, runners, sets, turns=4, times=2, flush=timing.cache_flusher())
            show(found[-len(runners) :])
    return found


def copies(rng: np.random.Generator) -> list[dict]:
    """Elementwise passes: over the bytes of a long append, and over 4 GiB."""
    del rng
    found = []
    step = jax.jit(lambda x: x + 1)
    for name, nbytes in (("67MB", 2**26), ("4GiB", 2**32)):
        blocks = [jnp.ones(nbytes // 4, jnp.float32) + i for i in range(2)]
        for i, block in enumerate(blocks):
            assert float(step(block).min()) == float(step(block).max()) == 2 + i
        turn = iter(range(10**6))
        subject = timing.Subject(
            "xla", lambda blocks=blocks, turn=turn: step(blocks[next(turn) % 2])
        )
        flush = timing.cache_flusher()
        t = timing.interleave(timing.CuptiTimer(), [subject], turns=4, times=2, flush=flush)["xla"]
        row = {"op": "copy", "case": f"copy_{name}", "impl": "xla", "problem": {"bytes": nbytes}}
        facts = {"ms": t.ms, "ms_min": t.ms_min, "n": t.n, "tbps": 2 * nbytes / t.ms / 1e9}
        found.append(row | facts | {"kernels": t.kernels, "checked": True})
        show(found[-1:])
    return found


def show(found: list[dict]) -> None:
    for row in found:
        times = f"{1e3 * row['ms']:10.2f} us (min {1e3 * row['ms_min']:.2f})"
        line = f"{row['case']:36}{row['impl']:28}" + times
        first = f"  first call {row['first_call_s']} s" if "first_call_s" in row else ""
        sys.stdout.write(line + f"{row['tbps']:8.3f} TB/s {row['kernels']:4} kernels{first}" + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--commit")
    parser.add_argument("--words", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    provenance = rows.Provenance.here(options.commit)
    warm = Case("per_sequence", 1, 1, 8, 128, capacity=1024, spread=0)
    Runner(warm, ours, [inside(warm, rng)])  # the first compilation of a process is not a kernel's
    found = copies(rng) + short(rng) + long(rng, tuple(options.words))
    shared = {"run": provenance.run, "gpu": provenance.gpu, "jax": provenance.jax}
    shared |= {"commit": provenance.commit, "date": provenance.date}
    with open(options.out, "a") as out:
        out.writelines(json.dumps(row | shared) + "\n" for row in found)


if __name__ == "__main__":
    sys.exit(main())
