"""What goes wrong on one rank: the others go on, are told in time, and nothing incomplete is ever chosen."""

import json
import os
import subprocess

import pytest

from mlflashpoint.core.arena import scan_seat
from tests.core import bodies
from tests.core.ranks import Life, memory_folder

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def base():
    with memory_folder() as folder:
        yield folder / "base"


def flip(base, seat, step):
    """Flip one byte of the shard of ``step`` in a seat; returns the slot's path."""
    (slot,) = (
        slot for slot in scan_seat(base / "default" / f"seat-{seat}") if slot.record and slot.record.step == step
    )
    with open(f"{slot.path}.data", "r+b") as data:
        data.seek(100)
        byte = data.read(1)
        data.seek(100)
        data.write(bytes([byte[0] ^ 1]))
    return slot.path


def test_a_corrupted_shard_makes_every_rank_take_the_next_older_version(base):
    Life(bodies.save_steps, 3, base, [1, 2]).results()
    slot = flip(base, 1, 2)
    second = Life(bodies.find_only, 3, base).results()
    assert {result["step"] for result in second.values()} == {1}
    assert slot.with_name(f"{slot.name}.quarantined").exists()
    assert any("quarantined" in line and "rank 1" in line for line in second[1]["logs"])
    # It is not tried again, and the older version can be gone on from.
    third = Life(bodies.save_steps, 3, base, [2, 3]).results()
    assert {result["found"] for result in third.values()} == {1}
    assert not any("quarantined" in line for result in third.values() for line in result["logs"])
    assert {r["found"] for r in Life(bodies.save_steps, 3, base, []).results().values()} == {3}


def test_when_every_version_is_corrupted_all_ranks_find_nothing(base):
    Life(bodies.save_steps, 2, base, [1, 2]).results()
    flip(base, 0, 1)
    flip(base, 1, 2)
    second = Life(bodies.find_only, 2, base).results()
    assert [(result["step"], result["error"]) for result in second.values()] == [(None, None)] * 2


def test_a_truncated_and_a_garbled_commit_record_only_make_their_version_incomplete(base):
    Life(bodies.save_steps, 2, base, [1, 2]).results()
    (slot,) = (s for s in scan_seat(base / "default" / "seat-0") if s.record.step == 2)
    commit = slot.path.with_name(f"{slot.path.name}.commit")
    commit.write_bytes(commit.read_bytes()[:40])
    second = Life(bodies.find_only, 2, base).results()
    assert {result["step"] for result in second.values()} == {1}


def test_a_rank_that_never_comes_is_named_within_the_deadline(base):
    results = Life(bodies.find_only, 3, base, absent=(2,), deadline_s=2).results()
    for result in results.values():
        assert "DeadlineExceededError: rank 2 did not answer" in result["error"]
        assert result["took"] < 15
        assert result["threads"] == []


def test_a_missing_rank_0_is_named_too(base):
    results = Life(bodies.find_only, 2, base, absent=(0,), deadline_s=2).results()
    assert "DeadlineExceededError: rank 0 did not answer" in results[1]["error"]


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
def test_a_full_store_on_one_rank_stops_neither_it_nor_the_others(base, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(small)], check=True)
    try:
        bases = [base, small / "base"]
        results = Life(bodies.train_beside_a_full_store, 2, None, 1, bases=bases, busy_wait_s=20).results()
        found = Life(bodies.find_only, 2, None, bases=bases).results()
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert results[0]["losses"] == results[1]["losses"] == [3, 6, 9, 12, 15]
    assert results[1]["oks"] == [False] * 5
    # It skips a save if it has heard by then that the other rank has nothing to save there.
    assert results[0]["oks"].count(False) == results[0]["stats"]["saves_skipped"] and results[0]["oks"][0]
    # No rank waited for a slot, though versions of another rank kept failing: busy_wait_s is 20.
    assert max(results[0]["blocking"] + results[1]["blocking"]) < 10
    assert "StoreFullError" in results[1]["errors"][0]
    assert "more bytes, the store has" in results[1]["errors"][0]
    stats = results[1]["stats"]
    assert (stats["saves_ok"], stats["saves_failed"]) == (0, 5)
    warnings = [line for line in results[1]["logs"] if line.startswith("WARNING") and "a save failed" in line]
    assert len(warnings) == 1
    assert "remedy" in warnings[0]
    assert {result["step"] for result in found.values()} == {None}


