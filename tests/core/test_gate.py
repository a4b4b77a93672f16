"""A save is staged on all ranks or on none: what one rank has no slot for, the others do not copy in vain."""

import threading
import time

import pytest
import torch.distributed as dist

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.gate import Gate
from mlflashpoint.core.ledger import Ledger
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import PeerError
from mlflashpoint.settings import StoreConfig
from tests.core import bodies
from tests.core.ranks import Life, memory_folder, state


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


@pytest.mark.multiprocess
@pytest.mark.parametrize("pinned", [0, 1])
def test_a_save_that_one_rank_has_no_slot_for_is_skipped_by_all(base, pinned):
    results = Life(bodies.save_beside_a_pinned_rank, 3, base, pinned, 4, 6, busy_wait_s=0.3).results()
    assert [result["skipped"] for result in results.values()] == [[3, 4]] * 3
    assert [result["stats"]["saves_skipped"] for result in results.values()] == [2] * 3
    assert [result["stats"]["last_complete_step"] for result in results.values()] == [6] * 3
    for rank, result in results.items():
        assert ("every slot is needed" in result["errors"][0]) == (rank == pinned), result["errors"]
        assert "the ranks skip this save together: " in result["errors"][0]
        assert "MLFLASHPOINT_KEEP_VERSIONS" in result["errors"][0]


@pytest.mark.multiprocess
def test_a_slot_that_gets_free_within_the_wait_makes_no_rank_skip(base):
    results = Life(bodies.save_beside_a_pinned_rank, 2, base, 1, 4, 5, True, busy_wait_s=20).results()
    assert [result["skipped"] for result in results.values()] == [[], []]
    assert [result["stats"]["last_complete_step"] for result in results.values()] == [5, 5]
    assert max(result["blocking"][2] for result in results.values()) < 10


@pytest.fixture
def pair(base):
    """Two ranks' runtimes in this process."""
    store = dist.HashStore()
    config = StoreConfig(job_id="job", base_container=base, keep_versions=3, busy_wait_s=20, deadline_s=30)
    made = [Runtime(config, rank=rank, world_size=2, local_rank=rank, store=store) for rank in (0, 1)]
    yield made
    for runtime in made:
        runtime.close()


def test_a_rank_that_waits_for_the_attributes_of_one_save_stages_the_next_with_the_others(pair):
    one, two = pair
    for runtime in pair:
        runtime.resumed(-1)
        runtime.save(state(1, runtime.rank), step=1)
    for runtime in pair:
        assert runtime.await_version(1, 20)
    waits, go_on = threading.Event(), threading.Event()

    def late():
        waits.set()
        assert go_on.wait(30)
        return {}

    one.save(state(2, 0), step=2, attributes=late)
    assert waits.wait(20)
    two.save(state(2, 1), step=2)
    try:
        started = time.monotonic()
        assert [runtime.save(state(3, runtime.rank), step=3).ok for runtime in pair] == [True, True]
        assert time.monotonic() - started < 10
    finally:
        go_on.set()
    for runtime in pair:
        assert runtime.await_version(3, 20)


class Ranks:
    """The gates of two ranks on one store, each with a slot or without."""

    def __init__(self):
        channel = Channel(dist.HashStore(), "test")
        self.ledgers = [Ledger(channel, rank=rank, world_size=2) for rank in (0, 1)]
        self.free = [True, True]
        self.gates = [
            Gate(2, lambda _, r=rank: self.ledgers[r], lambda r=rank: self.free[r], lambda: None) for rank in (0, 1)
        ]

    def give_up(self, rank, why, before=9):
        return self.gates[rank].give_up(why, self.gates[rank].enter(before))

    def look(self, *, rounds=2, before=9):
        for _ in range(rounds):
            for gate in self.gates:
                gate.enter(before)
                gate.look(gate.opening)
        return [gate.verdict() for gate in self.gates]


@pytest.fixture
def ranks():
    made = Ranks()
    made.openings = [gate.next(0, 7) for gate in made.gates]
    return made


def test_the_first_save_of_all_has_nothing_to_wait_for():
    assert [gate.verdict() for gate in Ranks().gates] == [True, True]


def test_one_rank_alone_never_asks():
    gate = Gate(1, lambda epoch: pytest.fail("asked"), lambda: False, lambda: None)
    assert (gate.next(0, 7), gate.verdict()) == (None, True)
    gate.look(gate.enter(9))


def test_the_gate_opens_when_the_last_rank_has_a_slot(ranks):
    ranks.free[1] = False
    assert ranks.look() == [None, None]
    ranks.free[1] = True
    assert ranks.look() == [True, True]


