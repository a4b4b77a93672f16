"""What a rank's background makes of the ledger, at moments that no schedule of processes would hit."""

import time

import pytest
import torch.distributed as dist

from mlflashpoint.core.channel import Channel
from mlflashpoint.core.counters import Counters
from mlflashpoint.core.incarnation import Incarnation
from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.rotation import Version
from mlflashpoint.core.settlement import Settlement
from mlflashpoint.core.ticket import Ticket
from mlflashpoint.errors import FlashpointError, StepError
from tests.core.memberships import Membership


class Member:
    """One rank with two slots, whose training thread and background are the test's own."""

    def __init__(self, store, rank, world=2):
        start = Incarnation(1, "run", 1.0, -1)
        self.session = Membership(Channel(store, "test", clone=False), start, rank=rank, world=world)
        self.session.resumed_from[-1] = -1
        self.pool = SlotPool()
        self.pool.adopt([None, None], ())
        self.settlement = Settlement(self.session, Counters(), self.pool, free=self.pool.available)
        self.gate = self.settlement.gate

    def ticket(self, step):
        return Ticket(step, self.session.epoch, "")

    def stage(self, ticket):
        ticket.index = self.pool.take(0)
        assert ticket.index is not None
        ticket.opening = self.gate.next(ticket.epoch, ticket.step)

    def store(self, ticket, *, told=True):
        version = Version(self.session.number(ticket.epoch), ticket.step)
        self.pool.stored(ticket.index, version, epoch=ticket.epoch)
        if told:
            self.settlement.commit(ticket)

    def save(self, step, *, told=True):
        ticket = self.ticket(step)
        self.stage(ticket)
        self.settlement.attempt(ticket)
        self.store(ticket, told=told)
        return ticket

    def roll_back(self, step):
        self.session.resumed_from.append(step)
        given_up = [version for version in self.pool.open_versions() if version.step > step]
        self.pool.roll_back(step)
        self.gate.next(self.session.epoch, -1)
        self.settlement.go_back(self.session.epoch, step, given_up)

    def wait_for(self, step):
        ticket = self.ticket(step)
        ticket.entrance = self.gate.enter(step)
        self.settlement.await_slot(ticket)
        self.settlement.attempt(ticket)
        return ticket


@pytest.fixture
def members():
    store = dist.HashStore()
    return [Member(store, rank) for rank in (0, 1)]


def look(members, rounds=3):
    for _ in range(rounds):
        for member in members:
            member.settlement.watch()


def test_a_wait_that_is_over_leaves_the_gate_of_the_next_save_alone(members):
    one, two = members
    for member in members:
        member.save(1)
    look(members)
    ticket = one.wait_for(2)
    two.settlement.fail(two.ticket(2), FlashpointError("no"))
    ledger = one.settlement._ledger(0)
    verdict = ledger.verdict

    def meanwhile(step):
        # The training thread waits no longer, skips the save, and sets up the gate behind it.
        one.gate.next(0, 2)
        one.settlement.slot_awaited()
        return verdict(step)

    ledger.verdict = meanwhile
    one.settlement.watch()
    ledger.verdict = verdict
    two.gate.next(0, 2)
    look(members)
    assert [member.gate.verdict() for member in members] == [True, True]
    assert ticket.attempted


def test_why_a_rank_has_waited_in_vain_is_told_though_its_training_thread_has_gone_on(members):
    one, two = members
    for member in members:
        begun = member.ticket(1)
        member.stage(begun)
        member.settlement.attempt(begun)
    ticket = one.wait_for(2)
    assert one.gate.give_up("no slot here", ticket.entrance) is True
    one.gate.next(0, 2)
    one.settlement.slot_awaited()
    one.settlement.fail(ticket, FlashpointError("skipped"))
    two.wait_for(2)
    look([two])
    assert (two.gate.verdict(), two.gate.reason) == (False, "rank 0: no slot here")


@pytest.mark.parametrize("told", [False, True])
def test_a_version_that_no_longer_can_become_complete_keeps_no_slot_after_a_rollback(members, told):
    one, two = members
    for member in members:
        member.save(1)
    look(members)
    # Step 2 is saved here; on the other rank its failure, or the commit, is never told.
    one.save(2)
    if told:
        ticket = two.ticket(2)
        two.stage(ticket)
        two.settlement.attempt(ticket)
        two.store(ticket, told=False)
    for member in members:
        member.roll_back(2)
    assert not one.pool.available()
    for member in members:
        member.wait_for(3)
    look(members)
    assert one.pool.available()
    assert one.settlement._ledger(0).verdict(2).complete is False
    assert [member.gate.verdict() for member in members] == [True, True]


