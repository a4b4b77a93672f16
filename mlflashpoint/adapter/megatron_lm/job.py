"""The one Megatron-LM job of this process: when it saves to memory, and what its recipe said before that was set."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.megatron_lm import arguments
from mlflashpoint.adapter.megatron_local.manager import LocalCheckpointManager
from mlflashpoint.settings import BY_NAME, StoreConfig

log = logging.getLogger("mlflashpoint.adapter.megatron")

#: arguments that ``begin`` may set
_CHANGED = ("non_persistent_ckpt_type", "non_persistent_save_interval", "non_persistent_local_ckpt_dir", "load")


class LocalManager(LocalCheckpointManager):
    """``LocalCheckpointManager`` for Megatron-LM's arguments, where ``ckpt_step`` 0 names no checkpoint."""

    side_folder = "megatron_lm"

    def is_pinned(self) -> bool:
        return bool(getattr(self.checkpoint_config, "ckpt_step", None))


@dataclass
class Job:
    """Begun when ``pretrain`` is; a second one in one process begins another.

    Attributes:
        args: Megatron-LM's arguments, changed in place.
        said: the recipe's own values of those that were changed.
        manager: in the place of NVRx's local manager.
        only_in_memory: step whose save to memory, of ours, the loop takes for its last; -1 if there was none.
    """

    args: Any
    said: Mapping[str, Any] = field(default_factory=dict)
    manager: LocalManager | None = None
    only_in_memory: int = -1

    @property
    def own_interval(self) -> bool:
        """Whether the recipe has said how often to save to memory."""
        return bool(self.said.get("non_persistent_save_interval"))


_current: Job | None = None


def begin(args: Any) -> Job | None:
    """Turn memory saves on for a job that is about to train; None if they stay off, and the log says why.

    The recipe's own interval is the cadence; where it has none, MLFLASHPOINT_SAVE_EVERY_N_STEPS is.

    Raises:
        SettingError: a setting is malformed, or there is no job id.
    """
    global _current
    _current = None
    kind, interval = args.non_persistent_ckpt_type, args.non_persistent_save_interval
    interval = interval or BY_NAME["save_every_n_steps"].read(os.environ)
    if kind == "global" or (kind is None and interval is None):
        return None
    reason = refusal(args)
    if reason is not None:
        log.warning("this job's checkpoints do not go to memory: %s", reason)
        return None
    store = StoreConfig.from_env()
    arguments.register(args)
    _current = Job(args, {name: getattr(args, name) for name in _CHANGED})
    args.non_persistent_ckpt_type = "local"
    args.non_persistent_save_interval = interval
    if args.non_persistent_local_ckpt_dir is None:
        args.non_persistent_local_ckpt_dir = str(store.base_container)
    if args.load is None:
        # The loop loads only where it has a folder to load from; in this one there is nothing durable.
        args.load = str(Path(store.base_container) / "no-durable-checkpoint")
    log.info("checkpoints go to memory every %s steps, kept in %s", interval, store.base_container)
    return _current


def end(this: Job) -> None:
    """The job is over, or can't go to memory after all: its arguments are the recipe's again."""
    global _current
    _current = None
    for name, value in this.said.items():
        setattr(this.args, name, value)


def refusal(args: Any) -> str | None:
    """Why memory saves can't serve this job, None if they can."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        return "nvidia_resiliency_ext is not installed, and Megatron-Core assembles no local checkpoint without it"
    if args.ckpt_format != "torch_dist":
        return f"--ckpt-format is {args.ckpt_format}, and Megatron-LM's local checkpoints need torch_dist"
    if getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False):
        return "the job uses FSDP, which local checkpoints do not know"
    if getattr(args, "dist_ckpt_optim_fully_reshardable", False):
        return "--dist-ckpt-optim-fully-reshardable is set, and Megatron-LM refuses it together with local checkpoints"
    if getattr(args, "moe_use_upcycling", False) or getattr(args, "ckpt_convert_format", None):
        return "the job converts a checkpoint"
    if getattr(args, "perform_rl_step", False):
        return "reinforcement learning in Megatron-LM's loop was not tested"
    return None


def current() -> Job | None:
    """The job that goes to memory in this process."""
    return _current


def due(args: Any, step: int) -> bool:
    """Whether a memory save is due at ``step`` that the loop does not make because the recipe saves nowhere."""
    interval = args.non_persistent_save_interval
    return not args.save and bool(interval) and step > 0 and step % interval == 0
