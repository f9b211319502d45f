"""The keys of a DeepSeek-V2 config.json: sizes of latent attention, and of experts."""

import math
from collections.abc import Mapping
from typing import Any

from pallas_lm.experts import Experts
from pallas_lm.hf_keys import REQUIRED, Key, Reader, factor
from pallas_lm.latent import Latent

DEEPSEEK = ("deepseek_v2",)
_GREEDY, _BY_GROUP = "greedy", "group_limited_greedy"

# The model supports a single value of each of the last three.
DEEPSEEK_KEYS: dict[str, Key] = {
    "kv_lora_rank": Key(int, most=2**16, default=REQUIRED),
    "q_lora_rank": Key(int, most=2**16),
    "qk_nope_head_dim": Key(int, most=1024, default=REQUIRED),
    "qk_rope_head_dim": Key(int, least=2, most=1024, default=REQUIRED),
    "v_head_dim": Key(int, most=1024, default=REQUIRED),
    "n_routed_experts": Key(int, most=2**16),
    "n_shared_experts": Key(int, least=0, most=1024, default=0),
    "num_experts_per_tok": Key(int, most=1024),
    "moe_intermediate_size": Key(int, most=2**20),
    "first_k_dense_replace": Key(int, least=0, most=1000, default=0),
    "topk_method": Key(str, choices=(_GREEDY, _BY_GROUP), default=_GREEDY),
    "n_group": Key(int, most=2**16),
    "topk_group": Key(int, most=2**16),
    "routed_scaling_factor": factor(1.0),
    "scoring_func": Key(str, choices=("softmax",)),
    "norm_topk_prob": Key(bool, choices=(False,)),
    "moe_layer_freq": Key(int, choices=(1,)),
}
# Defaults for absent keys; null is another thing.
_ABSENT = {"q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2}
_ABSENT |= {"moe_intermediate_size": 1407}


def fields(
    described: Mapping[str, Any], where: str, layers: int, rope: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a Config that are other ones in DeepSeek. `rope`: the object that stretches
    rotary positions, whose keys were checked; {} without one.
    """
    read = Reader(f"{where}: ", {**_ABSENT, **described}, DEEPSEEK_KEYS)
    latent = Latent(
        rank=read["kv_lora_rank"],
        plain=read["qk_nope_head_dim"],
        rotated=read["qk_rope_head_dim"],
        values=read["v_head_dim"],
        q_rank=read["q_lora_rank"],
    )
    if latent.rotated % 2:
        raise read.wrong("qk_rope_head_dim", latent.rotated, "an even number")
    return {
        "head_dim": latent.head_dim,
        "scale": latent.head_dim**-0.5 * _sharpened(rope) ** 2,
        "latent": latent,
        "experts": _experts(read) if read["first_k_dense_replace"] < layers else None,
    }


def _sharpened(rope: Mapping[str, Any]) -> float:
    """The factor of q and of k, in yarn, for a context that was stretched."""
    stretched = rope.get("factor") or 1.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" or stretched <= 1:
        return 1.0
    return (rope.get("mscale_all_dim") or 0) * math.log(stretched) / 10 + 1


def _experts(read: Reader) -> Experts | None:
    """The experts; None where config.json says that there are none."""
    count = read["n_routed_experts"]
    if count is None:
        return None
    for name in ("moe_intermediate_size", "num_experts_per_tok"):
        if read[name] is None:
            raise read.wrong(name, None)
    groups = active_groups = 1
    if read["topk_method"] == _BY_GROUP:
        groups, active_groups = read["n_group"], read["topk_group"]
        for name in ("n_group", "topk_group"):
            if read[name] is None:
                raise read.wrong(name, None)
    if count % groups:
        raise read.wrong("n_group", groups, f"a divisor of the {count} experts")
    if active_groups > groups:
        raise read.wrong("topk_group", active_groups, f"at most the {groups} groups")
    if (active := read["num_experts_per_tok"]) > count // groups * active_groups:
        wanted = f"at most the {count // groups * active_groups} experts to choose from"
        raise read.wrong("num_experts_per_tok", active, wanted)
    return Experts(
        first=read["first_k_dense_replace"],
        count=count,
        columns=read["moe_intermediate_size"],
        shared=read["n_shared_experts"],
        active=active,
        scale=read["routed_scaling_factor"],
        groups=groups,
        active_groups=active_groups,
    )
