"""Checkpoints as strangers write them: what is read, what is refused, and in which words."""

import functools
import json
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from pallas_lm import checkpoint, hf_config, model, text, train
from pallas_lm.config import random_params
from pallas_lm.folder import Folder
from pallas_lm.hf_config import KEYS, REQUIRED, ROPE_KEYS, config_from
from tests.lm import checkpoint_fuzz, witness

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def loaded(folder, family, **how):
    witness.write(folder, *witness.made(family), **how)
    return checkpoint.load(folder, "float32")


def refusal(call, *arguments):
    """The one line that a call is refused with."""
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert len(line) < 600 and line.isprintable()
    return line


# ---- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_sharded_checkpoint_is_the_whole_one(tmp_path, dtype):
    whole = loaded(tmp_path / "whole", "qwen2", dtype=dtype)
    parts = loaded(tmp_path / "parts", "qwen2", dtype=dtype, shards=4)
    assert whole[0] == parts[0]
    jax.tree.map(np.testing.assert_array_equal, whole[1], parts[1])
    named = witness.made("qwen2")[1]["model.layers.1.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(  # layer 1 is the first of the second run
        parts[1]["runs"][1]["qkv"][0, 32:48], named.astype(jnp.dtype(dtype)).astype(np.float32)
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    described = witness.CONFIGS["qwen2"]
    config = config_from(described)
    params = random_params(config, 3, "bfloat16")
    checkpoint.save(tmp_path, described, params)
    again = checkpoint.load(tmp_path, "bfloat16")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_the_embedded_model_is_small_and_has_learnt():
    files = list(checkpoint.EMBEDDED.iterdir())
    assert sum(path.stat().st_size for path in files) <= 4e6
    assert "public domain" in (checkpoint.EMBEDDED / "ORIGIN.md").read_text()
    assert Folder(checkpoint.EMBEDDED).json("config.json") == train.TINY
    config, params = checkpoint.load(checkpoint.EMBEDDED, "float32")
    line = b"KING HENRY VI:\nMy lord, I have a man that is not so much.\n"
    ids = jnp.asarray(list(line), jnp.int32)[None]
    logits = jax.nn.log_softmax(model.forward(config, params, ids)[0, :-1])
    loss = -np.take_along_axis(np.asarray(logits), np.array(list(line))[1:, None], axis=1).mean()
    assert loss < 1.6  # nats a byte; guessing is 5.5


def test_other_files_beside_model_safetensors_are_not_read(tmp_path):
    _, plain = loaded(tmp_path, "llama3")
    _, tensors = witness.made("llama3")
    others = {name: -x for name, x in tensors.items()}
    safetensors.numpy.save_file(others, tmp_path / "zzz.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(tmp_path, "float32")[1], plain)


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 5]}, None, (2, 5)),
        ({"eos_token_id": 2}, {"eos_token_id": [7]}, (7,)),
        ({"eos_token_id": 2}, {"temperature": 0.6}, ()),  # transformers does the same
        ({"eos_token_id": 2}, {"eos_token_id": None}, ()),
    ],
)
def test_where_a_text_ends(tmp_path, config, generation, stops):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert hf_config.stop_tokens(Folder(tmp_path)) == stops


