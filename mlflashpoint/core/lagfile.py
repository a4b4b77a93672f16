"""How far a rank's replicas are behind, in one small file on its seat, for ``mlflashpoint status`` to read."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

from mlflashpoint.core.files import replace_file
from mlflashpoint.replication.delivery import ReplicationLag

LAG_FILE = "replication.json"
_MAX_BYTES = 64 << 10
_MAX_ERROR = 1000


@dataclass(frozen=True)
class SeatLag:
    """What a rank has last told of its replicas.

    Attributes:
        rank: its global rank.
        replicas: replicas that each of its shards should have.
        told_s: when, in seconds since the epoch.
        bytes_outstanding: bytes that holders had not taken then.
        since_s: when the oldest shard that is still on its way was committed, 0 for none.
        acknowledged, failed: shards that all holders acknowledged, and shards that some did not.
        received, refused: shards of other ranks that were taken in, and that were not.
        last_error: in one line, empty for none.
    """

    rank: int
    replicas: int
    told_s: float
    bytes_outstanding: int
    since_s: float
    acknowledged: int
    failed: int
    received: int
    refused: int
    last_error: str

    @classmethod
    def of(cls, lag: ReplicationLag, *, rank: int, replicas: int) -> SeatLag:
        now = time.time()
        return cls(
            rank=rank,
            replicas=replicas,
            told_s=now,
            bytes_outstanding=lag.bytes_outstanding,
            since_s=now - lag.age_s if lag.shards_outstanding else 0.0,
            acknowledged=lag.acknowledged,
            failed=lag.failed,
            received=lag.received,
            refused=lag.refused,
            last_error=lag.last_error[:_MAX_ERROR],
        )

    def write(self, seat: Path) -> None:
        """Replace what is there; raises OSError."""
        replace_file(seat / LAG_FILE, json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def read(cls, seat: Path) -> SeatLag | None:
        """What the seat's rank has told; None if nothing that can be read."""
        try:
            with open(seat / LAG_FILE, "rb") as stream:
                raw = json.loads(stream.read(_MAX_BYTES))
            found = cls(**raw)
            if all(type(getattr(found, field.name)).__name__ in (field.type, "int") for field in _FIELDS):
                return found
        except (OSError, ValueError, TypeError, RecursionError):
            pass
        return None


_FIELDS = dataclasses.fields(SeatLag)
