"""What the agent's patches of Lightning do. Each takes ``(call, instance, args, kwargs)``, see ``agent.guard``.

A fit is bracketed by ``Trainer._run``; in between, the recorder callback saves and ``resume_start``, which Lightning
calls exactly once per run and on every rank with the process group up, chooses what to go on from.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from mlflashpoint.adapter.lightning import ends, fits, left, recorder, tuners
from mlflashpoint.adapter.lightning.cadence import Cadence
from mlflashpoint.adapter.lightning.fits import session_of
from mlflashpoint.adapter.lightning.kinds import diverted, kind_of
from mlflashpoint.adapter.lightning.named import NamedCheckpoint
from mlflashpoint.adapter.lightning.packages import is_fitting, pytorch_package
from mlflashpoint.adapter.lightning.places import lies_in
from mlflashpoint.adapter.lightning.session import FitSession
from mlflashpoint.adapter.lightning.store import base_of, store_opener
from mlflashpoint.errors import FlashpointError, StoreInUseError, UnsupportedStrategyError
from mlflashpoint.settings import BY_NAME, StoreConfig

_log = logging.getLogger(__name__)

_Arguments = tuple[Any, ...]

#: Trainers whose fit is under way without a session, for a reason that the log tells
_without: weakref.WeakSet[Any] = weakref.WeakSet()


def run(call: Any, trainer: Any, args: _Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Around ``Trainer._run``."""
    session = _begin(trainer)
    if session is None:
        _without.add(trainer)
        try:
            return call()
        finally:
            _without.discard(trainer)
    success = False
    try:
        result = call()
        success = ends.is_done(trainer)
        if not success:
            _log.info("max_time stopped the training: the memory versions are kept")
        return result
    finally:
        recorder.detach(trainer)
        fits.release(trainer)
        session.finish(success=success)


def callbacks_attached(result: Any, connector: Any, args: _Arguments, kwargs: Mapping[str, Any]) -> None:
    """After ``_CallbackConnector._attach_model_callbacks``, which puts ModelCheckpoint last."""
    trainer = connector.trainer
    session = session_of(trainer)
    if not is_fitting(trainer):
        return
    if session is not None:
        recorder.attach(trainer, session)
    elif trainer not in _without and interval() is not None and not trainer.fast_dev_run:
        # The agent lets a fit within a fit through, so ``run`` does not see it.
        try:
            fits.refuse_second(trainer)
        except StoreInUseError as error:
            _log.error("no memory checkpoints for this fit: %s", error)


def ckpt_path_selected(path: Any, connector: Any, args: _Arguments, kwargs: Mapping[str, Any]) -> None:
    """After ``_CheckpointConnector._select_ckpt_path(state_fn, ckpt_path, ...)``, which a fit asks before all else."""
    trainer = connector.trainer
    if not is_fitting(trainer):
        return
    session = session_of(trainer)
    # Of a name that nothing has yet ("last", at the first start) Lightning tells nothing later.
    given = args[1] if len(args) > 1 else kwargs.get("ckpt_path")
    left.named(trainer, bool(given or (path and not (session and lies_in(path, session.base)))))


