"""What torch.optim.Optimizer promises, and what trainers, schedulers and checkpoints rely on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import Lamb
from cases import CASES, FEW, LRS, ZOO, Case, Leaf, arranged, set_gradients, set_lr

BY_ID = {case.id: case for case in CASES}
CASE = Case("contract", {"max_grad_norm": 5.0, "exclude_from_weight_decay": ["bias"]}, ZOO)


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
    """Fill the gradients with those of a loss on fixed data."""
    generator = torch.Generator().manual_seed(step)
    dtype = next(net.parameters()).dtype
    loss: Tensor = net(torch.randn(10, 6, generator=generator).to(dtype)).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def advance(case: Case, parameters: list[Parameter], optimizer: Lamb, steps: range) -> None:
    for step in steps:
        set_gradients(parameters, case.gradients(step))
        set_lr(optimizer, LRS[step])
        optimizer.step()


def copies(parameters: list[Parameter]) -> list[Parameter]:
    """The same values in the same layout, in other storage."""
    return [copy.deepcopy(p) for p in parameters]


def assert_bitwise(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not a.equal(b)] == []


def assert_same_everything(
    ours: list[Parameter], optimizer: Lamb, theirs: list[Parameter], other: torch.optim.Optimizer
) -> None:
    assert_bitwise(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a in optimizer.state) == (b in other.state)
        if a in optimizer.state:
            assert optimizer.state[a].keys() == other.state[b].keys()
            for key, value in optimizer.state[a].items():
                assert value.dtype == other.state[b][key].dtype, key
                assert value.equal(other.state[b][key]), key


# ---- construction -----------------------------------------------------------------------------------------------


def test_it_is_a_torch_optimizer() -> None:
    assert isinstance(Lamb(model().parameters()), torch.optim.Optimizer)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda net: net.parameters(),
    "list": lambda net: list(net.parameters()),
    "dicts": lambda net: [{"params": [p]} for p in net.parameters()],
    "dict-of-one-tensor": lambda net: [{"params": p} for p in net.parameters()],
    "named": lambda net: net.named_parameters(),
    "named-dicts": lambda net: [{"params": [pair]} for pair in net.named_parameters()],
}


@pytest.mark.parametrize("form", FORMS)
def test_params_in_every_form(form: str, backend: str) -> None:
    results = []
    for make in (FORMS["list"], FORMS[form]):
        net = model()
        optimizer = Lamb(make(net), lr=0.1, weight_decay=0.1, backend=backend)
        backward(net)
        optimizer.step()
        results.append(list(net.parameters()))
    assert_bitwise(*results)


@pytest.mark.parametrize("form", ["list", "dicts"])
@pytest.mark.parametrize("names", ["module", "mapping"])
def test_names_for_bare_parameters(form: str, names: str) -> None:
    named, bare = model(), model()
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5, "exclude_from_weight_decay": ["bias", r"^norm\."]}
    first = Lamb(named.named_parameters(), **options)
    given = bare if names == "module" else dict(bare.named_parameters())
    second = Lamb(FORMS[form](bare), names=given, **options)
    for net, optimizer in ((named, first), (bare, second)):
        backward(net)
        optimizer.step()
    assert_bitwise(list(named.parameters()), list(bare.parameters()))
    without = model()
    plain = Lamb(without.parameters(), lr=0.1, weight_decay=0.5)
    backward(without)
    plain.step()
    assert not without.first.bias.equal(named.first.bias)


def test_a_group_overrides_the_defaults(backend: str) -> None:
    """Two groups with their own options are two optimizers with those options."""
    together, apart = model(), model()
    groups = [
        {"params": together.first.parameters(), "lr": 0.1, "weight_decay": 0.3, "betas": (0.5, 0.6), "eps": 0.1},
        {"params": together.last.parameters(), "adam": True, "decay_mode": "decoupled"},
    ]
    one = Lamb(groups, lr=0.02, weight_decay=0.1, backend=backend)
    two = Lamb(apart.first.parameters(), lr=0.1, weight_decay=0.3, betas=(0.5, 0.6), eps=0.1, backend=backend)
    three = Lamb(apart.last.parameters(), lr=0.02, weight_decay=0.1, adam=True, decay_mode="decoupled", backend=backend)
    for step in range(3):
        backward(together, step)
        backward(apart, step)
        for optimizer in (one, two, three):
            optimizer.step()
            optimizer.zero_grad()
    assert_bitwise(list(together.parameters()), list(apart.parameters()))


def test_late_add_param_group(backend: str) -> None:
    """A parameter that joins late takes its own first step, as in an optimizer of its own."""
    together, apart = model(), model()
    one = Lamb(together.first.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    two = Lamb(apart.first.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    three = Lamb(apart.last.parameters(), lr=0.05, weight_decay=0.1, backend=backend)
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


def test_tensor_lr_is_the_same_as_a_float(backend: str) -> None:
    results = []
    for lr in (torch.tensor(0.125), 0.125):
        parameters = CASE.parameters()
        optimizer = CASE.optimizer(parameters, backend, lr=lr)
        for step, factor in enumerate((1.0, 0.5)):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(0.125 * factor)
                else:
                    group["lr"] = 0.125 * factor
            set_gradients(parameters, CASE.gradients(step))
            optimizer.step()
        results.append(parameters)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-7, atol=1e-8)


def test_tensor_lr_survives_a_checkpoint(backend: str) -> None:
    parameters = CASE.parameters()
    optimizer = CASE.optimizer(parameters, backend, lr=torch.tensor(0.1))
    set_gradients(parameters, CASE.gradients(0))
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.03)
    other = CASE.optimizer(copies(parameters), backend, lr=torch.tensor(0.5))
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == torch.tensor(0.03)


def test_a_scheduler_drives_groups_of_one_tensor_lr_apart() -> None:
    """Torch's schedulers fill a Tensor lr in place; groups that share one would all get the last group's rate."""
    net = model()
    groups = [{"params": net.first.parameters()}, {"params": net.last.parameters()}]
    optimizer = Lamb(groups, lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step])
    backward(net)
    optimizer.step()
    scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])


def test_each_group_has_a_tensor_lr_of_its_own() -> None:
    """The first keeps the caller's, who may write into it."""
    lr, parameters = torch.tensor(0.1), copies([Parameter(torch.ones(2))] * 4)
    optimizer = Lamb([{"params": [p], "lr": lr} for p in parameters[:3]])
    optimizer.add_param_group({"params": [parameters[3]], "lr": lr})
    assert optimizer.param_groups[0]["lr"] is lr
    assert len({group["lr"].data_ptr() for group in optimizer.param_groups}) == 4
    assert [group["lr"] for group in optimizer.param_groups] == [lr] * 4
    assert Lamb(parameters, lr=lr).param_groups[0]["lr"] is lr


