"""A test whose environment is missing is skipped, and fails where all environments are to be there."""

from __future__ import annotations

import pytest

from tests.adapter.lightning import support


@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_missing_environment_is_skipped_or_fails_where_it_is_required(tmp_path, monkeypatch, required, outcome):
    monkeypatch.setenv("REQUIRE_FRAMEWORKS", required)
    with pytest.raises(outcome, match=r"nothing is missing: a\.sh builds it"):
        support.need(tmp_path / "nothing", "a.sh")


def test_an_environment_that_was_built_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("REQUIRE_FRAMEWORKS", "1")
    (tmp_path / ".stamp").touch()
    support.need(tmp_path, "a.sh")
