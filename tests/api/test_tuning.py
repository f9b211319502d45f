"""Tuned Configs (pallas_attn/tuning.py): the file, who reads it, and what a search may try."""

import contextlib
import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn import tuning
from pallas_attn._call import config as _config
from pallas_attn._call import device, dispatch, store
from pallas_attn._call.config import Choice
from tests.support import kernels, operations
from tests.support.stored_kernels import kept_in, lower

PROBLEM = operations._BASE["append"]
OWN = {"words": 2, "overlaps": False}


def entry(problem=PROBLEM, kernel="append_copy", **fields):
    gpu, version, _, text = tuning.key_of(kernel, problem)
    times = {"microseconds": 8.0, "default_microseconds": 10.0}
    made = tuning.Entry(gpu, version, kernel, text, OWN | {"words": 4}, **times)
    return dataclasses.replace(made, **fields)


def written(folder, *entries):
    path = folder / "made" / "tuned.json"
    tuning.write(path, {x.key: x for x in entries})
    return path


def chosen(problem=PROBLEM):
    """The Config that append runs with, and the warnings."""
    kernel = dispatch.TABLES["append"][0]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config = _config.choose(kernel.name, kernel.kernel, problem)
    return dataclasses.asdict(config), [str(x.message) for x in warned]


@pytest.fixture(autouse=True)
def no_warning_was_given():
    tuning._warn_once.cache_clear()


# ---- the file ------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    path, other = written(tmp_path, entry()), entry(gpu="NVIDIA H20")
    tuning.write(path, {other.key: other})
    assert {*tuning.read(path).entries} == {entry().key, other.key}
    assert tuning.read(path).entries[other.key] == other
    changed = entry(microseconds=7.0)
    tuning.write(path, {changed.key: changed, other.key: None})
    assert dict(tuning.read(path).entries) == {changed.key: changed}
    assert [x.name for x in path.parent.iterdir()] == ["tuned.json"]


def test_files_of_the_same_content_are_one_key(tmp_path):
    first, other = (tuning.read(written(tmp_path / x, entry())) for x in "ab")
    assert first == other and hash(first) == hash(other)
    assert first != tuning.read(written(tmp_path / "c", entry(microseconds=7.0)))


def content(**changes):
    return json.dumps({"format": 1, "entries": [vars(entry()) | changes]})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", 'it is no object of "format" and "entries"'),
        ('{"format": 1, "entries": [], "more": 1}', 'it is no object of "format" and "entries"'),
        ('{"format": 2, "entries": []}', "format 1 is known, not 2"),
        ('{"format": 1, "entries": [7]}', "an entry has .*, not 7"),
        ("an unknown field", "an entry has .*, not .*'unknown'"),
        ("a config that is none", "config of an entry is 7"),
        ("\xff", "'utf-8' codec can't decode"),
    ],
)
def test_another_file_is_refused(tmp_path, text, why):
    path = tmp_path / "other.json"
    text = {"an unknown field": content(unknown=1), "a config that is none": content(config=7)}.get(
        text, text
    )
    path.write_text(text, encoding="latin-1")
    with (
        pytest.raises(ValueError, match=f"(?s)^path: expected a file of .*, got {path}: .*{why}"),
        pa.tuned(path),
    ):
        raise AssertionError


def test_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no.json: No such file or directory"):
        tuning.read(tmp_path / "no.json")
    with (
        kept_in(None),
        pytest.raises(ValueError, match="no persistent cache on disk"),
        pa.tuned(),
    ):
        raise AssertionError


def test_the_file_lies_beside_the_lowered_kernels(tmp_path):
    with kept_in(tmp_path):
        assert tuning.default_file() == tmp_path / store.FOLDER / "tuned.json"
        tuning.write(tuning.default_file(), {entry().key: entry()})
        with pa.tuned():
            assert chosen() == (OWN | {"words": 4}, [])


# ---- a block ------------------------------------------------------------------------------------


def test_kernels_run_with_it_where_they_are_told_to(tmp_path):
    path, other = written(tmp_path, entry()), dataclasses.replace(PROBLEM, sequences=9)
    assert chosen() == (OWN, [])
    with pa.tuned(path):
        path.unlink()
        assert chosen() == (OWN | {"words": 4}, [])
        assert chosen(other) == (OWN, [])
        with _config.forced("append_copy", {"words": 1}):
            assert chosen() == (OWN | {"words": 1}, [])
    assert chosen() == (OWN, [])


