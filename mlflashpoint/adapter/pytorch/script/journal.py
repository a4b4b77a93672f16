"""What a stream has to know over restarts, kept in memory: nothing is written to a durable folder for it.

Which durable checkpoint each version in memory was saved beside, on the node of rank 0. Without that (rank 0 is on
another node now) a durable checkpoint counts as one that somebody else has written, and is loaded from disk. And on
every node why all saves are durable, if they are.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.pytorch.script.line import is_group
from mlflashpoint.core.runtime import Runtime

log = logging.getLogger("mlflashpoint.adapter")

_KEPT = 8
_FILE = Path("script", "journal.json")


class Journal:
    """By identity of a durable checkpoint the token of the save that wrote it; of one process.

    Attributes:
        turned: why every save of the stream is durable, empty if it is not so.
    """

    def __init__(self, runtime: Runtime) -> None:
        seat = runtime.config.base_container / runtime.group / f"seat-{runtime.local_rank}"
        self._path: Path = seat / _FILE
        self.turned = str(_read(self._path).get("turned", ""))

    def token_of(self, identity: str) -> str | None:
        """The token of the save that wrote it, None if no save of this job is known to have."""
        return _tokens(self._path).get(identity)

    def note(self, identity: str, token: str) -> None:
        """Raises OSError."""
        known = _tokens(self._path)
        known.pop(identity, None)
        self._write(dict([*known.items(), (identity, token)][-_KEPT:]))

    def turn(self, reason: str) -> None:
        """From now on every save of the stream is durable, over restarts too: on each rank, for a node may be lost."""
        if self.turned:
            return
        self.turned = reason
        try:
            self._write(_tokens(self._path))
        except OSError as error:
            log.debug("the next start has to find out by itself: %s", error)

    def _write(self, tokens: dict[str, str]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps({"durable": tokens, "turned": self.turned}))
        os.replace(temporary, self._path)


def group_that_wrote(identity: str, base: Path) -> str | None:
    """The store of this node whose journal knows a durable checkpoint, wherever that is now."""
    for path in sorted(base.glob(f"dcp-*/seat-*/{_FILE}")):
        group = path.relative_to(base).parts[0]
        if is_group(group) and identity in _tokens(path):
            return group
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokens(path: Path) -> dict[str, str]:
    found = _read(path).get("durable")
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if type(key) is str and type(value) is str}
