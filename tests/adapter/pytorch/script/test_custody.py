"""What rank 0 sees of a script's folders, and what it makes of that; the folders are real, the saves are files."""

import logging
import os
import shutil
from types import SimpleNamespace

import pytest

from mlflashpoint.adapter.pytorch.script import loads, marker, protection
from mlflashpoint.adapter.pytorch.script.custody import Custody
from mlflashpoint.adapter.pytorch.script.journal import Journal
from mlflashpoint.adapter.pytorch.script.line import depth_of, goes_up, group_of
from mlflashpoint.adapter.pytorch.script.retirement import retire


class Line:
    """A script's saves to one line of folders; every tenth is durable."""

    def __init__(self, base, **names):
        runtime = SimpleNamespace(config=SimpleNamespace(base_container=base), group=group_of(base), local_rank=0)
        self.journal = Journal(runtime)
        self.custody = Custody("job", group_of(base), self.journal)
        self.tokens = {}

    def save(self, path, *, every=10, whole=True):
        """True if it is in memory only."""
        decision = self.custody.decide(path, every)
        self.flushed = {folder for folders in decision["flush"].values() for folder in folders}
        for folder in self.flushed:
            durable(type(path)(folder))
            self.custody.written(type(path)(folder))
        if decision["alone"]:
            self.tokens[path] = decision["token"]
            self.custody.show(path, len(self.tokens), decision["token"])
            return True
        self.custody.durable_begins(path)
        if whole:
            durable(path)
            self.custody.durable_ends(path)
        return False


def durable(path):
    path.mkdir(parents=True, exist_ok=True)
    (path / "__0_0.distcp").write_bytes(b"data of " + str(path).encode())
    (path / ".metadata.tmp").write_bytes(os.urandom(20))
    os.replace(path / ".metadata.tmp", path / ".metadata")


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path / "memory")


@pytest.fixture
def steps(tmp_path, line):
    """Folders of steps 1 to 3: the first is durable, the others are in memory only."""
    paths = {step: tmp_path / "run-1" / f"step-{step}" for step in range(1, 30)}
    assert [line.save(paths[step]) for step in (1, 2, 3)] == [False, True, True]
    return paths


def test_a_plain_script_that_keeps_the_newest_pays_every_tenth_save_only(line, steps, caplog):
    link = steps[1].parent / "latest"
    kinds = []
    for step in range(4, 25):
        kinds.append(line.save(steps[step]))
        for old in range(1, step - 1):
            shutil.rmtree(steps[old], ignore_errors=True)
        link.unlink(missing_ok=True)
        link.symlink_to(steps[step].name)
    assert [step for step, alone in zip(range(4, 25), kinds, strict=True) if not alone] == [11, 21]
    assert not caplog.records and not line.journal.turned


def rename_the_newest(steps):
    os.rename(steps[3], steps[3].with_name("kept"))
    return {"step-2", "kept"}


def delete_the_newest(steps):
    shutil.rmtree(steps[3])
    return {"step-2"}


def keep_an_older_one(steps):
    shutil.rmtree(steps[2])
    return {"step-3"}


def copy_one(steps):
    shutil.copytree(steps[2], steps[2].with_name("best"))
    return {"step-2", "step-3", "best"}


def copy_one_further_in(steps):
    shutil.copytree(steps[2], steps[2].with_name("best") / "copy-2")
    return {"step-2", "step-3", "copy-2"}


def copy_one_outside(steps):
    shutil.copytree(steps[2], steps[2].parents[1] / "best")
    return {"step-2", "step-3", "best"}


def copy_one_outside_and_further_in(steps):
    shutil.copytree(steps[3], steps[2].parents[1] / "best" / "copy-3")
    return {"step-2", "step-3", "copy-3"}


def move_the_newest_outside(steps):
    (steps[3].parents[1] / "kept").mkdir()
    shutil.move(steps[3], steps[3].parents[1] / "kept" / "step-3")
    return {"step-2", "step-3"}


def overwrite_the_newest(steps):
    durable(steps[3])
    return {"step-2"}


def link_an_older_one(steps):
    steps[2].with_name("best").symlink_to("step-2")
    return {"step-2", "step-3"}


def nothing(steps):
    return {"step-2", "step-3"}


@pytest.mark.parametrize(
    ("habit", "next_step"),
    [
        (rename_the_newest, 4),
        (delete_the_newest, 4),
        (keep_an_older_one, 4),
        (copy_one, 4),
        (copy_one_further_in, 4),
        (copy_one_outside, 4),
        (copy_one_outside_and_further_in, 4),
        (move_the_newest_outside, 4),
        (overwrite_the_newest, 4),
        (link_an_older_one, 4),
        (nothing, 3),
        (nothing, 2),
        (nothing, 1),
    ],
)
def test_what_is_in_memory_only_is_written_where_its_folder_is_and_all_later_saves_are_durable(
    line, steps, caplog, habit, next_step
):
    whole = (steps[1] / "__0_0.distcp").read_bytes()
    expected = habit(steps)
    assert line.save(steps[next_step]) is False
    assert {os.path.basename(folder) for folder in line.flushed} == expected
    assert not any(marker.read(steps[1].parent / name) for name in expected)
    assert [line.save(steps[step]) for step in (5, 6)] == [False, False]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert next_step == 1 or (steps[1] / "__0_0.distcp").read_bytes() == whole
    # A restart need not find out again.
    assert Journal(SimpleNamespace(
        config=SimpleNamespace(base_container=line.journal._path.parents[3]), group=line.custody._group, local_rank=0
    )).turned  # fmt: skip


