"""The search space of ``bighorn compare`` for each optimizer, and the points that it tries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.optimizers import CONTESTANTS, OPTIMIZERS
from bighorn_workbench.values import assigned, check_name, numbers

Space = Mapping[str, tuple[float, float]]
"""The lowest and the highest value of each option that is searched, in the logarithm; equal ones fix it."""

SCAN = 6
"""The first trials of a cell, in which only its rate changes: a few trials of all options do not cover its range."""

AROUND = 4.0
"""Later trials have rates between the best of the first ones divided and multiplied by this."""


@dataclass(frozen=True)
class Entry:
    """A cell to fill: an optimizer or variant at a batch size.

    Attributes:
        name: The name of the optimizer or variant.
        base: The resolved options of its runs.
        space: What is searched.
    """

    name: str
    base: RunConfig
    space: Space

    @property
    def start(self) -> dict[str, float]:
        """The defaults, as far as the space allows."""
        first = {"lr": self.base.lr, "weight_decay": self.base.weight_decay, "warmup": 0.1}
        first |= OPTIMIZERS[self.base.optimizer].defaults
        return {name: min(max(first[name] or low, low), high) for name, (low, high) in self.space.items()}

    def most(self, count: int) -> int:
        """Return how many of so many trials differ: one, if nothing is searched."""
        return min(count, 1) if all(low == high for low, high in self.space.values()) else count

    def scan(self) -> list[dict[str, float]]:
        """Return the first points: the defaults, and other rates evenly over their range with the other defaults."""
        low, high = self.space.get("lr", (1.0, 1.0))
        rates = scanned(low, high, SCAN - 1) if low < high else []
        return [self.start, *(self.start | {"lr": lr} for lr in rates if lr != self.start["lr"])]

    def around(self, best: float, count: int) -> list[dict[str, float]]:
        """Return further points: a quasi-random sequence of Sobol over all options, with rates near the best one."""
        from scipy.stats.qmc import Sobol  # other commands, which have spaces too, do without

        space = dict(self.space)
        if "lr" in space:
            space["lr"] = max(space["lr"][0], best / AROUND), min(space["lr"][1], best * AROUND)
        inside = {name: min(max(value, space[name][0]), space[name][1]) for name, value in self.start.items()}
        free = {name: span for name, span in space.items() if span[0] < span[1]}
        points: list[dict[str, float]] = []
        for shares in Sobol(len(free), seed=0).random_base2((count - 1).bit_length())[:count] if free else ():
            drawn = {
                name: min(max(float(f"{low * (high / low) ** share:.3g}"), low), high)
                for share, (name, (low, high)) in zip(shares, free.items(), strict=True)
            }
            points.append(inside | drawn)
        return points


def scanned(low: float, high: float, count: int) -> list[float]:
    """Return rates in the middles of equal parts of a range, in the logarithm.

    Example:
        >>> scanned(0.001, 1.0, 3)
        [0.00316, 0.0316, 0.316]
    """
    return [float(f"{low * (high / low) ** ((index + 0.5) / count):.3g}") for index in range(count)]


def read_spaces(texts: Sequence[str], optimizers: Sequence[str]) -> Mapping[str, Space]:
    """Read ``OPTIMIZER.OPTION=LOWEST,HIGHEST`` for some options of ``optimizers``; a variant keeps what it sets itself.

    Example:
        >>> read_spaces(["sgd.lr=0.1,1", "sgd.warmup=0.1"], ["sgd"])["sgd"]  # doctest: +NORMALIZE_WHITESPACE
        {'lr': (0.1, 1.0), 'weight_decay': (5e-05, 0.01), 'warmup': (0.1, 0.1),
         'one_minus_momentum': (0.01, 0.5)}
    """
    spaces: dict[str, dict[str, tuple[float, float]]] = {}
    for name in optimizers:
        space = OPTIMIZERS[CONTESTANTS[name]["optimizer"]].space
        spaces[name] = {option: span for option, span in space.items() if option not in CONTESTANTS[name]}
    form = "OPTIMIZER.OPTION=LOWEST,HIGHEST like lamb.lr=0.001,0.1"
    for place, values in assigned("--space", r"[^.]*\..*", form, texts).items():
        name, _, key = place.partition(".")
        flag = f"--space {place}={values}"
        if name in CONTESTANTS and name not in optimizers:
            raise InputError(f"{flag}: add {name} to --optimizers {','.join(optimizers)}, or leave it out.")
        check_name("--space", name, optimizers)
        recipe = OPTIMIZERS[CONTESTANTS[name]["optimizer"]]
        check_name(f"--space {name}", key, dict.fromkeys([*spaces[name], *recipe.defaults]))
        none = key in {"weight_decay", "warmup"} and values == "0"
        ends = (0.0,) if none else numbers(f"--space {place}", values, float)
        if len(ends) > 2:
            raise InputError(f"{flag} has {len(ends)} numbers: give the lowest and the highest, or a single one.")
        if ends[0] > ends[-1]:
            raise InputError(f"{flag}: give the lowest first.")
        if key != "lr" and ends[-1] > 1:
            raise InputError(f"{flag}: {key} is at most 1.")
        spaces[name][key] = ends[0], ends[-1]
    return spaces


def spans(space: Space) -> str:
    """Return a space in words."""
    return ", ".join(
        f"{name} {low:g}" if low == high else f"{name} {low:g} to {high:g}" for name, (low, high) in space.items()
    )
