"""The loss scaler: policies step by step, beside torch's GradScaler, and with every kind of optimizer."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from bighorn import Came, ExponentialScale, FixedScale, Lamb, LossScaler, WindowScale
from bighorn.scaling import ScalePolicy

G, B = False, True  # a good step, a bad one
MOST = torch.finfo(torch.float32).max

# What each step was, and the scale, the good and the bad steps after it, written out by hand.
POLICIES: dict[str, tuple[ScalePolicy, list[tuple[bool, float, int, int]]]] = {
    "fixed": (FixedScale(8.0), [(B, 8, 0, 0), (G, 8, 0, 0), (B, 8, 0, 0)]),
    "window": (
        WindowScale(8.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=3),
        [
            (G, 8, 1, 0),
            (G, 8, 2, 0),
            (B, 2, 0, 0),  # shrinks at every overflow, which clears the good steps
            (B, 0.5, 0, 0),
            (G, 0.5, 1, 0),
            (G, 0.5, 2, 0),
            (G, 1, 0, 0),
            (G, 1, 1, 0),
        ],
    ),
    "exponential": (
        ExponentialScale(100.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2, backoff_interval=2),
        [
            (B, 100, 0, 1),
            (G, 100, 1, 1),  # a good step does not clear the bad one,
            (B, 50, 0, 0),  # so this is the second; the change clears both
            (G, 50, 1, 0),
            (B, 50, 0, 1),  # a bad step clears the good one,
            (G, 50, 1, 1),
            (G, 100, 0, 0),  # so only now there are two in a row; the change clears the bad one, too
            (B, 100, 0, 1),
            (B, 50, 0, 0),
        ],
    ),
    "exponential-3": (
        ExponentialScale(10.0, growth_factor=1.5, backoff_factor=0.8, growth_interval=1, backoff_interval=3),
        [(B, 10, 0, 1), (B, 10, 0, 2), (B, 8, 0, 0), (G, 12, 0, 0), (G, 18, 0, 0), (B, 18, 0, 1)],
    ),
    "ceiling": (
        WindowScale(2.0**126, growth_interval=2),
        [(G, 2.0**126, 1, 0), (G, 2.0**127, 0, 0), (G, 2.0**127, 1, 0), (G, 2.0**127, 0, 0), (B, 2.0**126, 0, 0)],
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_counts_as_written_out(name: str) -> None:
    policy, steps = POLICIES[name]
    state = policy.start()
    for overflow, *expected in steps:
        before = [value.item() for value in state]
        after = policy.next(state, torch.tensor(overflow))
        assert [value.item() for value in after] == pytest.approx(expected, rel=1e-6)
        assert [value.item() for value in state] == before
        assert [value.dtype for value in after] == [torch.float32, torch.int32, torch.int32]
        state = after


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def train_on(scaler: torch.amp.GradScaler, optimizer: Optimizer, param: Tensor, overflow: bool, factor: float) -> None:
    """One step whose gradient is known: `factor` in each place, before scaling."""
    optimizer.zero_grad()
    backward(scaler.scale((param * factor).sum()))
    if overflow:
        assert param.grad is not None
        param.grad.view(-1)[1] = torch.inf
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", POLICIES)
def test_the_scaler_moves_as_its_policy(name: str) -> None:
    policy, steps = POLICIES[name]
    param = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = LossScaler(policy, min_scale=2.0**-20)
    for overflow, *expected in steps:
        before = param.detach().clone()
        train_on(scaler, optimizer, param, overflow, 1.0)
        state = scaler.state_dict()
        assert [state["scale"], state["_growth_tracker"], state["bad_steps"]] == pytest.approx(expected, rel=1e-6)
        assert param.equal(before) == overflow


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "Lamb": lambda params: Lamb(params, lr=0.1, weight_decay=0.1),
    "Came": lambda params: Came(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)

ROUGH = [step in (1, 4, 5) for step in range(12)]


@optimizers
def test_it_trains_as_torch_where_they_coincide(make: Callable[..., Optimizer]) -> None:
    """torch's GradScaler has the policy of WindowScale."""
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


