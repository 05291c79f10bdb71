"""Progress on the terminal: a line per evaluation and, on a terminal, a progress bar below them."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from bighorn.cli.environment import device_name
from bighorn.cli.run import Run

HEADER = f"{'epoch':>6}{'step':>7}{'loss':>9}{'acc':>7}{'test loss':>11}{'acc':>7}{'lr':>9}{'per s':>7}"


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
        self._refreshed = 0.0
        self._live: Live | None = None
        if console.is_terminal and not console.quiet:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeRemainingColumn(),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task(run.config.optimizer, total=run.total, completed=run.step)
            self._live = Live(self._bar, console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> "Display":
        introduce(self.run, self.console, self._warnings)
        if self.run.step < self.run.total:
            self.console.print("  ".join([HEADER, *(gauge.label for gauge in self.run.gauges[:1])]), style="dim")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stepped(self) -> None:
        """Show the last step."""
        if self._live is None or time.perf_counter() - self._refreshed < 0.2:
            return
        self._refreshed = time.perf_counter()
        history = self.run.history
        text = f"loss {history.loss[-1]:.4f}   acc {history.accuracy[-1]:.1%}   lr {history.lr[-1]:.2e}   "
        text += f"{quantity(self._speed())} samples/s"
        if self.run.gauge is not None:
            text += f"   {self.run.gauges[0].label} {self._gauge()}"
        self._bar.update(self._task, completed=self.run.step)
        self._live.update(Group(self._bar, Text(text, style="cyan", no_wrap=True)))

    def evaluated(self) -> None:
        """Print the line of the last evaluation; training loss and accuracy are means since the previous line."""
        run, history = self.run, self.run.history
        count = run.step - self._line[0]
        _, test_loss, test_accuracy = history.tests[-1]
        loss, accuracy = sum(history.loss[-count:]) / count, sum(history.accuracy[-count:]) / count
        self.console.print(
            f"{run.epoch:6.2f}{run.step:7d}{loss:9.4f}{accuracy:7.1%}{test_loss:11.4f}{test_accuracy:7.1%}"
            f"{history.lr[-1]:9.1e}{quantity(self._speed()):>7}  {self._gauge()}".rstrip(),
        )
        self._line = run.step, history.seconds

    def _speed(self) -> float:
        step, seconds = self._line
        return (self.run.step - step) * self.run.batch_size / max(self.run.history.seconds - seconds, 1e-9)

    def _gauge(self) -> str:
        """Return the lowest, the median and the highest value of the layers."""
        if self.run.gauge is None:
            return ""
        ordered = self.run.gauge.sort().values.tolist()
        return "/".join(short(value) for value in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))


def introduce(run: Run, console: Console, warnings: Sequence[str]) -> None:
    """Print the configuration of the run before it starts, and warnings."""
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
    for warning in warnings:
        console.print(f"Warning: {warning}", style="yellow")


def counting(console: Console) -> Progress:
    """A progress bar for counted work; it is hidden without a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def quantity(value: float) -> str:
    """A large number in five characters at most: 950, 12.3k, 4.5M, 27.0G."""
    for divisor, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        if value < 999.5 * divisor:
            scaled = value / divisor
            return f"{scaled:.1f}{unit}" if unit and scaled < 99.95 else f"{scaled:.0f}{unit}"
    return f"{value:.1e}"


def short(value: float) -> str:
    """A ratio in at most five characters: .0123, 1.2, 35, 1e-06."""
    text = f"{value:.2g}"
    return text.removeprefix("0") if text.startswith("0.") else text
