"""One round: who is counted, and what settles it."""

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
