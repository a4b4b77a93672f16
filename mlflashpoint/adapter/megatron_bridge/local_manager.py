"""What stands in the place of Bridge's local checkpoint manager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mlflashpoint.adapter.megatron_bridge import layout
from mlflashpoint.adapter.megatron_bridge.index import MLFlashpointLocalCheckpointIndex
from mlflashpoint.adapter.megatron_local.manager import LocalCheckpointManager

#: with these Bridge reorders gated weights on load, so that they differ from what was stored on purpose
_REORDERING = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")


class MLFlashpointLocalCheckpointManager(MLFlashpointLocalCheckpointIndex, LocalCheckpointManager):
    """Saves Bridge's local checkpoints to memory and loads them."""

    def describe(self, config: Any, model: Sequence[torch.nn.Module]) -> None:
        """Learn how the job is laid out, which is stored beside each shard; cheap after the first time."""
        self.learn(lambda: layout.topology_of(config), model)

    @contextlib.contextmanager
    def loading(self, state: Any, model: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Stands around Bridge's ``load_checkpoint``; collective.

        If the version in memory fits on every rank, Bridge resumes from it whatever the recipe says of a pretrained
        checkpoint to begin with.
        """
        with self.resuming(
            lambda: layout.topology_of(state.cfg),
            model,
            config=state.cfg.checkpoint,
            overrides=lambda: _resume_only(state.cfg, self.local_ckpt_dir),
            step=lambda: int(state.train_state.step),
            verify=all(getattr(state.cfg.model, name, None) is None for name in _REORDERING),
        ):
            yield


def local_manager_of(owner: Any) -> MLFlashpointLocalCheckpointManager | None:
    """Our local manager in a checkpoint manager or a checkpointing context of Bridge's, if it is one of ours."""
    context = owner if isinstance(owner, dict) else getattr(owner, "checkpointing_context", None)
    found = context.get("local_checkpoint_manager") if isinstance(context, dict) else None
    return found if isinstance(found, MLFlashpointLocalCheckpointManager) else None


def _resume_only(config: Any, folder: str) -> dict[str, Any]:
    """Fields of the checkpoint config that would keep Bridge from resuming at what is in memory."""
    checkpoint = config.checkpoint
    overrides: dict[str, Any] = {"pretrained_checkpoint": None}
    if getattr(config, "peft", None) is not None:
        # Bridge knows a resume of adapters, which alone are stored, by a folder to load from.
        overrides["load"] = checkpoint.load or folder
        overrides["finetune"] = False
    elif checkpoint.finetune:
        # Then ``load`` is where the weights came from at the very first start, and not where this job stands.
        overrides |= {"finetune": False, "load": None}
    return overrides
