"""compat.npu_bridge.NPUOptimizer in one process; tests/support/overlap_worker.py has a scenario with two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bighorn import Lamb
from bighorn.compat.npu_bridge import FixedLossScaleManager, NPULossScaleOptimizer, NPUOptimizer
from tests.support import overlap_worker

LAMB: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def sample(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.parametrize("branch", range(3), ids=["dynamic", "fixed", "none"])
def test_a_branch_of_the_example_is_the_plain_optimizer(branch: int) -> None:
    plain, model = overlap_worker.network(), overlap_worker.network()
    reference = Lamb(plain.parameters(), **LAMB)
    manager = overlap_worker.branches()[branch]
    optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), manager, is_loss_scale=manager is not None)
    for step in range(5):
        overlap_worker.backward(overlap_worker.loss(plain, sample(step)))
        reference.step()
        reference.zero_grad()
        optimizer.minimize(overlap_worker.loss(model, sample(step)))
    overlap_worker.assert_same(model, plain)


def test_the_invalid_branch_of_the_example() -> None:
    with pytest.raises(ValueError, match=r"loss_scale=-2 is out of range"):
        FixedLossScaleManager(-2)


def test_an_overflow_is_skipped_and_a_checkpoint_goes_on() -> None:
    model = overlap_worker.network()
    optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), overlap_worker.branches()[0], is_loss_scale=True)
    for _ in range(2):
        optimizer.minimize(overlap_worker.loss(model, sample(0)) * torch.inf)
    for p, start in zip(model.parameters(), overlap_worker.network().parameters(), strict=True):
        assert p.equal(start)
    saved = optimizer.state_dict()
    assert saved["scaler"]["scale"] == 32.0
    optimizer = NPUOptimizer(Lamb(model.parameters(), lr=1.0), overlap_worker.branches()[0], is_loss_scale=True)
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["scaler"] == saved["scaler"]
    assert optimizer.opt.param_groups[0]["lr"] == 0.05


def test_it_counts_the_steps_that_were_taken() -> None:
    model = overlap_worker.network()
    optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), overlap_worker.branches()[0], is_loss_scale=True)
    plain = NPUOptimizer(Lamb(model.parameters(), **LAMB))
    steps = torch.tensor(0)
    optimizer.minimize(overlap_worker.loss(model, sample(0)) * torch.inf, steps)
    assert steps == 0
    optimizer.minimize(overlap_worker.loss(model, sample(0)), global_step=steps)
    plain.minimize(overlap_worker.loss(model, sample(1)), steps)
    assert steps == 2
    before = [param.detach().clone() for param in model.parameters()]
    for wrong in (0, torch.tensor(0.0), "tf.Variable"):
        with pytest.raises(TypeError, match=r"global_step must be a tensor of integers, as torch\.tensor\(0\), not"):
            plain.minimize(overlap_worker.loss(model, sample(2)), wrong)  # type: ignore[arg-type]
    assert all(
        param.equal(start) and param.grad is None for param, start in zip(model.parameters(), before, strict=True)
    )


def test_groups_and_gradients_are_the_optimizers() -> None:
    model = overlap_worker.network()
    optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB))
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.opt.param_groups[0]["lr"] == 0.5
    overlap_worker.backward(overlap_worker.loss(model, sample(0)))
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_loss_scale": True}, "is_loss_scale=True.*manager"),
        ({"loss_scale_manager": FixedLossScaleManager(2)}, "is_loss_scale=False.*manager"),
        ({"is_distributed": True}, "is_distributed=True.*DistributedDataParallel"),
        ({"is_distributed": True, "model": nn.Linear(2, 2)}, "type Linear"),
    ],
)
def test_what_does_not_belong_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NPUOptimizer(Lamb(overlap_worker.network().parameters(), **LAMB), **options)


def test_something_else_than_a_manager() -> None:
    with pytest.raises(TypeError, match="not float"):
        NPULossScaleOptimizer(Lamb(overlap_worker.network().parameters(), **LAMB), 128.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("switch", ["is_distributed", "is_loss_scale", "is_tailing_optimization"])
def test_what_is_no_optimizer_and_no_switch(switch: str) -> None:
    with pytest.raises(TypeError, match=r"^opt must be .*, not Linear$"):
        NPUOptimizer(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"{switch} must be True or False, not 'no'"):
        NPUOptimizer(Lamb(overlap_worker.network().parameters(), **LAMB), **{switch: "no"})  # type: ignore[arg-type]


def test_a_state_that_does_not_fit_leaves_both_as_they_were() -> None:
    model = overlap_worker.network()
    scaled = NPUOptimizer(Lamb(model.parameters(), **LAMB), FixedLossScaleManager(2), is_loss_scale=True)
    plain = NPUOptimizer(Lamb(model.parameters(), **LAMB))
    other = NPUOptimizer(Lamb([nn.Parameter(torch.ones(2))], **LAMB), FixedLossScaleManager(8), is_loss_scale=True)
    before = scaled.state_dict()
    for state, words in (
        (plain.state_dict(), "no state of a loss scaler, and there is one here.*is_loss_scale=False"),
        (other.state_dict(), "parameter group"),
        ({}, "with 'opt' and 'scaler'"),
    ):
        with pytest.raises(ValueError, match=words):
            scaled.load_state_dict(state)
        assert scaled.state_dict() == before
    with pytest.raises(ValueError, match=r"has state of a loss scaler, and there is none here.*is_loss_scale=True"):
        plain.load_state_dict(before)


def test_tailing_without_distributed_warns_and_does_nothing() -> None:
    model = overlap_worker.network()
    with pytest.warns(UserWarning, match=r"no effect without is_distributed.*pass is_distributed=True and"):
        optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), is_tailing_optimization=True, name="alone")
    assert optimizer.name == "alone"
    optimizer.minimize(overlap_worker.loss(model, sample(0)))
