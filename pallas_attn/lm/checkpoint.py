"""A model's folder: its weights beside config.json.

Weights lie in either of two forms. A checkpoint of Hugging Face has model.safetensors, or several
files that model.safetensors.index.json names, which the package safetensors reads (the extra `lm`).
A model that was trained here has model.npy, which NumPy reads: one record with a field a parameter,
the bits of bfloat16. Names, shapes and types are compared with config.json before anything is
built, and what was built holds finite numbers only; a ValueError says which file is wrong, and how.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_attn.lm import mesh as lm_mesh
from pallas_attn.lm.folder import Folder, shown
from pallas_attn.lm.hf_config import config_from
from pallas_attn.lm.model import Config, Params, is_shape

EMBEDDED = pathlib.Path(__file__).parent / "tiny"

_OURS, _THEIRS, _INDEX = "model.npy", "model.safetensors", "model.safetensors.index.json"
NAMES = ("config.json", _OURS, _THEIRS, _INDEX, "generation_config.json", "tokenizer.json")
_DTYPES = ("F64", "F32", "F16", "BF16")
_UNREAD = ("rotary_emb.inv_freq",)  # tensors that old checkpoints hold and no model reads

Loader = Callable[..., Params]  # (dtype, mesh or None)


def config_of(folder: str | os.PathLike[str]) -> Config:
    """The model that a folder holds."""
    found = Folder(folder)
    return config_from(found.json("config.json"), str(found.path / "config.json"))


def load(
    folder: str | os.PathLike[str], dtype: Any, mesh: Mesh | None = None
) -> tuple[Config, Params]:
    """A model from a folder, its weights as `dtype` on the default device, or split over a mesh."""
    config = config_of(folder)
    return config, weights_of(folder, config)(dtype, mesh)


def weights_of(folder: str | os.PathLike[str], config: Config) -> Loader:
    """What makes the parameters in a given dtype, on a mesh or on the default device. That the
    files hold them is checked at once.
    """
    found = Folder(folder)
    if not found.has(_OURS):
        return _Tensors(found, config).load
    if found.has(_THEIRS) or found.has(_INDEX):
        raise ValueError(f"{found.path}: holds {_OURS} and *.safetensors; remove one of them")
    path = found.file(_OURS)
    return functools.partial(_from_record, config, path, _record(config, path))


@jax.jit
def _finite(params: Params) -> Any:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), params)


def _all_finite(params: Params) -> bool:
    return all(jax.device_get(jax.tree.leaves(_finite(params))))


# ---- model.npy ----------------------------------------------------------------------------------


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its name in the tree, "runs.0.qkv"."""
    leaves = jax.tree.leaves_with_path(config.shapes(), is_leaf=is_shape)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): shape for path, shape in leaves}


def _record(config: Config, path: pathlib.Path) -> np.ndarray:
    """The record of a file, mapped, with a field of every parameter and no other."""
    try:
        record = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of many types: the header is a Python literal
        raise ValueError(f"{path}: not a model that was saved here: {shown(error)}") from None
    found = record.dtype.fields if record.shape == (1,) else None
    found = {name: field[0].subdtype for name, field in (found or {}).items()}
    wanted = {name: (np.dtype("<u2"), shape) for name, shape in _shapes(config).items()}
    for name in wanted | found:
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{path}: {shown(name)}: expected {shown(wanted.get(name))}, as config.json has "
                f"it, got {shown(found.get(name))}"
            )
    return record


def _from_record(
    config: Config, path: pathlib.Path, record: np.ndarray, dtype: Any, mesh: Mesh | None = None
) -> Params:
    def read(name: str, shape: tuple[int, ...], at: tuple[slice, ...]) -> np.ndarray:
        held = record[0][name].view(jnp.bfloat16)
        sizes = lm_mesh.segments(config, name.rpartition(".")[2])
        if sizes:
            starts = np.cumsum((0, *sizes))
            rows = [
                held[at[0], starts[n] + some.start : starts[n] + some.stop]
                for n, some in lm_mesh.spans(sizes, at[1], shape[1])
            ]
            return np.concatenate(rows, axis=1).astype(dtype)
        return held[at].astype(dtype)

    specs = _specs(config, mesh)
    tree = jax.tree.structure(config.shapes(), is_leaf=is_shape)
    params = jax.tree.unflatten(
        tree,
        [
            lm_mesh.placed(mesh, spec, shape, functools.partial(read, name, shape))
            for spec, (name, shape) in zip(specs, _shapes(config).items(), strict=True)
        ],
    )
    if not _all_finite(params):
        raise ValueError(f"{path}: holds numbers that are not finite")
    return params


