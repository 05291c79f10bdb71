"""The report of ``bighorn compare``."""

from collections.abc import Mapping, Sequence

from bighorn.cli.metrics import is_share, metric_text
from bighorn.cli.reports import Section, plots, render
from bighorn.cli.trials import Cell


def compare_report(
    cells: Sequence[Cell],
    data: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    answers: Sequence[str],
    notes: Sequence[str],
    command: str,
    settings: Mapping[str, object],
) -> str:
    """Return the report of ``bighorn compare``."""
    names = list(dict.fromkeys(cell.optimizer for cell in cells))
    of = {name: [cell for cell in cells if cell.optimizer == name] for name in names}
    metric = cells[0].metric
    by_batch = plots.ranges(
        [(name, [cell.batch_size for cell in of[name]], [cell.value for cell in of[name]]) for name in names],
        "batch size",
        metric,
    )
    convergence = plots.convergence(
        [(name, [(str(cell.batch_size), *_by_epoch(cell)) for cell in of[name]]) for name in names], metric
    )
    rates = plots.tuning(
        [
            (
                name,
                [
                    (str(cell.batch_size), [lr for lr, _ in cell.tuned], [reached for _, reached in cell.tuned])
                    for cell in of[name]
                ],
            )
            for name in names
        ],
        metric,
    )
    seeds, epochs = len(cells[0].trials), cells[0].trials[0].config.epochs
    length = "its steps" if epochs is None else f"{epochs:g} epochs"
    return render(
        f"Can the batch grow and the {metric} stay?",
        " ".join(answers),
        {
            f"{cell.optimizer}, batch {cell.batch_size}": metric_text(metric, cell.value[1])
            for name in names
            for cell in (of[name][0], of[name][-1])
        },
        [
            Section(
                f"{metric.capitalize()} by batch size",
                f"{' against '.join(names)} on the test data of {data} after {length}: median, lowest and "
                f"highest of {seeds} {'seed' if seeds == 1 else 'seeds'}.",
                by_batch,
            ),
            Section(
                "Results",
                "\n".join(notes)
                + "\nMedians over the seeds; * marks a learning rate on the edge of its range. Time is of the training "
                "steps, on one thread, while other runs used the other processors.",
                head=head,
                rows=rows,
            ),
            Section(
                "Convergence",
                f"The {'test error' if is_share(metric) else metric} on the way: median of the seeds.",
                convergence,
            ),
            Section(
                "Learning rates",
                f"Each trial's {metric} on validation data, by its learning rate; its other options differ too.",
                rates,
            ),
        ],
        [command],
        settings,
    )


def _by_epoch(cell: Cell) -> tuple[list[float], list[float]]:
    """Return the epochs of a cell's evaluations, or their steps; and the error of an accuracy, or another metric."""
    trial = cell.trials[0]
    unit = (trial.config.epochs or trial.steps) / trial.steps
    values = [1 - value if is_share(cell.metric) else value for _, value in cell.curve]
    return [unit * step for step, _ in cell.curve], values
