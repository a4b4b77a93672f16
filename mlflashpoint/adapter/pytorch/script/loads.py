"""A script's ``dcp.load`` of a folder: from memory if that has the folder's checkpoint, else from disk.

Rank 0 looks at the folder and decides for all. A folder says by its marker which version it is, wherever a script has
moved it. A folder with a durable checkpoint is loaded from memory only if a journal knows that very checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from mlflashpoint.adapter.pytorch.script import journal, marker
from mlflashpoint.adapter.pytorch.script.calls import Request, elsewhere, request, trouble
from mlflashpoint.adapter.pytorch.script.council import given_up, hold
from mlflashpoint.adapter.pytorch.script.line import group_of
from mlflashpoint.adapter.pytorch.script.retirement import retire
from mlflashpoint.adapter.pytorch.script.saves import BROKEN, Original, stand_in
from mlflashpoint.adapter.pytorch.script.stream import Stream, Version
from mlflashpoint.adapter.pytorch.script.streams import abandon, stream_of
from mlflashpoint.adapter.pytorch.script.successor import make_folder
from mlflashpoint.errors import FlashpointError, NoVersionError, PeerError
from mlflashpoint.settings import StoreConfig

log = logging.getLogger("mlflashpoint.adapter")

#: what a rank says that has not found the version which the others load
_MISSING = "it does not find the version in memory"


def load(original: Original, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Around ``load``."""
    asked = request(args, kwargs, "storage_reader")
    if isinstance(asked, str):
        log.debug("a load is left alone: %s", asked)
        return original()
    place = None if given_up() else hold(lambda: _place(asked.path)).answer
    if place is None:
        return _from_disk(original, asked.path)
    group, last_durable = place
    stream = stream_of(group, asked.path, asked.alone)
    if stream is None:
        if last_durable:
            original.error = _out_of_reach(asked.path, last_durable)
            raise original.error
        return original()
    versions = _find(stream)
    outcome = hold(lambda: _judged(stream, asked.path, versions), trouble=BROKEN * bool(stream.broken))
    verdict = outcome.answer
    source, note = ("disk", "") if verdict is None else (verdict["source"], verdict["note"])
    if outcome.trouble == BROKEN:
        abandon(stream, stream.broken or f"rank {outcome.rank} has lost the process group of memory saves")
        source, note = ("out of reach", last_durable) if last_durable else ("script", "")
    if source == "script":
        return original()
    if source == "out of reach":
        original.error = _out_of_reach(asked.path, note)
        raise original.error
    if source == "lost":
        original.error = NoVersionError(
            "the checkpoint was in memory only, and memory does not have it any more",
            path=asked.path,
            rank=stream.runtime.rank,
            remedy=note,
        )
        raise original.error
    if source == "memory":
        version = next((version for version in versions or () if version.token == verdict["token"]), None)
        _from_memory(original, stream, asked, version, on_disk=bool(note))
    else:
        _from_disk(original, asked.path)
    if source == "memory":
        stream.has_loaded = True
        if not stream.has_saved and not note:
            stand_in(stream)
    if verdict is not None and stream.runtime.rank == 0:
        _enter(stream, asked.path)
    return None


def _from_memory(original: Original, stream: Stream, asked: Request, version: Version | None, *, on_disk: bool) -> None:
    """Load it from memory, or from disk if that fails and the disk has it; what the script's own code raises is its."""
    state, failure = asked.plain_state()
    outcome = hold(trouble=trouble(failure) or _MISSING * (version is None))
    if failure is not None:
        original.error = failure
        raise failure
    if not outcome.ok and outcome.rank != -1 and outcome.trouble != _MISSING:
        original.error = elsewhere("load", outcome.rank or 0, outcome.trouble)
        raise original.error
    try:
        if version is None or not outcome.ok:
            raise elsewhere("load", outcome.rank or 0, outcome.trouble or _MISSING)
        stream.load(state, version.id, asked.planner)
    except CheckpointException as failure:
        if not on_disk:
            original.error = failure
            raise
        # Raised on all ranks, as DCP does, so that all of them turn to the disk.
        log.error("%s can't be loaded from memory: %s", asked.path, failure)
        original()
        return
    except BaseException as failure:
        stream.broken = f"the load of {version} failed: {failure}"
        original.error = failure
        raise
    try:
        asked.take(state)
    except BaseException as failure:
        # The script's own: a Stateful that refuses what was loaded, for example.
        original.error = failure
        raise
    if stream.runtime.rank == 0:
        found = stream.store.loader.found(version.id)
        log.info("%s is loaded from %s", asked.path, "memory" if found is None else found[1].place)
    original.skip()


