"""The demo on a mesh: the same tokens as on one device, each device with its own part."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
import pallas_lm as lm
from benchmarks import decode_loop
from pallas_lm import checkpoint, decode, presets, train
from pallas_lm import mesh as lm_mesh
from pallas_lm.hf_config import config_from
from pallas_lm.sampling import Sampling
from tests.lm import witness
from tests.lm.loops import refuses, tokens

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

ROOT = pathlib.Path(pa.__file__).parent.parent
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


def decoded(config, params, **options):
    """A run of the prompts."""
    how = {"batch": 2, "capacity": 16, "chunk": 4, "dtype": "float32"}
    run = decode.Run(config, params, decode.Options(**how | options), PROMPTS, 6, seed=3)
    assert list(run)
    return run


CASES = {  # devices, words, options
    "llama2": (4, 96, {"cache": "stacked", "sampling": Sampling(0.8, top_k=20)}),
    "qwen2": (
        2,
        95,
        {"cache": "paged", "page_size": 4, "draft": "ngram", "drafts": 2} | {"prefill_chunk": 3},
    ),
    "qwen3": (2, 95, {"cache": "per_sequence", "prefill_chunk": 4}),
    "gemma3": (2, 95, {"cache": "stacked"}),
}


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=pytest.mark.by_xla if x == "qwen3" else ()) for x in CASES]
)
def test_the_same_tokens_as_on_one_device(tmp_path, family):
    """Heads, biases, norms of heads, windows, a head and one that is the embedding, words that the
    devices divide and words that they do not; each device has its part of every matrix.
    """
    shards, words, options = CASES[family]
    described = witness.CONFIGS[family] | {"vocab_size": words}
    tensors = witness.tensors_of(described, np.random.default_rng(0))
    folder = witness.write(tmp_path / family, described, tensors, shards=2)
    mesh = lm_mesh.make(f"tp:{shards}", ("tp",))
    options |= {"keep_logits": True}
    want = decoded(*checkpoint.load(folder, "float32"), **options)
    config, params = checkpoint.load(folder, "float32", mesh)
    for name in ("qkv", "out", "gate_up", "down"):
        whole = params["runs"][0][name]
        assert {x.data.size for x in whole.addressable_shards} == {whole.size // shards}, name
    for name in {"embed", "head"} & set(params):
        rows = {x.data.shape[0] for x in params[name].addressable_shards}
        assert rows == {-(-words // shards)}, name
    got = decoded(config, params, mesh=mesh, **options)
    assert tokens(got) == tokens(want)
    for x, y in zip(got.sequences, want.sequences, strict=True):
        np.testing.assert_allclose(x.logits, y.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("words", [5, 8])
def test_the_rows_of_a_vocabulary_are_read_by_their_devices_alone(words):
    """Also where the last devices have none."""
    mesh, asked = lm_mesh.make("tp:4", ("tp",)), []
    whole = np.arange(words * 3, dtype=np.float32).reshape(words, 3) + 1

    def read(at):
        asked.append(len(whole[at]))
        return whole[at]

    rows = lm_mesh.placed(mesh, P("tp"), whole.shape, read)
    assert rows.shape == (8, 3) and max(asked) == 2
    np.testing.assert_array_equal(rows[:words], whole)
    assert not np.asarray(rows[words:]).any()


def test_our_own_files_and_random_weights_on_a_mesh(tmp_path):
    """Are the same numbers, in the order of the devices."""
    described = witness.CONFIGS["qwen2"] | {"vocab_size": 97}
    config, mesh = config_from(described), lm_mesh.make("tp:2", ("tp",))
    alone = lm_mesh.random_params(config, 1, "bfloat16")
    spread = lm_mesh.random_params(config, 1, "bfloat16", mesh)
    checkpoint.save(tmp_path, described, alone)
    read = checkpoint.load(tmp_path, "bfloat16", mesh)[1]
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    first = {"qkv": np.r_[: q // 2, q : q + kv // 2, q + kv : q + kv + kv // 2]}
    first |= {"qkv_bias": first["qkv"]}
    first |= {"gate_up": np.r_[: config.mlp // 2, config.mlp : config.mlp * 3 // 2]}
    for params in (spread, read):
        for name in ("embed", "head"):
            words = np.asarray(params[name], np.float32)
            np.testing.assert_array_equal(words[:97], np.asarray(alone[name], np.float32))
            assert words.shape[0] == 98 and not words[97:].any()
        for name, x in params["runs"][0].items():
            plain = np.asarray(alone["runs"][0][name])
            local = min(x.addressable_shards, key=lambda shard: shard.device.id).data
            plain = plain[:, first[name]] if name in first else plain
            np.testing.assert_array_equal(local, plain[tuple(map(slice, local.shape))])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("tp:16", "mesh: tp:16 takes 16 devices, there are 8"),
        ("cp:2", "mesh: expected tp:N, N at least 1, got 'cp:2'"),
        ("tp:0", "mesh: expected tp:N, N at least 1, got 'tp:0'"),
        ("tp:2,tp:2", "mesh: expected tp:N, N at least 1, got 'tp:2,tp:2'"),
        ("tp:3", "mesh: expected tp to divide the 8 kv heads of the model, got 3"),
    ],
)
def test_a_mesh_that_cannot_be(call, said):
    config = config_from(presets.PRESETS["llama3_70b"])
    refuses(said, lambda: lm_mesh.local(config, lm_mesh.make(call, ("tp",))))


def test_training_has_the_same_losses(tmp_path, monkeypatch):
    """A small model: windows over one axis, rows over another, and both, and rows in two
    processes; two steps and what is held out.
    """
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    monkeypatch.setattr(train, "TINY", train.TINY | small)
    text = bytes(np.random.default_rng(0).integers(97, 107, 400, np.uint8))
    (tmp_path / "text").write_bytes(text)
    flags = ("--task=train", f"--text={tmp_path / 'text'}", f"--out={tmp_path / 'processes'}")
    sizes = ("--steps=2", "--batch=4", "--context=16", "--learning_rate=0.5")
    running = _processes("--mesh=cp:2", *flags, *sizes, first=f"train.TINY |= {small}")
    lines = {}
    for axes in (None, "cp:2,dp:2"):
        mesh = None if axes is None else lm_mesh.make(axes, ("cp", "dp"))
        recipe = train.Recipe(steps=2, batch=4, context=16, learning_rate=0.5, mesh=mesh)
        (line,) = train.train(text, str(tmp_path / str(axes)), recipe)
        lines[axes] = line
    alone, split = lines.values()
    np.testing.assert_allclose(split[1:3], alone[1:3], rtol=1e-4)
    first, other = _said(running)
    step, loss, held_out, _ = first.splitlines()[-3].split()
    assert step == "2" and "trained on 2 x cpu" in first and "trained" not in other
    np.testing.assert_allclose([float(loss), float(held_out)], alone[1:3], atol=6e-4)
    assert (tmp_path / "processes" / "model.safetensors").stat().st_size > 1e5
    for options, said in (({"batch": 3}, "batch: expected a multiple of 2"), ({"context": 6}, "4")):
        with pytest.raises(ValueError, match=said):
            train.Recipe(mesh=mesh, **options)


_RUN = """
import sys
from pallas_lm.cli import driver
from pallas_lm import train
{}
sys.argv[0] = "run.py"
sys.exit(driver.main(sys.argv))
"""


def _processes(*flags, first=""):
    """Two processes that do as run.py does, with one device each, after the statement `first`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [
        sys.executable,
        "-c",
        _RUN.format(first),
        *flags,
        f"--coordinator={address}",
        "--processes=2",
    ]
    one_device = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    environment = os.environ | {"XLA_FLAGS": one_device, "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"cwd": ROOT, "env": environment, **pipes}
    return [subprocess.Popen([*command, f"--process={n}"], **how) for n in (0, 1)]


def _said(running):
    """Outputs of processes, which all end well."""
    said = [process.communicate(timeout=600) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    return [out for out, _ in said]


def test_a_model_over_devices_completes_as_one_does():
    """A mesh by its flag; log-probabilities are those of the whole vocabulary."""
    how = {"max_new_tokens": 6, "logprobs": True}
    model = lm.load(mesh="tp:2")
    assert model.mesh.shape == {"tp": 2}
    (split,), (alone,) = (lm.complete(each, ["ROMEO:"], **how) for each in (model, lm.load()))
    assert split.tokens == alone.tokens
    np.testing.assert_allclose(split.logprobs, alone.logprobs, atol=1e-4)
    with pytest.raises(ValueError, match="^mesh: expected tp:N, N at least 1, got 'cp:2'"):
        lm.load(mesh="cp:2")


@pytest.mark.by_xla
def test_the_loops_of_a_report_are_split_over_devices(tmp_path):
    """The loop beside ours has the same tokens as on one device."""
    described = witness.CONFIGS["llama2"] | {"vocab_size": 95}
    tensors = witness.tensors_of(described, np.random.default_rng(0))
    folder = witness.write(tmp_path / "llama2", described, tensors)
    drawn = []
    for mesh in (None, lm_mesh.make("tp:2", ("tp",))):
        config, params = checkpoint.load(folder, "float32", mesh)
        how = decode.Options(batch=3, capacity=32, chunk=5, dtype="float32", mesh=mesh)
        subject = decode_loop.Subject("small", config, params, how, 20)
        options = subject.at("stacked", 3)
        assert decode_loop.our_chunk(subject, options)().shape == (5, 3)
        chunk = decode_loop.peer_chunk(subject, options, "xla")
        row = decode_loop.row_of(subject, options, "xla", chunk, 1.0)
        assert row["impl"] == "xla" and row["problem"].get("devices", 1) == len(drawn) + 1
        drawn.append(np.asarray(decode_loop.peer_chunk(subject, options, "xla")()))
    np.testing.assert_array_equal(*drawn)
