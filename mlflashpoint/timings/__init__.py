"""Checkpoint timings of training logs: parse, compare, report."""
