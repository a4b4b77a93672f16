"""One small file per process that tells each patch's state, for ``mlflashpoint doctor --pid``.

It lies in memory, at a place that does not depend on the job's environment, under the user's own 0700 directory. A
process that is killed leaves its file; the next one that writes takes away those of processes that are gone.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_logger = logging.getLogger(__name__)
_armed: set[int] = set()


def directory() -> Path:
    """The folder of this user's status files."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path("/tmp")
    return root / f"mlflashpoint-agent-{os.getuid()}"


def path_of(pid: int) -> Path:
    """The status file of a process of this process' pid namespace."""
    return directory() / f"{_namespace()}-{pid}.json"


def _namespace() -> str:
    # containers can share /dev/shm and still have pids of their own
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def started_at(pid: int) -> str | None:
    """When the process began, in the kernel's ticks; tells a pid from a later process with the same one."""
    try:
        # the command name in parentheses may hold spaces and parentheses itself
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def write(patches: Iterable[dict[str, object]]) -> None:
    """Write this process' file; never raises: a status file is not worth a fault in the job."""
    try:
        _write(patches)
    except Exception as error:
        _logger.debug("mlflashpoint agent: no status file: %s", error)


def _write(patches: Iterable[dict[str, object]]) -> None:
    pid = os.getpid()
    folder = directory()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a private directory of this user")
    path = path_of(pid)
    if pid not in _armed:
        _armed.add(pid)
        _reap(folder)
        atexit.register(_remove, path, pid)
    content = {"pid": pid, "started_at": started_at(pid), "patches": list(patches)}
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    os.replace(temporary, path)


def _remove(path: Path, pid: int) -> None:
    # a forked child inherits the atexit table, but not the file
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _reap(folder: Path) -> None:
    prefix = f"{_namespace()}-"
    for path in folder.glob(f"{prefix}*"):
        pid = path.name[len(prefix) :].partition(".")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def read(pid: int) -> dict[str, object] | None:
    """What process ``pid`` last wrote, or None if it wrote nothing or is another process by now."""
    try:
        content = json.loads(path_of(pid).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("started_at") != started_at(pid):
        return None
    return content
