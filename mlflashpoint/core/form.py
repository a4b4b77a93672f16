"""The form of a state: all that two saves of one training loop have in common, and which tensors are tied."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlflashpoint.core.likeness import Likeness
from mlflashpoint.core.skeleton import Entry

_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


@dataclass(frozen=True)
class Form:
    """Structure of a state, and of its tensors. Lists that end in ``s`` without more words have one entry per node.

    Attributes:
        tokens, keys, key_kinds: see ``skeleton``.
        shapes, dtypes, grads, contiguous: facts of each tensor node's tensor.
        strides: strides of those that are not contiguous, by node.
        flipped: whether each is a conjugate or negative view, whose bytes are not its elements.
        addresses: where each tensor lay when the form was found.
        devices: where each tensor was then.
        refs: for each tensor node the number of its tensor.
        nodes: for each tensor the node where it first appears.
        crowds: nodes that share an address with another, with what tells whether they are tied.
        likeness: of the tensors, each taken once.
    """

    tokens: list[Any]
    keys: list[Any]
    key_kinds: list[Any]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    grads: list[bool]
    contiguous: list[bool]
    strides: dict[int, tuple[int, ...]]
    flipped: list[bool]
    addresses: list[int]
    devices: list[torch.device]
    refs: list[int]
    nodes: list[int]
    crowds: dict[int, Any]
    likeness: Likeness

    @functools.cached_property
    def has_entries(self) -> bool:
        """Whether it holds what is on the allow-list; sparse tensors are on it."""
        return any(type(token) is Entry for token in self.tokens)

    @functools.cached_property
    def on_host(self) -> bool:
        return of_host(self.devices)


def of_host(devices: Sequence[torch.device]) -> bool:
    """Whether none is an accelerator."""
    return {device.type for device in set(devices)} <= {"cpu"}


def strides_of(tensors: Sequence[Tensor], contiguous: Sequence[bool]) -> dict[int, tuple[int, ...]]:
    """Strides of the tensors that are not contiguous, by position."""
    return {place: tensors[place].stride() for place, plain in enumerate(contiguous) if not plain}


def flips_of(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[bool]:
    """Whether each tensor is a conjugate or negative view."""
    if not _COMPLEX.isdisjoint(dtypes):
        return [tensor.is_neg() or tensor.is_conj() for tensor in tensors]
    return list(map(Tensor.is_neg, tensors))


def crowds_of(tensors: Sequence[Tensor], addresses: Sequence[int]) -> dict[int, Any]:
    """By position, for each tensor with elements that shares its address: what it has in common with one tied to it."""
    if len(set(addresses)) == len(addresses):
        return {}
    often = {address for address, times in collections.Counter(addresses).items() if times > 1}
    places = (place for place, address in enumerate(addresses) if address in often)
    return {place: identity_of(tensors[place]) for place in places if tensors[place].numel()}


def identity_of(tensor: Tensor) -> Any:
    """Equal for two tensors that are one memory in one shape: tied ones."""
    return (
        *(tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()),
        *(tensor.is_conj(), tensor.is_neg()),
    )


def ties(count: int, crowds: dict[int, Any]) -> tuple[list[int], list[int]]:
    """For each of ``count`` nodes the number of its tensor, and for each tensor the node where it first appears."""
    if not crowds:
        return list(range(count)), list(range(count))
    seen: dict[Any, int] = {}
    refs: list[int] = []
    nodes: list[int] = []
    for node in range(count):
        identity = crowds.get(node)
        ref = len(nodes) if identity is None else seen.setdefault(identity, len(nodes))
        if ref == len(nodes):
            nodes.append(node)
        refs.append(ref)
    return refs, nodes
