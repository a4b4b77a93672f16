"""The two names under which one release of Lightning is installed: ``lightning.pytorch`` and ``pytorch_lightning``.

They share no class, and a job may import both. What belongs to a Trainer is decided by the Trainer's own classes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

#: root package of the Trainer -> root package of its fabric
PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def package_of(instance: object) -> str | None:
    """``lightning.pytorch`` or ``pytorch_lightning``, whichever defines a base class of ``instance``, else None."""
    for kind in type(instance).__mro__:
        for package in PACKAGES:
            if kind.__module__ == package or kind.__module__.startswith(package + "."):
                return package
    return None


def pytorch_package(trainer: object) -> ModuleType:
    """The package that defines the Trainer; raises TypeError when ``trainer`` is no Lightning Trainer."""
    package = package_of(trainer)
    if package is None:
        raise TypeError(f"{type(trainer).__qualname__} is no Lightning Trainer")
    return importlib.import_module(package)


def is_fitting(trainer: Any) -> bool:
    """Whether the Trainer's present entry point is ``fit``."""
    return trainer.state.fn is not None and trainer.state.fn.value == "fit"


def defined_by(instance: object, attribute: str) -> type | None:
    """The class of ``instance`` whose body defines ``attribute``, None if there is none."""
    return next((kind for kind in type(instance).__mro__ if attribute in vars(kind)), None)
