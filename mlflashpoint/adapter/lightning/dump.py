"""Lightning's own checkpoint content, without what no resume reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: ``load_from_checkpoint`` alone reads these, and they hold whatever objects the recipe passed to its classes
_HYPER_PARAMETERS = (
    "CHECKPOINT_HYPER_PARAMS_KEY",
    "CHECKPOINT_HYPER_PARAMS_NAME",
    "CHECKPOINT_HYPER_PARAMS_TYPE",
)


def dump(trainer: Any) -> dict[str, Any]:
    """What ``Trainer.save_checkpoint`` hands to the strategy, less the hyperparameters."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for owner in (trainer.lightning_module, trainer.datamodule):
        for name in _HYPER_PARAMETERS:
            checkpoint.pop(getattr(owner, name, None), None)  # type: ignore[arg-type]
    _count_the_batch(trainer, checkpoint["loops"]["fit_loop"])
    return checkpoint


def _without_lost_file(state: Any) -> Any:
    """A ModelCheckpoint's state, but for a file that was never finished when the job was killed.

    A durable checkpoint names only files that are older than it. A memory version may name one that was still being
    written, and that has been cleared away since; to replace it later NeMo would fail to remove it.
    """
    last = state.get("last_model_path") if isinstance(state, dict) else None
    if not isinstance(last, (str, Path)) or not str(last) or "://" in str(last):
        return state
    if any(Path(found).exists() for found in (str(last), str(last).removesuffix(".ckpt"))):
        return state
    return {**state, "last_model_path": ""}


def _count_the_batch(trainer: Any, loops: dict[str, Any]) -> None:
    """Let the batch at whose end this is called count as done, for releases that would not count it.

    Until 2.5 Lightning resumes from the last batch that was *completed*, which at ``on_train_batch_end`` is the one
    before: the rest of the epoch has one batch more than the data, and gradient accumulation is out of step. Later
    releases see it by themselves, and expect the counters as they are.
    """
    loop = trainer.fit_loop.epoch_loop
    current = loops["epoch_loop.batch_progress"]["current"]
    if hasattr(loop, "update_restart_stage") or current["completed"] != current["processed"] - 1:
        return
    for counters in (current, loops["epoch_loop.batch_progress"]["total"]):
        counters["completed"] += 1
    # A validation that is due now is made up for after the resume, and the loop counts the step after it; not by NeMo.
    made_up = not hasattr(loop, "skip_val_on_restart") and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    if not made_up:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def completed(trainer: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` as it fits what is there now: hyperparameters for hooks that look at them, and existing files."""
    filled = dict(checkpoint)
    filled["callbacks"] = {key: _without_lost_file(state) for key, state in checkpoint.get("callbacks", {}).items()}
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is not None and getattr(owner, "hparams", None):
            filled[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    return filled