@pytest.mark.parametrize("value", [-1, 2.0, "2", True, [1, "2"], [[1]], {}, 2**31, float("nan")])
def test_stop_tokens_are_token_numbers(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    line = refusal(hf_config.stop_tokens, Folder(tmp_path))
    wanted = "eos_token_id: expected a whole number from 0 to 2147483647, or a list of such, got "
    assert line.startswith(f"{tmp_path}/generation_config.json: {wanted}")


# ---- config.json --------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", [*KEYS, *(f"rope_scaling.{name}" for name in ROPE_KEYS)])
def test_a_key_of_another_type_or_out_of_range_is_refused_by_name(tmp_path, name):
    good = witness.CONFIGS["qwen3"] | {"use_sliding_window": True, "sliding_window": 8}
    good |= {"rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    config_from(good)
    key = (KEYS | {f"rope_scaling.{name}": key for name, key in ROPE_KEYS.items()})[name]
    count = 0
    for value in values(key):
        *outer, inner = name.split(".")
        if outer:
            changed = good | {"rope_scaling": good["rope_scaling"] | {inner: value}}
        else:
            changed = good | {inner: value}
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


LINEAR = {"rope_type": "linear", "factor": 2.0}
SLIDING = ["full_attention", "full_attention", "sliding_attention"]
NO_WINDOW = "sliding_window or use_sliding_window leaves no window"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_values_that_do_not_go_together(changes, message):
    line = refusal(config_from, witness.CONFIGS["llama3"] | changes)
    assert line == f"config.json: {message}"


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


def test_a_gate_that_a_family_does_not_have():
    gelu = witness.CONFIGS["llama3"] | {"hidden_act": "gelu_pytorch_tanh"}
    assert refusal(config_from, gelu) == (
        "config.json: hidden_act: expected silu in llama, got 'gelu_pytorch_tanh'"
    )


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
    for changes, line in (
        (
            {"hidden_act": "silu"},
            "hidden_act: expected gelu_pytorch_tanh in gemma3_text, got 'silu'",
        ),
        (
            {"rope_parameters": {"full_attention": 3}},
            "rope_parameters.full_attention: expected an object, got 3",
        ),
    ):
        assert refusal(config_from, listed | changes) == f"config.json: {line}"


THREE = witness.CONFIGS["gemma3"] | {"rope_scaling": None}
NESTED = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_what_transformers_computes_otherwise_in_gemma_3(changes, message):
    assert refusal(config_from, THREE | changes) == f"config.json: {message}"


# ---- files --------------------------------------------------------------------------------------

FILES = ["config.json", "generation_config.json", "model.safetensors.index.json",
         "model-00001-of-00002.safetensors", "tokenizer.json"]  # fmt: skip


def opened(folder):
    """Everything that run.py reads of a folder."""
    checkpoint.load(folder, "float32")
    hf_config.stop_tokens(Folder(folder))
    text.tokenizer_of(folder)


@pytest.mark.parametrize("kind", ["directory", "fifo", "nowhere", "itself", "outside"])
@pytest.mark.parametrize("name", FILES)
def test_what_stands_in_place_of_a_file_is_named(tmp_path, name, kind):
    folder = witness.write(tmp_path / "x", *witness.made("llama3"), shards=2)
    path, outside = folder / name, tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.write_text("{}")
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"nowhere": "not there", "itself": name, "outside": outside}[kind])
    said = {
        "directory": "expected a file, got a directory",
        "fifo": "expected a file, got a FIFO",
        "nowhere": "a link that leads nowhere: No such file or directory",
        "itself": "a link that leads nowhere: Too many levels of symbolic links",
        "outside": f"is a link out of the folder, to {outside}",
    }
    assert refusal(opened, folder) == f"{path}: {said[kind]}"


def test_a_snapshot_in_the_download_cache_links_to_its_blobs(tmp_path):
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    witness.write(folder, *witness.made("llama3"))
    (tmp_path / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    checkpoint.load(folder, "float32")
    (tmp_path / "blobs").rename(tmp_path / "elsewhere")
    (tmp_path / "blobs").symlink_to(tmp_path / "elsewhere")
    assert "is a link out of the folder" in refusal(checkpoint.load, folder, "float32")


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", ".", "", "x", "x.safetensors\n", None, 1,
     ["x.safetensors"], {}, "nul\0.safetensors"],
    ids=repr,
)  # fmt: skip
def test_an_index_names_files_of_its_folder(tmp_path, file):
    folder = witness.write(tmp_path / "x", *witness.made("llama3"), shards=2)
    safetensors.numpy.save_file(witness.made("llama3")[1], tmp_path / "x.safetensors")
    path = folder / "model.safetensors.index.json"
    where = json.loads(path.read_text())["weight_map"] | {"model.norm.weight": file}
    path.write_text(json.dumps({"weight_map": where}))
    line = refusal(checkpoint.load, folder, "float32")
    assert line.startswith(
        f"{path}: weight_map: 'model.norm.weight': expected the name of a *.safetensors file in "
        "this folder, got "
    )


@pytest.mark.parametrize("value", [None, [], {}, "x", 1])
def test_an_index_without_a_map(tmp_path, value):
    folder = witness.write(tmp_path, *witness.made("llama3"), shards=2)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": value}))
    line = refusal(checkpoint.load, folder, "float32")
    assert line.startswith(f"{path}: weight_map: expected an object, got ")


