"""Whether a stored state fits the model as it is now: names, shapes and dtypes of the parameters, and their bits."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mlflashpoint.adapter.megatron_local.tensor_aware import shapes_of


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
    """Names of the parameters that do not hold what was loaded for them, after the loop has loaded it.

    Megatron reports a mismatch of names only in its log, and parameters that are not the plain tensors that were stored
    (quantized ones) can't be compared.

    Args:
        given: model sections of the state dict that the loop got.
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
    """Name and parameter, named as in Megatron's state dict."""
    for index, chunk in enumerate(model):
        while hasattr(chunk, "module") and isinstance(chunk.module, torch.nn.Module):
            chunk = chunk.module
        section = "model" if len(model) == 1 else f"model{index}"
        for name, parameter in chunk.named_parameters():
            yield f"{section}.{name}", parameter


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # NaN is not equal to itself, its bits are.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def release(distribution: str) -> str:
    """Major and minor number of what is installed."""
    try:
        return ".".join(importlib.metadata.version(distribution).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
