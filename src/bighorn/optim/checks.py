"""What hyper-parameters may be. A check takes an option's name and value, and returns it in its canonical form."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from bighorn import arguments, sharding
from bighorn.arguments import ELSEWHERE, hint, unknown_name
from bighorn.arguments import flag as flag
from bighorn.schedules import Values
from bighorn.state import overlaps

Check = Callable[[str, object], object]
StepFunction = Callable[[int], Any]
"""A schedule, or any other function of the step (0 for the first)."""


def number(low: float, high: float = math.inf, *, exclusive: bool = False) -> Check:
    """A real number from `low` to `high`, without `high` itself where `exclusive`."""
    return lambda name, value: arguments.number(name, value, low, high, below=exclusive)


def scheduled(value: object) -> StepFunction | None:
    """A schedule, or an iterable as one: entry t-1 holds at step t. None for anything else."""
    if isinstance(value, Tensor):
        return Values.of(value) if value.dim() == 1 and value.numel() != 1 else None
    if callable(value) and not isinstance(value, type):
        return value
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Set)):
        return Values.of(value)
    return None


def learning_rate(name: str, value: object) -> float | Tensor | StepFunction:
    """A number that is not negative, a real tensor of one element (whose value is read at each step), or a schedule."""
    schedule = _scheduled(name, value)
    if schedule is not None:
        return schedule
    if not isinstance(value, Tensor):
        return _number_or_schedule(name, value)
    if value.numel() != 1 or value.is_complex():
        raise ValueError(f"{name} as a tensor must hold one real number, not shape {tuple(value.shape)}, {value.dtype}")
    if value.device.type == "cpu":  # elsewhere the host would have to wait for the value
        arguments.number(name, value.detach().item())
    return value.detach() if value.requires_grad else value


def weight_decay(name: str, value: object) -> float | StepFunction:
    """A number that is not negative (a tensor of one element is read once), or a schedule."""
    schedule = _scheduled(name, value)
    if schedule is not None:
        return schedule
    return _number_or_schedule(name, _read(value))


def _scheduled(name: str, value: object) -> StepFunction | None:
    try:
        return scheduled(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _number_or_schedule(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number, a tensor, an iterable of numbers (one for each step) or a schedule (called with "
            f"the step), not {value!r} ({type(value).__name__})"
        )
    return arguments.number(name, value)


def _are(value: object, count: int) -> TypeGuard[Sequence[Any]]:
    """Whether these are so many things in order: a tuple, a list, or a list of a configuration file's reader."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == count


def _read(value: object) -> object:
    """The number in a real tensor of one element, as torch's OneCycleLR and CyclicLR write into betas; or the value."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() else value


def betas(count: int) -> Callable[[str, object], tuple[object, ...]]:
    """So many numbers in [0, 1)."""
    each = number(0, 1, exclusive=True)
    names = ", ".join(f"beta{i + 1}" for i in range(count))

    def check(name: str, value: object) -> tuple[object, ...]:
        if not _are(value, count):
            raise TypeError(f"{name} must be {count} numbers ({names}), not {value!r}")
        return tuple(each(f"{name}[{i}]", _read(beta)) for i, beta in enumerate(value))

    return check


def came_betas(name: str, value: object) -> tuple[object, ...]:
    """Three numbers in [0, 1), the first above 0."""
    if _are(value, 3):
        value = [_read(beta) for beta in value]
    if _are(value, 3) and not any(isinstance(beta, Tensor) for beta in value):
        if value[2] == 1:
            raise ValueError(
                f"{name}[2]={value[2]!r} is out of range: the averages of the instability, by which CAME divides, "
                "would stay at 0; use a value in [0, 1), such as 0.9999"
            )
        if value[0] == 0:
            raise ValueError(
                f"{name}[0]={value[0]!r} is out of range: CAME divides by how far the momentum misses the update, and "
                "without momentum it never does; use a value in (0, 1), such as 0.9"
            )
        arguments.number(f"{name}[0]", value[0], 0, 1, above=True, below=True)
    return betas(3)(name, value)


def came_eps(name: str, value: object) -> tuple[object, ...]:
    """Two positive numbers."""
    if not _are(value, 2):
        raise TypeError(f"{name} must be two numbers, for the squared gradient and for the instability, not {value!r}")
    return tuple(positive(f"{name}[{i}]", eps) for i, eps in enumerate(value))


def count(name: str, value: object) -> int:
    """An integer that is not negative, below 2**63."""
    exact = arguments.integer(name, value)
    if exact >= 2**63:
        raise ValueError(f"{name}={value!r} is out of range: it must be at least 0 and below 2**63")
    return exact


def positive(name: str, value: object) -> float:
    """A finite number above 0."""
    return arguments.number(name, value, above=True)


def optional(check: Check) -> Check:
    """None, or what `check` takes."""
    return lambda name, value: None if value is None else check(name, value)


def bounds(name: str, value: object) -> tuple[float, float] | None:
    """None, or a lower and an upper bound, which may be infinite."""
    if value is None:
        return None
    if not _are(value, 2):
        raise TypeError(f"{name} must be None or (low, high), not {value!r}")
    if any(isinstance(bound, bool) or not isinstance(bound, Real) for bound in value):
        raise TypeError(f"{name} must be two numbers, not {value!r}; where nothing bounds, use 0 and math.inf")
    low, high = map(float, value)
    if not 0 <= low <= high or low == math.inf or high == 0:
        raise ValueError(f"{name}={value!r} must be (low, high) with 0 <= low <= high and high above 0")
    return low, high


def choice(*allowed: str | bool) -> Check:
    """One of a few words (or True and False)."""

    def check(name: str, value: object) -> str | bool:
        if isinstance(value, (str, bool)) and any(value is word or value == word for word in allowed):
            return value
        raise ValueError(f"{name}={value!r} is not known: use {', '.join(map(repr, allowed))}{hint(value, allowed)}")

    return check


def dtype_among(dtypes: Mapping[str, torch.dtype]) -> Check:
    """None, or the name of a dtype that state can be kept in (a torch dtype is taken too)."""

    def check(name: str, value: object) -> str | None:
        text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        if text is None or (isinstance(text, str) and text in dtypes):
            return text
        names = ", ".join('"int8"' if dtype == "int8" else f"torch.{dtype}" for dtype in dtypes)
        raise ValueError(f"{name}={value!r} is not supported: use None, {names}")

    return check


def max_norm(name: str, value: object) -> float | None:
    """None, or a positive number."""
    return None if value is None else arguments.number(name, value, above=True, span="above 0, or None for no clip")


def process_group(value: object, *, used: bool) -> Any:
    """None, or a process group, where an option makes use of it."""
    if value is None:
        return None
    if not torch.distributed.is_available() or not isinstance(value, torch.distributed.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, not {value!r}")
    if not used:
        raise ValueError("process_group is only used by max_grad_norm and skip_nonfinite: set one of them, or leave it")
    return value


def closure(value: object) -> None:
    """Raise for what is no function, such as a loss."""
    if not callable(value):
        raise TypeError(
            f"closure must be a function that computes the loss anew, not {_brief(value)}: call loss.backward(), and "
            "step() without it"
        )


def parameter(name: object, param: object, *, stacked: bool) -> None:
    """A tensor that can be optimized here.

    Raises:
        TypeError: It is no tensor.
        ValueError: Its layout or kind cannot be optimized.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"params must be tensors or pairs of a name and a tensor, but a name is {_brief(name)}")
    what = f"parameter {name!r}" if name is not None else "a parameter"
    if not isinstance(param, Tensor):
        raise TypeError(f"params must be tensors, but {what} is {_brief(param)}")
    if not (param.is_leaf or param.retains_grad):
        raise ValueError(f"{what} is no leaf: it was computed from others, which get the gradients; pass those")
    if param.layout != torch.strided:
        raise ValueError(f"{what} has layout {param.layout}; only dense parameters can be optimized")
    reason = sharding.why_refused(param)
    if reason:
        raise ValueError(f"{what} cannot be optimized here: {reason}")
    if overlaps(param) or param.is_neg() or param.is_conj():
        raise ValueError(f"{what} is a view whose elements share memory or are negated on reading: clone() it first")
    if stacked and param.dim() < 2:
        raise ValueError(f"{what} has {param.dim()} dims, but stacked=True needs 2 or more: dim 0 stacks the layers")


