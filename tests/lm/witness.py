"""A Llama-family model a third time: float64 NumPy over tensors by their Hugging Face names, one
query at a time, turning pairs as complex numbers. And checkpoints of random weights to feed it.
"""

import functools
import json
import math

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_GEMMA = {name: x for name, x in BASE.items() if name != "hidden_act"} | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
}
CONFIGS = {
    "llama2": BASE | {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": BASE
    | {"model_type": "llama", "rope_theta": 5e5}
    | {"rope_scaling": _LLAMA3 | {"rope_type": "llama3", "factor": 8.0}},
    "linear": BASE
    | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}
    | {"tie_word_embeddings": True},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 6},
    "qwen2": BASE
    | {"model_type": "qwen2", "use_sliding_window": True}
    | {"sliding_window": 5, "max_window_layers": 1},
    "qwen3": BASE
    | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
    | {"rope_parameters": _YARN | {"rope_theta": 1e4}},
    "gemma2": _GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3": _GEMMA
    | {"model_type": "gemma3_text", "sliding_window_pattern": 3, "rope_theta": 1e5}
    | {"rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}


def tensors_of(config, rng):
    """Random tensors, large enough that every part of the model shows in the logits."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", hidden // heads)
    layer_shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * dim, hidden),
        "self_attn.k_proj.weight": (kv * dim, hidden),
        "self_attn.v_proj.weight": (kv * dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if config["model_type"] == "qwen2":
        sizes = {"q": heads, "k": kv, "v": kv}
        layer_shapes |= {f"self_attn.{x}_proj.bias": (n * dim,) for x, n in sizes.items()}
    if gemma := config["model_type"].startswith("gemma"):
        names = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        layer_shapes |= {f"{name}.weight": (hidden,) for name in names}
    if config["model_type"] in ("qwen3", "gemma3_text"):
        layer_shapes |= {f"self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    tensors = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape)
        # Norms about 1, matrices that keep the size of what they are given, large for one layer.
        drawn = (not gemma) + 0.2 * drawn if "norm" in name else drawn * (2 / math.sqrt(shape[-1]))
        tensors[name] = drawn.astype(np.float32)
    return tensors


@functools.cache
def made(family):
    """(its config.json, tensors by name)."""
    return CONFIGS[family], tensors_of(CONFIGS[family], np.random.default_rng(len(family)))


def write(folder, config, tensors, shards=1, dtype=np.float32):
    """A folder as Hugging Face lays it out."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: x.astype(jnp.dtype(dtype)) for name, x in tensors.items()}
    if shards == 1:
        safetensors.numpy.save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, where = list(stored), {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        mine = names[n::shards]
        safetensors.numpy.save_file({name: stored[name] for name in mine}, folder / file)
        where |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def logits(config, tensors, ids):
    """float64[t, vocab]."""
    tensors = {name: x.astype(np.float64) for name, x in tensors.items()}
    if config["model_type"].startswith("gemma"):
        return _gemma_logits(config, tensors, ids)
    x = tensors["model.embed_tokens.weight"][list(ids)]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        x = x + _attention(config, mine, _norm(config, x, mine["input_layernorm.weight"]), layer)
        h = _norm(config, x, mine["post_attention_layernorm.weight"])
        gate = h @ mine["mlp.gate_proj.weight"].T
        up = h @ mine["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ mine["mlp.down_proj.weight"].T
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return _norm(config, x, tensors["model.norm.weight"]) @ head.T


def _gemma_logits(config, tensors, ids):
    """Norms of 1 + w on both sides of attention and MLP, a GELU, a bound of the logits."""
    embed = tensors["model.embed_tokens.weight"]
    tensors = {name: x + 1 if name.endswith("norm.weight") else x for name, x in tensors.items()}
    x = embed[list(ids)] * math.sqrt(config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        h = _attention(config, mine, _norm(config, x, mine["input_layernorm.weight"]), layer)
        x = x + _norm(config, h, mine["post_attention_layernorm.weight"])
        h = _norm(config, x, mine["pre_feedforward_layernorm.weight"])
        gate = h @ mine["mlp.gate_proj.weight"].T
        gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        h = (gate * (h @ mine["mlp.up_proj.weight"].T)) @ mine["mlp.down_proj.weight"].T
        x = x + _norm(config, h, mine["post_feedforward_layernorm.weight"])
    logits = _norm(config, x, tensors["model.norm.weight"]) @ embed.T
    cap = config.get("final_logit_softcapping")
    return logits if cap is None else cap * np.tanh(logits / cap)


def _norm(config, x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight


def _attention(config, mine, x, layer):
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    rows = {}
    for name, count in (("q", heads), ("k", kv), ("v", kv)):
        y = x @ mine[f"self_attn.{name}_proj.weight"].T
        y = y + mine.get(f"self_attn.{name}_proj.bias", 0.0)
        y = y.reshape(len(x), count, dim)
        if f"self_attn.{name}_norm.weight" in mine:
            y = _norm(config, y, mine[f"self_attn.{name}_norm.weight"])
        rows[name] = y if name == "v" else _turned(_rotation(config, layer), y, dim)
    out = np.zeros((len(x), heads, dim))
    window, cap = _window(config, layer), config.get("attn_logit_softcapping")
    for t in range(len(x)):
        first = 0 if window is None else max(0, t - window + 1)
        for head in range(heads):
            mates = slice(first, t + 1), head // (heads // kv)
            scores = rows["k"][mates] @ rows["q"][t, head]
            scores = scores / math.sqrt(config.get("query_pre_attn_scalar", dim))
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ rows["v"][mates]
    return out.reshape(len(x), -1) @ mine["self_attn.o_proj.weight"].T


def _rotation(config, layer):
    """The keys of config.json about the rotation in a layer: Gemma 3 has two kinds of layers."""
    if config["model_type"] != "gemma3_text" or _window(config, layer) is None:
        return config
    return {"rope_theta": config["rope_local_base_freq"]}


def _window(config, layer):
    if config["model_type"] == "gemma2":
        return config["sliding_window"] if layer % 2 == 0 else None
    if config["model_type"] == "gemma3_text":
        last = layer % config["sliding_window_pattern"] == config["sliding_window_pattern"] - 1
        return None if last else config["sliding_window"]
    if config["model_type"] == "mistral":
        return config["sliding_window"]
    if config.get("use_sliding_window") and layer >= config["max_window_layers"]:
        return config["sliding_window"]
    return None


def _turned(config, x, dim):
    pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
    for i in range(dim // 2):
        speed, size = _speed(config, i, dim)
        pairs[..., i] *= size * np.exp(1j * speed * np.arange(len(x)))[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def _speed(config, i, dim):
    """Radians a position of pair i, and what yarn multiplies it by: case by case."""
    how = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = how.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = how.get("rope_type", how.get("type"))
    plain = theta ** (-2 * i / dim)
    if kind is None:
        return plain, 1.0
    factor = how["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    seen = how["original_max_position_embeddings"]
    if kind == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength > seen / how["low_freq_factor"]:
            return plain / factor, 1.0
        if wavelength < seen / how["high_freq_factor"]:
            return plain, 1.0
        span = how["high_freq_factor"] - how["low_freq_factor"]
        share = (seen / wavelength - how["low_freq_factor"]) / span
        return (1 - share) * plain / factor + share * plain, 1.0
    assert kind == "yarn"
    edge = [dim / 2 * math.log(seen / (2 * math.pi * turns), theta) for turns in (32, 1)]
    low, high = max(math.floor(edge[0]), 0), min(math.ceil(edge[1]), dim - 1)
    share = min(max((i - low) / (high - low), 0), 1)
    return share * plain / factor + (1 - share) * plain, 0.1 * math.log(factor) + 1
