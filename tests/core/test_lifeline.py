"""A process that holds a lifeline ends after the one that started it, and not before its drain is over."""

import os
import threading
import time

import pytest

from mlflashpoint.core import lifeline, sigterm


@pytest.fixture
def ended(monkeypatch):
    """When the process would have ended, after its parent is found dead at once."""
    moments = []
    monkeypatch.setattr(lifeline, "_GRACE_S", 0.1)
    monkeypatch.setattr(lifeline.os, "_exit", lambda code: moments.append(time.monotonic()))
    return moments


def watch():
    reading, writing = os.pipe()
    os.close(writing)
    lifeline._watch(reading, os.getppid())
    os.close(reading)


def test_a_moment_after_its_parent_has_ended_the_process_ends(ended):
    began = time.monotonic()
    watch()
    assert 0.1 <= ended[0] - began < 2


def test_a_parent_whose_sentinel_another_process_keeps_open_is_missed_all_the_same(ended, monkeypatch):
    monkeypatch.setattr(lifeline, "_LOOK_S", 0.05)
    reading, writing = os.pipe()
    lifeline._watch(reading, os.getppid() + 1)
    assert len(ended) == 1
    os.close(reading)
    os.close(writing)


def test_a_drain_that_is_under_way_is_waited_for(ended, monkeypatch):
    draining = threading.Thread(target=time.sleep, args=(0.5,))
    draining.start()
    monkeypatch.setattr(sigterm, "_running", [(draining, time.monotonic() + 10)])
    watch()
    assert not draining.is_alive()


def test_a_process_that_nobody_has_started_holds_none():
    lifeline.hold()
    assert "mlflashpoint-lifeline" not in [thread.name for thread in threading.enumerate()]
