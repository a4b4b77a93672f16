"""What worker.py imports, with CUDA answered by the CPU before it; for a warm process (tests/warm.py)."""

import sys
from pathlib import Path

import cpu

cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402, F401
from megatron.core.dist_checkpointing.strategies import fully_parallel  # noqa: E402, F401

import mlflashpoint.adapter.megatron  # noqa: E402, F401

sys.path.append(str(Path(__file__).parent.parent / "pytorch"))
import model  # noqa: E402, F401
