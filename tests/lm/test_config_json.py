"""config.json of every family: what it means, what is refused, and in which words."""

import functools
import json
import math

import numpy as np
import pytest

from pallas_lm import checkpoint, hf_config, hf_deepseek, hf_gemma4, mesh
from pallas_lm.config import Rope
from pallas_lm.experts import Experts
from pallas_lm.gemma4 import Gemma4
from pallas_lm.hf_config import KEYS, REQUIRED, ROPE_KEYS, config_from
from tests.lm import witness
from tests.lm.loops import refusal, refuses, small

LITE, LARGE, PLAIN = (witness.CONFIGS[x] for x in ("deepseek_v2_lite", "deepseek_v2", "gemma4"))
ROPES = PLAIN["rope_parameters"]
LINEAR = {"rope_type": "linear", "factor": 2.0}
SLIDING = ["full_attention", "full_attention", "sliding_attention"]
NO_WINDOW = "sliding_window or use_sliding_window leaves no window"
THREE = witness.CONFIGS["gemma3"] | {"rope_scaling": None}
NESTED = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}

# ---- single keys --------------------------------------------------------------------------------

_NASTY = (None, True, False, 0, 1, -1, 8.5, 10**9, 10**400, 1e39, -1e39, math.nan, math.inf, "",
          "silu", "false", "1", [], [1], [[[[]]]] * 9, {}, {"a": {"b": []}}, "x" * 999,
          "\n\x1b[1m")  # fmt: skip


def values(key):
    """Values that a key may not hold: those above that are none of its own, and past its range."""
    edges = [key.least - 1, key.most + 1, key.most * 2] if key.kind in (int, float) else []
    for value in (*_NASTY, *edges):
        if value is None and key.default is not REQUIRED:
            continue
        if not key.holds(value):
            yield value


