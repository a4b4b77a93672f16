"""Around each save of Bridge's training loop: its time, and in ``replace`` mode what becomes of a durable one.

``replace`` keeps every Nth durable save, counted by its number (step divided by ``save_interval``), so that all ranks
and all restarts agree without talking. The others go to memory alone. Nothing is written to the save folder for those,
neither a folder that a retention policy could count nor a tracker that a resume could follow. A step is saved durably
all the same when

- its memory save failed on any rank, or a rank did not say in time that it succeeded;
- training ends at it, for whatever reason, so that what a finished job leaves behind is what it leaves without us.

The last holds in every mode for memory saves at an interval of ours: Bridge leaves with no other save than that.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from mlflashpoint.adapter.megatron_bridge import cadence, job
from mlflashpoint.adapter.megatron_bridge.local_manager import MLFlashpointLocalCheckpointManager, local_manager_of
from mlflashpoint.adapter.observe import timed
from mlflashpoint.adapter.original import Original, as_originals

log = logging.getLogger("mlflashpoint.adapter.megatron_bridge")

_TRAIN = "megatron.bridge.training.train"
#: leading parameters of save_checkpoint_and_time and of checkpoint_and_decide_exit, the same on every version
_LEADING = ("state", "model", "optimizer", "opt_param_scheduler", "num_floating_point_operations_so_far")
_SAVE = (*_LEADING, "checkpoint_manager", "non_persistent_ckpt", "train_data_iterator")
_DECIDE = (*_LEADING, "checkpoint_manager", "train_data_iterator")
_REST = ("pg_collection", "callback_manager", "module_name")

Arguments = Mapping[str, Any]


def save(original: Original, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """Around ``save_checkpoint_and_time``."""
    given = _named(_SAVE, args, kwargs)
    state = given["state"]
    this, manager = job.current_for(state.cfg), local_manager_of(given["checkpoint_manager"])
    step = int(state.train_state.step)
    if given.get("non_persistent_ckpt"):
        if this is not None and this.deciding and not this.own_interval:
            this.only_in_memory = step
        return timed(log, "non_persistent", step, original)
    if this is None or manager is None or not _goes_to_memory(this, manager, state.cfg, step):
        return timed(log, "durable", step, original)
    with manager.waiting():
        changed = {**given, "non_persistent_ckpt": True}
        result = timed(log, "non_persistent", step, lambda: original.using(**changed))
        done = manager.last_save
    ok = done is not None and done.ok and done.step == step
    assert manager.runtime is not None
    if manager.runtime.agree(f"bridge/replace/{step}", ok):
        this.only_in_memory = step
        log.info("step %d is in memory only; every %d. durable save stays durable", step, this.durable_every)
        return result
    log.warning("the memory save of step %d failed on a rank: it is saved durably, by all", step)
    return timed(log, "durable", step, lambda: as_originals(original, lambda: _save_again(given, False)))


def decide(original: Original, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """Around ``checkpoint_and_decide_exit``: the memory saves of a job that saves nowhere, and the last durable one."""
    given = _named(_DECIDE, args, kwargs)
    state = given["state"]
    this = job.current_for(state.cfg)
    step = int(state.train_state.step)
    if this is None or not this.active:
        return original()
    if cadence.due(state.cfg, step) and local_manager_of(given["checkpoint_manager"]) is not None:
        as_originals(original, lambda: _save_again(given, True))
    this.deciding = True
    try:
        leaves = original()
    finally:
        this.deciding = False
    if leaves and this.only_in_memory == step:
        as_originals(original, lambda: _save_again(given, False))
    return leaves


def describe(args: tuple[Any, ...], kwargs: Arguments) -> None:
    """Before ``save_checkpoint``: our local manager learns how the job is laid out."""
    given = {**dict(zip((*_LEADING, "checkpointing_context"), args, strict=False)), **kwargs}
    manager = local_manager_of(given.get("checkpointing_context"))
    if manager is not None:
        manager.describe(given["state"].cfg, given["model"])


def _goes_to_memory(this: job.Job, manager: MLFlashpointLocalCheckpointManager, config: Any, step: int) -> bool:
    """Whether a durable save is one of those that ``replace`` mode keeps in memory only; the same on all ranks."""
    interval = config.checkpoint.save_interval
    if this.mode != "replace" or not this.active or not this.deciding or manager.runtime is None:
        return False
    if not interval or step <= 0 or step % interval != 0:
        return False
    iterations = getattr(config.train, "train_iters", None)
    if iterations and step >= iterations:
        return False
    return bool((step // interval) % this.durable_every != 0)


def _save_again(given: Arguments, non_persistent: bool) -> None:
    """Bridge's own timed save, for a save that it has not been asked for."""
    function = importlib.import_module(_TRAIN).save_checkpoint_and_time
    known = inspect.signature(function).parameters
    values = {**given, "non_persistent_ckpt": non_persistent}
    function(**{name: value for name, value in values.items() if name in known})


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Arguments) -> dict[str, Any]:
    """The arguments by name; what stands beyond ``names`` by position is what later versions have added."""
    return {**dict(zip((*names, *_REST), args, strict=False)), **kwargs}
