"""A save that is held is given up once its holder is gone, however many saves have begun since, and not before."""

import pytest


class Request:
    """Who holds a save."""


@pytest.fixture
def begin(store):
    """Begins a save of a step, held by a request; gives both."""

    def of(step, *, planning=False):
        store.writer.reset(store.version(step))
        store.writer.set_up_storage_writer(True)
        request = Request()
        save = store.writer.hold(request)
        save.planning = planning
        return request, save

    return of


def test_a_save_whose_request_is_dropped_after_the_next_has_begun_is_given_up_at_the_one_after(begin):
    request, first = begin(1)
    kept = [begin(2)]
    assert first.outcome is None
    del request
    kept.append(begin(3))
    assert first.outcome is False
    assert [save.outcome for _, save in kept] == [None, None]


def test_one_whose_request_was_dropped_before_the_next_is_given_up_by_it(begin):
    request, first = begin(1)
    del request
    begin(2)
    assert first.outcome is False


def test_looking_for_the_newest_gives_up_what_was_dropped_too(begin, store):
    request, first = begin(1)
    kept = begin(2)
    del request
    store.latest()
    assert first.outcome is False and kept[1].outcome is None


def test_one_that_was_finished_meanwhile_stays_so(begin):
    request, first = begin(1)
    kept = begin(2)
    first.finish(b"metadata", shared=False)
    del request
    kept = begin(3)
    assert first.outcome is None and first.alone and kept[1].outcome is None


def test_one_without_a_plan_may_be_saved_yet(begin):
    request, first = begin(1, planning=True)
    kept = begin(2)
    del request
    begin(3)
    assert first.outcome is None and kept[1].outcome is None


def test_it_is_told_to_the_store_that_it_is_saved_to(begin, store, monkeypatch):
    told = []
    monkeypatch.setattr(
        "mlflashpoint.adapter.pytorch.unfinished.tell_failed",
        lambda runtime, save, error: told.append((runtime, save, error)),
    )
    request, first = begin(1)
    del request
    begin(2)
    ((runtime, save, error),) = told
    assert (runtime, save, error.step) == (store.runtime, first, 1)
