"""What an optimizer's last step did to each layer, as the flat numbers that TensorBoard and Weights & Biases take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bighorn.arguments import integer

__all__ = ["Log", "log_every", "scalars"]

Log = Callable[[dict[str, float], int], Any]
"""Takes scalars by their tags, and the step: `wandb.log`, `accelerator.log`, or a loop over `writer.add_scalar`."""

MULTIPLIERS = ("trust_ratio", "confidence")
"""What LAMB and CAME multiply a layer's learning rate with."""


def scalars(optimizer: Optimizer) -> dict[str, float]:
    """The figures of `optimizer.telemetry()` by tags FIGURE/LAYER. The host waits for the device once.

    Args:
        optimizer: A `Lamb` or `Came`, or what Accelerate, Lightning or ZeroRedundancyOptimizer wrapped around one.

    Returns:
        For LAMB `weight_norm`, `update_norm` and `trust_ratio`, for CAME `update_rms`, `clip_factor` and
        `confidence`; `lr`, and `effective_lr`, which is it times the trust ratio or the confidence; and
        `skipped_steps`. Empty before the first step.

    Raises:
        TypeError: It is no optimizer with telemetry, or a wrapper of one.

    Example:
        >>> import torch
        >>> from bighorn import Lamb, telemetry
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> optimizer = Lamb(model.named_parameters(), lr=0.5, adam=True)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
        >>> list(telemetry.scalars(optimizer))
        ['weight_norm/weight', 'update_norm/weight', 'trust_ratio/weight', 'lr/weight', 'effective_lr/weight',
         'skipped_steps']
        >>> telemetry.scalars(optimizer)["effective_lr/weight"]
        0.5
    """
    told = vars(_telemetric(optimizer).telemetry())
    names, skipped = told.pop("names"), told.pop("skipped")
    if not names:
        return {}
    columns = torch.stack(list(told.values()))
    *rows, count = torch.cat([columns.flatten(), skipped.to(columns).reshape(1)]).tolist()
    figures = {figure: rows[i * len(names) : (i + 1) * len(names)] for i, figure in enumerate(told)}
    multiplier = next(figures[name] for name in MULTIPLIERS if name in figures)
    figures["effective_lr"] = [lr * by for lr, by in zip(figures["lr"], multiplier, strict=True)]
    by_tag = {f"{figure}/{name}": v for figure, of in figures.items() for name, v in zip(names, of, strict=True)}
    return {**by_tag, "skipped_steps": count}


def log_every(optimizer: Optimizer, steps: int, log: Log) -> RemovableHandle:
    """Hand the scalars of every so many steps of an optimizer to a logger, with the number of the step from here on.

    Args:
        optimizer: As for `scalars`.
        steps: How many steps lie between two reports; 1 or more.
        log: Called with the scalars and the step.

    Returns:
        A handle, whose `remove()` ends it.

    Raises:
        TypeError: As `scalars`, `steps` is no integer, or `log` no function.
        ValueError: `steps` is less than 1.

    Example:
        >>> import torch
        >>> from bighorn import Came, telemetry
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Came(model.named_parameters(), lr=0.01)
        >>> handle = telemetry.log_every(optimizer, 2, lambda values, step: print(step, values["lr/weight"]))
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(3, 4)).square().sum().backward()
        ...     optimizer.step()
        2 0.009999999776482582
        4 0.009999999776482582
    """
    integer("steps", steps, least=1)
    if not callable(log):
        raise TypeError(f"log must be a function of the scalars and the step, not {log!r} ({type(log).__name__})")
    inner, taken = _telemetric(optimizer), 0

    def after(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken % steps == 0:
            log(scalars(inner), taken)

    handle: RemovableHandle = inner.register_step_post_hook(after)
    return handle


def _telemetric(optimizer: Any) -> Any:
    """The optimizer within its wrappers: `optimizer` of Accelerate's, `optim` of ZeroRedundancyOptimizer."""
    inner = optimizer
    while not hasattr(inner, "telemetry"):
        inner = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if inner is None:
            raise TypeError(f"optimizer must be one with telemetry, a Lamb or a Came, not {type(optimizer).__name__}")
    return inner
