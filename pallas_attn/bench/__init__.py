"""Timing, peers, reports, plots, tuning."""
