"""One launch command at a time: started apart, watched, stopped with all that it has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.25


class Interrupted(BaseException):
    """A signal asked for the end; not an error, and not to be swallowed as one."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@dataclass(frozen=True)
class Ending:
    """How a command ended.

    Attributes:
        code: exit code, negative for the number of the signal that ended it.
        seconds: how long it ran.
        timed_out: whether it was stopped at its deadline.
        leftovers: processes of it that were still there afterwards and had to be stopped.
    """

    code: int
    seconds: float
    timed_out: bool = False
    leftovers: int = 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted while the block runs, also where they were ignored before."""

    def handle(number: int, frame: object) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    """In the child: a command whose ``mlflashpoint ab`` is killed would run on with nobody to stop it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    log: IO[bytes],
    *,
    deadline_s: float,
    grace_s: float,
    watch: Callable[[float], None],
) -> Ending:
    """Run ``command`` in a session of its own, its output in ``log``, until it ends.

    Args:
        command: program and arguments.
        environ: its whole environment.
        log: where standard output and error go.
        deadline_s: seconds after which it is stopped.
        grace_s: seconds that it has to stop after SIGINT, and again after SIGTERM, before SIGKILL.
        watch: called several times a second with the seconds that have passed.

    Raises:
        OSError: it can't be started.
        Interrupted: a signal came; the command and all its processes are stopped by then.
    """
    # processes that lose their parent below this one become its children, so that none can escape
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    others = frozenset(_children())
    started = time.monotonic()
    process = subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    timed_out = False
    try:
        while process.poll() is None:
            passed = time.monotonic() - started
            watch(passed)
            if passed > deadline_s:
                timed_out = True
                _stop(process, grace_s)
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        # an interrupt lands here too, and a second one cuts the patience short
        try:
            _stop(process, grace_s)
            leftovers = _stop_orphans(others, grace_s)
        except Interrupted:
            _signal_group(process, signal.SIGKILL)
            process.wait(30)
            leftovers = _stop_orphans(others, 0.2)
    return Ending(process.returncode, time.monotonic() - started, timed_out, leftovers)


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        _signal_group(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _stop_orphans(others: Collection[int], grace_s: float) -> int:
    """End what the command has left behind: it would run on beside the next one and take its time from it."""
    seen: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        told: set[int] = set()
        deadline = time.monotonic() + grace_s
        while orphans := set(_children()) - set(others):
            for pid in orphans - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told |= orphans
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        seen |= told
    return len(seen)


def _children() -> list[int]:
    """Living children of this process; dead ones are reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != os.getpid():
                continue
            if fields[0] == "Z":
                os.waitpid(int(entry.name), os.WNOHANG)
            else:
                found.append(int(entry.name))
    return found
