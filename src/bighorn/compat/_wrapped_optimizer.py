"""A torch optimizer around another one, whose gradients a scaler has scaled or a TailOverlap has in flight."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bighorn import LossScaler, TailOverlap


class WrappedOptimizer(Optimizer):
    """The methods of torch's optimizers. Groups, state and hooks belong to the wrapped optimizer."""

    def __init__(
        self,
        opt: Optimizer,
        scaler: LossScaler | None,
        model: DistributedDataParallel | None,
        overlap: TailOverlap | None,
    ) -> None:
        """Wrap an optimizer. torch's constructor is not called, since it would make new groups and a new state."""
        self.opt: Optimizer = opt
        self.scaler, self.model, self.overlap = scaler, model, overlap
        self._found_inf: list[Tensor] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer."""
        return self.opt.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer; if the update is sharded, of this rank's tensors only."""
        return getattr(self.opt, "optim", self.opt).state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the optimizer, which some of torch's schedulers read."""
        return self.opt.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer.

        Args:
            param_group: As for the optimizer.
        """
        self.opt.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Register a hook that runs before the optimizer's step, and return its handle."""
        return self.opt.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Register a hook that runs after the optimizer's step, and return its handle."""
        return self.opt.register_step_post_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, which `minimize` and `apply_gradients` do after each step.

        Args:
            set_to_none: As for torch's optimizers. Default: True.
        """
        if self.scaler is not None:
            self.scaler._per_optimizer_states.pop(id(self.opt), None)
        (self.opt if self.overlap is None else self.overlap).zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Step with the gradients of the scaled loss, which are in `.grad`, and update the scale.

        Args:
            closure: As for the optimizer; None if the loss is scaled, or with the tailing optimisation. Default: None.

        Returns:
            The loss that the closure returned, or None.

        Raises:
            RuntimeError: A closure where the loss is scaled.
            ValueError: A closure with the tailing optimisation.
        """
        loss = None
        if self.overlap is not None:
            self.overlap.step(closure)
        elif self.scaler is not None:
            self.scaler.step(self.opt, closure)
        else:
            loss = self.opt.step(closure)
        if self.scaler is not None:
            states = self.scaler._per_optimizer_states.values()
            self._found_inf = [found for state in states for found in state["found_inf_per_device"].values()]
            self.scaler.update()
        return loss

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _is_unscaled(self) -> bool:
        """Whether gradients have been unscaled, and not stepped since."""
        if self.scaler is None or id(self.opt) not in self.scaler._per_optimizer_states:
            return False
        return self.scaler._per_optimizer_states[id(self.opt)]["stage"] is OptState.UNSCALED

    def __getstate__(self) -> dict[str, Any]:
        # torch's schedulers wrap `step`, and the wrapper cannot be copied.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return {"opt": the optimizer's state, "scaler": the scaler's, or {}}."""
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
            saved, present = ("", "none ") if state_dict["scaler"] else ("no ", "one ")
            raise ValueError(
                f"state_dict has {saved}state of a loss scaler, and there is {present}here: make the optimizer with "
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
