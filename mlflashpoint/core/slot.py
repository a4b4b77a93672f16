"""A slot: room in memory for one shard, mapped into this process and reused from save to save."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from mlflashpoint.core import mapping
from mlflashpoint.core.device import Accelerator
from mlflashpoint.core.files import file_error
from mlflashpoint.core.layout import Layout, Placed
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.slotfiles import check_sizes, file_of, read_record, remove_files
from mlflashpoint.errors import ContainerError, DeadlineExceededError, ShardFormatError

log = logging.getLogger("mlflashpoint.core")

_DEADLINE_S = 600.0


class Slot:
    """One slot.

    Attributes:
        path: prefix of its files, for example ``.../seat-0/slot-1``.
        record: what it holds, by its commit record; None if nothing that is complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: ShardRecord | None = None
        self._mapping: mapping.Mapping | None = None
        self._pinned: tuple[Accelerator, bool] | None = None
        self._placed: Placed | None = None
        self._owner = os.getpid()

    @property
    def data_path(self) -> Path:
        return file_of(self.path, "data")

    @property
    def capacity(self) -> int:
        """Bytes that it can hold, 0 if it is not mapped."""
        return 0 if self._mapping is None else self._mapping.nbytes

    @property
    def bytes(self) -> torch.Tensor:
        """All of it: a writable uint8 tensor of ``capacity`` elements; it and its views keep the mapping alive."""
        return self._mapped().bytes

    @property
    def buffer(self) -> memoryview:
        """All of it, writable; keeps the mapping alive likewise."""
        return self._mapped().buffer

    def placed(self, layout: Layout) -> Placed:
        """The layout in this slot; the last one is kept."""
        if self._placed is None or self._placed.layout is not layout:
            self._placed = layout.place(self.bytes)
        return self._placed

    def adopt(self) -> None:
        """Map what a predecessor left, and read what it holds; changes nothing.

        Raises:
            ContainerError: it can't be read or mapped.
            StoreFullError: its file is not all memory, and there is no room to make it so.
        """
        try:
            record = read_record(self.path)
            if record is not None:
                check_sizes(self.path, record)
            self.record = record
        except ShardFormatError as error:
            log.warning("a slot is taken for empty: %s", error)
        self.remap()

    def remap(self) -> None:
        """Map its file as it is now. What others got of the old mapping stays valid and shows the same memory."""
        fresh = mapping.map_writable(self.data_path)
        if fresh is not None:
            fresh.populate(write=True)
        self.unmap()
        self._mapping = fresh

    def unmap(self) -> None:
        """Let go of the mapping; the file stays."""
        if self._pinned is not None and self._pinned[1] and self._owner == os.getpid():
            self._pinned[0].unpin(self.bytes)
        self._pinned = None
        self._placed = None
        self._mapping = None

    def pin(self, accelerator: Accelerator) -> None:
        """Prepare it for copies from devices, once; it stays as it is where that is refused."""
        if self._pinned is None:
            self._pinned = accelerator, accelerator.pin(self.bytes)

    def invalidate(self) -> None:
        """Declare it empty, which comes before its first byte is overwritten: remove the commit record.

        Raises:
            ContainerError: that can't be done, or the slot belongs to the process that this one was forked from.
        """
        if self._owner != os.getpid():
            raise ContainerError(
                f"the slot belongs to process {self._owner}, which this one was forked from", path=self.path
            )
        try:
            file_of(self.path, "commit").unlink(missing_ok=True)
        except OSError as error:
            raise file_error("the slot can't be invalidated", error, path=self.path) from error
        self.record = None

    def remove(self) -> int:
        """Remove its files, the commit record first, and let go of the mapping; returns the bytes freed.

        Raises ContainerError.
        """
        self.invalidate()
        try:
            freed = remove_files(self.path)
        except OSError as error:
            raise file_error("the slot can't be removed", error, path=self.path) from error
        self.unmap()
        return freed

    def _mapped(self) -> mapping.Mapping:
        if self._mapping is None:
            raise ContainerError("the slot is not mapped", path=self.path)
        return self._mapping


def prepare(slots: Sequence[Slot], nbytes: int) -> None:
    """Give each slot's file ``nbytes`` bytes of memory, keeping what it holds, and map it; all slots at once.

    Raises:
        StoreFullError: there is no room; files that were not there before are not there now.
        ContainerError: a file can't be made.
    """
    made = [slot for slot in slots if not slot.data_path.exists()]
    failures: list[Exception] = []

    def one(slot: Slot) -> None:
        try:
            mapping.allocate(slot.data_path, nbytes)
            slot.remap()
        except Exception as error:
            failures.append(error)

    # The kernel zeroes each page with one thread per call, so one call per slot is that many times faster.
    threads = [
        threading.Thread(target=one, args=(slot,), name="mlflashpoint-allocate", daemon=True) for slot in slots[1:]
    ]
    for thread in threads:
        thread.start()
    for slot in slots[:1]:
        one(slot)
    for thread in threads:
        thread.join(_DEADLINE_S)
        if thread.is_alive():
            failures.append(DeadlineExceededError(f"allocating {nbytes} bytes took more than {_DEADLINE_S:g} s"))
    if failures:
        for slot in made:
            slot.unmap()
            with contextlib.suppress(OSError):
                slot.data_path.unlink(missing_ok=True)
        raise failures[0]
