"""Finding what a patch names in a module that has run, and putting something in its place and back."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlflashpoint.agent import guard
from mlflashpoint.agent.patch import Handle


class MissingTargetError(LookupError):
    """The module does not have what the patch names; the message says what is missing where."""


@dataclass(frozen=True)
class Target:
    """A place that holds a callable: ``vars(owner)[name] is raw``."""

    owner: types.ModuleType | type
    name: str
    raw: Any

    @property
    def current(self) -> Any:
        return vars(self.owner).get(self.name)

    def put(self, value: Any) -> None:
        setattr(self.owner, self.name, value)


def find(module: types.ModuleType, path: str) -> Target:
    """The place of ``path`` (``f``, ``C``, ``C.m``) in ``module``.

    Raises:
        MissingTargetError: it isn't there, or a class only inherits it. (A patch on an inherited attribute would
            give the class one of its own, and break the order of a diamond of classes.)
    """
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        if part not in vars(owner):
            raise MissingTargetError(f"{module.__name__} has no {part}")
        owner = vars(owner)[part]
        if not isinstance(owner, type):
            raise MissingTargetError(f"{module.__name__}.{part} is no class")
    if name in vars(owner):
        return Target(owner, name, vars(owner)[name])
    if isinstance(owner, type):
        for base in owner.__mro__[1:]:
            if name in vars(base):
                where = f"{base.__module__}.{base.__qualname__}"
                raise MissingTargetError(
                    f"{owner.__qualname__} does not define {name} itself, it inherits {where}.{name}"
                )
    raise MissingTargetError(f"{module.__name__} has no {path}")


def holds(value: Any, ours: Any) -> bool:
    """Whether ``value`` is ``ours``, or wraps it in the way of functools.wraps or wrapt."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        if value is ours:
            return True
        seen.add(id(value))
        if type(value) in (staticmethod, classmethod):
            value = value.__func__
        elif type(value) is property:
            value = value.fget
        else:
            value = getattr(value, "__wrapped__", None)
    return False


def wrapped(target: Target, around: guard.Around, handle: Handle) -> Any:
    """What to put in the place of ``target.raw`` so that calls go through ``around``.

    A plain function gets a plain function: it can be pickled by name, deep-copied, compiled and inspected like the
    original. Everything else that can be called (another tool's proxy, a callable object, a function in C) gets a
    wrapt proxy, which binds and looks like what it wraps.
    """
    raw = target.raw
    in_class = isinstance(target.owner, type)
    # type() and not isinstance(): another tool's proxy of a staticmethod says that it is one
    if type(raw) is staticmethod and _is_plain(raw.__func__):
        return staticmethod(_function(raw.__func__, around, handle, bound=False))
    if type(raw) is classmethod and _is_plain(raw.__func__):
        return classmethod(_function(raw.__func__, around, handle, bound=True))
    if type(raw) is property:
        if raw.fget is None:
            raise TypeError("the property has no getter")
        return property(_function(raw.fget, around, handle, bound=True), raw.fset, raw.fdel, raw.__doc__)
    if _is_plain(raw):
        return _function(raw, around, handle, bound=in_class)
    if isinstance(raw, type) or not (callable(raw) or isinstance(raw, (staticmethod, classmethod))):
        raise TypeError(f"a {type(raw).__name__} can't be wrapped")
    from mlflashpoint.agent.proxy import proxy

    return proxy(raw, around, handle)


def _is_plain(value: Any) -> bool:
    if type(value) is not types.FunctionType:
        return False
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise TypeError("a generator function can't be wrapped: its body runs after the call")
    return True


def _function(original: Callable[..., Any], around: guard.Around, handle: Handle, *, bound: bool) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def patched_async(*args: Any, **kwargs: Any) -> Any:
            if not handle.enabled or guard.entered(handle.group) or (bound and not args):
                return await original(*args, **kwargs)
            handle.calls += 1
            instance, rest, call = _bind(original, args, bound)
            return await guard.run_async(handle, handle.group, around, call, instance, rest, kwargs)

        return patched_async

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if not handle.enabled or guard.entered(handle.group) or (bound and not args):
            return original(*args, **kwargs)
        handle.calls += 1
        instance, rest, call = _bind(original, args, bound)
        return guard.run(handle, handle.group, around, call, instance, rest, kwargs)

    return patched


def _bind(
    original: Callable[..., Any], args: tuple[Any, ...], bound: bool
) -> tuple[Any, tuple[Any, ...], Callable[..., Any]]:
    if not bound:
        return None, args, original
    return args[0], args[1:], functools.partial(original, args[0])
