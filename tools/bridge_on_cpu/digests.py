"""Digests of all that training goes on from, taken from a callback's context."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy
import torch


def digest(*parts: Any) -> str:
    """A digest of nested containers, tensors, arrays and plain values."""
    total = hashlib.sha256()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            total.update(f"{value.dtype}{tuple(value.shape)}".encode())
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, numpy.ndarray):
            total.update(value.tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                total.update(str(key).encode())
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        else:
            total.update(repr(value).encode())

    walk(parts)
    return total.hexdigest()[:20]


def optimizer_state(optimizer: Any) -> list[Any]:
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", part)
        for group in inner.param_groups:
            found.append({key: value for key, value in group.items() if key != "params" and not callable(value)})
            found += [[param, inner.state.get(param, {})] for param in group["params"]]
    return found


def rng_state() -> dict[str, str]:
    """A digest of each random generator's state."""
    from megatron.core import tensor_parallel

    return {
        "python": digest(random.getstate()),
        "numpy": digest(numpy.random.get_state()),
        "torch": digest(torch.get_rng_state()),
        "tracker": digest(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def digests(context: Any) -> dict[str, Any]:
    """Step, counters and digests of weights, optimizer, scheduler and random generators."""
    state = context.state.train_state
    chunks = context.model if isinstance(context.model, list) else [context.model]
    return {
        "step": int(state.step),
        "samples": int(state.consumed_train_samples),
        "flops": float(state.floating_point_operations_so_far),
        "weights": digest([dict(chunk.named_parameters()) for chunk in chunks]),
        "optimizer": digest(optimizer_state(context.optimizer)),
        "scheduler": digest(context.scheduler.state_dict()),
        "rng": rng_state(),
    }
