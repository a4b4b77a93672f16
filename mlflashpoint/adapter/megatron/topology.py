"""The parallel layout of a Megatron job in one readable line."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

_SIZES = (
    ("tp", "get_tensor_model_parallel_world_size"),
    ("pp", "get_pipeline_model_parallel_world_size"),
    ("cp", "get_context_parallel_world_size"),
    ("ep", "get_expert_model_parallel_world_size"),
    ("etp", "get_expert_tensor_parallel_world_size"),
    ("dp", "get_data_parallel_world_size"),
)


def current_topology() -> str:
    """``world=8 tp=2 pp=1 ...``; equal on all ranks. Empty if Megatron's groups are not initialised."""
    if not dist.is_initialized() or not parallel_state.model_parallel_is_initialized():
        return ""
    parts = [f"world={dist.get_world_size()}"]
    for name, function in _SIZES:
        size = getattr(parallel_state, function, None)
        if size is not None:
            parts.append(f"{name}={size()}")
    return " ".join(parts)
