"""The saver of the user guide: who this process is, and which stores it has open; the runtime does the work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from mlflashpoint.core.node_versions import split_version
from mlflashpoint.core.onlooker import Onlooker
from mlflashpoint.core.ranks import Ranks
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import FlashpointError
from mlflashpoint.settings import BY_NAME

__all__ = ["DefaultMLFlashpointCheckpointSaver", "MLFlashpointCheckpointSaver", "Stores", "deadline_of"]


class Stores(Protocol):
    """The part of CheckpointObjectManager that savers and loaders use."""

    group: str

    def runtime(self, base_container: str, ranks: Ranks | None = None) -> Runtime: ...

    def opened(self, base_container: str) -> Runtime | None: ...

    def gave_up(self) -> bool: ...

    def onlooker(self, base_container: str, ranks: Ranks | None = None) -> Onlooker: ...

    def reached(self, base_container: str, step: int, *, resumed: bool = False) -> None: ...


def deadline_of(stores: Stores, version: object) -> float:
    """The deadline, in seconds, of the store that ``version`` lies in; the setting's if that is not open."""
    with contextlib.suppress(FlashpointError):
        opened = stores.opened(split_version(str(version), stores.group)[0])
        if opened is not None:
            return opened.config.deadline_s
    return float(BY_NAME["deadline_s"].read(os.environ))


class DefaultMLFlashpointCheckpointSaver:
    """Saves into the memory store of whichever base container a checkpoint's id lies in.

    Args:
        global_rank_getter: this process's global rank; None asks torch.distributed and the environment.
        local_rank_getter: its rank on this node.
        global_barrier_func: accepted for the guide's sake; a save waits for no other rank.
        ckpt_obj_manager: the open stores, shared with the loader.
        replication_manager: accepted for the guide's sake; ``initialize`` has told the stores all that it knows.
        initial_buffer_size_bytes: accepted for the guide's sake; the store allocates what the state needs, once.
        use_optimized_save: accepted for the guide's sake; there is one way to save.
        world_size_getter: number of ranks; torch.distributed's by default.
    """

    def __init__(
        self,
        global_rank_getter: Callable[[], int] | None = None,
        local_rank_getter: Callable[[], int] | None = None,
        global_barrier_func: Callable[[], Any] | None = None,
        ckpt_obj_manager: Stores | None = None,
        replication_manager: Any = None,
        initial_buffer_size_bytes: int | None = None,
        use_optimized_save: bool = True,
        *,
        world_size_getter: Callable[[], int] | None = None,
    ) -> None:
        self.stores = ckpt_obj_manager if ckpt_obj_manager is not None else _new_stores()
        self._getters = (global_rank_getter, world_size_getter, local_rank_getter)

    def runtime(self, base_container: str) -> Runtime:
        """The store of ``base_container``; raises as ``CheckpointObjectManager.runtime``."""
        return self.stores.runtime(base_container, ranks_by(*self._getters))

    def __getstate__(self) -> dict[str, Stores]:
        # The getters may be lambdas, and a checkpoint process has its own answers.
        return {"stores": self.stores}

    def __setstate__(self, state: dict[str, Stores]) -> None:
        self.stores = state["stores"]
        self._getters = (None, None, None)


#: the guide's abstract name for the same thing
MLFlashpointCheckpointSaver = DefaultMLFlashpointCheckpointSaver


def ranks_by(
    rank: Callable[[], int] | None, world_size: Callable[[], int] | None, local_rank: Callable[[], int] | None
) -> Ranks | None:
    """What the getters say; None if they are not given."""
    if rank is None or local_rank is None:
        return None
    return Ranks(rank(), (world_size or dist.get_world_size)(), local_rank())


def _new_stores() -> Stores:
    from mlflashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager

    return CheckpointObjectManager()
