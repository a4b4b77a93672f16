"""Saving a whole Megatron checkpoint into memory, its common state on every node."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing import utils as mcore_utils
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

from mlflashpoint.adapter.megatron.readiness import all_ready
from mlflashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy, serialised
from mlflashpoint.core.nesting import too_deep

__all__ = ["save_local_aware_megatron_checkpoint"]

#: Megatron-Core's key of the content metadata in the common state
_CONTENT_METADATA = "content_metadata"
_UNSET: Any = object()


def save_local_aware_megatron_checkpoint(
    checkpoint: dict[str, Any],
    checkpoint_dir: str,
    save_strategy: Any,
    async_save: bool = True,
    *,
    content_metadata: Any = _UNSET,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    async_strategy: str = "mcore",
) -> Any:
    """Like ``dist_checkpointing.save``, with the common state in every rank's shard and on every node.

    Args:
        checkpoint: the sharded state dict; changed in place, as by Megatron-Core.
        checkpoint_dir: the version's id, ``<base container>/step-<n>_ckpt`` in the default group.
        save_strategy: an ``MLFlashpointMegatronAsyncSaveStrategy``, or Megatron-Core's fully parallel wrapper of one.
        async_save: whether to return a request for the caller to schedule, or to be done when this returns.
        content_metadata: as in ``dist_checkpointing.save``; None is stored too.
        validate_access_integrity: as there.
        preprocess_common_before_consistancy_check: as there.
        async_strategy: whose async queue the request is for, ``mcore`` or ``nvrx``.

    Returns:
        the async request, or None. Once it is finalized, or this returns None, every node has the version's folder.

    Raises:
        TypeError: the strategy does not save to memory.
        as ``MLFlashpointMegatronAsyncSaveStrategy``, on all ranks if one has reason to; of an async save what
            concerns the writing is raised by the request's finalizing.
        PeerError: Megatron-Core has refused the state on another rank; there it is what Megatron-Core raises.
    """
    base_strategy = getattr(save_strategy, "base_strategy", save_strategy)
    if not isinstance(base_strategy, MLFlashpointMegatronAsyncSaveStrategy):
        raise TypeError(f"{type(base_strategy).__name__} does not save to memory")
    where: dict[str, Any] = {
        "version": base_strategy.name_of(checkpoint_dir),
        "deadline_s": base_strategy.deadline_s(checkpoint_dir),
    }
    sharded: dict[str, Any] = {}
    compared: Any = None
    common = b""
    problem: Exception | None = None
    try:
        if content_metadata is not _UNSET:
            checkpoint[_CONTENT_METADATA] = content_metadata
        if checkpoint.get(_CONTENT_METADATA) is not None:
            clean = getattr(mcore_utils, "_clean_metadata_for_serialization", lambda metadata: metadata)
            checkpoint[_CONTENT_METADATA] = clean(checkpoint[_CONTENT_METADATA])
        # What each rank does for itself: one that fails here must not leave the others in the exchange behind it.
        sharded, compared = save_preprocess(checkpoint, False)
        common = serialised(compared)
        if validate_access_integrity and preprocess_common_before_consistancy_check is not None:
            compared = preprocess_common_before_consistancy_check(compared)
    except RecursionError:
        problem = too_deep(checkpoint)
    except Exception as error:
        problem = error
    all_ready("preprocess", problem, **where)
    if validate_access_integrity:
        try:
            validate_sharding_integrity(determine_global_metadata(sharded)[1], common_state_dict=compared)
        except Exception as error:
            problem = error
        # Megatron-Core's wrappers exchange what each rank saves before they call the strategy.
        all_ready("sharding", problem, **where)
    with base_strategy.with_common(common):
        if not async_save:
            save_strategy.save(sharded, checkpoint_dir)
            return None
        if "async_strategy" in inspect.signature(save_strategy.async_save).parameters:
            return save_strategy.async_save(sharded, checkpoint_dir, async_strategy)
        return save_strategy.async_save(sharded, checkpoint_dir)
