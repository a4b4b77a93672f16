import json
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mlflashpoint.core import container as module
from mlflashpoint.core.container import check_container, open_container, read_container
from mlflashpoint.core.files import replace_file
from mlflashpoint.core.filesystem import filesystem_kind
from mlflashpoint.errors import ContainerError, ForeignContainerError, SettingError, StoreFullError
from mlflashpoint.settings import StoreConfig


@pytest.fixture
def shm():
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlf-test-") as folder:
        yield Path(folder)


def config(path, job="job-1", **more):
    return StoreConfig(job_id=job, base_container=path, **more)


def test_a_container_is_made_once_and_found_again(shm):
    first = open_container(config(shm / "a" / "b"))
    assert open_container(config(shm / "a" / "b")) == first
    assert len(first.node) == 32


def test_folders_are_0700_and_files_0600_whatever_the_umask(shm):
    old = os.umask(0)
    try:
        opened = open_container(config(shm / "parent" / "job"))
        opened.seat_dir("default", 0)
    finally:
        os.umask(old)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in shm.rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_an_existing_empty_folder_is_taken_and_closed_to_others(shm):
    (shm / "job").mkdir(mode=0o755)
    open_container(config(shm / "job"))
    assert stat.S_IMODE((shm / "job").stat().st_mode) == 0o700


def test_another_jobs_container_is_refused(shm):
    open_container(config(shm / "base", job="job-1"))
    with pytest.raises(ForeignContainerError, match=r"belongs to job 'job-1'.*MLFLASHPOINT_BASE_CONTAINER.*remedy"):
        open_container(config(shm / "base", job="job-10"))


def test_a_container_of_another_user_is_refused(shm):
    opened = open_container(config(shm / "base"))
    raw = json.loads((shm / "base" / "container.json").read_text())
    replace_file(shm / "base" / "container.json", json.dumps({**raw, "uid": opened.uid + 1}).encode())
    with pytest.raises(ForeignContainerError):
        open_container(config(shm / "base"))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_folder_owned_by_another_user_is_refused(shm):
    (shm / "base").mkdir()
    os.chown(shm / "base", 12345, 12345)
    with pytest.raises(ForeignContainerError, match="belongs to user 12345"):
        open_container(config(shm / "base"))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder away")
def test_a_parent_in_which_another_user_may_swap_the_folder_is_refused(shm):
    (shm / "theirs").mkdir()
    os.chown(shm / "theirs", 12345, 12345)
    with pytest.raises(ContainerError, match="may replace"):
        open_container(config(shm / "theirs" / "base"))


def test_a_symbolic_link_is_refused(shm):
    (shm / "real").mkdir()
    (shm / "link").symlink_to(shm / "real")
    with pytest.raises(ContainerError, match="symbolic link"):
        open_container(config(shm / "link"))
    (shm / "dangling").symlink_to(shm / "nowhere")
    with pytest.raises(ContainerError):
        open_container(config(shm / "dangling"))


def test_a_file_in_its_place_is_refused(shm):
    (shm / "file").write_text("x")
    with pytest.raises(ContainerError, match="not a folder"):
        open_container(config(shm / "file"))


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(shm):
    (shm / "base").mkdir(mode=0o755)
    (shm / "base" / "precious").write_text("x")
    with pytest.raises(ContainerError, match="other files"):
        open_container(config(shm / "base"))
    assert os.listdir(shm / "base") == ["precious"]
    assert stat.S_IMODE((shm / "base").stat().st_mode) == 0o755


def test_a_folder_that_users_share_is_refused():
    before = os.stat("/dev/shm").st_mode
    with pytest.raises(ContainerError, match="users share"):
        open_container(config(Path("/dev/shm")))
    assert os.stat("/dev/shm").st_mode == before


