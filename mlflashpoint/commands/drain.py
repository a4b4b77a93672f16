"""``mlflashpoint drain``: copy what a node's memory holds to a durable directory, from which recovery works too."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from mlflashpoint.commands.inventory import Inventory, Version, base_from, human_bytes, reported, take_stock
from mlflashpoint.core.arena import SlotInfo
from mlflashpoint.core.drain import drain_slot, tried_again, worse
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.errors import DrainError, FlashpointError, NoVersionError, OverwrittenError

_LONGEST_S = 86400.0


def main(argv: list[str]) -> int:
    """Exit code 0: drained; 1: nothing is there, or it could not be drained, then none of it is left."""
    parser = argparse.ArgumentParser(
        prog="mlflashpoint drain",
        description="Copy the newest version in this node's memory to a durable directory. Of a version whose ranks are"
        " spread over several nodes, run it on each of them.",
    )
    parser.add_argument("base", nargs="?", metavar="BASE", help="base container; by default what the settings name")
    parser.add_argument("--to", required=True, type=Path, metavar="DIR", help="directory that all nodes see")
    parser.add_argument("--budget", type=_seconds, default=_LONGEST_S, metavar="S", help="longest time in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args(argv)

    def drain() -> int:
        base, to, deadline = base_from(options.base), options.to.absolute(), time.monotonic() + options.budget
        inventory = take_stock(base)
        reports = [
            report
            for group in inventory.groups
            for report in tried_again(functools.partial(_drain_group, base, group, to, deadline), deadline=deadline)
        ]
        if not reports:
            raise NoVersionError("there is no version to drain", path=inventory.container.path)
        if options.json:
            sys.stdout.write(json.dumps({"to": str(options.to), "versions": reports}, indent=2) + "\n")
            return 0
        for report in reports:
            what = f"group {report['group']}, step {report['step']}, {len(report['ranks'])} ranks"
            sys.stdout.write(f"{options.to}: {what}: {human_bytes(report['bytes'])} written\n")
        return 0

    return reported("drain", drain)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def _drain_group(base: Path, group: str, to: Path, deadline: float) -> list[dict[str, Any]]:
    """Drain what the group has at this moment; returns a report for each version, none if there is no version.

    Raises:
        OverwrittenError: the job has overwritten what was to be drained, and nothing was.
        FlashpointError: it can't be drained.
    """
    inventory = take_stock(base)
    reports: list[dict[str, Any]] = []
    lost: OverwrittenError | None = None
    for version in _wanted(inventory, group):
        try:
            nbytes = _drain(inventory, version, to, deadline)
        except OverwrittenError as error:
            # Of several that may be whole with other nodes the older ones may go while the newest is copied.
            lost = lost or error
            continue
        reports.append({"group": group, "step": version.key.step, "ranks": list(version.ranks), "bytes": nbytes})
    if lost is not None and not reports:
        raise lost
    return reports


def _wanted(inventory: Inventory, group: str) -> list[Version]:
    """The newest version that is whole here; where none is, all that may be whole with other nodes.

    Raises:
        OverwrittenError: all ranks of a running job are here, and yet no version was found whole.
    """
    usable = [v for v in inventory.versions if v.group == group and not (v.problem or "").startswith("abandoned")]
    whole = [version for version in usable if version.problem is None]
    here = {rank for version in usable for rank in version.ranks}
    running = any(seat.owner is not None for seat in inventory.seats if seat.group == group)
    if usable and not whole and running and len(here) >= max(version.key.world_size for version in usable):
        raise OverwrittenError("the job has overwritten a version while the ranks' slots were looked at")
    return whole[:1] or usable


def _drain(inventory: Inventory, version: Version, to: Path, deadline: float) -> int:
    """Drain what is here of one version; takes it all back if some can't be. Returns the bytes written."""
    target = DrainDir(to, inventory.container.job_id, version.group)
    target.check(inventory.container.path)
    nbytes, written = 0, []
    try:
        for rank, slots in _slots_of(inventory, version).items():
            record, size = _put_one(rank, slots, target, deadline)
            nbytes += size
            if size:
                written.append(record)
    except FlashpointError:
        for record in written:
            target.remove(record)
        raise
    target.prune()
    return nbytes


def _put_one(rank: int, slots: list[SlotInfo], target: DrainDir, deadline: float) -> tuple[ShardRecord, int]:
    """Drain one rank's shard from the first good copy of it."""
    failure: FlashpointError | None = None
    for slot in slots:
        assert slot.record is not None
        try:
            return slot.record, drain_slot(slot, target, deadline=deadline)
        except FlashpointError as error:
            failure = worse(failure, error)
    raise failure or DrainError(f"the shard of rank {rank} is gone", rank=rank)


def _slots_of(inventory: Inventory, version: Version) -> dict[int, list[SlotInfo]]:
    """Rank -> the copies of its shard here, its own before replicas."""
    found: dict[int, list[SlotInfo]] = {}
    for one in inventory.slots:
        slot = one.slot
        if one.group == version.group and one.key == version.key and slot.problem is None and slot.record is not None:
            found.setdefault(slot.record.rank, []).append(slot)
    return {rank: sorted(slots, key=lambda slot: slot.replica) for rank, slots in sorted(found.items())}
