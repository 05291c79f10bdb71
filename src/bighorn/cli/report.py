"""Reports: one self-contained HTML file that says what came out and how to get it again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from bighorn import Came, Lamb
from bighorn.cli import figures
from bighorn.cli.config import RunConfig
from bighorn.cli.environment import environment
from bighorn.cli.footprint import Kind
from bighorn.cli.lr_find import Curve
from bighorn.cli.optimizers import Gauge, state_bytes
from bighorn.cli.run import Run
from bighorn.cli.sweep import Cell


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading, some words, and a figure or a table.

    Attributes:
        heading: The heading.
        text: A sentence or two below it.
        figure: An ``<svg>`` element.
        head: The table's column names; the first column is text, the others are numbers.
        rows: The table's cells.
    """

    heading: str
    text: str = ""
    figure: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def render(
    title: str,
    lead: str,
    tiles: Mapping[str, str],
    sections: Sequence[Section],
    commands: Sequence[str],
    settings: Mapping[str, object],
    device: str = "cpu",
) -> str:
    """Lay out a report.

    Args:
        title: The heading.
        lead: The sentence below it.
        tiles: The few figures that matter most.
        sections: The body.
        commands: The commands that made it, in order.
        settings: Every option's value, defaults included.
        device: The device of the runs. Default: "cpu".
    """
    loader = jinja2.PackageLoader("bighorn.cli", ".")
    template = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("report.html.j2")
    return template.render(
        title=title,
        lead=lead,
        tiles=tiles,
        sections=[asdict(section) | {"figure": Markup(section.figure)} for section in sections],
        commands=commands,
        settings={
            name.replace("_", " "): _in_words(value)
            for name, value in settings.items()
            if value is not None and value != ()
        },
        environment=environment(device),
    )


def _in_words(value: object) -> object:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value


def run_report(run: Run) -> str:
    """The report of ``bighorn train``."""
    config, history = run.config, run.history
    steps = range(1, run.step + 1)
    tests = history.tests
    tiles = {"test accuracy": f"{tests[-1][2]:.2%}", "test loss": f"{tests[-1][1]:.4f}"} if tests else {}
    tiles |= {
        "steps": f"{run.step:,}" + ("" if run.done else f" of {run.total:,}"),
        "training time": f"{history.seconds:.1f} s",
        "optimizer state": f"{state_bytes(run.optimizer) / 1e6:.2f} MB",
    }
    sections = []
    if steps:
        test_steps = [test[0] for test in tests]
        loss = figures.curves(steps, history.loss, test_steps, [test[1] for test in tests], "loss", log=True)
        accuracy = figures.curves(
            steps, history.accuracy, test_steps, [test[2] for test in tests], "accuracy", percent=True
        )
        sections += [
            Section("Loss", "Cross-entropy in nats. Training: each batch, with dropout, and its running mean.", loss),
            Section("Accuracy", "", accuracy),
        ]
        sections += [_heat_map(run, gauge) for gauge in run.gauges if history.gauges.get(gauge.name)]
        sections.append(
            Section("Learning rate", "As scheduled, the same for all layers.", figures.line(steps, history.lr, "lr"))
        )
    sections.append(
        Section(
            "Evaluations",
            head=("step", "epoch", "learning rate", "test loss", "test accuracy"),
            rows=[
                (
                    f"{step:,}",
                    f"{step * run.batch_size / len(run.dataset):.2f}",
                    f"{history.lr[step - 1]:.3g}",
                    f"{loss:.4f}",
                    f"{accuracy:.2%}",
                )
                for step, loss, accuracy in tests
            ],
        )
    )
    lead = (
        f"{config.optimizer} on {run.dataset.description}, batch {run.batch_size}, peak learning rate {run.peak_lr:.3g}"
    )
    if not run.done:
        lead += f". Stopped after step {run.step:,} of {run.total:,}"
    settings = asdict(config) | ({"kernels": run.optimizer.explain()} if isinstance(run.optimizer, Lamb | Came) else {})
    return render(
        f"{config.task} with {config.optimizer}", lead + ".", tiles, sections, history.commands, settings, config.device
    )


def _heat_map(run: Run, gauge: Gauge) -> Section:
    history = run.history
    position = {name: index for index, (name, _) in enumerate(run.model.named_parameters())}
    order = sorted(range(len(history.layers)), key=lambda index: position.get(history.layers[index], len(position)))
    values = np.array(history.gauges[gauge.name], dtype=float).T[order]
    if gauge.times_lr:
        values = values * np.array([history.lr[step - 1] for step in history.gauge_steps])
    return Section(
        gauge.heading,
        f"{gauge.text} Logarithmic colours; the outermost values share the last ones.",
        figures.heat_map(
            [history.layers[index] for index in order],
            history.gauge_steps,
            values,
            f"lr x {gauge.label}" if gauge.times_lr else gauge.label,
        ),
    )


