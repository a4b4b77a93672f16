"""What becomes of folders whose checkpoints memory has lost: the script's own search finds the last durable one again.

They are taken away, the last durable checkpoint is put back under its own name if it was deleted, and links to them
are pointed to it. What a script has put into such a folder stays: the folder is renamed then.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Set
from pathlib import Path

from mlflashpoint.adapter.pytorch.script import marker, protection
from mlflashpoint.adapter.pytorch.script.line import alike, entries, inner, step_folder

log = logging.getLogger("mlflashpoint.adapter")

_HIDDEN = ".mlflashpoint-lost-"


def retire(folder: Path, mark: marker.Marker, recoverable: Set[str], newer: Path | None = None) -> Path | None:
    """Take ``folder`` and its like out of the script's sight, all of them checkpoints that memory has lost.

    A folder that is not where it was saved is taken away alone: what lies around it is not known.

    Args:
        folder: the folder that the script wants to load.
        mark: what it says.
        recoverable: tokens of the versions that memory has, whose folders stay.
        newer: folder of one of them that the script is to go on from, None for the last durable checkpoint.

    Returns:
        the last durable checkpoint's folder, None if there is no such folder any more. Raises OSError.
    """
    durable = Path(mark.last_durable)
    at_home = mark.is_at_home(folder)
    depth = mark.depth if at_home else 0
    lost = [path for path in alike(folder, depth) if _is_lost(path, mark, recoverable)] if at_home else [folder]
    if marker.identity(durable) is None:
        # A start that died between two steps has left the links in a folder without a marker.
        beside = entries(step_folder(folder, depth).parent) if at_home else [folder]
        for step in beside:
            _put_back(step / protection.LINKS, durable, mark.depth)
    left = durable if marker.identity(durable) is not None else None
    for path in lost:
        step = step_folder(path, depth)
        target = newer or left
        if target is not None:
            _repoint(step, step_folder(target, mark.depth) if at_home else target)
        marker.erase(path)
        if left is not None or marker.identity(step / protection.LINKS / inner(path, depth)) is None:
            protection.drop(path, depth)
        _remove_empty(path, step)
        if step.exists():
            # Something of the script's own lies in it, which is not ours to delete.
            os.rename(step, _free_name(step.with_name(_HIDDEN + step.name)))
        log.warning("the checkpoint %s was in memory only and is lost; its folder is taken away", path)
    return left


def _is_lost(path: Path, mark: marker.Marker, recoverable: Set[str]) -> bool:
    found = marker.read(path)
    if marker.identity(path) is not None:
        # Somebody has written a durable checkpoint to it.
        return False
    return found is not None and (found.group, found.folder) == (mark.group, str(path)) and (
        found.token not in recoverable
    )  # fmt: skip


def _put_back(links: Path, durable: Path, depth: int) -> None:
    target = step_folder(durable, depth)
    if marker.identity(links / inner(durable, depth)) is None or target.exists() or not target.parent.is_dir():
        return
    os.rename(links, target)
    log.warning("%s had been deleted meanwhile; it is back", target)


def _repoint(step: Path, target: Path) -> None:
    """Links beside ``step`` that lead to it, or into it, lead to ``target`` from now on."""
    real = os.path.realpath(step)
    for link in entries(step.parent):
        if not link.is_symlink():
            continue
        leads = os.path.realpath(link)
        if leads != real and not leads.startswith(real + os.sep):
            continue
        place = target / os.path.relpath(leads, real)
        text = str(place) if os.path.isabs(os.readlink(link)) else os.path.relpath(place, link.parent)
        temporary = _free_name(link.with_name(f"{_HIDDEN}link"))
        temporary.symlink_to(os.path.normpath(text))
        os.replace(temporary, link)
        log.warning("%s leads to %s now", link, place)


def _remove_empty(path: Path, top: Path) -> None:
    with contextlib.suppress(OSError):
        while True:
            path.rmdir()
            if path == top:
                return
            path = path.parent


def _free_name(path: Path) -> Path:
    number, free = 0, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
