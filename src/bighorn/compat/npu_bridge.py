"""The compatibility layer of Ascend's npu_bridge for TensorFlow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from bighorn import ExponentialScale, FixedScale, Lamb, LossScaler, TailOverlap, shard_update
from bighorn._arguments import beta, knows_its_keywords, truth
from bighorn.compat._loss_scale import LossScaleManager
from bighorn.compat._wrapped_optimizer import WrappedOptimizer

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
        bias_correction: As in `bighorn.Lamb`; False is version 3 of the paper. Default: True.

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
    """npu_bridge's FixedLossScaleManager, a constant scale (`bighorn.FixedScale`), for `NPUOptimizer`.

    Args:
        loss_scale: The scale, at least 1.
        enable_overflow_check: Whether a step whose gradients are not finite is skipped. Default: True.

    Raises:
        TypeError: `loss_scale` is not a number, or `enable_overflow_check` is neither True nor False.
        ValueError: `loss_scale` is below 1.
    """

    def __init__(self, loss_scale: float, enable_overflow_check: bool = True) -> None:
        self._enable_overflow_check = truth("enable_overflow_check", enable_overflow_check)
        super().__init__(FixedScale, init_scale=("loss_scale", loss_scale))

    def get_enable_overflow_check(self) -> bool:
        """Return whether a step whose gradients are not finite is skipped."""
        return self._enable_overflow_check

    def loss_scaler(self, **options: Any) -> LossScaler:
        """Return a LossScaler with the scale and the skipping of this manager, as `LossScaleManager.loss_scaler`."""
        return super().loss_scaler(**{"skip_on_overflow": self._enable_overflow_check, **options})


class ExponentialUpdateLossScaleManager(_Manager):
    """npu_bridge's ExponentialUpdateLossScaleManager (`bighorn.ExponentialScale`), for `NPUOptimizer`.

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


_TENSORFLOW_SLOTS = {"m": "exp_avg", "v": "exp_avg_sq", "momentum": "momentum_buffer"}
"""TensorFlow's name of a slot, and torch's name of the same state."""


