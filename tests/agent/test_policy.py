"""Which patches stay out, and what the job and its owner hear of it."""

from __future__ import annotations

import os

import pytest

from tests.agent.support import STATES, Workspace, python

ROWS = [
    ({"MLFLASHPOINT_KEEP_VERSIONS": "many"}, "not a whole number", "use a whole number from 1 to 3"),
    ({"MLFLASHPOINT_KEEP_VERSIONS": "9"}, "out of range", "use a whole number from 1 to 3"),
    ({"MLFLASHPOINT_ASYNC": "perhaps"}, "not a switch", "use 1 or 0"),
    ({"MLFLASHPOINT_ENABLED": "2"}, "not a switch", "use 1 or 0"),
    ({"MLFLASHPOINT_BRIDGE_ENABLED": "never"}, "not a switch", "use 1 or 0"),
    ({"MLFLASHPOINT_DEADLINE_S": "-1"}, "not a number of seconds", "use a number above 0"),
    ({"MLFLASHPOINT_BASE_CONTAINER": "relative"}, "not an absolute path", "give a path that begins with /"),
    ({"MLFLASHPOINT_LOG_LEVEL": "LOUD"}, "not a log level", "use DEBUG"),
    ({"MLFLASHPOINT_KEEP_VERSION": "2"}, "unknown setting", "did you mean MLFLASHPOINT_KEEP_VERSIONS?"),
    ({"MLFLASHPOINT_JOB_ID": "a/b"}, "a job id is a plain name", "use up to 200 letters"),
    (
        {"MLFLASHPOINT_DRAIN_DIR": f"/dev/shm/mlflashpoint-{os.getuid()}/agent-test/drain"},
        "the drain directory lies in the base container",
        "set it to a durable directory",
    ),
    ({"MLFLASHPOINT_JOB_ID": ""}, "no job id, and none is guessed", "set it to a name that is unique"),
]


@pytest.mark.parametrize(("extra", "message", "remedy"), ROWS, ids=[str(row[0]) for row in ROWS])
def test_a_bad_setting_is_one_line_and_the_job_runs_without_us(
    workspace: Workspace, extra: dict[str, str], message: str, remedy: str
) -> None:
    workspace.table('patch("save"), patch("Manager.save"), patch("save_async")')
    code = "import table, fw.core; print(fw.core.save(1), len(table.CALLS), {s for s, _ in states().values()})"
    done = workspace.run(code, **extra)
    assert (done.returncode, done.stdout) == (0, "('saved', 1, 1) 0 {'skipped'}\n")
    (line,) = done.stderr.splitlines()
    ((name, value),) = extra.items()
    assert message in line and remedy in line and name in line and (not value or repr(value) in line)