GOOD = witness.CONFIGS["qwen3"] | {"use_sliding_window": True, "sliding_window": 8}
GOOD |= {"rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
EVERY = {
    **{name: (GOOD, key) for name, key in KEYS.items()},
    **{f"rope_scaling.{name}": (GOOD, key) for name, key in ROPE_KEYS.items()},
    **{name: (LARGE, key) for name, key in hf_deepseek.DEEPSEEK_KEYS.items()},
    **{name: (PLAIN, key) for name, key in hf_gemma4.GEMMA4_KEYS.items()},
}


@pytest.mark.parametrize("name", EVERY)
def test_a_key_of_another_type_or_out_of_range_is_refused_by_name(tmp_path, name):
    good, key = EVERY[name]
    config_from(good)
    outer, _, inner = name.rpartition(".")
    count = 0
    for value in values(key):
        changed = good | ({outer: good[outer] | {inner: value}} if outer else {inner: value})
        (tmp_path / "config.json").write_text(json.dumps(changed))
        line = refusal(checkpoint.config_of, tmp_path)
        assert line.startswith(f"{tmp_path}/config.json: {name}: expected {key.wanted}, got "), line
        count += 1
    assert count > 8


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.default is REQUIRED])
def test_a_key_that_has_to_be_there(tmp_path, name):
    config = {key: x for key, x in witness.CONFIGS["llama3"].items() if key != name}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = refusal(checkpoint.config_of, tmp_path)
    assert line == f"{tmp_path}/config.json: {name}: expected {KEYS[name].wanted}, got nothing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xfe",
         "not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[" * 10**5, "not JSON of any use: it is nested too deeply"),
        (b"[1, 2]", "expected a JSON object, got [1, 2]"),
        (b'{"a": 1' + b"0" * 5000 + b"}",
         "not JSON: Exceeds the limit (4300 digits) for integer string conversion"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_is_no_json_object(tmp_path, name, content, message):
    witness.write(tmp_path, *witness.made("llama3"), shards=2)
    (tmp_path / name).write_bytes(content)
    assert refusal(checkpoint.load, tmp_path, "float32").startswith(f"{tmp_path}/{name}: {message}")


# ---- values that do not go together -------------------------------------------------------------

REFUSED = {
    "llama3": (witness.CONFIGS["llama3"], [
        ({"num_attention_heads": 3, "num_key_value_heads": 2},
         "num_key_value_heads: expected a divisor of the 3 heads, got 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6},
         "hidden_size: expected a multiple of the 6 heads, or head_dim, got 32"),
        ({"head_dim": 7}, "head_dim: expected an even number, for rotary positions, got 7"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}},
         "rope_scaling: type 'dynamic' turns keys anew as the text grows, which a cache of rotated "
         "keys cannot; use 'yarn' or 'linear'"),
        ({"rope_scaling": {"rope_type": "linear"}},
         "rope_scaling.factor: expected a number from 0.001 to 1e+06, got None"),
        ({"rope_scaling": witness.CONFIGS["llama3"]["rope_scaling"] | {"high_freq_factor": 1}},
         "rope_scaling.high_freq_factor: expected more than low_freq_factor 1, got 1.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "high_freq_factor": 1}},
         "rope_scaling.low_freq_factor: expected a number from 0.001 to 1e+06, got None"),
        ({"rope_parameters": LINEAR | {"factor": 4.0}, "rope_scaling": LINEAR},
         "rope_scaling: expected null, as rope_parameters says something else, got {'factor': 2.0, "
         "'rope_type': 'linear'}"),
        ({"model_type": "qwen2", "sliding_window": 4, "layer_types": SLIDING},
         f"layer_types: expected full_attention alone, as {NO_WINDOW}, got {SLIDING}"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": SLIDING,
          "sliding_window": None},
         f"layer_types: expected full_attention alone, as {NO_WINDOW}, got {SLIDING}"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 9.0}}},
         "rope_parameters: 'full_attention' is an object, which is not supported"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]},
         "layer_types: expected 3 of full_attention, sliding_attention, got ['full_attention']"),
        ({"hidden_act": "gelu_pytorch_tanh"},
         "hidden_act: expected silu in llama, got 'gelu_pytorch_tanh'"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}},
         "rope_scaling.partial_rotary_factor: expected one of 1.0, 1, got 0.5"),
    ]),
    "gemma3": (THREE, [
        ({"attn_logit_softcapping": 3.0},
         "attn_logit_softcapping: expected null, as transformers has no softcap of scores in "
         "gemma3_text, got 3.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}},
         "rope_scaling: expected rope_type in place of type, which transformers does not read in "
         "gemma3_text, got {'factor': 2.0, 'type': 'linear'}"),
        ({"rope_scaling": LINEAR, "rope_parameters": NESTED},
         "rope_scaling: expected null, as rope_parameters says something else, got {'factor': 2.0, "
         "'rope_type': 'linear'}"),
        ({"rope_parameters": LINEAR},
         "rope_parameters: expected an object for each of full_attention and sliding_attention in "
         "gemma3_text, got {'factor': 2.0, 'rope_type': 'linear'}"),
        ({"rope_scaling": NESTED},
         "rope_scaling: 'full_attention' is an object, which is not supported"),
        ({"use_bidirectional_attention": "vision"},
         "use_bidirectional_attention: expected null or false in gemma3_text, got 'vision'"),
        ({"sliding_window": None},
         f"layer_types: expected full_attention alone, as {NO_WINDOW}, got ['sliding_attention', "
         "'sliding_attention', 'full_attention']"),
        ({"hidden_activation": None, "hidden_act": "silu"},
         "hidden_act: expected gelu_pytorch_tanh in gemma3_text, got 'silu'"),
        ({"rope_parameters": {"full_attention": 3}},
         "rope_parameters.full_attention: expected an object, got 3"),
    ]),
    "deepseek_v2": (LARGE, [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: expected an even number, got 7"),
        ({"kv_lora_rank": None},
         "kv_lora_rank: expected a whole number from 1 to 65536, got nothing"),
        ({"moe_intermediate_size": None},
         "moe_intermediate_size: expected a whole number from 1 to 1048576, got None"),
        ({"num_experts_per_tok": 5},
         "num_experts_per_tok: expected at most the 4 experts to choose from, got 5"),
        ({"n_group": 4}, "n_group: expected a divisor of the 6 experts, got 4"),
        ({"topk_group": 4}, "topk_group: expected at most the 3 groups, got 4"),
        ({"topk_group": None}, "topk_group: expected a whole number from 1 to 65536, got None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0},
          "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
         "rope_scaling: expected null, as rope_parameters says something else, got {'factor': 4.0, "
         "'rope_type': 'linear'}"),
        ({"num_key_value_heads": 2},
         "num_key_value_heads: expected null or 4: each of the heads has its own K and V, got 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func: expected one of softmax, got 'sigmoid'"),
        ({"norm_topk_prob": True}, "norm_topk_prob: expected one of False, got True"),
    ]),
    "gemma4": (PLAIN, [
        ({"num_global_key_value_heads": 3},
         "num_global_key_value_heads: expected a divisor of the 4 heads, got 3"),
        ({"global_head_dim": 7}, "global_head_dim: expected an even number, got 7"),
        ({"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
         "layer_types: expected layers of sliding_attention and full_attention, a full one last, "
         "got ['full_attention', 'full_attention']"),
        ({"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
         "layer_types: expected layers of sliding_attention and full_attention, a full one last, "
         "got ['full_attention', 'sliding_attention']"),
        ({"rope_scaling": {"factor": 2}},
         "rope_scaling: expected null, as Gemma 4 has its RoPE in rope_parameters, got "
         "{'factor': 2}"),
        ({"rope_parameters": None, "rope_theta": 1e5},
         "rope_theta: expected null, as Gemma 4 has its RoPE in rope_parameters, got 100000.0"),
        ({"attn_logit_softcapping": 3.0},
         "attn_logit_softcapping: expected null, as transformers has no softcap of scores in "
         "gemma4_text, got 3.0"),
        ({"rope_parameters": {}},
         "rope_parameters.full_attention: expected an object, got nothing"),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}},
         "rope_parameters.sliding_attention: expected an object, got nothing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
         "rope_parameters: expected an object for each of full_attention and sliding_attention in "
         "gemma4_text, got {'rope_theta': 100.0, 'rope_type': 'default'}"),
        ({"rope_parameters": ROPES | {"sliding_attention": {"rope_type": "default"}}},
         "rope_parameters.sliding_attention.rope_theta: expected a number from 2 to 1e+12, got "
         "None"),
        ({"hidden_size_per_layer_input": 256},
         "vocab_size_per_layer_input: expected vocab_size, 96, got 262144"),
        ({"num_kv_shared_layers": 3},
         "num_kv_shared_layers: expected layers with a window and without before those that share "
         "k and v, got 3"),
        ({"enable_moe_block": True},
         "num_experts: expected a whole number from 1 to 65536, got None"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3,
          "moe_intermediate_size": 8}, "top_k_experts: expected at most the 2 experts, got 3"),
        ({"per_layer_config": {"0": {"head_dim": 24}}},
         "per_layer_config: expected the same head_dim and num_key_value_heads for every layer "
         "without a window, or {}, got {'0': {'head_dim': 24}}"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [(family, *row) for family, (_, rows) in REFUSED.items() for row in rows],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)
