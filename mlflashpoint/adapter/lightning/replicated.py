"""Strategies under which every rank has the whole state: a single device, and DDP. Each rank stores its own copy.

What differs between the ranks (the position in their data, buffers that DDP does not broadcast) is each rank's own
again after a resume, where a file written by rank 0 would give rank 0's to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from mlflashpoint.adapter.lightning.dump import completed, dump
from mlflashpoint.adapter.lightning.kinds import diverted
from mlflashpoint.adapter.lightning.mismatch import compare
from mlflashpoint.adapter.lightning.packages import PACKAGES, defined_by
from mlflashpoint.errors import UnsupportedStrategyError

#: hooks by which a module changes which tensors a checkpoint holds
_HOOKS = ("on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict")


class Replicated:
    """See the module; implements StateKind."""

    replicated = True

    def topology(self, trainer: Any) -> str:
        return "lightning/replicated"

    def capture(self, trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "consolidate_state_dict"):
                raise UnsupportedStrategyError(
                    f"{type(optimizer).__module__}.{type(optimizer).__qualname__} under "
                    f"{type(trainer.strategy).__qualname__} shards its state, and gives it to rank 0 alone",
                    remedy="use FSDPStrategy, or an optimizer that is not sharded",
                )
        return {"checkpoint": dump(trainer)}, {}

    def check(self, trainer: Any, state: Mapping[str, Any]) -> None:
        module = trainer.lightning_module
        if module is None:
            return
        hooked = any(_overrides(module, name) for name in _HOOKS)
        compare(state["checkpoint"]["state_dict"], module.state_dict(), missing=module.strict_loading and not hooked)

    def serving(
        self, trainer: Any, state: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        checkpoint = completed(trainer, state["checkpoint"])
        return diverted(trainer.strategy, load_checkpoint=lambda *args, **kwargs: checkpoint)

    def side_files(self, trainer: Any, base: str, group: str) -> None:
        return None


def _overrides(module: object, name: str) -> bool:
    owner = defined_by(module, name)
    if owner is None or owner.__module__.startswith("torch."):
        return False
    return not owner.__module__.startswith(tuple(PACKAGES))
