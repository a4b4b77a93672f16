"""What a transport owes the replicator: move a shard's bytes between the memory of two ranks, or fail in time.

A shard on the wire is a header (opaque bytes, a commit record) and a few buffers (index and data). A transport copies
straight between the buffers it is given; it keeps no copy and knows nothing of what the bytes mean.

Rules for every implementation, checked by one conformance suite:

- Every call has a deadline. A peer that dies, stalls or restarts is a `PeerError` or a `DeadlineExceededError` no later
  than that, and the next call to the same peer starts afresh.
- After a call has returned or raised, the transport touches the buffers of that call no more.
- Any rank may send to and fetch from any other at any time; crossing transfers do not wait for each other.
- A peer of another protocol version, job, group or incarnation is refused with a `PeerError` that names the difference.
- Nothing that arrives is unpickled, and nothing that arrives chooses where it is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlflashpoint.errors import PeerError, ReplicationError

#: raised when what goes over the wire changes; peers of different versions refuse each other
PROTOCOL_VERSION = 1

#: most buffers that a shard may have
MAX_BUFFERS = 64

#: largest header of a shard in bytes
MAX_HEADER_BYTES = 96 << 10


@dataclass(frozen=True)
class Identity:
    """Who a peer is; two peers talk only if all but ``rank`` is equal.

    Attributes:
        job_id: the job.
        group: the set of ranks that save together.
        incarnation: start of the job.
        rank: global rank within the group.
        protocol: version of what goes over the wire.
    """

    job_id: str
    group: str
    incarnation: int
    rank: int
    protocol: int = PROTOCOL_VERSION

    def check(self, other: Identity) -> None:
        """Raises PeerError, naming the field, if ``other`` is not of the same protocol, job, group and incarnation."""
        for name in ("protocol", "job_id", "group", "incarnation"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise PeerError(
                    f"rank {other.rank} has {name} {theirs!r} and rank {self.rank} has {mine!r}",
                    rank=other.rank,
                    remedy="run the same mlflashpoint release and one job per base container and store",
                )

    def to_record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: object) -> Identity:
        """Raises PeerError unless ``record`` is a well-formed identity."""
        kinds = {"job_id": str, "group": str, "incarnation": int, "rank": int, "protocol": int}
        if not isinstance(record, Mapping) or any(type(record.get(name)) is not kind for name, kind in kinds.items()):
            raise PeerError("a peer introduced itself with a malformed record")
        return cls(**{name: record[name] for name in kinds})


class Incoming(Protocol):
    """A shard that a peer wants to send here. Exactly one of `acknowledge` and `refuse` ends it.

    Attributes:
        source: rank of the sender.
        header: the shard's header.
        sizes: lengths of its buffers in bytes.
    """

    source: int
    header: bytes
    sizes: tuple[int, ...]

    def accept(self, buffers: Sequence[memoryview], *, timeout_s: float) -> None:
        """Receive all bytes into ``buffers``, whose lengths must be ``sizes``."""

    def acknowledge(self, *, timeout_s: float) -> None:
        """Tell the sender that the replica is stored and was checked."""

    def refuse(self, error: Exception, *, timeout_s: float) -> None:
        """Tell the sender why there is no replica: before `accept`, or after it when the check failed."""


class Transport(Protocol):
    """Moves shards between ranks. All methods may be called from any thread.

    Errors of every call: `DeadlineExceededError` at the deadline; `PeerError` when the peer went away or is of another
    job; `ReplicationError` when it answered that it can't or won't; each names the peer's rank.
    """

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    def offer(self, key: str, header: bytes, buffers: Sequence[memoryview], *, timeout_s: float) -> None:
        """Let any peer fetch the shard under ``key`` until it is withdrawn; replaces an earlier offer of that key."""

    def withdraw(self, key: str, *, timeout_s: float) -> None:
        """End an offer; when this returns nobody reads its buffers any more. No error if there is none."""

    def describe(self, peer: int, key: str, *, timeout_s: float) -> tuple[bytes, tuple[int, ...]]:
        """Header and buffer lengths of what ``peer`` offers under ``key``."""

    def fetch(
        self, peer: int, key: str, buffers: Sequence[memoryview], *, offset: int, length: int, timeout_s: float
    ) -> None:
        """Read the bytes ``[offset, offset + length)`` of an offer into the same place of ``buffers``.

        Offsets count over the buffers laid end to end; ``buffers`` have the lengths that `describe` told.
        """

    def send(
        self,
        peer: int,
        header: bytes,
        buffers: Sequence[memoryview],
        *,
        timeout_s: float,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Send a shard; returns once the peer has acknowledged it. ``progress`` is told of bytes that have left."""

    def receive(self, *, timeout_s: float) -> Incoming | None:
        """The next shard that a peer wants to send here; None if nobody did in time, or after `close`."""

    def close(self, *, timeout_s: float) -> None:
        """End all calls in progress with an error and release everything."""


def total_bytes(buffers: Sequence[memoryview]) -> int:
    return sum(len(buffer) for buffer in buffers)


def check_header(header: bytes) -> None:
    """Raises ReplicationError if the header of a shard is longer than `MAX_HEADER_BYTES`."""
    if len(header) > MAX_HEADER_BYTES:
        raise ReplicationError(f"a shard's header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")


def sizes_from(record: Mapping[str, Any], peer: int) -> tuple[int, ...]:
    """The buffer lengths in a peer's record; raises PeerError if they are malformed."""
    sizes = record.get("sizes")
    if (
        not isinstance(sizes, list)
        or len(sizes) > MAX_BUFFERS
        or any(type(size) is not int or not 0 <= size < 1 << 62 for size in sizes)
    ):
        raise PeerError(f"rank {peer} sent malformed buffer sizes", rank=peer)
    return tuple(sizes)


def check_room(buffers: Sequence[memoryview], sizes: Sequence[int]) -> None:
    """Raises ReplicationError unless the buffers have exactly these lengths and can be written to."""
    check_sizes(buffers, sizes)
    if any(buffer.readonly for buffer in buffers):
        # the engines write to bare addresses: into a read-only mapping that would kill the process
        raise ReplicationError("buffers that are read-only can't take a shard")


def check_sizes(buffers: Sequence[memoryview], sizes: Sequence[int]) -> None:
    """Raises ReplicationError unless the buffers have exactly these lengths."""
    given = [len(buffer) for buffer in buffers]
    if given != list(sizes):
        raise ReplicationError(f"buffers of {given} bytes can't take a shard of {list(sizes)} bytes")
