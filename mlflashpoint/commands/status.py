"""``mlflashpoint status``: the versions in a base container or a drain directory, complete or why not."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from mlflashpoint.commands.drained import EITHER, stock_of_either
from mlflashpoint.commands.inventory import Inventory, arguments, base_from, human_bytes, reported
from mlflashpoint.core.lagfile import SeatLag


def main(argv: list[str]) -> int:
    options = arguments(
        "status",
        "List the versions that a base container holds, or a drain directory.",
        argv,
        ("--json", "print JSON for programs"),
        what=EITHER,
    )

    def show() -> int:
        inventory = stock_of_either(base_from(options.base))
        sys.stdout.write(json.dumps(_as_json(inventory), indent=2) + "\n" if options.json else _as_text(inventory))
        return 0

    return reported("status", show)


def _as_json(inventory: Inventory) -> dict[str, Any]:
    now = time.time()
    return {
        "path": str(inventory.container.path),
        "job_id": inventory.container.job_id,
        "node": inventory.container.node,
        "seats": [{"group": seat.group, "seat": seat.path.name, "pid": seat.owner} for seat in inventory.seats],
        "versions": [
            {
                "group": version.group,
                **version.key._asdict(),
                "ranks": list(version.ranks),
                "complete_here": version.problem is None,
                "problem": version.problem,
                "bytes": version.nbytes,
                "age_s": round(now - version.newest_s, 3),
            }
            for version in inventory.versions
        ],
        "replication": [
            {"group": seat.group, "seat": seat.path.name, **dataclasses.asdict(seat.lag)}
            for seat in inventory.seats
            if seat.lag is not None
        ],
        "problems": list(inventory.problems),
    }


def _as_text(inventory: Inventory) -> str:
    now = time.time()
    lines = [_heading(inventory)]
    rows = [("GROUP", "STEP", "INCARNATION", "RANKS", "BYTES", "AGE", "STATE")]
    for version in inventory.versions:
        rows.append(
            (
                version.group,
                str(version.key.step),
                str(version.key.incarnation),
                f"{len(version.ranks)}/{version.key.world_size}",
                human_bytes(version.nbytes),
                f"{max(0.0, now - version.newest_s):.0f} s",
                version.problem or "complete",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if not inventory.versions:
        lines[1:] = ["no version"]
    lines += [_lag(seat.lag, now, seat.owner is not None) for seat in inventory.seats if seat.lag is not None]
    return "\n".join([*lines, *(f"unusable: {problem}" for problem in inventory.problems)]) + "\n"


def _heading(inventory: Inventory) -> str:
    container = inventory.container
    if inventory.drained:
        return f"{container.path}: job {container.job_id}, drained"
    live = [seat for seat in inventory.seats if seat.owner is not None]
    seats = f"{len(live)} of {len(inventory.seats)} seats have a live process"
    return f"{container.path}: job {container.job_id}, node {container.node[:8]}, {seats}"


def _lag(lag: SeatLag, now: float, live: bool) -> str:
    text = f"rank {lag.rank}: {lag.acknowledged} shards replicated, {lag.failed} not"
    if live and lag.since_s:
        text += f"; {human_bytes(lag.bytes_outstanding)} on their way for {max(0.0, now - lag.since_s):.0f} s"
    return text + (f"; last error: {lag.last_error}" if lag.last_error else "")
