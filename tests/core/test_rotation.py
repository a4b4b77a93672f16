"""The rule of slot reuse, proven on the real code in a simulation: any interleaving, a crash at any moment."""

import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflashpoint.core import pipeline as pipeline_module
from mlflashpoint.core import slots as slots_module
from mlflashpoint.core.channel import Channel
from mlflashpoint.core.counters import Counters
from mlflashpoint.core.incarnation import Incarnation, Lineage
from mlflashpoint.core.pipeline import Pipeline
from mlflashpoint.core.plan import plan_recovery
from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.record import ShardCopy, ShardRecord
from mlflashpoint.core.rotation import Tenant, Version, choose_slot, may_overwrite, slots_needed
from mlflashpoint.core.saves import Saves
from mlflashpoint.errors import PeerError
from mlflashpoint.replication.delivery import ReplicationLag
from tests.core.memberships import Membership
from tests.core.schedule import Schedule


def test_two_slots_are_the_least():
    assert [slots_needed(keep) for keep in (1, 2, 3)] == [2, 2, 3]


def test_empty_goes_before_failed_before_superseded_and_the_oldest_first():
    old, older = Tenant(Version(1, 9)), Tenant(Version(1, 8))
    failed, empty, newest = Tenant(Version(1, 11), failed=True), Tenant(), Tenant(Version(1, 10))
    assert choose_slot([newest, old, older, failed, empty], Version(1, 10)) == 4
    assert choose_slot([newest, old, older, failed], Version(1, 10)) == 3
    assert choose_slot([newest, old, older], Version(1, 10)) == 2
    assert choose_slot([newest], Version(1, 10)) is None


def test_what_is_open_newest_or_under_way_is_never_overwritten():
    assert not may_overwrite(Tenant(Version(1, 10)), Version(1, 10))
    assert not may_overwrite(Tenant(Version(1, 11)), Version(1, 10))
    assert not may_overwrite(Tenant(Version(1, 5)), None)
    assert not may_overwrite(Tenant(busy=True), None)
    assert not may_overwrite(Tenant(Version(1, 1), busy=True), Version(1, 10))


def test_a_version_of_an_earlier_start_is_older_whatever_its_step():
    assert may_overwrite(Tenant(Version(1, 90)), Version(2, 10))


# -- the simulation --

#: so short that any other wait is longer
BUSY_WAIT_S = 1e-9


class SimChannel(Channel):
    """Each call is one step of the schedule; a fault loses the call or its answer."""

    sim = None

    def under(self, prefix):
        channel = SimChannel(self._base, f"{self._prefix}/{prefix}", clone=False)
        channel.sim = self.sim
        return channel

    def _call(self, call, *args):
        self.sim.schedule.point()
        fault = self.sim.chance(self.sim.store_faults)
        if fault == 1:
            raise PeerError("the request is lost")
        result = call(*args)
        if fault == 2:
            raise PeerError("the answer is lost")
        return result

    def read(self, key):
        return self._call(super().read, key)

    def add(self, key, amount=1):
        return self._call(super().add, key, amount)

    def decide(self, key, proposal):
        return self._call(super().decide, key, proposal)


class SimPool(SlotPool):
    """Waiting for a slot lets the others run a few steps; what a rank learns is noted."""

    sim = None

    def settle(self, version, *, complete):
        super().settle(version, complete=complete)
        if complete and not self.sim.given_up(version):
            self.sim.complete.add(version)

    def take(self, wait_s, verdict=lambda: True):
        # In a quiet time the wait outlasts many looks at the verdicts, as busy_wait_s does; else it may be in vain.
        patience = 1 if wait_s == 0 else 60 if self.sim.quiet() else 6
        while patience > 0:
            index = super().take(0, verdict)
            if index is not None or verdict() is False:
                return index
            self.sim.schedule.point()
            # The answer of a store that answers is waited for: what was decided, and that a version which is complete,
            # as somebody has seen who opened the gate, makes room here as well.
            awaited = verdict() is None or (verdict() and self.open_versions())
            patience -= not (wait_s > BUSY_WAIT_S and awaited)
        return None


@dataclass
class SimSlot:
    sim: object
    where: tuple
    record: ShardRecord | None
    capacity: int = 1 << 30
    path: Path = Path("unused")

    def invalidate(self):
        self.sim.schedule.point()
        self.record = self.sim.disk[self.where] = None


