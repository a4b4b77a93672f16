"""The checkpoint that the recipe names for a fit: its step, and its content where that has to be read to know more.

All ranks ask the same questions in the same order, and get the same answers: what one rank can't read, none uses. A
rank that can't read it for a moment is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.lightning.attempts import attempt
from mlflashpoint.adapter.lightning.durable import checkpoint_step, is_unfinished

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.found import FromMemory
    from mlflashpoint.adapter.lightning.session import FitSession

_log = logging.getLogger(__name__)


class NamedCheckpoint:
    """See the module.

    Args:
        path: what ``resume_start`` is given; None or empty if the recipe names nothing.
        load: loads it as Lightning would, on this rank.
    """

    def __init__(self, path: object, load: Callable[[], Mapping[str, Any]]) -> None:
        self.path = path
        self._load = load
        #: what every rank has read, None if that was not needed or not possible
        self.content: Mapping[str, Any] | None = None
        self._trouble: str | None = None

    def newer_in_memory(self, session: FitSession, trainer: Any) -> FromMemory | None:
        """The version in memory to go on from instead of this checkpoint; collective.

        It is one that is newer, or the newest there is if not every rank can read this checkpoint.

        Raises:
            FlashpointError: the store can't be asked.
        """
        if not self.path or is_unfinished(self.path):
            return session.find(trainer, None, f"{self.path} (unfinished)" if self.path else None)
        step = checkpoint_step(self.path)
        if not session.runtime.agree("lightning/durable-step", step is not None):
            step = self._read(session)
        found = session.find(trainer, step, self)
        if found is None and self.content is None and self._trouble is None:
            # A step that can be told is no proof that the rest can be read.
            self._read(session)
            if self._trouble is not None:
                found = session.find(trainer, None, self)
        if found is not None and self._trouble is not None:
            text = "%s can't be read, %s: going on from %s, step %d"
            _log.warning(text, self.path, self._trouble, found.place, found.step)
        return found

    def _read(self, session: FitSession) -> int | None:
        """Read it, once; the step that it holds, None if not every rank can read it."""

        def read() -> tuple[int, Mapping[str, Any]]:
            loaded = self._load()
            if not isinstance(loaded, Mapping):
                raise TypeError(f"it holds a {type(loaded).__qualname__}, which is no checkpoint")
            return int(loaded.get("global_step", 0)), loaded

        tried = attempt(session.runtime, "lightning/durable-read", f"reading {self.path}", read)
        if tried.value is None:
            error = tried.error
            self._trouble = "another rank can't read it" if error is None else f"{type(error).__name__}: {error}"
            return None
        step, self.content = tried.value
        return step

    def __str__(self) -> str:
        return f"{self.path}" + ("" if self._trouble is None else " (unreadable)")
