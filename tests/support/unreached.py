"""Branches of `pallas_attn/kernels/` that no test without a GPU reaches, and why not.

Most of them have no case yet: they are in a file, which may only become shorter. A branch that is
new is removed or gets a case.
"""

import pathlib

FILE = pathlib.Path(__file__).parents[1] / "recorded" / "unreached.txt"

REASONS: dict[str, tuple[str, ...]] = {
    "only the oldest jax takes it": ("lang/mosaic.py store: _store is None is true",),
    "it is called while its module is imported": (
        "decode_mla/sm90_common.py <lambda>: lambda launch: launch is called",
    ),
    "there is no case yet": tuple(FILE.read_text().splitlines()),
}
EXCUSED = frozenset(name for names in REASONS.values() for name in names)
