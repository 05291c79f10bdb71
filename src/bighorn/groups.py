"""Parameter groups from ordered rules on names: a parameter belongs to the first rule that matches it.

The groups are for `bighorn.Lamb` and any other `torch.optim.Optimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bighorn._arguments import nearest
from bighorn._names import Exclusion, check_exclusion, common_prefix, excludes, unwrapped

__all__ = ["Rule", "by_rules", "report", "zero_initialized"]

_REST = "everything else"
"""The name of the group of parameters that no rule matches."""


class Rule:
    """Options for the parameters that the rule matches.

    Args:
        match: A regular expression that is searched for in the parameter's name, a list of them, "ndim<2" (biases and
            the scales of norms), or a callable (name, param) -> bool.
        **options: The options of the group of these parameters: any that the optimizer accepts in a group, and `name`,
            the name of the group in the report.

    Raises:
        TypeError: `match` is of another type, or an option is one that `by_rules` writes itself.
        ValueError: A regular expression does not compile, or there is none.

    Example:
        >>> Rule(r"bias|norm", weight_decay=0.0, adapt=False)
        Rule('bias|norm', weight_decay=0.0, adapt=False)
    """

    def __init__(self, match: str | Exclusion, **options: Any) -> None:
        checked = check_exclusion("match", [match] if isinstance(match, str) else match)
        if checked is None:
            raise ValueError(f"match={match!r} matches nothing: give a regular expression, or leave out the rule")
        for name in ("params", "param_names"):
            if name in options:
                raise TypeError(f"a Rule got {name!r}, but what it matches decides which parameters are in its group")
        self.match, self.options = checked, options
        self.label = getattr(checked, "__name__", repr(checked)) if callable(checked) else "|".join(checked)

    def __repr__(self) -> str:
        match = self.label if callable(self.match) else repr(self.label)
        return f"Rule({', '.join([match, *(f'{name}={value!r}' for name, value in self.options.items())])})"

    def matches(self, name: str, param: Tensor) -> bool:
        """Whether the rule matches a parameter."""
        return excludes(self.match, name, param)


def by_rules(
    named_parameters: Iterable[tuple[str, Tensor]], rules: Sequence[Rule], *, pairs: bool = True
) -> list[dict[str, Any]]:
    """Return parameter groups for any optimizer: one for each rule, and one without options for all other parameters.

    Args:
        named_parameters: The pairs of `model.named_parameters()`. Their order is kept within each group. Rules see, and
            groups contain, the names of the model without wrappers (`module.`, `_orig_mod.`).
        rules: The rules in order: a parameter belongs to the first one that matches it.
        pairs: Give (name, parameter) pairs, which `torch.optim` and `bighorn` keep as `param_names`. False: bare
            parameters, for optimizers that require these. Default: True.

    Returns:
        Dicts with `name`, `params` and the rule's options. The optimizer checks the options, and refuses unknown ones.
        `print(report(...))` shows the parameters of each group.

    Raises:
        TypeError: Parameters have no names, or an element of `rules` is not a `Rule`.
        ValueError: There are no parameters, two have the same name, one has two names, or a rule gets no parameter.

    Example:
        >>> import torch
        >>> from bighorn import Lamb
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        >>> groups = by_rules(
        ...     model.named_parameters(),
        ...     [Rule("bias", weight_decay=0.0), Rule(lambda name, param: param.dim() < 2, name="scales", adapt=False)],
        ... )
        >>> print(report(groups))
        bias: 2 parameters, 6 elements; weight_decay=0.0
          0.bias [3]
          1.bias [3]
        scales: 1 parameter, 3 elements; adapt=False
          1.weight [3]
        everything else: 1 parameter, 12 elements
          0.weight [3, 4]
        >>> optimizer = Lamb(groups, lr=0.01, weight_decay=0.01)
    """
    params = _checked(named_parameters)
    if isinstance(rules, Rule) or not isinstance(rules, Sequence):
        raise TypeError(f"rules must be a list of Rule, not a {type(rules).__name__}")
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules must be a list of Rule, not of {type(rule).__name__} ({rule!r})")
    taken: list[list[tuple[str, Tensor]]] = [[] for _ in (*rules, _REST)]
    for name, param in params:
        index = next((i for i, rule in enumerate(rules) if rule.matches(name, param)), len(rules))
        taken[index].append((name, param))
    for rule, members in zip(rules, taken, strict=False):
        if not members:
            raise ValueError(f"{rule!r} takes no parameter: {_why_nothing(rule, params)}")
    headers = [{"name": rule.label, **rule.options} for rule in rules] + [{"name": _REST}]
    return [
        {**header, "params": members if pairs else [param for _, param in members]}
        for header, members in zip(headers, taken, strict=True)
        if members
    ]


def zero_initialized(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of trained parameters that are zero, for `exclude_from_layer_adaptation`.

    LAMB multiplies the learning rate by the norm of a layer, so one that starts at zero, as adapters do, would grow by
    a factor of at most 1 + lr per step. Call this before the model is trained or a checkpoint is loaded into it.

    Args:
        named_parameters: The pairs of `model.named_parameters()`.

    Returns:
        A regular expression for each such parameter, which matches its name without wrappers and no other.

    Raises:
        TypeError: Parameters have no names.
        ValueError: There are no parameters, two have the same name, one has two names, or one is on the meta device.

    Example:
        >>> import torch
        >>> from bighorn import Lamb
        >>> model = torch.nn.LayerNorm(3)
        >>> exclude = zero_initialized(model.named_parameters())
        >>> exclude
        ['^bias$']
        >>> optimizer = Lamb(model.named_parameters(), lr=0.01, exclude_from_layer_adaptation=exclude)
    """
    params = _checked(named_parameters)
    for name, param in params:
        if param.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values yet: initialize the model first")
    return [f"^{re.escape(name)}$" for name, param in params if param.requires_grad and not param.any()]


