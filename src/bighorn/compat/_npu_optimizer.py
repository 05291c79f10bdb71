"""npu_bridge's NPUOptimizer."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bighorn import TailOverlap
from bighorn.arguments import knows_its_keywords
from bighorn.compat._checks import flag
from bighorn.compat._loss_scale import LossScaleManager


@knows_its_keywords
class NPUOptimizer:
    """npu_bridge's NPUOptimizer: loss scaling, data-parallel training and tailing optimisation for an optimizer.

    TensorFlow's optimizers own the gradients, but torch's do not. Therefore the model is a DistributedDataParallel,
    which reduces them, and `minimize(loss)` is one step of a training loop.

    Args:
        opt: Any torch optimizer; for the tailing optimisation, one that TailOverlap supports.
        loss_scale_manager: The manager of the loss scale: a FixedLossScaleManager or ExponentialUpdateLossScaleManager.
            Default: None.
        is_distributed: Whether all ranks train the model together. Default: False.
        is_loss_scale: Whether `loss_scale_manager` scales the loss. Default: False.
        is_tailing_optimization: Whether to step gradients that have arrived while later ones are in flight, by
            `bighorn.TailOverlap`. Without `is_distributed` it has no effect, and warns. Default: False.
        name: The name, which is kept as an attribute. Default: None.
        model: The DistributedDataParallel, for `is_distributed`; `gradient_as_bucket_view=True` for the tailing
            optimisation. npu_bridge has no such argument. Default: None.

    Raises:
        TypeError: `opt` is not a torch optimizer, `loss_scale_manager` is not a manager, or a flag is neither True nor
            False.
        ValueError: `is_loss_scale` without a manager, a manager without `is_loss_scale`, `is_distributed` without a
            `model` that is a DistributedDataParallel; or arguments that TailOverlap does not support.

    Example:
        >>> import torch
        >>> from bighorn import Lamb
        >>> from bighorn.compat.npu_bridge import FixedLossScaleManager, NPUOptimizer
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = NPUOptimizer(Lamb(model.parameters(), lr=0.01), FixedLossScaleManager(128), is_loss_scale=True)
        >>> optimizer.minimize(model(torch.ones(4, 3)).square().mean())
    """

    def __init__(
        self,
        opt: Optimizer,
        loss_scale_manager: LossScaleManager | None = None,
        is_distributed: bool = False,
        is_loss_scale: bool = False,
        is_tailing_optimization: bool = False,
        name: str | None = None,
        *,
        model: DistributedDataParallel | None = None,
    ) -> None:
        if not isinstance(opt, Optimizer):
            raise TypeError(f"opt must be a torch.optim.Optimizer, not {type(opt).__name__}")
        flag("is_distributed", is_distributed)
        flag("is_loss_scale", is_loss_scale)
        flag("is_tailing_optimization", is_tailing_optimization)
        if is_loss_scale != (loss_scale_manager is not None):
            raise ValueError(
                f"is_loss_scale={is_loss_scale} with loss_scale_manager={loss_scale_manager}: scaling the loss takes "
                "is_loss_scale=True and a manager, training without takes neither"
            )
        if loss_scale_manager is not None and not isinstance(loss_scale_manager, LossScaleManager):
            raise TypeError(
                "loss_scale_manager must be a FixedLossScaleManager or an ExponentialUpdateLossScaleManager, not "
                f"{type(loss_scale_manager).__name__}"
            )
        if is_distributed != isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"is_distributed={is_distributed} with a model of type {type(model).__name__}: gradients are summed by "
                "a DistributedDataParallel; pass it as model, together with is_distributed=True"
            )
        if is_tailing_optimization and not is_distributed:
            warnings.warn(
                "is_tailing_optimization has no effect without is_distributed=True, here as in npu_bridge: pass "
                "is_distributed=True and the DistributedDataParallel as model, or leave it out",
                stacklevel=3,
            )
        self.opt, self.name = opt, name
        self.scaler = None if loss_scale_manager is None else loss_scale_manager.loss_scaler()
        self.overlap = (
            TailOverlap(model, opt, scaler=self.scaler) if is_tailing_optimization and model is not None else None
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer."""
        return self.opt.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, which `minimize` does after each step.

        Args:
            set_to_none: As for torch's optimizers. Default: True.
        """
        self.opt.zero_grad(set_to_none)

    def minimize(self, loss: Tensor, global_step: Tensor | None = None) -> None:
        """Take one step: compute the gradients of the scaled loss, and apply them.

        Args:
            loss: A scalar.
            global_step: A tensor of int32 or int64 that counts the steps; one with an overflow does not count. Default:
                None.

        Raises:
            TypeError: `global_step` is something else.
        """
        if global_step is not None and str(getattr(global_step, "dtype", "")) not in ("torch.int32", "torch.int64"):
            raise TypeError(f"global_step must be a tensor of integers, as torch.tensor(0), not {global_step!r}")
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if self.overlap is not None:
            self.overlap.step()
        elif self.scaler is not None:
            self.scaler.step(self.opt)
        else:
            self.opt.step()
        if global_step is not None:
            states = () if self.scaler is None else self.scaler._per_optimizer_states.values()
            global_step += not any(found for state in states for found in state["found_inf_per_device"].values())
        if self.scaler is not None:
            self.scaler.update()
        self.opt.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the scaler."""
        return {"opt": self.opt.state_dict(), "scaler": {} if self.scaler is None else self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`.

        Args:
            state_dict: A dict with the optimizer's state, and the scaler's if there is one.

        Raises:
            ValueError: The dict has other keys, has a scaler's state but there is no scaler here or the other way
                round, or the optimizer or the scaler refuses its state. Both are unchanged.
        """
        if not isinstance(state_dict, dict) or state_dict.keys() != {"opt", "scaler"}:
            raise ValueError("state_dict must be what NPUOptimizer.state_dict() returned, with 'opt' and 'scaler'")
        if bool(state_dict["scaler"]) != (self.scaler is not None):
            there, here = ("", "none ") if state_dict["scaler"] else ("no ", "one ")
            raise ValueError(
                f"state_dict has {there}state of a loss scaler, and there is {here}here: make the optimizer with "
                f"is_loss_scale={self.scaler is None} and load again"
            )
        before = self.state_dict()["scaler"]
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
        try:
            self.opt.load_state_dict(state_dict["opt"])
        except BaseException:
            if self.scaler is not None:
                self.scaler.load_state_dict(before)
            raise
