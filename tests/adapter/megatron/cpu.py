"""Lets Megatron-Core run on a machine without a GPU: what it asks of CUDA is answered by the CPU.

Only devices, streams, generators and the backend's name are changed; no checkpointing code is replaced.
"""

import contextlib
import inspect
import os

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(device):
    if isinstance(device, bool) or device is None:
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], torch.dtype) and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Nothing:
    """A stream, an event or a device guard that has nothing to do."""

    def __init__(self, *args, **kwargs):
        self.device, self.cuda_stream = CPU, 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def __getattr__(self, name):
        if name == "query":
            return lambda *a, **k: True
        if name == "elapsed_time":
            return lambda *a, **k: 0.0
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: self


class _Properties:
    name, major, minor, multi_processor_count, total_memory = "cpu", 9, 0, 1, 8 << 30


_mode = None


def install():
    """May be called twice; must come before megatron is imported."""
    global _mode
    if _mode is not None:
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda, generator = torch.cuda, torch.default_generator
    answers = {
        "current_device": 0, "set_device": None, "synchronize": None, "empty_cache": None, "device_count": 1,
        "get_device_capability": (9, 0), "get_device_properties": _Properties(), "get_device_name": "cpu",
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "reset_peak_memory_stats": None, "memory_stats": {}, "mem_get_info": (8 << 30, 8 << 30), "set_stream": None,
        "_lazy_init": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, lambda *a, _answer=answer, **k: _answer)
    cuda._lazy_call = lambda call, **k: call()
    cuda.random._lazy_init, cuda.random._lazy_call = cuda._lazy_init, cuda._lazy_call
    # Everything random draws from the CPU's generator, so that saving and restoring it is real.
    cuda.default_generators = (generator,) * 8
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *a, **k: generator.get_state()
        module.set_rng_state = lambda state, *a, **k: generator.set_state(state.cpu())
        module.manual_seed = lambda seed: generator.manual_seed(int(seed))
        module.manual_seed_all = lambda seed: None
        module.initial_seed = lambda: generator.initial_seed()
    cuda.Stream = cuda.Event = cuda.device = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *a, **k: _Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a, **k: None
    torch.nn.Module.cuda = lambda self, *a, **k: self
    for name in ("init_process_group", "new_group"):
        original = getattr(dist, name)

        def on_gloo(*args, _original=original, **kwargs):
            bound = inspect.signature(_original).bind(*args, **kwargs).arguments
            if "nccl" in str(bound.get("backend") or "nccl"):
                bound["backend"] = "gloo"
            bound.pop("device_id", None)
            bound.pop("pg_options", None)
            return _original(**bound)

        setattr(dist, name, on_gloo)
    _mode = _OnTheCpu()
    _mode.__enter__()


class Adam(torch.optim.Optimizer):
    """Adam with the state layout of a fused one, which the distributed optimizer needs to be loaded into."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **ignored):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                grad = param.grad.to(param.dtype)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                spread = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                param.addcdiv_(mean, spread, value=-group["lr"])


def use_adam():
    """Hand our Adam to Megatron-Core where an installed apex would put its own."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    optimizer.Adam = distributed.Adam = Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = True
    if hasattr(distributed, "USING_APEX_OPTIMIZER"):
        distributed.USING_APEX_OPTIMIZER = True
