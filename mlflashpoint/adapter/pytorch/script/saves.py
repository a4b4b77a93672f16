"""A script's ``dcp.save`` and ``dcp.async_save``: a save to memory beside the durable one, or in its place.

``augment``: the memory save first, then the script's own, untouched. ``replace``: every Nth save of a stream is
durable, the others are in memory alone. Rank 0 decides which, see ``custody``; a save is durable all the same, on all
ranks, when the last durable checkpoint can't be protected, and when the memory save fails on any rank. That is known
only once it is committed everywhere, so such a save waits for that, ``async_save`` too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint import state_dict_saver

from mlflashpoint.adapter import original as original_of
from mlflashpoint.adapter.observe import timed
from mlflashpoint.adapter.pytorch.script import marker
from mlflashpoint.adapter.pytorch.script.calls import Request, elsewhere, request, trouble
from mlflashpoint.adapter.pytorch.script.council import hold
from mlflashpoint.adapter.pytorch.script.flush import flush
from mlflashpoint.adapter.pytorch.script.line import group_of
from mlflashpoint.adapter.pytorch.script.stream import Stream
from mlflashpoint.adapter.pytorch.script.streams import abandon, stream_of
from mlflashpoint.errors import FlashpointError
from mlflashpoint.settings import BY_NAME

log = logging.getLogger("mlflashpoint.adapter")

#: imported with the first checkpoint in memory only, for it has something to do at the end from then on
_ENDING = "mlflashpoint.adapter.pytorch.script.ending"


#: for a folder that one node has made to be seen on the others
_SEEN_S = 3.0
#: what a rank says that has no use for the process group any more
BROKEN = "the process group of memory saves is broken"


class Original(original_of.Original, Protocol):
    """The same, which may also be left out."""

    def skip(self) -> None: ...


def save(original: Original, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_async: bool) -> Any:
    """Around ``save`` and ``async_save``."""
    asked = request(args, kwargs, "storage_writer")
    stream = None if isinstance(asked, str) else stream_of(group_of(asked.path), asked.path, asked.alone)
    if isinstance(asked, str) or stream is None:
        log.debug("a save is left alone: %s", asked)
        return original()
    state, failure = asked.plain_state()
    outcome = hold(lambda: _decide(stream, asked.path), trouble=trouble(failure) or BROKEN * bool(stream.broken))
    if outcome.trouble == BROKEN:
        abandon(stream, stream.broken or f"rank {outcome.rank} has lost the process group of memory saves")
    if failure is not None:
        original.error = failure
        raise failure
    if outcome.trouble == BROKEN:
        return original.using(state, **_rest(kwargs))
    if not outcome.ok and outcome.rank != -1:
        original.error = elsewhere("save", outcome.rank or 0, outcome.trouble)
        raise original.error
    decision = outcome.answer
    if decision is None:
        return _durably(original, stream, asked.path, state, kwargs, is_async, "")
    if decision["turned"]:
        stream.journal.turn(decision["turned"])
    flush(stream, decision["flush"])
    if decision["alone"]:
        metadata = _to_memory_alone(stream, asked, state, decision["token"])
        if metadata is not None:
            original.skip()
            return _future(metadata, kwargs) if is_async else metadata
    else:
        timed(
            log,
            "memory",
            stream.number + 1,
            lambda: stream.save(state, decision["token"], asked.path, asked.planner, wait=False),
        )
    return _durably(original, stream, asked.path, state, kwargs, is_async, decision["token"])


def setting(name: str) -> Any:
    """The value of a setting in this process's environment; raises SettingError."""
    return BY_NAME[name].read(os.environ)


def _decide(stream: Stream, path: Path) -> dict[str, Any] | None:
    """Rank 0's decision, plain data; None if there can be none, and then the save is the script's alone."""
    try:
        every = setting("dcp_durable_every_n_saves") if setting("dcp_mode") == "replace" else 1
        with stream.uploads.noted():
            return stream.custody.decide(path, every)
    except Exception as error:
        log.error("%s is saved durably: %s", path, error, exc_info=not isinstance(error, FlashpointError))
        return None


