"""What torch puts around every optimizer's `step`: its hooks, and a range for profilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Step = Callable[..., Any]

_RecordFunctionFast: Any = None
with suppress(ImportError):
    # The range without the dispatcher. It is no public name, so there is a way without it.
    from torch._C._profiler import _RecordFunctionFast


def where_there_are_some(step: Step, hooked: Step) -> Step:
    """`hooked`, torch's wrapper of `step`, where anybody has hooked in; else `step` in the range alone.

    torch 2.13 opens the range by way of its dispatcher, which takes 0.01 ms, and 0.1 to 0.2 where a training has driven
    that out of the caches. May go when torch opens it at once.
    """
    if _RecordFunctionFast is None:
        return hooked

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
