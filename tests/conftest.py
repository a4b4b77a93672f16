"""What the tests start and kill must not outlive them: children of a killed process go on without a parent."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Tests are never timed: a slow machine is no fault of the code.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

_MARK = "MLFLASHPOINT_TEST_RUN"

# Each connection to a job's store looks up a name, and a name server that loses a question now and then costs 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# A shell without job control starts what it puts into the background with SIGINT ignored, and that is inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _orphans(mark: str) -> list[int]:
    """Processes of this test run whose parent is gone."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == 1 and f"_{_MARK}={mark}".encode() in environment:
                found.append(int(folder.name))
    return found


@pytest.fixture(scope="module", autouse=True)
def no_orphans() -> Iterator[None]:
    """Kill, after each module, what its killed jobs have left running."""
    # The name begins with an underscore: one of ours would be reported as an unknown setting.
    mark = os.environ.setdefault(f"_{_MARK}", uuid.uuid4().hex)
    yield
    for pid in _orphans(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
