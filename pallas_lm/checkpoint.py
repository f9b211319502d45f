"""A model's folder: its weights beside config.json.

Weights lie in model.safetensors, or in several files that model.safetensors.index.json names.
Names, shapes and types are compared with config.json before anything is built, and only finite
numbers are accepted; a ValueError names the file and its fault.
"""

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
from jax.typing import DTypeLike

from pallas_lm import gemma4, tensor_files
from pallas_lm import mesh as lm_mesh
from pallas_lm.config import Config, Params, Shape, is_shape
from pallas_lm.folder import Folder, shown
from pallas_lm.hf_config import config_from

EMBEDDED = pathlib.Path(__file__).parent / "tiny"

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
NAMES = ("config.json", _FILE, _INDEX, "generation_config.json", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja")  # fmt: skip
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_UNREAD = ("rotary_emb.inv_freq",)  # tensors that old checkpoints hold and no model reads
_ROWS = 4096  # rows of two tensors that are compared at a time

Slices = tuple[slice, ...]
Loader = Callable[..., Params]  # (dtype, mesh or None)


def config_of(folder: str | os.PathLike[str]) -> Config:
    """The model that a folder holds."""
    files = Folder(folder)
    return config_from(files.json("config.json"), str(files.path / "config.json"))


def load(
    folder: str | os.PathLike[str], dtype: DTypeLike, mesh: Mesh | None = None
) -> tuple[Config, Params]:
    """A model from a folder, its weights as `dtype` on the default device, or split over a mesh."""
    config = config_of(folder)
    return config, weights_of(folder, config)(dtype, mesh)


def weights_of(folder: str | os.PathLike[str], config: Config) -> Loader:
    """The function that makes the parameters in a dtype, on a mesh or on the default device. The
    names and shapes in the files are checked at once.
    """
    return functools.partial(_load, config, _Tensors(Folder(folder), config))


def save(folder: str | os.PathLike[str], described: Mapping[str, Any], params: Params) -> None:
    """A model into a folder: `described` is its config.json, the weights go in as bfloat16. For
    families whose norms are stored as they are.
    """
    folder, config = pathlib.Path(folder), config_from(described)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(described), indent=2) + "\n", "utf-8")
    params = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), params)
    tensors = {tensor: params[name] for name, tensor in _TOP.items() if name in params}
    layers = itertools.count()
    for number, run in enumerate(params["runs"]):
        names = {name: x for name, x in _tensors_of(config, number).items() if name in run}
        for n, layer in zip(range(len(run["qkv"])), layers, strict=False):
            for name, parts in names.items():
                rows = [shape[0] for shape in _parts(config, name, number, run[name].shape)]
                pieces = np.split(run[name][n], np.cumsum(rows)[:-1])
                named = (f"model.layers.{layer}.{part}" for part in parts)
                tensors |= zip(named, pieces, strict=True)
    tensor_files.write(folder / _FILE, tensors)


def _load(config: Config, source: "_Tensors", dtype: DTypeLike, mesh: Mesh | None = None) -> Params:
    """The parameters, one after the other: the host never holds the model twice. On a mesh no
    device or process reads more of a matrix than it has.
    """
    shapes = _shapes(config)
    specs: list[Any] = [None] * len(shapes)
    if mesh is not None:
        specs = jax.tree.leaves(lm_mesh.specs(config, mesh), is_leaf=lm_mesh.is_spec)
    leaves = [
        lm_mesh.placed(mesh, spec, shape, functools.partial(source.read, name, shape, dtype))
        for spec, (name, shape) in zip(specs, shapes.items(), strict=True)
    ]
    tree = jax.tree.structure(config.shapes(), is_leaf=is_shape)
    params = jax.tree.unflatten(tree, leaves)
    finite = jax.jit(lambda params: [jnp.isfinite(x).all() for x in jax.tree.leaves(params)])
    if not all(jax.device_get(finite(params))):
        raise ValueError(source.not_finite(dtype))
    return params


def _shapes(config: Config) -> dict[str, Shape]:
    """The shape of each parameter by its name in the tree, "runs.0.qkv"."""
    leaves = jax.tree.leaves_with_path(config.shapes(), is_leaf=is_shape)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): shape for path, shape in leaves}


# ---- *.safetensors ------------------------------------------------------------------------------

