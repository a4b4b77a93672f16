"""Which loads a save of a step that was saved already comes from."""

import pytest

from mlflashpoint.core.visits import Back, Visits

PLACE = ("default", "/base")
WHOLE, PART = frozenset(), frozenset({0})


@pytest.fixture
def visits():
    return Visits()


def back(visits, step=10, seen=None, world_size=2):
    return visits.back(PLACE, step, visits.seen() if seen is None else seen, rank=0, world_size=world_size)


def load(visits, *loads):
    for step, missed in loads:
        visits.add(PLACE, step, 2, missed)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([], None),
        ([(5, WHOLE)], Back(5)),
        ([(5, frozenset({1}))], Back(5)),
        ([(5, PART)], Back(None)),
        ([(10, WHOLE)], None),
        ([(5, WHOLE), (10, WHOLE)], None),
        ([(5, WHOLE), (10, PART)], Back(None)),
        ([(10, PART)], None),
        ([(3, PART), (5, WHOLE)], Back(5)),
        ([(5, WHOLE), (3, PART)], Back(None)),
        ([(5, WHOLE), (5, PART)], Back(5)),
        ([(5, WHOLE), (3, WHOLE), (5, WHOLE)], Back(5)),
    ],
)
def test_the_version_that_was_loaded_whole_last_is_the_one_that_a_save_comes_from(visits, loads, expected):
    load(visits, *loads)
    assert back(visits) == expected


def test_a_version_of_another_number_of_ranks_is_not_whole(visits):
    load(visits, (5, WHOLE))
    assert back(visits, world_size=4) == Back(None)


def test_what_a_save_knew_of_is_not_what_the_next_one_comes_from(visits):
    load(visits, (5, WHOLE))
    visits.settle(PLACE, visits.seen())
    assert back(visits) is None


def test_a_load_that_comes_after_a_save_has_its_state_counts_for_the_next_one(visits):
    seen = visits.seen()
    load(visits, (5, WHOLE))
    assert back(visits, seen=seen) is None
    visits.settle(PLACE, seen)
    assert back(visits) == Back(5)


def test_loads_of_other_stores_do_not_count(visits):
    visits.add(("other", "/base"), 5, 2, WHOLE)
    assert back(visits) is None


def test_many_loads_of_one_version_are_kept_as_one(visits):
    load(visits, *[(5, WHOLE)] * 200)
    assert len(visits.seen()[PLACE]) == 1
