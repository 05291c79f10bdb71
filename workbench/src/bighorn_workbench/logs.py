"""``--log``: the figures of runs in TensorBoard or Weights & Biases, by their own writers."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec

import click

from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError, visible
from bighorn_workbench.history import History
from bighorn_workbench.options import Name
from bighorn_workbench.run import Run

LOGS = ("tensorboard", "wandb")


def _installed(ctx: click.Context, param: click.Parameter, kind: str | None) -> str | None:  # noqa: ARG001 - click's
    if kind is not None and find_spec(kind) is None:
        raise InputError(f"--log {kind} needs its package. Install it with: pip install {kind}")
    return kind


log_option = click.option(
    "--log", type=Name(LOGS), callback=_installed, help="Also log the figures to TensorBoard, in runs/, or to W&B."
)


@contextmanager
def opened(
    kind: str, name: str, config: RunConfig, results: Mapping[str, float]
) -> Iterator[Callable[[dict[str, float], int], object]]:
    """Open a run of a log, with its options and results; yield a function that writes values by name, of a step."""
    options = {key: value for key, value in asdict(config).items() if isinstance(value, str | int | float)}
    options = {key: visible(value) if isinstance(value, str) else value for key, value in options.items()}
    results = {visible(key): value for key, value in results.items()}
    if kind == "tensorboard":
        with import_module("torch.utils.tensorboard").SummaryWriter(comment="-" + re.sub(r"\W+", "-", name)) as writer:
            writer.add_hparams(options, results, run_name=".")
            yield lambda values, step: [writer.add_scalar(visible(key), value, step) for key, value in values.items()]
    else:
        with import_module("wandb").init(project="bighorn", name=name, config=options) as writer:
            writer.summary.update(results)
            yield lambda values, step: writer.log({visible(key): value for key, value in values.items()}, step=step)


def failed(kind: str, error: Exception) -> str:
    """Return the warning about a log that has failed, on a full disk or without a network; the run continues."""
    return f"Warning: --log {kind} has failed, and gets nothing more ({type(error).__name__}: {error})."


@contextmanager
def logged(kind: str, run: Run, warn: Callable[[str], object]) -> Iterator[Callable[[], object]]:
    """Yield a function that writes the steps and evaluations since its last call, and call it at the end."""
    done, tested, stack = 0, False, ExitStack()
    failures: list[Exception] = []

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # the packages may raise any
            failures.append(error)
            if len(failures) == 1:
                warn(failed(kind, error))

    def write_since(history: History) -> None:
        nonlocal tested
        found, series = dict(history.evaluations), {"loss": history.loss, "lr": history.lr, **history.batch_metrics}
        for step in range(done + 1, len(history.loss) + 1):
            values = {f"train/{name}": of[step - 1] for name, of in series.items()}
            write(values | {f"validation/{name}": value for name, value in found.get(step, {}).items()}, step)
        if history.test and not tested:
            tested = True
            write({f"test/{name}": value for name, value in history.test.items()}, len(history.loss))

    def update() -> None:
        nonlocal done
        history = run.history  # a loss that is not finite raises here, and is no error of the log
        if not failures:
            attempt(lambda: write_since(history))
        done = len(history.loss)

    try:
        write = stack.enter_context(opened(kind, f"{run.config.optimizer}, seed {run.config.seed}", run.config, {}))
    except Exception as error:
        raise InputError(f"--log {kind} cannot be opened ({type(error).__name__}: {error}).") from error
    try:
        yield update
    finally:
        try:
            update()
        finally:
            attempt(stack.close)
