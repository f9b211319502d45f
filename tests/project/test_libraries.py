"""`pallas_attn.flax`, `.keras`, `.equinox` and `.tokamax` with the real libraries: each layer
beside the one that it replaces; and the programs of docs/libraries.md.
"""

import functools
import importlib
import os
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn._libraries import call, masks
from pallas_attn.flax import attention_fn, combine_masks, make_attention_mask, make_causal_mask

pytestmark = [pytest.mark.recipes, pytest.mark.filterwarnings("default")]

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "libraries.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
T = 16
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
IDS = jnp.array([[3] * 5 + [7] * 6 + [1] * 5, [2] * 9 + [0] * 7])
COUNTS = jnp.array([[1] * 11 + [0] * 5, [1] * 16])


@pytest.fixture(autouse=True)
def as_the_libraries_expect():
    """Theirs add shapes and types of all kinds."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def arguments(monkeypatch):
    """The arguments of the latest `flash_attention`."""
    seen = {}

    def spy(*args, **options):
        seen.clear()
        seen.update({name: x for name, x in options.items() if x is not None})
        return pa.flash_attention(*args, **options)

    monkeypatch.setattr(call, "flash_attention", spy)
    return seen


def x_of(rng):
    return jnp.asarray(rng.standard_normal((2, T, 32)), jnp.float32)


def same(ours, theirs, x, rows=np.s_[:]):
    """Results, and gradients of the input. `rows`: those that see a key."""
    close = functools.partial(np.testing.assert_allclose, atol=2e-5)
    close(ours(x)[rows], theirs(x)[rows])
    close(jax.jit(ours)(x)[rows], theirs(x)[rows])
    weight = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
    close(*(jax.grad(lambda x, f=f: (f(x) * weight)[rows].sum())(x) for f in (ours, theirs)))


@pytest.mark.parametrize("number", range(4))
def test_the_programs_print_what_they_say(number, capsys):
    os.environ["KERAS_BACKEND"] = "jax"
    exec(compile(PROGRAMS[number], "libraries.md", "exec"), {})
    said = re.search(r"print\(.*?\)\s*# (.*)", PROGRAMS[number]).group(1)
    assert capsys.readouterr().out.strip() == said


# ---- masks ---------------------------------------------------------------------------------------

_SAME = IDS[:, None, :, None] == IDS[:, None, None]
_KEYS = COUNTS[:, None, None].astype(bool)
_FAR = jnp.arange(T)[:, None] - jnp.arange(T)[None]
# Known masks, and the arguments that they become.
KNOWN = {
    "full": (jnp.ones((T, T), bool), "full", set()),
    "causal": (CAUSAL, "causal", set()),
    "window": (CAUSAL & ~jnp.tril(CAUSAL, -4), "left=3, right=0", set()),
    "causal, keys first": (CAUSAL[::-1, ::-1], "left=0, right=None", set()),
    "padding": (_KEYS, "full", {"kv_lengths"}),
    "padding of both": (_KEYS & _KEYS.mT, "full", {"q_lengths", "kv_lengths"}),
    "padding on the left": (_KEYS[..., ::-1], "full", {"segment_ids"}),
    "causal padding": (_KEYS & CAUSAL[None, None], "causal", {"kv_lengths"}),
    "documents": (_SAME, "full", {"segment_ids"}),
    "causal documents": (_SAME & CAUSAL[None, None], "causal", {"segment_ids"}),
    "causal documents, padding": (
        _SAME & CAUSAL[None, None] & _KEYS & _KEYS.mT,
        "causal",
        {"segment_ids"},
    ),
    "nothing": (jnp.zeros((T, T), bool), "full", {"segment_ids"}),
    "all heads alike": (jnp.stack([CAUSAL] * 4)[None], "causal", set()),
    "of heads": (jnp.stack([CAUSAL, CAUSAL, CAUSAL.T, CAUSAL])[None], "full", {"mask_array"}),
    "every third": (_FAR % 3 == 0, "full", {"segment_ids"}),
    "two of three": (_FAR % 3 < 2, "full", {"mask_array"}),
    "floats": (CAUSAL.astype(jnp.float32)[None, None], "causal", set()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_masks_become_sparse(rng, arguments, name):
    mask, band, names = KNOWN[name]
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, 4, 8)), jnp.float32) for _ in range(3))
    got = attention_fn(q, k, v, mask=mask)
    assert str(arguments.pop("mask")) == band and set(arguments) == names
    wanted = pa.flash_attention(q, k, v, mask_array=mask.astype(bool))
    np.testing.assert_allclose(got, wanted, atol=1e-6)


TRACED = {"keys": (_KEYS, {"segment_ids"}), "queries": (_KEYS.mT, {"segment_ids"})}
TRACED |= {"both": (_KEYS & CAUSAL[None, None], {"mask_array"})}


@pytest.mark.parametrize("name", TRACED)
def test_traced_masks_are_sparse_where_their_shape_says_so(rng, arguments, name):
    mask, names = TRACED[name]
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, 4, 8)), jnp.float32) for _ in range(3))
    got = jax.jit(lambda mask: attention_fn(q, k, v, mask=mask, is_causal=True))(mask)
    assert arguments.pop("mask") == pa.CAUSAL and set(arguments) == names
    wanted = pa.flash_attention(q, k, v, mask=pa.CAUSAL, mask_array=mask)
    np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_makers_of_masks_are_those_of_flax(rng, arguments):
    """Traced: documents with padding, causal, and what no option names."""
    from flax import linen

    q, k, v = (jnp.asarray(rng.standard_normal((2, T, 4, 8)), jnp.float32) for _ in range(3))
    extra = jnp.asarray(rng.random((2, 1, T, T)) < 0.9) | jnp.eye(T, dtype=bool)[None, None]

    def made(ours, ids, counts, extra, others=()):
        make, causal, combine = (
            (make_attention_mask, make_causal_mask, combine_masks)
            if ours
            else (linen.make_attention_mask, linen.make_causal_mask, linen.combine_masks)
        )
        parts = [make(counts, counts), make(ids, ids, jnp.equal), causal(ids)]
        return combine(*parts, *(make(*x) for x in others), extra)

    others = ((IDS % 2, IDS % 2, jnp.equal), (IDS, IDS, jnp.greater_equal))
    for more, last, names in (
        ((), None, {"segment_ids"}),
        ((), extra, {"segment_ids", "mask_array"}),
        (others, extra, {"segment_ids", "mask_array"}),
    ):
        got = jax.jit(
            lambda ids, counts, more=more, last=last: attention_fn(
                q, k, v, mask=made(True, ids, counts, last, more)
            )
        )(IDS, COUNTS)
        assert arguments.pop("mask") == pa.CAUSAL and set(arguments) == names
        dense = made(False, IDS, COUNTS, last, more).astype(bool)
        wanted = pa.flash_attention(q, k, v, mask_array=dense)
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert combine_masks(None, None) is None
    both = combine_masks(CAUSAL, CAUSAL.T, dtype=bool)
    np.testing.assert_array_equal(both, jnp.eye(T, dtype=bool))


def test_leading_axes_are_the_batch(rng):
    """None, one and two; masks with as many axes, or with 1 in their place."""
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, T, 4, 8)), jnp.float32) for _ in range(3))
    counts = jnp.asarray(rng.random((2, 3, T)) < 0.7).at[..., 0].set(True)
    wanted = jax.vmap(jax.vmap(lambda q, k, v, c: attention_fn(q, k, v, mask=c[None, None])))(
        q, k, v, counts
    )
    got = attention_fn(q, k, v, mask=make_attention_mask(jnp.ones_like(counts), counts))
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    got = attention_fn(q, k, v, mask=counts[..., None, None, :])
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    ids = counts.astype(jnp.int32)
    bias = jnp.asarray(rng.standard_normal((2, 1, 4, T, T)), jnp.float32)
    got = attention_fn(q, k, v, bias, segment_ids=ids, is_causal=True)
    for b in range(2):
        wanted = attention_fn(q[b], k[b], v[b], bias[b], segment_ids=ids[b], is_causal=True)
        np.testing.assert_allclose(got[b], wanted, atol=1e-6)
    alone = attention_fn(q[0, 0], k[0, 0], v[0, 0], bias[0, 0])
    first = attention_fn(q[:1, 0], k[:1, 0], v[:1, 0], bias[:1, 0])
    np.testing.assert_allclose(alone[None], first, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_a_mesh(rng, kind):
    """Batch and heads split over devices, with the mask of documents and of what counts."""
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, 4, 8)), jnp.float32) for _ in range(3))
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2, devices=jax.devices()[:4])

    def attend(q, k, v, ids, counts):
        parts = make_attention_mask(counts, counts), make_attention_mask(ids, ids, jnp.equal)
        return attention_fn(q, k, v, mask=combine_masks(*parts, make_causal_mask(ids)))

    wanted = attend(q, k, v, IDS, COUNTS)
    with jax.set_mesh(mesh):
        heads, rows = (NamedSharding(mesh, P(*x)) for x in (("data", None, "model"), ("data",)))
        arrays = [jax.device_put(x, heads) for x in (q, k, v)]
        arrays += [jax.device_put(x, rows) for x in (IDS, COUNTS)]
        np.testing.assert_allclose(jax.jit(attend)(*arrays), wanted, atol=1e-6)


def test_wrong_arguments_are_named(rng):
    q = jnp.zeros((2, T, 4, 8))
    for mask, text in (
        ("causal", "mask: expected an array that broadcasts to "),
        (
            jnp.ones((2, 1, 5, T)),
            r"mask: expected \[..., heads, T, S\] with T, S = \(16, 16\), got",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            attention_fn(q, q, q, mask=mask)
    with pytest.raises(ValueError, match=r"^mask: expected T, S = \(16, 16\) as in the other, got"):
        make_causal_mask(jnp.ones(T)) & make_causal_mask(jnp.ones(5))
    with pytest.raises(ValueError, match=r"^key: expected \[..., rows, heads, head dim\] with"):
        attention_fn(q, q[0], q[0])
    with pytest.raises(ValueError, match="^segment_ids: expected int32"):
        attention_fn(q, q, q, segment_ids=jnp.zeros((2, T)))


def test_sparse_masks_are_pytrees():
    mask = make_attention_mask(COUNTS, COUNTS) & make_causal_mask(COUNTS)
    again = jax.jit(lambda mask: mask)(mask)
    assert again.rows == (T, T) and again.band == pa.CAUSAL
    np.testing.assert_array_equal(again.kv_counts, COUNTS != 0)
    assert masks.sparse(again, (T, T)) is again


# ---- Flax ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_linen(rng, mask):
    from flax import linen

    x = x_of(rng)
    made = {
        "none": None,
        "causal": linen.make_causal_mask(x[..., 0]),
        "padding": linen.make_attention_mask(jnp.ones((2, T)), jnp.arange(T)[None] < 9),
    }
    layer = linen.MultiHeadDotProductAttention(num_heads=4)
    variables = layer.init(jax.random.key(1), x)
    ours = layer.clone(attention_fn=attention_fn)
    same(*(lambda x, f=f: f.apply(variables, x, mask=made[mask]) for f in (ours, layer)), x)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pa.CAUSAL, CAUSAL[None, None]),
        (pa.sliding_window(4), (CAUSAL & ~jnp.tril(CAUSAL, -4))[None, None]),
        (pa.mask_fn(lambda b, h, q, kv: q >= kv), CAUSAL[None, None]),
        (make_attention_mask(IDS, IDS, jnp.equal), _SAME),
    ],
)
def test_layers_take_sparse_masks(rng, ours, theirs):
    from flax import linen, nnx

    layer = linen.MultiHeadDotProductAttention(num_heads=4)
    variables = layer.init(jax.random.key(1), x_of(rng))
    flash = layer.clone(attention_fn=attention_fn)
    same(lambda x: flash.apply(variables, x, mask=ours),
         lambda x: layer.apply(variables, x, mask=theirs), x_of(rng))  # fmt: skip
    make = functools.partial(nnx.MultiHeadAttention, 4, 32, decode=False)
    layer, flash = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0), attention_fn=attention_fn)
    same(lambda x: flash(x, mask=ours), lambda x: layer(x, mask=theirs), x_of(rng))


def test_linen_takes_segment_ids_by_partial(rng):
    from flax import linen

    layer = linen.MultiHeadDotProductAttention(num_heads=4)
    variables = layer.init(jax.random.key(1), x_of(rng))
    ours = layer.clone(attention_fn=functools.partial(attention_fn, segment_ids=IDS))
    same(lambda x: ours.apply(variables, x),
         lambda x: layer.apply(variables, x, mask=_SAME), x_of(rng))  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"mask": CAUSAL[None, None]}], ids=str)
def test_nnx(rng, how):
    from flax import nnx

    make = functools.partial(nnx.MultiHeadAttention, 4, 32, decode=False)
    layer, ours = make(rngs=nnx.Rngs(0)), make(rngs=nnx.Rngs(0), attention_fn=attention_fn)
    same(lambda x: ours(x, **how), lambda x: layer(x, **how), x_of(rng))


@pytest.mark.parametrize("positions", [None, np.arange(T)[::-1]], ids=["rows", "own"])
def test_rope_of_nnx(rng, positions):
    """`nnx.dot_product_attention_with_rope` as it is without positions; with them it maps them over
    heads, so each head is turned alone here.
    """
    from flax import nnx

    def of_heads(query, key, value, input_positions, **rest):
        turn = jax.vmap(lambda x: nnx.RoPE()(x, input_positions), in_axes=-2, out_axes=-2)
        return nnx.dot_product_attention(turn(query), turn(key), value, **rest)

    make = functools.partial(nnx.MultiHeadAttention, 4, 32, decode=False)
    rope = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    theirs = rope if positions is None else of_heads
    flash = functools.partial(attention_fn, rotary=pa.Rotary.create(T, 8))
    ours, layer = (make(rngs=nnx.Rngs(0), attention_fn=f) for f in (flash, theirs))
    how = {"is_causal": True, "input_positions": positions}
    same(lambda x: ours(x, **how), lambda x: layer(x, **how), x_of(rng))
    with pytest.raises(ValueError, match="^input_positions: expected None without rotary"):
        make(rngs=nnx.Rngs(0), attention_fn=attention_fn)(x_of(rng), input_positions=np.arange(T))


def test_nnx_decodes_over_its_cache(rng):
    from flax import nnx

    x, result = x_of(rng), []
    for how in ({}, {"attention_fn": attention_fn}):
        layer = nnx.MultiHeadAttention(4, 32, decode=True, rngs=nnx.Rngs(0), **how)
        layer.init_cache((2, T, 32))
        result.append(jnp.concatenate([layer(x[:, n : n + 1]) for n in range(5)], axis=1))
    np.testing.assert_allclose(*result, atol=2e-5)


def test_dtypes_are_those_of_flax(rng):
    """One dtype for all where none is named: a float32 cache beside bfloat16 queries."""
    q, k = jnp.ones((2, T, 4, 8), jnp.bfloat16), jnp.ones((2, T, 4, 8))
    assert attention_fn(q, k, k).dtype == jnp.float32
    assert attention_fn(k, k, k, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_what_flax_would_lose_is_refused_by_name(rng):
    from flax import linen, nnx

    x = x_of(rng)
    layer = linen.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.1)
    variables = layer.init(jax.random.key(1), x, deterministic=True)
    ours = layer.clone(attention_fn=attention_fn)
    ours.apply(variables, x, deterministic=True)
    key = {"dropout": jax.random.key(0)}
    with pytest.raises(ValueError, match=r"^dropout_rate: 0.1 of attention weights: use 0"):
        ours.apply(variables, x, deterministic=False, rngs=key)
    with pytest.raises(ValueError, match="^sow_weights: "):
        ours.apply(variables, x, deterministic=True, sow_weights=True)
    make = functools.partial(nnx.MultiHeadAttention, 4, 32, decode=False, attention_fn=attention_fn)
    dropping = make(dropout_rate=0.1, rngs=nnx.Rngs(0))
    dropping(x, deterministic=True)
    with pytest.raises(ValueError, match=r"^dropout_rate: 0.1 of attention weights: use 0"):
        dropping(x, deterministic=False)
    with pytest.raises(ValueError, match="^sow_weights: "):
        make(rngs=nnx.Rngs(0))(x, sow_weights=True)


# ---- Keras ---------------------------------------------------------------------------------------


def kinds_of_keras(name="MultiHeadAttention"):
    """Our layer and theirs."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    ours = importlib.import_module("pallas_attn.keras")
    return getattr(ours, name), getattr(keras.layers, name)


