"""One training step: forward and backward passes, then the optimizer, with loss scaling, clipping and overlap."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bighorn import FixedScale, LossScaler, TailOverlap, WindowScale, offload, shard_update
from bighorn_workbench.builtin_tasks.user import UserTask, user_call
from bighorn_workbench.config import ParallelConfig, RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.optimizers import OF_BIGHORN, OPTIMIZERS, STATE_DTYPES
from bighorn_workbench.ranks import Ranks
from bighorn_workbench.tasks import Task, map_tensors, tensors_in, to_device

MAX_OVERFLOWS = 50
"""Overflows in a row after which a lower loss scale does not help: a dynamic one has reached its minimum long
before."""


class TrainStep:
    """The training steps of a model that several processes may share.

    Args:
        task: The task.
        model: The model without wrappers.
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
        batch_metrics: The names of the metrics that the last loss came with.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        config: RunConfig,
        parallel: ParallelConfig,
        ranks: Ranks,
        lr: float,
        options: Mapping[str, Any],
        loss_scale: FixedScale | WindowScale | None,
    ) -> None:
        sharded = parallel.shard_update and ranks.size > 1
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True) if ranks.size > 1 else model
        excluded = getattr(task, "excluded", None)
        whole: Any = ranks.together(lambda: build_optimizer(config, model, lr, options, sharded, excluded))
        self.scaler = LossScaler(loss_scale, max_consecutive_overflows=MAX_OVERFLOWS, enabled=loss_scale is not None)
        self._clip = None if config.optimizer in OF_BIGHORN else config.max_grad_norm
        self._offloaded = None
        if parallel.offload:
            whole = self._offloaded = offload(model, whole, max_grad_norm=self._clip, scaler=self.scaler)
            self._clip = None
        self.whole = whole
        self._sharded = whole if sharded else None  # a ZeroRedundancyOptimizer
        self.optimizer: torch.optim.Optimizer = whole.optim if sharded else whole
        self._task, self._model, self._forward, self._ranks = task, model, forward, ranks
        self._device, self._fp16 = torch.device(config.device), config.precision == "fp16"
        self._accumulate = parallel.accumulate
        self.batch_metrics: tuple[str, ...] = ()
        self._overlap = None
        if parallel.tail_overlap and isinstance(forward, DistributedDataParallel):
            self._overlap = TailOverlap(forward, self.whole, scaler=self.scaler)

    def __call__(self, batch: Any, lr: float, record: Callable[[Tensor], None]) -> bool:
        """Make a step with this process's samples of a batch.

        Args:
            batch: The whole batch, as the task yields it.
            lr: The learning rate.
            record: Called with the batch's mean loss and :attr:`batch_metrics`, before the model changes.

        Returns:
            False if gradients overflowed, so that the step changed nothing.

        Raises:
            FloatingPointError: Too many steps in a row have overflowed.
        """
        for group in self.whole.param_groups:
            group["lr"] = lr
        self._model.train()
        means: Tensor | float = 0.0
        for number, part in enumerate(rank_parts(batch, self._ranks.rank, self._ranks.size, self._accumulate), start=1):
            last = number == self._accumulate
            with nullcontext() if last else self._without_sync():
                loss, metrics = self._score(part)
                means = means + torch.stack([loss.detach().float(), *metrics]) / self._accumulate
                if last:  # before the backward pass, since the overlap updates parameters within it
                    record(self._ranks.mean(means))
                self._backward(self.scaler.scale(loss / self._accumulate))
        return self.update()

    def _backward(self, loss: Tensor) -> None:
        """Compute gradients, by a user's functions and hooks too; an error of gloo is left to :class:`Ranks`."""
        if isinstance(self._task, UserTask) and self._ranks.size == 1:
            user_call(f"{self._task.place}: the backward pass of loss(model, batch)", loss.backward)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def _score(self, part: Any) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss of samples, and their metrics in the order of :attr:`batch_metrics`."""
        if self._device.type != "cpu":
            part = to_device(part, self._device)
        with self.autocast():
            returned = self._task.loss(self._forward, part)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        self.batch_metrics = tuple(metrics)
        return loss, [torch.as_tensor(value, device=loss.device).detach().float() for value in metrics.values()]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes: autocast for ``--precision fp16``."""
        return torch.autocast(self._device.type, torch.float16) if self._fp16 else nullcontext()

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

    def telemetry(self) -> dict[str, dict[str, float]]:
        """Return the optimizer's telemetry by parameter, in the model's order."""
        found = self.optimizer.telemetry().as_dict()  # type: ignore[attr-defined]
        if self._sharded is not None:
            found = ChainMap(*self._ranks.gather(found))
        return {name: found[name] for name, _ in self._model.named_parameters() if name in found}

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
        if not all(isinstance(each, dict) for each in self.optimizer.state.values()):  # torch takes anything
            raise TypeError("the optimizer's state of a parameter must be a dict")
        if self._sharded is not None:
            self._sharded.state.clear()  # otherwise the state of its parts would exist twice
            for groups in (self._sharded.param_groups, self.optimizer.param_groups):
                for group, group_names in zip(groups, names, strict=True):
                    group["param_names"] = group_names


