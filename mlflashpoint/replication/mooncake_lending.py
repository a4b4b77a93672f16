"""Memory that a peer may write into, and what of it is out of bounds because a peer may not be done with it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlflashpoint.errors import PeerError, ReplicationError
from mlflashpoint.replication.memory import address_of
from mlflashpoint.replication.mooncake_engine import Engine

_REMEMBERED = 1000


@dataclass(frozen=True)
class _Loan:
    """Memory that ``peer`` may still write into by the engine ``session``.

    Attributes:
        regions: as the engine has them.
        views: kept, so that nothing else comes to lie at those addresses meanwhile.
    """

    peer: int
    session: str
    regions: list[tuple[int, int]]
    views: Sequence[memoryview]


class Lending:
    """Book of the memory lent to peers; thread-safe.

    A write can't be called back. Memory whose loan ended with an error therefore stays out of bounds until the writer
    says that its engine is done with it, or until it turns up with another engine: its old process is gone then.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._out_of_bounds: dict[str, _Loan] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)

    @contextmanager
    def lend(self, peer: int, session: str, call: str, views: Sequence[memoryview]) -> Iterator[list[int]]:
        """Let ``peer`` write into ``views`` while the context lasts; yields their addresses, 0 for an empty one.

        Raises:
            PeerError: the peer has given the call up already.
            ReplicationError: some of the memory is out of bounds, or the engine can't use it.
        """
        spans = [(address_of(view), address_of(view) + len(view)) for view in views if len(view)]
        with self._lock:
            if call in self._ended:
                raise PeerError(f"rank {peer} has given this transfer up", rank=peer)
            for loan in self._out_of_bounds.values():
                if any(start < end and begin < stop for start, stop in loan.regions for begin, end in spans):
                    raise ReplicationError(f"rank {loan.peer} may still write into that memory", rank=peer)
        regions = self._engine.register(views)
        try:
            yield [address_of(view) if len(view) else 0 for view in views]
        except BaseException:
            with self._lock:
                done = call in self._ended
                if not done:
                    self._out_of_bounds[call] = _Loan(peer, session, regions, views)
            if done:
                self._engine.release(regions)
            raise
        self._engine.release(regions)

    def given_up(self, call: str) -> bool:
        """Whether the peer has said that it will not write for that call, or no more."""
        with self._lock:
            return call in self._ended

    def ended(self, call: str) -> None:
        """The peer's engine is done with the memory of that call."""
        with self._lock:
            self._ended.append(call)
            loan = self._out_of_bounds.pop(call, None)
        if loan is not None:
            self._engine.release(loan.regions)

    def seen(self, peer: int, session: str) -> None:
        """``peer`` writes by this engine now; what a former process of it was to write will never come."""
        with self._lock:
            gone = [
                call
                for call, loan in self._out_of_bounds.items()
                if loan.peer == peer and loan.session not in ("", session)
            ]
        for call in gone:
            self.ended(call)
