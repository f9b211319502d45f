"""Ahead-of-time compilation for GPUs that are not here: down to SASS, with what ptxas and XLA said
on the way.

`compile_for(f, *shapes, target="h100")` hands `f` to a worker process, one a GPU generation (code
lowered for one and compiled for another can abort a process), which lives until the tests end. `f`
travels by pickle: a function of a module, or a `functools.partial` of one. The worker needs the
`aot` extra; `available()` says whether it is installed.

`python -m tests.support.aot --digest [NAME ...]` prints digests of the machine code of
tests/support/builds.py.
"""

import atexit
import ctypes
import dataclasses
import gc
import importlib.util
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]

# Facts about a GPU that XLA needs, from the vendor's data sheets and CUDA's table of compute
# capabilities: capability, multiprocessors, shared memory of one and of a block (KiB), L2 (MiB),
# clock (GHz), memory (GB), TB/s.
_GPUS = {
    "a100": ("major: 8 minor: 0", 108, 164, 163, 40, 1.41, 80, 2.04, "NVIDIA A100-SXM4-80GB"),
    "h100": (
        "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        *(132, 228, 227, 50, 1.98, 80, 3.35, "NVIDIA H100 80GB HBM3"),
    ),
    "sm86": ("major: 8 minor: 6", 84, 100, 99, 6, 1.8, 48, 0.77, "NVIDIA RTX A6000"),
    "sm89": ("major: 8 minor: 9", 142, 100, 99, 96, 2.5, 48, 0.86, "NVIDIA L40S"),
    "b200": (
        "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES",
        *(148, 228, 227, 126, 1.97, 180, 7.7, "NVIDIA B200"),
    ),
    "b300": (
        "major: 10 minor: 3 feature_extension: ACCELERATED_FEATURES",
        *(148, 228, 227, 126, 1.97, 288, 8.0, "NVIDIA B300"),
    ),
}

GENERATIONS = {"a100": "sm80", "h100": "sm90", "b200": "sm100", "b300": "sm103"}

# The remark of ptxas on a kernel whose matmuls wait for each other, for any of ten reasons.
SERIALISED = "wgmma.mma_async instructions are serialized"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Report of ptxas about one kernel."""

    name: str
    registers: int
    spill_bytes: int  # stored
    notes: tuple[str, ...]  # remarks by number
    serialised: bool  # whether ptxas has matmuls of wgmma wait for each other


@dataclasses.dataclass(frozen=True)
class Report:
    """One compiled function: its Mosaic kernels, their machine code, XLA's program around them."""

    kernels: tuple[Kernel, ...]
    disassembled: str
    ptx: str
    hlo: str

    @property
    def sass(self) -> str:
        assert self.disassembled.strip(), "compiled without sass=True"
        return self.disassembled

    @property
    def registers(self) -> int:
        return max((kernel.registers for kernel in self.kernels), default=0)

    @property
    def spill_bytes(self) -> int:
        return sum(kernel.spill_bytes for kernel in self.kernels)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for kernel in self.kernels for note in kernel.notes)

    @property
    def copies(self) -> int:
        """Copies of arrays (a loop counter is none); what is updated in place has no copy."""
        return len(re.findall(r"= \w+\[\d[^ ]* copy(?:-start)?\(", self.hlo))

    @property
    def others(self) -> tuple[str, ...]:
        """Launches of XLA beside Mosaic's kernels, in the program's entry: each is a microsecond or
        more.
        """
        entry = self.hlo[self.hlo.index("\nENTRY") :]
        result = re.findall(r"(?m)^ +(?:ROOT )?%(\S+) = .*? ([a-z][\w-]*)\((.*)$", entry)
        free = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}
        return tuple(
            name for name, what, rest in result if what not in free and "mosaic_gpu" not in rest
        )

    @property
    def aliases(self) -> int:
        """Results that live in a donated argument's buffer."""
        return len(re.findall(r"(?:may|must)-alias", self.hlo))

    @property
    def launches(self) -> int:
        """Mosaic kernels in the compiled program, each counted where it stands."""
        return len(re.findall(r'custom_call_target="mosaic_gpu', self.hlo))

    @property
    def tensor_maps(self) -> int:
        """Descriptors of TMA with a swizzle or a tile: 128 bytes of kernel parameters each."""
        sizes = re.findall(r"\.param \.align 64 \.b8 \S+\[(\d+)\]", self.ptx)
        return sum(map(int, sizes)) // 128


