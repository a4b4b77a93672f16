"""A second transport, on the Mooncake transfer engine, for networks with RDMA. Over TCP it is slower than the default.

The engine writes straight into a peer's memory. Who writes what where is agreed in messages through the job's store
(`mailbox`). The engine opens a port of its own, which is why this transport is an option that somebody has to choose:
use it only on a network that the job has to itself.

A write can't be called back. When one end gives up at its deadline, the other's engine may still be writing. So memory
that a failed call was to fill stays out of bounds until the writer has told that its engine is done: no later call
accepts it before. It is the same rule as for other transports, kept by refusing instead of by cancelling.
"""

from __future__ import annotations

import base64
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlflashpoint.errors import FlashpointError, PeerError, ReplicationError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.mailbox import Mailbox
from mlflashpoint.replication.memory import flat
from mlflashpoint.replication.mooncake_engine import Engine
from mlflashpoint.replication.mooncake_lending import Lending
from mlflashpoint.replication.mooncake_messages import Replies, addresses_of, header_of, hear, part
from mlflashpoint.replication.offers import Offers
from mlflashpoint.replication.transport import Identity, check_header, check_room, check_sizes, sizes_from

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger("mlflashpoint.replication")

#: longest wait for the engine to let go of memory after a failure; it drops a transfer without progress after 30 s
_DRAIN_S = 120.0
_CLOSED: Mapping[str, Any] = {"ok": False, "refused": True, "error": "the transport was closed"}


class MooncakeIncoming:
    """`Incoming` whose sender writes into the accepted buffers itself."""

    def __init__(self, owner: MooncakeTransport, message: Mapping[str, Any], source: int) -> None:
        self.source = source
        self.sizes = sizes_from(message, source)
        self.header = header_of(message, source)
        self._owner = owner
        self.call = str(message["call"])
        self._session = str(message["session"])
        self._deadline = Deadline(float(message["timeout_s"]))

    def accept(self, buffers: Sequence[memoryview], *, timeout_s: float) -> None:
        views = [flat(buffer) for buffer in buffers]
        check_room(views, self.sizes)
        deadline = Deadline(min(timeout_s, max(0.001, self._deadline.remaining_s)))
        with (
            self._owner.lending.lend(self.source, self._session, self.call, views) as addresses,
            self._owner.replies(self.call) as replies,
        ):
            self._owner.reply(self.source, self.call, ok=True, addresses=addresses)
            hear(replies, self.source, deadline)

    def acknowledge(self, *, timeout_s: float) -> None:
        self._owner.reply(self.source, self.call, ok=True)

    def refuse(self, error: Exception, *, timeout_s: float) -> None:
        self._owner.reply(self.source, self.call, ok=False, error=str(error)[:1000])


