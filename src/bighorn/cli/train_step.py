"""One training step: forward and backward passes, then the optimizer, with loss scaling, clipping and overlap."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bighorn import FixedScale, LossScaler, TailOverlap, WindowScale, offload
from bighorn.cli.config import ParallelConfig, RunConfig
from bighorn.cli.optimizers import OPTIMIZERS, build_optimizer
from bighorn.cli.ranks import Ranks

MAX_OVERFLOWS = 50
"""Overflows in a row after which a lower loss scale does not help: a dynamic one has reached its minimum long
before."""


class TrainStep:
    """The training steps of a model that several processes may share.

    Args:
        model: The model without wrappers.
        forward: The module to call for outputs: the model, or its wrapper.
        config: A resolved configuration.
        parallel: How processes divide the work.
        ranks: The processes.
        lr: The peak learning rate.
        options: Additional options of the optimizer.
        loss_scale: The scale policy; None for no loss scaling.

    Attributes:
        whole: The optimizer of all parameters.
        optimizer: The same, but with ``--shard-update`` the optimizer of this process's parameters.
        scaler: The loss scaler.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: nn.Module,
        config: RunConfig,
        parallel: ParallelConfig,
        ranks: Ranks,
        lr: float,
        options: Mapping[str, Any],
        loss_scale: FixedScale | WindowScale | None,
    ) -> None:
        assert config.weight_decay is not None
        sharded = parallel.shard_update and ranks.size > 1
        build = partial(
            build_optimizer,
            config.optimizer,
            model,
            lr,
            config.weight_decay,
            config.backend,
            config.state_dtype,
            options,
            config.max_grad_norm,
            sharded,
        )
        whole: Any = ranks.together(build)
        self.scaler = LossScaler(loss_scale, max_consecutive_overflows=MAX_OVERFLOWS, enabled=loss_scale is not None)
        # Bighorn's optimizers clip gradients themselves.
        self._clip = None if OPTIMIZERS[config.optimizer].state_dtypes else config.max_grad_norm
        self._offloaded = None
        if parallel.offload:
            whole = self._offloaded = offload(model, whole, max_grad_norm=self._clip, scaler=self.scaler)
            self._clip = None
        self.whole = whole
        self._sharded = whole if sharded else None  # a ZeroRedundancyOptimizer
        self.optimizer: torch.optim.Optimizer = whole.optim if sharded else whole
        self._model, self._forward, self._ranks = model, forward, ranks
        self._device, self._fp16 = torch.device(config.device), config.precision == "fp16"
        self._accumulate = parallel.accumulate
        self._overlap = None
        if parallel.tail_overlap and isinstance(forward, DistributedDataParallel):
            self._overlap = TailOverlap(forward, self.whole, scaler=self.scaler)

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float, record: Callable[[Tensor], None]) -> bool:
        """Make a step with this process's samples of a batch.

        Args:
            inputs: The samples, on the CPU.
            targets: Their targets, on the CPU.
            lr: The learning rate.
            record: Called with the batch's mean loss and accuracy, before the model changes.

        Returns:
            False if gradients overflowed, so that the step changed nothing.

        Raises:
            FloatingPointError: Too many steps in a row have overflowed.
        """
        for group in self.whole.param_groups:
            group["lr"] = lr
        self._model.train()
        means = torch.zeros(2, device=self._device)
        batches = list(zip(inputs.chunk(self._accumulate), targets.chunk(self._accumulate), strict=True))
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with nullcontext() if last else self._without_sync():
                loss, accuracy = self.score(self._forward, *batch)
                means += torch.stack((loss.detach(), accuracy)) / len(batches)
                if last:  # before the backward pass, since the overlap updates parameters within it
                    record(self._ranks.mean(means))
                self.scaler.scale(loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        return self.update()

    def score(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss and accuracy of samples on the CPU."""
        inputs, targets = (tensor.to(self._device, non_blocking=True) for tensor in (inputs, targets))
        with torch.autocast(self._device.type, torch.float16) if self._fp16 else nullcontext():
            logits = model(inputs)
        logits, targets = logits.flatten(0, -2).float(), targets.flatten().long()
        return cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()

    def _without_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients are accumulated in this process, without communication."""
        if self._offloaded is not None:
            return self._offloaded.accumulate()
        if not isinstance(self._forward, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[Any] = self._forward.no_sync()
        return context

    def update(self) -> bool:
        """Clip, step the optimizer and clear the gradients; return False if they overflowed.

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
        elif self._offloaded is not None:
            self._offloaded.step()
        else:
            self.scaler.step(self.whole)
        self.scaler.update()
        self._model.zero_grad()
        return not self.scaler.state_dict().get("overflows")

    def telemetry(self, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
        """Return the attributes ``names`` of the optimizer's telemetry, each by parameter, in the model's order."""
        local = self.optimizer.telemetry()  # type: ignore[attr-defined]
        values = {name: dict(zip(local.names, getattr(local, name).tolist(), strict=True)) for name in names}
        if self._sharded is not None:
            shards = self._ranks.gather(values)
            values = {name: dict(ChainMap(*(shard[name] for shard in shards))) for name in names}
        order = [key for key, _ in self._model.named_parameters()]
        return {name: {key: of[key] for key in order if key in of} for name, of in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of one unsharded optimizer, in the first process; call it in all processes."""
        if self._sharded is not None:
            self._sharded.consolidate_state_dict(to=0)
        if not self._ranks.first:
            return {}
        state: dict[str, Any] = self.whole.state_dict()
        if self._sharded is not None:
            # Its groups have all parameters, but only the names of the first process's parameters.
            names = {parameter: name for name, parameter in self._model.named_parameters()}
            for saved, group in zip(state["param_groups"], self.whole.param_groups, strict=True):
                saved["param_names"] = [names[parameter] for parameter in group["params"]]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the value of :meth:`state_dict`, with any number of processes, sharded or not."""
        names = [group["param_names"] for group in self.optimizer.param_groups]
        self.whole.load_state_dict(state)
        if self._sharded is not None:
            self._sharded.state.clear()  # otherwise the state of its parts would exist twice
            for groups in (self._sharded.param_groups, self.optimizer.param_groups):
                for group, own in zip(groups, names, strict=True):
                    group["param_names"] = own
