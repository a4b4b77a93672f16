"""A save is ended by SIGKILL at each of its phases; what was complete before still is, and nothing half looks whole."""

import os
import random
import signal
import time
import warnings

import pytest
import torch

from mlflashpoint.core import saver as saver_module
from mlflashpoint.core.arena import Arena, scan_seat
from mlflashpoint.core.layout import view_of
from mlflashpoint.core.reader import ShardReader
from mlflashpoint.core.saver import ShardSaver
from tests.core.shard_helpers import FIELDS, save

pytestmark = pytest.mark.multiprocess


def state_of(step):
    return {"step": step, "w": [torch.full((40_000,), float(step)) for _ in range(20)], "b": torch.full((3,), step)}


def in_child(body):
    """Run ``body`` in a forked child and wait until it has ended; returns the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(3)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def loadable(seat):
    """Steps of the committed shards, after checking that each is whole and all of one step."""
    steps = []
    for info in scan_seat(seat):
        assert info.problem is None
        if info.record is not None:
            with ShardReader.open(info.path) as reader:
                reader.verify()
                state = reader.state()
            step = info.record.step
            assert state["step"] == step
            assert all(bool(tensor.eq(step).all()) for tensor in (*state["w"], state["b"]))
            steps.append(step)
    return sorted(steps)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DiesBeforeCopying(ShardSaver):
    def _copy(self, slot, planned):
        die()


class DiesHalfCopied(ShardSaver):
    def _copy(self, slot, planned):
        for entry in planned.layout.entries[:7]:
            view_of(entry, slot.bytes).fill_(-1)
        die()


class DiesAfterStaging(ShardSaver):
    def commit(self, staged, **fields):
        die()


class Patched(ShardSaver):
    """Dies in the commit, in one of the functions that it calls."""

    def __init__(self, name, when):
        super().__init__()
        self._name, self._when = name, when

    def commit(self, staged, **fields):
        original = getattr(saver_module, self._name)

        def deadly(*arguments):
            if self._when == "instead" or (self._when == "last" and str(arguments[0]).endswith("commit")):
                die()
            original(*arguments)
            die()

        setattr(saver_module, self._name, deadly)
        return super().commit(staged, **fields)


class DiesBeforeRename(ShardSaver):
    """Dies when a temporary file is whole, just before it gets its name."""

    def __init__(self, kind):
        super().__init__()
        self._kind = kind

    def commit(self, staged, **fields):
        rename = os.rename
        os.rename = lambda source, target: die() if str(target).endswith(self._kind) else rename(source, target)
        return super().commit(staged, **fields)


PHASES = {
    "before copying": DiesBeforeCopying,
    "half copied": DiesHalfCopied,
    "staged": DiesAfterStaging,
    "digests": lambda: Patched("digest_of", "after"),
    "index written, not renamed": lambda: DiesBeforeRename("index"),
    "index in place": lambda: Patched("replace_file", "after"),
    "commit not written": lambda: Patched("replace_file", "last"),
    "commit written, not renamed": lambda: DiesBeforeRename("commit"),
}


@pytest.mark.parametrize("make", PHASES.values(), ids=PHASES)
def test_a_save_that_is_killed_leaves_the_other_version_whole(seat, make):
    save(seat, state_of(1), step=1, slot=0)[0].close()
    save(seat, state_of(2), step=2, slot=1)[0].close()
    assert in_child(lambda: save(seat, state_of(3), step=3, slot=0, saver=make())) == signal.SIGKILL
    assert loadable(seat) == [2]
    arena = Arena(seat)
    arena.adopt()
    assert not [path for path in seat.iterdir() if ".tmp-" in path.name]
    assert [slot.record and slot.record.step for slot in arena.slots] == [None, 2]
    save(seat, state_of(3), step=3, slot=0, arena=arena)
    assert loadable(seat) == [2, 3]


def test_a_save_that_is_killed_after_its_commit_is_whole(seat):
    save(seat, state_of(1), step=1, slot=0)[0].close()

    def body():
        save(seat, state_of(2), step=2, slot=1)
        die()

    assert in_child(body) == signal.SIGKILL
    assert loadable(seat) == [1, 2]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_of_saves_that_is_ended_at_any_moment_leaves_a_whole_version(seat, signum):
    save(seat, state_of(0), step=0, slot=0)[0].close()
    for attempt in range(8):
        newest = max(loadable(seat))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            try:
                arena, saver = Arena(seat), ShardSaver()
                arena.adopt()
                arena.reserve(2, saver.size_of(state_of(0)))
                for step in range(newest + 1, newest + 10_000):
                    held = [-1 if slot.record is None else slot.record.step for slot in arena.slots]
                    saver.commit(saver.stage(arena.slots[held.index(min(held))], state_of(step)), step=step, **FIELDS)
            finally:
                os._exit(3)
        time.sleep(random.Random(attempt).uniform(0.02, 0.15))
        os.kill(child, signum)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signum
        assert max(loadable(seat)) >= newest
