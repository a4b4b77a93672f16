"""Routing by path for strategies that don't call their CheckpointIO on every rank, or not at all.

Lightning's own strategies write through rank 0, or past the CheckpointIO. So their two methods get a function in front
that sends the paths of the base container to memory, on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflashpoint.adapter.nemo.checkpoint_io import found_version, version_of
from mlflashpoint.adapter.nemo.routing import Routing

if TYPE_CHECKING:
    from mlflashpoint.adapter.lightning.session import FitSession


def install(trainer: Any, routing: Routing, session: FitSession) -> None:
    """Route the saves and loads of ``trainer.strategy``; a second call replaces what the first put in place."""
    strategy = trainer.strategy
    save, load = type(strategy).save_checkpoint, type(strategy).load_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if not routing.is_memory(filepath):
            result = save(strategy, checkpoint, filepath, *args, **kwargs)
            session.wrote(trainer, checkpoint)
            return result
        # The state is captured anew: what Lightning has dumped may be gathered on rank 0.
        session.save(trainer, version_of(routing, filepath))
        return None

    def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not routing.is_memory(checkpoint_path):
            return load(strategy, checkpoint_path, *args, **kwargs)
        found = found_version(session, trainer, routing, checkpoint_path)
        with session.serving(trainer, found):
            return strategy.load_checkpoint(checkpoint_path, *args, **kwargs)

    vars(strategy).update(save_checkpoint=save_checkpoint, load_checkpoint=load_checkpoint)
