"""``bighorn train``."""

import math
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bighorn.cli import checkpoint, files, folder
from bighorn.cli.config import Division, RunConfig
from bighorn.cli.devices import device_name
from bighorn.cli.display import Display, quantity
from bighorn.cli.environment import environment
from bighorn.cli.errors import InputError
from bighorn.cli.interrupt import Interrupt
from bighorn.cli.optimizers import state_bytes
from bighorn.cli.options import FILE, command_line, config_options, given, words
from bighorn.cli.ranks import Ranks
from bighorn.cli.tasks import TASKS, Dataset
from bighorn.cli.training import DivergedError, Run

PICTURES = (".png", ".svg")
RESULTS = ("--save", "--report", "--json")


@click.command(epilog="Example: bighorn train --task text --steps 200 --report run.html")
@config_options(RunConfig)
@config_options(Division)
@click.option("--save", type=FILE, help="Save the run here: ten times on the way, at the end and on Ctrl-C.")
@click.option("--resume", type=FILE, help="Continue a saved run; its options come from the file, --save too.")
@click.option("--report", type=FILE, help="Write an HTML report with curves and heat maps of layers by step.")
@click.option("--json", "json_file", type=FILE, help="Write options, history and result as JSON.")
@click.option("--plot-schedule", type=FILE, help="Draw the learning rate as a .png or .svg, and do not train.")
@click.pass_context
def train(
    ctx: click.Context,
    /,
    save: Path | None,
    resume: Path | None,
    report: Path | None,
    json_file: Path | None,
    plot_schedule: Path | None,
    **_: Any,
) -> None:
    """Train a model with LAMB, CAME or, for comparison, with one of torch's optimizers.

    Without options: handwritten digits, a few seconds. Ctrl-C finishes the step, saves and says how to resume; the
    resumed run is bitwise the one that was never interrupted, on a GPU as far as torch's kernels are deterministic.
    Several processes share each batch:

    torchrun --nproc-per-node 2 --no-python bighorn train
    """
    if plot_schedule is None and save is None and resume is not None:
        save = folder.root(resume)
    outputs = {"--save": save, "--report": report, "--json": json_file, "--plot-schedule": plot_schedule}
    with Ranks.join() as ranks:
        done = _run(ctx, outputs, resume, ranks)  # a function of its own: see ranks.end_process_group
    if not done:
        ctx.exit(130)


def _run(ctx: click.Context, outputs: dict[str, Path | None], resume: Path | None, ranks: Ranks) -> bool:
    """Train, or draw the schedule; False if Ctrl-C has ended the run early."""
    console = Console(quiet=not ranks.first, soft_wrap=True, highlight=False)
    run = _set_up(ctx, outputs, resume, ranks, console)
    plot = outputs["--plot-schedule"]
    if plot is not None:
        if ranks.first:
            _plot(run, plot)
        console.print(f"Schedule: {plot}; nothing was trained.")
        return True
    save, report, json_file = (outputs[option] for option in RESULTS)
    try:
        _train(run, console, save)
    except DivergedError as error:
        if ranks.first:
            _write(run, report, json_file)
        raise InputError(f"{error}. Try a lower --lr than {run.config.lr:g} or a longer --warmup.") from error
    if not run.done and save is None:
        fresh = f"bighorn-{run.config.task}-{run.config.optimizer}-step{run.step}" + ".pt" * (not run.is_sharded)
        save = ranks.from_first(lambda: files.unused(Path(fresh)))
        checkpoint.save(run, save)
    console.print(_summary(run))
    if ranks.first:
        _write(run, report, json_file)
    for name, path in (("Report", report), ("JSON", json_file), ("Checkpoint", save)):
        if path is not None:
            console.print(f"{name}: {path}")
    if not run.done:
        again = [*ranks.launcher, *ctx.command_path.split(), "--resume", str(save)]
        again += words(ctx, {"report", "json_file", *(field.name for field in fields(Division))})
        where = " on every machine, each with its --node-rank" if ranks.machines > 1 else ""
        console.print(
            f"Interrupted after step {run.step} of {run.total} and saved. Resume{where} with:\n  {shlex.join(again)}"
        )
    return run.done


