"""Megatron-Core's save planning on top of the memory store, with its plan kept while the structure holds.

Megatron-Core reuses a plan, once it came out equal twice, without looking at the state again. Here each rank compares
its state with the plan at every save, the first ones too, and the ranks agree; if any of them has no such plan, or
finds a difference, all plan anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from mlflashpoint.adapter.megatron.readiness import all_ready
from mlflashpoint.adapter.pytorch.finish import Save
from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from mlflashpoint.errors import DeadlineExceededError, PeerError

_COORDINATOR = 0


class PlannedWrite:
    """One save of this rank: planned and staged, or failed meanwhile; ``finish`` makes it final on all ranks."""

    def __init__(self, writer: MemoryStorageWriter, version: str) -> None:
        self._writer = writer
        self.version = version
        self._dist = _DistWrapper(None, True, _COORDINATOR)
        self._results: list[WriteResult] = []
        self._metadata: Metadata | None = None
        self._save: Save | None = None
        #: kept for ``finish``: raised before, on one rank, it would leave the others in the next collective
        self.error: Exception | None = None

    def begin(self, state: Mapping[str, Any], planner: SavePlanner) -> None:
        planner.set_up_planner(state, is_coordinator=self._dist.is_coordinator)  # type: ignore[arg-type]
        self._writer.set_up_storage_writer(self._dist.is_coordinator)
        self._save = self._writer.hold(self)
        self._save.planning = True

    def described_by(self, plan: SavePlan, planner: SavePlanner) -> Metadata | None:
        """What all ranks' plans together describe, on the coordinator; collective, and raises nothing of its own."""
        plans = self._dist.gather_object(plan)
        if plans is None:
            return None
        try:
            return planner.create_global_plan(plans)[1]
        except Exception as error:
            self.error = error
            return None

    def stage(self, plan: SavePlan, planner: SavePlanner, metadata: Metadata | None) -> None:
        """Copy this rank's data into the store, unless something has failed already."""
        if self._save is not None:
            self._save.planning = False
        if self.error is not None:
            return
        self._metadata = metadata
        try:
            self._results = self._writer.stage_items(planner.finish_plan(plan), planner)
        except Exception as error:
            self.error = error

    def finish(self, deadline_s: float) -> None:
        """Exchange what became of the save; collective.

        Raises:
            DeadlineExceededError: some rank does not come to finish it; on all ranks.
            StepError: another rank finishes another version; on all ranks.
            CheckpointException: on all ranks, with the error of each rank that failed.
        """

        def mine() -> list[WriteResult] | None:
            if self.error is not None:
                raise self.error
            given_up = self._save is not None and self._save.outcome is False
            return None if given_up else self._results

        def make_final(results: list[list[WriteResult] | None]) -> None:
            # Only where no rank says why: what one rank could not write the others give up too.
            late = [rank for rank, found in enumerate(results) if found is None]
            if late:
                raise DeadlineExceededError(
                    f"the save was given up before it was finalized, on {len(late)} ranks",
                    rank=late[0],
                    setting="MLFLASHPOINT_DEADLINE_S",
                    remedy="finalize requests earlier: let the queue look after each step",
                )
            assert self._metadata is not None
            self._writer.finish(self._metadata, [found for found in results if found is not None], save=self._save)

        try:
            all_ready("finish", version=self.version, deadline_s=deadline_s)
            self._dist.all_reduce("write", mine, make_final)
        except BaseException:
            # The version can't become whole any more: what is staged here is for nothing, and its slot free at once.
            if self._save is not None:
                self._save.abandon(PeerError("the save was not finished on all ranks", step=self._save.step))
            raise


class SavePlanning:
    """Plans the saves of one strategy, each rank for itself, as Megatron-Core does where it can.

    Megatron-Core's own function is not used: what it raises on one rank leaves the others in its collective.

    Args:
        keep_plan: whether a plan that came out equal twice is used again while the structure holds.
    """

    def __init__(self, *, keep_plan: bool) -> None:
        self.keep_plan = keep_plan
        #: of the last save that was planned
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._came_out_twice = False

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this rank could save ``state`` by the plan that it has; raises nothing."""
        try:
            return self._came_out_twice and _fits(self._plan, state)
        except Exception:
            # Planning tells what is wrong with it, on all ranks.
            return False

    def plan(
        self, state: Mapping[str, Any], writer: MemoryStorageWriter, *, again: bool, version: str, deadline_s: float
    ) -> PlannedWrite:
        """Plan the save of ``state`` and stage this rank's part; collective.

        Args:
            state: flattened, in DCP's terms, from ``mcore_to_pyt_state_dict``.
            writer: reset to the version.
            again: whether the plan of the last save fits on every rank; the same on all of them.
            version: what the ranks call it, of ``readiness.name_of``.
            deadline_s: longest wait for the other ranks.

        Raises:
            what one rank can't plan: on that rank; PeerError on the others.
        """
        write, planner = PlannedWrite(writer, version), _planner()
        plan = self._plan if again else None
        problem: Exception | None = None
        try:
            write.begin(state, planner)
            if plan is None:
                plan = planner.create_decentralized_global_plan(planner.create_local_plan())
        except Exception as error:
            problem = error
        if again:
            # No rank hears of another here.
            write.error = problem
        else:
            all_ready("plan", problem, version=version, deadline_s=deadline_s)
        assert plan is not None
        metadata = self._metadata if again else write.described_by(plan, planner)
        if self.keep_plan and not again:
            self._came_out_twice = write.error is None and plan == self._plan
            self._plan, self._metadata = plan, metadata
        write.stage(plan, planner, metadata)
        return write


def _planner() -> Any:
    # Main replicas are chosen by Megatron-Core, so DCP has no duplicates to remove.
    return MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _fits(plan: SavePlan | None, state: Mapping[str, Any]) -> bool:
    """Whether a fresh local plan of ``state`` would have the same items."""
    if plan is None:
        return False
    items = iter(plan.items)
    for fqn, value in state.items():
        if isinstance(value, torch.Tensor):
            for fresh in _create_write_items(fqn, value):
                known = next(items, None)
                if known is None or (known.index, known.type, known.tensor_data) != (
                    fresh.index,
                    fresh.type,
                    fresh.tensor_data,
                ):
                    return False
        else:
            known = next(items, None)
            if known is None or known.index.fqn != fqn or known.type is not WriteItemType.BYTE_IO:
                return False
    return next(items, None) is None
