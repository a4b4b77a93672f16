"""What a Megatron state holds beside plain data and tensors, and how each of it is stored without pickle.

Found by looking at the local state dicts of Megatron Bridge 0.4.2, 0.5.1 and 0.6.2: ``ShardedTensor`` and
``ShardedObject`` carry the model, the optimizer and the RNG states; all the rest is what the core stores anyway (plain
data, tensors, numpy arrays, byte buffers, dictionaries with numbers and tuples of dtypes as keys). Factories are
expanded and non-persistent objects taken out before a checkpoint manager sees the state. A pending rerun adds
enumerations of Megatron-Core.
"""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import Any

import torch

from mlflashpoint.core.nesting import too_deep
from mlflashpoint.core.state import register_leaf

#: constructor fields of ShardedTensor and ShardedObject that are plain data
_TENSOR_FIELDS = (
    "key",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    "replica_id",
    "prepend_axis_num",
    "allow_shape_mismatch",
)
_OBJECT_FIELDS = ("key", "global_shape", "global_offset", "replica_id")
_MAPPING = "megatron.core.dist_checkpointing.mapping"

_registered = False


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor that goes back to a device of this type when it is loaded; the store itself gives CPU tensors."""

    device: str
    tensor: torch.Tensor


def register() -> None:
    """Enter the types into the core's allow-list; imports Megatron-Core. A second call does nothing."""
    global _registered
    if _registered:
        return
    mapping = importlib.import_module(_MAPPING)
    register_leaf("megatron.ShardedTensor", mapping.ShardedTensor, _take_tensor, _make_tensor)
    register_leaf("megatron.ShardedObject", mapping.ShardedObject, _take_object, _make_object)
    register_leaf("megatron.DeviceTensor", DeviceTensor, lambda it: [it.device, it.tensor], _to_device)
    rerun = importlib.import_module("megatron.core.rerun_state_machine")
    for name, cls in vars(rerun).items():
        if isinstance(cls, type) and issubclass(cls, enum.Enum) and cls.__module__ == rerun.__name__:
            register_leaf(f"megatron.{name}", cls, _value_of, cls)
    _registered = True


def with_devices(value: Any) -> Any:
    """``value`` with each tensor that is not on the CPU as a ``DeviceTensor``.

    Raises:
        StateTypeError: it contains itself or nests too deep; names the place.
    """
    try:
        return _with_devices(value)
    except RecursionError as error:
        raise too_deep(value) from error


def _with_devices(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else DeviceTensor(value.device.type, value.detach())
    if type(value) is dict:
        return {key: _with_devices(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_with_devices, value))
    return value


def _value_of(member: enum.Enum) -> Any:
    return member.value


def _to_device(state: Any) -> torch.Tensor:
    device, tensor = state
    moved: torch.Tensor = tensor.to(device)
    return moved


def _take_tensor(shard: Any) -> list[Any]:
    """Fields, flattened range and data of a ShardedTensor; data is None where another rank stores it."""
    data, flattened = shard.data, shard.flattened_range
    return [
        [getattr(shard, name) for name in _TENSOR_FIELDS],
        None if flattened is None else [flattened.start, flattened.stop, flattened.step],
        None if data is None else with_devices(data.detach()),
    ]


def _make_tensor(state: Any) -> Any:
    fields, flattened, data = state
    return importlib.import_module(_MAPPING).ShardedTensor(
        data=data,
        flattened_range=None if flattened is None else slice(*flattened),
        **dict(zip(_TENSOR_FIELDS, fields, strict=True)),
    )


def _take_object(shard: Any) -> list[Any]:
    return [[getattr(shard, name) for name in _OBJECT_FIELDS], with_devices(shard.data)]


def _make_object(state: Any) -> Any:
    fields, data = state
    return importlib.import_module(_MAPPING).ShardedObject(data=data, **dict(zip(_OBJECT_FIELDS, fields, strict=True)))
