"""Lowered kernels on disk (pallas_attn/_call/store.py), without a GPU: keys, damaged files, folders
that cannot be written, transforms. tests/api/test_saved_programs.py runs such kernels on a GPU.
"""

import contextlib
import copy
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import pallas_attn as pa
from pallas_attn import tuning
from pallas_attn._call import config, device, store
from tests.conftest import REAL_GPU
from tests.support import operations
from tests.support.stored_kernels import forget, kept_in, lower

NEW = jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.bfloat16)


@pytest.fixture
def lowered(tmp_path):
    """The kernels that the test lowers, with an empty folder."""
    with kept_in(tmp_path) as kernels:
        yield kernels


def cache_of(capacity=64, layers=None):
    return jax.eval_shape(lambda: pa.StackedCache.create(2, capacity, 2, 64, layers=layers))


def append(capacity=64):
    """A program of one launch, which is quickly lowered."""
    return lower(lambda cache, new: pa.append_kv(cache, new, new), cache_of(capacity), NEW)


def files(folder):
    """Files with a kernel. (Answers of "yes" and "no" have a few bytes.)"""
    every = (path for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return [path for path in every if path.stat().st_size > 100]


# ---- several processes ---------------------------------------------------------------------------


def test_another_process_lowers_nothing(tmp_path):
    """Two that fill a folder side by side, and one after them, which imports no kernel."""
    command = [sys.executable, "-m", "tests.support.stored_kernels", str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}

    def start():
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def row_of(process):
        out, _ = process.communicate()
        assert process.returncode == 0
        return json.loads(out.splitlines()[-1])

    first, beside = map(row_of, [start(), start()])
    later, last = map(row_of, [start(), start()])
    assert later["lowered"] == [] and not later["imported"] and later == last
    lowered = {*first["lowered"], *beside["lowered"]}
    assert len(files(tmp_path)) == len(lowered) == 2


# ---- the key -------------------------------------------------------------------------------------


def test_a_kernel_is_lowered_once(lowered):
    first = append()
    forget()
    assert append() == first and lowered == ["append.copy"]
    assert "mosaic_gpu" in first


CACHES = jax.ShapeDtypeStruct((2, 2, 64, 64), jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Asked:
    """All that the name of a kernel's file depends on."""

    kernel: str = "append.copy"
    problem: Any = operations._BASE["append"]
    inputs: Any = (CACHES, NEW)
    gpu: str = "NVIDIA H200"
    cuda: str = "PJRT 13.0"
    jax: str = "0.12.0"
    jaxlib: str = "0.12.1"
    sources: tuple[tuple[str, str], ...] = (("a.py", "1"), ("kernels/lang/b.py", "2"))
    generation: str = "sm90"
    overlapping: bool = False
    tuned: int | None = None  # the words of a tuned Config
    setting: tuple[str, Any] = ("jax_enable_x64", False)

    def file(self):
        if self.tuned is None:
            return None
        return types.SimpleNamespace(fields_of=lambda kernel, problem: {"words": self.tuned})

    def names(self, folder):
        """Names of the stored files: the lowered kernel, and the answer for a problem. Nothing is
        lowered.
        """
        package, names = folder / hashlib.sha256(repr(self.sources).encode()).hexdigest(), []
        for name, content in self.sources:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(content)
        client = types.SimpleNamespace(platform_version=self.cuda)
        gpu = types.SimpleNamespace(platform="gpu", device_kind=self.gpu, client=client)
        kernel, (setting, value) = (
            types.SimpleNamespace(module=self.kernel, name=self.kernel),
            self.setting,
        )
        before = {x: jax.config.values[x] for x in (setting, "jax_compilation_cache_dir")}
        with contextlib.ExitStack() as stack:
            for place, attribute, new in (
                (store, "_gpu", REAL_GPU),
                (store, "_versions", store._versions.__wrapped__),
                (store, "_PACKAGE", package),
                (store, "_program", lambda path, call: names.append(path)),
                (store, "_read", lambda path: names.append(path)),
                (store, "_write", lambda path, content: None),
                (device, "current", lambda: gpu),
                (jax, "__version__", self.jax),
                (importlib.metadata, "version", lambda name: self.jaxlib),
            ):
                stack.enter_context(mock.patch.object(place, attribute, new))
            stack.enter_context(device.assume(self.generation))
            stack.enter_context(
                device.overlapping() if self.overlapping else contextlib.nullcontext()
            )
            stack.callback(config.tuned.reset, config.tuned.set(self.file()))
            for name, new in {"jax_compilation_cache_dir": str(folder), setting: value}.items():
                stack.callback(jax.config.update, name, before[name])
                jax.config.update(name, new)
            store.results(kernel, self.inputs, self.problem)
            store.answer(kernel, self.problem, lambda problem: True)
        return names


BASE = Asked()
# The parts of the key, and another value of each.
KEY = {
    "kernel": {"kernel": "append.keep"},
    "problem": {"problem": dataclasses.replace(BASE.problem, new_rows=2)},
    "gpu": {"gpu": "NVIDIA H100"},
    "cuda": {"cuda": "PJRT 12.9"},
    "jax": {"jax": "0.12.1"},
    "jaxlib": {"jaxlib": "0.12.0"},
    "source": {"sources": (("a.py", "3"), BASE.sources[1])},
    "source in a folder": {"sources": (BASE.sources[0], ("kernels/lang/b.py", "3"))},
    "name of a source": {"sources": (BASE.sources[0], ("kernels/lang/c.py", "2"))},
    "folder of a source": {"sources": (BASE.sources[0], ("kernels/mma/b.py", "2"))},
    "shape": {"inputs": (CACHES, NEW.update(shape=(2, 1, 2, 72)))},
    "dtype": {"inputs": (CACHES, NEW.update(dtype=jnp.float16))},
    "structure": {"inputs": [CACHES, NEW]},
    "generation": {"generation": "sm80"},
    "overlapping": {"overlapping": True},
    "tuned": {"tuned": 4},
    "x64": {"setting": ("jax_enable_x64", True)},
    "precision": {"setting": ("jax_default_matmul_precision", "highest")},
    "dtypes": {"setting": ("jax_numpy_dtype_promotion", "standard")},
    "ranks": {"setting": ("jax_numpy_rank_promotion", "allow")},
    "mosaic": {"setting": ("jax_pallas_enable_debug_checks", True)},
}
KERNEL_ALONE = {*list(KEY)[list(KEY).index("shape") :]}  # the answer depends on no more


@pytest.mark.parametrize("part", KEY)
def test_another_value_of_a_part_of_the_key_is_another_kernel(part, tmp_path):
    names = BASE.names(tmp_path)
    assert names == BASE.names(tmp_path) and len(set(names)) == 2
    kernel, answer = dataclasses.replace(BASE, **KEY[part]).names(tmp_path)
    assert kernel not in names and (answer in names) == (part in KERNEL_ALONE)


@pytest.mark.parametrize("operation", operations._BASE)
def test_every_field_of_a_problem_is_in_its_text(operation):
    problem = operations._BASE[operation]
    for field in dataclasses.fields(problem):
        other = copy.copy(problem)
        object.__setattr__(other, field.name, "another")
        assert (store._text(other) != store._text(problem)) == field.compare, field.name


def test_layers_share_a_kernel(lowered):
    """Each has a number of its own."""

    def step(cache, new):
        for layer in range(3):
            cache = pa.write_kv(cache, new, new, layer=layer)
        return cache

    text = lower(step, cache_of(layers=3), NEW)
    assert lowered == ["append.copy"] and text.count("@mosaic_gpu") == 1


def test_functions_of_positions_are_told_apart(lowered):
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)

    def masked(number):
        function = pa.mask_fn(lambda b, h, q, k: (q - k) % number == 0)
        return lower(lambda q: pa.flash_attention(q, q, q, mask=function), q)

    three, five = masked(3), masked(5)
    forget()
    assert masked(3) == three != five == masked(5) and len(lowered) == 2


def test_values_without_a_text_are_not_kept():
    program = pa.CAUSAL, 1, 0.5, float("nan"), "x", None, (True, -1), np.dtype("int32")
    assert store._text(program) == store._text(program)
    assert store._text((1, True, 1.0, "1")) == "tuple(1,True,0x1.0000000000000p+0,'1')"
    assert store._text(pa.CAUSAL) != store._text(pa.FULL)
    for value in (lambda: 0, object(), np.zeros(2), {1, 2}):
        with pytest.raises(TypeError, match="has no text"):
            store._text((1, value))


def test_a_problem_without_a_text_is_traced(lowered, monkeypatch, tmp_path):
    text = store._text

    def refuse(value):
        if value[0] == "append.copy":
            raise TypeError
        return text(value)

    monkeypatch.setattr(store, "_text", refuse)
    assert "mosaic_gpu" in append() and lowered == [] and files(tmp_path) == []


# ---- calls that are not kept ---------------------------------------------------------------------


def test_a_forced_config_is_not_kept(lowered, tmp_path):
    with config.watched() as choices:
        append()
    (choice,) = choices
    with config.forced("append_copy", dataclasses.asdict(choice.config)):
        append()
    assert lowered == [] and files(tmp_path) == []


def test_every_process_says_that_a_tuned_config_is_refused(lowered, tmp_path):
    with config.watched() as choices:
        append()
    kernel, problem, _ = choices[0]
    path = tmp_path / "tuned.json"
    for words in (0, 1):
        tuning.write(path, tuning.key_of(kernel, problem), {"config": {"words": words}})
        for _ in range(2):
            forget()
            refused = pytest.warns(UserWarning, match=f"{path}: a tuned Config of append_copy")
            with pa.tuned(path), contextlib.nullcontext() if words else refused:
                append()
    assert lowered == ["append.copy"] * 3 and len(files(tmp_path)) == 2


def nothing_kept(folder):
    with kept_in(folder) as lowered:
        assert "mosaic_gpu" in append()
        return lowered == []


def test_nothing_is_kept_without_a_persistent_cache(tmp_path):
    assert nothing_kept(None)
    assert nothing_kept("gs://bucket/folder")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert nothing_kept(tmp_path)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_kept_where_mosaic_is_to_print(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    assert nothing_kept(tmp_path) and list(tmp_path.iterdir()) == []


def test_nothing_is_kept_without_a_gpu(lowered, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "_gpu", lambda: None)
    append()
    assert lowered == [] and list(tmp_path.iterdir()) == []


def test_what_jax_does_not_export_is_traced(lowered, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise ValueError("no")

    monkeypatch.setattr(jax.export, "export", refuse)
    assert "mosaic_gpu" in append()
    jax.clear_caches()
    append()
    assert lowered == ["append.copy"] and files(tmp_path) == []


# ---- files ---------------------------------------------------------------------------------------

DAMAGES = {
    "truncated": lambda content: content[:-100],
    "empty": lambda content: b"",
    "changed": lambda content: content[:4000] + bytes([content[4000] ^ 1]) + content[4001:],
    "another": lambda content: store._DIGEST(b"no program").digest() + b"no program",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_written_anew(lowered, tmp_path, damage):
    append()
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(DAMAGES[damage](content))
    forget()
    text = append()
    assert lowered == ["append.copy"] * 2 and store._read(path) is not None
    forget()
    assert append() == text and len(lowered) == 2


def test_a_damaged_answer_is_asked_again(lowered, tmp_path):
    append()
    (path,) = {path for path in tmp_path.rglob("*") if path.is_file()} - set(files(tmp_path))
    content = path.read_bytes()
    for damaged in (b"", store._DIGEST(b"maybe").digest() + b"maybe"):
        path.write_bytes(damaged)
        forget()
        append()
        assert path.read_bytes() == content


def test_files_of_other_users_are_not_read(lowered, tmp_path, monkeypatch):
    """They are pickles. The folders are closed to others."""
    append()
    with monkeypatch.context() as patch:
        patch.setattr(store, "_trusted_users", lambda: (os.geteuid() + 1,))
        forget()
        text = append()
    assert lowered == ["append.copy"] * 2
    forget()
    assert append() == text and len(lowered) == 2
    closed = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(closed) == 2 and all(path.stat().st_mode & 0o077 == 0 for path in closed)


def test_a_program_that_jax_cannot_save_is_run(lowered, monkeypatch, tmp_path):
    def refuse(_):
        raise TypeError("cannot pickle")

    monkeypatch.setattr(store, "_saved", refuse)
    assert "mosaic_gpu" in append() and lowered == ["append.copy"] and files(tmp_path) == []


def test_a_package_without_sources_keeps_nothing(lowered, monkeypatch, tmp_path):
    """In a zip, say. A lock file of an editor, a link to nowhere, is no source."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(store, "_PACKAGE", folder)
    (folder / ".#a.py").symlink_to("user@host.1")
    assert store._versions.__wrapped__() is None
    (folder / "a.py").write_text("")
    assert store._versions.__wrapped__() is not None
    (folder / "b.py").symlink_to("nowhere")
    assert store._versions.__wrapped__() is None
    monkeypatch.setattr(store, "_versions", lambda: None)
    append()
    assert lowered == [] and not (tmp_path / store.FOLDER).exists()


def test_a_kernel_whose_compiler_has_moved_is_lowered_anew(lowered, tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.touch()
    monkeypatch.setenv("MOSAIC_GPU_TEST_PATH", str(library))
    append()
    library.unlink()
    monkeypatch.delenv("MOSAIC_GPU_TEST_PATH")
    forget()
    append()
    assert lowered == ["append.copy"] * 2


def test_the_compiler_is_named_as_by_mosaic(lowered, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_TEST_PATH", str(tmp_path))
    append()
    monkeypatch.delenv("MOSAIC_GPU_TEST_PATH")
    forget()
    append()
    assert os.environ.pop("MOSAIC_GPU_TEST_PATH") == str(tmp_path) and len(lowered) == 1


def test_a_folder_that_cannot_be_written_costs_one_warning(lowered, tmp_path):
    (tmp_path / store.FOLDER).write_text("a file")
    store._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="lowered kernels are not kept in") as warned:
        append()
        forget()
        append()
    assert len(warned) == 1 and lowered == ["append.copy"] * 2


# ---- under transforms ----------------------------------------------------------------------------


def test_a_donated_cache_is_written_in_place(lowered):
    text = lower(lambda c, x: pa.append_kv(c, x, x), cache_of(), NEW, donate=(0,))
    assert lowered and text.count("tf.aliasing_output") + text.count("jax.buffer_donor") >= 2
    assert text.count("output_operand_aliases") == 1


def test_devices_of_a_mesh_share_a_kernel(lowered):
    """Within shard_map, over explicit axes, under vmap, in a loop."""

    def rounded(x):
        return pa.quantize_qkv(x, x, x)[0]

    x = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)
    split = PartitionSpec("x")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    lower(jax.shard_map(rounded, mesh=mesh, in_specs=split, out_specs=split), x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        there = jax.sharding.NamedSharding(mesh, split)
        lower(rounded, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there))
    half = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    lower(rounded, half)
    lower(lambda x: jax.lax.scan(lambda c, _: (c, rounded(x)), 0, length=3)[1], half)
    assert lowered == ["quantize.blocks"]
    lower(jax.vmap(rounded), jax.ShapeDtypeStruct((2, 1, 64, 2, 64), jnp.bfloat16))
    assert lowered == ["quantize.blocks"] * 2  # two batch rows
