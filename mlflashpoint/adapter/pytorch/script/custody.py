"""Rank 0's record of what a stream has saved, and whether the script left it as checkpoints in memory only need it.

Those can stand in for durable ones in a script that saves to rising folders and keeps the newest few. What the
script has done since the last save is looked at in each. Where it renames, copies, overwrites, or keeps by score, the
stream *turns durable*: what memory still has is written to where its folder is now, and from then on every save is
durable.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import deque
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.pytorch.script import folder, marker, protection
from mlflashpoint.adapter.pytorch.script.journal import Journal
from mlflashpoint.adapter.pytorch.script.line import alike, depth_of, goes_up, inner, step_folder
from mlflashpoint.adapter.pytorch.script.neighbours import Neighbours
from mlflashpoint.adapter.pytorch.script.saved import Saved

log = logging.getLogger("mlflashpoint.adapter")

#: saves that are looked back at
_REMEMBERED = 64


class Custody:
    """Of one stream; rank 0's counts.

    Args:
        job: id of the job.
        group: the stream's store.
        journal: where it is kept over a restart that the stream has turned durable.
    """

    def __init__(self, job: str, group: str, journal: Journal) -> None:
        self._job, self._group = job, group
        self._journal = journal
        self._saved: deque[Saved] = deque(maxlen=_REMEMBERED)
        self._previous: Path | None = None
        self._previous_is_own = False
        self._durable: protection.Durable | None = None
        self._durable_is_own = False
        #: a durable save of this start is not known to be whole
        self._pending = False
        self._since = 0
        self._neighbours = Neighbours()
        self._released: list[tuple[Path, int]] = []

    def decide(self, path: Path, every: int) -> dict[str, Any]:
        """What the save to ``path`` is to be; for rank 0.

        Args:
            path: the folder.
            every: each so-manieth is durable, 1 for all.

        Returns:
            plain data: ``alone`` to save to memory only, ``token`` of the version, ``flush``, the folders by token that
            are to be made durable before, and ``turned``, why every save is durable, empty if it is not so.
        """
        self.settle()
        flush: dict[str, list[str]] = {}
        alone = False
        if every > 1 and not self._journal.turned:
            problem = self._problem(path)
            if problem:
                flush = self._places()
                self.turn(path, problem)
            elif self._newest() and self._depth(path) is None:
                # The script has gone to another folder, and comes back for these or does not.
                flush = self._places()
            else:
                ready = self._depth(path) is not None and not self._pending and marker.identity(path) is None
                alone = ready and self._since + 1 < every
        if not alone and self._durable is not None and marker.identity(path) is not None:
            protection.part(path, self._durable)
        return {"alone": alone, "token": uuid.uuid4().hex, "flush": flush, "turned": self._journal.turned}

    def show(self, path: Path, number: int, token: str) -> None:
        """The save is in memory, on all ranks: give it a folder that protects the last durable one; raises OSError."""
        depth = self._depth(path)
        if self._durable is None or depth is None:
            raise FileNotFoundError("there is no durable checkpoint of the same family")
        self._durable = self._durable.filled()
        newest = self._newest()
        before = newest.path if newest and newest.depth == depth else None
        durable, since = str(self._durable.path), self._since + 1
        mark = marker.Marker(str(path), self._job, self._group, number, token, durable, since, depth)
        folder.make(path, mark, self._durable, before)
        self._since += 1
        self._append(Saved(path, token, depth))

    def durable_begins(self, path: Path) -> None:
        """A durable save to ``path`` is under way."""
        self._pending = True
        self._append(Saved(path))

    def durable_ends(self, path: Path, failed: bool = False) -> None:
        """It is whole now, or will never be; what protected the one before is taken away."""
        before, was_own = self._durable, self._durable_is_own
        # Without a durable checkpoint the next save is durable.
        self._durable = None if failed else protection.glimpse(path)
        self._durable_is_own, self._since = True, 0
        if self._durable is None:
            self._forget(path)
        self._pending = False
        if self._durable is None:
            return
        depth = None if before is None else depth_of(path, before.path, own=was_own)
        for other in alike(path, depth) if depth is not None else [path]:
            self._release(other)
        (path / marker.MARKER).unlink(missing_ok=True)

    def written(self, folder: Path) -> None:
        """A checkpoint that was in memory only has been written to ``folder``; raises OSError."""
        mark, identity = marker.read(folder), marker.identity(folder)
        self._release(folder)
        (folder / marker.MARKER).unlink(missing_ok=True)
        if mark is not None and identity is not None:
            self._journal.note(identity, mark.token)
        for saved in self._saved:
            if mark is not None and saved.token == mark.token:
                saved.path, saved.token = folder, ""
        self._durable, self._durable_is_own, self._since = protection.glimpse(folder), False, 0

    def settle(self) -> None:
        """Take away what has protected checkpoints before the last durable one.

        Not as soon as that is whole: what a script saves apart has one folder and one protection for each step.
        """
        released, self._released = self._released, []
        for path, depth in released:
            protection.drop(path, depth)

    def resume(self, path: Path, mark: marker.Marker | None) -> None:
        """The script goes on from ``path``; with ``mark`` that is in memory only."""
        if mark is None:
            self._durable, self._since = protection.glimpse(path), 0
            self._append(Saved(path), own=False)
            return
        self._durable = protection.kept(path, Path(mark.last_durable), mark.depth)
        self._since = mark.since_durable
        self._append(Saved(path, mark.token, mark.depth), own=False)

    def rolled_back(self, path: Path) -> None:
        """The script has loaded ``path`` again, and may go on from there."""
        self._previous, self._previous_is_own = path, False

    def at_end(self, has_saved: bool) -> dict[str, list[str]]:
        """What to make durable at the end: the newest checkpoint, and all that the script has taken another way.

        Which one is the newest can't be told of a start that has not saved: then it is all that it has loaded.
        """
        last = [saved for saved in self._saved if saved.token]
        if has_saved:
            last = [saved for saved in last if saved is self._newest()]
        if not last:
            return {}
        for saved in self._saved:
            if saved.token and marker.identity(saved.path) is not None:
                # The script's own checkpoint: nothing of ours stays in it.
                self._release(saved.path)
                (saved.path / marker.MARKER).unlink(missing_ok=True)
        return self._places() if self._strayed() else {saved.token: [str(saved.path)] for saved in last}

    def turn(self, path: Path, problem: str) -> None:
        """Every save is durable from the one to ``path`` on, because of ``problem``."""
        log.warning(
            "%s: every save is durable from now on, with a memory save beside it, because %s; checkpoints in memory "
            "only suit scripts that save to rising folders and keep the newest; DCP_MODE=augment suits all",
            path,
            problem,
        )
        self._journal.turn(problem)

    def _release(self, path: Path) -> None:
        mark = marker.read(path)
        if mark is not None:
            self._released.append((path, mark.depth if mark.folder == str(path) else 0))

    def _newest(self) -> Saved | None:
        return self._saved[-1] if self._saved and self._saved[-1].token else None

    def _append(self, saved: Saved, *, own: bool = True) -> None:
        self._forget(saved.path)
        self._saved.append(saved)
        self._previous, self._previous_is_own = saved.path, own

    def _forget(self, path: Path) -> None:
        for saved in list(self._saved):
            if saved.path == path:
                self._saved.remove(saved)

    def _depth(self, path: Path) -> int | None:
        if self._durable is None:
            return None
        return depth_of(path, self._durable.path, own=self._durable_is_own)

    def _problem(self, path: Path) -> str:
        """What the script does that checkpoints in memory only can't stand, empty if nothing."""
        before = self._previous
        strayed = self._strayed()
        if strayed:
            return strayed
        if before is None or (not self._previous_is_own and depth_of(path, before, own=False) is None):
            return ""
        if before == path:
            return "the script saves to the same folder again"
        if not goes_up(before, path):
            return f"the numbers in its path do not only go up from those of {before}"
        return ""

    def _strayed(self) -> str:
        """What the script has done to the folders since the last save."""
        newest = self._newest()
        if newest is not None and not newest.lies_in(newest.path):
            return f"{newest.path} is not as it was saved: the script has renamed, moved, deleted or overwritten it"
        last = self._saved[-1] if self._saved else None
        durable = None if self._pending else self._durable
        if last and durable and last.path == durable.path and not durable.seems_at(last.path):
            return f"{last.path} is not where it was saved: the script has renamed, moved or deleted it"
        return self._gaps() or self._doubles()

    def _gaps(self) -> str:
        """Whether the script keeps others than the newest."""
        older = False
        for saved in list(self._saved)[: -1 if self._pending else None]:
            if saved.path.is_dir():
                older = True
            elif older:
                return f"the script has deleted {saved.path} and keeps an older one"
            else:
                self._saved.remove(saved)
        return ""

    def _doubles(self) -> str:
        """Whether there are copies of what is in memory only, or links to others than the newest."""
        tokens = {saved.token for saved in self._saved if saved.token}
        older = {str(saved.path) for saved in list(self._saved)[:-1] if saved.token}
        if not tokens:
            return ""
        own = {step_folder(saved.path, saved.depth) for saved in self._saved}
        lines = {
            (saved.depth, step_folder(saved.path, saved.depth).parent): saved for saved in self._saved if saved.token
        }
        for (depth, parent), saved in lines.items():
            within = inner(saved.path, depth)
            with os.scandir(parent) as found:
                links = [Path(entry.path) for entry in found if entry.is_symlink()]
            for link in links:
                if os.path.realpath(link / within) in older:
                    return f"{link} leads to one that is not the newest"
            copy = self._neighbours.copy(step_folder(saved.path, depth), within, own, tokens)
            if copy is not None:
                return f"{copy} is a copy of one"
        return ""

    def _places(self) -> dict[str, list[str]]:
        """Where what is in memory only has its folders now, by token."""
        places: dict[str, list[str]] = {}
        for saved in self._saved:
            if saved.token:
                found = [path for path in saved.candidates() if saved.lies_in(path)]
                if found:
                    places[saved.token] = [str(path) for path in found]
        return places
