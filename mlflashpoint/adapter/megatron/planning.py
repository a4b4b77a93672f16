"""Megatron-Core's save planning on top of the memory store, with its plan kept while the structure holds.

Megatron-Core reuses a plan, once it came out equal twice, without looking at the state again. Here each rank compares
its state with the plan at every save, and the ranks agree; if any of them finds a difference all plan anew.
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

from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from mlflashpoint.core.runtime import Runtime

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

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self._writer.set_up_storage_writer(is_coordinator)

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

    def finish(self) -> None:
        """Exchange what became of the save; collective.

        Raises:
            CheckpointException: on all ranks, with the error of each rank that failed.
        """
        assert self._dist is not None

        def mine() -> list[WriteResult]:
            if self._error is not None:
                raise self._error
            return self._results

        def make_final(results: list[list[WriteResult]]) -> None:
            assert self._metadata is not None
            self._writer.finish(self._metadata, results)

        self._dist.all_reduce("write", mine, make_final)


class SavePlanning:
    """Plans the saves of one strategy.

    Args:
        keep_plan: whether a plan that came out equal twice is used again while the structure holds.
    """

    def __init__(self, *, keep_plan: bool) -> None:
        self.keep_plan = keep_plan
        self._central: SavePlan | None = None
        self._local: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._validated = False

    def plan(self, state: Mapping[str, Any], writer: MemoryStorageWriter, runtime: Runtime) -> PlannedWrite:
        """Plan the save of ``state`` and stage this rank's part; collective.

        Args:
            state: flattened, in DCP's terms, from ``mcore_to_pyt_state_dict``.
            writer: reset to the version.
            runtime: the writer's store.
        """
        write = PlannedWrite(writer)
        if self._validated and not runtime.agree("megatron/structure", _fits(self._local, state)):
            self._central = self._local = self._metadata = None
            self._validated = False
        cached = (self._central, self._local if self._validated else None, self._validated) if self.keep_plan else None
        (_, metadata, wrapper), central, local, same, _ = save_state_dict_async_plan(
            state, write, None, _COORDINATOR, planner=_planner(), cached_ckpt_structure=cached
        )
        if self.keep_plan:
            self._central, self._local = central, local
            self._validated = self._validated or same
            if metadata is None:
                metadata = self._metadata
            self._metadata = metadata
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