def _durably(
    original: Original, stream: Stream, path: Path, state: Any, kwargs: Mapping[str, Any], is_async: bool, token: str
) -> Any:
    """The script's own save, of a state that is asked for already."""
    number, custody, leads = stream.number, stream.custody, stream.runtime.rank == 0
    stream.has_saved = True
    if leads:
        custody.durable_begins(path)
    try:
        result = timed(log, "durable", number, lambda: original.using(state, **_rest(kwargs)))
    except BaseException:
        if leads:
            custody.durable_ends(path, failed=True)
        raise
    stream.newest_is_memory = False
    if leads:
        written = functools.partial(_written, stream, path, token)
        upload = getattr(result, "upload_completion", result)
        if is_async and hasattr(upload, "add_done_callback"):
            stream.uploads.add(upload, written)
        else:
            written(None)
    return result


def _to_memory_alone(stream: Stream, asked: Request, state: Mapping[str, Any], token: str) -> Any:
    """Save to memory in the place of the durable save; None if that is to be made after all, by all ranks."""
    number = stream.number + 1
    saved = timed(log, "memory", number, lambda: stream.save(state, token, asked.path, asked.planner, wait=True))
    outcome = hold(lambda: _show(stream, asked.path, number, token), trouble="" if saved is not None else "it failed")
    if not outcome.answer:
        if stream.runtime.rank == 0 and not stream.warned:
            log.warning("%s is not kept in memory only: it is saved durably, by all", asked.path)
            stream.warned = True
        return None
    if not _seen_by_all(stream, asked.path, token):
        return None
    if stream.runtime.rank == 0:
        log.info("%s is in memory only", asked.path)
    stand_in(stream)
    return saved


def stand_in(stream: Stream) -> None:
    """The newest checkpoint of ``stream`` is in memory only: what is still so at the end is made durable then."""
    importlib.import_module(_ENDING)
    stream.newest_is_memory = True


def _show(stream: Stream, path: Path, number: int, token: str) -> bool:
    try:
        stream.custody.show(path, number, token)
    except OSError as error:
        log.log(
            logging.DEBUG if stream.warned else logging.WARNING,
            "the last durable checkpoint can't be protected: %s",
            error,
        )
        return False
    return True


def _seen_by_all(stream: Stream, path: Path, token: str) -> bool:
    """Whether every rank finds the folder that rank 0 has made, as each finds that of a durable save.

    Asked until all do. One folder that some rank does not see may be its file system's memory of an earlier look, and
    makes one save durable; a second one makes all.
    """
    if stream.folders_are_shared or stream.runtime.world_size == 1:
        return True
    give_up = time.monotonic() + _SEEN_S
    while not (seen := _is_marked(path, token)) and time.monotonic() < give_up:
        time.sleep(0.1)
    outcome = hold(trouble="" if seen else f"rank {stream.runtime.rank} does not see {path}")
    stream.folders_are_shared = outcome.ok
    if not outcome.ok and outcome.rank != -1 and stream.runtime.rank == 0:
        if stream.unseen not in (None, path):
            stream.custody.turn(path, f"it is not to be seen on every node ({outcome.trouble})")
        else:
            log.warning("%s is not kept in memory only, it is saved durably, by all: %s", path, outcome.trouble)
        stream.unseen = path
    return outcome.ok


def _is_marked(path: Path, token: str) -> bool:
    for folder in (path.parent.parent, path.parent):
        # Opened, NFS asks the server what is new in it, and forgets that a name was not there half a minute ago.
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            next(entries, None)
    mark = marker.read(path)
    return mark is not None and mark.token == token


def _written(stream: Stream, path: Path, token: str, upload: Any) -> None:
    """The durable checkpoint is whole: it is no checkpoint in memory only, and the one before needs no protection."""
    try:
        if upload is not None and upload.exception() is not None:
            stream.custody.durable_ends(path, failed=True)
            return
        stream.custody.durable_ends(path)
        found = marker.identity(path)
        if found is not None and token:
            stream.journal.note(found, token)
    except Exception as error:
        log.warning("the durable checkpoint %s could not be entered in the journal: %s", path, error)


def _rest(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "state_dict"}


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
