"""Saves that a log tells in one line: mlflashpoint's own records, NeMo's, and NeMo RL's summary of a step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: more ranks than any job has; a larger number was not a rank
MAX_RANKS = 1 << 17

_MARKER = re.compile(r"mlflashpoint (save|commit|observe|ab) (?=\{)")
_MARKER_CUT = re.compile(r"mlflashpoint (?:save|commit|observe)$")
_DECODER = json.JSONDecoder()

_NUMBER = r"\d{1,15}\.\d{3}"
_NEMO = re.compile(
    rf"Global Checkpoint (Save|Load) : Rank ?: (\d{{1,7}})(?: : Iteration: (\d{{1,15}}))? : "
    rf"Start time ?: ({_NUMBER})s : (?:Save duration|Time spent in load_checkpoint): ({_NUMBER})s$"
)
_NEMO_TORN = re.compile(r"Global Checkpoint (?:Save|Load) : Rank")
_NEMO_RL_TORN = re.compile(r"(?:^|\s)• (\S{1,200}): -?(?:\d{1,12}\.|nan|inf)")
_NEMO_RL = re.compile(r"(?:^|\s)• (\S{1,200}): (\d{1,12}\.\d\d)s(?: \(\d{1,6}\.\d%\))?$")


@dataclass(frozen=True)
class RankRecord:
    """What one rank says of one save.

    Attributes:
        timer: the row of the comparison that it belongs to.
        key: what the ranks of one save have in common. A rank can have several saves of one key (after a restart, or
            two checkpoints of one step): its nth record belongs to the nth of them.
        rank: global rank within the group that saves, below ``MAX_RANKS``.
        seconds: how long this rank was blocked (for ``flashpoint-commit``: busy in the background).
        identity: equal only for the same line seen again.
        step: training step, None if the line does not tell.
        ok: whether the save went well on this rank.
        skipped: whether it was left out, because no memory slot was free or the step was stored already.
    """

    timer: str
    key: tuple[object, ...]
    rank: int
    seconds: float
    identity: float
    step: int | None
    ok: bool = True
    skipped: bool = False


class TornRecordError(ValueError):
    """A line has the marker of a record and does not hold one."""


def own_record(text: str) -> RankRecord | Mapping[str, Any] | None:
    """The record in ``text``, the announcement of ``mlflashpoint ab`` as a mapping, or None if there is neither.

    Raises:
        TornRecordError: there is the marker of one, and no complete record behind it.
    """
    found = _MARKER.search(text)
    if found is None:
        if _MARKER_CUT.search(text):
            raise TornRecordError("cut")
        return None
    kind = found[1]
    try:
        # a number of more than 4,300 digits is a ValueError too
        fields, _ = _DECODER.raw_decode(text, found.end())
        if not isinstance(fields, dict):
            raise TypeError
        return fields if kind == "ab" else _READERS[kind](fields)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise TornRecordError(kind) from None


def nemo_record(text: str) -> RankRecord | None:
    """NeMo's line about one ``dist_checkpointing.save`` or ``load`` on one rank, None if ``text`` is none.

    Raises:
        TornRecordError: it begins as one and is not whole, or holds impossible numbers.
    """
    found = _NEMO.search(text)
    if found is None or int(found[2]) >= MAX_RANKS:
        if _NEMO_TORN.search(text):
            raise TornRecordError("Global Checkpoint")
        return None
    what, rank, iteration, start, duration = found.groups()
    return RankRecord(
        timer=f"global-checkpoint-{what.lower()}",
        key=(iteration,),
        rank=int(rank),
        seconds=float(duration),
        identity=float(start),
        step=None if iteration is None else int(iteration),
    )


def nemo_rl_row(text: str) -> tuple[str, float] | None:
    """``(timer, seconds)`` of a row of NeMo RL's table of a step's times, None if ``text`` is none.

    Raises:
        TornRecordError: it begins as one and is not whole, or holds an impossible number; its text is the timer.
    """
    found = _NEMO_RL.search(text)
    if found is None and (torn := _NEMO_RL_TORN.search(text)):
        raise TornRecordError(torn[1])
    return None if found is None else (found[1], float(found[2]))


def _save(fields: Mapping[str, Any]) -> RankRecord:
    # the incarnation is no part of the key: a rank's first line can come before it knows the number
    step, seq, group, seconds = _count(fields, "step"), _count(fields, "seq"), fields["group"], _seconds(fields)
    if not isinstance(group, str) or not isinstance(fields["ok"], bool):
        raise TypeError
    return RankRecord(
        timer=_of_group("flashpoint-save", group),
        key=(group, step, seq),
        rank=_rank(fields),
        seconds=seconds,
        identity=seconds,
        step=step,
        ok=fields["ok"],
        skipped=bool(fields.get("skipped", False)),
    )


def _commit(fields: Mapping[str, Any]) -> RankRecord:
    step, group, seconds = _count(fields, "step"), fields["group"], _seconds(fields, "commit_ms")
    if not isinstance(group, str):
        raise TypeError
    return RankRecord(
        timer=_of_group("flashpoint-commit", group),
        key=(group, step),
        rank=_rank(fields),
        seconds=seconds,
        identity=seconds,
        step=step,
    )


def _observe(fields: Mapping[str, Any]) -> RankRecord:
    step, kind, seconds = _count(fields, "step"), fields["kind"], _seconds(fields)
    if not isinstance(kind, str) or not re.fullmatch(r"[\w-]{1,60}", kind):
        raise ValueError
    return RankRecord(
        timer=f"observed-{kind.replace('_', '-')}-save",
        key=(kind, step),
        rank=_rank(fields),
        seconds=seconds,
        identity=seconds,
        step=step,
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], RankRecord]] = {
    "save": _save,
    "commit": _commit,
    "observe": _observe,
}


def _of_group(timer: str, group: str) -> str:
    return timer if group == "default" else f"{timer}[{group[:100]}]"


def _rank(fields: Mapping[str, Any]) -> int:
    rank = _count(fields, "rank")
    if rank >= MAX_RANKS:
        raise ValueError
    return rank


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError
    return value


def _seconds(fields: Mapping[str, Any], name: str = "blocking_ms") -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ValueError
    return float(value) / 1e3
