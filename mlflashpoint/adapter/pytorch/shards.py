"""The shards of one version as a reader of DCP checkpoints needs them: any rank's, opened when first asked for."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mlflashpoint.adapter.pytorch.checked_copies import Stored
from mlflashpoint.adapter.pytorch.metadata_codec import VersionMetadata, decode_metadata
from mlflashpoint.core.arena import read_record
from mlflashpoint.core.node_versions import plan_on_node, split_version
from mlflashpoint.core.onlooker import Finder
from mlflashpoint.core.plan import VersionKey
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.record import ShardRecord
from mlflashpoint.core.recovery import Recovery
from mlflashpoint.core.standard_leaves import LONG
from mlflashpoint.errors import (
    ContainerError,
    FlashpointError,
    NoVersionError,
    ShardCorruptError,
    ShardFormatError,
)

#: name in a shard's attributes of what this adapter keeps there
ATTRIBUTE = "dcp"
_MAX_METADATA_BYTES = 1 << 30
_PIECE = LONG - 1


class Shards:
    """Reads the shards of one version.

    Args:
        version: which one.
        open_shard: rank -> reader.

    Attributes:
        version: which one.
        step: training step of the version.
        world_size: ranks that saved it.
        topology: parallel layout that it was saved with.
    """

    def __init__(self, version: VersionKey, open_shard: Callable[[int], ShardReader]) -> None:
        self.version = version
        self.step = version.step
        self.world_size = version.world_size
        self.topology = version.topology
        self._open_shard = open_shard
        self._readers: dict[int, ShardReader] = {}
        self._items: dict[int, dict[str, Stored]] = {}
        self._metadata: VersionMetadata | None = None

    @classmethod
    def recovered(cls, finder: Finder, recovery: Recovery) -> Shards:
        """Of a version that all ranks found together; a shard may lie on any node."""
        return cls(recovery.version, lambda rank: finder.load_shard(recovery, rank))

    @classmethod
    def on_node(cls, version: str, group: str, *, job_id: str | None = None) -> Shards:
        """Of a version of the group, by its id, that lies whole in this node's memory.

        Raises:
            CheckpointIdError: that is no version's name, or none of the group's.
            NoVersionError, ContainerError, ForeignContainerError: as ``plan_on_node``.
        """
        base, step = split_version(version, group)
        plan = plan_on_node(base, group, step, job_id=job_id)
        assert plan.version is not None

        def open_shard(rank: int) -> ShardReader:
            problem: FlashpointError | None = None
            for copy in plan.sources.get(rank, ()):
                try:
                    return _opened(Path(base) / copy.slot, copy.record)
                except FlashpointError as error:
                    problem = problem or error
            raise problem or NoVersionError(f"no rank {rank} saved step {step}", path=base, step=step)

        return cls(plan.version, open_shard)

    def reader(self, rank: int) -> ShardReader:
        found = self._readers.get(rank)
        if found is None:
            found = self._readers[rank] = self._open_shard(rank)
        return found

    def stored(self, rank: int, item: str) -> Stored:
        """The stored tensor of an item in rank's shard; raises ShardFormatError if the shard does not hold it."""
        found = self._items_of(rank).get(item)
        if found is None:
            raise ShardFormatError(
                f"the shard of rank {rank} does not hold {item!r}",
                rank=rank,
                step=self.step,
                path=self.reader(rank).path,
            )
        return found

    def view(self, rank: int, item: str) -> Tensor:
        """The same where it lies, not checked; valid until ``close``."""
        return self.stored(rank, item).view()

    def _items_of(self, rank: int) -> dict[str, Stored]:
        """The shard's items, and what the store has of each."""
        items = self._items.get(rank)
        if items is None:
            # A shard's state is one flat dictionary, so that its keys and its tensor nodes go in step.
            reader = self.reader(rank)
            index = reader.index
            pairs = zip(index.skeleton.keys, index.skeleton.refs, strict=True)
            items = self._items[rank] = {str(key): Stored(reader, index.tensors[ref]) for key, ref in pairs}
        return items

    def attribute(self, rank: int) -> dict[str, Any]:
        """What this adapter attached to rank's shard; raises ShardFormatError if another one saved it."""
        found = self.reader(rank).attributes.get(ATTRIBUTE)
        if not isinstance(found, dict):
            raise ShardFormatError(
                "the version was not saved through torch.distributed.checkpoint",
                step=self.step,
                path=self.reader(rank).path,
                remedy="load it with the adapter that saved it",
            )
        return found

    def side_file(self, rank: int, name: str) -> bytes | None:
        """A small file that rank's shard carries, checked, None if it does not; raises FlashpointError."""
        key = side_file_key(name)
        stored = self._items_of(rank).get(key)
        if stored is None:
            return None
        content = stored.view().numpy().tobytes()
        if not stored.is_intact(content):
            self.confirm([stored])
        return content

    def metadata(self, rank: int) -> VersionMetadata:
        """DCP's description of the version, from the shard of ``rank``; raises ShardFormatError."""
        if self._metadata is None:
            pieces = self.attribute(rank).get("metadata")
            if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
                raise ShardFormatError("the shard has no DCP metadata", step=self.step, path=self.reader(rank).path)
            self._metadata = decode_metadata(unpack("".join(pieces)))
        return self._metadata

    def confirm(self, bad: Sequence[Stored] = ()) -> None:
        """Make sure, after copying, that what was copied is the version.

        Args:
            bad: stored tensors whose bytes were not those that were saved.

        Raises:
            NoVersionError: the job has meanwhile begun to overwrite the version.
            ShardCorruptError: it has not, and there are bad ones.
        """
        for reader in self._readers.values():
            if reader.path is not None and read_record(reader.path) != reader.record:
                raise _overwritten(reader.path, self.step)
        if bad:
            first = bad[0]
            raise ShardCorruptError(
                f"tensor {first.entry.name!r} has not the digest that was saved ({len(bad)} of those read are bad)",
                rank=first.reader.record.rank,
                step=self.step,
                path=first.reader.path,
                remedy="ask for the newest version again (latest): another copy, or an older version, is then found",
            )

    def close(self) -> None:
        """Let go of the slots, which may be overwritten from now on."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._items.clear()


def _opened(slot: Path, record: ShardRecord) -> ShardReader:
    """A reader of the slot if it still holds the shard of ``record``, with good digests.

    Raises:
        NoVersionError: it does not hold it any more.
        ShardFormatError, ShardCorruptError, ContainerError: it is damaged, or can't be read.
    """
    try:
        reader = ShardReader.open(slot)
        if reader.record != record:
            raise _overwritten(slot, record.step)
        # Nobody has looked at these bytes since they were written.
        reader.verify()
        return reader
    except (ShardFormatError, ShardCorruptError, ContainerError):
        # Half of what is written over it looks like damage, too.
        if read_record(slot) == record:
            raise
    raise _overwritten(slot, record.step)


def _overwritten(slot: Path, step: int) -> NoVersionError:
    return NoVersionError(
        "the version was overwritten by a newer one while it was being read",
        path=slot,
        step=step,
        remedy="load the newest version",
    )


def item_name(fqn: str, offsets: tuple[int, ...] | None) -> str:
    """Key of an item in a shard's state; no two items of a checkpoint have the same."""
    return f"{fqn}!" if offsets is None else f"{fqn}@{','.join(map(str, offsets))}"


def side_file_key(name: str) -> str:
    """Key of a small file in a shard's state; no item has it."""
    return f"/{name}/"


def pieces_of(text: str) -> list[str]:
    """The text in pieces that attributes may hold: longer ones would count as tensors."""
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]


def pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def unpack(text: str) -> bytes:
    """The inverse of ``pack``; raises ShardFormatError."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), _MAX_METADATA_BYTES)
    except (ValueError, zlib.error) as error:
        raise ShardFormatError(f"malformed DCP metadata: {error}") from None
    if not inflate.eof:
        raise ShardFormatError(f"DCP metadata of more than {_MAX_METADATA_BYTES} bytes, or cut short")
    return data
