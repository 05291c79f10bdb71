"""The options of a training run, their defaults, and the values that follow from them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bighorn.schedules import Cosine, PiecewiseConstant, Polynomial, Schedule, scaled_lr
from bighorn_workbench.builtin_tasks import TASKS, TaskName
from bighorn_workbench.checks import integer, number
from bighorn_workbench.errors import InputError
from bighorn_workbench.optimizers import BACKENDS, OF_BIGHORN, OPTIMIZERS, STATE_DTYPES
from bighorn_workbench.options import COUNT, MOST, POSITIVE, THREADS, Options, option
from bighorn_workbench.tasks import Task, defaults
from bighorn_workbench.values import counted, device_of, read_options, scale_policy, warmup_steps

BASE_BATCH = 256
"""The batch size of the default learning rates, to which ``--lr-scaling`` is relative."""

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtypes of weights."""

DECAYS: dict[str, Callable[[float, int], Schedule]] = {
    "linear": Polynomial,  # of power 1, as for BERT in the LAMB paper (arXiv:1904.00962v5, section 4.1)
    "cosine": Cosine,
    "constant": lambda peak, _: PiecewiseConstant([], [peak]),
}
"""The schedules after the warm-up, each created from its first value and its number of steps."""


TASK_HELP = "What to train on: a built-in task, or a bighorn_workbench.tasks.Task of yours in a file or module."
DATA_HELP = (
    "Data for the task: a text FILE for text, a DIR with the idx files for mnist; NAME of a file or module is called "
    "with it."
)


def _by_name(table: Mapping[str, Any], attribute: str) -> str:
    return ", ".join(f"{name} {getattr(entry, attribute):g}" for name, entry in table.items())


def check_device(name: str) -> None:
    """Raise an error for a device that is absent, or on which runs are not made."""
    if device_of(name).type == "xla":
        raise InputError(
            f"--device {name}: its steps are graphs that end where a program calls torch_xla.sync(), which runs of "
            "this command do not. Use bighorn.Lamb and Came in your own loop."
        )