class SimExchange:
    """Replicas that are acknowledged, or not, at any later time and in any order."""

    sends = True

    def __init__(self, sim):
        self.sim, self.under_way = sim, []
        sim.schedule.spawn(self.run)

    def send(self, slot, record, over):
        assert slot.record == record
        self.under_way.append((slot, record, over))

    def run(self):
        while True:
            self.sim.schedule.point()
            # It takes a while: meanwhile the others may give the version up.
            if self.under_way and self.sim.decide() % 8 == 0:
                slot, record, over = self.under_way.pop(self.sim.decide() % len(self.under_way))
                # What is on its way to another node may not change before it is there.
                assert slot.record == record, "overwritten while it was being sent"
                over(PeerError("not acknowledged") if self.sim.chance(self.sim.replica_faults) else None)

    def lag(self):
        return ReplicationLag(len(self.under_way), len(self.under_way), 0.0, 0, 0, 0, 0, "")

    def open(self): ...
    def report(self): ...
    def withdraw(self, path): ...


class Simulation:
    """Ranks that save, and the memory that outlives them.

    ``paced``: training keeps the ranks together, and a save is over before the next begins.
    """

    def __init__(
        self, decisions, *, world, keep, store_faults=0, save_faults=0, replica_faults=None, paced=False, rollbacks=0
    ):
        self.paced, self.jobs, self.reached = paced, [], {}
        #: once every rank has begun this step nothing fails any more, and everyone takes turns
        self.quiet_from = 1 << 30
        self.turn = itertools.count()
        # When the drawn decisions are used up, everyone takes turns and nothing fails any more.
        self.decisions = itertools.chain(decisions, itertools.count(256))
        self.world, self.keep = world, keep
        self.store_faults, self.save_faults, self.rollbacks = store_faults, save_faults, rollbacks
        #: None is without replicas
        self.replica_faults = replica_faults
        self.disk = {(rank, slot): None for rank in range(world) for slot in range(slots_needed(keep))}
        self.lineage, self.number, self.ever = Lineage(), 0, False
        #: versions that some rank of this life knows to be complete, and the one that it began with
        self.complete = set()
        #: (incarnation, step) -> rank -> whether it has skipped that save
        self.skipped = {}
        self.schedule = Schedule()

    def decide(self):
        return next(self.decisions)

    def quiet(self):
        return bool(self.reached) and min(self.reached.values()) >= self.quiet_from

    def chance(self, per_256):
        """0 for no fault, else 1 or 2."""
        drawn = self.decide() if per_256 and not self.quiet() else 256
        return 0 if drawn >= per_256 else 1 + drawn % 2

    # -- what a rank's process is made of --

    def arena(self, seat):
        rank = int(seat.name)
        slots = [SimSlot(self, where, record) for where, record in self.disk.items() if where[0] == rank]
        return SimpleNamespace(slots=slots, adopt=lambda: None, reserve=lambda count, nbytes: None, close=lambda: None)

    def plan(self, state):
        return SimpleNamespace(nbytes=1)

    def stage(self, slot, state, *, attributes):
        slot.invalidate()
        self.schedule.point()
        if self.chance(self.save_faults):
            raise MemoryError("staging failed")
        return SimpleNamespace(slot=slot, nbytes=1)

    def commit(self, staged, between, **fields):
        self.schedule.point()
        between()
        fault = self.chance(self.save_faults)
        # A commit that is done and then fails is a version that was whole for a moment without anybody's knowing.
        if fault == 1 or (fault and not self.store_faults):
            raise OSError("committing failed")
        record = ShardRecord(**fields, index_bytes=1, index_digest="", data_bytes=1, created_s=float(fields["step"]))
        staged.slot.record = self.disk[staged.slot.where] = record
        if fault == 2:
            raise OSError("committing failed after the rename")
        return record

    def worker(self, name, watch):
        jobs = []
        self.jobs.append(jobs)

        def run():
            while True:
                self.schedule.point()
                if jobs:
                    jobs[0]()
                    jobs.pop(0)
                watch()

        self.schedule.spawn(run)
        return SimpleNamespace(
            submit=lambda job: (jobs.append(job), True)[1],
            wake=lambda: None,
            drain=lambda s: not jobs,
            stop=lambda s: True,
        )

    # -- one life of the job --

    def copies(self):
        return [
            ShardCopy(record, f"n{rank}", rank, f"default/seat-{rank}/slot-{slot}")
            for (rank, slot), record in self.disk.items()
            if record is not None
        ]

    def recovery(self):
        place = {rank: f"n{rank}" for rank in range(self.world)}
        return plan_recovery(self.copies(), self.world, placement=place, lineage=self.lineage)

    def start(self, steps, back_after=None):
        found = self.recovery()
        self.number = self.lineage.newest + 1
        # Now and then the job goes back further than it would have to.
        step = found.step if self.decide() % 4 else min(found.step, max(-1, found.step - 3))
        start = Incarnation(self.number, f"run-{self.number}", 1e9 * self.number, step)
        self.lineage = Lineage.of((*self.lineage.starts, start))
        self.ever = self.recovery().step >= 0
        self.complete = {Version(0, self.recovery().step)}
        store = dist.HashStore()
        plan = self.planned = self.plan_of(step, steps, back_after)
        for rank in range(self.world):
            self.spawn_rank(rank, store, start, found.complete, plan)
        return step

    def given_up(self, version):
        """Whether training has gone back to before that version, or to before one that had superseded it."""
        return version.incarnation < self.lineage.newest and version.step > self.recovery().step

    def remember(self, incarnation):
        """A rank has gone back, as all of them will: that settles which versions count."""
        if incarnation not in self.lineage.starts:
            self.lineage = Lineage.of((*self.lineage.starts, incarnation))
            self.ever = self.recovery().step >= 0
            self.complete = {version for version in self.complete if not self.given_up(version)}

    def plan_of(self, first, steps, back_after):
        """What training does, on all ranks: ``(True, step)`` saves, ``(False, step)`` goes back to that step."""
        plan, step = [], first
        for left in reversed(range(steps)):
            step += 1
            plan.append((True, step))
            if step == back_after:
                plan.append((False, step))
            if left >= 3 and self.rollbacks and self.decide() < self.rollbacks:
                step = max(first, step - self.decide() % 3)
                plan.append((False, step))
        return plan

    def spawn_rank(self, rank, store, start, complete, plan):
        self.reached[rank] = -1
        channel = SimChannel(store, "sim", clone=False)
        channel.sim = self
        settings = {"keep_versions": self.keep, "busy_wait_s": BUSY_WAIT_S}
        session = Membership(channel, start, rank=rank, world=self.world, remembered=self.remember, **settings)
        counters = Counters()
        exchange = None if self.replica_faults is None else SimExchange(self)
        pipeline = Pipeline(session, counters, exchange)
        pipeline._pool.sim = self
        pipeline.standing.rebase(complete)
        saves = Saves(session, pipeline, counters, SimpleNamespace(release=lambda: None, origin=lambda step: -1))
        saves.resumed(start.resumed_from)

        def train():
            for number, (saves_it, step) in enumerate(plan):
                self.schedule.point()
                while self.paced and (any(self.jobs) or min(self.reached.values()) < number - 1):
                    self.schedule.point()
                self.reached[rank] = number
                # Where training goes back to, the ranks have found together.
                while not saves_it and min(self.reached.values()) < number:
                    self.schedule.point()
                if not saves_it:
                    saves.resumed(step)
                elif self.chance(self.save_faults):
                    # Some say nothing at all, all the way from one rollback to the next; but one that has never begun
                    # anything takes the first rollback for a correction of where it started.
                    if number == 0 or self.decide() % 2:
                        saves.failed(step, OSError("nothing to save"))
                else:
                    result = saves.save(lambda: None, {}, step, "", {}, False)
                    # A save may fail, but not for what is wrong with the simulation.
                    cause = None if result.error is None else result.error.__cause__
                    assert not isinstance(cause, (AttributeError, TypeError, AssertionError)), repr(cause)
                    save = session.number(session.epoch), step
                    self.skipped.setdefault(save, {})[rank] = result.skipped

        self.schedule.spawn(train)

    def run(self, advances, check):
        """Make that many steps. A drawn byte says who goes next and for how many: races need both kinds of turns."""
        left = advances
        while left > 0:
            # A rank that gets no turn can't learn in time that a slot is free, and skips a save: that is no fault.
            drawn = 256 + next(self.turn) if self.quiet() else self.decide()
            who, turns = (drawn % 8, 2 ** max(0, (drawn >> 5) - 2)) if drawn < 256 else (drawn, 1)
            for _ in range(min(turns, left)):
                if not self.schedule.advance(who):
                    return
                check()
            left -= turns

    def crash(self):
        self.schedule.kill()


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr(logging.getLogger("mlflashpoint.core"), "disabled", True)

    def make(decisions, **more):
        sim = Simulation(decisions, **more)
        monkeypatch.setattr(slots_module, "Arena", sim.arena)
        monkeypatch.setattr(pipeline_module, "ShardSaver", lambda: sim)
        monkeypatch.setattr(pipeline_module, "Worker", sim.worker)
        monkeypatch.setattr(pipeline_module, "SlotPool", SimPool)
        return sim

    return make


