"""``mlflashpoint verify``: check every digest of what a base container holds. Reads only; quarantines nothing."""

from __future__ import annotations

import json
import sys

from mlflashpoint.commands.inventory import arguments, base_from, reported, take_stock
from mlflashpoint.core.arena import SlotInfo, read_record
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.errors import FlashpointError


def main(argv: list[str]) -> int:
    """Exit code 0: all are good; 1: some are not, or there is no container."""
    options = arguments(
        "verify", "Check every digest of the versions in a base container.", argv, ("--json", "print JSON for programs")
    )

    def check() -> int:
        inventory = take_stock(base_from(options.base))
        results = []
        for seat in inventory.seats:
            for slot in seat.slots:
                if slot.record is None and slot.problem is None:
                    continue
                problem = _problem(slot)
                name = f"{seat.group}/{seat.path.name}/{slot.path.name}"
                record = slot.record
                results.append(
                    {
                        "slot": name,
                        "step": None if record is None else record.step,
                        "rank": None if record is None else record.rank,
                        "bytes": None if record is None else record.data_bytes,
                        "problem": problem,
                    }
                )
        bad = [result for result in results if result["problem"] is not None]
        if options.json:
            sys.stdout.write(json.dumps({"shards": results, "bad": len(bad)}, indent=2) + "\n")
        else:
            for result in results:
                what = "a shard" if result["step"] is None else f"step {result['step']}, rank {result['rank']}"
                sys.stdout.write(f"{result['slot']}: {what}: {result['problem'] or 'good'}\n")
            sys.stdout.write(f"{len(results)} shards, {len(bad)} bad\n")
        return 1 if bad else 0

    return reported("verify", check)


def _problem(slot: SlotInfo) -> str | None:
    """Why the shard can't be used, None if all its digests are right or it has been replaced meanwhile."""
    try:
        with ShardReader.open(slot.path) as reader:
            reader.verify()
    except FlashpointError as error:
        try:
            # A live job may have begun to overwrite the slot under us, which is no fault of the shard.
            replaced = slot.problem is None and read_record(slot.path) != slot.record
        except FlashpointError:
            replaced = False
        return None if replaced else str(error)
    return None
