"""The depot: this rank's access to the copies of shards, in its own node's memory and in that of others."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from mlflashpoint.core.arena import file_of
from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.incarnation import Lineage, read_lineage
from mlflashpoint.core.manifest import node_copies
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import DRAIN_NODE, ShardCopy
from mlflashpoint.core.seat import live_owner
from mlflashpoint.core.session import Session
from mlflashpoint.errors import (
    FlashpointError,
    NoVersionError,
    PeerError,
    ShardCorruptError,
    ShardFormatError,
    in_words,
)

log = logging.getLogger("mlflashpoint.core")

#: part of the deadline that fetching one shard for a reader may take
_FETCH_SHARE = 0.5

_Copies = list[ShardCopy]


class Depot:
    """Lists, checks, fetches and opens copies; keeps what it checked open, so that loading maps nothing a second time.

    Args:
        session: an opened session.
        exchange: reaches other nodes.
    """

    def __init__(self, session: Session, exchange: Exchange) -> None:
        self._session = session
        self._exchange = exchange
        self._open: dict[tuple[str, str], ShardReader] = {}

    @property
    def remote(self) -> bool:
        """Whether a shard in another node's memory can be had."""
        return self._exchange.linked

    def list(self) -> tuple[Sequence[ShardCopy], Lineage]:
        """The committed copies on this node, and what it knows of the job's starts."""
        container, group = self._session.container, self._session.group
        lineage = Lineage()
        try:
            lineage = read_lineage(container.group_dir(group))
        except FlashpointError as error:
            log.warning("the lineage on this node is left out: %s", error)
        return [*node_copies(container, group, holder=self._session.ranks.rank), *self._session.drained()], lineage

    def offer(self, *, leader: bool) -> None:
        """Let other nodes fetch what lies on this rank's seat; a node's leader also what lies where no rank sits."""
        if not self.remote or self._session.problem is not None:
            return
        container, seat = self._session.container, self._session.seat
        mine = []
        for copy in node_copies(container, self._session.group, holder=self._session.ranks.rank):
            path = self._path(copy)
            with contextlib.suppress(FlashpointError):
                if path.parent == seat or (leader and live_owner(path.parent) is None):
                    mine.append((copy, path))
        self._exchange.offer(mine)

    def secure(
        self, copies: Sequence[ShardCopy], timeout_s: float
    ) -> tuple[tuple[ShardCopy, ...], Sequence[ShardCopy]]:
        """Make sure that this rank can read a shard: check the copies on this node, else fetch it from other nodes.

        Args:
            copies: of one shard, best first.
            timeout_s: longest time for fetching, in seconds.

        Returns:
            the copies that can be used, the one that was checked first, none if there is none; and those that can't.
        """
        here = self._session.container.node
        near, far, drained = _by_place(copies, here)
        usable, bad = self._first_good(near)
        if usable:
            return (*usable, *far, *drained), bad
        if far:
            try:
                found = self._fetch(far, timeout_s, keep=True)
                return (*found, *drained), bad + [copy for copy in far if copy not in found]
            except FlashpointError as error:
                log.warning("shard of rank %d can't be had from other nodes: %s", far[0].record.rank, error)
                bad += far
        usable, unusable = self._first_good(drained)
        if usable and (near or far):
            log.info("the shard of rank %d is taken from the drain directory", usable[0].record.rank)
        return tuple(usable), bad + unusable

    def _first_good(self, copies: Sequence[ShardCopy]) -> tuple[_Copies, _Copies]:
        """The copies from the first that has the right digests on, and those before it."""
        left, bad = list(copies), []
        while left and (problem := self.check(left[0])) is not None:
            log.warning("shard of rank %d in %s is unusable: %s", left[0].record.rank, left[0].slot, problem)
            bad.append(left.pop(0))
        return left, bad

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
            return in_words(error)
        self._open[copy.node, copy.slot] = reader
        return None

    def take(self, copy: ShardCopy) -> ShardReader:
        """A reader of the copy that the caller has to close; one that ``secure`` opened if there is one.

        Raises:
            PeerError: another node holds it.
            ShardCorruptError: it is not the copy that was listed any more.
            FlashpointError: it can't be opened.
        """
        return self._open.pop((copy.node, copy.slot), None) or self._opened(copy)

    def first_of(self, copies: Sequence[ShardCopy], *, shard: int, step: int) -> ShardReader:
        """A reader of the first of ``copies`` that can be had; raises NoVersionError with each one's problem."""
        problems = []
        here = "" if self._session.problem is not None else self._session.container.node
        near, far, drained = _by_place(copies, here)
        for copy in (*near, *(copy for copy in far if (copy.node, copy.slot) in self._open), *drained):
            try:
                return self.take(copy)
            except (FlashpointError, OSError) as error:
                problems.append(str(error))
        if far:
            try:
                found = self._fetch(far, self._session.config.deadline_s * _FETCH_SHARE, keep=False)
                return self.take(found[0])
            except (FlashpointError, OSError) as error:
                problems.append(str(error))
        raise NoVersionError(
            f"no copy of the shard of rank {shard} can be read: {'; '.join(problems) or 'none is listed'}",
            rank=self._session.ranks.rank,
            step=step,
            remedy="resume from a durable checkpoint",
        )

    def rebuild(self, copies: Sequence[ShardCopy]) -> None:
        """Give the shard, of which these copies are left, the first on this node, to holders that lack it."""
        if not copies or not self._exchange.sends:
            return

        def holding() -> Holding:
            if copies[0].node in (self._session.container.node, DRAIN_NODE):
                return Holding.open(self._path(copies[0]))
            raise PeerError("the shard is not in this node's memory, which is full", rank=self._session.ranks.rank)

        self._exchange.rebuild(copies, holding)

    def quarantine(self, copy: ShardCopy) -> None:
        """Rename the commit record of a corrupt copy on this node, so that nobody tries it again."""
        slot = self._path(copy)
        commit = file_of(slot, "commit")
        try:
            os.rename(commit, file_of(slot, "quarantined"))
        except FileNotFoundError:
            return
        except OSError as error:
            # A drain directory may be read-only. This recovery does without the copy all the same.
            log.warning("a corrupt shard can't be quarantined: %s", error)
            return
        log.warning("quarantined the shard of rank %d, step %d: %s", copy.record.rank, copy.record.step, commit)

    def close(self) -> None:
        """Close what is still open: the slots may be overwritten from now on."""
        while self._open:
            self._open.popitem()[1].close()

    def _fetch(self, far: Sequence[ShardCopy], timeout_s: float, *, keep: bool) -> tuple[ShardCopy, ...]:
        """Pull a shard from other nodes; the copies that can be used, the one that is open first."""
        got = self._exchange.fetch(far, timeout_s=timeout_s, keep=keep)
        good = [copy for copy in far if copy not in got.bad] or list(far)
        first = good[0]
        if got.slot is not None:
            container = self._session.container
            slot = got.slot.relative_to(container.path).as_posix()
            first = dataclasses.replace(first, node=container.node, holder=self._session.ranks.rank, slot=slot)
            good.insert(0, first)
        self._open[first.node, first.slot] = got.reader
        return tuple(good)

    def _path(self, copy: ShardCopy) -> Path:
        if copy.node == DRAIN_NODE:
            if self._session.drain is None:
                raise PeerError(
                    "the shard lies in a drain directory that this rank was not told of",
                    setting="MLFLASHPOINT_DRAIN_DIR",
                    rank=self._session.ranks.rank,
                    remedy="set it alike on all ranks",
                )
            return self._session.drain.slot(copy.slot)
        return self._session.container.path / copy.slot

    def _opened(self, copy: ShardCopy) -> ShardReader:
        if copy.node not in (self._session.container.node, DRAIN_NODE):
            raise PeerError(
                f"the shard of rank {copy.record.rank} lies in the memory of another node",
                rank=self._session.ranks.rank,
            )
        reader = ShardReader.open(self._path(copy))
        if reader.record != copy.record:
            reader.close()
            raise PeerError("the slot holds another shard by now", path=self._path(copy))
        return reader


def _by_place(copies: Sequence[ShardCopy], here: str) -> tuple[_Copies, _Copies, _Copies]:
    """The copies on this node, on other nodes, and in the drain directory."""
    near = [copy for copy in copies if copy.node == here]
    far = [copy for copy in copies if copy.node not in (here, DRAIN_NODE)]
    return near, far, [copy for copy in copies if copy.node == DRAIN_NODE]
