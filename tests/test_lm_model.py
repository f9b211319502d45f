"""The demo's model and its checkpoints, beside a NumPy model that shares nothing with it."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from pallas_attn.lm import checkpoint, decode, model, text, train
from pallas_attn.lm import safetensors as format_
from tests import lm_witness

every_family = pytest.mark.parametrize("family", lm_witness.CONFIGS)
every_cache = pytest.mark.parametrize("kind", decode.CACHES)


@functools.cache
def made(family):
    """(its config.json, tensors by name)."""
    config = lm_witness.CONFIGS[family]
    return config, lm_witness.tensors_of(config, np.random.default_rng(len(family)))


def loaded(folder, family, **how):
    lm_witness.write(folder, *made(family), **how)
    return checkpoint.load(folder, "float32")


# ---- the model ----------------------------------------------------------------------------------


@every_family
def test_a_checkpoint_computes_what_the_witness_does(tmp_path, rng, family):
    config, params = loaded(tmp_path, family, shards=3)
    ids = rng.integers(0, config.vocab, 80)
    got = model.forward(config, params, jnp.asarray(ids, jnp.int32)[None])[0]
    wanted = lm_witness.logits(*made(family), ids)
    assert np.abs(wanted).max() > 2  # the logits have something to say
    np.testing.assert_allclose(got, wanted, atol=2e-4)


@pytest.mark.parametrize(
    "family, kind",
    [("llama3", "paged"), ("qwen2", "stacked"), *(("qwen3", kind) for kind in decode.CACHES)],
)
def test_prefill_then_decode_equals_the_full_forward(tmp_path, rng, family, kind):
    """Two prompts of unlike lengths into a cache of three, then tokens into one and both."""
    config, params = loaded(tmp_path, family)
    ids = jnp.asarray(rng.integers(0, config.vocab, (2, 24)), jnp.int32)
    full = model.forward(config, params, ids)
    options = decode.Options(cache=kind, slots=3, capacity=32, page_size=8, dtype="float32")
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
        logits, cache = step(config, params, cache, jnp.asarray(token), jnp.asarray(rows))
        close(logits[2], full[0, lengths[0]])
        if both:
            close(logits[0], full[1, lengths[1]])
        lengths += [1, both]
    np.testing.assert_array_equal(cache.lengths, [lengths[1], 0, lengths[0]])


def test_layers_with_one_mask_are_one_scan():
    config = checkpoint.config_from(lm_witness.CONFIGS["qwen2"])
    assert config.windows == (None, 5, 5)
    assert [(count, mask.left) for count, mask in config.runs] == [(1, None), (2, 4)]


def test_random_weights_have_the_shapes_and_no_others():
    config = checkpoint.config_from(lm_witness.CONFIGS["qwen2"])
    params = model.random_params(config, 0, "bfloat16")
    assert jax.tree.map(jnp.shape, params) == config.shapes()
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert model.num_bytes(params) == 2 * sum(x.size for x in jax.tree.leaves(params))


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
        cache=kind, slots=2, capacity=104, page_size=8, chunk=4, dtype="float32"
    )
    return decode.Run(config, params, options, [[1, 2], [3], [4, 5, 6], [7]], 9), params


@every_cache
def test_a_chunk_of_steps_and_a_prefill_copy_no_cache(tmp_path, kind):
    run, params = two_slots(tmp_path, kind)
    config, options = run.config, run.options
    cache, state = options.create_cache(config), decode.State.create(2)
    new = run._arrivals([*enumerate(run.sequences[:2])], np.array([True, True]))
    shapes = {",".join(map(str, x.shape)) for x in jax.tree.leaves((cache.k, cache.v))}
    programs = (
        decode.steps.lower(config, options, params, cache, state),
        decode.admit.lower(config, options, params, cache, state, new),
    )
    for lowered in programs:
        hlo = lowered.compile().as_text()
        assert any(f"f32[{shape}]" in hlo for shape in shapes)
        copies = re.findall(rf"= f32\[(?:{'|'.join(shapes)})\]\S* copy\(.*", hlo)
        assert not copies
        assert len(re.findall("(?:may|must)-alias", hlo)) >= len(jax.tree.leaves(cache))


@every_cache
def test_the_buffers_of_a_run_stay_where_they_are(tmp_path, kind):
    run, _ = two_slots(tmp_path, kind)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((run.cache.k, run.cache.v))]
    for _ in run:
        now = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((run.cache.k, run.cache.v))]
        assert now == where
    assert [len(one.tokens) for one in run.sequences] == [9] * 4


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_sharded_checkpoint_is_the_whole_one(tmp_path, dtype):
    whole = loaded(tmp_path / "whole", "qwen2", dtype=dtype)
    parts = loaded(tmp_path / "parts", "qwen2", dtype=dtype, shards=4)
    assert whole[0] == parts[0]
    jax.tree.map(np.testing.assert_array_equal, whole[1], parts[1])
    named = made("qwen2")[1]["model.layers.1.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(  # layer 1 is the first of the second run
        parts[1]["runs"][1]["qkv"][0, 32:48], named.astype(jnp.dtype(dtype)).astype(np.float32)
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    described = lm_witness.CONFIGS["qwen2"]
    config = checkpoint.config_from(described)
    params = model.random_params(config, 3, "bfloat16")
    checkpoint.save(tmp_path, described, params, "bfloat16")
    again = checkpoint.load(tmp_path, "bfloat16")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_the_format_is_that_of_the_package(tmp_path, rng):
    """Both ways: files of the package safetensors are read here, and the other way round."""
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(-9, 9, (2, 1, 4)),
        "empty": np.zeros((0, 3), np.float16),
        "scalar": np.array(2.5),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "theirs")
    format_.write(tmp_path / "ours", tensors, {"format": "pt"})
    theirs, ours = format_.read(tmp_path / "theirs"), safetensors.numpy.load_file(tmp_path / "ours")
    for name, wanted in tensors.items():
        for got in (theirs[name], ours[name]):
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)


def broken(folder, how):
    """A checkpoint with one thing wrong."""
    config, tensors = made("llama3")
    tensors = dict(tensors)
    name = "model.layers.1.mlp.down_proj.weight"
    if how == "wrong shape":
        tensors[name] = tensors[name][:, :-1]
    elif how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    elif isinstance(how, dict):
        config = config | how
    lm_witness.write(folder, config, tensors)
    path = folder / "model.safetensors"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "beheaded":
        path.write_bytes(path.read_bytes()[:20])
    elif how == "no header":
        path.write_bytes((4).to_bytes(8, "little") + b"abcd")
    elif how == "no weights":
        path.unlink()
    elif how == "no shard":
        index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "wrong shape",
            "model.layers.1.mlp.down_proj.weight: expected shape [32, 48], got [32, 47] in "
            "{0}/model.safetensors",
        ),
        (
            "missing",
            "model.layers.1.mlp.down_proj.weight: expected shape [32, 48], got no such tensor",
        ),
        (
            "extra",
            "{0}/model.safetensors: model.layers.0.self_attn.q_proj.bias is no part of the model "
            "that config.json describes",
        ),
        (
            "truncated",
            "{0}/model.safetensors: truncated: lm_head.weight ends at byte 117632 of the data, "
            "which has 117532",
        ),
        (
            "beheaded",
            "{0}/model.safetensors: truncated: its header ends at byte 3016, it has 20",
        ),
        (
            "no header",
            "{0}/model.safetensors: its header is not the JSON of a safetensors file",
        ),
        ("no weights", "{0}: no *.safetensors file"),
        (
            "no shard",
            "{0}/model-00001-of-00002.safetensors: model.safetensors.index.json names this file "
            "and it is not there",
        ),
        (
            {"model_type": "gpt2"},
            "config.json: expected model_type of ('llama', 'mistral', 'qwen2', 'qwen3'), got "
            "'gpt2'",
        ),
        ({"hidden_act": "gelu"}, "config.json: hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "config.json: attention_bias True is not supported"),
        (
            {"quantization_config": {"bits": 4}},
            "config.json: quantization_config {{'bits': 4}} is not supported",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "config.json: rope type 'dynamic' turns keys anew as the text grows, which a cache of "
            "turned keys cannot; use 'yarn' or 'linear'",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "config.json: rope type: expected default, linear, llama3 or yarn, got 'longrope'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json: factor is missing"),
        (
            {"rope_scaling": {"partial_rotary_factor": 0.5}},
            "config.json: partial_rotary_factor is not supported",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path, how, message):
    with pytest.raises(ValueError) as caught:
        checkpoint.load(broken(tmp_path, how), "float32")
    assert str(caught.value) == message.format(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "a has no dtype, shape and data_offsets"),
        (
            {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]},
            "a is of type F8_E4M3; read are F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL",
        ),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
            "a of type F32 and shape [2] takes 8 bytes, got 4",
        ),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named(tmp_path, entry, message):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}") + "$"):
        format_.read(path)


def test_the_embedded_model_is_small_and_has_learnt(tmp_path):
    files = list(checkpoint.EMBEDDED.iterdir())
    assert sum(path.stat().st_size for path in files) <= 4e6
    assert "public domain" in (checkpoint.EMBEDDED / "ORIGIN.md").read_text()
    assert checkpoint.read_json(checkpoint.EMBEDDED / "config.json") == train.TINY
    config, params = checkpoint.load(checkpoint.EMBEDDED, "float32")
    line = b"KING HENRY VI:\nMy lord, I have a man that is not so much.\n"
    ids = jnp.asarray(list(line), jnp.int32)[None]
    logits = jax.nn.log_softmax(model.forward(config, params, ids)[0, :-1])
    loss = -np.take_along_axis(np.asarray(logits), np.array(list(line))[1:, None], axis=1).mean()
    assert loss < 1.6  # nats a byte; guessing is 5.5


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
