"""The wrapt proxy for targets that are no plain functions; the only module of the agent that imports wrapt."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import wrapt

from mlflashpoint.agent import guard
from mlflashpoint.agent.patch import Handle


class Proxy(wrapt.FunctionWrapper):  # type: ignore[misc,type-arg]
    """A FunctionWrapper that is pickled and copied as what it wraps; wrapt's own refuses both."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = self.__wrapped__.__reduce_ex__(protocol)
        # a name means "the object of that name", and pickle sees that this one is not; a copy of a function is itself
        return (copy.copy, (self.__wrapped__,)) if isinstance(reduced, str) else reduced

    def __copy__(self) -> Any:
        return copy.copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)


def proxy(raw: Any, around: guard.Around, handle: Handle) -> Any:
    """A proxy of ``raw`` whose calls go through ``around``."""

    def wrapper(original: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not handle.enabled or guard.entered(handle.group):
            return original(*args, **kwargs)
        handle.calls += 1
        if inspect.iscoroutinefunction(original):
            return guard.run_async(handle, handle.group, around, original, instance, args, kwargs)
        return guard.run(handle, handle.group, around, original, instance, args, kwargs)

    return Proxy(raw, wrapper)