def layers_of_keras(name="MultiHeadAttention", sizes=(4, 8), **how):
    layers = [kind(*sizes, **how) for kind in kinds_of_keras(name)]
    for layer in layers:
        layer.build((2, T, 32), (2, T, 32))
    layers[0].set_weights(layers[1].get_weights())
    return layers


_KERAS = {
    "none": ({}, set()),
    "causal": ({"use_causal_mask": True}, set()),
    "mask": ({"attention_mask": CAUSAL[None]}, set()),
    "both": ({"attention_mask": CAUSAL.T[None], "use_causal_mask": True}, set()),
    "padding": ({"value_mask": COUNTS}, {"segment_ids"}),
    "padding, causal": ({"value_mask": COUNTS, "use_causal_mask": True}, {"segment_ids"}),
}


@pytest.mark.parametrize("how", _KERAS)
@pytest.mark.parametrize(
    "kind", [("MultiHeadAttention", (4, 8)), ("GroupQueryAttention", (8, 4, 2))]
)
def test_keras(rng, arguments, kind, how):
    how, names = _KERAS[how]
    ours, layer = layers_of_keras(*kind)
    same(lambda x: ours(x, x, **how), lambda x: layer(x, x, **how), x_of(rng))
    ours(x_of(rng), x_of(rng), **how)
    assert set(arguments) - {"mask", "scale"} == names


