"""Where each tensor of a state goes in a slot: planned once per structure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from mlflashpoint.core.copying import Schedule
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
        raw: whether the bytes of each tensor can be taken as they are.
        schedule: how to copy the tensors, if all are on the CPU.
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
        dense = [
            tensor.is_contiguous() or entry.stride is not None
            for tensor, entry in zip(flat.tensors, self.entries, strict=True)
        ]
        self.raw = [solid and not flip for solid, flip in zip(dense, flat.flipped(), strict=True)]
        self.schedule = Schedule([entry.nbytes for entry in self.entries], self.raw)
        self.template = IndexTemplate(self.entries, flat.skeleton, end)

    def place(self, memory: Tensor) -> Placed:
        """Where the tensors go in a slot's memory."""
        base = memory.data_ptr()
        to = self.schedule.addresses([base + entry.offset for entry in self.entries])
        return Placed(self, to, [view_of(self.entries[number], memory) for number in self.schedule.odd])


@dataclass(frozen=True)
class Placed:
    """A layout in a slot's memory.

    Attributes:
        layout: the layout.
        to: addresses, for its schedule.
        odd: the places of the schedule's odd tensors, as tensors.
    """

    layout: Layout
    to: array[int]
    odd: list[Tensor]


def view_of(entry: TensorEntry, memory: Tensor) -> Tensor:
    """The tensor's place in ``memory``, a uint8 tensor; of no memory if it has no elements."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    flat = memory[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
    if entry.stride is not None:
        return flat.as_strided(entry.shape, entry.stride)
    return flat.view(entry.shape)
