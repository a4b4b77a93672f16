"""``mlflashpoint drain``: copy what a node's memory holds to a durable directory, from which recovery works too."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlflashpoint.commands.inventory import Inventory, Version, base_from, human_bytes, reported, take_stock
from mlflashpoint.core.arena import SlotInfo
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.errors import DrainError, FlashpointError, NoVersionError

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
        inventory = take_stock(base_from(options.base))
        deadline = time.monotonic() + options.budget
        reports: list[dict[str, Any]] = [
            {"group": version.group, "step": version.key.step, "ranks": list(version.ranks), "bytes": nbytes}
            for version in _wanted(inventory)
            for nbytes in [_drain(inventory, version, options.to.absolute(), deadline)]
        ]
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


def _wanted(inventory: Inventory) -> Iterable[Version]:
    """Of each group the newest version that is whole here; where none is, all that may be whole with other nodes.

    Raises:
        NoVersionError: there is none.
    """
    wanted: dict[str, list[Version]] = {}
    for group in dict.fromkeys(version.group for version in inventory.versions):
        usable = [v for v in inventory.versions if v.group == group and not (v.problem or "").startswith("abandoned")]
        whole = [version for version in usable if version.problem is None]
        wanted[group] = whole[:1] or usable
    if not any(wanted.values()):
        raise NoVersionError("there is no version to drain", path=inventory.container.path)
    return [version for versions in wanted.values() for version in versions]


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
        try:
            holding = Holding.open(slot.path)
            return holding.record, target.put(holding, deadline=deadline)
        except FlashpointError as error:
            failure = failure or error
    raise failure or DrainError(f"the shard of rank {rank} is gone", rank=rank)


def _slots_of(inventory: Inventory, version: Version) -> dict[int, list[SlotInfo]]:
    """Rank -> the copies of its shard here, its own before replicas."""
    found: dict[int, list[SlotInfo]] = {}
    for seat in inventory.seats:
        for slot in seat.slots if seat.group == version.group else ():
            record = slot.record
            key = None if record is None else (record.incarnation, record.run, record.step)
            if record is not None and slot.problem is None and key == version.key[:3]:
                found.setdefault(record.rank, []).append(slot)
    return {rank: sorted(slots, key=lambda slot: slot.replica) for rank, slots in sorted(found.items())}
