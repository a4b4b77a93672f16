"""One patch: what a framework's table declares, and what became of it in this process."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlflashpoint.errors import SettingError

_logger = logging.getLogger(__name__)

#: what was told of settings: the patches of a framework all meet with the same one
_told: set[str] = set()


class State(str, enum.Enum):
    """What became of a patch; each comes with a reason."""

    PENDING = "pending"  #: its module was not imported yet
    ACTIVE = "active"  #: in place
    LATE = "late"  #: in place, but its module had been imported before the agent could see it
    SKIPPED = "skipped"  #: deliberately not in place: setting, version, or missing target
    FAILED = "failed"  #: not in place, because of a fault

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Patch:
    """One entry of a framework's table.

    Exactly one of ``around``, ``before`` and/or ``after``, and ``replace`` is given, each as ``"module:callable"``
    and loaded when the target's module has run:

    - ``around(call, instance, args, kwargs)`` returns the result; ``call()`` runs the original (see
      ``mlflashpoint.agent.guard.Call``). For a coroutine function it is one too, and awaits ``call()``.
    - ``before(instance, args, kwargs)`` and ``after(result, instance, args, kwargs)``.
    - ``replace(original)`` returns what stands in the original's place. A class that stands in for a class is made
      fail-open: when making an instance raises, the original's instance is made.

    Attributes:
        name: unique, shown by the doctor, for example ``"bridge.save"``.
        framework: one of ``mlflashpoint.agent.frameworks.FRAMEWORKS``.
        module: the module that *defines* the target.
        target: ``"function"``, ``"Class"``, ``"Class.method"`` (static, class and coroutine methods too) or
            ``"Class.property"`` (its getter).
        setting: keyword of the setting that turns it off, by being false or ``"off"``.
        versions: distribution and range, for example ``("megatron-bridge", ">=0.4.2,<0.7")``; None accepts any.
        group: patches of one group count as one interception: inside one of them the others pass straight through.
            The patch's own name by default.
    """

    name: str
    framework: str
    module: str
    target: str
    setting: str
    versions: tuple[str, str] | None = None
    around: str | None = None
    before: str | None = None
    after: str | None = None
    replace: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        kinds = (self.around is not None, self.before is not None or self.after is not None, self.replace is not None)
        if sum(kinds) != 1:
            raise ValueError(f"patch {self.name}: give one of around, before/after, replace")


@dataclass
class Handle:
    """A patch in this process; mutable, owned by the registry."""

    patch: Patch
    state: State = State.PENDING
    reason: str = ""
    version: str | None = None
    calls: int = 0
    faults: int = 0
    last_fault: str = ""
    expected: bool = False
    enabled: bool = False
    ours: Any = field(default=None, repr=False)
    strict: bool = False
    undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    changed: Callable[[], None] = field(default=lambda: None, repr=False)
    _seen: set[tuple[str, type]] = field(default_factory=set, repr=False)

    @property
    def group(self) -> str:
        return self.patch.group or self.patch.name

    def set(self, state: State, reason: str, *, expected: bool = False) -> None:
        """Enter a state; ``expected`` marks a skip that somebody asked for, which needs no warning."""
        self.state, self.reason, self.expected = state, reason, expected

    def fault(self, phase: str, error: BaseException) -> None:
        """Count a fault of ours around a call; each kind is logged once with its traceback.

        A setting that can't be used is no fault of the code: it is told in one line, whichever patch meets with it.
        """
        self.faults += 1
        self.last_fault = f"{phase} the original: {type(error).__name__}: {' '.join(str(error).split())}"
        kind = (phase, type(error))
        if kind in self._seen or (isinstance(error, SettingError) and str(error) in _told):
            _logger.debug("mlflashpoint agent: patch %s: fault %s", self.patch.name, self.last_fault)
            return
        self._seen.add(kind)
        if isinstance(error, SettingError):
            _told.add(str(error))
            _logger.error("mlflashpoint agent: patch %s: %s; the job goes on without it", self.patch.name, error)
        else:
            _logger.error(
                "mlflashpoint agent: patch %s: fault %s; the job goes on without it",
                self.patch.name,
                self.last_fault,
                exc_info=error,
            )
        self.changed()

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.patch.name,
            "framework": self.patch.framework,
            "module": self.patch.module,
            "target": self.patch.target,
            "state": str(self.state),
            "reason": self.reason,
            "version": self.version,
            "calls": self.calls,
            "faults": self.faults,
            "last_fault": self.last_fault,
        }
