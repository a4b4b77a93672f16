"""Megatron's tensor-aware state dict to a state of the store and back.

``MCoreTensorAwareStateDict`` is what a Megatron loop hands to a local checkpoint manager, and what it wants back. It
consists of a common part and of a sharded part.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.megatron_local import leaves
from mlflashpoint.core.state import register_leaf
from mlflashpoint.errors import StateMismatchError

#: LayerWise optimizers put their state into such files in the local checkpoint folder, beside the state dict
SIDE_FILES = "layer_wise_optimizer_*.pt"


@dataclass(frozen=True)
class LocalShard:
    """What one rank saves: taken apart while the store stages it, so that a fault in it is a failed save.

    Attributes:
        tasd: from ``MCoreTensorAwareStateDict.from_state_dict``; its tensors are the live ones.
        folder: the rank's local checkpoint folder; files that the loop has put there become part of the shard.
    """

    tasd: Any
    folder: Path


def register() -> None:
    """Enter what a shard consists of into the core's allow-list; imports Megatron-Core."""
    leaves.register()
    register_leaf("megatron.LocalShard", LocalShard, _take_apart, lambda state: state)


def _take_apart(shard: LocalShard) -> dict[str, Any]:
    return {
        "common": leaves.with_devices(shard.tasd.common),
        "sharded": shard.tasd.sharded_state_dict,
        "files": {path.name: path.read_bytes() for path in sorted(shard.folder.glob(SIDE_FILES))},
    }


def put_together(state: Any, folder: Path) -> Any:
    """A tensor-aware state dict that the loop can load from; puts the files back where it looks for them.

    Raises:
        StateMismatchError: the state is not one of a ``LocalShard``.
    """
    if not isinstance(state, dict) or set(state) != {"common", "sharded", "files"}:
        raise StateMismatchError(
            "the stored state is no local checkpoint of Megatron's", remedy="give each job its own job id"
        )
    for name, data in state["files"].items():
        if not Path(name).match(SIDE_FILES) or Path(name).name != name:
            raise StateMismatchError(f"the stored state holds an unknown file {name!r}")
        (folder / name).write_bytes(data)
    return _recording()(common=state["common"], sharded_state_dict=state["sharded"])


def shapes_of(tasd: Any) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of what is stored of each model parameter, by section and name; several where a factory had split it."""
    sharded_tensor = importlib.import_module("megatron.core.dist_checkpointing.mapping").ShardedTensor

    def shards(value: Any) -> Iterator[Any]:
        if isinstance(value, sharded_tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from shards(item)

    return {
        f"{section}.{name}": [tuple(shard.local_shape) for shard in shards(value)]
        for section, values in tasd.sharded_state_dict.items()
        if is_model_section(section)
        for name, value in values.items()
    }


def is_model_section(name: str) -> bool:
    """Whether a part of the state dict holds a model chunk: ``model``, or ``model0`` and on with virtual stages."""
    return name == "model" or (name.startswith("model") and name[5:].isdigit())


@functools.cache
def _recording() -> type:
    """``MCoreTensorAwareStateDict`` that remembers the model sections it gave out, so that the load can be verified."""
    base: type = importlib.import_module(
        "megatron.core.dist_checkpointing.tensor_aware_state_dict"
    ).MCoreTensorAwareStateDict

    class RecordingStateDict(base):  # type: ignore[misc]
        given: dict[str, dict[str, Any]] | None = None

        def to_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            result = super().to_state_dict(*args, **kwargs)
            if isinstance(result, dict):
                # A copy of the upper two levels: the loop takes entries out of them while it loads.
                self.given = {name: dict(part) for name, part in result.items() if is_model_section(name)}
            return result

    return RecordingStateDict
