"""A checkpoint in memory whose folder was not made before the job ended, and which folder it then gets."""

import pytest

from mlflashpoint.adapter.pytorch.script import marker, protection
from mlflashpoint.adapter.pytorch.script.folder import make
from mlflashpoint.adapter.pytorch.script.stream import Version
from mlflashpoint.adapter.pytorch.script.successor import make_folder

GROUP = "dcp-0123456789ab"


@pytest.fixture(params=["", "model"], ids=["step", "below the step"])
def family(tmp_path, request):
    """Gives the folder of a step's checkpoint; that of step 1 is durable, that of step 3 in memory only and lost."""

    def folder(step):
        return tmp_path / f"step-{step}" / request.param if request.param else tmp_path / f"step-{step}"

    folder(1).mkdir(parents=True)
    for name in (marker.METADATA, "__0_0.distcp"):
        (folder(1) / name).write_bytes(b"durable")
    depth = int(bool(request.param))
    mark = marker.Marker(str(folder(3)), "job", GROUP, 2, "third", str(folder(1)), 2, depth)
    make(folder(3), mark, protection.seen(folder(1)), None)
    return folder


def newest(family, step=4, number=3):
    return Version(number, "fourth", str(family(step)), None)


def made(family, version):
    return make_folder(family(3), marker.read(family(3)), version)


def test_it_says_what_it_would_have_said(family):
    assert made(family, newest(family)) == family(4)
    mark = marker.read(family(3))
    assert marker.read(family(4)) == marker.Marker(
        str(family(4)), "job", GROUP, 3, "fourth", str(family(1)), 3, mark.depth
    )


def test_it_protects_the_last_durable_checkpoint(family, tmp_path):
    made(family, newest(family))
    (links,) = tmp_path.rglob(protection.LINKS)
    assert links.parent == tmp_path / "step-4"
    assert (links / family(1).relative_to(tmp_path / "step-1") / "__0_0.distcp").read_bytes() == b"durable"


def test_what_a_durable_save_has_left_there_half_done_does_not_hinder_it(family):
    family(4).mkdir(parents=True)
    (family(4) / "__0_0.distcp").write_bytes(b"half")
    assert made(family, newest(family)) == family(4)


def test_a_version_that_is_not_newer_gets_none(family):
    assert made(family, newest(family, number=2)) is None


def test_a_version_that_does_not_say_where_it_was_saved_gets_none(family):
    assert made(family, Version(3, "fourth", "", None)) is None


@pytest.mark.parametrize("step", [2, "4/5"], ids=["older", "another family"])
def test_a_folder_that_does_not_follow_is_not_made(family, step):
    assert made(family, newest(family, step)) is None


def test_a_durable_checkpoint_there_is_left_alone(family):
    family(4).mkdir(parents=True)
    (family(4) / marker.METADATA).write_bytes(b"also durable")
    assert made(family, newest(family)) is None


def test_a_checkpoint_that_has_a_folder_gets_no_second_one(family):
    made(family, newest(family))
    assert made(family, newest(family, step=5)) is None


@pytest.mark.parametrize("name", ["trainer.pt", "optimizer"])
def test_a_script_that_keeps_more_than_that_in_a_step_gets_none(family, tmp_path, name):
    (tmp_path / "step-3" / name).mkdir()
    assert made(family, newest(family)) is None


def test_a_folder_that_was_moved_has_no_successor(family, tmp_path):
    mark = marker.read(family(3))
    moved = tmp_path / "best"
    (tmp_path / "step-3").rename(moved)
    assert make_folder(moved, mark, newest(family)) is None
