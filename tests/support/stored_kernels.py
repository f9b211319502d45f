"""A process that lowers kernels for a Hopper GPU, which it pretends to have, and keeps them
(`pallas_attn/_call/store.py`).

`python -m tests.support.stored_kernels FOLDER` prints one line of JSON: `lowered`, the kernels that
it lowered itself; `imported`, whether it imported Mosaic; `program`, a digest of what it lowered.
"""

import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

import pallas_attn as pa
from pallas_attn._call import device, dispatch, store

MOSAIC = "jax.experimental.mosaic.gpu"


@contextmanager
def kept_in(folder: pathlib.Path | None, pretend: bool = True) -> Iterator[list[str]]:
    """Has jax's persistent cache in a folder, on a Hopper GPU that is pretended or on the GPU that
    is there. Yields the kernels that are lowered in the block.
    """
    name = "NVIDIA H200" if pretend else jax.devices()[0].device_kind
    lowered: list[str] = []
    gpu, lower, before = store._gpu, store._lowered, jax.config.jax_compilation_cache_dir

    def counted(call: Any) -> Any:
        lowered.append(call.chosen.module)
        return lower(call)

    store._gpu, store._lowered = (lambda: name), counted
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    forget()
    try:
        with device.assume("sm90") if pretend else nullcontext():
            yield lowered
    finally:
        store._gpu, store._lowered = gpu, lower
        jax.config.update("jax_compilation_cache_dir", before)
        forget()


def forget() -> None:
    """Empties all caches of this process."""
    jax.clear_caches()
    store._program.cache_clear()
    dispatch._select.cache_clear()


def lower(function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> str:
    """The program for a GPU."""
    traced = jax.jit(function, donate_argnums=donate).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def step(new: jax.Array, cache: pa.StackedCache) -> Any:
    """A row that is appended to a cache and decoded."""
    cache = pa.append_kv(cache, new, new)
    return pa.decode_attention(new, cache), cache


def shapes_of_step() -> tuple[Any, ...]:
    cache = jax.eval_shape(lambda: pa.StackedCache.create(2, 64, 2, 64))
    return jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.bfloat16), cache


def main(folder: str) -> None:
    with kept_in(pathlib.Path(folder)) as lowered:
        text = lower(step, *shapes_of_step())
    digest = hashlib.sha256(text.encode()).hexdigest()
    row = {"lowered": lowered, "imported": MOSAIC in sys.modules, "program": digest}
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
