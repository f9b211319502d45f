"""Configs that were measured on a GPU: `tuned`, by which kernels run with those of a file, and the
steps of `pallas-attn tune`, which makes such a file.

The file is JSON. It names an entry by GPU, version of this package, kernel and problem, every fact
of the call; so it may be that of several GPUs and versions. An entry that a kernel refuses is
ignored, with a warning.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

import pallas_attn
from pallas_attn._call import config as _config
from pallas_attn._call import device, dispatch
from pallas_attn._call.config import Choice
from pallas_attn._call.kernel import Config, Kernel, Problem
from pallas_attn._call.special import Special
from pallas_attn.errors import described

store = Special("_call.store")

FILE = "tuned.json"  # beside the lowered kernels
_FORMAT = 1

Fields = Any  # the Config of a kernel: a frozen dataclass
Value = Any  # the value of a field: a number, or fields where it is a Config


@contextlib.contextmanager
def tuned(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Kernels traced in this block run with the Configs that `pallas-attn tune` measured to be
    faster than their own on this GPU, for the problems that it timed. The file is read at the start
    of the block. A Config changes results by rounding alone; which kernel runs, it does not change.
    Decoding with `batch_invariant` keeps its own. A function that was jitted and called outside of
    the block keeps what it was traced with.

    Args:
      path: the file. Default: where `pallas-attn tune` writes it, beside jax's persistent cache.

    Raises:
      ValueError: there is no such file, or it is none of `pallas-attn tune`.

    Example, with a file that has no Config yet:

        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "tuned.json")
        >>> _ = file.write_text('{"format": 1, "entries": []}')
        >>> x = jnp.ones((1, 64, 2, 64))
        >>> with pa.tuned(file):
        ...     out = pa.flash_attention(x, x, x)
    """
    place = default_file() if path is None else pathlib.Path(path)
    if place is None:
        raise ValueError(
            "path: expected a file of `pallas-attn tune`, got None, and jax has no persistent "
            "cache on disk beside which it could lie; name the file"
        )
    token = _config.tuned.set(read(place))
    try:
        yield
    finally:
        _config.tuned.reset(token)


# ---- the file ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A Config that was faster than the kernel's own."""

    gpu: str  # its vendor's name
    pallas_attn: str  # the version
    kernel: str  # its own name
    problem: str  # every fact of the call
    config: dict[str, Value]  # fields of the Config
    microseconds: float
    default_microseconds: float  # by the default, measured in turns with it

    @property
    def key(self) -> tuple[str, ...]:
        return self.gpu, self.pallas_attn, self.kernel, self.problem


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The content of a file, and part of the keys of programs: files with the same are equal."""

    digest: str
    path: str = dataclasses.field(compare=False)
    entries: Mapping[tuple[str, ...], Entry] = dataclasses.field(compare=False, repr=False)

    def fields_of(self, kernel: str, problem: Problem) -> dict[str, Value] | None:
        """The fields of a Config for a kernel and a problem on the GPU of this call, or None."""
        if getattr(problem, "batch_invariant", False):  # bits may not depend on the batch
            return None
        key = key_of(kernel, problem)
        entry = None if key is None else self.entries.get(key)
        return None if entry is None else entry.config

    def config_of(self, name: str, kernel: Kernel, problem: Problem, own: Fields) -> Fields:
        """The Config for a problem; `own`, the kernel's, where there is none that it takes."""
        fields = self.fields_of(name, problem)
        if fields is None:
            return own
        try:
            config = changed(own, fields)
        except ValueError as error:
            _warn_once(self.path, name, str(error))
            return own
        if _config.fits(kernel, problem, config):
            return config
        _warn_once(self.path, name, f"it refuses {config} for {problem}")
        return own


@functools.cache
def _warn_once(path: str, kernel: str, why: str) -> None:
    warnings.warn(
        f"{path}: a tuned Config of {kernel} is ignored: {why}; `pallas-attn tune` makes another",
        stacklevel=2,
    )


def default_file() -> pathlib.Path | None:
    """The file in the folder of lowered kernels; None where jax has no persistent cache on disk."""
    of_jax = jax.config.jax_compilation_cache_dir
    if not of_jax or "://" in of_jax:
        return None
    return pathlib.Path(of_jax, store.FOLDER, FILE)


