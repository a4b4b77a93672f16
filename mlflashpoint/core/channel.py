"""Rank-to-rank talk: small JSON records, counters and decisions in the job's own c10d Store, under our prefix.

Nothing here waits inside the store: reads of a missing key come back at once, and waiting is polling with a deadline.
Nothing is pickled, and a record has a size cap: beyond 8 MiB a TCPStore drops the connection of whoever wrote.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from mlflashpoint.core.connection import kept
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.errors import PeerError

__all__ = ["Channel", "HashStore", "Store", "poll"]

T = TypeVar("T")

MAX_RECORD_BYTES = 1 << 20
_BATCH = 512
#: compare_set with this as both values reads a key without waiting for it; no JSON text is equal to it
_ABSENT = "\x01"


class Channel:
    """Records, counters and decisions under one prefix of a store.

    Args:
        store: the job's store.
        prefix: what our keys begin with.
        clone: talk on this process's own connection to the store, see ``connection``; else on ``store`` as it is.
        written: where the keys that are written are noted, for ``forget``.

    Every method raises PeerError when the store can't be reached or holds something that is no record of ours.
    """

    def __init__(self, store: Store, prefix: str, *, clone: bool = True, written: set[str] | None = None) -> None:
        if clone:
            store = kept(store)
        self._written = written
        self._base = store
        # Its stub knows neither multi_set nor has_extended_api, which every store of torch 2.4 and later has.
        self._store: Any = PrefixStore(prefix, store)
        self._prefix = prefix

    def under(self, prefix: str) -> Channel:
        """The same connection, with ``prefix`` added."""
        return Channel(self._base, f"{self._prefix}/{prefix}", clone=False, written=self._written)

    def on(self, connection: Store) -> Channel:
        """The same prefix on another connection."""
        return Channel(connection, self._prefix, clone=False, written=self._written)

    def noting(self) -> Channel:
        """The same, which notes what this process writes by it, and by those under it."""
        return Channel(self._base, self._prefix, clone=False, written=set())

    @property
    def connection(self) -> Store:
        """What it talks on."""
        return self._base

    @property
    def store(self) -> Store:
        """The store itself, below this channel's prefix."""
        return PrefixStore(self._prefix, self._base)

    def post(self, key: str, value: Any) -> None:
        self._note(key)
        with self._explained(key):
            self._store.set(key, _encode(key, value))

    def post_many(self, values: Mapping[str, Any]) -> None:
        pairs = [(key, _encode(key, value)) for key, value in values.items()]
        self._note(*values)
        for start in range(0, len(pairs), _BATCH):
            batch = pairs[start : start + _BATCH]
            with self._explained(batch[0][0]):
                if self._store.has_extended_api():
                    self._store.multi_set([key for key, _ in batch], [text for _, text in batch])
                else:
                    for key, text in batch:
                        self._store.set(key, text)

    def read(self, key: str) -> Any | None:
        """The record at ``key``, None if there is none yet; never waits."""
        with self._explained(key):
            data = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if data == _ABSENT.encode() else _decode(key, data)

    def read_many(self, keys: Sequence[str]) -> list[Any]:
        """The records at ``keys``, all of which must be there."""
        values: list[Any] = []
        for start in range(0, len(keys), _BATCH):
            batch = list(keys[start : start + _BATCH])
            with self._explained(batch[0]):
                if not self._store.check(batch):
                    raise KeyError("a record is missing")
                extended = self._store.has_extended_api()
                found = self._store.multi_get(batch) if extended else [self._store.get(key) for key in batch]
            values += [_decode(key, data) for key, data in zip(batch, found, strict=True)]
        return values

    def read_present(self, keys: Sequence[str]) -> list[Any | None]:
        """The records at ``keys``, None for each that is not there yet; never waits."""
        values: list[Any | None] = []
        for start in range(0, len(keys), _BATCH):
            batch = list(keys[start : start + _BATCH])
            with self._explained(batch[0]):
                whole = self._store.check(batch)
            values += self.read_many(batch) if whole else [self.read(key) for key in batch]
        return values

    def add(self, key: str, amount: int = 1) -> int:
        """Add to the counter ``key`` (0 at first) and return its new value."""
        self._note(key)
        with self._explained(key):
            return int(self._store.add(key, amount))

    def decide(self, key: str, proposal: Any) -> Any:
        """Settle ``key`` for all ranks: the first proposal to arrive wins, and every caller is told that one."""
        self._note(key)
        with self._explained(key):
            return _decode(key, self._store.compare_set(key, "", _encode(key, proposal)))

    def delete(self, *keys: str) -> None:
        for key in keys:
            # Housekeeping only: stores without deletion keep a few bytes more.
            with contextlib.suppress(Exception):
                self._store.delete_key(key)

    def delete_later(self, *keys: str) -> None:
        """The same in the background: there may be many, and the store may be gone, which the first of them tells."""
        _delete_later(self._store, keys)

    def forget(self) -> None:
        """Delete what this process has written, as noted, in the background; nobody may want it any more."""
        written, self._written = self._written, set()
        _delete_later(self._base, tuple(written or ()))

    def _note(self, *keys: str) -> None:
        if self._written is not None:
            self._written.update(f"{self._prefix}/{key}" for key in keys)

    @contextlib.contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            # c10d has several error types, among them bare RuntimeError, and texts of many lines with a stack.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PeerError(
                f"the job's store did not answer for {self._prefix}/{key}: {reason}",
                remedy="look whether the process that hosts the job's store (rank 0 or the torchrun agent) is alive",
            ) from error


def _delete_later(store: Any, keys: Collection[str]) -> None:
    def delete() -> None:
        with contextlib.suppress(Exception):
            for key in keys:
                store.delete_key(key)

    if keys:
        threading.Thread(target=delete, name="mlflashpoint-forget", daemon=True).start()


def poll(look: Callable[[], T | None], deadline: Deadline, *, world_size: int) -> T | None:
    """What ``look`` finds, as soon as it is not None; None when the deadline passes first.

    Looks often at first, then rarely, and the more rarely the more ranks ask the same store.
    """
    pause, longest = 0.001, 0.02 + world_size / 40_000
    while True:
        found = look()
        if found is not None or deadline.passed:
            return found
        time.sleep(min(pause, deadline.remaining_s))
        pause = min(pause * 1.5, longest)


def _encode(key: str, value: Any) -> str:
    data = json.dumps(value, separators=(",", ":"))  # ASCII, so its length is its size
    if len(data) > MAX_RECORD_BYTES:
        raise PeerError(f"the record {key} of {len(data)} bytes exceeds {MAX_RECORD_BYTES}")
    return data


def _decode(key: str, data: bytes) -> Any:
    if len(data) > MAX_RECORD_BYTES:
        raise PeerError(f"the record {key} of {len(data)} bytes exceeds {MAX_RECORD_BYTES}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the record {key} is not JSON: {error}") from None