@knows_its_keywords
class NPUOptimizer(WrappedOptimizer):
    """npu_bridge's NPUOptimizer: loss scaling, data-parallel training and tailing optimisation for an optimizer.

    TensorFlow's optimizers own the gradients, but torch's do not. Therefore the model is a DistributedDataParallel,
    which averages them over ranks. `minimize(loss)` is one step of a training loop; `compute_gradients` and
    `apply_gradients` are its halves, between which you may change gradients. torch's schedulers accept this class.

    Args:
        opt: Any torch optimizer; for the tailing optimisation, one that TailOverlap supports. Another NPUOptimizer adds
            its data-parallel part and its scaling to this one's.
        loss_scale_manager: The manager of the loss scale: a FixedLossScaleManager or ExponentialUpdateLossScaleManager.
            Default: None.
        is_distributed: Whether all ranks train the model together. Default: False.
        is_loss_scale: Whether `loss_scale_manager` scales the loss. Default: False.
        is_tailing_optimization: Whether to step gradients that have arrived while later ones are in flight, by
            `bighorn.TailOverlap`. Without `is_distributed` it has no effect, and warns. Default: False.
        name: The name, which is kept as an attribute. Default: None.
        model: The DistributedDataParallel, for `is_distributed`; `gradient_as_bucket_view=True` for the tailing
            optimisation. npu_bridge has no such argument. Default: None, which is the model of `opt`, if it has one.

    Raises:
        TypeError: `opt` is not a torch optimizer, `loss_scale_manager` is not a manager, or a flag is neither True nor
            False.
        ValueError: `is_loss_scale` without a manager, a manager without `is_loss_scale`, `is_distributed` without a
            `model` that is a DistributedDataParallel; an `opt` that has a manager too, or tailing optimisation; or
            arguments that TailOverlap does not support.

    Example:
        >>> import torch
        >>> from bighorn import Lamb
        >>> from bighorn.compat.npu_bridge import FixedLossScaleManager, NPUOptimizer
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = NPUOptimizer(Lamb(model.parameters(), lr=0.01), FixedLossScaleManager(128), is_loss_scale=True)
        >>> optimizer.minimize(model(torch.ones(4, 3)).square().mean())
        >>> grads_and_vars = optimizer.compute_gradients(model(torch.ones(4, 3)).square().mean())
        >>> optimizer.apply_gradients([(grad.clamp(-1, 1), var) for grad, var in grads_and_vars])
    """

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

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
        is_distributed = truth("is_distributed", is_distributed)
        is_loss_scale = truth("is_loss_scale", is_loss_scale)
        is_tailing_optimization = truth("is_tailing_optimization", is_tailing_optimization)
        _check_manager(loss_scale_manager, is_loss_scale)
        scaler = None
        if isinstance(opt, NPUOptimizer):
            _check_inner(opt, is_loss_scale)
            if model is None and opt.model is not None:
                is_distributed, model = True, opt.model
            scaler, opt = opt.scaler, opt.opt
        if is_distributed != isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"is_distributed={is_distributed} with a model of type {type(model).__name__}: gradients are averaged "
                "by a DistributedDataParallel; pass it as model, together with is_distributed=True"
            )
        if is_tailing_optimization and not is_distributed:
            warnings.warn(
                "is_tailing_optimization has no effect without is_distributed=True, as npu_bridge's documentation "
                "says: pass is_distributed=True and the DistributedDataParallel as model, or leave it out",
                stacklevel=3,
            )
        self.name: str | None = name
        scaler = scaler if loss_scale_manager is None else loss_scale_manager.loss_scaler()
        overlap = TailOverlap(model, opt, scaler=scaler) if is_tailing_optimization and model is not None else None
        super().__init__(opt, scaler, model, overlap)

    def minimize(
        self,
        loss: Tensor | Callable[[], Tensor],
        global_step: Tensor | None = None,
        var_list: Iterable[Tensor] | None = None,
        gate_gradients: int = GATE_OP,  # noqa: ARG002 - TensorFlow's signature
        aggregation_method: object = None,  # noqa: ARG002
        colocate_gradients_with_ops: bool = False,  # noqa: ARG002
        name: str | None = None,  # noqa: ARG002
        grad_loss: None = None,
    ) -> None:
        """Take one step: compute the gradients of the scaled loss, and apply them. Earlier gradients are reset.

        Args:
            loss: A scalar, or a function that returns it.
            global_step: A tensor of int32 or int64 that counts the steps; one with an overflow does not count. Default:
                None.
            var_list: The parameters to step. Default: None, which is all of them.
            gate_gradients: It has no effect, since gradients are computed at once. Default: 1, which is GATE_OP.
            aggregation_method: It has no effect. Default: None.
            colocate_gradients_with_ops: It has no effect. Default: False.
            name: It has no effect. Default: None.
            grad_loss: Only None; multiply the loss instead. Default: None.

        Raises:
            TypeError: `global_step` is something else.
            ValueError: As for `compute_gradients`.
        """
        _check_global_step(global_step)
        _refuse_grad_loss(grad_loss)
        self.zero_grad()  # a step that raised has left its gradients
        if var_list is not None:
            self.apply_gradients(self.compute_gradients(loss, var_list), global_step)
            return
        self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        self._step_and_count(global_step)

    def compute_gradients(
        self,
        loss: Tensor | Callable[[], Tensor],
        var_list: Iterable[Tensor] | None = None,
        gate_gradients: int = GATE_OP,  # noqa: ARG002 - TensorFlow's signature
        aggregation_method: object = None,  # noqa: ARG002
        colocate_gradients_with_ops: bool = False,  # noqa: ARG002
        grad_loss: None = None,
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Return the gradients of the loss: the averages over ranks, not scaled. Earlier gradients are reset.

        Where the loss is scaled, an overflow is kept for `apply_gradients`, which follows each call of this method.

        Args:
            loss: A scalar, which is not scaled, or a function that returns it.
            var_list: Parameters of the optimizer. Without a DistributedDataParallel, no other tensor gets a gradient.
                Default: None, which is all of them.
            gate_gradients: It has no effect. Default: 1, which is GATE_OP.
            aggregation_method: It has no effect. Default: None.
            colocate_gradients_with_ops: It has no effect. Default: False.
            grad_loss: Only None; multiply the loss instead. Default: None.

        Returns:
            (gradient, parameter) for each of `var_list`; the gradient is the tensor in `.grad`, or None if the loss
            does not depend on the parameter.

        Raises:
            RuntimeError: The loss is scaled, and the gradients before were not applied.
            ValueError: `var_list` has a tensor that is not a parameter of the optimizer; the loss is scaled and a
                gradient is float16 (with Bighorn's optimizers, call `minimize` without `var_list`); or `grad_loss` is
                given.

        Source: tf.compat.v1.train.Optimizer.

        Example:
            >>> import torch
            >>> param = torch.nn.Parameter(torch.ones(2))
            >>> optimizer = NPUOptimizer(torch.optim.SGD([param]), FixedLossScaleManager(128), is_loss_scale=True)
            >>> [(grad, var)] = optimizer.compute_gradients(param.sum())
            >>> grad
            tensor([1., 1.])
        """
        _refuse_grad_loss(grad_loss)
        params = self._params()
        chosen = params if var_list is None else list(var_list)
        for i, param in enumerate(chosen):
            _check_param(f"var_list[{i}]", param, params)
        if self._is_unscaled():
            raise RuntimeError(
                "compute_gradients() was called twice, but a scaled loss has one set of gradients for each step: call "
                "apply_gradients() between the two, or zero_grad() to drop the first, or add up the losses"
            )
        self.zero_grad()
        # A DistributedDataParallel averages gradients when all of them are there.
        self._scaled(loss).backward(inputs=chosen if self.model is None else None)  # type: ignore[no-untyped-call]
        if self.overlap is not None:
            self.overlap.synchronize()
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        return [(param.grad, param) for param in chosen]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Tensor | None, Tensor]],
        global_step: Tensor | None = None,
        name: str | None = None,  # noqa: ARG002 - TensorFlow's signature
    ) -> None:
        """Step with these gradients, and reset them.

        Where the loss is scaled, the step is skipped if a gradient was not finite when `compute_gradients` returned it;
        without that call, if a gradient passed here is not.

        Args:
            grads_and_vars: (gradient, parameter) for the parameters to step; a gradient is not scaled. None for a
                parameter that is not stepped.
            global_step: As for `minimize`. Default: None.
            name: It has no effect. Default: None.

        Raises:
            TypeError: `grads_and_vars` are not pairs, or `global_step` is something else.
            ValueError: There is no gradient, or a tensor is not a parameter of the optimizer, or there twice, or has
                another shape than its gradient.

        Source: tf.compat.v1.train.Optimizer.
        """
        _check_global_step(global_step)
        params = self._params()
        grads = _checked_pairs(grads_and_vars, params)
        for param in params:
            param.grad = grads.get(param)
        if self.scaler is not None and not self._is_unscaled():
            self.scaler.scale(next(iter(grads.values())).new_zeros(()))  # the first call sets the scale up
            self.scaler._check_inf_per_device(self.opt)
            self.scaler._per_optimizer_states[id(self.opt)]["stage"] = OptState.UNSCALED
        self._step_and_count(global_step)

    def get_slot(self, var: Tensor, name: str) -> Tensor | None:
        """Return a tensor of a parameter's state, as it is stored; None if there is none, as before the first step.

        Args:
            var: A parameter of the optimizer.
            name: The name of the state, or TensorFlow's for it: "m", "v" or "momentum".

        Raises:
            ValueError: `var` is not a parameter of the optimizer.

        Source: tf.compat.v1.train.Optimizer.
        """
        _check_param("var", var, self._params())
        state = self.state.get(var, {})
        slot: Tensor | None = state.get(name, state.get(_TENSORFLOW_SLOTS.get(name)))
        return slot

    def get_slot_names(self) -> list[str]:
        """Return the sorted names of the tensors of a parameter's state, without its step count."""
        states = self.state.values()
        return sorted(
            {name for state in states for name, value in state.items() if isinstance(value, Tensor)} - {"step"}
        )

    def get_name(self) -> str | None:
        """Return the name."""
        return self.name

    def variables(self) -> list[Tensor]:
        """Return the tensors of the state, with the step counts. The list is empty before the first step."""
        return [value for state in self.state.values() for value in state.values() if isinstance(value, Tensor)]

    def _scaled(self, loss: Tensor | Callable[[], Tensor]) -> Tensor:
        loss = loss if isinstance(loss, Tensor) else loss()
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _step_and_count(self, global_step: Tensor | None) -> None:
        self.step()
        if global_step is not None:
            global_step += not any(self._found_inf)
        self.zero_grad()


def _check_manager(manager: object, is_loss_scale: bool) -> None:
    """Raise for something that is no manager, or one without `is_loss_scale`."""
    if is_loss_scale != (manager is not None):
        raise ValueError(
            f"is_loss_scale={is_loss_scale} with loss_scale_manager={manager}: scaling the loss takes "
            "is_loss_scale=True and a manager, training without takes neither"
        )
    if manager is not None and not isinstance(manager, LossScaleManager):
        raise TypeError(
            "loss_scale_manager must be a FixedLossScaleManager or an ExponentialUpdateLossScaleManager, not "
            f"{type(manager).__name__}"
        )


def _check_inner(opt: NPUOptimizer, is_loss_scale: bool) -> None:
    """Raise if one NPUOptimizer cannot be made of two."""
    if opt.overlap is not None:
        raise ValueError(
            "opt is an NPUOptimizer with is_tailing_optimization=True, which knows no other scaler and no other model: "
            "give loss_scale_manager and model to that one"
        )
    if opt.scaler is not None and is_loss_scale:
        raise ValueError("opt scales the loss already: give loss_scale_manager to one of the two optimizers only")


def _refuse_grad_loss(grad_loss: object) -> None:
    if grad_loss is not None:
        raise ValueError("grad_loss is not supported: multiply the loss by it, and pass the sum as loss")


def _check_global_step(global_step: object) -> None:
    if global_step is not None and str(getattr(global_step, "dtype", "")) not in ("torch.int32", "torch.int64"):
        raise TypeError(f"global_step must be a tensor of integers, as torch.tensor(0), not {global_step!r}")


def _check_param(name: str, param: object, params: Sequence[Tensor]) -> None:
    """Raise if a tensor is not one of the optimizer's parameters."""
    if not any(param is candidate for candidate in params):
        kind = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else type(param).__name__
        raise ValueError(f"{name} is {kind}, and no parameter of the optimizer: pass its parameters only")


def _checked_pairs(grads_and_vars: Any, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the gradient of each parameter that has one."""
    grads: dict[Tensor, Tensor] = {}
    seen = set()
    for i, pair in enumerate(grads_and_vars):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], (Tensor, type(None))):
            raise TypeError(f"grads_and_vars[{i}] must be a pair of a gradient or None and its parameter, not {pair!r}")
        grad, param = pair
        _check_param(f"grads_and_vars[{i}][1]", param, params)
        if param in seen:
            raise ValueError(f"grads_and_vars[{i}] is the second pair of its parameter: add up its gradients")
        seen.add(param)
        if grad is None:
            continue
        if grad.shape != param.shape:
            raise ValueError(
                f"grads_and_vars[{i}] has a gradient of shape {tuple(grad.shape)} for a parameter of shape "
                f"{tuple(param.shape)}: pass each gradient with its own parameter"
            )
        grads[param] = grad.detach()
    if not grads:
        raise ValueError("grads_and_vars has no gradient: the loss depends on none of the parameters")
    return grads


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
        sharding = truth("is_weight_update_sharding", is_weight_update_sharding)
        super().__init__(optimizer, is_distributed=True, name=name, model=model)
        if sharding:
            self.opt = shard_update(self.opt, None if self.model is None else self.model.process_group)


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
