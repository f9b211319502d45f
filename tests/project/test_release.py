"""What a release is made of: the files of wheel and source distribution."""

import pathlib
import tarfile
import zipfile

import pytest

from tests.support import distribution

WHEEL = "pallas_attn-1-py3-none-any.whl"
SOURCE = "pallas_attn-1.tar.gz"
IN_WHEEL = {*distribution.modules(), "pallas_attn/py.typed", "pallas_lm/py.typed"}
IN_WHEEL |= {"pallas_lm/tiny/model.npy", "pallas_attn-1.dist-info/METADATA"}


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
    files["pallas_lm/tiny/model.npy"] = 4_000_001
    assert distribution.faults(archive(tmp_path, name, files)) == [
        f"{name}: pallas_attn/cache.py has 1000001 bytes",
        f"{name}: pallas_attn/masks.py is not in it",
        f"{name}: pallas_lm/tiny/model.npy has 4000001 bytes",
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
    text = (pathlib.Path(distribution.ROOT) / ".ci" / "run").read_text()
    assert "python -m tests.support.distribution" in text
