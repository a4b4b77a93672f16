"""``mlflashpoint verify``: check every digest of what a base container or a drain directory holds.

It reads only, and quarantines nothing.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mlflashpoint.commands.drained import EITHER, stock_of_either
from mlflashpoint.commands.inventory import Found, Inventory, arguments, base_from, reported
from mlflashpoint.core.arena import SlotInfo, read_record
from mlflashpoint.core.plan import VersionKey
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.errors import FlashpointError


def main(argv: list[str]) -> int:
    """Exit code 0: all are good; 1: some are not, there is nothing, or no drained version is whole."""
    options = arguments(
        "verify",
        "Check every digest of the versions in a base container or a drain directory.",
        argv,
        ("--json", "print JSON for programs"),
        what=EITHER,
    )

    def check() -> int:
        inventory = stock_of_either(base_from(options.base))
        found = [one for one in inventory.slots if one.slot.record is not None or one.slot.problem is not None]
        problems = [_problem(one.slot) for one in found]
        results = [_result(one, problem) for one, problem in zip(found, problems, strict=True)]
        bad = sum(problem is not None for problem in problems)
        spoilt = {(one.group, one.key) for one, problem in zip(found, problems, strict=True) if problem is not None}
        whole = _whole(inventory, spoilt) if inventory.drained else {}
        if options.json:
            more = {"whole": whole} if inventory.drained else {}
            sys.stdout.write(json.dumps({"shards": results, "bad": bad, **more}, indent=2) + "\n")
        else:
            for result in results:
                what = "a shard" if result["step"] is None else f"step {result['step']}, rank {result['rank']}"
                sys.stdout.write(f"{result['slot']}: {what}: {result['problem'] or 'good'}\n")
            for group, step in whole.items():
                what = "no version is whole" if step is None else f"step {step} is whole"
                sys.stdout.write(f"{group}: {what}\n")
            sys.stdout.write(f"{len(results)} shards, {bad} bad\n")
        return 1 if bad or None in whole.values() else 0

    return reported("verify", check)


def _result(one: Found, problem: str | None) -> dict[str, Any]:
    record = one.slot.record
    return {
        "slot": one.name,
        "step": None if record is None else record.step,
        "rank": None if record is None else record.rank,
        "bytes": None if record is None else record.data_bytes,
        "problem": problem,
    }


def _whole(inventory: Inventory, spoilt: set[tuple[str, VersionKey | None]]) -> dict[str, int | None]:
    """Step of each group's newest version of which every shard is there and good, None if there is none."""
    newest: dict[str, int | None] = dict.fromkeys(inventory.groups)
    for version in inventory.versions:
        good = version.problem is None and (version.group, version.key) not in spoilt
        if good and newest[version.group] is None:
            newest[version.group] = version.key.step
    return newest


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
    # It may be intact, and of another job.
    return None if slot.problem is None else str(slot.problem)