def test_values_that_do_not_go_together(family, changes, message):
    """Nor does what transformers computes otherwise."""
    refuses(f"config.json: {message}", config_from, REFUSED[family][0] | changes)


@pytest.mark.parametrize(
    ("family", "what"), [("deepseek_v2_lite", "latent attention"), ("gemma4", "two head dims")]
)
def test_models_that_no_mesh_has(family, what):
    message = (
        f"mesh: expected none: a model with {what} is not split over devices, got tp:1; leave mesh "
        "out"
    )
    refuses(message, mesh.local, small(family)[0], mesh.make("tp:1", ("tp",)))


# ---- reading ------------------------------------------------------------------------------------


def test_a_family_has_its_own_values_for_what_is_absent():
    base = witness.BASE
    assert config_from(base | {"model_type": "mistral"}).windows == (4096,) * 3
    assert config_from(base | {"model_type": "mistral", "sliding_window": None}).windows == ()
    assert config_from(base | {"model_type": "qwen3"}).head_dim == 128
    assert config_from(base | {"model_type": "llama"}).head_dim == 8


def test_the_rope_of_transformers():
    """A config.json that says a thing twice, or in an older spelling."""

    def rope(family="llama3", **changes):
        return config_from(witness.CONFIGS[family] | changes).rope

    assert rope(rope_parameters=LINEAR, rope_scaling=LINEAR) == rope(rope_scaling=LINEAR)
    assert rope(rope_parameters={}, rope_scaling=LINEAR).kind == "linear"
    yarn = {"rope_type": "yarn", "factor": 4.0}
    original = functools.partial(rope, original_max_position_embeddings=48)
    assert original(rope_scaling=yarn).original_positions == 48
    inner = yarn | {"original_max_position_embeddings": 32}
    assert original(rope_scaling=inner).original_positions == 48
    assert original("gemma3", rope_scaling=inner).original_positions == 32
    assert rope(rope_scaling=inner).original_positions == 32
    assert rope(rope_scaling=yarn).original_positions == 256