def test_a_version_of_before_a_rollback_is_waited_for_until_every_rank_has_begun_a_later_save(members):
    one, two = members
    for member in members:
        member.save(1)
    look(members)
    one.save(2)
    late = two.ticket(2)
    two.stage(late)
    two.settlement.attempt(late)
    for member in members:
        member.roll_back(2)
    one.wait_for(3)
    look(members)
    assert not one.pool.available()
    two.store(late)
    look(members)
    assert one.pool.newest_complete == Version(1, 2)


def test_the_gate_of_the_first_save_after_a_rollback_opens_only_when_every_rank_has_a_slot(members):
    for member in members:
        member.roll_back(-1)
    one = members[0]
    one.pool.take(0)
    one.pool.take(0)
    for member in members:
        member.wait_for(3)
    look(members)
    assert [member.gate.verdict() for member in members] == [None, None]
    one.pool.freed(0)
    look(members)
    assert [member.gate.verdict() for member in members] == [True, True]


def test_looks_made_from_within_a_job_keep_the_pause_of_the_watch(members):
    one = members[0]
    for member in members:
        member.save(1)
    one.wait_for(2)
    calls = []
    watch = one.settlement.watch
    one.settlement.watch = lambda: calls.append(1) or watch()
    one.session.ranks = one.session.ranks.__class__(0, 20_000, 0)
    give_up = time.monotonic() + 0.3
    while time.monotonic() < give_up:
        one.settlement.glance()
    assert len(calls) == 1


def test_no_look_is_made_from_within_a_job_when_nothing_waits(members):
    one = members[0]
    one.save(1)
    one.settlement.watch = lambda: pytest.fail("looked")
    one.settlement.glance()


def test_a_new_wait_is_looked_for_at_once_whatever_the_pause_was_before(members):
    one = members[0]
    for member in members:
        member.save(1)
    one.session.ranks = one.session.ranks.__class__(0, 20_000, 0)
    one.settlement.watch()
    calls = []
    one.settlement.watch = lambda: calls.append(1)
    one.wait_for(2)
    one.settlement.glance()
    assert calls == [1]


@pytest.mark.parametrize(("saves", "most"), [(40, 2), (2, 10)])
def test_what_was_said_before_a_rollback_is_forgotten_after_it(members, saves, most):
    store = members[0].session.channel().connection
    step, keys = 0, []
    for _ in range(20):
        for _ in range(saves):
            step += 1
            for member in members:
                member.save(step)
            look(members, rounds=1)
        keys.append(store.num_keys())
        assert all(len(member.settlement._ledgers) <= most for member in members)
        for member in members:
            member.roll_back(step)
    assert keys[-1] == keys[most]


def test_what_lies_above_the_step_that_training_went_back_to_is_told_as_failed(members):
    one, two = members
    for member in members:
        member.save(1)
    look(members)
    one.save(2)
    one.roll_back(1)
    assert two.settlement._ledger(0).verdict(2).reason == "rank 0: training went back to step 1"
    late = two.ticket(2)
    two.stage(late)
    two.settlement.attempt(late)
    two.store(late)
    assert two.pool.newest_complete == Version(1, 1)


def test_a_save_that_was_under_way_when_training_went_back_below_it_never_becomes_complete(members):
    tickets = [member.ticket(2) for member in members]
    for member, ticket in zip(members, tickets, strict=True):
        member.stage(ticket)
        member.settlement.attempt(ticket)
        member.roll_back(1)
    for member, ticket in zip(members, tickets, strict=True):
        member.store(ticket)
    assert members[0].settlement._ledger(0).verdict(2).complete is False


def test_a_rank_that_is_about_to_go_back_itself_saves_on_what_the_others_have_left_above_it_alone(members):
    one, two = members
    for member in members:
        member.save(1)
    look(members)
    one.save(3)
    one.roll_back(2)
    two.settlement.fail(two.ticket(3), FlashpointError("no"))
    two.settlement.require_in_step(two.ticket(2))
    with pytest.raises(StepError, match="on the other ranks training went back to step 2"):
        two.settlement.require_in_step(two.ticket(3))
    two.roll_back(2)
    two.settlement.require_in_step(two.ticket(3))