def available() -> bool:
    """Whether the `aot` extra is installed."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def compile_for(
    f: Any,
    *shapes: Any,
    target: str = "h100",
    donate_argnums: Any = (),
    compiler_options: dict[str, Any] | None = None,
    sass: bool = False,
    serialised: bool = False,
) -> Report:
    """Compiles `jax.jit(f)` for one of `_GPUS` at `shapes`: a tree of anything with a shape and a
    dtype. "h100x2" is two of them, the mesh's axis "cp", over which axis 1 of all arrays and
    results is split. `sass`: and disassembles it, which takes a quarter of the time. A program
    with matmuls of wgmma that ptxas serialises is an error, unless it is to be one (`serialised`).
    """
    import jax

    try:
        shapes = jax.tree.map(_shape, shapes)
        request = pickle.dumps((f, shapes, donate_argnums, compiler_options))
    except (pickle.PicklingError, AttributeError) as e:
        raise TypeError(
            f"compile_for wants a function of a module, or a partial of one: {e}"
        ) from e
    kernels, *texts = _worker(target, sass).ask(request)
    report = Report(tuple(Kernel(*kernel) for kernel in kernels), *texts)
    slow = [kernel for kernel in report.kernels if kernel.serialised]
    assert bool(slow) == serialised, f"matmuls that wait for each other: {slow}"
    return report


def _shape(array: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(array.shape, array.dtype)


reached_folder: str | None = None  # the folder of `--reached`, where workers write theirs


class _Worker:
    """A process that compiles for one GPU, and disassembles all that it compiles or nothing."""

    def __init__(self, target: str, sass: bool, reached: str | None):
        # To standard output: into a folder Mosaic writes 100 MB of everything, in twice the time.
        wanted = ("PTX", "PTXAS", *["SASS"] * sass)
        dump = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in wanted}
        env = (
            os.environ
            | dump
            | {
                "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no cuDNN here
                "JAX_PLATFORMS": "cpu",
                "JAX_ENABLE_COMPILATION_CACHE": "false",  # out of which nothing is dumped
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={_count(target)}",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            }
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.aot", target, *([reached] if reached else [])],
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, request: bytes) -> Any:
        self.process.stdin.write(len(request).to_bytes(8, "little") + request)
        self.process.stdin.flush()
        try:
            answer = pickle.load(self.process.stdout)
        except EOFError:
            raise RuntimeError(f"the compiling process died: exit {self.process.wait()}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


_workers: dict[tuple[str, bool], _Worker] = {}


def _worker(target: str, sass: bool) -> _Worker:
    if (target, sass) not in _workers:
        _workers[target, sass] = _Worker(target, sass, reached_folder)
    return _workers[target, sass]


@atexit.register
def close_workers() -> None:
    """Ends all workers, and waits for what they write."""
    for worker in _workers.values():
        worker.process.stdin.close()
    for worker in _workers.values():
        worker.process.wait(timeout=120)
        worker.process.stdout.close()
    _workers.clear()


def name_kernels(name: Callable[[], str]) -> None:
    """Writes a name into the text of every kernel that is lowered from now on, by which jax tells
    compiled kernels apart. jax 0.11.2 writes a number there that it counts in each process.
    """
    from jax._src.lib import mosaic_gpu_dialect
    from jaxlib.mlir import ir

    set_options = mosaic_gpu_dialect.get_or_set_dump_options

    def named(module: ir.Module) -> Any:
        attribute = "mosaic_gpu.dump_basename"
        if attribute not in module.operation.attributes:
            with module.context:
                module.operation.attributes[attribute] = ir.StringAttr.get(name())
        return set_options(module)

    mosaic_gpu_dialect.get_or_set_dump_options = named


def _serve(target: str, reached_folder: str | None = None) -> None:
    """The worker's loop: compile what comes in, answer, until the pipe is closed. Writes which
    branches of kernels it reached into a folder.
    """
    gc.set_threshold(50_000, 20, 20)  # the thresholds of tests/conftest.py
    name_kernels(lambda: "kernel")
    answers = os.fdopen(os.dup(1), "wb")
    with tempfile.TemporaryFile("w+") as printed, _watched(reached_folder):
        os.dup2(printed.fileno(), 1)  # Mosaic prints there, and no print may be an answer
        _answer(answers, printed, _devices(target))


@contextmanager
def _watched(reached_folder: str | None) -> Iterator[None]:
    if reached_folder is None:
        yield
        return
    from tests.support import reached

    watch = reached.Watch()
    watch.start()
    yield
    watch.stop()
    watch.write(pathlib.Path(reached_folder))


def _answer(answers: Any, printed: Any, devices: Any) -> None:
    while size := sys.stdin.buffer.read(8):
        request = sys.stdin.buffer.read(int.from_bytes(size, "little"))
        try:
            answer: Any = _compile(devices, printed, *pickle.loads(request))
        except Exception as e:  # the process that asked raises it
            answer = RuntimeError(f"{type(e).__name__}: {e}")
        answers.write(pickle.dumps(answer))
        answers.flush()


def _count(target: str) -> int:
    return int(target.partition("x")[2] or 1)


def _devices(target: str) -> Any:
    from jax.experimental import topologies

    device, count = target.partition("x")[0], _count(target)
    capability, cores, shared, shared_block, l2, clock, memory, bandwidth, name = _GPUS[device]
    description = f"""
    gpu_device_info {{
      cuda_compute_capability {{ {capability} }}
      core_count: {cores} fpus_per_core: 128 clock_rate_ghz: {clock}
      threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
      block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      shared_memory_per_core: {shared * 1024} shared_memory_per_block: 49152
      shared_memory_per_block_optin: {shared_block * 1024} l2_cache_size: {l2 * 2**20}
      device_memory_size: {memory * 10**9} memory_bandwidth: {int(bandwidth * 10**12)}
    }}
    platform_name: "CUDA" device_description_str: "{name}"
    dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 minor: 0 }}
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=device, target_config=description, topology=f"1x1x{count}"
    )
    return topology.devices


