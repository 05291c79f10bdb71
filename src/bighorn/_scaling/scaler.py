"""LossScaler: torch's GradScaler with policies, bounds and a found_inf that all ranks share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from bighorn._arguments import flag, integer, unknown_name
from bighorn._capabilities import wide
from bighorn._deferred import DeferredScalar
from bighorn._scaling.overflow import OverflowReport, batches, group_of, local_grads, names_of, unscale
from bighorn._scaling.policies import (
    CHECKS,
    FLOAT32,
    MOST_STEPS,
    ScalePolicy,
    ScaleState,
    WindowScale,
    check_scale,
)


class LossScaler(GradScaler):
    """A `torch.amp.GradScaler` with a choice of policies, bounds, and one found_inf for all ranks, devices and meshes.

    Use it like torch's scaler, in your own training loop or in trainers that accept a GradScaler, with any torch
    optimizer. Bighorn's optimizers unscale inside the step and skip it on an overflow, so the host never waits.

    An overflow is detected in all gradients of an optimizer, after their reduction. If ranks can see different
    gradients, found_inf is the maximum over ranks, from one all-reduce of one number:

    * One process, DistributedDataParallel, and ZeroRedundancyOptimizer above it: every rank sees the same reduced
      gradients, so nothing is sent.
    * FSDP2, tensor parallelism and mixtures of meshes (any DTensor among the parameters), and FSDP1: over all ranks.
      torch 2.13's GradScaler only reduces over the mesh of the first gradient.
    * Any other setup in which ranks have different gradients, such as stages of a pipeline or whole tensors per rank,
      and DTensors that only some of the ranks train: pass the `process_group` of the ranks that step together.

    The scale is on the device of the first loss that is scaled.

    Args:
        policy: The rule by which the scale changes: a FixedScale, WindowScale or ExponentialScale. Default: None, which
            is WindowScale().
        min_scale: The scale never falls below it. Default: 1.0.
        max_scale: The scale never rises above it; None: the largest value of float32. Default: None.
        skip_on_overflow: False: step even if gradients are not finite. Default: True.
        max_consecutive_overflows: The number of consecutive steps with an overflow after which the next one raises. The
            error comes one step late, so that the host need not wait for the device. None: never. Default: None.
        process_group: The ranks that share found_inf; all must take the same number of steps. None: as described
            above. Default: None.
        enabled: False: everything passes through unscaled. Default: True.

    Raises:
        TypeError: An unknown option, or a value of a wrong type.
        ValueError: A value out of range, or bounds that exclude the policy's first scale.

    Example:
        >>> import torch
        >>> from bighorn import Lamb, LossScaler, WindowScale
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = Lamb(model.parameters(), lr=0.01)
        >>> scaler = LossScaler(WindowScale(init_scale=1024.0, growth_interval=1))
        >>> scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        2048.0
    """

    def __init__(
        self,
        policy: ScalePolicy | None = None,
        *,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        skip_on_overflow: bool = True,
        max_consecutive_overflows: int | None = None,
        process_group: Any = None,
        enabled: bool = True,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(unknown)
        if policy is None:
            policy = WindowScale()
        if not isinstance(policy, ScalePolicy):
            raise TypeError(f"policy must be a FixedScale, WindowScale or ExponentialScale, not {policy!r}")
        flag("skip_on_overflow", skip_on_overflow)
        flag("enabled", enabled)
        if process_group is not None and not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
            raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, not {process_group!r}")
        if max_consecutive_overflows is not None:
            integer("max_consecutive_overflows", max_consecutive_overflows, least=1)
        self.policy = policy
        self.min_scale = check_scale("min_scale", min_scale)
        self.max_scale = FLOAT32.max if max_scale is None else check_scale("max_scale", max_scale)
        self.skip_on_overflow = skip_on_overflow
        self.max_consecutive_overflows = max_consecutive_overflows
        self.process_group = process_group
        self._check_bounds("init_scale", policy.init_scale)
        # torch's class looks for a GPU if the device is "cuda", and uses the device for nothing else that is not done
        # here.
        super().__init__("cpu", init_scale=policy.init_scale, enabled=enabled)
        self._bad_steps: Tensor | int = 0
        self._overflows: Tensor | int = 0
        self._late_overflows: DeferredScalar | None = None
        self._overflow_reports: list[OverflowReport] = []

    def _check_bounds(self, name: str, value: object) -> float:
        scale = check_scale(name, value)
        if not self.min_scale <= scale <= self.max_scale:
            raise ValueError(
                f"{name}={value!r} is not within min_scale={self.min_scale} and max_scale={self.max_scale}"
            )
        return scale

    # ---- found_inf --------------------------------------------------------------------------------------------------

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply gradients by `inv_scale`, and compute whether any of them, on any rank, is not finite."""
        overflows, limit = self._overflow_count(), self.max_consecutive_overflows
        if limit is not None and overflows >= limit and self._overflow_reports:
            self._give_up(overflows)
        grads = local_grads(optimizer, allow_fp16)
        # Each gradient has a flag of its own if this may be one overflow too many; otherwise they share one.
        watch = limit is not None and overflows + 1 >= limit
        flags = [unscale(batch, inv_scale, found_inf) for batch in (zip(grads) if watch else batches(grads))]
        verdict = torch.stack([found_inf, *flags]).amax(dim=0)  # without a dim, torch_xla 2.9 reduces nothing
        group = group_of(optimizer) if self.process_group is None else self.process_group
        if group is not None:
            dist.all_reduce(verdict, dist.ReduceOp.MAX, group)
        state = self._per_optimizer_states[id(optimizer)]
        if grads or group is not None:
            state["overflow"] = verdict
        if watch:
            state["overflow_report"] = OverflowReport(names_of(optimizer), flags, group)
        return {verdict.device: verdict if self.skip_on_overflow else torch.zeros_like(verdict)}

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of an optimizer in place, as torch's class does, also on a device without float64."""
        scale = self._scale if self._enabled else None
        if scale is None or wide(scale.device) == torch.float64:
            super().unscale_(optimizer)
            return
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            super().unscale_(optimizer)  # which raises
        inv_scale, found_inf = scale.reciprocal(), torch.zeros_like(scale)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, found_inf, False)
        state["stage"] = OptState.UNSCALED

    def _overflow_count(self) -> int:
        """The number of consecutive overflows at the last update; 0 without a limit, so that the host does not wait."""
        if self.max_consecutive_overflows is None:
            return 0
        return int(self._overflows) if self._late_overflows is None else self._late_overflows.read()

    def _give_up(self, overflows: int) -> NoReturn:
        raise FloatingPointError(
            f"{overflows} steps in a row overflowed (max_consecutive_overflows={self.max_consecutive_overflows}, the "
            f"scale is {self.get_scale():g} now), in the gradients of "
            f"{'; '.join(filter(None, map(OverflowReport.describe, self._overflow_reports)))}. If the scale is "
            "small, the model itself diverges: go back to a checkpoint, and lower the learning rate or keep these "
            "layers in float32"
        )

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, unless `unscale_` did, and step if all of them are finite.

        Args:
            optimizer: Any torch optimizer.
            *args: Arguments of its `step`.
            **kwargs: Keyword arguments of its `step`.

        Returns:
            The value that its `step` returned, or None if that was not called.

        Raises:
            RuntimeError: A closure is given, or this is the second step since `update`.
            TypeError: `optimizer` is not an optimizer.
            ValueError: A gradient is float16, and the optimizer does not unscale by itself.
            FloatingPointError: `max_consecutive_overflows` steps before this one overflowed. The message names the
                parameters and the ranks; nothing has changed.
        """
        if self._enabled and any(arg is not None for arg in args):
            raise RuntimeError("LossScaler.step takes no closure: gradients from a second backward would not be scaled")
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
        # This is set for this call only, since Lightning refuses to clip for an optimizer that always has it.
        says_so = self._enabled and not hasattr(optimizer, "_step_supports_amp_scaling")
        hand_over = says_so and getattr(optimizer, "takes_grad_scale", False)
        if hand_over:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            # torch 2.13 keeps both attributes if a step raises, and multiplies the next scale by the old one.
            vars(optimizer).pop("grad_scale", None)
            vars(optimizer).pop("found_inf", None)
            raise
        finally:
            if hand_over:
                del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]

    # ---- the scale --------------------------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by the policy. Call this once, after the steps of all optimizers.

        Args:
            new_scale: A scale to set instead, which also resets the count of consecutive overflows. The value of a
                tensor is not read, but clamped to `min_scale` and `max_scale`. Default: None.

        Raises:
            AssertionError: Nothing was scaled, or no optimizer was stepped, since the last update.
            TypeError: `new_scale` is neither a number nor a tensor of one.
            ValueError: `new_scale` is not within the bounds.
        """
        if not self._enabled:
            return
        scale, good_steps = self._check_scale_growth_tracker("update")
        if new_scale is None:
            verdicts = [state["overflow"] for state in self._per_optimizer_states.values() if "overflow" in state]
            if not verdicts:
                raise AssertionError("No inf checks were recorded prior to update: call step(optimizer) before it.")
            overflow = torch.stack(verdicts).amax(dim=0) > 0
            bad_steps = torch.as_tensor(self._bad_steps, dtype=torch.int32, device=scale.device)
            after = self.policy.next(ScaleState(scale, good_steps, bad_steps), overflow)
            scale.copy_(after.scale.clamp(self.min_scale, self.max_scale))
            good_steps.copy_(after.good_steps)
            self._bad_steps = after.bad_steps
            self._overflows = torch.where(overflow, self._overflows + 1, 0)
            self._late_overflows = None if self.max_consecutive_overflows is None else DeferredScalar(self._overflows)
        else:
            if not isinstance(new_scale, Tensor):
                scale.fill_(self._check_bounds("new_scale", new_scale))
            elif new_scale.numel() == 1 and not new_scale.requires_grad and not new_scale.is_complex():
                scale.copy_(new_scale.reshape(()).clamp(self.min_scale, self.max_scale))
            else:
                raise TypeError("new_scale must be a number or a real tensor of one element that needs no gradient")
            self._overflows, self._late_overflows = 0, None
        states = self._per_optimizer_states.values()
        self._overflow_reports = [
            state["overflow_report"] for state in states if new_scale is None and "overflow_report" in state
        ]
        self._per_optimizer_states.clear()

    def get_growth_factor(self) -> float:
        """Return the policy's growth_factor."""
        return float(self._of_policy("growth_factor"))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the policy's growth_factor."""
        self._change_policy(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Return the policy's backoff_factor."""
        return float(self._of_policy("backoff_factor"))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the policy's backoff_factor."""
        self._change_policy(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Return the policy's growth_interval."""
        return int(self._of_policy("growth_interval"))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the policy's growth_interval."""
        self._change_policy(growth_interval=new_interval)

    def _of_policy(self, name: str) -> Any:
        return getattr(self.policy, name)

    def _change_policy(self, **numbers: float) -> None:
        self.policy = replace(self.policy, **numbers)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the counters and the policy's numbers; empty if not enabled. Call this after `update`.

        The state of a WindowScale or ExponentialScale can be loaded into torch's GradScaler, too.
        """
        if not self._enabled:
            return {}
        numbers = {field.name: getattr(self.policy, field.name) for field in fields(self.policy)}
        return {
            "policy": type(self.policy).__name__,
            **numbers,
            "scale": self.get_scale(),
            "_growth_tracker": self._get_growth_tracker(),
            "bad_steps": int(self._bad_steps),
            "overflows": int(self._overflows),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, including the policy's numbers; a no-op if not enabled.

        Args:
            state_dict: The `state_dict` of a LossScaler or, for a WindowScale, of torch's GradScaler.

        Raises:
            RuntimeError: The dict is empty, since its scaler was not enabled.
            TypeError: The dict is not a mapping, or a value is not a number.
            ValueError: The dict is of another policy, lacks a key, has an unknown key, or holds a value out of range.
                The scaler is unchanged.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be what state_dict() of a scaler returned, not {state_dict!r}")
        if not state_dict:
            raise RuntimeError("the state dict is empty, probably from a scaler with enabled=False")
        kind, ours = state_dict.get("policy", "WindowScale"), type(self.policy).__name__
        if kind != ours:
            raise ValueError(
                f"the state dict is from a scaler with a {kind}, but this one has a {ours}: make it with a {kind}, "
                f"or start anew with {ours}(init_scale={state_dict.get('scale')!r})"
            )
        numbers = {field.name for field in fields(self.policy)}
        counters = {"_growth_tracker", "bad_steps", "overflows"}
        missing = {"scale", "_growth_tracker"} - state_dict.keys()
        extra = state_dict.keys() - numbers - counters - {"policy", "scale"}
        if missing or extra:
            wrong = [f"misses {sorted(missing)}"] * bool(missing) + [f"has unknown {sorted(extra)}"] * bool(extra)
            raise ValueError(f"the state dict {' and '.join(wrong)}: it is not from a LossScaler or GradScaler")
        policy = replace(self.policy, **{name: state_dict[name] for name in numbers & state_dict.keys()})
        scale = self._check_bounds("scale", state_dict["scale"])
        counts = {name: integer(name, state_dict.get(name, 0), most=MOST_STEPS - 1) for name in counters}
        self.policy = policy
        super().load_state_dict({**super().state_dict(), "scale": scale, "_growth_tracker": counts["_growth_tracker"]})
        self._bad_steps, self._overflows = counts["bad_steps"], counts["overflows"]
        self._late_overflows, self._overflow_reports = None, []

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "a scaler with a process_group can be neither pickled nor copied: save state_dict() instead"
            )
        state = super().__getstate__()
        counts = {"_bad_steps": int(self._bad_steps), "_overflows": int(self._overflows)}
        return {**state, **counts, "_late_overflows": None, "_overflow_reports": []}


def _refuse_unknown(options: dict[str, Any]) -> None:
    for name in options:
        if name in CHECKS:
            reason = f"it belongs to the policy: LossScaler(WindowScale({name}=...))"
        elif name == "device":
            reason = "the scale lives where the first loss does, so none is needed"
        else:
            raise unknown_name("LossScaler", name, list(inspect.signature(LossScaler).parameters)[:-1])
        raise TypeError(f"LossScaler got an unknown option {name!r}; {reason}")