@pytest.mark.parametrize("field", ["gpu", "pallas_attn", "kernel", "problem"])
def test_another_key_is_another_entry(tmp_path, field):
    with pa.tuned(written(tmp_path, entry(**{field: "another"}))):
        assert chosen() == (OWN, [])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"words": 0}, "Config.words must be 1 to "),
        ({"words": True}, "Config.words cannot be True"),
        ({"speed": 1}, "its Config has no field 'speed', but ['overlaps', 'words']"),
    ],
)
def test_what_a_kernel_refuses_is_ignored_with_one_warning(tmp_path, fields, why):
    path = written(tmp_path, entry(config=fields))
    with pa.tuned(path):
        config, warned = chosen()
        assert config == OWN and chosen() == (OWN, [])
    (said,) = warned
    assert said.startswith(f"{path}: a tuned Config of append_copy is ignored: ") and why in said


def test_a_config_without_room_is_ignored(tmp_path):
    problem = operations._BASE["flash_forward"]
    kernel = next(x for x in dispatch.TABLES["flash_forward"] if x.name == "flash_fwd_sm90")
    own = kernel.kernel.config.default(problem)
    large = dataclasses.asdict(dataclasses.replace(own, stages=40))
    said = r"tuned\.json: .* flash_fwd_sm90 .* it refuses Config"
    with (
        pa.tuned(written(tmp_path, entry(problem, kernel.name, config=large))),
        pytest.warns(UserWarning, match=said),
    ):
        assert _config.choose(kernel.name, kernel.kernel, problem) == own


def test_bits_that_may_not_depend_on_the_batch_do_not(tmp_path):
    problem = dataclasses.replace(operations._BASE["decode"], batch_invariant=True)
    with pa.tuned(written(tmp_path, entry(problem, "decode_sm90", config={"stages": 2}))):
        assert _config.tuned.get().fields_of("decode_sm90", problem) is None


def test_a_program_is_that_of_the_file(tmp_path):
    """One function is traced anew in a block, and where the content is another; its own Config is
    back after it.
    """
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def attend(path):
        """On one line, which is in the program, too."""
        with contextlib.nullcontext() if path is None else pa.tuned(path):
            return lower(lambda q: pa.flash_attention(q, q, q), q)

    with kept_in(None):
        (choice,) = tuning.choices(lambda q: pa.flash_attention(q, q, q), q)
        paths = [None]
        for config in tuning.around(choice, choice.config, tuning.TILES)[:2]:
            made = entry(choice.problem, choice.kernel, config=dataclasses.asdict(config))
            paths.append(written(tmp_path / str(len(paths)), made))
        assert len({attend(path) for path in paths}) == 3
        assert tuning.choices(lambda q: pa.flash_attention(q, q, q), q) == [choice]


# ---- the search ----------------------------------------------------------------------------------

OTHERS = ("flash_jvp", "prefill.gathered_packed")  # their rows do not say their problems
CALLS = {
    row.module: (row, case)
    for row in kernels.KERNELS
    for case, _ in row.ends.values()
    if not row.module.startswith(OTHERS)
}


@pytest.mark.parametrize("module", CALLS)
def test_a_search_tries_what_the_kernel_takes(module):
    """Each Config once, none of them the kernel's own, in a single part."""
    row, case = CALLS[module]
    problem = kernels.problem_of(row, case)
    own = _config.default(row.kernel, problem)
    choice = Choice(row.candidate.name, problem, own)
    assert tuning.parts(choice) or not dataclasses.fields(own)
    for part in tuning.parts(choice):
        tried = tuning.around(choice, own, part)
        assert len({own, *tried}) == len(tried) + 1
        assert all(_config.fits(row.kernel, problem, config) for config in tried)
        for config in tried:
            fields = json.loads(json.dumps(dataclasses.asdict(config)))
            assert tuning.changed(own, fields) == config


def test_a_config_within_a_config_varies():
    row, case = CALLS["prefill.contiguous_sm90"]
    problem = kernels.problem_of(row, case)
    own = _config.default(row.kernel, problem)
    tried = tuning.around(Choice(row.candidate.name, problem, own), own, "splits")
    assert tried and {x.prefill.splits for x in tried} <= {1, 2, 4, 8} - {own.prefill.splits}


def test_choices_are_those_of_a_generation():
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def attend(q):
        return pa.flash_attention(q, q, q)

    names = [tuning.choices(attend, q, generation=x)[0].kernel for x in ("sm90", "sm80", "sm90")]
    assert names == ["flash_fwd_sm90", "flash_fwd_sm80", "flash_fwd_sm90"]
    assert device.gpu_generation() != "sm80"
