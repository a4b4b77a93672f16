import json
import multiprocessing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflashpoint.core.incarnation import Incarnation, Lineage, read_lineage, record_lineage
from mlflashpoint.errors import ContainerError, ShardFormatError


def start(number, resumed_from=None, run="r", started_s=0.0):
    return Incarnation(number, run, started_s, resumed_from)


def test_a_later_start_abandons_what_lies_above_the_step_it_went_on_from():
    lineage = Lineage.of([start(1, -1), start(2, 20)])
    assert lineage.horizon(1, "r", 0.0) == 20
    assert lineage.horizon(2, "r", 0.0) > 10**18


def test_a_start_that_has_not_said_where_it_went_on_abandons_nothing():
    assert Lineage.of([start(1, -1), start(2, None)]).horizon(1, "r", 0.0) > 10**18


def test_a_start_from_nothing_abandons_all_earlier_versions():
    assert Lineage.of([start(1, -1), start(2, -1)]).horizon(1, "r", 0.0) == -1


def test_the_lowest_step_of_all_later_starts_counts():
    lineage = Lineage.of([start(1, -1), start(2, 20), start(3, 35)])
    assert lineage.horizon(1, "r", 0.0) == 20
    assert lineage.horizon(2, "r", 0.0) == 35


def test_of_two_starts_with_one_number_the_later_by_the_clock_abandons_the_other():
    lineage = Lineage.of([start(2, 5, run="a", started_s=100.0), start(2, 7, run="b", started_s=200.0)])
    assert lineage.horizon(2, "a", created_s=150.0) == 7
    assert lineage.horizon(2, "b", created_s=250.0) > 10**18


def test_a_number_follows_all_that_were_seen_and_two_starts_never_share_a_name():
    first, second = Incarnation.after(4), Incarnation.after(4)
    assert first.number == second.number == 5
    assert first.run != second.run


def test_a_rollback_within_a_process_is_a_later_start_with_a_name_that_all_ranks_derive():
    base = Incarnation.after(0)
    once, twice = base.rolled_back(7), base.rolled_back(7).rolled_back(3)
    assert (once.number, once.resumed_from, twice.number, twice.resumed_from) == (2, 7, 3, 3)
    assert len({base.run, once.run, twice.run}) == 3
    assert base.rolled_back(7) == once


def test_what_a_node_knows_is_read_back(tmp_path):
    assert read_lineage(tmp_path) == Lineage()
    record_lineage(tmp_path, start(1, -1))
    record_lineage(tmp_path, start(2), Lineage.of([start(1, -1), start(9, 4, run="other")]))
    record_lineage(tmp_path, start(2, 20))
    assert read_lineage(tmp_path) == Lineage.of([start(1, -1), start(2, 20), start(9, 4, run="other")])
    assert (tmp_path / "lineage.json").stat().st_mode & 0o777 == 0o600


def test_the_present_starts_last_word_replaces_its_former_one(tmp_path):
    record_lineage(tmp_path, start(2, -1))
    record_lineage(tmp_path, start(2, 40))
    assert read_lineage(tmp_path).horizon(1, "r", 0.0) == 40


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '[{"number":1}]',
        '[{"number":"1","run":"r","started_s":0,"resumed_from":null}]',
        "[" * 30_000,
        "[]" * 50_000,
    ],
)
def test_a_malformed_lineage_is_named(tmp_path, text):
    (tmp_path / "lineage.json").write_text(text)
    with pytest.raises(ShardFormatError, match=r"lineage is malformed.*lineage\.json"):
        read_lineage(tmp_path)


@pytest.mark.parametrize("name", ["lineage.json", "lineage.json.lock"])
def test_a_lineage_in_whose_place_lies_a_folder_has_a_remedy_that_helps(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ContainerError) as caught:
        record_lineage(tmp_path, start(1))
    assert caught.value.remedy == "remove the container with 'mlflashpoint clean'"


def _record(folder, number):
    record_lineage(folder, start(number, number))


def test_ranks_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_record, args=(tmp_path, number)) for number in range(1, 9)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert [found.number for found in read_lineage(tmp_path).starts] == list(range(1, 9))


starts = st.lists(
    st.builds(
        Incarnation,
        number=st.integers(1, 100),
        run=st.sampled_from("ab"),
        started_s=st.floats(0, 10),
        resumed_from=st.none() | st.integers(-1, 50),
    ),
    max_size=80,
)


@given(starts, starts, st.integers(1, 100), st.sampled_from("ab"), st.floats(0, 10))
def test_merging_and_forgetting_never_bring_an_abandoned_version_back(some, more, number, run, created_s):
    every = [other.resumed_from for other in (*some, *more) if other.number > number and other.resumed_from is not None]
    merged = Lineage.of((*Lineage.of(some).starts, *Lineage.of(more).starts))
    assert merged.horizon(number, run, created_s) <= min(every, default=1 << 62)
    assert merged.newest == max((other.number for other in (*some, *more)), default=0)
    assert len(merged.starts) <= 32


@given(starts)
def test_a_lineage_survives_json(some):
    lineage = Lineage.of(some)
    assert Lineage.from_json(json.loads(json.dumps(lineage.to_json()))) == lineage
