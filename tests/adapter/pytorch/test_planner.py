"""The planner plans once per structure, and anew whenever anything that a plan depends on has changed."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from mlflashpoint.adapter.pytorch.planner import StructureSavePlanner
from mlflashpoint.errors import PeerError, StateTypeError


def state(width=4, **more):
    return {
        "model": {"w": torch.randn(width, 3), "b": torch.zeros(3)},
        "opt": [{"m": torch.ones(2)}],
        "step": 7,
        **more,
    }


def plan(planners, states):
    """One save's planning on several ranks, as DCP drives it; the coordinator is rank 0."""
    for rank, (planner, content) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(content, None, rank == 0)
    local = [planner.create_local_plan() for planner in planners]
    final, metadata = planners[0].create_global_plan(local)
    return local, [p.finish_plan(f) for p, f in zip(planners, final, strict=True)], metadata


def test_the_first_plan_is_the_default_planners():
    ours, theirs = [StructureSavePlanner()], [DefaultSavePlanner()]
    content = state()
    _, final, metadata = plan(ours, [content])
    _, expected, expected_metadata = plan(theirs, [content])
    assert final == expected
    assert metadata == expected_metadata


def test_an_equal_structure_sends_no_items_and_keeps_plan_and_metadata():
    planner = StructureSavePlanner()
    _, (first,), metadata = plan([planner], [state()])
    local, (second,), again = plan([planner], [state()])
    assert local[0].items == []
    assert second is first
    assert again is metadata


def test_data_resolved_by_structure_is_what_the_default_planner_resolves():
    planner = StructureSavePlanner()
    plan([planner], [state(blob=[1, "x"])])
    content = state(blob=[2, "y"])
    _, (final,), _ = plan([planner], [content])
    reference = DefaultSavePlanner()
    reference.set_up_planner(content, None, True)
    resolved = planner.resolve_all()
    assert len(resolved) == len(final.items) == 5
    for item, data in zip(final.items, resolved, strict=True):
        expected = reference.resolve_data(item)
        if isinstance(data, io.BytesIO):
            assert data.getvalue() == expected.getvalue()
        else:
            assert data.data_ptr() == expected.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["model"].update(w=torch.randn(5, 3)),
        lambda s: s["model"].update(w=torch.randn(4, 3, dtype=torch.float64)),
        lambda s: s["model"].update(w=[1, 2]),
        lambda s: s["model"].update(new=torch.ones(1)),
        lambda s: s["model"].pop("b"),
        lambda s: s["model"].update(b=s["model"].pop("b"), w=s["model"].pop("w")),
        lambda s: s["opt"].append({"m": torch.ones(2)}),
        lambda s: s.update(step=torch.tensor(7)),
        lambda s: s["model"]["w"].requires_grad_(),
    ],
    ids=["shape", "dtype", "kind", "added", "removed", "reordered", "longer list", "leaf to tensor", "requires_grad"],
)
def test_a_changed_structure_is_planned_anew(change):
    planner = StructureSavePlanner()
    plan([planner], [state()])
    plan([planner], [state()])
    content = state()
    change(content)
    local, (final,), metadata = plan([planner], [content])
    _, (expected,), expected_metadata = plan([DefaultSavePlanner()], [content])
    assert local[0].items
    assert final == expected
    assert metadata == expected_metadata


def test_one_changed_rank_makes_a_new_plan_for_all_with_the_others_kept():
    planners = [StructureSavePlanner(), StructureSavePlanner()]
    plan(planners, [state(), {"own": torch.ones(3), **state()}])
    changed = [state(), {"own": torch.ones(8), **state()}]
    local, final, metadata = plan(planners, changed)
    assert local[0].items == [] and local[1].items
    _, expected, expected_metadata = plan([DefaultSavePlanner(), DefaultSavePlanner()], changed)
    assert final == expected
    assert metadata == expected_metadata
    assert len(planners[0].resolve_all()) == len(final[0].items)