@pytest.mark.parametrize("when", ["construction", "later"])
def test_a_tensor_lr_that_requires_grad_is_detached(when: str, backend: str) -> None:
    lr = torch.tensor(0.5, requires_grad=True)
    parameter = Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = Lamb([parameter], lr=lr if when == "construction" else 0.1, backend=backend)
    optimizer.param_groups[0]["lr"] = lr if when == "later" else optimizer.param_groups[0]["lr"]
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.5] * 3)
    assert not optimizer.param_groups[0]["lr"].requires_grad
    copy.deepcopy(optimizer)


def test_a_scheduler_changes_the_step(backend: str) -> None:
    scheduled, by_hand = model(), model()
    one = Lamb(scheduled.parameters(), lr=0.2, weight_decay=0.1, backend=backend)
    two = Lamb(by_hand.parameters(), lr=0.2, weight_decay=0.1, backend=backend)
    scheduler = torch.optim.lr_scheduler.StepLR(one, step_size=1, gamma=0.5)
    for step in range(3):
        set_lr(two, 0.2 * 0.5**step)
        for net, optimizer in ((scheduled, one), (by_hand, two)):
            optimizer.zero_grad()
            backward(net, step)
            optimizer.step()
        scheduler.step()
    assert_bitwise(list(scheduled.parameters()), list(by_hand.parameters()))


CHANGES: list[dict[str, Any]] = [
    {"lr": 0.5},
    {"weight_decay": 0.7},
    {"betas": (0.3, 0.4)},
    {"eps": 0.5},
    {"adapt": False},
    {"adam": True},
    {"bias_correction": "lr"},
    {"trust_ratio_bounds": (0.1, 0.2)},
    {"decay_mode": "decoupled"},
    {"maximize": True},
    {"stacked": True},
    {"grad_centralization": True},
    {"grad_averaging": False},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_value_written_into_a_group_counts_from_the_next_step(change: dict[str, Any], backend: str) -> None:
    """Nothing of an earlier step is remembered: a fresh optimizer built with the value goes the same way."""
    case = Case("written", {}, tuple(leaf for leaf in FEW if len(leaf.shape) >= 2))
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


def test_closure_runs_with_gradients_enabled_and_its_loss_is_returned(backend: str) -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1, backend=backend)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(net)

    with torch.no_grad():
        first, second = (optimizer.step(closure).detach() for _ in range(2))
    assert second.item() < first.item()
    assert optimizer.step() is None


def test_step_hooks() -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    backward(net)
    optimizer.step()
    assert calls == ["pre", "post"]


def test_a_step_without_any_gradient_is_a_no_op(backend: str) -> None:
    parameters = CASE.parameters()
    before = copies(parameters)
    optimizer = CASE.optimizer(parameters, backend)
    assert optimizer.step() is None
    assert_bitwise(parameters, before)
    assert not optimizer.state


def test_only_parameters_with_gradients_get_state_and_count_steps(backend: str) -> None:
    leaves = (Leaf("always", (5,)), Leaf("late", (5,), grad="late"), Leaf("gap", (5,), grad="gap"), ZOO[10])
    case = Case("counts", {}, leaves)
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


