"""Signals that ask for the end: the first one interrupts, the next ones can't disturb the cleaning up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked for the end; not an error, and not to be swallowed as one."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class _State:
    """What the handler knows; there is one per process, as of the handlers.

    Attributes:
        held: signals raise nothing at present.
        raised: Interrupted was raised since the last ``rearm``.
        came: signals that came while held, the newest last.
    """

    def __init__(self) -> None:
        self.held = False
        self.raised = False
        self.came: list[int] = []

    def handle(self, number: int, frame: object) -> None:
        if self.held:
            self.came.append(number)
            return
        # held from here on: a second signal could strike before any handler of the exception has begun
        self.held = self.raised = True
        raise Interrupted(number)


_state = _State()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted while the block runs; one that was ignored before stays ignored.

    After an interruption they stay without effect also behind the block: the process is about to end.
    """
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    mine = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in mine:
        signal.signal(number, _state.handle)
    try:
        yield
    finally:
        for number in mine:
            # Python would give an interrupt its default effect back while it ends
            signal.signal(number, signal.SIG_IGN if _state.raised else before[number])


def hold() -> None:
    """From here on a signal is noted and raises nothing."""
    _state.held = True


def release() -> None:
    """Ends ``hold``; raises Interrupted if a signal has come meanwhile, unless one had been raised before."""
    if _state.raised:
        return
    _state.held = False
    if _state.came:
        number = _state.came[0]
        _state.held = _state.raised = True
        raise Interrupted(number)


def rearm() -> None:
    """After an interruption has been dealt with: the next signal interrupts again."""
    _state.came.clear()
    _state.held = False


def hurried() -> int:
    """How many signals have come since ``hold`` or the interruption: somebody is losing patience."""
    return len(_state.came)