def test_a_file_system_that_is_no_memory_is_refused_unless_allowed(tmp_path):
    if filesystem_kind(tmp_path) == "tmpfs":
        pytest.skip("this machine's temporary folder is on tmpfs")
    with pytest.raises(ContainerError, match=r"not on tmpfs.*MLFLASHPOINT_ALLOW_NON_TMPFS=1"):
        open_container(config(tmp_path / "base"))
    assert open_container(config(tmp_path / "base", allow_non_tmpfs=True)).job_id == "job-1"


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_full_file_system_is_said_to_be_full(tmp_path):
    mount = tmp_path / "tiny"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(mount)], check=True)
    try:
        (mount / "filler").write_bytes(b"x" * (16 << 10))
        with pytest.raises(StoreFullError, match=r"full.*MLFLASHPOINT_BASE_CONTAINER"):
            open_container(config(mount / "base"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"job_id": 1}',
        b'{"format_version":1,"job_id":"j","uid":"0","node":"n"}',
        b"x" * 100_000,
        b"[" * 60_000,
    ],
)
def test_a_malformed_identity_is_named(shm, content):
    open_container(config(shm / "base"))
    replace_file(shm / "base" / "container.json", content)
    with pytest.raises(ContainerError, match=r"malformed.*container\.json.*remedy"):
        open_container(config(shm / "base"))


def test_an_identity_of_another_format_version_is_named(shm):
    open_container(config(shm / "base"))
    raw = json.loads((shm / "base" / "container.json").read_text())
    replace_file(shm / "base" / "container.json", json.dumps({**raw, "format_version": 99}).encode())
    with pytest.raises(ContainerError, match="format version"):
        open_container(config(shm / "base"))


def test_a_folder_without_identity_is_no_container(shm):
    assert read_container(shm) is None
    assert read_container(shm / "missing") is None


def _open(path, barrier, out):
    barrier.wait(timeout=30)
    out.put(open_container(config(path)).node)


def test_ranks_that_open_at_once_agree_on_one_identity(shm):
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(6), context.Queue()
    ranks = [context.Process(target=_open, args=(shm / "deep" / "base", barrier, out)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    nodes = {out.get(timeout=30) for _ in ranks}
    for rank in ranks:
        rank.join(30)
    assert len(nodes) == 1
    assert os.listdir(shm / "deep" / "base") == ["container.json"]


@pytest.mark.parametrize("job", ["a/b", "..", "", "a\\b", "a\nb", "x.", "y" * 201, " a"])
def test_a_job_id_that_is_no_plain_name_is_a_setting_error(job, shm):
    with pytest.raises(SettingError, match="MLFLASHPOINT_JOB_ID"):
        config(shm / "base", job=job)


@pytest.mark.parametrize("group", ["a/b", "..", "", "container.json", "step-3_ckpt"])
def test_a_group_that_could_hide_other_files_is_a_setting_error(group):
    with pytest.raises(SettingError):
        module.check_group(group)


def test_a_refused_folder_is_not_made(tmp_path):
    with pytest.raises(ContainerError, match="not on tmpfs"):
        open_container(StoreConfig(job_id="j", base_container=tmp_path / "new" / "base"))
    assert not (tmp_path / "new").exists()


def test_a_check_says_what_opening_would_say_and_makes_nothing(shm, tmp_path):
    new = StoreConfig(job_id="j", base_container=shm / "new")
    check_container(new)
    assert not (shm / "new").exists()
    open_container(new)
    check_container(new)
    (shm / "file").write_bytes(b"")
    (shm / "full").mkdir()
    (shm / "full" / "other").write_bytes(b"")
    for job, path in [("other", "new"), ("j", "file"), ("j", "full"), ("j", "y" * 300)]:
        config = StoreConfig(job_id=job, base_container=shm / path)
        with pytest.raises(ContainerError) as checked:
            check_container(config)
        with pytest.raises(ContainerError) as opened:
            open_container(config)
        assert str(checked.value) == str(opened.value)


def test_a_container_that_cant_be_written_to_is_refused_by_the_check_and_by_the_store(tmp_path):
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces, to mount a tmpfs that can only be read")
    code = (
        "import sys; from pathlib import Path\n"
        "from mlflashpoint.core.container import check_container, open_container\n"
        "from mlflashpoint.errors import ContainerError\n"
        "from mlflashpoint.settings import StoreConfig\n"
        "config = StoreConfig(job_id='job', base_container=Path(sys.argv[1]))\n"
        "for use in (check_container, open_container):\n"
        "    try: use(config); print('fine')\n"
        "    except ContainerError as error: print(error)\n"
    )
    mount = 'mount -t tmpfs -o size=1m,mode=700 tmpfs "$1" && mkdir -m 700 "$1/base" && mount -o remount,ro "$1"'
    command = ["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$2" -c "$3" "$1/base"', "sh"]
    done = subprocess.run(
        [*command, str(tmp_path), sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "MLFLASHPOINT_BASE_CONTAINER" in line and f"{tmp_path}/base" in line and "remedy" in line
