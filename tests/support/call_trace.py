"""The functions of the package that run for one warm call, and the files they are in.

`python -m tests.support.call_trace [NAME ...]` prints a line for each call of `CALLS`, or for those
that are named, and then every file with its functions. A call is warm when it was traced before and
jax has forgotten it since: what the package keeps of an earlier call does not count, what it does
for every new program does. Functions are counted once, however often they run; lambdas and
generator expressions count.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from types import CodeType, FrameType

import jax
import jax.numpy as jnp

import pallas_attn as pa
from pallas_attn._call import device

ROOT = pathlib.Path(pa.__file__).parent
KERNELS = "kernels/"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The functions that one call ran."""

    functions: frozenset[CodeType]

    @property
    def files(self) -> dict[str, list[str]]:
        """Qualified names of the functions, by file relative to the package."""
        names: dict[str, list[str]] = {}
        for code in self.functions:
            file = str(pathlib.Path(code.co_filename).relative_to(ROOT))
            names.setdefault(file, []).append(code.co_qualname)
        return {file: sorted(names[file]) for file in sorted(names)}

    @property
    def kernel_files(self) -> list[str]:
        """The files of `kernels/` among them."""
        return [name for name in self.files if name.startswith(KERNELS)]


def trace(call: Callable[..., object], *shapes: object) -> Trace:
    """The functions that run when `call` is traced at `shapes` again, for a Hopper GPU."""
    root, functions = str(ROOT), set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            functions.add(frame.f_code)

    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)  # else it looks for lowered kernels
    with device.assume("sm90"):
        _trace_once(call, shapes)
        jax.clear_caches()
        sys.setprofile(profile)
        try:
            _trace_once(call, shapes)
        finally:
            sys.setprofile(None)
            jax.config.update("jax_compilation_cache_dir", kept)
    return Trace(frozenset(functions))


def _trace_once(call: Callable[..., object], shapes: tuple[object, ...]) -> None:
    jax.jit(lambda *arrays: call(*arrays)).trace(*shapes)


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _cache() -> pa.StackedCache:
    return jax.eval_shape(lambda: pa.StackedCache.create(16, 4096, kv_heads=8, head_dim=128))


def forward() -> Trace:
    """Plain causal attention, `[2, 4096, 16, 128]` bfloat16."""
    q = _shape(2, 4096, 16, 128)
    return trace(lambda q, k, v: pa.flash_attention(q, k, v, mask=pa.CAUSAL), q, q, q)


def decode() -> Trace:
    """One new token for each of 16 sequences of a stacked cache."""
    return trace(lambda q, cache: pa.decode_attention(q, cache), _shape(16, 32, 128), _cache())


def append() -> Trace:
    """One new row for each of 16 sequences of a stacked cache."""
    row = _shape(16, 8, 128)
    return trace(lambda cache, k, v: pa.append_kv(cache, k, v), _cache(), row, row)


def prefill() -> Trace:
    """512 query rows for each of 16 sequences of a stacked cache."""
    q = _shape(16, 512, 32, 128)
    return trace(lambda q, cache: pa.decode_attention(q, cache), q, _cache())


def gradients() -> Trace:
    """`forward`, and the gradients of q, k and v."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return pa.flash_attention(q, k, v, mask=pa.CAUSAL).astype(jnp.float32).sum()

    q = _shape(2, 4096, 16, 128)
    return trace(jax.grad(loss, (0, 1, 2)), q, q, q)


CALLS = {"forward": forward, "decode": decode, "append": append, "prefill": prefill}
CALLS |= {"gradients": gradients}


def main(names: list[str]) -> None:
    """Prints the traces of the named calls, or of all."""
    for name in names or CALLS:
        called = CALLS[name]()
        lines = [
            f"{name}: {len(called.functions)} functions in {len(called.files)} files, "
            f"{len(called.kernel_files)} of kernels/"
        ]
        lines += [f"  {file}: {', '.join(names)}" for file, names in called.files.items()]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