# Texts of the module of each kernel: compiled once, it comes out of a cache and prints nothing.
_dumps: dict[str, tuple[str, str, str]] = {}


def _compile(
    devices: Any, printed: Any, f: Any, shapes: Any, donate_argnums: Any, compiler_options: Any
) -> tuple[Any, ...]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    printed.seek(0)
    printed.truncate()
    mesh = Mesh(np.array(devices), ("cp",))
    several = len(devices) > 1
    there = NamedSharding(mesh, PartitionSpec(*[None, "cp"] * several))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), shapes)
    # Tells what is traced which GPU it is for, and which mesh, where there is one.
    with jax.default_device(devices[0]), jax.set_mesh(mesh) if several else nullcontext():
        lowered = jax.jit(f, out_shardings=there, donate_argnums=donate_argnums).lower(*shapes)
    compiled = lowered.compile(compiler_options)
    ctypes.CDLL(None).fflush(None)
    printed.seek(0)
    kernels = dict(
        re.findall(rf'kernel_hash = "({_QUOTED})", module = "({_QUOTED})"', lowered.as_text())
    )
    modules = _modules(printed.read())
    for kernel, module in kernels.items():
        if kernel not in _dumps:
            entry = next(x for x in modules if f"00{_entry(x)}\\00" in module)
            modules.remove(entry)
            _dumps[kernel] = entry
    ptx, ptxas, sass = ("\f".join(texts) for texts in zip(*map(_dumps.get, kernels), strict=True))
    return _kernels(ptxas), sass, ptx, compiled.as_text()


_QUOTED = r'(?:[^"\\]|\\.)*'


def _entry(texts: tuple[str, str, str]) -> str:
    """The name of a module's kernel, as it is written in its program."""
    return re.search(r"entry function '(\w+)_kernel'", texts[1]).group(1)


def _modules(dump: str) -> list[tuple[str, str, str]]:
    """Dumped texts of each module: PTX, the lines of ptxas, SASS."""
    modules = []
    for text in re.split(r"(?m)^//\n// Generated by LLVM NVPTX Back-End\n//\n", dump)[1:]:
        lines = [line.span() for line in re.finditer(r"(?m)^(?:ptxas .*|    \d+ bytes .*)\n", text)]
        start, end = lines[0][0], lines[-1][1]
        modules.append((text[:start], text[start:end], text[end:]))
    return modules


def _kernels(ptxas: str) -> list[tuple[Any, ...]]:
    """One `Kernel`'s fields for each kernel that ptxas reports on; `ptxas` holds a form feed
    between one module and the next.
    """
    results = []
    for module in ptxas.split("\f"):
        name = re.search(r"Compiling entry function '(\w+)'", module)
        if name is None:
            continue
        numbers = [
            int(re.search(pattern, module).group(1))
            for pattern in (
                r"Used (\d+) registers",
                r"stack frame, (\d+) bytes spill stores",
            )
        ]
        # Remarks stand before the function that they are about.
        notes = tuple(re.findall(r"\((C\d{4})\)", module))
        results.append((name.group(1), *numbers, notes, SERIALISED in module))
    return results


if __name__ == "__main__":
    if sys.argv[1] == "--digest":
        from tests.support import builds

        builds.write_digests(sys.argv[2:], sys.stdout.write)
    else:
        _serve(*sys.argv[1:])
