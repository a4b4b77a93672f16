"""A script's ``dcp.save`` and ``dcp.async_save``: a save to memory beside the durable one, or in its place.

``augment``: the memory save first, then the script's own, untouched. ``replace``: every Nth save of a stream is
durable, the others are in memory alone. A save is durable all the same, on all ranks, when there is no durable one
yet, when the last durable one can't be protected from the script's own retention (see ``marker``), and when the memory
save fails on any rank. That is known only once it is committed everywhere, so such a save waits for that,
``async_save`` too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint import state_dict_saver

from mlflashpoint.adapter.observe import timed
from mlflashpoint.adapter.pytorch.script import marker
from mlflashpoint.adapter.pytorch.script.calls import Request, pattern_of, request
from mlflashpoint.adapter.pytorch.script.stream import Stream, stream_of
from mlflashpoint.settings import BY_NAME

log = logging.getLogger("mlflashpoint.adapter")

#: imported with the first checkpoint in memory only, for it has something to do at the end from then on
_ENDING = "mlflashpoint.adapter.pytorch.script.ending"


class Original(Protocol):
    """The one call of a patched function: with the caller's arguments, with others, or not at all."""

    error: BaseException | None

    def __call__(self) -> Any: ...

    def using(self, *args: Any, **kwargs: Any) -> Any: ...

    def skip(self) -> None: ...


def save(original: Original, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_async: bool) -> Any:
    """Around ``save`` and ``async_save``."""
    asked = request(args, kwargs, "storage_writer")
    stream = None if isinstance(asked, str) else stream_of(pattern_of(asked.path), asked.alone)
    if isinstance(asked, str) or stream is None:
        log.debug("a save is left alone: %s", asked)
        return original()
    state = asked.plain_state()
    if _may_replace(stream):
        metadata = _to_memory_alone(stream, asked, state)
        if metadata is not None:
            original.skip()
            return _future(metadata, kwargs) if is_async else metadata
    else:
        timed(log, "memory", stream.number + 1, lambda: stream.save(state, asked.path, asked.planner, wait=False))
    rest = {name: value for name, value in kwargs.items() if name != "state_dict"}
    result = timed(log, "durable", stream.number, lambda: original.using(state, **rest))
    before = stream.last_durable
    stream.last_durable, stream.since_durable, stream.newest_is_memory = asked.path, 0, None
    if stream.runtime.rank == 0:
        written = functools.partial(_written, stream, asked.path, before, stream.number)
        upload = getattr(result, "upload_completion", result)
        if is_async and hasattr(upload, "add_done_callback"):
            upload.add_done_callback(written)
        else:
            written(None)
    return result


def setting(name: str) -> Any:
    """The value of a setting in this process's environment; raises SettingError."""
    return BY_NAME[name].read(os.environ)


def _may_replace(stream: Stream) -> bool:
    """Whether the next save of the stream is one for memory alone; the same on all ranks."""
    if setting("dcp_mode") != "replace" or stream.last_durable is None:
        return False
    return bool(stream.since_durable + 1 < setting("dcp_durable_every_n_saves"))


def _to_memory_alone(stream: Stream, asked: Request, state: Mapping[str, Any]) -> Any:
    """Save to memory in the place of the durable save; None if that is to be made after all, by all ranks."""
    assert stream.last_durable is not None
    number = stream.number + 1
    saved = timed(log, "memory", number, lambda: stream.save(state, asked.path, asked.planner, wait=True))
    shown = saved is not None
    if shown and stream.runtime.rank == 0:
        try:
            marker.write(asked.path, marker.Marker(str(stream.last_durable), stream.since_durable + 1))
        except OSError as error:
            shown = False
            log.warning("the last durable checkpoint %s can't be protected: %s", stream.last_durable, error)
    if not stream.vote(shown):
        log.warning("%s is not kept in memory only: it is saved durably, by all", asked.path)
        if stream.runtime.rank == 0 and shown:
            with contextlib.suppress(OSError):
                marker.erase(asked.path)
        return None
    importlib.import_module(_ENDING)
    if stream.newest_is_memory is None and stream.runtime.rank == 0:
        log.warning(
            "MLFLASHPOINT_DCP_MODE=replace is experimental: see its limits in docs/pytorch-dcp.md before relying on it"
        )
    stream.since_durable += 1
    stream.newest_is_memory = asked.path
    log.info("%s is in memory only, %d. since the durable %s", asked.path, stream.since_durable, stream.last_durable)
    return saved


def _written(stream: Stream, path: Path, before: Path | None, number: int, upload: Any) -> None:
    """The durable checkpoint is whole: it is no checkpoint in memory only, and the one before needs no protection."""
    try:
        if upload is not None and upload.exception() is not None:
            return
        marker.release(path, before)
        found = marker.identity(path)
        if found is not None:
            stream.journal.note(found, number)
    except Exception as error:
        log.warning("the durable checkpoint %s could not be entered in the journal: %s", path, error)


def _future(metadata: Any, kwargs: Mapping[str, Any]) -> Any:
    """What ``async_save`` gives back for a save that is done already."""
    done: Future[Any] = Future()
    done.set_result(metadata)
    staging = getattr(kwargs.get("async_stager"), "_config", None)
    response = getattr(state_dict_saver, "AsyncSaveResponse", None)
    if response is None or not getattr(staging, "use_async_staging", False):
        return done
    staged: Future[None] = Future()
    staged.set_result(None)
    return response(staging_completion=staged, upload_completion=done)