def test_a_copy_over_an_older_copy_is_noticed(line, steps):
    best = steps[1].with_name("best")
    shutil.copytree(steps[1], best)
    assert line.save(steps[4]) is True
    shutil.copytree(steps[4], best, dirs_exist_ok=True)
    assert line.save(steps[5]) is False and line.journal.turned
    assert str(best) in line.flushed


def test_a_folder_that_somebody_has_written_to_is_not_written_over_at_the_end(line, steps):
    durable(steps[3])
    assert line.custody.at_end(has_saved=True) == {line.tokens[steps[2]]: [str(steps[2])]}
    line.custody.settle()
    assert sorted(path.name for path in steps[3].iterdir()) == [".metadata", "__0_0.distcp"]


def test_a_folder_that_somebody_has_written_to_is_not_taken_away_when_memory_is_lost(line, steps):
    mark = marker.read(steps[3])
    durable(steps[3])
    retire(steps[2], marker.read(steps[2]), set())
    assert mark is not None and marker.identity(steps[3]) is not None
    assert not steps[2].exists()


def test_a_durable_checkpoint_that_was_moved_is_not_called_protected(line, tmp_path):
    first, second = tmp_path / "tmp-1", tmp_path / "tmp-2"
    line.save(first)
    os.rename(first, tmp_path / "step-1")
    assert line.save(second) is False and line.journal.turned


def test_links_that_are_not_the_whole_durable_checkpoint_protect_nothing(tmp_path):
    old, new = tmp_path / "step-1", tmp_path / "step-2"
    durable(old)
    seen = protection.seen(old)
    new.mkdir()
    for spoil in (lambda: (old / "__0_0.distcp").unlink(), lambda: durable(old)):
        spoil()
        with pytest.raises(FileNotFoundError, match="not whole"):
            protection.protect(new, seen, 0, None)


def test_a_save_in_the_background_is_no_reason_to_give_up_memory(line, tmp_path):
    paths = [tmp_path / f"step-{step}" for step in range(4)]
    assert line.save(paths[0], whole=False) is False
    assert line.save(paths[1], whole=False) is False
    durable(paths[1])
    line.custody.durable_ends(paths[1])
    assert line.save(paths[2]) is True
    assert not line.journal.turned


def test_overwriting_the_durable_checkpoint_leaves_its_links_whole(line, steps):
    links = steps[3] / protection.LINKS / "__0_0.distcp"
    before = links.read_bytes()
    line.custody.decide(steps[1], 1)
    with (steps[1] / "__0_0.distcp").open("wb") as file:
        file.write(b"other")
    assert links.read_bytes() == before


@pytest.mark.parametrize(
    ("now", "before", "strict", "loose"),
    [
        ("/a/step-2", "/a/step-1", 0, 0),
        ("/a/step-2/model", "/a/step-1/model", 1, 1),
        ("/a/run-2/step-1", "/a/run-1/step-1", None, 1),
        ("/a/run-2/step-1", "/a/run-1/step-100", None, None),
        ("/a/step-2", "/a/kept", None, None),
        ("/a/step-2", "/b/step-1", None, None),
    ],
)
def test_which_checkpoints_are_one_family(tmp_path, now, before, strict, loose):
    now, before = type(tmp_path)(now), type(tmp_path)(before)
    assert (depth_of(now, before, own=False), depth_of(now, before, own=True)) == (strict, loose)


def test_numbers_that_only_go_up(tmp_path):
    path = type(tmp_path)
    assert goes_up(path("/a/epoch-1/step-9"), path("/a/epoch-1/step-10"))
    assert not goes_up(path("/a/ema-0.99/step-5"), path("/a/ema-0.9/step-6"))
    assert not goes_up(path("/a/last"), path("/a/last"))


def test_another_jobs_checkpoint_is_named_and_left_alone(line, steps):
    stream = SimpleNamespace(runtime=SimpleNamespace(config=SimpleNamespace(job_id="other")), journal=line.journal)
    verdict = loads._judge(stream, steps[3], [])
    assert verdict["source"] == "lost" and str(steps[1]) in verdict["note"]
    assert marker.read(steps[3]) is not None and marker.read(steps[2]) is not None


def test_a_lost_checkpoint_that_was_moved_away_is_taken_away_alone(line, steps, tmp_path):
    away = tmp_path / "archive" / "run-1" / "step-3"
    away.parent.mkdir(parents=True)
    os.rename(steps[3], away)
    shutil.rmtree(steps[1])
    (away.parent / "notes.txt").write_text("mine")
    assert retire(away, marker.read(away), set()) == steps[1]
    assert sorted(path.name for path in away.parent.iterdir()) == ["notes.txt"]
    assert marker.identity(steps[1]) is not None and marker.read(steps[2]) is not None


def test_links_to_a_lost_checkpoint_lead_to_the_last_durable_one(line, steps):
    relative, absolute = steps[1].with_name("latest"), steps[1].with_name("newest")
    relative.symlink_to("step-3")
    absolute.symlink_to(steps[3])
    retire(steps[3], marker.read(steps[3]), set())
    assert (os.readlink(relative), os.readlink(absolute)) == ("step-1", str(steps[1]))


def test_the_only_folder_left_is_followed_under_its_new_name(line, steps):
    shutil.rmtree(steps[1])
    shutil.rmtree(steps[2])
    os.rename(steps[3], steps[3].with_name("kept"))
    assert line.save(steps[4]) is False
    assert line.flushed == {str(steps[3].with_name("kept"))}
