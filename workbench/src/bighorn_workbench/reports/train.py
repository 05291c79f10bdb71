"""The report of ``bighorn train``."""

import math
from dataclasses import asdict
from functools import partial

import numpy as np

from bighorn_workbench import rate_hint
from bighorn_workbench.metrics import is_share, metric_text
from bighorn_workbench.optimizers import KINDS, Metric, state_bytes
from bighorn_workbench.reports import Section, plots, render
from bighorn_workbench.run import Run
from bighorn_workbench.tasks import defaults


def train_report(run: Run) -> str:
    """Return the report of ``bighorn train``."""
    config, history = run.config, run.history
    steps = range(1, run.step + 1)
    evaluations, metric = history.evaluations, run.task.metric
    last = evaluations[-1][1] if evaluations else {}
    names = sorted({**last, **history.test}, key=lambda name: (name != metric, name))
    tiles = {f"test {name}": _text(name, history.test[name]) for name in names if name in history.test}
    tiles |= {f"validation {name}": _text(name, last[name]) for name in names if name in last and name == metric}
    tiles |= {
        "steps": f"{run.step:,}" + ("" if run.done else f" of {run.total:,}"),
        "training time": f"{history.seconds:.1f} s",
        "optimizer state": f"{state_bytes(run.optimizer) / 1e6:.2f} MB",
    }
    sections = []
    if steps:
        points = [(step, found["loss"]) for step, found in evaluations if "loss" in found]
        log = min(*history.loss, *(loss for _, loss in points), math.inf) > 0
        figure = partial(plots.curves, steps, history.loss, points, "loss", log=log)
        text = "Training: each batch, as the model is in training, and its running mean."
        sections.append(Section("Loss", text, figure))
        for name in dict.fromkeys([*(name for name in names if name != "loss"), *history.batch_metrics]):
            sections.append(_metric(name, run))
        sections += [_heat_map(run, metric) for metric in run.metrics if history.metrics.get(metric.name)]
        figure = partial(plots.line, steps, history.lr, "lr")
        sections.append(Section("Learning rate", "As scheduled, the same for all layers.", figure))
    head = ("step", "epoch", "learning rate", *(f"validation {name}" for name in reversed(names)))
    rows = [
        (
            f"{step:,}",
            f"{step * run.epoch_size[1] / run.epoch_size[0]:.2f}" if run.epoch_size else "-",
            f"{history.lr[step - 1]:.3g}",
            *(_text(name, found.get(name)) for name in reversed(names)),
        )
        for step, found in evaluations
    ]
    sections.append(Section("Evaluations", "On validation data; the test data are for the end.", head=head, rows=rows))
    data = defaults(run.task).description
    lead = f"{config.optimizer} on {data}, batch {run.batch_size}, peak learning rate {run.peak_lr:.3g}."
    if not run.done:
        lead += f" Stopped after step {run.step:,} of {run.total:,}."
    lead += f" {hint}" if (hint := rate_hint.hint(run)) else ""
    settings = asdict(config) | ({"kernels": run.optimizer.explain()} if isinstance(run.optimizer, KINDS) else {})
    split = "test" if history.test else "validation"
    answer = f"{tiles[f'{split} {metric}']} {split} {metric}" if evaluations else "No evaluation yet"
    title = f"{answer}: {config.optimizer} on {config.task}"
    return render(title, lead, tiles, sections, history.commands, settings, config.device)


def _text(name: str, value: float | None) -> str:
    return metric_text(name, value, 2) if name != "loss" or value is None else f"{value:.4f}"


def _metric(name: str, run: Run) -> Section:
    """Return the curves of a metric of validation data, and of the batches if their loss comes with it."""
    steps, batches = range(1, run.step + 1), run.history.batch_metrics.get(name, [])
    points = [(step, found[name]) for step, found in run.history.evaluations if name in found]
    figure = partial(plots.curves, steps, batches, points, name)
    text = "On a logarithmic scale of the error, up to the best evaluation." if is_share(name) else ""
    return Section(name.capitalize(), text, figure)


def _heat_map(run: Run, metric: Metric) -> Section:
    history = run.history
    values = np.array(history.metrics[metric.name], dtype=float).T
    if metric.times_lr:
        values = values * np.array([history.lr[step - 1] for step in history.metric_steps])
    label = f"lr x {metric.label}" if metric.times_lr else metric.label
    text = f"{metric.text} Logarithmic colours; the outermost values share the last ones."
    return Section(metric.heading, text, partial(plots.heat_map, history.layers, history.metric_steps, values, label))
