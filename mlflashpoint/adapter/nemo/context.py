"""NeMo's context files beside the memory versions: what rebuilds the model, tokenizer and trainer, on every node.

They don't change during a fit, so they are written once per node, and each version's folder links to them. NeMo writes
them, with the modes that it gives its files anywhere; nobody else can enter the base container all the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

from mlflashpoint.adapter.nemo.routing import Routing

_log = logging.getLogger(__name__)

_SHARED = "step-context"
_FOLDER = "context"
_KEPT = 4


class ContextFiles:
    """Context files of one Trainer on one node; only the node's local rank 0 writes.

    Args:
        routing: the base container.
        trainer: the Trainer.
        group: name of its versions; other Trainers of the process have context files of their own.
    """

    def __init__(self, routing: Routing, trainer: Any, group: str) -> None:
        self._base = Path(routing.base)
        self._routing = routing
        # The session of a Trainer, which has this, must not keep the Trainer alive.
        self._trainer = weakref.ref(trainer)
        # No group of ranks can have a name that begins so.
        self._shared = f"{_SHARED}-{group}"
        self._written = False

    def begin(self, resumed: int | None) -> None:
        """Write them, and make them part of the version that is gone on from, which may have come from another node.

        A failure is logged: the versions are as good without them.
        """
        trainer = self._trainer()
        if trainer is None or trainer.local_rank != 0:
            return
        try:
            self._write(trainer, self._base / self._shared)
            self._written = True
        except Exception as error:
            _log.warning("there are no context files beside the versions: %s: %s", type(error).__name__, error)
        if resumed is not None:
            self.add(resumed)

    def add(self, step: int) -> None:
        """Make them part of the version's folder."""
        if not self._written:
            return
        link = Path(self._routing.path_of(step)) / _FOLDER
        try:
            link.parent.mkdir(exist_ok=True)
            if not self._is_ours(link):
                if link.is_symlink() and os.readlink(link).startswith(f"../{_SHARED}-"):
                    # another Trainer's of this process, or of an earlier start
                    link.unlink()
                link.symlink_to(Path("..") / self._shared)
            for old in self._versions()[:-_KEPT]:
                _remove_version(old)
        except OSError as error:
            _log.warning("the context files of step %d are missing: %s", step, error)

    def remove(self) -> None:
        """Take all of them away."""
        trainer = self._trainer()
        if trainer is not None and trainer.local_rank == 0:
            for folder in self._versions():
                _remove_version(folder)
            shutil.rmtree(self._base / self._shared, ignore_errors=True)

    def _is_ours(self, link: Path) -> bool:
        return link.is_symlink() and os.readlink(link) == f"../{self._shared}"

    def _versions(self) -> list[Path]:
        """Folders of the versions that have these files, the oldest first."""
        found = [path for path in self._base.glob("step-*_ckpt") if self._is_ours(path / _FOLDER)]
        return sorted(found, key=lambda path: self._routing.step_of(path) or 0)

    def _write(self, trainer: Any, folder: Path) -> None:
        from nemo.lightning.io.pl import TrainerContext

        try:
            TrainerContext.from_trainer(trainer).io_dump(folder, yaml_attrs=["model"])
        except ModuleNotFoundError as error:
            # NeMo-Run writes YAML for people to read, when what NeMo itself reads is there already
            if error.name != "nemo_run" or not (folder / "io.json").exists():
                raise


def _remove_version(folder: Path) -> None:
    """Take the link away, and the folder if nothing else lies in it: what does is not ours."""
    with contextlib.suppress(OSError):
        (folder / _FOLDER).unlink()
        folder.rmdir()
