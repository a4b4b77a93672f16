from mlflashpoint.core.runtimes import close_runtimes, get_runtime
from tests.core.ranks import memory_folder

ENVIRON = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MLFLASHPOINT_JOB_ID": "job"}


def test_one_runtime_per_group_serves_the_whole_process(monkeypatch):
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    with memory_folder() as folder:
        monkeypatch.setenv("MLFLASHPOINT_BASE_CONTAINER", str(folder / "base"))
        first = get_runtime()
        assert get_runtime() is first
        assert get_runtime("critic") is not first
        close_runtimes()
        assert first.closed
        assert get_runtime() is not first
        close_runtimes()
