"""Checkpoints in Hugging Face's layout: config.json, *.safetensors, tokenizer.json.

What is read is checked: an architecture, a choice or a tensor that this model does not know is an
error that names it, never a model that quietly computes something else.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_attn.lm import safetensors
from pallas_attn.lm.model import Config, Params, Rope

EMBEDDED = pathlib.Path(__file__).parent / "tiny"

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# What the families have in common, so that another value would mean another model.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def config_of(folder: str | os.PathLike[str]) -> Config:
    """The model that a folder holds."""
    return config_from(read_json(pathlib.Path(folder) / "config.json"))


def load(folder: str | os.PathLike[str], dtype: Any) -> tuple[Config, Params]:
    """A model from a folder, its weights as `dtype` on the default device."""
    config = config_of(folder)
    return config, _params(config, _Tensors(pathlib.Path(folder)), dtype)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A file that has to hold one JSON object."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def stop_tokens(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """The tokens that end a text, as generation_config.json or config.json name them."""
    for name in ("generation_config.json", "config.json"):
        path = pathlib.Path(folder) / name
        ids = read_json(path).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


# ---- config.json --------------------------------------------------------------------------------


def config_from(found: Mapping[str, Any]) -> Config:
    """The model that a config.json describes."""
    family = found.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"config.json: expected model_type of {_FAMILIES}, got {family!r}")
    for name, wanted in _FIXED.items():
        if found.get(name, wanted) not in (wanted, None):
            raise ValueError(f"config.json: {name} {found[name]!r} is not supported")
    try:
        heads = int(found["num_attention_heads"])
        layers = int(found["num_hidden_layers"])
        positions = int(found["max_position_embeddings"])
        head_dim = found.get("head_dim") or found["hidden_size"] // heads
        return Config(
            vocab=int(found["vocab_size"]),
            hidden=int(found["hidden_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            mlp=int(found["intermediate_size"]),
            positions=positions,
            rope=_rope(found, positions),
            norm_eps=float(found.get("rms_norm_eps", 1e-6)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied=bool(found.get("tie_word_embeddings", False)),
            windows=_windows(found, family, layers),
        )
    except KeyError as error:
        raise ValueError(f"config.json: {error.args[0]} is missing") from None


def _windows(found: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; () where there is none at all."""
    window = found.get("sliding_window")
    if family == "llama" or (family != "mistral" and not found.get("use_sliding_window")):
        window = None
    if window is None:
        return ()
    first = found.get("max_window_layers", 0) if family != "mistral" else 0
    kinds = found.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]
    sizes = {"sliding_attention": int(window), "full_attention": None}
    if len(kinds) != layers or not set(kinds) <= set(sizes):
        raise ValueError(f"config.json: layer_types: expected {layers} of {list(sizes)}")
    return tuple(sizes[kind] for kind in kinds)


def _rope(found: Mapping[str, Any], positions: int) -> Rope:
    scaling = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", found.get("rope_theta", 10000.0)))
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported")
    if kind == "dynamic":
        raise ValueError(
            "config.json: rope type 'dynamic' turns keys anew as the text grows, which a cache of "
            "turned keys cannot; use 'yarn' or 'linear'"
        )
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"config.json: rope type: expected default, linear, llama3 or yarn, got {kind!r}"
        )
    if kind == "default":
        return Rope(theta)
    names = {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"}
    options = {name: float(scaling[name]) for name in names if scaling.get(name) is not None}
    return Rope(
        theta,
        kind,
        factor=float(scaling["factor"]),
        original_positions=int(scaling.get("original_max_position_embeddings") or positions),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_attention_factor(scaling) if kind == "yarn" else 1.0,
        **options,
    )


def _attention_factor(scaling: Mapping[str, Any]) -> float:
    """What yarn multiplies cos and sin by: as given, or growing with the log of the factor."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    grown = math.log(max(float(scaling["factor"]), 1.0)) / 10
    scale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scale and all_dims:
        return (scale * grown + 1) / (all_dims * grown + 1)
    return grown + 1


# ---- tensors ------------------------------------------------------------------------------------


class _Tensors:
    """The tensors of a folder, whichever file holds them; each is taken once."""

    def __init__(self, folder: pathlib.Path):
        self._where: dict[str, pathlib.Path] = {}
        self._left: dict[str, np.ndarray] = {}
        for path in _files(folder):
            found = safetensors.read(path)
            self._left |= found
            self._where |= dict.fromkeys(found, path)

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self._left:
            raise ValueError(f"{name}: expected shape {list(shape)}, got no such tensor")
        tensor = self._left.pop(name)
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: expected shape {list(shape)}, got {list(tensor.shape)} in "
                f"{self._where[name]}"
            )
        return tensor

    def none_left(self, but: tuple[str, ...]) -> None:
        for name in self._left:
            if not name.endswith(but):
                raise ValueError(
                    f"{self._where[name]}: {name} is no part of the model that config.json "
                    "describes"
                )


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no *.safetensors file")
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: {index.name} names this file and it is not there")
    return files


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


def _params(config: Config, tensors: _Tensors, dtype: Any) -> Params:
    shapes = config.shapes()
    params: Params = {
        name: jnp.asarray(tensors.take(tensor, shapes[name]).astype(dtype))
        for name, tensor in _top(config).items()
    }
    runs, first, parts = [], 0, _parts(config)
    for run in shapes["runs"]:
        layers = range(first, first + run["qkv"][0])
        first = layers.stop
        # One parameter of all layers at a time: the host never holds the model twice.
        runs.append({name: _stack(tensors, part, layers, run[name][2:], dtype)
                     for name, part in parts.items()})  # fmt: skip
    tensors.none_left(("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied else ())))
    return params | {"runs": tuple(runs)}


def _stack(tensors: _Tensors, part: _Part, layers: range, rest: tuple[int, ...], dtype: Any):
    stacked = np.empty((len(layers), sum(part.rows), *rest), dtype)
    for n, layer in enumerate(layers):
        start = 0
        for name, rows in zip(part.names, part.rows, strict=True):
            tensor = tensors.take(f"model.layers.{layer}.{name}", (rows, *rest))
            stacked[n, start : start + rows] = tensor.astype(dtype)
            start += rows
    return jnp.asarray(stacked)


# ---- writing ------------------------------------------------------------------------------------


def save(
    folder: str | os.PathLike[str], described: Mapping[str, Any], params: Params, dtype: Any
) -> None:
    """A model into a folder: `described` is its config.json, the weights go in as `dtype`."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(described), indent=2) + "\n", "utf-8")
    tensors = dict(_named(config_from(described), params, dtype))
    safetensors.write(folder / "model.safetensors", tensors, {"format": "pt"})


def _named(config: Config, params: Params, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in _top(config).items():
        yield tensor, np.asarray(params[name].astype(dtype))
    layer = 0
    for run in params["runs"]:
        stacked = {name: np.asarray(run[name].astype(dtype)) for name in _parts(config)}
        for n in range(len(stacked["qkv"])):
            one = {name: whole[n] for name, whole in stacked.items()}
            yield from _pieces(config, one, f"model.layers.{layer}")
            layer += 1


def _pieces(
    config: Config, one: Mapping[str, np.ndarray], prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that the parameters of one layer were put together from."""
    for name, part in _parts(config).items():
        pieces = np.split(one[name], np.cumsum(part.rows)[:-1])
        for tensor, piece in zip(part.names, pieces, strict=True):
            yield f"{prefix}.{tensor}", piece
