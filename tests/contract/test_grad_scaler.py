"""Steps with torch's GradScaler, which skips them or passes its scale; tests/scaling has bighorn's own scaler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.case_tensors import FEW
from tests.support.cases import Case, Kind, set_gradients
from tests.support.optimizer_runs import CASE, assert_bitwise, assert_same_everything


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_grad_scaler_skips_an_overflow(max_grad_norm: float | None, kind: Kind, backend: str) -> None:
    """With torch's GradScaler, an infinite gradient changes nothing, and the next step is the first."""
    case = CASE.of(kind)
    parameters, others = case.parameters(), case.parameters()
    one = case.optimizer(parameters, backend, max_grad_norm=max_grad_norm)
    two = case.optimizer(others, backend, max_grad_norm=max_grad_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step, bad in ((0, True), (1, False)):
        gradients = [None if g is None else g * scaler.get_scale() for g in case.gradients(step)]
        scaler.scale(torch.ones(()))
        if bad:
            assert gradients[0] is not None
            gradients[0][0, 0] = torch.inf
        set_gradients(parameters, gradients)
        scaler.step(one)
        scaler.update()
        if bad:
            assert_bitwise(parameters, others)
    set_gradients(others, case.gradients(1))
    two.step()
    assert_same_everything(parameters, one, others, two)
    assert not hasattr(one, "grad_scale")
    assert not hasattr(one, "found_inf")


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_scale_that_a_scaler_hands_over(max_grad_norm: float | None, kind: Kind, backend: str) -> None:
    """The step unscales before the clip and leaves the gradients as they are; an overflow changes nothing."""
    case = Case("scaled", {}, FEW).of(kind)
    parameters, others = case.parameters(), case.parameters()
    one = case.optimizer(parameters, backend, max_grad_norm=max_grad_norm)
    two = case.optimizer(others, backend, max_grad_norm=max_grad_norm)
    one._step_supports_amp_scaling = True  # type: ignore[union-attr]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step, bad in enumerate((False, True, False)):
        scaled = [None if g is None else g * scaler.get_scale() for g in case.gradients(step)]
        scaler.scale(torch.ones(()))
        if bad:
            assert scaled[0] is not None
            scaled[0][3, 3] = torch.nan
        else:
            set_gradients(others, case.gradients(step))
            two.step()
        given = [None if g is None else g.clone() for g in scaled]
        set_gradients(parameters, scaled)
        scaler.step(one)
        scaler.update()
        for a, b in zip(parameters, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(dict(one.state[a]), dict(two.state[b]), rtol=1e-6, atol=1e-9)
        for ours, before in zip(scaled, given, strict=True):
            assert ours is None or torch.allclose(ours, before, 0, 0, equal_nan=True)  # type: ignore[arg-type]
    assert one.telemetry().skipped == 1


def raising() -> None:
    raise KeyError("lr")


@pytest.mark.parametrize("closure", [None, raising], ids=["bad-lr", "closure-raises"])
def test_a_refused_step_forgets_the_scale(closure: Callable[[], None] | None, kind: Kind, backend: str) -> None:
    """Otherwise the next step, for which the scaler passes nothing, would unscale again."""
    case = CASE.of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    set_gradients(parameters, case.gradients(0))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)  # type: ignore[union-attr]
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises((ValueError, KeyError), match="lr"):
        optimizer.step(closure)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
