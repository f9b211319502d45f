"""The demo's model and its checkpoints, beside a NumPy model that shares nothing with it."""

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_lm import (
    checkpoint,
    chunked_prefill,
    decode,
    model,
    programs,
    sampling,
    slots,
    text,
    train,
)
from pallas_lm.config import num_bytes, random_params
from pallas_lm.hf_config import config_from
from pallas_lm.options import CACHES
from pallas_lm.state import State
from tests.lm import witness

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

every_family = pytest.mark.parametrize("family", witness.CONFIGS)
every_cache = pytest.mark.parametrize("kind", CACHES)


def loaded(folder, family, **how):
    witness.write(folder, *witness.made(family), **how)
    return checkpoint.load(folder, "float32")


def test_a_prefill_is_of_32_bits_with_jax_enable_x64():
    """jax warns where 64 bits are scattered into 32."""
    config = config_from(witness.CONFIGS["llama3"])
    params = jax.eval_shape(lambda: random_params(config, 0, jnp.float32))

    def prefill(params):
        slots = jnp.arange(2, dtype=jnp.int32)
        prompts = model.Prompts(jnp.ones((2, 8), jnp.int32), slots + 7, slots)
        cache = decode.Options(batch=2, dtype="float32").create_cache(config)
        return model.prefill(config, params, cache, prompts)

    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        logits, _ = jax.eval_shape(prefill, params)
    assert logits.dtype == jnp.float32


# ---- the model ----------------------------------------------------------------------------------


@every_family
def test_a_checkpoint_computes_what_the_witness_does(tmp_path, rng, family):
    config, params = loaded(tmp_path, family, shards=3)
    ids = rng.integers(0, config.vocab, 80)
    got = model.forward(config, params, jnp.asarray(ids, jnp.int32)[None])[0]
    wanted = witness.logits(*witness.made(family), ids)
    assert np.abs(wanted).max() > 2  # the logits have something to say
    np.testing.assert_allclose(got, wanted, atol=5e-4)  # float32 beside float64


@pytest.mark.parametrize(
    "family, kind",
    [
        ("llama3", "paged"),
        ("qwen2", "stacked"),
        *(("qwen3", kind) for kind in CACHES),
        ("gemma2", "stacked"),
        ("gemma3", "paged"),
        *(("gemma4", kind) for kind in CACHES),
        ("gemma4_small", "stacked"),
        ("deepseek_v2_lite", "stacked"),
        ("deepseek_v2", "paged"),
    ],
)
def test_prefill_then_decode_equals_the_full_forward(tmp_path, rng, family, kind):
    """Two prompts of unlike lengths into a cache of three, then tokens into one and both."""
    config, params = loaded(tmp_path, family)
    ids = jnp.asarray(rng.integers(0, config.vocab, (2, 24)), jnp.int32)
    full = model.forward(config, params, ids)
    options = decode.Options(cache=kind, batch=3, capacity=32, page_size=8, dtype="float32")
    lengths, slots = np.array([16, 9]), np.array([2, 0])
    new = model.Prompts(ids[:, :16], *(jnp.asarray(x, jnp.int32) for x in (lengths, slots)))
    run = jax.jit(model.prefill, static_argnums=0)
    logits, cache = run(config, params, options.create_cache(config), new)
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    close(logits, full[jnp.arange(2), jnp.asarray(lengths) - 1])
    step = jax.jit(model.decode, static_argnums=0)
    for both in (True, False, True):
        token, rows = np.zeros(3, np.int32), np.zeros(3, np.int32)
        token[slots], rows[slots] = np.asarray(ids)[range(2), lengths], [1, both]
        operands = jnp.asarray(token[:, None]), jnp.asarray(rows), model.rotary_of(config, cache)
        logits, cache = step(config, params, cache, *operands)
        close(logits[2, 0], full[0, lengths[0]])
        if both:
            close(logits[0, 0], full[1, lengths[1]])
        lengths += [1, both]
    np.testing.assert_array_equal(cache.lengths, [lengths[1], 0, lengths[0]])


def test_layers_with_one_mask_are_one_scan():
    config = config_from(witness.CONFIGS["qwen2"])
    assert config.windows == (None, 5, 5)
    assert [(count, mask.left) for count, mask in config.runs] == [(1, None), (2, 4)]


def test_random_weights_have_the_shapes_and_no_others():
    config = config_from(witness.CONFIGS["qwen2"])
    params = random_params(config, 0, "bfloat16")
    assert jax.tree.map(jnp.shape, params) == config.shapes()
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert num_bytes(params) == 2 * sum(x.size for x in jax.tree.leaves(params))


