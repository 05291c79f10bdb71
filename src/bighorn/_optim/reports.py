"""The reports of an optimizer: its repr, the backend of each tensor, bytes of state, and metrics of the last step."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bighorn import _kernels as kernels
from bighorn._arguments import shortened
from bighorn._distributed.sharding import local
from bighorn._kernels import codec
from bighorn._optim.algorithm import Algorithm, Group
from bighorn._optim.entry import Entry
from bighorn._optim.group_records import GroupRecord
from bighorn._optim.scheduled import ScheduledOptions
from bighorn._optim.settings import Settings
from bighorn._optim.state import STEP_BYTES, local_view, real_view, same_layout
from bighorn._optim.step import Steps
from bighorn._optim.step_options import attach_all, check_changed

MOST_NAMES = 4
"""The number of names that a line lists."""


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


class Reports(Optimizer):
    """An optimizer that reports what it does."""

    algorithm: ClassVar[Algorithm[Any]]
    _settings: Settings
    _steps: Steps

    @abstractmethod
    def _present_records(self) -> list[GroupRecord]:
        """Return the record of each group in `param_groups`."""

    @abstractmethod
    def _entries(self, groups: list[Group]) -> Iterator[Entry]:
        """Return the entry of every parameter in the groups, in the order in which a step visits them."""

    def _metrics(self) -> dict[str, Any]:
        """The fields of telemetry by name: names, the algorithm's metrics, the learning rate, and skipped steps."""
        skipped = self._steps.skipped
        columns = (*self.algorithm.kernel_options_type.metrics, "lr")
        table = torch.zeros(0, len(columns), dtype=torch.float32, device="cpu")
        if pieces := [plan.metrics() for plan in self._steps.last]:
            table = torch.cat([piece.to(pieces[0].device) for piece in pieces])
        skipped = torch.zeros((), dtype=torch.int64, device="cpu") if skipped is None else skipped.clone()
        return {
            "names": _distinct([label for plan in self._steps.last for label in plan.step_labels()]),
            **dict(zip(columns, table.unbind(dim=1), strict=True)),
            "skipped": skipped,
        }

    @classmethod
    def state_bytes(cls, params: nn.Module | ParamsT, **options: Any) -> dict[str, int]:
        """Return the bytes of state that each parameter will have. They are computed from shapes; nothing is allocated.

        Args:
            params: A module, or parameters as the constructor takes them; they may be on the meta device.
            **options: Options of the constructor; a learning rate is not needed.

        Returns:
            Bytes by the parameter's name, or by its indices in `param_groups`, without frozen parameters, which have no
            state. The sum is the memory that the first step allocates permanently.

        Raises:
            TypeError: As for the constructor.
            ValueError: As for the constructor.

        Example:
            >>> import torch
            >>> from bighorn import Came, Lamb
            >>> model = torch.nn.Linear(1000, 500, device="meta")
            >>> Lamb.state_bytes(model)
            {'weight': 4000004, 'bias': 4004}
            >>> Came.state_bytes(model, state_dtype="int8")
            {'weight': 520004, 'bias': 4004}
        """
        if isinstance(params, nn.Module):
            params = params.named_parameters()
        for name in {"lr", "learning_rate"} & inspect.signature(cls).parameters.keys():
            options.setdefault(name, 1.0)
        optimizer = cls(params=params, **options)
        sizes: dict[str, int] = {}
        for entry in optimizer._entries(optimizer.param_groups):
            if isinstance(entry.param, Parameter) and not entry.param.requires_grad:
                continue
            state = {name: spec.like(local_view(entry.param)) for name, spec in entry.spec.items()}
            size = STEP_BYTES + sum(tensor.nbytes for tensor in entry.state_part(state).values())
            sizes[entry.label] = sizes.get(entry.label, 0) + size
        return sizes

    def code_errors(self) -> dict[str, float]:
        """Return the expected rounding error of each first moment in 8 or 4 bits, relative to its norm.

        Call it for reports, not in every step: the host waits for the device, and decodes a million codes at a time. In
        4 bits an error of 0.2 is common and does no harm, since dithered rounding has a mean error of 0. An error that
        grows in training means that few values of a block are far above the others.

        Returns:
            The norm of the error relative to the moment's, by the parameter's name or its indices in `param_groups`, of
            this rank's part. Only parameters with a moment in int8 or int4 are there; of two moments it is the first. A
            moment of zeros loses 0, and one that is not finite NaN.

        Example:
            >>> import torch
            >>> from bighorn import Came
            >>> model = torch.nn.Linear(64, 64)
            >>> optimizer = Came(model.named_parameters(), lr=1e-3, state_dtype="int8")
            >>> model(torch.eye(64)).square().sum().backward()
            >>> optimizer.step()
            >>> errors = optimizer.code_errors()
            >>> list(errors), 0 < errors["weight"] < 0.02
            (['weight'], True)
        """
        found = {}
        forms = self.algorithm.forms
        for entry in self._entries(self.param_groups):
            state = self.state.get(entry.param, {})
            for name in forms:  # the first moment is the last one there
                if (form := codec.form_of(forms, name, state)) is not None:
                    codes, scales = (local(state[key]) for key in (name, f"{name}_scale"))
                    found[entry.label] = float(codec.expected_error(codes, scales, form))
        return found

    def __repr__(self) -> str:
        """The options that are not the constructor's defaults."""
        scheduled = [record.scheduled for record in self._present_records()]
        return _written(type(self), self.param_groups, scheduled, self._settings)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") or name.startswith("__")]

    def explain(self) -> str:
        """Return one line for each kind of tensor: the backend that serves it, and the reason.

        A further line of a group has its schedules, exclusions and clip, if there are any.

        Raises:
            ValueError: The requested backend does not serve a tensor, for which `step` raises too.
        """
        # A report changes none.
        records = [record.copied({**record.group}) for record in self._present_records()]
        groups, scheduled = [record.group for record in records], [record.scheduled for record in records]
        attach_all(records, self.defaults, self.algorithm)
        check_changed(records, self.defaults, self.algorithm, self._settings)
        entries = list(self._entries(groups))
        kernels = _explained(entries, groups, self.algorithm, self._settings.backend)
        more = _options_of_groups(entries, scheduled, groups, self.algorithm, self._settings)
        lines: list[str] = []
        for index, group_lines in sorted(kernels.items()):
            lines += [*group_lines, *([f"  options of group {index}: {more[index]}"] if index in more else [])]
        return "\n".join(lines)


