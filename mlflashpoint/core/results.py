"""What the runtime's calls give back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlflashpoint.core.record import ShardRecord
from mlflashpoint.errors import FlashpointError


@dataclass(frozen=True)
class SaveResult:
    """What became of one save on this rank.

    Attributes:
        ok: the state is staged (and, if the save was to wait, committed).
        step: the step.
        error: why it is not.
        blocking_s: seconds that training stood still.
        staged_bytes: bytes of tensors and skeleton copied.
        skipped: nothing was copied: the step is stored already (``ok``), or every slot was still needed.
    """

    ok: bool
    step: int
    error: FlashpointError | None = None
    blocking_s: float = 0.0
    staged_bytes: int = 0
    skipped: bool = False


@dataclass(frozen=True)
class Loaded:
    """One rank's shard: the state, its step, what the adapter attached, and the commit record."""

    state: Any
    step: int
    attributes: Mapping[str, Any]
    record: ShardRecord