class MooncakeTransport:
    """`Transport` over the Mooncake transfer engine.

    Args:
        store: the job's store, under a prefix that is the same on all ranks of the group and that nobody else uses.
        identity: who this rank is.
        protocol: ``tcp`` or ``rdma``.
        device: names of RDMA devices, empty for all.
        connect_timeout_s: longest time that finding this host's address takes.

    Raises:
        ReplicationError, SettingError, DeadlineExceededError: the engine or the store can't be used; see `Engine`,
            `Mailbox`.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        protocol: str = "tcp",
        device: str = "",
        connect_timeout_s: float = 60.0,
    ) -> None:
        self._identity = identity
        self._engine = Engine(protocol, device, connect_timeout_s)
        self.lending = Lending(self._engine)
        self._offers = Offers()
        self._inbox: queue.SimpleQueue[MooncakeIncoming | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._replies: dict[str, Replies] = {}
        self._threads: set[threading.Thread] = set()
        self._mailbox = Mailbox(store, rank=identity.rank, deliver=self._delivered)

    @property
    def rank(self) -> int:
        return self._identity.rank

    def offer(self, key: str, header: bytes, buffers: Sequence[memoryview], *, timeout_s: float) -> None:
        self._offers.put(key, header, buffers, deadline=Deadline(timeout_s))

    def withdraw(self, key: str, *, timeout_s: float) -> None:
        self._offers.withdraw(key, deadline=Deadline(timeout_s))

    def describe(self, peer: int, key: str, *, timeout_s: float) -> tuple[bytes, tuple[int, ...]]:
        deadline, call = Deadline(timeout_s), uuid.uuid4().hex
        with self.replies(call) as replies:
            self._ask(peer, call, "describe", deadline, key=key)
            answer = hear(replies, peer, deadline)
        return header_of(answer, peer), sizes_from(answer, peer)

    def fetch(
        self, peer: int, key: str, buffers: Sequence[memoryview], *, offset: int, length: int, timeout_s: float
    ) -> None:
        views = [flat(buffer) for buffer in buffers]
        check_room(views, list(map(len, views)))
        deadline, call = Deadline(timeout_s), uuid.uuid4().hex
        with self.lending.lend(peer, "", call, views) as addresses, self.replies(call) as replies:
            where = {"offset": offset, "length": length, "sizes": list(map(len, views)), "addresses": addresses}
            self._ask(peer, call, "fetch", deadline, key=key, **where)
            hear(replies, peer, deadline)

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
        deadline, call = Deadline(timeout_s), uuid.uuid4().hex
        check_header(header)
        encoded = base64.b64encode(header).decode()
        with self.replies(call) as replies:
            self._ask(peer, call, "push", deadline, sizes=list(map(len, views)), header=encoded)
            try:
                answer = hear(replies, peer, deadline)
            except FlashpointError:
                self._ended(peer, call)
                raise
            self._write(peer, call, answer, views, deadline, progress)
            self.reply(peer, call, ok=True)
            hear(replies, peer, deadline)

    def receive(self, *, timeout_s: float) -> MooncakeIncoming | None:
        deadline = Deadline(timeout_s)
        while True:
            try:
                incoming = self._inbox.get(timeout=deadline.remaining_s)
            except queue.Empty:
                return None
            if incoming is None:
                # the mark of close() stays for whoever asks next
                self._inbox.put(None)
            if incoming is None or not self.lending.given_up(incoming.call):
                return incoming

    def close(self, *, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, threads = list(self._replies.values()), list(self._threads)
        self._inbox.put(None)
        for replies in waiting:
            replies.put(_CLOSED)
        self._mailbox.close(timeout_s=deadline.remaining_s)
        for thread in threads:
            thread.join(deadline.remaining_s)

    @contextmanager
    def replies(self, call: str) -> Iterator[Replies]:
        """Where the peer's messages about ``call`` arrive while the context lasts."""
        replies: Replies = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                raise PeerError("the transport is closed", rank=self.rank)
            self._replies[call] = replies
        try:
            yield replies
        finally:
            with self._lock:
                del self._replies[call]

    def reply(self, peer: int, call: str, **fields: Any) -> None:
        """Tell ``peer`` something about ``call``."""
        self._mailbox.post(peer, {"kind": "reply", "call": call, "session": self._engine.session, **fields})

    def _ask(self, peer: int, call: str, operation: str, deadline: Deadline, **fields: Any) -> None:
        message = {"kind": "ask", "call": call, "op": operation, "identity": self._identity.to_record(), **fields}
        self._mailbox.post(
            peer, {**message, "session": self._engine.session, "timeout_s": max(0.001, deadline.remaining_s)}
        )

    def _ended(self, peer: int, call: str) -> None:
        try:
            self._mailbox.post(peer, {"kind": "ended", "call": call})
        except ReplicationError as error:
            _log.debug("rank %d was not told that a transfer ended: %s", peer, error)

    def _write(
        self,
        peer: int,
        call: str,
        answer: Mapping[str, Any],
        views: Sequence[memoryview],
        deadline: Deadline,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Write ``views`` where the peer's answer says. After a failure a thread stays until the engine lets go."""
        try:
            addresses = addresses_of(answer, len(views), peer)
            regions = self._engine.register(views)
        except FlashpointError:
            self._ended(peer, call)
            raise
        writing = self._engine.write(str(answer.get("session")), views, addresses)

        def drain() -> None:
            if writing.ended(_DRAIN_S):
                self._engine.release(regions)
                self._ended(peer, call)

        try:
            writing.run(peer, deadline, progress)
        except BaseException:
            self._start(drain)
            raise
        self._engine.release(regions)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="mlflashpoint-mooncake", daemon=True)
        with self._lock:
            self._threads = {other for other in self._threads if other.is_alive()}
            self._threads.add(thread)
            thread.start()

    def _delivered(self, message: Mapping[str, Any]) -> None:
        kind, call = message.get("kind"), message.get("call")
        if not isinstance(call, str):
            return
        if kind == "reply":
            with self._lock:
                replies = self._replies.get(call)
            if replies is not None:
                replies.put(message)
        elif kind == "ended":
            self.lending.ended(call)
        elif kind == "ask":
            self._asked(message, call)

    def _asked(self, message: Mapping[str, Any], call: str) -> None:
        try:
            peer = Identity.from_record(message.get("identity"))
            self.lending.seen(peer.rank, str(message.get("session")))
            self._identity.check(peer)
        except PeerError as error:
            if error.rank is not None:
                self.reply(error.rank, call, ok=False, refused=True, error=str(error)[:1000])
            return
        if message.get("op") == "push":
            self._inbox.put(MooncakeIncoming(self, message, peer.rank))
        else:
            self._start(self._serve, message, call, peer.rank)

    def _serve(self, message: Mapping[str, Any], call: str, peer: int) -> None:
        try:
            with self._offers.reading(str(message.get("key"))) as offer:
                if message.get("op") == "describe":
                    header = base64.b64encode(offer.header).decode()
                    self.reply(peer, call, ok=True, sizes=offer.sizes, header=header)
                    return
                check_sizes(offer.buffers, sizes_from(message, peer))
                starts = addresses_of(message, len(offer.buffers), peer)
                views, where = part(offer.buffers, starts, message.get("offset"), message.get("length"))
                deadline = Deadline(float(message["timeout_s"]))
                self._write(peer, call, {**message, "addresses": where}, views, deadline)
            self.reply(peer, call, ok=True)
        except (FlashpointError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, ReplicationError):
                # nothing was written: the peer may use its memory again as soon as it hears of it
                self._ended(peer, call)
            try:
                self.reply(peer, call, ok=False, error=str(error)[:1000])
            except ReplicationError as lost:
                _log.debug("rank %d was not answered: %s", peer, lost)
