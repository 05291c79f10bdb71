"""What torch.optim.Optimizer promises, and what trainers and schedulers rely on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import Came, Lamb
from cases import FEW, KINDS, ZOO, Case, Kind, Leaf, arranged, set_gradients, set_lr
from contract import (
    BY_ID,
    CASE,
    OWN,
    advance,
    assert_bitwise,
    assert_same_everything,
    backward,
    copies,
    figures,
    model,
    runs,
    saved_and_loaded,
)

# ---- construction -----------------------------------------------------------------------------------------------


def test_it_is_a_torch_optimizer(kind: Kind) -> None:
    assert isinstance(kind(model().parameters(), lr=0.1), torch.optim.Optimizer)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda net: net.parameters(),
    "list": lambda net: list(net.parameters()),
    "dicts": lambda net: [{"params": [p]} for p in net.parameters()],
    "dict-of-one-tensor": lambda net: [{"params": p} for p in net.parameters()],
    "named": lambda net: net.named_parameters(),
    "named-dicts": lambda net: [{"params": [pair]} for pair in net.named_parameters()],
}


@pytest.mark.parametrize("form", FORMS)
def test_params_in_every_form(form: str, kind: Kind, backend: str) -> None:
    results = []
    for make in (FORMS["list"], FORMS[form]):
        net = model()
        optimizer = kind(make(net), lr=0.1, weight_decay=0.1, backend=backend)
        backward(net)
        optimizer.step()
        results.append(list(net.parameters()))
    assert_bitwise(*results)


@pytest.mark.parametrize("form", ["list", "dicts"])
@pytest.mark.parametrize("names", ["module", "mapping"])
def test_names_for_bare_parameters(form: str, names: str, kind: Kind) -> None:
    named, bare = model(), model()
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5, "exclude_from_weight_decay": ["bias", r"^norm\."]}
    first = kind(named.named_parameters(), **options)
    given = bare if names == "module" else dict(bare.named_parameters())
    second = kind(FORMS[form](bare), names=given, **options)
    for net, optimizer in ((named, first), (bare, second)):
        backward(net)
        optimizer.step()
    assert_bitwise(list(named.parameters()), list(bare.parameters()))
    without = model()
    plain = kind(without.parameters(), lr=0.1, weight_decay=0.5)
    backward(without)
    plain.step()
    assert not without.first.bias.equal(named.first.bias)


def test_a_group_overrides_the_defaults(kind: Kind, backend: str) -> None:
    """Two groups with their own options are two optimizers with those options."""
    together, apart = model(), model()
    groups = [
        {"params": together.first.parameters(), "lr": 0.1, "weight_decay": 0.3},
        {"params": together.last.parameters(), **OWN[kind]},
    ]
    one = kind(groups, lr=0.02, weight_decay=0.1, backend=backend)
    two = kind(apart.first.parameters(), lr=0.1, weight_decay=0.3, backend=backend)
    three = kind(apart.last.parameters(), lr=0.02, weight_decay=0.1, backend=backend, **OWN[kind])
    for step in range(3):
        backward(together, step)
        backward(apart, step)
        for optimizer in (one, two, three):
            optimizer.step()
            optimizer.zero_grad()
    assert_bitwise(list(together.parameters()), list(apart.parameters()))


def test_late_add_param_group(kind: Kind, backend: str) -> None:
    """A parameter that joins late takes its own first step, as in an optimizer of its own."""
    together, apart = model(), model()
    one = kind(together.first.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    two = kind(apart.first.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    three = kind(apart.last.parameters(), lr=0.05, weight_decay=0.1, backend=backend)
    for step in range(4):
        if step == 2:
            one.add_param_group({"params": list(together.last.parameters()), "lr": 0.05})
        for net in (together, apart):
            net.zero_grad()
            backward(net, step)
        one.step()
        two.step()
        if step >= 2:
            three.step()
    assert_bitwise(list(together.parameters()), list(apart.parameters()))


# ---- the learning rate and other hyper-parameters ---------------------------------------------------------------


def test_tensor_lr_is_the_same_as_a_float(kind: Kind, backend: str) -> None:
    case = CASE.of(kind)
    results = []
    for lr in (torch.tensor(0.125), 0.125):
        parameters = case.parameters()
        optimizer = case.optimizer(parameters, backend, lr=lr)
        for step, factor in enumerate((1.0, 0.5)):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(0.125 * factor)
                else:
                    group["lr"] = 0.125 * factor
            set_gradients(parameters, case.gradients(step))
            optimizer.step()
        results.append(parameters)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-7, atol=1e-8)


def test_tensor_lr_survives_a_checkpoint(kind: Kind, backend: str) -> None:
    case = CASE.of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend, lr=torch.tensor(0.1))
    set_gradients(parameters, case.gradients(0))
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.03)
    other = case.optimizer(copies(parameters), backend, lr=torch.tensor(0.5))
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == torch.tensor(0.03)


def test_a_scheduler_drives_groups_of_one_tensor_lr_apart(kind: Kind) -> None:
    """Torch's schedulers fill a Tensor lr in place; groups that share one would all get the last group's rate."""
    net = model()
    groups = [{"params": net.first.parameters()}, {"params": net.last.parameters()}]
    optimizer = kind(groups, lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step])
    backward(net)
    optimizer.step()
    scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])


def test_each_group_has_a_tensor_lr_of_its_own(kind: Kind) -> None:
    """The first keeps the caller's, who may write into it."""
    lr, parameters = torch.tensor(0.1), copies([Parameter(torch.ones(2))] * 4)
    optimizer = kind([{"params": [p], "lr": lr} for p in parameters[:3]], lr=0.1)
    optimizer.add_param_group({"params": [parameters[3]], "lr": lr})
    assert optimizer.param_groups[0]["lr"] is lr
    assert len({group["lr"].data_ptr() for group in optimizer.param_groups}) == 4
    assert [group["lr"] for group in optimizer.param_groups] == [lr] * 4
    assert kind(parameters, lr=lr).param_groups[0]["lr"] is lr


