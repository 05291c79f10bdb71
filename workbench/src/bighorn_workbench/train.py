"""``bighorn train``."""

import math
import re
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bighorn_workbench import checkpoint, files, rate_hint
from bighorn_workbench.builtin_tasks import fingerprint, load
from bighorn_workbench.builtin_tasks.trial import resolved
from bighorn_workbench.builtin_tasks.user import UserError
from bighorn_workbench.config import ParallelConfig, RunConfig
from bighorn_workbench.display import Display, terminal
from bighorn_workbench.environment import device_name, environment
from bighorn_workbench.errors import InputError, after
from bighorn_workbench.logs import log_option, logged
from bighorn_workbench.metrics import metric_text
from bighorn_workbench.optimizers import state_bytes, without_compiler
from bighorn_workbench.options import FILE, Command, command_line, config_options, given, words
from bighorn_workbench.ranks import Interrupt, Ranks
from bighorn_workbench.run import MAX_UNREAD, DivergedError, Run
from bighorn_workbench.tasks import Task, defaults

Outputs = Mapping[str, Path | None]
"""The files to write, by option; None for an option that was not given."""


@click.command(cls=Command, epilog="Example: bighorn train --task text --steps 200 --report run.html")
@config_options(RunConfig)
@config_options(ParallelConfig)
@click.option("--save", type=FILE, help="Save the run here: ten times on the way, at the end and on Ctrl-C.")
@click.option(
    "--resume",
    type=FILE,
    help="Continue a saved run; its options come from the file, --save too, but not --task and --data of yours.",
)
@click.option("--report", type=FILE, help="Write an HTML report with curves and heat maps of layers by step.")
@click.option("--json", "json_file", type=FILE, help="Write options, history and result as JSON.")
@log_option
@click.pass_context
@without_compiler()
def train(
    ctx: click.Context,
    /,
    save: Path | None,
    resume: Path | None,
    report: Path | None,
    json_file: Path | None,
    log: str | None,
    **_: Any,
) -> None:
    """Train a model with LAMB, CAME or one of torch's optimizers.

    Without options: handwritten digits, a few seconds. Evaluations on the way are on validation data: a part of the
    training data, which the run then lacks, or the task's own. The test data are for the end. Ctrl-C finishes the
    step, saves and prints how to resume; the resumed run is bitwise identical to an uninterrupted one, on a GPU as far
    as torch's kernels are deterministic. Several processes share each batch:

    torchrun --nproc-per-node 2 --no-python bighorn train
    """
    outputs = {"--save": save or resume, "--report": report, "--json": json_file}
    with Ranks.join() as ranks:
        # Separate functions hold the model: see ranks.end_process_group.
        done = _run(ctx, outputs, resume, ranks, log)
    if not done:
        ctx.exit(130)


def _run(ctx: click.Context, outputs: Outputs, resume: Path | None, ranks: Ranks, log: str | None) -> bool:
    """Train; return False if Ctrl-C has ended the run early."""
    run, task, warnings = _set_up(ctx, outputs, resume, ranks)
    history = run.history
    command = command_line(ctx)
    history.commands.append(shlex.join(ranks.launcher) + " " * (ranks.size > 1) + command)
    console = terminal(quiet=not ranks.first)
    save = outputs["--save"]
    try:
        with Interrupt(echoes=ranks.size > 1) as interrupt:
            ranks.meet()  # a Ctrl-C at the display's first line must be safe in every process
            display = Display(run, console, history.seconds, warnings)

            def evaluate() -> None:
                run.evaluate()
                display.evaluated()
                if save is not None:
                    _save(run, save, ctx)

            with (
                logged(log, run, display.warn) if log and ranks.first else nullcontext(lambda: None) as update,
                display,
            ):
                if resume is not None and run.evaluation_missing:
                    evaluate()
                while not (ranks.any(interrupt.requested) or run.done):
                    run.train_step()
                    display.stepped()
                    if run.step == rate_hint.due(run) < run.total and (words := rate_hint.hint(run)):
                        display.warn(words)
                    if run.evaluation_due:
                        evaluate()
                    if run.evaluation_due or run.step % MAX_UNREAD == 0:
                        update()
                if run.done and not history.test:
                    run.test(task)
                    if save is not None:
                        _save(run, save, ctx)
    except UserError as error:  # of a step that has changed nothing, or an evaluation
        if ranks.size == 1 and run.step:
            with after(error):
                _finish(run, outputs, ctx, console, "Stopped")
        raise
    except DivergedError as error:
        diverged = InputError(f"{error}. {rate_hint.of_diverged(run.config)}")
        with after(diverged):
            _write(run, outputs, console)
        raise diverged from error
    _finish(run, outputs, ctx, console, "" if run.done else "Interrupted")
    return run.done


