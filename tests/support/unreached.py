"""Branches of `pallas_attn/kernels/` that no test without a GPU reaches, and why not. A new one is
removed or gets a case.
"""

REASONS: dict[str, tuple[str, ...]] = {
    "only the oldest jax takes it": ("lang/mosaic.py store: _store is None is true",),
}
EXCUSED = frozenset(name for names in REASONS.values() for name in names)
