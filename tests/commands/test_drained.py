"""status and verify on what jobs of real runtimes have drained; each command is run as a user runs it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from mlflashpoint.core.arena import scan_seat
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.holding import Holding
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.settings import StoreConfig
from tests.commands.test_store_commands import run
from tests.core.ranks import memory_folder, state


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for variable in ("MLFLASHPOINT_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)


def save(base, *steps, job="job", group="default", resumed=-1):
    config = StoreConfig(job_id=job, base_container=base)
    store = Runtime(config, rank=0, world_size=1, local_rank=0, group=group)
    store.find_latest()
    store.resumed(resumed)
    for step in steps:
        assert store.save(state(step, 0), step=step, wait=True).ok
    store.close()


def drain(base, to, capsys):
    assert run(capsys, "drain", base, "--to", to)[0] == 0


def drain_all(base, to, *, world=1, group="default"):
    """Every version, as ranks do at SIGTERM; told to be of ``world`` ranks."""
    for slot in (slot for slot in scan_seat(base / group / "seat-0") if slot.record):
        held = Holding.open(slot.path)
        record = dataclasses.replace(held.record, world_size=world)
        DrainDir(to, record.job_id, group).put(dataclasses.replace(held, record=record), deadline=1e12)


def test_status_lists_what_was_drained_in_the_form_of_a_containers(base, tmp_path, capsys):
    save(base, 9)
    drain(base, tmp_path, capsys)
    code, out, _ = run(capsys, "status", tmp_path)
    heading, columns, row = out.splitlines()
    assert (code, heading) == (0, f"{tmp_path}/job: job job, drained")
    assert columns.split() == ["GROUP", "STEP", "INCARNATION", "RANKS", "BYTES", "AGE", "STATE"]
    assert (row.split()[:4], row.split()[-1]) == (["default", "9", "1", "1/1"], "complete")


def test_status_as_json_has_the_fields_of_a_containers(base, tmp_path, capsys):
    save(base, 9)
    drain(base, tmp_path, capsys)
    memory, drained = (json.loads(run(capsys, "status", "--json", where)[1]) for where in (base, tmp_path))
    assert drained.keys() == memory.keys()
    assert (drained["job_id"], drained["node"], drained["seats"]) == ("job", "drain", [])
    (one,), (other,) = drained["versions"], memory["versions"]
    assert {**one, "age_s": 0} == {**other, "age_s": 0}


def test_status_says_of_which_ranks_nothing_was_drained(base, tmp_path, capsys):
    save(base, 5)
    drain_all(base, tmp_path, world=4)
    code, out, _ = run(capsys, "status", tmp_path)
    assert code == 0
    assert "1/4" in out and "1 of 4 ranks are drained" in out


def test_status_says_what_a_later_start_has_abandoned(base, tmp_path, capsys):
    save(base, 20, 40)
    drain_all(base, tmp_path)
    shutil.rmtree(base / "default")
    save(base, 21, resumed=20)
    (slot,) = (slot for slot in scan_seat(base / "default" / "seat-0") if slot.record)
    held = Holding.open(slot.path)
    # A later start, of which not all ranks could drain.
    record = dataclasses.replace(held.record, incarnation=2, world_size=2)
    DrainDir(tmp_path, "job", "default").put(dataclasses.replace(held, record=record), deadline=1e12)
    versions = json.loads(run(capsys, "status", "--json", tmp_path)[1])["versions"]
    assert {version["step"]: version["problem"] for version in versions} == {
        21: "1 of 2 ranks are drained",
        40: "abandoned: a later start of the job went on from step 20",
        20: None,
    }


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("rank-1-tmp-0123456789abcdef.data", "a drain that is not finished, or was broken off [path "),
        ("rank-1.data", "a drain that is not finished, or was broken off [path "),
        ("rank-1.commit", "commit record is not JSON"),
        ("rank-1.quarantined", "quarantined [path "),
    ],
)
def test_status_names_what_a_drain_has_left_unfinished_and_what_is_of_no_use(base, tmp_path, capsys, made, said):
    save(base, 5)
    drain(base, tmp_path, capsys)
    (folder,) = tmp_path.glob("job/default/step-5.*")
    (folder / made).write_text("x")
    if made == "rank-1.quarantined":
        (folder / "rank-1.data").write_text("x")
    code, out, _ = run(capsys, "status", tmp_path)
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("unusable: "))
    assert said in line and f"{folder}/rank-1" in line


def test_verify_passes_a_drained_version_that_is_whole_and_says_so(base, tmp_path, capsys):
    save(base, 5, 6)
    drain(base, tmp_path, capsys)
    code, out, _ = run(capsys, "verify", tmp_path)
    shard, group, total = out.splitlines()
    assert (code, group, total) == (0, "default: step 6 is whole", "1 shards, 0 bad")
    assert shard.startswith("default/step-6.1.") and shard.endswith("/rank-0: step 6, rank 0: good")


def test_verify_names_a_drained_shard_that_is_not_good(base, tmp_path, capsys):
    save(base, 5, 6)
    drain_all(base, tmp_path)
    (data,) = tmp_path.glob("job/default/step-6.*/rank-0.data")
    with open(data, "r+b") as file:
        file.seek(50)
        file.write(b"\x55")
    code, out, _ = run(capsys, "verify", "--json", tmp_path)
    found = json.loads(out)
    assert (code, found["bad"], found["whole"]) == (1, 1, {"default": 5})
    assert [shard["step"] for shard in found["shards"] if "has not the digest" in (shard["problem"] or "")] == [6]
    assert not list(tmp_path.rglob("*.quarantined"))


def test_verify_fails_where_no_drained_version_is_whole_though_every_shard_is_good(base, tmp_path, capsys):
    save(base, 5)
    drain_all(base, tmp_path, world=2)
    code, out, _ = run(capsys, "verify", tmp_path)
    assert (code, out.splitlines()[1:]) == (1, ["default: no version is whole", "1 shards, 0 bad"])
    assert json.loads(run(capsys, "verify", "--json", tmp_path)[1])["whole"] == {"default": None}


def test_verify_fails_where_a_drain_has_left_no_shard(base, tmp_path, capsys):
    folder = tmp_path / "job" / "default" / "step-5.1.run"
    folder.mkdir(parents=True)
    (folder / "rank-0-tmp-0123456789abcdef.data").touch()
    assert run(capsys, "verify", tmp_path)[:2] == (1, "default: no version is whole\n0 shards, 0 bad\n")
    assert run(capsys, "status", tmp_path)[1].splitlines()[1] == "no version"


def test_each_group_has_its_own_whole_version(base, tmp_path, capsys):
    save(base, 5, group="actor")
    save(base, 7, group="critic")
    drain(base, tmp_path, capsys)
    out = run(capsys, "verify", tmp_path)[1]
    assert "actor: step 5 is whole\ncritic: step 7 is whole\n2 shards, 0 bad\n" in out


def test_a_shard_of_another_job_in_the_jobs_folder_is_named(base, tmp_path, capsys):
    save(base, 5)
    drain(base, tmp_path, capsys)
    (tmp_path / "job").rename(tmp_path / "renamed")
    assert "a shard of job 'job', group 'default'" in run(capsys, "status", tmp_path)[1]
    assert run(capsys, "verify", tmp_path)[0] == 1


def test_of_several_jobs_the_settings_one_is_meant_or_one_has_to_be_named(base, tmp_path, capsys, monkeypatch):
    save(base, 5, job="one")
    save(base.with_name("other"), 6, job="two")
    drain(base, tmp_path, capsys)
    drain(base.with_name("other"), tmp_path, capsys)
    code, out, err = run(capsys, "status", tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "2 jobs have drained to here: one, two" in err and f"for example {tmp_path}/one" in err
    assert f"{tmp_path}/two: job two, drained" in run(capsys, "status", tmp_path / "two")[1]
    monkeypatch.setenv("MLFLASHPOINT_JOB_ID", "one")
    assert f"{tmp_path}/one: job one, drained" in run(capsys, "status", tmp_path)[1]


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_directory_to_which_nothing_was_drained_is_one_line_of_error(tmp_path, capsys, command):
    code, out, err = run(capsys, command, tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no memory container is here, and nothing was drained to here" in err
    assert run(capsys, command, Path(tmp_path / "not there"))[0] == 1
