"""A decorator for functions that torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Like `torch.compiler.disable`, which would import dynamo, inductor and triton with `import bighorn`: 1.7 s.

    The lazy form of torch imports them in the first call. It is not a public name, but `torch.optim` uses it.
    """
    wrapper = _disable_dynamo(function)
    # torch.optim's wrapper of step inherits the attribute. Without it, dynamo traces that wrapper and warns (torch
    # 2.13).
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    return wrapper
