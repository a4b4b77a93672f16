"""What would keep a SIGTERM from draining is told when the job starts; a drain directory that hangs hangs no job."""

import os
import shutil
import subprocess
import threading
import time

import pytest

from mlflashpoint import cli
from mlflashpoint.core import drainlook
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig
from tests.core import bodies
from tests.core.mounts import fill, mounted
from tests.core.ranks import Life, memory_folder, state

#: how the line begins that says that a drain would fail
TOLD = "a SIGTERM would drain nothing: "


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


@pytest.fixture
def start(base):
    """Starts a job of one rank that looks for a version, and waits for what is done beside it."""
    made = []

    def begin(drain, group="default", **settings):
        config = StoreConfig(job_id="job", base_container=base, drain_dir=drain, **settings)
        made.append(Runtime(config, rank=0, world_size=1, local_rank=0, group=group))
        made[-1].find_latest()
        bodies.await_drain_look()
        return made[-1]

    yield begin
    for runtime in made:
        runtime.close()


def told(caplog):
    """What was said of the drain directory, but for what is said of all that is on tmpfs, as these tests may be."""
    said = [record for record in caplog.records if "drain" in record.getMessage()]
    return [record for record in said if "which does not outlive the node" not in record.getMessage()]


def test_a_directory_that_can_be_drained_to_is_not_spoken_of_and_nothing_is_left_in_it(start, tmp_path, caplog):
    start(tmp_path)
    assert told(caplog) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_made_at_the_start_and_the_log_says_so_with_the_remedy(
    start, tmp_path, caplog
):
    start(tmp_path / "new" / "drain")
    (record,) = told(caplog)
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"the drain directory {tmp_path}/new/drain did not exist and was made, on ")
    assert "see that it is durable and that all nodes see the same one" in record.getMessage()
    assert (tmp_path / "new" / "drain").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("where", ["file", "file/below", "link"])
def test_what_is_no_directory_is_told_at_the_start_by_the_settings_name_and_the_job_goes_on(
    start, tmp_path, caplog, where
):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    runtime = start(tmp_path / where)
    (record,) = told(caplog)
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(TOLD)
    assert "[MLFLASHPOINT_DRAIN_DIR, path " in record.getMessage()
    assert "remedy: give a durable directory that this user may write" in record.getMessage()
    assert runtime.save(state(1, 0), step=1, wait=True).ok


def test_a_directory_in_the_container_by_a_link_is_told_at_the_start(start, base, tmp_path, caplog):
    (tmp_path / "link").symlink_to(base)
    start(tmp_path / "link" / "drained")
    (record,) = told(caplog)
    assert record.getMessage().startswith(f"{TOLD}the drain directory lies in the memory to drain")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
@pytest.mark.parametrize("there", [True, False])
def test_a_read_only_place_is_told_at_the_start(start, tmp_path, caplog, there):
    with mounted(tmp_path / "small") as folder:
        (folder / "drain").mkdir(mode=0o700)
        read_only(folder)
        start(folder / "drain" if there else folder / "other")
        (record,) = [record for record in told(caplog) if record.levelname == "ERROR"]
    assert record.getMessage().startswith(f"{TOLD}the drain directory can't be used: Read-only file system")
    assert "MLFLASHPOINT_DRAIN_DIR" in record.getMessage()


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_full_directory_is_told_at_the_start(start, tmp_path, caplog):
    with mounted(tmp_path / "small") as folder:
        fill(folder)
        start(folder)
        (record,) = [record for record in told(caplog) if record.levelname == "ERROR"]
        assert [path.name for path in folder.iterdir()] == ["other"]
    assert record.getMessage().startswith(f"{TOLD}the drain directory is full")


def test_a_directory_is_told_of_once_by_a_process_that_has_several_groups(start, tmp_path, caplog):
    (tmp_path / "file").touch()
    for group in ("one", "two"):
        start(tmp_path / "file", group)
    assert len(told(caplog)) == 1


@pytest.mark.multiprocess
def test_each_node_tells_it_once(base, tmp_path):
    (tmp_path / "file").touch()
    nodes = [base.with_name("node-a"), base.with_name("node-b")]
    life = Life(bodies.look_at_drain_dir, 4, None, bases=[nodes[0], nodes[0], nodes[1], nodes[1]], replicas=0,
                seats=[0, 1, 0, 1], drain_dir=tmp_path / "file")  # fmt: skip
    counts = {rank: sum(TOLD in line for line in logs) for rank, logs in life.results().items()}
    assert counts == {0: 1, 1: 0, 2: 1, 3: 0}


@pytest.fixture
def hung():
    """What a system call on a file system that hangs does, until the test is over."""
    over = threading.Event()
    yield lambda *_, **__: over.wait(60)
    over.set()


def test_a_directory_that_hangs_is_told_and_no_call_of_the_job_waits_for_it(base, tmp_path, caplog, monkeypatch, hung):
    monkeypatch.setattr(DrainDir, "prepare", hung)
    monkeypatch.setattr(drainlook, "_LONGEST_S", 0.5)
    config = StoreConfig(job_id="job", base_container=base, drain_dir=tmp_path)
    began = time.monotonic()
    runtime = Runtime(config, rank=0, world_size=1, local_rank=0)
    try:
        runtime.find_latest()
        assert runtime.save(state(1, 0), step=1, wait=True).ok
        assert time.monotonic() - began < 30
        bodies.await_drain_look()
    finally:
        runtime.close()
    (record,) = told(caplog)
    assert record.getMessage().startswith(f"{TOLD}the drain directory has not answered within 0.5 s")
    assert f"[MLFLASHPOINT_DRAIN_DIR, path {tmp_path}]; remedy: " in record.getMessage()


@pytest.mark.multiprocess
def test_a_job_goes_on_from_memory_though_the_drain_directory_hangs(base, tmp_path, caplog, monkeypatch, hung):
    Life(bodies.save_steps, 1, base, [1]).results()
    monkeypatch.setattr(DrainDir, "versions", hung)
    config = StoreConfig(job_id="job", base_container=base, drain_dir=tmp_path, deadline_s=5)
    runtime = Runtime(config, rank=0, world_size=1, local_rank=0)
    try:
        recovery = runtime.find_latest()
        assert recovery is not None and recovery.step == 1
    finally:
        runtime.close()
    assert "the drain directory is left out: the drain directory has not answered within 1 s" in caplog.text


@pytest.mark.multiprocess
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_corrupt_copy_on_a_read_only_place_is_passed_over_by_all_ranks(base, tmp_path):
    with mounted(tmp_path / "small", "16m") as folder:
        Life(bodies.save_steps, 2, base, [1, 2]).results()
        assert cli.main(["drain", str(base), "--to", str(folder)]) == 0
        (data,) = folder.rglob("rank-1.data")
        data.write_bytes(b"\x99" * 100 + data.read_bytes()[100:])
        shutil.rmtree(base)
        read_only(folder)
        results = Life(bodies.save_steps, 2, base, [], drain_dir=folder).results()
    assert {result["found"] for result in results.values()} == {-1}
    assert any("a corrupt shard can't be quarantined: " in line for line in results[1]["logs"])


def read_only(folder):
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
