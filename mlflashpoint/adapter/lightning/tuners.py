"""LearningRateFinder and BatchSizeFinder among the callbacks: they search before the first batch, once for a training.

A fit that goes on from memory has what they had found then: the rate is the optimizer's, and the attribute that they
have set is kept beside it. Another search would find something else, and Lightning begins the epoch anew behind one.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mlflashpoint.adapter.lightning.packages import PACKAGES, pytorch_package

_log = logging.getLogger(__name__)

#: class -> (method that searches, name of the field that names the attribute that it sets)
_KINDS = {
    "LearningRateFinder": ("lr_find", "_attr_name"),
    "BatchSizeFinder": ("scale_batch_size", "_batch_arg_name"),
}
#: what Lightning looks for if no attribute is named
_RATES = ("lr", "learning_rate")
#: files that the searches save and restore themselves
_FILES = (".lr_find_", ".scale_batch_size_")


def found(trainer: Any) -> dict[str, int | float]:
    """What the searches of this training have set, by attribute."""
    values: dict[str, int | float] = {}
    for callback, _, names in _tuners(trainer):
        name = next((name for name in names if _has(trainer, name)), None)
        if name is None or not getattr(callback, "_update_attr", True):
            continue
        value = _parsing(trainer).lightning_getattr(trainer.lightning_module, name)
        if type(value) in (int, float):
            values[name] = value
    return values


def leave_out(trainer: Any, values: Mapping[str, int | float]) -> None:
    """Let a fit that goes on from memory have ``values``, what was found, and search no more until ``allow``."""
    for callback, method, names in _tuners(trainer):
        if callback._early_exit:
            # The search is all that this fit is for.
            continue
        vars(callback)[method] = _Left(f"{type(callback).__name__}.{method}")
        name = next((name for name in names if name in values), None)
        if name is not None and _has(trainer, name):
            _parsing(trainer).lightning_setattr(trainer.lightning_module, name, values[name])
            _log.info("%s is %r, as %s had found it", name, values[name], type(callback).__name__)
            if hasattr(callback, "optimal_batch_size"):
                callback.optimal_batch_size = values[name]


def allow(trainer: Any) -> None:
    """Searches are made again: the training has begun."""
    for callback, method, _ in _tuners(trainer):
        vars(callback).pop(method, None)


def is_file_of_search(path: object) -> bool:
    """Whether ``path`` is what a search restores when it is over, and not the checkpoint that a fit goes on from."""
    return isinstance(path, (str, os.PathLike)) and os.path.basename(os.fspath(path)).startswith(_FILES)


class _Left:
    """In the place of a callback's method that searches."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __call__(self, *_: Any) -> None:
        _log.info("%s is left out: this fit goes on from memory", self._what)


def _tuners(trainer: Any) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """Each such callback, its method that searches, and the attributes that it may set."""
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _KINDS and kind.__module__.startswith(tuple(PACKAGES)):
                method, field = _KINDS[kind.__name__]
                named = getattr(callback, field, "")
                yield callback, method, (named,) if named else _RATES


def _has(trainer: Any, name: str) -> bool:
    return bool(_parsing(trainer).lightning_hasattr(trainer.lightning_module, name))


def _parsing(trainer: Any) -> Any:
    return importlib.import_module(f"{pytorch_package(trainer).__name__}.utilities.parsing")
