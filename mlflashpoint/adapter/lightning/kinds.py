"""What one rank's state is under each strategy: how it is captured, checked and put back.

A strategy is recognised by the classes that it derives from, and accepted only while the methods that decide what a
checkpoint holds are Lightning's own: a strategy that gathers, shards or writes its state its own way is refused by
name, never guessed at.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mlflashpoint.adapter.lightning.packages import PACKAGES, defined_by
from mlflashpoint.core.ids import CheckpointContainerId
from mlflashpoint.errors import UnsupportedStrategyError

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.side_files import SideFiles

#: methods of a strategy that decide what a checkpoint holds and how it is put back
_CHECKPOINT_METHODS = (
    "save_checkpoint",
    "load_checkpoint",
    "lightning_module_state_dict",
    "optimizer_state",
    "load_model_state_dict",
    "load_optimizer_state_dict",
)

#: (module prefix, class, class that has to define the methods above or None to leave that to the kind, kind)
_KINDS = (
    ("nemo.lightning", "MegatronStrategy", None, "mlflashpoint.adapter.nemo.megatron_kind:MegatronKind"),
    ("", "FSDPStrategy", "FSDPStrategy", "mlflashpoint.adapter.lightning.local_shards:LocalShards"),
    ("", "ModelParallelStrategy", "ModelParallelStrategy", "mlflashpoint.adapter.lightning.local_shards:LocalShards"),
    ("", "DDPStrategy", "Strategy", "mlflashpoint.adapter.lightning.replicated:Replicated"),
    ("", "SingleDeviceStrategy", "Strategy", "mlflashpoint.adapter.lightning.replicated:Replicated"),
)


class StateKind(Protocol):
    """One way in which a strategy spreads a Trainer's state over its ranks; one instance per fit."""

    #: whether any rank's shard is as good as another's, so that another number of ranks can load it
    replicated: bool

    def topology(self, trainer: Any) -> str:
        """Fingerprint of the layout that a version of this kind can be loaded into, equal on all ranks."""

    def capture(self, trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """``(state, attributes)`` of this rank; the tensors are the live ones, they are copied by whoever calls.

        Raises:
            UnsupportedStrategyError: a part of the state can't be kept per rank.
        """

    def check(self, trainer: Any, state: Mapping[str, Any]) -> None:
        """Compare ``state`` with the model, once there is one; changes nothing.

        Raises:
            StateMismatchError: they don't fit; names the first tensors that differ.
        """

    def serving(
        self, trainer: Any, state: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """While it is open, loading any path through the trainer's strategy gives ``state`` instead of a file."""

    def side_files(self, trainer: Any, base: CheckpointContainerId, group: str) -> SideFiles | None:
        """What belongs beside the versions of ``group``; None if nothing does."""


def kind_of(trainer: Any) -> StateKind:
    """The kind of the Trainer's strategy.

    Raises:
        UnsupportedStrategyError: none fits; names the strategy and what is in the way.
    """
    strategy = trainer.strategy
    launcher = type(strategy.launcher)
    if "MultiProcessing" in launcher.__name__:
        raise _refusal(strategy, f"its {launcher.__name__} starts the ranks anew for each fit, unknown to one another")
    ancestry = [(kind.__module__, kind.__name__) for kind in type(strategy).__mro__]
    if any("XLA" in name for _, name in ancestry):
        raise _refusal(strategy, "its tensors are computed when they are asked for, and lie in no memory of their own")
    for prefix, name, definer, where in _KINDS:
        if not any(kind == name and _belongs(module, prefix) for module, kind in ancestry):
            continue
        for method in _CHECKPOINT_METHODS if definer else ():
            owner = defined_by(strategy, method)
            if owner is None or owner.__name__ != definer or not _belongs(owner.__module__, ""):
                what = (
                    f"its {method} is {owner.__module__}.{owner.__qualname__}'s own" if owner else f"it has no {method}"
                )
                raise _refusal(strategy, what)
        module, _, attribute = where.partition(":")
        kind: StateKind = getattr(importlib.import_module(module), attribute)()
        return kind
    raise _refusal(strategy, "it derives from no strategy whose state is known")


def _belongs(module: str, prefix: str) -> bool:
    prefixes = (prefix,) if prefix else tuple(PACKAGES)
    return any(module == one or module.startswith(one + ".") for one in prefixes)


def _refusal(strategy: object, why: str) -> UnsupportedStrategyError:
    kind = type(strategy)
    return UnsupportedStrategyError(
        f"the state of {kind.__module__}.{kind.__qualname__} can't be kept per rank: {why}",
        remedy="use SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy or NeMo's MegatronStrategy, "
        "launched as scripts, or the recipe's own checkpoints alone",
    )


@contextlib.contextmanager
def diverted(instance: object, **methods: Any) -> Iterator[None]:
    """Let ``instance`` have these attributes of its own for a while, then what it had before."""
    before = {name: vars(instance)[name] for name in methods if name in vars(instance)}
    vars(instance).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(instance).pop(name, None)
        vars(instance).update(before)
