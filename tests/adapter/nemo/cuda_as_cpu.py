"""Lets NeMo and Megatron-Core run on a CPU: what they ask of ``cuda`` goes to the CPU, and NCCL becomes gloo.

Nothing of ours is involved. ``install`` comes before NeMo is imported, ``after_import`` behind it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _to_cpu(value: Any) -> Any:
    if type(value) is int:
        return _CPU
    kind = value.type if isinstance(value, torch.device) else value
    return _CPU if isinstance(kind, str) and kind.startswith("cuda") else value


class _Redirect(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            # Megatron's optimizers know a parameter by this name
            return function(*args).replace("torch.", "torch.cuda.", 1)
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if function is torch.Tensor.to:
            args = tuple(map(_to_cpu, args))
        return function(*args, **kwargs)


class _Quiet:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: True


def install() -> None:
    """Redirect ``torch.cuda`` in this process, for good."""
    cuda, generator = torch.cuda, torch.default_generator
    properties = types.SimpleNamespace(major=9, minor=0, total_memory=8 << 30, multi_processor_count=1, name="cpu")
    given: dict[str, Any] = {
        "current_device": 0,
        "is_initialized": True,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": "cpu",
        "mem_get_info": (8 << 30, 8 << 30),
        "memory_stats": {},
        "stream": contextlib.nullcontext(),
        "device": contextlib.nullcontext(),
    }
    nothing = ("set_device", "empty_cache", "synchronize", "_lazy_init", "manual_seed_all", "set_stream")
    for name, value in [*given.items(), *((name, None) for name in nothing)]:
        setattr(cuda, name, lambda *args, _value=value, **kwargs: _value)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.Stream = cuda.Event = _Quiet
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Quiet()
    cuda.default_generators = (generator,) * 8
    cuda._lazy_call = lambda call, **kwargs: call()
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: generator.get_state()
        module.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
        module.manual_seed = lambda seed: generator.manual_seed(int(seed))
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor", "DoubleTensor"):
        setattr(cuda, name, getattr(torch, name))
    _Redirect().__enter__()


def absent(*modules: str) -> None:
    """Let modules that only drag in what the CPU can't have be empty packages."""
    for name in modules:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = _nothing  # type: ignore[method-assign]


def _nothing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: None


def after_import() -> None:
    """What NeMo and Megatron-Core, once imported, have to do otherwise."""
    import nemo.lightning.io.pl
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from nemo.lightning.callback_group import CallbackGroup

    nemo.lightning.io.pl._fix_tensors_device = lambda checkpoint: checkpoint
    # its telemetry wants a configuration that only nemo.collections.llm makes
    CallbackGroup.get_instance()._callbacks = []
    # With parameters in fp32 its main parameters are views of them; in production they are tensors of their own.
    DistributedOptimizer.load_state_dict = torch.no_grad()(DistributedOptimizer.load_state_dict)
