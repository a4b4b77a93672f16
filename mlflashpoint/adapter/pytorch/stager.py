"""Staging for ``dcp.async_save``: the state is copied into buffers that are made once and used again.

DCP's default stager allocates a copy of the whole state at every save, and touching fresh pages costs several times
what the copy itself does. Here a save whose state has the structure of the one before copies into the same memory.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from mlflashpoint.adapter.pytorch.copies import copy_all
from mlflashpoint.adapter.pytorch.missing import Missing
from mlflashpoint.adapter.pytorch.sending import packed
from mlflashpoint.adapter.pytorch.structure import Structure, is_nested, local_of, rebuild

#: sets of buffers that are kept: one being uploaded while the next save is staged
_SETS = 2
#: bytes; a cache line, and a multiple of every element size
_ALIGN = 64
_STAGED = "copied, which async_save does first"
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


class ReusedStager:
    """Copies a state to host memory; after ``stage`` returns the caller may change every tensor and object of it.

    Has the methods of DCP's ``AsyncStager``. Tensors of a kind of their own (neither plain nor DTensor) are left to
    DCP's blocking stager.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._sets: list[_Buffers] = []

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``state_dict`` on the host; what can't be copied is ``Missing`` from it."""
        try:
            return self._stage(state_dict)
        except Exception as error:
            return _Staged({"state": Missing.of(state_dict, "staged", error)})

    def _stage(self, state_dict: dict[str, Any]) -> _Staged:
        found = self._fitting(state_dict)
        if found is not None:
            return found[0].fill(state_dict, found[1])
        structure, leaves = Structure.of(state_dict)
        if not structure.is_comparable:
            return _Buffers(structure, leaves).fill(state_dict, leaves)
        # First of all, so that idle ones make room for the new.
        self._sets = [buffers for buffers in self._sets if buffers.busy][: _SETS - 1]
        self._sets.append(_Buffers(structure, leaves))
        return self._sets[-1].fill(state_dict, leaves)

    def _fitting(self, state: dict[str, Any]) -> tuple[_Buffers, list[Any]] | None:
        """Idle buffers for ``state``, and its leaves."""
        for buffers in self._sets:
            leaves = None if buffers.busy else buffers.match(state)
            if leaves is not None:
                return buffers, leaves
        return None

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the copy is made."""

    def close(self) -> None:
        """Give the buffers back."""
        self._sets.clear()


class _Staged(dict[str, Any]):
    """A staged state; once it is gone nobody reads its buffers any more."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (packed(dict(self)),)


class _Buffers:
    """Host memory for states of one structure, one at a time."""

    def __init__(self, structure: Structure, leaves: list[Any]) -> None:
        self.structure = structure
        self._user: weakref.ref[_Staged] | None = None
        sources = {place: local_of(leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        found = {place: source for place, source in sources.items() if source is not None}
        pinned = any(source.is_cuda for source in found.values())
        memory = torch.empty(
            sum(_padded(_nbytes(source)) for source in found.values()), dtype=torch.uint8, pin_memory=pinned
        )
        self._views: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, Any] = {}
        offset = 0
        for place, source in found.items():
            leaf, nbytes = leaves[place], _nbytes(source)
            view = memory[offset : offset + nbytes].view(source.dtype).view(source.shape)
            offset += _padded(nbytes)
            self._views[place] = self._tensors[place] = view
            if isinstance(leaf, DTensor):
                self._tensors[place] = DTensor(view, leaf._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def match(self, state: dict[str, Any]) -> list[Any] | None:
        """The leaves of ``state`` if they fit in, else None."""
        leaves = self.structure.match(state)
        fits = leaves is not None and all(local_of(leaves[place]) is not None for place in self._views)
        return leaves if fits else None

    @property
    def busy(self) -> bool:
        return self._user is not None and self._user() is not None

    def fill(self, state: dict[str, Any], leaves: list[Any]) -> _Staged:
        tensors = {**self._tensors, **self._lost(leaves)}
        staged = (tensors[p] if p in tensors else _snapshot(leaf) for p, leaf in enumerate(leaves))
        result = _Staged(rebuild(state, staged))
        self._user = weakref.ref(result)
        return result

    def _lost(self, leaves: list[Any]) -> dict[int, Missing]:
        """Copy the tensors; those that could not be, by their place."""
        sources = [source for place in self._views if (source := local_of(leaves[place])) is not None]
        try:
            _copy(list(self._views.values()), sources)
            return {}
        except Exception:
            return self._lost_one_by_one(leaves, sources)

    def _lost_one_by_one(self, leaves: list[Any], sources: list[torch.Tensor]) -> dict[int, Missing]:
        lost = {}
        for (place, view), source in zip(self._views.items(), sources, strict=True):
            try:
                view.copy_(source)
            except Exception as error:
                lost[place] = Missing.of(leaves[place], _STAGED, error)
        return lost


def _copy(views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    devices = {source.device for source in sources if source.device.type != "cpu"}
    if devices:
        # It takes no lazily conjugated or negated view; for all others these give back the tensor itself.
        torch._foreach_copy_(views, [source.resolve_conj().resolve_neg() for source in sources], non_blocking=True)
        for device in devices:
            getattr(torch, device.type).current_stream(device).synchronize()
    else:
        copy_all(views, sources)


def _snapshot(leaf: Any) -> Any:
    """A copy of what has no buffer, never the leaf itself: training changes it while it is saved."""
    if isinstance(leaf, _IMMUTABLE):
        return leaf
    try:
        return _tensor_copy(leaf) if isinstance(leaf, torch.Tensor) else _object_copy(leaf)
    except Exception as error:
        return Missing.of(leaf, _STAGED, error)


def _tensor_copy(leaf: torch.Tensor) -> Any:
    if not is_nested(leaf):
        # It can't copy all layouts.
        with contextlib.suppress(Exception):
            return BlockingAsyncStager().stage({"": leaf})[""]
    own = leaf.detach()
    return own.clone() if own.is_cpu else own.cpu()


def _object_copy(leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception:
        # As DCP will store it; a tensor with a history, for one, can be pickled and not deep-copied.
        return pickle.loads(pickle.dumps(leaf, pickle.HIGHEST_PROTOCOL))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
