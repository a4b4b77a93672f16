"""The runtime as one process sees it; what several ranks do together is in test_crash and test_trouble."""

import contextlib
import gc
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mlflashpoint.core import saver
from mlflashpoint.core.runtime import Runtime
from mlflashpoint.errors import (
    ContainerError,
    DeadlineExceededError,
    FlashpointError,
    RankUnknownError,
    SettingError,
    StateMismatchError,
    StateTypeError,
    StepError,
    StoreClosedError,
    StoreInUseError,
)
from mlflashpoint.settings import StoreConfig
from tests.core.ranks import memory_folder, state


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


@pytest.fixture
def make(base):
    made = []

    def runtime(**more):
        settings = {"job_id": "job", "base_container": base, "deadline_s": 30, **more}
        made.append(Runtime(StoreConfig(**settings), rank=0, world_size=1, local_rank=0))
        return made[-1]

    yield runtime
    for one in made:
        one.close()


def ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mlflashpoint")]


def test_what_is_saved_is_loaded_with_its_attributes(make):
    store = make()
    assert store.find_latest() is None
    assert store.save(state(7, 0), step=7, attributes={"samples": 12}, topology="tp1", wait=True).ok
    store.close()
    again = make()
    recovery = again.find_latest()
    loaded = again.load(recovery)
    assert (recovery.step, recovery.topology, loaded.step, loaded.attributes) == (7, "tp1", 7, {"samples": 12})
    assert torch.equal(loaded.state["w"], state(7, 0)["w"])


def test_loading_into_a_state_overwrites_its_tensors_in_place(make):
    store = make()
    store.save(state(7, 0), step=7, wait=True)
    target = state(0, 0)
    kept = target["w"]
    store.load(store.find_latest(), into=target)
    assert torch.equal(kept, state(7, 0)["w"])
    with pytest.raises(StateMismatchError, match="w"):
        store.load(store.find_latest(), into=state(0, 0, numbers=10))


def test_a_change_right_after_save_never_reaches_the_stored_bytes(make):
    store = make()
    content = state(7, 0, numbers=300_000)
    store.save(content, step=7)
    content["w"].add_(1)
    content["nested"].append("late")
    store.flush()
    loaded = store.load(store.find_latest()).state
    assert torch.equal(loaded["w"], state(7, 0, numbers=300_000)["w"])
    assert len(loaded["nested"]) == 2


def test_no_thread_exists_before_the_first_save_and_none_after_the_end(make):
    # An earlier test's large copy may have left the one helper that all copies of a process share.
    before = ours()
    store = make()
    store.find_latest()
    store.resumed(-1)
    store.stats()
    assert ours() == before
    store.save(state(1, 0), step=1)
    assert sorted(ours()) == sorted([*before, "mlflashpoint-default"])
    store.close()
    assert ours() == before


def test_a_step_that_is_stored_is_not_stored_again(make):
    store = make()
    assert not store.save(state(1, 0), step=1).skipped
    again = store.save(state(1, 0), step=1)
    assert (again.ok, again.skipped, again.staged_bytes) == (True, True, 0)


def test_a_step_whose_save_failed_stays_failed_and_the_next_one_succeeds(make):
    store = make()
    failed = store.save({"odd": object()}, step=1)
    assert isinstance(failed.error, StateTypeError)
    assert (failed.error.rank, failed.error.step) == (0, 1)
    assert isinstance(store.save(state(1, 0), step=1).error, StepError)
    assert store.save(state(2, 0), step=2).ok


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, True])
def test_what_is_no_step_is_a_failed_save_and_no_exception(make, step):
    assert isinstance(make().save({}, step=step).error, StepError)


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")


def test_a_reason_that_can_not_be_told_is_a_failed_save_like_any_other(make):
    store = make()
    store.save_failed(1, Unspeakable())
    assert store.stats()["saves_failed"] == 1
    assert store.save(state(2, 0), step=2).ok


def test_what_goes_wrong_while_a_failed_save_is_told_is_raised_to_nobody(make, monkeypatch):
    store = make()
    monkeypatch.setattr(store._saves, "failed", lambda *args: (_ for _ in ()).throw(Unspeakable()))
    store.save_failed(1, ValueError("no"))
    assert "Unspeakable, which has no text: its __str__ raised ValueError" in store.stats()["last_error"]


def test_strict_raises_what_is_otherwise_a_result(make):
    with pytest.raises(StateTypeError):
        make(strict=True).save({"odd": object()}, step=1)


