"""Compares the loss scaler with torch's GradScaler, for every kind of optimizer, loop and gradient."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim import Optimizer

from bighorn import FixedScale, Lamb, LossScaler, WindowScale
from bighorn._optim.step_plan import scale_and_mask
from tests.support.case_tensors import FEW
from tests.support.cases import Case, Kind, set_gradients
from tests.support.loss_scaling import ROUGH, backward, optimizers, train_on
from tests.support.optimizer_runs import CASE


@optimizers
def test_it_trains_as_torch_where_they_coincide(make: Callable[..., Optimizer]) -> None:
    """Torch's GradScaler has the policy of WindowScale."""
    ours, theirs = Parameter(torch.randn(5)), Parameter(torch.empty(5))
    theirs.data.copy_(ours)
    scaler = LossScaler(WindowScale(2.0**10, growth_interval=3))
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    one, two = make([ours]), make([theirs])
    for step, overflow in enumerate(ROUGH):
        train_on(scaler, one, ours, overflow, 0.1 * step)
        train_on(torchs, two, theirs, overflow, 0.1 * step)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert scaler.get_scale() == torchs.get_scale()
        assert torchs.state_dict().items() <= scaler.state_dict().items()
    assert scaler.state_dict()["scale"] < 2**10
    assert len(one.state[ours]) == len(two.state[theirs])


# ---- optimizers that unscale by themselves -------------------------------------------------------------------------


def raising(*_: object) -> None:
    raise KeyError("in the hook")


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


@pytest.mark.parametrize("closure", [None, raising], ids=["bad-lr", "closure-raises"])
def test_a_refused_step_forgets_the_scale(closure: Callable[[], None] | None, kind: Kind, backend: str) -> None:
    """Otherwise the next step, for which the scaler passes nothing, would unscale again."""
    case = CASE.of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    set_gradients(parameters, case.gradients(0))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)  # type: ignore[union-attr]
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises((ValueError, KeyError), match=r"lr|hook"):
        optimizer.step(closure)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_lamb_says_so_to_nobody_else() -> None:
    """Lightning clips for no optimizer whose `_step_supports_amp_scaling` is True, so it is True only in the step."""
    param = Parameter(torch.ones(3))
    optimizer = Lamb([param])
    scaler = LossScaler()
    seen = []
    optimizer.register_step_pre_hook(lambda self, *_: seen.append(self._step_supports_amp_scaling))
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    train_on(scaler, optimizer, param, False, 1.0)
    assert seen == [True]
    assert not {"_step_supports_amp_scaling", "grad_scale", "found_inf"} & vars(optimizer).keys()


@optimizers
def test_a_clip_after_unscale(make: Callable[..., Optimizer]) -> None:
    """After `unscale_` and a clip by hand, `step` uses the clipped gradient without unscaling it again."""
    ours, plain = Parameter(torch.randn(6)), Parameter(torch.empty(6))
    plain.data.copy_(ours)
    one, two = make([ours]), make([plain])
    scaler = LossScaler(WindowScale(4096.0))
    for overflow in ROUGH[:6]:
        one.zero_grad()
        direction = torch.randn(6)
        backward(scaler.scale((ours * direction).sum()))
        assert ours.grad is not None
        if overflow:
            ours.grad[0] = -torch.inf
        scaler.unscale_(one)
        torch.nn.utils.clip_grad_norm_([ours], 0.3)
        scaler.step(one)
        scaler.update()
        if not overflow:
            plain.grad = direction
            torch.nn.utils.clip_grad_norm_([plain], 0.3)
            two.step()
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


@optimizers
def test_a_step_that_raises_leaves_no_scale_behind(make: Callable[..., Optimizer]) -> None:
    param = Parameter(torch.ones(3))
    optimizer, scaler = make([param]), LossScaler()
    backward(scaler.scale(param.sum()))
    optimizer.register_step_pre_hook(raising)
    with pytest.raises(KeyError, match="in the hook"):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    assert getattr(optimizer, "_step_supports_amp_scaling", None) == (True if optimizer.defaults.get("fused") else None)


@optimizers
def test_stepping_in_spite_of_an_overflow(make: Callable[..., Optimizer]) -> None:
    """The step is taken, and the policy still counts the overflow."""
    param = Parameter(torch.ones(3))
    scaler = LossScaler(WindowScale(8.0), skip_on_overflow=False)
    train_on(scaler, make([param]), param, True, 1.0)
    assert not param.isfinite().all()
    assert scaler.get_scale() == 4.0


# ---- loops of all kinds --------------------------------------------------------------------------------------------