def test_windows_of_keras(rng, arguments):
    try:
        ours, layer = layers_of_keras(sliding_window=4)
    except (TypeError, ValueError):
        pytest.skip("this Keras has no windows")
    for causal in (False, True):
        how = {"use_causal_mask": causal}
        same(lambda x: ours(x, x, **how), lambda x: layer(x, x, **how), x_of(rng))  # noqa: B023
        assert arguments["mask"] == pa.Mask(3, 0 if causal else 3)


def test_embeddings_of_keras_mask_what_is_padding(arguments):
    import keras

    tokens = np.array([[5, 3, 4, 0, 0], [1, 2, 3, 4, 0]])
    models = []
    for kind in kinds_of_keras():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,), dtype="int32")
        x = keras.layers.Embedding(8, 32, mask_zero=True)(inputs)
        models.append(keras.Model(inputs, kind(4, 8)(x, x, use_causal_mask=True)))
    models[0].set_weights(models[1].get_weights())
    ours, theirs = (model(tokens) for model in models)
    np.testing.assert_allclose(ours[tokens != 0], theirs[tokens != 0], atol=2e-5)
    assert arguments["mask"] == pa.CAUSAL and "mask_array" not in arguments


def test_a_model_of_keras_trains_and_is_saved(rng, tmp_path):
    import keras

    kind = kinds_of_keras()[0]
    inputs = keras.Input((T, 32))
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
    for kind in (("MultiHeadAttention", (4, 8)), ("GroupQueryAttention", (8, 4, 2))):
        ours, _ = layers_of_keras(*kind, dropout=0.2)
        ours(x, x)
        with pytest.raises(ValueError, match="dropout: 0.2 of attention weights in training: use"):
            ours(x, x, training=True)
        with pytest.raises(ValueError, match="return_attention_scores: they are never computed"):
            ours(x, x, return_attention_scores=True)
    ours = kinds_of_keras()[0](4, 8, attention_axes=(1, 2))
    with pytest.raises(ValueError, match=r"attention_axes: expected one axis, got \(1, 2\)"):
        ours(jnp.ones((2, 3, 4, 32)), jnp.ones((2, 3, 4, 32)))


