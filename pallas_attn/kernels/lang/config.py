"""What a kernel's `Config` checks of itself when it is made."""

from typing import Any


def check(config: Any, **wants: tuple[bool, str]) -> None:
    """Raises a ValueError that names the first field that is not as wanted.

    Args:
      config: a dataclass.
      wants: for a field's name, whether its value is good, and which values are.
    """
    for name, (good, want) in wants.items():
        if not good:
            raise ValueError(f"Config.{name} must be {want}, got {getattr(config, name)}")
