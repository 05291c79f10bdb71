"""LAMB as most packages write it, a Python loop over the tensors in plain torch, and as LAMBrrr does, compiled."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from tempfile import mkdtemp

import torch
from torch import Tensor
from torch.optim import Optimizer

BETA1, BETA2, EPS = 0.9, 0.999, 1e-6

Step = Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor, float, float], None]


def loop(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Tensor,
    lr: float,
    weight_decay: float,
) -> None:
    """Update each parameter in turn, operation by operation as timm's Lamb does; ``step`` is a float64 scalar."""
    correction1, correction2 = 1 - BETA1**step, 1 - BETA2**step
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        exp_avg.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        exp_avg_sq.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        denominator = (exp_avg_sq.sqrt() / correction2.sqrt()).add_(EPS)
        update = (exp_avg / correction1).div_(denominator).add_(param, alpha=weight_decay)
        weight_norm, update_norm = param.norm(), update.norm()
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        param.sub_(update.mul_(ratio), alpha=lr)


def foreach(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Tensor,
    lr: float,
    weight_decay: float,
) -> None:
    """Compute what :func:`loop` computes with ``torch._foreach``, for all parameters at once, as LAMBrrr does."""
    correction1, correction2 = 1 - BETA1**step, 1 - BETA2**step
    torch._foreach_lerp_(exp_avgs, grads, 1 - BETA1)
    torch._foreach_mul_(exp_avg_sqs, BETA2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - BETA2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, correction2.sqrt())
    torch._foreach_add_(denominators, EPS)
    updates = torch._foreach_div(exp_avgs, correction1)
    torch._foreach_div_(updates, denominators)
    torch._foreach_add_(updates, params, alpha=weight_decay)
    norms = zip(torch._foreach_norm(params), torch._foreach_norm(updates), strict=True)
    torch._foreach_mul_(
        updates, [torch.where((weight > 0) & (update > 0), weight / update, 1.0) for weight, update in norms]
    )
    torch._foreach_sub_(params, updates, alpha=lr)


class BaselineLamb(Optimizer):
    """The loop as an optimizer.

    Args:
        params: Tensors that all get gradients.
        lr: Learning rate.
        weight_decay: Inside the trust ratio.
        step: :func:`loop`, or the function that :func:`compiled_foreach` returns.
    """

    def __init__(self, params: Sequence[Tensor], lr: float, weight_decay: float, step: Step = loop) -> None:
        super().__init__(params, {})
        self._lr, self._weight_decay, self._step = lr, weight_decay, step
        self._params = list(params)
        self._exp_avgs, self._exp_avg_sqs = ([torch.zeros_like(param) for param in params] for _ in range(2))
        self._count = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given here
        """Make one step."""
        assert closure is None
        self._count += 1
        grads = [param.grad for param in self._params if param.grad is not None]
        self._step(self._params, grads, self._exp_avgs, self._exp_avg_sqs, self._count, self._lr, self._weight_decay)


@cache
def compiled_foreach() -> Step:
    """Return :func:`foreach` as one graph per list of shapes, compiled at its first call for them.

    From here on, this process compiles into a new folder: a cache of earlier compilations would hide the time.

    Raises:
        ImportError: If there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ImportError(f"torch.compile needs a C++ compiler, and there is no {compiler}")
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return torch.compile(foreach, fullgraph=True, dynamic=False)