def _distinct(labels: Iterable[str]) -> tuple[str, ...]:
    """Return labels with a number for those that an earlier group has as well: weight, weight-2."""
    seen: Counter[str] = Counter()
    found = []
    for label in labels:
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label}-{seen[label]}")
    return tuple(found)


def _written(kind: type, groups: Sequence[Group], scheduled: Sequence[ScheduledOptions], settings: Settings) -> str:
    """Return the constructor with the options that are not its defaults: first the optimizer's, then each group's."""
    base = next(each for each in kind.__mro__ if "algorithm" in vars(each))
    defaults = {name: parameter.default for name, parameter in inspect.signature(base).parameters.items()}
    defaults |= base.algorithm.group_only  # type: ignore[attr-defined]  # found by this attribute
    whole = [f"{name}={_short(value)}" for name, value in vars(settings).items() if _differs(value, defaults.get(name))]
    lines = [f"{kind.__name__}({', '.join(whole)})"]
    for index, group in enumerate(groups):
        schedules = {name: option.schedule for name, option in scheduled[index].items()} if scheduled else {}
        values = {name: value for name, value in (group | schedules).items() if name in defaults and name != "params"}
        shown = [f"{n}={_short(v)}" for n, v in values.items() if n == "lr" or _differs(v, defaults[n])]
        elements = sum(param.numel() for param in group["params"])
        lines.append(f"  group {index}: {tensor_count(group['params'])}, {elements:,} elements: {', '.join(shown)}")
    return "\n".join(lines)


def tensor_count(tensors: Sequence[Tensor]) -> str:
    """The number of tensors in words."""
    return f"{len(tensors)} tensor" + "s" * (len(tensors) != 1)


