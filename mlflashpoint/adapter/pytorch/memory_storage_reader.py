"""A DCP storage reader of the memory store: any world size, any layout, shards from wherever they lie."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mlflashpoint.adapter.pytorch.checked_copies import CheckedCopies, Stored
from mlflashpoint.adapter.pytorch.metadata_codec import VersionMetadata, chunk_key
from mlflashpoint.adapter.pytorch.shards import Shards, item_name
from mlflashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from mlflashpoint.core.collector import no_collections
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.node_versions import NodeLoader, split_version
from mlflashpoint.core.onlooker import Finder
from mlflashpoint.core.ranks import ranks_from
from mlflashpoint.errors import (
    CheckpointIdError,
    FlashpointError,
    NoVersionError,
    RankUnknownError,
    ShardFormatError,
    StateMismatchError,
    TopologyMismatchError,
)

log = logging.getLogger("mlflashpoint.adapter")


@dataclass(frozen=True)
class _Mark:
    """Tells the coordinator which version of a step this rank reads."""

    incarnation: int
    run: str


class MemoryStorageReader(StorageReader):
    """Reads DCP checkpoints from memory, for ``dcp.load``.

    Args:
        path: the version, or the base container; ``checkpoint_id`` of ``dcp.load`` goes before it.
        checkpoint_loader: what found the version; None takes a new one.

    A version that ``checkpoint_loader.get_latest_complete_checkpoint`` has just found was checked by all ranks, and its
    shards may lie on any node. Any other version is looked for on this node alone, and checked here. If this process is
    still finishing its save, that is waited for. No seat is taken: any process of the job's user can read so.

    What was not checked in the last half minute is checked again, and objects always: one that has not the digest that
    was saved is ShardCorruptError. A version that is overwritten while it is read is NoVersionError. Tensors of the
    state may then have been written to, its other values are as they were.

    Raises (within a CheckpointException on all ranks, if DCP calls it): NoVersionError, ShardCorruptError,
    ShardFormatError, TopologyMismatchError, StateMismatchError, CheckpointIdError.
    """

    def __init__(
        self, path: Any = None, checkpoint_loader: DefaultMLFlashpointCheckpointLoader | NodeLoader | None = None
    ) -> None:
        super().__init__()
        self._loader = checkpoint_loader if checkpoint_loader is not None else DefaultMLFlashpointCheckpointLoader()
        self.checkpoint_id: CheckpointContainerId | None = None if path is None else CheckpointContainerId(str(path))
        self._shards: Shards | None = None
        self._finder: Finder | None = None
        self._problem: FlashpointError | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """A new load begins."""
        self.close()
        self._problem = None
        if checkpoint_id is not None:
            self.checkpoint_id = CheckpointContainerId(str(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the version holds."""
        if kwargs and self._problem is not None:
            # Newer releases of DCP swallow what this raises, ask again for this rank alone, and at last raise an
            # AssertionError. They go on with what is given now as far as set_up_storage_reader, which raises.
            return Metadata(state_dict_metadata={})
        try:
            return self.version_metadata().metadata
        except FlashpointError as error:
            self._problem = error
            raise

    def version_metadata(self) -> VersionMetadata:
        """What the version holds, and which rank's shard has each part."""
        shards = self.shards()
        rank = self.nearest_rank()
        scope = shards.attribute(rank).get("scope")
        if scope == "rank" and self._world_size() != shards.world_size:
            raise TopologyMismatchError(
                f"step {shards.step} was saved by {shards.world_size} ranks each for itself (no_dist), the job has "
                f"{self._world_size()}",
                step=shards.step,
                remedy="start the job with as many ranks, or save with dcp.save's collectives",
            )
        return shards.metadata(rank)

    def shards(self) -> Shards:
        """The version's shards, opened on demand; ``close`` lets go of them."""
        if self._shards is None:
            if self.checkpoint_id is None:
                raise CheckpointIdError("no checkpoint id", remedy="pass checkpoint_id to dcp.load")
            found = self._loader.found(self.checkpoint_id)
            if found is not None:
                self._finder = found[0]
                self._shards = Shards.recovered(*found)
            else:
                self._loader.await_saved(self.checkpoint_id)
                self._shards = Shards.on_node(self.checkpoint_id, self._loader.group, job_id=self._loader.job_id)
        return self._shards

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises what reading the metadata did."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan if plan.storage_data is not None else dataclasses.replace(plan, storage_data=self._mark())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises NoVersionError if the ranks look at different versions of the step, which a rollback may leave."""
        marks = {plan.storage_data for plan in plans if isinstance(plan.storage_data, _Mark)}
        if len(marks) > 1:
            raise NoVersionError(
                "the ranks see different versions of the step: it is being replaced",
                path=self.checkpoint_id,
                remedy="load the newest version",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for out of the store; the slots are let go of before it returns."""
        shards, described = self.shards(), self.version_metadata()
        try:
            # A planner that acts on each tensor once it is filled has to see it filled.
            at_once = type(planner).commit_tensor is DefaultLoadPlanner.commit_tensor
            with no_collections() if at_once else contextlib.nullcontext():
                copies, contents = self._look_up(plan.items, planner, shards, described, at_once)
            bad = copies.run()
            shards.confirm(bad + [stored for _, stored, content in contents if not stored.is_intact(content)])
            # Not before: the planner unpickles them, and damaged bytes, or half of one version and half of another,
            # would be anything.
            for item, _, content in contents:
                planner.load_bytes(item, io.BytesIO(content))
            self._loader.loaded(str(self.checkpoint_id))
        finally:
            self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        try:
            split_version(str(checkpoint_id))
        except CheckpointIdError:
            return False
        return True

    def close(self) -> None:
        """Let go of the slots."""
        if self._shards is not None:
            self._shards.close()
        self._shards = self._finder = None

    def _look_up(
        self, items: list[ReadItem], planner: LoadPlanner, shards: Shards, described: VersionMetadata, at_once: bool
    ) -> tuple[CheckedCopies, list[tuple[ReadItem, Stored, bytes]]]:
        """What is to be copied, and the bytes of the objects that are to be loaded."""
        copies = CheckedCopies()
        contents: list[tuple[ReadItem, Stored, bytes]] = []
        for item in items:
            try:
                holder = described.holder(item.storage_index)
            except KeyError:
                raise ShardFormatError(
                    f"the version holds no {item.storage_index.fqn!r} at {item.storage_index.offset}", step=shards.step
                ) from None
            stored = shards.stored(holder, item_name(*chunk_key(item.storage_index)))
            if item.type is LoadItemType.BYTE_IO:
                contents.append((item, stored, stored.view().numpy().tobytes()))
                continue
            source = _part(stored.view(), item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.shape != source.shape:
                raise StateMismatchError(
                    f"{item.dest_index.fqn}: a part of {list(source.shape)} elements for a place of "
                    f"{list(target.shape)}",
                    step=shards.step,
                )
            copies.add(stored, source, target)
            if not at_once:
                bad = copies.run()
                if bad:
                    shards.confirm(bad)
                planner.commit_tensor(item, target)
                copies = CheckedCopies()
        return copies, contents

    def __enter__(self) -> MemoryStorageReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def nearest_rank(self) -> int:
        """The rank of the version whose shard tells of the whole: this one's own if it has one."""
        return self._ranks()[0] % self.shards().world_size

    def _world_size(self) -> int:
        return self._ranks()[1]

    def _ranks(self) -> tuple[int, int]:
        """Rank and number of the processes that load; a process that can't tell loads alone."""
        self.shards()
        if self._finder is not None:
            return self._finder.rank, self._finder.world_size
        if torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        try:
            ranks = ranks_from(os.environ)
        except RankUnknownError:
            return 0, 1
        return ranks.rank, ranks.world_size

    def _mark(self) -> _Mark:
        version = self.shards().version
        return _Mark(version.incarnation, version.run)


def _part(stored: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    if stored.shape == lengths:
        return stored
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if stored.shape[dim] != length:
            stored = stored.narrow(dim, offset, length)
    return stored
