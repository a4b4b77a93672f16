"""The versions in this node's memory for a process that is no rank of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mlflashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.node_versions import NodeLoader, version_of
from mlflashpoint.settings import StoreConfig


class ReadOnlyStore:
    """Finds and reads versions beside a job that runs or has died: for an evaluator, a notebook, an export script.

    Takes no seat, changes no file and makes the job wait for nothing; needs no rank. It sees what lies whole in this
    node's memory, own shards and replicas. The job may overwrite a version while it is read, which is a
    ``NoVersionError``: ask for the newest again.

    Args:
        base_container: the job's base container.
        group: name of the set of ranks that saved together.
        job_id: refuse another job's container; None reads any of this user's.

    ::

        store = ReadOnlyStore.from_env()
        newest = store.latest()
        if newest is not None:
            dcp.load(state, checkpoint_id=newest, storage_reader=store.reader)

    Attributes:
        base: the base container.
        reader: for ``dcp.load``.
    """

    def __init__(
        self, base_container: str | os.PathLike[str], *, group: str = "default", job_id: str | None = None
    ) -> None:
        self.base = CheckpointContainerId(os.fspath(base_container))
        self.loader = NodeLoader(group=group, job_id=job_id)
        self.reader = MemoryStorageReader(path=self.base, checkpoint_loader=self.loader)

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, group: str = "default", **settings: Any
    ) -> ReadOnlyStore:
        """As the settings in the environment say; ``settings`` are fields of StoreConfig.

        Raises:
            SettingError: a setting is malformed, or there is no job id.
        """
        config = StoreConfig.from_env(environ, **settings)
        return cls(config.base_container, group=group, job_id=config.job_id)

    def version(self, step: int) -> CheckpointContainerId:
        """The checkpoint id of ``step``; raises CheckpointIdError."""
        return version_of(self.base, step, self.loader.group)

    def latest(self, *, durable_step: int | None = None) -> CheckpointContainerId | None:
        """The newest version that lies whole in this node's memory, None if there is none.

        Collective where torch.distributed is initialised: the newest that lies whole on every process's node.

        Raises:
            ContainerError: the container can't be read, or other users may write to it.
            ForeignContainerError: it belongs to another user or another job.
            PeerError: the processes could not agree.
        """
        return self.loader.get_latest_complete_checkpoint(self.base, durable_step=durable_step)

    def close(self) -> None:
        """Let go of what is still being read."""
        self.reader.close()
