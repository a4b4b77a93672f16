from pathlib import Path

from mlflashpoint.core.filesystem import filesystem_kind


def test_the_kind_of_a_tmpfs_is_known():
    assert filesystem_kind(Path("/dev/shm")) == "tmpfs"
