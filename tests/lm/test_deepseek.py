"""DeepSeek-V2 in the demo: latent attention over every cache, experts, and config.json.

That it computes what it should is in test_model.py and test_recorded.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_lm import decode, experts, hf_deepseek, mesh, model
from pallas_lm.experts import Experts
from pallas_lm.hf_config import config_from
from pallas_lm.options import CACHES
from pallas_lm.sampling import Sampling
from tests.lm import witness
from tests.lm.loops import options, prompts, refuses, small, tokens

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

LITE, LARGE = "deepseek_v2_lite", "deepseek_v2"


def run(family=LITE, **changes):
    made = decode.Run(*small(family), options(**changes), prompts((5, 12, 1, 9)), 8)
    for _ in made:
        pass
    return made


def test_chunks_drafts_and_caches_give_the_same_tokens():
    want = tokens(run(LARGE, cache="per_sequence"))
    assert tokens(run(LARGE, cache="stacked", prefill_chunk=7)) == want
    assert tokens(run(LARGE, cache="paged", draft="ngram", drafts=3)) == want
    assert len(set(map(tuple, want))) == len(want)


def test_answers_share_the_pages_of_their_prompt():
    hot = {"sampling": Sampling(1e6, top_k=90), "batch": 4}
    made = run(cache="paged", samples=2, **hot)
    assert len(made.sequences) == 8
    assert tokens(made) == tokens(run(cache="paged", samples=2, **hot))


def test_a_row_of_the_cache_is_that_of_all_heads():
    config, _ = small(LITE)
    assert (config.latent.row, config.latent.rank, config.head_dim) == (24, 16, 20)
    for kind in CACHES:
        cache = options(cache=kind).create_cache(config)
        assert (cache.kv_heads, cache.head_dim, cache.v_head_dim) == (1, 24, 16)
        assert cache.shared_kv
    assert config.kv_bytes("bfloat16") == 3 * 24 * 2
    assert [count for count, _ in config.runs] == [1, 2]


def test_many_rows_are_taken_some_at_a_time(monkeypatch, rng):
    config, params = small(LITE)
    weights = jax.tree.map(lambda x: x[0], params["runs"][1])
    x = jnp.asarray(rng.standard_normal((1, 50, config.hidden)), jnp.float32)
    whole = experts.mlp(config.experts, x, weights)
    monkeypatch.setattr(experts, "_ROWS", 16)
    np.testing.assert_allclose(experts.mlp(config.experts, x, weights), whole, atol=1e-5)


def test_gradients_reach_every_weight():
    config, params = small(LITE)
    ids = jnp.arange(12, dtype=jnp.int32)[None]
    loss = lambda params: jax.nn.logsumexp(model.forward(config, params, ids)).sum()  # noqa: E731
    for x in jax.tree.leaves(jax.grad(loss)(params)):
        assert jnp.isfinite(x).all() and x.any()


def test_what_a_config_holds():
    plain = witness.CONFIGS[LITE] | {"rope_scaling": None}
    assert config_from(plain).scale == pytest.approx(20**-0.5)
    assert config_from(plain | {"n_routed_experts": None}).experts is None
    assert config_from(plain | {"first_k_dense_replace": 3}).experts is None
    stretched = config_from(witness.CONFIGS[LITE])
    assert stretched.scale == pytest.approx(20**-0.5 * (0.07 * np.log(4.0) + 1) ** 2)
    absent = {name: x for name, x in plain.items() if name != "q_lora_rank"}
    assert config_from(absent).latent.q_rank == 1536
    assert config_from(witness.CONFIGS[LARGE]).experts == Experts(
        first=1, count=6, columns=24, shared=2, active=2, scale=3.0, groups=3, active_groups=2
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_values_that_do_not_go_together(changes, message):
    described = witness.CONFIGS[LARGE] | changes
    refuses(f"config.json: {message}", config_from, described)


@pytest.mark.parametrize("name", hf_deepseek.DEEPSEEK_KEYS)
def test_a_key_of_another_type_is_refused_by_name(name):
    key = hf_deepseek.DEEPSEEK_KEYS[name]
    described = witness.CONFIGS[LARGE] | {name: [1]}
    refuses(f"config.json: {name}: expected {key.wanted}, got [1]", config_from, described)


def test_no_mesh_has_it():
    config, _ = small(LITE)
    message = (
        "mesh: expected none: a model with latent attention is not split over devices, got tp:1; "
        "leave mesh out"
    )
    refuses(message, mesh.local, config, mesh.make("tp:1", ("tp",)))
