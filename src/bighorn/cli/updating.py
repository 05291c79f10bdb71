"""From losses to a step: the optimizer, and around it processes, precision, loss scaling, clipping and overlap."""

from collections import ChainMap
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bighorn import LossScaler, TailOverlap
from bighorn.cli.config import Division, RunConfig, scale_policy
from bighorn.cli.errors import InputError
from bighorn.cli.optimizers import OPTIMIZERS, build_optimizer
from bighorn.cli.ranks import Ranks

MOST_OVERFLOWS = 50
"""So many steps in a row that overflow are no matter of the scale: a dynamic one has been at its least for long."""


class Updater:
    """Updates a model that several processes may share.

    Args:
        model: The model itself, its parameters in their places.
        forward: What is called for losses.
        config: Of the run.
        lr: The peak learning rate.
        division: Of the work of a step.
        ranks: The processes.

    Attributes:
        whole: The optimizer of all parameters.
        optimizer: It, but with ``--shard-update`` that of this process's parameters.
        scaler: Scales losses; not enabled without ``--loss-scale``.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: nn.Module,
        config: RunConfig,
        lr: float,
        division: Division,
        ranks: Ranks,
    ) -> None:
        sharded = division.shard_update and ranks.size > 1
        assert config.weight_decay is not None
        build = partial(
            build_optimizer,
            config.optimizer,
            model,
            lr,
            config.weight_decay,
            config.backend,
            config.state_dtype,
            config.optimizer_option,
            config.max_grad_norm,
            sharded,
        )
        whole: Any = ranks.together(build)
        self.whole, self._model, self._ranks = whole, model, ranks
        self._sharded = whole if sharded else None  # a ZeroRedundancyOptimizer
        self._fp16, self._device = config.precision == "fp16", config.device
        # Bighorn's optimizers clip by themselves.
        self._clip = None if OPTIMIZERS[config.optimizer].state_dtypes else config.max_grad_norm
        if self._clip is not None and division.parallel == "tp" and ranks.size > 1:
            raise InputError(
                f"--max-grad-norm with --optimizer {config.optimizer} and --parallel tp: torch adds no norms of whole "
                "and of divided tensors up. Leave one of them out, or take lamb or came."
            )
        policy = scale_policy(config.loss_scale)
        self._forward = forward
        self.optimizer: torch.optim.Optimizer = whole if self._sharded is None else self._sharded.optim
        self.scaler = LossScaler(policy, max_consecutive_overflows=MOST_OVERFLOWS, enabled=policy is not None)
        self._overlap = None
        if division.tail_overlap and isinstance(self._forward, DistributedDataParallel):
            self._overlap = TailOverlap(self._forward, whole, scaler=self.scaler)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters."""
        for group in self.whole.param_groups:
            group["lr"] = lr

    def autocast(self) -> AbstractContextManager[Any]:
        """In which the model computes, and nothing goes backward."""
        return torch.autocast(self._device, torch.float16) if self._fp16 else nullcontext()

    def part(self, last: bool) -> AbstractContextManager[Any]:
        """In which a part of a batch goes forward and backward: gradients are sent with the last one."""
        if last or not isinstance(self._forward, DistributedDataParallel):
            return nullcontext()
        sending: AbstractContextManager[Any] = self._forward.no_sync()
        return sending

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> bool:
        """Step, and forget the gradients; False if they overflowed, so that nothing was changed.

        Raises:
            FloatingPointError: Too many steps in a row have overflowed.
        """
        if self._clip is not None:
            if self._overlap is not None:
                self._overlap.synchronize()
            self.scaler.unscale_(self.whole)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        if self._overlap is not None:
            self._overlap.step()
        else:
            self.scaler.step(self.whole)
        self.scaler.update()
        self._model.zero_grad()
        return not self.scaler.state_dict().get("overflows")

    def telemetry(self, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """The attributes ``names`` of the optimizer's telemetry, each by parameter, in the model's order."""
        here = self.optimizer.telemetry()  # type: ignore[attr-defined]
        figures = {name: dict(zip(here.names, getattr(here, name).tolist(), strict=True)) for name in names}
        if self._sharded is not None:
            shards = self._ranks.gather(figures)
            figures = {name: dict(ChainMap(*(shard[name] for shard in shards))) for name in names}
        order = [key for key, _ in self._model.named_parameters()]
        return {name: {key: of[key] for key in order if key in of} for name, of in figures.items()}

    def state_dict(self) -> dict[str, Any]:
        """That of one optimizer without shards, in the first process; call it in all processes."""
        if self._sharded is not None:
            self._sharded.consolidate_state_dict(to=0)
        if not self._ranks.first:
            return {}
        optimizer = self.whole.state_dict()
        if self._sharded is not None:
            # It leaves the names of the first process's parameters in groups that hold those of all.
            names = {parameter: name for name, parameter in self._model.named_parameters()}
            for saved, group in zip(optimizer["param_groups"], self.whole.param_groups, strict=True):
                saved["param_names"] = [names[parameter] for parameter in group["params"]]
        state: dict[str, Any] = optimizer
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned, with any number of processes, sharded or not."""
        names = [group["param_names"] for group in self.optimizer.param_groups]
        self.whole.load_state_dict(state)
        if self._sharded is not None:
            self._sharded.state.clear()  # a second copy of what it has given to its parts
            for groups in (self._sharded.param_groups, self.optimizer.param_groups):
                for group, own in zip(groups, names, strict=True):
                    group["param_names"] = own
