"""Values that the keys of a JSON object of a checkpoint may hold, and their checks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallas_lm.folder import shown

REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Key:
    """Values that a key may hold. Absent and null are the default."""

    kind: type
    least: float = 1
    most: float = 2**28
    choices: tuple[Any, ...] = ()
    default: Any = None

    @property
    def wanted(self) -> str:
        """The values in words."""
        if self.choices == (None,):
            return "null"
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        words = {bool: "true or false", dict: "an object", list: "a list", str: "a string"}
        if self.kind is int:
            return f"a whole number from {self.least:.0f} to {self.most:.0f}"
        return words.get(self.kind) or f"a number from {self.least:g} to {self.most:g}"

    def holds(self, value: Any) -> bool:
        """Whether the key may hold this value, which is not null."""
        if self.choices:
            return any(type(value) is type(x) and value == x for x in self.choices)
        if self.kind in (int, float):
            taken = (int,) if self.kind is int else (int, float)
            return type(value) in taken and self.least <= value <= self.most  # NaN is refused
        return type(value) is self.kind


def factor(default: float | None = None) -> Key:
    """A key that holds a factor."""
    return Key(float, 1e-3, 1e6, default=default)


class Reader:
    """The values of one JSON object, checked, by name."""

    def __init__(self, where: str, values: Mapping[str, Any], keys: Mapping[str, Key]):
        self._where, self._keys = where, keys
        self._values = {name: self._checked(name, key, values) for name, key in keys.items()}

    def _checked(self, name: str, key: Key, values: Mapping[str, Any]) -> Any:
        value = values.get(name)
        if value is None:
            if key.default is REQUIRED:
                raise ValueError(f"{self._where}{name}: expected {key.wanted}, got nothing")
            return key.default
        if not key.holds(value):
            raise self.wrong(name, value)
        return float(value) if key.kind is float else value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def wrong(self, name: str, value: object, wanted: str = "") -> ValueError:
        """The error for a value that cannot be."""
        wanted = wanted or self._keys[name].wanted
        return ValueError(f"{self._where}{name}: expected {wanted}, got {shown(value)}")
