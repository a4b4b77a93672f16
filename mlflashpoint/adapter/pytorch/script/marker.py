"""The folder of a checkpoint that is in memory only, and how it is told from a durable one: by what is in it.

A script finds its newest checkpoint by looking at folders, so a checkpoint in memory has one too. In it lie

- ``mlflashpoint.json``: that it is in memory only, which version of which store it is, and which checkpoint is the last
  durable one. A script may rename, move or copy the folder: what it holds is the same checkpoint still;
- ``.metadata``: where a durable checkpoint has DCP's description, this one makes DCP fail with a sentence that says
  the same, on a machine without mlflashpoint too;
- ``last-durable``: see ``protection``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path

from mlflashpoint.adapter.pytorch.script.line import depth_of, is_group

MARKER = "mlflashpoint.json"
METADATA = ".metadata"
_MAX_BYTES = 64 << 10
_SENTENCE = "mlflashpoint kept this checkpoint in memory only"


@dataclass(frozen=True)
class Marker:
    """What a folder says of a checkpoint in memory.

    Attributes:
        folder: where it was saved.
        job: id of the job that has saved it.
        group: the store that it is in.
        number: of the save in that store.
        token: what the version in memory says too; no two saves have the same.
        last_durable: folder of the last durable checkpoint before it.
        since_durable: checkpoints in memory only since then, this one included.
        depth: parts of the path below the step's folder.
    """

    folder: str
    job: str
    group: str
    number: int
    token: str
    last_durable: str
    since_durable: int
    depth: int

    def is_at_home(self, place: Path) -> bool:
        """Whether ``place``, in which it was read, is where it was saved, so that what lies around it is known."""
        own = depth_of(place, Path(self.last_durable), own=True)
        return self.folder == str(place) and own == self.depth


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
        texts = [str(found[name]) for name in ("folder", "job", "group", "token", "last_durable")]
        number, since, depth = (int(found[name]) for name in ("number", "since_durable", "depth"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    folder_text, job, group, token, last_durable = texts
    if not is_group(group) or not 0 <= depth < len(folder.parts):
        return None
    return Marker(folder_text, job, group, number, token, last_durable, since, depth)


def write(folder: Path, marker: Marker, links: Path) -> None:
    """Make ``folder``, which exists, that of a checkpoint in memory; names ``links`` to the reader. Raises OSError."""
    sentence = f"{_SENTENCE} ({folder}); the last durable one is {marker.last_durable}, whose files are also in {links}"
    _put(folder / METADATA, pickle.dumps(_Refusal(sentence), 2))
    _put(folder / MARKER, json.dumps({"memory_only": True, **asdict(marker)}, indent=1).encode())


def erase(folder: Path) -> None:
    """Take our files out of ``folder``; raises OSError."""
    if identity(folder) is None:
        (folder / METADATA).unlink(missing_ok=True)
    (folder / MARKER).unlink(missing_ok=True)


def identity(folder: Path) -> str | None:
    """What tells one durable checkpoint in ``folder`` from another, None if there is none.

    DCP writes its metadata last, so a folder that has it is whole.
    """
    try:
        path = folder / METADATA
        data, found = path.read_bytes(), path.stat()
    except OSError:
        return None
    if len(data) < _MAX_BYTES and _SENTENCE.encode() in data:
        return None
    return f"{hashlib.sha256(data).hexdigest()}-{found.st_mtime_ns}"


def _put(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.mlflashpoint-part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
