"""Defaults of this machine: dtype, precision of matmuls, how much memory it has, and the folder of
compiled programs.
"""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

PRECISIONS = ("default", "high", "highest")


def default_dtype() -> str:
    """float32 without a GPU: on a CPU bfloat16 has no matmuls of its own."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def must_be_host(*arrays: object) -> None:
    """Raises ValueError within a function that jax traces; `arrays`: pytrees of a call."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves([*arrays, jnp.zeros(())])):
        raise ValueError(
            "lm: expected a call outside of jax.jit and the like, got one inside, which is traced: "
            "load, generate, complete and stream work on the host; call them outside, or take "
            "pallas_lm.model.mixed and lm.sample inside"
        )


@contextlib.contextmanager
def matmul_precision(asked: str | None, dtype: str) -> Iterator[None]:
    """Sets JAX's default precision of matmuls, in every thread: float32 means float32, not the TF32
    that JAX takes on GPUs, unless another precision is asked for.
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


def keep_programs(folder: str | os.PathLike[str] | None = None) -> None:
    """Has jax keep compiled programs on disk: in the next process a first call compiles nothing
    that an earlier process has compiled.

    It is jax's persistent compilation cache, for all programs, however fast they compile. Where it
    is on, attention's lowered kernels are kept too, so that no later process traces them. Call it
    before the first program. Where jax has a folder already, that one stays. Programs and kernels
    are run as they lie there: nobody else may write to the folder.

    Args:
      folder: where; it is made if it is not there. Default: ~/.cache/pallas_attn, as with run.py.

    Raises:
      OSError: the folder cannot be made, read or written.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    path = pathlib.Path.home() / ".cache" / "pallas_attn" if folder is None else folder
    path = pathlib.Path(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