# Tensors that lie one after the other in each parameter of a layer.
_LAYER = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "out": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "qkv_bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
}
# Tensors of Gemma's layers, whose "post_attention_layernorm" norms the result of attention.
_GEMMA_LAYER = _LAYER | {
    "attn_post_norm": ("post_attention_layernorm.weight",),
    "mlp_norm": ("pre_feedforward_layernorm.weight",),
    "mlp_post_norm": ("post_feedforward_layernorm.weight",),
    **gemma4.TENSORS,
}
_TOP = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "embed_inputs": "model.embed_tokens_per_layer.weight",
    "inputs_proj": "model.per_layer_model_projection.weight",
    "inputs_norm": "model.per_layer_projection_norm.weight",
}


def _parameter(name: str) -> tuple[str, int]:
    """Name and run of a parameter by its name in the tree, "runs.0.qkv"; run 0 of those in none."""
    *place, last = name.split(".")
    return last, int(place[-1]) if place else 0


def _tensors_of(config: Config, run: int) -> dict[str, tuple[str, ...]]:
    """The tensors of each parameter of a run's layers."""
    tensors, experts = _GEMMA_LAYER if config.gemma else _LAYER, config.experts_of(run)
    if config.gemma4 is not None:
        tensors = tensors | {"qkv": tensors["qkv"][: len(config.joined("qkv", run))]}
    if config.latent is not None:
        tensors = tensors | config.latent.tensors
    return tensors if experts is None else tensors | experts.tensors


def _wanted(config: Config) -> Iterator[tuple[str, Shape]]:
    """The tensors of a model: (name, shape)."""
    shapes, layers = config.shapes(), itertools.count()
    for name, tensor in _TOP.items():
        if name in shapes:
            yield tensor, shapes[name]
    for number, run in enumerate(shapes["runs"]):
        layer = [
            (tensor, shape)
            for name, tensors in _tensors_of(config, number).items()
            if name in run
            for tensor, shape in zip(tensors, _parts(config, name, number, run[name]), strict=True)
        ]
        for n in itertools.islice(layers, run["qkv"][0]):
            yield from ((f"model.layers.{n}.{tensor}", shape) for tensor, shape in layer)


def _unread(config: Config, name: str) -> bool:
    """Whether a checkpoint may hold a tensor of this name that the model does not read."""
    readers = 0 if config.gemma4 is None else config.gemma4.readers
    layers = range(config.layers - readers, config.layers)
    names = "k_proj", "v_proj", "k_norm", "v_norm"
    rows = (f"model.layers.{n}.self_attn.{name}.weight" for n in layers for name in names)
    return name.endswith(_UNREAD) or name in rows or (config.tied and name == _TOP["head"])


def _parts(config: Config, name: str, run: int, shape: Shape) -> list[Shape]:
    """The shapes of the tensors in a layer of a parameter [layers, ...] of a run."""
    if columns := config.joined_columns(name, run):
        return [(*shape[1:-1], size) for size in columns]
    return [(rows, *shape[2:]) for rows in config.joined(name, run) or shape[1:2]]


