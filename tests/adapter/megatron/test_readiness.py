"""All ranks go on, or all raise: what they say to each other about it, with a thread for each rank."""

import os
import threading
import time
import weakref

import pytest

from mlflashpoint import errors
from mlflashpoint.adapter.megatron import readiness
from mlflashpoint.adapter.megatron.readiness import _error_of, _Meeting, _record, _round, all_ready
from mlflashpoint.core.channel import Channel, HashStore
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.errors import ContainerError, FlashpointError, NoVersionError, PeerError, StateTypeError

KINDS = sorted(
    (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, FlashpointError) and kind is not errors.ComparisonOptionError
    ),
    key=lambda kind: kind.__name__,
)


class Ranks:
    """The ranks of one group, on one store."""

    def __init__(self, size):
        self.store = HashStore()
        channel = Channel(self.store, "test", clone=False)
        self.meetings = [_Meeting(channel, rank, size, weakref.ref(self.store), os.getpid()) for rank in range(size)]

    def ask(self, *answers, deadline_s=30.0):
        """The outcome on each rank that answers: (problem, vote, version), or None for one that does not come."""
        outcomes = {}

        def answer(rank, problem=None, vote=True, version=""):
            outcomes[rank] = _round(self.meetings[rank], "q", problem, vote, version, Deadline(deadline_s))

        threads = [
            threading.Thread(target=answer, args=(rank, *given))
            for rank, given in enumerate(answers)
            if given is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes


def test_all_ranks_go_on_and_each_question_is_a_new_one():
    ranks = Ranks(3)
    for votes in ((True, True, True), (True, False, True), (True, True, True)):
        outcomes = ranks.ask(*((None, vote) for vote in votes))
        assert [outcomes[rank]["kind"] for rank in range(3)] == [None] * 3
        assert [outcomes[rank]["vote"] for rank in range(3)] == [all(votes)] * 3


def test_nothing_of_a_question_stays_in_the_store():
    ranks = Ranks(2)
    for answers in (((), ()), ((NoVersionError("none"),), ()), ((None, True, "a"), (None, True, "b"))):
        ranks.ask(*answers)
    assert ranks.store.num_keys() == 0


def test_one_ranks_problem_is_told_to_all_before_the_last_has_come():
    began = time.monotonic()
    outcomes = Ranks(3).ask((), (ContainerError("full", rank=1),), None)
    assert time.monotonic() - began < 10
    for rank in (0, 1):
        error = _error_of(outcomes[rank])
        assert type(error) is ContainerError and error.rank == 1 and error.message == "full"


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline_and_told_too():
    ranks = Ranks(2)
    outcomes = ranks.ask((), None, deadline_s=0.2)
    assert outcomes[0]["kind"] == "DeadlineExceededError"
    assert ranks.ask(None, ())[1] == outcomes[0]


def test_ranks_at_different_versions_are_told_both():
    outcomes = Ranks(2).ask((None, True, "step-4"), (None, True, "step-5"))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["kind"] == "StepError"
    assert "step-4" in outcomes[0]["message"] and "step-5" in outcomes[0]["message"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_ours_is_the_same_on_the_other_ranks(kind):
    error = kind("odd", remedy="do", setting="MLFLASHPOINT_X", rank=3, step=4, path="/p")
    told = _error_of(_record(error, 3))
    assert type(told) is kind and str(told) == str(error)


@pytest.mark.parametrize("error", [ValueError("odd"), errors.ComparisonOptionError("odd", option="x")])
def test_an_error_that_is_none_of_ours_is_a_peer_error_with_its_text(error):
    told = _error_of(_record(error, 3))
    assert type(told) is PeerError and told.rank == 3
    assert str(told).startswith(f"{type(error).__name__}: odd")


def test_a_record_that_names_no_error_is_a_peer_error():
    assert type(_error_of({"kind": "annotations", "message": "odd"})) is PeerError


def test_a_rank_alone_asks_nobody():
    assert all_ready("q", deadline_s=1) is True
    assert all_ready("q", vote=False, deadline_s=1) is False
    with pytest.raises(StateTypeError):
        all_ready("q", StateTypeError("odd"), deadline_s=1)


def test_the_ranks_of_a_new_process_group_meet_anew(monkeypatch):
    names = iter("ab")
    monkeypatch.setattr(readiness, "meet", lambda *args, **kwargs: next(names))
    monkeypatch.setattr(readiness.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(readiness.dist, "get_world_size", lambda: 2)
    old, new = HashStore(), HashStore()
    monkeypatch.setattr(readiness, "_meeting", None)
    met = readiness._met(old, Deadline(1))
    monkeypatch.setattr(readiness, "_meeting", met)
    assert readiness._met(old, Deadline(1)) is met
    assert readiness._met(new, Deadline(1)) is not met
