"""Optimizers that are made with the options of another one, as by `type(o)(params, **o.defaults)`.

Trainers reset an optimizer so; PyKEEN does it with the options of the first group. Some options are in neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from bighorn._arguments import shortened
from bighorn._optim.param_groups import COUNT, VERSION

_INCOMPLETE: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
"""The optimizers with options that their `defaults` do not hold, the newest last."""


def without_copied(unknown: Mapping[str, Any], group_only: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a copy passes: options of groups at their defaults, and the counts that groups keep."""
    return {
        name: value
        for name, value in unknown.items()
        if name not in (COUNT, VERSION) and (name not in group_only or value != group_only[name])
    }


def remember(optimizer: Any, copied: bool) -> None:
    """Remember an optimizer whose `defaults` do not hold all of its options; warn if it is a copy that lost some."""
    absent = _not_in_defaults(optimizer)
    others = [*_INCOMPLETE] if copied else []
    alike = [each for each in others if type(each) is type(optimizer) and _fixed(each) == _fixed(optimizer)]
    lost = [name for name in _not_in_defaults(alike[-1]) if name not in absent] if alike else []
    if lost:
        warnings.warn(
            f"{shortened(lost, 9)} of the optimizer whose options were copied are lost, since its defaults do not "
            "hold them: pass them again",
            stacklevel=6,  # at the call of Lamb or Came, above two constructors and torch's two wrappers
        )
    if absent:
        _INCOMPLETE[optimizer] = None


def _not_in_defaults(optimizer: Any) -> list[str]:
    """The options of the whole optimizer that are set, and its schedules, of which `defaults` hold a value."""
    whole = [name for name, value in vars(optimizer._settings).items() if value not in (None, False, "auto")]
    return [name for name in whole if name != "names"] + [
        f"schedule of {each}" for each in optimizer._default_schedules
    ]


def _fixed(optimizer: Any) -> dict[str, Any]:
    """The defaults that no scheduler writes."""
    return {name: value for name, value in optimizer.defaults.items() if name not in ("lr", "weight_decay")}
