"""Send to the CPU what is asked of ``cuda``, and to gloo what is asked of NCCL.

``torch.cuda.is_available()`` stays False: Bridge is told so by its own ``allow_no_cuda``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs.get("dtype"):
            # Megatron's optimizers accept a parameter by this name.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    cuda_stream = stream_id = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Properties:
    name = "cpu"
    major, minor = 9, 0
    multi_processor_count = 1
    total_memory = 8 << 30


_GIVEN: dict[str, Any] = {
    "current_device": 0,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "get_device_capability": (9, 0),
    "get_device_properties": _Properties(),
    "get_device_name": "cpu",
    "max_memory_allocated": 0,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "reset_peak_memory_stats": None,
    "memory_stats": {},
    "mem_get_info": (8 << 30, 8 << 30),
    "stream": contextlib.nullcontext(),
    "set_stream": None,
    "device": contextlib.nullcontext(),
    "_lazy_init": None,
}


def _given(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _gloo(create: Callable[..., Any], first_is_backend: bool) -> Callable[..., Any]:
    @functools.wraps(create)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[0] if args and first_is_backend else None)
        if backend is None or "nccl" in str(backend):
            kwargs["backend"] = "gloo"
            args = args[1:] if first_is_backend else args
        for name in ("device_id",) if first_is_backend else ("device_id", "pg_options"):
            kwargs.pop(name, None)
        return create(*args, **kwargs)

    return wrapped


_mode: _OnCpu | None = None


def install() -> None:
    global _mode
    if _mode is not None:
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda, generator = torch.cuda, torch.default_generator
    for name, value in _GIVEN.items():
        setattr(cuda, name, _given(value))
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _given(None)
    cuda.default_generators = (generator,) * 8
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.random._lazy_init, cuda.random._lazy_call = cuda._lazy_init, cuda._lazy_call
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: generator.get_state()
        module.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state.cpu())
        module.manual_seed = lambda seed: generator.manual_seed(int(seed))
        # torch.manual_seed() has seeded this very generator already.
        module.manual_seed_all = _given(None)
        module.initial_seed = lambda: generator.initial_seed()
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    dist.init_process_group = _gloo(dist.init_process_group, True)
    dist.new_group = _gloo(dist.new_group, False)
    dist.new_subgroups_by_enumeration = _gloo(dist.new_subgroups_by_enumeration, False)
    _mode = _OnCpu()
    _mode.__enter__()
