"""The checkpoint after the one that a script asks for, whose folder it had not got when the job ended.

A checkpoint in memory only gets its folder when all ranks have committed it. Where a job ends before that and memory is
lost, what is left (replicas, drained copies) may be that newer version alone, of which no folder tells.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from mlflashpoint.adapter.pytorch.script import folder, marker, protection
from mlflashpoint.adapter.pytorch.script.line import alike, depth_of, entries, goes_up, inner, step_folder
from mlflashpoint.adapter.pytorch.script.stream import Version

log = logging.getLogger("mlflashpoint.adapter")

_OURS = {marker.MARKER, marker.METADATA, protection.LINKS}


def make_folder(asked: Path, mark: marker.Marker, newest: Version) -> Path | None:
    """Make the folder of ``newest`` if it has none, so that the script's own search finds it.

    Args:
        asked: the folder that the script wants to load, of a checkpoint that is lost.
        mark: what it says.
        newest: the newest version that can be loaded.

    Returns:
        the folder; None if it has one, or if a script may need more than it to go on: other files of its own, as lie
        beside the checkpoint ``asked``, or parts that are saved apart. Raises OSError.
    """
    path, depth = Path(newest.folder), mark.depth
    if newest.number <= mark.number or not mark.is_at_home(asked):
        return None
    if depth_of(path, asked, own=True) != depth or not goes_up(asked, path) or not _stands_alone(asked, depth):
        return None
    marks = [marker.read(other) for other in alike(asked, depth)]
    if marker.identity(path) is not None or newest.token in {found.token for found in marks if found is not None}:
        return None
    durable = protection.kept(asked, Path(mark.last_durable), depth)
    if durable is None:
        return None
    told = dataclasses.replace(
        mark,
        folder=str(path),
        number=newest.number,
        token=newest.token,
        since_durable=mark.since_durable + newest.number - mark.number,
    )
    folder.make(path, told, durable.filled(), asked)
    log.warning("the job had ended before the checkpoint %s, which memory has, got its folder: it has it now", path)
    return path


def _stands_alone(asked: Path, depth: int) -> bool:
    """Whether the folder of the step holds the checkpoint and nothing else."""
    within = inner(asked, depth).parts
    place = step_folder(asked, depth)
    for part in (*within, ""):
        names = {entry.name for entry in entries(place)}
        if names - _OURS - {part}:
            return False
        place /= part
    return True
