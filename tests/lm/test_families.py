"""Gemma 4 and DeepSeek-V2 in the loop: caches, rows that layers share, experts.

That they compute what they should is in test_model.py and test_recorded.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_lm import checkpoint, decode, experts, model
from pallas_lm.gemma4 import with_experts
from pallas_lm.hf_config import config_from
from pallas_lm.options import CACHES
from pallas_lm.sampling import Sampling
from tests.lm import witness
from tests.lm.loops import forward, options, prompts, small, tokens

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def told(family, **changes):
    """The tokens of a run."""
    made = decode.Run(*small(family), options(**changes), prompts((5, 12, 1, 9)), 8)
    assert list(made)
    return tokens(made)


# Some layers of gemma4_small read the rows of others.
@pytest.mark.parametrize("family", ["deepseek_v2", "gemma4_small"])
def test_chunks_drafts_and_caches_give_the_same_tokens(family):
    want = told(family, cache="per_sequence")
    assert told(family, cache="stacked", prefill_chunk=7) == want
    assert told(family, cache="paged", draft="ngram", drafts=3) == want
    assert len(set(map(tuple, want))) == len(want)


@pytest.mark.parametrize("family", ["deepseek_v2_lite", "gemma4"])
def test_answers_share_the_pages_of_their_prompt(monkeypatch, family):
    """In all caches; prefixes are read once for all answers, or by each."""
    hot = {"sampling": Sampling(1e6, top_k=90), "batch": 4, "cache": "paged", "samples": 2}
    want = told(family, **hot)
    monkeypatch.setattr(decode.Options, "levels", int(family == "gemma4"))
    assert told(family, **hot) == want and len(want) == 8


@pytest.mark.parametrize(("family", "run"), [("deepseek_v2_lite", 1), ("gemma4_moe", 0)])
def test_many_rows_are_taken_some_at_a_time(monkeypatch, rng, family, run):
    config, params = small(family)
    weights = jax.tree.map(lambda x: x[0], params["runs"][run])
    x, result = jnp.asarray(rng.standard_normal((2, 1, 50, config.hidden)), jnp.float32)
    mlp = functools.partial(experts.mlp, config.experts, x, weights)
    if config.gemma4 is not None:
        mlp = functools.partial(with_experts, config.gemma4.experts, x, result, weights, 1e-6)
    whole = mlp()
    monkeypatch.setattr(experts, "_ROWS", 16)
    np.testing.assert_allclose(mlp(), whole, atol=1e-4)


def test_a_row_of_the_cache_is_that_of_all_heads():
    config, _ = small("deepseek_v2_lite")
    assert (config.latent.row, config.latent.rank, config.head_dim) == (24, 16, 20)
    for kind in CACHES:
        cache = options(cache=kind).create_cache(config)
        assert (cache.kv_heads, cache.head_dim, cache.v_head_dim) == (1, 24, 16)
        assert cache.shared_kv
    assert config.kv_bytes("bfloat16") == 3 * 24 * 2
    assert [count for count, _ in config.runs] == [1, 2]


def test_gradients_reach_every_weight():
    config, params = small("deepseek_v2_lite")
    ids = jnp.arange(12, dtype=jnp.int32)[None]
    loss = lambda params: jax.nn.logsumexp(model.forward(config, params, ids)).sum()  # noqa: E731
    for x in jax.tree.leaves(jax.grad(loss)(params)):
        assert jnp.isfinite(x).all() and x.any()


def test_each_kind_of_layer_has_a_cache():
    config, _ = small("gemma4")
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
    described = witness.CONFIGS["gemma4"] | {"global_head_dim": 16, "attention_k_eq_v": False}
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
