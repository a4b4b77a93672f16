"""A session without files, sockets or a roster: a rank that knows its place in a start that others have settled."""

from pathlib import Path
from types import SimpleNamespace

from mlflashpoint.core.placement import Placement
from mlflashpoint.core.ranks import Ranks
from mlflashpoint.core.session import Session
from mlflashpoint.settings import StoreConfig


class Membership(Session):
    """Its incarnations are those of a session, rollbacks too.

    Args:
        channel: to the other ranks.
        start: the incarnation that this start is.
        remembered: called with each incarnation of this start that a rollback makes known.
        config: fields of StoreConfig.
    """

    seat = None

    def __init__(self, channel, start, *, rank, world, remembered=lambda incarnation: None, **config):
        self.config = StoreConfig(job_id="j", base_container=Path("/dev/shm/unused"), **config)
        self.ranks, self.group = Ranks(rank, world, rank), "default"
        self.seat, self.problem = Path(f"/{rank}"), None
        self.resumed_from = [None]
        self._given_channel, self._remembered = channel, remembered
        self._joined = SimpleNamespace(start=start, me=SimpleNamespace(leader=False), placement=Placement())

    def joined(self):
        return self._joined

    def channel(self):
        return self._given_channel

    def remember(self, others=None):
        self._remembered(self.incarnation(self.epoch))
