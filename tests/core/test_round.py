"""One round: who is counted, and what settles it."""

import threading
import time

import pytest
import torch.distributed as dist

from mlflashpoint.core import round as round_module
from mlflashpoint.core.channel import Channel
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.round import Question, Settled, settle
from mlflashpoint.errors import PeerError


@pytest.fixture
def channel():
    return Channel(dist.HashStore(), "test")


QUESTION = Question("q", yes=lambda unanimous: unanimous, no=lambda error: type(error).__name__)
TOLD = Question("q", yes=lambda unanimous: unanimous, no=lambda error: error.message)


def settled_by(channel, came, *, size, deadline_s, late=()):
    """How a round ends for each rank in ``came``, those in ``late`` being there when most of the time is over."""
    ended = {}

    def ask(rank):
        if rank in late:
            time.sleep(0.7 * deadline_s)
        ended[rank] = settle(channel, TOLD, rank=rank, size=size, deadline=Deadline(deadline_s))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in came]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ended


def test_the_ranks_that_do_not_come_are_named(channel):
    ended = settled_by(channel, [0, 2, 63, 64, 66], size=67, deadline_s=0.6)
    missing = ", ".join(str(rank) for rank in range(1, 18) if rank != 2)
    told = f"62 of 67 ranks did not come within 0.6 s (q): ranks {missing} and 46 more"
    assert ended == dict.fromkeys([0, 2, 63, 64, 66], Settled(told, over=True))


def test_a_rank_that_comes_too_late_is_the_one_that_is_named(channel):
    settle(channel, TOLD, rank=0, size=2, deadline=Deadline(0.2))
    found = settle(channel, TOLD, rank=1, size=2, deadline=Deadline(0.2))
    assert found == Settled("1 of 2 ranks did not come within 0.2 s (q): rank 1", over=True)


def test_a_round_that_took_long_leaves_no_key_behind(channel):
    before = channel.connection.num_keys()
    assert settled_by(channel, [0, 1, 2], size=3, deadline_s=3, late=[1]) == dict.fromkeys(range(3), Settled(True))
    assert channel.connection.num_keys() == before


def test_a_rank_whose_time_is_up_is_not_counted(channel):
    assert settle(channel, QUESTION, rank=1, size=2, deadline=Deadline(0)) == Settled("DeadlineExceededError", True)
    assert channel.add("came", 0) == 0


def test_who_waits_leaves_a_round_when_the_others_are_at_another(channel):
    assert settle(channel, QUESTION, rank=0, size=2, deadline=Deadline(30), over=lambda: True) is None


def test_what_fails_behind_the_outcome_does_not_come_out(channel, monkeypatch):
    heard = []
    add = Channel.add

    def failing(self, key, amount=1):
        if key == "read":
            assert heard
            raise RuntimeError("odd")
        return add(self, key, amount)

    monkeypatch.setattr(Channel, "add", failing)
    found = settle(channel, QUESTION, rank=0, size=1, deadline=Deadline(30), heard=heard.append)
    assert found == Settled(True)


@pytest.mark.parametrize("another_connection", [False, True])
def test_who_waits_when_the_store_has_gone_does_not_wait_for_the_deadline(channel, monkeypatch, another_connection):
    def gone(self, *args):
        raise PeerError("the store's host has left")

    monkeypatch.setattr(Channel, "read", gone)
    monkeypatch.setattr(round_module, "_UNREACHABLE_S", 2.0)
    deadline = Deadline(300)
    renew = (lambda: channel) if another_connection else None
    with pytest.raises(PeerError, match="has left"):
        settle(channel, QUESTION, rank=1, size=2, deadline=deadline, renew=renew)
    assert deadline.remaining_s > 200
