"""Megatron-Core's save planning on top of the memory store, with its plan kept while the structure holds.

Megatron-Core reuses a plan, once it came out equal twice, without looking at the state again. Here each rank compares
its state with the plan at every save, the first ones too, and the ranks agree; if any of them has no such plan, or
finds a difference, all plan anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from mlflashpoint.adapter.megatron.readiness import all_ready
from mlflashpoint.adapter.pytorch.finish import Save
from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter

_COORDINATOR = 0


class PlannedWrite:
    """One save of this rank: planned and staged, or failed in staging; ``finish`` makes it final on all ranks."""

    #: Megatron-Core then makes each rank's plan without the coordinator
    can_run_decentralized_global_plan = True

    def __init__(self, writer: MemoryStorageWriter) -> None:
        self._writer = writer
        self._results: list[WriteResult] = []
        self._error: Exception | None = None
        self._metadata: Metadata | None = None
        self._dist: _DistWrapper | None = None
        self._save: Save | None = None

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self._writer.set_up_storage_writer(is_coordinator)
        self._save = self._writer.hold(self)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy this rank's data into the store.

        A failure is kept for ``finish``: raised here, on one rank, it would leave the others in the next collective.
        """
        try:
            self._results = self._writer.stage_items(plan, planner)
        except Exception as error:
            self._error = error

    def planned(self, metadata: Metadata | None, wrapper: _DistWrapper) -> None:
        self._metadata, self._dist = metadata, wrapper

    def stage(self, state: Mapping[str, Any], plan: SavePlan, wrapper: _DistWrapper) -> None:
        """As Megatron-Core does with a plan that it has kept: no rank talks to another, so that none may raise."""
        try:
            planner = _planner()
            planner.set_up_planner(state, is_coordinator=wrapper.is_coordinator)  # type: ignore[arg-type]
            self.set_up_storage_writer(wrapper.is_coordinator)
            self.prepare_write_data(planner.finish_plan(plan), planner)
        except Exception as error:
            self._error = error

    def finish(self, deadline_s: float) -> None:
        """Exchange what became of the save; collective.

        Raises:
            DeadlineExceededError: some rank does not come to finish it; on all ranks.
            CheckpointException: on all ranks, with the error of each rank that failed.
        """
        assert self._dist is not None
        all_ready("finish", deadline_s=deadline_s)

        def mine() -> list[WriteResult]:
            if self._error is not None:
                raise self._error
            return self._results

        def make_final(results: list[list[WriteResult]]) -> None:
            assert self._metadata is not None
            self._writer.finish(self._metadata, results, save=self._save)

        self._dist.all_reduce("write", mine, make_final)


class SavePlanning:
    """Plans the saves of one strategy.

    Args:
        keep_plan: whether a plan that came out equal twice is used again while the structure holds.
    """

    def __init__(self, *, keep_plan: bool) -> None:
        self.keep_plan = keep_plan
        #: of the last save that was planned
        self._central: SavePlan | None = None
        self._local: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._came_out_twice = False

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether this rank could save ``state`` by the plan that it has; raises nothing."""
        try:
            return self._came_out_twice and _fits(self._local, state)
        except Exception:
            # Planning tells what is wrong with it, on all ranks.
            return False

    def plan(self, state: Mapping[str, Any], writer: MemoryStorageWriter, *, again: bool) -> PlannedWrite:
        """Plan the save of ``state`` and stage this rank's part; collective.

        Args:
            state: flattened, in DCP's terms, from ``mcore_to_pyt_state_dict``.
            writer: reset to the version.
            again: whether the plan of the last save fits on every rank; the same on all of them.
        """
        write = PlannedWrite(writer)
        if again and self._central is not None:
            wrapper = _DistWrapper(None, True, _COORDINATOR)
            write.stage(state, self._central, wrapper)
            write.planned(self._metadata, wrapper)
            return write
        (_, metadata, wrapper), central, local, _, _ = save_state_dict_async_plan(
            state, write, None, _COORDINATOR, planner=_planner()
        )
        if self.keep_plan:
            self._came_out_twice = central == self._central
            self._central, self._local, self._metadata = central, local, metadata
        write.planned(metadata, wrapper)
        return write


def _planner() -> SavePlanner:
    # Main replicas are chosen by Megatron-Core, so DCP has no duplicates to remove.
    planner: SavePlanner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    return planner


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
