"""Metrics by name: how a value is written, and whether lower is better."""

import math
import re

SHORT = {"accuracy": "acc", "perplexity": "ppl"}
"""Names of metrics in the lines of a run."""


LOWER = re.compile(
    "_(loss(es)?|err(or)?s?|n?r?msl?e|rmsd|[nsw]?map?e|m?ape|mpe|mad|mase|mpjpe|nll|neg(ative)?_log_likelihood|bp[cb]|"
    "bits|nats|ppl|perplexity|[wcbep]er(?=_$)|fid|kld?|divergence|distance|deviance|residual|regret|brier|crps|b?ce|"
    "(cross)?entropy|logloss|hinge|huber|chamfer|emd|lpips|ece|cost|energy|miss_rate)_"
)
"""Words in the names of metrics for which lower is usually better; "per" is also a word of "tokens_per_second"."""

SHARE = re.compile("acc(urac(y|ies))?")
"""Words in the names of metrics that are shares of the samples."""

RECORDED = (
    *("name", "config", "tuned", "on_edge", "steps", "steps_to_target", "seconds", "state_bytes", "curve", "final"),
    *("tuning", "repeats", "lr", "weight_decay", "warmup", "optimizer_option", "seed"),
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
    return LOWER.search(f"_{'_'.join(_words(metric))}_") is not None


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