def _set_up(ctx: click.Context, outputs: Outputs, resume: Path | None, ranks: Ranks) -> tuple[Run, Task, list[str]]:
    """Create the run, or load it; return it with the task, which has the test data, and its warnings."""
    saved = None if resume is None else ranks.from_first(lambda: checkpoint.load(resume))
    config, parallel, task, tuned = ranks.together(lambda: _prepare(ctx, outputs, resume, saved, ranks))
    if ranks.size > 1:
        ranks.check_same(
            options={**asdict(config), **asdict(parallel), "data": None, "threads": None},
            training_data=fingerprint(tuned, config.batch_size or 1),
        )
    run = Run(config, tuned, ranks, parallel=parallel, split="validation")
    idle = {"--tail-overlap": parallel.tail_overlap, "--shard-update": parallel.shard_update}
    warnings = [
        f"{flag} has no effect in one process; see torchrun in --help."
        for flag, is_on in idle.items()
        if is_on and ranks.size == 1
    ]
    if saved is not None:
        differences = checkpoint.restore(run, saved)
        warnings += [f"not as it was saved, the last bits may differ: {difference}" for difference in differences]
    return run, task, warnings


def _prepare(
    ctx: click.Context, outputs: Outputs, resume: Path | None, saved: dict[str, Any] | None, ranks: Ranks
) -> tuple[RunConfig, ParallelConfig, Task, Task]:
    """Check the options, load the task and try it: the work that can fail in a single process.

    The first task has the test data, and the second the training and validation data.
    """
    options, parallel = given(ctx, RunConfig), ParallelConfig(**given(ctx, ParallelConfig))
    config = RunConfig(**options) if saved is None else checkpoint.config_of(saved, options)
    config.check()
    if config.device != "cpu" and ranks.size > 1:
        raise InputError(
            f"--device {config.device} with {ranks.size} processes is not supported: no machine with several GPUs "
            "has run this. Start one process, without torchrun, or use --device cpu."
        )
    if ranks.rank == 0:
        save = outputs["--save"]
        if save is not None:
            files.check_regular(save, "--save")
            files.check_outputs({"--save": save}, {"--data": config.data})
        others = {option: path for option, path in outputs.items() if option != "--save"}
        files.check_outputs(others, {"--save": save, "--data": config.data, "--resume": resume})
    task = load(config.task, config.data)
    config, tuned = resolved(task, config)
    return config, parallel, task, tuned


def _finish(run: Run, outputs: Outputs, ctx: click.Context, console: Console, ended: str) -> None:
    """Write the results; of a run that has ``ended`` early, save it and print how to continue."""
    ranks, save = run.ranks, outputs["--save"]
    if ended:
        name = re.sub(r"\W+", "-", run.config.task).strip("-")
        fresh = f"bighorn-{name}-{run.config.optimizer}-step{run.step}.pt"
        save = save or ranks.from_first(lambda: files.unused(Path(fresh)))
        _save(run, save, ctx)
    console.print(_summary(run))
    if words := rate_hint.hint(run):
        console.print(words, style="yellow")
    try:
        _write(run, outputs, console)
    finally:
        if save is not None:
            console.print(f"Checkpoint: {save}")
        if ended and save is not None:
            where = " on every machine, each with its --node-rank" if ranks.machines > 1 else ""
            again = _again(run, save, ctx)
            console.print(f"{ended} after step {run.step} of {run.total} and saved. Resume{where} with:\n  {again}")


