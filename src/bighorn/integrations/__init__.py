"""Registrations with trainers, callbacks for them, and a scheduler for those that require one.

Each file of this folder imports the trainer that it is for, and no other module imports one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["OwnSchedule"]


class OwnSchedule(LRScheduler):
    """A torch scheduler that does not change the learning rate, for trainers that would otherwise create one.

    The optimizer's own schedules, such as `Lamb(lr=bighorn.schedules.Cosine(...))`, set it.

    Args:
        optimizer: The optimizer, or a wrapper of it.

    Raises:
        TypeError: `optimizer` is not a `torch.optim.Optimizer`.

    Example:
        >>> import torch
        >>> from bighorn import Lamb, schedules
        >>> from bighorn.integrations import OwnSchedule
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lamb(model.named_parameters(), lr=schedules.Cosine(0.5, decay_steps=2))
        >>> scheduler = OwnSchedule(optimizer)
        >>> for _ in range(2):
        ...     model(torch.ones(3, 4)).square().sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     scheduler.step()
        ...     print(scheduler.get_last_lr())
        [0.5]
        [0.25]
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Unlike torch's constructor, this one leaves `initial_lr` out of the groups, where a schedule refuses it.
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self.optimizer, self.last_epoch, self._step_count = optimizer, 0, 1

    def step(self, epoch: int | None = None) -> None:
        """Count the step."""
        del epoch
        self.last_epoch += 1
        self._step_count += 1

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at the last step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps; the optimizer's `state_dict` has the position of its schedules."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the count of steps."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
