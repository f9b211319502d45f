"""Timing, peers, checks, reports, plots and pages."""

from pallas_attn.bench import context, first_call
from pallas_attn.bench.contest import Options
from pallas_attn.bench.runner import OPS, run_bench

__all__ = ["OPS", "Options", "context", "first_call", "run_bench"]
