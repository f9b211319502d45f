"""Timing, peers, checks, reports, plots and pages."""

from benchmarks import context, first_call, workers
from benchmarks.contest import Options
from benchmarks.runner import OPS, run_bench

__all__ = ["OPS", "Options", "context", "first_call", "run_bench", "workers"]