def once_complete_always_complete(sim):
    """The strong claim: after one version lay whole in memory, one does at every later moment."""

    def check():
        whole = sim.recovery().step >= 0
        assert whole or not sim.ever, f"no complete version is left: {sorted(sim.disk.items())}"
        sim.ever = sim.ever or whole

    return check


def lives(sim, decisions_per_life, check):
    """Live and crash until the decisions are used up."""
    for advances in decisions_per_life:
        try:
            sim.start(steps=6)
            sim.run(advances, check)
        finally:
            sim.crash()
        check()


schedules = st.binary(min_size=60, max_size=900)
life_lengths = st.lists(st.integers(1, 400), min_size=1, max_size=4)
#: of 256 steps, how many training goes back after
back = st.sampled_from([0, 80])
simulation = settings(max_examples=70, deadline=None, suppress_health_check=list(HealthCheck))


def none_is_staged_that_another_rank_skipped(sim):
    def check():
        for save, told in sim.skipped.items():
            assert len(set(told.values())) == 1, f"{save}: {told}"

    return check


def no_verdict_is_broken(sim):
    """The claim when calls to the store may be lost: what the ranks hold to be complete stays until a newer one is."""

    def check():
        known = max((version.step for version in sim.complete), default=-1)
        assert sim.recovery().step >= known, f"{sorted(sim.disk.items())} {sim.complete}"

    return check


