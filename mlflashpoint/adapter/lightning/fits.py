"""The fits of this process: the session of each Trainer, the names of their versions, and who else is fitting."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.lightning.packages import is_fitting
from mlflashpoint.errors import StoreInUseError

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.session import FitSession

#: the session of each Trainer that has one, whoever made it: the agent for a fit, or the recipe by the library form
_sessions: weakref.WeakKeyDictionary[Any, FitSession] = weakref.WeakKeyDictionary()
_groups = 0


def session_of(trainer: Any) -> FitSession | None:
    """The session of a Trainer, None if nobody made one."""
    return _sessions.get(trainer)


def adopt(trainer: Any, session: FitSession) -> None:
    """Make ``session`` the Trainer's; one that the recipe has made before is given up."""
    before = _sessions.get(trainer)
    if before is not None and before is not session:
        # Its store would be in the way of this one's.
        before.finish(success=False)
    _sessions[trainer] = session


def release(trainer: Any) -> None:
    """The Trainer has no session any more."""
    _sessions.pop(trainer, None)


def next_group() -> str:
    """Name of the versions of one more fit, or Trainer.

    The same command makes the same ones in the same order after a restart, so that each finds its own again.
    """
    global _groups
    _groups += 1
    return "lightning" if _groups == 1 else f"lightning-{_groups}"


def refuse_second(trainer: Any) -> None:
    """Raise StoreInUseError if another Trainer of this process is saving while it fits."""
    for other, session in list(_sessions.items()):
        running = is_fitting(other) and other.state.status.value == "running"
        if other is not trainer and running and not session.closed:
            raise StoreInUseError(
                "another Trainer of this process is fitting, and saves to memory",
                path=session.base,
                remedy="let one fit end before the next begins, or give each a process and a MLFLASHPOINT_JOB_ID",
            )