def _set_up(
    ctx: click.Context, outputs: dict[str, Path | None], resume: Path | None, ranks: Ranks, console: Console
) -> Run:
    """Make the run, or load it, and introduce it."""
    saved = None if resume is None else ranks.from_first(lambda: checkpoint.load(resume))
    config, division, dataset = ranks.together(lambda: _prepare(ctx, saved, outputs, resume, ranks))
    ranks.check_same(
        options={**asdict(config), **asdict(division), "data": None, "threads": None},
        training_data=dataset.fingerprint(),
    )
    run = Run(config, dataset, ranks, division=division)
    differences = [] if saved is None else checkpoint.restore(run, saved)
    run.history.commands.append(shlex.join(ranks.launcher) + " " * (ranks.size > 1) + command_line(ctx))
    _introduce(run, console)
    for flag in division.idle(ranks.size):
        console.print(f"Warning: {flag} has no effect in one process; see torchrun in --help.", style="yellow")
    for difference in differences:
        console.print(f"Warning: not as it was saved, the last bits may differ: {difference}", style="yellow")
    return run


def _prepare(
    ctx: click.Context,
    saved: dict[str, Any] | None,
    outputs: dict[str, Path | None],
    resume: Path | None,
    ranks: Ranks,
) -> tuple[RunConfig, Division, Dataset]:
    """All that may be wrong with the command in one process alone."""
    options = given(ctx, RunConfig)
    config = (RunConfig(**options) if saved is None else checkpoint.config_of(saved, options)).resolved()
    division = Division(**given(ctx, Division))
    if config.device == "cuda" and ranks.size > 1:
        raise InputError(
            f"--device cuda with {ranks.size} processes is not supported: no machine with several GPUs has run this. "
            "Start one process, without torchrun, or use --device cpu."
        )
    if outputs["--plot-schedule"] is not None:
        _check_plot(outputs["--plot-schedule"], {name: path for name, path in outputs.items() if name in RESULTS})
    if ranks.first:
        _check_outputs(outputs, config.data, resume, saved, division.shards(ranks.size))
    return config, division, TASKS[config.task].load(config.data)


def _check_outputs(
    outputs: dict[str, Path | None],
    data: str | None,
    resume: Path | None,
    saved: dict[str, Any] | None,
    sharded: bool,
) -> None:
    """Refuse outputs that cannot be written to, or that would destroy what is not this run's own."""
    save = outputs["--save"]
    others = {option: path for option, path in outputs.items() if option != "--save"}
    if save is None:
        files.check_outputs(others, {"--data": data, "--resume": resume})
    elif sharded or save.is_dir():
        folder.check(save, None if saved is None else saved["folder"])
        files.check_outputs(others, {"--data": data, "--resume": resume, "--save": save})
    else:
        files.check_regular(save, "--save")
        files.check_outputs({"--save": save}, {"--data": data})
        files.check_outputs(others, {"--save": save, "--data": data, "--resume": resume})


def _train(run: Run, console: Console, save: Path | None) -> None:
    """Train to the end or to a Ctrl-C, saving at every evaluation and at the end."""
    with Interrupt(echoes=run.ranks.size > 1) as interrupt:
        run.ranks.meet()  # who sees the display's first line may press Ctrl-C: it has to be safe in every process
        with Display(run, console) as display:
            while not run.done and not run.ranks.any(interrupt.requested):
                run.train_step()
                display.stepped()
                if run.evaluation_due:
                    run.evaluate()
                    display.evaluated()
                    if save is not None:
                        checkpoint.save(run, save)
        if not run.done and save is not None:
            checkpoint.save(run, save)


def _write(run: Run, report: Path | None, json_file: Path | None) -> None:
    if report is not None:
        from bighorn.cli.report import run_report

        files.write_text(report, run_report(run))
    if json_file is not None:
        files.write_json(json_file, as_json(run))


