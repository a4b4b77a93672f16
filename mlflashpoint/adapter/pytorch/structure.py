"""The structure of a state: what a plan or a set of buffers made for one state depends on, apart from the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor


class Structure:
    """Keys, kinds, shapes, dtypes and layouts of a nested state.

    Attributes:
        keys: every key and container length, in the order of the walk.
        traits: what is compared of each leaf.
    """

    def __init__(self, keys: list[Any], traits: list[tuple[Any, ...]]) -> None:
        self.keys = keys
        self.traits = traits

    @classmethod
    def of(cls, state: Any) -> tuple[Structure, list[Any]]:
        """The structure of ``state``, and its leaves."""
        keys, leaves = walked(state)
        return cls(keys, [_trait(leaf) for leaf in leaves]), leaves

    @property
    def is_comparable(self) -> bool:
        """False if a leaf plans its own items, which no comparison from outside can foresee."""
        return not any(trait[1] is _never for trait in self.traits)

    def match(self, state: Any) -> list[Any] | None:
        """The leaves of ``state`` if it has this structure, else None."""
        keys, leaves = walked(state)
        if keys != self.keys:
            return None
        for leaf, trait in zip(leaves, self.traits, strict=True):
            if type(leaf) is not trait[0] or (trait[1] is not None and not trait[1](leaf, trait)):
                return None
        return leaves


def walked(state: Any) -> tuple[list[Any], list[Any]]:
    """The keys (and container lengths) and the leaves of ``state``, in the order of the walk."""
    keys: list[Any] = []
    leaves: list[Any] = []
    _walk(state, keys, leaves)
    return keys, leaves


def rebuild(state: Any, leaves: Iterator[Any]) -> Any:
    """The containers of ``state`` anew, with ``leaves`` (in the order of the walk) in place of its own."""
    if isinstance(state, Mapping):
        return {key: rebuild(entry, leaves) for key, entry in state.items()}
    if isinstance(state, list) and not _is_leaf(state):
        return [rebuild(entry, leaves) for entry in state]
    return next(leaves)


#: what most leaves are; asking an abstract class whether a tensor is a mapping takes longer than all the rest
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, DTensor, int, float, bool, str, bytes, type(None)})


def _walk(value: Any, keys: list[Any], leaves: list[Any]) -> None:
    """Collect keys and leaves in the order in which DCP's flattening meets them."""
    if isinstance(value, Mapping):
        keys.append(len(value))
        for key, entry in value.items():
            keys.append(key)
            if type(entry) not in _LEAVES and isinstance(entry, (Mapping, list)):
                _walk(entry, keys, leaves)
            else:
                leaves.append(entry)
    elif isinstance(value, list) and not _is_leaf(value):
        keys.append(-1 - len(value))
        for entry in value:
            _walk(entry, keys, leaves)
    else:
        leaves.append(value)


def _is_leaf(value: list[Any]) -> bool:
    """Whether DCP keeps a list whole: it does unless a tensor or mapping lies somewhere in it."""
    return not any(
        isinstance(entry, (Mapping, torch.Tensor)) or (isinstance(entry, list) and not _is_leaf(entry))
        for entry in value
    )


def _trait(leaf: Any) -> tuple[Any, ...]:
    inner = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    if hasattr(inner, "__create_write_items__") or is_nested(inner):
        return type(leaf), _never
    if isinstance(leaf, DTensor):
        return type(leaf), _same_dtensor, leaf.dtype, leaf.requires_grad, leaf._spec, leaf._local_tensor.shape
    if isinstance(leaf, ShardedTensor):
        return type(leaf), _same_sharded, leaf.metadata(), [shard.metadata for shard in leaf.local_shards()]
    if isinstance(leaf, torch.Tensor):
        return type(leaf), _same_tensor, leaf.dtype, leaf.requires_grad, leaf.shape
    return type(leaf), None


def local_of(leaf: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor that holds this rank's bytes, None if there is no single one."""
    inner = leaf._local_tensor if type(leaf) is DTensor else leaf
    is_plain = type(inner) in (torch.Tensor, torch.nn.Parameter) and inner.layout is torch.strided
    return inner if is_plain and not inner.is_nested else None


def is_nested(leaf: Any) -> bool:
    """Whether it is a nested tensor, which has no sizes to compare or to plan by."""
    return isinstance(leaf, torch.Tensor) and leaf.is_nested


def _never(leaf: Any, trait: tuple[Any, ...]) -> bool:
    return False


def _same_tensor(leaf: Any, trait: tuple[Any, ...]) -> bool:
    return leaf.dtype is trait[2] and leaf.requires_grad is trait[3] and leaf.shape == trait[4]


def _same_dtensor(leaf: Any, trait: tuple[Any, ...]) -> bool:
    spec = leaf._spec
    return (
        (spec is trait[4] or spec == trait[4])
        and leaf.dtype is trait[2]
        and leaf.requires_grad is trait[3]
        and leaf._local_tensor.shape == trait[5]
    )


def _same_sharded(leaf: Any, trait: tuple[Any, ...]) -> bool:
    return bool(leaf.metadata() == trait[2]) and [shard.metadata for shard in leaf.local_shards()] == trait[3]
