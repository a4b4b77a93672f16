"""What happens on SIGTERM: each runtime drains, and then whatever would have happened without us.

The scheduler's SIGTERM gives a job a last few seconds. The user's own handler, and the default, keep their say: ours
starts the drain beside them and passes the signal on. A handler that is set later than ours is wrapped in turn; it may
call ours itself, so each of ours knows which one it stands before.

Python calls a handler only when the main thread is back in Python, and a rank whose peer is gone may wait for it in a
collective for long. So a thread is told of the signal by the wakeup descriptor, where nobody else uses that.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("mlflashpoint.core")

#: (what drains, its budget in seconds), for each object that lives
_drains: weakref.WeakKeyDictionary[object, tuple[Callable[[], object], float]] = weakref.WeakKeyDictionary()
_running: list[tuple[threading.Thread, float]] = []
_lock = threading.Lock()
_woken_by = -1


def on_sigterm(owner: object, drain: Callable[[], object], budget_s: float) -> None:
    """From now on, as long as ``owner`` lives, a SIGTERM to this process calls ``drain`` in a thread of its own.

    Args:
        owner: forgotten when it is gone, or by ``forget``.
        drain: must hold no reference to ``owner``, and end within ``budget_s`` seconds by itself.
        budget_s: longest time that the end of the process is put off for it.
    """
    _drains[owner] = drain, budget_s
    install()


def forget(owner: object) -> None:
    """``owner`` needs no drain any more."""
    _drains.pop(owner, None)


def install() -> None:
    """Put our handler before the one that is there now; does nothing outside of the main thread."""
    if not _drains or threading.current_thread() is not threading.main_thread():
        return
    present = signal.getsignal(signal.SIGTERM)
    # None: a handler that was set by C code can't be called from here, and is not ours to replace.
    if present is None or isinstance(present, _Handler):
        return
    try:
        signal.signal(signal.SIGTERM, _Handler(present))
        _listen()
    except (ValueError, OSError) as error:
        log.debug("SIGTERM can't be handled here: %s", error)


def wait() -> None:
    """Wait for drains that are under way, each no longer than its budget."""
    for thread, until in list(_running):
        thread.join(max(0.0, until - time.monotonic()))


def _listen() -> None:
    global _woken_by
    if _woken_by >= 0:
        return
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
        return
    _woken_by = writing
    threading.Thread(target=_watch, args=(reading,), name="mlflashpoint-sigterm", daemon=True).start()


def _watch(descriptor: int) -> None:
    while numbers := os.read(descriptor, 64):
        if signal.SIGTERM in numbers:
            _begin()


def _begin() -> None:
    """Start the drains, unless they are under way."""
    with _lock:
        if any(thread.is_alive() for thread, _ in _running):
            return
        _running.clear()
        for drain, budget_s in list(_drains.values()):
            thread = threading.Thread(target=_guarded, args=(drain,), name="mlflashpoint-drain", daemon=True)
            thread.start()
            _running.append((thread, time.monotonic() + budget_s))


class _Handler:
    """Ours, before the one that was there: ``before``."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # In a thread: the lock may be held by whoever the signal has interrupted.
        beginner = threading.Thread(target=_begin, name="mlflashpoint-drain-begin", daemon=True)
        beginner.start()
        beginner.join(1.0)
        if callable(self._before):
            # It may go on for long, or end the process by an exception: the runtimes' end waits for the drain then.
            self._before(number, frame)
        elif self._before == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is self:
            # Called by another's handler, it is that one's affair what becomes of the process.
            wait()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def _guarded(drain: Callable[[], object]) -> None:
    try:
        drain()
    except Exception as error:
        log.warning("nothing was drained: %s", error)