def _check_plot(path: Path, results: dict[str, Path | None]) -> None:
    if path.suffix not in PICTURES:
        raise InputError(f"--plot-schedule {path} must end in {' or '.join(PICTURES)}.")
    for option, result in results.items():
        if result is not None:
            raise InputError(f"--plot-schedule does not train, so {option} would stay empty: leave one of them out.")


def _plot(run: Run, path: Path) -> None:
    from bighorn.cli import figures

    lrs = run.schedule.as_list(run.total)
    picture = figures.line_picture(range(1, run.total + 1), lrs, "learning rate", path.suffix[1:])
    files.write(path, lambda file: file.write(picture))


def _introduce(run: Run, console: Console) -> None:
    config = run.config
    parameters = quantity(sum(parameter.numel() for parameter in run.model.parameters()))
    scaled = "" if config.lr_scaling == "none" else f" ({config.lr:g} scaled)"
    scale = "" if config.loss_scale == "none" else f", loss scale {config.loss_scale}"
    console.print(f"{config.task}: {run.dataset.description}; {parameters} parameters, {config.precision}{scale}")
    if config.device != "cpu":
        console.print(f"on {device_name(config.device)}")
    state = "" if config.state_dtype is None else f", state in {config.state_dtype}"
    options = "".join(f", {text}" for text in config.optimizer_option)
    console.print(
        f"{config.optimizer}{state}{options}: lr {run.peak_lr:g}{scaled}, weight decay {config.weight_decay:g}, "
        f"batch {run.batch_size}, {run.total} steps, {run.warmup} warm-up, then {config.schedule}"
    )
    if run.ranks.size > 1:
        share = run.batch_size // run.ranks.size
        machines = f" on {run.ranks.machines} machines" if run.ranks.machines > 1 else ""
        console.print(f"{run.ranks.size} processes{machines}, each with {share} samples of a batch")
    if run.step:
        console.print(f"resumed after step {run.step}")


def results(run: Run) -> dict[str, Any]:
    """The figures that a finished run comes down to; None for what was not measured."""
    tests = run.history.tests
    return {
        "steps": run.step,
        "epochs": run.epoch,
        "test_loss": tests[-1][1] if tests else None,
        "test_accuracy": tests[-1][2] if tests else None,
        "best_test_accuracy": max(test[2] for test in tests) if tests else None,
        "train_seconds": run.history.seconds,
        "samples_per_second": run.step * run.batch_size / run.history.seconds if run.history.seconds else None,
        "skipped_steps": len(run.history.skipped),
        "optimizer_state_bytes": state_bytes(run.optimizer),
    }


def _summary(run: Run) -> Table:
    figures = results(run)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if figures["test_accuracy"] is not None:
        table.add_row(
            "Test accuracy", f"[bold]{figures['test_accuracy']:.2%}[/] (best {figures['best_test_accuracy']:.2%})"
        )
        table.add_row("Test loss", f"{figures['test_loss']:.4f}")
    table.add_row("Steps", f"{run.step} of {run.total} ({run.epoch:.2f} epochs)")
    if run.config.device != "cpu":
        table.add_row("Device", device_name(run.config.device))
    table.add_row("Training time", f"{figures['train_seconds']:.1f} s")
    if run.history.scale:
        table.add_row("Loss scale", f"{run.history.scale[-1]:g}; {figures['skipped_steps']} steps skipped")
    share = " in the first process" if run.division.shard_update and run.ranks.size > 1 else ""
    table.add_row("Optimizer state", f"{figures['optimizer_state_bytes'] / 1e6:.2f} MB{share}")
    return table


def as_json(run: Run) -> dict[str, Any]:
    """Everything about a run that a later analysis could want."""
    history = {name: values for name, values in vars(run.history).items() if name != "seconds"}
    history["gauges"] = {
        name: [[value if math.isfinite(value) else None for value in row] for row in rows]
        for name, rows in run.history.gauges.items()
    }
    return {
        "config": asdict(run.config),
        "environment": environment(run.config.device),
        "data": {"description": run.dataset.description, "sha256": run.dataset.fingerprint()},
        "peak_lr": run.peak_lr,
        "result": results(run),
        "history": history,
    }
