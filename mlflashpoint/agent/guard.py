"""What stands around a patched function, and the promise it keeps.

The original runs exactly once, with its own arguments, unless our function says ``call.skip()``. A fault of ours
before it means that it runs unchanged; a fault of ours after it is reported, and its result is returned. What the
original raises goes to the caller as it is, whatever our function did with it. KeyboardInterrupt and SystemExit that
reach our function are the caller's too, and are never swallowed.

A nested call, from our own function or from the original, goes straight through: one interception per save.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
import types
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

Around = Callable[["Call", Any, tuple[Any, ...], Mapping[str, Any]], Any]

#: (group, thread) pairs that are inside a patched call; the thread, because 3.14 can pass a context on to threads
_inside: contextvars.ContextVar[frozenset[tuple[str, int]]] = contextvars.ContextVar(
    "mlflashpoint_inside", default=frozenset()
)


class Reporter(Protocol):
    """Who hears of faults; ``strict`` turns them into exceptions (tests only), ``enabled`` is false after an undo."""

    strict: bool
    enabled: bool

    def fault(self, phase: str, error: BaseException) -> None: ...


class Call:
    """The one call of the original that our function may make.

    ``call()`` runs it with the caller's arguments, ``call.using(*args, **kwargs)`` with others (without the instance
    of a method). Either can be used once. ``call.skip()`` says that the original shall not run at all, and that our
    function's return value is the result; without it the guard runs an original that was not called.
    """

    __slots__ = ("_args", "_kwargs", "_original", "_started", "error", "result", "returned", "skipped", "traceback")

    def __init__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._original = original
        self._args = args
        self._kwargs = kwargs
        self._started = False
        self.returned = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.traceback: Any = None
        self.skipped = False

    def __call__(self) -> Any:
        return self.using(*self._args, **self._kwargs)

    def using(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original with these arguments; raises RuntimeError when it was called before."""
        self._start()
        try:
            self.result = self._original(*args, **kwargs)
        except BaseException as error:
            self._failed(error)
            raise
        self.returned = True
        return self.result

    def skip(self) -> None:
        """The original shall not run; raises RuntimeError when it has."""
        if self._started:
            raise RuntimeError("the original was called already")
        self.skipped = True

    @property
    def started(self) -> bool:
        return self._started

    def _start(self) -> None:
        if self._started:
            raise RuntimeError("the original is called once only")
        self._started = True

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self.traceback = error.__traceback__


class AsyncCall(Call):
    """The same for a coroutine function: ``await call()``."""

    __slots__ = ()

    async def using(self, *args: Any, **kwargs: Any) -> Any:
        self._start()
        try:
            self.result = await self._original(*args, **kwargs)
        except BaseException as error:
            self._failed(error)
            raise
        self.returned = True
        return self.result


def phases(before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> Around:
    """An around function out of ``before(instance, args, kwargs)`` and ``after(result, instance, args, kwargs)``."""

    def around(call: Call, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if before is not None:
            before(instance, args, kwargs)
        result = call()
        if inspect.isawaitable(result) and isinstance(call, AsyncCall):
            return finish(result, instance, args, kwargs)
        if after is not None:
            after(result, instance, args, kwargs)
        return result

    async def finish(pending: Awaitable[Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = await pending
        if after is not None:
            after(result, instance, args, kwargs)
        return result

    return around


def entered(group: str) -> bool:
    """Whether this thread or task is inside a patched call of ``group``."""
    return (group, threading.get_ident()) in _inside.get()


def run(
    reporter: Reporter,
    group: str,
    around: Around,
    original: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``original`` (bound already) through ``around``, and keep the promise of this module."""
    call = Call(original, args, kwargs)
    token = _inside.set(_inside.get() | {(group, threading.get_ident())})
    try:
        try:
            result = around(call, instance, args, kwargs)
        except Exception as fault:
            if fault is call.error:
                raise
            _report(reporter, call, fault)
        else:
            if call.error is None and (call.returned or call.skipped):
                return result
            _report(reporter, call, None)
        if call.error is not None:
            raise call.error.with_traceback(call.traceback)
        return call.result if call.returned else original(*args, **kwargs)
    finally:
        _inside.reset(token)


async def run_async(
    reporter: Reporter,
    group: str,
    around: Around,
    original: Callable[..., Awaitable[Any]],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``run`` for a coroutine function; ``around`` is one too, or returns ``call()`` for the guard to await."""
    call = AsyncCall(original, args, kwargs)
    token = _inside.set(_inside.get() | {(group, threading.get_ident())})
    try:
        try:
            result = around(call, instance, args, kwargs)
            if inspect.isawaitable(result):
                result = await result
        except Exception as fault:
            if fault is call.error:
                raise
            _report(reporter, call, fault)
        else:
            if call.error is None and (call.returned or call.skipped):
                return result
            _report(reporter, call, None)
        if call.error is not None:
            raise call.error.with_traceback(call.traceback)
        return call.result if call.returned else await original(*args, **kwargs)
    finally:
        _inside.reset(token)


def _report(reporter: Reporter, call: Call, fault: Exception | None) -> None:
    if fault is None:
        swallowed = call.error is not None
        what = "the original's exception was swallowed" if swallowed else "the original was not called"
        fault = RuntimeError(what)
    reporter.fault("after" if call.started else "before", fault)
    if reporter.strict:
        raise fault


def fail_open_class(original: type, replacement: type, reporter: Reporter) -> type:
    """A class that makes a ``replacement``, or an ``original`` when making that one fails.

    It carries the original's name, and instances of both count as its instances. A class of the job's that inherits
    from it inherits from the original.
    """
    meta = type(replacement)
    made: list[type] = []

    def new(mcls: type[type], name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> type:
        if made:
            bases = tuple(original if base is made[0] else base for base in bases)
            return types.new_class(name, bases, options, lambda body: body.update(namespace))
        made.append(meta.__new__(mcls, name, bases, namespace))
        return made[0]

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not reporter.enabled:
            return original(*args, **kwargs)
        try:
            return meta.__call__(replacement, *args, **kwargs)
        except Exception as fault:
            reporter.fault("before", fault)
            if reporter.strict:
                raise
        return original(*args, **kwargs)

    def is_instance(cls: type, instance: Any) -> bool:
        return isinstance(instance, (original, replacement))

    def is_subclass(cls: type, other: type) -> bool:
        return other is cls or issubclass(other, (original, replacement))

    behaviour = {"__new__": new, "__call__": make, "__instancecheck__": is_instance, "__subclasscheck__": is_subclass}
    namespace = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    stand_in: type = type(meta.__name__, (meta,), behaviour)(original.__name__, (replacement,), namespace)
    return stand_in
