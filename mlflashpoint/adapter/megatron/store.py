"""The short form: one object from the environment, with everything that Megatron-Core's save and load take."""

from __future__ import annotations

from typing import Any

from megatron.core import dist_checkpointing

from mlflashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from mlflashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from mlflashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint
from mlflashpoint.adapter.pytorch.store import MemoryStore
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.core.runtime import Runtime

__all__ = ["MegatronStore"]


class MegatronStore(MemoryStore):
    """The memory store of this job, as Megatron-Core sees it.

    ::

        store = MegatronStore.from_env()
        queue.schedule_async_request(store.save(state_dict, step))  # Megatron-Core's AsyncCallsQueue
        newest = store.latest()
        if newest is not None:
            state_dict = store.load(sharded_state_dict, newest)

    Attributes:
        save_strategy, load_strategy: as in the long form.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.save_strategy = MLFlashpointMegatronAsyncSaveStrategy(self.writer, use_cached_ckpt_structure=True)
        self.load_strategy = MLFlashpointMegatronLoadStrategy(checkpoint_loader=self.loader)

    def latest(self, *, durable_step: int | None = None) -> CheckpointContainerId | None:
        """As ``MemoryStore.latest``. Finalize all requests before: one that is left it waits for until the deadline."""
        return self.loader.get_latest_complete_checkpoint(self.base, durable_step=durable_step)

    def save(self, checkpoint: dict[str, Any], step: int, *, async_save: bool = True, **options: Any) -> Any:
        """``save_local_aware_megatron_checkpoint`` of ``step``; ``options`` are its own.

        Returns:
            Megatron-Core's request, for its ``AsyncCallsQueue``, or to ``execute_sync`` at once; the version counts
            once it was finalized. None if not ``async_save``.
        """
        return save_local_aware_megatron_checkpoint(
            checkpoint, self.version(step), options.pop("save_strategy", self.save_strategy), async_save, **options
        )

    def load(self, sharded_state_dict: dict[str, Any], version: str, **options: Any) -> Any:
        """``dist_checkpointing.load`` of any ``version``; ``options`` are its own.

        Raises, on all ranks if one has reason to:
            as ``MLFlashpointMegatronLoadStrategy`` and its ``make_ready``.
        """
        self.load_strategy.make_ready(version)
        options.setdefault("sharded_strategy", self.load_strategy)
        return dist_checkpointing.load(sharded_state_dict, str(version), **options)
