"""Around Megatron-LM's loop: our local manager in its context, its saves timed, its resume from memory."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlflashpoint.adapter.megatron_lm import arguments, job
from mlflashpoint.adapter.megatron_lm.layout import topology_of
from mlflashpoint.adapter.megatron_local.fields import fields_set
from mlflashpoint.adapter.observe import timed
from mlflashpoint.adapter.original import Original, as_originals

log = logging.getLogger("mlflashpoint.adapter.megatron")

#: leading parameters of the loop's functions
_SAVE = (
    "iteration",
    "model",
    "optimizer",
    "opt_param_scheduler",
    "num_floating_point_operations_so_far",
    "checkpointing_context",
    "non_persistent_ckpt",
    "train_data_iterator",
)
_DECIDE = (
    "model",
    "optimizer",
    "opt_param_scheduler",
    "iteration",
    "num_floating_point_operations_so_far",
    "checkpointing_context",
    "train_data_iterator",
)

Arguments = Mapping[str, Any]


def pretrain(original: Original, config: Any) -> Any:
    """Around ``pretrain``.

    The loop makes NVRx's manager, which would claim a folder, where ``config`` says ``local``; the arguments, which
    everything else goes by, keep saying it.
    """
    this = job.begin(importlib.import_module("megatron.training.global_vars").get_args())
    checkpoint = getattr(config, "checkpoint", None)
    if this is None or checkpoint is None:
        return original()
    try:
        with fields_set(checkpoint, {"non_persistent_ckpt_type": None}):
            return original()
    finally:
        job.end(this)


def fill_context(args: tuple[Any, ...], kwargs: Arguments) -> None:
    """Before ``setup_model_and_optimizer``, which loads: put our local manager into the loop's context."""
    this, context = job.current(), kwargs.get("checkpointing_context")
    if this is None or not isinstance(context, dict) or this.manager is not None:
        return
    if getattr(this.args, "replication", False):
        log.info("--replication is NVRx's; copies on other nodes are made by MLFLASHPOINT_REPLICAS")
    try:
        this.manager = job.LocalManager(this.args)
    except BaseException:
        # With these arguments and no manager the loop would fail.
        job.end(this)
        raise
    context["local_checkpoint_manager"] = this.manager


def load(original: Original, model: Sequence[Any], context: Any) -> Any:
    """Around ``load_checkpoint``."""
    this = _job_of(context)
    if this is None or this.manager is None:
        return original()
    # get_model has added some since the job began
    arguments.register(this.args)
    loaded: list[int] = []
    manager = this.manager
    with manager.resuming(
        lambda: topology_of(this.args),
        model,
        config=this.args,
        overrides=lambda: _resume_only(this.args),
        step=lambda: loaded[0],
    ):
        result = original()
        loaded.append(int(result[0]))
    return result


def save(original: Original, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """Around ``save_checkpoint_and_time``."""
    given = _named(_SAVE, args, kwargs)
    kind = "non_persistent" if given.get("non_persistent_ckpt") else "durable"
    step = int(given["iteration"])
    this = _job_of(given.get("checkpointing_context"))
    if kind == "non_persistent" and this is not None and this.args.save and not this.own_interval:
        this.only_in_memory = step
    return timed(log, kind, step, original)


def write(original: Original, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """Around ``save_checkpoint``: our manager learns the layout; a durable checkpoint holds the recipe's arguments."""
    given = _named(_SAVE[:6], args, kwargs)
    this = _job_of(given.get("checkpointing_context"))
    if this is None or this.manager is None:
        return original()
    if given.get("non_persistent_ckpt"):
        this.manager.learn(lambda: topology_of(this.args), given["model"])
        return original()
    with fields_set(this.args, this.said):
        return original()


def decide(original: Original, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """Around ``checkpoint_and_decide_exit``: the memory saves of a job that saves nowhere, and the last durable one."""
    given = _named(_DECIDE, args, kwargs)
    this = _job_of(given["checkpointing_context"])
    step = int(given["iteration"])
    if this is None or this.manager is None:
        return original()
    if job.due(this.args, step):
        _save_again(original, given, True)
    leaves = original()
    if leaves and this.only_in_memory == step:
        # The loop takes its memory save for the last one, which the next start may not have.
        _save_again(original, given, False)
    return leaves


def _save_again(original: Original, given: Arguments, non_persistent: bool) -> None:
    """The loop's own timed save, for a save that it has not been asked for."""
    function: Callable[..., Any] = importlib.import_module("megatron.training.training").save_checkpoint_and_time
    values = {name: given[name] for name in _DECIDE}
    as_originals(original, lambda: function(**values, non_persistent_ckpt=non_persistent))


def _job_of(context: Any) -> job.Job | None:
    """The job, if this is its context."""
    this = job.current()
    found = context.get("local_checkpoint_manager") if isinstance(context, dict) else None
    return this if this is not None and found is not None and found is this.manager else None


def _resume_only(args: Any) -> dict[str, Any]:
    """Arguments that would keep the loop from resuming at what is in memory."""
    overrides: dict[str, Any] = {"pretrained_checkpoint": None}
    if args.finetune:
        # Then ``load`` is where the weights came from at the very first start, and not where this job stands.
        overrides |= {"finetune": False, "load": None}
    return overrides


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Arguments) -> dict[str, Any]:
    """The arguments by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
