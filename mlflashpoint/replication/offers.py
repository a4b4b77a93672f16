"""What this rank lets its peers fetch, and the pins that keep a buffer from being reused while somebody reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlflashpoint.errors import ReplicationError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.memory import flat
from mlflashpoint.replication.transport import check_header


@dataclass
class Offer:
    """A shard that may be fetched.

    Attributes:
        header: the shard's header.
        buffers: its bytes, flat.
        readers: calls that read it right now.
    """

    header: bytes
    buffers: list[memoryview]
    readers: int = 0

    @property
    def sizes(self) -> list[int]:
        return [len(buffer) for buffer in self.buffers]


class Offers:
    """Thread-safe table of offers by key."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._changed = threading.Condition()

    def put(self, key: str, header: bytes, buffers: Sequence[memoryview], *, deadline: Deadline) -> None:
        """Add an offer; waits until nobody reads one that it replaces. Raises DeadlineExceededError."""
        check_header(header)
        offer = Offer(header, [flat(buffer) for buffer in buffers])
        self.withdraw(key, deadline=deadline)
        with self._changed:
            self._offers[key] = offer

    def withdraw(self, key: str, *, deadline: Deadline) -> None:
        """Remove an offer and wait until nobody reads it. Raises DeadlineExceededError."""
        with self._changed:
            offer = self._offers.pop(key, None)
            if offer is not None and not self._changed.wait_for(lambda: offer.readers == 0, deadline.remaining_s):
                raise deadline.exceeded(f"end of {offer.readers} transfers of {key!r}")

    @contextmanager
    def reading(self, key: str) -> Iterator[Offer]:
        """The offer, pinned while the context lasts. Raises ReplicationError if there is none."""
        with self._changed:
            offer = self._offers.get(key)
            if offer is None:
                raise ReplicationError(f"nothing is offered under {key!r}")
            offer.readers += 1
        try:
            yield offer
        finally:
            with self._changed:
                offer.readers -= 1
                self._changed.notify_all()