@pytest.mark.parametrize("when", ["construction", "later"])
def test_a_tensor_lr_that_requires_grad_is_detached(when: str, kind: Kind, backend: str) -> None:
    lr = torch.tensor(0.5, requires_grad=True)
    parameter, other = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    parameter.grad, other.grad = torch.ones(3), torch.ones(3)
    optimizer = kind([parameter], lr=lr if when == "construction" else 0.1, backend=backend)
    optimizer.param_groups[0]["lr"] = lr if when == "later" else optimizer.param_groups[0]["lr"]
    optimizer.step()
    kind([other], lr=0.5, backend=backend).step()
    assert_bitwise([parameter], [other])
    assert not optimizer.param_groups[0]["lr"].requires_grad
    copy.deepcopy(optimizer)


def test_a_scheduler_changes_the_step(kind: Kind, backend: str) -> None:
    scheduled, by_hand = model(), model()
    one = kind(scheduled.parameters(), lr=0.2, weight_decay=0.1, backend=backend)
    two = kind(by_hand.parameters(), lr=0.2, weight_decay=0.1, backend=backend)
    scheduler = torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5)
    for step in range(3):
        set_lr(two, 0.2 * 0.5**step)
        for net, optimizer in ((scheduled, one), (by_hand, two)):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
        scheduler.step()
    assert_bitwise(list(scheduled.parameters()), list(by_hand.parameters()))