def test_the_late_step_is_corrected_as_a_first_step(backend: str) -> None:
    late = Parameter(torch.ones(9))
    early = Parameter(torch.ones(9))
    fresh = Parameter(torch.ones(9))
    optimizer = Lamb([early, late], lr=0.1, weight_decay=0.1, backend=backend)
    for _ in range(3):
        early.grad = torch.full((9,), 0.5)
        optimizer.step()
    late.grad = torch.linspace(0.1, 2, 9)
    optimizer.step()
    fresh.grad = torch.linspace(0.1, 2, 9)
    Lamb([fresh], lr=0.1, weight_decay=0.1, backend=backend).step()
    assert late.equal(fresh)


@pytest.mark.parametrize("periods", [3, 5], ids=["few-sets", "many-sets"])
def test_gradients_that_come_and_go(periods: int, backend: str) -> None:
    """Together as each alone, whatever is remembered of one set of parameters while another takes its steps."""

    def make() -> list[dict[str, Any]]:
        torch.manual_seed(4)
        tensors = [torch.randn(shape) for shape in ((5,), (4, 3), (3, 2, 2), (300,), (6, 5), (2, 3, 2, 2))]
        tensors[3:5] = [tensors[3].bfloat16(), arranged(tensors[4], "strided")]
        return [{"params": [Parameter(x)], "stacked": x.dim() == 3, "adam": x.dim() == 4} for x in tensors]

    options: dict[str, Any] = {"weight_decay": 0.1, "backend": backend}
    together, alone = Lamb(make(), **options), [Lamb([group], **options) for group in make()]
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


