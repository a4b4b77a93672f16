"""The arena: the slots of one seat. Each is a file in memory that is allocated once, mapped once and reused.

A restart finds its predecessor's slots and takes them over as they are; nothing here ever shortens a slot or touches
its content. The caller holds the seat (``SeatLock``).
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from mlflashpoint.core.files import file_error
from mlflashpoint.core.slot import Slot, prepare
from mlflashpoint.core.slotfiles import SlotInfo, file_of, read_record, scan_seat
from mlflashpoint.core.space import free_bytes
from mlflashpoint.errors import StoreFullError

__all__ = ["Arena", "Slot", "SlotInfo", "file_of", "read_record", "scan_seat"]

log = logging.getLogger("mlflashpoint.core")

#: slots are whole huge pages, for a file system that has them
_GRAIN = 2 << 20


class Arena:
    """The slots of one seat.

    Args:
        seat_dir: the seat's folder; the caller holds its lock.
        prefix: ``slot`` for this rank's own shards, ``replica`` for received ones.

    Attributes:
        slots: those that were adopted or reserved.
    """

    def __init__(self, seat_dir: Path, *, prefix: str = "slot") -> None:
        self.seat_dir = Path(seat_dir)
        self.prefix = prefix
        self.slots: list[Slot] = []

    def adopt(self) -> list[Slot]:
        """Take over the slots that are there, whatever they hold, and remove left-over temporary files.

        Raises:
            ContainerError: the seat can't be read, or a slot can't be mapped.
        """
        known = {slot.path for slot in self.slots}
        for number in self._found():
            slot = Slot(self._path(number))
            if slot.path not in known:
                slot.adopt()
                self.slots.append(slot)
        return self.slots

    def reserve(self, count: int, nbytes: int) -> None:
        """Have at least ``count`` slots, each of at least ``nbytes`` bytes.

        Content and records of existing slots stay: a slot that is too small is lengthened. It is mapped anew then, so
        no save may be under way in it.

        Raises:
            StoreFullError: there is no room; names need and have in bytes, and nothing was changed.
            ContainerError: a file can't be made.
        """
        small = [slot for slot in self.slots if slot.capacity < nbytes]
        if len(self.slots) >= count and not small:
            return
        fresh = self._fresh(count - len(self.slots))
        self._prepare([*small, *fresh], nbytes, max(count, len(self.slots)))
        self.slots += fresh

    def add(self, nbytes: int) -> Slot:
        """One more slot of at least ``nbytes`` bytes, empty; raises as ``reserve``."""
        (slot,) = self._fresh(1)
        self._prepare([slot], nbytes, 1)
        self.slots.append(slot)
        return slot

    def enlarge(self, slot: Slot, nbytes: int) -> None:
        """Make one slot of the arena at least ``nbytes`` bytes long, keeping what it holds; raises as ``reserve``."""
        if slot.capacity < nbytes:
            self._prepare([slot], nbytes, 1)

    def remove(self, slot: Slot) -> int:
        """Give up a slot and its memory; returns the bytes freed. Raises ContainerError."""
        freed = slot.remove()
        self.slots.remove(slot)
        return freed

    def _fresh(self, count: int) -> list[Slot]:
        taken = {slot.path for slot in self.slots}
        free_paths = (path for path in map(self._path, range(count + len(taken))) if path not in taken)
        return [Slot(next(free_paths)) for _ in range(count)]

    def _prepare(self, slots: list[Slot], nbytes: int, count: int) -> None:
        size = max(1, -(-nbytes // _GRAIN)) * _GRAIN
        need = sum(size - slot.capacity for slot in slots)
        have = free_bytes(self.seat_dir)
        if need > have:
            raise StoreFullError(
                f"{count} slots of {size} bytes need {need} more bytes, the store has {have}",
                path=self.seat_dir,
                setting="MLFLASHPOINT_BASE_CONTAINER",
                remedy="give the memory file system more room, or keep fewer versions (MLFLASHPOINT_KEEP_VERSIONS)",
            )
        prepare(slots, size)

    def close(self) -> None:
        """Let go of the mappings; the files stay. What others still hold of them stays valid until they let go."""
        for slot in self.slots:
            slot.unmap()
        self.slots = []

    def _path(self, number: int) -> Path:
        return self.seat_dir / f"{self.prefix}-{number}"

    def _found(self) -> list[int]:
        slots = re.compile(rf"{re.escape(self.prefix)}-([0-9]{{1,9}})\.data")
        left_over = re.compile(rf"{re.escape(self.prefix)}-[0-9]{{1,9}}\.(data|index|commit)\.tmp-.*")
        try:
            names = os.listdir(self.seat_dir)
            for name in names:
                if left_over.fullmatch(name):
                    (self.seat_dir / name).unlink(missing_ok=True)
        except OSError as error:
            raise file_error("the seat can't be read", error, path=self.seat_dir) from error
        return sorted(int(match[1]) for name in names if (match := slots.fullmatch(name)))