CHANGES: dict[Kind, dict[str, Any]] = {
    Lamb: {
        "betas": (0.3, 0.4),
        "eps": 0.5,
        "adapt": False,
        "adam": True,
        "bias_correction": "lr",
        "trust_ratio_bounds": (0.1, 0.2),
        "decay_mode": "decoupled",
        "stacked": True,
        "grad_averaging": False,
    },
    Came: {
        "betas": (0.3, 0.4, 0.5),
        "eps": (0.1, 0.5),
        "clip_threshold": 0.3,
        "decay_rate": 0.8,
        "scale_parameter": True,
        "bias_correction": True,
        "state_dtype": "bfloat16",
    },
}
for changes in CHANGES.values():
    changes |= {"lr": 0.5, "weight_decay": 0.7, "maximize": True, "grad_centralization": True}


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=f"{kind.algorithm.name}-{name}") for kind in KINDS for name in CHANGES[kind]],
    indirect=["kind"],
)
def test_a_value_written_into_a_group_counts_from_the_next_step(name: str, kind: Kind, backend: str) -> None:
    """Nothing of an earlier step is remembered: a fresh optimizer built with the value goes the same way."""
    change = {name: CHANGES[kind][name]}
    case = Case("written", {}, tuple(leaf for leaf in FEW if len(leaf.shape) >= 2)).of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    others = copies(parameters)
    other = case.optimizer(others, backend)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    unchanged = copies(parameters)
    third = case.optimizer(unchanged, backend)
    third.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.param_groups[0].update(change)
    optimizer.param_groups[0].update(change)
    for tensors, each in ((parameters, optimizer), (others, other), (unchanged, third)):
        set_gradients(tensors, case.gradients(2))
        each.step()
    assert_bitwise(parameters, others)
    assert any(not a.equal(b) for a, b in zip(parameters, unchanged, strict=True)), "the change had no effect"


# ---- step -------------------------------------------------------------------------------------------------------


def test_closure_runs_with_gradients_enabled_and_its_loss_is_returned(kind: Kind, backend: str) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=1e-3, backend=backend)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(net)

    with torch.no_grad():
        first, second = (optimizer.step(closure).detach() for _ in range(2))
    assert second.item() < first.item()
    assert optimizer.step() is None


def test_step_hooks(kind: Kind) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    backward(net)
    optimizer.step()
    assert calls == ["pre", "post"]


def test_a_step_without_any_gradient_is_a_no_op(kind: Kind, backend: str) -> None:
    case = CASE.of(kind)
    parameters = case.parameters()
    before = copies(parameters)
    optimizer = case.optimizer(parameters, backend)
    assert optimizer.step() is None
    assert_bitwise(parameters, before)
    assert not optimizer.state


def test_only_parameters_with_gradients_get_state_and_count_steps(kind: Kind, backend: str) -> None:
    leaves = (Leaf("always", (5,)), Leaf("late", (5,), grad="late"), Leaf("gap", (5,), grad="gap"), ZOO[10])
    case = Case("counts", {}, leaves).of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    set_gradients(parameters, case.gradients(0))
    optimizer.step()
    assert [p in optimizer.state for p in parameters] == [True, False, True, False]
    gap = parameters[2].detach().clone()
    set_gradients(parameters, case.gradients(1))
    optimizer.step()
    assert parameters[2].equal(gap)
    assert [int(optimizer.state[p]["step"]) for p in parameters[:3]] == [2, 1, 1]


def test_the_late_step_is_corrected_as_a_first_step(kind: Kind, backend: str) -> None:
    early, late, fresh = (Parameter(torch.ones(9, 9)) for _ in range(3))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "bias_correction": True, "backend": backend}
    options |= {"decay_rate": 0.8} if kind is Came else {}
    optimizer = kind([early, late], **options)
    for _ in range(3):
        early.grad = torch.full((9, 9), 0.5)
        optimizer.step()
    late.grad = torch.linspace(0.1, 2, 81).view(9, 9)
    optimizer.step()
    fresh.grad = torch.linspace(0.1, 2, 81).view(9, 9)
    kind([fresh], **options).step()
    assert late.equal(fresh)