def report(groups: Iterable[Mapping[str, Any]]) -> str:
    """Describe the parameters and options of each group, from `by_rules` or an optimizer's `param_groups`.

    Args:
        groups: Dicts with `params`, as optimizers accept and keep them.

    Raises:
        TypeError: `groups` is not a list of dicts.
        ValueError: A group has no `params`.
    """
    if not isinstance(groups, Iterable):
        raise TypeError(f"groups must be dicts in a list, as optimizer.param_groups, not a {type(groups).__name__}")
    lines = []
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise TypeError(
                f"groups must be dicts in a list, as optimizer.param_groups, not of a {type(group).__name__}"
            )
        if "params" not in group:
            raise ValueError(f"groups[{index}] has no 'params', but {', '.join(map(repr, group)) or 'nothing'}")
        params = [param if isinstance(param, tuple) else (None, param) for param in group["params"]]
        names = group.get("param_names") or [name or f"params[{i}]" for i, (name, _) in enumerate(params)]
        options = {key: value for key, value in group.items() if key not in ("name", "params", "param_names")}
        count, elements = len(params), sum(param.numel() for _, param in params)
        title = f"{group.get('name', f'group {index}')}: {count} parameter{'s' * (count != 1)}, {elements:,} elements"
        lines.append(
            "; ".join([title, ", ".join(f"{key}={value!r}" for key, value in options.items())]).removesuffix("; ")
        )
        lines += [f"  {name} {list(param.shape)}" for name, (_, param) in zip(names, params, strict=True)]
    return "\n".join(lines)


def _checked(named_parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the (name, parameter) pairs without wrappers' prefixes, if each name and each parameter occurs once."""
    if isinstance(named_parameters, nn.Module):
        raise TypeError(f"rules need names: pass model.named_parameters(), not {type(named_parameters).__name__}")
    params = list(named_parameters)
    if not params:
        raise ValueError(
            "named_parameters is empty: pass model.named_parameters() of a model that has some, each time anew"
        )
    by_name: dict[str, Tensor] = {}
    by_id: dict[int, str] = {}
    for pair in params:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(f"rules need names: pass model.named_parameters(), not {type(pair).__name__} in a list")
        name, param = pair
        if name in by_name:
            raise ValueError(f"two parameters are called {name!r}: give each model a prefix of its own")
        if id(param) in by_id:
            raise ValueError(f"{by_id[id(param)]!r} and {name!r} are the same parameter: pass it once")
        by_name[name], by_id[id(param)] = param, name
    prefix = common_prefix(by_name)
    return [(unwrapped(name, prefix), param) for name, param in params]


def _why_nothing(rule: Rule, params: list[tuple[str, Tensor]]) -> str:
    matching = [name for name, param in params if rule.matches(name, param)]
    if matching:
        return f"rules before it took the {len(matching)} that it matches ({', '.join(matching[:3])}); put it first"
    if callable(rule.match):
        return "it was False for each of them"
    return f"it matches no name; the nearest are {nearest(rule.match, [name for name, _ in params])}"
