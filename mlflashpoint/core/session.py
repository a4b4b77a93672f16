"""A session: this process's place in the store for one start of the job, from opening the container to its number.

Opening is local and starts no thread. What needs the other ranks is done where it may wait: inside a collective call
with its deadline, or in the background.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from mlflashpoint.core.channel import Channel, HashStore, Store
from mlflashpoint.core.connection import apart, drop
from mlflashpoint.core.container import Container, check_group, open_container, unusable
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.drainlook import look_into, tell_at_start
from mlflashpoint.core.incarnation import Incarnation, Lineage, read_lineage, record_lineage
from mlflashpoint.core.manifest import seats_of
from mlflashpoint.core.ranks import Ranks
from mlflashpoint.core.record import ShardCopy
from mlflashpoint.core.room import Room
from mlflashpoint.core.roster import Joined, Member, join
from mlflashpoint.core.seat import SeatLock
from mlflashpoint.core.slotfiles import clear_places
from mlflashpoint.errors import ContainerError, FlashpointError, PeerError
from mlflashpoint.settings import StoreConfig

log = logging.getLogger("mlflashpoint.core")

T = TypeVar("T")

#: a predecessor that was killed may take a moment to be gone
_SEAT_WAIT_S = 10.0


class Session:
    """One process's place in one group.

    Args:
        config: the settings.
        ranks: who this process is.
        group: name of the set of ranks that save together.
        store: the job's store; None takes that of torch.distributed when it is needed.
        number: tells apart the sessions that this process has open for one group; the same on all ranks.
        own: what else the job keeps in the container, see ``open_container``.

    A container or seat that can't be used is no exception but ``problem``: the rank still has to talk to the others.

    Raises:
        SettingError: the group's name can't be used.
    """

    def __init__(
        self,
        config: StoreConfig,
        ranks: Ranks,
        group: str,
        store: Store | None,
        number: int = 0,
        own: Collection[str] = (),
    ) -> None:
        check_group(group)
        self.config = config
        self.ranks = ranks
        self.group = group
        # Two containers' ranks would take each other's entries in the roster for those of a replaced process.
        self._prefix = f"mlflashpoint/{group}" if number == 0 else f"mlflashpoint/{group}/{number}"
        self.problem: FlashpointError | None = None
        self._given_store = store
        self._channel: Channel | None = None
        self._channel_lock = threading.Lock()
        self._lock = threading.Lock()
        self._joined: Joined | None = None
        #: steps that training went on from: at the start, and after each rollback within this process
        self.resumed_from: list[int | None] = [None]
        self._own = own
        self._container: Container | None = None
        self._seat: Path | None = None
        self._seat_lock: SeatLock | None = None
        try:
            self._enter()
        except FlashpointError as error:
            error.rank = ranks.rank
            self.problem = error
        except OSError as error:
            self.problem = unusable(config.base_container, error)
            self.problem.rank = ranks.rank

    @property
    def container(self) -> Container:
        """Raises the problem if there is one."""
        if self._container is None or self.problem is not None:
            raise self.problem or ContainerError("the container is closed")
        return self._container

    @property
    def seat(self) -> Path:
        """The folder of this rank; raises the problem if there is one."""
        if self._seat is None or self.problem is not None:
            raise self.problem or ContainerError("the container is closed")
        return self._seat

    @property
    def epoch(self) -> int:
        """Number of rollbacks within this process."""
        return len(self.resumed_from) - 1

    @property
    def drain(self) -> DrainDir | None:
        """Where versions are drained to, and may have been by an earlier start; None for nowhere."""
        root = self.config.drain_dir
        return None if root is None else DrainDir(root, self.config.job_id, self.group)

    def drained(self) -> list[ShardCopy]:
        """What earlier starts have drained, on rank 0; none on the others."""
        return self._found_drained(lambda drain: drain.copies(holder=self.ranks.rank), [])

    def channel(self) -> Channel:
        """The group's channel, on this process's connection; the first call of a process may take a moment.

        Raises:
            PeerError: there is no store to talk through.
        """
        with self._channel_lock:
            if self._channel is None:
                self._channel = Channel(self._store(), self._prefix)
            return self._channel

    def fresh_channel(self) -> Channel:
        """The same on another connection, for whoever may keep one busy; raises PeerError."""
        return Channel(apart(self._store()), self._prefix, clone=False)

    def drop_channel(self) -> None:
        """Give up a connection on which a call hangs; the next use makes a new one."""
        # Not under the lock: whoever makes a connection may be what hangs.
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(PeerError):
                drop(self._store(), channel.connection)

    def joined(self) -> Joined:
        """Join the roster unless that has happened; collective at first, and may wait until the deadline.

        Raises:
            DeadlineExceededError: some ranks did not come; names them.
            PeerError: the job's store can't be reached.
        """
        with self._lock:
            if self._joined is None:
                lineage = self._lineage()
                node = "" if self._container is None else self._container.node
                me = Member(
                    rank=self.ranks.rank,
                    seat=self.ranks.local_rank,
                    node=node if self.problem is None else "",
                    domain=self.config.failure_domain,
                    seen=self._seen(lineage),
                    job_id=self.config.job_id,
                    problem=None if self.problem is None else str(self.problem),
                    host=socket.gethostname(),
                    transport=self.config.transport,
                )
                self._joined = join(
                    self.channel().under("start"),
                    me,
                    lineage,
                    world_size=self.ranks.world_size,
                    deadline_s=self.config.deadline_s,
                    replicas=self.config.replicas,
                )
                self.remember()
                if self.drain is not None and self._joined.me.leader:
                    tell_at_start(self.drain, self.container.path, deadline_s=self.config.deadline_s)
            return self._joined

    @property
    def joined_already(self) -> Joined | None:
        """What ``joined`` gave, None before it."""
        return self._joined

    def number(self, epoch: int) -> int:
        """The incarnation's number, 0 before ``joined``."""
        return 0 if self._joined is None else self.incarnation(epoch).number

    def room(self, channel: Channel) -> Room:
        return Room(channel, rank=self.ranks.rank, world_size=self.ranks.world_size, deadline_s=self.config.deadline_s)

    def incarnation(self, epoch: int) -> Incarnation:
        """The present start as it is in the given epoch; raises PeerError before ``joined``."""
        if self._joined is None:
            raise PeerError("this start has no number yet", rank=self.ranks.rank)
        current = self._joined.start
        for index, step in enumerate(self.resumed_from[: epoch + 1]):
            if index:
                current = current.rolled_back(-1)
            current = current.resumed(step) if step is not None else current
        return current

    def remember(self, others: Lineage | None = None) -> None:
        """Write what is known of this start, and of others, into the node's container, if there is anything to write.

        A failure is logged only: every commit record tells the same.
        """
        if self._joined is None or self.problem is not None:
            return
        try:
            for epoch in range(self.epoch + 1):
                record_lineage(self.container.group_dir(self.group), self.incarnation(epoch), others)
        except FlashpointError as error:
            log.warning("which versions this start abandons could not be recorded: %s", error)

    def close(self) -> None:
        if self._seat_lock is not None:
            self._seat_lock.release()
        self._channel = None

    def _enter(self) -> None:
        """Open the container and take the seat; raises ContainerError."""
        self._container = open_container(self.config, self._own)
        self._seat = self._container.seat_dir(self.group, self.ranks.local_rank)
        self._seat_lock = SeatLock(self._seat, wait_s=min(_SEAT_WAIT_S, self.config.deadline_s))
        clear_places(self._seat)

    def _store(self) -> Store:
        if self.ranks.world_size == 1 and self._given_store is None:
            self._given_store = HashStore()
        if self._given_store is not None:
            return self._given_store
        if dist.is_available() and dist.is_initialized():
            return dist.distributed_c10d._get_default_store()
        raise PeerError(
            "several ranks and no store to talk through",
            rank=self.ranks.rank,
            remedy="initialise torch.distributed before the first save or resume, or pass its store",
        )

    def _lineage(self) -> Lineage:
        if self.problem is not None:
            return Lineage()
        try:
            return read_lineage(self.container.group_dir(self.group))
        except FlashpointError as error:
            log.warning("the lineage on this node is left out: %s", error)
            return Lineage()

    def _seen(self, lineage: Lineage) -> int:
        """Highest incarnation number that the node's lineage, a commit record on it, or what was drained names."""
        from mlflashpoint.core.arena import scan_seat

        if self.problem is not None:
            return 0
        seats = seats_of(self.container.group_dir(self.group)).values()
        numbers = (slot.record.incarnation for seat in seats for slot in scan_seat(seat) if slot.record is not None)
        return max(lineage.newest, self._found_drained(DrainDir.newest_incarnation, 0), *numbers)

    def _found_drained(self, look: Callable[[DrainDir], T], nothing: T) -> T:
        """What rank 0 finds in the drain directory, which all nodes see."""
        drain = self.drain
        if drain is None or self.ranks.rank != 0:
            return nothing
        return look_into(drain, look, nothing, deadline_s=self.config.deadline_s)
