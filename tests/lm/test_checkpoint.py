"""Checkpoints as strangers write them: what is read, what is refused, and in which words."""

import json
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
from pallas_lm.hf_config import config_from
from tests.lm import checkpoint_fuzz, witness
from tests.lm.loops import refusal

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def loaded(folder, family, **how):
    witness.write(folder, *witness.made(family), **how)
    return checkpoint.load(folder, "float32")


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
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")  # by a reader of others
    assert tensors.keys() == witness.made("qwen2")[1].keys()
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
         "{0}/model.safetensors: {1}: expected one of float64, float32, float16, bfloat16, got "
         "int32"),
        ("NaN", "{0}/model.safetensors: {1}: holds numbers that are not finite as float32"),
        ("infinite", "{0}/model.safetensors: {1}: holds numbers that are not finite as float32"),
        ("many layers",
         "{0}: model.layers.3.input_layernorm.weight: expected shape [32], as config.json has it, "
         "got no such tensor"),
        ("wide",
         "{0}/model.safetensors: model.embed_tokens.weight: expected shape [16777216, 1048576], as "
         "config.json has it, got [96, 32]"),
        ("no weights", "{0}: holds neither model.safetensors nor model.safetensors.index.json"),
        ("twice", "{0}/b.safetensors: 'lm_head.weight' is also in {0}/a.safetensors"),
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


# ---- mutations of good folders ------------------------------------------------------------------


def test_no_mutation_of_a_folder_is_more_than_one_line(tmp_path, seed):
    """python -m tests.lm.checkpoint_fuzz 2000 tries more."""
    refused = checkpoint_fuzz.run(tmp_path, 200, seed)
    assert 60 < refused < 200  # and some were harmless