def test_replicated_tensors_are_written_by_one_rank():
    planners = [StructureSavePlanner(), StructureSavePlanner()]
    shared = state()
    for _ in range(2):
        _, final, _ = plan(planners, [shared, shared])
        written = [item.index for part in final for item in part.items]
        assert len(written) == len(set(written)) == 4


def test_a_save_that_failed_in_between_is_planned_anew():
    planner = StructureSavePlanner()
    plan([planner], [state()])
    planner.set_up_planner(state(), None, True)
    planner.create_local_plan()
    local, _, _ = plan([planner], [state()])
    assert local[0].items


def test_a_coordinator_without_the_plan_refuses_and_the_next_save_heals():
    planners = [StructureSavePlanner(), StructureSavePlanner()]
    plan(planners, [state(), state()])
    planners[0] = StructureSavePlanner()
    for rank, planner in enumerate(planners):
        planner.set_up_planner(state(), None, rank == 0)
    local = [planner.create_local_plan() for planner in planners]
    with pytest.raises(Exception, match="another save"):
        planners[0].create_global_plan(local)
    _, final, _ = plan(planners, [state(), state()])
    assert sum(len(part.items) for part in final) == 4


def test_a_plan_of_one_rank_is_not_taken_for_that_of_all_and_the_next_save_heals():
    planners = [StructureSavePlanner(), StructureSavePlanner()]
    for rank, planner in enumerate(planners):
        plan([planner], [state()])
        planner.set_up_planner(state(), None, rank == 0)
    with pytest.raises(PeerError, match=r"one of 1 ranks, this save is one of 2.*no_dist"):
        planners[0].create_global_plan([planner.create_local_plan() for planner in planners[:1]] * 2)
    _, final, _ = plan(planners, [state(), state()])
    assert sum(len(part.items) for part in final) == 4


def test_a_subclass_that_resolves_its_own_way_is_asked_item_by_item():
    class Halving(StructureSavePlanner):
        def transform_object(self, write_item, object):
            return object.half() if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)

    planner = Halving()
    plan([planner], [state()])
    plan([planner], [state()])
    assert planner.resolve_all() is None


def test_it_serves_dcp_itself(tmp_path):
    planner = StructureSavePlanner()
    for step in range(3):
        content = state(step=step)
        dcp.save(content, checkpoint_id=tmp_path / str(step), planner=planner)
        loaded = state(step=-1)
        dcp.load(loaded, checkpoint_id=tmp_path / str(step))
        assert loaded["step"] == step
        assert torch.equal(loaded["model"]["w"], content["model"]["w"])


def test_an_unset_plan_is_no_agreement():
    planner = StructureSavePlanner()
    planner.set_up_planner(state(), None, True)
    planner.create_local_plan()
    assert planner.finish_plan(SavePlan([])).items == []
    planner.set_up_planner(state(), None, True)
    assert planner.create_local_plan().items


def test_errors_reach_dcp_as_its_own(tmp_path):
    class Broken(StructureSavePlanner):
        def create_global_plan(self, all_plans):
            raise ValueError("no plan")

    with pytest.raises(CheckpointException, match="no plan"):
        dcp.save(state(), checkpoint_id=tmp_path, planner=Broken())


@pytest.mark.parametrize("planned_before", [False, True])
def test_a_state_that_nests_too_deep_is_refused_by_its_place(planned_before):
    planner = StructureSavePlanner()
    if planned_before:
        plan([planner], [state()])
    deep = torch.ones(1)
    for _ in range(3000):
        deep = {"k": deep}
    with pytest.raises(
        StateTypeError, match=r"^state\.deep\.k\.k\.k\.\.\. \(3000 parts\): the state is nested too deep"
    ):
        planner.set_up_planner(state(deep=deep), None, True)


def test_a_state_that_contains_itself_is_refused_by_the_place_where_it_does():
    content = state()
    content["opt"][0]["all"] = content["opt"]
    with pytest.raises(StateTypeError, match=r"^state\.opt\[0\]\.all: the state contains itself"):
        StructureSavePlanner().set_up_planner(content, None, True)
