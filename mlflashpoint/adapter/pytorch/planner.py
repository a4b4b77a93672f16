"""A save planner for DCP that plans once per structure.

DCP's own planner rebuilds, exchanges and checks the plan of every tensor at every save, about 90 us per tensor. Here a
save whose state has the names, types, shapes and layouts of the one before sends two words to the coordinator and gets
two words back; what was agreed then is used again. The comparison is made at every save on every rank, and one rank
that differs sends its whole plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from mlflashpoint.adapter.pytorch.registered import not_serialisable, require_registered
from mlflashpoint.adapter.pytorch.structure import Structure, is_nested
from mlflashpoint.core.nesting import too_deep
from mlflashpoint.errors import PeerError, StateTypeError

_numbers = itertools.count(1)


@dataclass(frozen=True)
class _Agreed:
    """Stands in for a plan: the one that was agreed under this number holds."""

    number: int


@dataclass(frozen=True)
class _Numbered:
    """Planner data of a rank's final plan when it is new: the number that it is agreed under, and the planner's own."""

    number: int
    data: Any


class StructureSavePlanner(DefaultSavePlanner):
    """DCP's default planner (replicated tensors are written by one rank), with the plan kept while the structure holds.

    Use one instance for all saves of one state: it holds the plan. Takes the arguments of ``DefaultSavePlanner``.

    Raises (as DCP does, on all ranks): PeerError if the ranks hold plans of different saves, which can't happen while
    they make the same saves; the next save plans anew. StateTypeError for a nested tensor, and for an object whose type
    is neither plain data nor registered.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop(
            "enable_plan_caching", None
        )  # DCP's own, from torch 2.7 on, which compares plans that it has to make
        super().__init__(*args, **kwargs)
        self._planned: _Planned | None = None
        self._walked: tuple[Structure, list[Any]] | None = None
        self._final_plan: SavePlan | None = None
        self._number = 0
        self._leaves: list[Any] | None = None
        self._unfinished = False
        # Of the coordinator alone: the plans of all ranks as they came, and what they led to.
        self._all_plans: list[SavePlan] = []
        self._agreed: tuple[int, Metadata] | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """As DCP's; raises StateTypeError for a state that contains itself or nests too deep, with the place."""
        try:
            self._set_up(state_dict, storage_meta, is_coordinator)
        except RecursionError as error:
            raise too_deep(state_dict) from error

    def _set_up(self, state_dict: Any, storage_meta: Any, is_coordinator: bool) -> None:
        if self._unfinished:
            # The save before did not get as far as a final plan: other ranks may know another number.
            self._planned = None
        self._unfinished = True
        self._leaves = None if self._planned is None else self._planned.structure.match(state_dict)
        if self._planned is None or self._leaves is None:
            self._planned = None
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self._walked = Structure.of(state_dict)
        else:
            self.is_coordinator = is_coordinator
            self.state_dict = dict(zip(self._planned.fqns, self._leaves, strict=True))

    def create_local_plan(self) -> SavePlan:
        if self._leaves is not None:
            return SavePlan([], planner_data=_Agreed(self._number))
        for fqn, value in self.state_dict.items():
            if is_nested(value):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                raise StateTypeError(
                    f"{fqn!r} is a nested tensor ({kind}), which DCP can't plan",
                    remedy="save what it consists of: its unbind(), or values() and offsets() of a jagged one",
                )
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kept = [isinstance(plan.planner_data, _Agreed) for plan in all_plans]
        if any(kept):
            number = self._agreed[0] if self._agreed else 0
            strange = [
                rank for rank, plan in enumerate(all_plans) if kept[rank] and plan.planner_data != _Agreed(number)
            ]
            if not strange and len(all_plans) != len(self._all_plans):
                self._planned = None
                raise PeerError(
                    f"the plan is one of {len(self._all_plans)} ranks, this save is one of {len(all_plans)}",
                    remedy="save again; use one planner for saves with no_dist, and another one for those without",
                )
            if strange:
                self._planned = None
                raise PeerError(f"ranks {strange} hold a plan of another save", remedy="save again: the plan is remade")
        if all(kept) and self._agreed is not None:
            return list(all_plans), self._agreed[1]
        merged = [
            dataclasses.replace(self._all_plans[rank], storage_data=plan.storage_data) if kept[rank] else plan
            for rank, plan in enumerate(all_plans)
        ]
        plans, metadata = super().create_global_plan(merged)
        number = next(_numbers)
        self._all_plans, self._agreed = merged, (number, metadata)
        numbered = [dataclasses.replace(plan, planner_data=_Numbered(number, plan.planner_data)) for plan in plans]
        return numbered, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if isinstance(new_plan.planner_data, _Agreed) and self._final_plan is not None:
            self.plan = self._final_plan
        else:
            numbered = new_plan.planner_data
            if isinstance(numbered, _Numbered):
                self._number = numbered.number
                new_plan = dataclasses.replace(new_plan, planner_data=numbered.data)
            self.plan = self._final_plan = super().finish_plan(new_plan)
            if self._walked is not None:
                self._planned = _Planned.of(*self._walked, self.state_dict) if isinstance(numbered, _Numbered) else None
            if self._planned is not None:
                self._planned.index(self.plan.items)
        self._walked = None
        self._unfinished = False
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """As DCP's; raises StateTypeError for what it would pickle without anybody having registered its type."""
        if write_item.type is WriteItemType.BYTE_IO:
            require_registered(write_item.index.fqn, object)
        try:
            return super().transform_object(write_item, object)
        except Exception as error:
            raise not_serialisable(write_item.index.fqn, object, error) from error

    def resolve_all(self) -> list[Any] | None:
        """The data of each item of the final plan, in its order; None if a subclass resolves items its own way."""
        kind = type(self)
        overridden = any(
            getattr(kind, name) is not getattr(StructureSavePlanner, name)
            for name in ("resolve_data", "lookup_object", "transform_object")
        )
        if overridden or self._planned is None or self._leaves is None:
            return None
        return self._planned.resolve(self._leaves, self)

    def release(self) -> None:
        """Let go of the state; the plan stays."""
        self._leaves = None
        self.state_dict = {}