# ---- tensors ------------------------------------------------------------------------------------

NAME = "model.layers.1.mlp.down_proj.weight"


def broken(folder, how):
    """A checkpoint with one thing wrong."""
    config, tensors = witness.made("llama3")
    tensors = dict(tensors)
    if how == "wrong shape":
        tensors[NAME] = tensors[NAME][:, :-1]
    elif how == "missing":
        del tensors[NAME]
    elif how == "extra":
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    elif how in ("NaN", "infinite"):
        tensors[NAME] = tensors[NAME].copy()
        tensors[NAME][3, 4] = {"NaN": np.nan, "infinite": -np.inf}[how]
    elif how == "many layers":
        config = config | {"num_hidden_layers": 1000}
    elif how == "wide":
        config = config | {"hidden_size": 2**20, "vocab_size": 2**24, "intermediate_size": 2**20}
    witness.write(folder, config, tensors)
    path = folder / "model.safetensors"
    if how == "no weights":
        path.rename(folder / "other.safetensors")
    elif how == "twice":
        index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "b.safetensors").write_bytes(path.read_bytes())
        path.rename(folder / "a.safetensors")
    elif how == "whole numbers":
        header, data = checkpoint_fuzz.split(path.read_bytes())
        header[NAME]["dtype"] = "I32"
        path.write_bytes(checkpoint_fuzz.joined(header, data))
    elif how == "two forms":
        (folder / "model.npy").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("wrong shape",
         "{0}/model.safetensors: {1}: expected shape [32, 48], as config.json has it, got [32, 4"
         "7]"),
        ("missing", "{0}: {1}: expected shape [32, 48], as config.json has it, got no such tensor"),
        ("extra",
         "{0}/model.safetensors: 'model.layers.0.self_attn.q_proj.bias' is no part of the model "
         "that config.json describes"),
        ("whole numbers",
         "{0}/model.safetensors: {1}: expected one of F64, F32, F16, BF16, got I32"),
        ("NaN", "{0}/model.safetensors: {1}: holds numbers that are not finite as float32"),
        ("infinite", "{0}/model.safetensors: {1}: holds numbers that are not finite as float32"),
        ("many layers",
         "{0}: model.layers.3.input_layernorm.weight: expected shape [32], as config.json has it, "
         "got no such tensor"),
        ("wide",
         "{0}/model.safetensors: model.embed_tokens.weight: expected shape [16777216, 1048576], as "
         "config.json has it, got [96, 32]"),
        ("no weights",
         "{0}: holds neither model.safetensors nor model.safetensors.index.json nor model.npy"),
        ("twice", "{0}/b.safetensors: 'lm_head.weight' is also in {0}/a.safetensors"),
        ("two forms", "{0}: holds model.npy and *.safetensors; remove one of them"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path, how, message):
    line = refusal(checkpoint.load, broken(tmp_path, how), "float32")
    assert line == message.format(tmp_path, NAME)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # which says so, and which does by default
def test_a_head_beside_a_tied_embedding_is_equal(tmp_path, monkeypatch, family):
    """transformers uses another head, config.json says not to."""
    monkeypatch.setattr(checkpoint, "_ROWS", 40)  # a part of the 96
    config, tensors = witness.made(family)
    embed = tensors["model.embed_tokens.weight"]
    changed, narrow, ints = embed.copy(), embed[:, :-1].copy(), embed.astype(np.int8)
    changed[90, 3] += 1
    _, plain = checkpoint.load(witness.write(tmp_path, config, tensors), "float32")
    witness.write(tmp_path, config, tensors | {"lm_head.weight": embed})
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(tmp_path, "float32")[1], plain)
    for head in (changed, narrow):
        witness.write(tmp_path, config, tensors | {"lm_head.weight": head})
        assert refusal(checkpoint.load, tmp_path, "float32") == (
            f"{tmp_path}/model.safetensors: lm_head.weight: expected the numbers of "
            "model.embed_tokens.weight, as config.json has tie_word_embeddings true, got others; "
            "set it to false to use this head, or remove the tensor"
        )
    safetensors.numpy.save_file(tensors | {"lm_head.weight": ints}, tmp_path / "model.safetensors")
    assert "lm_head.weight: expected the numbers" in refusal(checkpoint.load, tmp_path, "float32")
    config = config | {"tie_word_embeddings": False}
    witness.write(tmp_path, config, tensors | {"lm_head.weight": changed})
    _, untied = checkpoint.load(tmp_path, "float32")
    np.testing.assert_array_equal(untied["head"], changed)


