"""A store that has no room in the middle of an async save."""

import os
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.adapter.pytorch import launch

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What two ranks say whose store is a tmpfs of 32 MiB of their own."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, to mount a small tmpfs")
    # Both ranks have to see one mount, so that one process makes it and starts them.
    folder = tmp_path_factory.mktemp("full")
    base = Path(f"/dev/shm/mlflashpoint-test-{uuid.uuid4().hex}")
    base.mkdir(mode=0o700)
    inside = (
        "import json,sys; sys.path.insert(0, sys.argv[1]); import launch;"
        "print(json.dumps(launch.launch(sys.argv[2], 2, [sys.argv[3]], sys.argv[4])))"
    )
    here = Path(__file__).parent
    python = launch.sys.executable
    command = f'mount -t tmpfs -o size=32m,mode=700 tmpfs {base} && exec "$0" "$@"'
    try:
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", command, python, "-c", inside, here, here / "full_worker.py", base, folder],
            capture_output=True,
            text=True,
            timeout=launch.DEADLINE_S + 30,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr
        yield launch.json.loads(done.stdout)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_the_error_names_need_and_have_on_all_ranks(reports):
    for report in reports:
        assert list(report["failures"]) == ["1"]
        kind, text = report["failures"]["1"]
        assert kind == "StoreFullError"
        assert "rank 1" in text and "need" in text and "the store has" in text


def test_no_rank_waits(reports):
    assert max(report["seconds"] for report in reports) < 30


def test_the_version_before_is_intact(reports):
    for report in reports:
        assert report["latest"].endswith("/step-1_ckpt")
        assert report["loaded"] == [1.0, 1.0]


def test_the_save_after_it_succeeds(reports):
    assert all(report["next"].endswith("/step-3_ckpt") for report in reports)
