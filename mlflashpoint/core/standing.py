"""The standing: which versions count, as far as this rank knows from recovery and from the verdicts since then."""

from __future__ import annotations

from mlflashpoint.core.plan import VersionKey
from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.session import Session


class Standing:
    """What is known of versions, for whoever is about to overwrite one.

    Args:
        session: an opened session.
        pool: this rank's slots.

    Attributes:
        found: complete versions of earlier starts that training may still go on from.
        began: whether this rank's slots are in use, so that nobody else may write to them.
    """

    def __init__(self, session: Session, pool: SlotPool) -> None:
        self.found: tuple[VersionKey, ...] = ()
        self.began = False
        self._session = session
        self._pool = pool
        #: whether it is known which versions of earlier starts count
        self._based = False

    def rebase(self, complete: tuple[VersionKey, ...]) -> None:
        """The ranks found together which versions are complete."""
        self.found, self._based = complete, True
        if self.began:
            self._pool.rebase(complete)

    def go_on_from(self, step: int) -> None:
        """Training goes on from ``step``, and nothing has been saved yet."""
        self.found = tuple(key for key in self.found if key.step <= step)
        self._pool.go_on_from(step)

    def roll_back(self, step: int) -> None:
        """Training goes back to ``step`` within this process."""
        self.found = tuple(key for key in self.found if key.step <= step)
        self._pool.roll_back(step)

    def keep(self) -> list[Version]:
        """Versions that other nodes must keep the replicas of."""
        known = {Version(key.incarnation, key.step) for key in self.found}
        if self.began and known:
            known = {max(known)}
        # Until this start has saved something, it may still go on from any of them.
        return sorted(known | self._pool.protected())

    def newest_complete(self) -> Version | None:
        """The newest version that is known to be complete, None if none is."""
        known = [Version(key.incarnation, key.step) for key in self.found]
        newest = self._pool.newest_complete
        return max(known if newest is None else [*known, newest], default=None)

    def obsolete(self, record: ShardRecord) -> bool:
        """Whether nobody will ever need a shard: a newer version is complete, or its own can't become so any more."""
        version, newest = Version(record.incarnation, record.step), self._pool.newest_complete
        if newest is not None and version < newest:
            return True
        if not self._based or record.incarnation >= self._session.number(0):
            return False
        return record.version not in {key[:3] for key in self.found}

    @property
    def superseded(self) -> bool:
        """Whether a version that this start saved is complete, so that nobody needs what earlier ones left."""
        newest = self._pool.newest_complete
        return newest is not None and newest.incarnation >= self._session.number(0) > 0
