"""Whether a stored state fits the job as it is configured now: parallel layout, names and shapes of the parameters."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mlflashpoint.adapter.megatron_bridge.tensor_aware import shapes_of

#: (part of the config, field, short name): what decides how Megatron lays a state out over the ranks
_DECISIVE = (
    ("model", "tensor_model_parallel_size", "tp"),
    ("model", "pipeline_model_parallel_size", "pp"),
    ("model", "virtual_pipeline_model_parallel_size", "vpp"),
    ("model", "context_parallel_size", "cp"),
    ("model", "expert_model_parallel_size", "ep"),
    ("model", "expert_tensor_parallel_size", "etp"),
    ("dist", "use_tp_pp_dp_mapping", "tp_pp_dp"),
    ("optimizer", "optimizer", "optimizer"),
    ("optimizer", "use_distributed_optimizer", "distributed"),
    ("optimizer", "use_precision_aware_optimizer", "precision_aware"),
    ("optimizer", "params_dtype", "dtype"),
    ("ddp", "bucket_size", "bucket"),
    ("ddp", "num_distributed_optimizer_instances", "instances"),
    ("ddp", "overlap_grad_reduce", "overlap"),
    ("ddp", "grad_reduce_in_fp32", "fp32_grads"),
    ("checkpoint", "non_persistent_local_ckpt_algo", "algo"),
    ("checkpoint", "fully_parallel_save", "parallel_save"),
    ("checkpoint", "dist_ckpt_optim_fully_reshardable", "reshardable"),
    ("checkpoint", "save_optim", "optim"),
    ("checkpoint", "save_rng", "rng"),
)


def topology_of(config: Any) -> str:
    """One readable line that is equal on all ranks, and equal for two starts whose shards fit each other."""
    parts = [f"core={_release('megatron-core')}"]
    for part, field, short in _DECISIVE:
        value = getattr(getattr(config, part, None), field, None)
        if value is not None and value is not False:
            parts.append(f"{short}={str(value).removeprefix('torch.')}")
    if getattr(config, "peft", None) is not None:
        parts.append(f"peft={type(config.peft).__name__}")
    return " ".join(parts)


def layout_of(model: Sequence[torch.nn.Module]) -> str:
    """Digest of the names, shapes and dtypes of this rank's parameters, in hex."""
    digest = hashlib.sha256()
    for name, parameter in _parameters(model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return digest.hexdigest()[:32]


def first_difference(tasd: Any, model: Sequence[torch.nn.Module]) -> str:
    """Names the first parameter in which the stored state and the model differ, for a message."""
    stored = shapes_of(tasd)
    present = {name: tuple(parameter.shape) for name, parameter in _parameters(model)}
    for name in sorted(set(stored) | set(present)):
        shapes, shape = stored.get(name), present.get(name)
        if shape is None and shapes:
            return f"{name} is stored with shape {shapes[0]}, the model has none"
        if not shapes and shape is not None:
            return f"the model's {name} of shape {shape} is not stored"
        if shapes and shape is not None and len(shapes) == 1 and shapes[0] != shape:
            return f"{name} is stored with shape {shapes[0]}, the model's is {shape}"
    return "the names, shapes or dtypes of the parameters differ"


def unlike(given: Mapping[str, Mapping[str, Any]], model: Sequence[torch.nn.Module]) -> list[str]:
    """Names of the parameters that do not hold what was loaded for them, after Bridge has loaded it.

    Bridge reports a mismatch of names only in its log, and parameters that are not the plain tensors that were stored
    (quantized ones) can't be compared.

    Args:
        given: model sections of the state dict that Bridge got.
        model: the model's chunks.
    """
    loaded = {f"{section}.{name}": value for section, part in given.items() for name, value in part.items()}
    wrong = []
    for name, parameter in _parameters(model):
        value = loaded.get(name)
        if value is None:
            wrong.append(name)
        elif type(parameter.data) is type(value) is torch.Tensor and parameter.dtype == value.dtype:
            here = parameter.detach()
            if here.shape != value.shape or not torch.equal(_bits(here), _bits(value.to(here.device))):
                wrong.append(name)
    return wrong


def _parameters(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and parameter, named as in Bridge's state dict."""
    for index, chunk in enumerate(model):
        while hasattr(chunk, "module") and isinstance(chunk.module, torch.nn.Module):
            chunk = chunk.module
        section = "model" if len(model) == 1 else f"model{index}"
        for name, parameter in chunk.named_parameters():
            yield f"{section}.{name}", parameter


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # NaN is not equal to itself, its bits are.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _release(distribution: str) -> str:
    try:
        return ".".join(importlib.metadata.version(distribution).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
