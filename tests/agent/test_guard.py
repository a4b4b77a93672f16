"""The promise around a patched call: the original once, unchanged, and the job never pays for a fault of ours."""

from __future__ import annotations

import abc
import asyncio
import threading
from typing import Any

import pytest

from mlflashpoint.agent import guard


class Job:
    """An original that counts its calls, and hears of the faults around it."""

    strict = False
    enabled = True

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.faults: list[tuple[str, str]] = []

    def original(self, *args: Any, **kwargs: Any) -> str:
        self.seen.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return "result"

    def fault(self, phase: str, error: BaseException) -> None:
        self.faults.append((phase, str(error)))

    def run(self, around: guard.Around) -> Any:
        return guard.run(self, "group", around, self.original, "self", (1,), {"step": 2})

    def run_async(self, around: guard.Around) -> Any:
        async def original(*args: Any, **kwargs: Any) -> str:
            await asyncio.sleep(0)
            return self.original(*args, **kwargs)

        return asyncio.run(guard.run_async(self, "group", around, original, "self", (1,), {"step": 2}))


ONCE = [((1,), {"step": 2})]


@pytest.fixture(params=["plain", "async"])
def run(request: pytest.FixtureRequest) -> Any:
    """Runs a plain around function around a plain original, or a coroutine function around one."""
    if request.param == "plain":
        return lambda job, around: job.run(around)

    def run_async(job: Job, around: guard.Around) -> Any:
        return job.run_async(around)

    return run_async