# ---- Equinox -------------------------------------------------------------------------------------


def layers_of_equinox(**how):
    import equinox as eqx

    from pallas_attn.equinox import MultiheadAttention

    kinds = MultiheadAttention, eqx.nn.MultiheadAttention
    return [kind(num_heads=4, query_size=32, key=jax.random.key(0), **how) for kind in kinds]


@pytest.mark.parametrize("mask", ["none", "causal", "of heads"])
def test_equinox(rng, mask):
    ours, layer = layers_of_equinox()
    heads = jnp.stack([CAUSAL, CAUSAL, jnp.ones_like(CAUSAL), CAUSAL.T | CAUSAL])
    mask = {"none": None, "causal": CAUSAL, "of heads": heads}[mask]
    x = x_of(rng)
    same(*(jax.vmap(lambda x, f=f: f(x, x, x, mask)) for f in (ours, layer)), x)
    wanted = jax.vmap(lambda x: layer(x, x, x, CAUSAL))(x)
    for how in ({"is_causal": True}, {"mask": pa.CAUSAL}):
        got = jax.vmap(lambda x, how=how: ours(x, x, x, **how))(x)
        np.testing.assert_allclose(got, wanted, atol=2e-5)
    got = jax.vmap(lambda x, i: ours(x, x, x, segment_ids=i))(x, IDS)
    wanted = jax.vmap(lambda x, i: layer(x, x, x, i[:, None] == i))(x, IDS)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_the_function_within_equinoxs_layer(rng, monkeypatch):
    """In place of Equinox's own, for a head under vmap; and for all heads at once."""
    from pallas_attn.equinox import dot_product_attention

    x = x_of(rng)[0]
    _, layer = layers_of_equinox()
    wanted = layer(x, x, x, CAUSAL)
    module = sys.modules[type(layer).__module__]
    theirs = module.dot_product_attention
    monkeypatch.setattr(module, "dot_product_attention", dot_product_attention)
    np.testing.assert_allclose(layer(x, x, x, CAUSAL), wanted, atol=2e-5)
    q, k, v = (jnp.asarray(rng.standard_normal((T, 4, 8)), jnp.float32) for _ in range(3))
    wanted = jax.vmap(lambda *x: theirs(*x, CAUSAL), in_axes=1, out_axes=1)(q, k, v)
    got = dot_product_attention(q, k, v, is_causal=True)
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


