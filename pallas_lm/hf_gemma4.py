"""The keys of a Gemma 4 (text) config.json that others do not have."""

from collections.abc import Mapping, Sequence
from typing import Any

from pallas_lm.config import Config
from pallas_lm.folder import shown
from pallas_lm.gemma4 import ExpertsBesideMlp, Gemma4
from pallas_lm.hf_keys import Key, Reader

GEMMA4_KEYS: dict[str, Key] = {
    "global_head_dim": Key(int, least=2, most=1024, default=512),
    "num_global_key_value_heads": Key(int, most=4096),
    "attention_k_eq_v": Key(bool, default=False),
    "per_layer_config": Key(dict),
    "enable_moe_block": Key(bool, default=False),
    "num_experts": Key(int, most=2**16),
    "top_k_experts": Key(int, most=1024),
    "moe_intermediate_size": Key(int, most=2**20),
    "hidden_size_per_layer_input": Key(int, least=0, most=2**16, default=0),
    "vocab_size_per_layer_input": Key(int, most=2**24),
    "num_kv_shared_layers": Key(int, least=0, most=1000, default=0),
    "use_double_wide_mlp": Key(bool, default=False),
}
_ABSENT = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
_SIZES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def with_rope(described: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The values of a config.json whose RoPE is described by rope_parameters or by default; older
    keys, which transformers does not read in Gemma 4, are refused.
    """
    absent = described.get("rope_parameters") is None
    for name in ("rope_scaling", *(("rope_theta", "rope_local_base_freq") if absent else ())):
        if described.get(name) is not None:
            raise ValueError(
                f"{where}: {name}: expected null, as Gemma 4 has its RoPE in rope_parameters, got "
                f"{shown(described[name])}"
            )
    if not absent:
        return described
    return {name: value for name, value in described.items() if name != "rope_parameters"}


def gemma4_of(described: Mapping[str, Any], where: str, config: Config) -> Gemma4:
    """Choices of a Gemma 4 with these windows, heads, and the kv heads of layers with a window."""
    values, windows = {**_ABSENT, **described}, config.windows
    read = Reader(f"{where}: ", values, GEMMA4_KEYS)
    if len(set(windows)) < 2 or windows[-1] is not None:
        kinds = described.get("layer_types") or f"a sliding_window for {len(windows)} layers"
        raise ValueError(
            f"{where}: layer_types: expected layers of sliding_attention and full_attention, a "
            f"full one last, got {shown(kinds)}"
        )
    if "per_layer_config" in described:  # transformers then reads no other key of these layers
        values |= {"num_global_key_value_heads": None, "global_head_dim": config.head_dim}
        values |= _listed(read, windows)
    elif not read["attention_k_eq_v"]:
        values["num_global_key_value_heads"] = None
    read = Reader(f"{where}: ", values, GEMMA4_KEYS)
    kv_heads = read["num_global_key_value_heads"] or config.kv_heads
    if config.heads % kv_heads:
        wanted = f"a divisor of the {config.heads} heads"
        raise read.wrong("num_global_key_value_heads", kv_heads, wanted)
    if read["global_head_dim"] % 2:
        raise read.wrong("global_head_dim", read["global_head_dim"], "an even number")
    if (readers := read["num_kv_shared_layers"]) and len(set(windows[:-readers])) < 2:
        wanted = "layers with a window and without before those that share k and v"
        raise read.wrong("num_kv_shared_layers", readers, wanted)
    inputs, rows = read["hidden_size_per_layer_input"], read["vocab_size_per_layer_input"]
    if inputs and rows != described.get("vocab_size"):
        wanted = f"vocab_size, {described.get('vocab_size')}"
        raise read.wrong("vocab_size_per_layer_input", rows, wanted)
    return Gemma4(
        kv_heads,
        read["global_head_dim"],
        read["attention_k_eq_v"],
        _experts(read) if read["enable_moe_block"] else None,
        inputs=inputs,
        readers=readers,
        wide_readers=read["use_double_wide_mlp"],
    )


def _experts(read: Reader) -> ExpertsBesideMlp:
    names = "num_experts", "moe_intermediate_size", "top_k_experts"
    for name in names:
        if read[name] is None:
            raise read.wrong(name, None)
    count, columns, active = (read[name] for name in names)
    if active > count:
        raise read.wrong("top_k_experts", active, f"at most the {count} experts")
    return ExpertsBesideMlp(count, columns, active)


def _listed(read: Reader, windows: Sequence[int | None]) -> dict[str, Any]:
    """The keys of layers without a window from a list of layers, as transformers writes them: what
    differs from layers with one; {} where nothing does.
    """
    layers = read["per_layer_config"] or {}
    sizes: Any = next(iter(layers.values()), {})
    full = {str(n) for n, window in enumerate(windows) if window is None}
    same = isinstance(sizes, dict) and all(own == sizes for own in layers.values())
    if not same or (layers and set(layers) != full) or not set(sizes) <= set(_SIZES):
        wanted = "the same head_dim and num_key_value_heads for every layer without a window, or {}"
        raise read.wrong("per_layer_config", layers, wanted)
    return {_SIZES[name]: value for name, value in sizes.items()}
