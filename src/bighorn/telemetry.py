"""Telemetry: the metrics of an optimizer's last step as scalars for TensorBoard or Weights & Biases."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bighorn._arguments import integer

__all__ = ["Log", "SlowLayers", "log_every", "scalars"]

Log = Callable[[dict[str, float], int], Any]
"""A function of scalars by tag, and of the step: `wandb.log`, `accelerator.log`, or a loop over `writer.add_scalar`."""

_SLOW = 0.05
"""The trust ratio below which a layer that started at zero is slow."""

_REPORTS = 3
"""The number of reports in a row after which slow layers are named."""


def scalars(optimizer: Optimizer) -> dict[str, float]:
    """Return the metrics of `optimizer.telemetry()` by tags METRIC/LAYER. The host waits for the device once.

    Args:
        optimizer: A `Lamb`, `Came` or `Lars`, or a wrapper of one by Accelerate, Lightning or ZeroRedundancyOptimizer.

    Returns:
        For LAMB and LARS `weight_norm`, `update_norm` and `trust_ratio`, for CAME `update_rms`, `clip_factor` and
        `confidence`; `lr`, and `effective_lr`, the learning rate times the trust ratio or the confidence; and
        `skipped_steps`. The dict is empty before the first step.

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
    inner = _telemetric(optimizer)
    metrics_by_name = vars(inner.telemetry())
    names, skipped = metrics_by_name.pop("names"), metrics_by_name.pop("skipped")
    if not names:
        return {}
    columns = torch.stack(list(metrics_by_name.values()))
    *rows, count = torch.cat([columns.flatten(), skipped.to(columns).reshape(1)]).tolist()
    metrics = {metric: rows[i * len(names) : (i + 1) * len(names)] for i, metric in enumerate(metrics_by_name)}
    multiplier = metrics.get(inner.algorithm.kernel_options_type.multiplier, [1.0] * len(names))
    metrics["effective_lr"] = [lr * by for lr, by in zip(metrics["lr"], multiplier, strict=True)]
    by_tag = {f"{metric}/{name}": v for metric, of in metrics.items() for name, v in zip(names, of, strict=True)}
    return {**by_tag, "skipped_steps": count}


class SlowLayers:
    """Watch layers that started at zero, such as `lora_B`: LAMB moves them too slowly, and LARS too far at first.

    With LAMB such a layer moves by the learning rate times its present norm. With LARS the trust ratio of its first
    step is 1, hundreds of times the ratio of other layers. The watch never makes a step wait: it keeps the first
    step's norms on the device, and reads them with the first report.

    Args:
        below: The trust ratio below which such a layer is slow. Default: 0.05.

    Example:
        >>> import torch
        >>> from bighorn import Lamb
        >>> from bighorn.telemetry import SlowLayers, scalars
        >>> layer = torch.nn.Linear(4, 2, bias=False)
        >>> layer.weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer, slow = Lamb(layer.named_parameters(), lr=1e-3), SlowLayers()
        >>> for _ in range(2):
        ...     layer(torch.ones(3, 4)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     slow.watch(optimizer)
        >>> slow.found(scalars(optimizer))  # the third report of a ratio this small names the layer
        []
        >>> scalars(optimizer)["trust_ratio/weight"] < slow.below
        True
    """

    def __init__(self, below: float = _SLOW) -> None:
        self.below = below
        self._first: tuple[tuple[str, ...], Tensor] | None = None
        self._zero: frozenset[str] | None = None
        self._reports: Counter[str] = Counter()
        self._told = False
        self._hint: str | None = None

    def watch(self, optimizer: Optimizer) -> None:
        """Keep the norms of the first step that this is called after; CAME has no trust ratio."""
        if self._first is None:
            inner = _telemetric(optimizer)
            last, self._hint = inner.telemetry(), inner.algorithm.slow_layers_hint
            if last.names:
                self._first = (last.names, last.weight_norm.clone()) if self._hint else ((), last.lr[:0])

    def found(self, values: dict[str, float]) -> list[str]:
        """Return the layers that were slow in this report and the two before, and warn about the first of them once.

        Args:
            values: The result of `scalars`.
        """
        if self._zero is None and self._first is not None:
            names, norms = self._first
            self._zero = frozenset(name for name, norm in zip(names, norms.tolist(), strict=True) if norm == 0)
        now = [name for name in self._zero or () if values.get(f"trust_ratio/{name}", 1.0) < self.below]
        self._reports = Counter({name: self._reports[name] + 1 for name in now})
        slow = sorted(name for name, reports in self._reports.items() if reports >= _REPORTS)
        if slow and self._hint and not self._told:
            self._told = True
            shown = ", ".join(slow[:3]) + (f" and {len(slow) - 3} others" if len(slow) > 3 else "")
            warnings.warn(f"{shown} started at zero, and {self._hint.format(below=self.below)}", stacklevel=2)
        return slow


def log_every(optimizer: Optimizer, steps: int, log: Log) -> RemovableHandle:
    """Call a logger with the scalars and the number of every `steps`-th step of an optimizer, from now on.

    Layers that `SlowLayers` finds are named in a warning.

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
    inner, taken, slow = _telemetric(optimizer), 0, SlowLayers()

    def after(*_: object) -> None:
        nonlocal taken
        taken += 1
        slow.watch(inner)
        if taken % steps == 0:
            values = scalars(inner)
            log(values, taken)
            slow.found(values)

    handle: RemovableHandle = inner.register_step_post_hook(after)
    return handle


def _telemetric(optimizer: Any) -> Any:
    """Return the optimizer inside its wrappers: `optimizer` of Accelerate's, `optim` of ZeroRedundancyOptimizer."""
    inner = optimizer
    while not hasattr(inner, "telemetry"):
        inner = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if inner is None:
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be one with telemetry, a Lamb, a Came or a Lars, not {kind}")
    return inner
