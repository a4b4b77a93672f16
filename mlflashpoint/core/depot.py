"""The depot: this rank's access to the copies in its own node's memory."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from mlflashpoint.core.arena import file_of
from mlflashpoint.core.incarnation import Lineage, read_lineage
from mlflashpoint.core.manifest import node_copies
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import ShardCopy
from mlflashpoint.core.session import Session
from mlflashpoint.errors import FlashpointError, NoVersionError, PeerError, ShardCorruptError, ShardFormatError

log = logging.getLogger("mlflashpoint.core")


class Depot:
    """Lists, checks and opens copies; keeps what it checked open, so that loading maps nothing a second time.

    Args:
        session: an opened session.
    """

    #: a shard in another node's memory is out of reach
    remote = False

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: dict[str, ShardReader] = {}

    def list(self) -> tuple[Sequence[ShardCopy], Lineage]:
        """The committed copies on this node, and what it knows of the job's starts."""
        container, group = self._session.container, self._session.group
        lineage = Lineage()
        try:
            lineage = read_lineage(container.group_dir(group))
        except FlashpointError as error:
            log.warning("the lineage on this node is left out: %s", error)
        return node_copies(container, group, holder=self._session.ranks.rank), lineage

    def check(self, copy: ShardCopy) -> str | None:
        """Why the copy is unusable to this rank, None if all its digests are right; quarantines a corrupt one."""
        try:
            reader = self._opened(copy)
            reader.verify()
        except (ShardCorruptError, ShardFormatError) as error:
            self.quarantine(copy)
            return str(error)
        except FlashpointError as error:
            return str(error)
        except (OSError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        self._open[copy.slot] = reader
        return None

    def take(self, copy: ShardCopy) -> ShardReader:
        """A reader of the copy that the caller has to close; one that ``check`` opened if there is one.

        Raises:
            PeerError: another node holds it.
            ShardCorruptError: it is not the copy that was listed any more.
            FlashpointError: it can't be opened.
        """
        return self._open.pop(copy.slot, None) or self._opened(copy)

    def first_of(self, copies: Sequence[ShardCopy], *, shard: int, step: int) -> ShardReader:
        """A reader of the first of ``copies`` that can be opened; raises NoVersionError with each one's problem."""
        problems = []
        for copy in copies:
            try:
                return self.take(copy)
            except (FlashpointError, OSError) as error:
                problems.append(str(error))
        raise NoVersionError(
            f"no copy of the shard of rank {shard} can be read: {'; '.join(problems) or 'none is listed'}",
            rank=self._session.ranks.rank,
            step=step,
            remedy="resume from a durable checkpoint",
        )

    def quarantine(self, copy: ShardCopy) -> None:
        """Rename the commit record of a corrupt copy on this node, so that nobody tries it again."""
        slot = self._path(copy)
        commit = file_of(slot, "commit")
        with contextlib.suppress(FileNotFoundError):
            os.rename(commit, file_of(slot, "quarantined"))
            log.warning("quarantined the shard of rank %d, step %d: %s", copy.record.rank, copy.record.step, commit)

    def close(self) -> None:
        """Close what is still open: the slots may be overwritten from now on."""
        while self._open:
            self._open.popitem()[1].close()

    def _path(self, copy: ShardCopy) -> Path:
        return self._session.container.path / copy.slot

    def _opened(self, copy: ShardCopy) -> ShardReader:
        if copy.node != self._session.container.node:
            raise PeerError(
                f"the shard of rank {copy.record.rank} lies in the memory of another node",
                rank=self._session.ranks.rank,
                remedy="resume on the nodes that hold the version, or from a durable checkpoint",
            )
        reader = ShardReader.open(self._path(copy))
        if reader.record != copy.record:
            reader.close()
            raise PeerError("the slot holds another shard by now", path=self._path(copy))
        return reader
