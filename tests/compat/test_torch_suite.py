"""Tests of torch's test_optim.py, implemented again for Bighorn's optimizers: schedulers, tensors, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from bighorn import Came, Lamb, Lars
from tests.support.cases import Kind
from tests.support.optimizer_runs import saved_and_loaded

pytestmark = pytest.mark.long


def parameters() -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((10, 5), (64, 16), (10,), ())]


def set_gradients(params: list[Parameter], seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize(("kind", "betas"), [(Lamb, (0.8, 0.9)), (Came, (0.8, 0.9, 0.99))])
def test_a_checkpoint_of_betas_in_tensors_goes_on(kind: Any, betas: tuple[float, ...]) -> None:
    def made(params: list[Parameter]) -> Any:
        return kind(params, lr=0.01, betas=tuple(torch.tensor([beta]) for beta in betas))

    params = parameters()
    optimizer = made(params)
    set_gradients(params)
    optimizer.step()
    others = [Parameter(p.detach().clone()) for p in params]
    other = made(others)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for mine, each in ((params, optimizer), (others, other)):
        set_gradients(mine, 50)
        each.step()
    assert all(p.equal(q) for p, q in zip(params, others, strict=True))


def momenta(base: float, most: float) -> dict[str, Any]:
    return {"base_momentum": torch.tensor(base), "max_momentum": torch.tensor(most)}


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "one-cycle-tensors": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 8, **momenta(0.85, 0.95)),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=True),
    "cyclic-tensors": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 2, **momenta(0.8, 0.9)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learning_rate_schedulers(scheduler: str, tensor: bool, kind: Kind) -> None:
    """Schedulers that cycle momentum write it or betas; torch's optimizers accept tensors of one element for them."""
    results = []
    for written in (False, True):
        params = parameters()
        optimizer = kind(params, lr=torch.tensor(0.05) if tensor else 0.05)
        driven = SCHEDULERS[scheduler](optimizer)
        for step in range(6):
            set_gradients(params, step)
            group = optimizer.param_groups[0]
            if written and kind is Lars:
                group["momentum"] = torch.tensor(float(group["momentum"]), dtype=torch.float64)
            elif written:
                group["betas"] = tuple(torch.tensor([float(beta)], dtype=torch.float64) for beta in group["betas"])
            optimizer.step()
            driven.step()
        betas = [group["momentum"]] if kind is Lars else group["betas"]
        assert all(isinstance(beta, (float, Tensor)) for beta in betas)
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q)


def test_betas_in_tensors_are_checked(kind: Kind) -> None:
    if kind is Lars:
        with pytest.raises(TypeError, match=r"^momentum"):
            kind(parameters(), momentum=torch.tensor([0.1, 0.2]))  # type: ignore[arg-type]
        return
    build: Any = kind
    rest = (0.9,) if kind is Lamb else (0.9, 0.99)
    for beta in (torch.tensor(1.5), torch.tensor([0.1, 0.2]), torch.tensor(0.5j)):
        with pytest.raises((TypeError, ValueError), match=r"^betas\[0\]"):
            build(parameters(), lr=0.1, betas=(beta, *rest))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.process
@pytest.mark.parametrize("way", ["plain", "schedule", "tensor", "two"])
@pytest.mark.usefixtures("fresh_compiler")
def test_an_optimizer_made_in_a_compiled_function(way: str, kind: Kind) -> None:
    """It once lost attributes from before a graph break: no attribute '_default_schedules'."""
    weight = Parameter(torch.ones(3, 4))

    def made(inputs: Tensor) -> tuple[Tensor, Any]:
        groups = [{"params": [weight], "lr": torch.tensor(0.1) if way == "tensor" else 0.1}]
        lr: Any = (lambda _: 0.1) if way == "schedule" else 0.1
        optimizers = [kind(groups if way == "tensor" else [weight], lr=lr) for _ in range(1 + (way == "two"))]
        scaled = optimizers[-1].param_groups[0]["lr"] * inputs
        return scaled, optimizers[-1]

    scaled, optimizer = torch.compile(made, backend="eager")(torch.ones(2))
    torch.testing.assert_close(scaled, torch.full((2,), 0.1))
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    assert not weight.equal(torch.ones(3, 4))
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
    optimizer.load_state_dict(optimizer.state_dict())