def compare_report(
    asks: str,
    cells: Sequence[Cell],
    data: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    command: str,
    settings: Mapping[str, object],
) -> str:
    """The report of ``bighorn compare``."""
    names = list(dict.fromkeys(cell.optimizer for cell in cells))
    of = {name: [cell for cell in cells if cell.optimizer == name] for name in names}
    accuracy = figures.ranges(
        [(name, [cell.batch_size for cell in of[name]], [cell.accuracy for cell in of[name]]) for name in names],
        "batch size",
    )
    convergence = figures.convergence(
        [(name, [(str(cell.batch_size), *_by_epoch(cell)) for cell in of[name]]) for name in names]
    )
    rates = figures.tuning(
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
    seeds = len(cells[0].trials)
    return render(
        asks,
        f"{' against '.join(names)} on {data}; {cells[0].trials[0].config.epochs:g} epochs, {seeds} seeds.",
        {
            f"{cell.optimizer}, batch {cell.batch_size}": f"{cell.accuracy[1]:.1%}"
            for name in names
            for cell in (of[name][0], of[name][-1])
        },
        [
            Section(
                "Accuracy by batch size", f"Median, lowest and highest of {seeds} seeds on the test data.", accuracy
            ),
            Section(
                "Results",
                "Medians over the seeds; * marks a learning rate on the edge of its grid. Time is of the training "
                "steps, on one thread, while other runs used the other processors.",
                head=head,
                rows=rows,
            ),
            Section("In words", "\n".join(notes)),
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
    """The epochs of a cell's evaluations, and the test error at each."""
    trial = cell.trials[0]
    assert trial.config.epochs is not None
    epochs = [trial.config.epochs * step / trial.steps for step, _ in cell.curve]
    return epochs, [1 - accuracy for _, accuracy in cell.curve]


def lr_report(
    config: RunConfig,
    data: str,
    curve: Curve,
    chosen: int | None,
    words: Sequence[str],
    command: str,
    settings: Mapping[str, object],
) -> str:
    """The report of ``bighorn lr-find``."""
    best = int(np.argmin(curve.smooth))
    return render(
        f"A learning rate for {config.optimizer}",
        f"{config.optimizer} on {data}, batch {config.batch_size}.",
        {
            "suggested learning rate": "none" if chosen is None else f"{curve.lrs[chosen]:.2g}",
            "best smoothed loss": f"{curve.smooth[best]:.4f}",
            "steps": f"{len(curve.lrs)}",
        },
        [
            Section(
                "Loss by learning rate",
                "One run whose learning rate grows by the same factor at each step.\n" + "\n".join(words),
                figures.search(curve.lrs, curve.losses, curve.smooth, chosen),
            )
        ],
        [command],
        settings,
        config.device,
    )


def bench_report(
    content: Mapping[str, Any], columns: Mapping[str, Callable[[dict[str, Any]], str]], absent: Sequence[str]
) -> str:
    """The report of ``bighorn bench``, from what it writes as JSON: a figure and a table for each set of shapes."""
    config, sets = content["config"], content["results"]
    baseline = sets[0]["optimizers"][0]["label"]
    rows = [row for found in sets for row in found["optimizers"]]
    columns = {name: show for name, show in columns.items() if any(show(row) != "-" for row in rows)}
    sections = []
    for found in sets:
        peers = [(row["label"], row["ratio"]) for row in found["optimizers"] if row["ratio"] is not None]
        sections.append(
            Section(
                found["shapes"],
                "\n".join([f"{found['parameters']:,} parameters in {found['tensors']} tensors.", *found["notes"]]),
                figures.spreads(peers, f"step time on {found['shapes']}, relative to {baseline}") if peers else "",
                ("optimizer", *columns),
                [(row["label"], *(show(row) for show in columns.values())) for row in found["optimizers"]],
            )
        )
    if absent:
        sections.append(Section("Not installed here", ", ".join(absent)))
    return render(
        "What a step costs",
        f"Each optimizer takes turns with {baseline}. Ratios are of each round: median and 10th to 90th percentile. "
        "The first row is the baseline against itself, which shows the noise.",
        {
            f"{row['label']} on {sets[-1]['shapes']}, relative": f"{row['ratio']['median']:.2f}"
            for row in sets[-1]["optimizers"][1:4]
            if row["ratio"] is not None
        },
        sections,
        [content["command"]],
        config | content["machine"],
        config["device"],
    )


PARTS = 5
"""Kinds of layers that the bars of a prediction tell apart."""


def memory_report(
    source: str,
    about: str,
    layers: Sequence[Kind],
    elements: int,
    layer_table: Section,
    total_table: Section,
    command: str,
    settings: Mapping[str, object],
) -> str:
    """The report of ``bighorn memory``."""
    names = list(layers[0].bytes)
    parts = [
        (kind.label.replace("\n", ": "), [kind.bytes[name] / elements for name in names]) for kind in layers[:PARTS]
    ]
    rest = layers[PARTS:]
    if rest:
        label = f"{sum(kind.count for kind in rest)} others"
        parts.append((label, [sum(kind.bytes[name] for kind in rest) / elements for name in names]))
    return render(
        f"Optimizer state of {source}",
        f"{about}.",
        {name: total for name, total, _ in total_table.rows},
        [
            Section(
                "State by optimizer",
                "Bytes for each parameter of the model, by the layers that they belong to.",
                figures.bars(names, parts, "bytes per parameter"),
            ),
            total_table,
            layer_table,
        ],
        [command],
        settings,
    )