# ---- optimizers that unscale by themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_lamb_unscales_inside_its_step(max_grad_norm: float | None, backend: str) -> None:
    """Gradients stay scaled, an overflow changes nothing and counts no step, and the clip is in unscaled units."""
    ours, plain = Parameter(torch.randn(4, 3)), Parameter(torch.empty(4, 3))
    plain.data.copy_(ours)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": max_grad_norm, "backend": backend}
    one, two = Lamb([ours], **options), Lamb([plain], **options)
    scaler = LossScaler(WindowScale(1024.0, growth_interval=2))
    for overflow in (False, True, False, False):
        direction, scale = torch.randn(4, 3), scaler.get_scale()
        backward(scaler.scale((ours * direction).sum()))
        assert ours.grad is not None
        if overflow:
            ours.grad[0, 0] = torch.nan
        given, before = ours.grad.clone(), ours.detach().clone()
        scaler.step(one)
        scaler.update()
        torch.testing.assert_close(ours.grad, given, rtol=0, atol=0, equal_nan=True)
        if overflow:
            assert ours.equal(before)
            assert one.state[ours]["step"] == 1
        else:
            plain.grad = given / scale
            two.step()
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)
        one.zero_grad()
    assert one.telemetry().skipped == 1
    assert one.state[ours]["step"] == two.state[plain]["step"] == 3


def test_lamb_says_so_to_nobody_else() -> None:
    """Lightning clips for no optimizer whose `_step_supports_amp_scaling` is True."""
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
    """`unscale_`, a clip by hand, `step`: the clipped gradient is what is stepped with, in its own units."""
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


def raising(*_: object) -> None:
    raise KeyError("in the hook")


@optimizers
def test_stepping_in_spite_of_an_overflow(make: Callable[..., Optimizer]) -> None:
    """The step is taken, and the policy hears of the overflow all the same."""
    param = Parameter(torch.ones(3))
    scaler = LossScaler(WindowScale(8.0), skip_on_overflow=False)
    train_on(scaler, make([param]), param, True, 1.0)
    assert not param.isfinite().all()
    assert scaler.get_scale() == 4.0


# ---- loops of all kinds ---------------------------------------------------------------------------------------------


def test_several_losses_and_optimizers() -> None:
    """Each optimizer has a verdict of its own, and the scale goes by all of them; an idle one has none."""
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


def test_accumulated_gradients() -> None:
    ours, plain = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    scaler = LossScaler(FixedScale(256.0))
    optimizer, other = Lamb([ours], lr=0.1, weight_decay=0.1), Lamb([plain], lr=0.1, weight_decay=0.1)
    for direction in torch.randn(3, 4):
        backward(scaler.scale((ours * direction).sum() / 3))
        backward((plain * direction).sum() / 3)
    scaler.step(optimizer)
    scaler.update()
    other.step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


def test_autocast_to_float16() -> None:
    """A gradient that float16 cannot hold without the scale, and a scale that is too large at first."""
    linear = nn.Linear(8, 1, bias=False)
    optimizer = Lamb(linear.parameters(), lr=0.1)
    scaler = LossScaler(WindowScale(2.0**50, backoff_factor=2.0**-8))
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = linear(torch.ones(2, 8))
        backward(scaler.scale(out.float().mean() * 1e-9))
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
    """Unscaled in place, and looked at, beside a plain one."""
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
    """Refused where they would be unscaled in place, fine where the optimizer unscales in float32."""
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


def test_closures_are_refused() -> None:
    param = Parameter(torch.ones(3))
    for optimizer in (Lamb([param]), torch.optim.SGD([param])):
        scaler = LossScaler()
        backward(scaler.scale(param.sum()))
        with pytest.raises(RuntimeError, match="closure"):
            scaler.step(optimizer, lambda: 1.0)
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, closure=lambda: 1.0)
        scaler.step(optimizer, None)  # as Accelerate does


# ---- bounds and changes by hand -------------------------------------------------------------------------------------


def scales_of(scaler: LossScaler, steps: list[bool]) -> list[float]:
    param = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scales = []
    for overflow in steps:
        train_on(scaler, optimizer, param, overflow, 1.0)
        scales.append(scaler.get_scale())
    return scales


