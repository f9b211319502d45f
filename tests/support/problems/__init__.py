"""Named problems: what tests prove and benchmarks time."""
