"""One save of a script, and where its folder may be by now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.adapter.pytorch.script import marker
from mlflashpoint.adapter.pytorch.script.line import entries, inner, step_folder
from mlflashpoint.adapter.pytorch.script.neighbours import around

#: parts of a path that a script may have renamed, from its end
_RENAMED = 3


@dataclass
class Saved:
    """One save: where it is, its token if it is in memory only, and how deep it lies in its step's folder."""

    path: Path
    token: str = ""
    depth: int = 0

    def lies_in(self, path: Path) -> bool:
        """Whether ``path`` is this checkpoint in memory only, and nobody has written a durable one to it since."""
        mark = marker.read(path)
        return mark is not None and mark.token == self.token and marker.identity(path) is None

    def candidates(self) -> list[Path]:
        """Where its folder and copies may be: there, with another name for one of its last parts, around."""
        path = self.path
        found = [path]
        for renamed in [path, *path.parents][:_RENAMED]:
            within = path.relative_to(renamed)
            beside = (entry for entry in entries(renamed.parent) if entry != renamed and not entry.is_symlink())
            found += [entry / within for entry in beside]
        for folder in around(step_folder(path, self.depth)):
            found += [folder / inner(path, self.depth), folder]
        return list(dict.fromkeys(found))
