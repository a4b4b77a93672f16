"""The status file of each process, and what reads it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlflashpoint.agent import status
from tests.agent.support import ROOT, STATES, Workspace, python

WAIT = "\nimport sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def job(workspace: Workspace) -> Iterator[subprocess.Popen[str]]:
    """A process with one active, one skipped and one failed patch, and one fault."""
    workspace.table(
        'patch("save"), patch("gone"), patch("RUNS"), patch("Manager.save", around="table:bad")',
        "def bad(call, *rest):\n    raise ValueError('ours')\n",
    )
    code = STATES + "import fw.core; fw.core.save(1); fw.core.Manager('d').save(1)" + WAIT
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=workspace.environment(MLFLASHPOINT_KEEP_VERSIONS="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate(timeout=30)
    status.path_of(process.pid).unlink(missing_ok=True)


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "mlflashpoint.cli", "doctor", *arguments, env={**os.environ, **env}, cwd=ROOT)


def test_the_doctor_shows_each_patch_of_a_running_process(job: subprocess.Popen[str]) -> None:
    done = doctor("--json", "--pid", str(job.pid))
    facts = json.loads(done.stdout)
    patches = {patch["target"]: patch for patch in facts["process"]["patches"]}
    assert {target: patch["state"] for target, patch in patches.items()} == {
        "save": "active",
        "gone": "skipped",
        "RUNS": "failed",
        "Manager.save": "active",
    }
    assert patches["Manager.save"]["faults"] == 1
    assert patches["Manager.save"]["last_fault"] == "before the original: ValueError: ours"
    assert patches["gone"]["reason"] == "missing target: fw.core has no gone"
    settings = {row["variable"]: row for row in facts["settings"]}
    assert settings["MLFLASHPOINT_KEEP_VERSIONS"]["value"] == 1
    assert settings["MLFLASHPOINT_KEEP_VERSIONS"]["source"] == "environment"
    assert settings["MLFLASHPOINT_JOB_ID"]["value"] == "agent-test"
    assert facts["start_up"]["on"] and done.returncode == 1
    assert any("RUNS" in problem for problem in facts["problems"])
    text = doctor("--pid", str(job.pid)).stdout
    assert "bridge:fw.core:Manager.save: active: bridge; calls 1, faults 1, last before the original" in text


def test_the_file_is_private(job: subprocess.Popen[str]) -> None:
    path = status.path_of(job.pid)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_it_goes_with_the_process(job: subprocess.Popen[str]) -> None:
    path = status.path_of(job.pid)
    assert path.exists()
    job.communicate(timeout=30)
    assert not path.exists()


def test_the_file_of_a_killed_process_is_taken_away_by_the_next_one(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    done = workspace.run(
        "import fw.core, os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = status.path_of(int(done.stdout))
    assert path.exists()
    assert status.read(int(done.stdout)) is None
    workspace.check("import fw.core")
    assert not path.exists()


def test_a_later_process_with_the_same_id_is_not_taken_for_the_one_that_wrote(job: subprocess.Popen[str]) -> None:
    path = status.path_of(job.pid)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "started_at": "1"}))
    assert status.read(job.pid) is None
    path.write_text("{ no json")
    assert status.read(job.pid) is None


def test_a_forked_child_does_not_take_its_parents_file_away(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    code = """
import fw.core, os, sys
from mlflashpoint.agent import status
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
print(status.path_of(os.getpid()).exists(), status.read(os.getpid())["pid"] == os.getpid())
"""
    assert workspace.check(code) == "True True\n"


def test_a_folder_that_is_not_this_users_own_is_never_written_to(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    code = """
import os, sys
from pathlib import Path
from mlflashpoint.agent import status
status.directory = lambda: Path(sys.argv[1])
import fw.core
print(states()["save"][0], os.listdir(sys.argv[1]))
"""
    shared = workspace.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (workspace.folder / "link").symlink_to(workspace.folder / "private")
    (workspace.folder / "private").mkdir(mode=0o700)
    for folder in (shared, workspace.folder / "link"):
        done = python("-c", STATES + code, str(folder), env=workspace.environment())
        assert done.stdout == "active []\n", done.stderr


def test_a_process_of_nobodys_is_a_clear_answer() -> None:
    done = doctor("--pid", str(2**22 + 1))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "can't read the environment of process" in done.stderr


def test_a_process_without_a_framework_is_said_to_be_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.2)
        facts = json.loads(doctor("--json", "--pid", str(process.pid)).stdout)
        assert process.stdin is not None
        process.stdin.close()
    assert facts["process"]["patches"] == []
    assert "has not imported a framework" in facts["process"]["reason"]


def test_no_status_file_exists_for_a_process_that_imports_no_framework(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    code = "import os; from mlflashpoint.agent import status; print(status.path_of(os.getpid()).exists())"
    assert workspace.check(code) == "False\n"
    assert Path(status.directory()).name == f"mlflashpoint-agent-{os.getuid()}"
