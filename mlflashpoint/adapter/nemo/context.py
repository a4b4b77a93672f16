"""NeMo's context files beside the memory versions: what rebuilds the model, tokenizer and trainer, on every node.

They don't change during a fit, so they are written once per node, and each version's folder links to them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.nemo.routing import Routing

_log = logging.getLogger(__name__)

#: no group of ranks can have a name that begins so
_SHARED = "step-context"
_FOLDER = "context"
_KEPT = 4


class ContextFiles:
    """Context files of one fit on one node; only the node's local rank 0 writes."""

    def __init__(self, routing: Routing, trainer: Any) -> None:
        self._base = Path(routing.base)
        self._routing = routing
        self._trainer = trainer
        self._written = False

    def add(self, step: int) -> None:
        """Make them part of the version's folder; a failure is logged, the version is as good without them."""
        if self._trainer.local_rank != 0:
            return
        try:
            if not self._written:
                self._write(self._base / _SHARED)
                self._written = True
            folder = Path(self._routing.path_of(step))
            folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (folder / _FOLDER).symlink_to(Path("..") / _SHARED)
            for old in self._versions()[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        except Exception as error:
            _log.warning("the context files of step %d are missing: %s: %s", step, type(error).__name__, error)

    def remove(self) -> None:
        """Take all of them away."""
        if self._trainer.local_rank == 0:
            for folder in [*self._versions(), self._base / _SHARED]:
                shutil.rmtree(folder, ignore_errors=True)

    def _versions(self) -> list[Path]:
        found = [path for path in self._base.glob("step-*_ckpt") if self._routing.step_of(path) is not None]
        return sorted(found, key=lambda path: self._routing.step_of(path) or 0)

    def _write(self, folder: Path) -> None:
        from nemo.lightning.io.pl import TrainerContext

        with _private_files():
            try:
                TrainerContext.from_trainer(self._trainer).io_dump(folder, yaml_attrs=["model"])
            except ModuleNotFoundError as error:
                # NeMo-Run writes YAML for people to read, when what NeMo itself reads is there already
                if error.name != "nemo_run" or not (folder / "io.json").exists():
                    raise


@contextlib.contextmanager
def _private_files() -> Any:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
