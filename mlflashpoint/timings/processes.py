"""One launch command at a time: started apart, watched, stopped with all that it has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mlflashpoint.timings import signals

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.25
#: how long a process that was sent SIGKILL is waited for: one in the kernel's hands may never end
_KILLED_S = 10.0


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
        grace_s: seconds that it has to stop after SIGINT, which is left out where it is ignored, and again after
            SIGTERM, before SIGKILL; and that what it leaves behind has after SIGTERM.
        watch: called several times a second with the seconds that have passed.

    Raises:
        OSError: it can't be started.
        signals.Interrupted: a signal came; the command and all its processes are stopped by then.
    """
    # processes that lose their parent below this one become its children, so that none can escape
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    others = frozenset(_children())
    started = time.monotonic()
    timed_out = False
    # no signal between the start and the place from which on the process would be stopped
    signals.hold()
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError:
        signals.release()
        raise
    try:
        try:
            signals.release()
            while process.poll() is None:
                passed = time.monotonic() - started
                watch(passed)
                if passed > deadline_s:
                    timed_out = True
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            signals.hold()
    finally:
        # held by now whatever has happened: further signals only cut the patience short
        _stop(process, grace_s)
        leftovers = _stop_orphans(others, grace_s)
    signals.release()
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return Ending(code, time.monotonic() - started, timed_out, leftovers)


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGINT, then SIGTERM, then SIGKILL, which comes at once if another signal asks for the end meanwhile."""
    told = signals.hurried()
    # a shell's ``&`` ignores SIGINT, and the command has inherited that with the rest
    deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    for number in (signal.SIGTERM,) if deaf else (signal.SIGINT, signal.SIGTERM):
        if process.poll() is not None:
            return
        _signal_group(process, number)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline and signals.hurried() == told:
            time.sleep(0.05)
    if process.poll() is None:
        _signal_group(process, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _stop_orphans(others: Collection[int], grace_s: float) -> int:
    """End what the command has left behind: it would run on beside the next one and take its time from it."""
    seen: set[int] = set()
    hurried = signals.hurried() > 0
    for number, patience_s in ((signal.SIGTERM, 0.2 if hurried else grace_s), (signal.SIGKILL, _KILLED_S)):
        told: set[int] = set()
        deadline = time.monotonic() + patience_s
        before = signals.hurried()
        while orphans := set(_children()) - set(others):
            for pid in orphans - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told |= orphans
            if time.monotonic() > deadline or (number == signal.SIGTERM and signals.hurried() != before):
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
