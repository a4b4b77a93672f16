"""A replica sink in plain memory, for the replication tests."""

from __future__ import annotations

import threading

import xxhash

from mlflashpoint.errors import ShardCorruptError, StoreFullError
from mlflashpoint.replication.delivery import OutgoingShard


def shard(data: bytes, *, step: int = 1, digest: str | None = None) -> OutgoingShard:
    """A shard of two buffers whose header carries a digest, right or wrong."""
    header = f"{step}:{xxhash.xxh3_64_hexdigest(data) if digest is None else digest}".encode()
    view = memoryview(data)
    return OutgoingShard(header, [view[: len(data) // 3], view[len(data) // 3 :]], step=step)


def check(header: bytes, buffers) -> None:
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        hasher.update(buffer)
    if hasher.hexdigest() != header.decode().split(":")[1]:
        raise ShardCorruptError("digest differs")


class MemorySink:
    """Keeps the newest replica of each rank; ``room`` bytes at most for one shard."""

    def __init__(self, room: int = 1 << 40):
        self.room = room
        self.replicas: dict[int, tuple[bytes, bytes]] = {}
        self.abandoned: list[tuple[int, str]] = []
        self.changed = threading.Condition()

    def allocate(self, source, header, sizes):
        if sum(sizes) > self.room:
            raise StoreFullError(f"need {sum(sizes)} and have {self.room} bytes")
        with self.changed:
            self.replicas.pop(source, None)
        return [memoryview(bytearray(size)) for size in sizes]

    def commit(self, source, header, buffers):
        check(header, buffers)
        with self.changed:
            self.replicas[source] = (header, b"".join(buffers))
            self.changed.notify_all()

    def abandon(self, source, header, error):
        self.abandoned.append((source, type(error).__name__))