def test_several_losses_and_optimizers() -> None:
    """Each optimizer skips separately, and the scale depends on all of them; an idle one has no effect."""
    params = [Parameter(torch.ones(3)) for _ in range(3)]
    made = [Lamb([params[0]]), torch.optim.AdamW([params[1]]), torch.optim.SGD([params[2]])]
    scaler = LossScaler(WindowScale(64.0))
    for loss in scaler.scale([params[0].sum() + params[1].sum(), params[1].square().sum()]):
        backward(loss)
    assert params[1].grad is not None
    params[1].grad[0] = torch.inf
    for optimizer in made:
        scaler.step(optimizer)
    scaler.update()
    assert [param.equal(torch.ones(3)) for param in params] == [False, True, True]
    assert scaler.get_scale() == 32.0


def test_an_update_without_a_single_gradient() -> None:
    param = Parameter(torch.ones(3))
    for optimizer in (Lamb([param]), torch.optim.SGD([param])):
        scaler = LossScaler()
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
    assert param.equal(torch.ones(3))


def test_accumulated_gradients_under_autocast_to_float16() -> None:
    """Without the scale float16 cannot hold the gradient, and the first scale is too large."""
    linear = nn.Linear(8, 1, bias=False)
    optimizer = Lamb(linear.parameters(), lr=0.1)
    scaler = LossScaler(WindowScale(2.0**50, backoff_factor=2.0**-8))
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        for share in (0.25, 0.75):
            with torch.autocast("cpu", torch.float16):
                out = linear(torch.ones(2, 8))
            backward(scaler.scale(out.float().mean() * share * 1e-9))
        before = linear.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), linear.weight.equal(before)))
    assert seen == [(2.0**42, True), (2.0**42, False), (2.0**42, False)]
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad / scaler.get_scale(), torch.full((1, 8), 1e-9), rtol=1e-2, atol=0)


KINDS: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(3, dtype=torch.bfloat16),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "strided": lambda: torch.randn(3, 3)[:, 1],
    "sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.randn(2), (3,), check_invariants=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_gradients(kind: str) -> None:
    """Gradients are unscaled in place and checked, beside a plain one."""
    for bad in (False, True):
        grad = KINDS[kind]()
        values = grad._values() if grad.is_sparse else grad
        if bad:
            values[1] = torch.nan
        before = grad.to_dense().clone()
        params = [Parameter(torch.zeros(3)), Parameter(torch.zeros(3, dtype=grad.dtype))]
        params[0].grad, params[1].grad = torch.ones(3), grad
        scaler = LossScaler(WindowScale(8.0))
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.unscale_(optimizer)
        (found,) = scaler._found_inf_per_device(optimizer).values()
        assert found == bad
        assert params[0].grad.equal(torch.full((3,), 1 / 8))
        torch.testing.assert_close(grad.to_dense(), before / 8, equal_nan=True)


def test_float16_gradients() -> None:
    """They are refused if they would be unscaled in place, and accepted if the optimizer unscales in float32."""
    param = Parameter(torch.ones(3, dtype=torch.float16))
    plain = torch.optim.SGD([("layer.weight", param)])
    scaler = LossScaler(FixedScale(2.0**10))
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), 2.0**-20 * 2**10, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"layer\.weight is float16.*float32 under autocast"):
        scaler.step(plain)
    assert param.grad.equal(torch.full((3,), 2.0**-10, dtype=torch.float16))
    optimizer = Lamb([param], lr=0.1)
    scaler.step(optimizer)
    assert optimizer.state[param]["exp_avg"].allclose(torch.full((3,), 0.1 * 2.0**-20), rtol=1e-6)


def test_not_enabled() -> None:
    param = Parameter(torch.ones(3))
    optimizer = Lamb([param], lr=0.1)
    scaler = LossScaler(enabled=False)
    loss = param.sum()
    assert scaler.scale(loss) is loss
    backward(loss)
    scaler.unscale_(optimizer)
    scaler.step(optimizer, None)
    scaler.update()
    assert not param.equal(torch.ones(3))
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"anything": 1})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def test_a_model_on_several_devices_clips_with_the_scaler_of_one() -> None:
    """The sum of squares is on the device of the first gradients; the scaler's tensors are on the loss's device."""
    settings = Lamb([Parameter(torch.ones(2))], max_grad_norm=1.0, skip_nonfinite=True)._settings
    with FakeTensorMode():
        there, here = torch.ones((), device="cuda:0"), torch.ones((), dtype=torch.float64, device="cuda:1")
        for grad_scale, found_inf in ((there, there), (None, there), (there, None)):
            scale, mask = scale_and_mask(settings, grad_scale, found_inf, lambda: here)
            assert isinstance(scale, Tensor)
            assert isinstance(mask, Tensor)
            assert scale.device == mask.device == here.device