def _specs(config: Config, mesh: Mesh | None) -> list[Any]:
    """Of each parameter, in the order of the tree."""
    if mesh is None:
        return [None] * len(_shapes(config))
    return jax.tree.leaves(lm_mesh.specs(config, mesh), is_leaf=lm_mesh.is_spec)


def save(folder: str | os.PathLike[str], described: Mapping[str, Any], params: Params) -> None:
    """A model into a folder: `described` is its config.json, the weights go in as bfloat16."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(described), indent=2) + "\n", "utf-8")
    shapes = _shapes(config_from(described))
    record = np.zeros(1, [(name, "<u2", shape) for name, shape in shapes.items()])
    for name, param in zip(shapes, jax.tree.leaves(params), strict=True):
        record[name][0] = np.asarray(param.astype(jnp.bfloat16)).view(np.uint16)
    np.save(folder / _OURS, record, allow_pickle=False)


# ---- *.safetensors ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Part:
    """A parameter of one layer: the tensors that lie one after the other in it."""

    names: tuple[str, ...]
    rows: tuple[int, ...]  # of each


def _parts(config: Config) -> dict[str, _Part]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    wide = (config.hidden,)
    parts = {
        "attn_norm": _Part(("input_layernorm.weight",), wide),
        "qkv": _Part(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), (q, kv, kv)),
        "out": _Part(("self_attn.o_proj.weight",), wide),
        "mlp_norm": _Part(("post_attention_layernorm.weight",), wide),
        "gate_up": _Part(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (config.mlp,) * 2),
        "down": _Part(("mlp.down_proj.weight",), wide),
    }
    if config.qkv_bias:
        parts["qkv_bias"] = _Part(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), (q, kv, kv))
    if config.qk_norm:
        parts["q_norm"] = _Part(("self_attn.q_norm.weight",), (config.head_dim,))
        parts["k_norm"] = _Part(("self_attn.k_norm.weight",), (config.head_dim,))
    return parts


def _top(config: Config) -> dict[str, str]:
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    return names if config.tied else names | {"head": "lm_head.weight"}


def _wanted(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a model: (name, shape)."""
    shapes, parts, layers = config.shapes(), _parts(config), itertools.count()
    for name, tensor in _top(config).items():
        yield tensor, shapes[name]
    for run in shapes["runs"]:
        layer = [
            (tensor, (rows, *run[name][2:]))
            for name, part in parts.items()
            for tensor, rows in zip(part.names, part.rows, strict=True)
        ]
        for n in itertools.islice(layers, run["qkv"][0]):
            yield from ((f"model.layers.{n}.{tensor}", shape) for tensor, shape in layer)


