"""A call that knows no deadline of its own gets one."""

import threading
import time

import pytest

from mlflashpoint.core import deadline
from mlflashpoint.core.deadline import bounded, ready_for_the_end
from mlflashpoint.errors import DeadlineExceededError


def test_what_the_action_raises_is_raised_and_what_it_returns_is_returned():
    def fail():
        raise KeyError("x")

    assert bounded(lambda: 3, 5.0, "three") == 3
    with pytest.raises(KeyError):
        bounded(fail, 5.0, "failing")


def test_an_action_after_a_stuck_one_has_a_thread_of_its_own():
    stuck = threading.Event()
    with pytest.raises(DeadlineExceededError, match="waiting took longer"):
        bounded(stuck.wait, 0.05, "waiting")
    assert bounded(lambda: 4, 5.0, "four") == 4
    stuck.set()


def test_an_action_within_an_action_does_not_wait_for_its_thread():
    assert bounded(lambda: bounded(lambda: 5, 5.0, "inner"), 5.0, "outer") == 5


@pytest.fixture
def unasked(monkeypatch):
    monkeypatch.setattr(deadline, "_idle", {})


def test_no_thread_is_left_where_nobody_asked_for_one(unasked):
    before = set(threading.enumerate())
    assert bounded(lambda: 4, 5.0, "four") == 4
    assert set(threading.enumerate()) <= before


def test_no_thread_is_started_where_one_is_ready(unasked, monkeypatch):
    ready_for_the_end()

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert [bounded(threading.get_ident, 5.0, "a name") == threading.get_ident() for _ in range(3)] == [False] * 3


def test_idle_threads_do_not_pile_up(unasked):
    ready_for_the_end()
    threads = [threading.Thread(target=bounded, args=(lambda: time.sleep(0.1), 5.0, "a nap")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [len(idle) <= 2 for idle in deadline._idle.values()] == [True]


def test_what_is_to_be_done_meanwhile_is_done_again_and_again():
    ended, calls = threading.Event(), []

    def meanwhile():
        calls.append(1)
        if len(calls) == 3:
            ended.set()

    assert bounded(lambda: ended.wait(20), 20, "it", meanwhile=meanwhile, every_s=0.001)
    assert len(calls) >= 3


def test_what_is_done_meanwhile_does_not_go_on_beyond_the_time():
    ended = threading.Event()
    with pytest.raises(DeadlineExceededError, match="it took longer than"):
        bounded(lambda: ended.wait(20), 0.05, "it", meanwhile=lambda: None, every_s=0.001)
    ended.set()


def test_an_accompanied_action_runs_here_when_the_interpreter_ends_and_starts_no_thread(monkeypatch):
    monkeypatch.setattr(deadline, "_runner", lambda: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
    assert bounded(threading.current_thread, 20, "it", meanwhile=lambda: None) is threading.current_thread()
    with pytest.raises(RuntimeError):
        bounded(threading.current_thread, 20, "it")
