"""What happens on SIGTERM: each runtime drains, and then whatever would have happened without us.

The scheduler's SIGTERM gives a job a last few seconds. The user's own handler, and the default, keep their say: ours
starts the drain beside them and passes the signal on. A handler that is set later than ours is wrapped in turn; it may
call ours itself, so each of ours knows which one it stands before.

Python calls a handler only when the main thread is back in Python, and a rank whose peer is gone may wait for it in a
collective for long. So a thread is told of the signal by the wakeup descriptor, where nobody else uses that. Our
handler tells it as well, by the same pipe: what comes first drains, and a handler that is called for a signal which the
thread has heard of does not drain again, however long ago that was. A later signal does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("mlflashpoint.core")

#: (what drains, its budget in seconds), for each object that lives
_drains: weakref.WeakKeyDictionary[object, tuple[Callable[[], object], float]] = weakref.WeakKeyDictionary()
_running: list[tuple[threading.Thread, float]] = []
#: what our handler writes into the pipe, where the wakeup descriptor writes numbers of signals
_CALLED = 0
#: writing end of the pipe, -1 for none
_woken_by = -1
#: handlers of ours that wait until their call has been heard of
_callers: deque[threading.Event] = deque()
#: handlers of ours that are being called, one within the other
_depth = 0


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
    if present is None:
        return
    try:
        _listen()
        if not isinstance(present, _Handler):
            signal.signal(signal.SIGTERM, _Handler(present))
    except (ValueError, OSError, RuntimeError) as error:
        log.debug("SIGTERM can't be handled here: %s", error)


def wait() -> None:
    """Wait for drains that are under way, each no longer than its budget."""
    for thread, until in _running:
        thread.join(max(0.0, until - time.monotonic()))


def _listen() -> None:
    global _woken_by
    if _woken_by >= 0:
        return
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    try:
        threading.Thread(target=_watch, args=(reading,), name="mlflashpoint-sigterm", daemon=True).start()
    except RuntimeError:
        os.close(reading)
        os.close(writing)
        raise
    _woken_by = writing
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)


def _watch(descriptor: int) -> None:
    ahead = False
    while heard := os.read(descriptor, 64):
        for number in heard:
            if number == signal.SIGTERM:
                _begin()
                ahead = True
            elif number == _CALLED:
                # One call may stand for several signals, and each of those was heard of before it.
                if not ahead:
                    _begin()
                ahead = False
                while _callers:
                    _callers.popleft().set()


def _begin() -> None:
    """Start the drains, unless they are under way."""
    global _running
    if any(thread.is_alive() for thread, _ in _running):
        return
    begun = []
    for drain, budget_s in list(_drains.values()):
        thread = threading.Thread(target=_guarded, args=(drain,), name="mlflashpoint-drain", daemon=True)
        thread.start()
        begun.append((thread, time.monotonic() + budget_s))
    _running = begun


class _Handler:
    """Ours, before the one that was there: ``before``."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _depth
        # Called by another's handler that ours stands before, it is for the same signal.
        if _depth == 0:
            _tell()
        _depth += 1
        try:
            self._pass_on(number, frame)
        finally:
            _depth -= 1

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            # It may go on for long, or end the process by an exception: the runtimes' end waits for the drain then.
            self._before(number, frame)
        elif self._before == signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is self:
            # Called by another's handler, it is that one's affair what becomes of the process.
            wait()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def _tell() -> None:
    """Tell the thread that our handler is called, and wait until it has begun what is to begin."""
    if _woken_by < 0:
        return
    heard = threading.Event()
    _callers.append(heard)
    with contextlib.suppress(OSError):
        os.write(_woken_by, bytes([_CALLED]))
        heard.wait(1.0)


def _guarded(drain: Callable[[], object]) -> None:
    try:
        drain()
    except Exception as error:
        log.warning("nothing was drained: %s", error)


def _forget_in_child() -> None:
    """A forked child has neither what the drains need nor the thread, and by its pipe it would tell its parent."""
    global _woken_by, _running, _depth
    _drains.clear()
    _callers.clear()
    _running, _depth = [], 0
    ours, _woken_by = _woken_by, -1
    if ours >= 0:
        with contextlib.suppress(ValueError, OSError):
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, ours):
                signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_forget_in_child)
