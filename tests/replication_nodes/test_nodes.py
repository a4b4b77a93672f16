"""Jobs on several nodes, each with its own network and memory: nodes die, links break and slow down, memory fills."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

JOB = Path(__file__).with_name("job.py")
DEADLINE_S = 150
#: float64 numbers in each of two tensors: a shard of 16 MB, 8 MB, or a few KiB
LARGE, MIDDLE, SMALL = 1_000_000, 500_000, 1_000


def unbroken(steps, world):
    """The same training in one process, without a store, a network or a loss: the sum of the weights at the end."""
    weights = torch.zeros(1000, dtype=torch.float64)
    momentum = torch.zeros_like(weights)
    generators = [torch.Generator().manual_seed(rank) for rank in range(world)]
    for _ in range(steps):
        gradients = [torch.randint(-9, 10, (1000,), generator=g).double() for g in generators]
        momentum.mul_(0.9).add_(sum(gradients))
        weights.sub_(momentum, alpha=0.1)
    return weights.sum().item().hex()


class Progress:
    """What the ranks of one launch have told so far."""

    def __init__(self, cluster, name, world):
        self.folder = cluster.folder / name
        self.folder.mkdir()
        self.world = world

    def lines(self, rank):
        file = self.folder / f"progress.{rank}"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def until(self, launch, met, what):
        """Wait until ``met(lines of rank 0)``; the job must be alive meanwhile."""
        give_up = time.monotonic() + DEADLINE_S
        while not met(self.lines(0)):
            assert time.monotonic() < give_up, f"{what}: not in time\n{launch.text()}"
            assert any(process.poll() is None for process in launch.processes), f"{what}: ended\n{launch.text()}"
            time.sleep(0.02)

    def first(self):
        return {line["first"] for rank in range(self.world) for line in self.lines(rank) if "first" in line}

    def ends(self):
        found = [line for rank in range(self.world) for line in self.lines(rank) if "end" in line]
        assert len(found) == self.world
        return found

    def steps(self, rank=0):
        return [line for line in self.lines(rank) if "step" in line]


def skipped(progress, rank):
    return [line["step"] for line in progress.steps(rank) if line["skipped"]]


def complete_above(step):
    return lambda lines: any(line.get("complete", -1) >= step for line in lines)


def port():
    return random.randint(20_000, 40_000)


@pytest.mark.parametrize(("count", "ranks", "victim"), [(2, 2, 1), (3, 1, 0)])
def test_a_killed_node_with_its_memory_gone_is_replaced_and_the_job_resumes_bit_for_bit(cluster, count, ranks, victim):
    nodes, world = cluster(count), count * ranks
    before = Progress(nodes, "before", world)
    launch = nodes.torchrun(JOB, 10_000, before.folder, 0.05, SMALL, ranks_per_node=ranks, port=port())
    before.until(launch, complete_above(6), "six complete saves")
    nodes.kill_node(victim)
    reached = max(line["step"] for line in before.steps((victim + 1) % count * ranks))
    launch.kill()
    nodes.boot(victim)
    after = Progress(nodes, "after", world)
    launch = nodes.torchrun(JOB, 30, after.folder, 0, SMALL, ranks_per_node=ranks, port=port())
    assert launch.wait(DEADLINE_S) == [0] * count, launch.text()
    (first,) = after.first()
    assert 6 <= first <= reached
    assert {end["sum"] for end in after.ends()} == {unbroken(30, world)}
    assert {end["stats"]["last_complete_step"] for end in after.ends()} == {30}


def test_a_link_that_is_cut_in_the_middle_of_a_transfer_stops_no_rank_and_replication_goes_on_when_it_is_back(cluster):
    nodes = cluster(2)
    nodes.throttle(1, "16mbit")
    progress = Progress(nodes, "job", 2)
    launch = nodes.torchrun(
        JOB,
        90,
        progress.folder,
        0.25,
        MIDDLE,
        port=port(),
        MLFLASHPOINT_DEADLINE_S="12",
        MLFLASHPOINT_BUSY_WAIT_S="0.5",
    )
    # 8 MB take node 1 four seconds: between two saves in a row they are half-way.
    under_way = lambda: all(line["lag"] > 0 for line in progress.steps(1)[-2:]) and len(progress.steps(1)) > 2  # noqa: E731
    progress.until(launch, lambda _: under_way(), "a transfer under way")
    nodes.cut(1)
    step = len(progress.steps())
    # Longer than the 6 s in which a replica has to be acknowledged.
    progress.until(launch, lambda _: len(progress.steps()) > step + 32, "training beside a cut link")
    before = max(line["complete"] for line in progress.steps())
    nodes.unthrottle(1)
    nodes.mend(1)
    assert launch.wait(DEADLINE_S) == [0, 0], launch.text()
    assert {end["sum"] for end in progress.ends()} == {unbroken(90, 2)}
    assert max(line["blocking_s"] for rank in (0, 1) for line in progress.steps(rank)) < 5
    assert all(line["ok"] or line["skipped"] for rank in (0, 1) for line in progress.steps(rank))
    assert skipped(progress, 0) == skipped(progress, 1)
    assert any("within" in line["last_error"] for rank in (0, 1) for line in progress.steps(rank)), launch.text()
    assert {end["stats"]["last_complete_step"] > max(before, step + 32) for end in progress.ends()} == {True}


@pytest.mark.parametrize("count", [2, 3])
def test_a_full_memory_on_one_node_is_an_error_there_and_no_version_counts_until_there_is_room(cluster, count):
    nodes = cluster(count)
    # 16 MB a shard: room for its own two, and for no replica.
    nodes.node(1).run("mount", "-o", "remount,size=46m", "/dev/shm")
    progress = Progress(nodes, "job", count)
    launch = nodes.torchrun(JOB, 25, progress.folder, 0.2, LARGE, port=port())
    progress.until(launch, lambda _: len(progress.steps()) >= 8, "eight steps")
    lines = [line for rank in range(count) for line in progress.steps(rank)]
    assert {line["complete"] for line in lines} == {-1}
    assert all(line["ok"] for line in lines)
    nodes.node(1).run("mount", "-o", "remount,size=512m", "/dev/shm")
    assert launch.wait(DEADLINE_S) == [0] * count, launch.text()
    assert {end["sum"] for end in progress.ends()} == {unbroken(25, count)}
    assert {end["stats"]["last_complete_step"] for end in progress.ends()} == {25}
    assert "no room for a replica of the shard of rank 0" in launch.full_text()
    assert launch.full_text().count("WARNING a replica could not be delivered") == 1


def test_transfers_that_outlast_the_save_interval_make_all_ranks_skip_the_same_saves(cluster):
    nodes = cluster(2)
    for number in (0, 1):
        nodes.throttle(number, "60mbit")
    progress = Progress(nodes, "job", 2)
    launch = nodes.torchrun(JOB, 40, progress.folder, 0.25, LARGE, port=port(), MLFLASHPOINT_BUSY_WAIT_S="0.2")
    assert launch.wait(DEADLINE_S) == [0, 0], launch.text()
    ends, steps = progress.ends(), [progress.steps(rank) for rank in (0, 1)]
    assert {end["sum"] for end in ends} == {unbroken(40, 2)}
    complete = {line["complete"] for line in steps[0]}
    assert len(complete) >= 3, complete
    # Each rank's replica takes more than two seconds, its saves come every quarter: most of them are skipped.
    assert skipped(progress, 0) == skipped(progress, 1)
    assert [end["stats"]["saves_skipped"] for end in ends] == [len(skipped(progress, 0))] * 2
    assert len(skipped(progress, 0)) >= 15
    assert any(line["lag"] > 0 for line in steps[0])
    assert max(line["blocking_s"] for lines in steps for line in lines) < 5


def test_a_job_that_is_terminated_drains_and_resumes_bit_for_bit_when_all_nodes_are_replaced(cluster):
    nodes = cluster(2)
    drain = {"MLFLASHPOINT_DRAIN_DIR": str(nodes.folder / "drain")}
    before = Progress(nodes, "before", 2)
    launch = nodes.torchrun(JOB, 10_000, before.folder, 0.05, SMALL, port=port(), **drain)
    before.until(launch, complete_above(6), "six complete saves")
    launch.terminate()
    assert None not in launch.wait(60), launch.text()
    reached = max(line["step"] for line in before.steps())
    for number in (0, 1):
        nodes.kill_node(number)
        nodes.boot(number)
    after = Progress(nodes, "after", 2)
    launch = nodes.torchrun(JOB, reached + 10, after.folder, 0, SMALL, port=port(), **drain)
    assert launch.wait(DEADLINE_S) == [0, 0], launch.text()
    (first,) = after.first()
    assert 6 <= first <= reached
    assert {end["sum"] for end in after.ends()} == {unbroken(reached + 10, 2)}