def key_of(kernel: str, problem: Problem) -> tuple[str, ...] | None:
    """The key of an entry for the GPU of a call that is traced now; None where a fact of the
    problem has no text.
    """
    try:
        text = store._text(problem)
    except TypeError:
        return None
    return device.current().device_kind, pallas_attn.__version__, kernel, text


def read(path: pathlib.Path) -> Tuned:
    """A file; ValueError where it is not there, or is another."""
    wanted = "expected a file of `pallas-attn tune`"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"path: {wanted}, got {path}: {error.strerror}") from None
    try:
        entries = _entries(json.loads(content))
    except (ValueError, TypeError) as error:
        raise ValueError(f"path: {wanted}, got {path}: {error}") from None
    named = {entry.key: entry for entry in entries}
    return Tuned(hashlib.sha256(content).hexdigest(), str(path), named)


def _entries(content: Value) -> list[Entry]:
    if not isinstance(content, dict) or set(content) != {"format", "entries"}:
        raise ValueError('it is no object of "format" and "entries"')
    if content["format"] != _FORMAT or not isinstance(content["entries"], list):
        raise ValueError(f"format {_FORMAT} is known, not {described(content['format'])}")
    return [_entry(each) for each in content["entries"]]


def _entry(fields: Value) -> Entry:
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Entry)}
    kinds |= {"config": dict, "microseconds": (int, float), "default_microseconds": (int, float)}
    if not isinstance(fields, dict) or set(fields) != set(kinds):
        said = sorted(fields) if isinstance(fields, dict) else described(fields)
        raise ValueError(f"an entry has {sorted(kinds)}, not {said}")
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} of an entry is {described(fields[name])}")
    return Entry(**fields)


def write(path: pathlib.Path, measured: Mapping[tuple[str, ...], Entry | None]) -> None:
    """Adds what was measured for some keys to a file, in place of what it has for them; None:
    nothing was faster than the kernel's own Config. A whole file is written, or none.
    """
    entries = dict(read(path).entries) if path.exists() else {}
    entries = {key: entry for key, entry in entries.items() if key not in measured}
    entries |= {key: entry for key, entry in measured.items() if entry is not None}
    content = {"format": _FORMAT, "entries": [vars(x) for x in entries.values()]}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


# ---- the search ----------------------------------------------------------------------------------

# Values of the fields of Configs, which have the same meaning in all kernels. Fields that are not
# here keep the kernel's own: they decide more than how fast it is, or follow from the problem.
_TILES: dict[str, tuple[Value, ...]] = {  # in all combinations
    "warpgroups": (1, 2, 3, 4),
    "row_blocks": (1, 2),
    "q_tiles": (1, 2),
    "kv_blocks": (1, 2),
    "block_q": (32, 64, 128),
    "block_kv": (32, 64, 128),
    "tile": (32, 64, 128),
}
_STAGES = (1, 2, 3, 4, 5, 6, 8)  # with each tile size the two largest numbers that have room
_OTHERS: dict[str, tuple[Value, ...]] = {  # one at a time
    "l2_heads": (0, 1, 2, 4, 8, 16, 32),
    "grid": (78, 114, 132),  # multiprocessors of Hopper's GPUs
    "q_slots": (1, 2),
    "kv_slots": (1, 2),
    "splits": (1, 2, 4, 8),
    "parts": (1, 2, 4, 8),
    "together": (1, 2, 4, 8),
    "in_turn": (False, True),
    "load_first": (False, True),
    "q_in_registers": (False, True),
    "k_in_registers": (False, True),
    "lockstep": (False, True),
    "q_rows": (16, 32, 64),
    "do_stages": (1, 2),
    "dq_lag": (1, 2),
    "dq_block_kv": (32, 64, 128),
    "dq_stages": (2, 3),
    "dq_warpgroups": (1, 2, 3),
    "k_ring": (4, 6, 8),
    "v_ring": (2, 3, 4),
    "polynomials": (0, 1, 2),
    "slots": (2, 4, 6, 8),
    "producers": (1, 2),
    "chunks": (0, 1, 2, 4, 8),
}
TILES = "tiles and stages"
_Path = tuple[str, ...]  # names of fields, the outermost first


def choices(
    function: Callable[..., Any], *arguments: object, generation: str | None = None
) -> list[Choice]:
    """The kernels that a call runs on this GPU, or on one of a generation, each with its problem
    and its own Config. Nothing is computed.
    """
    assumed = contextlib.nullcontext() if generation is None else device.assume(generation)
    # jax keeps what it has traced; the metadata tells it that another generation is another place.
    apart = set_xla_metadata(pallas_attn_generation=str(generation))
    with assumed, apart, _config.watched() as seen:
        jax.eval_shape(lambda *some: function(*some), *arguments)
    return list(dict.fromkeys(seen))


