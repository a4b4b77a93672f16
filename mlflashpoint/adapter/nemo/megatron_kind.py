"""NeMo's MegatronStrategy: its own save and load, with a CheckpointIO in between that keeps this rank's part.

The strategy adds the optimizer's shards after Lightning has dumped the checkpoint, and hands all of it to its
CheckpointIO on every rank. So for the time of a memory save or load that CheckpointIO is ours; NeMo's own one, with
whatever durable save it is still busy with, is not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from mlflashpoint.adapter.lightning.dump import completed, dump
from mlflashpoint.adapter.lightning.kinds import diverted
from mlflashpoint.adapter.nemo import local_state
from mlflashpoint.adapter.nemo.context import ContextFiles
from mlflashpoint.adapter.nemo.routing import Routing
from mlflashpoint.errors import UnsupportedStrategyError

CONTENT_METADATA = "content_metadata"


class MegatronKind:
    """See the module; implements StateKind of ``mlflashpoint.adapter.lightning``."""

    replicated = False

    def topology(self, trainer: Any) -> str:
        strategy = trainer.strategy
        sizes = {
            "tp": getattr(strategy, "tensor_model_parallel_size", 1),
            "pp": getattr(strategy, "pipeline_model_parallel_size", 1),
            "vp": getattr(strategy, "virtual_pipeline_model_parallel_size", None),
            "cp": getattr(strategy, "context_parallel_size", 1),
            "ep": getattr(strategy, "expert_model_parallel_size", 1),
            "etp": getattr(strategy, "expert_tensor_parallel_size", None),
        }
        return "nemo/megatron/" + "-".join(f"{name}{size}" for name, size in sizes.items() if size not in (None, 1))

    def capture(self, trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        strategy = trainer.strategy
        if getattr(strategy, "save_ckpt_format", None) == "fsdp_dtensor":
            raise UnsupportedStrategyError(
                f"{type(strategy).__qualname__} with save_ckpt_format='fsdp_dtensor' writes past its CheckpointIO",
                remedy="use save_ckpt_format='torch_dist'",
            )
        if getattr(trainer.lightning_module, "model_transform", None) is not None:
            raise UnsupportedStrategyError(
                f"{type(strategy).__qualname__} transforms the model (PEFT) only after its weights have been restored",
                remedy="use the recipe's own checkpoints for it",
            )
        keeper = Keeper()
        # The optimizer's own state would be gathered here only for the strategy to throw it away. What it keeps for
        # the optimizer is wanted whether or not the recipe's checkpoints have it.
        with (
            diverted(strategy, _checkpoint_io=keeper, ckpt_save_optimizer=True),
            diverted(strategy, optimizer_state=lambda optimizer: {}),
        ):
            strategy.save_checkpoint(dump(trainer), "memory", storage_options={})
        if keeper.checkpoint is None:
            raise UnsupportedStrategyError(f"{type(strategy).__qualname__} saved nothing through its CheckpointIO")
        return local_state.split(keeper.checkpoint), {CONTENT_METADATA: keeper.content_metadata}

    def check(self, trainer: Any, state: Mapping[str, Any]) -> None:
        # the strategy has none before it is set up
        model = getattr(trainer.strategy, "megatron_parallel", None)
        if model is None:
            return
        local_state.check(state, {"state_dict": model.sharded_state_dict()})

    @contextlib.contextmanager
    def serving(self, trainer: Any, state: Mapping[str, Any], attributes: Mapping[str, Any]) -> Iterator[None]:
        stored = {**state, "common": completed(trainer, state["common"])}
        with diverted(trainer.strategy, _checkpoint_io=Keeper(stored, attributes.get(CONTENT_METADATA))):
            yield

    def side_files(self, trainer: Any, base: str, group: str) -> ContextFiles:
        return ContextFiles(Routing(base), trainer, group)


class Keeper:
    """Stands in for the strategy's CheckpointIO: keeps what is saved through it, gives what it was made with.

    Args:
        stored: what ``local_state.split`` gave, to be loaded.
        content_metadata: what the strategy told about the layout of ``stored`` when it saved it.
    """

    def __init__(self, stored: Mapping[str, Any] | None = None, content_metadata: Any = None) -> None:
        self.stored = stored
        self.content_metadata = content_metadata
        self.checkpoint: dict[str, Any] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.checkpoint = checkpoint
        self.content_metadata = (storage_options or {}).get(CONTENT_METADATA)

    def load_checkpoint(self, path: Any, sharded_state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Raises StateMismatchError if what is stored does not fit."""
        assert self.stored is not None
        return local_state.join(self.stored, sharded_state_dict)

    def load_content_metadata(self, path: Any = None, preloaded_state_dict: Any = None) -> Any:
        return self.content_metadata

    @property
    def save_sharded_strategy(self) -> Any:
        """NeMo asks for it to save the state of a model that ModelOpt has converted, outside the checkpoint."""
        raise UnsupportedStrategyError(
            "MegatronStrategy saves the state of a model converted by ModelOpt past its CheckpointIO",
            remedy="use the recipe's own checkpoints for it",
        )
