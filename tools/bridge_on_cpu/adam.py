"""Adam with the interface and the state layout of apex' and Transformer Engine's FusedAdam, in plain torch.

Megatron's distributed optimizer can't reload torch's own Adam (its per-parameter ``step`` makes it assert on resume);
in production it runs on the fused kernel, whose step is one number per parameter group.
"""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **unused: Any,
    ) -> None:
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param.data)
                    state["exp_avg_sq"] = torch.zeros_like(param.data)
                grad = param.grad.to(param.dtype)
                if self.adam_w_mode:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    grad = grad + group["weight_decay"] * param
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
                param.addcdiv_(state["exp_avg"] / correction1, denominator, value=-group["lr"])


def install() -> None:
    """Set the module globals that an installed apex would have set."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.Adam = FusedAdam
    distributed.HAVE_APEX_OR_TE = True
    if hasattr(distributed, "USING_APEX_OPTIMIZER"):
        distributed.USING_APEX_OPTIMIZER = True
