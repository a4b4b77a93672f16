"""A line of checkpoints: those that one place in a script saves. What their paths say of it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path


def pattern_of(path: Path) -> str:
    """The path with a ``#`` for each number: equal for the checkpoints of one line."""
    return re.sub(r"\d+", "#", str(path))


def group_of(path: Path) -> str:
    """Name of the store of the line that ``path`` belongs to."""
    return f"dcp-{hashlib.sha256(pattern_of(path).encode()).hexdigest()[:12]}"


def is_group(name: object) -> bool:
    """Whether ``name``, which a file says, is one of ``group_of``."""
    return isinstance(name, str) and re.fullmatch(r"dcp-[0-9a-f]{12}", name) is not None


def goes_up(before: Path, now: Path) -> bool:
    """Whether no number in the path is lower than before and one is higher."""
    pairs = list(zip(_numbers(before), _numbers(now), strict=False))
    return all(old <= new for old, new in pairs) and any(old < new for old, new in pairs)


def depth_of(folder: Path, other: Path, *, own: bool) -> int | None:
    """How many parts of ``folder`` lie below the one in which it differs from ``other``; None for another family.

    Two checkpoints of one family differ in the numbers of one part, which names the step. Of those that one start has
    saved that is all to know (``own``). With another run's it is the last part that has a number: ``run-1/step-1``
    and ``run-2/step-1`` are no family, ``step-1/model`` and ``step-2/model`` are one.
    """
    if len(folder.parts) != len(other.parts):
        return None
    differ = [n for n, (one, two) in enumerate(zip(folder.parts, other.parts, strict=True)) if one != two]
    if len(differ) != 1 or pattern_of(folder) != pattern_of(other):
        return None
    below = folder.parts[differ[0] + 1 :]
    if not own and any(re.search(r"\d", part) for part in below):
        return None
    return len(below)


def step_folder(folder: Path, depth: int) -> Path:
    """The folder of the whole step, ``depth`` parts above the checkpoint's."""
    return folder.parents[depth - 1] if depth else folder


def inner(folder: Path, depth: int) -> Path:
    """Where the checkpoint lies within its step's folder."""
    return Path(*folder.parts[len(folder.parts) - depth :])


def alike(folder: Path, depth: int) -> list[Path]:
    """Folders of the same family that exist, ``folder`` among them."""
    step = step_folder(folder, depth)
    shape = pattern_of(Path(step.name))
    found = [entry / inner(folder, depth) for entry in entries(step.parent) if pattern_of(Path(entry.name)) == shape]
    return [path for path in found if path.is_dir()]


def entries(path: Path) -> list[Path]:
    """What lies in a folder, nothing if it can't be read."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _numbers(path: Path) -> list[int]:
    return [int(text) for text in re.findall(r"\d+", str(path))]
