"""Manifests: what one node's memory holds, as its leader tells it to rank 0, and the same in JSON."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlflashpoint.core.arena import scan_seat
from mlflashpoint.core.container import Container
from mlflashpoint.core.record import DRAIN_NODE, ShardCopy, ShardRecord
from mlflashpoint.errors import FlashpointError, PeerError

log = logging.getLogger("mlflashpoint.core")

_SLOT = re.compile(r"(?!\.)[^/\x00]{1,200}/seat-[0-9]{1,9}/(slot|replica)-[0-9]{1,9}")
_DRAINED = re.compile(DRAIN_NODE + r"/step-[0-9]{1,18}\.[0-9]{1,9}\.[0-9a-zA-Z+]{0,64}/rank-[0-9]{1,9}")
_SEAT = re.compile(r"seat-([0-9]{1,9})")


def seats_of(group_dir: Path) -> dict[int, Path]:
    """Local rank -> folder of every seat that the group has on this node."""
    if not group_dir.is_dir():
        return {}
    found = ((match, path) for path in group_dir.iterdir() if (match := _SEAT.fullmatch(path.name)))
    return {int(match[1]): path for match, path in sorted(found, key=lambda pair: int(pair[0][1]))}


def node_copies(container: Container, group: str, *, holder: int) -> list[ShardCopy]:
    """Every committed copy that this node holds of the group's shards; reads, changes nothing.

    Malformed ones, and those of another job or group, are logged and left out.
    """
    copies = []
    for seat in seats_of(container.group_dir(group)).values():
        for slot in scan_seat(seat):
            record, problem = slot.record, slot.problem
            if problem is None and record is not None and (record.job_id, record.group) != (container.job_id, group):
                problem = PeerError(f"a shard of job {record.job_id!r}, group {record.group!r}", path=slot.path)
            if problem is not None:
                log.warning("left out: %s", problem)
            elif record is not None:
                where = f"{group}/{seat.name}/{Path(slot.path).name}"
                copies.append(ShardCopy(record, container.node, holder, where, slot.replica))
    return copies


def with_holders(copies: Iterable[ShardCopy], holders: Mapping[tuple[str, int], int]) -> list[ShardCopy]:
    """Name as each copy's holder the rank that sits on its seat now, where ``(node, seat)`` has one."""
    named = []
    for copy in copies:
        if copy.node == DRAIN_NODE:
            named.append(copy)
            continue
        seat = int(copy.slot.split("/")[-2].removeprefix("seat-"))
        holder = holders.get((copy.node, seat), copy.holder)
        named.append(copy if holder == copy.holder else dataclasses.replace(copy, holder=holder))
    return named


def copy_to_json(copy: ShardCopy) -> dict[str, Any]:
    return dataclasses.asdict(copy)


def copy_from_json(raw: Any) -> ShardCopy:
    """Raises PeerError for a malformed copy, ShardFormatError for a malformed record in it."""
    kinds = {"record": dict, "node": str, "holder": int, "slot": str, "replica": bool}
    if not isinstance(raw, dict) or {name: type(value) for name, value in raw.items()} != kinds:
        raise PeerError("an entry of a manifest is malformed", remedy="run one mlflashpoint release on all ranks")
    # The slot becomes part of a path: it must not lead out of the container.
    if not (_DRAINED if raw["node"] == DRAIN_NODE else _SLOT).fullmatch(raw["slot"]):
        raise PeerError(f"{raw['slot']!r} is no slot")
    return ShardCopy(**{**raw, "record": ShardRecord.from_fields(raw["record"])})


def copies_from_json(raw: Any) -> list[ShardCopy]:
    """Well-formed copies of a manifest; others are logged and left out: they only make a version incomplete."""
    copies = []
    for entry in raw if isinstance(raw, list) else ():
        try:
            copies.append(copy_from_json(entry))
        except FlashpointError as error:
            log.warning("left out: %s", error)
    return copies