class _Tensors:
    """The tensors of a folder, whichever file holds them."""

    def __init__(self, folder: Folder, config: Config):
        self._config = config
        self._tensors: dict[str, np.ndarray] = {}
        self._where: dict[str, pathlib.Path] = {}  # file of each tensor
        index = self._index(folder)
        for name in sorted(set(index.values())) or [_FILE]:
            self._open(folder.file(name))
        for name, file in index.items():
            if self._where.get(name) != folder.path / file:
                raise ValueError(
                    f"{folder.path / _INDEX}: weight_map: {shown(name)} is not in {shown(file)}"
                )
        self._check_shapes(folder)
        if config.tied and _TOP["head"] in self._where:
            self._check_head()

    def _index(self, folder: Folder) -> dict[str, str]:
        """The file of each tensor; {} where one file has all, which comes first."""
        if folder.has(_FILE):
            return {}
        if not folder.has(_INDEX):
            raise ValueError(f"{folder.path}: holds neither {_FILE} nor {_INDEX}")
        where, files = f"{folder.path / _INDEX}: weight_map", folder.json(_INDEX).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError(f"{where}: expected an object, got {shown(files)}")
        for name, file in files.items():
            plain = isinstance(file, str) and file.isprintable() and os.path.basename(file) == file
            if not plain or not file.endswith(".safetensors"):
                raise ValueError(
                    f"{where}: {shown(name)}: expected the name of a *.safetensors file in this "
                    f"folder, got {shown(file)}"
                )
        return files

    def _open(self, path: pathlib.Path) -> None:
        for name, tensor in tensor_files.read(path).items():
            if name in self._where:
                raise ValueError(f"{path}: {shown(name)} is also in {self._where[name]}")
            self._where[name], self._tensors[name] = path, tensor

    def _check_shapes(self, folder: Folder) -> None:
        left = dict(self._where)
        for name, shape in _wanted(self._config):
            expected = f"{name}: expected shape {list(shape)}, as config.json has it, got"
            path = left.pop(name, None)
            if path is None:
                raise ValueError(f"{folder.path}: {expected} no such tensor")
            tensor = self._tensors[name]
            if tensor.shape != shape:
                raise ValueError(f"{path}: {expected} {shown(list(tensor.shape))}")
            if (dtype := tensor.dtype.name) not in _DTYPES:
                raise ValueError(
                    f"{path}: {name}: expected one of {', '.join(_DTYPES)}, got {dtype}"
                )
        for name, path in left.items():
            if not _unread(self._config, name):
                raise ValueError(
                    f"{path}: {shown(name)} is no part of the model that config.json describes"
                )

    def _check_head(self) -> None:
        """Refuses a head beside a tied embedding whose numbers are others: transformers uses it."""
        names = _TOP["head"], _TOP["embed"]
        head, embed = (self._tensors[name] for name in names)
        rows = self._config.vocab
        parts = [slice(row, min(row + _ROWS, rows)) for row in range(0, rows, _ROWS)]
        same = head.shape == embed.shape and head.dtype.name in _DTYPES
        same = same and all(np.array_equal(head[x], embed[x], equal_nan=True) for x in parts)
        if not same:
            raise ValueError(
                f"{self._where[names[0]]}: {names[0]}: expected the numbers of {names[1]}, as "
                "config.json has tie_word_embeddings true, got others; set it to false to use this "
                "head, or remove the tensor"
            )

    def read(self, name: str, shape: Shape, dtype: DTypeLike, at: Slices) -> np.ndarray:
        """The part of a parameter that slices say; of a layer's parameter, always all layers."""
        if name in _TOP:
            return self._take(_TOP[name], dtype, at)
        name, run = _parameter(name)
        tensors = _tensors_of(self._config, run)[name]
        first = sum(count for count, _ in self._config.runs[:run])
        counts = [len(range(*part.indices(n))) for part, n in zip(at, shape, strict=True)]
        stacked = np.empty(counts, dtype)
        if self._config.joined_columns(name, run):
            for n in range(shape[0]):
                names = (f"model.layers.{first + n}.{tensor}" for tensor in tensors)
                np.concatenate([self._take(x, dtype) for x in names], axis=-1, out=stacked[n])
            return stacked
        sizes = self._config.joined(name, run) or shape[1:2]
        for n in range(shape[0]):
            start = 0
            for matrix, rows in lm_mesh.spans(sizes, at[1], shape[1]):
                tensor = f"model.layers.{first + n}.{tensors[matrix]}"
                part = self._take(tensor, dtype, (rows, *at[2:]))
                stacked[n, start : start + len(part)] = part
                start += len(part)
        return stacked

    def _take(self, name: str, dtype: DTypeLike, at: Slices = ()) -> np.ndarray:
        """A tensor, or the part of it that slices say."""
        with np.errstate(over="ignore", invalid="ignore"):
            held = self._tensors[name][at]
            less_1 = self._config.gemma and self._config.gemma4 is None
            if less_1 and name.endswith("norm.weight"):
                held = held.astype(np.float32) + 1
            return held.astype(dtype)

    def not_finite(self, dtype: DTypeLike) -> str:
        """The error for the first tensor with a number that is not finite."""
        for name, _ in _wanted(self._config):
            if not np.isfinite(self._take(name, dtype).astype(np.float32)).all():
                break
        where = self._where[name]
        return f"{where}: {name}: holds numbers that are not finite as {jnp.dtype(dtype).name}"
