"""Float32 masters in a `state_dict`, under the name that Bighorn's own `weight_rounding="master"` gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bighorn.offloading.params import OffloadedParam

MASTER = "master"


def with_masters(state_dict: dict[str, Any], params: Sequence[OffloadedParam]) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with the masters of the parameters that have state."""
    state = dict(state_dict["state"])
    for number, param in enumerate(params):
        if param.master is not None and number in state:
            state[number] = {**state[number], MASTER: param.host.detach()}
    return {**state_dict, "state": state}


@torch.no_grad()
def load_with_masters(
    load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any], params: Sequence[OffloadedParam]
) -> None:
    """Load a `state_dict` into an optimizer, and the masters in it into the host's parameters.

    Without masters in it, those of the weights that are loaded into the model are used.
    """
    if all(param.master is None for param in params) or "state" not in state_dict:
        load(state_dict)
        return
    masters = {
        number: state[MASTER]
        for number, state in state_dict["state"].items()
        if isinstance(state, dict) and MASTER in state
    }
    state = {
        number: {name: value for name, value in state.items() if name != MASTER} if number in masters else state
        for number, state in state_dict["state"].items()
    }
    load({**state_dict, "state": state})
    for number, param in enumerate(params):
        if number in masters:
            param.host.copy_(masters[number])
