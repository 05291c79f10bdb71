"""Models, runs of cases and comparisons that the tests of the optimizers share."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import Came, CameTelemetry, Lamb, LambTelemetry, Lars, LarsTelemetry
from tests.support.case_tensors import LARGE, ZOO
from tests.support.cases import BACKENDS, CASES, Case, Kind, Optimizer, set_gradients
from tests.support.covering_cases import cost, covering, covering_pairs

BY_ID = {case.id: case for case in CASES}
CASE = Case("contract", {"max_grad_norm": 5.0, "exclude_from_weight_decay": ["bias"]}, ZOO)

OWN: dict[Kind, dict[str, Any]] = {
    Lamb: {"adam": True, "decay_mode": "decoupled", "betas": (0.5, 0.6), "eps": 0.1},
    Came: {"factor": "last_two", "decay_rate": 0.8, "betas": (0.5, 0.6, 0.7), "eps": (1e-3, 1e-2)},
    Lars: {"momentum": 0.5, "nesterov": True, "denominator": "joint", "lr_in_momentum": False, "eps": 0.1},
}
"""Group options of each optimizer, other than the defaults."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


def model() -> Net:
    torch.manual_seed(5)
    return Net()


def backward(net: nn.Module, step: int = 0) -> Tensor:
    """Run a backward pass of a loss on fixed data."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(net.parameters()).dtype
    loss: Tensor = net(torch.randn(10, 6, generator=generator).to(dtype)).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def is_short(case: Case) -> bool:
    """Whether the interpreter takes at most a few seconds for a case."""
    return case.leaves is not LARGE and cost(case) < 6


def runs(cases: Iterable[Case]) -> list[Any]:
    """Return test parameters, an indirect `backend` and a `case`: each case on each backend that supports it.

    A case whose traits other cases have is slow. Backends with separate code for an option also get each pair of
    options, in long tests. Triton's kernels are interpreted if there is no GPU, and their longest cases are slow, too.
    """
    cases = list(cases)
    few = covering(cases)
    more = few | covering_pairs(cases)
    short = {case.id for case in cases if is_short(case)}
    slow, long = pytest.mark.slow, pytest.mark.long
    tested = {"cpu": more, "foreach": more, "triton": covering(cases, of_kernels=True) & short}
    return [
        pytest.param(
            backend,
            case,
            id=f"{backend}-{case.id}",
            marks=[mark for mark, names in ((slow, tested.get(backend, few)), (long, few)) if case.id not in names],
        )
        for backend in BACKENDS
        for case in cases
        if case.runs_on(backend)
    ]


def advance(case: Case, parameters: list[Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(parameters, case.gradients(step))
        case.set_lr(optimizer, step)
        optimizer.step()


def copies(parameters: list[Parameter]) -> list[Parameter]:
    """Return copies with the same values and layout in other storage."""
    return [copy.deepcopy(p) for p in parameters]


def assert_bitwise(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not a.equal(b)] == []


def assert_same_everything(
    ours: list[Parameter], optimizer: Optimizer, theirs: list[Parameter], other: torch.optim.Optimizer
) -> None:
    assert_bitwise(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a in optimizer.state) == (b in other.state)
        if a in optimizer.state:
            assert optimizer.state[a].keys() == other.state[b].keys()
            for key, value in optimizer.state[a].items():
                assert value.dtype == other.state[b][key].dtype, key
                assert value.equal(other.state[b][key]), key


def figures(telemetry: LambTelemetry | CameTelemetry | LarsTelemetry) -> dict[str, Tensor]:
    """Return the metrics that kernels write, one entry per parameter."""
    return {name: value for name, value in vars(telemetry).items() if name not in {"names", "lr", "skipped"}}


def saved_and_loaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
