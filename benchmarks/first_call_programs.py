"""Programs whose first call `first_call` times, each in a process that runs this file.

It imports jax and the package and nothing else of the benchmark, starts the GPU by a small program,
makes the arrays, and then times tracing, lowering, compiling and the first run by wall time. The
imports that a first call makes count, and CUDA's start does not.
"""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

_BEGUN = time.perf_counter()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

_AFTER_JAX = time.perf_counter()

OURS = "pallas_attn"
STEPS = ("trace_s", "lower_s", "compile_s", "run_s")
Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # last: donated arguments


@dataclasses.dataclass(frozen=True)
class Case:
    """One program; `sizes` are what its maker takes."""

    name: str
    make: Callable[..., Program]
    sizes: dict[str, Any]
    impls: tuple[str, ...] = (OURS,)

    def problem(self) -> dict[str, Any]:
        return {"program": self.make.__name__, **self.sizes}


SHAPE = (2, 4096, 16, 128)  # [B, T, N, H]


def attention(
    impl: str,
    *,
    layers: int,
    both: bool,
    documents: bool = False,
    shape: tuple[int, int, int, int] = SHAPE,
) -> Program:
    """Causal layers over bfloat16 of a shape, or documents of 1000 rows; `both`: and gradients."""
    q, k, v = (_normal(n, shape) for n in range(3))
    ids = (
        jnp.arange(shape[1], dtype=jnp.int32)[None].repeat(shape[0], 0) // 1000
        if documents
        else None
    )
    attend = functools.partial(_attend, impl, ids)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(layers):
            q = attend(q, k, v)
        return q

    def loss(*arrays: jax.Array) -> jax.Array:
        return forward(*arrays).astype(jnp.float32).sum()

    return (jax.grad(loss, (0, 1, 2)) if both else forward), (q, k, v), ()


def _attend(impl: str, ids: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    if impl == OURS:
        import pallas_attn as pa

        return pa.flash_attention(q, k, v, mask=pa.CAUSAL, segment_ids=ids)
    mask = None if ids is None else (ids[:, None, :, None] == ids[:, None, None, :])
    peer: Literal["cudnn", "xla"] = "cudnn" if impl == "cudnn" else "xla"
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=peer)


def cache(impl: str, *, kind: str, sequences: int, rows: int, room: int = 1024) -> Program:
    """A step that appends and decodes a row of each sequence, with the cache donated, or more rows
    of each over the cache; 32 query heads and 8 kv heads of 128.
    """
    import pallas_attn as pa

    del impl
    q, k, v = (_normal(n, (sequences, rows, heads, 128)) for n, heads in enumerate((32, 8, 8)))
    sizes = (8, 128)
    made: pa.KVCache
    if kind == "stacked":
        made = pa.StackedCache.create(sequences, room, *sizes)
    elif kind == "paged":
        made = pa.PagedCache.create(sequences, sequences * room // 128, 128, *sizes)
    else:
        made = pa.PerSequenceCache.create([room] * sequences, *sizes)
    if rows > 1:
        return (lambda q, cache: pa.decode_attention(q, cache)), (q, made.extend(rows)), ()

    def step(q: jax.Array, k: jax.Array, v: jax.Array, cache: pa.KVCache) -> Any:
        cache = pa.append_kv(cache, k, v)
        return pa.decode_attention(q, cache), cache

    return step, (q, k, v, made), (3,)


def imports(impl: str) -> Program:
    """Case of the imports alone, which calls nothing."""
    raise AssertionError(impl)


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _attention(name: str, *impls: str, layers: int = 1, **sizes: bool) -> Case:
    return Case(name, attention, {"layers": layers} | sizes, (OURS, *impls))


def _cache(name: str, kind: str, sequences: int = 32, rows: int = 1) -> Case:
    return Case(name, cache, {"kind": kind, "sequences": sequences, "rows": rows})


CASES = (
    Case("import", imports, {}, (OURS, "jax")),
    _attention("fwd", "cudnn", "xla", both=False),
    _attention("both", "cudnn", "xla", both=True),
    _attention("docs", "xla", both=True, documents=True),
    _attention("layers_8", "cudnn", layers=8, both=True),
    _attention("layers_32", "cudnn", layers=32, both=True),
    *(_cache(f"step_{kind}", kind) for kind in ("stacked", "paged", "separate")),
    *(_cache(f"prefill_{kind}", kind, rows=512) for kind in ("stacked", "paged", "separate")),
    _cache("prefill_separate_128", "separate", 128, 512),
)


# ---- timing --------------------------------------------------------------------------------------


def measure(case: Case, impl: str) -> dict[str, float]:
    """Seconds of each step; of imports, of jax alone or of the package after it."""
    if case.make is imports:
        if impl == "jax":
            return {"import_s": _AFTER_JAX - _BEGUN}
        start = time.perf_counter()
        import pallas_attn

        del pallas_attn
        return {"import_s": time.perf_counter() - start}
    call, arrays, donated = case.make(impl, **case.sizes)
    jax.block_until_ready((jax.jit(lambda x: x + 1)(jnp.zeros(8)), arrays))  # CUDA's start
    jitted, times, stage = jax.jit(call, donate_argnums=donated), [time.perf_counter()], None
    for step in (
        lambda _: jitted.trace(*arrays),
        lambda traced: traced.lower(),
        lambda lowered: lowered.compile(),
        lambda compiled: jax.block_until_ready(compiled(*arrays)),
    ):
        stage = step(stage)
        times.append(time.perf_counter())
    ends = zip(times, times[1:], strict=False)
    return dict(zip(STEPS, (end - start for start, end in ends), strict=True))


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", sys.argv[3] or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    (CASE,) = (case for case in CASES if case.name == sys.argv[1])
    sys.stdout.write(json.dumps(measure(CASE, sys.argv[2])) + "\n")