@pytest.mark.parametrize("value", ["maybe", "1e9", "\N{SNOWMAN}", "-"])
def test_a_bad_value_does_not_keep_python_from_starting(workspace: Workspace, value: str) -> None:
    env = workspace.environment(MLFLASHPOINT_ENABLED=value, MLFLASHPOINT_DEADLINE_S=value)
    done = python("-c", "print('ok')", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_a_framework_that_is_switched_off_is_skipped_in_silence(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    done = workspace.run("import fw.core; print(states()['save'])", MLFLASHPOINT_BRIDGE_ENABLED="0")
    assert done.stdout == "('skipped', 'MLFLASHPOINT_BRIDGE_ENABLED is 0')\n"
    assert done.stderr == ""


def version_of(workspace: Workspace, version: str) -> None:
    workspace.write(
        f"fw_dist-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: fw-dist\nVersion: {version}\n"
    )


@pytest.mark.parametrize(("version", "state"), [("0.5.1", "active"), ("0.3.1", "skipped"), ("0.7.0rc1", "skipped")])
def test_an_untested_version_is_a_visible_skip(workspace: Workspace, version: str, state: str) -> None:
    workspace.table(
        'patch("save", versions=("fw-dist", ">=0.4.2,<0.7")), patch("Manager.save", versions=("fw-dist", "<0.7"))'
    )
    version_of(workspace, version)
    done = workspace.run("import table, fw.core; fw.core.save(1); print(states()['save'], len(table.CALLS))")
    if state == "active":
        assert done.stdout == f"('active', 'fw-dist {version}') 1\n"
        assert "WARNING" not in done.stderr
    else:
        assert done.stdout == f"('skipped', 'fw-dist {version} is outside the tested range >=0.4.2,<0.7') 0\n"
        assert f"WARNING mlflashpoint agent: patch bridge:fw.core:save is skipped: fw-dist {version} is" in done.stderr


def test_a_distribution_without_metadata_is_judged_by_its_packages_version(workspace: Workspace) -> None:
    workspace.table('patch("save", versions=("fw-dist", ">=0.4.2,<0.7"))')
    code = "import fw.core; print(states()['save'])"
    assert "can't be told" in workspace.check(code)
    workspace.write("fw/__init__.py", "__version__ = '0.5.0+checkout'\n")
    assert workspace.check(code) == "('active', 'fw-dist 0.5.0+checkout')\n"


def test_a_malformed_version_is_a_skip_and_no_fault(workspace: Workspace) -> None:
    workspace.table('patch("save", versions=("fw-dist", ">=0.4.2,<0.7"))')
    workspace.write("fw/__init__.py", "__version__ = 'main'\n")
    assert "outside the tested range" in workspace.check("import fw.core; print(states()['save'])")


def test_the_settings_count_that_the_script_made_before_it_imported_the_framework(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    script = workspace.write(
        "job.py",
        "import os\nos.environ['MLFLASHPOINT_BRIDGE_ENABLED'] = '0'\n"
        + STATES
        + "import fw.core\nprint(states()['save'][0])\n",
    )
    assert python(str(script), env=workspace.environment()).stdout == "skipped\n"


def test_log_lines_go_to_the_jobs_own_handlers_where_it_has_some(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    code = """
import io, logging
stream = io.StringIO()
logging.basicConfig(stream=stream, format="JOB %(message)s")
import fw.core
print(stream.getvalue().strip())
"""
    done = workspace.run(code)
    assert (done.stdout, done.stderr) == ("JOB mlflashpoint agent: patch bridge:fw.core:save is active: bridge\n", "")


def test_the_log_level_is_the_settings_and_a_level_of_the_jobs_own_wins(workspace: Workspace) -> None:
    workspace.table('patch("save")')
    assert workspace.run("import fw.core", MLFLASHPOINT_LOG_LEVEL="ERROR").stderr == ""
    code = "import logging; logging.getLogger('mlflashpoint').setLevel('ERROR'); import fw.core"
    assert workspace.run(code).stderr == ""
    assert "is active" in workspace.run("import fw.core").stderr


def test_a_setting_that_turns_bad_while_the_job_runs_is_one_line_without_a_traceback(workspace: Workspace) -> None:
    functions = """
def config(*_):
    from mlflashpoint.settings import StoreConfig
    StoreConfig.from_env()
def check(call, instance, args, kwargs):
    config()
    return call()
"""
    workspace.table(
        'Patch("one", "bridge", "fw.core", "save", "bridge_enabled", around="table:check"), '
        'Patch("other", "bridge", "fw.core", "Manager.save", "bridge_enabled", after="table:config")',
        functions,
    )
    code = """
import os, fw.core
os.environ["MLFLASHPOINT_BASE_CONTAINER"] = "/dev/shm/x"
os.environ["MLFLASHPOINT_DRAIN_DIR"] = "/dev/shm/x/drain"
fw.core.Manager('x').save(3)
print(fw.core.save(1)[0], fw.core.save(2)[0])
"""
    done = workspace.run(code)
    assert done.returncode == 0 and done.stdout == "saved saved\n", done
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    assert line.startswith("ERROR mlflashpoint agent: patch other: the drain directory lies in the base container")
    assert "MLFLASHPOINT_DRAIN_DIR='/dev/shm/x/drain'" in line and "remedy: set it to a durable directory" in line
