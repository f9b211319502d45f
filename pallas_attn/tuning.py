"""Configs that were measured on a GPU: `tuned`, by which kernels run with those of a file, and the
Configs that `pallas-attn tune` tries, which makes such a file.

The file is JSON. It names an entry by GPU, version of this package, kernel and problem, every fact
of the call; so it may be that of several GPUs and versions. Its Config is the fields in which it
differs from the kernel's own.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

import pallas_attn
from pallas_attn._call import config as _config
from pallas_attn._call import device, dispatch
from pallas_attn._call.config import Choice
from pallas_attn._call.kernel import Kernel, Problem
from pallas_attn._call.special import Special
from pallas_attn.errors import described

store = Special("_call.store")

FILE = "tuned.json"  # beside the lowered kernels
_FORMAT = 1
_KEY = "gpu", "pallas_attn", "kernel", "problem"

Key = tuple[str, ...]  # values of an entry for the names of `_KEY`
Config = Any  # a kernel's: a frozen dataclass
Fields = dict[str, Any]  # values by the names of fields of a Config, or of a Config within it
Entry = dict[str, Any]  # the names of `_KEY`; "config", its Fields; and the times


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
class Tuned:
    """The content of a file, and part of the keys of programs: files with the same are equal."""

    digest: str
    path: pathlib.Path = dataclasses.field(compare=False)
    entries: Mapping[Key, Entry] = dataclasses.field(compare=False, repr=False)
    refused: set[Key] = dataclasses.field(compare=False, repr=False, default_factory=set)

    def fields_of(self, kernel: str, problem: Problem) -> Fields | None:
        """The fields for a kernel and a problem on the GPU of this call; None where there are none,
        or where the kernel has refused them.
        """
        if getattr(problem, "batch_invariant", False):  # bits may not depend on the batch
            return None
        try:
            key = key_of(kernel, problem)
        except TypeError:
            return None
        known = key in self.entries and key not in self.refused
        return self.entries[key]["config"] if known else None

    def config_of(self, name: str, kernel: Kernel, problem: Problem, own: Config) -> Config:
        """The Config for a problem; `own`, the kernel's, where there is none that it takes."""
        fields = self.fields_of(name, problem)
        if fields is None:
            return own
        try:
            config = changed(own, fields)
            if not _config.fits(kernel, problem, config):
                raise ValueError(f"it refuses {config} for {problem}")
        except ValueError as error:
            self.refused.add(key_of(name, problem))
            warnings.warn(
                f"{self.path}: a tuned Config of {name} is ignored: {error}; `pallas-attn tune` "
                "makes another",
                stacklevel=2,
            )
            return own
        return config


def default_file() -> pathlib.Path | None:
    """The file in the folder of lowered kernels; None where jax has no persistent cache on disk."""
    of_jax = jax.config.jax_compilation_cache_dir
    if not of_jax or "://" in of_jax:
        return None
    return pathlib.Path(of_jax, store.FOLDER, FILE)


def key_of(kernel: str, problem: Problem) -> Key:
    """The key of an entry for the GPU of a call that is traced now; TypeError where a fact of the
    problem, as a function, has no text.
    """
    text = store._text(problem)
    return device.current().device_kind, pallas_attn.__version__, kernel, text


def read(path: pathlib.Path) -> Tuned:
    """A file; ValueError where it is not there, or is another."""
    try:
        content = path.read_bytes()
        held = json.loads(content)
        if held["format"] != _FORMAT:
            raise ValueError(f"format {_FORMAT} is known, not {described(held['format'])}")
        entries = {tuple([entry[name] for name in _KEY]): entry for entry in held["entries"]}
        if not all(isinstance(entry["config"], dict) for entry in entries.values()):
            raise ValueError("a config of it has no names of fields")
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"path: expected a file of `pallas-attn tune`, got {path}: {why}"
        ) from None
    return Tuned(hashlib.sha256(content).hexdigest(), path, entries)


def write(path: pathlib.Path, key: Key, faster: Entry | None) -> None:
    """Puts a Config and its times in place of what a file has for a key; None: nothing was faster
    than the kernel's own. A whole file is written, or none.
    """
    entries = dict(read(path).entries) if path.exists() else {}
    entries.pop(key, None)
    if faster is not None:
        entries[key] = dict(zip(_KEY, key, strict=True)) | faster
    content = json.dumps({"format": _FORMAT, "entries": [*entries.values()]}, indent=1)
    store._replace(path, f"{content}\n".encode())


# ---- the search ----------------------------------------------------------------------------------