# ---- tokamax -------------------------------------------------------------------------------------

_TOKAMAX = {
    "none": ({}, "full", set()),
    "causal": ({"is_causal": True}, "causal", set()),
    "window": ({"local_window_size": (3, 1)}, "left=3, right=1", set()),
    "causal window": ({"is_causal": True, "local_window_size": 3}, "left=3, right=0", set()),
    "lengths": (
        {"query_seq_lengths": jnp.array([9, 16]), "key_value_seq_lengths": jnp.array([16, 5])},
        "full",
        {"q_lengths", "kv_lengths"},
    ),
    "mask": ({"mask": CAUSAL[None, None], "scale": 0.3}, "causal", {"scale"}),
    "bias": ({"bias": jnp.cos(jnp.arange(T * T * 4.0)).reshape(1, 4, T, T)}, "full", {"bias"}),
    "cap": ({"logits_soft_cap": 2.0, "is_causal": True}, "causal", {"softcap"}),
    "precision": ({"precision": jax.lax.Precision.HIGHEST}, "full", {"precision"}),
}


@pytest.mark.parametrize("how", _TOKAMAX)
def test_tokamax(rng, arguments, how):
    import tokamax

    from pallas_attn.tokamax import implementation

    how, band, names = _TOKAMAX[how]
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, T, heads, 8)), jnp.float32) for heads in (4, 2, 2)
    )
    rows = np.s_[:, :9]  # past the lengths of queries tokamax gives a mean

    def attend(x, which):
        return tokamax.dot_product_attention(x, k, v, implementation=[which], **how)

    same(lambda x: attend(x, implementation), lambda x: attend(x, "xla"), q, rows)
    attend(q, implementation)
    assert str(arguments.pop("mask")) == band and set(arguments) == names


