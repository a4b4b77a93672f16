"""Megatron-LM's own training loop, which ships with Megatron-Core: which of its functions are patched.

What each wrapper does is said in ``mlflashpoint.adapter.megatron_lm``, which is imported when the wrapper runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflashpoint.agent.arguments import Arguments, argument
from mlflashpoint.agent.guard import Call
from mlflashpoint.agent.patch import Patch

_VERSIONS = ("megatron-core", ">=0.19,<0.20")
_TRAINING = "megatron.training"


def _patch(name: str, module: str, target: str, **wrapper: str) -> Patch:
    ours = {kind: f"{__name__}:{function}" for kind, function in wrapper.items()}
    return Patch(
        f"megatron_lm.{name}", "megatron_lm", f"{_TRAINING}.{module}", target, "megatron_lm_enabled", _VERSIONS, **ours
    )


PATCHES: tuple[Patch, ...] = (
    _patch("cadence", "training", "pretrain", around="around_pretrain"),
    _patch("store", "training", "setup_model_and_optimizer", before="before_setup"),
    _patch("resume", "checkpointing", "load_checkpoint", around="around_load"),
    _patch("write", "checkpointing", "save_checkpoint", around="around_write"),
    _patch("save", "training", "save_checkpoint_and_time", around="around_save"),
    _patch("decide", "training", "checkpoint_and_decide_exit", around="around_decide"),
)


def around_pretrain(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Turn memory saves on where the recipe leaves room for it."""
    from mlflashpoint.adapter.megatron_lm import loop

    return loop.pretrain(call, argument(args, kwargs, 0, "cfg_container"))


def before_setup(instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> None:
    """Put our local manager into the context that the loop saves and loads by."""
    from mlflashpoint.adapter.megatron_lm import loop

    loop.fill_context(args, kwargs)


def around_load(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Let the loop resume from memory where that is newest and fits."""
    from mlflashpoint.adapter.megatron_lm import loop

    return loop.load(call, argument(args, kwargs, 0, "ddp_model"), argument(args, kwargs, 5, "checkpointing_context"))


def around_write(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Tell our local manager how the job is laid out; leave what was set for memory out of durable checkpoints."""
    from mlflashpoint.adapter.megatron_lm import loop

    return loop.write(call, args, kwargs)


def around_save(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Time the save."""
    from mlflashpoint.adapter.megatron_lm import loop

    return loop.save(call, args, kwargs)


def around_decide(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Save to memory where the loop would not because it has nowhere to save durably; leave a durable checkpoint."""
    from mlflashpoint.adapter.megatron_lm import loop

    return loop.decide(call, args, kwargs)
