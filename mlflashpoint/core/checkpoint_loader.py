"""The loader of the user guide: finds the newest version that all ranks can load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlflashpoint.core.checkpoint_saver import Stores, _new_stores, ranks_by
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.node_versions import split_version, version_of
from mlflashpoint.core.onlooker import Finder
from mlflashpoint.core.recovery import Recovery

__all__ = ["DefaultMLFlashpointCheckpointLoader", "MLFlashpointCheckpointLoader"]


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
        self._found: tuple[CheckpointContainerId, Finder, Recovery] | None = None
        self._listeners: list[Callable[[CheckpointContainerId], None]] = []

    @property
    def group(self) -> str:
        """The group of ranks whose versions are loaded."""
        return self.stores.group

    @property
    def job_id(self) -> str | None:
        """The only job whose versions are read; None for any of this user's."""
        return None

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
        finder: Finder
        if self.stores.gave_up():
            finder = self.stores.onlooker(base, ranks_by(*self._getters))
        else:
            finder = self.stores.runtime(base, ranks_by(*self._getters))
        recovery = finder.find_latest(durable_step=durable_step, reshard=True)
        if recovery is None:
            return None
        found = version_of(base, recovery.step, self.group)
        self._found = found, finder, recovery
        return found

    def found(self, version: str) -> tuple[Finder, Recovery] | None:
        """What the last ``get_latest_complete_checkpoint`` found, if it is ``version``."""
        if self._found is None or self._found[0] != CheckpointContainerId(version):
            return None
        return self._found[1:]

    def await_saved(self, version: str) -> None:
        """If this process has saved ``version``, wait until its outcome is settled for all ranks, bounded.

        Raises:
            DeadlineExceededError: it is not after ``deadline_s`` seconds.
        """
        base, step = split_version(version, self.group)
        runtime = self.stores.opened(base)
        if runtime is not None:
            runtime.await_version(step)

    def loaded(self, version: str) -> None:
        """Tell that ``version`` was loaded: this process goes on from it, if it has not begun to save."""
        base, step = split_version(version, self.group)
        self.stores.reached(base, step, resumed=True)


#: the guide's abstract name for the same thing
MLFlashpointCheckpointLoader = DefaultMLFlashpointCheckpointLoader
