"""Calls that raise a ValueError; tests/recorded/messages.json has their messages, word for word.

python -m tests.support.messages    # writes the file anew; its diff says what changed
"""

import importlib
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

FILE = pathlib.Path(__file__).parents[1] / "recorded" / "messages.json"
MODULES = ("api.test_errors", "api.test_float8", "api.test_functions", "api.test_merge")
MODULES += ("api.test_pictures",)
MODULES += ("caches.test_packed_rows", "caches.test_quantized")
MODULES += ("parallel.test_context", "parallel.test_sharded_caches")
Tables = dict[str, tuple[Callable[[], Any], ...]]  # calls, by a name


def recorded() -> dict[str, list[str]]:
    """Messages of each table, in the order of its calls."""
    return json.loads(FILE.read_text())


def cases(tables: Tables) -> list[Any]:
    """Parameters (call, message) for `check`; "" where none is recorded."""
    known, pairs = recorded(), itertools.zip_longest
    return [
        pytest.param(call, message, id=f"{name}-{number}")
        for name, calls in tables.items()
        for number, (call, message) in enumerate(pairs(calls, known.get(name, ()), fillvalue=""))
    ]


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert type(caught.value) is ValueError
    return str(caught.value)


def check(call: Callable[[], Any], message: str) -> None:
    assert raised(call) == message


def write() -> None:
    importlib.import_module("tests.conftest")  # several devices
    tables: Tables = {}
    for module in MODULES:
        tables |= importlib.import_module(f"tests.{module}").MESSAGES
    messages = {name: list(map(raised, calls)) for name, calls in sorted(tables.items())}
    FILE.write_text(json.dumps(messages, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
