"""Models by name: the contents of their config.json, for runs with random weights."""

from typing import Any

_KEYS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
         "rms_norm_eps")  # fmt: skip
_SIZES = {
    "llama2_7b": ("llama", 32000, 4096, 11008, 32, 32, 32, 4096, 1e-5),
    "llama3_8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 8192, 1e-5),
    "llama3_70b": ("llama", 128256, 8192, 28672, 80, 64, 8, 8192, 1e-5),
    "llama3.1_8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 131072, 1e-5),
    "mistral_7b": ("mistral", 32000, 4096, 14336, 32, 32, 8, 32768, 1e-5),
    "qwen2_7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 131072, 1e-6),
    "qwen3_8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, 1e-6),
    "deepseek_v2_lite": ("deepseek_v2", 102400, 2048, 10944, 27, 16, 16, 163840, 1e-6),
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}
_MORE: dict[str, dict[str, Any]] = {
    "llama2_7b": {},
    "llama3_8b": {"rope_theta": 500000.0},
    "llama3_70b": {"rope_theta": 500000.0},
    "llama3.1_8b": {"rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    "mistral_7b": {"rope_theta": 10000.0, "sliding_window": 4096},
    "qwen2_7b": {"rope_theta": 1000000.0, "use_sliding_window": False},
    "qwen3_8b": {"head_dim": 128, "rope_theta": 1000000.0, "use_sliding_window": False},
    "deepseek_v2_lite": _DEEPSEEK,
}
PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, sizes, strict=True)) | _MORE[name] for name, sizes in _SIZES.items()
}
