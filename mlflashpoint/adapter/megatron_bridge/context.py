"""Bridge's checkpointing context with our local manager in it."""

from __future__ import annotations

import copy
import logging
from typing import Any

from mlflashpoint.adapter.megatron_bridge import job
from mlflashpoint.adapter.megatron_bridge.local_manager import MLFlashpointLocalCheckpointManager
from mlflashpoint.adapter.original import Original

log = logging.getLogger("mlflashpoint.adapter.megatron_bridge")


def initialise(original: Original, checkpoint_config: Any) -> dict[str, Any]:
    """Bridge's ``init_checkpointing_context`` for a job whose local checkpoints go to memory; else as it is.

    Bridge's own runs without the local type, so it makes no manager of NVRx's, which would claim a folder.
    """
    this = job.current_for(checkpoint_config)
    if this is None or not this.active or checkpoint_config.non_persistent_ckpt_type != "local":
        result: dict[str, Any] = original()
        return result
    bare = copy.copy(checkpoint_config)
    bare.non_persistent_ckpt_type = None
    result = original.using(bare)
    if getattr(checkpoint_config, "replication", False):
        log.info("checkpoint.replication is NVRx's; copies on other nodes are made by MLFLASHPOINT_REPLICAS")
    this.manager = MLFlashpointLocalCheckpointManager(checkpoint_config)
    result["local_checkpoint_manager"] = this.manager
    return result


def checkpoint_exists(durable: bool, path: Any) -> bool:
    """Bridge's ``checkpoint_exists(path)``; true also where the job's adapters can be resumed from memory instead.

    Bridge's resume decision for PEFT asks this question alone, and only after it has asked the local manager in vain.
    """
    this = job.current()
    if durable or this is None or path is None or not this.can_resume_adapters:
        return durable
    return bool(path == this.config.checkpoint.load)


def iteration(original: Original, directory: Any, kind: str | None, context: dict[str, Any] | None) -> int:
    """Bridge's ``_get_non_persistent_iteration``, which takes a local manager for granted.

    For PEFT it loads the weights below the adapters with an empty context, and then fails by itself.
    """
    if kind == "local" and "local_checkpoint_manager" not in (context or {}):
        return int(original.using(directory, None, context))
    return int(original())
