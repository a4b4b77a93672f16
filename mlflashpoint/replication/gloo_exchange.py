"""Where the two ends of a gloo group look each other's address up."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store

from mlflashpoint.replication.deadline import Deadline


class AddressExchange(Store):
    """Stands in for the store in which the two ends of a gloo group look each other's address up.

    Gloo keeps the store that it is given for as long as the group lives. On the job's store that would be one more
    connection for each link; here what one end writes is carried to the other in the message that sets up the link.

    Args:
        deadline: end of every wait in here.
    """

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._cancelled = False

    def own_addresses(self, count: int) -> dict[str, bytes]:
        """What this end has written, once it has written ``count`` values, or fewer when cancelled or out of time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._own) >= count or self._cancelled, self._deadline.remaining_s)
            return dict(self._own)

    def add_peer(self, addresses: Mapping[str, bytes]) -> None:
        with self._changed:
            self._values.update(addresses)
            self._changed.notify_all()

    def cancel(self) -> None:
        """End all waits with an error."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    # What follows is called by gloo, from C++.
    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = self._own[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            met = self._changed.wait_for(
                lambda: self._cancelled or all(key in self._values for key in keys), self._deadline.remaining_s
            )
            if self._cancelled or not met:
                raise RuntimeError("the peer sent no address in time")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)
