"""A seat: the folder that one local rank's process owns while it lives, guarded by an advisory lock on its ``lock``.

The kernel drops the lock when the process ends, however it ends. A forked child must not keep it alive, so children
close their copy of the descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from mlflashpoint.core.files import file_error
from mlflashpoint.errors import ContainerError

log = logging.getLogger("mlflashpoint.core")

LOCK_FILE = "lock"
_held: weakref.WeakSet[SeatLock] = weakref.WeakSet()


class SeatLock:
    """Holds a seat until ``release`` or the end of the process.

    Args:
        seat: the seat's folder.
        wait_s: seconds to wait for a predecessor that is still ending.

    Raises:
        ContainerError: another live process holds the seat, or the lock file can't be made.
        StoreFullError: there is no room for the lock file.
    """

    def __init__(self, seat: Path, *, wait_s: float) -> None:
        self.seat = seat
        give_up = time.monotonic() + wait_s
        file = seat / LOCK_FILE
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            remedy = "remove what lies there, if no process of the job runs"
            raise file_error("the seat can't be locked", error, path=file, remedy=remedy) from error
        told = wait_s <= 0
        while not _try_lock(self._descriptor, fcntl.LOCK_EX):
            if not told:
                told = True
                log.info("waiting up to %g s for process %d, which holds the seat %s", wait_s, _pid_in(seat), seat)
            if time.monotonic() >= give_up:
                os.close(self._descriptor)
                raise ContainerError(
                    f"another live process (pid {_pid_in(seat)}) holds the seat",
                    path=seat,
                    remedy="end that process, or give each job a MLFLASHPOINT_JOB_ID of its own (and a "
                    "MLFLASHPOINT_BASE_CONTAINER, where that is set), and the groups of one job different names; to "
                    "read versions beside the job takes no seat (ReadOnlyStore)",
                )
            time.sleep(min(0.05, wait_s / 10))
        # That it is held counts; where there is no room to say by whom, it is not said.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, f"{os.getpid():<20}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Give the seat up; may be called twice."""
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def live_owner(seat: Path) -> int | None:
    """Process id of the live owner of the seat, 0 if it is live but did not say, None if nobody holds it.

    Raises:
        ContainerError: the lock file can't be read.
    """
    try:
        descriptor = os.open(seat / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ContainerError(
            f"the seat's lock can't be read: {error.strerror}", path=seat, remedy="run this as the job's user"
        ) from error
    try:
        return None if _try_lock(descriptor, fcntl.LOCK_SH) else _pid_in(seat)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def file_lock(file: Path, *, wait_s: float) -> Iterator[None]:
    """Hold an advisory lock on ``file``, made if missing, for one short action.

    Raises:
        OSError: it can't be opened, or (TimeoutError) another process held it for ``wait_s`` seconds.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        give_up = time.monotonic() + wait_s
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= give_up:
                raise TimeoutError(errno.ETIMEDOUT, f"another process held the lock for {wait_s} s", str(file))
            time.sleep(0.002)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid_in(seat: Path) -> int:
    try:
        text = (seat / LOCK_FILE).read_bytes()[:32].strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_in_child)
