"""Saves of several threads through one writer take turns."""

import threading

import pytest

from mlflashpoint.adapter.pytorch.turns import Turns
from mlflashpoint.errors import DeadlineExceededError


class Saver(threading.Thread):
    """A thread that begins a turn, waits to be told, and may say that it ends it."""

    def __init__(self, turns, *, ends=False):
        super().__init__(daemon=True)
        self.turns, self.ends = turns, ends
        self.begun, self.told, self.over = threading.Event(), threading.Event(), threading.Event()
        self.last = threading.Event()
        self.start()

    def run(self):
        self.turns.begin(30)
        self.begun.set()
        self.told.wait(30)
        if self.ends:
            self.turns.end()
        self.over.set()
        self.last.wait(30)


def test_a_turn_waits_for_that_of_another_thread_until_its_end():
    turns = Turns()
    first = Saver(turns, ends=True)
    assert first.begun.wait(30)
    with pytest.raises(DeadlineExceededError, match="earlier save"):
        turns.begin(0.1)
    first.told.set()
    turns.begin(30)
    first.last.set()


def test_the_turn_of_an_async_save_lasts_as_long_as_its_thread():
    turns = Turns()
    turns.announce(30)
    first = Saver(turns, ends=True)
    first.told.set()
    assert first.over.wait(30)
    with pytest.raises(DeadlineExceededError):
        turns.announce(0.1)
    first.last.set()
    turns.announce(30)


def test_what_is_announced_comes_before_the_announcers_next_save():
    turns = Turns()
    turns.announce(30)
    began = []
    late = threading.Timer(0.1, lambda: began.append(Saver(turns)))
    late.start()
    with pytest.raises(DeadlineExceededError):
        turns.begin(0.5)
    assert began[0].begun.is_set()
    began[0].told.set()
    began[0].last.set()


def test_one_thread_never_waits_for_itself():
    turns = Turns()
    for _ in range(3):
        turns.begin(0.1)


def test_what_is_announced_and_done_elsewhere_holds_up_nobody():
    turns = Turns()
    turns.announce(30)
    turns.withdraw()
    turns.begin(0.1)
