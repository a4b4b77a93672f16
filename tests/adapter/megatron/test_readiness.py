"""All ranks go on, or all raise: what they say to each other about it, with a thread for each rank."""

import threading
import time
from types import SimpleNamespace

import pytest

from mlflashpoint import errors
from mlflashpoint.adapter.megatron import readiness
from mlflashpoint.adapter.megatron.readiness import _error_of, _question, _record, all_ready
from mlflashpoint.core.channel import Channel, HashStore
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.round import settle
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
        self.size = size
        self.rounds = [0] * size

    def ask(self, *answers, deadline_s=30.0):
        """The outcome on each rank that answers: (problem, vote, version), or None for one that does not come."""
        outcomes = {}

        def answer(rank, problem=None, vote=True, version=""):
            self.rounds[rank] += 1
            channel = Channel(self.store, f"test/{self.rounds[rank]}", clone=False)
            question = _question("q", problem, vote, version, rank)
            found = settle(channel, question, rank=rank, size=self.size, deadline=Deadline(deadline_s))
            outcomes[rank] = found.outcome

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
    assert all_ready("q", version="v", deadline_s=1) is True
    assert all_ready("q", version="v", vote=False, deadline_s=1) is False
    with pytest.raises(StateTypeError):
        all_ready("q", StateTypeError("odd"), version="v", deadline_s=1)


def test_ranks_whose_base_containers_have_other_paths_are_at_the_same_version():
    stores = SimpleNamespace(group="default")
    versions = ["/tmp/a/step-4_ckpt", "/tmp/b/step-4_ckpt", "/tmp/a/step-5_ckpt"]
    names = [readiness.name_of(stores, version) for version in versions]
    assert names[0] == names[1] != names[2]
    assert readiness.name_of(SimpleNamespace(group="other"), "/tmp/a/other/step-4_ckpt") != names[0]


def test_what_is_no_version_is_called_as_it_is():
    assert readiness.name_of(SimpleNamespace(group="default"), "odd") == "odd"
