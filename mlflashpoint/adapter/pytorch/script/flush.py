"""Checkpoints in memory only are written to their folders, out of memory: the script's state is another by now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.observe import timed
from mlflashpoint.adapter.pytorch.script.council import hold
from mlflashpoint.adapter.pytorch.script.stream import Stream, Version
from mlflashpoint.adapter.pytorch.script.version_planner import VersionPlanner
from mlflashpoint.errors import FlashpointError

log = logging.getLogger("mlflashpoint.adapter")


def flush(stream: Stream, wanted: Mapping[str, list[str]]) -> None:
    """Make versions durable; collective. What can't be is said in the log, and nothing is raised.

    Args:
        stream: whose versions.
        wanted: folders by token.
    """
    if not wanted:
        return
    try:
        found = {version.token: version for version in stream.find()}
    except FlashpointError as error:
        # Raised on every rank.
        log.error("what is in memory only can't be made durable: %s", error)
        return
    for token, folders in wanted.items():
        for folder in map(Path, folders):
            version = found.get(token)
            done = version is not None and _write(stream, version, folder)
            if stream.runtime.rank == 0:
                if done:
                    log.info("%s is durable now", folder)
                else:
                    log.warning("%s was in memory only and can't be made durable any more", folder)


def _write(stream: Stream, version: Version, folder: Path) -> bool:
    reader, rank, problem = stream.store.reader, stream.runtime.rank, ""
    reader.reset(version.id)
    try:
        try:
            planner = VersionPlanner(reader.shards(), reader.version_metadata(), rank)
        except FlashpointError as error:
            problem = str(error)
        if not hold(trouble=problem).ok:
            return False
        timed(log, "durable", version.number, lambda: stream.write_durable(folder, planner))
    except CheckpointException as error:
        log.error("%s can't be written: %s", folder, error)
        return False
    except Exception as error:
        stream.broken = f"{folder} can't be written: {type(error).__name__}: {error}"
        return False
    finally:
        reader.close()

    def enter() -> None:
        stream.custody.written(folder)

    return hold(enter).ok
