"""The allow-list's first entries: torch's sparse tensors, long byte strings, a few of Python's own types."""

from __future__ import annotations

import argparse
import collections
import ctypes
import io
import pathlib
import types
from typing import Any

import torch

from mlflashpoint.core.leaves import Leaf, register_leaf
from mlflashpoint.errors import StateTypeError

#: strings and byte strings from this length on lie with the tensors instead of in the index
LONG = 4096
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}


def tensor_of(data: bytes | bytearray) -> torch.Tensor:
    """A copy of the bytes as a tensor."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(tensor: Any) -> bytes:
    """The bytes of what ``tensor_of`` gave; raises ValueError for anything else."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError("not a tensor of bytes")
    tensor = tensor.cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""


_long: dict[type, Leaf] = {
    bytes: Leaf("bytes", bytes, tensor_of, bytes_of),
    str: Leaf(
        "str",
        str,
        lambda text: tensor_of(text.encode("utf-8", "surrogatepass")),
        lambda state: bytes_of(state).decode("utf-8", "surrogatepass"),
    ),
}


def _take_coo_apart(tensor: torch.Tensor) -> dict[str, Any]:
    bare = tensor.detach()
    return {
        "indices": bare._indices(),
        "values": bare._values(),
        "size": bare.shape,
        "coalesced": bare.is_coalesced(),
        "requires_grad": tensor.requires_grad,
    }


def _put_coo_together(state: Any) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        state["indices"],
        state["values"],
        state["size"],
        is_coalesced=bool(state["coalesced"]),
        check_invariants=True,
        requires_grad=bool(state["requires_grad"]),
    )


def _compressed(layout: torch.layout) -> Leaf:
    by_row = layout in (torch.sparse_csr, torch.sparse_bsr)

    def take_apart(tensor: torch.Tensor) -> dict[str, Any]:
        bare = tensor.detach()
        return {
            "compressed": bare.crow_indices() if by_row else bare.ccol_indices(),
            "plain": bare.col_indices() if by_row else bare.row_indices(),
            "values": bare.values(),
            "size": bare.shape,
            "requires_grad": tensor.requires_grad,
        }

    def put_together(state: Any) -> torch.Tensor:
        return torch.sparse_compressed_tensor(
            state["compressed"],
            state["plain"],
            state["values"],
            state["size"],
            layout=layout,
            check_invariants=True,
            requires_grad=bool(state["requires_grad"]),
        )

    return Leaf(str(layout), torch.Tensor, take_apart, put_together)


_sparse: dict[torch.layout, Leaf] = {
    torch.sparse_coo: Leaf("torch.sparse_coo", torch.Tensor, _take_coo_apart, _put_coo_together),
    **{
        layout: _compressed(layout)
        for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    },
}
_chosen = {leaf.name: leaf for leaf in (*_sparse.values(), *_long.values())}


def _sparse_leaf(tensor: torch.Tensor) -> Leaf:
    leaf = _sparse.get(tensor.layout)
    if leaf is None or type(tensor) is not torch.Tensor:
        raise StateTypeError(
            f"a {type(tensor).__name__} of layout {tensor.layout}", remedy="store its parts as strided tensors"
        )
    return leaf


def chosen_leaf(item: Any) -> Leaf | None:
    """The leaf of an object whose type alone does not tell: a long string, a tensor that is not strided.

    Raises:
        StateTypeError: a tensor of a layout that is not known.
    """
    kind = type(item)
    return _sparse_leaf(item) if kind is torch.Tensor or kind is torch.nn.Parameter else _long.get(kind)


def chosen_leaf_named(name: str) -> Leaf | None:
    """The same by name."""
    return _chosen.get(name)


def _take_defaultdict_apart(value: Any) -> dict[str, Any]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise StateTypeError(f"a defaultdict of {factory!r}", remedy="store dict(it)")
    return {"factory": name, "items": dict(value)}


def _put_defaultdict_together(state: Any) -> Any:
    name = state["factory"]
    return collections.defaultdict(None if name is None else _FACTORIES[name], state["items"])


def _buffer_with(state: Any) -> io.BytesIO:
    buffer = io.BytesIO(state["data"])
    buffer.seek(state["position"])
    return buffer


register_leaf("bytearray", bytearray, tensor_of, lambda state: bytearray(bytes_of(state)))
register_leaf(
    "io.BytesIO", io.BytesIO, lambda value: {"data": value.getvalue(), "position": value.tell()}, _buffer_with
)
register_leaf("collections.defaultdict", collections.defaultdict, _take_defaultdict_apart, _put_defaultdict_together)
register_leaf(
    "types.SimpleNamespace",
    types.SimpleNamespace,
    lambda value: dict(vars(value)),
    lambda s: types.SimpleNamespace(**s),
)
register_leaf(
    "argparse.Namespace", argparse.Namespace, lambda value: dict(vars(value)), lambda s: argparse.Namespace(**s)
)
register_leaf("pathlib.PosixPath", pathlib.PosixPath, str, pathlib.PosixPath)
