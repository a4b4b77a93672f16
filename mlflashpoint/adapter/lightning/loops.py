"""Lightning's loops after a resume within an epoch: what their counters lack, so that they go on as if undisturbed.

Lightning's own resume, from a file as well, miscounts in several ways that differ between releases. A job that is
resumed often can't live with them, so memory versions and the fits that go on from one are put right here.
"""

from __future__ import annotations

from typing import Any

from mlflashpoint.adapter.lightning import loaders


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
    made_up = makes_up(loop) and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
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


def makes_up(batches: Any) -> bool:
    """Whether a loop of batches that was resumed behind the last one of an epoch makes the validation that was due."""
    # NeMo's own loop, which has the attribute, leaves it out.
    return not hasattr(batches, "skip_val_on_restart")


def go_on(trainer: Any, *, whole: bool, last: bool = False) -> None:
    """At the start of a fit that was resumed behind a batch: let it do first what comes behind a batch.

    That is the validation that is due, the plateau schedulers that count steps, and the end of the epoch if the batch
    was its last. Until 2.5 Lightning makes up for a validation, and if none is due looks for one more batch of an epoch
    that is over, which a loader that can't be resumed gives it. From 2.5 on it takes both the validation and the end of
    the epoch for done.

    Args:
        trainer: the Trainer that is fitting.
        whole: whether what the epoch has logged is known; without it an epoch can't end like any other.
        last: whether that batch was the last of the training; then its end comes next, see ``last_step``.
    """
    loop = trainer.fit_loop
    batches, validation = loop.epoch_loop, loop.epoch_loop.val_loop
    later = hasattr(loop, "restarted_mid_epoch")
    if later and not _go_back_behind_the_batch(loop, whole or last):
        return
    counted = False
    if last and not makes_up(batches):
        # NeMo's own loop leaves a validation out that is made again by going on; here nothing else makes it.
        batches.skip_val_on_restart, counted = False, not later
    due = batches._should_check_val_fx(loop._data_fetcher)
    if due:
        # It begins; what is stored of its counters is of the one before, what the Trainer remembers of an earlier fit.
        validation._restarting = validation._has_run = False
        if later:
            validation._restart_stage = "restarted_mid_evaluation"
        if later or counted:
            # It will be counted twice: when the loop starts, or at the save, and behind the validation.
            batches._batches_that_stepped -= not batches._should_accumulate()
    else:
        _step_plateaus(trainer)
    if _no_batch_left(batches):
        loaders.pass_the_end(loop)
        if not due and not last:
            validation._has_run = True


def _go_back_behind_the_batch(loop: Any, whole: bool) -> bool:
    """From 2.5 on: let the loops stand where the batch had ended, with its epoch under way; whether they do."""
    batches, progress = loop.epoch_loop, loop.epoch_progress
    if not (loop.restarted_mid_epoch and batches.restarted_on_train_batch_end):
        return False
    over = progress.current.ready == progress.current.processed
    if over and not whole:
        # The epoch stays over, and the next one starts like any other.
        loop.trainer._logger_connector.reset_results()
        loop.reset_restart_stage()
        loaders.pass_the_end(loop)
        return False
    if over:
        for counters in (progress.current, progress.total):
            counters.processed -= 1
            counters.completed -= 1
    batches.batch_progress.increment_completed()
    # With this stage the loop would forget the batches of an epoch that has no more of them.
    batches.reset_restart_stage()
    return True


def _step_plateaus(trainer: Any) -> None:
    known = trainer.callback_metrics
    if all(not one.reduce_on_plateau or one.monitor in known for one in trainer.lr_scheduler_configs):
        trainer.fit_loop.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)


def _no_batch_left(batches: Any) -> bool:
    return makes_up(batches) and bool(batches._num_ready_batches_reached())


def end_epoch(trainer: Any) -> None:
    """Let the epoch that a resumed fit has trained to its end, end like any other.

    Lightning takes the fit loop for restarting until then. It therefore leaves out the plateau schedulers, as if no
    metric were known; until 2.5 it also steps the other schedulers that count epochs a second time.
    """
    # An epoch without a batch left does not enter its loop, which would do this.
    trainer.fit_loop.epoch_loop._restarting = False
    known = trainer.callback_metrics
    # a metric that really is not there would be an error of the recipe's
    if all(not config.reduce_on_plateau or config.monitor in known for config in trainer.lr_scheduler_configs):
        trainer.fit_loop._restarting = False
