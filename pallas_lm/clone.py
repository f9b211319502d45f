"""Modules of `benchmarks/`, which a clone of the repository has and an installation has not."""

import importlib
from typing import Any


def benchmarks(name: str, flag: str) -> Any:
    """A module of `benchmarks`, which `flag` asks for. ValueError where it is not there."""
    try:
        return importlib.import_module(f"benchmarks.{name}" if name else "benchmarks")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("benchmarks", "tests"):
            raise
        raise ValueError(
            f"{flag}: expected the folder benchmarks/ of the repository, which is not part of the "
            f"installed package; clone the repository and run: python run.py {flag} there"
        ) from None
