"""The forms of a learning rate or a weight decay, the step that a schedule gets, and its part of a checkpoint."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb
from bighorn import _kernels as kernels
from bighorn.schedules import Cosine, RelativeStep, Values, WarmUp
from tests.support.cases import Kind
from tests.support.error_checks import refused
from tests.support.optimizer_runs import copies, saved_and_loaded
from tests.support.tables import for_every

LRS = (0.1, 0.05, 0.2, 0.08)


def falling(step: int) -> float:
    return 0.1 / (step + 1)


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 5), (7,))]


def step(params: list[Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def trained(steps: int, make: Callable[[list[Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
    params = weights()
    optimizer = make(params)
    for seed in range(steps):
        step(params, optimizer, seed)
    return [param.detach() for param in params]


FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(LRS),
    "tuple": lambda: LRS,
    "generator": lambda: (lr for lr in LRS),
    "tensor": lambda: torch.tensor(LRS, dtype=torch.float64),
    "dict-values": lambda: dict(enumerate(LRS)).values(),
    "function": lambda: LRS.__getitem__,
    "tensor-valued-function": lambda: lambda s: torch.tensor(LRS[s], dtype=torch.float64),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_every_form_is_the_training_with_values_written_by_hand(option: str, form: str, kind: Kind) -> None:
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    ours = trained(4, lambda params: kind(params, **{**options, option: FORMS[form]()}))
    params = weights()
    optimizer = kind(params, **options)
    for seed, value in enumerate(LRS):
        optimizer.param_groups[0][option] = value
        step(params, optimizer, seed)
    assert all(map(torch.equal, ours, params))


def test_groups_have_forms_of_their_own_and_late_ones_join_the_count() -> None:
    a, b, c = weights()[0], weights()[1], Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [a], "lr": 0.5}, {"params": [b], "weight_decay": [0.3, 0.2, 0.1]}]
    optimizer = Lamb(groups, lr=falling)
    for seed in range(2):
        step([a, b], optimizer, seed)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1 / 2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.2]
    optimizer.add_param_group({"params": [c]})
    step([a, b, c], optimizer, 2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1 / 3, 0.1 / 3]
    assert optimizer.defaults["lr"] == 0.1


def test_a_schedule_can_be_written_into_a_group() -> None:
    params = weights()
    optimizer = Lamb(params, lr=0.5)
    step(params, optimizer, 0)
    optimizer.param_groups[0]["lr"] = falling
    assert "cpu" in optimizer.explain() or "foreach" in optimizer.explain()
    for seed in (1, 2):
        step(params, optimizer, seed)
        assert optimizer.param_groups[0]["lr"] == 0.1 / (seed + 1)


def test_a_step_at_a_rate_of_0_by_hand_does_not_count() -> None:
    """torch.distributed.checkpoint makes it. The group's count is then below its parameters' one, also when saved."""
    params = weights()
    optimizer, other = (Lamb(each, lr=falling, weight_decay=[0.3, 0.2, 0.1]) for each in (params, weights()))
    step(params, optimizer, 0)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    step(params, optimizer, 1)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.0, 0.3)
    optimizer.param_groups[0]["lr"] = rate
    other.load_state_dict(optimizer.state_dict())
    for each in (optimizer, other):
        step(each.param_groups[0]["params"], each, 2)
        assert (each.param_groups[0]["lr"], each.param_groups[0]["weight_decay"]) == (0.1 / 2, 0.2)
        assert {float(state["step"]) for state in each.state.values()} == {3}


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_a_value_written_by_hand_beside_a_schedule_is_refused(option: str, kind: Kind) -> None:
    """A value used to hold for every second step at most, and stopped the other option's schedule."""
    params = weights()
    optimizer = kind(params, lr=falling, weight_decay=falling)
    step(params, optimizer, 0)
    before, group = [param.detach().clone() for param in params], optimizer.param_groups[0]
    scheduled, group[option] = group[option], 0.05
    with pytest.raises(RuntimeError, match=rf"param_groups\[0\] has a schedule for {option}.*0\.05"):
        step(params, optimizer, 1)
    assert all(map(torch.equal, params, before))
    group[option] = scheduled
    step(params, optimizer, 1)
    assert group["lr"] == group["weight_decay"] == falling(1)
    group[option] = lambda _: 0.05
    step(params, optimizer, 2)
    assert group[option] == 0.05


def test_torchs_plateau_scheduler_beside_a_schedule_is_refused() -> None:
    """Unlike torch's other schedulers, it leaves no `initial_lr` in the groups."""
    params = weights()
    optimizer = Lamb(params, lr=falling)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    step(params, optimizer, 0)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\] has a schedule for lr"):
        step(params, optimizer, 1)


def test_calls_without_gradients_or_that_a_scaler_skips_count() -> None:
    params = weights()
    optimizer = Lamb(params, lr=falling)
    optimizer.step()
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    step(params, optimizer, 0)
    del optimizer.found_inf  # type: ignore[attr-defined]
    assert all(map(torch.equal, params, weights()))
    step(params, optimizer, 1)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 3
    assert float(optimizer.state[params[0]]["step"]) == 1


