"""Scripts in plain PyTorch: which functions of ``torch.distributed.checkpoint`` are patched.

What becomes of a call is said in ``mlflashpoint.adapter.pytorch.script``, which is imported when one is made. They are
one group: what DCP, or our own save, calls inside a call is no call of the script's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflashpoint.agent.arguments import Arguments
from mlflashpoint.agent.guard import Call
from mlflashpoint.agent.patch import Patch

_VERSIONS = ("torch", ">=2.13,<2.15")


def _patch(name: str, module: str, target: str, **wrapper: str) -> Patch:
    ours = {kind: f"{__name__}:{function}" for kind, function in wrapper.items()}
    return Patch(f"dcp.{name}", "dcp", module, target, "dcp_mode", _VERSIONS, group="dcp", **ours)


PATCHES: tuple[Patch, ...] = (
    _patch("save", "torch.distributed.checkpoint.state_dict_saver", "save", around="around_save"),
    _patch("async_save", "torch.distributed.checkpoint.state_dict_saver", "async_save", around="around_async_save"),
    _patch("load", "torch.distributed.checkpoint.state_dict_loader", "load", around="around_load"),
    _patch("end", "torch.distributed.distributed_c10d", "destroy_process_group", around="around_end"),
)


def around_save(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Save to memory beside the durable save, or in its place."""
    from mlflashpoint.adapter.pytorch.script import saves

    return saves.save(call, args, kwargs, is_async=False)


def around_async_save(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """The same for a save in the background."""
    from mlflashpoint.adapter.pytorch.script import saves

    return saves.save(call, args, kwargs, is_async=True)


def around_load(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Load from memory what that has."""
    from mlflashpoint.adapter.pytorch.script import loads

    return loads.load(call, args, kwargs)


def around_end(call: Call, instance: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """The job's ranks are about to part: what is in memory only is made durable while they can still talk."""
    import sys

    failure = None
    if "mlflashpoint.adapter.pytorch.script.streams" in sys.modules:
        from mlflashpoint.adapter.pytorch.script import ending

        failure = ending.before_parting(args[0] if args else kwargs.get("group"))
    result = call()
    if failure is not None:
        call.error = failure
        raise failure
    return result