def around_of(run: Any, before: Any = None, after: Any = None) -> guard.Around:
    """An around function of the kind that ``run`` needs."""
    if run.__name__ == "run_async":

        async def coroutine(call: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if before is not None:
                before(call)
            result = await call()
            return result if after is None else after(call, result)

        return coroutine

    def plain(call: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if before is not None:
            before(call)
        result = call()
        return result if after is None else after(call, result)

    return plain


def broken(*_: Any) -> None:
    raise ValueError("ours")


def test_our_function_sees_the_call_and_its_result_is_returned(run: Any) -> None:
    job = Job()
    assert run(job, around_of(run, after=lambda call, result: result + "!")) == "result!"
    assert (job.seen, job.faults) == (ONCE, [])


def test_after_a_fault_before_it_the_original_runs_once_unchanged(run: Any) -> None:
    job = Job()
    assert run(job, around_of(run, before=broken)) == "result"
    assert (job.seen, job.faults) == (ONCE, [("before", "ours")])


def test_a_fault_after_it_is_reported_and_its_result_returned(run: Any) -> None:
    job = Job()
    assert run(job, around_of(run, after=broken)) == "result"
    assert (job.seen, job.faults) == (ONCE, [("after", "ours")])


@pytest.mark.parametrize("error", [KeyError("theirs"), KeyboardInterrupt("theirs"), SystemExit(3)])
def test_its_exception_is_the_callers_as_it_is(run: Any, error: BaseException) -> None:
    if run.__name__ == "run_async" and not isinstance(error, Exception):
        pytest.skip("asyncio ends its loop for these")
    job = Job(error)
    with pytest.raises(type(error)) as caught:
        run(job, around_of(run))
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert (job.seen, job.faults) == (ONCE, [])


def test_its_exception_survives_our_function_swallowing_it() -> None:
    job = Job(KeyError("theirs"))

    def swallow(call: Any, *_: Any) -> None:
        try:
            call()
        except KeyError:
            return

    with pytest.raises(KeyError) as caught:
        job.run(swallow)
    assert caught.value is job.error
    assert (job.seen, job.faults) == (ONCE, [("after", "the original's exception was swallowed")])


def test_its_exception_survives_our_function_raising_another() -> None:
    job = Job(KeyError("theirs"))

    def replace(call: Any, *_: Any) -> None:
        try:
            call()
        finally:
            raise ValueError("ours")

    with pytest.raises(KeyError) as caught:
        job.run(replace)
    assert caught.value is job.error
    assert caught.value.__context__ is None
    assert (job.seen, job.faults) == (ONCE, [("after", "ours")])


def test_the_traceback_still_ends_where_the_original_raised() -> None:
    job = Job(KeyError("theirs"))
    with pytest.raises(KeyError) as caught:
        job.run(around_of(job.run))
    assert caught.traceback[-1].name == "original"


def test_the_original_is_never_called_twice(run: Any) -> None:
    job = Job()

    def again(call: Any, result: Any) -> Any:
        return call()

    if run.__name__ == "run_async":

        async def twice(call: Any, *_: Any) -> Any:
            await call()
            return await call()

        assert run(job, twice) == "result"
    else:
        assert run(job, around_of(run, after=again)) == "result"
    assert (job.seen, job.faults) == (ONCE, [("after", "the original is called once only")])


def test_a_function_that_forgets_the_original_has_it_called_for_it() -> None:
    job = Job()
    assert job.run(lambda call, instance, args, kwargs: "forgot") == "result"
    assert (job.seen, job.faults) == (ONCE, [("before", "the original was not called")])


def test_only_a_declared_skip_keeps_the_original_from_running() -> None:
    job = Job()

    def skip(call: guard.Call, *_: Any) -> str:
        call.skip()
        return "instead"

    assert job.run(skip) == "instead"
    assert (job.seen, job.faults) == ([], [])


def test_a_fault_after_a_declared_skip_runs_the_original_after_all() -> None:
    job = Job()

    def skip(call: guard.Call, *_: Any) -> str:
        call.skip()
        raise ValueError("ours")

    assert job.run(skip) == "result"
    assert (job.seen, job.faults) == (ONCE, [("before", "ours")])


def test_other_arguments_are_passed_only_when_asked_for() -> None:
    job = Job()
    assert job.run(lambda call, instance, args, kwargs: call.using(*args, step=9)) == "result"
    assert job.seen == [((1,), {"step": 9})]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_that_reaches_our_function_is_not_swallowed(error: type[BaseException]) -> None:
    job = Job()

    def interrupted(*_: Any) -> None:
        raise error

    with pytest.raises(error):
        job.run(interrupted)
    assert (job.seen, job.faults) == ([], [])


def test_a_cancelled_coroutine_stays_cancelled() -> None:
    job = Job()

    async def slow(call: Any, *_: Any) -> Any:
        await asyncio.sleep(30)
        return await call()

    async def main() -> bool:
        async def original() -> None:
            job.seen.append(((), {}))

        task = asyncio.create_task(guard.run_async(job, "group", slow, original, None, (), {}))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    assert asyncio.run(main())
    assert (job.seen, job.faults) == ([], [])


def test_strict_raises_our_faults() -> None:
    job = Job()
    job.strict = True
    with pytest.raises(ValueError, match="ours"):
        job.run(around_of(job.run, before=broken))


def test_a_nested_call_is_known_in_this_thread_and_in_no_other() -> None:
    job = Job()
    seen = []

    def nested(call: Any, *_: Any) -> Any:
        seen.append((guard.entered("group"), guard.entered("another")))
        thread = threading.Thread(target=lambda: seen.append((guard.entered("group"), False)))
        thread.start()
        thread.join(10)
        return call()

    job.run(nested)
    assert seen == [(True, False), (False, False)]
    assert not guard.entered("group")


def test_the_group_is_left_after_an_exception_too() -> None:
    job = Job(KeyError("theirs"))
    with pytest.raises(KeyError):
        job.run(around_of(job.run))
    assert not guard.entered("group")


def test_two_coroutines_at_once_do_not_take_each_other_for_nested() -> None:
    entered = []

    async def around(call: Any, *_: Any) -> Any:
        return await call()

    async def one() -> None:
        entered.append(guard.entered("group"))

        async def original() -> None:
            await asyncio.sleep(0.01)

        await guard.run_async(Job(), "group", around, original, None, (), {})

    async def main() -> None:
        await asyncio.gather(one(), one(), one())

    asyncio.run(main())
    assert entered == [False, False, False]


@pytest.mark.parametrize(
    ("before", "after", "faults"), [(broken, None, [("before", "ours")]), (None, broken, [("after", "ours")])]
)
def test_phases_keep_the_same_promise(before: Any, after: Any, faults: list[tuple[str, str]]) -> None:
    job = Job()
    assert job.run(guard.phases(before, after)) == "result"
    assert (job.seen, job.faults) == (ONCE, faults)
    job = Job()
    assert job.run_async(guard.phases(before, after)) == "result"
    assert (job.seen, job.faults) == (ONCE, faults)


def test_phases_see_the_instance_the_arguments_and_the_result() -> None:
    job = Job()
    seen: list[Any] = []
    assert job.run(guard.phases(lambda *a: seen.append(a), lambda *a: seen.append(a))) == "result"
    assert seen == [("self", (1,), {"step": 2}), ("result", "self", (1,), {"step": 2})]


class Original:
    def __init__(self, folder: str) -> None:
        if folder == "both":
            raise OSError("theirs")
        self.folder = folder


class Replacement:
    def __init__(self, folder: str) -> None:
        if folder in ("bad", "both"):
            raise ValueError("ours")
        self.folder = folder


def test_a_class_that_stands_in_makes_an_original_where_ours_fails() -> None:
    job = Job()
    made = guard.fail_open_class(Original, Replacement, job)
    assert type(made("good")) is Replacement
    assert type(made("bad")) is Original
    assert job.faults == [("before", "ours")]
    with pytest.raises(OSError, match="theirs"):
        made("both")


def test_it_has_the_originals_name_and_both_kinds_as_instances_and_subclasses() -> None:
    made = guard.fail_open_class(Original, Replacement, Job())
    assert (made.__name__, made.__qualname__, made.__module__) == ("Original", "Original", __name__)
    assert isinstance(made("good"), made) and isinstance(made("bad"), made) and not isinstance(3, made)
    assert issubclass(Original, made) and issubclass(Replacement, made) and not issubclass(int, made)


def test_a_class_of_the_jobs_that_inherits_from_it_inherits_from_the_original() -> None:
    made: Any = guard.fail_open_class(Original, Replacement, Job())

    class Sub(made):
        def __init__(self, folder: str) -> None:
            super().__init__(folder + "!")

    assert Sub.__mro__ == (Sub, Original, object)
    assert type(Sub("bad")) is Sub and Sub("bad").folder == "bad!"
    assert isinstance(Sub("x"), made) and issubclass(Sub, made)


def test_it_stands_in_for_classes_with_metaclasses_of_their_own() -> None:
    class Abstract(abc.ABC):  # noqa: B024
        def __init__(self, folder: str) -> None:
            self.folder = folder

    class Ours(Abstract):
        pass

    made: Any = guard.fail_open_class(Abstract, Ours, Job())

    class Sub(made):
        @abc.abstractmethod
        def missing(self) -> None: ...

    assert type(made("x")) is Ours
    with pytest.raises(TypeError, match="abstract"):
        Sub("x")


def test_after_an_undo_it_makes_originals() -> None:
    job = Job()
    made = guard.fail_open_class(Original, Replacement, job)
    job.enabled = False
    assert type(made("good")) is Original
