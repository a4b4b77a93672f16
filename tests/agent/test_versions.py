"""Version ranges, against the reference implementation where that is installed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflashpoint.agent.versions import in_range, installed_version, version_key

numbers = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
suffixes = st.sampled_from(["", "", "a1", "b2", "rc1", "rc0", ".dev3", ".post1", "rc1.dev2", ".post1.dev4", "a0", "-1"])
locals_ = st.sampled_from(["", "", "+cpu", "+cu126", "+g1a2b3c.dirty"])
versions = st.builds("{}{}{}".format, numbers, suffixes, locals_)
bounds = st.builds("{}{}".format, numbers, st.sampled_from(["", "", "rc1", ".dev0"]))
clauses = st.builds("{}{}".format, st.sampled_from([">=", "<", "<="]), bounds)


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("0.4.2", ">=0.4.2,<0.7", True),
        ("0.6.2", ">=0.4.2,<0.7", True),
        ("0.6.99.post1", ">=0.4.2,<0.7", True),
        ("0.4.1", ">=0.4.2,<0.7", False),
        ("0.4.2rc1", ">=0.4.2,<0.7", False),
        ("0.7.0", ">=0.4.2,<0.7", False),
        ("0.7.0rc0", ">=0.4.2,<0.7", False),
        ("0.7.0.dev1+gabc", ">=0.4.2,<0.7", False),
        ("0.10.0", ">=0.4.2,<0.7", False),
        ("0.5", ">= 0.4.2 , < 0.7", True),
        ("2.13.0+cpu", "==2.13", True),
        ("2.13.0", "!=2.13.0", False),
        ("1!0.1", ">2", True),
        ("0.6.2", "", True),
    ],
)
def test_a_version_lies_in_a_range_or_not(version: str, wanted: str, fits: bool) -> None:
    assert in_range(version, wanted) is fits


@given(versions, st.lists(clauses, min_size=1, max_size=2))
def test_ranges_mean_what_packaging_takes_them_to_mean(version: str, wanted: list[str]) -> None:
    specifiers = pytest.importorskip("packaging.specifiers")
    expected = specifiers.SpecifierSet(",".join(wanted)).contains(version, prereleases=True)
    assert in_range(version, ",".join(wanted)) is expected


@given(versions, versions)
def test_versions_are_ordered_as_packaging_orders_them(one: str, other: str) -> None:
    reference = pytest.importorskip("packaging.version").Version
    public_one, public_other = one.partition("+")[0], other.partition("+")[0]
    assert (version_key(one) < version_key(other)) is (reference(public_one) < reference(public_other))
    assert (version_key(one) == version_key(other)) is (reference(public_one) == reference(public_other))


@pytest.mark.parametrize("text", ["", "main", "1.x", "1.0-", "v", "1..2", "unknown", "1.0 beta!"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a version"):
        version_key(text)


@pytest.mark.parametrize("wanted", ["0.4", "~=0.4", ">=", "=>1"])
def test_what_is_no_clause_is_refused(wanted: str) -> None:
    with pytest.raises(ValueError, match="not a version"):
        in_range("1.0", wanted)


def test_the_metadata_tells_the_version_and_nothing_is_imported_for_it() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("a-distribution-that-is-not-there") is None
    assert installed_version("a-distribution-that-is-not-there", "pytest") == pytest.__version__
    assert installed_version("a-distribution-that-is-not-there", "package_that_is_not_imported") is None
