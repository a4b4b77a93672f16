"""An onlooker: a rank whose store another process has, and which still finds and reads what lies in any node's memory.

With a checkpoint process per rank the training processes have neither seats nor links of their own. They need none to
read: the commit records tell what is there, and digests tell whether it was overwritten meanwhile. So the training
processes come together on their own, apart from the checkpoint processes, take the decision that a start takes, and
hand each other what lies on their nodes. They write nothing.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Protocol

from mlflashpoint.core.channel import Store
from mlflashpoint.core.container import look_into
from mlflashpoint.core.conversation import Conversation
from mlflashpoint.core.counters import Counters
from mlflashpoint.core.depot import Depot
from mlflashpoint.core.exchange import Exchange
from mlflashpoint.core.incarnation import Lineage
from mlflashpoint.core.planner import Wish
from mlflashpoint.core.ranks import Ranks
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import ShardCopy
from mlflashpoint.core.recovery import Recovery
from mlflashpoint.core.session import Session
from mlflashpoint.core.slotfiles import still_holds
from mlflashpoint.errors import ContainerError, ForeignContainerError, NoVersionError, PeerError
from mlflashpoint.settings import StoreConfig

log = logging.getLogger("mlflashpoint.core")

_CLOSE_S = 5.0


class Finder(Protocol):
    """Whoever finds a version together with the other ranks and gives its shards: a runtime or an onlooker."""

    rank: int
    world_size: int

    def find_latest(
        self, *, durable_step: int | None = None, topology: str | None = None, reshard: bool = False
    ) -> Recovery | None:
        """What all ranks can load; collective."""

    def load_shard(self, recovery: Recovery, rank: int) -> ShardReader:
        """The shard of any rank of the version; the caller closes the reader."""


class Onlooker:
    """Finds and reads for one rank, whose store another process of it has.

    Args:
        config: the settings of the store.
        ranks: this rank, as the store had it; ``local_rank`` names the seat that the other process sits on.
        group: name of the set of ranks that save together.
        store: the training processes' c10d store; None takes that of torch.distributed.

    A version is what it is at a start: complete if every rank's shard lies in some node's memory with good digests. The
    newest complete one stays while a newer one is on its way. What a save overwrites can't be read any more.
    """

    def __init__(self, config: StoreConfig, ranks: Ranks, group: str, store: Store | None = None) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self._make = functools.partial(_Visit, config, ranks, group, store)
        self._group = group
        self._visit: _Visit | None = None
        self._saves = 0
        self._lock = threading.Lock()

    def find_latest(
        self, *, durable_step: int | None = None, topology: str | None = None, reshard: bool = False
    ) -> Recovery | None:
        """As ``Runtime.find_latest``; what the other process has begun to save, and not finished, is not waited for."""
        with self._lock:
            self._saves = 0
            visit = self._visit = self._visit or self._make()
            visit.depot.close()
            recovery = None
            try:
                decision = visit.conversation.find(Wish(self._group, durable_step, topology, reshard))
                recovery = decision.recovery
            finally:
                if recovery is None:
                    # They meet anew then: a rank may find the container later, or have missed how this one ended.
                    self._visit = None
                    visit.close()
        log.debug("rank %d: %s", self.rank, decision.reason)
        if recovery is None and visit.session.problem is not None:
            text = "rank %d can load nothing from memory, where there may be a version: %s"
            log.error(text, self.rank, visit.session.problem)
        return recovery

    def load_shard(self, recovery: Recovery, rank: int) -> ShardReader:
        """As ``Runtime.load_shard``; from another node until the second save after ``find_latest``.

        Raises:
            NoVersionError: no copy of it can be read.
            PeerError: the plan does not list it, or can't be asked.
        """
        visit = self._visit
        if visit is None:
            raise NoVersionError(
                "another version was looked for since, in vain",
                path=recovery.where,
                step=recovery.step,
                remedy="load what latest gives",
            )
        return visit.depot.first_of(visit.conversation.sources(recovery, rank), shard=rank, step=recovery.step)

    def save_begins(self) -> None:
        """A save of this rank begins elsewhere: by the second one the first is over, and nobody reads any more."""
        # Who is looking at this moment needs it all.
        if self._lock.acquire(blocking=False):
            try:
                self._saves += 1
                if self._saves == 2 and self._visit is not None:
                    self._visit.rest()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Let go of all that it reads and offers; may be called twice."""
        with self._lock:
            visit, self._visit = self._visit, None
            if visit is not None:
                visit.close()


class _Visit:
    """All that the questions need, and the reading after them, as long as the ranks are in step."""

    def __init__(self, config: StoreConfig, ranks: Ranks, group: str, store: Store | None) -> None:
        self.session = _Standing(config, ranks, group, store)
        self._exchange = Exchange(
            self.session,
            Counters(),
            keep=tuple,
            obsolete=lambda record: False,
            began=lambda: True,
            keeps=False,
        )
        self.depot = _Shelf(self.session, self._exchange)
        self.conversation = Conversation(self.session, self.depot)

    def rest(self) -> None:
        """Hand out nothing until the next question."""
        self._exchange.withdraw()
        self.depot.close()

    def close(self) -> None:
        self._exchange.close(_CLOSE_S)
        self.depot.close()
        self.session.close()


class _Standing(Session):
    """A session without a seat: it opens what is there, and leaves no trace of itself."""

    def _enter(self) -> None:
        self._prefix = f"mlflashpoint/{self.group}/onlookers"
        path, job_id = self.config.base_container, self.config.job_id
        container = look_into(path)
        if container is None:
            raise ContainerError("there is no memory container here", path=path, remedy="save first")
        if container.job_id != job_id:
            raise ForeignContainerError(
                f"the container belongs to job {container.job_id!r}, not {job_id!r}",
                path=path,
                remedy="give the base container of the job whose versions are wanted",
            )
        self._container = container
        self._seat = container.group_dir(self.group) / f"seat-{self.ranks.local_rank}"

    def remember(self, others: Lineage | None = None) -> None:
        """Nothing: to look is no start of the job."""


class _Shelf(Depot):
    """A depot in which nothing is moved, and whose slots others may overwrite at any time."""

    def take(self, copy: ShardCopy) -> ShardReader:
        """As ``Depot.take``, if the slot still holds it; whoever copies out of it asks that once more afterwards."""
        reader = super().take(copy)
        if reader.path is not None and not still_holds(reader.path, reader.record):
            reader.close()
            raise PeerError("the slot holds another shard by now", path=reader.path)
        return reader

    def quarantine(self, copy: ShardCopy) -> None:
        """Nothing: the slot is another process's, which may have stored another shard in it by now."""