class _Planned:
    """A structure together with where in it each item of a plan finds its data."""

    def __init__(self, structure: Structure, fqns: list[str]) -> None:
        self.structure = structure
        self.fqns = fqns
        self._sources: list[tuple[int, WriteItem]] = []

    @classmethod
    def of(cls, structure: Structure, leaves: list[Any], flat: Mapping[str, Any]) -> _Planned | None:
        """Name each leaf by its fully qualified name in the flattened state; None if they can't be told apart."""
        if not structure.is_comparable:
            return None
        names: dict[int, list[str]] = {}
        for fqn, value in reversed(list(flat.items())):
            names.setdefault(id(value), []).append(fqn)
        fqns = []
        for leaf in leaves:
            # Equal small values and tied tensors are one object under several names, met in the same order.
            candidates = names.get(id(leaf))
            if not candidates:
                return None
            fqns.append(candidates.pop())
        return None if any(names.values()) else cls(structure, fqns)

    def index(self, items: list[WriteItem]) -> None:
        places = {fqn: place for place, fqn in enumerate(self.fqns)}
        self._sources = [(places[item.index.fqn], item) for item in items]

    def resolve(self, leaves: list[Any], planner: DefaultSavePlanner) -> list[Any]:
        data: list[Any] = []
        for place, item in self._sources:
            leaf = leaves[place]
            if item.type is WriteItemType.BYTE_IO:
                data.append(planner.transform_object(item, leaf))
            elif type(leaf) is DTensor:
                data.append(leaf._local_tensor)
            elif isinstance(leaf, ShardedTensor):
                data.append(planner.resolve_data(item))
            else:
                data.append(leaf)
        return data
