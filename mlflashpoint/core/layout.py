"""Where each tensor of a state goes in a slot: planned once per structure."""

from __future__ import annotations

import torch
from torch import Tensor

from mlflashpoint.core.shard import IndexTemplate, TensorEntry, is_dense
from mlflashpoint.core.state import Flat

_ALIGN = 64
_ALIGN_LARGE = 4096
_LARGE = 256 << 10


class Layout:
    """The places of one structure's tensors.

    Attributes:
        entries: one per tensor of the flat state, without digests.
        sizes: bytes of each.
        nbytes: room that the whole takes.
        template: of the index.
    """

    def __init__(self, flat: Flat) -> None:
        self._skeleton = flat.skeleton
        self._shapes, self._dtypes = flat.shapes, flat.dtypes
        self._contiguous = list(map(Tensor.is_contiguous, flat.tensors))
        self.entries: list[TensorEntry] = []
        end = 0
        for name, tensor in zip(flat.names(), flat.tensors, strict=True):
            nbytes = tensor.numel() * tensor.dtype.itemsize
            align = _ALIGN_LARGE if nbytes >= _LARGE else _ALIGN
            offset = -(-end // align) * align if nbytes else 0
            stride = None
            if not tensor.is_contiguous() and is_dense(tensor.shape, tensor.stride()):
                stride = tensor.stride()
            self.entries.append(TensorEntry(name, tensor.dtype, tensor.shape, offset, nbytes, stride))
            end = max(end, offset + nbytes)
        self.sizes = [entry.nbytes for entry in self.entries]
        self.nbytes = end
        self.template = IndexTemplate(self.entries, flat.skeleton, end)

    def fits(self, flat: Flat) -> bool:
        """Whether this is the layout of ``flat`` too."""
        return (
            self._skeleton.same_structure(flat.skeleton)
            and self._shapes == flat.shapes
            and self._dtypes == flat.dtypes
            and self._contiguous == list(map(Tensor.is_contiguous, flat.tensors))
            and all(
                entry.stride == (tensor.stride() if is_dense(tensor.shape, tensor.stride()) else None)
                for entry, tensor, contiguous in zip(self.entries, flat.tensors, self._contiguous, strict=True)
                if not contiguous
            )
        )

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors' places in a slot's memory, as tensors of their dtype, shape and stride."""
        return [view_of(entry, memory) for entry in self.entries]


def view_of(entry: TensorEntry, memory: Tensor) -> Tensor:
    """The tensor's place in ``memory``, a uint8 tensor; of no memory if it has no elements."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    flat = memory[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
    if entry.stride is not None:
        return flat.as_strided(entry.shape, entry.stride)
    return flat.view(entry.shape)
