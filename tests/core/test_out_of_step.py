"""Ranks that do not do the same: who is missing is named, and what they save never makes one version.

The ranks are stores of this process, each with a background of its own, so that a test says who does what when.
"""

import threading

import pytest
import torch.distributed as dist

from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import DeadlineExceededError, SlotBusyError, StateTypeError, StepError
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import memory_folder, state


@pytest.fixture
def start():
    """Makes the ranks of one start of the job, after the ones before have ended."""
    with memory_folder() as folder:
        made = []

        def ranks(world=2, **more):
            while made:
                made.pop().close()
            store = dist.HashStore()
            settings = {"deadline_s": 30, "busy_wait_s": 0.3, **more}
            config = StoreConfig(job_id="job", base_container=folder / "base", **settings)
            made.extend(
                Runtime(config, rank=rank, world_size=world, local_rank=rank, store=store) for rank in range(world)
            )
            return list(made)

        yield ranks
        while made:
            made.pop().close()


def together(ranks, call):
    """What the call gives on each rank, or raises, made by all of them at once."""
    found = {}

    def run(runtime):
        try:
            found[runtime.rank] = call(runtime)
        except Exception as error:
            found[runtime.rank] = error

    threads = [threading.Thread(target=run, args=(runtime,)) for runtime in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[runtime.rank] for runtime in ranks]


def save(ranks, step):
    return together(ranks, lambda runtime: runtime.save(state(step, runtime.rank), step=step, wait=True))


def complete(ranks, step):
    assert [result.ok for result in save(ranks, step)] == [True] * len(ranks)
    assert [runtime.await_version(step, 20) for runtime in ranks] == [True] * len(ranks)


def newest(ranks):
    found = together(ranks, lambda runtime: runtime.find_latest())
    steps = {None if recovery is None else recovery.step for recovery in found}
    assert len(steps) == 1
    return steps.pop()


# -- looking for the newest version --


def test_a_rank_that_looks_when_the_others_have_given_up_is_not_named_as_if_it_were_missing(start):
    one, two = start(deadline_s=1.5)
    complete([one, two], 1)
    with pytest.raises(DeadlineExceededError, match=r"^rank 0 did not answer"):
        two.find_latest()
    with pytest.raises(
        DeadlineExceededError, match=r"^this rank came when the others had given up: rank 0 did not"
    ) as told:
        one.find_latest()
    assert (told.value.rank, "equally often on all ranks" in told.value.remedy) == (0, True)
    assert newest([one, two]) == 1


def test_a_rank_that_waited_longest_names_the_rank_that_never_came_and_not_rank_0(start):
    one, two, three = start(3, deadline_s=2)
    complete([one, two, three], 1)
    # Rank 0 comes so late that rank 1 gives up first.
    go = threading.Timer(1.0, lambda: None)
    go.start()

    def look(runtime):
        if runtime is one:
            go.join()
        return runtime.find_latest()

    for error in together([one, two], look):
        assert isinstance(error, DeadlineExceededError)
        assert str(error).startswith("rank 2 did not answer"), error


# -- going back --


def test_a_save_after_going_back_alone_tells_to_let_the_others_go_back_too(start):
    one, two = start()
    complete([one, two], 1)
    complete([one, two], 2)
    one.resumed(1)
    (result,) = save([one], 3)
    assert isinstance(result.error, SlotBusyError)
    assert "training went back to step 1, and another rank has not begun a save since" in str(result.error)
    assert "let every rank go back as well" in result.error.remedy
    assert "save more rarely" not in str(result.error)


def test_a_save_after_going_back_that_finds_its_slots_in_use_tells_by_what(start, monkeypatch):
    (one,) = start(1)
    complete([one], 10)
    go, commit = threading.Event(), one._pipeline._saver.commit
    monkeypatch.setattr(one._pipeline._saver, "commit", lambda *args, **more: go.wait(30) and commit(*args, **more))
    assert one.save(state(20, 0), step=20).ok
    one.resumed(10)
    result = one.save(state(11, 0), step=11)
    go.set()
    assert isinstance(result.error, SlotBusyError)
    assert "went back to step 10, and every slot is needed: the save before is still being written" in str(result.error)
    assert "MLFLASHPOINT_KEEP_VERSIONS=3" in result.error.remedy
    assert "save more rarely" not in str(result.error)
    one.flush()
    complete([one], 12)


def test_a_rank_that_begins_no_save_between_two_rollbacks_is_in_step_with_the_others_after_them(start):
    one, two = start()
    complete([one, two], 1)
    for _ in range(2):
        together([one, two], lambda runtime: runtime.resumed(1))
        save([one], 2)
    together([one, two], lambda runtime: runtime.resumed(1))
    complete([one, two], 2)
    assert newest(start()) == 2


def test_what_a_rank_saves_that_saw_one_rollback_less_is_never_a_version_with_what_the_others_saved_before(start):
    one, two = start()
    for step in (10, 20):
        complete([one, two], step)
    # Nobody tells that training goes back: rank 0 sees it by a lower step, rank 1, which misses two saves, does not.
    save([one], 30)
    save([one], 25)
    save([two], 30)
    assert two.await_version(30, 20) is False
    assert "training went back to an earlier step, on this one it did not" in str(save([two], 35)[0].error)
    assert newest(start()) is None


def test_a_rank_that_missed_a_rollback_is_told_so_at_its_next_save(start):
    one, two = start()
    assert newest([one, two]) is None
    for runtime in (one, two):
        runtime.resumed(-1)
    # Rank 1 has begun no save at all: for it the second word is not about a rollback.
    save([one], 1)
    for runtime in (one, two):
        runtime.resumed(-1)
    save([two], 1)
    assert two.await_version(1, 20) is False
    (result,) = save([two], 2)
    assert isinstance(result.error, StepError)
    assert "on the other ranks training went back to an earlier step, on this one it did not" in str(result.error)
    assert "resumed(step) on every rank" in result.error.remedy
    assert newest(start()) is None


# -- a save that fails after going back --


def test_a_failed_save_after_going_back_leaves_the_version_that_training_went_back_to(start):
    one, two = start()
    for step in (10, 20):
        complete([one, two], step)
    together([one, two], lambda runtime: runtime.resumed(10))
    one.save(state(11, 0), step=11)
    assert isinstance(two.save({"odd": object()}, step=11).error, StateTypeError)
    # Step 20 is of a future that is given up, however whole it lies there.
    ranks = start()
    assert newest(ranks) == 10
    together(ranks, lambda runtime: runtime.resumed(10))
    complete(ranks, 11)
    assert newest(start()) == 11


def test_all_that_fails_after_going_back_costs_the_abandoned_version_alone(start, monkeypatch):
    (one,) = start(1)
    for step in (10, 20):
        complete([one], step)
    one.resumed(10)
    monkeypatch.setattr(one._pipeline._saver, "commit", lambda *args, **more: (_ for _ in ()).throw(OSError("no")))
    for step in (11, 12, 13):
        assert not one.save(state(step, 0), step=step, wait=True).ok
    assert newest(start(1)) == 10


def test_a_lower_step_without_a_word_abandons_all_versions_even_if_its_save_fails(start, caplog):
    (one,) = start(1)
    for step in (10, 20):
        complete([one], step)
    assert isinstance(one.save({"odd": object()}, step=11).error, StateTypeError)
    assert any("tell it by resumed(step) on all ranks" in record.message for record in caplog.records)
    assert newest(start(1)) is None
