"""One call puts the memory store into a Trainer, with any strategy whose state is known."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.lightning import fits, recorder
from mlflashpoint.adapter.lightning.kinds import kind_of
from mlflashpoint.adapter.lightning.packages import package_of
from mlflashpoint.adapter.lightning.session import FitSession
from mlflashpoint.adapter.lightning.store import store_opener
from mlflashpoint.adapter.nemo import checkpoint_io, strategy_routes
from mlflashpoint.adapter.nemo.auto_resume import MLFlashpointAutoResume
from mlflashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback
from mlflashpoint.adapter.nemo.megatron_kind import MegatronKind
from mlflashpoint.adapter.nemo.routing import Routing
from mlflashpoint.errors import SettingError
from mlflashpoint.settings import BY_NAME, StoreConfig

_log = logging.getLogger(__name__)

_GIB = 1 << 30


def wrap_trainer_and_auto_resume_with_mlflashpoint(
    trainer: Any,
    flashpoint_base_container: str | os.PathLike[str],
    async_save: bool,
    default_auto_resume: Any = None,
    always_save_context: bool = False,
    write_thread_count: int = 1,
    initial_write_buffer_size_bytes: int = 16 * _GIB,
    use_optimized_save: bool = True,
    use_cached_ckpt_structure: bool = False,
    use_fully_parallel_wrapper: bool = True,
) -> MLFlashpointAutoResume:
    """Let ``trainer`` save to memory, and resume from it, beside its own checkpoints.

    Call it on every rank, after ``trainer.strategy.setup_environment()`` where there are several, and before ``fit``.
    How often it saves is said by a MLFlashpointCheckpointCallback among the trainer's callbacks.

    Args:
        trainer: a Lightning or NeMo Trainer.
        flashpoint_base_container: folder on tmpfs that belongs to this job alone and stays the same when it restarts.
        async_save: finish a save in the background after staging.
        default_auto_resume: the recipe's AutoResume, which knows the durable checkpoints; None if it has none.
        always_save_context: put NeMo's context files beside each memory version, on every node.
        write_thread_count: accepted for recipes written for other releases; the store decides.
        initial_write_buffer_size_bytes: likewise: the store allocates what the state takes.
        use_optimized_save: likewise.
        use_cached_ckpt_structure: likewise: there is no save plan to cache.
        use_fully_parallel_wrapper: likewise: every rank keeps its own part.

    Returns:
        what to use in the place of ``default_auto_resume``.

    Raises:
        UnsupportedStrategyError: the trainer's strategy keeps its state in a way that can't be stored per rank.
        SettingError: an argument or a setting is malformed.
        CheckpointIdError: ``flashpoint_base_container`` can't name a container.

    ``fit`` raises SettingError before its first batch if a ModelCheckpoint is to save into the container.
    """
    if package_of(trainer) is None:
        raise SettingError(f"{type(trainer).__qualname__} is no Lightning Trainer", remedy="pass the Trainer that fits")
    for name, value in (
        ("write_thread_count", write_thread_count),
        ("initial_write_buffer_size_bytes", initial_write_buffer_size_bytes),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingError(f"{name} is {value!r}", remedy="use a whole number from 1")
    kind = kind_of(trainer)
    routing = Routing(flashpoint_base_container)
    config = StoreConfig.from_env(
        {"MLFLASHPOINT_JOB_ID": routing.base.name, **os.environ},
        base_container=Path(routing.base),
        async_save=async_save,
    )
    before = fits.session_of(trainer)
    group = before.group if before is not None and before.base == routing.base else fits.next_group()
    session = FitSession(
        kind,
        None,
        store_opener(trainer, config, group),
        base=routing.base,
        group=group,
        # the callback's skip_every_n_steps says which steps are left to the recipe's own checkpoints
        skip_durable=bool(BY_NAME["skip_durable_steps"].read(os.environ)),
        keep_on_success=bool(BY_NAME["keep_on_success"].read(os.environ)),
        strict=config.strict,
    )
    if always_save_context:
        session.side_files = kind.side_files(trainer, routing.base, group)
        if session.side_files is None:
            _log.warning("always_save_context has no effect: %s has no context files", type(trainer).__qualname__)
    fits.adopt(trainer, session)
    recorder.detach(trainer)
    recorder.attach(trainer, session)
    if isinstance(kind, MegatronKind):
        trainer.strategy.checkpoint_io = checkpoint_io.before(trainer.strategy.checkpoint_io, routing, session, trainer)
    else:
        strategy_routes.install(trainer, routing, session)
    _forget_in_context(trainer)
    return MLFlashpointAutoResume(session, trainer, routing, default_auto_resume)


def _forget_in_context(trainer: Any) -> None:
    """Leave our callback out of what NeMo writes of the Trainer, so that it loads where we are not installed."""
    recorded = getattr(trainer, "__io__", None)
    callbacks = getattr(recorded, "callbacks", None)
    if isinstance(callbacks, list):
        recorded.callbacks = [item for item in callbacks if not _is_ours(item)]  # type: ignore[union-attr]


def _is_ours(item: object) -> bool:
    ours = MLFlashpointCheckpointCallback
    return isinstance(item, ours) or getattr(item, "__fn_or_cls__", None) is ours
