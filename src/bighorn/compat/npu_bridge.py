"""The compatibility layer of Ascend's npu_bridge for TensorFlow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bighorn import ExponentialScale, FixedScale, Lamb, TailOverlap, shard_update
from bighorn.arguments import beta, flag, knows_its_keywords
from bighorn.compat._loss_scale import LossScaleManager

__all__ = [
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "LAMBOptimizer",
    "NPUDistributedOptimizer",
    "NPULossScaleOptimizer",
    "NPUOptimizer",
]


@knows_its_keywords
class LAMBOptimizer(Lamb):
    """npu_bridge's LAMBOptimizer: version 5 of the paper, with weight decay excluded by name.

    Args:
        learning_rate: The learning rate, in any form that `bighorn.Lamb` takes for `lr`.
        weight_decay_rate: The weight decay, at least 0, in any form that `bighorn.Lamb` takes for `weight_decay`.
            Default: 0.0.
        beta_1: Decay of the average of the gradient, in [0, 1). Default: 0.9.
        beta_2: Decay of the average of its square, in [0, 1). Default: 0.999.
        epsilon: Added to the root of the second moment, at least 0. Default: 1e-6.
        exclude_from_weight_decay: The parameters without weight decay: regular expressions that are searched for in
            parameter names. Default: None.
        params: The parameters, which TensorFlow finds in the graph: `model.named_parameters()`, or groups of such
            pairs. Tensors without names are accepted if nothing is excluded.
        bias_correction: False: as in version 3 of the paper. Default: True.

    Raises:
        TypeError: A value of a wrong type.
        ValueError: A value out of range, or parameters without names while an exclusion is given.

    Example:
        >>> import torch
        >>> from bighorn.compat.npu_bridge import LAMBOptimizer
        >>> model = torch.nn.Linear(4, 2)
        >>> exclude = ["bias"]
        >>> optimizer = LAMBOptimizer(
        ...     0.01, weight_decay_rate=0.01, exclude_from_weight_decay=exclude, params=model.named_parameters()
        ... )
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        learning_rate: float | Tensor | Iterable[float] | Callable[[int], Any],
        weight_decay_rate: float | Iterable[float] | Callable[[int], Any] = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Sequence[str] | None = None,
        *,
        params: ParamsT,
        bias_correction: bool | Literal["lr"] = True,
    ) -> None:
        options = self.algorithm.options
        super().__init__(
            params,
            options["lr"]("learning_rate", learning_rate),
            (beta("beta_1", beta_1), beta("beta_2", beta_2)),
            options["eps"]("epsilon", epsilon),
            options["weight_decay"]("weight_decay_rate", weight_decay_rate),
            bias_correction=bias_correction,
            exclude_from_weight_decay=exclude_from_weight_decay,
        )


class _Manager(LossScaleManager):
    def update_loss_scale(self, finite_grads: bool) -> None:
        """Update the scale, unless it is constant.

        Args:
            finite_grads: Whether all gradients of the step were finite.
        """
        self._move(overflow=not finite_grads)


class FixedLossScaleManager(_Manager):
    """npu_bridge's FixedLossScaleManager, over `bighorn.FixedScale`: the scale is constant.

    Args:
        loss_scale: The scale, at least 1.

    Raises:
        TypeError: `loss_scale` is not a number.
        ValueError: `loss_scale` is below 1.
    """

    def __init__(self, loss_scale: float) -> None:
        super().__init__(FixedScale, init_scale=("loss_scale", loss_scale))


class ExponentialUpdateLossScaleManager(_Manager):
    """npu_bridge's ExponentialUpdateLossScaleManager, over `bighorn.ExponentialScale`.

    Args:
        init_loss_scale: The initial scale, at least 1. The scale never falls below 1, and never overflows float32.
        incr_every_n_steps: The number of consecutive finite steps after which the scale grows.
        decr_every_n_nan_or_inf: The number of steps that were not finite after which the scale shrinks. Default: 2.
        incr_ratio: The factor by which the scale grows, above 1. Default: 2.
        decr_ratio: The factor by which the scale shrinks, between 0 and 1. Default: 0.8.

    Raises:
        TypeError: A value is not a number, or a number of steps is not an integer.
        ValueError: A value is out of range.

    Example:
        >>> from bighorn.compat.npu_bridge import ExponentialUpdateLossScaleManager
        >>> manager = ExponentialUpdateLossScaleManager(1024, incr_every_n_steps=1000, decr_ratio=0.5)
        >>> for finite in (False, True, False):
        ...     manager.update_loss_scale(finite)
        >>> manager.get_loss_scale()
        512.0
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        super().__init__(
            ExponentialScale,
            init_scale=("init_loss_scale", init_loss_scale),
            growth_factor=("incr_ratio", incr_ratio),
            backoff_factor=("decr_ratio", decr_ratio),
            growth_interval=("incr_every_n_steps", incr_every_n_steps),
            backoff_interval=("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
        )


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


@knows_its_keywords
class NPUDistributedOptimizer(NPUOptimizer):
    """npu_bridge's NPUDistributedOptimizer: an NPUOptimizer that is always distributed, and may shard the update.

    Args:
        optimizer: Any torch optimizer; for weight-update sharding, one that has not stepped yet.
        is_weight_update_sharding: Each rank keeps the state of some of the tensors, steps these and sends them to the
            others, by `bighorn.shard_update`. Default: False.
        name: The name, which is kept as an attribute. Default: None.
        model: As for NPUOptimizer; it is required. Default: None.

    Raises:
        TypeError: `is_weight_update_sharding` is neither True nor False.
        ValueError: As for NPUOptimizer, or as for `bighorn.shard_update`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        is_weight_update_sharding: bool = False,
        name: str | None = None,
        *,
        model: DistributedDataParallel | None = None,
    ) -> None:
        sharding = flag("is_weight_update_sharding", is_weight_update_sharding)
        super().__init__(optimizer, is_distributed=True, name=name, model=model)
        if sharding:
            self.opt = shard_update(optimizer, model.process_group if model is not None else None)


@knows_its_keywords
class NPULossScaleOptimizer(NPUOptimizer):
    """npu_bridge's NPULossScaleOptimizer: an NPUOptimizer that scales the loss, and overlaps nothing.

    Args:
        opt: As for NPUOptimizer.
        loss_scale_manager: As for NPUOptimizer.
        is_distributed: As for NPUOptimizer. Default: False.
        model: As for NPUOptimizer. Default: None.
    """

    def __init__(
        self,
        opt: Optimizer,
        loss_scale_manager: LossScaleManager,
        is_distributed: bool = False,
        *,
        model: DistributedDataParallel | None = None,
    ) -> None:
        super().__init__(opt, loss_scale_manager, is_distributed, is_loss_scale=True, model=model)