def build_optimizer(
    config: RunConfig,
    model: nn.Module,
    lr: float,
    options: Mapping[str, Any],
    sharded: bool,
    excluded: Callable[[str, nn.Parameter], bool] | None,
) -> torch.optim.Optimizer:
    """Build the optimizer of a resolved run over named parameters.

    The parameters that are ``excluded`` have no weight decay and no trust ratio: by default vectors (biases and norms),
    as in the BERT runs of LAMB's authors. ``sharded`` wraps the optimizer in a ZeroRedundancyOptimizer.
    """
    named = list(model.named_parameters())
    out = {label for label, parameter in named if (excluded(label, parameter) if excluded else parameter.ndim <= 1)}
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in named if pair[0] not in out], "weight_decay": config.weight_decay},
        {"params": [pair for pair in named if pair[0] in out], "weight_decay": 0.0},
    ]
    if config.optimizer in ("lamb", "lars"):
        groups[1]["adapt"] = False
    ours: dict[str, Any] = {}
    if config.optimizer in OF_BIGHORN:
        ours = {"backend": config.backend or "auto", "state_dtype": STATE_DTYPES.get(config.state_dtype or "")}
        ours |= {"max_grad_norm": config.max_grad_norm}
    groups = [group for group in groups if group["params"]]
    try:
        optimizer = OPTIMIZERS[config.optimizer].build(groups, lr=lr, **ours, **options)
        return shard_update(optimizer) if sharded else optimizer
    except (TypeError, ValueError, RuntimeError) as error:  # such as a backend that does not work on this machine
        raise InputError(f"--optimizer {config.optimizer}: {error}") from error


def rank_parts(batch: Any, rank: int, processes: int, parts: int) -> Iterator[Any]:
    """Yield the parts of a process's share of a batch: each tensor's samples along dim 0.

    Raises:
        InputError: The samples cannot be split evenly, or their number is unknown.
    """
    if processes * parts == 1:
        yield batch
        return
    samples = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_in(batch)}
    if len(samples) != 1 or (count := samples.pop()) % (processes * parts) or not count:
        raise InputError(
            f"a batch cannot be split evenly over {processes} x {parts} (processes x --accumulate): its tensors have "
            f"{', '.join(str(list(tensor.shape)) for tensor in tensors_in(batch)) or 'no samples'}. Give every batch "
            "the same number of samples along dim 0, a multiple of that (drop_last=True in a DataLoader)."
        )
    share = map_tensors(lambda tensor: tensor[rank::processes], batch)
    for start in range(0, count // processes, each := count // (processes * parts)):
        yield map_tensors(itemgetter(slice(start, start + each)), share)
