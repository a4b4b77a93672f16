"""What is told of a save that has failed: to the other ranks, and to whoever reads the error."""

from __future__ import annotations

import logging
import threading

from mlflashpoint.adapter.pytorch.finish import Save
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import FlashpointError

log = logging.getLogger("mlflashpoint.adapter")


def tell_failed(runtime: Runtime, save: Save, error: BaseException) -> None:
    """Let the other ranks' shards of this step go; in the background, because it may wait for those ranks."""

    def tell() -> None:
        try:
            channel = runtime.channel("dcp-failures").under("dcp")
            channel.decide(save.key, [False, f"rank {runtime.rank}: {error}"[:1000]])
        except FlashpointError as unreachable:
            log.warning("the other ranks could not be told of a failed save: %s", unreachable)

    if runtime.world_size > 1:
        threading.Thread(target=tell, name="mlflashpoint-tell", daemon=True).start()


def locate(error: BaseException, runtime: Runtime, save: Save, version: object) -> None:
    """Let an error of a state say which save it is of; what it says already holds."""
    if isinstance(error, FlashpointError):
        error.rank = runtime.rank if error.rank is None else error.rank
        error.step = save.step if error.step is None else error.step
        error.path = str(version) if error.path is None else error.path