@pytest.mark.parametrize("periods", [3, 5], ids=["few-sets", "many-sets"])
def test_gradients_that_come_and_go(periods: int, kind: Kind, backend: str) -> None:
    """Together as each alone, whatever is remembered of one set of parameters while another takes its steps."""

    def make() -> list[dict[str, Any]]:
        torch.manual_seed(4)
        tensors = [torch.randn(shape) for shape in ((5,), (4, 3), (3, 2, 2), (300,), (6, 5), (2, 3, 2, 2))]
        tensors[3:5] = [tensors[3].bfloat16(), arranged(tensors[4], "strided")]
        own: dict[int, dict[str, Any]] = {3: {"stacked": True}, 4: OWN[kind]}
        return [{"params": [Parameter(x)], **own.get(x.dim(), {})} for x in tensors]

    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "backend": backend}
    together, alone = kind(make(), **options), [kind([group], **options) for group in make()]
    for step in range(24):
        torch.manual_seed(step)
        taking_part = set()
        for i, (group, each) in enumerate(zip(together.param_groups, alone, strict=True)):
            (ours,), (theirs,) = group["params"], each.param_groups[0]["params"]
            group["lr"] = each.param_groups[0]["lr"] = 0.1 / (1 + step % 7)
            ours.grad = theirs.grad = None
            if step == 14:
                ours.data = ours.data.clone()  # while it takes no part, or while it does
            if (step + i) % (1 + i % periods) == 0:
                ours.grad = torch.randn(ours.shape).to(ours.dtype)
                theirs.grad = ours.grad.clone()
                taking_part.add(f"param_groups[{i}].params[0]")
            each.step()
        together.step()
        assert {name[: len("param_groups[i].params[0]")] for name in together.telemetry().names} == taking_part
    for group, each in zip(together.param_groups, alone, strict=True):
        assert_same_everything(group["params"], together, each.param_groups[0]["params"], each)


def test_frozen_parameters_stay(kind: Kind, backend: str) -> None:
    net = model()
    net.first.weight.requires_grad_(False)
    before = net.first.weight.detach().clone()
    optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    backward(net)
    optimizer.step()
    assert net.first.weight.equal(before)
    assert net.first.weight not in optimizer.state


REPEATED = ["paper-v5", "everything", "mixed-paper-v5", "large-paper-v5"]
REPEATED += ["came-published", "came-everything", "came-mixed-published", "came-large-published"]


