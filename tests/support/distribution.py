"""The contents of a wheel and of a source distribution.

`python -m tests.support.distribution FOLDER` checks those in a folder, and builds them there first
where it has none (with setuptools, which the extra `test` does not install).
"""

import pathlib
import sys
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("pallas_attn", "pallas_lm")
WEIGHTS = "pallas_lm/tiny/model.safetensors"  # the demo's
LARGEST = 1_000_000  # bytes of a file
LARGER = {WEIGHTS: 4_000_000}
# Files of the source distribution, of which its documents and tests read some.
IN_SOURCE = ("README.md", "CHANGELOG.md", "LICENSE", "run.py", ".ci/run", "docs/conf.py")
IN_SOURCE += ("results/forward_h200.jsonl", "tests/conftest.py", "benchmarks/__init__.py")


def build(folder: pathlib.Path) -> None:
    """Makes both in the folder. Works in the current directory, a copy of the project."""
    from setuptools import build_meta

    build_meta.build_sdist(str(folder))
    build_meta.build_wheel(str(folder))


def contents(path: pathlib.Path) -> dict[str, int]:
    """Bytes of each file of a wheel or of a source distribution, there without its first folder."""
    if path.suffix == ".whl":
        return {x.filename: x.file_size for x in zipfile.ZipFile(path).infolist()}
    with tarfile.open(path) as archive:
        return {x.name.partition("/")[2]: x.size for x in archive if x.isfile()}


def modules() -> set[str]:
    """Python files of the packages, in this tree."""
    return {
        str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    }


def faults(path: pathlib.Path) -> list[str]:
    """A line for each file that should not be there, is missing, or is too large."""
    files = contents(path)
    wanted = modules() | {f"{name}/py.typed" for name in PACKAGES} | {WEIGHTS}
    lines = [
        f"{name} has {size} bytes"
        for name, size in files.items()
        if size > LARGER.get(name, LARGEST)
    ]
    if path.suffix == ".whl":
        tops = {name: name.partition("/")[0] for name in files}
        strange = [x for x, top in tops.items() if not top.endswith(".dist-info")]
        lines += [f"{x} is no part of it" for x in strange if tops[x] not in PACKAGES]
    else:
        wanted |= set(IN_SOURCE)
    lines += [f"{name} is not in it" for name in wanted - set(files)]
    return sorted(f"{path.name}: {line}" for line in lines)


def main(folder: pathlib.Path) -> None:
    """Fails with a line for each fault."""
    names = ("*.whl", "*.tar.gz")
    if not any(folder.glob("*.whl")):
        build(folder)
    paths = [path for name in names for path in folder.glob(name)]
    lines = [line for path in paths for line in faults(path)]
    if len(paths) != 2:
        lines.append(f"expected a wheel and a source distribution in {folder}, got {len(paths)}")
    sys.stdout.write("".join(f"{path.name}: {len(contents(path))} files\n" for path in paths))
    sys.exit("\n".join(lines) or None)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
