"""Modules of special cases, which a plain call does not load."""

import importlib
from typing import Any


class Special:
    """A module of this package by its name, imported where something of it is asked for. It stands
    at the top of a file, as an import does, and tests count it as one.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(f"pallas_attn.{self._name}"), attribute)
