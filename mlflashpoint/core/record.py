"""What one shard says of itself, and where a copy of it lies: the words that every part of the core shares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mlflashpoint.core.files import seal, unseal
from mlflashpoint.errors import ShardFormatError

FORMAT_VERSION = 1
#: stands for the node of a copy in the drain directory, which every node reads
DRAIN_NODE = "drain"
_MAX_RECORD_BYTES = 64 << 10


@dataclass(frozen=True)
class ShardRecord:
    """The commit record of a shard: written last, by atomic rename. A shard is what one rank saves at one step.

    Attributes:
        job_id: the job that saved it.
        group: the set of ranks that save together, ``default`` unless a job has several (an RL job's worker groups).
        incarnation: start of the job that saved it; each start's number is higher than those before.
        step: training step.
        rank: global rank within the group.
        world_size: number of ranks in the group.
        topology: fingerprint of the parallel layout; equal on all ranks of one version.
        index_bytes: length of the index in bytes.
        index_digest: xxh3_128 of the index, in hex.
        data_bytes: length of the used part of the data file in bytes.
        created_s: seconds since the epoch.
        resumed_from: step that this incarnation resumed from, -1 if it started from nothing.
        run: random name of that start of the job, equal on all its ranks. Two starts that could not know of each
            other (their nodes had none in common) may take the same incarnation number; their shards never mix.
    """

    job_id: str
    group: str
    incarnation: int
    step: int
    rank: int
    world_size: int
    topology: str
    index_bytes: int
    index_digest: str
    data_bytes: int
    created_s: float
    resumed_from: int = -1
    run: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def version(self) -> tuple[int, str, int]:
        """Incarnation, its run, and step: which version of its group it is of; a VersionKey begins with the same."""
        return self.incarnation, self.run, self.step

    def to_json(self) -> bytes:
        """As its file has it, with a digest of itself."""
        return seal(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> ShardRecord:
        """Raises ShardFormatError unless ``data`` is exactly one intact record of a known format version."""
        if len(data) > _MAX_RECORD_BYTES:
            raise ShardFormatError(f"commit record of {len(data)} bytes exceeds {_MAX_RECORD_BYTES}")
        return cls.from_fields(unseal(data, "commit record"))

    @classmethod
    def from_fields(cls, raw: Any) -> ShardRecord:
        """Raises ShardFormatError unless ``raw`` has the fields of a well-formed record of a known format version."""
        fields = {f.name: f.type for f in dataclasses.fields(cls)}
        if not isinstance(raw, dict) or set(raw) != set(fields):
            raise ShardFormatError("commit record has not the fields of a shard record")
        kinds: dict[str, type] = {"int": int, "str": str, "float": float}
        for name, kind in fields.items():
            value = raw[name]
            if kind == "float" and type(value) is int:
                value = raw[name] = float(value)
            if type(value) is not kinds[str(kind)]:
                raise ShardFormatError(f"commit record field {name} is no {kind}")
        record = cls(**raw)
        if record.format_version != FORMAT_VERSION:
            raise ShardFormatError(
                f"shard format {record.format_version} is not {FORMAT_VERSION}",
                remedy="resume with the mlflashpoint release that saved it, or from a durable checkpoint",
            )
        if not (0 <= record.rank < record.world_size) or min(record.step, record.index_bytes, record.data_bytes) < 0:
            raise ShardFormatError("commit record has impossible numbers", rank=record.rank, step=record.step)
        return record


@dataclass(frozen=True)
class ShardCopy:
    """One copy of a shard on some node: what a manifest lists.

    Attributes:
        record: the shard's commit record.
        node: identity of the memory container that holds it (random, kept in the container, lost with it), or
            ``DRAIN_NODE``.
        holder: global rank, in the present incarnation, whose process can read and serve the copy.
        slot: path of the slot relative to the base container, for example ``default/seat-0/slot-1``.
        replica: whether it was received from a peer.
    """

    record: ShardRecord
    node: str
    holder: int
    slot: str
    replica: bool = False
