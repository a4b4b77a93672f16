"""status, verify and clean on containers that real runtimes have made; each command is run as a user runs it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlflashpoint import cli
from mlflashpoint.core.arena import scan_seat
from mlflashpoint.core.lagfile import SeatLag
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.replication.delivery import ReplicationLag
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import memory_folder, state

ROOT = Path(__file__).parents[2]


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


def runtime(base, **more):
    return Runtime(StoreConfig(job_id="job", base_container=base), rank=0, world_size=1, local_rank=0, **more)


def save(base, *steps, resumed=-1):
    store = runtime(base)
    store.find_latest()
    store.resumed(resumed)
    for step in steps:
        assert store.save(state(step, 0), step=step, wait=True).ok
    store.close()


def run(capsys, *argv):
    code = cli.main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_status_lists_versions_newest_first_with_bytes_age_and_state(base, capsys):
    save(base, 9, 10)
    code, out, _ = run(capsys, "status", base)
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [(row[0], row[1], row[2], row[3], row[-1]) for row in rows] == [
        ("default", "10", "1", "1/1", "complete"),
        ("default", "9", "1", "1/1", "complete"),
    ]
    assert "job job" in out
    assert "0 of 1 seats have a live process" in out


def test_status_says_why_a_version_is_not_complete(base, capsys):
    save(base, 20, 40)
    save(base, resumed=20)
    code, out, _ = run(capsys, "status", "--json", base)
    versions = {version["step"]: version for version in json.loads(out)["versions"]}
    assert code == 0
    assert versions[40]["problem"] == "abandoned: a later start of the job went on from step 20"
    assert versions[20]["complete_here"]
    assert versions[20]["bytes"] > 4000
    assert 0 <= versions[20]["age_s"] < 600


def test_status_counts_the_ranks_of_other_nodes_as_missing_here(base, capsys):
    save(base, 5)
    (slot,) = (slot for slot in scan_seat(base / "default" / "seat-0") if slot.record)
    commit = Path(f"{slot.path}.commit")
    commit.write_bytes(dataclasses.replace(slot.record, world_size=4).to_json())
    _, out, _ = run(capsys, "status", base)
    assert "1/4" in out
    assert "1 of 4 ranks are on this node" in out


def test_status_names_what_can_not_be_used(base, capsys):
    save(base, 5, 6)
    (slot,) = (slot for slot in scan_seat(base / "default" / "seat-0") if slot.record.step == 6)
    Path(f"{slot.path}.commit").write_text("garbage")
    code, out, _ = run(capsys, "status", base)
    assert code == 0
    assert "unusable: commit record is not JSON" in out


def test_status_of_what_is_no_container_is_one_line_of_error(base, capsys):
    code, out, err = run(capsys, "status", base.parent)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "no memory container" in err


def test_the_container_that_the_settings_name_is_the_default(base, capsys, monkeypatch):
    save(base, 5)
    monkeypatch.setenv("MLFLASHPOINT_JOB_ID", "job")
    monkeypatch.setenv("MLFLASHPOINT_BASE_CONTAINER", str(base))
    assert str(base) in run(capsys, "status")[1]
    for variable in ("MLFLASHPOINT_JOB_ID", "MLFLASHPOINT_BASE_CONTAINER", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    code, _, err = run(capsys, "status")
    assert code == 1
    assert "MLFLASHPOINT_JOB_ID" in err


def test_verify_passes_what_is_good_and_names_what_is_not(base, capsys):
    save(base, 5, 6)
    code, out, _ = run(capsys, "verify", base)
    assert code == 0
    assert "2 shards, 0 bad" in out
    (slot,) = (slot for slot in scan_seat(base / "default" / "seat-0") if slot.record.step == 6)
    with open(f"{slot.path}.data", "r+b") as data:
        data.seek(50)
        data.write(b"\x55")
    code, out, _ = run(capsys, "verify", "--json", base)
    found = {shard["step"]: shard["problem"] for shard in json.loads(out)["shards"]}
    assert code == 1
    assert found[5] is None
    assert "has not the digest" in found[6]
    assert not list(base.rglob("*.quarantined"))


def test_clean_removes_nothing_without_a_yes_and_everything_with_it(base, capsys):
    save(base, 5)
    (base / "step-5_ckpt").mkdir()
    (base / "step-5_ckpt" / "common.pt").write_text("x")
    code, out, _ = run(capsys, "clean", base)
    assert code == 1
    assert "add --yes" in out
    assert base.exists()
    assert run(capsys, "clean", "--yes", base)[0] == 0
    assert not base.exists()
    assert run(capsys, "clean", "--yes", base)[0] == 0


def test_clean_removes_and_counts_no_file_that_the_store_has_not_made(base, capsys):
    save(base, 5)
    (base / "default" / "step-5_ckpt").mkdir()
    (base / "step-context-lightning").mkdir()
    would = run(capsys, "clean", base)[1].partition("; add")[0]
    precious = [base / "durable" / "step=6.ckpt", base / "default" / "step=8.ckpt", base / "seat-0", base / "a" / "b"]
    for file in precious:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(1 << 20))
    _, out, _ = run(capsys, "clean", base)
    assert out.startswith(f"{would}; 4 that the store has not made stay: a, default/step=8.ckpt, durable, ...; add")
    assert run(capsys, "clean", "--yes", base)[0] == 0
    assert sorted(path for path in base.rglob("*") if path.is_file()) == sorted(precious)
    assert run(capsys, "clean", "--yes", base)[0] == 1, "it is no container any more"


def test_clean_refuses_while_a_process_lives_in_the_container(base, capsys):
    store = runtime(base)
    store.save(state(5, 0), step=5, wait=True)
    assert "1 of 1 seats have a live process" in run(capsys, "status", base)[1]
    code, _, err = run(capsys, "clean", "--yes", base)
    assert code == 1
    assert f"pid {os.getpid()}" in err
    store.close()
    assert run(capsys, "clean", "--yes", base)[0] == 0


def test_clean_touches_no_folder_that_is_no_container(base, capsys):
    base.mkdir()
    (base / "precious").write_text("x")
    code, _, err = run(capsys, "clean", "--yes", base)
    assert code == 1
    assert "nothing is removed" in err
    assert (base / "precious").exists()
    link = base.with_name("link")
    save(base.with_name("real"), 1)
    link.symlink_to(base.with_name("real"))
    assert run(capsys, "clean", "--yes", link)[0] == 1
    assert base.with_name("real").exists()


def test_clean_removes_a_container_whose_identity_is_garbled(base, capsys):
    save(base, 5)
    (base / "container.json").write_text("{")
    assert run(capsys, "status", base)[0] == 1
    assert run(capsys, "clean", "--yes", base)[0] == 0
    assert not base.exists()


def test_the_commands_run_as_processes_and_tell_usage_errors_apart(base):
    save(base, 5)
    command = [sys.executable, "-m", "mlflashpoint.cli"]
    shown = subprocess.run([*command, "status", str(base)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "complete" in shown.stdout
    wrong = subprocess.run([*command, "clean", "--force"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2


def test_status_tells_how_far_the_replicas_of_a_live_rank_are_behind(base, capsys):
    store = runtime(base)
    store.save(state(1, 0), step=1, wait=True)
    lag = ReplicationLag(3 << 20, 1, 12.0, 5, 1, 4, 0, "rank 1 went away")
    SeatLag.of(lag, rank=0, replicas=1).write(base / "default" / "seat-0")
    _, out, _ = run(capsys, "status", base)
    (line,) = (line for line in out.splitlines() if line.startswith("rank 0"))
    assert line.startswith("rank 0: 5 shards replicated, 1 not; 3.0 MiB on their way for 1")
    assert line.endswith("last error: rank 1 went away")
    _, out, _ = run(capsys, "status", base, "--json")
    (found,) = json.loads(out)["replication"]
    assert (found["bytes_outstanding"], found["failed"], found["seat"]) == (3 << 20, 1, "seat-0")
    store.close()
    # What a rank that is gone had on its way is on its way no more.
    assert "on their way" not in run(capsys, "status", base)[1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": "x"}', "null"])
def test_a_malformed_lag_file_is_left_out(base, capsys, text):
    save(base, 1)
    (base / "default" / "seat-0" / "replication.json").write_text(text)
    code, out, _ = run(capsys, "status", base)
    assert code == 0
    assert "replicated" not in out
