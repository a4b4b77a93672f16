"""What may lie beside the versions in memory."""

from __future__ import annotations

from typing import Protocol


class SideFiles(Protocol):
    """Files beside the versions, on every node; none of these raises anything."""

    def begin(self, resumed: int | None) -> None:
        """Training begins, or goes on from the version of step ``resumed``."""

    def add(self, step: int) -> None:
        """A version of ``step`` has this rank's part."""

    def remove(self) -> None:
        """All versions are gone."""