def test_tokamax_goes_on_where_nothing_here_takes_a_problem(rng):
    import tokamax

    from pallas_attn.tokamax import implementation

    q = jnp.asarray(rng.standard_normal((2, T, 4, 8)), jnp.float32)
    bias = jnp.ones((1, 1, T, T))
    how = {"bias": bias, "logits_soft_cap": 3.0}
    with pytest.raises(NotImplementedError, match="^logits_soft_cap: not supported"):
        tokamax.dot_product_attention(q, q, q, implementation=[implementation], **how)
    got = tokamax.dot_product_attention(q, q, q, implementation=[implementation, "xla"], **how)
    assert got.shape == q.shape
    with pytest.raises(NotImplementedError, match="^dropout_rate: not supported by pallas_attn"):
        implementation(q, q, q, dropout_rate=0.1)
    implementation(q, q, q, dropout_rate=0.0, mask=CAUSAL)


def test_masks_of_tokamax(rng):
    """Starts and ends of rows, which become an array."""
    from tokamax._src.ops.attention import base

    from pallas_attn.tokamax import implementation

    q = jnp.asarray(rng.standard_normal((2, T, 4, 8)), jnp.float32)
    rows = jnp.arange(T)
    for mask in (
        base.Mask(k_start=jnp.maximum(rows - 2, 0)[None, None], is_causal=True),
        base.Mask(k_end=(rows + 1)[None, None], q_end=jnp.array([5, 16])[:, None, None]),
        base.Mask(CAUSAL[None], causal_mask=base.CausalMask(1, 4)),
    ):
        wanted = base.DotProductAttention()(q, q, q, mask=mask)
        got = implementation(q, q, q, mask=mask)
        np.testing.assert_allclose(got[:, :5], wanted[:, :5], atol=2e-5)


