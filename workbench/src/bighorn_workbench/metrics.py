"""How the value of a metric is written, by the metric's name."""

SHORT = {"accuracy": "acc", "perplexity": "ppl"}
"""Names of metrics in the lines of a run."""


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
