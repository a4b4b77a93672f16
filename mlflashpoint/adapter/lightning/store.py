"""Opening this rank's memory store for a Trainer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mlflashpoint.adapter.lightning import leaves
from mlflashpoint.adapter.lightning.packages import pytorch_package
from mlflashpoint.adapter.lightning.places import own_folders
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.errors import RankUnknownError
from mlflashpoint.settings import StoreConfig

if TYPE_CHECKING:
    from mlflashpoint.core.runtime import Runtime


def base_of(config: StoreConfig) -> CheckpointContainerId:
    return CheckpointContainerId(str(config.base_container))


def store_opener(trainer: Any, config: StoreConfig, group: str) -> Callable[[], Runtime]:
    """What opens the store of this rank, to be called when the trainer's process group is up.

    The returned function raises RankUnknownError when the Trainer's idea of the ranks is not the launcher's, and what
    ``Runtime`` raises.
    """
    # The session of a Trainer, which has this, must not keep the Trainer alive.
    held = weakref.ref(trainer)

    def open_store() -> Runtime:
        from mlflashpoint.core.runtime import Runtime

        trainer = held()
        if trainer is None:
            raise RankUnknownError("the Trainer is gone", remedy="keep it until its fit has ended")
        leaves.register(pytorch_package(trainer).__name__)
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        launched = int(os.environ.get("WORLD_SIZE", world_size))
        if not trainer.world_size == world_size == launched:
            raise RankUnknownError(
                f"the Trainer has {trainer.world_size} ranks, its process group {world_size}, the launcher started "
                f"{launched}",
                remedy="use a strategy for as many ranks as are launched; a library call: first "
                "trainer.strategy.setup_environment()",
            )
        return Runtime(
            config,
            rank=trainer.global_rank,
            world_size=world_size,
            local_rank=trainer.local_rank,
            group=group,
            own=own_folders(trainer, str(config.base_container)) - {group},
        )

    return open_store
