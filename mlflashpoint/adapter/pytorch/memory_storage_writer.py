"""A DCP storage writer that stores each rank's part of a checkpoint in the memory store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mlflashpoint.adapter.pytorch.finish import Bulletins, Save, attempts_before, await_complete
from mlflashpoint.adapter.pytorch.going_back import GoingBack
from mlflashpoint.adapter.pytorch.missing import missing_of
from mlflashpoint.adapter.pytorch.planner import StructureSavePlanner
from mlflashpoint.adapter.pytorch.resolving import bytes_tensor, resolve_items
from mlflashpoint.adapter.pytorch.same_step import compared, goes_back, marked, saved_to
from mlflashpoint.adapter.pytorch.shards import ATTRIBUTE, pieces_of, side_file_key
from mlflashpoint.adapter.pytorch.stager import ReusedStager
from mlflashpoint.adapter.pytorch.tables import Sent, Table, Tables
from mlflashpoint.adapter.pytorch.telling import locate, tell_failed
from mlflashpoint.adapter.pytorch.turns import Turns
from mlflashpoint.adapter.pytorch.unfinished import Unfinished
from mlflashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver, Stores, deadline_of
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.node_versions import split_version
from mlflashpoint.core.runtime import Runtime, SaveResult
from mlflashpoint.errors import CheckpointIdError, FlashpointError, PeerError, StepError

log = logging.getLogger("mlflashpoint.adapter")


class MemoryStorageWriter(StorageWriter):
    """Writes DCP checkpoints into memory: ``dcp.save`` and ``dcp.async_save``, with threads or with processes.

    Args:
        checkpoint_saver: whose store to use; None takes the process's own.
        mp_manager, thread_count: accepted for the guide's sake and not used.
        side_files: small named files that every rank's shard carries, for the adapters of frameworks.

    The checkpoint's id is ``<base container>/step-<n>_ckpt``; of a saver for a named group it is
    ``<base container>/<group>/step-<n>_ckpt``. Blocking is the copy of this rank's data alone; digests, metadata and
    replicas follow in the background. A version counts once DCP has finished it on the coordinator. A save waits for a
    slot as ``MLFLASHPOINT_BUSY_WAIT_S`` says, and for an ``async_save`` of this writer that has not ended. The last
    step is not stored again, unless all ranks have loaded an older version since: then training went back to that.

    Attributes:
        planner: keeps the plan from save to save; pass it to ``dcp.save`` to plan once per structure.
        going_back: whether the next save comes from an older version.
        topology: fingerprint of the parallel layout, equal on all ranks; named if the version can't be resharded.

    Raises (as DCP does, on all ranks, within a CheckpointException): StoreFullError, StateTypeError, SlotBusyError,
    StepError, ContainerError.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        checkpoint_saver: DefaultMLFlashpointCheckpointSaver | None = None,
        *,
        mp_manager: Any = None,
        thread_count: int = 1,
        side_files: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__()
        self._saver = checkpoint_saver if checkpoint_saver is not None else DefaultMLFlashpointCheckpointSaver()
        self.planner = StructureSavePlanner()
        self.topology = ""
        self.side_files: dict[str, bytes] = dict(side_files or {})
        self.checkpoint_id: CheckpointContainerId | None = None
        self._stager = ReusedStager()
        self._turns = Turns()
        self.going_back = GoingBack()
        #: on the plan of the save that has begun
        self._mark = 0
        self._is_coordinator = True
        #: whether it came from the training process: nobody waits for what it does but those who want the version
        self._travelled = False
        self._save: Save | None = None
        self._last: Save | None = None
        self._unfinished = Unfinished()
        self._bulletins = Bulletins()
        self._tables = Tables()

    def reset(self, checkpoint_id: Any = None) -> None:
        """A new save begins, once those of other threads have ended.

        Raises:
            CheckpointIdError: the id is no version's.
            DeadlineExceededError: a save in another thread does not end.
        """
        self._turns.begin(deadline_of(self.stores, self.checkpoint_id))
        self.give_up_unfinished()
        self._save = None
        if checkpoint_id is not None:
            split_version(str(checkpoint_id), self._saver.stores.group)
            self.checkpoint_id = CheckpointContainerId(str(checkpoint_id))

    def give_up_unfinished(self) -> None:
        """Tell all ranks of the saves that DCP, or who held them, has let go of without finishing them."""
        self._unfinished.give_up(self._saver.runtime, last=self._turns.free)

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, use_collectives: bool = True, **kwargs: Any
    ) -> None:
        if self.checkpoint_id is None:
            raise CheckpointIdError("no checkpoint id", remedy="pass checkpoint_id to dcp.save")
        # Without collectives each rank finishes its save for itself.
        self._is_coordinator = is_coordinator or not use_collectives
        container, step = self._place()
        self._save = Save(step)
        self.going_back.begin()
        if self._is_coordinator:
            self._unfinished.begin(self._save, container)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Names the version to the coordinator; raises, as DCP does on all ranks, what could not be staged or sent."""
        save, missing = self._begun(), missing_of(plan)
        if missing is not None:
            locate(missing, self.runtime(), save, self.checkpoint_id)
            raise missing
        save.planning = True
        container, runtime = self._place()[0], self._opened()
        back = None if runtime is None else self.going_back.bring(runtime, save.step)
        plan, self._mark = marked(plan, save.step, str(self.checkpoint_id), str(container), back)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises StepError, which DCP raises on all ranks, if they save different steps, or not all of them go back."""
        unmarked = compared(plans, world_size=0 if (runtime := self._opened()) is None else runtime.world_size)
        self._begun().planning = False
        return unmarked

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items into the store."""
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self.stage_items(plan, planner))
        finally:
            if not self._is_coordinator:
                self._turns.end()
        return future

    def stage_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Copy this rank's items into the store; what to tell the coordinator. Raises FlashpointError."""
        save = self._begun()
        # The ranks have one plan, so all of them come here.
        saved_to(str(self._place()[0]))
        save.attempt = attempts_before(str(self.checkpoint_id))
        runtime, stored = self._usable(), False
        try:
            self.going_back.follow(runtime, save.step, goes_back(plan, self._mark))
            names, table, sent = self._tables.describe(plan, runtime.rank, here=self._is_coordinator)
            state = dict(zip(names, resolve_items(plan, planner), strict=True))
            for name, content in self.side_files.items():
                state[side_file_key(name)] = bytes_tensor(content)
            stored = True
            result = self._store(runtime, save, state, sent)
        except BaseException as error:
            locate(error, runtime, save, self.checkpoint_id)
            if not stored:
                runtime.save_failed(save.step, error)
            tell_failed(runtime, save, error)
            raise
        finally:
            if isinstance(planner, StructureSavePlanner):
                planner.release()
        return [WriteResult(MetadataIndex("mlflashpoint"), result.staged_bytes, table)]

    def hold(self, holder: object) -> Save:
        """The save that has begun, for ``finish`` to be told: ``holder`` may finish it after later ones have begun."""
        self._unfinished.hold(holder)
        return self._begun()

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]], *, save: Save | None = None) -> None:
        """On the coordinator, once all ranks have written: from now on the version may become complete.

        Args:
            metadata: as DCP's planner made it.
            results: of all ranks.
            save: from ``hold``; None for the one that began last.

        Raises:
            StateTypeError: the planner's own data is not plain.
            PeerError: the ranks that wrote are not those of the store.
        """
        try:
            self._finish(metadata, results, self._begun() if save is None else save)
        finally:
            self._turns.end()

    def _finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]], save: Save) -> None:
        runtime = self._usable()
        tables = [result.storage_data for part in results for result in part if isinstance(result.storage_data, Table)]
        if len(tables) not in (1, runtime.world_size):
            raise PeerError(
                f"{len(tables)} ranks wrote, the memory store has {runtime.world_size}",
                rank=runtime.rank,
                step=save.step,
                remedy="give the ranks of that process group a store of their own (group=, rank=, world_size=)",
            )
        try:
            encoded = self._tables.encode(metadata, tables, step=save.step, path=self.checkpoint_id)
        except FlashpointError as error:
            locate(error, runtime, save, self.checkpoint_id)
            tell_failed(runtime, save, error)
            save.abandon(error)
            raise
        save.finish(encoded, shared=len(tables) == runtime.world_size > 1)
        if self._travelled and (runtime.world_size == 1 or not save.alone):
            # The training process has no other way to learn when the version is there.
            await_complete(runtime, save)
        elif self._travelled or not runtime.config.async_save:
            runtime.flush()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        try:
            split_version(str(checkpoint_id))
        except CheckpointIdError:
            return False
        return True

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """For ``dcp.async_save``: a copy of the state, into memory that is used again.

        Raises:
            DeadlineExceededError: an earlier ``async_save`` of this writer does not end.
        """
        self._turns.announce(deadline_of(self.stores, self.checkpoint_id))
        staged = self._stager.stage(state_dict)
        self.going_back.state_taken()
        return staged

    def synchronize_staging(self) -> None:
        self._stager.synchronize_staging()

    def close(self) -> None:
        """Give the staging memory back; the store stays open."""
        self._stager.close()

    def __getstate__(self) -> dict[str, Any]:
        # It travels to a checkpoint process at each save: the settings do, what was learnt from saves does not.
        self._turns.withdraw()
        settings = {"saver": self._saver, "topology": self.topology, "side_files": self.side_files}
        return {**settings, "loaded": self.going_back.take_staged()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(checkpoint_saver=state["saver"], side_files=state["side_files"])  # type: ignore[misc]
        self.topology = state["topology"]
        self.going_back = GoingBack(state["loaded"])
        self._travelled = True

    @property
    def stores(self) -> Stores:
        """The open stores that it saves to."""
        return self._saver.stores

    def runtime(self) -> Runtime:
        """The store that the checkpoint's id lies in; raises as the saver does, and CheckpointIdError."""
        if self.checkpoint_id is None:
            raise CheckpointIdError("no checkpoint id", remedy="pass checkpoint_id to dcp.save")
        return self._saver.runtime(self._place()[0])

    @property
    def step(self) -> int:
        """Of the checkpoint's id; raises CheckpointIdError."""
        return self._place()[1]

    def _place(self) -> tuple[CheckpointContainerId, int]:
        """Base container and step of the checkpoint's id."""
        return split_version(str(self.checkpoint_id), self._saver.stores.group)

    def _opened(self) -> Runtime | None:
        """The store if this process has it open, as it has once it has saved."""
        return self._saver.stores.opened(self._place()[0])

    def _usable(self) -> Runtime:
        runtime = self.runtime()
        if runtime.problem is not None:
            raise runtime.problem
        return runtime

    def _begun(self) -> Save:
        if self._save is None:
            raise StepError("no save has begun", remedy="call set_up_storage_writer first, as DCP does")
        return self._save

    def _store(self, runtime: Runtime, save: Save, state: dict[str, Any], sent: Sent) -> SaveResult:
        bulletin = self._bulletins.of(runtime)
        world_size, deadline_s = runtime.world_size, runtime.config.deadline_s

        def finished() -> dict[str, Any]:
            try:
                text = save.settle(bulletin, world_size=world_size, deadline_s=deadline_s)
            except BaseException:
                self._tables.doubt(sent)
                raise
            self._tables.confirm(sent)
            return {
                ATTRIBUTE: {"metadata": pieces_of(text), "scope": "rank" if save.alone and world_size > 1 else "all"}
            }

        result = runtime.save(state, step=save.step, topology=self.topology, attributes=finished, wait=False)
        last, self._last = self._last, save
        if result.error is not None:
            raise result.error
        if result.skipped:
            save.outcome = None if last is None else last.outcome
            if save.outcome is False:
                raise StepError(
                    "an earlier save of this step has failed, which is final",
                    step=save.step,
                    remedy="save again under the next step",
                )
            log.debug("step %d lies in memory already and is not stored again", save.step)
        self._saver.stores.reached(self._place()[0], save.step)
        self.going_back.settled(runtime)
        return result
