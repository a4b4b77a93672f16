"""A ticket: one save of this rank on its way from staging to commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflashpoint.core.gate import Opening
from mlflashpoint.core.saver import Staged
from mlflashpoint.errors import FlashpointError

#: plain data, or what gives it in the background, before the commit
Attributes = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


@dataclass
class Ticket:
    """One save.

    Attributes:
        step: training step.
        epoch: rollbacks within the process before it began.
        topology: fingerprint of the parallel layout.
        back_at: step that training went back to before this save, the first one since then; -1 for a step that is not
            known, None if training did not go back.
        entrance: the gate in front of this save, None for none.
        opening: the gate in front of the save behind this one, None for none.
        index: slot that it is staged in, -1 for none yet.
        staged: what was staged, None for nothing yet.
        attempted: whether the other ranks were told that this rank has begun it.
        announced: whether they will be, in its turn.
        late_attributes: gives the attributes once it may be committed.
        error: why this rank has no shard of the step.
        done: set when this rank's part in the save is over.
    """

    step: int
    epoch: int
    topology: str
    back_at: int | None = None
    entrance: Opening | None = None
    opening: Opening | None = None
    index: int = -1
    staged: Staged | None = None
    attempted: bool = False
    announced: bool = False
    late_attributes: Callable[[], Mapping[str, Any]] | None = None
    error: FlashpointError | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class Replication:
    """The replicas of one ticket's shard on their way.

    Attributes:
        done: set when every holder has acknowledged or failed.
        error: why a holder has no replica, None if all have.
    """

    done: threading.Event = field(default_factory=threading.Event)
    error: FlashpointError | None = None


def went_back(step: int) -> str:
    """In words; -1 for a step that is not known."""
    return "training went back " + ("to an earlier step" if step < 0 else f"to step {step}")
