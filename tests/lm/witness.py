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
    if config["model_type"] == "qwen3":
        layer_shapes |= {f"self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    tensors = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape)
        # Norms about 1, matrices that keep the size of what they are given, large for one layer.
        drawn = 1 + 0.2 * drawn if "norm" in name else drawn * (2 / math.sqrt(shape[-1]))
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
        rows[name] = y if name == "v" else _turned(config, y, dim)
    out = np.zeros((len(x), heads, dim))
    window = _window(config, layer)
    for t in range(len(x)):
        first = 0 if window is None else max(0, t - window + 1)
        for head in range(heads):
            mates = slice(first, t + 1), head // (heads // kv)
            scores = rows["k"][mates] @ rows["q"][t, head] / math.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ rows["v"][mates]
    return out.reshape(len(x), -1) @ mine["self_attn.o_proj.weight"].T


def _window(config, layer):
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
