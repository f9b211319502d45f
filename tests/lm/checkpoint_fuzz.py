"""Mutations of good checkpoints: each is read, or refused in one line that names its file.

JAX_PLATFORMS=cpu python -m tests.lm.checkpoint_fuzz [COUNT [SEED]]
"""

import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_lm import checkpoint, hf_config, model, text
from pallas_lm import config as lm_config
from pallas_lm.folder import Folder
from tests.lm import witness

_SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 3,
          "tokenizer": "bytes"}  # fmt: skip
_VALUES = (None, True, False, 0, 1, -1, 2, 3, 4, 7, 8, 16, 24, 32, 2**31, 2**63, 10**9, 10**30, 0.5,
           8.5, -0.0, 1e-39, 1e39, 1e308, math.nan, math.inf, -math.inf, "", "false", "F16", "BF16",
           "I32", "F8_E4M3", "default", "yarn", "../x", "/dev/zero", "\0", "\ud800", "x" * 5000,
           [], [0], [-1, 4], [0, 2**63], [2**40, 2**40], [[[]]], {},
           {"a": {"b": None}})  # fmt: skip
_JSON = ("config.json", "generation_config.json", "model.safetensors.index.json")
_logits = jax.jit(model.forward, static_argnums=0)


def split(content):
    """The header of a *.safetensors file and what follows it."""
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def joined(header, data):
    """The other way round."""
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + data


def good(folder):
    """Three folders that are well."""
    rng = np.random.default_rng(0)
    for name, family, shards in (("one", "llama3", 1), ("many", "qwen3", 3)):
        config = witness.CONFIGS[family] | _SIZES
        tensors = witness.tensors_of(config, rng)
        made = witness.write(folder / name, config, tensors, shards, jnp.bfloat16)
        (made / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    config = witness.CONFIGS["qwen2"] | _SIZES
    params = lm_config.random_params(hf_config.config_from(config), 0, "bfloat16")
    checkpoint.save(folder / "ours", config, params)
    return [folder / name for name in ("one", "many", "ours")]


def _change(rng, tree):
    """One place of a tree of JSON, changed."""
    while True:
        places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not places:
            return
        at = places[rng.integers(len(places))]
        inner = tree[at]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
            tree = inner
            continue
        how = rng.integers(4)
        if how == 0:
            del tree[at]
        elif how == 1 and isinstance(tree, dict):
            tree[str(_VALUES[rng.integers(len(_VALUES))])[:20]] = tree.pop(at)
        elif how == 2 and isinstance(inner, int):
            tree[at] = inner + int(rng.integers(-3, 4))
        else:
            tree[at] = _VALUES[rng.integers(len(_VALUES))]
        return


def _bytes(rng, content, end):
    """Some bytes before `end` changed, left out, put in, or everything behind one cut off."""
    at = int(rng.integers(max(min(end, len(content)), 1)))
    noise = rng.integers(0, 256, rng.integers(1, 9), np.uint8).tobytes()
    how = rng.integers(4)
    if how == 0:
        return content[:at] + noise + content[at + len(noise) :]
    if how == 1:
        return content[:at] + noise + content[at:]
    return content[:at] + content[at + len(noise) :] if how == 2 else content[:at]


def _kind(rng, path):
    """Something else in place of a file."""
    path.unlink()
    how = rng.integers(4)
    if how == 0:
        path.mkdir()
    elif how == 1:
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if how == 2 else "/etc/hostname")


def mutate(rng, folder):
    """One or two changes of a folder."""
    for _ in range(rng.integers(1, 3)):
        files = sorted(path for path in folder.iterdir() if path.is_file())
        path = files[rng.integers(len(files))]
        content, how = path.read_bytes(), rng.random()
        if how < 0.05:
            _kind(rng, path)
        elif how < 0.35:
            path.write_bytes(_bytes(rng, content, 2000))
        elif path.name in _JSON or path.suffix == ".safetensors":
            try:
                header, data = (
                    split(content) if path.suffix[1] == "s" else (json.loads(content), b"")
                )
                _change(rng, header)
            except (ValueError, AttributeError, TypeError):
                continue  # it was changed before
            path.write_bytes(joined(header, data) if data else json.dumps(header).encode())
        else:
            path.write_bytes(_bytes(rng, content, len(content)))


def _read(folder, plain):
    """Reads a folder; an AssertionError says what is wrong with what was read."""
    config, params = checkpoint.load(folder, "float32")
    assert all(0 <= token < 2**31 for token in hf_config.stop_tokens(Folder(folder)))
    assert isinstance(text.tokenizer_of(folder), text.Bytes)
    assert jax.tree.map(jnp.shape, params) == config.shapes()
    assert np.isfinite(config.rope.frequencies(config.head_dim)).all()
    if config == plain:  # a program of its own for each of the others would take too long
        tokens = jnp.arange(8, dtype=jnp.int32)[None]
        assert np.isfinite(_logits(config, params, tokens)).all() or _huge(params)


def _huge(params):
    """Whether a changed byte made a weight so large that the logits of no model would be finite."""
    return any(np.abs(x).max() > 1e9 for x in jax.tree.leaves(params))


def run(folder, count, seed):
    """Tries `count` mutations; how many were refused."""
    rng, refused = np.random.default_rng(seed), 0
    folders = good(folder)
    plain = [checkpoint.config_of(path) for path in folders]
    for n in range(count):
        which, path = n % len(folders), folder / "mutated"
        shutil.copytree(folders[which], path)
        mutate(rng, path)
        start = time.perf_counter()
        try:
            _read(path, plain[which])
        except ValueError as error:
            line = str(error)
            refused += 1
            assert line.startswith(str(path)), f"mutation {n} of seed {seed}: {line}"
            assert line.isprintable() and len(line) < 700, f"mutation {n} of seed {seed}: {line}"
        except BaseException:
            sys.stderr.write(f"mutation {n} of seed {seed}\n")
            raise
        assert time.perf_counter() - start < 20, f"mutation {n} of seed {seed} takes long"
        shutil.rmtree(path)
    return refused


if __name__ == "__main__":
    _count, _seed = map(int, (sys.argv[1:] + ["2000", "0"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as _folder:
        _refused = run(pathlib.Path(_folder), _count, _seed)
    sys.stdout.write(f"{_count} mutations of seed {_seed}: {_refused} refused\n")
