"""Ranks that do not do the same: who is missing is named, and what they save never makes one version.

The ranks are stores of this process, each with a background of its own, so that a test says who does what when.
"""

import threading

import pytest
import torch.distributed as dist

from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import DeadlineExceededError
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
