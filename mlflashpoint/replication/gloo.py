"""The default transport: dedicated gloo pairs between two ranks, set up through the job's own c10d store.

No port is opened beyond the one that each of its gloo devices listens on until it is closed, and whoever can't write to
the job's store gets no link. A rank has one link *to* each peer that it sends to or fetches from, on which only it
asks, and one *from* each peer that does so here, served by a thread of its own. So crossing transfers never meet.

A link lives until something goes wrong with it. Then both ends drop it, and the next call builds another.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlflashpoint.errors import PeerError, ReplicationError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.gloo_device import make_background_devices
from mlflashpoint.replication.gloo_link import Link
from mlflashpoint.replication.gloo_rendezvous import Rendezvous
from mlflashpoint.replication.gloo_server import GlooIncoming, serve
from mlflashpoint.replication.memory import flat
from mlflashpoint.replication.offers import Offers
from mlflashpoint.replication.transport import Identity, check_header, check_room, sizes_from, total_bytes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger("mlflashpoint.replication")


class _Outgoing:
    """The link to one peer that this rank asks on, and the turn on it."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.link: Link | None = None
        self.used_at = 0.0


class GlooTransport:
    """`Transport` over gloo.

    Args:
        store: the job's store, under a prefix that is the same on all ranks of the group and that nobody else uses.
        identity: who this rank is.
        connections: TCP connections of each link; each has a native thread, which all links share.
        connect_timeout_s: longest time that the side that was asked spends on building a link, and that finding this
            host's address takes.
        idle_timeout_s: age at which a link that nobody uses is given up; the next call builds another.

    Raises:
        SettingError, ReplicationError, DeadlineExceededError: the network interface or the store can't be used; see
            `make_background_devices`, `Mailbox`.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        connections: int = 2,
        connect_timeout_s: float = 60.0,
        idle_timeout_s: float = 3600.0,
    ) -> None:
        self._identity = identity
        self._idle_timeout_s = idle_timeout_s
        self._offers = Offers()
        self._inbox: queue.SimpleQueue[GlooIncoming | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._outgoing: dict[int, _Outgoing] = {}
        self._serving: dict[int, Link] = {}
        devices, listens_on = make_background_devices(connections, timeout_s=connect_timeout_s)
        self._rendezvous = Rendezvous(
            store,
            identity,
            devices=devices,
            listens_on=listens_on,
            connect_timeout_s=connect_timeout_s,
            accepted=self._serve,
        )

    @property
    def rank(self) -> int:
        return self._identity.rank

    def offer(self, key: str, header: bytes, buffers: Sequence[memoryview], *, timeout_s: float) -> None:
        self._offers.put(key, header, buffers, deadline=Deadline(timeout_s))

    def withdraw(self, key: str, *, timeout_s: float) -> None:
        self._offers.withdraw(key, deadline=Deadline(timeout_s))

    def describe(self, peer: int, key: str, *, timeout_s: float) -> tuple[bytes, tuple[int, ...]]:
        with self._asked(peer, {"op": "describe", "key": key}, b"", Deadline(timeout_s)) as (_, answer, header):
            return header, sizes_from(answer, peer)

    def fetch(
        self, peer: int, key: str, buffers: Sequence[memoryview], *, offset: int, length: int, timeout_s: float
    ) -> None:
        views = [flat(buffer) for buffer in buffers]
        check_room(views, list(map(len, views)))
        deadline = Deadline(timeout_s)
        request = {"op": "fetch", "key": key, "offset": offset, "length": length, "sizes": list(map(len, views))}
        with self._asked(peer, request, b"", deadline) as (link, _, _):
            link.pull(views, offset, length, deadline=deadline)

    def send(
        self,
        peer: int,
        header: bytes,
        buffers: Sequence[memoryview],
        *,
        timeout_s: float,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        views = [flat(buffer) for buffer in buffers]
        deadline = Deadline(timeout_s)
        check_header(header)
        with self._asked(peer, {"op": "push", "sizes": list(map(len, views))}, header, deadline) as (link, _, _):
            link.push(views, 0, total_bytes(views), deadline=deadline, progress=progress)
            answer, _ = link.hear(deadline=deadline)
        _check_answer(answer, peer)

    def receive(self, *, timeout_s: float) -> GlooIncoming | None:
        try:
            incoming = self._inbox.get(timeout=Deadline(timeout_s).remaining_s)
        except queue.Empty:
            return None
        if incoming is None:
            # the mark of close() stays for whoever asks next
            self._inbox.put(None)
        return incoming

    def close(self, *, timeout_s: float) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outgoing = [entry.link for entry in self._outgoing.values() if entry.link is not None]
            links = outgoing + list(self._serving.values())
        self._inbox.put(None)
        for link in links:
            link.close()
        self._rendezvous.close(timeout_s=timeout_s)
        with self._lock:
            self._outgoing.clear()
            self._serving.clear()

    @contextmanager
    def _asked(
        self, peer: int, request: Mapping[str, Any], payload: bytes, deadline: Deadline
    ) -> Iterator[tuple[Link, Mapping[str, Any], bytes]]:
        """Ask ``peer`` for something; yields the link and the answer once it has agreed. An error in there ends it."""
        with self._lock:
            outgoing = self._outgoing.setdefault(peer, _Outgoing())
        if not outgoing.turn.acquire(timeout=deadline.remaining_s):
            raise deadline.exceeded(f"turn on the link to rank {peer}", rank=peer)
        try:
            link, answer, header = self._ask(outgoing, peer, request, payload, deadline)
            outgoing.used_at = time.monotonic()
            _check_answer(answer, peer)
            try:
                yield link, answer, header
            except BaseException:
                link.close()
                raise
        finally:
            outgoing.turn.release()

    def _ask(
        self, outgoing: _Outgoing, peer: int, request: Mapping[str, Any], payload: bytes, deadline: Deadline
    ) -> tuple[Link, Mapping[str, Any], bytes]:
        link = outgoing.link
        if link is not None:
            if not link.closed and time.monotonic() - outgoing.used_at < self._idle_timeout_s / 2:
                try:
                    return link, *_request(link, request, payload, deadline)
                except PeerError as error:
                    # Restarted, or tired of an idle link: a fresh one tells whether the peer lives.
                    _log.debug("the link from rank %d to rank %d is stale: %s", self.rank, peer, error)
            link.close()
            outgoing.link = None
        link = self._rendezvous.connect(peer, deadline=deadline)
        with self._lock:
            outgoing.link = link
            if self._closed:
                link.close()
        return link, *_request(link, request, payload, deadline)

    def _serve(self, link: Link) -> None:
        with self._lock:
            # A peer has one link to here: an older one is what a break left behind.
            older = self._serving.get(link.peer)
            self._serving[link.peer] = link
            if self._closed:
                link.close()
        if older is not None:
            older.close()
        try:
            serve(link, self._offers, self._inbox.put, idle_timeout_s=self._idle_timeout_s)
        finally:
            with self._lock:
                if self._serving.get(link.peer) is link:
                    del self._serving[link.peer]


def _request(
    link: Link, request: Mapping[str, Any], payload: bytes, deadline: Deadline
) -> tuple[Mapping[str, Any], bytes]:
    link.tell({**request, "timeout_s": max(0.001, deadline.remaining_s)}, payload, deadline=deadline)
    return link.hear(deadline=deadline)


def _check_answer(answer: Mapping[str, Any], peer: int) -> None:
    if answer.get("ok") is not True:
        raise ReplicationError(f"rank {peer} refused: {answer.get('error')}", rank=peer)
