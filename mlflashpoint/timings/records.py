"""Saves that a log tells in one line: mlflashpoint's own records, NeMo's, and NeMo RL's summary of a step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: more ranks than any job has; a larger number was not a rank
MAX_RANKS = 1 << 17

#: what the names of timers begin with whose records have the time when the save began as their identity, in seconds
TIMED = "global-checkpoint-"

_MARKER = re.compile(r"mlflashpoint (save|commit|observe|ab) (?=\{)")
_MARKER_CUT = re.compile(r"mlflashpoint (save|commit|observe)$")
_REMAINS = re.compile(r'"rank": (\d{1,7})[,}]')
#: what the names of the timers of a kind of record begin with
_FAMILIES = {"save": "flashpoint-save", "commit": "flashpoint-commit", "observe": "observed-"}
_DECODER = json.JSONDecoder()

_NUMBER = r"\d{1,15}\.\d{3}"
_NEMO_START = re.compile(r"Global Checkpoint (?:Save|Load) : Rank")
_NEMO = re.compile(
    rf"Global Checkpoint (Save|Load) : Rank ?: (\d{{1,7}})(?: : Iteration: (\d{{1,15}}))? : "
    rf"Start time ?: ({_NUMBER})s : (?:Save duration|Time spent in load_checkpoint): ({_NUMBER})s"
)
_NEMO_REMAINS = re.compile(r"Global Checkpoint (Save|Load) : Rank ?: (\d{1,7})(?: : Iteration: (\d{1,15}))? : Start")
_BULLET = "• "
_NEMO_RL_TORN = re.compile(r"(\S{1,200}): -?(?:\d{1,12}\.|nan|inf)")
_NEMO_RL = re.compile(r"(\S{1,200}): (\d{1,12}\.\d\d)s(?: \(\d{1,6}\.\d%\))?$")


@dataclass(frozen=True)
class RankRecord:
    """What one rank says of one save.

    Attributes:
        timer: the row of the comparison that it belongs to.
        key: what the ranks of one save have in common. A rank can have several saves of one key (after a restart, or
            two checkpoints of one step): its nth record belongs to the nth of them.
        rank: global rank within the group that saves, below ``MAX_RANKS``.
        seconds: how long this rank was blocked (for ``flashpoint-commit``: busy in the background).
        identity: equal only for the same line seen again; finite.
        step: training step, None if the line does not tell.
        ok: whether the save went well on this rank.
        skipped: whether it was left out, because no memory slot was free or the step was stored already.
        incarnation: start of the job that it comes from, 0 if the line does not tell.
    """

    timer: str
    key: tuple[object, ...]
    rank: int
    seconds: float
    identity: float
    step: int | None
    ok: bool = True
    skipped: bool = False
    incarnation: int = 0


@dataclass(frozen=True)
class Torn:
    """What is in the place of a record that is not whole, or holds an impossible number.

    Attributes:
        timer: the timer that it was of, or what the names of such timers begin with.
        key: the save that it was of, as in ``RankRecord``, None if that was torn off.
        rank: its rank, None if that was torn off.
    """

    timer: str
    key: tuple[object, ...] | None = None
    rank: int | None = None


def own_records(text: str) -> Iterator[RankRecord | Mapping[str, Any] | Torn]:
    """All records in ``text``, of which several can stand on one line; an announcement of ``ab`` is a mapping."""
    place = 0
    while found := _MARKER.search(text, place):
        place = found.end()
        fields: object = None
        try:
            # a number of more than 4,300 digits is a ValueError too
            fields, place = _DECODER.raw_decode(text, place)
            if not isinstance(fields, dict):
                raise TypeError
            yield fields if found[1] == "ab" else _READERS[found[1]](fields)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            if found[1] != "ab":
                yield _torn(found[1], fields if isinstance(fields, dict) else _remains(text, place))
    if cut := _MARKER_CUT.search(text, place):
        yield Torn(_FAMILIES[cut[1]])


def nemo_records(text: str) -> Iterator[RankRecord | Torn]:
    """All of NeMo's reports in ``text`` on one ``dist_checkpointing.save`` or ``load`` of one rank."""
    starts = [found.start() for found in _NEMO_START.finditer(text)]
    for start, stop in pairwise([*starts, len(text)]):
        found = _NEMO.match(text, start, stop)
        # behind the last number of the line nothing may stand; behind another one stands the next report's beginning
        if found is None or int(found[2]) >= MAX_RANKS or found.end() < stop == len(text):
            yield _torn_nemo(text[start:stop])
            continue
        what, rank, iteration, started, duration = found.groups()
        yield RankRecord(
            timer=f"{TIMED}{what.lower()}",
            key=(iteration,),
            rank=int(rank),
            seconds=float(duration),
            identity=float(started),
            step=None if iteration is None else int(iteration),
        )


def nemo_rl_rows(text: str) -> Iterator[tuple[str, float] | Torn]:
    """``(timer, seconds)`` of every row of NeMo RL's table of a step's times in ``text``."""
    for row in text.split(_BULLET)[1:]:
        row = row.rstrip()
        if found := _NEMO_RL.match(row):
            yield found[1], float(found[2])
        elif found := _NEMO_RL_TORN.match(row):
            yield Torn(found[1])


def _torn(kind: str, fields: Mapping[str, Any]) -> Torn:
    """What a record of ours tells although it is not whole."""
    try:
        # the time does not matter
        whole = _READERS[kind]({**fields, "blocking_ms": 0, "commit_ms": 0, "rank": 0})
    except (ValueError, KeyError, TypeError):
        timer, key = _FAMILIES[kind], None
    else:
        timer, key = whole.timer, whole.key
    try:
        return Torn(timer, key, _rank(fields))
    except (ValueError, KeyError):
        return Torn(timer, key)


def _remains(text: str, place: int) -> dict[str, int]:
    """What can be read of a record that begins at ``place`` and has no end, up to the next one."""
    following = _MARKER.search(text, place)
    found = _REMAINS.search(text, place, following.start() if following else len(text))
    return {"rank": int(found[1])} if found else {}


def _torn_nemo(text: str) -> Torn:
    found = _NEMO_REMAINS.match(text)
    if found is None or int(found[2]) >= MAX_RANKS:
        return Torn(TIMED)
    return Torn(f"{TIMED}{found[1].lower()}", (found[3],), int(found[2]))


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
        incarnation=incarnation if type(incarnation := fields.get("incarnation")) is int else 0,
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
