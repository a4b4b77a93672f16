"""The doctor's verdict on an environment."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent.support import BOOTSTRAP, ROOT, environment, python

DOCTOR = ("-m", "mlflashpoint.cli", "doctor")


def doctor(*path: Path, on: bool | str = True, flags: tuple[str, ...] = (), **extra: str) -> dict[str, Any]:
    done = python(*flags, *DOCTOR, "--json", env=environment(*path, on=on, **extra), cwd=ROOT)
    facts: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if facts["problems"] else 0)
    return facts


def row(facts: dict[str, Any], variable: str) -> dict[str, Any]:
    (found,) = [setting for setting in facts["settings"] if setting["variable"] == variable]
    return dict(found)


def test_it_is_on_when_the_folder_is_first_on_the_path_and_the_switch_set() -> None:
    facts = doctor(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j")
    assert facts["start_up"]["on"] and facts["start_up"]["started_here"]
    assert facts["start_up"]["reason"] == f"{BOOTSTRAP}/sitecustomize.py starts it"
    assert facts["problems"] == []


def test_it_is_off_without_the_switch_and_that_is_no_problem() -> None:
    facts = doctor(BOOTSTRAP, on=False)
    assert not facts["start_up"]["on"] and facts["start_up"]["reason"] == "MLFLASHPOINT_ENABLED is not set"
    assert facts["problems"] == [] and not facts["start_up"]["started_here"]


def test_without_the_folder_on_the_path_it_says_where_the_folder_is() -> None:
    facts = doctor(MLFLASHPOINT_JOB_ID="j")
    assert not facts["start_up"]["on"]
    assert facts["problems"] == [facts["start_up"]["reason"]]
    assert str(BOOTSTRAP) in facts["start_up"]["reason"] and "mlflashpoint install" in facts["start_up"]["reason"]


def test_another_sitecustomize_before_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("")
    facts = doctor(tmp_path, BOOTSTRAP, MLFLASHPOINT_JOB_ID="j")
    assert not facts["start_up"]["on"] and not facts["start_up"]["started_here"]
    assert facts["start_up"]["reason"].startswith(f"{tmp_path}/sitecustomize.py stands before ours")
    facts = doctor(BOOTSTRAP, tmp_path, MLFLASHPOINT_JOB_ID="j")
    assert facts["start_up"]["on"]
    assert [file["ours"] for file in facts["start_up"]["sitecustomize"]][:2] == [True, False]


def test_python_that_ignores_its_environment_is_noticed() -> None:
    facts = doctor(BOOTSTRAP, flags=("-E",), MLFLASHPOINT_JOB_ID="j")
    assert not facts["start_up"]["on"] and not facts["start_up"]["started_here"]


def test_every_setting_has_a_value_and_a_source() -> None:
    facts = doctor(BOOTSTRAP, SLURM_JOB_ID="77", MLFLASHPOINT_REPLICAS="0")
    assert (row(facts, "MLFLASHPOINT_JOB_ID")["value"], row(facts, "MLFLASHPOINT_JOB_ID")["source"]) == (
        "77",
        "SLURM_JOB_ID",
    )
    assert (row(facts, "MLFLASHPOINT_REPLICAS")["value"], row(facts, "MLFLASHPOINT_REPLICAS")["source"]) == (
        0,
        "environment",
    )
    assert row(facts, "MLFLASHPOINT_STRICT")["source"] == "default"
    assert all(setting["meaning"] for setting in facts["settings"])


def test_malformed_and_unknown_settings_and_a_missing_job_id_are_the_problems() -> None:
    facts = doctor(BOOTSTRAP, MLFLASHPOINT_REPLICAS="two", MLFLASHPOINT_REPLICA="1")
    assert not facts["start_up"]["on"]
    assert [problem.partition(";")[0] for problem in facts["problems"]] == [
        "no job id, and none is guessed [MLFLASHPOINT_JOB_ID]",
        "not a whole number [MLFLASHPOINT_REPLICAS='two']",
        "unknown setting [MLFLASHPOINT_REPLICA='1']",
    ]


def test_a_chosen_transport_whose_engine_is_not_installed_is_a_problem() -> None:
    if importlib.util.find_spec("mooncake") is not None:
        pytest.skip("NOT RUN: the engine is installed here")
    facts = doctor(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j", MLFLASHPOINT_TRANSPORT="mooncake")
    (problem,) = facts["problems"]
    assert "the Mooncake transfer engine can't be loaded" in problem and "[MLFLASHPOINT_TRANSPORT]" in problem
    assert "pip install 'mlflashpoint[mooncake]'" in problem
    assert row(facts, "MLFLASHPOINT_TRANSPORT")["value"] == "mooncake" and facts["start_up"]["on"]


def test_the_base_container_has_a_kind_a_size_and_a_verdict(tmp_path: Path) -> None:
    facts = doctor(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j")["container"]
    assert facts["kind"] == "tmpfs" and 0 < facts["free"] <= facts["total"] and facts["error"] is None
    assert facts["path"].startswith("/dev/shm/mlflashpoint-") and facts["path"].endswith("/j")
    on_disk = doctor(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j", MLFLASHPOINT_BASE_CONTAINER=str(ROOT / "not" / "there"))
    assert "not on tmpfs" in on_disk["container"]["error"]
    assert "MLFLASHPOINT_BASE_CONTAINER=" in on_disk["container"]["error"] and "remedy" in on_disk["container"]["error"]
    assert on_disk["container"]["error"] in on_disk["problems"]
    assert not (ROOT / "not").exists()


def test_a_drain_directory_that_could_not_be_drained_to_is_a_problem_and_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for drain, bad in ((tmp_path / "file", True), (tmp_path / "file" / "below", True), (tmp_path / "new", False)):
        facts = doctor(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j", MLFLASHPOINT_DRAIN_DIR=str(drain))
        assert facts["drain_dir"]["path"] == str(drain)
        assert ["MLFLASHPOINT_DRAIN_DIR" in problem for problem in facts["problems"]] == [True] * bad
    assert not (tmp_path / "new").exists()


def test_a_container_that_the_store_would_refuse_is_a_problem() -> None:
    facts = doctor(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j", MLFLASHPOINT_BASE_CONTAINER="/dev/shm")
    assert any("a folder that users share" in problem for problem in facts["problems"])


def test_frameworks_are_judged_by_their_metadata_and_none_is_imported(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    facts = doctor(BOOTSTRAP, tmp_path, MLFLASHPOINT_JOB_ID="j")
    names = [framework["framework"] for framework in facts["frameworks"]]
    assert names == ["bridge", "megatron_lm", "lightning", "nemo", "nemo_rl", "dcp"]
    for framework in facts["frameworks"]:
        assert framework["patches"] or framework["error"] == "not part of this build"
        for patch in framework["patches"]:
            assert patch["will_apply"] is (patch["reason"] == "")
    built = {framework["framework"] for framework in facts["frameworks"] if framework["error"] is None}
    assert built >= {"bridge", "megatron_lm", "lightning", "nemo", "dcp"}


def test_the_text_says_the_same() -> None:
    done = python(*DOCTOR, env=environment(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j"), cwd=ROOT)
    lines = done.stdout.splitlines()
    assert lines[0] == f"agent       on: {BOOTSTRAP}/sitecustomize.py starts it"
    assert any(line.split() == ["MLFLASHPOINT_JOB_ID", "j", "environment"] for line in lines)
    assert done.stderr == ""


def test_a_command_of_ours_does_not_instrument_itself() -> None:
    code = """
import sys
assert "mlflashpoint.agent.start" in sys.modules
from mlflashpoint import cli
code = cli.main(["doctor", "--json"])
from mlflashpoint.agent import start
sys.stderr.write(f"{code} {start.is_started()} {[type(f).__name__ for f in sys.meta_path].count('Finder')}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(BOOTSTRAP, MLFLASHPOINT_JOB_ID="j"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == "0 False 0"
