"""Reading one shard: check its digests, and copy its state, or single tensors, out of it."""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlflashpoint.core import mapping
from mlflashpoint.core.copying import Schedule, in_two_threads
from mlflashpoint.core.flatten import Flat, flatten
from mlflashpoint.core.layout import view_of
from mlflashpoint.core.pairing import Pairing, described, overlaps, pair
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.shard import ShardIndex, TensorEntry, digest_of, parse_index
from mlflashpoint.core.skeleton import Entry
from mlflashpoint.core.slotfiles import file_of, read_index, read_record
from mlflashpoint.core.unflatten import unflatten
from mlflashpoint.errors import (
    ContainerError,
    ShardCorruptError,
    ShardFormatError,
    StateMismatchError,
)

log = logging.getLogger("mlflashpoint.core")


class ShardReader:
    """Reads one committed shard.

    Attributes:
        record: its commit record.
        index: its parsed index.
        path: prefix of the slot's files, None if it was given as buffers.
    """

    def __init__(self, record: ShardRecord, index: ShardIndex, memory: Tensor, path: Path | None) -> None:
        self.record = record
        self.index = index
        self.path = path
        self._memory: Tensor | None = memory
        self._raw: memoryview | None = None
        self._verified_at: float | None = None
        self._pairing: Pairing | None = None
        self._from: tuple[Schedule, array[int]] | None = None
        self._schedule = Schedule([entry.nbytes for entry in index.tensors], [True] * len(index.tensors))
        self._decodes = any(type(token) is Entry for token in index.skeleton.tokens)
        self._names = {entry.name: number for number, entry in enumerate(index.tensors)}

    @classmethod
    def open(cls, slot_path: Path) -> ShardReader:
        """Open the slot with that prefix, by a read-only mapping of its own.

        Raises:
            ShardFormatError: there is no commit record, or it, the index or the data file is malformed.
            ShardCorruptError: the index has not the digest that the commit record gives.
            ContainerError: a file can't be read.
        """
        slot_path = Path(slot_path)
        record = read_record(slot_path)
        if record is None:
            raise ShardFormatError("the slot holds no committed shard", path=slot_path)
        index = read_index(slot_path, record)
        mapped = mapping.map_readable(file_of(slot_path, "data"), record.data_bytes)
        memory = torch.empty(0, dtype=torch.uint8, device="cpu") if mapped is None else mapped.bytes
        return cls._checked(record, index, memory, slot_path)

    @classmethod
    def from_buffers(cls, record: ShardRecord, index: bytes, data: memoryview | bytes | bytearray) -> ShardReader:
        """Read a shard that lies in memory, for example a fetched replica; the buffer must live as long as the reader.

        Raises:
            ShardFormatError, ShardCorruptError: as ``open``.
        """
        if len(data) < record.data_bytes:
            raise ShardFormatError(f"{len(data)} bytes of data, the commit record says {record.data_bytes}")
        memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if record.data_bytes:
            memory = mapping.as_tensor(data, record.data_bytes)
        return cls._checked(record, index, memory, None)

    @classmethod
    def _checked(cls, record: ShardRecord, index: bytes, memory: Tensor, path: Path | None) -> ShardReader:
        try:
            if len(index) != record.index_bytes:
                raise ShardFormatError(f"the index has not the {record.index_bytes} bytes that its commit record says")
            if digest_of(index) != record.index_digest:
                raise ShardCorruptError("the index has not the digest that its commit record gives")
            return cls(record, parse_index(index, record.data_bytes), memory, path)
        except (ShardFormatError, ShardCorruptError) as error:
            raise type(error)(
                error.message, remedy=error.remedy, rank=record.rank, step=record.step, path=path
            ) from error.__cause__

    @property
    def attributes(self) -> dict[str, Any]:
        """The saver's own values."""
        found = unflatten(self.index.attributes, [])
        if not isinstance(found, dict):
            raise ShardFormatError("the attributes are no dictionary", path=self.path)
        return found

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors."""
        return list(self._names)

    def entry(self, name: str) -> TensorEntry:
        """Raises StateMismatchError if there is no tensor of that name."""
        number = self._names.get(name)
        if number is None:
            raise StateMismatchError(f"the shard holds no tensor {name!r}", path=self.path, step=self.record.step)
        return self.index.tensors[number]

    def verify(self) -> None:
        """Compare every tensor's digest, with two threads; raises ShardCorruptError naming the first bad tensor."""
        memory = self._opened()
        buffer = _bytes_view(memory)
        bad: list[str] = []

        def check(entry: TensorEntry) -> None:
            if digest_of(buffer[entry.offset : entry.offset + entry.nbytes]) != entry.digest:
                bad.append(entry.name)

        entries = self.index.tensors
        in_two_threads([functools.partial(check, entry) for entry in entries], self.record.data_bytes)
        if bad:
            raise ShardCorruptError(
                f"tensor {bad[0]!r} has not the digest that was saved ({len(bad)} of {len(entries)} tensors are bad)",
                rank=self.record.rank,
                step=self.record.step,
                path=self.path,
                remedy="another copy, or an older version, is used",
            )
        self._verified_at = time.monotonic()

    def verified_within(self, seconds: float) -> bool:
        """Whether ``verify`` has found all right no longer than ``seconds`` ago."""
        return self._verified_at is not None and time.monotonic() - self._verified_at < seconds

    def state(self, into: Any = None, *, strict: bool = True) -> Any:
        """The shard's state, with its tensors copied out of the store.

        Args:
            into: a state of the same structure; its tensors are overwritten in place and become part of the result.
                Its containers and plain values stay as they are, the result has new ones.
            strict: whether ``into`` must have exactly the shard's tensors; if not, a tensor that only the shard has
                is made anew, and one that only ``into`` has is left alone.

        Raises:
            StateMismatchError: ``into`` differs; names the first differing tensors. Nothing was written.
            StateTypeError: ``into`` holds what can't be in a state.
            ShardFormatError: a leaf of the allow-list is not registered here.
        """
        with torch.inference_mode(False), torch.no_grad():
            return self._state(into, strict)

    def _state(self, into: Any, strict: bool) -> Any:
        self._opened()
        if into is None:
            tensors = [_empty(entry) for entry in self.index.tensors]
            addresses = [tensor.data_ptr() for tensor in tensors]
            return self._fill(tensors, self._schedule, range(len(tensors)), tensors, addresses, True)
        flat = flatten(into, like=None if self._pairing is None else self._pairing.form)
        if self._pairing is None or self._pairing.form is not flat.form or self._pairing.strict != strict:
            found = pair(self.index, flat, strict=strict, where=self._where())
            self._check_shared(flat, found)
            self._pairing = found
        elif flat.moved:
            self._check_shared(flat, self._pairing)
        pairs = self._pairing
        if pairs.straight:
            ours = flat.tensors
            return self._fill(ours, pairs.schedule, pairs.stored, ours, flat.addresses, flat.on_host, pairs.alike)
        tensors = [self._copy_of(number) if at < 0 else flat.tensors[at] for number, at in enumerate(pairs.kept)]
        targets = [flat.tensors[at] for at in pairs.wanted]
        addresses = [flat.addresses[at] for at in pairs.wanted]
        return self._fill(tensors, pairs.schedule, pairs.stored, targets, addresses, flat.on_host)

    def tensor(self, name: str, region: tuple[slice, ...] | None = None) -> Tensor:
        """A copy of one tensor, or of a part of it; raises StateMismatchError if there is none of that name."""
        view = self.view(name)
        return (view if region is None else view[region]).clone()

    def view(self, name: str) -> Tensor:
        """One tensor where it lies in the store, not to be written to; raises StateMismatchError.

        Once the reader is closed the slot may be overwritten, and with it what the view shows.
        """
        return view_of(self.entry(name), self._opened())

    def raw(self, entry: TensorEntry) -> memoryview:
        """The bytes of one of its tensors where they lie, for their digest; valid as ``view``."""
        if self._raw is None:
            self._raw = _bytes_view(self._opened())
        return self._raw[entry.offset : entry.offset + entry.nbytes]

    def copy_into(self, name: str, target: Tensor, region: tuple[slice, ...] | None = None) -> None:
        """Copy one tensor, or a part of it, into ``target``.

        Raises:
            StateMismatchError: there is none of that name, or dtype or shape differ.
        """
        view = self.view(name)
        source = view if region is None else view[region]
        if (source.dtype, source.shape) != (target.dtype, target.shape):
            raise StateMismatchError(
                f"{name}: stored {described(source.dtype, source.shape)}, wanted "
                f"{described(target.dtype, target.shape)}",
                path=self.path,
            )
        with torch.no_grad():
            target.copy_(source)

    def close(self) -> None:
        """Let go of the mapping; may be called twice. The slot may be overwritten from now on."""
        self._pairing = self._from = self._memory = self._raw = None

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _opened(self) -> Tensor:
        if self._memory is None:
            raise ContainerError("the reader is closed", path=self.path)
        return self._memory

    def _fill(
        self,
        tensors: list[Tensor],
        schedule: Schedule,
        stored: Sequence[int],
        targets: Sequence[Tensor],
        addresses: Sequence[int],
        on_host: bool,
        fit: bool = False,
    ) -> Any:
        """Copy the tensors numbered ``stored`` into ``targets``, and put the state together from ``tensors``."""
        skeleton, entries, memory = self.index.skeleton, self.index.tensors, self._opened()
        if not on_host:
            for target, number in zip(targets, stored, strict=True):
                target.copy_(view_of(entries[number], memory))
            return unflatten(skeleton, tensors, fit=fit)
        if self._from is None or self._from[0] is not schedule:
            base = memory.data_ptr()
            self._from = (schedule, schedule.addresses([base + entries[number].offset for number in stored]))
        copy = functools.partial(
            schedule.copy,
            schedule.addresses(addresses),
            self._from[1],
            [targets[place] for place in schedule.odd],
            [view_of(entries[stored[place]], memory) for place in schedule.odd],
        )
        if self._decodes:
            # What is decoded has to be there first.
            copy()
            return unflatten(skeleton, tensors, fit=fit)
        result: list[Any] = []
        copy(lambda: result.append(unflatten(skeleton, tensors, fit=fit)))
        return result[0]

    def _check_shared(self, flat: Flat, pairs: Pairing) -> None:
        """Refuse to load into tensors that share memory what was stored with different contents."""
        memory = self._opened()
        for first, second, shift in overlaps(flat, pairs.wanted):
            one, two = (self.index.tensors[pairs.stored[place]] for place in (first, second))
            nbytes = min(one.nbytes - shift, two.nbytes)
            begin = one.offset + shift
            if not torch.equal(memory[begin : begin + nbytes], memory[two.offset : two.offset + nbytes]):
                raise StateMismatchError(
                    f"{one.name} and {two.name} share memory, and were stored with different contents",
                    remedy="load into a state whose tensors are as independent as those that were saved",
                    **self._where(),
                )

    def _copy_of(self, number: int) -> Tensor:
        return view_of(self.index.tensors[number], self._opened()).clone()

    def _where(self) -> dict[str, Any]:
        return {"rank": self.record.rank, "step": self.record.step, "path": self.path}


def _empty(entry: TensorEntry) -> Tensor:
    if entry.stride is None:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    return torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device="cpu")


def _bytes_view(memory: Tensor) -> memoryview:
    if memory.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr())).cast("B")
