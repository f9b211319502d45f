"""A Llama-family model a third time: float64 NumPy over tensors by their Hugging Face names, one
query at a time, turning pairs as complex numbers. And checkpoints of random weights to feed it.
"""

import functools
import json
import math

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
_GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e3,
    },
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEEPSEEK = BASE | {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
}
_DEEPSEEK_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_DEEPSEEK_YARN |= {"mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
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
    "gemma4": {name: x for name, x in _GEMMA.items() if name != "query_pre_attn_scalar"}
    | {"model_type": "gemma4_text", "num_hidden_layers": 5, "final_logit_softcapping": 5.0}
    | {"layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL], "attention_k_eq_v": True}
    | {"global_head_dim": 24, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    | {"rope_parameters": _GEMMA4_ROPES},
    "gemma4_moe": {name: x for name, x in _GEMMA.items() if name != "query_pre_attn_scalar"}
    | {"model_type": "gemma4_text", "layer_types": [_SLIDING, _SLIDING, _FULL]}
    | {"global_head_dim": 24, "hidden_size_per_layer_input": 0, "rope_parameters": _GEMMA4_ROPES}
    | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "enable_moe_block": True},
    "gemma4_small": {name: x for name, x in _GEMMA.items() if name != "query_pre_attn_scalar"}
    | {"model_type": "gemma4_text", "num_hidden_layers": 7, "rope_parameters": _GEMMA4_ROPES}
    | {"layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _SLIDING, _SLIDING, _FULL]}
    | {"global_head_dim": 24, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "deepseek_v2_lite": _DEEPSEEK | {"rope_scaling": _DEEPSEEK_YARN, "topk_method": "greedy"},
    "deepseek_v2": _DEEPSEEK
    | {"q_lora_rank": 20, "routed_scaling_factor": 3.0, "topk_method": "group_limited_greedy"}
    | {"n_group": 3, "topk_group": 2, "tie_word_embeddings": True},
}


def _of_layer(config, layer):
    """The config with the heads of a layer: those of Gemma 4's full layers are others."""
    if config["model_type"] != "gemma4_text" or config["layer_types"][layer] == _SLIDING:
        return config
    heads = config.get("num_global_key_value_heads", config["num_key_value_heads"])
    return config | {"head_dim": config["global_head_dim"], "num_key_value_heads": heads}


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
    if config["model_type"] in ("qwen3", "gemma3_text", "gemma4_text"):
        layer_shapes |= {f"self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    latent = config["model_type"] == "deepseek_v2"
    if latent:
        layer_shapes = _deepseek_shapes(config, layer_shapes)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        mine = layer_shapes
        if config["model_type"] == "gemma4_text":
            mine = _gemma4_shapes(_of_layer(config, layer), mine, _reads(config, layer))
        if latent and layer >= config["first_k_dense_replace"]:
            mine = {n: x for n, x in mine.items() if "mlp" not in n} | _expert_shapes(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in mine.items()}
    shapes["model.norm.weight"] = (hidden,)
    if columns := config.get("hidden_size_per_layer_input"):
        width = config["num_hidden_layers"] * columns
        shapes["model.embed_tokens_per_layer.weight"] = (config["vocab_size"], width)
        shapes["model.per_layer_model_projection.weight"] = (width, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (columns,)
    if not config.get("tie_word_embeddings", gemma):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    tensors = {}
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape)
        # Norms about 1, matrices that keep the size of what they are given, large for one layer.
        about = 0 if gemma and config["model_type"] != "gemma4_text" else 1
        factor = "norm" in name or "scal" in name
        drawn = about + 0.2 * drawn if factor else drawn * (2 / math.sqrt(shape[-1]))
        tensors[name] = drawn.astype(np.float32)
    return tensors


def _reads(config, layer):
    """Whether a layer has k and v of an earlier one."""
    return layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)


def _gemma4_shapes(config, shapes, reads):
    heads, kv, dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    hidden = config["hidden_size"]
    shapes = shapes | {f"self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    shapes |= {f"self_attn.{x}_proj.weight": (kv * dim, hidden) for x in "kv"}
    shapes["self_attn.q_proj.weight"] = (heads * dim, hidden)
    shapes["self_attn.o_proj.weight"] = (hidden, heads * dim)
    if dim == config["global_head_dim"] and config.get("attention_k_eq_v"):
        del shapes["self_attn.v_proj.weight"]
    if reads:
        names = [f"self_attn.{x}.weight" for x in ("k_proj", "v_proj", "k_norm")]
        shapes = {name: x for name, x in shapes.items() if name not in names}
        if config["use_double_wide_mlp"]:
            mlp = 2 * config["intermediate_size"]
            shapes |= {f"mlp.{x}_proj.weight": (mlp, hidden) for x in ("gate", "up")}
            shapes["mlp.down_proj.weight"] = (hidden, mlp)
    if columns := config["hidden_size_per_layer_input"]:
        shapes["per_layer_input_gate.weight"] = (columns, hidden)
        shapes["per_layer_projection.weight"] = (hidden, columns)
        shapes["post_per_layer_input_norm.weight"] = (hidden,)
    if config.get("enable_moe_block"):
        count, columns = config["num_experts"], config["moe_intermediate_size"]
        names = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"
        names = *names, "post_feedforward_layernorm_2"
        shapes |= {f"{name}.weight": (hidden,) for name in names}
        shapes |= {"router.proj.weight": (count, hidden), "router.scale": (hidden,)}
        shapes |= {"router.per_expert_scale": (count,)}
        shapes |= {"experts.gate_up_proj": (count, 2 * columns, hidden)}
        shapes |= {"experts.down_proj": (count, hidden, columns)}
    return shapes | {"layer_scalar": (1,)}


def _deepseek_shapes(config, shapes):
    heads, hidden, rank = (
        config[name] for name in ("num_attention_heads", "hidden_size", "kv_lora_rank")
    )
    plain, turned, values = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    shapes = {name: x for name, x in shapes.items() if "self_attn" not in name}
    if (q_rank := config["q_lora_rank"]) is None:
        shapes["self_attn.q_proj.weight"] = (heads * (plain + turned), hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (q_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (q_rank,)
        shapes["self_attn.q_b_proj.weight"] = (heads * (plain + turned), q_rank)
    return shapes | {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + turned, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (plain + values), rank),
        "self_attn.o_proj.weight": (hidden, heads * values),
    }


def _expert_shapes(config):
    hidden, columns = config["hidden_size"], config["moe_intermediate_size"]
    sizes = {f"experts.{n}": columns for n in range(config["n_routed_experts"])}
    sizes["shared_experts"] = columns * config["n_shared_experts"]
    shapes = {"mlp.gate.weight": (config["n_routed_experts"], hidden)}
    for name, size in sizes.items():
        shapes |= {f"mlp.{name}.{x}_proj.weight": (size, hidden) for x in ("gate", "up")}
        shapes[f"mlp.{name}.down_proj.weight"] = (hidden, size)
    return shapes


@functools.cache
def made(family):
    """(its config.json, tensors by name)."""
    return CONFIGS[family], tensors_of(CONFIGS[family], np.random.default_rng(len(family)))


def write(folder, config, tensors, shards=1, dtype=np.float32):
    """A folder as Hugging Face lays it out."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: x.astype(np.dtype(dtype)) for name, x in tensors.items()}
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
        h = _norm(config, x, mine["input_layernorm.weight"])
        latent = "kv_lora_rank" in config
        x = x + (
            _latent_attention(config, mine, h) if latent else _attention(config, mine, h, layer)
        )
        h = _norm(config, x, mine["post_attention_layernorm.weight"])
        routed = "mlp.gate.weight" in mine
        x = x + (_experts(config, mine, h) if routed else _mlp(mine, "mlp", h))
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return _norm(config, x, tensors["model.norm.weight"]) @ head.T


def _gemma_logits(config, tensors, ids):
    """Norms of 1 + w on both sides of attention and MLP, a GELU, a bound of the logits."""
    embed = tensors["model.embed_tokens.weight"]
    if config["model_type"] != "gemma4_text":
        tensors = {name: x + name.endswith("norm.weight") for name, x in tensors.items()}
    x = embed[list(ids)] * math.sqrt(config["hidden_size"])
    kept = {}  # k and v of the last layer of each kind
    if columns := config.get("hidden_size_per_layer_input"):
        made = x @ tensors["model.per_layer_model_projection.weight"].T
        made = made.reshape(len(x), -1, columns) / math.sqrt(config["hidden_size"])
        known = tensors["model.embed_tokens_per_layer.weight"][list(ids)].reshape(made.shape)
        made = _norm(config, made, tensors["model.per_layer_projection_norm.weight"])
        inputs = (made + known * math.sqrt(columns)) / math.sqrt(2)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        mine["kept"] = kept
        h = _attention(config, mine, _norm(config, x, mine["input_layernorm.weight"]), layer)
        x = x + _norm(config, h, mine["post_attention_layernorm.weight"])
        h = _norm(config, x, mine["pre_feedforward_layernorm.weight"])
        gate = _gelu(h @ mine["mlp.gate_proj.weight"].T)
        h = (gate * (h @ mine["mlp.up_proj.weight"].T)) @ mine["mlp.down_proj.weight"].T
        if config.get("enable_moe_block"):
            h = _norm(config, h, mine["post_feedforward_layernorm_1.weight"])
            added = np.stack([_gemma4_experts(config, mine, row) for row in x])
            h = h + _norm(config, added, mine["post_feedforward_layernorm_2.weight"])
        x = x + _norm(config, h, mine["post_feedforward_layernorm.weight"])
        if columns:
            gate = _gelu(x @ mine["per_layer_input_gate.weight"].T) * inputs[:, layer]
            h = gate @ mine["per_layer_projection.weight"].T
            x = x + _norm(config, h, mine["post_per_layer_input_norm.weight"])
        x = x * mine.get("layer_scalar", 1.0)
    logits = _norm(config, x, tensors["model.norm.weight"]) @ embed.T
    cap = config.get("final_logit_softcapping")
    return logits if cap is None else cap * np.tanh(logits / cap)


def _gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gemma4_experts(config, mine, row):
    """The likeliest experts, whose shares add up to 1."""
    seen = _norm(config, row, mine["router.scale"]) / math.sqrt(len(row))
    scores = np.exp(mine["router.proj.weight"] @ seen)
    chosen = np.argsort(-scores)[: config["top_k_experts"]]
    h, out = _norm(config, row, mine["pre_feedforward_layernorm_2.weight"]), np.zeros(len(row))
    for expert in chosen:
        gate, up = np.split(mine["experts.gate_up_proj"][expert] @ h, 2)
        share = scores[expert] / scores[chosen].sum() * mine["router.per_expert_scale"][expert]
        out += share * (mine["experts.down_proj"][expert] @ (_gelu(gate) * up))
    return out


def _norm(config, x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight


def _attention(config, mine, x, layer):
    rotation, window = _rotation(config, layer), _window(config, layer)
    config = _of_layer(config, layer)
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    kept = mine.get("kept", {})
    rows = dict(kept.get(window is None, {}))
    made = [x for x in "qkv" if x == "q" or "self_attn.k_proj.weight" in mine]
    for name, count in zip(made, (heads, kv, kv), strict=False):
        made = name if f"self_attn.{name}_proj.weight" in mine else "k"
        y = x @ mine[f"self_attn.{made}_proj.weight"].T
        y = y + mine.get(f"self_attn.{name}_proj.bias", 0.0)
        y = y.reshape(len(x), count, dim)
        if f"self_attn.{name}_norm.weight" in mine:
            y = _norm(config, y, mine[f"self_attn.{name}_norm.weight"])
        if name == "v" and "layer_scalar" in mine:
            y = _norm(config, y, 1.0)
        rows[name] = y if name == "v" else _turned(rotation, y, dim)
    kept[window is None] = rows
    out = np.zeros((len(x), heads, dim))
    cap = config.get("attn_logit_softcapping")
    divisor = 1.0 if "layer_scalar" in mine else config.get("query_pre_attn_scalar", dim)
    for t in range(len(x)):
        first = 0 if window is None else max(0, t - window + 1)
        for head in range(heads):
            mates = slice(first, t + 1), head // (heads // kv)
            scores = rows["k"][mates] @ rows["q"][t, head]
            scores = scores / math.sqrt(divisor)
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ rows["v"][mates]
    return out.reshape(len(x), -1) @ mine["self_attn.o_proj.weight"].T


def _mlp(mine, name, x):
    gate, up = (x @ mine[f"{name}.{kind}_proj.weight"].T for kind in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ mine[f"{name}.down_proj.weight"].T


def _experts(config, mine, x):
    """Row by row: the shared experts, and the likeliest of all others, or of the best groups."""
    out = _mlp(mine, "mlp.shared_experts", x)
    for row in range(len(x)):
        scores = np.exp(mine["mlp.gate.weight"] @ x[row])
        scores = dict(enumerate(scores / scores.sum()))
        if config["topk_method"] != "greedy":
            size = len(scores) // config["n_group"]
            best = sorted(scores, key=scores.get, reverse=True)
            groups = list(dict.fromkeys(expert // size for expert in best))[: config["topk_group"]]
            scores = {expert: x for expert, x in scores.items() if expert // size in groups}
        chosen = sorted(scores, key=scores.get, reverse=True)[: config["num_experts_per_tok"]]
        for expert in chosen:
            share = scores[expert] * config.get("routed_scaling_factor", 1.0)
            out[row] += share * _mlp(mine, f"mlp.experts.{expert}", x[row])
    return out


def _latent_attention(config, mine, x):
    """K and V of every head, made of a row that all heads share."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is None:
        q = x @ mine["self_attn.q_proj.weight"].T
    else:
        q = _norm(
            _FINE, x @ mine["self_attn.q_a_proj.weight"].T, mine["self_attn.q_a_layernorm.weight"]
        )
        q = q @ mine["self_attn.q_b_proj.weight"].T
    q = q.reshape(len(x), heads, -1)
    row = x @ mine["self_attn.kv_a_proj_with_mqa.weight"].T
    shared = _norm(_FINE, row[:, :rank], mine["self_attn.kv_a_layernorm.weight"])
    kv = (shared @ mine["self_attn.kv_b_proj.weight"].T).reshape(len(x), heads, -1)
    q_turned = _neighbours_turned(config, q[..., plain:], turned)
    k_turned = _neighbours_turned(config, row[:, None, rank:], turned)[:, 0]
    scale, how = 1 / math.sqrt(plain + turned), config.get("rope_scaling") or {}
    if how.get("mscale_all_dim"):
        scale *= (0.1 * how["mscale_all_dim"] * math.log(how["factor"]) + 1) ** 2
    out = np.zeros((len(x), heads, kv.shape[-1] - plain))
    for t in range(len(x)):
        for head in range(heads):
            scores = kv[: t + 1, head, :plain] @ q[t, head, :plain]
            scores = scale * (scores + k_turned[: t + 1] @ q_turned[t, head])
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ kv[: t + 1, head, plain:]
    return out.reshape(len(x), -1) @ mine["self_attn.o_proj.weight"].T


_FINE = {"rms_norm_eps": 1e-6}


def _neighbours_turned(config, x, dim):
    """Columns 2 i and 2 i + 1 are a pair."""
    halves = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    first, second = np.split(_turned(config, halves, dim), 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(x.shape)


def _rotation(config, layer):
    """The keys of config.json about the rotation in a layer: Gemma 3 and 4 have two kinds."""
    if config["model_type"] == "gemma4_text":
        return {"rope_parameters": config["rope_parameters"][config["layer_types"][layer]]}
    if config["model_type"] != "gemma3_text" or _window(config, layer) is None:
        return config
    return {"rope_theta": config["rope_local_base_freq"]}


def _window(config, layer):
    if config["model_type"] == "gemma4_text":
        return config["sliding_window"] if config["layer_types"][layer] == _SLIDING else None
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
    if kind in (None, "default"):
        return plain, 1.0
    if kind == "proportional":
        return plain if i < int(how["partial_rotary_factor"] * dim) // 2 else 0.0, 1.0
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
    grown = [
        0.1 * how.get(name, 1.0) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim")
    ]
    size = grown[0] / grown[1] if "mscale" in how else grown[0]
    return share * plain / factor + (1 - share) * plain, size
