"""The folder of a checkpoint that is in memory only: what lies in it, and what becomes of it when memory is lost.

A script finds its newest checkpoint by looking at folders, so a checkpoint in memory has one too. In it lie

- ``mlflashpoint.json``: that it is in memory only, and which checkpoint is the last durable one;
- ``.metadata``: where a durable checkpoint has DCP's description, this one makes DCP fail with a sentence that says
  the same, on a machine without mlflashpoint too;
- ``last-durable``: the files of the last durable checkpoint by hard links. A script that keeps the newest k folders,
  and counts this one, deletes names and not the last durable data.

If the folder's version can't be recovered, ``retire`` takes the folder away, and puts the last durable checkpoint back
under its own name: at the next start the script's own search finds that one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.pytorch.script.calls import pattern_of

log = logging.getLogger("mlflashpoint.adapter")

MARKER = "mlflashpoint.json"
LINKS = "last-durable"
METADATA = ".metadata"
_HIDDEN = ".mlflashpoint-lost-"
_MAX_BYTES = 64 << 10


@dataclass(frozen=True)
class Marker:
    """What a folder says of a checkpoint in memory.

    Attributes:
        last_durable: folder of the last durable checkpoint before it.
        since_durable: checkpoints in memory only since then, this one included.
    """

    last_durable: str
    since_durable: int


class _Refusal:
    """Unpickles to an error whose text has the sentence: ``float(sentence)``, which does nothing else."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __reduce__(self) -> tuple[type[float], tuple[str]]:
        return float, (self._sentence,)


def read(folder: Path) -> Marker | None:
    """The marker in ``folder``, None if there is none."""
    try:
        with open(folder / MARKER, encoding="utf-8") as file:
            found = json.loads(file.read(_MAX_BYTES))
        return Marker(str(found["last_durable"]), int(found["since_durable"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: Path, marker: Marker) -> None:
    """Make ``folder`` that of a checkpoint in memory; raises OSError, and then the folder is as it was.

    A folder that holds a durable checkpoint already (a script that saves under one name) is left as it is.
    """
    if identity(folder) is not None:
        return
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _link_durable(step_folder(folder, Path(marker.last_durable)), Path(marker.last_durable), folder)
        sentence = (
            f"mlflashpoint kept this checkpoint in memory only ({folder}); the last durable one is "
            f"{marker.last_durable}, whose files are also in {step_folder(folder, Path(marker.last_durable)) / LINKS}"
        )
        _put(folder / METADATA, pickle.dumps(_Refusal(sentence), 2))
        _put(folder / MARKER, json.dumps({"memory_only": True, **asdict(marker)}, indent=1).encode())
    except OSError:
        erase(folder)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def erase(folder: Path) -> None:
    """Take our files out of ``folder``; raises OSError."""
    marker = read(folder)
    if identity(folder) is None:
        (folder / METADATA).unlink(missing_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    if marker is not None:
        _drop_links(folder, marker)


def release(folder: Path, before: Path | None) -> None:
    """``folder`` has become durable: what protected the checkpoint ``before`` it is taken away; raises OSError."""
    for other in _alike(folder, before) if before is not None else ():
        marker = read(other)
        if marker is not None:
            _drop_links(other, marker)
    (folder / MARKER).unlink(missing_ok=True)


def _drop_links(folder: Path, marker: Marker) -> None:
    shutil.rmtree(step_folder(folder, Path(marker.last_durable)) / LINKS, ignore_errors=True)


def identity(folder: Path) -> str | None:
    """What tells one durable checkpoint in ``folder`` from another, None if there is none.

    DCP writes its metadata last, so a folder that has it is whole.
    """
    try:
        path = folder / METADATA
        data, found = path.read_bytes(), path.stat()
    except OSError:
        return None
    if len(data) < _MAX_BYTES and b"mlflashpoint kept this checkpoint in memory only" in data:
        return None
    return f"{hashlib.sha256(data).hexdigest()}-{found.st_mtime_ns}"


def step_folder(folder: Path, other: Path) -> Path:
    """Where ``folder`` and another checkpoint's part ways: what a script takes for the whole of that checkpoint."""
    for depth, (one, two) in enumerate(zip(folder.parts, other.parts, strict=False)):
        if one != two:
            return Path(*folder.parts[: depth + 1])
    return folder


def retire(folder: Path, marker: Marker, recoverable: set[str]) -> Path | None:
    """Take ``folder`` and its like out of the script's sight, all of them checkpoints that memory has lost.

    Args:
        folder: the folder that the script wants to load.
        marker: what it says.
        recoverable: folders whose checkpoints memory has, which stay.

    Returns:
        the last durable checkpoint's folder, None if there is no such folder any more.
    """
    durable = Path(marker.last_durable)
    lost = [path for path in _alike(folder, durable) if str(path) not in recoverable and read(path) is not None]
    for path in lost:
        step = step_folder(path, durable)
        if identity(durable) is None and (step / LINKS).is_dir():
            target = step_folder(durable, path)
            if not target.exists():
                os.rename(step / LINKS, target)
                log.warning("%s had been deleted meanwhile; it is back", target)
    for path in lost:
        step = step_folder(path, durable)
        erase(path)
        _remove_empty(path, step)
        if step.exists():
            # Something of the script's own lies in it, which is not ours to delete.
            os.rename(step, _free_name(step.with_name(_HIDDEN + step.name)))
        log.warning("the checkpoint %s was in memory only and is lost; its folder is taken away", path)
    return durable if identity(durable) is not None else None


def _link_durable(into: Path, durable: Path, folder: Path) -> None:
    """Have the files of the last durable checkpoint in ``into`` as well; raises OSError."""
    target = into / LINKS
    if durable == folder or target.is_dir():
        return
    for other in _alike(folder, durable):
        earlier = read(other)
        if other != folder and earlier is not None and earlier.last_durable == str(durable):
            links = step_folder(other, durable) / LINKS
            if links.is_dir():
                os.rename(links, target)
                return
    source = step_folder(durable, folder)
    if identity(durable) is None:
        raise FileNotFoundError(f"the last durable checkpoint {durable} is gone")
    partial = into / f"{LINKS}.part"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=os.link)
    os.rename(partial, target)


def _alike(folder: Path, durable: Path) -> list[Path]:
    """Checkpoints of the same line of the same script, ``folder`` too.

    Their paths differ from its own in numbers alone, and nowhere above where that of the last durable one does.
    """
    step = step_folder(folder, durable)
    found = [step.parent]
    for part in folder.parts[len(step.parts) - 1 :]:
        shape = pattern_of(Path(part))
        found = [entry for path in found for entry in _entries(path) if pattern_of(Path(entry.name)) == shape]
    return [path for path in found if path.is_dir()]


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _remove_empty(path: Path, top: Path) -> None:
    with contextlib.suppress(OSError):
        while True:
            path.rmdir()
            if path == top:
                return
            path = path.parent


def _free_name(path: Path) -> Path:
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _put(path: Path, content: bytes) -> None:
    temporary: Any = path.with_name(f"{path.name}.mlflashpoint-part")
    temporary.write_bytes(content)
    os.replace(temporary, path)