NOT_OURS = {
    "foreach": ("torch.optim", 'use backend="foreach"'),
    "fused": ("torch.optim", 'every backend is fused; choose one with backend="auto", "cpu", "triton" or "foreach"'),
    "capturable": ("torch.optim", "no option is needed; backend=... chooses the kernels"),
    "differentiable": ("torch.optim", "steps are not differentiable on any backend=...; use torch.optim for that"),
    "amsgrad": ("torch.optim", 'use second_moment="amsgrad"'),
    "relative_step": ("Adafactor", "use lr=bighorn.schedules.RelativeStep()"),
    "warmup_init": ("Adafactor", "use lr=bighorn.schedules.RelativeStep(warmup_init=True)"),
}
"""Options of other optimizers: whose, and what to use here."""


def _brief(value: object) -> str:
    """What something is, without the contents of tensors and of what holds them."""
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, (str, bytes, int, float, complex, type(None))) else f"a {kind}"


def refuse_unknown(names: Iterable[object], known: Iterable[str], where: str) -> None:
    """Raise for the first name that is not known, with what was probably meant."""
    known = list(known)
    for name in names:
        if name in known:
            continue
        if isinstance(name, str) and name in NOT_OURS:
            whose, remedy = NOT_OURS[name]
            raise TypeError(f"{where} got {name!r}, an option of {whose} but not of ours: {remedy}")
        raise unknown_name(where, name, known)


def refuse_group_only(names: Iterable[object], group_only: Iterable[str], where: str) -> None:
    """Raise for an option that only groups have, with where it goes."""
    for name in set(names).intersection(group_only):
        raise TypeError(
            f'{where} got {name!r}, an option of a group: give [{{"params": ..., {name!r}: ...}}] as params'
        )


NEAR = 0.8
"""From which likeness on (`difflib`'s) a key is taken for an option's misspelt name."""


def refuse_misspelt(names: Iterable[object], options: Iterable[str], where: str) -> None:
    """As `refuse_unknown`, but what is not like an option's name is somebody else's note: trainers write their own.

    `initial_weight_decay` and `lr_scale` are such notes: an option's whole name is a part of theirs.
    """
    options = list(options)
    refuse_unknown([name for name in names if name in NOT_OURS or _misspells(name, options)], options, where)


def _misspells(name: object, options: list[str]) -> bool:
    if not isinstance(name, str) or name in options:
        return False
    if ELSEWHERE.get(name) in options:
        return True
    near = difflib.get_close_matches(name, options, n=1, cutoff=NEAR)
    return bool(near) and not any(name.startswith(f"{word}_") or name.endswith(f"_{word}") for word in options)
