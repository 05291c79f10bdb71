"""The results of `bighorn compare` in pages beside their files: writes them into the pages, and draws them.

The place in a page is between `<!-- figures of NAME -->`, for NAME.json, and `<!-- end of figures -->`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import plots
from bighorn_workbench.config import RunConfig
from bighorn_workbench.reports import plots as report_plots
from bighorn_workbench.trials import Cell, Trial
from bighorn_workbench.values import counted
from bighorn_workbench.verdict import columns, row, verdicts
from result_files import RESULTS, load

FIGURES = re.compile(r"(<!-- figures of (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
PAGES = [page for page in sorted(RESULTS.glob("*.md")) if FIGURES.search(page.read_text())]
STUDIES = {
    path.stem: saved
    for path in sorted(RESULTS.glob("*.json"))
    if "cells" in (saved := load(path.stem)) and "trials" not in saved["config"]
}
"""The comparisons whose rates were tuned on grids; `equal_tuning.py` has the others."""


def cells_of(saved: dict[str, Any]) -> list[Cell]:
    """The cells out of a file, without their tuning runs."""
    return [_cell(each) for each in saved["cells"]]


def _cell(saved: dict[str, Any]) -> Cell:
    config = RunConfig(**{**saved["config"], "optimizer_option": tuple(saved["config"].get("optimizer_option", ()))})
    trials = [
        Trial(
            replace(config, seed=run["seed"]),
            run["accuracy"],
            float("inf") if run["loss"] is None else run["loss"],
            saved["steps"],
            run["steps_to_target"],
            0,
            saved["state_bytes"],
            (),
        )
        for run in saved["final"]
    ]
    tuned = tuple((tried["lr"], tried["accuracy"]) for tried in saved["tuned"])
    return Cell(
        saved.get("name", config.optimizer),
        config.batch_size or 0,
        tuned,
        config.lr or 0,
        tuple(trials),
    )


def table(name: str) -> str:
    """The results of a comparison as Markdown."""
    saved = STUDIES[name]
    config, cells = saved["config"], cells_of(saved)
    seeds, chosen_by = config["seeds"], config.get("tuning_seeds", config["seeds"])
    head = columns("accuracy", config["target"])[:-1]  # without the time: runs shared the machine
    lines = [
        "```bash",
        " \\\n  ".join(textwrap.wrap(command(saved), 80, break_long_words=False, break_on_hyphens=False)),
        "```",
        "",
        f"{config['task']} ({saved['data']['description']}), {counted(config['epochs'], 'epoch')}, {seeds} seeds, "
        f"rates of a grid chosen by {'all' if chosen_by == seeds else chosen_by} of them, as the command did at "
        f"commit {saved['commit'][:7]}, with fewer trials than it makes today; {config['precision']} unless a name has "
        f"another precision ([all runs]({name}.json)).",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join([*row(each)[:5], _loss(each), row(each)[6]]) + " |" for each in cells),
        "",
        f"![{_seen(cells)}]({name}.svg)",
        "",
        *(f"- {line}".replace("+-", "±") for line in verdicts(cells)),
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def _seen(cells: list[Cell]) -> str:
    """The picture in words: mean losses, or mean accuracies by batch size."""
    names = list(dict.fromkeys(cell.optimizer for cell in cells))
    if len(cells) == len(names):
        return "Test loss: " + ", ".join(f"{cell.optimizer} {cell.loss[1]:.3f}" for cell in cells)
    by_name = [
        f"{name} "
        + ", ".join(f"{cell.value[1]:.1%} at {cell.batch_size:,}" for cell in cells if cell.optimizer == name)
        for name in names
    ]
    return "Test accuracy by batch size: " + "; ".join(by_name)


def command(saved: dict[str, Any]) -> str:
    """The same command in today's form: the files' commands have grids of rates, and some name a study."""
    asked = re.sub(r" --(lrs|tuning-seeds) \S+", "", _written(saved))
    return asked.replace("--task mnist-rows", "--task workbench/benchmarks/mnist_rows.py:MnistRows")


def _written(saved: dict[str, Any]) -> str:
    study = re.search(r" --study \S+", saved["command"])
    if study is None:
        return str(saved["command"])
    config = saved["config"]
    named = f" --optimizers {config['optimizers'].replace(', ', ',')}"
    if "--batch-sizes" not in saved["command"]:
        named += f" --batch-sizes {config['batch_sizes'].replace(', ', ',')}"
    return str(saved["command"]).replace(study[0], named)


def _loss(cell: Cell) -> str:
    low, middle, high = cell.loss
    return f"{middle:.4f} ({low:.4f}-{high:.4f})"


def picture(name: str) -> str:
    """Accuracy by batch size, or where there is only one of it, each optimizer's loss."""
    cells = cells_of(STUDIES[name])
    names = list(dict.fromkeys(cell.optimizer for cell in cells))
    if len(cells) == len(names):
        return plots.standalone(report_plots.dots([(cell.optimizer, cell.loss) for cell in cells], "test loss"))
    groups = [
        (own, [c.batch_size for c in cells if c.optimizer == own], [c.value for c in cells if c.optimizer == own])
        for own in names
    ]
    return plots.standalone(report_plots.ranges(groups, "batch size"))


def written(page: Path) -> str:
    """A page with its figures rewritten."""
    return FIGURES.sub(lambda match: match[1] + table(match[2]) + match[3], page.read_text())


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page))
    for name in STUDIES:
        (RESULTS / f"{name}.svg").write_text(picture(name))