# ---- call sites of MaxText, sglang-jax and tokamax -----------------------------------------------


def program_with(monkeypatch, number, module, names):
    """Runs a program of the page where `module` is a stand-in of these names."""
    parent, _, last = module.rpartition(".")
    stand_in = types.ModuleType(module)
    vars(stand_in).update(names)
    top = types.ModuleType(parent)
    setattr(top, last, stand_in)
    monkeypatch.setitem(sys.modules, parent.partition(".")[0], types.ModuleType("top"))
    monkeypatch.setitem(sys.modules, parent, top)
    monkeypatch.setitem(sys.modules, module, stand_in)
    exec(compile(PROGRAMS[number], "libraries.md", "exec"), {})
    return stand_in


def test_the_call_site_of_maxtext(rng, monkeypatch):
    kinds = types.SimpleNamespace(GLOBAL="global", LOCAL_SLIDING="local", CHUNK="chunk")
    names = {"AttentionType": kinds, "AttentionOp": type("AttentionOp", (), {})}
    module = program_with(monkeypatch, 4, "maxtext.layers.attention_op", names)
    op = module.AttentionOp()
    op.sliding_window_size, op.attn_logits_soft_cap, op.dropout_rate = 4, 0.0, 0.0
    q, k = (jnp.asarray(rng.standard_normal((2, T, n, 8)), jnp.float32) for n in (4, 2))
    for op.attention_type, mask in (("global", pa.CAUSAL), ("local", pa.sliding_window(4))):
        wanted = pa.flash_attention(q, k, k, mask=mask, segment_ids=IDS, scale=1.0)
        for others in (("train",), (IDS, "train")):  # newer versions pass positions as well
            got = op.cudnn_flash_attention(q, k, k, IDS, *others)
            np.testing.assert_array_equal(got, wanted)
    op.attention_type = "chunk"
    with pytest.raises(NotImplementedError, match="^chunk, dropout_rate 0.0"):
        op.cudnn_flash_attention(q, k, k, IDS)


