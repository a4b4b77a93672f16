"""The end of a gloo link that was asked for: takes shards that are pushed here and hands out what is offered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlflashpoint.errors import FlashpointError, PeerError, ReplicationError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.gloo_link import Link
from mlflashpoint.replication.memory import flat
from mlflashpoint.replication.offers import Offers
from mlflashpoint.replication.transport import check_room, check_sizes, sizes_from, total_bytes

_MAX_ERROR_CHARS = 1000


class GlooIncoming:
    """`Incoming` on a gloo link; the link's own thread waits while somebody takes the shard in."""

    def __init__(self, link: Link, header: bytes, sizes: tuple[int, ...], deadline: Deadline) -> None:
        self.source = link.peer
        self.header = header
        self.sizes = sizes
        self._link = link
        self._deadline = deadline
        self._ended = threading.Event()

    def accept(self, buffers: Sequence[memoryview], *, timeout_s: float) -> None:
        views = [flat(buffer) for buffer in buffers]
        check_room(views, self.sizes)
        deadline = self._within(timeout_s)
        try:
            self._link.tell({"ok": True}, deadline=deadline)
            self._link.pull(views, 0, total_bytes(views), deadline=deadline)
        except FlashpointError:
            self._ended.set()
            raise

    def acknowledge(self, *, timeout_s: float) -> None:
        self._end({"ok": True}, timeout_s)

    def refuse(self, error: Exception, *, timeout_s: float) -> None:
        self._end({"ok": False, "error": str(error)[:_MAX_ERROR_CHARS]}, timeout_s)

    def wait(self) -> None:
        """Return once the shard was acknowledged or refused; closes the link if neither happens in time."""
        if not self._ended.wait(self._deadline.remaining_s):
            self._link.close()
            raise self._deadline.exceeded(f"decision on the shard from rank {self.source}", rank=self.source)

    def _within(self, timeout_s: float) -> Deadline:
        # The sender gives up at its own deadline: waiting longer would only hold the slot.
        return Deadline(min(timeout_s, max(0.001, self._deadline.remaining_s)))

    def _end(self, record: Mapping[str, Any], timeout_s: float) -> None:
        try:
            self._link.tell(record, deadline=self._within(timeout_s))
        finally:
            self._ended.set()


def serve(link: Link, offers: Offers, arrived: Callable[[GlooIncoming], None], *, idle_timeout_s: float) -> None:
    """Answer what the peer asks on ``link`` until it goes away.

    Raises:
        PeerError, DeadlineExceededError: the peer went away, stalled in the middle of a transfer, or asked nothing for
            ``idle_timeout_s``.
    """
    while True:
        request, payload = link.hear(deadline=Deadline(idle_timeout_s))
        timeout_s = request.get("timeout_s")
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s < 1e9:
            raise PeerError(f"rank {link.peer} sent a request without a deadline", rank=link.peer)
        deadline = Deadline(timeout_s)
        operation = request.get("op")
        if operation == "push":
            incoming = GlooIncoming(link, payload, sizes_from(request, link.peer), deadline)
            arrived(incoming)
            incoming.wait()
        elif operation == "describe":
            _describe(link, offers, request, deadline)
        elif operation == "fetch":
            _hand_out(link, offers, request, deadline)
        else:
            raise PeerError(f"rank {link.peer} asked for {operation!r}", rank=link.peer)


def _describe(link: Link, offers: Offers, request: Mapping[str, Any], deadline: Deadline) -> None:
    try:
        with offers.reading(str(request.get("key"))) as offer:
            answer, header = {"ok": True, "sizes": offer.sizes}, offer.header
    except FlashpointError as error:
        answer, header = {"ok": False, "error": str(error)[:_MAX_ERROR_CHARS]}, b""
    link.tell(answer, header, deadline=deadline)


def _hand_out(link: Link, offers: Offers, request: Mapping[str, Any], deadline: Deadline) -> None:
    offset, length = request.get("offset"), request.get("length")
    sizes = sizes_from(request, link.peer)
    try:
        with offers.reading(str(request.get("key"))) as offer:
            check_sizes(offer.buffers, sizes)
            if not (type(offset) is int and type(length) is int and 0 <= offset <= offset + length <= sum(sizes)):
                raise ReplicationError(f"there are no bytes [{offset}, {offset} + {length})")
            link.tell({"ok": True}, deadline=deadline)
            link.push(offer.buffers, offset, length, deadline=deadline)
            return
    except ReplicationError as error:
        refusal = error
    link.tell({"ok": False, "error": str(refusal)[:_MAX_ERROR_CHARS]}, deadline=deadline)
