from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.output import check_writable, write_whole


def test_whoever_has_the_old_file_open_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with open(path) as reader:
        write_whole(path, "new and longer")
        assert reader.read() == "old"
    assert path.read_text() == "new and longer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "hello")
    reader.join(10)
    assert got == ["hello"]


def test_an_output_that_can_not_be_written_is_found_out_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    with pytest.raises(TimingsError, match="a folder is in the place"):
        check_writable(tmp_path)
    with pytest.raises(TimingsError, match="mkdir -p"):
        check_writable(tmp_path / "no" / "new")
