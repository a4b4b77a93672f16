"""Incarnations: the starts of a job, in order, and which versions each later start abandoned for good.

A start that goes on from step S makes every version that an earlier start saved above S part of a past that did not
happen. That fact has to outlive the process, and nodes that were not there: each node's container keeps a small
``lineage.json`` per group, and at a start the ranks merge all that they find.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.core.files import file_error, read_file, replace_file, seal, unseal
from mlflashpoint.core.seat import file_lock
from mlflashpoint.errors import FlashpointError, ShardFormatError

LINEAGE_FILE = "lineage.json"
_MAX_BYTES = 64 << 10
_LOCK_WAIT_S = 10.0
#: starts that are remembered one by one; older ones are merged, see ``Lineage.of``
_REMEMBERED = 32
_NEVER = 1 << 62
_REMEDY = "remove the container with 'mlflashpoint clean'"


@dataclass(frozen=True)
class Incarnation:
    """One start of a job.

    Attributes:
        number: higher than every number seen on any node when it started, from 1.
        run: random name, equal on all ranks.
        started_s: seconds since the epoch by the clock of rank 0.
        resumed_from: step that it went on from, -1 from nothing, None while it has not said.
    """

    number: int
    run: str
    started_s: float
    resumed_from: int | None = None

    @classmethod
    def after(cls, seen: int) -> Incarnation:
        """A new start whose number follows ``seen``."""
        return cls(number=seen + 1, run=secrets.token_hex(8), started_s=time.time())

    def resumed(self, step: int) -> Incarnation:
        return dataclasses.replace(self, resumed_from=max(step, -1))

    def rolled_back(self, step: int) -> Incarnation:
        """The incarnation that begins when a process goes back to ``step`` without a restart; equal on all ranks."""
        return Incarnation(self.number + 1, f"{self.run.partition('+')[0]}+{self.number + 1}", self.started_s, step)

    def is_later_than(self, number: int, run: str, created_s: float) -> bool:
        """Whether this start came after the one of that number and run, which made a version at ``created_s``.

        Two starts with no node in common may take the same number; between them, the clock decides.
        """
        return self.number > number or (self.number == number and self.run != run and self.started_s > created_s)


@dataclass(frozen=True)
class Lineage:
    """The starts that are known of, oldest first; an immutable value."""

    starts: tuple[Incarnation, ...] = ()

    @classmethod
    def of(cls, starts: Iterable[Incarnation]) -> Lineage:
        """Merge what several nodes know.

        Beyond 32 starts the two oldest become one that abandons what either did: a version of theirs may be given up
        that needn't be, never the other way round.
        """
        known: dict[tuple[int, str], Incarnation] = {}
        for start in starts:
            other = known.get((start.number, start.run))
            known[start.number, start.run] = start if other is None else _merged(other, start, keep=other)
        ordered = sorted(known.values(), key=lambda start: (start.number, start.started_s, start.run))
        while len(ordered) > _REMEMBERED:
            oldest, second = ordered[:2]
            ordered[:2] = [_merged(oldest, second, keep=second)]
        return cls(tuple(ordered))

    @property
    def newest(self) -> int:
        """The highest number, 0 if there is none."""
        return max((start.number for start in self.starts), default=0)

    def horizon(self, number: int, run: str, created_s: float) -> int:
        """Highest step of that incarnation that no later start abandoned."""
        later = (
            start.resumed_from
            for start in self.starts
            if start.resumed_from is not None and start.is_later_than(number, run, created_s)
        )
        return min(later, default=_NEVER)

    def to_json(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(start) for start in self.starts]

    @classmethod
    def from_json(cls, raw: Any) -> Lineage:
        """Raises ShardFormatError unless ``raw`` is what ``to_json`` gives."""
        if not isinstance(raw, list) or len(raw) > 4 * _REMEMBERED:
            raise ShardFormatError("a lineage is a list of starts")
        return cls.of(map(_start_from_json, raw))


def read_lineage(group_dir: Path) -> Lineage:
    """What this node knows of the group's starts; empty if nothing.

    Raises:
        ShardFormatError: the file is malformed.
        ContainerError: it can't be read.
    """
    file = group_dir / LINEAGE_FILE
    try:
        data = read_file(file, _MAX_BYTES)
        if len(data) > _MAX_BYTES:
            raise ShardFormatError(f"more than {_MAX_BYTES} bytes")
        return Lineage.from_json(unseal(data, "it").get("starts"))
    except FileNotFoundError:
        return Lineage()
    except OSError as error:
        raise file_error("the lineage can't be read", error, path=file, remedy=_REMEDY) from error
    except (ValueError, RecursionError, ShardFormatError) as error:
        raise ShardFormatError(f"the lineage is malformed: {error}", path=file, remedy=_REMEDY) from None


def record_lineage(group_dir: Path, own: Incarnation, others: Lineage | None = None) -> Lineage:
    """Add the present start, as it is ``own`` now, and what other nodes know of earlier ones to what this node knows.

    Safe when several local ranks do so at once.

    Raises:
        ContainerError: it can't be written.
        ShardFormatError: what is there is malformed.
    """
    try:
        with file_lock(group_dir / f"{LINEAGE_FILE}.lock", wait_s=_LOCK_WAIT_S):
            before = read_lineage(group_dir)
            earlier = (*before.starts, *(others.starts if others else ()))
            # A start may still correct itself, so its own last word replaces what was known of it.
            kept = (start for start in earlier if (start.number, start.run) != (own.number, own.run))
            after = Lineage.of((*kept, own))
            if after != before:
                replace_file(group_dir / LINEAGE_FILE, seal({"starts": after.to_json()}))
            return after
    except FlashpointError:
        raise
    except OSError as error:
        raise file_error("the lineage can't be written", error, path=group_dir, remedy=_REMEDY) from error


def _merged(one: Incarnation, other: Incarnation, *, keep: Incarnation) -> Incarnation:
    steps = [start.resumed_from for start in (one, other) if start.resumed_from is not None]
    return dataclasses.replace(keep, resumed_from=min(steps, default=None))


def _start_from_json(raw: Any) -> Incarnation:
    kinds: dict[str, tuple[type, ...]] = {
        "number": (int,),
        "run": (str,),
        "started_s": (float, int),
        "resumed_from": (int, type(None)),
    }
    if not isinstance(raw, dict) or set(raw) != set(kinds):
        raise ShardFormatError("a start has not the fields of a start")
    for name, allowed in kinds.items():
        if type(raw[name]) not in allowed or len(str(raw[name])) > 64:
            raise ShardFormatError(f"a start's {name} is malformed")
    return Incarnation(**raw)
