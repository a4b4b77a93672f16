"""Another process of the user reads a job's versions, while the job runs and after it was killed."""

import shutil
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from mlflashpoint.adapter.pytorch import MemoryStorageReader, ReadOnlyStore
from mlflashpoint.core.seat import live_owner
from mlflashpoint.errors import ContainerError, ForeignContainerError, NoVersionError, TopologyMismatchError
from tests.adapter.pytorch import launch

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
RANKS = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The job in all its stages: reads during each are made by the fixture, for it goes on meanwhile."""
    folder = tmp_path_factory.mktemp("beside")
    base = Path(f"/dev/shm/mlflashpoint-test-{uuid.uuid4().hex}")
    base.mkdir(mode=0o700)
    found = {"base": base, "store": ReadOnlyStore(base / "job")}
    found["before"] = found["store"].latest()
    ended = []

    def run():
        arguments = [base, folder]
        ended.append(launch.launch(Path(__file__).parent / "beside_worker.py", RANKS, arguments, folder))

    trainer = threading.Thread(target=run)
    trainer.start()
    try:
        give_up = time.monotonic() + launch.DEADLINE_S
        while not (folder / "one version").exists() and trainer.is_alive() and time.monotonic() < give_up:
            time.sleep(0.05)
        seats = [base / "job" / "default" / f"seat-{rank}" for rank in range(RANKS)]
        found["owners"] = [live_owner(seat) for seat in seats]
        files = listing(base)
        found["while it runs"] = read(found["store"])
        found["changed"] = files ^ listing(base)
        (folder / "go on").touch()
        found["while it saves"] = [attempt(found["store"]) for _ in range(12)]
        (folder / "stop").touch()
        trainer.join(launch.DEADLINE_S)
        (found["reports"],) = ended
        yield found
    finally:
        (folder / "go on").touch()
        (folder / "stop").touch()
        trainer.join(launch.DEADLINE_S)
        shutil.rmtree(base, ignore_errors=True)


def listing(base):
    """Every file with its time of change."""
    return {(str(path), path.stat().st_mtime_ns) for path in base.rglob("*")}


def blank():
    return {
        "sharded": torch.zeros(1001, 1000),
        "own": {str(rank): torch.zeros(300_000) for rank in range(RANKS)},
        "text": "",
        "step": -1,
    }


def values(state):
    """All the different values in a state, which are one step's."""
    tensors = [state["sharded"], *state["own"].values()]
    text, step = state["text"], state["step"]
    whole = text == str(step) * 5000
    return sorted({value for tensor in tensors for value in tensor.unique().tolist()} | {step, step if whole else text})


def read(store, version=None):
    state, version = blank(), version or store.latest()
    dcp.load(state, checkpoint_id=version, storage_reader=store.reader)
    return version.step, values(state)


def attempt(store):
    """``read``, or the type of the error."""
    try:
        return read(store)
    except CheckpointException as error:
        return [type(failure) for failure, _ in error.failures.values()]


def test_before_the_job_has_begun_there_is_no_version(job):
    assert job["before"] is None


def test_a_version_is_read_whole_into_one_process_while_the_job_runs(job):
    assert all(job["owners"]), "the job does not sit on its seats"
    assert job["while it runs"] == (1, [1])


def test_reading_changes_no_file(job):
    assert job["changed"] == set()


def test_a_version_that_is_recycled_while_it_is_read_is_right_or_refused(job):
    good = [result for result in job["while it saves"] if isinstance(result, tuple)]
    refused = [result for result in job["while it saves"] if not isinstance(result, tuple)]
    assert good and all(found == [step] for step, found in good)
    assert all(kinds == [NoVersionError] for kinds in refused), refused
    assert max(step for step, _ in good) > 1


def test_the_job_is_not_disturbed(job):
    for report in job["reports"]:
        assert report["last"] > 3
        assert report["failed"] == 0 and report["error"] == ""


def test_a_dead_jobs_newest_version_is_read(job):
    last = job["reports"][0]["last"]
    assert read(job["store"]) == (last, [last])


def test_a_reader_alone_reads_a_version_by_name(job):
    state, last = blank(), job["reports"][0]["last"]
    dcp.load(state, storage_reader=MemoryStorageReader(job["store"].version(last)))
    assert values(state) == [last]


def test_a_process_with_ranks_of_its_own_reads(job, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    last = job["reports"][0]["last"]
    files = listing(job["base"])
    environ = {"MLFLASHPOINT_JOB_ID": "job", "MLFLASHPOINT_BASE_CONTAINER": str(job["base"] / "job")}
    assert read(ReadOnlyStore.from_env(environ)) == (last, [last])
    assert listing(job["base"]) == files


def test_a_newer_durable_checkpoint_goes_before(job):
    last = job["reports"][0]["last"]
    assert job["store"].latest(durable_step=last + 1) is None
    assert job["store"].latest(durable_step=last) == job["store"].version(last)


def test_what_each_rank_saved_for_itself_is_not_taken_for_the_whole(job):
    store = ReadOnlyStore(job["base"] / "alone")
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"mine": -1}, checkpoint_id=store.latest(), storage_reader=store.reader)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, TopologyMismatchError)


def test_another_jobs_container_is_refused(job):
    with pytest.raises(ForeignContainerError, match="'job', not 'other'"):
        ReadOnlyStore(job["base"] / "job", job_id="other").latest()


def test_a_container_behind_a_link_is_refused(job):
    link = job["base"] / "link"
    link.symlink_to(job["base"] / "alone")
    with pytest.raises(ContainerError, match="symbolic link"):
        ReadOnlyStore(link).latest()
