"""Megatron-Core's ``dist_checkpointing`` on the memory store, on each release: a real GPT, real ranks, a real kill."""

import pytest

pytestmark = pytest.mark.multiprocess
#: the job, and its restarts on four, two and three ranks
STARTS = (("save", 2), ("look", 4), ("fewer", 2), ("fewer", 3))


@pytest.fixture
def said(job):
    """Scenario -> what each rank reports of it, at the given start; those before it are made first."""

    def of(scenario, start=1):
        for what, ranks in STARTS[:start]:
            job.reports("worker", ranks, what)
        return job.said("worker", ranks, what, scenario)

    return of


@pytest.mark.parametrize("scenario", ["guide_async", "megatrons_own_save"])
def test_a_fresh_model_gets_from_memory_what_it_gets_from_disk(said, scenario):
    for result in said(scenario):
        assert result["differing"] == []
        assert result["changed"] > 50


def test_the_guides_async_save_is_a_snapshot_of_its_step(said, job):
    for result in said("guide_async"):
        assert result["latest"] == f"{job.base}/guide/step-3_ckpt"
        assert result["snapshot"] == []
        assert result["goes_on_equal"]


def test_the_pages_python_runs(said, job):
    for result in said("the_python_of_the_page"):
        assert result == {"differing": [], "newest": f"{job.base}/page/step-2_ckpt"}


def test_the_common_state_is_in_the_folder_and_survives(said):
    for result in said("guide_async"):
        assert result["files"] == ["common.pt", "metadata.json"]
        common = result["common"]
        assert (common["iteration"], common["args"], common["list"]) == (
            3,
            {"lr": 0.1, "nothing": None},
            [1, None, "x"],
        )


def test_content_metadata_survives_megatrons_own_save(said):
    for result in said("megatrons_own_save"):
        assert result["stored"] == {"kind": "x", "nothing": None}


def test_content_metadata_that_is_none_survives(said):
    assert [(result["has"], result["value"]) for result in said("metadata_that_is_none")] == [(True, None)] * 2


def test_sharded_metadata_can_be_listed(said):
    for result in said("metadata_that_is_none"):
        assert result["keys"] > result["tensors"] > 10
        assert result["shape"] == [128, 32]


def test_a_node_that_lost_the_folder_gets_it_back(said):
    assert [result["files"] for result in said("a_node_without_the_folder")] == [["common.pt", "metadata.json"]] * 2


def test_an_object_that_cant_be_serialised_is_named_on_all_ranks(said):
    for rank, result in enumerate(said("an_object_that_nothing_can_serialise")):
        ((where, (kind, text)),) = result["failures"].items()
        assert where == str(rank)
        assert kind == "StateTypeError"
        assert "'bad/shard_1_2'" in text and "rank 1" in text and "_thread.lock" in text and "copyreg.pickle" in text


def test_a_full_store_is_named_on_all_ranks_and_leaves_the_version_before(said, job):
    for result in said("a_full_store"):
        ((rank, (kind, text)),) = result["failures"].items()
        assert (rank, kind) == ("1", "StoreFullError")
        assert "need" in text and "the store has" in text
        assert result["latest"] == f"{job.base}/guide/step-5_ckpt"


def test_the_fully_parallel_wrapper_with_a_cached_structure_loads_bit_for_bit(said):
    for result in said("fully_parallel_and_cached"):
        # Kept once it came out equal twice.
        assert result["planned"] == [False, False, True, True]
        assert result["differing"] == []


def test_a_cached_structure_is_dropped_when_the_state_changes(said):
    for rank, result in enumerate(said("a_structure_that_changes")):
        assert result == {"t": [130.0 + rank] * 5, "iteration": 13}


def test_groups_of_one_step_each_get_their_own_common_state_back(said, job):
    for result in said("two_groups_of_one_job"):
        assert result["newest"] == {group: f"{job.base}/groups/{group}/step-3_ckpt" for group in "ab"}
        assert result["both"] == [["a", 3, 3.0], ["b", 3, 103.0]]


def test_a_group_that_saves_on_takes_no_version_from_another(said):
    for result in said("two_groups_of_one_job"):
        assert result["kept"] == [["a", 2, 2.0], ["a", 3, 3.0]]
        assert result["last"] == ["b", 6, 106.0]


@pytest.mark.parametrize(("scenario", "step"), [("more_data_parallel_ranks", 20), ("another_tensor_parallel_size", 30)])
def test_after_a_kill_another_layout_loads_bit_for_bit(said, scenario, step):
    for result in said(scenario, 2):
        assert result["latest"].endswith(f"/step-{step}_ckpt")
        assert result["differing"] == []
        assert result["goes_on_equal"]
        assert result["iteration"] == step


def test_what_cant_be_resharded_is_refused_naming_both_layouts(said):
    for result in said("what_cant_be_resharded", 2):
        ((kind, text),) = result.values()
        assert kind == "TopologyMismatchError"
        assert "world=2 tp=2" in text and "world=4 tp=1" in text


@pytest.mark.parametrize(("start", "ranks"), [(3, 2), (4, 3)])
def test_what_four_ranks_saved_is_loaded_by_fewer_bit_for_bit(said, start, ranks):
    found = said("fewer_ranks_and_another_tensor_parallel_size", start)
    assert len(found) == ranks
    for result in found:
        assert result["latest"].endswith("/step-40_ckpt")
        assert result["differing"] == []
        assert result["goes_on_equal"]
        assert result["iteration"] == 40


@pytest.mark.parametrize(("start", "layout"), [(3, "world=2 tp=1"), (4, "world=3 tp=1")])
def test_what_fewer_ranks_cant_load_is_refused_naming_both_layouts(said, start, layout):
    for result in said("a_sharding_that_fewer_ranks_cant_load", start):
        ((kind, text),) = result.values()
        assert kind == "TopologyMismatchError"
        assert "world=4 tp=2" in text and layout in text
