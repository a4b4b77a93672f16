"""The fits of this process: the session of each Trainer, the names of their versions, and who else is fitting."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.lightning.packages import is_fitting
from mlflashpoint.errors import StoreInUseError

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.session import FitSession

#: the session of each Trainer that has one, whoever made it: the agent for a fit, or the recipe by the library form
_sessions: weakref.WeakKeyDictionary[Any, FitSession] = weakref.WeakKeyDictionary()
#: the Trainer that was last to begin a fit that saves, if it lives
_last: weakref.ref[Any] | None = None
_groups = 0
#: Trainers may begin to fit in several threads at once
_lock = threading.RLock()


def session_of(trainer: Any) -> FitSession | None:
    """The session of a Trainer, None if nobody made one."""
    return _sessions.get(trainer)


def adopt(trainer: Any, session: FitSession) -> None:
    """Make ``session`` the Trainer's; one that the recipe has made before is given up."""
    with _lock:
        before = _sessions.get(trainer)
        _sessions[trainer] = session
    if before is not None and before is not session:
        # Its store would be in the way of this one's.
        before.finish(success=False)


def enter(trainer: Any, session: FitSession) -> None:
    """The Trainer begins a fit that saves, by its ``session``; of several that begin at once one gets through.

    Raises:
        StoreInUseError: another one is fitting. Nothing has changed then.
    """
    global _last
    with _lock:
        refuse_second(trainer)
        _last = weakref.ref(trainer)
        adopt(trainer, session)


def release(trainer: Any) -> None:
    """The Trainer has no session any more."""
    with _lock:
        _sessions.pop(trainer, None)


def next_group() -> str:
    """Name of the versions of one more fit, or Trainer.

    The same command makes the same ones in the same order after a restart, so that each finds its own again.
    """
    global _groups
    with _lock:
        _groups += 1
        return "lightning" if _groups == 1 else f"lightning-{_groups}"


def refuse_second(trainer: Any) -> None:
    """Raise StoreInUseError if another Trainer of this process is saving while it fits."""
    with _lock:
        other = None if _last is None else _last()
        if other is None or other is trainer:
            return
        session = _sessions.get(other)
        if session is None or session.closed or not is_fitting(other) or other.state.status.value != "running":
            return
    raise StoreInUseError(
        "another Trainer of this process is fitting, and saves to memory",
        path=session.base,
        remedy="let one fit end before the next begins, or give each a process and a MLFLASHPOINT_JOB_ID",
    )
