"""A script's ``dcp.load`` of a folder: from memory if that has the folder's checkpoint, else from disk.

Rank 0 looks at the folder and decides for all. A folder with a durable checkpoint is loaded from memory only if the
journal knows that very checkpoint: saved beside the version in memory, or by an earlier save.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.pytorch.script import marker
from mlflashpoint.adapter.pytorch.script.calls import pattern_of, request
from mlflashpoint.adapter.pytorch.script.saves import Original, setting
from mlflashpoint.adapter.pytorch.script.stream import Stream, stream_of
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.errors import FlashpointError, NoVersionError

log = logging.getLogger("mlflashpoint.adapter")

Versions = Mapping[Path, CheckpointContainerId]


def load(original: Original, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Around ``load``."""
    asked = request(args, kwargs, "storage_reader")
    stream = None if isinstance(asked, str) else stream_of(pattern_of(asked.path), asked.alone)
    if isinstance(asked, str) or stream is None:
        log.debug("a load is left alone: %s", asked)
        return original()
    versions = _find(stream)
    verdict = stream.tell(_verdict(stream, asked.path, versions) if stream.runtime.rank == 0 else None)
    source, durable, since, note = verdict["source"], verdict["durable"], verdict["since"], verdict["note"]
    if source == "lost":
        error = NoVersionError(
            "the checkpoint was in memory only, and memory does not have it any more",
            path=asked.path,
            rank=stream.runtime.rank,
            remedy=note,
        )
        original.error = error
        raise error
    if source == "memory":
        try:
            stream.load(asked.state, versions[asked.path], asked.planner)  # type: ignore[arg-type]
        except CheckpointException as failure:
            if not note:
                original.error = failure
                raise
            # Raised on all ranks, as DCP does, so that all of them turn to the disk.
            log.error("%s can't be loaded from memory: %s", asked.path, failure)
            original()
        except BaseException as failure:
            # The script's own: a Stateful that refuses what was loaded, for example.
            original.error = failure
            raise
        else:
            log.info("%s is loaded from memory", asked.path)
            original.skip()
    else:
        original()
    if stream.newest_is_memory is None and not stream.has_saved:
        stream.last_durable = Path(durable) if durable else None
        stream.since_durable = since
        stream.newest_is_memory = asked.path if since else None
    return None


def _find(stream: Stream) -> Versions:
    try:
        return stream.find()
    except FlashpointError as error:
        # Raised on every rank.
        log.error("memory can't be asked for a version: %s", error)
        return {}


def _verdict(stream: Stream, path: Path, versions: Versions) -> dict[str, Any]:
    """``_judge``; a fault in it leaves the load to the disk, for the other ranks wait for an answer."""
    try:
        return _judge(stream, path, versions)
    except Exception as error:
        log.error("%s is loaded from disk: %s", path, error, exc_info=True)
        return {"source": "disk", "durable": "", "since": 0, "note": "on disk"}


def _judge(stream: Stream, path: Path, versions: Versions) -> dict[str, Any]:
    """Where ``path`` is to be loaded from, the last durable checkpoint then, and saves to memory alone since it.

    ``note`` is a remedy if it is lost, and else not empty if the disk has it as well.
    """
    identity, mark = marker.identity(path), marker.read(path)
    version = versions.get(path)
    if identity is not None:
        number = stream.journal.number_of(identity)
        step = None if version is None else version.step
        # A script may have put an older checkpoint back under this name. Unless the newer one may be in memory alone,
        # what is on disk is what it wants.
        newest = number == step if setting("dcp_mode") != "replace" else number is not None and number <= (step or 0)
        ours = step is not None and newest
        return {"source": "memory" if ours else "disk", "durable": str(path), "since": 0, "note": "on disk"}
    durable, since = (mark.last_durable, mark.since_durable) if mark is not None else ("", 0)
    if version is not None:
        return {"source": "memory", "durable": durable, "since": since, "note": ""}
    if mark is None:
        return {"source": "disk", "durable": "", "since": 0, "note": "on disk"}
    try:
        left = marker.retire(path, mark, {str(folder) for folder in versions})
    except OSError as error:
        return {
            "source": "lost",
            "durable": "",
            "since": 0,
            "note": f"load {durable}; {path} stays in the way: {error}",
        }
    note = f"start again, and the script finds the last durable checkpoint {left}; the folder of this one is taken away"
    if left is None:
        note = f"the last durable checkpoint {durable} was deleted: start again from an older one"
    return {"source": "lost", "durable": "", "since": 0, "note": note}