def test_only_the_unread_tensors_themselves_are_left_out(tmp_path):
    config, tensors = witness.made("qwen3")
    other = {"draft.lm_head.weight": tensors["model.embed_tokens.weight"]}
    witness.write(tmp_path, config, tensors | other)
    assert refusal(checkpoint.load, tmp_path, "float32") == (
        f"{tmp_path}/model.safetensors: 'draft.lm_head.weight' is no part of the model that "
        "config.json describes"
    )


def test_weights_that_a_narrower_type_does_not_hold_are_named(tmp_path):
    config, tensors = witness.made("llama3")
    tensors = tensors | {NAME: tensors[NAME] * 1e6}
    witness.write(tmp_path, config, tensors)
    checkpoint.load(tmp_path, "float32")
    line = refusal(checkpoint.load, tmp_path, "float16")
    assert line.endswith(f"{NAME}: holds numbers that are not finite as float16")


@pytest.mark.parametrize("how", ["overlap", "hole", "short", "long", "no header", "one byte"])
def test_a_file_that_is_not_what_its_header_says(tmp_path, how):
    witness.write(tmp_path, *witness.made("llama3"))
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    if how in ("overlap", "hole"):
        header, data = checkpoint_fuzz.split(content)
        moved = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"]
        other = header["model.layers.0.mlp.gate_proj.weight"]["data_offsets"]
        moved[:] = other if how == "overlap" else [n + 4 for n in moved]
        content = checkpoint_fuzz.joined(header, data)
    content = {"short": content[:-100], "long": content + b"1234", "no header": content[8:],
               "one byte": b"x"}.get(how, content)  # fmt: skip
    path.write_bytes(content)
    line = refusal(checkpoint.load, tmp_path, "float32")
    assert line.startswith(f"{path}: ") and re.search("[Hh]eader|[Oo]ffset|[Mm]etadata", line)


@pytest.mark.parametrize("how", ["empty", "short", "pickled", "array", "field", "shape", "type"])
def test_what_is_wrong_with_a_record_is_named(tmp_path, how):
    described = witness.CONFIGS["qwen3"]
    config = config_from(described)
    checkpoint.save(tmp_path, described, random_params(config, 0, "bfloat16"))
    path = tmp_path / "model.npy"
    record = np.load(path)
    fields = [(name, "<u2", record.dtype[name].shape) for name in record.dtype.names]
    if how == "empty":
        path.write_bytes(b"")
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "pickled":
        np.save(path, np.array([{}]), allow_pickle=True)
    elif how == "array":
        np.save(path, np.zeros(3))
    elif how == "field":
        np.save(path, np.zeros(1, [*fields, ("x", "<u2", (3,))]))
    elif how == "shape":
        np.save(path, np.zeros(1, [(*fields[0][:2], (3,)), *fields[1:]]))
    elif how == "type":
        np.save(path, np.zeros(1, [(fields[0][0], "<u4", fields[0][2]), *fields[1:]]))
    line = refusal(checkpoint.load, tmp_path, "float32")
    assert line.startswith(f"{path}: "), line
    assert re.search("not a model that was saved here|as config.json has it, got ", line), line


def test_a_record_of_nan_is_refused(tmp_path):
    described = witness.CONFIGS["qwen3"]
    params = random_params(config_from(described), 0, "bfloat16")
    params["norm"] = params["norm"] * jnp.nan
    checkpoint.save(tmp_path, described, params)
    line = refusal(checkpoint.load, tmp_path, "float32")
    assert line == f"{tmp_path}/model.npy: holds numbers that are not finite"


# ---- mutations of good folders ------------------------------------------------------------------


def test_no_mutation_of_a_folder_is_more_than_one_line(tmp_path, seed):
    """python -m tests.lm.checkpoint_fuzz 2000 tries more."""
    refused = checkpoint_fuzz.run(tmp_path, 200, seed)
    assert 60 < refused < 200  # and some were harmless
