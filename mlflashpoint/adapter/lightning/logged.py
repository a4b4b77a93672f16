"""What a fit has logged so far, as plain data: the last metrics, and the means of the epoch that is under way.

Lightning's checkpoints leave it out. Whoever looks at a metric later than at the batch that has logged it (schedulers,
early stopping, the best checkpoint) would find nothing after a resume, or the mean over a part of the epoch.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_log = logging.getLogger(__name__)

#: fields of a logged value's description; its reduction is kept by name
_FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def capture(trainer: Any) -> dict[str, Any] | None:
    """The metrics of this rank, None if they can't be told.

    ``whole`` tells whether the epoch's means are all there. What a torchmetrics object has gathered is its own affair,
    and so is a mean over a process group of the recipe's.
    """
    try:
        return _capture(trainer)
    except Exception as error:  # a release, or a recipe, that keeps them another way: no reason to lose the save
        _log.debug("what was logged is not saved: %s: %s", type(error).__name__, error)
        return None


def _capture(trainer: Any) -> dict[str, Any]:
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    # Outside of a batch this would compute the means, together with the other ranks.
    within_batch = trainer.training and connector._first_loop_iter is not None
    metrics = dict(trainer.callback_metrics if within_batch else connector._callback_metrics)
    valid = {key: one for key, one in results.items() if not one.has_reset}
    kept = {key: one for key, one in valid.items() if _is_plain(one)}
    values: list[Any] = [*metrics.values()]
    for one in kept.values():
        values += [one.value, getattr(one, "cumulated_batch_size", None), one._forward_cache]
    numbers = iter(_numbers(values))
    return {
        "metrics": {name: next(numbers) for name in metrics},
        "results": {key: [_described(one), next(numbers), next(numbers), next(numbers)] for key, one in kept.items()},
        "first_batch": connector._first_loop_iter,
        "hook": connector._current_fx,
        "whole": all(key in kept or not one.meta.on_epoch for key, one in valid.items()),
    }


def restore(trainer: Any, logged: Mapping[str, Any]) -> None:
    """Put back what ``capture`` gave, before the first batch."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    device = trainer.strategy.root_device
    found = {name: _tensor(number, device) for name, number in logged["metrics"].items()}
    connector._callback_metrics.update({name: value for name, value in found.items() if value is not None})
    kinds = importlib.import_module(type(results).__module__)
    for key, (description, value, count, last) in logged["results"].items():
        fields = {name: description[name] for name in _FIELDS}
        meta = kinds._Metadata(**fields, reduce_fx=description["reduce"])
        meta.sync = kinds._Sync(
            _should=description["sync"], fn=trainer.strategy.reduce, rank_zero_only=description["rank_zero_only"]
        )
        one = kinds._ResultMetric(meta, True)
        one.value = _tensor(value, device)
        if count is not None:
            one.cumulated_batch_size = _tensor(count, device)
        one._forward_cache = _tensor(last, device)
        # torchmetrics warns of a mean that is asked for before anything was added
        one._update_count = 1
        results[key] = one.to(device)
    connector._first_loop_iter, connector._current_fx = logged["first_batch"], logged["hook"]


def _is_plain(one: Any) -> bool:
    # Lightning takes Python's own max, min and sum too, and tells them from torch's.
    return bool(
        one.is_tensor
        and one.meta.sync.group is None
        and one.meta.reduce_fx is getattr(torch, one.meta.reduce_fx.__name__, None)
    )


def _described(one: Any) -> dict[str, Any]:
    meta = one.meta
    described = {name: getattr(meta, name) for name in _FIELDS}
    return {
        **described,
        "reduce": meta.reduce_fx.__name__,
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
    }


def _numbers(values: Iterable[Any]) -> list[Any]:
    """``[dtype, value]`` of each tensor of one element, None for anything else; they leave their device at once."""
    listed = [value if isinstance(value, torch.Tensor) and value.numel() == 1 else None for value in values]
    usable = [value.detach().reshape(()).double() for value in listed if value is not None]
    together = len({value.device for value in usable}) == 1
    numbers = iter(torch.stack(usable).tolist() if together else [value.item() for value in usable])
    return [None if value is None else [str(value.dtype).removeprefix("torch."), next(numbers)] for value in listed]


def _tensor(number: Any, device: torch.device) -> torch.Tensor | None:
    if number is None:
        return None
    dtype, value = number
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device)
