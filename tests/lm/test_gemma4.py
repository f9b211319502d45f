"""Gemma 4 in the demo: two caches, and config.json.

That it computes what it should is in test_model.py and test_recorded.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_lm import checkpoint, decode, experts, hf_gemma4, mesh
from pallas_lm.config import Rope
from pallas_lm.gemma4 import Gemma4
from pallas_lm.gemma4_experts import with_experts
from pallas_lm.hf_config import config_from
from pallas_lm.sampling import Sampling
from tests.lm import witness
from tests.lm.loops import forward, options, prompts, refuses, small, tokens

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

FAMILY = "gemma4"
PLAIN = witness.CONFIGS[FAMILY]
ROPES = PLAIN["rope_parameters"]


def run(family=FAMILY, **changes):
    made = decode.Run(*small(family), options(**changes), prompts((5, 12, 1, 9)), 8)
    for _ in made:
        pass
    return made


def test_many_rows_are_taken_some_at_a_time(monkeypatch, rng):
    config, params = small("gemma4_moe")
    weights = jax.tree.map(lambda x: x[0], params["runs"][0])
    x, result = jnp.asarray(rng.standard_normal((2, 1, 50, config.hidden)), jnp.float32)
    mlp = functools.partial(with_experts, config.gemma4.experts, x, result, weights, 1e-6)
    whole = mlp()
    monkeypatch.setattr(experts, "_ROWS", 16)
    np.testing.assert_allclose(mlp(), whole, atol=1e-4)


def test_chunks_drafts_and_caches_give_the_same_tokens():
    family = "gemma4_small"  # some of its layers read the rows of others
    want = tokens(run(family, cache="per_sequence"))
    assert tokens(run(family, cache="stacked", prefill_chunk=7)) == want
    assert tokens(run(family, cache="paged", draft="ngram", drafts=3)) == want
    assert len(set(map(tuple, want))) == len(want)


def test_answers_share_the_pages_of_their_prompt(monkeypatch):
    """In both caches; prefixes are read once for all answers, or by each."""
    hot = {"sampling": Sampling(1e6, top_k=90), "batch": 4, "cache": "paged", "samples": 2}
    want = tokens(run(**hot))
    monkeypatch.setattr(decode.Options, "levels", 1)
    assert tokens(run(**hot)) == want


def test_each_kind_of_layer_has_a_cache():
    config, _ = small(FAMILY)
    cache = options().create_cache(config)
    windowed, full = cache.windowed, cache.full
    assert (windowed.layers, windowed.kv_heads, windowed.head_dim) == (3, 2, 16)
    assert (full.layers, full.kv_heads, full.head_dim) == (2, 1, 24)
    assert cache.num_bytes == windowed.num_bytes + full.num_bytes
    assert config.kv_bytes("float32") == (3 * 2 * 2 * 16 + 2 * 2 * 1 * 24) * 4


def test_layers_that_share_rows_have_none_in_the_caches():
    config, _ = small("gemma4_small")
    cache = options().create_cache(config)
    assert (cache.windowed.layers, cache.full.layers) == (3, 1)
    assert config.kv_bytes("float32") == (3 * 2 * 2 * 16 + 2 * 2 * 24) * 4
    assert [config.first_layer(run) for run in range(5)] == [0, 0, 2, 2, 0]
    assert [config.of_run(run).reads_only for run in range(5)] == [False] * 3 + [True] * 2


def test_k_and_v_of_layers_that_share_rows_are_not_read(tmp_path):
    """Published checkpoints hold such tensors."""
    config, tensors = witness.made("gemma4_small")
    more = {f"model.layers.5.self_attn.{name}.weight": tensors["model.norm.weight"]
            for name in ("k_proj", "v_proj", "k_norm")}  # fmt: skip
    _, want = checkpoint.load(witness.write(tmp_path / "a", config, tensors), "float32")
    _, got = checkpoint.load(witness.write(tmp_path / "b", config, tensors | more), "float32")
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_layers_of_one_size(tmp_path, rng):
    """transformers writes no differences where global_head_dim is head_dim."""
    described = PLAIN | {"global_head_dim": 16, "attention_k_eq_v": False}
    del described["num_global_key_value_heads"]
    tensors = witness.tensors_of(described, rng)
    ids = rng.integers(0, 96, 20)
    wanted = witness.logits(described, tensors, ids)
    written = described | {"per_layer_config": {}}
    del written["global_head_dim"]
    config, params = checkpoint.load(witness.write(tmp_path, written, tensors), "float32")
    assert config == config_from(described)
    got = forward(config, params, jnp.asarray(ids, jnp.int32)[None])[0]
    np.testing.assert_allclose(got, wanted, atol=2e-4)
    made = decode.Run(config, params, options(cache="stacked"), [ids.tolist()], 3)
    assert len(list(made)) and len(tokens(made)[0]) == 3


def test_what_a_config_holds():
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_values_that_do_not_go_together(changes, message):
    refuses(f"config.json: {message}", config_from, PLAIN | changes)


@pytest.mark.parametrize("name", hf_gemma4.GEMMA4_KEYS)
def test_a_key_of_another_type_is_refused_by_name(name):
    wanted = hf_gemma4.GEMMA4_KEYS[name].wanted
    refuses(f"config.json: {name}: expected {wanted}, got [1]", config_from, PLAIN | {name: [1]})


def test_pairs_turn_where_a_config_says_so():
    described = witness.CONFIGS["llama3"] | {"rope_scaling": {"partial_rotary_factor": 0.5}}
    message = "rope_scaling: partial_rotary_factor: expected one of 1.0, 1, got 0.5"
    refuses(f"config.json: {message.replace(': p', '.p')}", config_from, described)


def test_no_mesh_has_it():
    config, _ = small(FAMILY)
    message = (
        "mesh: expected none: a model with two head dims is not split over devices, got tp:1; "
        "leave mesh out"
    )
    refuses(message, mesh.local, config, mesh.make("tp:1", ("tp",)))


def test_a_rope_of_another_kind():
    message = "rope: expected default, linear, llama3, yarn or proportional, got 'cosine'"
    refuses(message, Rope(kind="cosine").frequencies, 8)