def test_frozen_parameters_stay(backend: str) -> None:
    net = model()
    net.first.weight.requires_grad_(False)
    before = net.first.weight.detach().clone()
    optimizer = Lamb(net.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    backward(net)
    optimizer.step()
    assert net.first.weight.equal(before)
    assert net.first.weight not in optimizer.state


@pytest.mark.parametrize("case_id", ["paper-v5", "everything", "mixed-paper-v5", "large-paper-v5"])
def test_two_runs_are_bitwise_equal(case_id: str, backend: str) -> None:
    case = BY_ID[case_id]
    runs = []
    for _ in range(2):
        parameters = case.parameters()
        optimizer = case.optimizer(parameters, backend)
        advance(case, parameters, optimizer, range(3))
        runs.append((parameters, optimizer))
    (ours, one), (theirs, two) = runs
    assert_same_everything(ours, one, theirs, two)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_kept_or_reallocated(set_to_none: bool, backend: str) -> None:
    kept, fresh = model(), model()
    one = Lamb(kept.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    two = Lamb(fresh.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
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


def test_gradients_written_in_place_between_steps(backend: str) -> None:
    parameter, other = Parameter(torch.ones(20)), Parameter(torch.ones(20))
    parameter.grad = torch.zeros(20)
    one = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    two = Lamb([other], lr=0.1, weight_decay=0.1, backend=backend)
    for step in range(3):
        values = torch.linspace(-1, step + 1.0, 20)
        parameter.grad.copy_(values)
        other.grad = values
        one.step()
        two.step()
    assert_bitwise([parameter], [other])


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_a_gradient_that_becomes_a_lazy_view_of_the_same_memory(
    kind: str, max_grad_norm: float | None, backend: str
) -> None:
    """`z.conj()` and its imaginary part have the address and strides of `z`, but are negated on reading."""
    z = torch.randn(6, dtype=torch.complex64)
    views = (z, z.conj(), z) if kind == "complex" else (z.imag, z.conj().imag, z.imag)
    parameter = Parameter(torch.ones(6, dtype=views[0].dtype))
    (other,) = copies([parameter])
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": max_grad_norm, "backend": backend}
    one, two = Lamb([parameter], **options), Lamb([other], **options)
    for view in views:
        parameter.grad, other.grad = view, view.resolve_conj().resolve_neg().clone()
        one.step()
        two.step()
        assert_same_everything([parameter], one, [other], two)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_grad_scaler_skips_an_overflow(max_grad_norm: float | None, backend: str) -> None:
    """With torch's GradScaler: an infinite gradient changes nothing, and the next step is the first."""
    parameters, others = CASE.parameters(), CASE.parameters()
    one = CASE.optimizer(parameters, backend, max_grad_norm=max_grad_norm)
    two = CASE.optimizer(others, backend, max_grad_norm=max_grad_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step, bad in ((0, True), (1, False)):
        gradients = [None if g is None else g * scaler.get_scale() for g in CASE.gradients(step)]
        scaler.scale(torch.ones(()))
        if bad:
            assert gradients[0] is not None
            gradients[0][0, 0] = torch.inf
        set_gradients(parameters, gradients)
        scaler.step(one)
        scaler.update()
        if bad:
            assert_bitwise(parameters, others)
    set_gradients(others, CASE.gradients(1))
    two.step()
    assert_same_everything(parameters, one, others, two)
    assert not hasattr(one, "grad_scale")
    assert not hasattr(one, "found_inf")


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_scale_that_a_scaler_hands_over(max_grad_norm: float | None, backend: str) -> None:
    """Gradients are unscaled inside the step, before the clip, and stay as they are; an overflow changes nothing."""
    case = Case("scaled", {}, FEW)
    parameters, others = case.parameters(), case.parameters()
    one = case.optimizer(parameters, backend, max_grad_norm=max_grad_norm)
    two = case.optimizer(others, backend, max_grad_norm=max_grad_norm)
    one._step_supports_amp_scaling = True  # type: ignore[attr-defined]
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
def test_a_refused_step_forgets_the_scale(closure: Callable[[], None] | None, backend: str) -> None:
    """Or the next step, for which the scaler hands over nothing, would unscale once more."""
    parameters = CASE.parameters()
    optimizer = CASE.optimizer(parameters, backend)
    set_gradients(parameters, CASE.gradients(0))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)  # type: ignore[attr-defined]
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
@pytest.mark.parametrize("case_id", ["clip-skip", "stacked"])
def test_torchs_default_dtype_changes_nothing(case_id: str, backend: str) -> None:
    case = BY_ID[case_id]
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    ours = optimizer.telemetry()
    torch.set_default_dtype(torch.float32)
    others = case.parameters()
    other = case.optimizer(others, backend)
    advance(case, others, other, range(2))
    assert_same_everything(parameters, optimizer, others, other)
    theirs = other.telemetry()
    for column in ("weight_norm", "update_norm", "trust_ratio"):
        assert getattr(ours, column).dtype is torch.float32
        assert getattr(ours, column).equal(getattr(theirs, column)), column


# ---- telemetry --------------------------------------------------------------------------------------------------


def test_telemetry_is_of_its_own_step(backend: str) -> None:
    parameters = CASE.parameters()
    optimizer = CASE.optimizer(parameters, backend)
    advance(CASE, parameters, optimizer, range(1))
    first = optimizer.telemetry()
    kept = first.update_norm.clone()
    advance(CASE, parameters, optimizer, range(1, 2))
    assert first.update_norm.equal(kept)
    assert not optimizer.telemetry().update_norm.equal(kept)


def test_telemetry_has_one_entry_for_each_parameter_or_slice(backend: str) -> None:
    net = nn.Linear(3, 4)
    groups: list[dict[str, Any]] = [
        {"params": [("weight", net.weight)], "stacked": True},
        {"params": [("bias", net.bias)]},
    ]
    optimizer = Lamb(groups, backend=backend)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    telemetry = optimizer.telemetry()
    assert len(telemetry.names) == 5
    assert telemetry.names[-1] == "bias"
    for column in (telemetry.weight_norm, telemetry.update_norm, telemetry.trust_ratio):
        assert column.shape == (5,)
        assert column.dtype is torch.float32


# ---- stacked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "group", [{}, {"decay_mode": "decoupled"}, {"trust_ratio_bounds": (0, 0.5)}, {"grad_centralization": True}], ids=str
)
def test_a_stacked_parameter_is_its_slices(group: dict[str, Any], backend: str) -> None:
    torch.manual_seed(8)
    stacked = Parameter(torch.randn(3, 5, 4))
    slices = [Parameter(row.clone()) for row in stacked.detach()]
    one = Lamb([{"params": [stacked], "stacked": True, **group}], lr=0.1, weight_decay=0.1, backend=backend)
    two = Lamb([{"params": slices, **group}], lr=0.1, weight_decay=0.1, backend=backend)
    for _ in range(3):
        stacked.grad = torch.randn(3, 5, 4)
        for part, gradient in zip(slices, stacked.grad, strict=True):
            part.grad = gradient.clone()
        one.step()
        two.step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in slices]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("group", [{"stacked": True}, {"grad_centralization": True}], ids=str)
def test_nothing_but_an_empty_parameter(
    group: dict[str, Any], shape: tuple[int, ...], max_grad_norm: float | None, backend: str
) -> None:
    parameter = Parameter(torch.zeros(shape))
    optimizer = Lamb([{"params": [parameter], **group}], max_grad_norm=max_grad_norm, backend=backend)
    for step in range(2):
        parameter.grad = torch.zeros(shape)
        optimizer.step()
        assert optimizer.state[parameter]["step"] == step + 1
    rows = shape[0] if "stacked" in group else 1
    assert optimizer.telemetry().trust_ratio.tolist() == [1.0] * rows


# ---- storage that moves -----------------------------------------------------------------------------------------


def continues_from(optimizer: Lamb, parameter: Parameter, backend: str) -> tuple[Parameter, Lamb]:
    """A plain contiguous copy of the parameter, and an optimizer for it that has the same state but no history."""
    other = Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
    fresh = Lamb([other], lr=0.1, weight_decay=0.1, backend=backend)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, fresh


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "other-storage": lambda data: data.clone(),
    "other-values": lambda data: data * 2,
    "transposed-view-at-the-same-address": lambda data: data.t(),
    "transposed-copy": lambda data: arranged(data, "transposed"),
    "strided-copy": lambda data: arranged(data, "strided"),
    "misaligned-copy": lambda data: arranged(data, "misaligned"),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_parameter_is_noticed(move: str, backend: str) -> None:
    torch.manual_seed(9)
    parameter = Parameter(torch.randn(9, 9))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    for _ in range(2):
        parameter.grad = torch.randn(9, 9)
        optimizer.step()
    parameter.data = MOVES[move](parameter.data)
    other, fresh = continues_from(optimizer, parameter, backend)
    for _ in range(2):
        gradient = torch.randn(9, 9)
        parameter.grad, other.grad = gradient, gradient.clone()
        optimizer.step()
        fresh.step()
    torch.testing.assert_close(parameter.detach(), other.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["moved", "loaded"])
@pytest.mark.parametrize("shape", [(520, 512, 1, 1), (520, 1, 23, 23), (64, 48, 10, 10)], ids=str)
def test_another_memory_format(shape: tuple[int, ...], way: str, backend: str) -> None:
    """Strides of dims of size 1 say nothing, yet they differ. Tensors as large as these are worked on in pieces."""
    results = []
    for name in (backend, "reference"):
        torch.manual_seed(6)
        parameter = Parameter(torch.randn(shape))
        optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=name)
        for step in range(3):
            if step == 1 and name == backend:
                state = copy.deepcopy(optimizer.state_dict())
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
                if way == "loaded":
                    optimizer = Lamb([parameter], backend=name)
                    optimizer.load_state_dict(state)
            parameter.grad = torch.randn(shape)
            optimizer.step()
        results.append((parameter.detach(), dict(optimizer.state[parameter])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_a_parameter_that_moves_to_another_group(backend: str) -> None:
    parameters = [Parameter(torch.ones(3)) for _ in range(3)]
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "lr": 0.0}]
    optimizer = Lamb(groups, adam=True, backend=backend)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
    optimizer.step()
    assert [float(p.detach()[0]) for p in parameters] == pytest.approx([0.0, 0.5, 1.0], abs=1e-5)


