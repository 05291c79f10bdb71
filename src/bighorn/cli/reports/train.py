"""The report of ``bighorn train``."""

from dataclasses import asdict

import numpy as np

from bighorn.cli.optimizers import KINDS, Metric, state_bytes
from bighorn.cli.reports import Section, plots, render
from bighorn.cli.run import Run


def train_report(run: Run) -> str:
    """Return the report of ``bighorn train``."""
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
        loss = plots.curves(steps, history.loss, test_steps, [test[1] for test in tests], "loss", log=True)
        accuracy = plots.curves(
            steps, history.accuracy, test_steps, [test[2] for test in tests], "accuracy", percent=True
        )
        sections += [
            Section("Loss", "Cross-entropy in nats. Training: each batch, with dropout, and its running mean.", loss),
            Section("Accuracy", "On a logarithmic scale of the error, up to the best test.", accuracy),
        ]
        sections += [_heat_map(run, metric) for metric in run.metrics if history.metrics.get(metric.name)]
        sections.append(
            Section("Learning rate", "As scheduled, the same for all layers.", plots.line(steps, history.lr, "lr"))
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
    settings = asdict(config) | ({"kernels": run.optimizer.explain()} if isinstance(run.optimizer, KINDS) else {})
    return render(
        f"{config.task} with {config.optimizer}", lead + ".", tiles, sections, history.commands, settings, config.device
    )


def _heat_map(run: Run, metric: Metric) -> Section:
    history = run.history
    position = {name: index for index, (name, _) in enumerate(run.model.named_parameters())}
    order = sorted(range(len(history.layers)), key=lambda index: position.get(history.layers[index], len(position)))
    values = np.array(history.metrics[metric.name], dtype=float).T[order]
    if metric.times_lr:
        values = values * np.array([history.lr[step - 1] for step in history.metric_steps])
    return Section(
        metric.heading,
        f"{metric.text} Logarithmic colours; the outermost values share the last ones.",
        plots.heat_map(
            [history.layers[index] for index in order],
            history.metric_steps,
            values,
            f"lr x {metric.label}" if metric.times_lr else metric.label,
        ),
    )
