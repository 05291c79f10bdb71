"""The trial of a user's task before hours are spent: a batch of each split, a loss, its gradient, an evaluation."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from bighorn_workbench.builtin_tasks.user import UserError, UserTask, shown, user_call
from bighorn_workbench.config import PRECISIONS, RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.metrics import is_share
from bighorn_workbench.tasks import Task, defaults, epoch_seed, length, seed_generators, tensors_in, to_device

PATIENCE = 10.0
"""Seconds in which the batches of an evaluation are counted."""

MOST_BATCHES = 100_000
"""An evaluation with more batches than this within that time counts as endless."""


def check_task(task: UserTask, tuned: Task, config: RunConfig, by_seed: bool = False) -> None:
    """Try a task of a user, and the one without its validation data, which may be the same.

    Raises:
        InputError: Something is wrong with it.
    """
    Trial(task, config).run(("test",) if tuned is not task else ("test", "validation"), by_seed)
    if tuned is not task:
        assert isinstance(tuned, UserTask)
        Trial(tuned, config).run(("validation",))


def held_out(task: Task) -> Task:
    """Return the task on which options are chosen: it has the split "validation"."""
    if not hasattr(task, "held_out"):
        return task
    seed_generators(0)  # a split that draws from them is the same in every process
    made: Task = task.held_out()
    return UserTask(made, f"{task.place}.held_out()") if isinstance(task, UserTask) else made


def resolved(task: Task, config: RunConfig) -> tuple[RunConfig, Task]:
    """Return a resolved configuration, and the task with validation data; a task of a user was tried with both."""
    tuned, config = held_out(task), config.resolved(task)
    if isinstance(task, UserTask):
        check_task(task, tuned, config)
    return config, tuned


class Trial:
    """A trial of a task as a run with a resolved ``config`` would use it."""

    def __init__(self, task: UserTask, config: RunConfig) -> None:
        self.task, self.config, self.device = task, config, torch.device(config.device)
        self.place = task.place

    def run(self, splits: Iterable[str] = ("test",), by_seed: bool = False) -> None:
        """Try everything, with evaluations on ``splits``, and with ``by_seed`` whether seeds make a difference.

        Raises:
            InputError: Something is wrong. The message names the method, what it returned, and the remedy.
        """
        torch.set_num_threads(self.config.threads or 1)
        self._check_switches("its import")
        model = self._model()
        if by_seed:
            self._other_seed(model)
        batch = self._training_batch()
        self._loss(model, batch)
        for split in splits:
            try:
                self._other_batches(split)
                self._evaluation(model, split)
            except UserError as error:
                if split != "validation":
                    raise
                raise InputError(
                    f"{error}\nRuns are evaluated on the split 'validation' on the way: give the task one, or a method "
                    "held_out() that returns the task with a part of its training data as that split."
                ) from error

    def _model(self) -> nn.Module:
        """Make the model twice, from the same seed."""
        model, again = self._new_model(), self._new_model()
        self._check_switches("model()")
        self._check_shared(model, again)
        others = dict(again.named_parameters())
        if others.keys() != dict(model.named_parameters()).keys():
            raise InputError(f"{self.place}: model() gives other parameters at each call. Let it always give the same.")
        for name, one in model.named_parameters():
            if one.device.type not in ("cpu", self.device.type):
                raise InputError(
                    f"{self.place}: model() has {name} on {one.device}, but --device is {self.device}. Make it on the "
                    "CPU; the run moves it."
                )
            if not _same(one, others[name]):
                raise InputError(
                    f"{self.place}: model() gives another {name} for the same seed, so that no run can be repeated. "
                    "Initialise it by torch's, NumPy's or Python's global generator, which the run seeds."
                )
        return model.to(self.device, PRECISIONS.get(self.config.precision, torch.float32))

    def _check_shared(self, model: nn.Module, again: nn.Module) -> None:
        """Raise an error for two models that share what a run changes: each run would continue the last one.

        Tensors that no run changes may be shared, such as the matrix of a graph: they are compared after a batch.
        """
        taken = {_place(tensor) for _, tensor in _tensors(again)} - {0}
        shared = {name: tensor for name, tensor in _tensors(model) if _place(tensor) in taken}
        for name, tensor in shared.items():
            if tensor.requires_grad:
                self._refuse_shared(name)
        self._shared = list(shared)

    def _refuse_shared(self, name: str) -> NoReturn:
        raise InputError(
            f"{self.place}: model() gives the same {name} at each call, so that a run would begin with what the one "
            "before has made of it. Make a new model, or return copy.deepcopy() of one."
        )

    def _other_seed(self, model: nn.Module) -> None:
        """Raise an error if models of two seeds start equal, unless the task is pretrained."""
        if defaults(self.task).pretrained:
            return
        others = dict(_tensors(self._new_model(self.config.seed + 1)))
        if all(_same(tensor, others[name]) for name, tensor in _tensors(model) if name in others):
            raise InputError(
                f"{self.place}: model() gives the same initial values for the seeds {self.config.seed} and "
                f"{self.config.seed + 1}, so that all runs would be one. Take torch.manual_seed() out of it and make "
                "the model anew, or give the task the attribute pretrained = True if every run is to begin with these "
                "weights."
            )

    def _check_switches(self, what: str, gradients: bool = True) -> None:
        """Raise an error if a call has changed torch's global switches, on which all later calls depend."""
        device = torch.empty(0).device  # get_default_device() fails after set_default_device(None) before torch 2.9
        if device.type not in ("cpu", self.device.type):
            raise InputError(
                f"{self.place}: {what} leaves torch's default device at {device}, but --device is {self.device}. Set "
                "it for a block alone, as in `with torch.device(...)`."
            )
        if gradients and not torch.is_grad_enabled():
            raise InputError(
                f"{self.place}: {what} leaves gradients switched off, so that no step could train. Switch them off for "
                "a block alone, as in `with torch.no_grad()`."
            )

    def _new_model(self, seed: int | None = None) -> nn.Module:
        seed_generators(self.config.seed if seed is None else seed)
        model = self.task.model()
        if not isinstance(model, nn.Module):
            raise InputError(f"{self.place}: model() returned {shown(model)}, but must return a torch.nn.Module.")
        for name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise InputError(
                    f"{self.place}: model() has {name} without a shape before the first batch. Give it its sizes."
                )
            if parameter.is_complex():
                raise InputError(
                    f"{self.place}: model() has the complex parameter {name}, which no run converts to its "
                    "--precision. Keep torch.view_as_real() of it as the parameter."
                )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError(f"{self.place}: model() has no trainable parameters. Give it one with requires_grad.")
        return model

    def _training_batch(self) -> Any:
        """Take the first batch twice, from the same seed."""
        size = self.config.batch_size or 1
        what = f"{self.place}: batches('train', {size}, generator)"
        batches = self._batches("train")
        if length(batches) is None and defaults(self.task).samples is None and self.config.steps is None:
            raise InputError(
                f"{what} has no len(), so that an epoch has no length, and may be endless. Give --steps, or give the "
                "task an attribute samples or steps."
            )
        batch, again = self._first(batches, what), self._first(self._batches("train"), what)
        self._check_switches(what)
        self._check_size(batch, batches, what)
        if length(batches) == 0:
            raise InputError(f"{what} gives batches, but its len() is 0. Let it be the number of batches of a pass.")
        pairs = zip(tensors_in(batch), tensors_in(again), strict=False)
        if not all(_same(one, other) for one, other in pairs):
            raise InputError(
                f"{what} gives another first batch for a generator with the same seed, so that no run can be repeated "
                "or resumed. Draw the order from it, as in DataLoader(..., shuffle=True, generator=generator)."
            )
        return batch

    def _check_size(self, batch: Any, batches: Iterable[Any], what: str) -> None:
        """Raise an error for a batch size above the data, whose only batch has fewer samples."""
        size = self.config.batch_size or 1
        tensors = [tensor for tensor in tensors_in(batch) if tensor.ndim]
        samples = {tensor.shape[0] for tensor in tensors}
        of_size = any(size in tensor.shape for tensor in tensors)  # such as a batch with samples along dim 1
        if len(samples) == 1 and min(samples) < size and not of_size and length(batches) == 1:
            raise InputError(
                f"{what} gives one batch of {min(samples)} samples: there are no more. Take a batch size of at most "
                f"{min(samples)}."
            )

    def _batches(self, split: str) -> Iterable[Any]:
        seed_generators(self.config.seed)
        generator = torch.Generator().manual_seed(epoch_seed(self.config.seed, 0))
        return self.task.batches(split, self.config.batch_size or 1, generator)

    def _first(self, batches: Iterable[Any], what: str) -> Any:
        for batch in batches:
            for tensor in tensors_in(batch):
                if tensor.device.type not in ("cpu", self.device.type):
                    raise InputError(
                        f"{what} has a tensor on {tensor.device}, but --device is {self.device}. Leave it on the CPU; "
                        "the run moves it."
                    )
            return batch
        raise InputError(
            f"{what} gives no batch: the split is empty, its iterator was used up before, or drop_last leaves nothing "
            "at this batch size. Return a new iterator at every call, or take a smaller --batch-size."
        )

    def _loss(self, model: nn.Module, batch: Any) -> None:
        what = f"{self.place}: loss(model, batch)"
        given = f"for batch = {shown(batch)}"
        before = {name: tensor.detach().clone() for name, tensor in _tensors(model) if name in self._shared}
        seed_generators(self.config.seed)
        fp16 = self.config.precision == "fp16"
        with torch.autocast(self.device.type, torch.float16, enabled=fp16):
            returned = self.task.loss(model.train(), to_device(batch, self.device))
        for name, tensor in _tensors(model):
            if name in before and not _same(before[name], tensor):
                self._refuse_shared(name)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        if not isinstance(loss, Tensor) or loss.ndim:
            raise InputError(
                f"{what} returned {shown(loss)} {given}, but must return a scalar tensor: the batch's mean."
            )
        if loss.device.type != self.device.type or not loss.is_floating_point():
            raise InputError(
                f"{what} returned a {loss.dtype} on {loss.device} {given}, but must return a real number on the "
                f"model's device, {self.device}."
            )
        self._check_switches("loss(model, batch)")
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            raise InputError(
                f"{what} returned {shown(metrics)} beside the loss {given}, but must return metrics by name."
            )
        for name, value in metrics.items():
            if not _is_number(value):
                raise InputError(
                    f"{what} returned the metric {name!r} = {shown(value)} {given}, which must be a number."
                )
        if not math.isfinite(loss.item()):
            raise InputError(
                f"{what} is {loss.item()} {given}, before any step. Look for a logarithm or a division of zero, or for "
                "NaN in the data."
            )
        if not loss.requires_grad:
            raise InputError(
                f"{what} does not depend on the parameters: it has no gradient. Compute it by calling model(...), "
                "without torch.no_grad(), .item() or .detach()."
            )
        user_call(f"{self.place}: the backward pass of loss(model, batch) {given}", loss.backward)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not any(gradient.any() for gradient in gradients):
            raise InputError(f"{what} does not depend on the parameters: all gradients are zero {given}.")
        if not all(gradient.isfinite().all() for gradient in gradients) and not fp16:
            raise InputError(f"{what} has gradients that are not finite {given}. Look for a root or a norm of zero.")

    def _other_batches(self, split: str) -> None:
        """Count the batches of a split that is evaluated, since an evaluation of endless ones would never end."""
        batches, ends = self._batches(split), time.monotonic() + PATIENCE
        self._first(batches, f"{self.place}: batches({split!r}, {self.config.batch_size}, generator)")
        if length(batches) is not None:
            return
        for number, _ in enumerate(batches):
            if number >= MOST_BATCHES:
                raise InputError(
                    f"{self.place}: batches({split!r}, {self.config.batch_size}, generator) gives more than "
                    f"{MOST_BATCHES:,} batches: it does not end. Let it make one pass over the split."
                )
            if time.monotonic() > ends:
                return

    @torch.no_grad()
    def _evaluation(self, model: nn.Module, split: str) -> None:
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        with torch.autocast(self.device.type, torch.float16, enabled=self.config.precision == "fp16"):
            found = self.task.evaluate(model.eval(), split)
        what = f"evaluate(model, {split!r})"
        self._check_switches(what, gradients=False)
        frozen = [
            name for name, parameter in model.named_parameters() if parameter.requires_grad is not trained.get(name)
        ]
        if frozen:
            raise InputError(
                f"{self.place}: {what} changes requires_grad of {frozen[0]}, so that the next step would train other "
                "parameters. Leave it: no gradients are computed in an evaluation."
            )
        value = found[self.task.metric]
        if not math.isfinite(value):
            raise InputError(
                f"{self.place}: evaluate(model, {split!r}) gives {self.task.metric} = {value} before any step, which "
                "decides nothing. Return a finite number."
            )
        if value > 1 and is_share(self.task.metric):
            raise InputError(
                f"{self.place}: evaluate(model, {split!r}) gives {self.task.metric} = {value:g}, but an accuracy is a "
                "share from 0 to 1. Divide it by 100, or give the metric another name."
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none, as on the device meta."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, in any dtype and layout."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.contiguous().reshape(-1).view(torch.uint8)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex() and not value.is_meta
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)
