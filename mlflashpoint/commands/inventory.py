"""What one base container holds, as its files say: for the commands, which look and never take part."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.core.arena import SlotInfo, file_of, scan_seat
from mlflashpoint.core.container import Container, read_container
from mlflashpoint.core.incarnation import Lineage, read_lineage
from mlflashpoint.core.lagfile import SeatLag
from mlflashpoint.core.manifest import seats_of
from mlflashpoint.core.plan import VersionKey, abandoned
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.seat import live_owner
from mlflashpoint.errors import ContainerError, FlashpointError
from mlflashpoint.settings import StoreConfig


@dataclass(frozen=True)
class Seat:
    """One seat: its folder, the process that lives on it (None for none), and how far its replicas are."""

    group: str
    path: Path
    owner: int | None
    lag: SeatLag | None = None


@dataclass(frozen=True)
class Version:
    """The shards of one version that were found.

    Attributes:
        group: the group of ranks.
        key: names the version.
        ranks: ranks whose shards are here, own or replica.
        nbytes: bytes of data and index of all copies.
        newest_s: when its newest shard was committed, in seconds since the epoch.
        problem: why it can't be recovered from what was found alone, None if it can.
    """

    group: str
    key: VersionKey
    ranks: tuple[int, ...]
    nbytes: int
    newest_s: float
    problem: str | None


@dataclass(frozen=True)
class Found:
    """One slot: its group, its name (its path in the container), and what it holds."""

    group: str
    name: str
    slot: SlotInfo

    @property
    def key(self) -> VersionKey | None:
        """The version that it holds a shard of, None if it holds nothing."""
        record = self.slot.record
        return None if record is None else _key(record)


@dataclass(frozen=True)
class Inventory:
    """What a container holds, or what was drained of one job.

    Attributes:
        container: which one.
        groups: the groups of ranks that have something in it.
        seats: the seats in it; what was drained has none.
        slots: every slot in it.
        versions: what they make together, of each group the newest first.
        problems: slots, seats and files that can't be used, each with its reason.
        drained: whether it is what was drained to a durable directory, and no memory.
    """

    container: Container
    groups: tuple[str, ...]
    seats: tuple[Seat, ...]
    slots: tuple[Found, ...]
    versions: tuple[Version, ...]
    problems: tuple[str, ...]
    drained: bool = False


def base_from(argument: str | None) -> Path:
    """The container that a command is to look at: its argument, else what the settings say.

    Raises:
        SettingError: no argument, and the settings name no job.
    """
    return Path(os.path.abspath(argument)) if argument else StoreConfig.from_env().base_container


def take_stock(base: Path) -> Inventory:
    """Read a container; changes nothing.

    Raises:
        ContainerError: it is none, or can't be read.
    """
    container = read_container(base)
    if container is None:
        raise ContainerError("no memory container is here", path=base, remedy="give the job's base container")
    problems: list[str] = []
    seats: list[Seat] = []
    slots: list[Found] = []
    versions: list[Version] = []
    for group in sorted(path.name for path in base.iterdir() if path.is_dir() and not path.is_symlink()):
        lineage = Lineage()
        try:
            lineage = read_lineage(base / group)
        except FlashpointError as error:
            problems.append(str(error))
        found = []
        for path in seats_of(base / group).values():
            seats.append(Seat(group, path, live_owner(path), SeatLag.read(path)))
            found += [Found(group, f"{group}/{path.name}/{slot.path.name}", slot) for slot in scan_seat(path)]
        slots += found
        problems += problems_of(found)
        versions += versions_of(group, found, lineage, where="on this node")
    groups = tuple(dict.fromkeys(seat.group for seat in seats))
    return Inventory(container, groups, tuple(seats), tuple(slots), tuple(versions), tuple(problems))


def problems_of(found: list[Found]) -> Iterator[str]:
    """Why slots can't be used."""
    for slot in (one.slot for one in found):
        if slot.problem is not None:
            yield str(slot.problem)
        if file_of(slot.path, "quarantined").exists():
            yield f"quarantined [path {slot.path}]"


def versions_of(group: str, found: list[Found], lineage: Lineage, *, where: str) -> Iterator[Version]:
    """The versions of a group of which something was found ``where``, the newest first."""
    copies: dict[VersionKey, list[SlotInfo]] = {}
    for one in found:
        if one.key is not None and one.slot.problem is None:
            copies.setdefault(one.key, []).append(one.slot)
    for key in sorted(copies, key=lambda key: (key.incarnation, key.step), reverse=True):
        records = [slot.record for slot in copies[key] if slot.record is not None]
        ranks = tuple(sorted({record.rank for record in records}))
        here = f"{len(ranks)} of {key.world_size} ranks are {where}"
        yield Version(
            group=group,
            key=key,
            ranks=ranks,
            nbytes=sum(record.data_bytes + record.index_bytes for record in records),
            newest_s=max(record.created_s for record in records),
            problem=abandoned(key, records[0].created_s, lineage) or (here if len(ranks) < key.world_size else None),
        )


def _key(record: ShardRecord) -> VersionKey:
    return VersionKey(record.incarnation, record.run, record.step, record.world_size, record.topology)


def arguments(
    name: str, meaning: str, argv: list[str], *flags: tuple[str, str], what: str = "base container"
) -> argparse.Namespace:
    """Parse a command's arguments: ``BASE``, which is ``what``, and some switches; exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(prog=f"mlflashpoint {name}", description=meaning)
    parser.add_argument(
        "base", nargs="?", metavar="BASE", help=f"{what}; by default the base container that the settings name"
    )
    for flag, text in flags:
        parser.add_argument(flag, action="store_true", help=text)
    return parser.parse_args(argv)


def reported(name: str, action: Callable[[], int]) -> int:
    """Run a command's ``action``; an error of ours becomes one line on standard error and exit code 1."""
    try:
        return action()
    except FlashpointError as error:
        sys.stderr.write(f"mlflashpoint {name}: {error}\n")
        return 1


def human_bytes(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
