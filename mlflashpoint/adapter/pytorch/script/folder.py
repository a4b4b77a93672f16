"""How the folder of a checkpoint that is in memory only is made: what ``marker`` and ``protection`` put into it."""

from __future__ import annotations

from pathlib import Path

from mlflashpoint.adapter.pytorch.script import marker, protection
from mlflashpoint.adapter.pytorch.script.line import step_folder


def make(path: Path, mark: marker.Marker, durable: protection.Durable, before: Path | None) -> None:
    """Make ``path`` the folder of a checkpoint in memory only; nothing is left of it if that fails.

    Args:
        path: the folder.
        mark: what it is to say.
        durable: the last durable checkpoint, which it protects.
        before: folder that has protected it until now, of the same family; None for none.

    Raises:
        OSError: the folder can't be written, or the durable checkpoint can't be protected.
    """
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        protection.protect(path, durable, mark.depth, before)
        marker.write(path, mark, step_folder(path, mark.depth) / protection.LINKS)
    except OSError:
        marker.erase(path)
        if made and not any(path.iterdir()):
            path.rmdir()
        raise