def test_another_jobs_container_on_one_rank_means_no_memory_for_all_and_no_hang(base):
    other = base.with_name("other")
    Life(bodies.save_steps, 1, other, [1], job_id="someone-else").results()
    results = Life(bodies.save_steps, 2, None, [1, 2], bases=[base, other], wish={"whole": False}).results()
    assert {result["found"] for result in results.values()} == {-1}
    assert [result["saved"] for result in results.values()] == [[False, False]] * 2
    assert any("skip this save together: rank 1 has no memory store" in line for line in results[0]["logs"])
    (told,) = {line for line in results[0]["logs"] if line.startswith("ERROR")}
    assert "rank 1 has no memory store" in told and "there may be a version" in told and "someone-else" in told
    assert any("belongs to job 'someone-else'" in line for line in results[1]["logs"])
    assert {r["step"] for r in Life(bodies.find_only, 1, other, job_id="someone-else").results().values()} == {1}


@pytest.mark.parametrize("name", ["base", "mine"], ids=["on one node", "each on its own"])
def test_a_save_that_is_skipped_for_want_of_a_store_gives_nothing_in_memory_up(base, name):
    mine, other = base.with_name(name), base.with_name("other")
    Life(bodies.save_steps, 2, None, [5], bases=[base, mine]).results()
    Life(bodies.save_steps, 1, other, [1], job_id="someone-else").results()
    broken = Life(bodies.save_without_a_word, 2, None, [1, 2], bases=[base, other]).results()
    assert broken == {rank: {"found": None, "saved": [False, False]} for rank in range(2)}
    found = Life(bodies.find_only, 2, None, bases=[base, mine]).results()
    assert {result["step"] for result in found.values()} == {5}


def test_a_cause_that_lasts_is_one_line_on_each_rank_and_no_remedy_is_repeated(base):
    Life(bodies.save_steps, 1, base, [1], job_id="someone-else").results()
    results = Life(bodies.save_steps, 2, base, [1, 2, 3, 4], wish={"whole": False}).results()
    for rank, result in results.items():
        assert result["saved"] == [False] * 4
        visible = [line for line in result["logs"] if not line.startswith("DEBUG")]
        (told,) = [line for line in visible if "remedy" in line]
        assert told.startswith("ERROR no memory store on this rank, nothing is saved to memory or loaded from it: ")
        assert "belongs to job 'someone-else'" in told and f"rank {rank}" in told
        records = [
            json.loads(line.partition("mlflashpoint save ")[2]) for line in visible if "mlflashpoint save " in line
        ]
        assert [record["error"] for record in records[1:]] == ["as at step 1"] * 3
        assert "someone-else" in records[0]["error"] and result["stats"]["saves_failed"] == 4
        others = [line for line in visible if line != told and "mlflashpoint save " not in line]
        assert not any("someone-else" in line for line in others), others


def test_a_failed_save_is_told_once_and_the_next_one_succeeds(base):
    results = Life(bodies.fail_one_save, 2, base).results()
    # That of step 3 is skipped by rank 0 if it has heard by then that rank 1 has nothing to save there.
    oks, stats = results[0]["oks"], results[0]["stats"]
    assert [ok for step, ok in enumerate(oks, 1) if step != 3] == [True] * 4 and oks[2] == (stats["saves_skipped"] == 0)
    assert results[1]["oks"] == [True, False, False, True, True]
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {5}
    # And counts it as failed too if it has begun it by then.
    assert 2 <= stats["versions_failed"] + stats["saves_skipped"] <= 2 + stats["saves_skipped"]
    told = [line for line in results[1]["logs"] if line.startswith("WARNING") and "a save failed" in line]
    assert len(told) == 1
    assert any("rank 1:" in line and "incomplete" in line for line in results[0]["logs"])


