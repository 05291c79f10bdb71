"""The report of ``bighorn compare``."""

from collections.abc import Mapping, Sequence
from functools import partial

from bighorn_workbench.metrics import is_share, metric_text
from bighorn_workbench.reports import Section, plots, render
from bighorn_workbench.trials import Cell
from bighorn_workbench.values import counted


def compare_report(
    cells: Sequence[Cell],
    data: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    answers: Sequence[str],
    notes: Sequence[str],
    paste: Mapping[str, str],
    command: str,
    settings: Mapping[str, object],
) -> str:
    """Return the report of ``bighorn compare``."""
    names = list(dict.fromkeys(cell.optimizer for cell in cells))
    of = {name: [cell for cell in cells if cell.optimizer == name] for name in names}
    metric, sizes = cells[0].metric, sorted({cell.batch_size for cell in cells})
    if len(sizes) > 1:
        groups = [(name, [cell.batch_size for cell in of[name]], [cell.value for cell in of[name]]) for name in names]
        by_batch, lines = partial(plots.ranges, groups, "batch size", metric), "batch size"
        panels = [(name, [(str(cell.batch_size), cell) for cell in of[name]]) for name in names]
    else:  # a figure over batch sizes would have one point, and each panel one line
        values = [(cell.optimizer, cell.value) for cell in cells]
        by_batch, lines = partial(plots.dots, values, f"test {metric}", percent=is_share(metric)), "optimizer"
        panels = [(f"batch size {sizes[0]:,}", [(cell.optimizer, cell) for cell in cells])]
    unit = "step" if cells[0].trials[0].config.epochs is None else "epoch"
    curves = [(title, [(name, *_by_epoch(cell)) for name, cell in members]) for title, members in panels]
    rates = [(title, [(name, *_pairs(cell.tuned)) for name, cell in members]) for title, members in panels]
    error = "test error" if is_share(metric) else metric
    seeds, length = len(cells[0].trials), cells[0].trials[0].config.length
    shown = {
        f"{cell.optimizer}, batch {cell.batch_size}": metric_text(metric, cell.value[1])
        for name in names
        for cell in (of[name][0], of[name][-1])
    }
    answer, *more = answers or [f"{metric.capitalize()} {', '.join(f'{v} with {k}' for k, v in shown.items())}"]
    title, _, detail = answer.rstrip(".").partition(": ")
    lead = f"{metric.capitalize()} on the test data of {data} after {length}."
    if detail:
        lead = f"{detail[0].upper()}{detail[1:]}. {lead}"
    about_results = (
        "Metrics are means over the seeds; steps and times are medians. * marks a learning rate on the edge of its "
        "range. Times are of training steps on one thread, while other runs used the other processors."
    )
    sections = [
        *([Section("Verdicts", "\n".join(more))] if more else []),
        Section(
            f"{metric.capitalize()} by {lines}", f"Mean, lowest and highest of {counted(seeds, 'seed')}.", by_batch
        ),
        Section("Results", "\n".join([*notes, about_results]), head=head, rows=rows),
        *(Section(f"Code: {name}", code=lines) for name, lines in paste.items()),
        Section(
            "Convergence",
            f"The {error} during training, mean over the seeds.",
            partial(plots.lines_in_panels, curves, unit, error, lines, metric),
        ),
        Section(
            "Learning rates",
            f"The {metric} of each trial on validation data, of repeated ones the mean. The other options of the "
            "trials differ too.",
            partial(plots.lines_in_panels, rates, "learning rate", f"held-out {metric}", lines, metric),
        ),
    ]
    return render(title, lead, shown, sections, [command], settings)


def _by_epoch(cell: Cell) -> tuple[list[float], list[float]]:
    """Return the epochs of a cell's evaluations, or their steps; and the error of an accuracy, or another metric."""
    trial = cell.trials[0]
    unit = (trial.config.epochs or trial.steps) / trial.steps
    values = [1 - value if is_share(cell.metric) else value for _, value in cell.curve]
    return [unit * step for step, _ in cell.curve], values


def _pairs(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
