"""The parts of a release: files of wheel and source distribution, notes, workflows."""

import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import pallas_attn as pa
from tests.support import distribution

WHEEL = "pallas_attn-1-py3-none-any.whl"
SOURCE = "pallas_attn-1.tar.gz"
IN_WHEEL = {*distribution.modules(), "pallas_attn/py.typed", "pallas_lm/py.typed"}
IN_WHEEL |= {"pallas_lm/tiny/model.safetensors", "pallas_attn-1.dist-info/METADATA"}


def archive(folder, name, files):
    """An archive with these files, {name: bytes}."""
    path = folder / name
    if name == WHEEL:
        with zipfile.ZipFile(path, "w") as wheel:
            for file, size in files.items():
                wheel.writestr(file, bytes(size))
        return path
    with tarfile.open(path, "w:gz") as source:
        for file, size in files.items():
            (folder / "bytes").write_bytes(bytes(size))
            source.add(folder / "bytes", f"pallas_attn-1/{file}")
    return path


@pytest.mark.parametrize("name", [WHEEL, SOURCE])
def test_files_that_are_missing_or_too_large_are_seen(name, tmp_path):
    files = dict.fromkeys(IN_WHEEL | (set(distribution.IN_SOURCE) if name == SOURCE else set()), 1)
    assert not distribution.faults(archive(tmp_path, name, files))
    del files["pallas_attn/masks.py"]
    files["pallas_attn/cache.py"] = 1_000_001
    files["pallas_lm/tiny/model.safetensors"] = 4_000_001
    assert distribution.faults(archive(tmp_path, name, files)) == [
        f"{name}: pallas_attn/cache.py has 1000001 bytes",
        f"{name}: pallas_attn/masks.py is not in it",
        f"{name}: pallas_lm/tiny/model.safetensors has 4000001 bytes",
    ]


def test_a_wheel_has_the_packages_alone(tmp_path):
    more = ("benchmarks/pages.py", "results/forward_h200.jsonl", "tests/conftest.py")
    path = archive(tmp_path, WHEEL, dict.fromkeys((*IN_WHEEL, *more), 1))
    assert distribution.faults(path) == [f"{WHEEL}: {name} is no part of it" for name in more]


def test_source_without_tests_is_refused(tmp_path):
    path = archive(tmp_path, SOURCE, dict.fromkeys(IN_WHEEL, 1))
    wanted = {f"{SOURCE}: {name} is not in it" for name in distribution.IN_SOURCE}
    assert set(distribution.faults(path)) == wanted


def test_ci_checks_both():
    text = (distribution.ROOT / ".ci" / "run").read_text()
    assert "python -m tests.support.distribution" in text


# ---- notes ---------------------------------------------------------------------------------------

_CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added

- A thing ([how](docs/recipes.md#how), [where](#there), [who](https://example.org)).

## [0.1.0] - 2026-11-27

First.
"""
SCRIPT = distribution.ROOT / ".ci" / "release_notes.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("release_notes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notes_are_one_version_of_the_changelog(script):
    assert script.notes(_CHANGELOG, "0.1.0") == "First.\n"
    assert script.notes(_CHANGELOG, "0.2.0", "x/") == (
        "### Added\n\n- A thing ([how](x/docs/recipes.md#how), [where](#there), "
        "[who](https://example.org)).\n"
    )


@pytest.mark.parametrize("version", ["Unreleased", "0.3.0", "0.1"])
def test_a_version_without_notes_is_refused(script, version):
    with pytest.raises(ValueError, match=rf"^CHANGELOG.md: expected notes below ## \[{version}\]"):
        script.notes(_CHANGELOG, version)


def test_the_tag_is_the_version(script):
    changelog = (distribution.ROOT / "CHANGELOG.md").read_text()
    texts, written = [], script.notes(changelog, pa.__version__)
    for tag in (f"v{pa.__version__}", "v9.9.9", pa.__version__):
        done = subprocess.run(
            [sys.executable, SCRIPT, tag], capture_output=True, text=True, check=False
        )
        texts.append((done.returncode, done.stdout, done.stderr))
    said = f"expected the tag v{pa.__version__} (pallas_attn.__version__), got "
    refused = [(1, "", f"{said}{tag}\n") for tag in ("v9.9.9", pa.__version__)]
    assert texts == [(0, written, ""), *refused]


def test_every_page_names_the_version():
    changelog, readme, support = (
        (distribution.ROOT / name).read_text()
        for name in ("CHANGELOG.md", "README.md", "docs/support.md")
    )
    unreleased, *released = re.findall(r"^## \[(.*?)\]( - \d{4}-\d\d-\d\d)?$", changelog, re.M)
    assert unreleased == ("Unreleased", "") and all(day for _, day in released)
    assert released[0][0] == pa.__version__
    assert f"**State.** Version {pa.__version__};" in readme
    table = re.findall(r"^\| (\d[.\d]*) \| [\d.]+ to ", support, re.M)
    assert table == [version for version, _ in released]


# ---- workflows -----------------------------------------------------------------------------------

WORKFLOWS = sorted((distribution.ROOT / ".github" / "workflows").glob("*.yml"))
SITE = distribution.ROOT / ".readthedocs.yaml"


def test_workflows_are_found():
    assert [path.stem for path in WORKFLOWS] == ["ci", "gpu", "release"]


@pytest.mark.parametrize("path", [*WORKFLOWS, SITE], ids=lambda path: path.name)
def test_workflows_name_no_host_and_what_they_name_is_there(path):
    text = path.read_text()
    assert "://" not in text
    project = tomllib.loads((distribution.ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"'\.\[([\w,]+)\]'|extra_requirements: \[(\w+)\]", text)
    names = {name for pair in extras for name in "".join(pair).split(",")}
    assert names <= set(project["optional-dependencies"])
    for name in re.findall(r"(?<![\w/])((?:\.ci|tests|docs)/[\w./]+)", text):
        assert (distribution.ROOT / name).exists(), name
    for name in re.findall(r"python -m (tests[\w.]+)", text):
        assert importlib.util.find_spec(name), name


def test_the_site_is_built_as_ci_builds_it():
    wanted = "python -m sphinx -W --keep-going -q docs "
    assert wanted in (distribution.ROOT / ".ci" / "run").read_text()
    assert wanted in WORKFLOWS[0].read_text()
    python = (distribution.ROOT / ".python-version").read_text().strip()
    assert f'python: "{python}"' in SITE.read_text() and "fail_on_warning: true" in SITE.read_text()
    assert f'python-version: "{python}"' in WORKFLOWS[2].read_text()


def test_a_gpu_runs_no_code_of_strangers():
    text = (WORKFLOWS[1]).read_text()
    assert "head.repo.full_name == github.repository" in text and "pull_request_target" not in text


def test_only_the_publisher_may_write():
    before, _, publish = WORKFLOWS[2].read_text().partition("\n  publish:\n")
    assert "write" not in before and "id-token: write" in publish and "needs: test" in publish
