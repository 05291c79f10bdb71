"""Schedules with explicit values, for every step or from certain steps on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from bighorn._arguments import knows_its_keywords
from bighorn.schedules._checks import plain
from bighorn.schedules._schedule import Schedule

MAX_VALUES = 2**22
"""The number of values that `Values.of` reads before it treats an iterable as infinite."""


@knows_its_keywords
@dataclass(frozen=True)
class PiecewiseConstant(Schedule):
    """values[0] before step boundaries[0], values[1] from there to before boundaries[1], and so on.

    Args:
        boundaries: The steps at which the value changes, ascending; none for a constant.
        values: The values, one more than boundaries.

    Raises:
        ValueError: The boundaries do not ascend, or there is not one value more than boundaries.

    Example:
        >>> PiecewiseConstant(boundaries=[2, 3], values=[1.0, 0.5, 0.1]).as_list(5)
        [1.0, 1.0, 0.5, 0.1, 0.1]
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"values must be one more than boundaries, but they are {len(self.values)} for "
                f"{len(self.boundaries)}: give the value before the first boundary and the one from each boundary on"
            )

    def _at(self, step: int) -> float:
        return self.values[bisect_right(self.boundaries, step)]


@knows_its_keywords
@dataclass(frozen=True)
class Values(Schedule):
    """values[s], from a list with one value for every step; a step past its end is an error.

    Args:
        values: The values in a list or a tuple, at least one; `Values.of` takes other iterables.

    Raises:
        ValueError: There are no values, one of them cannot be a learning rate, or the step is past the end.

    Example:
        >>> Values([0.1, 0.05]).as_list(2)
        [0.1, 0.05]
        >>> Values([0.1, 0.05])(2)
        Traceback (most recent call last):
        ...
        ValueError: step=2 is past the end of a schedule of 2 values, for steps 0 to 1: make it as long as the training
    """

    values: Sequence[float]

    @classmethod
    def of(cls, values: Iterable[float]) -> Values:
        """Return a schedule of the numbers in a list, a generator, a 1-D tensor or an array, which is read at once.

        Args:
            values: Numbers in the order of the steps, at least 1 and at most 4194304 of them (2**22).

        Raises:
            TypeError: It is not iterable, has no order, or holds something that is not a number.
            ValueError: It is empty, endless, or holds a number that is negative or not finite.

        Example:
            >>> Values.of(0.1 / (step + 1) for step in range(4))(3)
            0.025
        """
        read = plain(values)
        if isinstance(read, (str, bytes, Set, Mapping)) or not isinstance(read, Iterable):
            raise TypeError(f"values must be numbers in an order, as a list or a generator, not {values!r}")
        first = tuple(islice(read, MAX_VALUES + 1))
        if len(first) > MAX_VALUES:
            raise ValueError(
                f"values go on after {MAX_VALUES} steps, perhaps without an end: "
                "give a schedule or a function of the step instead"
            )
        return cls(first)

    def _at(self, step: int) -> float:
        if step >= len(self.values):
            raise ValueError(
                f"step={step} is past the end of a schedule of {len(self.values)} values, for steps 0 to "
                f"{len(self.values) - 1}: make it as long as the training"
            )
        return self.values[step]
