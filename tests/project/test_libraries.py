"""docs/libraries.md with the real libraries: each layer beside the one that it replaces."""

import functools
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.recipes, pytest.mark.filterwarnings("default")]

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "libraries.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
CAUSAL = jnp.tril(jnp.ones((16, 16), bool))


@pytest.fixture(autouse=True)
def as_the_libraries_expect():
    """Theirs add shapes and types of all kinds."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def names(number):
    """Names that a program of the page defines."""
    os.environ["KERAS_BACKEND"] = "jax"
    scope = {}
    exec(compile(PROGRAMS[number], f"libraries.md, program {number}", "exec"), scope)
    return scope


def x_of(rng):
    return jnp.asarray(rng.standard_normal((2, 16, 32)), jnp.float32)


def same(ours, theirs, x):
    """Results, and gradients of the input."""
    close = functools.partial(np.testing.assert_allclose, atol=2e-5)
    close(ours(x), theirs(x))
    close(jax.jit(ours)(x), theirs(x))
    weight = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    close(*(jax.grad(lambda x, f=f: (f(x) * weight).sum())(x) for f in (ours, theirs)))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_programs_print_what_they_say(number, capsys):
    exec(compile(PROGRAMS[number], "libraries.md", "exec"), {})
    said = re.search(r"print\(.*?\)\s*# (.*)", PROGRAMS[number]).group(1)
    assert capsys.readouterr().out.strip() == said


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_linen(rng, mask):
    from flax import linen

    x = x_of(rng)
    masks = {
        "none": None,
        "causal": linen.make_causal_mask(x[..., 0]),
        "padding": linen.make_attention_mask(jnp.ones((2, 16)), jnp.arange(16)[None] < 9),
    }
    layer = linen.MultiHeadDotProductAttention(num_heads=4)
    variables = layer.init(jax.random.key(1), x)
    ours = layer.clone(attention_fn=names(0)["attention"])
    same(*(lambda x, f=f: f.apply(variables, x, mask=masks[mask]) for f in (ours, layer)), x)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"mask": CAUSAL[None, None]}], ids=str)
def test_nnx(rng, how):
    from flax import nnx

    make = functools.partial(nnx.MultiHeadAttention, 4, 32, decode=False)
    layer, ours = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0), attention_fn=names(0)["attention"])
    same(lambda x: ours(x, **how), lambda x: layer(x, **how), x_of(rng))


def test_nnx_decodes_over_its_cache(rng):
    from flax import nnx

    x, result = x_of(rng), []
    for how in ({}, {"attention_fn": names(0)["attention"]}):
        layer = nnx.MultiHeadAttention(4, 32, decode=True, rngs=nnx.Rngs(0), **how)
        layer.init_cache((2, 16, 32))
        result.append(jnp.concatenate([layer(x[:, n : n + 1]) for n in range(5)], axis=1))
    np.testing.assert_allclose(*result, atol=2e-5)


def test_what_flax_would_lose_is_refused_by_name(rng):
    from flax import linen, nnx

    x, attention = x_of(rng), names(0)["attention"]
    layer = linen.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.1)
    variables = layer.init(jax.random.key(1), x, deterministic=True)
    ours = layer.clone(attention_fn=attention)
    ours.apply(variables, x, deterministic=True)
    key = {"dropout": jax.random.key(0)}
    with pytest.raises(ValueError, match=r"^dropout_rate: 0.1 of attention weights: use 0"):
        ours.apply(variables, x, deterministic=False, rngs=key)
    with pytest.raises(ValueError, match="^sow_weights: "):
        ours.apply(variables, x, deterministic=True, sow_weights=True)
    make = functools.partial(nnx.MultiHeadAttention, 4, 32, decode=False, attention_fn=attention)
    dropping = make(dropout_rate=0.1, rngs=nnx.Rngs(0))
    dropping(x, deterministic=True)
    with pytest.raises(ValueError, match=r"^dropout_rate: 0.1 of attention weights: use 0"):
        dropping(x, deterministic=False)
    with pytest.raises(ValueError, match="^sow_weights: "):
        make(rngs=nnx.Rngs(0))(x, sow_weights=True)


def layers_of_keras(**how):
    import keras

    kinds = names(1)["FlashMultiHeadAttention"], keras.layers.MultiHeadAttention
    layers = [kind(num_heads=4, key_dim=8, **how) for kind in kinds]
    for layer in layers:
        layer.build((2, 16, 32), (2, 16, 32))
    layers[0].set_weights(layers[1].get_weights())
    return layers


@pytest.mark.parametrize(
    "how",
    [{}, {"use_causal_mask": True}, {"attention_mask": CAUSAL[None]},
     {"attention_mask": CAUSAL[None], "use_causal_mask": True}],
    ids=["none", "causal", "mask", "both"],
)  # fmt: skip
def test_keras(rng, how):
    ours, layer = layers_of_keras()
    same(lambda x: ours(x, x, **how), lambda x: layer(x, x, **how), x_of(rng))


def test_a_model_of_keras_trains_and_is_saved(rng, tmp_path):
    import keras

    kind = names(1)["FlashMultiHeadAttention"]
    inputs = keras.Input((16, 32))
    model = keras.Model(inputs, kind(4, 8)(inputs, inputs, use_causal_mask=True))
    x = np.asarray(x_of(rng))
    model.compile("adam", "mse")
    before = model.evaluate(x, -x, verbose=0)
    model.fit(x, -x, epochs=5, verbose=0)
    assert model.evaluate(x, -x, verbose=0) < before
    model.save(tmp_path / "x.keras")
    again = keras.models.load_model(tmp_path / "x.keras")
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def test_what_keras_would_lose_is_refused_by_name(rng):
    x = x_of(rng)
    ours, _ = layers_of_keras(dropout=0.2)
    ours(x, x)
    with pytest.raises(ValueError, match="dropout: 0.2 of attention weights in training: use 0"):
        ours(x, x, training=True)
    with pytest.raises(ValueError, match="return_attention_scores: they are never computed"):
        ours(x, x, return_attention_scores=True)


def layers_of_equinox(**how):
    import equinox as eqx

    kinds = names(2)["FlashMultiheadAttention"], eqx.nn.MultiheadAttention
    return [kind(num_heads=4, query_size=32, key=jax.random.key(0), **how) for kind in kinds]


@pytest.mark.parametrize("mask", ["none", "causal", "of heads"])
def test_equinox(rng, mask):
    ours, layer = layers_of_equinox()
    heads = jnp.stack([CAUSAL, CAUSAL, jnp.ones_like(CAUSAL), CAUSAL.T | CAUSAL])
    mask = {"none": None, "causal": CAUSAL, "of heads": heads}[mask]
    x = x_of(rng)
    same(*(jax.vmap(lambda x, f=f: f(x, x, x, mask)) for f in (ours, layer)), x)
    wanted = jax.vmap(lambda x: layer(x, x, x, CAUSAL))(x)
    got = jax.vmap(lambda x: ours(x, x, x, is_causal=True))(x)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_equinox_turns_its_heads(rng):
    import equinox as eqx

    rope = jax.vmap(eqx.nn.RotaryPositionalEmbedding(8), in_axes=1, out_axes=1)
    ours, layer = layers_of_equinox()
    result = [
        jax.vmap(lambda x, f=f: f(x, x, x, process_heads=lambda q, k, v: (rope(q), rope(k), v)))
        for f in (ours, layer)
    ]
    same(*result, x_of(rng))


def test_what_equinox_would_lose_is_refused_by_name(rng):
    x = x_of(rng)[0]
    ours, _ = layers_of_equinox(dropout_p=0.3)
    ours(x, x, x, inference=True)
    with pytest.raises(ValueError, match=r"^dropout_p: 0.3 of attention weights: use 0"):
        ours(x, x, x, key=jax.random.key(0))