@pytest.mark.parametrize(("backend", "case"), runs(BY_ID[name] for name in REPEATED), indirect=["backend"])
def test_two_runs_are_bitwise_equal(case: Case, backend: str) -> None:
    both = []
    for _ in range(2):
        parameters = case.parameters()
        optimizer = case.optimizer(parameters, backend)
        advance(case, parameters, optimizer, range(3))
        both.append((parameters, optimizer))
    (ours, one), (theirs, two) = both
    assert_same_everything(ours, one, theirs, two)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_kept_or_reallocated(set_to_none: bool, kind: Kind, backend: str) -> None:
    kept, fresh = model(), model()
    one = kind(kept.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    two = kind(fresh.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    for step in range(4):
        one.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == (set_to_none or step == 0) for p in kept.parameters())
        backward(kept, step)
        one.step()
        backward(fresh, step)
        for p in fresh.parameters():
            assert p.grad is not None
            p.grad = p.grad.clone()
        two.step()
        two.zero_grad()
    assert_bitwise(list(kept.parameters()), list(fresh.parameters()))


def test_gradients_written_in_place_between_steps(kind: Kind, backend: str) -> None:
    parameter, other = Parameter(torch.ones(20)), Parameter(torch.ones(20))
    parameter.grad = torch.zeros(20)
    one = kind([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    two = kind([other], lr=0.1, weight_decay=0.1, backend=backend)
    for step in range(3):
        values = torch.linspace(-1, step + 1.0, 20)
        parameter.grad.copy_(values)
        other.grad = values
        one.step()
        two.step()
    assert_bitwise([parameter], [other])


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("numbers", ["real", "complex"])
def test_a_gradient_that_becomes_a_lazy_view_of_the_same_memory(
    numbers: str, max_grad_norm: float | None, kind: Kind, backend: str
) -> None:
    """`z.conj()` and its imaginary part have the address and strides of `z`, but are negated on reading."""
    z = torch.randn(6, dtype=torch.complex64)
    views = (z, z.conj(), z) if numbers == "complex" else (z.imag, z.conj().imag, z.imag)
    parameter = Parameter(torch.ones(6, dtype=views[0].dtype))
    (other,) = copies([parameter])
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": max_grad_norm, "backend": backend}
    one, two = kind([parameter], **options), kind([other], **options)
    for view in views:
        parameter.grad, other.grad = view, view.resolve_conj().resolve_neg().clone()
        one.step()
        two.step()
        assert_same_everything([parameter], one, [other], two)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_grad_scaler_skips_an_overflow(max_grad_norm: float | None, kind: Kind, backend: str) -> None:
    """With torch's GradScaler: an infinite gradient changes nothing, and the next step is the first."""
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
    """Gradients are unscaled inside the step, before the clip, and stay as they are; an overflow changes nothing."""
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
    """Or the next step, for which the scaler hands over nothing, would unscale once more."""
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


@pytest.fixture(params=[torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize(
    ("backend", "case"),
    runs(BY_ID[name] for name in ("clip-skip", "stacked", "came-clip-skip", "came-everything", "came-stacked")),
    indirect=["backend"],
)
def test_torchs_default_dtype_changes_nothing(case: Case, backend: str) -> None:
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    ours = figures(optimizer.telemetry())
    torch.set_default_dtype(torch.float32)
    others = case.parameters()
    other = case.optimizer(others, backend)
    advance(case, others, other, range(2))
    assert_same_everything(parameters, optimizer, others, other)
    for name, column in figures(other.telemetry()).items():
        assert ours[name].dtype is torch.float32
        assert ours[name].equal(column), name


# ---- telemetry --------------------------------------------------------------------------------------------------


def test_telemetry_is_of_its_own_step(kind: Kind, backend: str) -> None:
    case = CASE.of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(1))
    first = figures(optimizer.telemetry())
    kept = {name: column.clone() for name, column in first.items()}
    advance(case, parameters, optimizer, range(1, 2))
    for name, column in figures(optimizer.telemetry()).items():
        assert first[name].equal(kept[name])
        assert not column.equal(kept[name])


def test_telemetry_has_one_entry_for_each_parameter_or_slice(kind: Kind, backend: str) -> None:
    net = nn.Linear(3, 4)
    groups: list[dict[str, Any]] = [
        {"params": [("weight", net.weight)], "stacked": True},
        {"params": [("bias", net.bias)]},
    ]
    optimizer = kind(groups, lr=0.1, backend=backend)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    telemetry = optimizer.telemetry()
    assert len(telemetry.names) == 5
    assert telemetry.names[-1] == "bias"
    for column in figures(telemetry).values():
        assert column.shape == (5,)
        assert column.dtype is torch.float32


# ---- stacked ----------------------------------------------------------------------------------------------------


STACKED: dict[Kind, list[dict[str, Any]]] = {
    Lamb: [{}, {"decay_mode": "decoupled"}, {"trust_ratio_bounds": (0, 0.5)}, {"grad_centralization": True}],
    Came: [{}, {"factor": "last_two"}, {"scale_parameter": True}, {"grad_centralization": True}],
}


@pytest.mark.parametrize(
    ("kind", "group"), [(kind, group) for kind in KINDS for group in STACKED[kind]], indirect=["kind"], ids=str
)
def test_a_stacked_parameter_is_its_slices(group: dict[str, Any], kind: Kind, backend: str) -> None:
    torch.manual_seed(8)
    stacked = Parameter(torch.randn(3, 6, 7))
    slices = [Parameter(row.clone()) for row in stacked.detach()]
    one = kind([{"params": [stacked], "stacked": True, **group}], lr=0.1, weight_decay=0.1, backend=backend)
    two = kind([{"params": slices, **group}], lr=0.1, weight_decay=0.1, backend=backend)
    for _ in range(3):
        stacked.grad = torch.randn(3, 6, 7)
        for part, gradient in zip(slices, stacked.grad, strict=True):
            part.grad = gradient.clone()
        one.step()
        two.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in slices]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("group", [{"stacked": True}, {"grad_centralization": True}], ids=str)
def test_nothing_but_an_empty_parameter(
    group: dict[str, Any], shape: tuple[int, ...], max_grad_norm: float | None, kind: Kind, backend: str
) -> None:
    parameter = Parameter(torch.zeros(shape))
    optimizer = kind([{"params": [parameter], **group}], lr=0.1, max_grad_norm=max_grad_norm, backend=backend)
    for step in range(2):
        parameter.grad = torch.zeros(shape)
        optimizer.step()
        assert optimizer.state[parameter]["step"] == step + 1
    rows = shape[0] if "stacked" in group else 1
    *_, last = figures(optimizer.telemetry()).values()
    assert last.tolist() == [1.0] * rows
