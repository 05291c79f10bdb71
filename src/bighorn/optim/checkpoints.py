"""State out of checkpoints, and the one step that is taken for a checkpoint's sake alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from bighorn import sharding
from bighorn.optim.algorithm import Algorithm, Group
from bighorn.optim.parts import label_of
from bighorn.optim.step_options import COUNT
from bighorn.optim.step_plan import StepPlan
from bighorn.state import complete, local_view, release


def check_structure(state_dict: object) -> None:
    """Refuse what no optimizer's `state_dict()` has returned.

    Raises:
        ValueError: It is another thing, or it holds state of parameters that are in none of its groups.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("state_dict must be what optimizer.state_dict() returned, with 'state' and 'param_groups'")
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(states, Mapping) or not isinstance(groups, (list, tuple)):
        raise ValueError(
            "state_dict must hold a dict, 'state', and a list, 'param_groups', not a "
            f"{type(states).__name__} and a {type(groups).__name__}"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"param_groups[{index}] of state_dict must be a dict with a list of 'params'")
    known = {param for group in groups for param in group["params"]}
    for param, state in states.items():
        if param not in known:
            raise ValueError(
                f"state_dict is damaged: it has a state of {param!r}, which is in none of its param_groups"
            )
        if not isinstance(state, Mapping):
            raise ValueError(f"state_dict is damaged: its state of {param!r} is a {type(state).__name__}, not a dict")


def loaded_states(groups: list[Group], held: Mapping[Any, Any], algorithm: Algorithm[Any]) -> defaultdict[Any, Any]:
    """Every parameter's state, checked, in the dtypes that are declared for it. Groups get their count of steps.

    Args:
        groups: The loaded groups, with the parameters themselves.
        held: What was loaded, as `state.hold` carried it past torch.
        algorithm: What is declared.

    Raises:
        ValueError: A state does not fit its parameter.
    """
    states: defaultdict[Any, Any] = defaultdict(dict)
    states.update({param: release(value) for param, value in held.items()})
    for index, group in enumerate(groups):
        steps = 0.0
        for position, param in enumerate(group["params"]):
            what = label_of(index, position, group.get("param_names"))
            algorithm.refuse_unfit(group, param, what)
            if isinstance(states.get(param), dict) and states[param]:
                spec = algorithm.state_spec(group, param)
                states[param] = complete(param, local_view(param), spec, states[param], what)
                steps = max(steps, float(states[param]["step"]))
        group.setdefault(COUNT, int(steps))  # other optimizers' checkpoints count for each parameter only
    return states


def only_initialises(groups: list[Group], params: Iterable[Tensor], plans: list[StepPlan]) -> bool:
    """Whether this first step is the one by which torch.distributed.checkpoint makes an optimizer create its state.

    It sets lr to 0 and all gradients to zero. Counting it would make the first real step the second. The host
    waits for the gradients at most once in an optimizer's life, in a first step at lr 0.
    """
    if any(float(group["lr"]) != 0 for group in groups):
        return False
    moves = any(bool(sharding.local(param.grad).any()) for param in params if param.grad is not None)
    for ranks in [ranks for plan in plans for ranks in plan.meshes]:
        moves = ranks.any(moves)  # all of them step, or none
    return not moves
