"""Staging for ``dcp.async_save``: the state is copied into buffers that are made once and used again.

DCP's default stager allocates a copy of the whole state at every save, and touching fresh pages costs several times
what the copy itself does. Here a save whose state has the structure of the one before copies into the same memory.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from mlflashpoint.adapter.pytorch.copies import copy_all
from mlflashpoint.adapter.pytorch.sending import sendable
from mlflashpoint.adapter.pytorch.structure import Structure, is_nested, rebuild
from mlflashpoint.errors import FlashpointError

#: sets of buffers that are kept: one being uploaded while the next save is staged
_SETS = 2
#: bytes; a cache line, and a multiple of every element size
_ALIGN = 64
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


class ReusedStager:
    """Copies a state to host memory; after ``stage`` returns the caller may change every tensor and object of it.

    Has the methods of DCP's ``AsyncStager``. A state with tensors of a kind of their own (neither plain nor DTensor) is
    left to DCP's blocking stager.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._sets: list[_Buffers] = []
        self._last: weakref.ref[_Staged] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``state_dict`` on the host."""
        staged = self._stage(state_dict)
        self._last = weakref.ref(staged)
        return staged

    def unsendable(self) -> FlashpointError | None:
        """Why something of the state that was staged last can't be sent to a checkpoint process, None if all can."""
        staged = None if self._last is None else self._last()
        return None if staged is None else staged.parcel()[1]

    def _stage(self, state_dict: dict[str, Any]) -> _Staged:
        for buffers in self._sets:
            leaves = None if buffers.busy else buffers.structure.match(state_dict)
            if leaves is not None:
                return buffers.fill(state_dict, leaves)
        structure, leaves = Structure.of(state_dict)
        if any(map(is_nested, leaves)):
            # It has no buffer. Raised here, on one rank, it would leave the others waiting in the save, which refuses
            # it on all, unless the planner leaves it out: then the others are to be those of now.
            return _Buffers(structure, leaves).fill(state_dict, leaves)
        if not structure.is_comparable or any(isinstance(x, torch.Tensor) and _local(x) is None for x in leaves):
            return _Staged(_left_to_dcp(state_dict, leaves))
        self._sets = [buffers for buffers in self._sets if buffers.busy][: _SETS - 1]
        self._sets.append(_Buffers(structure, leaves))
        return self._sets[-1].fill(state_dict, leaves)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is made."""

    def close(self) -> None:
        """Give the buffers back."""
        self._sets.clear()


class _Staged(dict[str, Any]):
    """A staged state; once it is gone nobody reads its buffers any more."""

    __slots__ = ("__weakref__", "_parcel")

    def parcel(self) -> tuple[dict[str, Any], FlashpointError | None]:
        """As ``sendable`` gives it."""
        try:
            return self._parcel
        except AttributeError:
            self._parcel: tuple[dict[str, Any], FlashpointError | None] = sendable(dict(self))
            return self._parcel

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.parcel()[0],)


class _Buffers:
    """Host memory for states of one structure, one at a time."""

    def __init__(self, structure: Structure, leaves: list[Any]) -> None:
        self.structure = structure
        self._user: weakref.ref[_Staged] | None = None
        sources = {place: _local(leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        found = {place: source for place, source in sources.items() if source is not None}
        pinned = any(source.is_cuda for source in found.values())
        # The DTensors' parts need a storage of their own: torch takes a DTensor whose part begins further on in its
        # storage for a plain tensor when it pickles it for a checkpoint process, and crashes.
        flat = {place: _nbytes(source) for place, source in found.items() if not isinstance(leaves[place], DTensor)}
        memory = torch.empty(sum(map(_padded, flat.values())), dtype=torch.uint8, pin_memory=pinned)
        self._views: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, Any] = {}
        offset = 0
        for place, source in found.items():
            leaf = leaves[place]
            if isinstance(leaf, DTensor):
                view = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
                self._tensors[place] = DTensor(view, leaf._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            else:
                view = memory[offset : offset + flat[place]].view(source.dtype).view(source.shape)
                offset += _padded(flat[place])
                self._tensors[place] = view
            self._views[place] = view

    @property
    def busy(self) -> bool:
        return self._user is not None and self._user() is not None

    def fill(self, state: dict[str, Any], leaves: list[Any]) -> _Staged:
        views = list(self._views.values())
        sources = [_local(leaves[place]) for place in self._views]
        devices = {source.device for source in sources if source is not None and source.device.type != "cpu"}
        if devices:
            # It takes no lazily conjugated or negated view; for all others these give back the tensor itself.
            plain = [source.resolve_conj().resolve_neg() for source in sources if source is not None]
            torch._foreach_copy_(views, plain, non_blocking=True)
            for device in devices:
                getattr(torch, device.type).current_stream(device).synchronize()
        else:
            copy_all(views, sources)  # type: ignore[arg-type]
        tensors = self._tensors
        staged = (tensors[p] if p in tensors else _snapshot(leaf) for p, leaf in enumerate(leaves))
        result = _Staged(rebuild(state, staged))
        self._user = weakref.ref(result)
        return result


def _left_to_dcp(state: dict[str, Any], leaves: list[Any]) -> Any:
    try:
        return BlockingAsyncStager().stage(state)
    except Exception:
        # As in _snapshot.
        return rebuild(state, map(_snapshot, leaves))


def _local(leaf: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor that holds this rank's bytes, None if there is no single one."""
    inner = leaf._local_tensor if type(leaf) is DTensor else leaf
    is_plain = type(inner) in (torch.Tensor, torch.nn.Parameter) and inner.layout is torch.strided
    return inner if is_plain and not inner.is_nested else None


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _snapshot(leaf: Any) -> Any:
    if isinstance(leaf, _IMMUTABLE):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:
        # Raised here, on one rank, it would leave the others waiting in the save, which refuses the object on all.
        return leaf
