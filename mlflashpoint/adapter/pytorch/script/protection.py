"""The last durable checkpoint, kept safe from the script's own retention by hard links.

They lie in the folder of the newest checkpoint in memory only, as ``last-durable``. A script that keeps the newest k
folders, and counts that one, deletes names and not the last durable data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.adapter.pytorch.script import marker
from mlflashpoint.adapter.pytorch.script.line import inner, step_folder

LINKS = "last-durable"

_State = tuple[int, int, int]


@dataclass(frozen=True)
class Durable:
    """A durable checkpoint as it was when it was whole.

    Attributes:
        path: its folder.
        files: by name inode, size and time of change, so that copies by hard links can be told from others.
        is_filled: ``files`` has all of them, and not its description alone.
    """

    path: Path
    files: Mapping[str, _State]
    is_filled: bool = True

    def filled(self) -> Durable:
        """With all files, if they still lie in its folder; raises FileNotFoundError."""
        if self.is_filled:
            return self
        found = seen(self.path)
        if found is None or found.files[marker.METADATA] != self.files[marker.METADATA]:
            raise FileNotFoundError(f"the last durable checkpoint {self.path} is not where it was")
        return found

    def is_at(self, folder: Path) -> bool:
        """Whether all of it lies in ``folder``, unchanged."""
        return all(_state(folder / name) == state for name, state in self.files.items())

    def seems_at(self, folder: Path) -> bool:
        """The same by a look at its description alone."""
        return _state(folder / marker.METADATA) == self.files[marker.METADATA]


def seen(path: Path, at: Path | None = None) -> Durable | None:
    """The durable checkpoint ``path``, whose files lie ``at`` another place if given; None if it is not whole."""
    folder = path if at is None else at
    if marker.identity(folder) is None:
        return None
    states = {file.name: _state(file) for file in folder.iterdir() if file.is_file() and not file.is_symlink()}
    return Durable(path, {name: state for name, state in states.items() if state is not None})


def glimpse(path: Path) -> Durable | None:
    """The same by a look at its description alone: a checkpoint has as many files as the job has ranks."""
    state = _state(path / marker.METADATA)
    if state is None or marker.identity(path) is None:
        return None
    return Durable(path, {marker.METADATA: state}, is_filled=False)


def kept(folder: Path, last: Path, depth: int) -> Durable | None:
    """The durable checkpoint ``last`` that ``folder`` protects, by its links or where it lies; None if it is gone."""
    return seen(last, step_folder(folder, depth) / LINKS / inner(last, depth)) or glimpse(last)


def protect(folder: Path, durable: Durable, depth: int, before: Path | None) -> None:
    """Have the files of ``durable`` beside ``folder`` as well, whole; raises OSError.

    Args:
        folder: of the checkpoint in memory only.
        durable: what to protect.
        depth: parts of both paths below the step's.
        before: folder that has protected it until now.
    """
    target = step_folder(folder, depth) / LINKS
    within = inner(folder, depth)
    if not target.is_dir():
        links = None if before is None else step_folder(before, depth) / LINKS
        if links is not None and durable.is_at(links / within):
            os.rename(links, target)
        else:
            _link(step_folder(durable.path, depth), target)
    if not durable.is_at(target / within):
        raise FileNotFoundError(f"the last durable checkpoint {durable.path} is not whole, or not where it was")


def drop(folder: Path, depth: int) -> None:
    """Take the links of ``protect`` away."""
    shutil.rmtree(step_folder(folder, depth) / LINKS, ignore_errors=True)


def part(folder: Path, durable: Durable) -> None:
    """Before ``folder`` is written to: its files that are links of ``durable``'s become files of their own.

    DCP truncates a file that exists, and with it all its names. Raises OSError.
    """
    for name, state in durable.files.items():
        path = folder / name
        if _state(path) == state and path.stat().st_nlink > 1:
            copy = path.with_name(f"{name}.mlflashpoint-part")
            shutil.copy2(path, copy)
            os.replace(copy, path)


def _link(source: Path, target: Path) -> None:
    partial = target.with_name(f"{LINKS}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial, copy_function=os.link, ignore=shutil.ignore_patterns(LINKS, marker.MARKER))
        os.rename(partial, target)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{source} can't be linked: {error}") from error


def _state(path: Path) -> _State | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None