def test_bounds() -> None:
    policy = WindowScale(8.0, growth_interval=1)
    assert scales_of(LossScaler(policy), [B] * 5) == [4, 2, 1, 1, 1]
    assert scales_of(LossScaler(policy, min_scale=0.25), [B] * 7) == [4, 2, 1, 0.5, 0.25, 0.25, 0.25]
    assert scales_of(LossScaler(policy, min_scale=3.0, max_scale=20.0), [G, G, B, B, B, G]) == [16, 20, 10, 5, 3, 6]
    assert scales_of(LossScaler(FixedScale(8.0), min_scale=8.0, max_scale=8.0), [B, G]) == [8, 8]


def test_a_new_scale_by_hand() -> None:
    param = Parameter(torch.ones(3))
    scaler = LossScaler(WindowScale(8.0), max_scale=64.0)
    with pytest.raises(AssertionError, match="update"):
        scaler.update(4.0)
    scaler.scale(param.sum())
    for new_scale, expected in ((4.0, 4.0), (16, 16.0), (torch.tensor([2.0]), 2.0), (torch.tensor(1e9), 64.0)):
        scaler.update(new_scale)
        assert scaler.get_scale() == expected
    for wrong, error in (
        (0.5, ValueError),
        (65.0, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("8", TypeError),
        (torch.ones(2), TypeError),
        (param, TypeError),
    ):
        with pytest.raises(error, match="new_scale"):
            scaler.update(wrong)  # type: ignore[arg-type]
        assert scaler.get_scale() == 64.0


def test_numbers_of_the_policy_by_hand() -> None:
    """torch's own getters and setters reach the policy; FixedScale has none."""
    scaler = LossScaler(ExponentialScale(8.0))
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.8, 2000)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    with pytest.raises(ValueError, match="growth_factor=1"):
        scaler.set_growth_factor(1.0)
    assert scaler.policy == ExponentialScale(8.0, 4.0, 0.25, 1)
    assert scales_of(scaler, [G, B, B]) == [32, 32, 8]
    with pytest.raises(AttributeError, match="growth_factor"):
        LossScaler(FixedScale(8.0)).get_growth_factor()
    with pytest.raises(TypeError, match="growth_factor"):
        LossScaler(FixedScale(8.0)).set_growth_factor(2.0)


