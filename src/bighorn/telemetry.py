"""Telemetry: the metrics of an optimizer's last step as scalars for TensorBoard or Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bighorn.arguments import integer

__all__ = ["Log", "log_every", "scalars"]

Log = Callable[[dict[str, float], int], Any]
"""A function of scalars by tag, and of the step: `wandb.log`, `accelerator.log`, or a loop over `writer.add_scalar`."""

MULTIPLIERS = ("trust_ratio", "confidence")
"""The metrics by which LAMB and CAME multiply a layer's learning rate."""


def scalars(optimizer: Optimizer) -> dict[str, float]:
    """Return the metrics of `optimizer.telemetry()` by tags METRIC/LAYER. The host waits for the device once.

    Args:
        optimizer: A `Lamb` or `Came`, or a wrapper of one by Accelerate, Lightning or ZeroRedundancyOptimizer.

    Returns:
        For LAMB `weight_norm`, `update_norm` and `trust_ratio`, for CAME `update_rms`, `clip_factor` and `confidence`;
        `lr`, and `effective_lr`, the learning rate times the trust ratio or the confidence; and `skipped_steps`. The
        dict is empty before the first step.

    Raises:
        TypeError: `optimizer` is neither an optimizer with telemetry nor a wrapper of one.

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
    """Call a logger with the scalars of every `steps`-th step of an optimizer, and the number of the step from now on.

    Args:
        optimizer: An optimizer, as for `scalars`.
        steps: The number of steps between two reports; 1 or more.
        log: A function of the scalars and the step.

    Returns:
        A handle, whose `remove()` ends the logging.

    Raises:
        TypeError: As for `scalars`; or `steps` is not an integer, or `log` is not a function.
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
    """Return the optimizer inside its wrappers: `optimizer` of Accelerate's, `optim` of ZeroRedundancyOptimizer."""
    inner = optimizer
    while not hasattr(inner, "telemetry"):
        inner = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if inner is None:
            raise TypeError(f"optimizer must be one with telemetry, a Lamb or a Came, not {type(optimizer).__name__}")
    return inner
