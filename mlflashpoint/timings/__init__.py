"""Checkpoint timings out of training logs, and the comparison of two runs. Standard library only; no torch."""
