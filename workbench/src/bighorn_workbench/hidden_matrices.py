"""Optimizers of two rules: one for the matrices of hidden layers, AdamW's for embeddings, the head and vectors."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from bighorn import Lamb

EDGE = re.compile(r"(^|[._])(token|position|\w*emb\w*|wte|wpe|\w*head|classifier|decoder|output)s?\.weight$")
"""Names of matrices at the edges of a model; where none fits, the last matrix is its head."""


def split(groups: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split groups of named parameters into groups of hidden matrices, and groups of all other parameters.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
        >>> hidden, rest = split([{"params": list(model.named_parameters())}])
        >>> [name for name, _ in hidden[0]["params"]], [name for name, _ in rest[0]["params"]]
        (['0.weight'], ['0.bias', '1.weight', '1.bias'])
    """
    given = [{**group, "params": list(group["params"])} for group in groups]
    matrices = [name for group in given for name, parameter in group["params"] if parameter.ndim > 1]
    edges = {name for name in matrices if EDGE.search(name)} or set(matrices[-1:])
    inside = set(matrices) - edges

    def chosen(take: Callable[[str], bool]) -> list[dict[str, Any]]:
        parts = [{**group, "params": [pair for pair in group["params"] if take(pair[0])]} for group in given]
        return [part for part in parts if part["params"]]

    return chosen(lambda name: name in inside), chosen(lambda name: name not in inside)


class LambWithAdamW(Lamb):
    """LAMB for hidden matrices, with AdamW's step for the rest at ``adamw_rate`` times the learning rate."""

    hidden: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, *, adamw_rate: float = 0.1, **options: Any) -> None:
        hidden, rest = split(groups)
        hidden = [{**group, **self.hidden} for group in hidden]
        super().__init__([*hidden, *({**group, "adapt": False} for group in rest)], lr=lr, **options)
        self._slower = self.param_groups[len(hidden) :]
        self._adamw_rate = adamw_rate

    def step(self, closure: Any = None) -> Any:
        """Make a step at the rate that all groups have now."""
        lr = self.param_groups[0]["lr"]
        for group in self._slower:
            group["lr"] = lr * self._adamw_rate
        try:
            return super().step(closure)
        finally:
            for group in self._slower:
                group["lr"] = lr


class LambHyperball(LambWithAdamW):
    """The same with hidden matrices on balls, ``Lamb(hyperball=True)``, without decay."""

    hidden: ClassVar[Mapping[str, Any]] = {"hyperball": True, "weight_decay": 0.0}


class MuonWithAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for hidden matrices of two dims at AdamW's rates, and ``torch.optim.AdamW`` for the rest.

    Both have the same learning rate: Muon's update is scaled to the RMS of AdamW's (``adjust_lr_fn``).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, **options: Any) -> None:
        hidden, rest = split(groups)
        flat: list[dict[str, Any]] = []
        for group in hidden:
            deep = [pair for pair in group["params"] if pair[1].ndim > 2]
            flat.append({**group, "params": [pair for pair in group["params"] if pair[1].ndim == 2]})
            rest.append({**group, "params": deep})
        flat, rest = ([group for group in part if group["params"]] for part in (flat, rest))
        super().__init__([*flat, *rest], {"lr": lr})
        matrices, others = self.param_groups[: len(flat)], self.param_groups[len(flat) :]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, fused=True, **options))
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> Any:
        """Make a step of both."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss
