"""The comparisons at equal tuning in results/equal-tuning.md and docs/comparisons.md: writes their tables from results.

    python workbench/benchmarks/equal_tuning.py

Each optimizer got the same number of trials at each batch size, of which validation data chose one; then fresh seeds
trained with it, and was evaluated on the test data. The page marks the place of the tables of NAME.json; the pictures
are results/NAME.svg and results/NAME-rates.svg.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import equal_pictures
from bighorn_workbench.config import RunConfig
from bighorn_workbench.metrics import is_share, metric_text
from bighorn_workbench.verdict import UNCLEAR, interval
from equal_pictures import BASELINE
from result_files import DOCS, RESULTS, load

NOTEBOOK, HYPERBALL, SUMMARY = RESULTS / "equal-tuning.md", RESULTS / "hyperball.md", DOCS / "comparisons.md"
PAGES = NOTEBOOK, HYPERBALL, SUMMARY
TABLES = re.compile(
    r"(<!-- (equal tuning|tuned|four rates|summary|pairs|decays|sensitivity|widths|many steps) of (\S+) -->\n).*?"
    r"(<!-- end of the table -->)",
    re.DOTALL,
)

SECONDS = "equal-seconds"
"""The file with the times of steps."""

GOOD = {"accuracy": 0.01, "loss": 0.05}
"""A trial is good if it is so near to the best one of its optimizer at this batch size: a point, or 0.05 nats."""

GPTS = "equal-characters", "equal-gpt", "equal-gpt-little", "equal-gpt-steps-6"
CLASSES = {**dict.fromkeys((*GPTS, "ball-characters"), 66), **dict.fromkeys(("equal-masked", "ball-masked"), 67)}
"""The classes of the comparisons that do not have 10."""

LOST = 0.99
"""A trial is lost if it diverged, or has at least this share of the loss of a uniform guess among the classes."""


@dataclass(frozen=True)
class Cell:
    """An optimizer at a batch size, as the file has it."""

    saved: dict[str, Any]
    classes: int

    @property
    def name(self) -> str:
        """The name of the optimizer."""
        return str(self.saved["name"])

    @property
    def batch(self) -> int:
        """The batch size."""
        return int(self.saved["config"]["batch_size"])

    @cached_property
    def metric(self) -> str:
        """The metric that decides."""
        return "accuracy" if "accuracy" in self.saved else "loss"

    def config(self, data: str | None) -> RunConfig:
        """Return the options of its final runs, for data at a path of this machine."""
        saved = self.saved["config"]
        return RunConfig(**saved | {"optimizer_option": tuple(saved["optimizer_option"])}, data=data)

    @property
    def finals(self) -> dict[int, float]:
        """The metric on test data by seed, of planned runs and of added ones; infinite for a run that diverged."""
        runs = self.saved["final"] + self.saved.get("more", [])
        return {run["seed"]: _value(run, self.metric) for run in runs}

    def new_seeds(self, count: int) -> tuple[int, ...]:
        """Return seeds above its final runs' seeds."""
        first = max(self.finals) + 1
        return tuple(range(first, first + count))

    @property
    def trials(self) -> list[tuple[float, float]]:
        """Rate and metric on validation data of each trial, in the order in which they were tried."""
        return [(run["lr"], _value(run, self.metric)) for run in self.saved["tuning"]]

    @property
    def good(self) -> list[bool]:
        """Which trials are good."""
        values, sign = [value for _, value in self.trials], 1 if is_share(self.metric) else -1
        best = max(sign * value for value in values)
        return [sign * value >= best - GOOD[self.metric] for value in values]

    @property
    def lost(self) -> int:
        """The number of trials that are lost."""
        losses = [_value(run, "loss") for run in self.saved["tuning"]]
        return sum(not loss < LOST * math.log(self.classes) for loss in losses)

    def ahead(self, other: Cell, comparisons: int) -> tuple[float, float]:
        """How far the metric is above another's, with the half-width of the interval, paired over seeds."""
        theirs = other.finals
        return interval([value - theirs[seed] for seed, value in self.finals.items()], comparisons)


def _value(run: dict[str, Any], key: str) -> float:
    return math.inf if run[key] is None else float(run[key])


def cells_of(name: str) -> dict[int, list[Cell]]:
    """Return the cells of a comparison by batch size."""
    cells = sorted((Cell(each, CLASSES.get(name, 10)) for each in load(name)["cells"]), key=lambda cell: cell.batch)
    return {batch: list(group) for batch, group in groupby(cells, key=lambda cell: cell.batch)}


def comparisons_of(rows: dict[int, list[Cell]]) -> int:
    """Return the number of comparisons with the baseline in a study; `bighorn compare` corrects for the same number."""
    return sum(len(row) - 1 for row in rows.values())


