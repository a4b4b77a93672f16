"""FSDPStrategy and ModelParallelStrategy: each rank stores the local shards that it has, and nothing is gathered.

The parameters outside forward and backward, and the optimizer's own state, are this rank's part already; for DTensors
it is their local tensor. So a save moves no byte between ranks. It fits the same number of ranks and the same layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mlflashpoint.adapter.lightning.dump import completed, dump
from mlflashpoint.adapter.lightning.kinds import diverted
from mlflashpoint.adapter.lightning.mismatch import compare
from mlflashpoint.core.nesting import too_deep
from mlflashpoint.errors import StateMismatchError

#: FSDP's wrapper module, which the names of a model's parameters contain
_FSDP_PREFIX = "_fsdp_wrapped_module."
#: marks the local tensor of a DTensor in the stored optimizer state
_LOCAL = "dtensor-local"


class LocalShards:
    """See the module; implements StateKind."""

    replicated = False

    def topology(self, trainer: Any) -> str:
        strategy = trainer.strategy
        mesh = getattr(strategy, "_device_mesh", None)
        shape = "" if mesh is None else f"/{','.join(map(str, mesh.mesh.shape))}"
        return f"lightning/{type(strategy).__name__}/{getattr(strategy, 'sharding_strategy', '')}{shape}"

    def capture(self, trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        strategy = trainer.strategy
        with diverted(
            strategy,
            lightning_module_state_dict=lambda: local_tensors(strategy.model),
            optimizer_state=lambda optimizer: _localized(_unwrapped(optimizer).state_dict()),
        ):
            return {"checkpoint": dump(trainer), "extra": extra_state(strategy.model)}, {}

    def check(self, trainer: Any, state: Mapping[str, Any]) -> None:
        strategy = trainer.strategy
        if strategy.model is None:
            return
        compare(state["checkpoint"]["state_dict"], local_tensors(strategy.model), dtypes=True)
        saved = [[len(g["params"]) for g in o["param_groups"]] for o in state["checkpoint"]["optimizer_states"]]
        present = [[len(g["params"]) for g in o.param_groups] for o in strategy.optimizers]
        if saved != present:
            raise StateMismatchError(
                f"the optimizers have changed: parameters per group were {saved}, they are {present}",
                remedy="restart with the optimizers that were saved, or give the job another MLFLASHPOINT_JOB_ID",
            )

    @contextlib.contextmanager
    def serving(self, trainer: Any, state: Mapping[str, Any], attributes: Mapping[str, Any]) -> Iterator[None]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> dict[str, Any]:
            restore(trainer.strategy, state)
            return completed(trainer, state["checkpoint"])

        with diverted(trainer.strategy, load_checkpoint=load_checkpoint):
            yield

    def side_files(self, trainer: Any, base: str, group: str) -> None:
        return None


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The local part of every parameter and persistent buffer, by the name that it has without FSDP's wrappers."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found[_plain(name)] = _local(parameter.detach())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[_plain(f"{prefix}.{name}" if prefix else name)] = _local(buffer.detach())
    return found


def extra_state(model: torch.nn.Module) -> dict[str, Any]:
    """What ``get_extra_state`` of the modules that have one of their own gives, by module name."""
    return {_plain(f"{name}."): module.get_extra_state() for name, module in _with_extra_state(model)}


@torch.no_grad()
def restore(strategy: Any, state: Mapping[str, Any]) -> None:
    """Copy this rank's part, which ``LocalShards.check`` has accepted, back into the model and the optimizers."""
    present = local_tensors(strategy.model)
    for name, stored in state["checkpoint"]["state_dict"].items():
        present[name].copy_(stored)
    for name, module in _with_extra_state(strategy.model):
        if _plain(f"{name}.") in state["extra"]:
            module.set_extra_state(state["extra"][_plain(f"{name}.")])
    for optimizer, stored in zip(strategy.optimizers, state["checkpoint"]["optimizer_states"], strict=True):
        optimizer.load_state_dict(_distributed(stored, optimizer))


def _with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    default = torch.nn.Module.get_extra_state
    return ((name, module) for name, module in model.named_modules() if type(module).get_extra_state is not default)


def _plain(name: str) -> str:
    return name.replace(_FSDP_PREFIX, "")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "_optimizer", optimizer)


def _localized(state: dict[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        return {_LOCAL: value.to_local()} if isinstance(value, DTensor) else value

    try:
        return {**state, "state": _map_leaves(state["state"], convert)}
    except RecursionError as error:
        raise too_deep(state["state"], root="the optimizer's state: ") from error


def _distributed(stored: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The inverse of ``_localized``: a state tensor is laid out over the ranks as its parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in stored["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))

    def per_parameter(number: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        owner = owners[number]

        def convert(value: Any) -> Any:
            if not (isinstance(value, dict) and set(value) == {_LOCAL}):
                return value
            return DTensor.from_local(
                value[_LOCAL].to(owner.device),
                owner.device_mesh,
                owner.placements,
                run_check=False,
                shape=owner.shape,
                stride=owner.stride(),
            )

        return {name: convert(value) for name, value in values.items()}

    return {**stored, "state": {number: per_parameter(number, values) for number, values in stored["state"].items()}}


def _map_leaves(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _map_leaves(item, convert) for name, item in value.items()}
    return convert(value)