def _from_disk(original: Original, path: Path) -> Any:
    """The script's own load, which can't load what is in memory only: then the error says what is the matter."""
    try:
        return original()
    except CheckpointException as failure:
        last_durable = _memory_only(path)
        if not last_durable:
            raise
        original.error = _out_of_reach(path, last_durable)
        raise original.error from failure


def _memory_only(path: Path) -> str:
    """The last durable checkpoint before the one in ``path``, if that is in memory only; else empty."""
    mark = marker.read(path)
    return "" if mark is None or marker.identity(path) is not None else mark.last_durable


def _out_of_reach(path: Path, last_durable: str) -> PeerError:
    return PeerError(
        "the checkpoint is in memory only, and memory could not be reached; the log says why",
        path=path,
        remedy=f"start again: memory keeps it as long as the nodes are up; the last durable one is {last_durable}",
    )


def _place(path: Path) -> tuple[str, str]:
    """The store that has the checkpoint in ``path``, if any has, and the last durable one if it is in memory only."""
    mark, identity = marker.read(path), marker.identity(path)
    if identity is not None:
        return journal.group_that_wrote(identity, StoreConfig.from_env().base_container) or group_of(path), ""
    return group_of(path) if mark is None else mark.group, _memory_only(path)


def _find(stream: Stream) -> Sequence[Version] | None:
    """The versions in memory, None if they can't be told."""
    try:
        return stream.find()
    except FlashpointError as error:
        # Raised on every rank.
        log.error("memory can't be asked for a version: %s", error)
        return None


def _judged(stream: Stream, path: Path, versions: Sequence[Version] | None) -> dict[str, Any]:
    with stream.uploads.noted():
        return _judge(stream, path, versions)


def _judge(stream: Stream, path: Path, versions: Sequence[Version] | None) -> dict[str, Any]:
    """Where ``path`` is to be loaded from, and which version that is.

    ``note`` is a remedy if it is lost, the last durable one if it is out of reach, and else tells that the disk has it.
    """
    identity, mark = marker.identity(path), marker.read(path)
    if identity is not None:
        # A script may have put an older checkpoint back under this name.
        token = stream.journal.token_of(identity)
        known = token in {version.token for version in versions or ()}
        return {"source": "memory" if known else "disk", "token": token, "note": "on disk"}
    if mark is None:
        return {"source": "disk", "token": "", "note": "on disk"}
    if versions is None:
        return {"source": "out of reach", "token": "", "note": mark.last_durable}
    tokens = {version.token for version in versions}
    if mark.token in tokens:
        return {"source": "memory", "token": mark.token, "note": ""}
    if mark.job != stream.runtime.config.job_id:
        note = (
            f"it is another job's, {mark.job}, which has to end well first; the last durable one is {mark.last_durable}"
        )
        return {"source": "lost", "token": "", "note": note}
    if stream.has_saved or stream.has_loaded:
        # It is the job that has moved on, and not the memory that is lost.
        note = (
            f"memory has the newest {stream.runtime.config.keep_versions} checkpoints; load one of those or the last "
            f"durable one, {mark.last_durable}; a script that goes further back wants MLFLASHPOINT_DCP_MODE=augment"
        )
        return {"source": "lost", "token": "", "note": note}
    try:
        newer = make_folder(path, mark, versions[0]) if versions else None
        left = retire(path, mark, tokens, newer)
    except OSError as error:
        return {
            "source": "lost",
            "token": "",
            "note": f"load {mark.last_durable}; {path} stays in the way: {error}",
        }
    note = f"start again, and the script finds the last durable checkpoint {left}; the folder of this one is taken away"
    if newer is not None:
        note = (
            f"start again, and the script finds {newer}, a newer one, in memory; the folder of this one is taken away"
        )
    elif left is None:
        note = f"the last durable checkpoint {mark.last_durable} was deleted: start again from an older one"
    return {"source": "lost", "token": "", "note": note}


def _enter(stream: Stream, path: Path) -> None:
    """Rank 0 knows where the script goes on from."""
    with stream.uploads.noted():
        if stream.has_saved:
            stream.custody.rolled_back(path)
        else:
            stream.custody.resume(path, None if marker.identity(path) is not None else marker.read(path))
