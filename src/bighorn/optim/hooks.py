"""What torch puts around every optimizer's `step`: its hooks, and a range for profilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._C._profiler import _RecordFunctionFast
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Step = Callable[..., Any]


def where_there_are_some(step: Step, hooked: Step) -> Step:
    """`hooked`, torch's wrapper of `step`, where anybody has hooked in; else `step` in the range alone.

    torch opens the range by way of its dispatcher, which takes 0.01 ms, but 0.2 ms where a training has driven it out
    of the caches: as long as the optimizer itself takes for 40 small tensors. May go when torch 2.13's wrapper does.
    """

    @functools.wraps(hooked)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (
            _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
        ):
            return hooked(self, *args, **kwargs)
        with _RecordFunctionFast(f"Optimizer.step#{type(self).__name__}.step"):
            result = step(self, *args, **kwargs)
            self._optimizer_step_code()  # by which profilers of Python know that this was an optimizer
            return result

    return wrapper
