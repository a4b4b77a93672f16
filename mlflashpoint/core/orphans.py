"""Orphans: seats that no rank of the job sits on any more, because the node runs fewer ranks now."""

from __future__ import annotations

import logging
from pathlib import Path

from mlflashpoint.core.manifest import seats_of
from mlflashpoint.core.plan import VersionKey
from mlflashpoint.core.rotation import Tenant, Version, may_overwrite
from mlflashpoint.core.seat import SeatLock
from mlflashpoint.core.slotfiles import clear_places, remove_files, scan_seat
from mlflashpoint.errors import ContainerError, FlashpointError

log = logging.getLogger("mlflashpoint.core")


def free_orphans(group_dir: Path, newest: VersionKey | None) -> int:
    """Remove the slots of seats without an owner, by the rule that holds for slots with one.

    Args:
        group_dir: the group's folder on this node.
        newest: the newest complete version, which must survive; None if there is none.

    Returns:
        bytes freed. Failures are logged only.
    """
    freed = 0
    for seat in seats_of(group_dir).values():
        try:
            lock = SeatLock(seat, wait_s=0)
        except ContainerError:
            continue
        try:
            freed += free_slots(seat, newest)
        except (FlashpointError, OSError) as error:
            log.warning("the orphaned seat %s could not be freed: %s", seat, error)
        finally:
            lock.release()
    if freed:
        log.info("freed %d bytes of seats that no rank sits on any more", freed)
    return freed


def free_slots(seat: Path, newest: VersionKey | None = None) -> int:
    """Remove a seat's slots, but not what the rule protects; whoever calls it holds the seat's lock.

    Returns:
        bytes freed.

    Raises:
        OSError: a file can't be removed.
        ContainerError: the seat can't be read.
    """
    freed = 0
    clear_places(seat)
    for slot in scan_seat(seat):
        record = slot.record
        if record is not None and newest is not None:
            kept = record.version == newest[:3]
            tenant = Tenant(Version(record.incarnation, record.step), failed=not kept)
            if not may_overwrite(tenant, Version(newest.incarnation, newest.step)):
                continue
        freed += remove_files(slot.path)
    return freed


def free_replicas(seat: Path) -> int:
    """Remove the replicas on a seat, of a rank that keeps none any more; raises as ``free_slots``."""
    return sum(remove_files(slot.path) for slot in scan_seat(seat) if slot.replica)
