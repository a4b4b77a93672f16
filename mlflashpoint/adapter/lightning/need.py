"""Whether the memory versions are still needed when a fit has ended well.

A fit that finds nothing left to train ends well too. What an earlier start has trained, and no durable checkpoint has,
would then be lost with the memory.
"""

from __future__ import annotations

_NONE = -1


class Need:
    """What one fit has done with what memory held when it began; every rank tells its own the same."""

    def __init__(self) -> None:
        #: step that memory held, newer than what the recipe has durably; None if there was none
        self.held: int | None = None
        self._began_at = self._trained = self._saved = _NONE
        self._finished = False

    def found(self, step: int | None, durable: int | None) -> None:
        """Memory holds ``step``, the recipe's durable checkpoint ``durable``; None: there is none that can be used."""
        self.held = None if step is None or (durable is not None and durable >= step) else step

    def began(self, step: int) -> None:
        """The first batch is next, and ``step`` steps are done."""
        self._began_at = self._trained = step

    def trained(self, step: int) -> None:
        """A batch has ended, with ``step`` steps done."""
        self._trained = step

    def saved(self, step: int) -> None:
        """The recipe has saved ``step`` durably, with all that is needed to go on from it."""
        self._saved = step

    def finished(self) -> None:
        """The training has come to its end, with all that an undisturbed one does behind its last batch."""
        self._finished = self._began_at != _NONE

    def is_left(self) -> bool:
        """Whether memory holds what nothing else has."""
        if self.held is None or self._finished:
            return False
        return self._trained <= self._began_at and self._saved < self.held