EXTRAS: dict[str, Callable[[dict[str, Any]], None]] = {
    "leftover": lambda state: state.update(max_exp_avg_sq=torch.full_like(state["exp_avg_sq"], 9.0)),
    "another-tensor": lambda state: state.update(ema=torch.zeros(3)),
    "no-tensor": lambda state: state.update(note=None),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_else_lies_in_the_state_changes_nothing(extra: str, backend: str) -> None:
    """Neither where all is kept in the scratch, nor beyond it, nor where a small norm is taken again."""
    runs = []
    for added in (False, True):
        torch.manual_seed(7)
        parameters = [Parameter(torch.randn(2_200_000)), Parameter(torch.full((8,), 1e-20)), Parameter(torch.ones(8))]
        optimizer = Lamb(parameters, lr=0.1, weight_decay=0.1, backend=backend)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
                if step and added and parameter is not parameters[2]:
                    EXTRAS[extra](optimizer.state[parameter])
            optimizer.step()
        runs.append((parameters, optimizer))
    assert_bitwise(runs[0][0], runs[1][0])
    if extra != "leftover":
        assert len(runs[1][1].state[runs[1][0][0]]) == len(runs[0][1].state[runs[0][0][0]]) + 1


@pytest.mark.parametrize(
    ("before", "after"), [("amsgrad", "adam"), ("amsgrad", "adagrad"), ("adam", "amsgrad"), ("adagrad", "adam")]
)
def test_another_second_moment_from_now_on(before: str, after: str, backend: str) -> None:
    """The state of before is gone on with, as far as it is of use; some parameters have none yet."""
    case = Case("switched", {}, (*ZOO, Leaf("later", (6, 4), grad="late")))
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend, second_moment=before)
    advance(case, parameters, optimizer, range(1))
    others = copies(parameters)
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each.pop("max_exp_avg_sq", None)
        if after == "amsgrad":
            each["max_exp_avg_sq"] = each["exp_avg_sq"].clone()
    state["param_groups"][0]["second_moment"] = after
    other = case.optimizer(others, backend, second_moment=after)
    other.load_state_dict(state)
    optimizer.param_groups[0]["second_moment"] = after
    advance(case, parameters, optimizer, range(1, 3))
    advance(case, others, other, range(1, 3))
    assert_bitwise(parameters, others)


@pytest.mark.parametrize("shape", ["shorter-view", "transposed-view"])
def test_a_parameter_that_changed_shape_before_its_first_step(shape: str, backend: str) -> None:
    parameter = Parameter(torch.randn(6, 4))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    whole = parameter.detach()
    before = whole.clone()
    parameter.data = whole[:2] if shape == "shorter-view" else whole.t()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    if shape == "shorter-view":
        assert whole[2:].equal(before[2:]), "wrote beyond the view"
    assert not whole[:2].equal(before[:2])


@pytest.mark.parametrize("shape", ["shorter-view", "transposed-view"])
def test_a_parameter_that_changed_shape_after_a_step_is_refused(shape: str, backend: str) -> None:
    parameter = Parameter(torch.randn(6, 4))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    whole = parameter.detach()
    before = whole.clone()
    parameter.data = whole[:2] if shape == "shorter-view" else whole.t()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        optimizer.step()
    assert whole.equal(before)
    assert optimizer.state[parameter]["step"] == 1