def test_a_failing_commit_is_counted_and_told_once_and_leaves_nothing_half_done(make, monkeypatch, caplog):
    store = make()
    assert store.save(state(1, 0), step=1, wait=True).ok
    with monkeypatch.context() as patched:
        patched.setattr(saver, "replace_file", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        results = [store.save(state(step, 0), step=step, wait=True) for step in (2, 3)]
    assert [result.ok for result in results] == [False, False]
    assert "No space left" in str(results[0].error)
    assert (store.stats()["saves_ok"], store.stats()["saves_failed"]) == (1, 2)
    assert sum("failed in the background" in r.message for r in caplog.records if r.levelname == "WARNING") == 1
    assert store.find_latest().step == 1
    assert store.save(state(4, 0), step=4, wait=True).ok
    assert store.find_latest().step == 4


def test_an_asynchronous_commit_that_fails_shows_in_the_numbers(make, monkeypatch):
    store = make()
    monkeypatch.setattr(saver, "replace_file", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert store.save(state(1, 0), step=1).ok
    assert store.flush()
    stats = store.stats()
    assert (stats["saves_ok"], stats["saves_failed"], stats["bytes_outstanding"]) == (0, 1, 0)
    assert "No space left" in stats["last_error"]


def test_every_save_is_one_line_that_a_program_can_read(make, caplog):
    caplog.set_level(logging.INFO, "mlflashpoint")
    store = make()
    store.find_latest()
    store.save(state(40, 0), step=40, wait=True)
    store.save({"odd": object()}, step=41)
    marker = "mlflashpoint save "
    lines = [json.loads(r.message[len(marker) :]) for r in caplog.records if r.message.startswith(marker)]
    first, second = lines
    assert first["blocking_ms"] > 0
    assert {key: first[key] for key in ("bytes", "group", "incarnation", "ok", "rank", "seq", "skipped", "step")} == {
        "bytes": first["bytes"],
        "group": "default",
        "incarnation": 1,
        "ok": True,
        "rank": 0,
        "seq": 1,
        "skipped": False,
        "step": 40,
    }
    assert first["bytes"] >= 4012
    assert (second["ok"], second["seq"]) == (False, 2)
    assert "StateTypeError" not in second["error"]
    assert "odd" in second["error"]


def test_a_wait_for_a_version_ends_with_its_verdict_or_at_the_deadline(make, monkeypatch):
    runtime, go = make(replicas=0), threading.Event()
    commit = saver.ShardSaver.commit
    monkeypatch.setattr(saver.ShardSaver, "commit", lambda *args, **kwargs: go.wait(60) and commit(*args, **kwargs))
    runtime.save(state(1, 0), step=1, wait=False)
    with pytest.raises(DeadlineExceededError, match="MLFLASHPOINT_DEADLINE_S"):
        runtime.await_version(1, timeout_s=0.1)
    go.set()
    assert runtime.await_version(1, timeout_s=60) is True
    assert runtime.await_version(2, timeout_s=60) is None


def test_a_rollback_within_the_process_never_brings_the_abandoned_step_back(make):
    store = make()
    for step in (10, 20, 30):
        store.save(state(step, 0), step=step, wait=True)
    store.resumed(20)
    assert store.find_latest().step == 20
    store.save(state(21, 0), step=21, wait=True)
    store.close()
    assert make().find_latest().step == 21


def test_a_lower_step_without_a_word_is_taken_for_a_rollback(make):
    store = make()
    for step in (10, 20):
        store.save(state(step, 0), step=step, wait=True)
    store.save(state(15, 0), step=15, wait=True)
    assert store.find_latest().step == 15


def saved_before(make, *steps):
    """What an earlier start has left."""
    store = make()
    for step in steps:
        store.save(state(step, 0), step=step, wait=True)
    store.close()


def test_resuming_from_an_older_step_than_the_newest_keeps_that_one_until_a_newer_is_whole(make):
    saved_before(make, 10, 20)
    again = make()
    assert again.find_latest().step == 20
    again.resumed(10)
    assert isinstance(again.save({"odd": object()}, step=11).error, StateTypeError)
    again.close()
    assert make().find_latest().step == 10


def test_a_job_that_never_says_where_it_went_on_goes_on_from_what_it_loaded(make):
    store = make()
    store.save(state(10, 0), step=10, wait=True)
    store.close()
    again = make()
    again.load(again.find_latest())
    again.save({"odd": object()}, step=11)
    again.close()
    assert make().find_latest().step == 10


def test_a_version_that_was_loaded_by_other_means_counts_as_loaded(make):
    saved_before(make, 10, 20)
    again = make()
    again.find_latest()
    again.loaded(10)
    assert again.find_latest().step == 20
    again.save({"odd": object()}, step=11)
    again.close()
    assert make().find_latest().step == 10


def test_a_forked_child_can_neither_save_nor_close_what_is_its_parents(make):
    store = make()
    store.save(state(1, 0), step=1, wait=True)
    child = os.fork()
    if child == 0:
        result = store.save(state(2, 0), step=2)
        store.close()
        os._exit(0 if "forked" in str(result.error) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.save(state(2, 0), step=2, wait=True).ok


def test_a_closed_runtime_refuses_and_a_second_close_is_harmless(make):
    store = make()
    store.close()
    store.close()
    assert "closed" in str(store.save({}, step=1).error)


def test_a_closed_runtime_finds_nothing_more_and_says_as_a_save_does_that_it_is_closed(make):
    store = make()
    assert store.save(state(1, 0), step=1, wait=True).ok
    store.close()
    refused = store.save(state(2, 0), step=2).error
    with pytest.raises(StoreClosedError) as caught:
        store.find_latest()
    assert type(refused) is StoreClosedError
    assert (refused.message, refused.path, refused.remedy) == (
        caught.value.message,
        caught.value.path,
        caught.value.remedy,
    )


@pytest.mark.parametrize("step", ["x", None, 1.5, True, [3]], ids=repr)
def test_what_is_no_whole_number_is_no_step_to_go_on_from(make, step):
    store = make()
    assert store.save(state(4, 0), step=4, wait=True).ok
    with pytest.raises(StepError, match="whole number") as caught:
        store.resumed(step)
    assert repr(step) in str(caught.value)
    assert store.find_latest().step == 4


@pytest.mark.parametrize("step", [3, torch.tensor(3)], ids=["int", "tensor"])
def test_a_step_to_go_on_from_may_be_any_whole_number(make, step):
    store = make()
    for own in (3, 4):
        assert store.save(state(own, 0), step=own, wait=True).ok
    store.resumed(step)
    assert store.find_latest().step == 3


def test_discarding_frees_the_memory_of_all_versions(make, base):
    store = make()
    store.save(state(1, 0), step=1, wait=True)
    store.discard()
    assert not list(base.rglob("*.data"))
    assert make().find_latest() is None


def test_a_growing_state_gets_larger_slots_and_keeps_what_is_whole(make):
    store = make()
    for step, numbers in ((1, 1000), (2, 2_000_000), (3, 4_000_000)):
        assert store.save(state(step, 0, numbers), step=step, wait=True).ok
    assert store.load(store.find_latest()).state["w"].numel() == 4_000_000


def test_a_hundred_saves_leave_files_descriptors_and_memory_as_they_were(make, base):
    store = make()
    content = state(0, 0, numbers=500_000)

    def measure():
        gc.collect()
        return len(list(base.rglob("*"))), len(os.listdir("/proc/self/fd")), resident()

    for step in range(1, 101):
        content["w"].fill_(step)
        assert store.save(content, step=step).ok
        store.flush()
        if step == 10:
            files, descriptors, memory = measure()
    assert measure()[:2] == (files, descriptors)
    assert measure()[2] - memory < 16 << 20
    assert store.stats()["saves_ok"] == 100
    assert store.load(store.find_latest()).state["w"][0] == 100


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_an_empty_state_of_a_rank_without_tensors_is_a_shard_like_any_other(make):
    store = make()
    assert store.save({}, step=1, wait=True).ok
    assert store.load(store.find_latest()).state == {}


@contextlib.contextmanager
def another_process_on_the_seat(base):
    """Holds the seat of local rank 0; gives the process's id."""
    hold = "import sys; from pathlib import Path; from mlflashpoint.core.seat import SeatLock\n"
    hold += "lock = SeatLock(Path(sys.argv[1]), wait_s=5); print('held', flush=True); sys.stdin.read()"
    seat = str(base / "default" / "seat-0")
    process = subprocess.Popen([sys.executable, "-c", hold, seat], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.communicate(timeout=30)


def test_a_second_process_on_one_seat_is_refused_with_its_owner(make, base):
    make().close()
    with another_process_on_the_seat(base) as pid:
        store = make(deadline_s=0.2)
        assert f"pid {pid}" in str(store.problem)
        assert not store.save({}, step=1).ok
        store.close()
        with pytest.raises(ContainerError, match=f"pid {pid}"):
            make(deadline_s=0.2, strict=True)


def test_a_second_runtime_of_a_process_is_refused_at_once_and_the_first_goes_on(make):
    store = make()
    store.save(state(1, 0), step=1, wait=True)
    began = time.monotonic()
    with pytest.raises(StoreInUseError, match=r"this process already has a store for it.*remedy: .*close it"):
        make()
    assert time.monotonic() - began < 5
    assert store.save(state(2, 0), step=2, wait=True).ok
    assert store.find_latest().step == 2


def test_a_runtime_that_has_a_problem_has_to_be_closed_before_another_is_made(make, base):
    make().close()
    with another_process_on_the_seat(base):
        first = make(deadline_s=0.2)
        with pytest.raises(StoreInUseError):
            make(deadline_s=0.2)
        first.close()
    assert make().problem is None


@pytest.mark.parametrize("again", [{}, {"strict": True}], ids=["open", "strict"])
def test_a_runtime_that_could_not_be_made_is_in_nobodys_way(make, base, again):
    with pytest.raises(SettingError):
        Runtime(StoreConfig(job_id="job", base_container=base), rank=0, world_size=1, local_rank=0, group="../x")
    (base / "odd").mkdir(parents=True)
    with pytest.raises(ContainerError, match="other files"):
        make(strict=True)
    (base / "odd").rmdir()
    assert make(**again).problem is None


def test_a_forked_child_may_have_a_store_once_its_parent_has_closed_its_own(make):
    store = make()
    waits, goes = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(waits, 1)
        os._exit(0 if make().problem is None else 1)
    store.close()
    os.write(goes, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(waits)
    os.close(goes)


def test_nothing_found_without_a_memory_store_is_an_error_in_the_log(make, base, caplog):
    make().close()
    with another_process_on_the_seat(base):
        assert make(deadline_s=0.2).find_latest() is None
    (line,) = [record.message for record in caplog.records if record.levelno > logging.INFO]
    assert "nothing is saved to memory or loaded from it" in line and "another live process" in line


def test_nothing_found_in_an_empty_store_is_no_error_in_the_log(make, caplog):
    assert make().find_latest() is None
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_groups_have_seats_of_their_own(base):
    config = StoreConfig(job_id="job", base_container=base)
    actor, critic = (Runtime(config, rank=0, world_size=1, local_rank=0, group=group) for group in ("actor", "critic"))
    actor.save(state(1, 0), step=1, wait=True)
    critic.save(state(2, 0), step=2, wait=True)
    assert (actor.find_latest().step, critic.find_latest().step) == (1, 2)
    actor.close()
    critic.close()
    with pytest.raises(SettingError, match="group"):
        Runtime(config, rank=0, world_size=1, local_rank=0, group="../x")


def test_several_ranks_without_a_store_are_told_what_is_missing(base):
    store = Runtime(StoreConfig(job_id="job", base_container=base, deadline_s=2), rank=1, world_size=2, local_rank=1)
    with pytest.raises(FlashpointError, match=r"no store to talk through.*initialise torch.distributed"):
        store.find_latest()
    assert store.save(state(1, 0), step=1).ok
    assert store.flush()
    assert store.stats()["saves_failed"] == 1
    store.close()


ENVIRON = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MLFLASHPOINT_JOB_ID": "job"}


def test_the_environment_makes_a_runtime_and_overrides_go_before_it(base):
    environ = {**ENVIRON, "MLFLASHPOINT_BASE_CONTAINER": "/nowhere", "MLFLASHPOINT_KEEP_VERSIONS": "3"}
    environ["MLFLASHPOINT_TRANSPORT"] = "Mooncake"
    store = Runtime.from_env(environ, base_container=base, job_id="other")
    assert (store.config.job_id, store.config.keep_versions, store.config.base_container) == ("other", 3, base)
    assert store.config.transport == "mooncake"
    store.close()


def test_a_transport_that_there_is_none_of_is_a_setting_error(base):
    with pytest.raises(SettingError, match=r"MLFLASHPOINT_TRANSPORT='nixl'.*use gloo, mooncake, mooncake-rdma"):
        StoreConfig(job_id="job", base_container=base, transport="nixl")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_a_process_without_rank_is_not_taken_for_rank_0(base, missing):
    environ = {name: value for name, value in ENVIRON.items() if name != missing}
    with pytest.raises(RankUnknownError, match=f"{missing}.*remedy"):
        Runtime.from_env(environ, base_container=base)


@pytest.mark.parametrize(
    "ranks", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x"}, {"RANK": "-1"}, {"WORLD_SIZE": "2", "LOCAL_RANK": ""}]
)
def test_ranks_that_can_not_be_are_refused(base, ranks):
    with pytest.raises(RankUnknownError):
        Runtime.from_env({**ENVIRON, **ranks}, base_container=base)


def test_several_ranks_without_a_local_rank_are_refused(base):
    environ = {**ENVIRON, "WORLD_SIZE": "2"}
    del environ["LOCAL_RANK"]
    with pytest.raises(RankUnknownError, match="LOCAL_RANK"):
        Runtime.from_env(environ, base_container=base)
