"""Crash recovery for large PyTorch training jobs from checkpoints in node-local memory.

This module stays free of imports: the agent's start-up file loads it in every Python process of a job.
"""

__version__ = "0.1.0"
