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
NEW = OWN | {"words": 4}
TIMES = {"microseconds": 8.0, "default_microseconds": 10.0}


def written(folder, fields=NEW, problem=PROBLEM, kernel="append_copy", **key):
    """A file with a Config."""
    path = folder / "made" / "tuned.json"
    names = dict(zip(tuning._KEY, tuning.key_of(kernel, problem), strict=True)) | key
    tuning.write(path, tuple(names.values()), {"config": fields} | TIMES)
    return path


def chosen(problem=PROBLEM):
    """The Config that append runs with, and the warnings."""
    kernel = dispatch.TABLES["append"][0]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        config = _config.choose(kernel.name, kernel.kernel, problem)
    return dataclasses.asdict(config), [str(x.message) for x in warned]


# ---- the file ------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    path, key = written(tmp_path), tuning.key_of("append_copy", PROBLEM)
    written(tmp_path, {"words": 1}, gpu="NVIDIA H20")
    other = ("NVIDIA H20", *key[1:])
    configs = {name: x["config"] for name, x in tuning.read(path).entries.items()}
    assert configs == {key: NEW, other: {"words": 1}}
    tuning.write(path, other, None)
    (entry,) = tuning.read(path).entries.values()
    assert entry == dict(zip(tuning._KEY, key, strict=True)) | {"config": NEW} | TIMES
    assert [x.name for x in path.parent.iterdir()] == ["tuned.json"]


def test_what_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    path = written(tmp_path)
    before = path.read_bytes()

    def refuse(*some):
        raise OSError

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError):
        written(tmp_path, {"words": 1})
    assert path.read_bytes() == before and len([*path.parent.iterdir()]) == 1


def test_files_of_the_same_content_are_one_key(tmp_path):
    first, other = (tuning.read(written(tmp_path / x)) for x in "ab")
    assert first == other and hash(first) == hash(other)
    assert first != tuning.read(written(tmp_path / "c", {"words": 1}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSONDecodeError: Expecting value"),
        ("[]", "TypeError: "),
        ('{"format": 1}', "KeyError: 'entries'"),
        ('{"format": 2, "entries": []}', "format 1 is known, not 2"),
        ('{"format": 1, "entries": [7]}', "TypeError: "),
        ('{"format": 1, "entries": [{"gpu": "H20"}]}', "KeyError: 'pallas_attn'"),
        ('"config": 7', "a config of it has no names of fields"),
        ("\xff", "'utf-8' codec can't decode"),
        (None, "No such file or directory"),
    ],
)
def test_another_file_is_refused(tmp_path, text, why):
    path = written(tmp_path, 7)
    if text is None:
        path.unlink()
    elif not text.startswith('"config"'):
        path.write_text(text, encoding="latin-1")
    with (
        pytest.raises(ValueError, match=f"(?s)^path: expected a file of .*, got {path}: .*{why}"),
        pa.tuned(path),
    ):
        raise AssertionError


def test_the_file_lies_beside_the_lowered_kernels(tmp_path):
    with kept_in(tmp_path):
        place = tuning.default_file()
        assert place == tmp_path / store.FOLDER / "tuned.json"
        place.parent.mkdir()
        written(tmp_path).rename(place)
        with pa.tuned():
            assert chosen() == (NEW, [])
    with (
        kept_in(None),
        pytest.raises(ValueError, match="no persistent cache on disk"),
        pa.tuned(),
    ):
        raise AssertionError


# ---- a block ------------------------------------------------------------------------------------


def test_kernels_run_with_it_where_they_are_told_to(tmp_path):
    path, other = written(tmp_path, {"words": 4}), dataclasses.replace(PROBLEM, sequences=9)
    assert chosen() == (OWN, [])
    with pa.tuned(path):
        path.unlink()
        assert chosen() == (NEW, [])
        assert chosen(other) == (OWN, [])
        with _config.forced("append_copy", {"words": 1}):
            assert chosen() == (OWN | {"words": 1}, [])
    assert chosen() == (OWN, [])


@pytest.mark.parametrize("name", tuning._KEY)
def test_another_key_is_another_entry(tmp_path, name):
    with pa.tuned(written(tmp_path, **{name: "another"})):
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
    path = written(tmp_path, fields)
    with pa.tuned(path):
        config, warned = chosen()
        assert config == OWN and chosen() == (OWN, [])
    (said,) = warned
    assert said.startswith(f"{path}: a tuned Config of append_copy is ignored: ") and why in said


