"""Lightning's loops after a resume within an epoch: what their counters lack, so that they go on as if undisturbed.

Lightning's own resume, from a file as well, miscounts in several ways that differ between releases. A job that is
resumed often can't live with them, so memory versions and the fits that go on from one are put right here.
"""

from __future__ import annotations

from typing import Any


def count(trainer: Any, loops: dict[str, Any]) -> None:
    """Put right what ``dump_checkpoint`` says of the loops at ``on_train_batch_end``.

    Args:
        trainer: the Trainer that is fitting.
        loops: the state of its ``fit_loop``, changed in place.
    """
    _count_the_batch(trainer, loops)
    _count_the_epoch(loops["epoch_progress"])


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


def _count_the_epoch(progress: dict[str, Any]) -> None:
    """Let the running epoch count as started.

    From 2.5 on a fit that was resumed at the end of an epoch never counts the next one as started. A resume from within
    that one then takes it for finished, forgets its batches, and trains it a second time.
    """
    if progress["current"]["ready"] != progress["current"]["processed"]:
        return
    for counters in (progress["current"], progress["total"]):
        counters["ready"] += 1
        counters["started"] += 1


def start_next_epoch(trainer: Any) -> None:
    """At the start of a fit that was resumed at the end of an epoch: let the next one start like any other.

    Until 2.5 the loop looks for one more batch of the epoch that is over, unless a validation is to be made up for, and
    a loader that can't be resumed gives it one. From 2.5 on the fit takes the next epoch for the one that it was
    resumed in: it is not counted as started, see above, and its ``on_train_epoch_start`` is not called.
    """
    loop = trainer.fit_loop
    if hasattr(loop, "restarted_mid_epoch"):
        current = loop.epoch_progress.current
        if loop.restarted_mid_epoch and current.ready == current.processed:
            loop.reset_restart_stage()
            _pass_the_end(loop)
    elif _no_batch_left(loop.epoch_loop):
        _pass_the_end(loop)
        if not loop.epoch_loop._should_check_val_fx(loop._data_fetcher):
            loop.epoch_loop.val_loop._has_run = True


def _pass_the_end(loop: Any) -> None:
    """Let loaders that can be resumed know that the epoch is over.

    What they have stored says that the last batch was given, not that there is none left. Such a loader gives the next
    epoch, for which the loop does not ask it to begin anew, no batch at all.
    """
    loader = loop._combined_loader
    states = loader._state_dicts()
    if not states:
        return
    if next(loader, None) is not None:
        # It begins the next epoch by itself.
        loader._load_state_dicts(states)
    iter(loop._data_fetcher)


def _no_batch_left(batches: Any) -> bool:
    # NeMo's own loop, which has the attribute, makes up for no validation.
    return not hasattr(batches, "skip_val_on_restart") and batches._num_ready_batches_reached()


def end_epoch(trainer: Any) -> None:
    """Let the epoch that a resumed fit has trained to its end, end like any other.

    Lightning takes the fit loop for restarting until then. It therefore leaves out the plateau schedulers, as if no
    metric were known; until 2.5 it also steps the other schedulers that count epochs a second time.
    """
    known = trainer.callback_metrics
    # a metric that really is not there would be an error of the recipe's
    if all(not config.reduce_on_plateau or config.monitor in known for config in trainer.lr_scheduler_configs):
        trainer.fit_loop._restarting = False
