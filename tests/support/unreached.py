"""Branches of `pallas_attn/kernels/` that no test without a GPU reaches, and why not."""

REASONS: dict[str, tuple[str, ...]] = {}
EXCUSED = frozenset(name for names in REASONS.values() for name in names)
