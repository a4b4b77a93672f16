"""Megatron-LM's arguments as a part of a state: the loop keeps all of them in every checkpoint.

They are an ``argparse.Namespace`` of plain values and enumerations. A script may add arguments of any type; one that
can't be stored is left out, with a line in the log: on load the loop compares a few of its own, and no other.
"""

from __future__ import annotations

import argparse
import enum
import logging
from typing import Any

from mlflashpoint.core.flatten import flatten
from mlflashpoint.core.state import register_leaf
from mlflashpoint.errors import StateTypeError

log = logging.getLogger("mlflashpoint.adapter.megatron")

#: packages whose enumerations occur among the arguments
_PACKAGES = ("megatron", "signal")
_registered: set[type] = set()
_left_out: set[str] = set()


def register(arguments: argparse.Namespace) -> None:
    """Enter a namespace, and the enumerations in this one, into the core's allow-list."""
    register_leaf("argparse.Namespace", argparse.Namespace, _take_apart, _make)
    for value in vars(arguments).values():
        _register_member(value)


def _register_member(value: Any) -> None:
    cls = type(value)
    if isinstance(value, enum.Enum) and cls not in _registered and cls.__module__.partition(".")[0] in _PACKAGES:
        register_leaf(f"{cls.__module__}.{cls.__qualname__}", cls, _value_of, cls)
        _registered.add(cls)


def _take_apart(namespace: argparse.Namespace) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in vars(namespace).items():
        _register_member(value)
        try:
            flatten(value)
        except StateTypeError as error:
            if name not in _left_out:
                _left_out.add(name)
                log.warning("the argument %s is not kept in memory checkpoints: %s", name, error.message)
            continue
        kept[name] = value
    return kept


def _make(state: dict[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(**state)


def _value_of(member: enum.Enum) -> Any:
    return member.value
