"""A program that one process saves and another runs, without tracing it again.

`python -m tests.support.saved_program save WAY FOLDER` writes the program and its results;
`.. run WAY FOLDER` runs what lies there, and fails where the results are others, where an
executable is traced again, or where the cache lacks a program or has Mosaic imported, which traces
and lowers kernels. WAY is "executable" (`jax.experimental.serialize_executable`), "export"
(`jax.export`) or "cache" (jax's persistent compilation cache, with the package's lowered kernels).
"""

import importlib
import pathlib
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

import pallas_attn as pa

WAYS = ("executable", "export", "cache")
MOSAIC = "jax.experimental.mosaic.gpu"


def step(q: jax.Array, new: jax.Array, cache: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of attention, and a decode step: results of five kernels on a GPU."""
    gradients = jax.grad(lambda x: pa.flash_attention(x, x, x, mask=pa.CAUSAL).sum(), 0)(q)
    held = pa.append_kv(pa.StackedCache.create(2, 64, 2, 64), cache, cache)
    held = pa.append_kv(held, new, new)
    return gradients, pa.decode_attention(q[:, :1], held), held.lengths


def arguments() -> tuple[jax.Array, ...]:
    generator = np.random.default_rng(0)
    shapes = (2, 128, 4, 64), (2, 1, 2, 64), (2, 40, 2, 64)
    return tuple(jnp.asarray(generator.normal(size=shape), jnp.bfloat16) for shape in shapes)


def save(way: str, folder: pathlib.Path) -> None:
    program = jax.jit(step)
    if way == "executable":
        saved = serialize_executable.serialize(program.lower(*arguments()).compile())
        (folder / "program").write_bytes(pickle.dumps(saved))
    elif way == "export":
        exported = jax.export.export(program)(*arguments())
        (folder / "program").write_bytes(exported.serialize())
    results = [np.asarray(x, np.float32) for x in program(*arguments())]
    np.savez(folder / "results.npz", *results)


def run(way: str, folder: pathlib.Path) -> None:
    traced: list[str] = []
    missed: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: traced.append(event) if "jaxpr_trace_duration" in event else None
    )
    jax.monitoring.register_event_listener(
        lambda event, **_: missed.append(event) if "cache_misses" in event else None
    )
    program: Any = jax.jit(step)
    inputs = arguments()
    if way != "cache":
        importlib.import_module(MOSAIC)  # it tells XLA where the library of kernels is
    if way == "executable":
        saved = pickle.loads((folder / "program").read_bytes())
        first = jax.devices()[:1]  # else all that there are
        program = serialize_executable.deserialize_and_load(*saved, execution_devices=first)
    elif way == "export":
        program = jax.export.deserialize((folder / "program").read_bytes()).call
    traced.clear()
    results = program(*inputs)
    with np.load(folder / "results.npz") as wanted:
        for got, name in zip(results, wanted.files, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), wanted[name])
    if way == "executable" and traced:
        raise AssertionError(f"traced: {traced}")
    if way == "cache" and missed:
        raise AssertionError(f"not in the cache: {missed}")
    if way == "cache" and jax.default_backend() == "gpu":
        append_in_place()
    if way == "cache" and MOSAIC in sys.modules:
        raise AssertionError("a kernel was traced")


def append_in_place() -> None:
    """A kept kernel writes into a donated cache."""
    cache, new = pa.StackedCache.create(2, 64, 2, 64), arguments()[1]
    before = cache.k.unsafe_buffer_pointer(), cache.v.unsafe_buffer_pointer()
    after = jax.jit(lambda cache, new: pa.append_kv(cache, new, new), donate_argnums=0)(cache, new)
    if (after.k.unsafe_buffer_pointer(), after.v.unsafe_buffer_pointer()) != before:
        raise AssertionError("an append has copied the cache")


if __name__ == "__main__":
    {"save": save, "run": run}[sys.argv[1]](sys.argv[2], pathlib.Path(sys.argv[3]))
