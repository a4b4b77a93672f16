"""Tables of what each rank wrote: how the coordinator learns which rank's shard has which item, once per plan.

The coordinator keeps the last whole table of each rank. A rank leaves out the items only if the last whole table that
it sent to that coordinator is this one, and is known to have arrived. Saves overlap: a save's outcome may be known
after later saves have sent theirs, so what is confirmed is the very table that was sent, until the next is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from mlflashpoint.adapter.pytorch.metadata_codec import ChunkKey, chunk_key, encode_metadata
from mlflashpoint.adapter.pytorch.shards import item_name
from mlflashpoint.core.shard import digest_of
from mlflashpoint.errors import PeerError


@dataclass(frozen=True)
class Table:
    """What one rank wrote, told to the coordinator: the items if it may not know them yet, and their digest."""

    rank: int
    digest: str
    items: tuple[ChunkKey, ...] | None


class Sent:
    """A whole table on its way to the coordinator.

    Attributes:
        digest: of the table.
        here: whether this rank is the coordinator itself, of all ranks or of a save of its own.
        arrived: whether it is known to have got there.
    """

    def __init__(self, digest: str, *, here: bool) -> None:
        self.digest = digest
        self.here = here
        self.arrived = False


class Tables:
    """The table of this rank and, on the coordinator, those of all ranks, kept from save to save.

    The training thread describes, the background confirms and doubts, in any order.
    """

    def __init__(self) -> None:
        self._sent: Sent | None = None
        self._written: tuple[SavePlan, list[str], tuple[ChunkKey, ...], str] | None = None
        self._known: dict[int, Table] = {}
        self._encoded: tuple[Metadata, list[str], bytes] | None = None

    def describe(self, plan: SavePlan, rank: int, *, here: bool) -> tuple[list[str], Table, Sent]:
        """The items' names, made once per plan, what to tell the coordinator of them, and what to confirm later.

        Args:
            plan: this rank's final plan.
            rank: this rank.
            here: whether it is the coordinator itself.
        """
        written = self._written
        if written is None or written[0] is not plan:
            keys = tuple(chunk_key(item.index) for item in plan.items)
            names = [item_name(*key) for key in keys]
            written = self._written = plan, names, keys, digest_of(json.dumps(names).encode())
        _, names, keys, digest = written
        sent = self._sent
        if sent is not None and sent.arrived and sent.digest == digest and sent.here == here:
            return names, Table(rank, digest, None), sent
        # From now on what was sent before may not be what the coordinator has.
        sent = self._sent = Sent(digest, here=here)
        return names, Table(rank, digest, keys), sent

    def confirm(self, sent: Sent) -> None:
        """A save that was described with ``sent`` is final, so the coordinator had the table then."""
        sent.arrived = True

    def doubt(self, sent: Sent) -> None:
        """A save that was described with ``sent`` has failed: the next one tells the whole table."""
        if self._sent is sent:
            self._sent = None

    def encode(self, metadata: Metadata, tables: Sequence[Table], *, step: int, path: object) -> bytes:
        """On the coordinator: the metadata with the rank that has each item.

        Args:
            metadata: as DCP's planner made it.
            tables: of all ranks.
            step: of the version, for errors.
            path: its name, for errors.

        Raises:
            PeerError: a rank left out its items, which are not known.
            StateTypeError, ShardFormatError: as ``encode_metadata``.
        """
        for table in tables:
            known = self._known.get(table.rank)
            if table.items is not None:
                self._known[table.rank] = table
            elif known is None or known.digest != table.digest:
                raise PeerError(
                    f"rank {table.rank} wrote items that the coordinator does not know",
                    rank=table.rank,
                    step=step,
                    path=path,
                    remedy="save again, under the next step: the items are then told anew; use one storage writer for "
                    "all saves, on all ranks alike",
                )
        digests = [table.digest for table in tables]
        if self._encoded is not None and self._encoded[0] is metadata and self._encoded[1] == digests:
            return self._encoded[2]
        holders: dict[ChunkKey, int] = {}
        for table in tables:
            for key in self._known[table.rank].items or ():
                holders.setdefault(key, table.rank)
        encoded = encode_metadata(metadata, holders)
        self._encoded = metadata, digests, encoded
        return encoded
