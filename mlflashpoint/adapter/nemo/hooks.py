"""What the agent's patches of NeMo do. Saving and resuming are Lightning's: see ``adapter.lightning.hooks``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.lightning import left
from mlflashpoint.adapter.lightning.durable import distrust
from mlflashpoint.adapter.lightning.fits import session_of
from mlflashpoint.adapter.lightning.hooks import interval
from mlflashpoint.adapter.lightning.packages import is_fitting
from mlflashpoint.errors import FlashpointError

_log = logging.getLogger(__name__)


def selective_restore(call: Any, strategy: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Around ``MegatronStrategy.selective_restore``, which loads the weights that a job without checkpoint starts from.

    A job that goes on from memory needs none of them: what it has in memory replaces them all.
    """
    session = session_of(strategy.trainer)
    if session is None or session.closed or not is_fitting(strategy.trainer):
        return call()
    try:
        found = session.find(strategy.trainer, None)
    except FlashpointError as error:
        session.abandon(error)
        found = None
    if found is None:
        return call()
    call.skip()
    text = "step %d is in %s: the weights that training began with are not loaded again"
    _log.info(text, found.step, found.place)
    return None


def find_trainer_ckpt_path(call: Any, auto_resume: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Around ``AutoResume._find_trainer_ckpt_path``, which refuses to go on if only unfinished checkpoints are left.

    That is what a kill during a durable save leaves, and just then memory has what is newest. So the unfinished one is
    named, and distrusted: memory wins over it, and if memory has nothing after all, loading it fails as it should.
    """
    left.auto_resume_looks()
    unfinished = None if interval() is None else _unfinished(auto_resume)
    if unfinished is None:
        return call()
    call.skip()
    distrust(unfinished)
    _log.warning("the durable checkpoint %s is unfinished: going on is possible from memory alone", unfinished)
    return unfinished


def _unfinished(auto_resume: Any) -> Path | None:
    """The newest of the checkpoints that NeMo would choose from, if not one of them is finished."""
    from nemo.utils.app_state import AppState
    from nemo.utils.exp_manager import _filter_out_unfinished_checkpoints

    log_dir = AppState().log_dir
    where = auto_resume.resume_from_directory or (log_dir and Path(log_dir) / "checkpoints")
    if not where or "://" in str(where) or not Path(where).is_dir():
        return None
    for pattern in ("*end", "*last"):
        folders = [folder for folder in Path(where).glob(pattern) if folder.is_dir()]
        if folders and not _filter_out_unfinished_checkpoints(folders):
            return max(folders, key=lambda folder: folder.lstat().st_mtime)
    return None
