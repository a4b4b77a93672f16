"""Saving one shard: ``stage`` copies the state into a slot while training waits, ``commit`` finishes in the background.

The order is what makes a crash harmless: the slot's commit record is removed before its first byte changes and
written again, last and by rename, when data, digests and index are in place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlflashpoint.core.copying import Schedule
from mlflashpoint.core.device import Accelerator, Cuda
from mlflashpoint.core.files import file_error, replace_file
from mlflashpoint.core.flatten import Flat, flatten
from mlflashpoint.core.layout import Layout, view_of
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.shard import MAX_INDEX_BYTES, digest_of, new_digest, render_plain
from mlflashpoint.core.slot import Slot
from mlflashpoint.core.slotfiles import file_of
from mlflashpoint.errors import StateTypeError, StoreFullError

#: a digest of more is made in pieces: one takes some ten milliseconds
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Planned:
    """A state taken apart and laid out, not yet copied; holds the state's tensors.

    Attributes:
        nbytes: room that it takes in a slot.
    """

    flat: Flat = field(repr=False)
    layout: Layout = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


@dataclass(frozen=True)
class Staged:
    """A shard whose bytes lie in a slot, not yet committed. Holds nothing of the state.

    Attributes:
        slot: where.
        nbytes: of the data.
    """

    slot: Slot
    nbytes: int
    layout: Layout = field(repr=False)
    values: list[Any] = field(repr=False)
    attributes: str = field(repr=False)


class ShardSaver:
    """Saves shards of one rank; keeps what it learnt about the state's structure from save to save.

    Args:
        accelerators: device type -> how to copy from it; other devices are copied from by torch, one by one.
    """

    def __init__(self, accelerators: Mapping[str, Accelerator] | None = None) -> None:
        self._layout: Layout | None = None
        self._accelerators = {"cuda": Cuda()} if accelerators is None else accelerators

    def plan(self, state: Any) -> Planned:
        """Take ``state`` apart and lay it out; raises StateTypeError."""
        layout = self._layout
        flat = flatten(state, like=None if layout is None else layout.form)
        if layout is None or flat.form is not layout.form:
            layout = self._layout = Layout(flat)
        return Planned(flat, layout)

    def size_of(self, state: Any) -> int:
        """Bytes that ``state`` takes in a slot; raises StateTypeError."""
        return self.plan(state).nbytes

    def stage(self, slot: Slot, state: Any, *, attributes: Mapping[str, Any] | None = None) -> Staged:
        """Copy ``state`` into ``slot``. When this returns the caller may change everything.

        Args:
            slot: its present content is given up first.
            state: nested state, or what ``plan`` made of it.
            attributes: plain values, and containers of such, that travel with the shard.

        Raises:
            StateTypeError: the state or the attributes hold what can't be stored; the slot is as before.
            StoreFullError: the slot is too small; it is as before.
            ContainerError: the slot can't be written.
        """
        # What is made here lives on, for saves outside of the mode that this one may be made in.
        with torch.inference_mode(False), torch.no_grad():
            return self._stage(slot, state if isinstance(state, Planned) else self.plan(state), attributes or {})

    def _stage(self, slot: Slot, planned: Planned, attributes: Mapping[str, Any]) -> Staged:
        text = _rendered(attributes)
        layout = planned.layout
        if layout.nbytes > slot.capacity:
            raise StoreFullError(
                f"the state needs {layout.nbytes} bytes, the slot has {slot.capacity}",
                path=slot.path,
                remedy="reserve larger slots",
            )
        slot.invalidate()
        self._copy(slot, planned)
        return Staged(slot, layout.nbytes, layout, planned.flat.skeleton.values, text)

    def attach(self, staged: Staged, attributes: Mapping[str, Any]) -> Staged:
        """The same with other attributes, for those that are known only after staging; raises StateTypeError."""
        return dataclasses.replace(staged, attributes=_rendered(attributes))

    def commit(
        self,
        staged: Staged,
        *,
        job_id: str,
        group: str,
        incarnation: int,
        step: int,
        rank: int,
        world_size: int,
        topology: str = "",
        resumed_from: int = -1,
        run: str = "",
        created_s: float | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> ShardRecord:
        """Make the staged shard complete: digests, index, and last the commit record. The arguments are its fields.

        ``between`` is called again and again while the digests are computed, which takes a while.

        Raises:
            StoreFullError: there is no room for the index.
            ContainerError: a file can't be written.
            StateTypeError: the skeleton is too large for an index. The slot then holds nothing, in all three cases.
        """
        slot = staged.slot
        buffer = slot.buffer
        digests = []
        for entry in staged.layout.entries:
            digests.append(_digest(buffer[entry.offset : entry.offset + entry.nbytes], between))
        index = staged.layout.template.render(staged.values, digests, staged.attributes)
        if len(index) > MAX_INDEX_BYTES:
            raise StateTypeError(
                f"the skeleton takes {len(index)} bytes of index, more than {MAX_INDEX_BYTES}",
                step=step,
                remedy="keep large tables of plain values in tensors",
            )
        record = ShardRecord(
            job_id=job_id,
            group=group,
            incarnation=incarnation,
            step=step,
            rank=rank,
            world_size=world_size,
            topology=topology,
            index_bytes=len(index),
            index_digest=digest_of(index),
            data_bytes=staged.nbytes,
            created_s=time.time() if created_s is None else created_s,
            resumed_from=resumed_from,
            run=run,
        )
        commit_files(slot, record, index)
        return record

    def _copy(self, slot: Slot, planned: Planned) -> None:
        flat, schedule = planned.flat, planned.layout.schedule
        if not flat.on_host:
            self._copy_from_devices(slot, planned)
            return
        placed = slot.placed(planned.layout)
        odd = [flat.tensors[number] for number in schedule.odd]
        schedule.copy(placed.to, schedule.addresses(flat.addresses), placed.odd, odd)

    def _copy_from_devices(self, slot: Slot, planned: Planned) -> None:
        flat, entries, memory = planned.flat, planned.layout.entries, slot.bytes
        groups: dict[torch.device, list[int]] = {}
        for number, place in enumerate(flat.devices):
            groups.setdefault(place, []).append(number)
        begun: set[str] = set()
        try:
            for place, numbers in groups.items():
                accelerator = self._accelerators.get(place.type)
                if accelerator is not None:
                    slot.pin(accelerator)
                    begun.add(place.type)
                    targets = [view_of(entries[number], memory) for number in numbers]
                    accelerator.start(targets, [flat.tensors[number] for number in numbers], place)
            for place, numbers in groups.items():
                if place.type == "cpu":
                    self._copy_some(numbers, planned, memory)
                elif place.type not in self._accelerators:
                    for number in numbers:
                        view_of(entries[number], memory).copy_(flat.tensors[number].detach())
        finally:
            for kind in begun:
                self._accelerators[kind].wait()

    def _copy_some(self, numbers: list[int], planned: Planned, memory: Tensor) -> None:
        flat, layout, base = planned.flat, planned.layout, memory.data_ptr()
        entries = [layout.entries[number] for number in numbers]
        schedule = Schedule([entry.nbytes for entry in entries], [layout.raw[number] for number in numbers])
        schedule.copy(
            schedule.addresses([base + entry.offset for entry in entries]),
            schedule.addresses([flat.addresses[number] for number in numbers]),
            [view_of(entries[place], memory) for place in schedule.odd],
            [flat.tensors[numbers[place]] for place in schedule.odd],
        )


def _digest(data: memoryview, between: Callable[[], None]) -> str:
    if len(data) <= _PIECE_BYTES:
        digest = digest_of(data)
        between()
        return digest
    parts = new_digest()
    for start in range(0, len(data), _PIECE_BYTES):
        parts.update(data[start : start + _PIECE_BYTES])
        between()
    return parts.hexdigest()


def _rendered(attributes: Mapping[str, Any]) -> str:
    extra = flatten(dict(attributes))
    if extra.tensors:
        raise StateTypeError(f"attribute {extra.names()[0]}: a tensor", remedy="put it into the state")
    return render_plain(extra.skeleton)


def commit_files(slot: Slot, record: ShardRecord, index: bytes) -> None:
    """Write a slot's index and then its commit record, each as a whole; the data is in place.

    Raises:
        StoreFullError: there is no room.
        ContainerError: a file can't be written.
    """
    try:
        replace_file(file_of(slot.path, "index"), index)
        replace_file(file_of(slot.path, "commit"), record.to_json())
    except OSError as error:
        raise file_error("the shard can't be committed", error, path=slot.path, step=record.step) from error
    slot.record = record
