"""The report of ``bighorn lr-find``."""

from collections.abc import Mapping, Sequence

import numpy as np

from bighorn.cli.config import RunConfig
from bighorn.cli.reports import Section, figures, render


def lr_report(
    config: RunConfig,
    data: str,
    lrs: Sequence[float],
    losses: Sequence[float],
    smooth: Sequence[float],
    chosen: int | None,
    words: Sequence[str],
    command: str,
    settings: Mapping[str, object],
) -> str:
    """Return the report of ``bighorn lr-find``."""
    best = int(np.argmin(smooth))
    return render(
        f"A learning rate for {config.optimizer}",
        f"{config.optimizer} on {data}, batch {config.batch_size}.",
        {
            "suggested learning rate": "none" if chosen is None else f"{lrs[chosen]:.2g}",
            "best smoothed loss": f"{smooth[best]:.4f}",
            "steps": f"{len(lrs)}",
        },
        [
            Section(
                "Loss by learning rate",
                "One run whose learning rate grows by the same factor at each step.\n" + "\n".join(words),
                figures.search(lrs, losses, smooth, chosen),
            )
        ],
        [command],
        settings,
        config.device,
    )