def trying(choice: Choice, config: Config) -> contextlib.AbstractContextManager[None]:
    """Calls traced in this block run a kernel with this Config."""
    return _config.forced(choice.kernel, dict(vars(config)))


def parts(choice: Choice) -> list[str]:
    """The parts of a Config that may vary, in the order of a search: `TILES`, names of fields."""
    names = dict.fromkeys(path[-1] for path in _paths(choice.config))
    tiles = [TILES] if {*_TILES, "stages"} & set(names) else []
    return tiles + [name for name in names if name in _OTHERS]


def around(choice: Choice, config: Fields, part: str) -> list[Fields]:
    """Configs that differ from `config` in this part alone, and that the kernel takes."""
    kernel, problem = _kernel_of(choice), choice.problem
    paths = _paths(config)
    depths = [path for path in paths if path[-1] == "stages"]
    if part != TILES:
        at = [path for path in paths if path[-1] == part]
        made = _products(config, at, _OTHERS)
        return _distinct(config, (x for x in made if _takes(kernel, problem, x)))
    tiles = [path for path in paths if path[-1] in _TILES]
    tried: list[Fields] = []
    for tile in _products(config, tiles, _TILES) if tiles else [config]:
        deep = _products(tile, depths, {"stages": _STAGES}) if depths else [tile]
        tried += [x for x in deep if _takes(kernel, problem, x)][-2:]
        tried += [tile] if _takes(kernel, problem, tile) else []
    return _distinct(config, tried)


def changed(config: Fields, fields: dict[str, Value]) -> Fields:
    """`config` with other values of its fields; ValueError names one that it has not, or a value
    that is none of it.
    """
    known = {field.name for field in dataclasses.fields(config)}
    values: dict[str, Value] = {}
    for name, value in fields.items():
        own = getattr(config, name) if name in known else None
        if name not in known:
            raise ValueError(f"its Config has no field {name!r}, but {sorted(known)}")
        inner = dataclasses.is_dataclass(own)
        kind: type = dict if inner else type(own)
        good = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not good:
            raise ValueError(f"Config.{name} cannot be {described(value)}")
        values[name] = changed(own, value) if inner else value
    return dataclasses.replace(config, **values)


def _kernel_of(choice: Choice) -> Kernel:
    rows = itertools.chain(*dispatch.TABLES.values())
    candidates = (x for x in rows if isinstance(x, dispatch.Candidate))
    return next(x for x in candidates if x.name == choice.kernel).kernel


def _takes(kernel: Kernel, problem: Problem, config: Fields) -> bool:
    """Whether there is room, and heads of an L2 group are those of whole kv heads."""
    group, fields = getattr(problem, "group", 1), dict(_values(config))
    heads = next((x for path, x in fields.items() if path[-1] == "l2_heads"), 0)
    return heads % group == 0 and _config.fits(kernel, problem, config)


def _values(config: Fields, outer: _Path = ()) -> Iterator[tuple[_Path, Value]]:
    """The fields of a Config and of those within it."""
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), (*outer, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value, path)
        else:
            yield path, value


def _paths(config: Fields) -> list[_Path]:
    """Fields that a search may vary. 0 keys of a tile for dq: another algorithm, without a tile."""
    known = {*_TILES, *_OTHERS, "stages"}
    return [
        path
        for path, value in _values(config)
        if path[-1] in known and not (path[-1] == "dq_block_kv" and value == 0)
    ]


def _products(
    config: Fields, paths: list[_Path], values: Mapping[str, tuple[Value, ...]]
) -> list[Fields]:
    """The Config with all combinations of values at these paths that it does not refuse."""
    made = []
    for combination in itertools.product(*(values[path[-1]] for path in paths)):
        with contextlib.suppress(ValueError):
            made.append(changed(config, _nested(dict(zip(paths, combination, strict=True)))))
    return made


def _nested(values: dict[_Path, Value]) -> dict[str, Value]:
    """Values by path as fields of a Config and of those within it."""
    fields: dict[str, Value] = {}
    for path, value in values.items():
        inner = fields
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return fields


def _distinct(config: Fields, made: Iterable[Fields]) -> list[Fields]:
    return [x for x in dict.fromkeys(made) if x != config]
