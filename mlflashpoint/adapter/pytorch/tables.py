"""Tables of what each rank wrote: how the coordinator learns which rank's shard has which item, once per plan."""

from __future__ import annotations

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


class Tables:
    """The table of this rank and, on the coordinator, those of all ranks, kept from save to save.

    Attributes:
        confirmed: digest of the table that the coordinator is known to have.
    """

    def __init__(self) -> None:
        self.confirmed = ""
        self._written: tuple[SavePlan, list[str], tuple[ChunkKey, ...], str] | None = None
        self._known: dict[int, Table] = {}
        self._encoded: tuple[Metadata, list[str], bytes] | None = None

    def describe(self, plan: SavePlan, rank: int) -> tuple[list[str], Table]:
        """The items' names, and what to tell the coordinator of them; made once per plan."""
        written = self._written
        if written is None or written[0] is not plan:
            keys = tuple(chunk_key(item.index) for item in plan.items)
            names = [item_name(*key) for key in keys]
            written = self._written = plan, names, keys, digest_of("\n".join(names).encode())
        _, names, keys, digest = written
        if digest != self.confirmed:
            # The coordinator keeps one table per rank, and this one takes the place of what it has.
            self.confirmed = ""
            return names, Table(rank, digest, keys)
        return names, Table(rank, digest, None)

    def encode(self, metadata: Metadata, tables: Sequence[Table]) -> bytes:
        """On the coordinator: the metadata with the rank that has each item.

        Raises:
            PeerError: a rank left out its items, which are not known.
            StateTypeError, ShardFormatError: as ``encode_metadata``.
        """
        for table in tables:
            known = self._known.get(table.rank)
            if table.items is not None:
                self._known[table.rank] = table
            elif known is None or known.digest != table.digest:
                raise PeerError(f"rank {table.rank} wrote items that the coordinator does not know", rank=table.rank)
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