def _short(value: object) -> str:
    """A short repr: a model's class, and no values of a tensor on a device, for which the host would wait."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    far = isinstance(value, Tensor) and value.device.type != "cpu"
    return f"a tensor on {value.device}" if isinstance(value, Tensor) and far else repr(value)


def _differs(value: object, default: object) -> bool:
    if callable(value) or isinstance(value, Tensor):
        return value is not default
    return type(value) is not type(default) or value != default


def _options_of_groups(
    entries: Iterable[Entry],
    scheduled: Sequence[ScheduledOptions],
    groups: Sequence[Group],
    algorithm: Algorithm[Any],
    settings: Settings,
) -> dict[int, str]:
    """Return what holds for each group beside its kernels: schedules, exclusions and what needs all gradients."""
    ratio = str(algorithm.kernel_options_type.multiplier).replace("_", " ")
    excluded: dict[int, dict[str, list[str]]] = defaultdict(lambda: {"weight decay": [], ratio: []})
    adapted: dict[int, list[str]] = defaultdict(list)
    for entry in entries:
        if not entry.variant.decays:
            excluded[entry.variant.group]["weight decay"].append(entry.label)
        if not entry.variant.adapts:
            excluded[entry.variant.group][ratio].append(entry.label)
        options = algorithm.kernel_options(groups[entry.variant.group], entry.variant)
        if getattr(options, "adapt", False) and entry.param.dim() < 2 and not entry.fragment:
            adapted[entry.variant.group].append(entry.label)
    found = {}
    for index, group in enumerate(groups):
        parts = [f"{name} by {option.schedule!r}, now {group[name]:g}" for name, option in scheduled[index].items()]
        parts += [f"no {what} for {shortened(names, MOST_NAMES)}" for what, names in excluded[index].items() if names]
        if adapted[index]:
            parts.append(
                f"a {ratio} for {shortened(adapted[index], MOST_NAMES)}: biases and norms are best without one, as "
                "with exclude_from_layer_adaptation='ndim<2'"
            )
        if settings.max_grad_norm is not None:
            parts.append(f"gradients clipped to a 2-norm of {settings.max_grad_norm:g} over all groups")
        if settings.skip_nonfinite:
            parts.append("steps skipped where gradients are not finite")
        if parts:
            found[index] = "; ".join(parts)
    return found


def _explained(
    entries: Iterable[Entry], groups: list[Group], algorithm: Algorithm[Any], backend: str
) -> dict[int, list[str]]:
    """Return lines by group, one for each kind of tensor: its backend, the reason, and what makes its steps slower.

    Raises:
        ValueError: The requested backend does not serve a tensor.
    """
    kinds: dict[tuple[int, str, str, str, str, str], list[Tensor]] = {}
    for entry in entries:
        view, index = entry.local(), entry.variant.group
        options = algorithm.kernel_options(groups[index], entry.variant)
        name, why = kernels.pick(backend, view, options, entry.slot_shard)
        kind = (
            index,
            name,
            str(view.device),
            str(view.dtype),
            why,
            _rounded(entry, groups[index]) + _slower(entry, view),
        )
        kinds.setdefault(kind, []).append(view)
    lines: dict[int, list[str]] = {}
    for (index, name, device, dtype, why, slower), tensors in kinds.items():
        lines.setdefault(index, []).append(
            f"group {index}: {name:<9} {tensor_count(tensors)}, {sum(t.numel() for t in tensors):,} elements of "
            f"{dtype.removeprefix('torch.')} on {device} ({why}){slower}"
        )
    return lines


def _rounded(entry: Entry, group: Group) -> str:
    """Return whether the group's `weight_rounding` acts on a parameter; empty if there is none."""
    if group["weight_rounding"] == "nearest":
        return ""
    return f"; weight_rounding={group['weight_rounding']!r}" if entry.variant.rounds else "; no weight_rounding needed"


def _slower(entry: Entry, view: Tensor) -> str:
    """Return what makes the steps of a parameter slower, with the remedy; empty if nothing does."""
    if not entry.fits_kernels(view):
        return (
            "; slower, copied at each step: its memory has gaps or another order, as p.data = p.data.contiguous() has "
            "not"
        )
    grad = entry.param.grad
    if grad is None or grad.layout is not torch.strided or grad.shape != entry.param.shape or entry.fragment:
        return ""
    if same_layout(real_view(local(grad).resolve_conj()), view):
        return ""
    return (
        "; slower: its gradient is copied at each step, since it has other strides than the parameter, which "
        "torch.empty_like(p) would have"
    )
