"""Saves of a coordinator that DCP has begun and not finished, whose end the other ranks wait for."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from mlflashpoint.adapter.pytorch.finish import Save
from mlflashpoint.adapter.pytorch.telling import tell_failed
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import FlashpointError, PeerError


@dataclass(frozen=True)
class _Open:
    """A save under way, and the base container that it is saved to."""

    save: Save
    container: CheckpointContainerId


class Unfinished:
    """The save that began last, and earlier ones that somebody holds, who may finish them after later ones have begun.

    DCP does not say that it has let go of a save. One is known by the next save, one that is held by its holder's end.
    """

    def __init__(self) -> None:
        self._last: _Open | None = None
        self._held: list[tuple[weakref.ref[object], _Open]] = []

    def begin(self, save: Save, container: CheckpointContainerId) -> None:
        self._last = _Open(save, container)

    def hold(self, holder: object) -> None:
        """The save that began last is under way as long as ``holder`` lives."""
        if self._last is not None:
            self._held.append((weakref.ref(holder), self._last))
            self._last = None

    def give_up(self, runtime_of: Callable[[CheckpointContainerId], Runtime], *, last: bool) -> None:
        """Tell all ranks of those that nobody will finish any more, for they wait for the word on them.

        Args:
            runtime_of: gives the store of a base container.
            last: whether the save that began last is over, so that no word on it is on its way.
        """
        for found in self._let_go(last):
            save = found.save
            error = PeerError(
                "DCP did not finish the save", step=save.step, remedy="look for the error that dcp.save raised"
            )
            with contextlib.suppress(FlashpointError):
                tell_failed(runtime_of(found.container), save, error)
            save.abandon(error)

    def _let_go(self, last: bool) -> list[_Open]:
        held, gone = [], []
        for holder, found in self._held:
            # Asked once: it may end any time.
            if holder() is None:
                gone.append(found)
            elif found.save.is_open:
                held.append((holder, found))
        self._held = held
        if last and self._last is not None:
            gone.append(self._last)
            self._last = None
        # One without a plan has no rank that has begun to write, and its step may be saved yet.
        return [found for found in gone if found.save.is_open and not found.save.planning]
