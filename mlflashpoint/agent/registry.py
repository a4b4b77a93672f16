"""Every patch of this process: loaded from the frameworks' tables, applied when its module has run, undone on demand.

Two integrations never depend on each other: a table that can't be loaded, or a patch that can't be applied, is a
failed entry with a reason, and the others go on.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from mlflashpoint.agent import guard, log, names, policy, status, target
from mlflashpoint.agent.patch import Handle, Patch, State

_logger = logging.getLogger(__name__)
_warned: set[str] = set()


class Registry:
    """The patches of this process, by name; use the module's ``REGISTRY``."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self._tables: set[str] = set()
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    def load(self, framework: str, table: str) -> list[str]:
        """Import ``table`` and enter its ``PATCHES``; returns the modules to watch, and [] the second time."""
        with self._lock:
            if table in self._tables:
                return []
            self._tables.add(table)
            try:
                patches: Iterable[Patch] = importlib.import_module(table).PATCHES
                handles = [self.add(patch) for patch in patches]
            except Exception as error:
                absent = isinstance(error, ModuleNotFoundError) and error.name == table
                patch = Patch(f"{framework}.*", framework, table, "PATCHES", f"{framework}_enabled", replace="-")
                handle = self.add(patch)
                if absent:
                    handle.set(State.SKIPPED, "not part of this build", expected=True)
                else:
                    handle.set(State.FAILED, f"its table can't be loaded: {_line(error)}")
                    _logger.error("mlflashpoint agent: %s: %s", patch.name, handle.reason)
                self._changed()
                return []
            return sorted({handle.patch.module for handle in handles})

    def add(self, patch: Patch) -> Handle:
        """Enter one patch; a second one of the same name is refused with ValueError."""
        with self._lock:
            if patch.name in self.handles:
                raise ValueError(f"two patches are named {patch.name}")
            handle = self.handles[patch.name] = Handle(patch, changed=self._changed)
            handle.set(State.PENDING, f"{patch.module} was not imported yet")
            return handle

    def loaded(self, name: str, module: ModuleType, before: frozenset[str] | None) -> None:
        """Apply the patches of module ``name``, which has just run.

        Args:
            name: its name.
            module: the module.
            before: names of the modules that were there before it ran; None if it had run before the agent saw it.
        """
        # without the lock: what is resolved here may import a framework, as another thread may be doing
        handles = [handle for handle in list(self.handles.values()) if handle.patch.module == name]
        for handle in handles:
            try:
                self._apply(handle, module, before)
            except Exception as error:
                handle.enabled = False
                handle.set(State.FAILED, _line(error))
            _announce(handle)
        if handles:
            self._changed()

    def undo(self) -> None:
        """Take every patch out; one that another tool has wrapped since becomes a pass-through."""
        with self._lock:
            for handle in self.handles.values():
                undo_one(handle)
        self._changed()

    def _changed(self) -> None:
        status.write(handle.to_json() for handle in list(self.handles.values()))

    def _apply(self, handle: Handle, module: ModuleType, before: frozenset[str] | None) -> None:
        log.configure()
        handle.version, refusal = policy.decide(handle.patch)
        if refusal is not None:
            handle.set(State.SKIPPED, refusal.reason, expected=refusal.expected)
            return
        handle.strict = policy.strict()
        try:
            place = target.find(module, handle.patch.target)
        except target.MissingTargetError as error:
            handle.set(State.SKIPPED, f"missing target: {error}")
            return
        if handle.enabled and target.holds(place.raw, handle.ours):
            return
        _install(handle, place)
        late = before is None
        # only what was imported while the module ran can have taken a name from it before this point
        where = None if before is None else [name for name in list(sys.modules) if name not in before]
        renamed = names.replace(place.raw, place.current, where, handle.undo)
        reason = handle.patch.versions[0] if handle.patch.versions else handle.patch.framework
        if handle.version:
            reason += f" {handle.version}"
        if renamed:
            reason += f"; also replaced in {', '.join(renamed)}"
        if late:
            kept = names.holders(place.raw, vars(place), vars(handle.ours))
            reason += "; its module had been imported before the agent: what holds the original in a default argument, "
            reason += f"a partial or a container keeps it ({kept} such references)"
        handle.set(State.LATE if late else State.ACTIVE, reason)


def _install(handle: Handle, place: target.Target) -> None:
    patch = handle.patch
    replacement: Any
    if patch.replace is not None:
        replacement = _resolve(patch.replace)(place.raw)
        if not (isinstance(place.raw, type) and isinstance(replacement, type)):
            raise TypeError("replace puts a class in the place of a class")
        replacement = guard.fail_open_class(place.raw, replacement, handle)
    else:
        if patch.around is not None:
            around = _resolve(patch.around)
        else:
            around = guard.phases(_resolve(patch.before), _resolve(patch.after))
        replacement = target.wrapped(place, around, handle)

    def restore() -> None:
        if place.current is replacement:
            place.put(place.raw)

    place.put(replacement)
    handle.undo.append(restore)
    handle.ours = replacement
    handle.enabled = True


def undo_one(handle: Handle) -> None:
    """Take one patch out."""
    handle.enabled = False
    while handle.undo:
        handle.undo.pop()()
    if handle.state in (State.ACTIVE, State.LATE):
        handle.set(State.SKIPPED, "undone", expected=True)


def _resolve(path: str | None) -> Any:
    if path is None:
        return None
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _announce(handle: Handle) -> None:
    visible = {State.FAILED: logging.ERROR, State.LATE: logging.WARNING, State.ACTIVE: logging.INFO}
    level = visible.get(handle.state, logging.DEBUG)
    if handle.state is State.SKIPPED and not handle.expected and handle.reason not in _warned:
        # one line for all the patches that a bad setting or an untested version keeps out
        _warned.add(handle.reason)
        level = logging.WARNING
    _logger.log(level, "mlflashpoint agent: patch %s is %s: %s", handle.patch.name, handle.state, handle.reason)


REGISTRY = Registry()
