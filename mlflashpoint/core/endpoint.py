"""The endpoint: what of this rank other nodes reach, its replicator and the replicas that it keeps for others.

Made when first needed. What can't be made fails the call, and is tried again later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mlflashpoint.core.counters import as_flashpoint
from mlflashpoint.core.orphans import free_replicas
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.replicas import NoReplicas, Replicas
from mlflashpoint.core.session import Session
from mlflashpoint.errors import FlashpointError, ReplicationError
from mlflashpoint.replication.delivery import ReplicationLag
from mlflashpoint.replication.replicator import Replicator
from mlflashpoint.replication.transport import Identity
from mlflashpoint.replication.transports import SETTING, make_transport

#: part of the deadline in which a replica has to be acknowledged: whoever waits for it must not be the first to give up
_SHARE = 0.5
#: deliveries at once: one for each slot, and one that rebuilds
_QUEUE_DEPTH = 4
#: a host name that does not resolve may take many seconds to say so
_RETRY_S = 30.0


class Endpoint:
    """One rank's end of the links to other nodes; thread-safe.

    Args:
        session: an opened session.
        obsolete: whether nobody will ever need a shard.
        reused: called with a replica's slot that is about to be overwritten.
        keeps: whether it keeps replicas for others; else it refuses them.
    """

    def __init__(
        self,
        session: Session,
        *,
        obsolete: Callable[[ShardRecord], bool],
        reused: Callable[[Path], None],
        keeps: bool = True,
    ) -> None:
        self._session = session
        self._obsolete = obsolete
        self._reused = reused
        self._keeps = keeps
        self._lock = threading.Lock()
        self._replicator: Replicator | None = None
        self._replicas: Replicas | None = None
        self._problem: FlashpointError | None = None
        self._retry_at = 0.0
        self._last = ReplicationLag(0, 0, 0.0, 0, 0, 0, 0, "")
        self._closed = False

    @property
    def replicator(self) -> Replicator | None:
        """What ``open`` gave, None before it and after ``close``."""
        return self._replicator

    @property
    def replicas(self) -> Replicas | None:
        """The slots for other ranks' shards, None before ``open`` and after ``close``."""
        return self._replicas

    @property
    def problem(self) -> FlashpointError | None:
        """Why it could not be opened when that was last tried."""
        return self._problem

    def open(self) -> Replicator:
        """The replicator, made at the first call; raises FlashpointError."""
        with self._lock:
            if self._closed:
                raise ReplicationError("replication is closed", rank=self._rank)
            if self._replicator is None:
                if self._problem is not None and time.monotonic() < self._retry_at:
                    raise self._problem
                try:
                    self._replicator = self._made()
                except Exception as error:
                    self._problem = as_flashpoint(error, rank=self._rank, step=-1)
                    self._problem.step = None
                    self._retry_at = time.monotonic() + _RETRY_S
                    raise self._problem from error
            return self._replicator

    def lag(self) -> ReplicationLag:
        """How far the replicas are behind; after ``close``, how far they were."""
        replicator = self._replicator
        return self._last if replicator is None else replicator.lag()

    def free_strays(self) -> int:
        """Free the replicas of ranks that send none here any more; returns the bytes freed.

        Raises:
            ContainerError, OSError: one can't be removed.
        """
        with self._lock:
            joined = self._session.joined_already
            if self._replicas is not None and not self._closed:
                return self._replicas.free_strays(() if joined is None else joined.placement.owners)
            if joined is not None and not joined.placement.linked:
                return free_replicas(self._session.seat)
            return 0

    def close(self, timeout_s: float) -> None:
        """End it all, bounded; may be called twice."""
        self._closed = True
        # Whoever holds the lock may be waiting for a name server.
        locked = self._lock.acquire(timeout=max(0.1, timeout_s))
        replicator, self._replicator = self._replicator, None
        self._last = self._last if replicator is None else replicator.lag()
        replicas, self._replicas = self._replicas, None
        if locked:
            self._lock.release()
        if replicator is not None:
            with contextlib.suppress(FlashpointError):
                replicator.close(timeout_s=max(0.1, timeout_s))
        if replicas is not None:
            replicas.close()

    @property
    def _rank(self) -> int:
        return self._session.ranks.rank

    def _made(self) -> Replicator:
        joined, config = self._session.joined(), self._session.config
        if not joined.placement.linked:
            raise ReplicationError("the job has no other node to reach", rank=self._rank)
        if joined.placement.discord:
            raise ReplicationError(
                f"the ranks have chosen different transports: {joined.placement.discord}",
                setting=SETTING,
                value=config.transport,
                rank=self._rank,
                remedy="set it to the same value on all nodes",
            )
        if self._replicas is None and self._keeps:
            self._replicas = Replicas(
                self._session.seat,
                job_id=config.job_id,
                group=self._session.group,
                obsolete=self._obsolete,
                reused=self._reused,
            )
        # Another connection than that of small talk: whoever hangs on one must not hold up the other.
        channel = self._session.fresh_channel().under(f"run-{joined.start.run}/replication")
        identity = Identity(config.job_id, self._session.group, joined.start.number, self._rank)
        transport = make_transport(
            config.transport, channel.store, identity, connect_timeout_s=min(60.0, config.deadline_s * _SHARE)
        )
        return Replicator(
            transport,
            holders=joined.placement.holders,
            sink=self._replicas or NoReplicas(),
            timeout_s=config.deadline_s * _SHARE,
            queue_depth=_QUEUE_DEPTH,
        )
