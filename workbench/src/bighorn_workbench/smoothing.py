"""The running mean of a curve."""

from collections.abc import Sequence

import numpy as np


def smoothed(values: Sequence[float], half: int) -> np.ndarray:
    """Return a centred running mean over ``half`` values on each side, fewer towards the ends; it does not lag."""
    series = np.asarray(values, dtype=float)
    total = np.concatenate(([0.0], np.cumsum(series)))
    index = np.arange(len(series))
    reach = np.minimum(np.minimum(index, len(series) - 1 - index), half)
    mean: np.ndarray = (total[index + reach + 1] - total[index - reach]) / (2 * reach + 1)
    return mean
