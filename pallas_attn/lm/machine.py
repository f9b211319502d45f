"""Defaults of this machine: dtype, precision of matmuls, and how much memory it has."""

import contextlib
import os
from collections.abc import Iterator

import jax


def default_dtype() -> str:
    """float32 without a GPU: on a CPU bfloat16 has no matmuls of its own."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


@contextlib.contextmanager
def matmul_precision(asked: str | None, dtype: str) -> Iterator[None]:
    """JAX's default precision of matmuls, in every thread: float32 is float32 unless something else
    is asked for, not the TF32 that JAX takes on GPUs.
    """
    before = jax.config.jax_default_matmul_precision
    default = "highest" if dtype == "float32" else "default"
    jax.config.update("jax_default_matmul_precision", asked or default)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def memory() -> int:
    """Bytes that the default device can hold."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
