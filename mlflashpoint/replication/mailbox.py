"""Small messages from rank to rank through the job's own c10d store.

A receiver blocks in one native wait on its next message, so an idle rank costs the store nothing, whatever the
size of the job. Messages are JSON. They set up links and carry refusals; bytes of shards never go this way.

Store layout, all under the prefix of the store that is handed in::

    box/<rank>/count    messages ever posted to <rank>; gives each its number
    box/<rank>/read     messages that <rank> has read
    box/<rank>/<n>      message n, deleted once it is read
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mlflashpoint.errors import ReplicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger("mlflashpoint.replication")

MAX_MESSAGE_BYTES = 192 << 10
_CLOSE: dict[str, Any] = {"kind": "close"}
#: a native wait that runs out makes c10d write warnings to stderr, so it is long; a message ends it at close
_WAIT = timedelta(hours=12)
_LOOK_EVERY_S = 0.5
_HOLE = b"{}"
_LOOK_BACK = 64


class Mailbox:
    """The messages of one rank.

    Args:
        store: the job's store under a prefix of our own. Calls on it must stay short; the blocking wait uses another
            connection.
        rank: this process's global rank.
        deliver: called in the mailbox's thread with every message; must not block.

    Raises:
        ReplicationError: the store can't be reached.
    """

    def __init__(self, store: Store, *, rank: int, deliver: Callable[[Mapping[str, Any]], None]) -> None:
        self._store = store
        self._rank = rank
        self._deliver = deliver
        self._closed = False
        self._wake = threading.Event()
        self._lost: Exception | None = None
        try:
            # A connection of its own, so that the blocking wait holds up nobody else. Before torch 2.8 a store can't be
            # cloned: the thread looks into the box instead.
            self._waiter = store.clone() if hasattr(store, "clone") else None
            # 1, or where a predecessor of this rank, on the same store, stopped reading
            self._next = int(store.add(f"box/{rank}/read", 0)) + 1
        except RuntimeError as error:
            raise _store_gone(error) from error
        self._thread = threading.Thread(target=self._run, name="mlflashpoint-mailbox", daemon=True)
        self._thread.start()

    def post(self, rank: int, message: Mapping[str, Any]) -> int:
        """Send ``message`` to ``rank``; returns its number in that rank's box.

        Raises:
            ReplicationError: the message is too long or the store is gone.
        """
        if self._lost is not None:
            raise _store_gone(self._lost)
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ReplicationError(f"a message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}", rank=rank)
        try:
            number = int(self._store.add(f"box/{rank}/count", 1))
            self._store.set(f"box/{rank}/{number}", data.decode())
        except RuntimeError as error:
            raise _store_gone(error) from error
        return number

    def unblock(self, rank: int, number: int) -> None:
        """Fill gaps before message ``number`` in the box of ``rank``.

        A rank that is killed between taking a number and storing its message would block its receiver for good. A
        sender that gets no answer calls this. A message that is merely late overwrites the filler, or its sender tries
        again. Numbers that were read long ago get a filler too, which nobody looks at.
        """
        try:
            for n in range(max(1, number - _LOOK_BACK), number):
                self._store.compare_set(f"box/{rank}/{n}", "", _HOLE.decode())
        except RuntimeError as error:
            raise _store_gone(error) from error

    def close(self, *, timeout_s: float) -> None:
        """Stop delivering; the thread is left to the store's own timeout only if the store does not answer."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        try:
            self.post(self._rank, _CLOSE)
        except ReplicationError:
            _log.debug("the store was gone before the mailbox of rank %d closed", self._rank)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed:
            try:
                data = self._read(f"box/{self._rank}/{self._next}")
            except RuntimeError as error:
                self._lost = error
                _log.debug("the mailbox of rank %d lost the store: %s", self._rank, error)
                return
            if data is None:
                continue
            self._next += 1
            message = _parse(data)
            if message is None or message == _CLOSE:
                continue
            try:
                self._deliver(message)
            except Exception:
                # the thread outlives a fault in one message's handling: every later peer depends on it
                _log.exception("a message to rank %d could not be handled", self._rank)

    def _read(self, key: str) -> bytes | None:
        """The message under ``key``; None if the wait ran out."""
        if self._waiter is None:
            if not self._store.check([key]):
                self._wake.wait(_LOOK_EVERY_S)
                return None
        else:
            started = time.monotonic()
            try:
                self._waiter.wait([key], _WAIT)
            except RuntimeError:
                if time.monotonic() - started < _WAIT.total_seconds() / 2:
                    raise
                return None
        store = self._waiter or self._store
        data = bytes(store.get(key))
        # In this order: a successor may read a message twice, but never waits for one that is gone.
        store.add(f"box/{self._rank}/read", 1)
        store.delete_key(key)
        return data


def _parse(data: bytes) -> Mapping[str, Any] | None:
    if len(data) > MAX_MESSAGE_BYTES:
        return None
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and message else None


def _store_gone(error: Exception) -> ReplicationError:
    first_line = (str(error).splitlines() or [""])[0]
    return ReplicationError(
        f"the job's store does not answer: {first_line}", remedy="look whether the process that hosts it (rank 0) lives"
    )
