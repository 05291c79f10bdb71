"""Progress on the terminal: a line per evaluation and, on a terminal, a progress bar below them."""

import os
import time
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import bighorn
from bighorn_workbench.environment import cores, device_name
from bighorn_workbench.errors import visible
from bighorn_workbench.metrics import SHORT, metric_text
from bighorn_workbench.optimizers import OF_BIGHORN
from bighorn_workbench.run import Run
from bighorn_workbench.tasks import defaults

TIMED = 4
"""The first steps, whose times without the first one give the estimate of a run."""

LONG = 20
"""Seconds of a run above which it begins with an estimate."""


class _Terminal(Console):
    """A console whose words give no orders to the terminal, unlike the console's own colours and moves."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(text if text.isprintable() else visible(text), **options)


terminal = partial(_Terminal, soft_wrap=True, highlight=False, markup=False, emoji=False)
"""A console that prints words as they are, without markup, emoji or colours of its own."""


class Display:
    """Shows the progress of a run.

    Args:
        run: The run.
        console: The console to print to.
        seconds: Time that the run has already spent in training steps.
        warnings: Warnings that are printed below the introduction.
    """

    def __init__(self, run: Run, console: Console, seconds: float, warnings: Sequence[str]) -> None:
        self.run, self.console, self._warnings = run, console, warnings
        self._line = run.step, seconds
        label = SHORT.get(run.task.metric, run.task.metric)
        self._labels = f" {label:>6}", f" {'val ' + label:>8}"
        self._refreshed = 0.0
        self._first: list[float] = []
        self._live: Live | None = None
        if console.is_terminal and not console.quiet:
            name, unit = TextColumn("[bold]{task.description}"), TextColumn("steps")
            columns = (name, BarColumn(bar_width=None), MofNCompleteColumn(), unit, TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, expand=True)
            self._task = self._bar.add_task(run.config.optimizer, total=run.total, completed=run.step)
            self._live = Live(self._bar, console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> "Display":
        introduce(self.run, self.console, self._warnings)
        if self.run.step < self.run.total:
            label = [metric.label for metric in self.run.metrics[:1]]
            for metric in self.run.metrics[:1]:
                self.console.print(f"{metric.label}: of the lowest/median/highest layer", style="dim")
                self.console.print(f"  {metric.short}", style="dim")
            train, val = self._labels
            header = f"{'epoch':>6}{'step':>7}{'loss':>9}{train}{'val loss':>10}{val}{'lr':>9}{'per s':>7}"
            self.console.print("  ".join([header, *label]), style="dim")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def warn(self, warning: str) -> None:
        """Print a warning."""
        self.console.print(warning, style="yellow")

    def stepped(self) -> None:
        """Show the last step."""
        if len(self._first) < TIMED:
            self._time()
        if self._live is None or time.perf_counter() - self._refreshed < 0.2:
            return
        self._refreshed = time.perf_counter()
        history = self.run.history
        text = f"loss {history.loss[-1]:.4f}   "
        for name, values in history.batch_metrics.items():
            text += f"{SHORT.get(name, name)} {metric_text(name, values[-1])}   "
        text += f"lr {history.lr[-1]:.2e}   "
        text += f"{quantity(self._speed())} samples/s"
        if self.run.metric is not None:
            text += f"   {self.run.metrics[0].label} {self._metric()}"
        self._bar.update(self._task, completed=self.run.step)
        self._live.update(Group(self._bar, Text(visible(text), style="cyan", no_wrap=True)))

    def _time(self) -> None:
        """Time the first steps, and after the last of them print how long the run will take if that is long."""
        self._first.append(self.run.history.seconds)
        left = (self.run.total - self.run.step) * (self._first[-1] - self._first[0]) / (TIMED - 1)
        if len(self._first) == TIMED and left > LONG:
            self.console.print(f"This takes {duration(left)}, without evaluations{busy()}.", style="dim")

    def evaluated(self) -> None:
        """Print the line of the last evaluation; training loss and metric are means since the previous line."""
        run, history, metric = self.run, self.run.history, self.run.task.metric
        count = max(1, run.step - self._line[0])  # none since a run was resumed whose evaluation had failed
        _, found = history.evaluations[-1]
        of_batches = history.batch_metrics.get(metric)
        mean = None if of_batches is None else sum(of_batches[-count:]) / count
        train_width, val_width = map(len, self._labels)
        train, val = f"{metric_text(metric, mean):>{train_width}}", f"{metric_text(metric, found[metric]):>{val_width}}"
        epoch = f"{'-':>6}" if run.epoch is None else f"{run.epoch:6.2f}"
        val_loss = f"{found['loss']:10.4f}" if "loss" in found else f"{'-':>10}"
        self.console.print(
            f"{epoch}{run.step:7d}{sum(history.loss[-count:]) / count:9.4f}{train}{val_loss}{val}"
            f"{history.lr[-1]:9.1e}{quantity(self._speed()):>7}  {self._metric()}".rstrip()
        )
        self._line = run.step, history.seconds

    def _speed(self) -> float:
        step, seconds = self._line
        return (self.run.step - step) * self.run.batch_size / max(self.run.history.seconds - seconds, 1e-9)

    def _metric(self) -> str:
        """Return the lowest, the median and the highest value of the layers."""
        if self.run.metric is None:
            return ""
        ordered = self.run.metric.sort().values.tolist()
        return "/".join(short(value) for value in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))


def introduce(run: Run, console: Console, warnings: Sequence[str]) -> None:
    """Print the configuration of the run before it starts, and warnings."""
    config = run.config
    parameters = quantity(sum(parameter.numel() for parameter in run.model.parameters()))
    scaled = "" if config.lr_scaling == "none" else f" ({config.lr:g} scaled)"
    scale = "" if config.loss_scale == "none" else f", loss scale {config.loss_scale}"
    console.print(
        f"{config.task}: {defaults(run.task).description}; {parameters} parameters, {config.precision}{scale}"
    )
    if config.device != "cpu":
        console.print(f"on {device_name(config.device)}")
    state = "" if config.state_dtype is None else f", state in {config.state_dtype}"
    options = "".join(f", {text}" for text in config.optimizer_option)
    console.print(
        f"{config.optimizer}{state}{options}: lr {run.peak_lr:g}{scaled}, weight decay {config.weight_decay:g}, "
        f"batch {run.batch_size}, {run.total} steps, {run.warmup} warm-up, then {config.schedule}"
    )
    (cpu,) = bighorn.status(["cpu"], trial=False).backends
    if config.device == "cpu" and config.optimizer in OF_BIGHORN and not cpu.works:
        console.print(f"The kernels run in plain torch, which is slower, without the C library: {cpu.detail}")
    if run.ranks.size > 1:
        share = run.batch_size // run.ranks.size
        machines = f" on {run.ranks.machines} machines" if run.ranks.machines > 1 else ""
        console.print(f"{run.ranks.size} processes{machines}, each with {share} samples of a batch")
    if run.step:
        left = "" if run.step < run.total else ", its last one: nothing is left to train"
        console.print(f"resumed after step {run.step}{left}")
    for warning in warnings:
        console.print(f"Warning: {warning}", style="yellow")


def counting(console: Console) -> Progress:
    """A progress bar for counted work; it is hidden without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], padding: int = 1, groups: bool = False) -> Table:
    """A table whose first column is text and the others numbers, with a line between ``groups`` of the same text."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0))
    table.add_column(head[0], overflow="fold", vertical="bottom")
    for name in head[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row, following in zip_longest(rows, rows[1:]):
        table.add_row(*row, end_section=groups and following is not None and following[0] != row[0])
    return table


def quantity(value: float) -> str:
    """A large number in five characters at most: 950, 12.3k, 4.5M, 27.0G."""
    for divisor, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        if value < 999.5 * divisor:
            scaled = value / divisor
            return f"{scaled:.1f}{unit}" if unit and scaled < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.1e}"


def short(value: float) -> str:
    """A ratio in at most five characters.

    Example:
        >>> short(0.0123), short(1.23), short(0.000123), short(1.23e-6), short(99.7), short(4567.0)
        ('.012', '1.2', '.0001', '1e-06', '100', '4.6k')
    """
    if value >= 99.5:
        return quantity(value)
    texts = [f"{value:.{digits}g}".removeprefix("0" if 0 < value < 1 else "") for digits in (2, 1)]
    return texts[0] if len(texts[0]) <= 5 else texts[1]


def busy() -> str:
    """Words for an estimate on a machine whose cores other programs use; empty on one that is idle."""
    load, count = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, cores()
    return "" if load < count else f", and more while other programs run (load {load:.1f} on {count} cores)"


def duration(seconds: float) -> str:
    """A time in words: about 20 s, about 4 min, about 2.5 h.

    Example:
        >>> duration(0.2), duration(250), duration(9000)
        ('a few seconds', 'about 4 min', 'about 2.5 h')
    """
    if seconds < 5:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds, -1) or seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
