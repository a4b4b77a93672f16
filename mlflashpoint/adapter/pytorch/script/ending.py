"""When a script ends, its newest checkpoint becomes durable: what a finished job leaves behind, it leaves on disk.

That happens before ``destroy_process_group``, or at the interpreter's end in a script that does not call it. It is
written out of memory, because the script's state may be gone. A script that ends by an exception is to be resumed, and
its newest checkpoint stays where it is.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.observe import timed
from mlflashpoint.adapter.pytorch.script import marker
from mlflashpoint.adapter.pytorch.script.stream import Stream, all_say, forget_streams, open_streams
from mlflashpoint.adapter.pytorch.script.version_planner import VersionPlanner

log = logging.getLogger("mlflashpoint.adapter")

#: seconds that a rank waits for the others here; they may have crashed
_WAIT_S = 30.0


def before_parting(group: Any) -> None:
    """Before ``destroy_process_group(group)``; in the wake of an exception nothing is written."""
    if not dist.is_initialized() or group not in (None, dist.group.WORLD):
        return
    if sys.exc_info()[0] is None:
        finish()
    else:
        forget_streams()


def finish() -> None:
    """Make what is in memory only durable, and close the stores; collective, bounded, raises nothing."""
    waiting = [stream for stream in open_streams() if stream.newest_is_memory is not None]
    try:
        # The same ones on all ranks that get here.
        if waiting and all_say(True, _WAIT_S):
            for stream in waiting:
                _write(stream)
        elif waiting:
            log.warning("the newest checkpoints stay in memory only: the other ranks do not end as well")
    except (Exception, CheckpointException) as error:
        log.error("the newest checkpoint stays in memory only: %s", error)
    forget_streams()


def _write(stream: Stream) -> None:
    folder = stream.newest_is_memory
    found = stream.find()
    version = None if folder is None else found.get(folder)
    if folder is None or not stream.vote(version is not None) or version is None:
        log.error("%s can't be made durable: memory does not have it", folder)
        return
    reader, rank = stream.store.reader, stream.runtime.rank
    reader.reset(version)
    try:
        planner = VersionPlanner(reader.shards(), reader.version_metadata(), rank)
        timed(log, "durable", stream.number, lambda: stream.write_durable(folder, planner))
    finally:
        reader.close()
    stream.newest_is_memory = None
    if rank == 0:
        marker.release(folder, stream.last_durable)
    log.info("%s is durable now: the script ends", folder)


def _at_exit() -> None:
    # An unhandled exception leaves this behind: the job is to be resumed.
    if not hasattr(sys, "last_type"):
        finish()


atexit.register(_at_exit)
