"""``--log``: the figures of runs in TensorBoard or Weights & Biases, by their own writers."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec

import click

from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.run import Run

LOGS = ("tensorboard", "wandb")


def _installed(ctx: click.Context, param: click.Parameter, kind: str | None) -> str | None:  # noqa: ARG001 - click's
    if kind is not None and find_spec(kind) is None:
        raise InputError(f"--log {kind} needs its package. Install it with: pip install {kind}")
    return kind


log_option = click.option(
    "--log", type=click.Choice(LOGS), callback=_installed, help="Write the figures there too: runs/ is TensorBoard's."
)


@contextmanager
def opened(
    kind: str, name: str, config: RunConfig, results: Mapping[str, float]
) -> Iterator[Callable[[dict[str, float], int], object]]:
    """Open a run of a log, with its options and results; yield a function that writes values by name, of a step."""
    options = {key: value for key, value in asdict(config).items() if isinstance(value, str | int | float)}
    if kind == "tensorboard":
        with import_module("torch.utils.tensorboard").SummaryWriter(comment="-" + re.sub(r"\W+", "-", name)) as writer:
            writer.add_hparams(options, results, run_name=".")
            yield lambda values, step: [writer.add_scalar(key, value, step) for key, value in values.items()]
    else:
        with import_module("wandb").init(project="bighorn", name=name, config=options) as writer:
            writer.summary.update(results)
            yield lambda values, step: writer.log(values, step=step)


@contextmanager
def logged(kind: str, run: Run) -> Iterator[Callable[[], object]]:
    """Yield a function that writes the steps and evaluations since its last call, and call it at the end."""
    done = 0
    with opened(kind, f"{run.config.optimizer}, seed {run.config.seed}", run.config, {}) as write:

        def update() -> None:
            nonlocal done
            history = run.history
            tests, series = dict(history.tests), {"loss": history.loss, "lr": history.lr, **history.batch_metrics}
            for step in range(done + 1, len(history.loss) + 1):
                values = {f"train/{name}": of[step - 1] for name, of in series.items()}
                write(values | {f"test/{name}": value for name, value in tests.get(step, {}).items()}, step)
            done = len(history.loss)

        try:
            yield update
        finally:
            update()
