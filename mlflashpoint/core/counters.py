"""What a runtime counts and logs: one line per save, each kind of failure once with its remedy, and numbers to poll."""

from __future__ import annotations

import copy
import json
import logging
import threading
from typing import Any

from mlflashpoint.errors import FlashpointError, in_words

log = logging.getLogger("mlflashpoint.core")

Stats = dict[str, int | float | str]


def as_flashpoint(error: BaseException, *, rank: int, step: int) -> FlashpointError:
    """A copy of ``error`` that names rank and step; a foreign one becomes the cause of a FlashpointError."""
    if isinstance(error, FlashpointError):
        named = copy.copy(error)
        named.rank = rank if error.rank is None else error.rank
        named.step = step if error.step is None else error.step
        return named
    wrapped = FlashpointError(in_words(error), rank=rank, step=step, remedy="training goes on; please report this")
    wrapped.__cause__ = error
    return wrapped


class Counters:
    """Thread-safe numbers of one runtime."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Stats = {
            "saves_ok": 0,
            "saves_failed": 0,
            "saves_skipped": 0,
            "versions_complete": 0,
            "versions_failed": 0,
            "bytes_staged": 0,
            "bytes_outstanding": 0,
            "blocking_s": 0.0,
            "last_step": -1,
            "last_committed_step": -1,
            "last_complete_step": -1,
            "last_error": "",
        }
        self._told: set[tuple[str, ...]] = set()
        self._lasting: tuple[type, str] | None = None

    def add(self, name: str, amount: int | float = 1) -> None:
        with self._lock:
            self._values[name] += amount  # type: ignore[operator]

    def put(self, name: str, value: int | float | str) -> None:
        with self._lock:
            self._values[name] = value

    def raise_to(self, name: str, value: int) -> None:
        with self._lock:
            self._values[name] = max(int(self._values[name]), value)

    def snapshot(self) -> Stats:
        with self._lock:
            return dict(self._values)

    def lasting(self, what: str, problem: FlashpointError) -> None:
        """Log what is wrong for as long as this runtime lives; whatever fails for it later is told at DEBUG."""
        with self._lock:
            self._values["last_error"] = str(problem)
            self._lasting = type(problem), problem.message
        log.error("%s: %s", what, problem)

    def is_lasting(self, reason: str) -> bool:
        """Whether ``reason`` is the message of what ``lasting`` has told."""
        return self._lasting is not None and reason == self._lasting[1]

    def failure(self, what: str, error: FlashpointError) -> None:
        """Remember ``error``; log it in full the first time that its kind occurs, later at DEBUG."""
        kind = (what, type(error).__name__, error.setting or "", str(error.path or ""))
        with self._lock:
            self._values["last_error"] = str(error)
            first = kind not in self._told and (type(error), error.message) != self._lasting
            self._told.add(kind)
        # What the system refused, and our own errors, are told by the message alone.
        cause = None if isinstance(error.__cause__, (OSError, FlashpointError)) else error.__cause__
        log.log(logging.WARNING if first else logging.DEBUG, "%s: %s", what, error, exc_info=cause)


def log_record(level: int, kind: str, fields: dict[str, Any]) -> None:
    """Log ``mlflashpoint <kind> {json}`` on one line, the form that ``mlflashpoint timings parse`` reads."""
    log.log(level, "mlflashpoint %s %s", kind, json.dumps(fields, sort_keys=True))
