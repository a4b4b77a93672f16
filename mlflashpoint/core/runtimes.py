"""The runtimes of this process: one per group, found by whoever needs it."""

from __future__ import annotations

import threading

from mlflashpoint.core.claims import CLAIMS
from mlflashpoint.core.runtime import Runtime

_by_group: dict[str, Runtime] = {}
_lock = threading.Lock()


def get_runtime(group: str = "default") -> Runtime:
    """Return the process's runtime for ``group``, made from the environment at the first call.

    One that has been closed is made again.

    Raises:
        RankUnknownError: neither torch.distributed nor the environment tells the ranks.
        SettingError: a setting is malformed, or there is no job id.
        StoreInUseError: this process has one that it has made otherwise.
    """
    with _lock:
        found = _by_group.get(group)
        if found is None or found.closed:
            found = _by_group[group] = Runtime.from_env(group=group)
        return found


def close_runtimes() -> None:
    """Close every runtime of this process, bounded; also done at exit."""
    with _lock:
        _by_group.clear()
    CLAIMS.close_all()
