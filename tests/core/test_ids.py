import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflashpoint.core.ids import CheckpointContainerId, CheckpointObjectId
from mlflashpoint.errors import CheckpointIdError

BASE = CheckpointContainerId("/tmp/mlf/job-1")


@pytest.mark.parametrize("kind", [CheckpointContainerId, CheckpointObjectId])
@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "//",
        "relative",
        "a/b",
        "/a//b",
        "//a",
        "/a/./b",
        "/a/..",
        "/a/b.",
        "/a/ /b",
        "/a/b\n",
        "/a\x00b",
        7,
        None,
    ],
)
def test_a_path_that_is_no_absolute_plain_path_is_refused(kind, path):
    with pytest.raises(CheckpointIdError):
        kind(path)


def test_a_refused_id_is_a_value_error_too():
    with pytest.raises(ValueError, match="absolute path"):
        CheckpointContainerId("relative")


def test_a_trailing_slash_makes_no_other_id():
    assert CheckpointContainerId("/a/b/") == CheckpointContainerId("/a/b") == "/a/b"
    assert hash(CheckpointContainerId("/a/b/")) == hash(CheckpointContainerId("/a/b"))


def test_parents_end_below_the_root():
    child = CheckpointContainerId("/a/b/c")
    assert [child.get_parent(), child.get_parent(2), child.get_parent(3), child.get_parent(9)] == [
        "/a/b",
        "/a",
        None,
        None,
    ]
    with pytest.raises(CheckpointIdError):
        child.get_parent(0)


def test_a_child_is_one_segment():
    child = CheckpointContainerId.create_child(BASE, "step-5_ckpt")
    assert child == "/tmp/mlf/job-1/step-5_ckpt"
    assert isinstance(child, CheckpointContainerId)
    for name in ("", "a/b", " ", "..", "x."):
        with pytest.raises(CheckpointIdError):
            CheckpointContainerId.create_child(BASE, name)
    with pytest.raises(CheckpointIdError):
        CheckpointContainerId.create_child("/tmp/mlf/job-1", "x")


def test_an_object_knows_its_container():
    entry = CheckpointObjectId.from_container(BASE, "common.pt")
    assert entry == "/tmp/mlf/job-1/common.pt"
    assert entry.container == BASE


def test_a_job_never_claims_another_whose_name_begins_alike():
    assert CheckpointContainerId("/tmp/mlf/job-10/step-1_ckpt").is_within("/tmp/mlf/job-10/")
    assert not CheckpointContainerId("/tmp/mlf/job-10/step-1_ckpt").is_within(BASE)
    assert not CheckpointContainerId("/tmp/mlf/job-10").is_within(BASE)
    assert BASE.is_within(BASE)


@given(st.integers(0, 10**18))
def test_a_step_is_read_back_from_the_name_it_gives(step):
    name = CheckpointContainerId.format_version_container(step)
    assert CheckpointContainerId.parse_version_container_step(name) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-7_ckpt_backup",
        "step-7_ckpt ",
        "step-07_ckpt",
        "step--7_ckpt",
        "step-7.5_ckpt",
        "step-_ckpt",
        "xstep-7_ckpt",
        "step-7_ckpt\n",
        "step-\u0667_ckpt",
        "Step-7_ckpt",
        "step-7",
        "",
        None,
        7,
    ],
)
def test_a_near_miss_is_no_version(name):
    assert CheckpointContainerId.parse_version_container_step(name) is None


@pytest.mark.parametrize("step", [-1, 1.0, "7", None, True, 10**19])
def test_what_is_no_step_gets_no_name(step):
    with pytest.raises(CheckpointIdError):
        CheckpointContainerId.format_version_container(step)


def test_versions_compare_as_numbers():
    names = ["step-9_ckpt", "step-100_ckpt", "step-10_ckpt", "step-200_ckpt_backup", "other"]
    ids = [CheckpointContainerId.create_child(BASE, name) for name in names]
    assert CheckpointContainerId.newest_version(ids).step == 100
    assert CheckpointContainerId.newest_version(ids[3:]) is None


def test_an_id_survives_pickling_as_its_kind():
    copy = pickle.loads(pickle.dumps(BASE))
    assert type(copy) is CheckpointContainerId
    assert copy == BASE
