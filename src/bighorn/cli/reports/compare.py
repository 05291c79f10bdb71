"""The report of ``bighorn compare``."""

from collections.abc import Mapping, Sequence

from bighorn.cli.reports import Section, plots, render
from bighorn.cli.sweep import Cell


def compare_report(
    cells: Sequence[Cell],
    data: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    command: str,
    settings: Mapping[str, object],
) -> str:
    """Return the report of ``bighorn compare``."""
    names = list(dict.fromkeys(cell.optimizer for cell in cells))
    of = {name: [cell for cell in cells if cell.optimizer == name] for name in names}
    accuracy = plots.ranges(
        [(name, [cell.batch_size for cell in of[name]], [cell.accuracy for cell in of[name]]) for name in names],
        "batch size",
    )
    convergence = plots.convergence(
        [(name, [(str(cell.batch_size), *_by_epoch(cell)) for cell in of[name]]) for name in names]
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
        ]
    )
    seeds, epochs = len(cells[0].trials), cells[0].trials[0].config.epochs
    return render(
        "Can the batch grow and the accuracy stay?",
        " ".join(notes),
        {
            f"{cell.optimizer}, batch {cell.batch_size}": f"{cell.accuracy[1]:.1%}"
            for name in names
            for cell in (of[name][0], of[name][-1])
        },
        [
            Section(
                "Accuracy by batch size",
                f"{' against '.join(names)} on the test data of {data} after {epochs:g} epochs: median, lowest and "
                f"highest of {seeds} {'seed' if seeds == 1 else 'seeds'}.",
                accuracy,
            ),
            Section(
                "Results",
                "Medians over the seeds; * marks a learning rate on the edge of its grid. Time is of the training "
                "steps, on one thread, while other runs used the other processors.",
                head=head,
                rows=rows,
            ),
            Section(
                "Convergence",
                "The test error on the way: median of the seeds, at the learning rate chosen.",
                convergence,
            ),
            Section(
                "Learning rates",
                "Each rate was tried with a fifth of the training data held out; the highest mean "
                "accuracy on that fifth was taken, the lower loss deciding ties.",
                rates,
            ),
        ],
        [command],
        settings,
    )


def _by_epoch(cell: Cell) -> tuple[list[float], list[float]]:
    """Return the epochs of a cell's evaluations, and the test error at each."""
    trial = cell.trials[0]
    assert trial.config.epochs is not None
    epochs = [trial.config.epochs * step / trial.steps for step, _ in cell.curve]
    return epochs, [1 - accuracy for _, accuracy in cell.curve]