def test_a_module_cast_to_bfloat16_keeps_its_float32_moments(backend: str) -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    backward(net)
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in net.parameters()]
    net.to(torch.bfloat16)
    other = copy.deepcopy(net)
    fresh = Lamb(other.parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, moment in zip(net.parameters(), moments, strict=True):
        assert optimizer.state[p]["exp_avg"].equal(moment)
    for network, each in ((net, optimizer), (other, fresh)):
        each.zero_grad()
        backward(network, 1)
        each.step()
    assert_same_everything(list(net.parameters()), optimizer, list(other.parameters()), fresh)
    assert all(optimizer.state[p]["exp_avg"].dtype is torch.float32 for p in net.parameters())


@pytest.mark.parametrize("name", ["auto", "foreach", "reference"])
def test_a_module_cast_to_float64(name: str) -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1, weight_decay=0.1, backend=name)
    backward(net)
    optimizer.step()
    net.double()
    single = copy.deepcopy(net).float()
    other = Lamb(single.parameters(), lr=0.1, weight_decay=0.1, backend="reference")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, each in ((net, optimizer), (single, other)):
        each.zero_grad()
        backward(network, 1)
        each.step()
    for a, b in zip(net.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-4, atol=1e-6)
        assert optimizer.state[a]["step"] == 2


def test_state_replaced_by_the_caller_is_noticed(backend: str) -> None:
    parameter = Parameter(torch.ones(50))
    optimizer = Lamb([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    parameter.grad = torch.linspace(-1, 1, 50)
    optimizer.step()
    optimizer.state[parameter]["exp_avg"] = torch.linspace(2, 3, 50)
    optimizer.state[parameter]["exp_avg_sq"] = torch.linspace(4, 5, 50)
    other, fresh = continues_from(optimizer, parameter, backend)
    other.grad = torch.linspace(-1, 1, 50)
    optimizer.step()
    fresh.step()
    assert_same_everything([parameter], optimizer, [other], fresh)


def test_a_parameter_taken_out_of_its_group_stays(backend: str) -> None:
    net = model()
    optimizer = Lamb(net.parameters(), lr=0.1, backend=backend)
    backward(net)
    optimizer.step()
    taken = optimizer.param_groups[0]["params"].pop(0)
    before = taken.detach().clone()
    optimizer.step()
    assert taken.equal(before)
    optimizer.param_groups[0]["params"] = [taken]
    rest = net.last.weight.detach().clone()
    optimizer.step()
    assert not taken.equal(before)
    assert net.last.weight.equal(rest)


# ---- checkpoints ------------------------------------------------------------------------------------------------


def saved_and_loaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


KEPT = [case for case in CASES if case.runs_on("cpu") and "large" not in case.id]


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.id)
def test_weights_only_checkpoint_continues_bitwise(case: Case) -> None:
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, "auto")
    advance(case, parameters, optimizer, range(2))
    others = copies(parameters)
    other = case.optimizer(others, "auto")
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert_same_everything(parameters, optimizer, others, other)
    advance(case, parameters, optimizer, range(2, 4))
    advance(case, others, other, range(2, 4))
    assert_same_everything(parameters, optimizer, others, other)


CHECKPOINTED = [
    *("paper-v5", "everything", "clip-skip", "both-by-name", "amsgrad", "mixed-paper-v5", "stacked"),
    "float32-states-bfloat16-paper-v5",
    "bfloat16-paper-v5",
    "complex64-paper-v5",
]