def test_a_slow_background_makes_the_ranks_skip_saves_and_wait_no_longer_than_they_may(base):
    results = Life(bodies.commit_slowly, 2, base, 1, 0.8, busy_wait_s=0.3).results()
    for result in results.values():
        assert max(result["blocking"]) < 5
        assert result["final"]
    assert sum(results[1]["skipped"]) >= 1
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {100}


def test_a_save_that_one_rank_never_began_does_not_block_the_later_ones(base):
    results = Life(bodies.miss_one_save, 2, base, 1, busy_wait_s=2).results()
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {6}
    assert results[0]["oks"] == [True] * 6
    assert results[1]["oks"] == [True] * 5


def test_a_rank_that_says_it_has_nothing_to_save_makes_nobody_wait_and_is_named_with_the_reason(base):
    results = Life(bodies.miss_one_save, 2, base, 1, True, busy_wait_s=30).results()
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {6}
    assert [result["oks"] for result in results.values()] == [[True] * 6, [True] * 5]
    assert [result["stats"]["saves_failed"] for result in results.values()] == [0, 1]
    assert max(result["stats"]["blocking_s"] for result in results.values()) < 10
    assert any("step 2 is incomplete: rank 1: ValueError: nothing to save" in line for line in results[0]["logs"])


def test_the_ranks_vote_and_a_silent_one_counts_as_no(base):
    rounds = [[True, True, True], [True, False, True], [True, True, None], [True, True, True]]
    answers = Life(bodies.vote, 3, base, rounds, deadline_s=3).results()
    assert answers[0] == answers[1] == [True, False, False, True]
    assert answers[2][:2] == [True, False]


def test_first_saves_back_to_back_with_jitter_between_the_ranks_do_not_deadlock(base):
    results = Life(bodies.save_with_jitter, 3, base, 6, busy_wait_s=5).results()
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {6}


def test_a_rollback_within_the_process_abandons_what_lies_above(base):
    results = Life(bodies.roll_back_in_process, 2, base).results()
    assert {result["stats"]["last_complete_step"] for result in results.values()} == {30}
    second = Life(bodies.save_steps, 2, base, []).results()
    assert {result["found"] for result in second.values()} == {25}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_another_number_of_ranks_is_refused_plainly_and_can_be_read_shard_by_shard(base, before, after):
    Life(bodies.save_steps, before, base, [1, 2]).results()
    results = Life(bodies.reshard, after, base).results()
    for result in results.values():
        assert (result["plain"], result["step"], result["ok"]) == (None, 2, True)
        assert f"TopologyMismatchError: step 2 was saved by {before} ranks, the job has {after}" in result["error"]
        assert result["values"] == [200.0 + rank for rank in range(before)]
    assert any(f"TopologyMismatch: saved by {before} ranks, the job has {after}" in line for line in results[0]["logs"])
    assert Life(bodies.find_only, after, base).results()[0]["step"] == 3


def test_a_newer_durable_checkpoint_wins_and_the_memory_stays(base):
    Life(bodies.save_steps, 2, base, [1, 2]).results()
    newer = Life(bodies.find_only, 2, base, wish={"durable_step": 3}).results()
    assert {result["step"] for result in newer.values()} == {None}
    assert any("durable checkpoint of step 3 is newer" in line for line in newer[0]["logs"])
    assert Life(bodies.find_only, 2, base, wish={"durable_step": 2}).results()[0]["step"] == 2


def test_stores_of_two_containers_that_are_joined_at_the_same_time_do_not_mix(base):
    assert Life(bodies.two_containers, 2, base, 3).results() == {0: [], 1: []}