# ---- too many overflows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
@optimizers
def test_too_many_overflows_in_a_row(make: Callable[..., Optimizer], limit: int) -> None:
    """The step after them raises, names the parameters, and changes nothing. A good step between starts anew."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = make(model.named_parameters())
    scaler = LossScaler(max_consecutive_overflows=limit)

    def step(bad: tuple[str, ...]) -> None:
        optimizer.zero_grad()
        backward(scaler.scale(model(torch.ones(4, 2)).sum()))
        for name in bad:
            grad = model.get_parameter(name).grad
            assert grad is not None
            grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    for bad in [("0.bias",)] * (limit - 1) + [(), ("1.weight",)] * (limit > 1) + [("0.weight", "1.bias")] * (limit - 1):
        step(bad)
    if limit == 1:
        step(("0.weight", "1.bias"))
    before = [param.detach().clone() for param in model.parameters()]
    calls: list[Callable[[], None]] = [lambda: step(()), lambda: scaler.unscale_(optimizer)]
    for call in calls:
        state = scaler.state_dict()
        with pytest.raises(
            FloatingPointError, match=rf"(?s)^{limit} steps.*scale is .*gradients of 0\.weight, 1\.bias\. "
        ):
            call()
        assert scaler.state_dict() == state
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        assert grad.abs().max() > 50  # still scaled
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))

    scaler.update(2.0)  # whoever sets the scale starts anew
    step(())
    assert scaler.get_scale() == 2.0


def test_many_overflowed_parameters_are_counted() -> None:
    params = [Parameter(torch.ones(1)) for _ in range(9)]
    optimizer = torch.optim.SGD(params)
    scaler = LossScaler(max_consecutive_overflows=1)
    backward(scaler.scale(torch.stack(list(params)).sum() * torch.inf))
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(FloatingPointError, match=r"\.params\[4\] and 4 more\. "):
        scaler.step(optimizer)


def test_overflows_of_a_checkpoint_count() -> None:
    """They are gone on with, but by themselves they stop nobody."""
    scaler = LossScaler(max_consecutive_overflows=3)
    assert len(scales_of(scaler, [B, B, B])) == 3
    again = LossScaler(max_consecutive_overflows=3)
    again.load_state_dict(scaler.state_dict())
    assert scales_of(copy.deepcopy(again), [G, B, B, B])
    with pytest.raises(FloatingPointError, match="4 steps"):
        scales_of(again, [B, B])


# ---- state in and out -----------------------------------------------------------------------------------------------


def reload(state: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("policy", [FixedScale(8.0), WindowScale(8.0, 2.0, 0.5, 3), ExponentialScale(8.0, 2.0, 0.5, 3)])
def test_a_run_goes_on_from_its_state(policy: ScalePolicy, started: bool) -> None:
    steps = [B, G, G, B, G, G, G, G, B, B]
    whole = scales_of(LossScaler(policy), steps)
    for cut in range(1, len(steps)):
        first = LossScaler(policy)
        assert scales_of(first, steps[:cut]) == whole[:cut]
        second = LossScaler(type(policy)(2.0**20))
        if started:
            scales_of(second, [B, B, G])
        second.load_state_dict(reload(first.state_dict()))
        for scaler in (second, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
            assert {**scaler.state_dict(), "init_scale": 8.0} == first.state_dict()
            assert scales_of(scaler, steps[cut:]) == whole[cut:]


def test_states_of_torch_and_back() -> None:
    torchs = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=7, backoff_factor=0.25)
    param = Parameter(torch.ones(3))
    for overflow in (B, G, G):
        train_on(torchs, torch.optim.SGD([param]), param, overflow, 1.0)
    ours = LossScaler()
    ours.load_state_dict(torchs.state_dict())
    assert (ours.get_scale(), ours.get_growth_interval(), ours.get_backoff_factor()) == (8.0, 7, 0.25)
    assert ours.state_dict()["_growth_tracker"] == 2
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == torchs.state_dict()


BAD_STATES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty": ({}, RuntimeError, "enabled=False"),
    "no-scale": ({"scale": None}, TypeError, "scale"),
    "other-policy": ({"policy": "FixedScale"}, ValueError, "FixedScale.*has a WindowScale.*init_scale=65536"),
    "unknown": ({"growth": 2.0}, ValueError, r"unknown \['growth'\]"),
    "below": ({"scale": 0.5}, ValueError, "scale=0.5 is not within min_scale=1.0"),
    "zero": ({"scale": 0.0}, ValueError, "scale=0.0"),
    "nan": ({"scale": math.nan}, ValueError, "scale=nan"),
    "bad-number": ({"growth_factor": 0.5}, ValueError, "growth_factor=0.5"),
    "negative-count": ({"bad_steps": -1}, ValueError, "bad_steps=-1"),
    "fraction": ({"_growth_tracker": 1.5}, TypeError, "_growth_tracker"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_bad_state_changes_nothing(name: str) -> None:
    change, error, message = BAD_STATES[name]
    scaler = LossScaler()
    state = scaler.state_dict()
    with pytest.raises(error, match=message):
        scaler.load_state_dict({**state, **change} if change else {})
    with pytest.raises(ValueError, match=r"misses \['_growth_tracker', 'scale'\]"):
        scaler.load_state_dict({"bad_steps": 0})
    assert scaler.state_dict() == state


def test_a_scaler_in_the_middle_of_a_step_cannot_be_pickled() -> None:
    param = Parameter(torch.ones(3))
    scaler = LossScaler()
    backward(scaler.scale(param.sum()))
    scaler.unscale_(torch.optim.SGD([param]))
    with pytest.raises(AssertionError, match="pickled"):
        pickle.dumps(scaler)


# ---- bad input ------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "scale-0": (lambda: FixedScale(0.0), ValueError, "init_scale=0.0 .*above 0"),
    "scale-negative": (lambda: FixedScale(-1.0), ValueError, "init_scale=-1.0"),
    "scale-inf": (lambda: WindowScale(math.inf), ValueError, "init_scale=inf .*float32"),
    "scale-beyond": (lambda: WindowScale(1e39), ValueError, "init_scale=1e[+]39 .*float32"),
    "scale-nan": (lambda: WindowScale(math.nan), ValueError, "init_scale=nan"),
    "scale-text": (lambda: FixedScale("8"), TypeError, "init_scale must be a number, not '8'"),  # type: ignore[arg-type]
    "scale-bool": (lambda: FixedScale(True), TypeError, "init_scale must be a number"),
    "growth-1": (lambda: WindowScale(growth_factor=1.0), ValueError, "growth_factor=1.0 .*above 1"),
    "backoff-1": (lambda: ExponentialScale(backoff_factor=1), ValueError, "backoff_factor=1 .*in .0, 1.$"),
    "backoff-0": (lambda: ExponentialScale(backoff_factor=0), ValueError, "backoff_factor=0 "),
    "interval-0": (lambda: WindowScale(growth_interval=0), ValueError, "growth_interval=0 .*at least 1"),
    "interval-half": (lambda: WindowScale(growth_interval=1.5), TypeError, "growth_interval must be an integer"),  # type: ignore[arg-type]
    "bad-0": (lambda: ExponentialScale(backoff_interval=-2), ValueError, "backoff_interval=-2"),
    "policy-number": (lambda: LossScaler(1024.0), TypeError, "policy must be a FixedScale.*1024.0"),  # type: ignore[arg-type]
    "policy-device": (lambda: LossScaler("cuda"), TypeError, "policy must be .*'cuda'"),  # type: ignore[arg-type]
    "policy-class": (lambda: LossScaler(WindowScale), TypeError, "policy must be"),  # type: ignore[arg-type]
    "min-0": (lambda: LossScaler(min_scale=0.0), ValueError, "min_scale=0.0"),
    "max-text": (lambda: LossScaler(max_scale="big"), TypeError, "max_scale"),  # type: ignore[arg-type]
    "below-min": (lambda: LossScaler(FixedScale(0.5)), ValueError, "init_scale=0.5 is not within min_scale=1.0"),
    "above-max": (lambda: LossScaler(max_scale=2.0), ValueError, "init_scale=65536.0 .*max_scale=2.0"),
    "skip": (lambda: LossScaler(skip_on_overflow=1), TypeError, "skip_on_overflow must be True or False"),  # type: ignore[arg-type]
    "enabled": (lambda: LossScaler(enabled="no"), TypeError, "enabled must be True or False"),  # type: ignore[arg-type]
    "most-0": (lambda: LossScaler(max_consecutive_overflows=0), ValueError, "max_consecutive_overflows=0"),
    "most-text": (lambda: LossScaler(max_consecutive_overflows="3"), TypeError, "max_consecutive_overflows"),  # type: ignore[arg-type]
    "group": (lambda: LossScaler(process_group="world"), TypeError, "process_group.*'world'"),
    "torchs-option": (lambda: LossScaler(init_scale=2.0), TypeError, r"LossScaler\(WindowScale\(init_scale="),
    "device": (lambda: LossScaler(device="cuda"), TypeError, "'device'; the scale lives where"),
    "typo": (lambda: LossScaler(min_scal=2.0), TypeError, "'min_scal'; did you mean 'min_scale'"),
    "no-optimizer": (lambda: LossScaler().step(3), TypeError, "must be a torch.optim.Optimizer, not 3"),  # type: ignore[arg-type]
    "no-state": (lambda: LossScaler().load_state_dict(None), TypeError, "must be what state_dict.*not None"),  # type: ignore[arg-type]
    "half-a-state": (
        lambda: LossScaler().load_state_dict({"scale": 1.0}),
        ValueError,
        r"misses \['_growth_tracker'\]: it",
    ),
    "foreign": (lambda: LossScaler(xyz=2.0), TypeError, "'xyz'; known are policy, min_scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()
