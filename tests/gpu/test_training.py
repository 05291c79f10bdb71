"""Training on a GPU: with overflows of float16, under autocast and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.cases import Kind, set_gradients
from tests.support.gpu_steps import GPU, OPTIONS, gradients, needs_cuda, parameters, same, trained

pytestmark = GPU


def net() -> nn.Module:
    """Return a model in which a bias of 31 elements misaligns later gradients that are views of one buffer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 31), nn.LayerNorm(31), nn.Linear(31, 257), nn.Linear(257, 3))


@needs_cuda
@pytest.mark.parametrize("in_step", [False, True], ids=["unscaled-before", "scale-handed-over"])
def test_a_real_overflow_is_skipped(in_step: bool, kind: Kind) -> None:
    """float16 activations overflow under autocast with torch's GradScaler; the second of three steps is skipped."""
    results = []
    for backend in ("triton", "reference"):
        model = net()
        # With the lr of OPTIONS, 0.1, a step of Came makes float16 activations overflow by itself.
        optimizer = kind(model.parameters(), **{**OPTIONS, "lr": 0.01, "backend": backend, "max_grad_norm": 1.0})
        optimizer._step_supports_amp_scaling = in_step  # type: ignore[union-attr]
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=1000)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            x = torch.randn(8, 64) * (1e30 if step == 1 else 1.0)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).float().square().sum()
            scaler.scale(loss).backward()
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            unchanged = all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
            assert unchanged == (step == 1)
        assert scaler.get_scale() == 128.0
        assert all(state["step"] == 2 for state in optimizer.state.values())
        results.append([p.detach() for p in model.parameters()])
    for ours, exact in zip(*results, strict=True):
        # Activations are float16, and if a gradient is almost 0, its rounding decides the sign of the update.
        assert (ours - exact).norm() <= 1e-2 * exact.norm()


@needs_cuda
def test_autocast_around_a_step_changes_nothing(kind: Kind) -> None:
    plain = trained(kind, max_grad_norm=1.0)
    with torch.autocast("cuda", dtype=torch.float16):
        assert same(plain, trained(kind, max_grad_norm=1.0))


@needs_cuda
def test_a_compiled_training_step_is_compiled_once(kind: Kind) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    net = torch.nn.Linear(64, 64)
    optimizer = kind(net.parameters(), **OPTIONS)

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    compiled = torch.compile(train, backend=counter)
    for step in range(3):
        compiled(torch.randn(8, 64))
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
    count = counter.frame_count
    for step in range(4):
        compiled(torch.randn(8, 64))
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
    assert counter.frame_count == count > 0
    assert all(state["step"] == 7 for state in optimizer.state.values())


def test_nothing_is_compiled_again_when_numbers_change(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.triton_compat import on_compilation

    compiled: list[Any] = []
    params = parameters()
    optimizer = kind(params, **OPTIONS)
    for step in range(4):
        group = optimizer.param_groups[0]
        group["lr"], group["weight_decay"] = 0.1 / (step + 1), 0.1 * step
        if "betas" in group:
            group["betas"] = (0.9, 0.99 + step / 1000, 0.999)[: len(group["betas"])]
        set_gradients(params, gradients(step))
        optimizer.step()
        on_compilation(lambda *_, **found: compiled.append(found), monkeypatch)
    assert compiled == []