def _save(run: Run, path: Path, ctx: click.Context) -> None:
    """Save the run; if that fails, report how to continue from the last save."""
    try:
        checkpoint.save(run, path)
    except InputError as error:
        remedy = f" Then continue with: {_again(run, path, ctx)}" if path.exists() else ""
        raise InputError(f"{error}{remedy}") from error


def _again(run: Run, path: Path, ctx: click.Context) -> str:
    """Return the command that resumes the run from ``path``."""
    more = words(ctx, {"report", "json_file", "log", *(field.name for field in fields(ParallelConfig))})
    return shlex.join([*run.ranks.launcher, *ctx.command_path.split(), *checkpoint.resuming(run.config, path), *more])


def _write(run: Run, outputs: Outputs, console: Console) -> None:
    """Write the report and the JSON, in the first process."""

    def page() -> str:
        from bighorn_workbench.reports.train import train_report

        return train_report(run)

    if run.ranks.first:
        files.finish(console.print, outputs["--report"], page, outputs["--json"], lambda: as_json(run))


def results(run: Run) -> dict[str, Any]:
    """Return the results of a finished run; None for values that were not measured."""
    evaluations, test, metric = run.history.evaluations, run.history.test, run.task.metric
    last = evaluations[-1][1] if evaluations else {"loss": None, metric: None}
    best = max if defaults(run.task).higher_is_better else min
    finite = [found[metric] for _, found in evaluations if math.isfinite(found[metric])]
    return {
        "steps": run.step,
        "epochs": run.epoch,
        **{f"test_{name}": value for name, value in (test or dict.fromkeys(last)).items()},
        **{f"validation_{name}": value for name, value in last.items()},
        f"best_validation_{metric}": best(finite, default=None),
        "train_seconds": run.history.seconds,
        "samples_per_second": run.step * run.batch_size / run.history.seconds if run.history.seconds else None,
        "skipped_steps": len(run.history.skipped),
        "optimizer_state_bytes": state_bytes(run.optimizer),
    }


def _summary(run: Run) -> Table:
    found = results(run)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    metric, test = run.task.metric, run.history.test
    for name in sorted(test, key=lambda name: name != metric):
        text = f"{test[name]:.4f}" if name == "loss" else metric_text(name, test[name], 2)
        table.add_row(f"Test {name}", Text(text, "bold" if name == metric else ""))
    if run.history.evaluations:
        text, best = (metric_text(metric, found[f"{key}_{metric}"], 2) for key in ("validation", "best_validation"))
        table.add_row(f"Validation {metric}", f"{text} (best {best})")
    epochs = "" if run.epoch is None else f" ({run.epoch:.2f} epochs)"
    table.add_row("Steps", f"{run.step} of {run.total}{epochs}")
    if run.config.device != "cpu":
        table.add_row("Device", device_name(run.config.device))
    table.add_row("Training time", f"{found['train_seconds']:.1f} s")
    if run.history.scale:
        table.add_row("Loss scale", f"{run.history.scale[-1]:g}; {found['skipped_steps']} steps skipped")
    share = " in the first process" if run.parallel.shard_update and run.ranks.size > 1 else ""
    table.add_row("Optimizer state", f"{found['optimizer_state_bytes'] / 1e6:.2f} MB{share}")
    return table


def as_json(run: Run) -> dict[str, Any]:
    """Return all data of a run, for later analysis."""
    history = {name: values for name, values in vars(run.history).items() if name != "seconds"}
    return {
        "config": asdict(run.config),
        "environment": environment(run.config.device),
        "data": {"description": defaults(run.task).description, "sha256": run.fingerprint},
        "peak_lr": run.peak_lr,
        "result": results(run),
        "hint": rate_hint.hint(run),
        "history": history,
    }
