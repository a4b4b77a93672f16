import os

from mlflashpoint.core import space


def test_a_memory_file_system_offers_no_more_than_the_machine_has(seat):
    status = os.statvfs(seat)
    (available,) = space._machine(space.Path("/proc/meminfo"))
    assert 0 < space.free_bytes(seat) <= min(status.f_bavail * status.f_frsize, available + (1 << 30))


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_the_tightest_control_group_above_this_process_counts(tmp_path):
    root = tmp_path / "cgroup"
    group(root, memory__stat="")
    group(root / "pod", memory__max="1000\n", memory__current="700\n", memory__stat="anon 5\ninactive_file 50\n")
    group(root / "pod" / "box", memory__max="max\n", memory__current="600\n", memory__stat="")
    (tmp_path / "self").write_text("0::/pod/box\n")
    assert list(space._groups(root, tmp_path / "self")) == [350]


def test_the_older_control_groups_count_too(tmp_path):
    root = tmp_path / "cgroup"
    files = {"memory__limit_in_bytes": "500", "memory__usage_in_bytes": "100", "memory__stat": "total_inactive_file 7"}
    group(root / "memory" / "job", **files)
    (tmp_path / "self").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    assert list(space._groups(root, tmp_path / "self")) == [407]


def test_a_group_that_can_not_be_seen_sets_no_limit(tmp_path):
    (tmp_path / "self").write_text("0::/../../elsewhere\n")
    assert list(space._groups(tmp_path / "cgroup", tmp_path / "self")) == []
    assert list(space._groups(tmp_path, tmp_path / "nothing")) == []
    assert list(space._machine(tmp_path / "nothing")) == []
