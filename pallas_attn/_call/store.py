"""Lowered kernels on disk, for other processes.

Tracing and lowering a kernel is a second of Python, which jax's persistent compilation cache does
not save: its key is the lowered program. Where that cache is on and kernels run on a GPU, what
`jax.export` makes of a kernel's launches is kept in a folder below jax's, and so is the answer of a
kernel whether it takes a problem. A process that has both imports no kernel and no Mosaic.

A file is named by a digest of all that decides its content: in its folder's name the sources of the
package, the versions of jax and of its CUDA, and the GPU; in its own the kernel, the problem, the
inputs' types and jax's settings. A problem with a value that has no text of its own is not kept,
nor are calls with a forced or watched Config. A disk that cannot be written costs a warning.

Files are unpickled, so they can run code: no other user may write to the folders that are made
here, and a file of another user than this one and root counts as damaged. Damaged files are written
anew.
"""

import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import config, device
from pallas_attn._call.kernel import Chosen, Inputs, Problem, Results

FOLDER = "pallas_attn_kernels"  # within that of jax's cache
_DIGEST = hashlib.sha256
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
             "jax_numpy_rank_promotion")  # fmt: skip
_NOT_PICKLED = (pickle.PicklingError, TypeError, AttributeError)
_PACKAGE = pathlib.Path(__file__).parents[1]

_lowering: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "pallas_attn_lowering", default=False
)


class Named(Chosen, Protocol):
    """A kernel by its module (`dispatch.Candidate`)."""

    @property
    def module(self) -> str: ...


def results(chosen: Named, inputs: Inputs, problem: Problem) -> Results | None:
    """The results of `chosen.run(inputs, problem)`, lowered now or by an earlier process; None
    where nothing is kept.
    """
    folder = _folder()
    if folder is None or getattr(problem, "fetches", 1) > 1:  # asks for the axes of its mesh
        return None
    leaves, tree = jax.tree.flatten(inputs)
    # A number of a layer is an argument: kernels read it at run time.
    arrays = [jnp.asarray(x, jnp.int32) if isinstance(x, int) else x for x in leaves]
    shapes = tuple([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    try:
        types = [(x.shape, str(x.dtype)) for x in shapes]
        key = _text((chosen.module, problem, str(tree), types, _tuned(chosen, problem), _context()))
    except TypeError:
        return None
    program = _program(folder / _name(key), _Call(chosen, problem, tree, shapes))
    return None if program is None else program.tree.unflatten(program.call(*arrays))


def answer(chosen: Named, problem: Problem, ask: Callable[[Problem], bool]) -> bool:
    """`ask(problem)`, which imports the kernel: whether it takes the problem."""
    folder = _folder()
    try:
        path = None if folder is None else folder / _name(_text((chosen.module, problem)))
    except TypeError:
        path = None
    if path is None:
        return ask(problem)
    kept = _read(path)
    if kept not in (b"yes", b"no"):
        kept = b"yes" if ask(problem) else b"no"
        _write(path, kept)
    return kept == b"yes"


# ---- programs ------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The static part of a call of a kernel."""

    chosen: Named
    problem: Problem
    tree: jax.tree_util.PyTreeDef  # structure of the inputs
    shapes: tuple[jax.ShapeDtypeStruct, ...]


class _Lowered(NamedTuple):
    """A kernel that is lowered already."""

    exported: jax.export.Exported  # takes the arrays, gives the leaves of the results
    tree: jax.tree_util.PyTreeDef  # structure of the results


class _Program(NamedTuple):
    call: Callable[..., list[jax.Array]]  # one function, which a program has once
    tree: jax.tree_util.PyTreeDef


@functools.lru_cache(maxsize=256)
def _program(path: pathlib.Path, call: _Call) -> _Program | None:
    """From the file, or lowered now and written; None where `jax.export` does not take it."""
    content = _read(path)
    lowered = None if content is None else _restored(content)
    if lowered is None:
        tuned = _tuned(call.chosen, call.problem)
        lowered = _lowered(call)
        if lowered is None:
            return None
        if tuned != _tuned(
            call.chosen, call.problem
        ):  # refused: the next process is to say so, too
            return _Program(jax.jit(lowered.exported.call), lowered.tree)
        with contextlib.suppress(*_NOT_PICKLED):  # another jax may have programs that cannot be
            _write(path, _saved(lowered))
    return _Program(jax.jit(lowered.exported.call), lowered.tree)


def _lowered(call: _Call) -> _Lowered | None:
    trees: list[jax.tree_util.PyTreeDef] = []

    def run(*arrays: jax.Array) -> list[jax.Array]:
        flat, tree = jax.tree.flatten(call.chosen.run(call.tree.unflatten(arrays), call.problem))
        trees.append(tree)
        return flat

    token = _lowering.set(True)
    try:
        # For one GPU, also where this is traced for a part of a mesh.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            exported = jax.export.export(jax.jit(run), platforms=["cuda"])(*call.shapes)
    except Exception:  # the caller traces the kernel itself: an error of it stays
        return None
    finally:
        _lowering.reset(token)
    return _Lowered(exported, trees[-1])


def _saved(lowered: _Lowered) -> bytes:
    """The program as bytes. (`Exported.serialize` would need one more package, and the same
    versions of jax read what they wrote.)
    """
    exported = {
        name: value
        for name, value in vars(lowered.exported).items()
        if name not in ("in_tree", "out_tree", "_get_vjp")
    }
    example = lowered.tree.unflatten(range(lowered.tree.num_leaves))
    paths = {name: x for name, x in _mosaic_environment().items() if os.path.exists(x)}
    return pickle.dumps((exported, example, paths))


def _restored(content: bytes) -> _Lowered | None:
    """None where the bytes are those of a program that cannot be compiled here."""
    try:
        exported, example, paths = pickle.loads(content)
        leaves, tree = jax.tree.flatten(example)
        inputs: Any = (tuple(exported["in_avals"]), {})
        exported |= {"in_tree": jax.tree.structure(inputs), "_get_vjp": None}
        exported |= {"out_tree": jax.tree.structure(leaves)}
        lowered = _Lowered(jax.export.Exported(**exported), tree)
    except Exception:
        return None
    if not all(os.path.exists(path) for path in paths.values()):
        return None
    for name, path in paths.items():
        os.environ.setdefault(name, path)
    return lowered


def _mosaic_environment() -> dict[str, str]:
    """The files that Mosaic's compiler reads, which importing Mosaic names in the environment."""
    ends = ("_PATH", "_ROOT")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("MOSAIC_GPU_") and name.endswith(ends)
    }


# ---- names ---------------------------------------------------------------------------------------


def _folder() -> pathlib.Path | None:
    """The folder of what this process may read and write, or None."""
    of_jax = jax.config.jax_compilation_cache_dir
    if not of_jax or not jax.config.jax_enable_compilation_cache or "://" in of_jax:
        return None
    if _lowering.get() or config.observer.get() is not None or jax.config.jax_disable_jit:
        return None
    gpu, versions = _gpu(), _versions()
    if gpu is None or versions is None:
        return None
    if any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ):
        return None
    return pathlib.Path(of_jax, FOLDER, _name(_text((versions, gpu))))