@simulation
@given(schedules, life_lengths, st.integers(2, 3), st.integers(1, 3), back)
def test_a_complete_version_survives_every_interleaving_and_every_crash(
    simulated, decisions, lengths, world, keep, rollbacks
):
    sim = simulated(decisions, world=world, keep=keep, rollbacks=rollbacks)
    lives(sim, lengths, once_complete_always_complete(sim))


@simulation
@given(schedules, life_lengths, st.integers(2, 3), st.integers(1, 3), back)
def test_it_survives_failing_saves_too(simulated, decisions, lengths, world, keep, rollbacks):
    sim = simulated(decisions, world=world, keep=keep, save_faults=20, rollbacks=rollbacks)
    lives(sim, lengths, once_complete_always_complete(sim))


@simulation
@given(schedules, life_lengths, st.integers(2, 3), st.integers(1, 3), back)
def test_a_complete_verdict_holds_when_calls_to_the_store_are_lost(
    simulated, decisions, lengths, world, keep, rollbacks
):
    sim = simulated(decisions, world=world, keep=keep, store_faults=40, save_faults=10, rollbacks=rollbacks)
    lives(sim, lengths, no_verdict_is_broken(sim))


@simulation
@given(schedules, life_lengths, st.integers(2, 3), st.integers(1, 3), back)
def test_it_survives_replicas_that_come_late_and_in_any_order(simulated, decisions, lengths, world, keep, rollbacks):
    sim = simulated(decisions, world=world, keep=keep, replica_faults=0, rollbacks=rollbacks)
    lives(sim, lengths, once_complete_always_complete(sim))


@simulation
@given(schedules, life_lengths, st.integers(2, 3), st.integers(1, 3), back)
def test_a_complete_verdict_holds_when_replicas_fail(simulated, decisions, lengths, world, keep, rollbacks):
    sim = simulated(
        decisions, world=world, keep=keep, store_faults=20, save_faults=10, replica_faults=40, rollbacks=rollbacks
    )
    lives(sim, lengths, no_verdict_is_broken(sim))


@simulation
@given(schedules, life_lengths, st.integers(2, 3), st.integers(1, 3), st.sampled_from([None, 0, 40]), back)
def test_a_save_is_skipped_by_all_ranks_or_by_none(
    simulated, decisions, lengths, world, keep, replica_faults, rollbacks
):
    sim = simulated(decisions, world=world, keep=keep, replica_faults=replica_faults, rollbacks=rollbacks)
    lives(sim, lengths, none_is_staged_that_another_rank_skipped(sim))


@settings(simulation, max_examples=30)
@given(st.binary(min_size=60, max_size=300), st.integers(2, 3), st.integers(1, 3), st.sampled_from([None, 1, 2]))
def test_whatever_failed_before_the_saves_of_a_quiet_time_become_complete(
    simulated, decisions, world, keep, back_after
):
    sim = simulated(decisions, world=world, keep=keep, save_faults=50, paced=True)
    try:
        sim.start(12, back_after)
        sim.quiet_from = len(sim.planned) - 3
        sim.run(5_000, lambda: None)
        assert sim.recovery().step == sim.planned[-1][1]
    finally:
        sim.crash()
