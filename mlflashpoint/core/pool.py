"""The slots of one seat and what is known of each: shared by the training thread, which takes one, and the worker."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from mlflashpoint.core.plan import VersionKey
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.rotation import Tenant, Version, choose_slot, may_overwrite

#: complete versions that are remembered, many more than there are slots
_REMEMBERED = 64


class SlotPool:
    """Thread-safe book of slots; decides by ``rotation`` and touches no file."""

    def __init__(self) -> None:
        self._tenants: list[Tenant] = []
        self._newest: Version | None = None
        self._complete: set[Version] = set()
        self._rollbacks: list[int] = []
        self._changed = threading.Condition(threading.RLock())

    def adopt(self, records: Sequence[ShardRecord | None], complete: Sequence[VersionKey]) -> None:
        """Take over what the predecessor left in the slots.

        Of its versions only the ``complete`` ones count: all others are incomplete for good, or abandoned.
        """
        with self._changed:
            runs = {key[:3] for key in complete}
            self._complete = {Version(key.incarnation, key.step) for key in complete}
            self._newest = max(self._complete, default=None)
            self._tenants = []
            for record in records:
                if record is None:
                    self._tenants.append(Tenant())
                else:
                    lost = record.version not in runs
                    self._tenants.append(Tenant(Version(record.incarnation, record.step), failed=lost))
            self._changed.notify_all()

    def rebase(self, complete: Sequence[VersionKey]) -> None:
        """The ranks found together which versions are complete: of those held to be so, no other counts any more."""
        with self._changed:
            found = {Version(key.incarnation, key.step) for key in complete}
            self._give_up(lambda version: version in self._complete - found)
            self._complete = found
            self._newest = max(found, default=None)

    def go_on_from(self, step: int) -> None:
        """Training goes on from ``step``: nothing above it counts, and the newest at or below it is protected."""
        with self._changed:
            if self._rollbacks:
                self._rollbacks[-1] = min(self._rollbacks[-1], step)
            self._give_up(lambda version: version.step > step)
            self._complete = {version for version in self._complete if version.step <= step}
            held = {tenant.version for tenant in self._tenants}
            self._newest = max((version for version in self._complete if version in held), default=None)
            self._changed.notify_all()

    def roll_back(self, step: int) -> None:
        """Training goes back to ``step``, which ends an epoch."""
        with self._changed:
            self._rollbacks.append(step)
            self.go_on_from(step)

    def take(self, wait_s: float, verdict: Callable[[], bool | None] = lambda: True) -> int | None:
        """Index of a slot that may be overwritten now, marked busy; None if there is none after ``wait_s`` seconds.

        ``verdict`` tells whether one may be taken at all: False ends the wait, None goes on with it.
        """
        give_up = time.monotonic() + wait_s
        with self._changed:
            while True:
                allowed = verdict()
                index = choose_slot(self._tenants, self._newest) if allowed else None
                if index is not None:
                    self._tenants[index] = Tenant(busy=True)
                    return index
                left = give_up - time.monotonic()
                if left <= 0 or allowed is False:
                    return None
                self._changed.wait(left)

    def available(self) -> bool:
        """Whether ``take`` would return at once."""
        with self._changed:
            return choose_slot(self._tenants, self._newest) is not None

    def obstacle(self) -> str:
        """What keeps the slots, while none is available."""
        with self._changed:
            if any(tenant.busy and tenant.failed for tenant in self._tenants):
                return "one holds a version that does not count any more and is still on its way to other nodes"
            if any(tenant.busy and tenant.version is None for tenant in self._tenants):
                return "the save before is still being written into one"
            return "it is not known yet whether an earlier version is complete on all ranks"

    def stored(self, index: int, version: Version, *, epoch: int, sending: bool = False) -> None:
        """The slot now holds this rank's committed shard of ``version``, whose verdict is open.

        ``epoch`` is the number of rollbacks before the save began: later ones may have abandoned the version meanwhile.
        ``sending``: its bytes are on their way to other nodes, until ``sent``.
        """
        with self._changed:
            abandoned = any(version.step > step for step in self._rollbacks[epoch:])
            self._tenants[index] = Tenant(version, busy=sending, failed=abandoned)
            self._changed.notify_all()

    def sent(self, index: int) -> None:
        """Nobody reads the slot's bytes any more."""
        with self._changed:
            self._tenants[index] = dataclasses.replace(self._tenants[index], busy=False)
            self._changed.notify_all()

    def protected(self) -> set[Version]:
        """Versions that no rank may give up, as far as this one knows: those that may not be overwritten here, and the
        newest complete one.
        """
        with self._changed:
            held = {tenant.version for tenant in self._tenants if not may_overwrite(tenant, self._newest)}
            held |= {self._newest, max(self._complete, default=None)}
            return {version for version in held if version is not None}

    def freed(self, index: int) -> None:
        """The slot holds nothing."""
        with self._changed:
            self._tenants[index] = Tenant()
            self._changed.notify_all()

    def settle(self, version: Version, *, complete: bool) -> None:
        """The verdict of ``version`` is known, which is final."""
        with self._changed:
            # A version that a rollback abandoned after it was looked up stays abandoned.
            if complete and any(tenant.version == version and not tenant.failed for tenant in self._tenants):
                # What is older than these lies in no slot any more.
                self._complete = {*sorted(self._complete)[-_REMEMBERED:], version}
                self._newest = version if self._newest is None else max(self._newest, version)
            elif not complete:
                self._give_up(lambda held: held == version)
            self._changed.notify_all()

    def notify(self) -> None:
        """Make a waiting ``take`` look again."""
        with self._changed:
            self._changed.notify_all()

    def open_versions(self) -> list[Version]:
        """Versions held here that may become, or be, complete, without our knowing."""
        with self._changed:
            return [
                tenant.version
                for tenant in self._tenants
                if tenant.version is not None
                and not tenant.failed
                and tenant.version not in self._complete
                and (self._newest is None or tenant.version > self._newest)
            ]

    def verdict(self, step: int, *, since: int) -> tuple[bool | None, bool]:
        """Whether the version of ``step`` that was saved since the start numbered ``since`` is complete, None if no
        slot here tells; and whether the answer is still to come.
        """
        with self._changed:
            held = [t for t in self._tenants if t.version and t.version.step == step and t.version.incarnation >= since]
            if not held:
                return None, False
            newest = max(held, key=lambda tenant: tenant.version or Version(0, 0))
            verdict = True if newest.version in self._complete else (False if newest.failed else None)
            return verdict, verdict is None and newest.version in self.open_versions()

    @property
    def newest_complete(self) -> Version | None:
        return self._newest

    def _give_up(self, which: Callable[[Version], bool]) -> None:
        for index, tenant in enumerate(self._tenants):
            if tenant.version is not None and which(tenant.version):
                self._tenants[index] = dataclasses.replace(tenant, failed=True)