def _gpu() -> str | None:
    """The GPU that kernels run on, by its vendor's name, and jax's plugin with its CUDA."""
    current = device.current()
    if current.platform not in ("gpu", "cuda"):
        return None
    return f"{current.device_kind}, {current.client.platform_version}"


@functools.cache
def _versions() -> tuple[str, ...] | None:
    """Jax's, and a digest of the package's sources; None where they cannot be read, as in a zip."""
    digest, count = _DIGEST(), 0
    for folder, _, names in sorted(os.walk(_PACKAGE)):
        # Lock files of editors begin with a dot.
        for name in sorted(x for x in names if x.endswith(".py") and not x.startswith(".")):
            try:
                source = pathlib.Path(folder, name).read_bytes()
            except OSError:
                return None
            place = os.path.relpath(os.path.join(folder, name), _PACKAGE)
            digest.update(f"{place} {len(source)}\n".encode() + source)
            count += 1
    if count == 0:
        return None
    return jax.__version__, importlib.metadata.version("jaxlib"), digest.hexdigest()


def _context() -> tuple[Any, ...]:
    """Settings outside of the arguments that a lowered kernel depends on."""
    settings = jax.config.values
    names = [name for name in settings if "mosaic" in name or "pallas" in name]
    values = [(name, settings.get(name)) for name in (*_SETTINGS, *sorted(names))]
    return device.asked_to_overlap.get(), device.gpu_generation(), values


def _tuned(chosen: Named, problem: Problem) -> str | None:
    """The fields of a Config that a file has for this call (`tuning`), as JSON."""
    file = config.tuned.get()
    fields = None if file is None else file.fields_of(chosen.name, problem)
    return None if fields is None else json.dumps(fields, sort_keys=True)


def _name(text: str) -> str:
    return _DIGEST(text.encode()).hexdigest()[:40]


def _text(value: Any) -> str:
    """Every bit of a value that can be a jit key; a TypeError for others, functions among them."""
    if isinstance(value, float):
        return value.hex()
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if isinstance(value, (np.dtype, enum.Enum)):
        return f"{type(value).__qualname__}:{value}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__qualname__}({','.join(map(_text, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [x.name for x in dataclasses.fields(value) if x.compare]
        inner = ",".join(f"{name}={_text(getattr(value, name))}" for name in fields)
        return f"{type(value).__qualname__}({inner})"
    raise TypeError(f"{type(value)} has no text")


# ---- files ---------------------------------------------------------------------------------------


def _read(path: pathlib.Path) -> bytes | None:
    """The content of a file that is whole and was written by a trusted user."""
    try:
        with open(path, "rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            content = file.read()
    except OSError:
        return None
    if owner not in _trusted_users():
        return None
    size = _DIGEST().digest_size
    return content[size:] if _DIGEST(content[size:]).digest() == content[:size] else None


def _trusted_users() -> tuple[int, ...]:
    return 0, os.geteuid()


def _write(path: pathlib.Path, content: bytes) -> None:
    try:
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(path, _DIGEST(content).digest() + content)
    except OSError as error:
        _warn_once(str(path.parent), str(error))


def _replace(path: pathlib.Path, content: bytes) -> None:
    """Writes a whole file or none, also beside other processes."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


@functools.cache
def _warn_once(folder: str, error: str) -> None:
    warnings.warn(f"lowered kernels are not kept in {folder}: {error}", stacklevel=2)
