"""Which durable checkpoint each version in memory was saved beside: kept in memory, on the node of rank 0.

Nothing is written to a durable folder for it. Without the journal (rank 0 is on another node now) a durable checkpoint
counts as one that somebody else has written, and is loaded from disk.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from mlflashpoint.core.runtime import Runtime

log = logging.getLogger("mlflashpoint.adapter")

_KEPT = 8


class Journal:
    """By identity of a durable checkpoint the number of the save that wrote it; of one process."""

    def __init__(self, runtime: Runtime) -> None:
        seat = runtime.config.base_container / runtime.group / f"seat-{runtime.local_rank}"
        self._path: Path = seat / "script" / "durable.json"

    def number_of(self, identity: str) -> int | None:
        """The number of the save that wrote it, None if no save of this job is known to have."""
        return self._read().get(identity)

    def note(self, identity: str, number: int) -> None:
        """Raises OSError."""
        known = {**self._read(), identity: number}
        newest = sorted(known.items(), key=lambda entry: entry[1])[-_KEPT:]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(dict(newest)))
        os.replace(temporary, self._path)

    def _read(self) -> dict[str, int]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: value for key, value in found.items() if type(key) is str and type(value) is int}
