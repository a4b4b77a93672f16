"""What lies in memory is copied to a durable directory, on SIGTERM or by command, and the job resumes from there."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlflashpoint import cli
from mlflashpoint.core import draindir
from mlflashpoint.core.arena import scan_seat
from mlflashpoint.core.drain import drain_seat
from mlflashpoint.core.draindir import DrainDir
from mlflashpoint.core.filesystem import MEMORY_KINDS, filesystem_kind
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import OverwrittenError, SettingError
from mlflashpoint.settings import StoreConfig
from tests.core import bodies
from tests.core.ranks import Life, memory_folder, state
from tests.warm import Zygote

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]

#: how a script handles SIGTERM, and the exit code that it ends with then
HANDLERS = [("none", -signal.SIGTERM), ("flag", 0), ("leave", 7)]
#: for the drain, and what ending a process may take besides on a busy machine
BUDGET_S, MARGIN_S = 2.0, 15.0


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


def drained(root):
    """(rank, step) of every shard in a drain directory."""
    return sorted((copy.record.rank, copy.record.step) for copy in DrainDir(root, "job", "default").copies(holder=0))


@dataclass
class Ended:
    code: int
    log: str
    took_s: float

    @property
    def seen(self):
        """What the script's own handler has told, if it came to that."""
        return [line for line in self.log.splitlines() if line.startswith("seen")]


@pytest.fixture(scope="module")
def terminated(tmp_path_factory):
    """Runs sigterm_job.py, which has saved two steps when it gets the SIGTERM; how it ended."""
    job = Path(__file__).with_name("sigterm_job.py")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    zygote = Zygote(Path(sys.executable), job, environ, agent=False, folder=tmp_path_factory.mktemp("sigterm"))

    def run(base, drain, handler="none", disk="good", budget_s=20):
        outcome = zygote.run([str(base), str(drain), handler, disk, str(budget_s)], deadline_s=90, script=job)
        now = time.monotonic()
        assert not outcome.late, outcome.log
        (began,) = re.findall(r"^terminated at ([0-9.]+)$", outcome.log, re.M)
        return Ended(outcome.statuses[0], outcome.log, now - float(began))

    yield run
    zygote.close()


@pytest.mark.parametrize(
    ("handler", "code", "seen"),
    [
        ("none", -signal.SIGTERM, []),
        ("flag", 0, ["seen [15]"]),
        ("leave", 7, []),
        ("late", 0, ["seen [15]"]),
        ("composed", 0, ["seen [15]"]),
        ("composed_last", 0, ["seen [15]"]),
    ],
)
def test_sigterm_drains_and_whatever_handled_it_before_still_does(base, tmp_path, terminated, handler, code, seen):
    ended = terminated(base, tmp_path / "drain", handler)
    assert (ended.code, ended.seen) == (code, seen)
    assert (0, 2) in drained(tmp_path / "drain")


