"""How two ranks come to a gloo link: one knocks at the other's mailbox, with the addresses of its lanes.

The one that was asked checks who knocks, starts its own lanes, and answers with their addresses or with its refusal.
Two messages, five operations on the store each, and both ends connect.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlflashpoint.errors import FlashpointError, PeerError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.gloo_device import REMEDY
from mlflashpoint.replication.gloo_exchange import AddressExchange
from mlflashpoint.replication.gloo_link import Link
from mlflashpoint.replication.mailbox import Mailbox
from mlflashpoint.replication.transport import Identity

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger("mlflashpoint.replication")

#: first time to look whether a dead sender left a gap before our message; doubled each time
_UNBLOCK_AFTER_S = 10.0


class _Knock:
    """A knock that waits for its answer; None means that the rendezvous was closed."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.answer: Mapping[str, Any] | None = None


class Rendezvous:
    """Builds links to peers, and with peers that ask for one.

    Args:
        store: the job's store under a prefix of the transport's own.
        identity: who this rank is.
        devices: gloo devices, one for each lane of a link.
        listens_on: what the devices listen on: an address, or interface names.
        connect_timeout_s: longest time spent on a link that a peer asked for.
        accepted: called with every link that a peer asked for, in a thread of its own that may serve it until it ends.

    Raises:
        ReplicationError: the store can't be reached.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        devices: Sequence[Any],
        listens_on: str,
        connect_timeout_s: float,
        accepted: Callable[[Link], None],
    ) -> None:
        self._identity = identity
        self._devices = devices
        self._listens_on = listens_on
        self._connect_timeout_s = connect_timeout_s
        self._accepted = accepted
        self._lock = threading.Lock()
        self._closed = False
        self._knocks: dict[str, _Knock] = {}
        self._threads: set[threading.Thread] = set()
        self._mailbox = Mailbox(store, rank=identity.rank, deliver=self._delivered)

    def connect(self, peer: int, *, deadline: Deadline) -> Link:
        """A new link to ``peer``, which serves it.

        Raises:
            PeerError: the peer is of another job or version, or can't be connected.
            DeadlineExceededError: no answer in time.
            ReplicationError: the store is gone.
        """
        token, knock = uuid.uuid4().hex, _Knock()
        with self._lock:
            devices = self._usable_devices()
            self._knocks[token] = knock
        exchange = AddressExchange(deadline)
        link = Link(end=0, peer=peer, exchange=exchange, devices=devices, deadline=deadline)
        try:
            hello = {**self._introduction(), "kind": "knock", "link": token, "timeout_s": deadline.remaining_s}
            number = self._mailbox.post(peer, {**hello, "addresses": _encoded(link.own_addresses())})
            answer = self._await(knock, peer, number, deadline)
            self._check_reachable(answer, peer)
            exchange.add_peer(_addresses(answer, peer))
            link.connected()
            link.tell({"link": token}, deadline=deadline)
        except BaseException:
            link.close()
            raise
        finally:
            with self._lock:
                self._knocks.pop(token, None)
        return link

    def close(self, *, timeout_s: float) -> None:
        """End all waits for an answer, and join the threads of accepted links, which the caller has closed."""
        deadline = Deadline(timeout_s)
        with self._lock:
            self._closed = True
            knocks, threads = list(self._knocks.values()), list(self._threads)
        for knock in knocks:
            knock.answered.set()
        self._mailbox.close(timeout_s=deadline.remaining_s)
        for thread in threads:
            thread.join(deadline.remaining_s)
        # Their ports are given back as soon as nobody holds them.
        with self._lock:
            self._devices = ()

    def _usable_devices(self) -> Sequence[Any]:
        """With the lock held; raises PeerError."""
        if self._closed:
            raise PeerError("the transport is closed", rank=self._identity.rank)
        return self._devices

    def _await(self, knock: _Knock, peer: int, number: int, deadline: Deadline) -> Mapping[str, Any]:
        patience = _UNBLOCK_AFTER_S
        while not knock.answered.wait(min(patience, deadline.remaining_s)):
            if deadline.expired:
                raise deadline.exceeded(f"answer from rank {peer}", rank=peer)
            self._mailbox.unblock(peer, number)
            patience *= 2
        if knock.answer is None:
            raise PeerError("the transport was closed", rank=self._identity.rank)
        if knock.answer.get("ok") is not True:
            raise PeerError(f"rank {peer} refused: {knock.answer.get('error')}", rank=peer)
        return knock.answer

    def _introduction(self) -> dict[str, Any]:
        return {
            "identity": self._identity.to_record(),
            "host": socket.gethostname(),
            "listens_on": self._listens_on,
        }

    def _check_reachable(self, message: Mapping[str, Any], peer: int) -> None:
        """Refuse at once what would only run into the deadline: one end on loopback, the other on another host."""
        host = message.get("host")
        if host == socket.gethostname():
            return
        for who, where in ((peer, message.get("listens_on")), (self._identity.rank, self._listens_on)):
            if _is_loopback(where):
                raise PeerError(
                    f"rank {who} listens on {where}, which no other host reaches; rank {peer} runs on host {host!r}",
                    rank=peer,
                    remedy=REMEDY,
                )

    def _delivered(self, message: Mapping[str, Any]) -> None:
        kind, token = message.get("kind"), message.get("link")
        if not isinstance(token, str):
            return
        if kind == "answer":
            with self._lock:
                knock = self._knocks.get(token)
            if knock is not None:
                knock.answer = message
                knock.answered.set()
        elif kind == "knock":
            thread = threading.Thread(target=self._open, args=(message, token), name="mlflashpoint-link", daemon=True)
            with self._lock:
                if self._closed:
                    return
                self._threads = {other for other in self._threads if other.is_alive()}
                self._threads.add(thread)
                # under the lock, so that close() never joins a thread that has not been started
                thread.start()

    def _open(self, message: Mapping[str, Any], token: str) -> None:
        link: Link | None = None
        try:
            source = _source(message)
            try:
                deadline = Deadline(min(self._connect_timeout_s, float(message.get("timeout_s", 0.0))))
                link = self._answer(message, token, source, deadline)
            except FlashpointError as error:
                answer = {"kind": "answer", "link": token, "ok": False, "error": str(error)[:1000]}
                self._mailbox.post(source, answer)
                raise
            if link.hear(deadline=deadline)[0].get("link") != token:
                raise PeerError("a link came from somebody else than the rank that asked for it", rank=source)
            self._accepted(link)
        except (FlashpointError, ValueError, TypeError) as error:
            _log.debug("rank %d gave up a link that a peer had asked for: %s", self._identity.rank, error)
        finally:
            if link is not None:
                link.close()

    def _answer(self, message: Mapping[str, Any], token: str, source: int, deadline: Deadline) -> Link:
        self._identity.check(Identity.from_record(message.get("identity")))
        self._check_reachable(message, source)
        with self._lock:
            devices = self._usable_devices()
        exchange = AddressExchange(deadline)
        exchange.add_peer(_addresses(message, source))
        link = Link(end=1, peer=source, exchange=exchange, devices=devices, deadline=deadline)
        try:
            answer = {**self._introduction(), "kind": "answer", "link": token, "ok": True}
            self._mailbox.post(source, {**answer, "addresses": _encoded(link.own_addresses())})
            link.connected()
        except BaseException:
            link.close()
            raise
        return link


def _source(message: Mapping[str, Any]) -> int:
    identity = message.get("identity")
    rank = identity.get("rank") if isinstance(identity, Mapping) else None
    if type(rank) is not int or rank < 0:
        raise PeerError("a peer knocked without a rank")
    return rank


def _encoded(addresses: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in addresses.items()}


def _addresses(message: Mapping[str, Any], peer: int) -> dict[str, bytes]:
    try:
        return {str(key): base64.b64decode(value, validate=True) for key, value in message["addresses"].items()}
    except (KeyError, AttributeError, TypeError, binascii.Error):
        raise PeerError(f"rank {peer} sent malformed addresses", rank=peer) from None


def _is_loopback(where: object) -> bool:
    try:
        return ipaddress.ip_address(str(where)).is_loopback
    except ValueError:
        return where == "lo"