# ---- checkpoints and copies ---------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[list[Parameter]], Lamb | Came]] = {
    "cosine": lambda params: Lamb(params, lr=Cosine(0.1, 6).after_warmup(2), weight_decay=[0.1 * i for i in range(9)]),
    "from-zero": lambda params: Lamb(params, lr=WarmUp(0.1, 4), weight_decay=0.1),
    "list": lambda params: Lamb(params, lr=[0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.1], weight_decay=0.1),
    "relative_step": lambda params: Came(params, lr=RelativeStep(), weight_decay=0.1),
    "warmup_init": lambda params: Came(params, lr=RelativeStep(warmup_init=True)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_copy_goes_on_where_the_schedule_was(name: str) -> None:
    whole = trained(6, SCHEDULES[name])
    params = weights()
    optimizer = SCHEDULES[name](params)
    for seed in range(3):
        step(params, optimizer, seed)
    loaded = SCHEDULES[name](copies(params))
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for each in (loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        params = each.param_groups[0]["params"]
        for seed in range(3, 6):
            step(params, each, seed)
        assert all(map(torch.equal, params, whole))


# ---- torch's own schedulers ---------------------------------------------------------------------------------------


def test_a_torch_scheduler_beside_a_schedule_is_refused() -> None:
    params = weights()
    optimizer = Lamb(params, lr=falling)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(RuntimeError, match=r"param_groups\[0\].*initial_lr"):
        step(params, optimizer, 0)
    assert not optimizer.state


# ---- refusals -----------------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("nan", [0.1, math.nan], ValueError, "lr.*nan"),
    ("endless", itertools.repeat(0.1), ValueError, "lr.*end"),
    ("string", "0.1", TypeError, "lr.*number.*schedule"),
    ("set", {0.1}, TypeError, "lr.*number"),
    ("none", None, TypeError, "lr.*number"),
    ("class", WarmUp, TypeError, "lr.*number"),
    ("matrix", torch.ones(2, 2), ValueError, "lr.*one real number"),
    ("starts-negative", lambda _: -1.0, ValueError, r"lr.*step 0.*-1\.0"),
    ("says-nothing", lambda _: None, TypeError, "lr.*step 0.*None"),
]


@for_every(("value", "error", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_form_is_refused_at_construction(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?is){message}"):
        Lamb(weights(), lr=value)


@pytest.mark.parametrize("values", [[0.1, 0.2], torch.tensor([0.1, 0.2])])
def test_past_the_end_nothing_changes(values: Iterable[float]) -> None:
    params = weights()
    groups: list[dict[str, Any]] = [{"params": params[:1], "lr": falling}, {"params": params[1:], "lr": values}]
    optimizer = Lamb(groups)
    for seed in range(2):
        step(params, optimizer, seed)
    for _ in range(2):
        with refused(params, optimizer, ValueError, r"param_groups\[1\]: the schedule of lr at step 2: .*2 values"):
            optimizer.step()


def test_a_schedule_that_turns_bad_changes_nothing() -> None:
    params = weights()
    optimizer = Lamb(params, lr=lambda s: 0.1 - 0.1 * s, weight_decay=lambda s: 0.1 * (s + 1))
    for seed in range(2):
        step(params, optimizer, seed)
    with refused(params, optimizer, ValueError, r"lr.*step 2.*-0\.1"):
        optimizer.step()


def test_a_bad_gradient_takes_the_schedules_value_back() -> None:
    params = weights()
    optimizer = Lamb(params, lr=falling)
    step(params, optimizer, 0)
    params[1].grad = torch.ones(7).to_sparse()
    lr = optimizer.param_groups[0]["lr"]
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == lr
    step(params, optimizer, 1)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 2


def test_several_values_written_beside_a_schedule_take_its_place(kind: Kind) -> None:
    """The k-th step takes the k-th value, like values of the constructor."""

    def written(params: list[Parameter]) -> torch.optim.Optimizer:
        optimizer = kind(params, lr=falling)
        step(params, optimizer, 0)
        optimizer.param_groups[0]["lr"] = [1.0, 0.25, 0.125]
        return optimizer

    def numbers(params: list[Parameter]) -> torch.optim.Optimizer:
        optimizer = kind(params, lr=0.1)
        step(params, optimizer, 0)
        optimizer.param_groups[0]["lr"] = Values.of([1.0, 0.25, 0.125])
        return optimizer

    assert all(map(torch.equal, trained(2, written), trained(2, numbers)))


@for_every("name", ["lr", "weight_decay"])
def test_a_tensor_of_several_numbers_in_a_group_is_no_schedule(name: str, kind: Kind) -> None:
    params = weights()
    optimizer = kind(params, lr=0.1)
    step(params, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][name] = torch.tensor([0.1, 0.2])
    said = rf"param_groups\[0\].*{name} as a tensor must hold one real number, not shape \(2,\).*as a list"
    with refused(params, optimizer, ValueError, said):
        optimizer.load_state_dict(state)
    optimizer.param_groups[0][name] = torch.tensor([0.1, 0.2])
    with refused(params, optimizer, ValueError, said):
        optimizer.step()


def test_a_step_that_fails_leaves_the_schedule_where_it_was(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a Ctrl-C inside the kernels, the repeated step has the same rate, and it is not taken for a user's."""
    rates = []
    for fails in (False, True):
        param = Parameter(torch.ones(3, 2))
        optimizer = kind([param], lr=lambda step: 1 / (step + 1), backend="foreach")
        for step in range(3):
            param.grad = torch.ones(3, 2)
            before = optimizer.param_groups[0]["lr"]
            if fails and step == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(kernels.kernel("foreach", kind.algorithm.name), "step", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                assert optimizer.param_groups[0]["lr"] == before
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1, 1 / 2, 1 / 3] * 2


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
