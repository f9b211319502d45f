"""config.json and generation_config.json of a Hugging Face checkpoint: the keys that are read, the
values that each may hold, and the model that they describe.

Every value is checked against the tables here: a key of another type, a number out of range or a
choice that this model does not know is an error that names it, never a model that quietly computes
something else. Keys that are in no table change nothing of what is computed.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pallas_lm import hf_deepseek, hf_gemma4
from pallas_lm.config import Config, Rope
from pallas_lm.folder import Folder, shown
from pallas_lm.hf_deepseek import DEEPSEEK
from pallas_lm.hf_keys import REQUIRED, Key, Reader, factor

GEMMA = ("gemma2", "gemma3_text", "gemma4_text")
TWO_ROPES = ("gemma3_text", "gemma4_text")  # one for layers with a window, one for the others
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *GEMMA, *DEEPSEEK)
WINDOWED = ("full_attention", "sliding_attention")  # names in layer_types

_ALL_TURN = Key(float, choices=(1.0, 1))
# Keys of config.json. The model supports a single value of each of the last four.
KEYS: dict[str, Key] = {
    "model_type": Key(str, choices=FAMILIES, default=REQUIRED),
    "vocab_size": Key(int, most=2**24, default=REQUIRED),
    "hidden_size": Key(int, most=2**20, default=REQUIRED),
    "intermediate_size": Key(int, most=2**20, default=REQUIRED),
    "num_hidden_layers": Key(int, most=1000, default=REQUIRED),
    "num_attention_heads": Key(int, most=4096, default=REQUIRED),
    "num_key_value_heads": Key(int, most=4096),
    "head_dim": Key(int, least=2, most=1024),
    "max_position_embeddings": Key(int, default=REQUIRED),
    "rms_norm_eps": Key(float, least=1e-12, most=1, default=1e-6),
    "rope_theta": Key(float, least=2, most=1e12, default=10000.0),
    "rope_scaling": Key(dict),
    "rope_parameters": Key(dict),
    "tie_word_embeddings": Key(bool, default=False),
    "use_sliding_window": Key(bool, default=False),
    "sliding_window": Key(int),
    "max_window_layers": Key(int, least=0, default=28),
    "layer_types": Key(list),
    "tokenizer": Key(str, choices=("bytes",)),
    "hidden_act": Key(str, choices=("silu", "gelu_pytorch_tanh")),
    "hidden_activation": Key(str, choices=("gelu_pytorch_tanh",)),
    "query_pre_attn_scalar": factor(),
    "attn_logit_softcapping": factor(),
    "final_logit_softcapping": factor(),
    "rope_local_base_freq": Key(float, least=2, most=1e12, default=10000.0),
    "sliding_window_pattern": Key(int, most=1000, default=6),
    "use_bidirectional_attention": Key(str, choices=(False, "vision")),  # vision: Gemma 4's text
    "original_max_position_embeddings": Key(int),
    "attention_bias": Key(bool, choices=(False,)),
    "mlp_bias": Key(bool, choices=(False,)),
    "partial_rotary_factor": _ALL_TURN,
    "quantization_config": Key(dict, choices=(None,)),
}
ROPE_KEYS: dict[str, Key] = {
    "rope_type": Key(str, choices=("default", "linear", "llama3", "yarn", "proportional")),
    "type": Key(str, choices=("default", "linear", "llama3", "yarn", "proportional")),
    "rope_theta": KEYS["rope_theta"],
    "factor": factor(),
    "original_max_position_embeddings": Key(int),
    "low_freq_factor": factor(),
    "high_freq_factor": factor(),
    "beta_fast": factor(32.0),
    "beta_slow": factor(1.0),
    "truncate": Key(bool, default=True),
    "attention_factor": factor(),
    "mscale": Key(float, least=0, most=1000),
    "mscale_all_dim": Key(float, least=0, most=1000),
    "partial_rotary_factor": Key(float, least=0, most=1),
}
_TOKEN = Key(int, least=0, most=2**31 - 1)
# Defaults of a family for absent keys; null is another thing.
_GEMMA = {"sliding_window": 4096, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA |= {"tie_word_embeddings": True}
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
_ABSENT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA | {"rope_theta": 1e6},
    "gemma4_text": _GEMMA | {"sliding_window": 512, "rope_parameters": _GEMMA4_ROPE},
}


def config_from(described: Mapping[str, Any], where: str = "config.json") -> Config:
    """The model that a config.json describes; `where` is the file's name in errors."""
    family = described.get("model_type")
    absent = _ABSENT.get(family, {}) if isinstance(family, str) else {}
    if family == "gemma4_text":
        described = hf_gemma4.with_rope(described, where)
    read = Reader(f"{where}: ", {**absent, **described}, KEYS)
    heads, layers = read["num_attention_heads"], read["num_hidden_layers"]
    kv_heads = read["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise read.wrong("num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
    if family in DEEPSEEK and kv_heads != heads:
        wanted = f"null or {heads}: each of the heads has its own K and V"
        raise read.wrong("num_key_value_heads", kv_heads, wanted)
    gate = "gelu_pytorch_tanh" if family in GEMMA else "silu"
    if read["hidden_act"] not in (None, gate):
        raise read.wrong("hidden_act", read["hidden_act"], f"{gate} in {family}")
    head_dim = None if family in DEEPSEEK else read["head_dim"]
    if head_dim is None and read["hidden_size"] % heads:
        wanted = f"a multiple of the {heads} heads, or head_dim"
        raise read.wrong("hidden_size", read["hidden_size"], wanted)
    head_dim = head_dim or read["hidden_size"] // heads
    if head_dim % 2:
        raise read.wrong("head_dim", head_dim, "an even number, for rotary positions")
    config = Config(
        vocab=read["vocab_size"],
        hidden=read["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=read["intermediate_size"],
        positions=read["max_position_embeddings"],
        rope=_rope(read, where, WINDOWED[0]),
        norm_eps=read["rms_norm_eps"],
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", *TWO_ROPES),
        tied=read["tie_word_embeddings"],
        windows=_windows(read, layers),
        **(_gemma(read, where) if family in GEMMA else {}),
    )
    if family == "gemma4_text":
        config = dataclasses.replace(config, gemma4=hf_gemma4.gemma4_of(described, where, config))
    if family in DEEPSEEK:
        rope = _rope_object(read, where, WINDOWED[0])[1]
        fields = hf_deepseek.fields(described, where, layers, rope)
        config = dataclasses.replace(config, kv_heads=heads, **fields)
    return config


def _rope_object(outer: Reader, where: str, kind_of_layer: str) -> tuple[str, dict[str, Any]]:
    """The name and the values of the object about rotary positions of layers of a kind, one of
    `WINDOWED`. transformers reads one of the two objects, or mixes them: they may not differ.
    """
    new, old = outer["rope_parameters"] or {}, outer["rope_scaling"] or {}
    family = outer["model_type"]
    if new and old and new != old:
        raise outer.wrong("rope_scaling", old, "null, as rope_parameters says something else")
    if family not in TWO_ROPES:
        return ("rope_parameters", new) if new else ("rope_scaling", old)
    if new or family == "gemma4_text":
        if not set(new) <= set(WINDOWED):
            wanted = f"an object for each of {' and '.join(WINDOWED)} in {family}"
            raise outer.wrong("rope_parameters", new, wanted)
        default: Any = REQUIRED if family == "gemma4_text" else {}
        keys = {kind: Key(dict, default=default) for kind in WINDOWED}
        read = Reader(f"{where}: rope_parameters.", new, keys)
        return f"rope_parameters.{kind_of_layer}", read[kind_of_layer]
    if old.get("rope_type") is None and old.get("type") not in (None, "default"):
        wanted = f"rope_type in place of type, which transformers does not read in {family}"
        raise outer.wrong("rope_scaling", old, wanted)
    return "rope_scaling", old if kind_of_layer == WINDOWED[0] else {}


def _gemma(read: Reader, where: str) -> dict[str, Any]:
    """The fields of a Config that are set for Gemma only."""
    family, softcap = read["model_type"], read["attn_logit_softcapping"]
    scale = 1.0 if family == "gemma4_text" else read["query_pre_attn_scalar"]
    fields: dict[str, Any] = {"gemma": True, "scale": None if scale is None else scale**-0.5}
    if family in TWO_ROPES:
        fields["window_rope"] = _rope(read, where, WINDOWED[1])
        if softcap is not None:
            wanted = f"null, as transformers has no softcap of scores in {family}"
            raise read.wrong("attn_logit_softcapping", softcap, wanted)
    if family != "gemma4_text" and (both_ways := read["use_bidirectional_attention"]):
        raise read.wrong("use_bidirectional_attention", both_ways, f"null or false in {family}")
    return fields | {"softcap": softcap, "logit_softcap": read["final_logit_softcapping"]}


def _windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; () where there is none at all."""
    family, window = read["model_type"], read["sliding_window"]
    if family in ("llama", *DEEPSEEK):
        return ()
    if family in ("qwen2", "qwen3") and not read["use_sliding_window"]:
        window = None
    kinds = read["layer_types"]
    if kinds is None:
        windowed = family in GEMMA or window is not None
        kinds = [WINDOWED[windowed and _has_window(read, n)] for n in range(layers)]
    if len(kinds) != layers or not all(kind in WINDOWED for kind in kinds):
        raise read.wrong("layer_types", kinds, f"{layers} of {', '.join(WINDOWED)}")
    if window is None and WINDOWED[1] in kinds:
        wanted = "full_attention alone, as sliding_window or use_sliding_window leaves no window"
        raise read.wrong("layer_types", kinds, wanted)
    if window is None:
        return ()
    return tuple(window if kind == WINDOWED[1] else None for kind in kinds)


def _has_window(read: Reader, layer: int) -> bool:
    """Whether a layer has a window by its family's rule, where config.json lists no types."""
    family = read["model_type"]
    if family in GEMMA:
        if family == "gemma4_text" and layer == read["num_hidden_layers"] - 1:
            return False
        every = {"gemma2": 2, "gemma3_text": read["sliding_window_pattern"]}.get(family, 6)
        return (layer + 1) % every != 0
    return family == "mistral" or layer >= read["max_window_layers"]


def _rope(outer: Reader, where: str, kind_of_layer: str) -> Rope:
    """The RoPE of layers of a kind, one of `WINDOWED`."""
    name, described = _rope_object(outer, where, kind_of_layer)
    family = outer["model_type"]
    for key, value in described.items():
        if key not in ROPE_KEYS and isinstance(value, dict):
            raise ValueError(f"{where}: {name}: {shown(key)} is an object, which is not supported")
    if "dynamic" in (described.get("rope_type"), described.get("type")):
        raise ValueError(
            f"{where}: {name}: type 'dynamic' turns keys anew as the text grows, which a cache of "
            "rotated keys cannot; use 'yarn' or 'linear'"
        )
    read = Reader(f"{where}: {name}.", described, ROPE_KEYS)
    theta = read["rope_theta"]
    if described.get("rope_theta") is None:
        if family == "gemma4_text":
            raise read.wrong("rope_theta", None)
        own = family == "gemma3_text" and kind_of_layer == WINDOWED[1]
        theta = outer["rope_local_base_freq" if own else "rope_theta"]
    kind = read["rope_type"] or read["type"] or "default"
    rotated = read["partial_rotary_factor"]
    if kind == "proportional":
        return Rope(
            theta, kind, factor=read["factor"] or 1.0, rotated=1.0 if rotated is None else rotated
        )
    if rotated not in (None, 1.0):
        raise read.wrong("partial_rotary_factor", rotated, _ALL_TURN.wanted)
    if kind == "default":
        return Rope(theta)
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for key in needed:
        if read[key] is None:
            raise read.wrong(key, None)
    low, high = read["low_freq_factor"] or 1.0, read["high_freq_factor"] or 4.0
    if kind == "llama3" and not low < high:
        raise read.wrong("high_freq_factor", high, f"more than low_freq_factor {low:g}")
    # transformers prefers the outer one to the inner one, in models with one RoPE.
    outer_original = None if family in TWO_ROPES else outer["original_max_position_embeddings"]
    return Rope(
        theta,
        kind,
        factor=read["factor"],
        original_positions=(
            outer_original
            or read["original_max_position_embeddings"]
            or outer["max_position_embeddings"]
        ),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=read["beta_fast"],
        beta_slow=read["beta_slow"],
        truncate=read["truncate"],
        attention_factor=_attention_factor(read) if kind == "yarn" else 1.0,
    )


def _attention_factor(read: Reader) -> float:
    """The factor of cos and sin in yarn; by default it grows with the log of `factor`."""
    if read["attention_factor"] is not None:
        return read["attention_factor"]
    grown = math.log(max(read["factor"], 1.0)) / 10
    scale, all_dims = read["mscale"], read["mscale_all_dim"]
    if scale and all_dims:
        return (scale * grown + 1) / (all_dims * grown + 1)
    return grown + 1


def stop_tokens(folder: Folder) -> tuple[int, ...]:
    """The tokens that end a text, from generation_config.json if it is there, even if it names
    none, else from config.json.
    """
    name = "generation_config.json"
    name = name if folder.has(name) else "config.json"
    value = folder.json(name).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not _TOKEN.holds(token):
            wanted = f"{_TOKEN.wanted}, or a list of such"
            path = folder.path / name
            raise ValueError(f"{path}: eos_token_id: expected {wanted}, got {shown(token)}")
    return tuple(ids)