@dataclass(frozen=True)
class RunConfig(Options):
    """The options of a run. None stands for the task's or the optimizer's default.

    Values are as on the command line until :meth:`resolved` fills in the defaults.
    """

    task: str = option("digits", TASK_HELP, kind=TaskName())
    data: str | None = option(None, DATA_HELP, shown="what comes with the task")
    optimizer: str = option(
        "lamb",
        "Bighorn's lamb, came or lars, or one of torch's as a baseline. came has bias_correction=True; came-published "
        "is the paper's rule.",
        choices=tuple(OPTIMIZERS),
    )
    batch_size: int | None = option(None, "Samples per step.", shown=_by_name(TASKS, "batch_size"), check=COUNT)
    lr: float | None = option(
        None,
        f"Peak learning rate; with --lr-scaling, the rate at batch {BASE_BATCH}.",
        shown=_by_name(OPTIMIZERS, "lr"),
        check=POSITIVE,
    )
    lr_scaling: str = option(
        "none",
        f"Multiply lr by batch-size / {BASE_BATCH} (linear) or its square root (sqrt).",
        choices=("none", "sqrt", "linear"),
    )
    warmup: str = option("10%", "Linear warm-up, as steps (200) or a share of the run (10%).")
    schedule: str = option(
        "linear", "After warm-up: decay to 0 along a line or half a cosine, or no decay.", choices=tuple(DECAYS)
    )
    epochs: float | None = option(
        None, "Passes over the training data.", shown=_by_name(TASKS, "epochs"), check=POSITIVE
    )
    steps: int | None = option(None, "Optimizer steps, instead of --epochs.", check=COUNT)
    weight_decay: float | None = option(
        None,
        "Weight decay; biases and norms have none.",
        shown=_by_name(OPTIMIZERS, "weight_decay"),
        check=partial(number, high=MOST),
    )
    seed: int = option(0, "Seed of weights, data order and dropout.", check=partial(integer, most=2**63 - 1))
    precision: str = option(
        "fp32",
        "fp32 or bf16: type of weights and gradients. fp16: mixed, computed under autocast over fp32 weights.",
        choices=(*PRECISIONS, "fp16"),
    )
    loss_scale: str | None = option(
        None, "For --precision fp16: none, a fixed number, or dynamic.", shown="dynamic with fp16, else none"
    )
    max_grad_norm: float | None = option(
        None, "Clip gradients to this 2-norm over all parameters.", shown="no clip", check=POSITIVE
    )
    state_dtype: str | None = option(
        None, "Type of lamb's moments, or of the momentum of came and lars.", shown="fp32", choices=tuple(STATE_DTYPES)
    )
    optimizer_option: tuple[str, ...] = option(
        (), "Another option of the optimizer, as NAME=VALUE like bias_correction=True; may be repeated.", shown="none"
    )
    backend: str | None = option(None, "Kernels of lamb, came and lars.", shown="auto", choices=("auto", *BACKENDS))
    device: str = option("cpu", "Device of torch for model, batches and optimizer; all but cpu need a single process.")
    threads: int | None = option(
        None,
        "CPU threads; a run is bitwise reproducible for one number of them.",
        shown="1 for digits, else torch's choice",
        check=THREADS,
    )

    def check(self) -> None:
        """Raise an error for an absent device, for unreadable words, and for options that exclude each other."""
        check_device(self.device)
        if scale_policy(self.loss_scale) is not None and self.precision != "fp16":
            raise InputError(
                f"--loss-scale {self.loss_scale} is for --precision fp16; {self.precision} holds gradients as small as "
                "any that matter: leave --loss-scale out."
            )
        warmup_steps(self.warmup, total=1)
        if self.epochs is not None and self.steps is not None:
            raise InputError("--epochs and --steps both set the length of the run: give one of them.")
        read_options(self.optimizer_option)
        for flag, value in (("--backend", self.backend), ("--state-dtype", self.state_dtype)):
            if value is not None and self.optimizer not in OF_BIGHORN:
                raise InputError(
                    f"{flag} {value} is for lamb, came and lars, but --optimizer {self.optimizer} is torch's own: "
                    f"leave {flag} out."
                )

    def resolved(self, task: Task) -> "RunConfig":
        """Fill in every None that the task, the optimizer or this machine decides."""
        about, recipe = defaults(task), OPTIMIZERS[self.optimizer]
        steps = about.steps if self.epochs is None and self.steps is None else self.steps
        return dataclasses.replace(
            self,
            batch_size=about.batch_size if self.batch_size is None else self.batch_size,
            lr=recipe.lr if self.lr is None else self.lr,
            epochs=about.epochs if self.epochs is None and steps is None else self.epochs,
            steps=steps,
            weight_decay=recipe.weight_decay if self.weight_decay is None else self.weight_decay,
            loss_scale=self.loss_scale or ("dynamic" if self.precision == "fp16" else "none"),
            threads=self.threads or (1 if about.one_thread else torch.get_num_threads()),
        )

    @property
    def length(self) -> str:
        """The length of a resolved run, as text."""
        return counted(self.steps or 0, "step") if self.epochs is None else counted(float(self.epochs), "epoch")

    def total_steps(self, epoch_size: tuple[int, int] | None) -> int:
        """Return the steps of a resolved run; a partial last step is omitted.

        Args:
            epoch_size: The steps of an epoch, as a fraction; None if they are not known.
        """
        if epoch_size is not None and epoch_size[0] < epoch_size[1]:
            raise InputError(
                f"batch size {self.batch_size} is more than the {epoch_size[0]} training samples of {self.task}: "
                f"choose at most {epoch_size[0]}."
            )
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        if epoch_size is None:
            raise InputError(
                f"{self.task} does not say how long an epoch is: batches('train', ...) has no len(). Give --steps, or "
                "give the task an attribute samples or steps."
            )
        total = math.floor(self.epochs * epoch_size[0] / epoch_size[1])
        if total < 1:
            raise InputError(f"--epochs {self.epochs:g} is less than one step at batch size {self.batch_size}.")
        return total

    def peak_lr(self) -> float:
        """The learning rate after warm-up, scaled to the batch size, of a resolved run."""
        assert self.lr is not None
        assert self.batch_size is not None
        if self.lr_scaling == "none":
            return self.lr
        scaled = scaled_lr(self.lr, BASE_BATCH, self.batch_size, self.lr_scaling)
        try:
            return POSITIVE(f"--lr {self.lr:g} with --lr-scaling {self.lr_scaling}", scaled)
        except ValueError as error:
            raise InputError(str(error)) from error

    def lr_schedule(self, total: int) -> Schedule:
        """Return a resolved run's schedule: linear warm-up to the peak, then one of :data:`DECAYS` until ``total``.

        Example:
            >>> RunConfig(lr=1.0, warmup="2", batch_size=32).lr_schedule(total=6).as_list(6)
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        peak, warmup = self.peak_lr(), warmup_steps(self.warmup, total)
        if warmup > total:
            raise InputError(f"--warmup {self.warmup} is longer than the run of {total} steps: take less.")
        decay_steps = max(total - warmup, 1)  # a run of warm-up alone has no decay
        return DECAYS[self.schedule](peak, decay_steps).after_warmup(warmup)


@dataclass(frozen=True)
class ParallelConfig(Options):
    """How processes divide the work of a step. It changes results only by rounding, and checkpoints do not store it."""

    accumulate: int = option(
        1, "Parts in which each process computes its share of a batch, one after the other.", check=COUNT
    )
    tail_overlap: bool = option(
        False, "Step parameters while the last gradients are still in flight; with several processes.", shown="off"
    )
    shard_update: bool = option(
        False, "Each process keeps optimizer state for, and steps, a part of the tensors.", shown="off"
    )
    offload: bool = option(
        False, "With --device cuda: keep optimizer state in the host's memory, and step there.", shown="off"
    )

    def check(self, config: RunConfig, processes: int) -> None:
        """Raise an error for a resolved run that this number of processes cannot divide in this way."""
        assert config.batch_size is not None
        if self.tail_overlap and self.shard_update:
            raise InputError(
                "--tail-overlap and --shard-update exclude each other: with shards, a step ends with an exchange of "
                "parameters, not of gradients. Leave one of them out."
            )
        if self.offload and config.device == "cpu":
            raise InputError(
                "--offload takes the optimizer of a GPU's model to the host's memory, where --device cpu has it "
                "already: give --device cuda, or leave --offload out."
            )
        if config.batch_size % (processes * self.accumulate):
            into = [f"{processes} processes"] * (processes > 1) + [f"--accumulate {self.accumulate}"] * (
                self.accumulate > 1
            )
            raise InputError(
                f"--batch-size {config.batch_size} cannot be split evenly over {' x '.join(into)}: take a multiple."
            )
