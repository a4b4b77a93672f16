"""A container that this process can't open is a named error with the path, and none of a store that is merely full."""

import errno
import os

import pytest

from mlflashpoint import cli
from mlflashpoint.core import session
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import ContainerError, StoreFullError
from mlflashpoint.settings import StoreConfig
from tests.core.mounts import fill, mounted
from tests.core.ranks import state

SETTING = "MLFLASHPOINT_BASE_CONTAINER"


def start(base, local_rank=0):
    config = StoreConfig(job_id="job", base_container=base, allow_non_tmpfs=True, deadline_s=10)
    return Runtime(config, rank=0, world_size=1, local_rank=local_rank)


@pytest.mark.parametrize(
    ("number", "kind", "remedy"), [(errno.ENOSPC, StoreFullError, "free memory"), (errno.EIO, ContainerError, "choose")]
)
@pytest.mark.parametrize("where", ["open_container", "SeatLock", "clear_places"])
def test_an_error_of_the_system_at_the_start_names_the_container_its_setting_and_a_remedy(
    tmp_path, monkeypatch, where, number, kind, remedy
):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(session, where, fail)
    runtime = start(tmp_path / "base")
    runtime.close()
    problem = runtime.problem
    assert type(problem) is kind
    assert (problem.setting, problem.value, problem.rank) == (SETTING, str(tmp_path / "base"), 0)
    assert problem.remedy.startswith(remedy)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_rank_that_starts_on_a_full_file_system_saves_once_there_is_room(tmp_path):
    with mounted(tmp_path / "small", "16m") as folder:
        start(folder / "base").close()
        fill(folder)
        runtime = start(folder / "base", local_rank=1)
        try:
            assert runtime.problem is None and runtime.find_latest() is None
            error = runtime.save(state(1, 0), step=1, wait=True).error
            (folder / "other").unlink()
            assert runtime.save(state(2, 0), step=2, wait=True).ok
        finally:
            runtime.close()
    assert type(error) is StoreFullError
    assert error.setting == SETTING and error.path == str(folder / "base/default/seat-1")
    assert "more room" in error.remedy


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_full_file_system_keeps_no_one_from_removing_the_container_on_it(tmp_path):
    with mounted(tmp_path / "small", "1m") as folder:
        start(folder / "base").close()
        (folder / "base/default/seat-0/lock").unlink()
        fill(folder)
        assert cli.main(["clean", str(folder / "base"), "--yes"]) == 0
        assert not (folder / "base").exists()
