"""An optimizer in words: its repr, the options of each group that `explain()` adds, and the last step as a table."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from torch import Tensor

from bighorn.arguments import shortened
from bighorn.optim.algorithm import Group
from bighorn.optim.param_info import ParamInfo
from bighorn.optim.settings import Settings
from bighorn.optim.step_options import ScheduledOptions

MOST_NAMES = 4
"""The number of names that a line lists."""


def written(kind: type, groups: Sequence[Group], scheduled: Sequence[ScheduledOptions], settings: Settings) -> str:
    """Return the constructor with the options that are not its defaults: those of the optimizer, then of each group."""
    base = next(each for each in kind.__mro__ if "algorithm" in vars(each))
    defaults = {name: parameter.default for name, parameter in inspect.signature(base).parameters.items()}
    defaults |= base.algorithm.group_only  # type: ignore[attr-defined]  # found by this attribute
    own = [f"{name}={value!r}" for name, value in vars(settings).items() if _differs(value, defaults.get(name))]
    lines = [f"{kind.__name__}({', '.join(own)})"]
    for index, group in enumerate(groups):
        schedules = {name: option.schedule for name, option in scheduled[index].items()} if scheduled else {}
        values = {name: value for name, value in (group | schedules).items() if name in defaults and name != "params"}
        shown = [f"{n}={_short(v)}" for n, v in values.items() if n == "lr" or _differs(v, defaults[n])]
        elements = sum(param.numel() for param in group["params"])
        lines.append(f"  group {index}: {len(group['params'])} tensors, {elements:,} elements: {', '.join(shown)}")
    return "\n".join(lines)


def _short(value: object) -> str:
    """The repr, without the values of a tensor on a device, for which the host would wait."""
    far = isinstance(value, Tensor) and value.device.type != "cpu"
    return f"a tensor on {value.device}" if isinstance(value, Tensor) and far else repr(value)


def _differs(value: object, default: object) -> bool:
    if callable(value) or isinstance(value, Tensor):
        return value is not default
    return type(value) is not type(default) or value != default


def options_of_groups(
    infos: Iterable[ParamInfo], scheduled: Sequence[ScheduledOptions], groups: Sequence[Group], settings: Settings
) -> dict[int, str]:
    """Return what holds for each group beside its kernels: schedules, exclusions and what needs all gradients."""
    excluded: dict[int, dict[str, list[str]]] = defaultdict(lambda: {"weight decay": [], "trust ratio": []})
    for info in infos:
        if not info.variant.decays:
            excluded[info.variant.group]["weight decay"].append(info.label)
        if not info.variant.adapts:
            excluded[info.variant.group]["trust ratio"].append(info.label)
    found = {}
    for index, group in enumerate(groups):
        parts = [f"{name} by {option.schedule!r}, now {group[name]:g}" for name, option in scheduled[index].items()]
        parts += [f"no {what} for {shortened(names, MOST_NAMES)}" for what, names in excluded[index].items() if names]
        if settings.max_grad_norm is not None:
            parts.append(f"gradients clipped to a 2-norm of {settings.max_grad_norm:g} over all groups")
        if settings.skip_nonfinite:
            parts.append("steps skipped where gradients are not finite")
        if parts:
            found[index] = "; ".join(parts)
    return found


class Table:
    """Telemetry that prints as a table, and as a dict by parameter."""

    names: tuple[str, ...]
    skipped: Tensor

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each parameter as numbers, by its name and theirs. The host waits for the device."""
        columns = {name: column.tolist() for name, column in self._columns().items()}
        return {name: {key: column[i] for key, column in columns.items()} for i, name in enumerate(self.names)}

    def _columns(self) -> Mapping[str, Tensor]:
        metrics = [field.name for field in fields(self) if field.name not in ("names", "skipped")]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in metrics}

    def __repr__(self) -> str:
        heads = ["", *self._columns()]
        rows = [[name, *(f"{value:.4g}" for value in row.values())] for name, row in self.as_dict().items()]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in (heads, *rows)
        ]
        return "\n".join([f"{type(self).__name__}, {int(self.skipped)} steps skipped", *(x.rstrip() for x in lines)])
