"""Copies between an accelerator and host memory: the one module that knows CUDA.

A slot is page-locked the first time that a CUDA tensor is saved into it, so that the device writes into the store
directly. Where that is refused the same copies run through pageable memory: slower, and right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger("mlflashpoint.core")


class Accelerator(Protocol):
    """Copies between devices of one type and host memory, in the background of the calling thread."""

    def pin(self, region: Tensor) -> bool:
        """Prepare host memory, a uint8 tensor, for fast copies; False if that is refused, which changes nothing."""

    def unpin(self, region: Tensor) -> None:
        """Undo ``pin``, before the memory is unmapped."""

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor], device: torch.device) -> None:
        """Begin to copy each source into the target of the same shape and dtype; one side is on ``device``.

        What the device was given to do before is done before. Both sides must live until ``wait`` returns, and sources
        stay unchanged.
        """

    def wait(self) -> None:
        """Return when all copies that were begun are done."""


class Cuda:
    """CUDA, and what calls itself so: copies on a side stream of each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: list[torch.cuda.Event] = []

    def pin(self, region: Tensor) -> bool:
        """Page-lock host memory; False, with one log line, if the driver refuses."""
        error = int(_runtime().cudaHostRegister(region.data_ptr(), region.numel(), 0))
        if error == 0:
            return True
        log.warning(
            "a slot of %d bytes can't be page-locked (CUDA error %d): saves from the GPU are slower; "
            "raise the limit of locked memory (ulimit -l)",
            region.numel(),
            error,
        )
        _forget_error()
        return False

    def unpin(self, region: Tensor) -> None:
        if int(_runtime().cudaHostUnregister(region.data_ptr())) != 0:
            _forget_error()

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor], device: torch.device) -> None:
        with torch.cuda.device(device):
            side = self._streams.get(device)
            if side is None:
                side = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            try:
                with torch.cuda.stream(side), torch.no_grad():
                    for target, source in zip(targets, sources, strict=True):
                        target.copy_(source, non_blocking=True)
            finally:
                event.record(side)
                self._events.append(event)

    def wait(self) -> None:
        events, self._events = self._events, []
        for event in events:
            event.synchronize()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    # The driver's refusal stays behind as this thread's last error, and the job's next kernel launch would raise it. So
    # we launch one, and take the error.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        log.debug("the error of page-locking was taken back")