@pytest.mark.parametrize(
    ("disk", "handler", "code"),
    [("slow", *HANDLERS[0]), ("slow", *HANDLERS[1]), ("hung", *HANDLERS[0]), ("hung", *HANDLERS[2])],
)
def test_a_directory_that_is_too_slow_puts_the_end_of_the_job_off_by_the_budget_and_no_longer(
    base, tmp_path, terminated, disk, handler, code
):
    Life(bodies.save_steps, 1, base, [1]).results()
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    ended = terminated(base, tmp_path, handler, disk, budget_s=BUDGET_S)
    assert ended.code == code
    assert ended.took_s < BUDGET_S + MARGIN_S
    assert drained(tmp_path) == [(0, 1)]
    if disk == "slow":
        assert "the time for the drain is over [MLFLASHPOINT_DRAIN_BUDGET_S" in ended.log
        assert "remedy: raise it" in ended.log
        assert not [path for path in tmp_path.rglob("*-tmp-*") if path.is_file()]
    # What lies in memory is as good as before; without it, what was drained before is.
    assert [r["found"] for r in Life(bodies.save_steps, 1, base, [], drain_dir=tmp_path).results().values()] == [3]
    shutil.rmtree(base)
    assert [r["found"] for r in Life(bodies.save_steps, 1, base, [], drain_dir=tmp_path).results().values()] == [1]


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
@pytest.mark.parametrize(("handler", "code"), HANDLERS)
def test_a_drain_directory_that_is_full_at_sigterm_is_told_and_the_job_ends_as_it_would_have(
    base, tmp_path, terminated, handler, code
):
    Life(bodies.save_steps, 1, base, [1]).results()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(tmp_path)])
    if done.returncode:
        pytest.skip("NOT RUN: mounts are not allowed here")
    try:
        assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
        with open(tmp_path / "other", "wb", buffering=0) as other, contextlib.suppress(OSError):
            while other.write(b"x" * 4096):
                pass
        ended = terminated(base, tmp_path, handler)
        assert ended.code == code
        assert "nothing was drained: the drain directory is full" in ended.log
        assert f"[MLFLASHPOINT_DRAIN_DIR, rank 0, step 3, path {tmp_path}]" in ended.log
        assert "remedy: free space there, or give another directory" in ended.log
        assert drained(tmp_path) == [(0, 1)]
        assert not list(tmp_path.rglob("*-tmp-*"))
        shutil.rmtree(base)
        assert [r["found"] for r in Life(bodies.save_steps, 1, base, [], drain_dir=tmp_path).results().values()] == [1]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_rank_that_is_stuck_in_native_code_drains_all_the_same(base, tmp_path, terminated):
    ended = terminated(base, tmp_path / "drain", "stuck")
    # It has not ended of the SIGTERM, but when it had drained.
    assert ended.code == -signal.SIGKILL
    assert (0, 2) in drained(tmp_path / "drain")


def test_a_rank_that_comes_back_from_native_code_when_its_budget_is_used_up_does_not_drain_again(
    base, tmp_path, terminated
):
    ended = terminated(base, tmp_path / "drain", "back", "slow", budget_s=BUDGET_S)
    assert ended.code == -signal.SIGTERM
    assert ended.log.count("nothing was drained: the time for the drain is over") == 1


def test_a_job_resumes_from_what_was_drained_when_all_memory_is_gone(base, tmp_path):
    Life(bodies.save_steps, 3, base, [1, 2]).results()
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    assert drained(tmp_path) == [(0, 2), (1, 2), (2, 2)]
    shutil.rmtree(base)
    # The new start counts as later than those that were drained: what it saves is newer, at whatever step.
    results = Life(bodies.save_steps, 3, base, [3], drain_dir=tmp_path).results()
    assert {result["found"] for result in results.values()} == {2}
    assert "INFO recovery: step 2 of incarnation 1 is complete in the drain directory" in results[0]["logs"]
    assert {r["found"] for r in Life(bodies.save_steps, 3, base, [], drain_dir=tmp_path).results().values()} == {3}


def test_memory_that_is_newer_than_what_was_drained_wins(base, tmp_path):
    Life(bodies.save_steps, 2, base, [1, 2]).results()
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    Life(bodies.save_steps, 2, base, [3]).results()
    assert {r["found"] for r in Life(bodies.save_steps, 2, base, [], drain_dir=tmp_path).results().values()} == {3}


def test_a_drained_shard_that_is_corrupt_makes_all_ranks_fall_back_together(base, tmp_path):
    Life(bodies.save_steps, 2, base, [1, 2]).results()
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    (data,) = tmp_path.rglob("rank-1.data")
    data.write_bytes(data.read_bytes()[:100] + b"\x99" + data.read_bytes()[101:])
    shutil.rmtree(base)
    results = Life(bodies.save_steps, 2, base, [], drain_dir=tmp_path).results()
    assert {result["found"] for result in results.values()} == {-1}