def verdict(cell: Cell, row: list[Cell], comparisons: int) -> tuple[float, float]:
    """Return how far a cell is above the baseline at its batch size, corrected for the comparisons of the study."""
    return cell.ahead(next(each for each in row if each.name == BASELINE), comparisons)


def difference(cell: Cell, row: list[Cell], comparisons: int) -> str:
    """Return the difference from the baseline in words, in bold if it is clear; nothing for the baseline."""
    if cell.name == BASELINE:
        return ""
    return _difference(cell.metric, verdict(cell, row, comparisons))


def _difference(metric: str, found: tuple[float, float]) -> str:
    mean, half = found
    words = f"{100 * mean:+.1f} ± {100 * half:.1f}" if is_share(metric) else f"{mean:+.3f} ± {half:.3f}"
    return f"**{words}**" if abs(mean) > half else words


def text(metric: str, value: float) -> str:
    """Return an accuracy as a percentage, and a loss with all digits that may differ."""
    return metric_text(metric, value) if is_share(metric) else f"{value:.3f}"


def spread(cell: Cell) -> str:
    """Return mean, lowest and highest of the final runs."""
    values = list(cell.finals.values())
    mean, low, high = (text(cell.metric, each) for each in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({low}-{high})"


def figures(
    cell: Cell, row: list[Cell], steps: dict[str, dict[str, list[float]]] | None, comparisons: int
) -> list[str]:
    """Return a row of the table: results on test data, figures of the trials, bytes and seconds.

    Args:
        cell: The optimizer.
        row: All of them at its batch size.
        steps: The seconds of a step, by optimizer and batch size; None if they were not measured.
        comparisons: The comparisons with the baseline in the study.
    """
    seconds = [] if steps is None else [_seconds(cell.saved["steps"] * min(steps[cell.name][str(cell.batch)]))]
    good = [lr for (lr, _), fine in zip(cell.trials, cell.good, strict=True) if fine]
    return [
        cell.name,
        spread(cell),
        difference(cell, row, comparisons),
        f"{len(good)} of {len(cell.trials)}",
        f"{min(good):.2g} to {max(good):.2g}, x {_factor(max(good) / min(good))}",
        str(1 + cell.good.index(True)),
        str(cell.lost),
        f"{cell.saved['state_bytes'] / 1e3:.0f} kB",
        *seconds,
    ]


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:#.2g}"


def _factor(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


def _command(saved: dict[str, Any]) -> list[str]:
    command = saved.get("command_now", saved["command"])  # the same command in today's form
    wrapped = textwrap.wrap(command, 80, break_long_words=False, break_on_hyphens=False)
    return ["```bash", " \\\n  ".join(wrapped), "```", ""]


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _about(name: str) -> list[str]:
    saved = load(name)
    config = saved["config"]
    added = "".join(
        f"; {_listed(tuned['optimizers'])} as at commit {tuned['commit'][:7]}" for tuned in saved.get("tuned_again", ())
    )
    added += "".join(
        f"; {more['seeds']} seeds for {_listed(more['optimizers'])} by commit {more['commit'][:7]}"
        for more in saved.get("more_seeds", ())
    )
    return [
        *_command(saved),
        f"{config['task'].rpartition(':')[2]} ({saved['data']['description']}), {config['epochs']:g} epochs, "
        f"{config['trials']} trials and {config['seeds']} seeds for each, as the command of commit "
        f"{saved['commit'][:7]} did{added} ([all runs]({name}.json)).",
    ]


def equal_table(name: str, drawn: bool = True) -> str:
    """Return the tables of a comparison, one for each batch size, and its pictures if there are several."""
    lines, timed, cells = _about(name), load(SECONDS).get(name), cells_of(name)
    steps = None if timed is None else timed["steps"]
    for batch, row in cells.items():
        metric, unit = row[0].metric, "points" if is_share(row[0].metric) else "nats"
        head = ["optimizer", f"test {metric} (min-max)", f"{unit} from {BASELINE}", "good trials", "their rates"]
        lines += ["", f"At batch {batch:,} ({row[0].saved['steps']:,} steps):", ""]
        lines += _markdown(
            [*head, "first good", "lost", "state", *["seconds"] * (steps is not None)],
            [figures(cell, row, steps, comparisons_of(cells)) for cell in row],
        )
    if len(cells) == 1 or not drawn:
        return "\n".join(lines) + "\n"
    metric = next(iter(cells.values()))[0].metric
    words = "; ".join(
        f"{first.name} "
        + ", ".join(
            f"{text(metric, statistics.fmean(cell.finals.values()))} at {batch:,}"
            for batch, row in cells.items()
            for cell in row
            if cell.name == first.name
        )
        for first in next(iter(cells.values()))
    )
    lines += ["", f"![Runs by batch size, their mean test {metric} and its interval: {words}]({name}.svg)", ""]
    lines += [f"![Best {metric} on validation data by range of the learning rate]({name}-rates.svg)"]
    return "\n".join(lines) + "\n"


def rates_table(name: str) -> str:
    """Return the table of a comparison on a grid of few rates."""
    cells = cells_of(name)
    [row] = cells.values()
    rates = sorted({lr for lr, _ in row[0].trials})
    head = ["optimizer", *(f"held out, {lr:g}" for lr in rates), "test accuracy (min-max)", f"points from {BASELINE}"]
    rows = [
        [
            cell.name,
            *(metric_text(cell.metric, dict(cell.trials)[lr]) for lr in rates),
            spread(cell),
            difference(cell, row, comparisons_of(cells)),
        ]
        for cell in row
    ]
    return "\n".join([*_about(name), "", *_markdown(head, rows)]) + "\n"


def summary(names: str) -> str:
    """Return how often each optimizer was ahead of the baseline and behind it, over all cells of some comparisons."""
    found: dict[str, list[list[int]]] = {}
    for name in names.split(","):
        cells = cells_of(name)
        for row in cells.values():
            for cell in row:
                mean, half = (0.0, 0.0) if cell.name == BASELINE else verdict(cell, row, comparisons_of(cells))
                better = mean if is_share(cell.metric) else -mean
                counts = [better > half, abs(mean) <= half, -better > half, sum(cell.good), cell.lost, len(cell.trials)]
                found.setdefault(cell.name, []).append([int(each) for each in counts])
    rows = []
    for name, counted in found.items():
        ahead, equal, behind, good, lost, trials = map(sum, zip(*counted, strict=True))
        verdicts = ["", "", ""] if name == BASELINE else [str(ahead), str(equal), str(behind)]
        rows.append([name, *verdicts, f"{good / trials:.0%}", f"{lost / trials:.0%}"])
    head = ["optimizer", f"ahead of {BASELINE}", UNCLEAR, f"behind {BASELINE}", "good trials", "lost trials"]
    return "\n".join(_markdown(head, rows)) + "\n"


def pairs(words: str) -> str:
    """Return the differences between two optimizers of ``FILE:ONE,OTHER`` at each batch size."""
    name, _, both = words.partition(":")
    rows, cells = [], cells_of(name)
    for batch, row in cells.items():
        one, other = (next(cell for cell in row if cell.name == each) for each in both.split(","))
        ahead = one.ahead(other, comparisons_of(cells))
        rows.append([f"{batch:,}", spread(one), spread(other), _difference(one.metric, ahead)])
    first, second = both.split(",")
    return "\n".join(_markdown(["batch", first, second, "difference"], rows)) + "\n"


def decays(names: str) -> str:
    """Return how far each optimizer's metric moved when it was tuned again, corrected for the cells of the study."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for name in names.split(","):
        old_cells = [Cell(each, CLASSES.get(name, 10)) for each in load(name)["before"]]
        before = {(cell.name, cell.batch): cell for cell in old_cells}
        for batch, row in cells_of(name).items():
            tuned_again = [(cell, old) for cell in row if (old := before.get((cell.name, batch)))]
            found[name, batch] = {
                cell.name: _difference(cell.metric, cell.ahead(old, len(before))) for cell, old in tuned_again
            }
    columns = list(dict.fromkeys(each for row in found.values() for each in row))
    rows = [
        [f"{name.removeprefix('equal-')} at {batch:,}", *(row.get(each, "") for each in columns)]
        for (name, batch), row in found.items()
    ]
    return "\n".join(_markdown(["study", *columns], rows)) + "\n"


def sensitivity(name: str) -> str:
    """Return how far each change of an option moves the loss of each optimizer, and its steps with a spike."""
    saved = load(name)
    runs = {(cell["name"], cell["change"]): cell["runs"] for cell in saved["changed"]}
    columns, (tuned, *changes) = (list(dict.fromkeys(each)) for each in zip(*runs, strict=True))
    losses = {key: [_value(run, "loss") for run in each] for key, each in runs.items()}
    comparisons = len(runs) - len(columns)

    def moved(column: str, change: str) -> str:
        if (column, change) not in runs:
            return ""
        here = losses[column, change]
        diverged = sum(not math.isfinite(loss) for loss in here)
        moves = [new - old for new, old in zip(here, losses[column, tuned], strict=True)]
        words = _difference("loss", interval(moves, comparisons))
        if diverged:
            words = f"{diverged} of {len(here)} diverged"
        spikes = sum(run["spikes"] for run in runs[column, change])
        return f"{words}, {spikes} spike{'s' * (spikes != 1)}" if spikes else words

    rows = [[tuned, *(text("loss", statistics.fmean(losses[column, tuned])) for column in columns)]]
    rows += [[change, *(moved(column, change) for column in columns)] for change in changes]
    about = f"{saved['data']['description']}; commit {saved['commit'][:7]}"
    about += f" ([all runs]({name}.json))."
    return "\n".join([*_command(saved), about, "", *_markdown(["change", *columns], rows)]) + "\n"


def widths(name: str) -> str:
    """Return the best rate of each optimizer at each width, and what the smallest width's costs at the largest."""
    saved = load(name)
    losses: dict[str, dict[int, dict[float, list[float]]]] = {}
    for run, loss in saved["runs"].items():
        width, optimizer, lr, _ = run.split()
        found = losses.setdefault(optimizer, {}).setdefault(int(width), {}).setdefault(float(lr), [])
        found.append(math.inf if loss is None else loss)
    rows = []
    for optimizer, of_width in losses.items():
        means = {width: {lr: statistics.fmean(each) for lr, each in of.items()} for width, of in of_width.items()}
        best = {width: min(of, key=lambda lr, of=of: of[lr]) for width, of in means.items()}  # type: ignore[misc]
        small, large = min(best), max(best)
        kept = means[large].get(best[small])
        cost = "not tried" if kept is None else f"{kept - means[large][best[large]]:+.3f}"
        cells = [f"{best[width]:g} ({means[width][best[width]]:.3f})" for width in sorted(best)]
        rows.append([optimizer, *cells, f"x {best[large] / best[small]:.2g}", cost])
    sizes = sorted({width for of in losses.values() for width in of})
    head = ["optimizer", *(f"width {width}" for width in sizes), "its change", f"{sizes[0]}'s rate at {sizes[-1]}"]
    return "\n".join([*_command(saved), *_markdown(head, rows)]) + "\n"


def many_steps(name: str) -> str:
    """Return the loss of each optimizer after many steps, at the share of its rate that validation data chose."""
    saved = load(name)
    losses: dict[str, dict[str, dict[str, float]]] = {}
    for run, loss in saved["runs"].items():
        optimizer, share, seed = run.split() if " trial " not in run else (run.split()[0], run.split()[2], "trial")
        losses.setdefault(optimizer, {}).setdefault(share, {})[seed] = math.inf if loss is None else loss
    finals = {}
    for optimizer, of_share in losses.items():
        share = min(of_share, key=lambda each, of=of_share: of[each]["trial"])  # type: ignore[misc]
        finals[optimizer] = share, {seed: loss for seed, loss in of_share[share].items() if seed != "trial"}
    _, base = finals[BASELINE]
    comparisons = sum(bool(of_seed) for _, of_seed in finals.values()) - 1
    rows = []
    for optimizer, (share, of_seed) in finals.items():
        shares = sorted(losses[optimizer], key=float, reverse=True)
        trials = ", ".join(f"{losses[optimizer][each]['trial']:.3f} at {each}" for each in shares)
        if not of_seed:
            rows.append([optimizer, trials, "", "not run", ""])
            continue
        values = list(of_seed.values())
        moved = interval([loss - base[seed] for seed, loss in of_seed.items()], comparisons)
        words = "" if optimizer == BASELINE else _difference("loss", moved)
        spread_of = f"{statistics.fmean(values):.3f} ({min(values):.3f}-{max(values):.3f})"
        rows.append([optimizer, trials, share, spread_of, words])
    head = ["optimizer", "held out, at shares of the rate", "chosen", "test loss (min-max)"]
    return "\n".join([*_command(saved), *_markdown([*head, f"nats from {BASELINE}"], rows)]) + "\n"


KINDS: dict[str, Callable[[str], str]] = {
    "equal tuning": equal_table,
    "tuned": partial(equal_table, drawn=False),
    "four rates": rates_table,
    "summary": summary,
    "pairs": pairs,
    "decays": decays,
    "sensitivity": sensitivity,
    "widths": widths,
    "many steps": many_steps,
}


def written(page: Path) -> str:
    """Return a page with its tables rewritten."""
    return TABLES.sub(lambda match: match[1] + KINDS[match[2]](match[3]) + match[4], page.read_text())


def pictures(name: str) -> dict[str, str]:
    """Return the pictures of a comparison by the names of their files."""
    cells = cells_of(name)
    if len(cells) == 1:
        return {}
    panels = {f"batch {batch:,}": row for batch, row in cells.items()}
    return {name: equal_pictures.final_runs(panels), f"{name}-rates": equal_pictures.by_rate(cells)}


def names(*kinds: str) -> list[str]:
    """Return the comparisons of the notebook, or comparisons with some kinds of table."""
    wanted = "|".join(kinds or ("equal tuning", "four rates"))
    return re.findall(rf"<!-- (?:{wanted}) of (\S+) -->", NOTEBOOK.read_text())


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page))
    for shown in names("equal tuning"):
        for file, picture in pictures(shown).items():
            (RESULTS / f"{file}.svg").write_text(picture)
