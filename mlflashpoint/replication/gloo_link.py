"""One link between two ranks: a few gloo pairs that carry one conversation, frame by frame and shard by shard.

How gloo behaves decides the shape of this module (seen with torch 2.4 to 2.14):

- A wait that runs out closes its whole context. So does the peer's end, at once. That is what `close` uses to wake a
  thread blocked in a wait: it posts a receive that can't be met and lets it run out.
- When a connection breaks, a message that is half through is not told, on either end; a receive that is still to
  come is. So each piece of a shard is followed by a mark of one byte, the other end answers with a mark, and
  only marks are ever waited for while bytes are under way.
- A connection that gloo itself gives up is freed while its device still waits for it. If it comes after all, because a
  link that was cut is mended, the process crashes. So gloo is never the first to give up: a lane that does not stand
  at the deadline is left to its thread, which lets go of it when it does, or when the system gives up.
- A message longer than the posted receive aborts the process. So every message is of a length that both ends have
  agreed on before, or that a cap bounds, and nothing is ever received on a link after an error.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo

from mlflashpoint.errors import FlashpointError, PeerError
from mlflashpoint.replication.deadline import Deadline
from mlflashpoint.replication.gloo_device import REMEDY, reason
from mlflashpoint.replication.gloo_exchange import AddressExchange
from mlflashpoint.replication.memory import as_tensor, cut
from mlflashpoint.replication.transport import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

_MAX_RECORD_BYTES = 16 << 10
#: torch's stubs know neither its options nor its constructor with options
_GLOO: Any = ProcessGroupGloo
_FRAME_BYTES = 8 + _MAX_RECORD_BYTES + MAX_HEADER_BYTES
_MARK = bytearray(1)
#: no message ever has this tag
_NEVER = (1 << 30) - 1
_MILLISECOND = timedelta(milliseconds=1)
#: longer than the system goes on trying to connect, five times in a row
_CONNECT = timedelta(hours=1)


class Link:
    """A conversation with one peer over several gloo pairs ("lanes"); one call at a time.

    Args:
        end: 0 for the end that asked for the link, 1 for the other.
        peer: global rank of the other end, for errors.
        exchange: carries the lanes' addresses; the caller brings the peer's.
        devices: gloo devices, one for each lane.
        deadline: end of setting up.
    """

    def __init__(
        self, *, end: int, peer: int, exchange: AddressExchange, devices: Sequence[Any], deadline: Deadline
    ) -> None:
        self.peer = peer
        self._end = end
        self._other = 1 - end
        # gloo holds it as a C++ object only, which is an empty shell once the Python half is collected
        self._exchange = exchange
        self._groups: list[Any] = [None] * len(devices)
        self._errors: list[Exception] = []
        self._tag = 0
        self._closed = False
        self._close_lock = threading.Lock()
        self._out = bytearray(_FRAME_BYTES)
        self._in = bytearray(_FRAME_BYTES)
        self._deadline = deadline
        self._threads = [
            threading.Thread(
                target=self._connect, args=(lane, device), name=f"mlflashpoint-connect-{peer}", daemon=True
            )
            for lane, device in enumerate(devices)
        ]
        for thread in self._threads:
            thread.start()

    def own_addresses(self) -> dict[str, bytes]:
        """What the peer needs to connect; to be carried to it before `connected`. Raises like that."""
        addresses = self._exchange.own_addresses(len(self._groups))
        if len(addresses) < len(self._groups):
            raise self._not_connected()
        return addresses

    def connected(self) -> None:
        """Wait until all lanes stand; raises PeerError or DeadlineExceededError."""
        for thread in self._threads:
            thread.join(self._deadline.remaining_s)
        if not all(self._groups) or self._errors:
            raise self._not_connected()

    def tell(self, record: Mapping[str, Any], payload: bytes = b"", *, deadline: Deadline) -> None:
        """Send a record (plain data, as JSON) and a few opaque bytes."""
        data = json.dumps(record, separators=(",", ":")).encode()
        if len(data) > _MAX_RECORD_BYTES or len(payload) > MAX_HEADER_BYTES:
            raise ValueError(f"a frame of {len(data)} and {len(payload)} bytes is too long")
        size = 8 + len(data) + len(payload)
        self._out[:8] = len(data).to_bytes(4, "big") + len(payload).to_bytes(4, "big")
        self._out[8:size] = data + payload
        with self._talking("word to", deadline) as wait:
            wait(self._send(0, memoryview(self._out)[:size]))

    def hear(self, *, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
        """The peer's next record and bytes; raises PeerError for a malformed one."""
        with self._talking("word from", deadline) as wait:
            wait(self._receive(0, memoryview(self._in)))
        record_size, payload_size = int.from_bytes(self._in[:4], "big"), int.from_bytes(self._in[4:8], "big")
        if record_size > _MAX_RECORD_BYTES or payload_size > MAX_HEADER_BYTES:
            raise self._malformed()
        try:
            record = json.loads(self._in[8 : 8 + record_size])
        except (ValueError, RecursionError):
            raise self._malformed() from None
        if not isinstance(record, dict):
            raise self._malformed()
        return record, bytes(self._in[8 + record_size : 8 + record_size + payload_size])

    def push(
        self,
        buffers: Sequence[memoryview],
        offset: int,
        length: int,
        *,
        deadline: Deadline,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Send the range of the buffers; the peer calls `pull` with buffers of the same sizes and the same range."""
        pieces = self._in_turn(buffers, offset, length)
        marks = [bytearray(1) for _ in pieces]
        with self._talking("progress from", deadline) as wait:
            sent, received = [], []
            for (lane, piece), mark in zip(pieces, marks, strict=True):
                sent += [self._send(lane, piece), self._send(lane, memoryview(_MARK))]
                received.append(self._receive(lane, memoryview(mark)))
            for (_, piece), work in zip(pieces, received, strict=True):
                wait(work)
                if progress is not None:
                    progress(len(piece))
            for work in sent:
                wait(work)

    def pull(self, buffers: Sequence[memoryview], offset: int, length: int, *, deadline: Deadline) -> None:
        """Receive the range of the buffers."""
        pieces = self._in_turn(buffers, offset, length)
        marks = [bytearray(1) for _ in pieces]
        with self._talking("bytes from", deadline) as wait:
            coming, tags = [], []
            for (lane, piece), mark in zip(pieces, marks, strict=True):
                coming.append((self._receive(lane, piece), self._receive(lane, memoryview(mark))))
                tags.append(self._next_tag())
            answers = []
            for (lane, _), tag, (whole, end) in zip(pieces, tags, coming, strict=True):
                wait(end)
                wait(whole)
                answers.append(self._send(lane, memoryview(_MARK), tag))
            for work in answers:
                wait(work)

    def close(self) -> None:
        """Break all lanes, waking whoever waits on them. After it returns no lane touches any buffer."""
        with self._close_lock:
            self._closed = True
            self._exchange.cancel()
            for group in self._groups:
                if group is None:
                    continue
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], self._other, _NEVER).wait(_MILLISECOND)

    @property
    def closed(self) -> bool:
        return self._closed

    def _connect(self, lane: int, device: Any) -> None:
        options: Any = _GLOO._Options()
        options._devices = [device]
        options._threads = 1
        options._timeout = _CONNECT
        try:
            group = _GLOO(PrefixStore(str(lane), self._exchange), self._end, 2, options)
        except Exception as error:
            self._errors.append(error)
            self._exchange.cancel()
            return
        with self._close_lock:
            if not self._closed:
                self._groups[lane] = group

    def _not_connected(self) -> FlashpointError:
        expired = self._deadline.expired
        self.close()
        if expired:
            error: FlashpointError = self._deadline.exceeded(f"connection to rank {self.peer}", rank=self.peer)
            error.remedy = REMEDY
            return error
        why = reason(self._errors[0]) if self._errors else "the link was closed"
        return PeerError(f"rank {self.peer} can't be connected: {why}", rank=self.peer, remedy=REMEDY)

    def _in_turn(self, buffers: Sequence[memoryview], offset: int, length: int) -> list[tuple[int, memoryview]]:
        """The pieces of the range with their lanes, in the order in which they go."""
        lanes = cut(buffers, offset, length, len(self._groups))
        return [
            (lane, pieces[turn])
            for turn in range(max(map(len, lanes), default=0))
            for lane, pieces in enumerate(lanes)
            if turn < len(pieces)
        ]

    def _next_tag(self) -> int:
        # Both ends make the same messages in the same order, whichever way they go, and so count alike.
        self._tag = (self._tag + 1) % _NEVER
        return self._tag

    def _send(self, lane: int, view: memoryview, tag: int | None = None) -> Work:
        tag = self._next_tag() if tag is None else tag
        work: Work = self._groups[lane].send([as_tensor(view)], self._other, tag)
        return work

    def _receive(self, lane: int, view: memoryview) -> Work:
        work: Work = self._groups[lane].recv([as_tensor(view)], self._other, self._next_tag())
        return work

    @contextlib.contextmanager
    def _talking(self, waiting_for: str, deadline: Deadline) -> Iterator[Callable[[Work], None]]:
        """A stretch of conversation; yields how to wait for a message. Any error in it closes the link.

        Raises:
            PeerError: the link is or was closed, or the peer went away.
            DeadlineExceededError: a wait reached the deadline.
        """
        if self._closed:
            raise PeerError(f"the link to rank {self.peer} is closed", rank=self.peer)
        what = f"{waiting_for} rank {self.peer}"

        def wait(work: Work) -> None:
            work.wait(deadline.left(what, rank=self.peer))

        try:
            yield wait
        except BaseException as error:
            expired = deadline.expired
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            if expired:
                raise deadline.exceeded(what, rank=self.peer) from error
            raise PeerError(f"rank {self.peer} went away: {reason(error)}", rank=self.peer) from error

    def _malformed(self) -> PeerError:
        self.close()
        return PeerError(f"rank {self.peer} sent a malformed record", rank=self.peer)
