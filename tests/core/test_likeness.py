import pytest
import torch
from torch.nn import Parameter

from mlflashpoint.core import likeness
from mlflashpoint.core.flatten import flatten
from mlflashpoint.core.likeness import Likeness
from mlflashpoint.errors import StateTypeError


@pytest.fixture(params=["torch's guard", "fact by fact"], autouse=True)
def way(request, monkeypatch):
    if request.param == "fact by fact":
        monkeypatch.setattr(likeness, "_guard_of", lambda tensors: None)
    elif not Likeness([torch.ones(1)]).holds([torch.ones(1)]):
        pytest.skip("this torch has no such guard")


def state(**changes):
    torch.manual_seed(0)
    tied = torch.arange(6.0).reshape(2, 3)
    return {
        "w": torch.randn(4, 6),
        "p": Parameter(torch.randn(3)),
        "c": torch.randn(3, dtype=torch.complex64),
        "empty": torch.empty(0),
        "tied": [tied, tied.view(2, 3)],
        "step": 1,
        **changes,
    }


@pytest.mark.parametrize("grads", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_other_tensors_of_the_same_facts_have_the_form_of_the_earlier_ones(grads):
    first, second = state(), state(step=2)
    like = flatten(first).form
    with grads():
        assert flatten(second, like=like).form is like
        assert flatten(first, like=like).form is like


@pytest.mark.parametrize(
    "changes",
    [
        {"w": torch.randn(6, 4)},
        {"w": torch.randn(6, 4).t()},
        {"w": torch.randn(4, 6, dtype=torch.float64)},
        {"w": torch.randn(4, 6).requires_grad_()},
        {"w": torch._neg_view(torch.randn(4, 6))},
        {"w": Parameter(torch.randn(4, 6))},
        {"w": torch.randn(4, 6).to_sparse()},
        {"p": Parameter(torch.randn(3), requires_grad=False)},
        {"c": torch.randn(3, dtype=torch.complex64).conj()},
        {"empty": torch.empty(0, 2)},
        {"tied": [torch.ones(2, 3), torch.ones(2, 3)]},
    ],
    ids=["shape", "stride", "dtype", "grad", "neg", "parameter", "sparse", "no grad", "conj", "empty", "untied"],
)
def test_what_differs_in_one_fact_has_a_form_of_its_own(changes):
    like = flatten(state()).form
    assert flatten(state(**changes), like=like).form is not like


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["w"].t_(),
        lambda state: state["w"].resize_(2, 6),
        lambda state: state["w"].requires_grad_(),
        lambda state: state["w"].as_strided_((4, 6), (1, 4)),
        lambda state: state["tied"][1].t_(),
        lambda state: state["tied"][1].requires_grad_(),
        lambda state: state["tied"].__setitem__(1, state["tied"][1].clone()),
    ],
    ids=["turned", "shrunk", "grad", "strided", "tied turned", "tied grad", "untied"],
)
def test_a_tensor_that_was_changed_in_place_is_noticed_at_the_same_address(change):
    seen = state()
    like = flatten(seen).form
    change(seen)
    assert flatten(seen, like=like).form is not like


def test_one_tensor_in_two_places_that_held_two_is_tied():
    like = flatten([torch.ones(3), torch.ones(3)]).form
    shared = torch.ones(3)
    again = flatten([shared, shared], like=like)
    assert again.form is not like and len(again.tensors) == 1


def test_a_nested_tensor_is_refused_after_an_ordinary_one_too():
    like = flatten({"v": torch.ones(3)}).form
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for form in (like, None):
        with pytest.raises(StateTypeError, match=r"state\.v: a nested tensor"):
            flatten({"v": nested}, like=form)
