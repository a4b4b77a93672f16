"""What the recipe's own durable checkpoints tell: the step of one that is there, and whether one is due.

The step is read without executing anything: Lightning and Megatron-Core write it near the start of a pickle, and
``pickletools`` lists that pickle's opcodes without running them. A format that hides it gives None.
"""

from __future__ import annotations

import logging
import os
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any

from mlflashpoint.adapter.lightning.places import lies_in

_log = logging.getLogger(__name__)

#: files that hold the global step of a checkpoint that is a folder: FSDP's and ModelParallel's, Megatron-Core's
_FOLDER_FILES = ("meta.pt", "common.pt", "weights/common.pt")
_KEY = "global_step"
#: Lightning writes the step as the second key; a pickle without one is not read to its end
_MAX_OPCODES = 200_000
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")


#: checkpoints whose writer was interrupted, as their framework says
_unfinished: set[Path] = set()


def distrust(path: Path) -> None:
    """Take what lies at ``path`` for unfinished: it is older than any version in memory."""
    _unfinished.add(path)


def is_unfinished(path: object) -> bool:
    """Whether ``path`` is, or lies in, something that is distrusted."""
    if not _unfinished or not isinstance(path, (str, os.PathLike)):
        return False
    return not _unfinished.isdisjoint((Path(path), *Path(path).parents))


def checkpoint_step(path: object) -> int | None:
    """Global step of the durable checkpoint at ``path`` (local or any fsspec URL), None if it can't be told cheaply."""
    import fsspec.core

    try:
        files, root = fsspec.core.url_to_fs(str(path))
        names = [f"{root.rstrip('/')}/{name}" for name in _FOLDER_FILES] if files.isdir(root) else [root]
        for name in names:
            if files.exists(name):
                with files.open(name, "rb") as stream:
                    step = _step_in_archive(stream)
                if step is not None:
                    return step
    except Exception as error:  # any file system, any format: the caller then asks the framework
        _log.debug("no step read from %s: %s", path, error)
    return None


def _step_in_archive(stream: IO[bytes]) -> int | None:
    if not zipfile.is_zipfile(stream):
        return None
    with zipfile.ZipFile(stream) as archive:
        pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            return None
        with archive.open(pickles[0]) as pickle_stream:
            return _step_in_pickle(pickle_stream)


def _step_in_pickle(stream: IO[bytes]) -> int | None:
    found = False
    for count, (opcode, argument, _position) in enumerate(pickletools.genops(stream)):
        if found and opcode.name not in _MEMO:
            return argument if type(argument) is int else None
        found = found or argument == _KEY
        if count > _MAX_OPCODES:
            break
    return None


def durable_save_due(trainer: Any, base: str) -> bool:
    """Whether a ModelCheckpoint will surely save this very step, later than the end of the present batch.

    ModelCheckpoint saves by steps before this can be asked. By epochs it saves after the validation or at the end of
    the epoch that the present batch ends, with the step unchanged. A save that depends on a metric is not sure, and one
    into the container ``base`` is not durable.
    """
    loop = trainer.fit_loop.epoch_loop
    for callback in trainer.checkpoint_callbacks:
        every = getattr(callback, "_every_n_epochs", 0)
        sure = getattr(callback, "monitor", "") is None and callback.save_top_k != 0
        if not sure or every < 1 or (trainer.current_epoch + 1) % every or callback.save_weights_only:
            continue
        if callback._should_save_on_train_epoch_end(trainer):
            due = loop._is_training_done
        else:
            due = trainer.enable_validation and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if due and not lies_in(callback.dirpath, base):
            return True
    return False
