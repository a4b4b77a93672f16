"""The state of a rank's random number generators: Lightning's checkpoints leave it out, an exact resume needs it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Generators of this process as plain data: Python's, torch's, and NumPy's, CUDA's, Megatron's if in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, torch.tensor(keys.tolist(), dtype=torch.int64), position, has_gauss, cached]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    tracker = _megatron_tracker()
    if tracker is not None:
        # one generator per purpose, of which the present one of CUDA is a fork
        found = tracker.get_states()
        if all(isinstance(one, torch.Tensor) for one in found.values()):
            state["megatron"] = dict(found)
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put back what ``capture`` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys.tolist(), dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    tracker = _megatron_tracker()
    if tracker is not None and "megatron" in state:
        tracker.set_states(dict(state["megatron"]))


def _megatron_tracker() -> Any:
    """Megatron-Core's tracker, None where Megatron-Core is not in use."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker = None if module is None else module.get_cuda_rng_tracker()
    return tracker if tracker is not None and tracker.is_initialized() else None
