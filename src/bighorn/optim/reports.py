"""The reports of an optimizer, as methods: metrics of the last step, bytes of state, and the choice of backends."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bighorn.optim import describe, explain
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.param_info import ParamInfo
from bighorn.optim.settings import Settings
from bighorn.optim.step_options import OptionGuard, ScheduledOptions, attach_all
from bighorn.optim.step_plan import StepPlan


class Reports(Optimizer):
    """An optimizer that reports what it does."""

    algorithm: ClassVar[Algorithm[Any]]
    _settings: Settings
    _scheduled: list[ScheduledOptions]
    _last: tuple[StepPlan, ...]
    _skipped: Tensor | None

    @abstractmethod
    def _param_infos(self, groups: list[Group]) -> Iterator[ParamInfo]:
        """Return the ParamInfo of every parameter in the groups, in the order in which a step visits them."""

    def _figures(self) -> tuple[tuple[str, ...], Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The fields of telemetry: labels, three metrics of each, the learning rate, and a count of skipped steps."""
        skipped = torch.zeros((), dtype=torch.int64, device="cpu") if self._skipped is None else self._skipped.clone()
        return (*explain.figures(self._last), skipped)

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
            options.setdefault(name, 0.0)
        optimizer = cls(params=params, **options)
        return explain.bytes_of_state(optimizer._param_infos(optimizer.param_groups))

    def __repr__(self) -> str:
        """The options that are not the constructor's defaults."""
        return describe.written(type(self), self.param_groups, self._scheduled, self._settings)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_") or name.startswith("__")]

    def explain(self) -> str:
        """Return one line for each kind of tensor: the backend that serves it, and the reason.

        A further line of a group has its schedules, exclusions and clip, if there are any.

        Raises:
            ValueError: The requested backend does not serve a tensor, for which `step` raises too.
        """
        groups, scheduled = (
            list(map(dict, self.param_groups)),
            list(map(dict, self._scheduled)),
        )  # a report changes none
        attach_all(groups, scheduled, self.defaults, self.algorithm)
        OptionGuard().refresh(groups, self.defaults, self.algorithm, self._settings)
        infos = list(self._param_infos(groups))
        kernels = explain.explained(infos, groups, self.algorithm, self._settings.backend)
        more = describe.options_of_groups(infos, scheduled, groups, self._settings)
        lines: list[str] = []
        for index, mine in sorted(kernels.items()):
            lines += [*mine, *([f"  options of group {index}: {more[index]}"] if index in more else [])]
        return "\n".join(lines)
