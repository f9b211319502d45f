"""Versions of jax that the package was tested with, and the warning that importing it on another
one gives.
"""

import os
import warnings

import jax

OLDEST = (0, 11, 2)  # pyproject.toml asks for it
NEWEST = (0, 12)  # with any patch
TESTED = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.*"


def warning_for(version: tuple[int, ...]) -> str | None:
    """Warning of a jax.__version_info__; None for a tested one."""
    if version < OLDEST:
        return f"older than this pallas_attn takes (tested: {TESTED}): pip install -U jax"
    if version[:2] > NEWEST:
        return (
            f"newer than this pallas_attn was tested with ({TESTED}): kernels may fail to compile; "
            "take a newer pallas_attn or an older jax"
        )
    return None


if _warning := warning_for(jax.__version_info__):
    warnings.warn(
        f"jax {jax.__version__} is {_warning}",
        stacklevel=2,
        skip_file_prefixes=(os.path.dirname(__file__),),
    )
