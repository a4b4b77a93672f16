"""Types that Lightning recipes put into a checkpoint beside plain data, each stored as plain data.

Schedulers hold a Counter; callbacks hold times, configurations, and the last values of a metric in a deque. What is of
any other type of the recipe's own is refused by name: storing it would take a pickle.
"""

from __future__ import annotations

import collections
import datetime
import importlib
import sys
from typing import Any

from mlflashpoint.core.state import register_leaf


def register(package: str) -> None:
    """Enter the types into the core's allow-list; a second call changes nothing.

    Args:
        package: ``lightning.pytorch`` or ``pytorch_lightning``, whose own types are entered too.
    """
    register_leaf("collections.Counter", collections.Counter, dict, collections.Counter)
    register_leaf("collections.deque", collections.deque, _deque_parts, _deque)
    register_leaf("datetime.date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat)
    register_leaf("datetime.timedelta", datetime.timedelta, _delta_parts, lambda s: datetime.timedelta(*s))
    register_leaf("datetime.datetime", datetime.datetime, _moment_parts, _moment)
    fabric = importlib.import_module("lightning.fabric" if package == "lightning.pytorch" else "lightning_fabric")
    attributes = importlib.import_module(f"{fabric.__name__}.utilities.data").AttributeDict
    register_leaf(f"{fabric.__name__}.AttributeDict", attributes, dict, lambda s: attributes(**s))
    # a recipe that has not imported it has no such object
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None:
        for kind in (omegaconf.DictConfig, omegaconf.ListConfig):
            register_leaf(f"omegaconf.{kind.__name__}", kind, _config_parts, _config)


def _deque_parts(value: collections.deque[Any]) -> dict[str, Any]:
    return {"items": list(value), "maxlen": value.maxlen}


def _deque(state: Any) -> collections.deque[Any]:
    return collections.deque(state["items"], state["maxlen"])


def _delta_parts(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _moment_parts(value: datetime.datetime) -> str:
    return value.isoformat()


def _moment(state: Any) -> datetime.datetime:
    return datetime.datetime.fromisoformat(state)


def _config_parts(value: Any) -> Any:
    import omegaconf

    return omegaconf.OmegaConf.to_container(value, resolve=False)


def _config(state: Any) -> Any:
    import omegaconf

    return omegaconf.OmegaConf.create(state)