def test_a_gradient_is_that_of_finite_differences(tmp_path, rng):
    config, params = loaded(tmp_path, "qwen3")
    ids = jnp.asarray(rng.integers(0, config.vocab, (2, 12)), jnp.int32)
    target = jnp.asarray(rng.standard_normal((2, 12, config.vocab)), jnp.float32)
    loss = jax.jit(lambda p: jnp.vdot(model.forward(config, p, ids), target))
    direction = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype) * 0.1, params
    )
    slope = sum(
        jnp.vdot(a, b)
        for a, b in zip(
            jax.tree.leaves(jax.grad(loss)(params)), jax.tree.leaves(direction), strict=True
        )
    )
    ends = [
        loss(jax.tree.map(lambda x, d, s=step: x + s * d, params, direction))
        for step in (1e-2, -1e-2)
    ]
    assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / 2e-2, rel=2e-2)


# ---- nothing is copied --------------------------------------------------------------------------


def two_slots(folder, kind):
    """A run of four prompts, two at a time."""
    config, params = loaded(folder, "qwen3")
    options = decode.Options(
        cache=kind, batch=2, capacity=104, page_size=8, chunk=4, dtype="float32"
    )
    return decode.Run(config, params, options, [[1, 2], [3], [4, 5, 6], [7]], 9), params


@every_cache
def test_a_chunk_of_steps_and_a_prefill_copy_no_cache(tmp_path, kind):
    run, params = two_slots(tmp_path, kind)
    config, options = run.config, run.options
    cache, state = options.create_cache(config), State.create(options)
    vacant = np.array([True, True])
    new = run._sent(slots.arrivals(options, [*enumerate(run.sequences[:2])], vacant))
    mixture = dataclasses.replace(options, prefill_chunk=5, draft="ngram")
    if kind == "paged":  # a prompt's pages are forked
        mixture = dataclasses.replace(mixture, samples=2, sampling=sampling.Sampling(0.5))
    mixed = decode.Run(config, params, mixture, [[1, 2]], 9)
    chunks = mixed._sent(chunked_prefill.chunks(mixed._slots, {}, np.arange(2), vacant))
    more = mixed.cache, State.create(mixture)
    every = jax.tree.leaves([(x.k, x.v) for x in (cache, mixed.cache)])
    shapes = {",".join(map(str, x.shape)) for x in every}
    lowerings = (
        programs.steps.lower(config, options, params, cache, state),
        programs.admit.lower(config, options, params, cache, state, new),
        chunked_prefill.mixed.lower(config, mixture, params, *more, chunks),
    )
    for lowered in lowerings:
        hlo = lowered.compile().as_text()
        assert any(f"f32[{shape}]" in hlo for shape in shapes)
        copies = re.findall(rf"= f32\[(?:{'|'.join(shapes)})\]\S* copy\(.*", hlo)
        assert not copies
        assert len(re.findall("(?:may|must)-alias", hlo)) >= len(jax.tree.leaves(cache))


@pytest.mark.by_xla
@every_cache
def test_the_buffers_of_a_run_stay_where_they_are(tmp_path, kind):
    run, _ = two_slots(tmp_path, kind)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((run.cache.k, run.cache.v))]
    for _ in run:
        now = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((run.cache.k, run.cache.v))]
        assert now == where
    assert [len(x.tokens) for x in run.sequences] == [9] * 4


# ---- training -----------------------------------------------------------------------------------


def test_training_learns_and_leaves_a_checkpoint(tmp_path, monkeypatch):
    small = train.TINY | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    monkeypatch.setattr(train, "TINY", small)
    recipe = train.Recipe(steps=30, batch=8, context=16, warmup=5, every=15, learning_rate=0.02)
    lines = list(train.train(b"abcdefgh" * 200, str(tmp_path), recipe))
    assert [line.step for line in lines] == [15, 30]
    assert lines[-1].held_out < 0.5 < lines[0].loss < 5
    config, params = checkpoint.load(tmp_path, "float32")
    assert config.hidden == 32 and isinstance(text.tokenizer_of(tmp_path), text.Bytes)
    ids = jnp.asarray(list(b"abcdefgh" * 3), jnp.int32)[None]
    logits = model.forward(config, params, ids)
    assert (logits[0, 8:-1].argmax(-1) == ids[0, 9:]).mean() > 0.9


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (100, {}, "text: expected at least 5140 bytes, got 100"),
        (9999, {"steps": 0}, "steps: expected at least 1, got 0"),
        (9999, {"learning_rate": -1.0}, "learning_rate: expected above 0 and below 1, got -1.0"),
    ],
)
def test_training_says_what_it_needs(tmp_path, size, options, message):
    with pytest.raises(ValueError) as caught:
        list(train.train(bytes(size), str(tmp_path), train.Recipe(**options)))
    assert str(caught.value) == message
