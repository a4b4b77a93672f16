from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlflashpoint.errors import TimingsError
from mlflashpoint.timings.arguments import different_files
from mlflashpoint.timings.output import check_writable, write_whole
from tests.timings.helpers import environ


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


def test_a_link_to_a_file_stays_a_link_and_its_target_gets_the_content(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.json", tmp_path / "link.json"
    link.symlink_to(Path("folder") / "target.json")
    for text in ("new", "newer"):  # the first time the link points to nothing
        check_writable(link)
        write_whole(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["target.json"]


def test_a_link_to_a_device_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    check_writable(link)
    write_whole(link, "text")
    assert link.is_symlink()
    assert os.stat("/dev/null").st_rdev == os.makedev(1, 3)


@pytest.mark.parametrize("sink", ["pipe", "file"])
def test_a_link_to_an_open_file_of_the_process_is_written_to_behind_what_is_there(tmp_path: Path, sink: str) -> None:
    """/dev/stdout is such a link; a copy of it is used here, for a mistake would take the machine's own away."""
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")
    program = (
        "import sys; from pathlib import Path; from mlflashpoint.timings.output import check_writable, write_whole;"
        "sys.stdout.write('first\\n'); path = Path(sys.argv[1]); check_writable(path); write_whole(path, 'second\\n');"
        "sys.stdout.write('third\\n')"
    )
    command = [sys.executable, "-c", program, str(link)]
    if sink == "pipe":
        shown = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60).stdout
    else:
        out = tmp_path / "out"
        out.write_text("before\n")
        with open(out, "a") as file:
            subprocess.run(command, env=environ(), stdout=file, timeout=60, check=True)
        shown = out.read_text().removeprefix("before\n")
    assert shown == "first\nsecond\nthird\n"
    assert os.readlink(link) == "/proc/self/fd/1"


@pytest.mark.parametrize(("name", "reason"), [("loop", "symbolic links"), ("n" * 300, "File name too long")])
def test_a_name_that_can_not_be_one_is_found_out_before_the_work(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TimingsError, match=reason):
        check_writable(tmp_path / name)
    different_files([tmp_path / name])


def test_the_longest_name_that_the_file_system_takes_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    write_whole(path, "text")
    assert path.read_text() == "text"


def test_text_that_is_no_unicode_is_written_escaped(tmp_path: Path) -> None:
    write_whole(tmp_path / "out", "a\udcff\ud800")
    assert (tmp_path / "out").read_text() == "a\\udcff\\ud800"
