"""When a script ends, its newest checkpoint becomes durable: what a finished job leaves behind, it leaves on disk.

That happens before ``destroy_process_group``, or at the interpreter's end in a script that does not call it. It is
written out of memory, because the script's state may be gone. A script that ends by an exception is to be resumed, and
its newest checkpoint stays where it is. A disk that refuses it is an error of the script's save, which comes out late.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.pytorch.script.council import hold
from mlflashpoint.adapter.pytorch.script.flush import flush
from mlflashpoint.adapter.pytorch.script.stream import Stream
from mlflashpoint.adapter.pytorch.script.streams import forget_streams, open_streams

log = logging.getLogger("mlflashpoint.adapter")

#: seconds that a rank waits for the others here; they may have crashed
_WAIT_S = 30.0


def before_parting(group: Any) -> CheckpointException | None:
    """Before ``destroy_process_group(group)``; in the wake of an exception nothing is written.

    Returns:
        what the script is to hear when its process group is gone: why the newest checkpoint can't be written to disk.
    """
    if not dist.is_initialized() or group not in (None, dist.group.WORLD):
        return None
    if sys.exc_info()[0] is None:
        return finish()
    forget_streams()
    return None


def finish() -> CheckpointException | None:
    """Make what is in memory only durable, and close the stores; collective, bounded, raises nothing.

    Returns:
        why the disk refuses one of them, None if it does not.
    """
    refused: CheckpointException | None = None
    waiting = [stream for stream in open_streams() if stream.newest_is_memory]
    try:
        # The same ones on all ranks that get here.
        outcome = hold(lambda: [_wanted(stream) for stream in waiting], seconds=_WAIT_S) if waiting else None
        if outcome is not None and not outcome.ok:
            log.warning("the newest checkpoints stay in memory only: the other ranks do not end as well")
        elif outcome is not None:
            for stream, wanted in zip(waiting, outcome.answer, strict=True):
                failure = flush(stream, wanted)
                refused = refused or failure
            for stream in waiting:
                stream.custody.settle()
    except (Exception, CheckpointException) as error:
        log.error("the newest checkpoint stays in memory only: %s", error)
    forget_streams()
    return refused


def _wanted(stream: Stream) -> dict[str, list[str]]:
    with stream.uploads.noted():
        return stream.custody.at_end(stream.has_saved)


def _at_exit() -> None:
    # An unhandled exception leaves this behind: the job is to be resumed.
    if not hasattr(sys, "last_type"):
        finish()


atexit.register(_at_exit)
