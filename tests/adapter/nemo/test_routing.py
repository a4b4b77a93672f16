"""Which paths name memory versions of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflashpoint.adapter.nemo.routing import Routing
from mlflashpoint.errors import CheckpointIdError


def test_a_longer_name_is_another_container(tmp_path):
    routing = Routing(tmp_path / "job-1")
    assert routing.is_memory(tmp_path / "job-1" / "step-3_ckpt")
    assert not routing.is_memory(tmp_path / "job-10" / "step-3_ckpt")
    assert not routing.is_memory(f"{tmp_path}/job-1-old")


@pytest.mark.parametrize("write", [lambda p: f"{p}/", lambda p: f"{p}/../{Path(p).name}", lambda p: f"{p}//", Path])
def test_one_container_has_many_spellings(tmp_path, write):
    base = tmp_path / "job-1"
    base.mkdir()
    routing = Routing(write(str(base)))
    assert routing.base == str(base)
    assert routing.is_memory(f"{write(str(base))}/step-7_ckpt/") and routing.step_of(f"{base}/step-7_ckpt/") == 7


def test_a_relative_path_and_a_symbolic_link_lead_to_the_container(tmp_path, monkeypatch):
    base = tmp_path / "job-1"
    base.mkdir()
    (tmp_path / "link").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    for spelling in ("job-1", "./job-1", "link", str(tmp_path / "link")):
        routing = Routing(spelling)
        assert routing.base == str(base)
        assert all(routing.step_of(f"{other}/step-12_ckpt") == 12 for other in ("job-1", "link", base))


def test_what_lies_in_a_version_or_carries_a_suffix_is_of_that_version(tmp_path):
    routing = Routing(tmp_path / "job-1")
    version = tmp_path / "job-1" / "step-12_ckpt"
    for path in (version, version / "weights", version / "context", f"{version}.ckpt"):
        assert routing.step_of(path) == 12
    for path in (tmp_path / "job-1", tmp_path / "job-1" / "step-12_ckpt_backup", tmp_path / "job-1" / "other"):
        assert routing.is_memory(path) and routing.step_of(path) is None


def test_a_url_or_nothing_is_never_in_memory(tmp_path):
    routing = Routing(tmp_path / "job-1")
    assert not any(map(routing.is_memory, (None, "", "s3://job-1/step-3_ckpt", f"msc:/{tmp_path}/job-1", 3)))


def test_the_root_is_no_container():
    with pytest.raises(CheckpointIdError):
        Routing("/")
