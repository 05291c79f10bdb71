"""Metrics by name: how a value is written, and whether lower is better."""

import math
import re

SHORT = {"accuracy": "acc", "perplexity": "ppl"}
"""Names of metrics in the lines of a run."""


LOWER = re.compile(
    "loss(es)?|err(or)?s?|r?msl?e|map?e|nll|bp[cb]|ppl|perplexity|[wc]er|fid|kld?|divergence|distance|deviance|"
    "residual|regret|brier|crps|(cross)?entropy|logloss|hinge|ece|nats"
)
"""Words in the names of metrics for which lower is usually better."""

SHARE = re.compile("acc(urac(y|ies))?")
"""Words in the names of metrics that are shares of the samples."""

RECORDED = (
    *("name", "config", "tuned", "on_edge", "steps", "steps_to_target", "seconds", "state_bytes", "curve", "final"),
    *("tuning", "lr", "weight_decay", "warmup", "optimizer_option", "seed"),
)
"""The names of other figures in the records that ``--json`` writes for a metric."""


def _words(metric: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", metric)]


def seems_lower(metric: str) -> bool:
    """Whether lower is better, judged by the metric's name.

    Example:
        >>> seems_lower("val_rmse"), seems_lower("TestLoss"), seems_lower("l2-error"), seems_lower("accuracy")
        (True, True, True, False)
    """
    return any(map(LOWER.fullmatch, _words(metric)))


def is_share(metric: str) -> bool:
    """Whether a metric is an accuracy, which is written as a percentage.

    Example:
        >>> is_share("top1_acc"), is_share("valAccuracy"), is_share("accumulated_reward")
        (True, True, False)
    """
    return any(map(SHARE.fullmatch, _words(metric)))


def json_name(metric: str) -> str:
    """Return the name of a metric in the records of ``--json``, which have figures of their own.

    Example:
        >>> json_name("accuracy"), json_name("seconds")
        ('accuracy', 'metric seconds')
    """
    return f"metric {metric}" if metric in RECORDED else metric


def metric_text(metric: str, value: float | None, digits: int = 1) -> str:
    """The value of a metric, "-" for None.

    Example:
        >>> metric_text("accuracy", 0.9634), metric_text("perplexity", 23.4567)
        ('96.3%', '23.46')
    """
    if value is None:
        return "-"
    return f"{value:.{digits}%}" if is_share(metric) and math.isfinite(value) else f"{value:.4g}"
