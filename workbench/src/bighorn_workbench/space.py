"""What ``bighorn compare`` searches for each optimizer, and the points that it tries."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution

from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.optimizers import CONTESTANTS, OPTIMIZERS
from bighorn_workbench.values import check_name, numbers

Space = Mapping[str, tuple[float, float]]
"""The lowest and the highest value of each option that is searched, in the logarithm; equal ones fix it."""


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

    def candidates(self, count: int) -> list[dict[str, float]]:
        """Return the first ``count`` points of the search: the defaults, then a quasi-random sequence of Sobol."""
        first = {"lr": self.base.lr, "weight_decay": self.base.weight_decay, "warmup": 0.1}
        first |= OPTIMIZERS[self.base.optimizer].defaults
        start = {name: min(max(first[name] or low, low), high) for name, (low, high) in self.space.items()}
        free: dict[str, BaseDistribution] = {
            name: FloatDistribution(low, high, log=True) for name, (low, high) in self.space.items() if low < high
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.QMCSampler(seed=0, scramble=True)
        study = optuna.create_study(sampler=sampler)
        study.add_trial(optuna.create_trial(value=0, params={name: start[name] for name in free}, distributions=free))
        points = [start]
        while len(points) < (count if free else 1):
            trial = study.ask(free)
            study.tell(trial, 0)
            points.append(start | {name: float(f"{value:.3g}") for name, value in trial.params.items()})
        return points


def read_spaces(texts: Sequence[str], optimizers: Sequence[str]) -> Mapping[str, Space]:
    """Read ``OPTIMIZER.OPTION=LOWEST,HIGHEST`` for some options of ``optimizers``; a variant keeps what it sets itself.

    Example:
        >>> read_spaces(["sgd.lr=0.1,1", "sgd.warmup=0.1"], ["sgd"])["sgd"]  # doctest: +NORMALIZE_WHITESPACE
        {'lr': (0.1, 1.0), 'weight_decay': (5e-05, 0.01), 'warmup': (0.1, 0.1),
         'one_minus_momentum': (0.01, 0.5)}
    """
    spaces: dict[str, dict[str, tuple[float, float]]] = {}
    given: set[tuple[str, str]] = set()
    for name in optimizers:
        space = OPTIMIZERS[CONTESTANTS[name]["optimizer"]].space
        spaces[name] = {option: span for option, span in space.items() if option not in CONTESTANTS[name]}
    for text in texts:
        name, dot, rest = text.partition(".")
        key, equals, values = rest.partition("=")
        if not dot or not equals:
            raise InputError(
                f"--space {text!r} is not of the form OPTIMIZER.OPTION=LOWEST,HIGHEST like lamb.lr=0.001,0.1."
            )
        if name in CONTESTANTS and name not in optimizers:
            raise InputError(f"--space {text!r}: add {name} to --optimizers {','.join(optimizers)}, or leave it out.")
        check_name("--space", name, optimizers)
        recipe = OPTIMIZERS[CONTESTANTS[name]["optimizer"]]
        check_name(f"--space {name}", key, dict.fromkeys([*spaces[name], *recipe.defaults]))
        if (name, key) in given:
            raise InputError(f"--space {text!r}: there is another --space {name}.{key}; give one of them.")
        given.add((name, key))
        none = key in {"weight_decay", "warmup"} and values == "0"
        ends = (0.0,) if none else numbers(f"--space {name}.{key}", values, float)
        if len(ends) > 2:
            raise InputError(
                f"--space {text!r} has {len(ends)} numbers: give the lowest and the highest, or a single one."
            )
        if len(ends) == 2 and float(values.partition(",")[0]) == ends[1]:
            raise InputError(f"--space {text!r}: give the lowest first.")
        if key != "lr" and ends[-1] > 1:
            raise InputError(f"--space {text!r}: {key} is at most 1.")
        spaces[name][key] = ends[0], ends[-1]
    return spaces


def spans(space: Space) -> str:
    """Return a space in words."""
    return ", ".join(
        f"{name} {low:g}" if low == high else f"{name} {low:g} to {high:g}" for name, (low, high) in space.items()
    )
