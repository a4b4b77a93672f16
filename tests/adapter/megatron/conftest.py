"""Each release's job: a warm process of its environment, and what the ranks of each launch have reported."""

import os
import shutil
import uuid
from pathlib import Path

import pytest

from tests.adapter.pytorch import launch
from tests.warm import Zygote

_ENVS = launch.ROOT / ".envs"
#: release -> (Python, folder that goes before its own packages)
RELEASES = {
    "0.15.3": (Path(launch.sys.executable), _ENVS / "megatron" / "0.15.3"),
    "0.16.1": (Path(launch.sys.executable), _ENVS / "megatron" / "0.16.1"),
    "0.18.2": (_ENVS / "bridge" / "bin" / "python", _ENVS / "bridge-overlays" / "0.5.1"),
    "0.19.2": (_ENVS / "bridge" / "bin" / "python", _ENVS / "bridge-overlays" / "0.6.2"),
}
#: releases that load together and each rank for itself
BOTH_LOADS = ["0.16.1", "0.19.2"]
HERE = Path(__file__).parent


class Job:
    """The launches of one release, each made when it is first asked for, on containers that they share."""

    def __init__(self, release, folder):
        self.release = release
        self.folder = folder
        self.base = Path(f"/dev/shm/mlflashpoint-test-{uuid.uuid4().hex}")
        self.base.mkdir(mode=0o700)
        python, packages = RELEASES[release]
        environ = {**os.environ, **launch.environment([packages])}
        self._zygote = Zygote(python, HERE / "imports.py", environ, agent=False, folder=folder)
        self._reports = {}

    def reports(self, worker, ranks, what):
        """What each rank of that launch has reported."""
        key = (worker, what, ranks)
        if key not in self._reports:
            # One that broke is not tried again.
            self._reports[key] = []
            arguments = [what, self.base, self.base / "durable"]
            where = self.folder / f"{worker}-{what}-{ranks}"
            self._reports[key] = launch.fork(self._zygote, HERE / f"{worker}.py", ranks, arguments, where)
        return self._reports[key]

    def said(self, worker, ranks, what, scenario):
        """What each rank reports of a scenario; one that broke fails the test with its traceback."""
        found = [report.get(scenario, {"error": "it was not reached"}) for report in self.reports(worker, ranks, what)]
        assert found, "the launch broke"
        broken = [result["error"] for result in found if "error" in result]
        assert not broken, "\n".join(broken)
        return found

    def close(self):
        self._zygote.close()
        shutil.rmtree(self.base, ignore_errors=True)


@pytest.fixture(scope="session")
def jobs():
    """The jobs that were made, by release: all modules use one, for a warm process takes seconds to start."""
    made = {}
    yield made
    for job in made.values():
        job.close()


@pytest.fixture(scope="module", params=list(RELEASES))
def job(request, jobs, tmp_path_factory):
    release = request.param
    missing = [str(path) for path in RELEASES[release] if not path.exists()]
    if missing:
        reason = f"no megatron-core {release} ({missing[0]}): run tools/envs/megatron.sh and bridge.sh"
        pytest.fail(reason) if os.environ.get("REQUIRE_FRAMEWORKS") else pytest.skip(reason)
    if release not in jobs:
        jobs[release] = Job(release, tmp_path_factory.mktemp("megatron"))
    return jobs[release]
