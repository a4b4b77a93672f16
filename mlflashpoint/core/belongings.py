"""What of a base container is the store's, and goes with it; whatever else lies there is somebody's, and stays."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from mlflashpoint.core.container import IDENTITY_FILE
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.incarnation import LINEAGE_FILE
from mlflashpoint.core.manifest import seats_of

#: what NeMo needs to build the model anew, see ``adapter.nemo.context``
_CONTEXT = "step-context-"


def sort_out(base: Path) -> tuple[list[Path], list[Path]]:
    """``(the store's, others')`` of what lies in the container; raises OSError."""
    ours, others = [], []
    for entry in sorted(base.iterdir()):
        folder = entry.is_dir() and not entry.is_symlink()
        if entry.name.startswith(IDENTITY_FILE) or (folder and entry.name.startswith(_CONTEXT)) or _is_version(entry):
            ours.append(entry)
            continue
        inside = sorted(entry.iterdir()) if folder else []
        seats = set(seats_of(entry).values()) if folder else set()
        mine = [one for one in inside if one in seats or one.name.startswith(LINEAGE_FILE) or _is_version(one)]
        # A group's folder has its lineage and its seats, or was made for the folders of its versions alone.
        if folder and (mine == inside or any(one in seats or one.name.startswith(LINEAGE_FILE) for one in mine)):
            ours += [entry] if mine == inside else mine
            others += [one for one in inside if one not in mine]
        else:
            others.append(entry)
    return ours, others


def remove(base: Path) -> None:
    """Remove what is the store's, and the container itself if nothing else lies in it; raises OSError."""
    ours, _ = sort_out(base)
    for path in ours:
        # Its identity goes last: should this be interrupted, the rest can be removed again.
        if path.name != IDENTITY_FILE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (base / IDENTITY_FILE).unlink()
    # A mount point stays.
    with contextlib.suppress(OSError):
        base.rmdir()


def _is_version(path: Path) -> bool:
    named = CheckpointContainerId.parse_version_container_step(path.name) is not None
    return named and path.is_dir() and not path.is_symlink()
