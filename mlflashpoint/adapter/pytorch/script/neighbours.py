"""The folders around a line's checkpoints, in which a script may keep copies of them.

Those are what lies beside a step's folder, what lies beside the folder of all steps, and one folder further in:
``run/steps/best``, ``run/steps/best/step-3``, ``run/best``, ``run/best/step-3`` are around ``run/steps/step-3``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from mlflashpoint.adapter.pytorch.script import marker
from mlflashpoint.adapter.pytorch.script.line import pattern_of

#: folders of one place that are looked into; each costs a call to the file system at every save
_MOST = 64


class Neighbours:
    """Of one stream: tells a new copy by looking only at folders that have changed since the last look."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, int]] = {}

    def copy(self, step: Path, within: Path, own: Set[Path], tokens: Set[str]) -> Path | None:
        """A folder around ``step`` that holds a copy of a checkpoint in memory only, None if there is no new one.

        Args:
            step: a step's folder.
            within: where the checkpoint lies in it.
            own: steps' folders that the script has saved to.
            tokens: of the checkpoints in memory only.
        """
        new: set[Path] = set()
        # What lies outside has many folders, of other runs too: those that have not changed have no new ones in them.
        for folder in around(step, into=lambda outside: self._changed(outside, new)):
            if folder not in own and self._changed(folder, new):
                for place in (folder / within, folder):
                    mark = marker.read(place)
                    if mark is not None and mark.token in tokens:
                        return place
        return None

    def _changed(self, folder: Path, new: set[Path]) -> bool:
        """Whether it is another than in the looks before this one, of which ``new`` has been found so."""
        # A copy has the time of change of what it is a copy of, so any other than before is news.
        state = _state(folder)
        if state is not None and self._seen.get(folder) != state:
            self._seen[folder] = state
            new.add(folder)
        return folder in new


def around(step: Path, into: Callable[[Path], bool] = lambda outside: True) -> Iterator[Path]:
    """The folders around ``step``, which is not among them; ``into`` says which of those outside to look into."""
    parent, shape = step.parent, pattern_of(Path(step.name))
    beside = [folder for folder in _folders(parent) if folder != step]
    yield from beside
    # Other steps hold a checkpoint, and no copies of others.
    for folder in [folder for folder in beside if pattern_of(Path(folder.name)) != shape][:_MOST]:
        yield from _folders(folder)[:_MOST]
    if parent.parent == parent:
        return
    for folder in [folder for folder in _folders(parent.parent) if folder != parent][:_MOST]:
        yield folder
        if into(folder):
            yield from _folders(folder)[:_MOST]


def _folders(path: Path) -> list[Path]:
    """The folders in ``path`` that are no links, none if it can't be read."""
    try:
        with os.scandir(path) as found:
            return sorted(Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
