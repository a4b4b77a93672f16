"""Megatron Bridge: which of its functions are patched.

Each wrapper here is a few lines; what it does is said in ``mlflashpoint.adapter.megatron_bridge``, which is imported
only when the wrapper runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflashpoint.agent.arguments import Arguments, argument
from mlflashpoint.agent.guard import Call
from mlflashpoint.agent.patch import Patch

_VERSIONS = ("megatron-bridge", ">=0.4.2,<0.7")
_TRAINING = "megatron.bridge.training"


def _patch(name: str, module: str, target: str, **wrapper: str) -> Patch:
    ours = {kind: f"{__name__}:{function}" for kind, function in wrapper.items()}
    return Patch(f"bridge.{name}", "bridge", f"{_TRAINING}.{module}", target, "bridge_enabled", _VERSIONS, **ours)


PATCHES: tuple[Patch, ...] = (
    _patch("cadence", "config", "ConfigContainer.validate", before="before_validate"),
    _patch("store", "checkpointing", "init_checkpointing_context", around="around_context"),
    _patch("describe", "checkpointing", "save_checkpoint", before="before_save"),
    _patch("resume", "checkpointing", "load_checkpoint", around="around_load"),
    _patch("adapters", "checkpointing", "_get_non_persistent_iteration", around="around_iteration"),
    _patch("resume_adapters", "setup", "checkpoint_exists", around="around_exists"),
    _patch("save", "train", "save_checkpoint_and_time", around="around_save"),
    _patch("decide", "train", "checkpoint_and_decide_exit", around="around_decide"),
)


def before_validate(config: Any, args: Arguments, kwargs: Mapping[str, Any]) -> None:
    """Turn memory saves on where the recipe leaves room for it."""
    from mlflashpoint.adapter.megatron_bridge import cadence

    cadence.prepare(config)


def around_context(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Put our local manager into the context that Bridge saves and loads by."""
    from mlflashpoint.adapter.megatron_bridge import context

    return context.initialise(call, argument(args, kwargs, 0, "checkpoint_config"))


def before_save(instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> None:
    """Tell our local manager how the job is laid out."""
    from mlflashpoint.adapter.megatron_bridge import saves

    saves.describe(args, kwargs)


def around_load(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Let Bridge resume from memory where that is newest and fits."""
    from mlflashpoint.adapter.megatron_bridge.local_manager import local_manager_of

    manager = local_manager_of(argument(args, kwargs, 5, "checkpointing_context"))
    if manager is None:
        return call()
    with manager.loading(argument(args, kwargs, 0, "state"), argument(args, kwargs, 1, "model")):
        return call()


def around_exists(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Let Bridge's resume decision for PEFT adapters hear of memory."""
    from mlflashpoint.adapter.megatron_bridge import context

    return context.checkpoint_exists(call(), argument(args, kwargs, 0, "checkpoints_path"))


def around_iteration(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Let Bridge load the weights that adapters sit on, which it does without a local manager."""
    from mlflashpoint.adapter.megatron_bridge import context

    names = ("non_persistent_global_dir", "non_persistent_ckpt_type", "checkpointing_context")
    return context.iteration(call, *(argument(args, kwargs, place, name) for place, name in enumerate(names)))


def around_save(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Time the save; in ``replace`` mode, send it to memory."""
    from mlflashpoint.adapter.megatron_bridge import saves

    return saves.save(call, args, kwargs)


def around_decide(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Save to memory where Bridge would not because it has nowhere to save durably; leave a durable checkpoint."""
    from mlflashpoint.adapter.megatron_bridge import saves

    return saves.decide(call, args, kwargs)