def test_a_config_without_room_is_ignored(tmp_path):
    problem = operations._BASE["flash_forward"]
    kernel = next(x for x in dispatch.TABLES["flash_forward"] if x.name == "flash_fwd_sm90")
    said = r"tuned\.json: .* flash_fwd_sm90 .* it refuses Config"
    with (
        pa.tuned(written(tmp_path, {"stages": 40}, problem, kernel.name)),
        pytest.warns(UserWarning, match=said),
    ):
        own = kernel.kernel.config.default(problem)
        assert _config.choose(kernel.name, kernel.kernel, problem) == own


def test_bits_that_may_not_depend_on_the_batch_do_not(tmp_path):
    problem = dataclasses.replace(operations._BASE["decode"], batch_invariant=True)
    with pa.tuned(written(tmp_path, {"stages": 2}, problem, "decode_sm90")):
        assert _config.tuned.get().fields_of("decode_sm90", problem) is None


def attend():
    q = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
    return pa.flash_attention(q, q, q)


def test_a_program_is_that_of_the_file(tmp_path):
    """One function is traced anew in a block, and where the content is another; its own Config is
    back after it.
    """
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def lowered(path):
        """On one line, which is in the program, too."""
        with contextlib.nullcontext() if path is None else pa.tuned(path):
            return lower(lambda q: pa.flash_attention(q, q, q), q)

    with kept_in(None):
        (choice,) = tuning.choices(attend)
        paths = [None]
        for fields in tuning.singles(choice)[:2]:
            folder = tmp_path / str(len(paths))
            paths.append(written(folder, fields, choice.problem, choice.kernel))
        assert len({lowered(path) for path in paths}) == 3
        assert tuning.choices(attend) == [choice]


# ---- the search ----------------------------------------------------------------------------------

OTHERS = ("flash_jvp", "prefill.gathered_packed")  # their rows do not say their problems
CALLS = {
    row.module: (row, case)
    for row in kernels.KERNELS
    for case, _ in row.ends.values()
    if not row.module.startswith(OTHERS)
}


def choice_of(module):
    row, case = CALLS[module]
    problem = kernels.problem_of(row, case)
    return row.kernel, Choice(row.candidate.name, problem, _config.default(row.kernel, problem))


@pytest.mark.parametrize("module", CALLS)
def test_a_search_tries_what_the_kernel_takes(module):
    """Each Config once, none of them the kernel's own."""
    kernel, choice = choice_of(module)
    singles = tuning.singles(choice)
    assert singles or not tuning._VALUES.keys() & tuning._flat(choice.config).keys()
    best = [*{next(iter(fields)): fields for fields in singles}.values()]
    tried = json.loads(json.dumps(singles + tuning.pairs(choice, best)))
    configs = [tuning.changed(choice.config, fields) for fields in tried]
    assert len({choice.config, *configs}) == len(configs) + 1
    assert all(_config.fits(kernel, choice.problem, config) for config in configs)
    leaves = [x for x in vars(choice.config).values() if not dataclasses.is_dataclass(x)]
    inner = [x for x in vars(choice.config).values() if dataclasses.is_dataclass(x)]
    names = len(leaves) + sum(len(vars(x)) for x in inner)
    assert len(tuning._flat(choice.config)) == names  # a name means one field


def test_a_config_within_a_config_varies():
    _, choice = choice_of("prefill.contiguous_sm90")
    assert {"splits": 4} in tuning.singles(choice)
    config = tuning.changed(choice.config, {"splits": 4})
    inner = dataclasses.replace(choice.config.prefill, splits=4)
    assert config == dataclasses.replace(choice.config, prefill=inner) != choice.config


def test_larger_tiles_have_fewer_stages_and_pairs_the_most():
    _, choice = choice_of("prefill.sm90")
    assert (choice.config.warpgroups, choice.config.stages) == (1, 6)
    large, grid = {"warpgroups": 2, "stages": 5}, {"grid": 114}
    assert large in tuning.singles(choice) and {"warpgroups": 2} not in tuning.singles(choice)
    assert tuning.pairs(choice, [large, grid]) == [large | grid]
    small = {"block_kv": 64}
    assert tuning.pairs(choice, [small]) == [small | {"stages": 8}]


def test_choices_are_those_of_a_generation():
    names = [tuning.choices(attend, generation=x)[0].kernel for x in ("sm90", "sm80", "sm90")]
    assert names == ["flash_fwd_sm90", "flash_fwd_sm80", "flash_fwd_sm90"]
    assert device.gpu_generation() != "sm80"
