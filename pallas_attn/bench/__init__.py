"""Timing, peers, checks, reports, plots, pages, tuning."""

from pallas_attn.bench.runner import OPS, Options, run_bench
from pallas_attn.bench.tune import run_tune

__all__ = ["OPS", "Options", "run_bench", "run_tune"]
