"""The book of slots: what a resume or a rollback means for what it protects."""

from mlflashpoint.core.pool import SlotPool
from mlflashpoint.core.rotation import Version


def filled(*steps):
    """A pool with one slot per step, all complete in incarnation 1."""
    pool = SlotPool()
    pool.adopt([None] * len(steps), ())
    for step in steps:
        index = pool.take(0)
        pool.stored(index, Version(1, step), epoch=0)
        pool.settle(Version(1, step), complete=True)
    return pool


def test_going_back_twice_in_a_row_protects_the_version_of_the_lower_step():
    pool = filled(10, 20, 30)
    pool.roll_back(20)
    assert pool.newest_complete == Version(1, 20)
    pool.go_on_from(10)
    assert pool.newest_complete == Version(1, 10)
    # Only the two abandoned ones may be overwritten, never the one that training goes on from.
    assert len({pool.take(0), pool.take(0)} - {None}) == 2
    assert pool.take(0) is None


def test_a_save_that_was_under_way_when_training_went_back_below_it_is_abandoned():
    pool = filled(10, 20)
    pool.settle(Version(1, 20), complete=True)
    index = pool.take(0)
    pool.roll_back(40)
    pool.go_on_from(15)
    pool.stored(index, Version(1, 30), epoch=0)
    pool.settle(Version(1, 30), complete=True)
    assert pool.newest_complete != Version(1, 30)


def test_the_verdict_of_a_save_is_open_until_it_is_settled():
    pool = filled(10, 20)
    index = pool.take(0)
    pool.stored(index, Version(1, 30), epoch=0)
    assert pool.verdict(30, since=1) == (None, True)
    pool.settle(Version(1, 30), complete=True)
    assert pool.verdict(30, since=1) == (True, False)


def test_the_verdict_of_a_save_that_failed_or_was_never_made():
    pool = filled(10, 20)
    index = pool.take(0)
    pool.stored(index, Version(1, 30), epoch=0)
    pool.settle(Version(1, 30), complete=False)
    assert pool.verdict(30, since=1) == (False, False)
    assert pool.verdict(40, since=1) == (None, False)
    # An earlier start's version of that step is another one.
    assert pool.verdict(20, since=2) == (None, False)


def test_what_keeps_the_slots_is_told():
    pool = filled(10, 20)
    pool.roll_back(10)
    index = pool.take(0)
    assert pool.obstacle() == "the save before is still being written into one"
    pool.stored(index, Version(1, 30), epoch=0, sending=True)
    assert "does not count any more and is still on its way" in pool.obstacle()
    pool.sent(index)
    pool.stored(pool.take(0), Version(2, 11), epoch=1)
    assert "not known yet whether an earlier version is complete" in pool.obstacle()
