"""Schedules whose values fall by a formula.

A new class also needs its name in `__all__` of the package, a check of each new argument in `CHECKS` of `checks.py`,
values at some steps in `FORMULAS` of `tests/math/test_schedules.py`, and a row in `docs/schedules.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bighorn._arguments import knows_its_keywords
from bighorn.schedules._schedule import Schedule


@knows_its_keywords
@dataclass(frozen=True)
class Exponential(Schedule):
    """lr * decay_rate ** (s / D); as a staircase lr * decay_rate ** floor(s / D).

    Args:
        lr: The value at step 0.
        decay_rate: The factor of D steps, above 0.
        decay_steps: D, at least 1.
        staircase: Whether the value falls once in D steps and not at each. Default: False.

    Example:
        >>> Exponential(lr=1.0, decay_rate=0.25, decay_steps=2).as_list(5)
        [1.0, 0.5, 0.25, 0.125, 0.0625]
        >>> Exponential(lr=1.0, decay_rate=0.25, decay_steps=2, staircase=True).as_list(5)
        [1.0, 1.0, 0.25, 0.25, 0.0625]
    """

    lr: float
    decay_rate: float
    decay_steps: int
    staircase: bool = False

    def _at(self, step: int) -> float:
        return self.lr * math.pow(self.decay_rate, _decays(step, self.decay_steps, self.staircase))


@knows_its_keywords
@dataclass(frozen=True)
class NaturalExp(Schedule):
    """lr * exp(-decay_rate * floor(s / n) * n), where n is `stair_steps`; with n = 1, lr * exp(-decay_rate * s).

    Args:
        lr: The value at step 0.
        decay_rate: The decay per step, above 0.
        stair_steps: Steps that share a value, at least 1. Default: 1.

    Example:
        >>> [round(lr, 3) for lr in NaturalExp(lr=1.0, decay_rate=0.5).as_list(4)]
        [1.0, 0.607, 0.368, 0.223]
        >>> [round(lr, 3) for lr in NaturalExp(lr=1.0, decay_rate=0.5, stair_steps=2).as_list(4)]
        [1.0, 1.0, 0.368, 0.368]
    """

    lr: float
    decay_rate: float
    stair_steps: int = 1

    def _at(self, step: int) -> float:
        return self.lr * math.exp(-self.decay_rate * (step // self.stair_steps * self.stair_steps))


@knows_its_keywords
@dataclass(frozen=True)
class Inverse(Schedule):
    """lr / (1 + decay_rate * s / D); as a staircase lr / (1 + decay_rate * floor(s / D)).

    Args:
        lr: The value at step 0.
        decay_rate: The amount that D steps add to the divisor, above 0.
        decay_steps: D, at least 1.
        staircase: Whether the value falls once in D steps and not at each. Default: False.

    Example:
        >>> Inverse(lr=1.0, decay_rate=2.0, decay_steps=2).as_list(4)
        [1.0, 0.5, 0.3333333333333333, 0.25]
    """

    lr: float
    decay_rate: float
    decay_steps: int
    staircase: bool = False

    def _at(self, step: int) -> float:
        return self.lr / (1 + self.decay_rate * _decays(step, self.decay_steps, self.staircase))


def _decays(step: int, decay_steps: int, staircase: bool) -> float:
    """The number of decays so far: an integer in a staircase, otherwise with fractions."""
    return step // decay_steps if staircase else step / decay_steps


@knows_its_keywords
@dataclass(frozen=True)
class Cosine(Schedule):
    """end_lr + (lr - end_lr) / 2 * (1 + cos(pi * min(s, D) / D)): half a wave, and then `end_lr`.

    Args:
        lr: The value at step 0.
        decay_steps: D, the first step that gets `end_lr`; at least 1.
        end_lr: The value at the end. Default: 0.0.

    Example:
        >>> [round(lr, 3) for lr in Cosine(lr=1.0, decay_steps=4, end_lr=0.2).as_list(6)]
        [1.0, 0.883, 0.6, 0.317, 0.2, 0.2]
    """

    lr: float
    decay_steps: int
    end_lr: float = 0.0

    def _at(self, step: int) -> float:
        done = min(step, self.decay_steps) / self.decay_steps
        return self.end_lr + (self.lr - self.end_lr) / 2 * (1 + math.cos(math.pi * done))


@knows_its_keywords
@dataclass(frozen=True)
class Polynomial(Schedule):
    """(lr - end_lr) * (1 - min(s, D) / D) ** power + end_lr, and then `end_lr`; linear for a power of 1.

    Args:
        lr: The value at step 0.
        decay_steps: D, the first step that gets `end_lr`; at least 1.
        end_lr: The value at the end. Default: 0.0.
        power: The exponent, above 0. Default: 1.0.
        update_decay_steps: Whether D grows with the step, to D * max(ceil(s / D), 1): after each D steps the value
            jumps up and falls to `end_lr` again, more slowly each time. Default: False.

    Example:
        >>> Polynomial(lr=1.0, decay_steps=2, power=2.0).as_list(4)
        [1.0, 0.25, 0.0, 0.0]
        >>> Polynomial(lr=1.0, decay_steps=2, update_decay_steps=True).as_list(5)
        [1.0, 0.5, 0.0, 0.25, 0.0]
    """

    lr: float
    decay_steps: int
    end_lr: float = 0.0
    power: float = 1.0
    update_decay_steps: bool = False

    def _at(self, step: int) -> float:
        rounds = max(math.ceil(step / self.decay_steps), 1) if self.update_decay_steps else 1
        decay_steps = self.decay_steps * rounds
        left = (decay_steps - min(step, decay_steps)) / decay_steps
        return (self.lr - self.end_lr) * math.pow(left, self.power) + self.end_lr


@knows_its_keywords
@dataclass(frozen=True)
class RelativeStep(Schedule):
    """min(1e-2, 1 / sqrt(t)) at step t = s + 1: the learning rate of Adafactor's relative steps.

    Source: Shazeer and Stern, arXiv:1804.04235v1, section 8; with `warmup_init` as in MindFormers and fairseq.

    Args:
        warmup_init: Whether the first bound is 1e-6 t, a warm-up over the first 10000 steps. Default: False.

    Example:
        >>> RelativeStep().as_list(2), RelativeStep(warmup_init=True).as_list(2), RelativeStep()(39999)
        ([0.01, 0.01], [1e-06, 2e-06], 0.005)
    """

    warmup_init: bool = False

    def _at(self, step: int) -> float:
        t = step + 1
        return min(1e-6 * t if self.warmup_init else 1e-2, 1 / math.sqrt(t))