# Values of fields that a search tries. A name means the same in all kernels. Other fields keep
# the kernel's own value: they decide more than how fast it is, or follow from the problem.
_VALUES: dict[str, tuple[Any, ...]] = {
    "warpgroups": (1, 2, 3, 4), "row_blocks": (1, 2), "q_tiles": (1, 2), "kv_blocks": (1, 2),
    "block_q": (32, 64, 128), "block_kv": (32, 64, 128), "tile": (32, 64, 128),
    "stages": (1, 2, 3, 4, 5, 6, 8),
    "grid": (78, 114, 132),  # multiprocessors of Hopper's GPUs
    "l2_heads": (0, 1, 2, 4, 8, 16, 32), "q_slots": (1, 2), "kv_slots": (1, 2),
    "splits": (1, 2, 4, 8), "parts": (1, 2, 4, 8), "together": (1, 2, 4, 8),
    "chunks": (0, 1, 2, 4, 8), "in_turn": (False, True), "load_first": (False, True),
    "lockstep": (False, True), "q_in_registers": (False, True), "k_in_registers": (False, True),
    "q_rows": (16, 32, 64), "do_stages": (1, 2), "dq_lag": (1, 2), "dq_block_kv": (32, 64, 128),
    "dq_stages": (2, 3), "dq_warpgroups": (1, 2, 3), "k_ring": (4, 6, 8), "v_ring": (2, 3, 4),
    "polynomials": (0, 1, 2), "slots": (2, 4, 6, 8), "producers": (1, 2),
}  # fmt: skip


def choices(function: Callable[[], Any], generation: str | None = None) -> list[Choice]:
    """The kernels that a function runs on this GPU, or on one of a generation, each with its
    problem and its own Config. Nothing is computed.
    """
    assumed = contextlib.nullcontext() if generation is None else device.assume(generation)
    # jax keeps what it has traced; the metadata tells it that another generation is another place.
    apart = set_xla_metadata(pallas_attn_generation=str(generation))
    with assumed, apart, _config.watched() as seen:
        jax.eval_shape(lambda: function())
    return list(dict.fromkeys(seen))


def trying(choice: Choice, fields: Fields) -> contextlib.AbstractContextManager[None]:
    """Calls traced in this block run a kernel with its own Config, but for these fields."""
    return _config.forced(choice.kernel, dict(vars(changed(choice.config, fields))))


def singles(choice: Choice) -> list[Fields]:
    """Fields that the kernel takes: one that differs from its own Config, and with it the number of
    stages, where there is no room otherwise.
    """
    own = _flat(choice.config)
    tried = [
        {name: value}
        for name, values in _VALUES.items()
        if name in own
        for value in values
        if value != own[name]
    ]
    return [taken for fields in tried for taken in _taken(choice, [fields, *_staged(own, fields)])]


def pairs(choice: Choice, best: Sequence[Fields]) -> list[Fields]:
    """Pairs of these that the kernel takes, and each of these with the most stages."""
    own = _flat(choice.config)
    tried = [[x for x in _staged(own, y) if x["stages"] > own["stages"]] for y in best]
    for left, right in itertools.combinations(best, 2):
        if left.keys().isdisjoint(right):
            tried.append([left | right, *_staged(own, left | right)])
    made = [taken for some in tried for taken in _taken(choice, some)]
    return [x for n, x in enumerate(made) if x not in [*best, *made[:n]]]


def changed(config: Config, fields: Fields) -> Config:
    """`config` with other values of fields, also of a Config within it; ValueError names one that
    it has not, or that cannot have this value.
    """
    known, new = _flat(config), dict(vars(config))
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"its Config has no field {name!r}, but {sorted(known)}")
        if type(value) is not type(known[name]):
            raise ValueError(f"Config.{name} cannot be {described(value)}")
    for name, value in new.items():
        if dataclasses.is_dataclass(value):
            within = _flat(value)
            new[name] = changed(value, {x: y for x, y in fields.items() if x in within})
        else:
            new[name] = fields.get(name, value)
    return dataclasses.replace(config, **new)


def _flat(config: Config) -> Fields:
    """The values of a Config and of those within it, whose names differ."""
    flat: Fields = {}
    for name, value in vars(config).items():
        flat |= _flat(value) if dataclasses.is_dataclass(value) else {name: value}
    return flat


def _staged(own: Fields, fields: Fields) -> list[Fields]:
    """The fields with other numbers of stages, the most first; none where they have one already."""
    some = () if "stages" in fields or "stages" not in own else _VALUES["stages"]
    return [fields | {"stages": number} for number in reversed(some) if number != own["stages"]]


def _taken(choice: Choice, some: Sequence[Fields]) -> list[Fields]:
    """The first that the kernel takes, if any: there is room, and heads of an L2 group are those of
    whole kv heads.
    """
    rows = itertools.chain(*dispatch.TABLES.values())
    candidates = (x for x in rows if isinstance(x, dispatch.Candidate))
    kernel = next(x for x in candidates if x.name == choice.kernel).kernel
    for fields in some:
        with contextlib.suppress(ValueError):
            config = changed(choice.config, fields)
            of_groups = fields.get("l2_heads", 0) % getattr(choice.problem, "group", 1) == 0
            if of_groups and _config.fits(kernel, choice.problem, config):
                return [fields]
    return []