def resume_start(call: Any, connector: Any, args: _Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Around ``_CheckpointConnector.resume_start(checkpoint_path, ...)``: the newer of memory and durable wins."""
    trainer = connector.trainer
    session = session_of(trainer)
    if session is None or session.closed or not is_fitting(trainer):
        return call()
    if session.decided and session.found is None:
        return call()
    path, *rest = args or (kwargs.get("checkpoint_path"),)
    others = {name: value for name, value in kwargs.items() if name != "checkpoint_path"}
    if not session.decided and tuners.is_file_of_search(path):
        # A strategy that loads only after its setup: what the fit goes on from is asked for later.
        return call()
    # A tuner puts back, at the start of a fit, what it has saved before Lightning had restored the loops. Until the
    # first batch a fit that goes on from memory gets that version whenever it restores. What was found before the fit
    # was not compared with a path that the fit is given.
    found = session.found if session.decided or not path else None
    session.decided = True
    if not session.of_agent and lies_in(path, session.base):
        # The way to a version that the library form has laid.
        return call()

    def load() -> Any:
        # as Lightning's own resume_start does
        migration = importlib.import_module(f"{pytorch_package(trainer).__name__}.utilities.migration")
        with migration.pl_legacy_patch():
            return trainer.strategy.load_checkpoint(path, *rest, **others)

    named = NamedCheckpoint(path, load)
    try:
        found = found or named.newer_in_memory(session, trainer)
    except FlashpointError as error:
        session.abandon(error)
        return call()
    if found is not None:
        # A search may have set the loader up already, and Lightning puts its position back only when it does that.
        trainer.fit_loop._combined_loader = None
        with session.serving(trainer, found):
            return call.using(found.path, *rest, **others)
    if named.content is not None:
        with diverted(trainer.strategy, load_checkpoint=lambda *_, **__: named.content):
            return call()
    return call()


def choose_later(trainer: Any) -> None:
    """Let ``resume_start`` choose for this Trainer where no agent does; for sessions of the library form."""
    connector = trainer._checkpoint_connector
    if "resume_start" not in vars(connector):
        original = connector.resume_start
        vars(connector)["resume_start"] = lambda *args, **kwargs: resume_start(
            _Call(original, args, kwargs), connector, args, kwargs
        )
        select = connector._select_ckpt_path

        def select_ckpt_path(*args: Any, **kwargs: Any) -> Any:
            path = select(*args, **kwargs)
            ckpt_path_selected(path, connector, args, kwargs)
            return path

        vars(connector)["_select_ckpt_path"] = select_ckpt_path


class _Call:
    """The agent's ``Call`` for a function that no agent guards."""

    def __init__(self, original: Callable[..., Any], args: _Arguments, kwargs: Mapping[str, Any]) -> None:
        self.using = original
        self._arguments = args, kwargs

    def __call__(self) -> Any:
        args, kwargs = self._arguments
        return self.using(*args, **kwargs)


def save_checkpoint(call: Any, trainer: Any, args: _Arguments, kwargs: Mapping[str, Any]) -> Any:
    """Around ``Trainer.save_checkpoint(filepath, weights_only, storage_options)``: every save that a recipe makes."""
    began = time.perf_counter()
    result = call()
    elapsed_ms = (time.perf_counter() - began) * 1e3
    given = dict(zip(("filepath", "weights_only", "storage_options"), args, strict=False)) | dict(kwargs)
    # NVRx's local checkpoints come without a path
    kind = "non_persistent" if given.get("filepath") is None else "durable"
    step = trainer.global_step
    line = {"blocking_ms": round(elapsed_ms, 3), "kind": kind, "rank": trainer.global_rank, "step": step}
    _log.info("mlflashpoint observe %s", json.dumps(line, sort_keys=True))
    session = session_of(trainer)
    if session is not None and kind == "durable":
        # the last is NeMo's
        without_optimizer = not getattr(trainer.strategy, "ckpt_save_optimizer", True)
        weights_only = bool(given.get("weights_only")) or without_optimizer
        session.saved_durably(trainer, weights_only=weights_only, path=given["filepath"])
    return result


def interval() -> int | None:
    """Optimizer steps between two memory saves, None if the job has not said; raises SettingError."""
    found: int | None = BY_NAME["save_every_n_steps"].read(os.environ)
    return found


def _begin(trainer: Any) -> FitSession | None:
    """The session of the fit that starts now; None if there is none to make, with the reason in the log."""
    if not is_fitting(trainer) or session_of(trainer) is not None:
        return None
    group = fits.next_group()
    if trainer.fast_dev_run:
        return None
    every = interval()
    if every is None:
        _log.info("MLFLASHPOINT_SAVE_EVERY_N_STEPS is unset: nothing is saved to memory")
        return None
    try:
        kind = kind_of(trainer)
    except UnsupportedStrategyError as error:
        _log.error("no memory checkpoints for this fit: %s", error)
        return None
    if any(name.__module__.startswith("nemo.") for name in type(trainer.strategy).__mro__) and not _on("nemo_enabled"):
        _log.info("MLFLASHPOINT_NEMO_ENABLED=0: nothing is saved to memory")
        return None
    config = StoreConfig.from_env()
    session = FitSession(
        kind,
        Cadence(every),
        store_opener(trainer, config, group),
        base=base_of(config),
        group=group,
        skip_durable=_on("skip_durable_steps"),
        keep_on_success=_on("keep_on_success"),
        strict=config.strict,
        of_agent=True,
    )
    session.side_files = kind.side_files(trainer, session.base, group)
    try:
        fits.enter(trainer, session)
    except StoreInUseError as error:
        _log.error("no memory checkpoints for this fit: %s", error)
        return None
    return session


def _on(setting: str) -> bool:
    return bool(BY_NAME[setting].read(os.environ))
