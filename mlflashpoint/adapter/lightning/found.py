"""What a fit goes on from, when that is a version in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FromMemory:
    """One rank's part of the version that all ranks go on from.

    Attributes:
        step: optimizer steps done.
        path: the version's virtual folder ``<base container>/step-<n>_ckpt``.
        state: this rank's state as its kind captured it.
        attributes: as the kind gave them.
        rng: state of the random number generators, see ``mlflashpoint.adapter.lightning.rng``.
        logged: what the fit had logged, see ``mlflashpoint.adapter.lightning.logged``.
        tuned: what a search had found before the training, see ``mlflashpoint.adapter.lightning.tuners``.
        hook: within which of Lightning's hooks it was saved.
        place: where the version lies, in words.
    """

    step: int
    path: str
    state: Mapping[str, Any] = field(repr=False)
    attributes: Mapping[str, Any] = field(repr=False)
    rng: Mapping[str, Any] | None = field(repr=False, default=None)
    logged: Mapping[str, Any] | None = field(repr=False, default=None)
    tuned: Mapping[str, Any] = field(repr=False, default_factory=dict)
    hook: str | None = None
    place: str = "memory"