def test_each_node_drains_its_own_and_together_they_are_a_version(base, tmp_path):
    nodes = [base.with_name("node-a"), base.with_name("node-b")]
    Life(bodies.save_steps, 2, None, [1, 2], bases=nodes, replicas=0).results()
    assert cli.main(["drain", str(nodes[0]), "--to", str(tmp_path)]) == 0
    assert cli.main(["drain", str(nodes[1]), "--to", str(tmp_path)]) == 0
    assert {(0, 2), (1, 2)} <= set(drained(tmp_path))
    for node in nodes:
        shutil.rmtree(node)
    results = Life(bodies.save_steps, 2, None, [], bases=nodes, drain_dir=tmp_path).results()
    assert {result["found"] for result in results.values()} == {2}


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_full_drain_directory_is_one_clear_error_and_leaves_nothing(base, tmp_path, capsys):
    Life(bodies.save_steps, 2, base, [1, 2], wish={}).results()
    small = tmp_path / "small"
    small.mkdir()
    # Room for the first shard and not for the second.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(small)], check=True)
    try:
        assert cli.main(["drain", str(base), "--to", str(small)]) == 1
        error = capsys.readouterr().err
        left = [path for path in small.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert error.count("\n") == 1
    assert "mlflashpoint drain: the drain directory is full" in error
    assert str(small) in error
    assert "remedy" in error
    assert left == []


def test_a_file_in_the_place_of_the_drain_directory_is_one_clear_error(base, tmp_path, capsys):
    Life(bodies.save_steps, 1, base, [1]).results()
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["drain", str(base), "--to", str(file)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"the drain directory is no directory [path {file}]" in err


@pytest.mark.parametrize("where", ["base", "base/drained", "link/drained"])
def test_memory_is_not_drained_into_itself(base, where, capsys):
    Life(bodies.save_steps, 1, base, [1]).results()
    base.with_name("link").symlink_to(base)
    before = sorted(base.rglob("*"))
    assert cli.main(["drain", str(base), "--to", str(base.parent / where)]) == 1
    assert "the drain directory lies in the memory to drain" in capsys.readouterr().err
    assert sorted(base.rglob("*")) == before


def test_a_drain_directory_in_the_base_container_is_refused_by_name(base):
    with pytest.raises(SettingError, match="MLFLASHPOINT_DRAIN_DIR"):
        StoreConfig(job_id="job", base_container=base, drain_dir=base / "drained")


def test_draining_to_a_memory_file_system_warns_that_it_is_not_durable(base, tmp_path, caplog):
    Life(bodies.save_steps, 1, base, [1]).results()
    assert cli.main(["drain", str(base), "--to", str(base.with_name("other"))]) == 0
    assert "is on tmpfs, which does not outlive the node" in caplog.text
    caplog.clear()
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    assert (caplog.text != "") == (filesystem_kind(tmp_path) in MEMORY_KINDS)


def test_a_drain_that_runs_out_of_time_says_so_and_leaves_nothing(base, tmp_path, capsys):
    Life(bodies.save_steps, 1, base, [1]).results()
    assert cli.main(["drain", str(base), "--to", str(tmp_path), "--budget", "1e-9"]) == 1
    assert "MLFLASHPOINT_DRAIN_BUDGET_S" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.fixture
def saving(base):
    """A job of two ranks that saves without a pause."""
    life = Life(bodies.save_without_pause, 2, base)
    until(lambda: any(slot.record for slot in scan_seat(base / "default/seat-1")))
    yield life
    life.store.set("stop", "1")
    life.results()


def until(met):
    give_up = time.monotonic() + 30
    while not met():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def until_overwritten(seat, step):
    """Until each slot has been seen to hold a newer step. Not all at once: one of them is always being written."""
    older = {slot.path for slot in scan_seat(seat)}

    def met():
        older.difference_update(slot.path for slot in scan_seat(seat) if slot.record and slot.record.step > step)
        return not older

    until(met)


def copy_slowly(monkeypatch, base, copied=lambda: None):
    """A copy of a shard's data begins when the job has overwritten that, as one that takes long ends."""
    write = draindir._write

    def slowly(file, *arguments):
        if file.name.endswith(".data"):
            step, rank = (int(name.split("-")[1].split(".")[0]) for name in (file.parent.name, file.name))
            if not slowly.paused:
                until_overwritten(base / f"default/seat-{rank}", step)
                slowly.paused = copied()
        write(file, *arguments)

    slowly.paused = False
    monkeypatch.setattr(draindir, "_write", slowly)


def test_a_version_that_the_job_overwrites_while_it_is_copied_is_told_as_such_and_a_newer_one_is_drained(
    base, tmp_path, saving, monkeypatch, caplog
):
    def rest():
        saving.store.set("pause", "1")
        until(lambda: saving.store.check(["paused"]))
        return True

    copy_slowly(monkeypatch, base, rest)
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    assert "the job has overwritten the version while it was being copied [rank " in caplog.text
    assert "the newest version is taken instead" in caplog.text
    assert "digest" not in caplog.text
    (_, first), (_, second) = drained(tmp_path)
    assert first == second


def test_a_job_that_overwrites_its_versions_faster_than_they_are_copied_is_a_named_error_and_nothing_is_left(
    base, tmp_path, saving, monkeypatch, capsys
):
    copy_slowly(monkeypatch, base)
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the job overwrites its versions faster than they can be copied [MLFLASHPOINT_KEEP_VERSIONS" in error
    assert "remedy: set it to 3, save more rarely, or set MLFLASHPOINT_DRAIN_DIR" in error
    assert "digest" not in error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("times", [1, 100])
def test_a_rank_whose_training_overwrites_what_it_drains_takes_the_newer_version_as_often_as_is_allowed(
    base, tmp_path, monkeypatch, times
):
    runtime = Runtime(StoreConfig(job_id="job", base_container=base), rank=0, world_size=1, local_rank=0)
    steps, write, writes = iter(range(1, 1000)), draindir._write, []

    def save():
        step = next(steps)
        assert runtime.save(state(step, 0), step=step, wait=True).ok

    def slowly(file, *arguments):
        if file.name.endswith(".data"):
            writes.append(file)
            for _ in range(3 if len(writes) <= 2 * times else 0):
                save()
        write(file, *arguments)

    monkeypatch.setattr(draindir, "_write", slowly)
    save()
    save()
    target = DrainDir(tmp_path, "job", "default")
    try:
        if times == 1:
            found = drain_seat(base / "default/seat-0", 0, target, newest=lambda: None, budget_s=20)
            assert found.steps and found.steps[0] >= 5
            assert drained(tmp_path) == [(0, found.steps[0])]
        else:
            with pytest.raises(OverwrittenError, match="faster than they can be copied"):
                drain_seat(base / "default/seat-0", 0, target, newest=lambda: None, budget_s=20)
            assert len(writes) <= 6
            assert drained(tmp_path) == []
    finally:
        runtime.close()


def test_what_is_corrupt_in_memory_is_told_as_such_at_once(base, tmp_path, capsys):
    Life(bodies.save_steps, 1, base, [1]).results()
    (slot,) = (slot for slot in scan_seat(base / "default/seat-0") if slot.record)
    with open(f"{slot.path}.data", "r+b") as data:
        data.write(b"\x99" * 100)
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "what was drained is not what lay in memory: tensor" in error


def test_older_drained_versions_go_when_a_newer_one_is_whole(base, tmp_path):
    for steps in ([1, 2], [3]):
        Life(bodies.save_steps, 2, base, steps).results()
        assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    assert drained(tmp_path) == [(0, 3), (1, 3)]


def test_a_version_that_another_rank_removes_meanwhile_is_no_fault_of_a_drain(base, tmp_path, monkeypatch):
    Life(bodies.save_steps, 1, base, [1, 2]).results()
    versions = DrainDir.versions
    monkeypatch.setattr(DrainDir, "versions", lambda self: [self.path / "step-1.1.gone", *versions(self)])
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    assert drained(tmp_path) == [(0, 2)]


def test_a_shard_of_which_memory_has_a_corrupt_copy_alone_is_taken_from_the_drain_directory_and_the_log_says_so(
    base, tmp_path
):
    Life(bodies.save_steps, 2, base, [1]).results()
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    (slot,) = (slot for slot in scan_seat(base / "default/seat-1") if slot.record)
    with open(f"{slot.path}.data", "r+b") as data:
        data.write(b"\x99" * 100)
    results = Life(bodies.save_steps, 2, base, [], drain_dir=tmp_path).results()
    assert {result["found"] for result in results.values()} == {1}
    assert "INFO the shard of rank 1 is taken from the drain directory" in results[1]["logs"]


def test_the_drained_files_are_the_memorys_own_and_private(base, tmp_path):
    Life(bodies.save_steps, 1, base, [1]).results()
    assert cli.main(["drain", str(base), "--to", str(tmp_path)]) == 0
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")} == {0}
    (slot,) = (slot for slot in scan_seat(base / "default/seat-0") if slot.record)
    for kind in ("index", "commit"):
        (file,) = tmp_path.rglob(f"rank-0.{kind}")
        assert file.read_bytes() == Path(f"{slot.path}.{kind}").read_bytes()
