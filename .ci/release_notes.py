"""Notes of a release: its part of CHANGELOG.md.

`python .ci/release_notes.py v0.1.0 [ROOT]` prints them; ROOT goes before links within the project.
A tag that is not the package's version, or has no notes, is an error.
"""

import pathlib
import re
import sys

PROJECT = pathlib.Path(__file__).parents[1]


def notes(changelog: str, version: str, root: str = "") -> str:
    """Text below the version's heading and above the next one."""
    begins = rf"^## \[{re.escape(version)}\][^\n]*\n"
    part = re.search(rf"{begins}(.*?)(?=^## \[|\Z)", changelog, re.S | re.M)
    if part is None or not part[1].strip():
        raise ValueError(f"CHANGELOG.md: expected notes below ## [{version}], got none")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({root}", part[1].strip()) + "\n"


def version_of(tag: str, package: str) -> str:
    """Version that a tag names; it has to be that of pallas_attn/__init__.py."""
    (version,) = re.findall(r'^__version__ = "(.*)"$', package, re.M)
    if tag != f"v{version}":
        raise ValueError(f"expected the tag v{version} (pallas_attn.__version__), got {tag}")
    return version


def main(tag: str, root: str = "") -> None:
    """Prints the notes."""
    version = version_of(tag, (PROJECT / "pallas_attn" / "__init__.py").read_text("utf-8"))
    sys.stdout.write(notes((PROJECT / "CHANGELOG.md").read_text("utf-8"), version, root))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as e:
        sys.exit(str(e))
