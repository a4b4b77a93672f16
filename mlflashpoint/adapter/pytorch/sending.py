"""A staged state as it is sent to a checkpoint process.

``AsyncCheckpointerType.PROCESS`` pickles the state on each rank by itself, its tensors through files in /dev/shm. A
rank that fails there, or where it arrives, never begins the save, and DCP lets the others wait for it for half an hour.
So each leaf is pickled here, once, and what fails is ``Missing`` from the state that is sent.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import rebuild_storage_filename, reduce_storage

from mlflashpoint.adapter.pytorch.missing import Missing
from mlflashpoint.adapter.pytorch.structure import local_of, rebuild, walked

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_SENT = "sent to the checkpoint process"
_READ = "read in the checkpoint process"


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` in a form that ``ForkingPickler`` takes without fail; unpickled, it is the state.

    To be sent to one process, once: what it holds of the system's files is given back when they are received.
    """
    try:
        return _packed(state)
    except RecursionError as error:
        return {"state": Missing.of(state, _SENT, error)}


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    keys, leaves = walked(state)
    for key in keys:
        if type(key) not in _PLAIN:
            try:
                ForkingPickler.dumps(key)
            except Exception as error:
                return {"state": Missing.of(key, f"{_SENT} as a key", error)}
    parcel = _Parcel()
    return rebuild(state, map(parcel.leaf, leaves))  # type: ignore[no-any-return]


class _Parcel:
    """The leaves of one state, which share storages and meshes."""

    def __init__(self) -> None:
        #: by address
        self._lent: dict[int, _Lent] = {}
        #: those that can be pickled; kept, so that no other one gets its address
        self._meshes: dict[int, Any] = {}

    def leaf(self, leaf: Any) -> Any:
        """As it is sent."""
        if type(leaf) in _PLAIN or isinstance(leaf, Missing):
            return leaf
        try:
            staged = local_of(leaf) if type(leaf) in (torch.Tensor, DTensor) else None
            if staged is not None and _is_plain_memory(staged) and not leaf.requires_grad:
                return self._tensor(staged, leaf._spec if type(leaf) is DTensor else None)
            return self._letter(leaf)
        except Exception as error:
            return Missing.of(leaf, _SENT, error)

    def _tensor(self, tensor: torch.Tensor, spec: Any) -> _Tensor:
        """The short way: there are thousands of them."""
        if spec is not None and id(spec.mesh) not in self._meshes:
            ForkingPickler.dumps(spec)
            self._meshes[id(spec.mesh)] = spec.mesh
        (lent,) = self._lend([tensor.untyped_storage()])
        return _Tensor(lent, tensor, spec)

    def _letter(self, leaf: Any) -> _Letter:
        content = io.BytesIO()
        pickler = _Pickler(content)
        pickler.dump(leaf)
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        return _Letter(kind, content.getvalue(), self._lend(pickler.storages))

    def _lend(self, storages: list[torch.UntypedStorage]) -> list[_Lent]:
        """All of them, or none."""
        added: list[int] = []
        try:
            for storage in storages:
                if storage._cdata not in self._lent:
                    self._lent[storage._cdata] = _Lent(storage)
                    added.append(storage._cdata)
        except Exception:
            for address in added:
                self._lent.pop(address).take_back()
            raise
        return [self._lent[storage._cdata] for storage in storages]


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


class _Pickler(ForkingPickler):
    """Pickles an object without the storages of its tensors, which are numbered.

    Attributes:
        storages: the storages in the order of their numbers.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.UntypedStorage) or value.device.type != "cpu":
            return None
        number = self._numbers.setdefault(value._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(value)
        return number

    def reducer_override(self, value: Any) -> Any:
        if type(value) is DTensor:
            # torch takes one whose part begins further on in its storage for a plain tensor, and crashes.
            return _as_dtensor, (value._local_tensor, value._spec, value.requires_grad)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, storages: list[torch.UntypedStorage | Exception]) -> None:
        super().__init__(io.BytesIO(content))
        self._storages = storages

    def persistent_load(self, number: int) -> torch.UntypedStorage:
        found = self._storages[number]
        if isinstance(found, Exception):
            raise found
        return found


class _Letter:
    """A pickled leaf beside the storages that it needs; it arrives as the leaf."""

    def __init__(self, kind: str, content: bytes, storages: list[_Lent]) -> None:
        self._parts = kind, content, storages

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._parts


def _opened(kind: str, content: bytes, storages: list[torch.UntypedStorage | Exception]) -> Any:
    try:
        return _Unpickler(content, storages).load()
    except Exception as error:
        return Missing.of_kind(kind, _READ, error)


class _Tensor:
    """A plain tensor, or the DTensor of ``spec`` whose part it is, beside its storage; it arrives as the tensor."""

    def __init__(self, lent: _Lent, tensor: torch.Tensor, spec: Any) -> None:
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self._parts = lent, tensor.dtype, place, spec

    def __reduce__(self) -> tuple[Any, ...]:
        return _placed, self._parts


def _placed(storage: torch.UntypedStorage | Exception, dtype: torch.dtype, place: tuple[Any, ...], spec: Any) -> Any:
    try:
        if isinstance(storage, Exception):
            raise storage
        tensor = torch.empty(0, dtype=dtype).set_(storage, *place)
        return tensor if spec is None else _as_dtensor(tensor, spec, False)
    except Exception as error:
        return Missing.of_kind("torch.Tensor", _READ, error)


class _Lent:
    """A storage that is shared with the receiver; it arrives as the storage, or as what kept it from that."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and not storage.data_ptr():
            # Sharing it would read from there, and end the process.
            raise ValueError("its tensor has no memory of its own")
        self._storage = storage
        self._reduced = reduce_storage(storage)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._reduced

    def take_back(self) -> None:
        """Nobody will receive it."""
        if self._reduced[0] is rebuild_storage_filename:
            self._storage._shared_decref()
        for part in self._reduced[1]:
            if hasattr(part, "detach"):
                # A file that is kept open for the receiver. Without a free file there is no way to it.
                with contextlib.suppress(OSError, EOFError):
                    os.close(part.detach())


def _received(rebuilt: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        return rebuilt(*arguments)
    except Exception as error:
        return error


def _as_dtensor(local: torch.Tensor, spec: Any, requires_grad: bool) -> DTensor:
    return DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]
