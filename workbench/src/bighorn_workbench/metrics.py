"""Metrics by name: how a value is written, and whether lower is better."""

import re

SHORT = {"accuracy": "acc", "perplexity": "ppl"}
"""Names of metrics in the lines of a run."""


LOWER = re.compile(
    "loss(es)?|err(or)?s?|r?msl?e|map?e|nll|bp[cb]|ppl|perplexity|[wc]er|fid|kld?|divergence|distance|deviance|"
    "residual|regret|brier|crps|(cross)?entropy|logloss|hinge|ece|nats"
)
"""Words in the names of metrics for which lower is usually better."""


def seems_lower(metric: str) -> bool:
    """Whether lower is better, judged by the metric's name.

    Example:
        >>> seems_lower("val_rmse"), seems_lower("TestLoss"), seems_lower("l2-error"), seems_lower("accuracy")
        (True, True, True, False)
    """
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", metric)
    return any(LOWER.fullmatch(word.lower()) for word in words)


def is_share(metric: str) -> bool:
    """Whether a metric is an accuracy, which is written as a percentage."""
    return "acc" in metric


def metric_text(metric: str, value: float | None, digits: int = 1) -> str:
    """The value of a metric, "-" for None.

    Example:
        >>> metric_text("accuracy", 0.9634), metric_text("perplexity", 23.4567)
        ('96.3%', '23.46')
    """
    if value is None:
        return "-"
    return f"{value:.{digits}%}" if is_share(metric) else f"{value:.4g}"