class _Tensors:
    """The tensors of a folder, whichever file holds them."""

    def __init__(self, folder: Folder, config: Config):
        self._config = config
        self._files: dict[pathlib.Path, Any] = {}  # open
        self._where: dict[str, pathlib.Path] = {}
        index = self._index(folder)
        for name in sorted(set(index.values())) or [_THEIRS]:
            self._open(folder.file(name))
        for name, file in index.items():
            if self._where.get(name) != folder.path / file:
                raise ValueError(
                    f"{folder.path / _INDEX}: weight_map: {shown(name)} is not in {shown(file)}"
                )
        self._check_shapes(folder)

    def _index(self, folder: Folder) -> dict[str, str]:
        """The file of each tensor; {} where one file has all, which comes first."""
        if folder.has(_THEIRS):
            return {}
        if not folder.has(_INDEX):
            raise ValueError(f"{folder.path}: holds neither {_THEIRS} nor {_INDEX} nor {_OURS}")
        where, found = f"{folder.path / _INDEX}: weight_map", folder.json(_INDEX).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise ValueError(f"{where}: expected an object, got {shown(found)}")
        for name, file in found.items():
            plain = isinstance(file, str) and file.isprintable() and os.path.basename(file) == file
            if not plain or not file.endswith(".safetensors"):
                raise ValueError(
                    f"{where}: {shown(name)}: expected the name of a *.safetensors file in this "
                    f"folder, got {shown(file)}"
                )
        return found

    def _open(self, path: pathlib.Path) -> None:
        try:
            import safetensors
        except ImportError:
            raise ValueError(
                f"{path}: reading it takes the package safetensors: pip install 'pallas_attn[lm]'"
            ) from None
        try:
            file = safetensors.safe_open(path, "numpy")
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path}: {shown(str(error))[1:-1]}") from None
        self._files[path] = file
        for name in file.keys():  # noqa: SIM118
            if name in self._where:
                raise ValueError(f"{path}: {shown(name)} is also in {self._where[name]}")
            self._where[name] = path

    def _check_shapes(self, folder: Folder) -> None:
        left = dict(self._where)
        for name, shape in _wanted(self._config):
            path = left.pop(name, None)
            if path is None:
                raise ValueError(f"{folder.path}: {name}: expected shape {list(shape)}, as "
                                 "config.json has it, got no such tensor")  # fmt: skip
            found = self._files[path].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ValueError(f"{path}: {name}: expected shape {list(shape)}, as config.json "
                                 f"has it, got {shown(found.get_shape())}")  # fmt: skip
            if found.get_dtype() not in _DTYPES:
                raise ValueError(f"{path}: {name}: expected one of {', '.join(_DTYPES)}, got "
                                 f"{found.get_dtype()}")  # fmt: skip
        unread = (*_UNREAD, *(("lm_head.weight",) if self._config.tied else ()))
        for name, path in left.items():
            if not name.endswith(unread):
                raise ValueError(
                    f"{path}: {shown(name)} is no part of the model that config.json describes"
                )

    def _take(self, name: str, dtype: Any, at: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part of it that slices say."""
        file = self._files[self._where[name]]
        whole = all(one == slice(None) for one in at)
        with np.errstate(over="ignore", invalid="ignore"):
            return (file.get_tensor(name) if whole else file.get_slice(name)[at]).astype(dtype)

    def load(self, dtype: Any, mesh: Mesh | None = None) -> Params:
        """The parameters, on the default device; on a mesh no device or process reads more of a
        matrix than it has.
        """
        shapes, found = self._config.shapes(), _specs(self._config, mesh)
        specs = jax.tree.unflatten(jax.tree.structure(shapes, is_leaf=is_shape), found)
        params: Params = {
            name: lm_mesh.placed(
                mesh, specs[name], shapes[name], functools.partial(self._take, tensor, dtype)
            )
            for name, tensor in _top(self._config).items()
        }
        runs, first, parts = [], 0, _parts(self._config)
        for run, spec in zip(shapes["runs"], specs["runs"], strict=True):
            layers = range(first, first + run["qkv"][0])
            first = layers.stop
            # One parameter of all layers at a time: the host never holds the model twice.
            runs.append({
                name: lm_mesh.placed(mesh, spec[name], run[name], functools.partial(
                    self._stack, part, layers, run[name], dtype))
                for name, part in parts.items()
            })  # fmt: skip
        params |= {"runs": tuple(runs)}
        if not _all_finite(params):
            for name, _ in _wanted(self._config):
                if not np.isfinite(self._take(name, dtype).astype(np.float32)).all():
                    where = self._where[name]
                    raise ValueError(f"{where}: {name}: holds numbers that are not finite as "
                                     f"{jnp.dtype(dtype).name}")  # fmt: skip
        return params

    def _stack(
        self,
        part: _Part,
        layers: range,
        shape: tuple[int, ...],
        dtype: Any,
        at: tuple[slice, ...],
    ) -> np.ndarray:
        """The part of a stacked parameter that slices say; all layers."""
        sizes = [len(range(*one.indices(n))) for one, n in zip(at, shape, strict=True)]
        stacked = np.empty(sizes, dtype)
        spans = lm_mesh.spans(part.rows, at[1], shape[1])
        for n, layer in enumerate(layers):
            start = 0
            for which, rows in spans:
                name, size = f"model.layers.{layer}.{part.names[which]}", part.rows[which]
                rows = slice(None) if rows == slice(0, size) else rows
                stop = start + len(range(*rows.indices(size)))
                stacked[n, start:stop] = self._take(name, dtype, (rows, *at[2:]))
                start = stop
        return stacked
