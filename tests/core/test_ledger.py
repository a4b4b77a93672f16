import threading

import pytest
import torch.distributed as dist

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.deadline import Deadline
from mlflashpoint.core.ledger import Ledger, agree
from mlflashpoint.errors import PeerError


@pytest.fixture
def channel():
    return Channel(dist.HashStore(), "test")


def ledgers(channel, world):
    return [Ledger(channel, rank=rank, world_size=world) for rank in range(world)]


def test_a_version_is_complete_once_every_rank_has_committed(channel):
    one, two = ledgers(channel, 2)
    assert one.commit(5) is None
    assert one.verdict(5) is None
    assert two.commit(5).complete
    assert one.verdict(5).complete


def test_a_failure_is_final_and_names_the_rank_and_reason(channel):
    one, two = ledgers(channel, 2)
    assert two.fail(5, "tmpfs full").reason == "rank 1: tmpfs full"
    assert not one.commit(5).complete
    assert not two.verdict(5).complete


def test_a_failure_that_comes_after_completion_changes_nothing(channel):
    one, two = ledgers(channel, 2)
    one.commit(5)
    two.commit(5)
    assert one.fail(5, "gave up").complete


def test_a_version_is_overtaken_when_every_rank_has_begun_a_later_one(channel):
    one, two = ledgers(channel, 2)
    one.attempt(6)
    assert not one.overtaken(5, by=6)
    two.attempt(6)
    assert one.overtaken(5, by=6)
    assert not one.overtaken(6, by=6)


def test_the_keys_of_old_versions_go_but_the_newest_complete_verdict_stays(channel):
    one, two = ledgers(channel, 2)
    for step in (1, 2):
        for ledger in (one, two):
            ledger.attempt(step)
            ledger.commit(step)
        one.verdict(step)
    for step in range(3, 60):
        one.attempt(step)
        one.fail(step, "no")
    late = Ledger(channel, rank=1, world_size=2)
    assert late.verdict(1) is None
    assert late.verdict(2).complete
    assert late.verdict(10) is None
    assert late.verdict(59).reason == "rank 0: no"
    assert channel.add("1/commits", 0) == 0


def test_a_step_whose_outcome_is_not_known_keeps_its_keys_until_a_newer_one_is_complete(channel):
    one, two = ledgers(channel, 2)
    one.attempt(1)
    one.commit(1)
    for step in range(2, 60):
        one.attempt(step)
        one.fail(step, "no")
    assert two.commit(1).complete
    assert one.verdict(1).complete
    for ledger in (one, two):
        ledger.attempt(60)
        ledger.commit(60)
    assert one.verdict(60).complete
    for step in range(61, 99):
        one.attempt(step)
    assert channel.read("1/verdict") is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hundred_saves_are_not_remembered(channel, rank):
    both = ledgers(channel, 2)
    for step in range(100):
        for ledger in both:
            ledger.attempt(step)
            ledger.commit(step)
        both[0].verdict(step)
    assert len(both[rank]._verdicts) < 40
    assert len(both[rank]._history) < 40


def test_a_ledger_that_ends_leaves_no_key(channel):
    before = channel.connection.num_keys()
    one, two = ledgers(channel, 2)
    for ledger in (one, two):
        ledger.ready(-1)
        ledger.attempt(3)
        ledger.commit(3)
    for ledger in (one, two):
        ledger.end()
    assert channel.connection.num_keys() == before


def test_a_long_reason_is_cut(channel):
    (one,) = ledgers(channel, 1)
    assert len(one.fail(1, "x" * 10_000).reason) == 300


def vote(channel, votes, deadline_s=20):
    answers = {}

    def run(rank, ok):
        answers[rank] = agree(channel, ok, rank=rank, world_size=len(votes), deadline=Deadline(deadline_s))

    threads = [threading.Thread(target=run, args=(rank, ok)) for rank, ok in enumerate(votes) if ok is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


@pytest.mark.parametrize(
    ("votes", "answer"), [([True] * 4, True), ([True, True, False, True], False), ([False] * 3, False)]
)
def test_the_ranks_agree_on_the_and_of_their_votes(channel, votes, answer):
    answers = vote(channel, votes)
    assert {ok for ok, _ in answers.values()} == {answer}
    assert len(answers) == len(votes)
    assert channel.read("outcome") is None


def test_a_no_is_known_before_the_others_have_voted(channel):
    assert agree(channel, False, rank=1, world_size=3, deadline=Deadline(20)) == (False, "rank 1 said no")
    assert agree(channel, True, rank=0, world_size=3, deadline=Deadline(20)) == (False, "rank 1 said no")


def test_a_rank_that_does_not_vote_makes_it_no_for_all_that_do(channel):
    answers = vote(channel, [True, None, True], deadline_s=0.3)
    assert {ok for ok, _ in answers.values()} == {False}
    assert "1 of 3 ranks" in answers[0][1]
    assert agree(channel, True, rank=1, world_size=3, deadline=Deadline(1))[0] is False


@pytest.mark.parametrize(("name", "key"), [("read", "outcome"), ("add", "read")])
def test_a_rank_whose_store_fails_for_a_moment_agrees_with_the_others(monkeypatch, channel, name, key):
    original, failed = getattr(Channel, name), []

    def failing(self, first, *args):
        if first == key and not failed:
            failed.append(first)
            raise PeerError("the job's store did not answer")
        return original(self, first, *args)

    monkeypatch.setattr(Channel, name, failing)
    assert vote(channel, [True, True]) == {rank: (True, "") for rank in (0, 1)}
    assert failed


@pytest.mark.parametrize("missed_by", [0, 1])
def test_the_keys_of_steps_that_one_rank_never_begins_are_deleted_too(channel, missed_by):
    both = ledgers(channel, 2)
    keys = []
    for step in range(400):
        for rank, ledger in enumerate(both):
            if rank != missed_by or step % 2 == 0:
                ledger.ready(step - 1)
                ledger.attempt(step)
                ledger.commit(step)
                ledger.opening(step)
        for ledger in both:
            if step % 2 and ledger is not both[missed_by]:
                ledger.fail(step, "the other rank did not begin it")
            ledger.verdict(step)
        keys.append(channel.connection.num_keys())
    assert max(keys[300:]) <= max(keys[100:200])


def test_the_keys_of_a_step_whose_first_rank_heard_no_answer_are_deleted(channel, monkeypatch):
    one, two = ledgers(channel, 2)
    add = Channel.add
    before = channel.connection.num_keys()

    def lost(self, key, amount=1):
        add(self, key, amount)
        raise PeerError("the answer is lost")

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "add", lost)
        with pytest.raises(PeerError):
            two.attempt(7)
    one.attempt(7)
    for ledger in (one, two):
        ledger.end()
    assert channel.connection.num_keys() == before


def test_a_ledger_that_rank_0_never_used_leaves_no_key(channel):
    before = channel.connection.num_keys()
    three = ledgers(channel, 3)[1:]
    for ledger in three:
        ledger.ready(-1)
        ledger.attempt(3)
        ledger.fail(3, "no")
        ledger.shut(3, "no slot", before=4)
    for ledger in three:
        ledger.end()
    assert channel.connection.num_keys() == before