@pytest.mark.parametrize("case_id", CHECKPOINTED)
def test_load_state_dict_continues_bitwise(case_id: str, backend: str) -> None:
    case = BY_ID[case_id]
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    others = copies(parameters)
    other = case.optimizer(others, backend, lr=7.0, weight_decay=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["weight_decay"] == optimizer.param_groups[0]["weight_decay"]
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    advance(case, parameters, optimizer, range(2, 4))
    advance(case, others, other, range(2, 4))
    assert_same_everything(parameters, optimizer, others, other)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("case_id", CHECKPOINTED)
def test_a_copy_continues_bitwise(case_id: str, way: str, backend: str) -> None:
    """Everything that was given at construction must be in the copy, the exclusions and the clip too."""
    case = BY_ID[case_id]
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    set_gradients(parameters, [None] * len(parameters))
    both = (parameters, optimizer)
    others, other = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert others[0] is not parameters[0]
    advance(case, parameters, optimizer, range(2, 4))
    advance(case, others, other, range(2, 4))
    assert_same_everything(parameters, optimizer, others, other)


def test_a_copy_before_the_first_step(backend: str) -> None:
    parameters = CASE.parameters()
    others, other = copy.deepcopy((parameters, CASE.optimizer(parameters, backend)))
    optimizer = CASE.optimizer(parameters, backend)
    advance(CASE, parameters, optimizer, range(2))
    advance(CASE, others, other, range(2))
    assert_same_everything(parameters, optimizer, others, other)
    other.add_param_group({"params": [("added", Parameter(torch.ones(2)))]})
    assert other.param_groups[1]["weight_decay"] == 0.1


def test_loaded_moments_keep_their_dtype_whatever_the_parameters() -> None:
    """torch's own load_state_dict would cast the float32 moments of a bfloat16 parameter to bfloat16."""
    case = Case("bf16", {}, FEW, dtype=torch.bfloat16)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, "auto")
    advance(case, parameters, optimizer, range(2))
    other = case.optimizer(copies(parameters), "auto")
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    states = list(other.state.values())
    assert states
    assert {state[key].dtype for state in states for key in ("step", "exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_state_dtype(dtype: torch.dtype, backend: str) -> None:
    case = Case("declared", {"state_dtype": torch.bfloat16}, FEW, dtype=dtype)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    other = case.optimizer(copies(parameters), backend)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for each in (optimizer, other):
        for state in each.state.values():
            assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
            assert state["step"].dtype is torch.float32


def test_default_state_dtypes() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        parameter = Parameter(torch.ones(3, dtype=dtype))
        optimizer = Lamb([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        expected = torch.float64 if dtype is torch.float64 else torch.float32
        assert optimizer.state[parameter]["exp_avg"].dtype is expected
        assert optimizer.state[parameter]["exp_avg_sq"].dtype is expected


def test_a_checkpoint_of_an_older_version_gets_the_defaults_of_new_options() -> None:
    parameters = CASE.parameters()
    optimizer = CASE.optimizer(parameters, "auto")
    advance(CASE, parameters, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][0]["trust_ratio_bounds"]
    other = CASE.optimizer(copies(parameters), "auto")
    other.load_state_dict(state)
    assert other.param_groups[0]["trust_ratio_bounds"] is None


def after_adamw(**options: Any) -> tuple[list[Parameter], torch.optim.AdamW]:
    """What torch's AdamW has made of some parameters, the last gradients much smaller than the first."""
    torch.manual_seed(13)
    parameters = [Parameter(torch.randn(7, 3)), Parameter(torch.full((9,), 1e-20))]
    adamw = torch.optim.AdamW([{"params": [p]} for p in parameters], lr=0.01, **options)
    for scale in (1.0, 1e-3):
        for parameter in parameters:
            parameter.grad = scale * torch.randn_like(parameter)
        adamw.step()
    return parameters, adamw


def test_a_checkpoint_of_torchs_adamw_changes_what_it_names_and_nothing_else(backend: str) -> None:
    parameters, adamw = after_adamw(weight_decay=0.2, maximize=True)
    own = {"adapt": False, "decay_mode": "l2", "bias_correction": "lr"}
    groups: list[dict[str, Any]] = [{"params": [parameters[0]], **own}, {"params": [parameters[1]]}]
    optimizer = Lamb(groups, lr=7.0, trust_ratio_bounds=(0.0, 2.0), backend=backend)
    keys = optimizer.param_groups[0].keys()
    optimizer.load_state_dict(saved_and_loaded(adamw.state_dict()))
    first, second = optimizer.param_groups
    assert first.keys() == second.keys() == keys
    assert {key: first[key] for key in own} == own
    assert (second["adapt"], second["decay_mode"], second["bias_correction"]) == (True, "ratio", True)
    for group in (first, second):
        assert (group["lr"], group["weight_decay"], group["maximize"]) == (0.01, 0.2, True)
        assert group["trust_ratio_bounds"] == (0.0, 2.0)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [3, 3]


def test_a_checkpoint_of_torchs_amsgrad(backend: str) -> None:
    """Its maximum is gone on with by amsgrad alone, which without one starts from the second moment."""
    runs = []
    for second_moment, keep in (("adam", True), ("adam", False), ("amsgrad", True), ("amsgrad", False)):
        parameters, adamw = after_adamw(amsgrad=True)
        state = copy.deepcopy(adamw.state_dict())
        for group in state["param_groups"]:
            group["amsgrad"] = False
        for each in state["state"].values():
            assert not each["max_exp_avg_sq"].equal(each["exp_avg_sq"])
            if not keep:
                del each["max_exp_avg_sq"]
        groups = [{"params": [p]} for p in parameters]
        optimizer = Lamb(groups, weight_decay=0.1, second_moment=second_moment, backend=backend)  # type: ignore[arg-type]
        optimizer.load_state_dict(state)
        if second_moment == "amsgrad" and not keep:
            assert all(each["max_exp_avg_sq"].equal(each["exp_avg_sq"]) for each in optimizer.state.values())
        optimizer.step()
        runs.append(parameters)
    with_maximum, without, maximum, started_anew = runs
    assert_bitwise(with_maximum, without)
    assert not maximum[0].equal(started_anew[0])
    assert not maximum[0].equal(without[0])


def test_a_checkpoint_that_counts_steps_per_group(backend: str) -> None:
    """As those of apex and timm do."""
    case = Case("grouped", {}, FEW)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["step"] = 3
    for each in state["state"].values():
        del each["step"]
    others = copies(parameters)
    other = case.optimizer(others, backend)
    other.load_state_dict(state)
    assert "step" not in other.param_groups[0]
    advance(case, parameters, optimizer, range(3, 4))
    advance(case, others, other, range(3, 4))
    assert_same_everything(parameters, optimizer, others, other)


SCHEDULED: dict[str, float] = {
    "initial_lr": 0.1,
    "max_lr": 0.3,
    "min_lr": 0.01,
    "swa_lr": 0.05,
    "max_momentum": 0.95,
    "base_momentum": 0.85,
}


def test_the_keys_of_schedulers_stay() -> None:
    """They lie in groups, and so in checkpoints, and in groups that another optimizer is built from."""
    net = model()
    groups: list[dict[str, Any]] = [{"params": net.first.parameters(), **SCHEDULED}, {"params": net.last.parameters()}]
    optimizer = Lamb(groups)
    other = Lamb(optimizer.param_groups)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for each in (optimizer, other):
        assert {key: each.param_groups[0][key] for key in SCHEDULED} == SCHEDULED
        assert not each.param_groups[1].keys() & SCHEDULED.keys()


def test_a_one_cycle_schedule_is_resumed() -> None:
    """What it needs for that lies in the groups."""

    def go(net: Net, steps: range, state: dict[str, Any] | None = None) -> dict[str, Any]:
        optimizer = Lamb(net.parameters(), weight_decay=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, last_epoch=steps.start - 1)
        for step in steps:
            net.zero_grad()
            backward(net, step)
            optimizer.step()
            scheduler.step()
        return optimizer.state_dict()

    whole, resumed = model(), model()
    go(whole, range(9))
    go(resumed, range(4, 9), saved_and_loaded(go(resumed, range(4))))
    assert_bitwise(list(whole.parameters()), list(resumed.parameters()))


def test_load_state_dict_hooks_still_run() -> None:
    parameters = CASE.parameters()
    optimizer = CASE.optimizer(parameters, "auto")
    advance(CASE, parameters, optimizer, range(1))
    calls: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("post"))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert calls == ["pre", "post"] * 2


def test_distributed_checkpoint_of_a_fresh_optimizer_moves_nothing(backend: str) -> None:
    """DCP makes the state by a step at lr = 0 with zero gradients."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net, untouched = model(), model()
    optimizer = Lamb(net.named_parameters(), lr=0.1, weight_decay=0.1, max_grad_norm=1.0, backend=backend)
    state = get_optimizer_state_dict(net, optimizer)
    assert set(state["state"]) == {name for name, _ in net.named_parameters()}
    assert_bitwise(list(net.parameters()), list(untouched.parameters()))
    assert all(p.grad is None for p in net.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1
    for state_of_one in optimizer.state.values():
        assert not any(state_of_one[key].any() for key in ("exp_avg", "exp_avg_sq"))


def test_distributed_checkpoint_of_a_fresh_optimizer_consumes_nothing(backend: str) -> None:
    """The dummy step is not counted: the first real one is corrected as the first."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net, other = model(), model()
    optimizer = Lamb(net.named_parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    twin = Lamb(other.named_parameters(), lr=0.1, weight_decay=0.1, backend=backend)
    get_optimizer_state_dict(net, optimizer)
    for network, each in ((net, optimizer), (other, twin)):
        backward(network)
        each.step()
    assert_same_everything(list(net.parameters()), optimizer, list(other.parameters()), twin)


def test_a_real_step_at_lr_0_counts(backend: str) -> None:
    """As a warm-up from 0 takes it: the moments and the count move, the parameters do not."""
    net, untouched = model(), model()
    optimizer = Lamb(net.parameters(), lr=0.0, weight_decay=0.1, backend=backend)
    backward(net)
    optimizer.step()
    assert_bitwise(list(net.parameters()), list(untouched.parameters()))
    for state in optimizer.state.values():
        assert state["step"] == 1
        assert state["exp_avg"].any()


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoint_continues_bitwise(flatten: bool, backend: str) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    options: dict[str, Any] = {"weight_decay": 0.1, "max_grad_norm": 1.0, "trust_ratio_bounds": (0.0, 10.0)}
    net = model()
    optimizer = Lamb(net.named_parameters(), lr=0.1, backend=backend, **options)
    for step in range(3):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
    state = saved_and_loaded(get_optimizer_state_dict(net, optimizer, options=how))
    other = copy.deepcopy(net)
    other.zero_grad()
    fresh = Lamb(other.named_parameters(), lr=0.5, backend=backend, **options)
    before = copies(list(other.parameters()))
    set_optimizer_state_dict(other, fresh, state, options=how)
    assert_bitwise(list(other.parameters()), before)
    for network, each in ((net, optimizer), (other, fresh)):
        each.zero_grad()
        backward(network, 3)
        each.step()
    assert_same_everything(list(net.parameters()), optimizer, list(other.parameters()), fresh)
