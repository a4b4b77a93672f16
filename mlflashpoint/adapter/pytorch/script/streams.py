"""The streams of this process: one for each line of checkpoints, opened on all ranks together, or on none."""

from __future__ import annotations

import logging
import secrets

from mlflashpoint.adapter.pytorch.script.council import given_up, hold, ranks
from mlflashpoint.adapter.pytorch.script.stream import Stream
from mlflashpoint.core.deadline import ready_for_the_end
from mlflashpoint.core.ranks import Ranks

log = logging.getLogger("mlflashpoint.adapter")

#: stores of this process; a script that names its folders at random would else fill the node's memory
_MOST = 4
#: to connect the ranks, within one deadline
_TRIES = 2
#: begins what a rank says that knows why every save is durable
_TURNED = "every save is durable: "

_streams: dict[str, Stream | None] = {}


def stream_of(group: str, what: object, alone: bool) -> Stream | None:
    """The stream of ``group``, opened at the first call; None if it can't be used, on every rank.

    Collective. What goes wrong on one rank alone is learnt by all, so that none waits for it later.

    Args:
        group: its store.
        what: names the checkpoints in the log.
        alone: this process is the whole job.
    """
    if given_up():
        return None
    if group in _streams:
        return _streams[group]
    if sum(stream.has_saved for stream in open_streams()) >= _MOST:
        log.warning("checkpoints like %s are left alone: the script has %d lines of them already", what, _MOST)
        _streams[group] = None
        return None
    stream, problem = None, ""
    try:
        # Asked first, because it is collective: opening the store may fail on one rank alone.
        who = Ranks(0, 1, 0) if alone else ranks()
        stream = Stream(group, who)
        ready_for_the_end()
    except Exception as error:
        problem = str(error) or type(error).__name__
    if not _connected(stream):
        log.error("checkpoints like %s do not go to memory: %s", what, problem or "another rank can't")
        if stream is not None:
            stream.store.close()
        stream = None
    if stream is not None:
        _remember(stream)
    _streams[group] = stream
    return stream


def abandon(stream: Stream, why: str) -> None:
    """Leave the checkpoints of ``stream`` alone from now on, on every rank."""
    log.error("checkpoints are left to the script from now on: %s", why)
    for group, found in _streams.items():
        if found is stream:
            _streams[group] = None
    stream.store.close()


def open_streams() -> list[Stream]:
    """The streams of this process, in the order in which they were opened."""
    return [stream for stream in _streams.values() if stream is not None]


def forget_streams() -> None:
    """Close them all: the process group that they are of goes away."""
    for stream in open_streams():
        with stream.uploads.noted():
            stream.store.close()
    _streams.clear()


def _remember(stream: Stream) -> None:
    """What earlier starts have found out is known to all if one rank's memory has it; collective."""
    outcome = hold(trouble=_TURNED + stream.journal.turned if stream.journal.turned else "")
    if outcome.trouble.startswith(_TURNED):
        stream.journal.turn(outcome.trouble.removeprefix(_TURNED))


def _connected(stream: Stream | None) -> bool:
    """Whether all ranks have a stream, and have connected it; collective."""
    for _ in range(_TRIES):
        outcome = hold(lambda: secrets.token_hex(8), trouble="" if stream is not None else "it has no store")
        if not outcome.ok or stream is None:
            return False
        problem = ""
        try:
            stream.connect(outcome.answer, stream.runtime.config.deadline_s / _TRIES)
        except Exception as error:
            problem = str(error) or type(error).__name__
            log.error("memory saves have no process group: %s", error)
        outcome = hold(trouble=problem)
        if outcome.ok:
            return True
        if outcome.rank == -1:
            return False
    return False
