"""A rank's part of a Megatron-Core sharded state dict as plain data, and back into one of the same layout.

The library's own save deduplicates over the ranks and writes where others can read it. Here each rank keeps what it
holds, replicas included, so that a save moves no byte between ranks and a resume needs none from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mlflashpoint.core.nesting import too_deep
from mlflashpoint.errors import StateMismatchError

_SHOWN = 3


def split(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Take ``checkpoint`` apart.

    Returns:
        ``common``: what is not sharded; ``tensors``: local tensors by shard id; ``objects``: local objects by shard id;
        ``of_model``: how many of them are the model's. The tensors are the live ones.

    Raises:
        StateTypeError: ``checkpoint`` contains itself or nests too deep; names the place.
    """
    try:
        return _split(checkpoint)
    except RecursionError as error:
        raise too_deep(checkpoint) from error


def _split(checkpoint: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    sharded, common = save_preprocess(checkpoint, False)
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {}
    for shard in _shards(sharded):
        if not _is_tensor(shard):
            objects[_id(shard)] = shard.data
        elif shard.data is not None:
            tensors[_id(shard)] = shard.data.detach()
    of_model = len({_id(shard) for shard in _shards(sharded.get("sharded_state_dict", {}))})
    return {"common": common, "tensors": tensors, "objects": objects, "of_model": of_model}


@torch.no_grad()
def join(stored: Mapping[str, Any], template: dict[str, Any]) -> dict[str, Any]:
    """What loading from a folder would give: ``template`` with this rank's data in the place of its shards.

    Where the template holds a tensor of the model or the optimizer, the data are copied into that tensor, so that no
    second copy of the state ever lies in device memory.

    Raises:
        StateMismatchError: the template asks for shards that are not stored, or of another shape.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factory_merges
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    sharded, nonpersistent, factories = load_preprocess(template)
    # what else the template holds is told by ``common``
    sharded, _ = extract_sharded_base(sharded)
    _check(stored, sharded)

    def fill(value: Any) -> Any:
        if not isinstance(value, ShardedBase):
            return value
        if not _is_tensor(value):
            return stored["objects"][_id(value)]
        source, target = stored["tensors"][_id(value)], value.data
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            return source
        target.detach().copy_(source)
        return target

    dict_list_map_inplace(fill, sharded)
    merged = merge(merge(dict(stored["common"]), nonpersistent), sharded)
    joined: dict[str, Any] = apply_factory_merges(merged, factories)
    return joined


def check(stored: Mapping[str, Any], model: dict[str, Any]) -> None:
    """Check that the sharded state dict of a model has the shards that are stored, no more and no less.

    Raises:
        StateMismatchError: names the first shards that differ.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    sharded = load_preprocess(model)[0]
    _check(stored, sharded)
    present = len({_id(shard) for shard in _shards(sharded)})
    if present != stored["of_model"]:
        raise StateMismatchError(
            f"{stored['of_model']} shards of the model are stored on this rank, the model has {present}",
            remedy="restart with what was saved, or give the changed job another MLFLASHPOINT_JOB_ID",
        )


def _check(stored: Mapping[str, Any], sharded: Mapping[str, Any]) -> None:
    found = []
    for shard in _shards(sharded):
        name = _id(shard)
        if name not in stored["tensors" if _is_tensor(shard) else "objects"]:
            found.append(f"{shard.key} is not in the store in this place")
        elif _is_tensor(shard) and shard.data is not None:
            one, other = stored["tensors"][name], shard.data
            if one.shape != other.shape:
                found.append(f"{shard.key} is {list(one.shape)} in the store, {list(other.shape)} in the model")
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise StateMismatchError(
            f"the model or its layout has changed: {'; '.join(found[:_SHOWN])}{more}",
            remedy="restart with what was saved, or give the changed job another MLFLASHPOINT_JOB_ID",
        )


def _shards(sharded: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    return (value for value in nested_values(sharded) if isinstance(value, ShardedBase))


def _is_tensor(shard: Any) -> bool:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return isinstance(shard, ShardedTensor)


def _id(shard: Any) -> str:
    """Names a shard's place in the global tensor or object; equal for the replicas of one shard."""
    part = getattr(shard, "flattened_range", None)
    where = "" if part is None else f"|{part.start}-{part.stop}"
    return f"{shard.key}|{','.join(map(str, shard.global_offset))}{where}"
