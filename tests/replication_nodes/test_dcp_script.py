"""A script in plain PyTorch under the agent on two nodes, replicas as by default, whose nodes are killed and wiped."""

import json

import pytest

from tests.adapter.pytorch.script import jobs

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

PLACES = (0, 1)


class ScriptJob:
    """One job: its nodes and the folder of its checkpoints, which is the same on all nodes, or one on each."""

    def __init__(self, cluster, warm, folder, mode):
        self.cluster, self.warm, self.folder, self.mode = cluster, warm, folder, mode
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        self.starts, self.log = 0, ""

    def start(self, *arguments, agent=True, fails=False):
        self.starts += 1
        out = self.folder / f"out-{self.starts}"
        out.mkdir()
        arguments = ("--folder", self.checkpoints, "--out", out, *arguments)
        settings = {"ENABLED": str(int(agent)), "DCP_MODE": self.mode, "DCP_DURABLE_EVERY_N_SAVES": "4"}
        environ = {f"MLFLASHPOINT_{name}": value for name, value in settings.items()}
        warm = self.warm.zygote(agent)
        outcome = self.cluster.fork(warm, jobs.SCRIPT, *arguments, places=PLACES, **environ)
        self.log = outcome.log
        assert not outcome.late, f"the job hangs\n{self.log}"
        assert any(outcome.statuses) == fails, self.log
        reports = [out / f"report-{rank}.json" for rank in range(len(PLACES))]
        return [json.loads(path.read_text()) if path.exists() else None for path in reports]

    def replace(self, node):
        self.cluster.kill_node(node)
        self.cluster.boot(node)

    def apart(self):
        """From now on each node has a folder of checkpoints of its own."""
        for node in (0, 1):
            self.cluster.node(node).run("mount", "-t", "tmpfs", "tmpfs", str(self.checkpoints))

    def folders(self, node):
        """Checkpoint -> its files, as the node sees them."""
        listed = self.cluster.node(node).run("find", str(self.checkpoints), "-mindepth", "2", "-printf", "%P\n")
        found = {}
        for line in listed.splitlines():
            step, name = line.split("/", 1)
            found.setdefault(step, set()).add(name)
        return found


@pytest.fixture(scope="module")
def nodes(lasting_cluster):
    return lasting_cluster(2)


@pytest.fixture
def job(nodes, scripts, tmp_path):
    yield lambda mode: ScriptJob(nodes, scripts, tmp_path, mode)
    for number in (0, 1):
        nodes.kill_node(number)
        nodes.boot(number)


@pytest.fixture(scope="module")
def straight(nodes, scripts, tmp_path_factory):
    """Reports of the unbroken run without the agent."""
    one = ScriptJob(nodes, scripts, tmp_path_factory.mktemp("straight"), "off")
    return one.start("--steps", 8, "--every", 100, agent=False)


def test_replace_goes_on_from_memory_whichever_node_is_lost_and_ends_with_a_durable_checkpoint(job, straight):
    one = job("replace")
    for resumed, dies, victim in ((None, 3, 1), (3, 6, 0), (6, 0, None)):
        reports = one.start("--steps", 8, "--die-after", dies, fails=bool(dies))
        assert one.log.count(f"step-{resumed} is loaded from memory") == (resumed is not None)
        assert resumed is None or jobs.resumed_as(straight, reports) == resumed
        if dies:
            assert "mlflashpoint.json" in one.folders(0)[f"step-{dies}"]
            one.replace(victim)
    # What a finished job leaves behind needs neither memory nor us.
    one.replace(0)
    one.replace(1)
    last = one.start("--steps", 8, agent=False)
    assert [report["resumed"] for report in last] == [8] * len(PLACES)
    assert [report["digests"]["8"] for report in last] == [report["digests"]["8"] for report in straight]


@pytest.mark.parametrize("victim", PLACES)
def test_a_checkpoint_whose_folder_was_not_made_before_the_job_died_gets_it_at_the_next_start(job, straight, victim):
    one = job("replace")
    one.start("--steps", 8, "--die-making", "step-4", fails=True)
    assert set(one.folders(0)) == {"step-1", "step-2", "step-3"}
    one.replace(victim)
    # What is left of the older version, whose folder the script finds, is half of it.
    one.start("--steps", 8, fails=True)
    assert f"start again, and the script finds {one.checkpoints / 'step-4'}" in one.log
    assert set(one.folders(0)) == {"step-1", "step-4"}
    assert jobs.resumed_as(straight, one.start("--steps", 8)) == 4


def test_augment_goes_on_from_memory_when_a_node_is_lost_and_leaves_the_durable_saves_as_they_are(job, straight):
    one = job("augment")
    one.start("--steps", 8, "--die-after", 6, fails=True)
    one.replace(1)
    assert jobs.resumed_as(straight, one.start("--steps", 8)) == 6
    assert one.log.count("step-6 is loaded from memory") == 1
    files = {".metadata", *(f"__{rank}_0.distcp" for rank in range(len(PLACES)))}
    assert one.folders(0) == {f"step-{step}": files for step in range(1, 9)}


def test_with_a_folder_on_each_node_no_checkpoint_is_in_memory_only(job, straight):
    one = job("replace")
    one.apart()
    one.start("--steps", 8, "--die-after", 6, fails=True)
    # All nodes see the same names, as they would without us.
    for node in (0, 1):
        found = one.folders(node)
        assert set(found) == {f"step-{step}" for step in range(1, 7)}
        assert not any("mlflashpoint.json" in files or "last-durable" in files for files in found.values())
    assert one.log.count("not to be seen on every node") == 1
    assert one.log.count("is in memory only") == 0
    assert jobs.resumed_as(straight, one.start("--steps", 8)) == 6
    assert one.log.count("step-6 is loaded from memory") == 1
