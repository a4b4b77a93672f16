"""The short form: one object from the environment, with everything that ``dcp.save`` and ``dcp.load`` take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from mlflashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from mlflashpoint.adapter.pytorch.planner import StructureSavePlanner
from mlflashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from mlflashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from mlflashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.node_versions import version_of
from mlflashpoint.core.runtime import Runtime


class MemoryStore:
    """The memory store of this job, as DCP sees it.

    Args:
        runtime: an open store.

    ::

        store = MemoryStore.from_env()
        dcp.save(state, checkpoint_id=store.version(step), storage_writer=store.writer, planner=store.planner)

        newest = store.latest()
        if newest is not None:
            dcp.load(state, checkpoint_id=newest, storage_reader=store.reader)

    Attributes:
        base: the base container.
        runtime: the store itself.
        saver, loader: as in the long form.
        writer: for ``dcp.save`` and ``dcp.async_save``.
        reader: for ``dcp.load``.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.base = CheckpointContainerId(str(runtime.config.base_container))
        stores = self._stores = CheckpointObjectManager.around(runtime)
        self.saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=stores)
        self.loader = DefaultMLFlashpointCheckpointLoader(checkpoint_object_manager=stores)
        self.writer = MemoryStorageWriter(checkpoint_saver=self.saver)
        self.reader = MemoryStorageReader(path=self.base, checkpoint_loader=self.loader)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, group: str = "default", **settings: Any
    ) -> MemoryStore:
        """From torch.distributed and the settings in the environment; ``settings`` are fields of StoreConfig.

        Raises:
            RankUnknownError, SettingError: as ``Runtime.from_env``.
            StoreInUseError: this process has an open store for the container and the group.
        """
        return cls(Runtime.from_env(environ, group=group, **settings))

    @property
    def planner(self) -> StructureSavePlanner:
        """A planner that plans once per structure."""
        return self.writer.planner

    def version(self, step: int) -> CheckpointContainerId:
        """The checkpoint id of ``step``; raises CheckpointIdError."""
        return version_of(self.base, step, self.runtime.group)

    def latest(self, *, durable_step: int | None = None) -> CheckpointContainerId | None:
        """The newest version that every rank can load; collective, see ``get_latest_complete_checkpoint``.

        A save that ``dcp.save`` or the future of ``dcp.async_save`` has returned from is waited for. If a rank has no
        memory store, that is None on all ranks too, and an error in the log.

        Raises:
            StoreClosedError: the store was closed.
        """
        self.writer.give_up_unfinished()
        return self.loader.get_latest_complete_checkpoint(self.base, durable_step=durable_step)

    def close(self) -> None:
        """Finish the background work and close the store; what is called afterwards raises StoreClosedError."""
        self.writer.close()
        self._stores.look_away()
        self.runtime.close()