def ragged_step(rng, head_dim):
    """New rows of three sequences, one without any, and what they see: q, k, v, lengths, pages of
    each sequence in the pool, first rows."""
    q, k, v = (jnp.asarray(rng.standard_normal((9, n, head_dim)), jnp.float32) for n in (4, 2, 2))
    lengths, table = jnp.array([12, 0, 5]), jnp.array([[4, 1], [0, 0], [2, 0]])
    return q, k, v, *(x.astype(jnp.int32) for x in (lengths, table, jnp.array([0, 5, 5, 8])))


def test_the_call_site_of_sglang_jax(rng, monkeypatch):
    """Pages in sglang-jax's form, [.., 2 * K / 2, 2, H], H padded, and one list of all pages."""
    name = "sgl_jax.srt.layers.attention.flashattention_backend"
    attend = program_with(monkeypatch, 5, name, {}).ragged_paged_attention_v3
    q, k, v, lengths, table, starts = ragged_step(rng, 96)
    pages = jnp.asarray(rng.standard_normal((6, 8, 2, 2, 128)), jnp.float32).at[..., 96:].set(0)
    list_of_pages, aligned = jnp.array([4, 1, 2], jnp.int32), jnp.array([0, 16, 16, 24], jnp.int32)
    distribution = jnp.array([0, 0, 3], jnp.int32)
    sinks = jnp.arange(4.0)
    small = lengths, list_of_pages, starts, aligned, distribution
    options = {"sm_scale": 0.1, "sliding_window": 6, "attention_sink": sinks}
    out, written = attend(q, k, v, pages, *small, decode_mode=0, **options)
    pool = pages.reshape(6, 8, 4, 128)[..., :96]
    arguments = lengths, table, starts, jnp.array([3], jnp.int32)
    pool = pa.update_kv_pages(pool, k, v, *arguments)
    np.testing.assert_array_equal(written.reshape(6, 8, 4, 128)[..., :96], pool)
    want = pa.ragged_paged_attention(
        q, pool, *arguments, sm_scale=0.1, sliding_window=6, sinks=sinks
    )
    np.testing.assert_allclose(out, want, atol=1e-5)
    with pytest.raises(NotImplementedError, match="custom_mask"):
        attend(q, k, v, pages, *small, jnp.ones(8, jnp.int32))


def test_the_call_site_of_tokamax(rng, monkeypatch):
    """The call beside tokamax's reference of it."""
    api = pytest.importorskip("tokamax._src.ops.batched_rpa.api")
    theirs = api._IMPLEMENTATIONS["reference"]
    for name in ("batched_ragged_paged_attention", "ragged_paged_attention"):
        monkeypatch.setattr(api, name, None)
    exec(compile(PROGRAMS[6], "libraries.md", "exec"), {})
    q, k, v, lengths, table, starts = ragged_step(rng, 96)
    cache = jnp.asarray(rng.standard_normal((6, 8, 4, 128)), jnp.float32).at[..., 96:].set(0)
    small = lengths, table.reshape(-1), starts, jnp.array([0, 0, 3], jnp.int32)
    for options in ({"sm_scale": 0.1}, {"sm_scale": 0.2, "sliding_window": 6, "soft_cap": 3.0}):
        out, written = api.ragged_paged_attention(q, k, v, cache, *small, **options)
        want, cache_then = theirs(q, k, v, cache, *small, **options)
        np.testing.assert_allclose(out[:8], want[:8, :, :96], atol=1e-5)
        own = np.isin(np.arange(6), np.asarray([4, 1, 2]))
        np.testing.assert_array_equal(written[own], cache_then[own])
