"""Looks at the drain directory at the start of a job: none waits for long, for a network file system may hang."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlflashpoint.core.deadline import bounded
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.drainplace import SETTING
from mlflashpoint.errors import DeadlineExceededError, DrainError

log = logging.getLogger("mlflashpoint.core")

T = TypeVar("T")

#: part of the deadline that a look may take: without it the job still goes on from memory
_SHARE = 0.2
#: and the longest one at whether it can be written
_LONGEST_S = 30.0
#: (process, directory) that was told of: a process has a session for each group
_told: set[tuple[int, Path]] = set()


def look_into(target: DrainDir, look: Callable[[DrainDir], T], nothing: T, *, deadline_s: float) -> T:
    """What ``look`` finds there; ``nothing``, and a warning, if it can't be read or does not answer in time."""
    try:
        return _bounded(lambda: look(target), target, deadline_s * _SHARE)
    except (OSError, DrainError) as error:
        log.warning("the drain directory is left out: %s", error)
        return nothing


def tell_at_start(target: DrainDir, base: Path, *, deadline_s: float) -> None:
    """See in the background whether it can be drained to, and log it if not: at SIGTERM it would be too late.

    Args:
        target: where a SIGTERM is to drain to.
        base: the container that it drains.
        deadline_s: longest wait for anything, in seconds.
    """
    key = os.getpid(), target.root
    if key in _told:
        return
    _told.add(key)
    arguments = target, base, min(_LONGEST_S, deadline_s)
    # No thread starts while the interpreter ends; then there is nothing left to drain, either.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_see, args=arguments, name="mlflashpoint-drain-look", daemon=True).start()


def _see(target: DrainDir, base: Path, seconds: float) -> None:
    try:
        _bounded(lambda: target.prepare(base), target, seconds)
    except DrainError as error:
        error.setting = SETTING
        log.error("a SIGTERM would drain nothing: %s", error)
    except Exception as error:
        log.debug("the drain directory was not looked at: %s", error)


def _bounded(action: Callable[[], T], target: DrainDir, seconds: float) -> T:
    try:
        return bounded(action, seconds, "a look into the drain directory")
    except DeadlineExceededError:
        raise DrainError(
            f"the drain directory has not answered within {seconds:g} s",
            setting=SETTING,
            path=target.root,
            remedy="see what is the matter with its file system, or give another directory",
        ) from None
