"""Checkpoints in memory only are written to their folders, out of memory: the script's state is another by now."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.observe import timed
from mlflashpoint.adapter.pytorch.script.calls import told
from mlflashpoint.adapter.pytorch.script.council import hold
from mlflashpoint.adapter.pytorch.script.stream import Stream, Version
from mlflashpoint.adapter.pytorch.script.version_planner import VersionPlanner
from mlflashpoint.errors import FlashpointError

log = logging.getLogger("mlflashpoint.adapter")


def flush(stream: Stream, wanted: Mapping[str, list[str]]) -> CheckpointException | None:
    """Make versions durable; collective. What can't be is said in the log, and nothing is raised.

    Args:
        stream: whose versions.
        wanted: folders by token.

    Returns:
        why the first folder that can't be written to can't; None if there is none. The same on every rank.
    """
    refused: CheckpointException | None = None
    if not wanted:
        return refused
    try:
        found = {version.token: version for version in stream.find()}
    except FlashpointError as error:
        # Raised on every rank.
        log.error("what is in memory only can't be made durable: %s", error)
        return refused
    leads = stream.runtime.rank == 0
    for token, folders in wanted.items():
        for folder in map(Path, folders):
            version = found.get(token)
            try:
                done = version is not None and _write(stream, version, folder)
            except CheckpointException as error:
                refused = refused or error
                if leads:
                    log.error(
                        "%s can't be written (%s): it stays in memory only, and is found there if the same job starts "
                        "again on the same nodes",
                        folder,
                        told(error),
                    )
                continue
            if leads and done:
                log.info("%s is durable now", folder)
            elif leads:
                log.warning("%s was in memory only and can't be made durable any more", folder)
    return refused


def _write(stream: Stream, version: Version, folder: Path) -> bool:
    """False if memory does not have it whole any more; raises CheckpointException if the disk refuses it."""
    reader, runtime, problem = stream.store.reader, stream.runtime, ""
    reader.reset(version.id)
    try:
        try:
            planner = VersionPlanner(reader.shards(), reader.version_metadata(), runtime.rank, runtime.world_size)
        except FlashpointError as error:
            problem = str(error)
        if not hold(trouble=problem).ok:
            return False
        timed(log, "durable", version.number, lambda: stream.write_durable(folder, planner))
    except Exception as error:
        stream.broken = f"{folder} can't be written: {type(error).__name__}: {error}"
        return False
    finally:
        reader.close()

    def enter() -> None:
        stream.custody.written(folder)

    return hold(enter).ok