def test_gemma_as_its_config_says():
    """Defaults of absent keys, and newer files that list layers and their rotations."""
    plain = {name: x for name, x in witness.BASE.items() if name != "hidden_act"}
    two, three = (config_from(plain | {"model_type": name}) for name in hf_config.GEMMA[:2])
    assert two.windows == (4096, None, 4096) and three.windows == (4096, 4096, 4096)
    assert (two.softcap, two.logit_softcap, two.scale) == (50.0, 30.0, 1 / 16)
    assert (three.softcap, three.logit_softcap, three.scale) == (None, None, 1 / 16)
    assert two.head_dim == 256 and two.tied and not two.qk_norm and three.qk_norm
    assert [rope.theta for rope in three.ropes] == [1e6, 1e4] and len(two.ropes) == 1
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}}
    ropes |= {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    listed = plain | {"model_type": "gemma3_text", "layer_types": kinds, "rope_parameters": ropes}
    config = config_from(listed)
    assert config.windows == (4096, None, 4096)
    assert config.ropes == (
        hf_config.Rope(1e5, "linear", factor=8.0, original_positions=256),
        hf_config.Rope(500.0),
    )


def test_gemma_3_has_the_ropes_of_transformers():
    """A kind of layer that is left out is plain; each kind has a base of its own by default."""

    def ropes(**parameters):
        return config_from(THREE | {"rope_parameters": parameters}).ropes

    linear = hf_config.Rope(1e5, "linear", factor=2.0, original_positions=256)
    assert ropes(**NESTED) == (linear, hf_config.Rope(100.0))
    assert ropes(full_attention=LINEAR) == ropes(**NESTED | {"sliding_attention": None})
    assert ropes(full_attention=LINEAR) == ropes(full_attention={"type": "linear", "factor": 2.0})
    assert ropes(full_attention=LINEAR) == (linear, hf_config.Rope(100.0))
    assert ropes(sliding_attention={"rope_theta": 7.0}) == (hf_config.Rope(1e5), hf_config.Rope(7))
    assert ropes() == (hf_config.Rope(1e5), hf_config.Rope(100.0))


def test_deepseek_as_its_config_says():
    plain = LITE | {"rope_scaling": None}
    assert config_from(plain).scale == pytest.approx(20**-0.5)
    assert config_from(plain | {"n_routed_experts": None}).experts is None
    assert config_from(plain | {"first_k_dense_replace": 3}).experts is None
    stretched = config_from(LITE)
    assert stretched.scale == pytest.approx(20**-0.5 * (0.07 * np.log(4.0) + 1) ** 2)
    absent = {name: x for name, x in plain.items() if name != "q_lora_rank"}
    assert config_from(absent).latent.q_rank == 1536
    assert config_from(LARGE).experts == Experts(
        first=1, count=6, columns=24, shared=2, active=2, scale=3.0, groups=3, active_groups=2
    )


def test_gemma_4_as_its_config_says():
    config = config_from(PLAIN)
    assert config.gemma4 == Gemma4(kv_heads=1, head_dim=24, values_are_keys=True)
    assert config.scale == 1.0 and config.qk_norm and config.tied
    assert config.ropes == (Rope(1e3, "proportional", rotated=0.5), Rope(100.0))
    without = {
        name: x for name, x in PLAIN.items() if name not in ("layer_types", "rope_parameters")
    }
    config = config_from(without)
    assert config.windows == (5, 5, 5, 5, None)
    assert config.ropes == (Rope(1e6, "proportional", rotated=0.25), Rope(1e4))
    listed = {str(n): {"head_dim": 40, "num_key_value_heads": 4} for n in (2, 4)}
    assert config_from(PLAIN | {"per_layer_config": listed}).gemma4 == Gemma4(4, 40, True)
    assert config_from(PLAIN | {"attention_k_eq_v": False}).gemma4 == Gemma4(2, 24, False)
    listed = {"per_layer_config": listed, "attention_k_eq_v": False}
    assert config_from(PLAIN | listed).gemma4 == Gemma4(4, 40, False)
    # Such a list has what differs from layers with a window; other keys then say nothing of it.
    for listed, heads, dim in (
        ({}, 2, 16),
        (None, 2, 16),
        ({"2": {"head_dim": 40}, "4": {"head_dim": 40}}, 2, 40),
        ({"2": {"num_key_value_heads": 1}, "4": {"num_key_value_heads": 1}}, 1, 16),
    ):
        assert config_from(PLAIN | {"per_layer_config": listed}).gemma4 == Gemma4(heads, dim, True)
    assert config_from(without | {"sliding_window_pattern": 2}).windows == config.windows
    assert config_from(without | {"rope_parameters": None}).ropes == config.ropes


def test_a_rope_of_another_kind():
    message = "rope: expected default, linear, llama3, yarn or proportional, got 'cosine'"
    refuses(message, Rope(kind="cosine").frequencies, 8)
