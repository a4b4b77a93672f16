"""Where each tensor of a state goes in a slot: planned once per structure."""

from __future__ import annotations

import torch
from torch import Tensor

from mlflashpoint.core.copying import spans_of
from mlflashpoint.core.flatten import Flat
from mlflashpoint.core.form import Form
from mlflashpoint.core.shard import IndexTemplate, TensorEntry, is_dense

_ALIGN = 64
_ALIGN_LARGE = 4096
_LARGE = 256 << 10


class Layout:
    """The places of the tensors of all states of one form.

    Attributes:
        form: of those states.
        entries: one per tensor, without digests.
        nbytes: room that the whole takes.
        spans: how to copy it, see ``copying``.
        template: of the index.
    """

    def __init__(self, flat: Flat) -> None:
        self.form: Form = flat.form
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
        self.nbytes = end
        self.spans = spans_of((entry.shape.numel(), entry.nbytes) for entry in self.entries)
        self.template = IndexTemplate(self.entries, flat.skeleton, end)

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors' places in a slot's memory, as tensors of their dtype, shape and stride."""
        return [view_of(entry, memory) for entry in self.entries]


def view_of(entry: TensorEntry, memory: Tensor) -> Tensor:
    """The tensor's place in ``memory``, a uint8 tensor; of no memory if it has no elements."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    flat = memory[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
    if entry.stride is not None:
        return flat.as_strided(entry.shape, entry.stride)
    return flat.view(entry.shape)