def test_the_gate_behind_a_complete_version_is_open_before_anybody_has_said_so(ranks):
    for ledger in ranks.ledgers:
        ledger.commit(7)
    ranks.free = [False, False]
    assert ranks.look(rounds=1) == [True, True]


def test_whoever_waits_in_vain_shuts_the_gate_for_all_with_the_reason(ranks):
    ranks.free[1] = False
    ranks.look()
    ranks.give_up(0, "waited in vain")
    assert ranks.look() == [False, False]
    assert ranks.gates[1].reason == "rank 0: waited in vain"
    ranks.free[1] = True
    assert ranks.look() == [False, False]


def test_a_gate_that_is_open_stays_open_for_a_rank_that_had_given_up_without_knowing(ranks):
    ranks.look(rounds=1)
    assert ranks.gates[0].verdict() is None
    assert ranks.give_up(0, "waited in vain") is False
    assert ranks.look() == [True, True]


def test_a_rank_that_has_said_nothing_may_skip_alone_for_nobody_can_go_on_without_it(ranks):
    ranks.free[1] = False
    assert ranks.give_up(1, "no slot") is True
    ranks.free[1] = True
    assert ranks.look() == [False, False]


def test_a_rank_that_gave_up_says_so_before_it_tells_of_a_commit_that_would_open_the_gate(ranks):
    ranks.free[1] = False
    ranks.ledgers[0].commit(7)
    assert ranks.give_up(1, "no slot") is True
    ranks.gates[1].before_commit(ranks.openings[1])
    assert ranks.ledgers[1].commit(7).complete
    assert ranks.look() == [False, False]


def test_a_rank_that_is_about_to_tell_of_a_commit_can_skip_no_more_by_itself(ranks):
    ranks.free[1] = False
    ranks.gates[1].before_commit(ranks.openings[1])
    assert ranks.give_up(1, "no slot") is False


def test_a_rank_that_never_began_the_save_before_is_not_waited_for_once_all_have_begun_the_next(ranks):
    # Rank 1 goes on behind step 5, for which it has said that it has a slot.
    ranks.openings[1] = ranks.gates[1].next(0, 5)
    for ledger in ranks.ledgers:
        ledger.attempt(5)
    ranks.ledgers[0].attempt(7)
    ranks.free[0] = False
    assert ranks.look(before=9) == [None, None]
    ranks.ledgers[0].attempt(9)
    assert ranks.look(before=9) == [None, None]
    ranks.ledgers[1].attempt(9)
    assert ranks.look(before=9) == [None, None]
    ranks.free[0] = True
    assert ranks.look(before=9)[0] is True


def test_a_call_that_may_have_been_lost_is_not_made_twice(ranks):
    def lost(step):
        Ledger.ready(ranks.ledgers[0], step)
        raise PeerError("the answer is lost")

    ranks.ledgers[0].ready = lost
    ranks.free[1] = False
    with pytest.raises(PeerError):
        ranks.gates[0].look(ranks.openings[0])
    assert ranks.look() == [None, None]


def test_a_no_that_was_about_a_save_which_this_rank_missed_keeps_it_from_no_later_one(ranks):
    # Rank 1 is still behind step 7, the save of step 8 was skipped by rank 0, which is at 9 now.
    assert ranks.give_up(0, "no slot", before=8) is True
    ranks.gates[0].look(ranks.openings[0])
    ranks.gates[0].next(0, 8)
    ranks.gates[1].look(ranks.openings[1])
    ranks.gates[1].enter(9)
    assert ranks.gates[1].verdict() is True


def test_a_no_that_is_about_this_save_is_one(ranks):
    ranks.give_up(0, "no slot", before=8)
    ranks.gates[0].look(ranks.openings[0])
    ranks.gates[1].enter(8)
    ranks.gates[1].look(ranks.openings[1])
    assert ranks.gates[1].verdict() is False


def test_a_rank_that_knows_the_gate_to_be_open_skips_not_by_itself(ranks):
    ranks.free[1] = False
    for ledger in ranks.ledgers:
        ledger.attempt(7)
        ledger.commit(7)
    ranks.gates[1].look(ranks.gates[1].enter(9))
    assert not ranks.openings[1].bound
    assert ranks.give_up(1, "no slot") is False


def test_behind_no_save_at_all_every_rank_has_to_have_a_slot(ranks):
    ranks.free = [True, False]
    for gate, ledger in zip(ranks.gates, ranks.ledgers, strict=True):
        gate.next(0, -1)
        ledger.attempt(9)
    assert ranks.look() == [None, None]
    ranks.free[1] = True
    assert ranks.look() == [True, True]
