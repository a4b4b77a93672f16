"""The loader of the user guide: finds the newest version that all ranks can load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.checkpoint_saver import Stores, _new_stores, ranks_by
from mlflashpoint.core.container import read_container
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.incarnation import Lineage, read_lineage
from mlflashpoint.core.ledger import agree
from mlflashpoint.core.manifest import node_copies
from mlflashpoint.core.plan import RecoveryPlan, plan_recovery
from mlflashpoint.core.recovery import Recovery
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import FlashpointError, NoVersionError

__all__ = ["DefaultMLFlashpointCheckpointLoader", "MLFlashpointCheckpointLoader", "plan_on_node"]

log = logging.getLogger("mlflashpoint.core")

_AGREE_S = 60.0


class DefaultMLFlashpointCheckpointLoader:
    """Finds what to go on from.

    Args:
        checkpoint_object_manager: the open stores, shared with the saver.
        replication_manager: accepted for the guide's sake.
        global_rank_getter: this process's global rank; None asks torch.distributed and the environment.
        local_rank_getter: its rank on this node.
        broadcast_object_list_func, all_gather_object_func: accepted for the guide's sake and never called: they would
            unpickle what other ranks send.
        world_size_getter: number of ranks.
    """

    def __init__(
        self,
        checkpoint_object_manager: Stores | None = None,
        replication_manager: Any = None,
        global_rank_getter: Callable[[], int] | None = None,
        local_rank_getter: Callable[[], int] | None = None,
        broadcast_object_list_func: Callable[..., Any] | None = None,
        all_gather_object_func: Callable[..., Any] | None = None,
        world_size_getter: Callable[[], int] | None = None,
    ) -> None:
        self.stores = checkpoint_object_manager if checkpoint_object_manager is not None else _new_stores()
        self._getters = (global_rank_getter, world_size_getter, local_rank_getter)
        self._found: tuple[CheckpointContainerId, Runtime, Recovery] | None = None
        self._asked = 0
        self._listeners: list[Callable[[CheckpointContainerId], None]] = []

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str, *, durable_step: int | None = None
    ) -> CheckpointContainerId | None:
        """The newest version that every rank can load, None if there is none; collective, one answer for all.

        Args:
            checkpoint_base_container: the job's base container.
            durable_step: newest step in durable storage; memory is used only if it is not older.

        Raises:
            DeadlineExceededError, PeerError: the ranks could not agree; raised on all of them.
            RankUnknownError, SettingError, CheckpointIdError: the container can't be opened by that name.
        """
        found = self._find(CheckpointContainerId(checkpoint_base_container), durable_step)
        if found is not None:
            for listener in self._listeners:
                listener(found)
        return found

    def when_found(self, listener: Callable[[CheckpointContainerId], None]) -> None:
        """Call ``listener`` on this rank with each version that is found, and with the one that was found already."""
        self._listeners.append(listener)
        if self._found is not None:
            listener(self._found[0])

    def _find(self, base: CheckpointContainerId, durable_step: int | None) -> CheckpointContainerId | None:
        self._found = None
        if self.stores.gave_up():
            step = self._on_this_node(base)
            newer = step is not None and (durable_step is None or step >= durable_step)
            return _version(base, step) if step is not None and newer else None
        runtime = self.stores.runtime(base, ranks_by(*self._getters))
        recovery = runtime.find_latest(durable_step=durable_step, reshard=True)
        if recovery is None:
            return None
        found = _version(base, recovery.step)
        self._found = found, runtime, recovery
        return found

    def found(self, version: str) -> tuple[Runtime, Recovery] | None:
        """What the last ``get_latest_complete_checkpoint`` found, if it is ``version``."""
        if self._found is None or self._found[0] != CheckpointContainerId(version):
            return None
        return self._found[1:]

    def _on_this_node(self, base: CheckpointContainerId) -> int | None:
        """The newest step that is whole on every node, while a checkpoint process has the store."""
        self._asked += 1
        try:
            step: int | None = plan_on_node(base, self.stores.group).step
        except FlashpointError as error:
            log.info("nothing to load from %s: %s", base, error)
            step = None
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return step
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        channel = Channel(store, f"mlflashpoint/{self.stores.group}/on-node/{self._asked}")
        wanted = channel.decide("step", -1 if step is None else step)
        answer, reason = agree(
            channel.under("same"),
            step is not None and step == wanted,
            rank=rank,
            world_size=world_size,
            deadline=Deadline(_AGREE_S),
        )
        if not answer:
            log.info("no version is whole on every node: %s", reason)
        return step if answer else None


#: the guide's abstract name for the same thing
MLFlashpointCheckpointLoader = DefaultMLFlashpointCheckpointLoader


def plan_on_node(base_container: str, group: str, step: int | None = None) -> RecoveryPlan:
    """The newest version, or that of ``step``, that lies whole in this node's memory; asks no other rank.

    Reads only, so it also serves a process that does not own a seat.

    Raises:
        NoVersionError: there is none; gives the reason.
        ContainerError: the container can't be read.
    """
    base = Path(base_container)
    container = read_container(base)
    if container is None:
        raise NoVersionError(
            "the folder is no memory container", path=base, remedy="give the base container that the job saved to"
        )
    copies = [copy for copy in node_copies(container, group, holder=0) if step is None or copy.record.step == step]
    lineage = Lineage()
    try:
        lineage = read_lineage(container.group_dir(group))
    except FlashpointError as error:
        log.warning("the lineage on this node is left out: %s", error)
    # No job has no ranks, so that each version counts as one to be resharded, and any layout is taken.
    plan = plan_recovery(copies, 0, placement={0: container.node}, lineage=lineage, group=group, reshard=True)
    if plan.version is None:
        what = "no version" if step is None else f"no version of step {step}"
        why = plan.skipped[0].reason if plan.skipped else "nothing of the kind lies there"
        raise NoVersionError(
            f"{what} on this node: {why}",
            path=base,
            step=step,
            remedy="let get_latest_complete_checkpoint choose, or load the durable checkpoint",
        )
    return plan


def _version(base: CheckpointContainerId, step: int) -> CheckpointContainerId:
    return CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(step))
