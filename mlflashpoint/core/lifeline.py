"""The lifeline of a checkpoint process: it ends soon after the training process whose store it has.

DCP's checkpoint process notices that only when it looks for the next save. In the middle of one it may wait for other
ranks that are dead as well, for as long as torch's collectives do, and sits on the seat that the next start needs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from multiprocessing import connection

from mlflashpoint.core import sigterm

log = logging.getLogger("mlflashpoint.core")

#: enough for a save whose other ranks are there; less than the next start waits for the seat
_GRACE_S = 5.0
#: a process that was forked from the training process keeps the sentinel open
_LOOK_S = 1.0
_held: list[int] = []


def hold() -> None:
    """From now on this process, if it is a daemon that another process has started, ends soon after that one."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().daemon or os.getpid() in _held:
        return
    _held.append(os.getpid())
    arguments = (parent.sentinel, os.getppid())
    threading.Thread(target=_watch, args=arguments, name="mlflashpoint-lifeline", daemon=True).start()


def _watch(sentinel: int, parent: int) -> None:
    while os.getppid() == parent and not connection.wait([sentinel], _LOOK_S):
        pass
    time.sleep(_GRACE_S)
    # A drain has a budget of its own.
    sigterm.wait()
    log.warning("the training process %d has ended: its checkpoint process ends, too", parent)
    os._exit(1)
