"""The optimizers of MindSpore and MindFormers: groups, order, calls with gradients, and a scale of the loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import bighorn
from bighorn.compat.mindformers import Came
from bighorn.compat.mindspore import FixedLossScaleManager, Lamb, PolynomialDecayLR
from tests.support.cases import allow_gradients_of
from tests.support.compat_training import LRS, STEPS, gradient, step, trained, weights
from tests.support.error_checks import refused
from tests.support.tables import for_every

pytestmark = pytest.mark.filterwarnings("ignore:params have no names")

BOTH = pytest.mark.parametrize("kind", [Lamb, Came])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv2(self.conv1(x).relu()).flatten(1))
        return out


@BOTH
def test_the_documents_example(kind: Any) -> None:
    """MindSpore's example, with `net.named_parameters()` and `x[0]`: a torch parameter does not know its name."""
    net = Net()
    # 1) All parameters use the same learning rate and weight decay
    optim = kind(params=list(net.named_parameters()), learning_rate=0.1)
    assert [group["lr"] for group in optim.param_groups] == [0.1]

    # 2) Use parameter groups and set different values
    poly_decay_lr = PolynomialDecayLR(learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5)
    conv_params = list(filter(lambda x: "conv" in x[0], net.named_parameters()))
    no_conv_params = list(filter(lambda x: "conv" not in x[0], net.named_parameters()))
    group_params: list[dict[str, Any]] = [
        {"params": conv_params, "weight_decay": 0.01, "grad_centralization": True},
        {"params": no_conv_params, "lr": poly_decay_lr},
        {"order_params": list(net.named_parameters())},
    ]
    optim = kind(group_params, learning_rate=0.1, weight_decay=0.0)
    # The conv_params's parameters will use default learning rate of 0.1 and weight decay of 0.01 and grad
    # centralization of True.
    # The no_conv_params's parameters will use dynamic learning rate of poly decay learning rate and default
    # weight decay of 0.0 and grad centralization of False.
    # The final parameters order in which the optimizer will be followed is the value of 'order_params'.
    keys = ("weight_decay", "grad_centralization")
    assert [[group[key] for key in keys] for group in optim.param_groups] == [[0.01, "conv"], [0.0, False]]
    assert list(map(id, optim.parameters)) == list(map(id, net.parameters()))

    loss = nn.CrossEntropyLoss()
    data, labels = torch.randn(12, 1, 6, 6), torch.arange(12) % 3
    losses, lrs = [], []
    for _ in range(6):
        output = loss(net(data), labels)
        losses.append(output.item())
        optim(torch.autograd.grad(output, optim.parameters))
        lrs.append([group["lr"] for group in optim.param_groups])
    assert losses[-1] < losses[0]
    assert lrs == [[0.1, poly_decay_lr(number)] for number in range(6)]


@BOTH
def test_get_lr_is_that_of_the_next_step(kind: Any) -> None:
    net = Net()
    assert kind(net.parameters(), 0.1).get_lr() == 0.1
    schedule = PolynomialDecayLR(0.1, 0.01, 4, 0.5)
    groups = [{"params": [net.fc.weight], "lr": schedule}, {"params": [net.fc.bias]}]
    optim = kind([*groups, {"order_params": [net.fc.bias, net.fc.weight]}], 0.2)
    for number in range(3):
        assert optim.get_lr() == optim.get_lr() == (0.2, schedule(number))
        optim(tuple(torch.ones_like(param) for param in optim.parameters))
    optim.param_groups[1]["lr"] = optim.param_groups[0]["lr"] = 0.5
    assert optim.get_lr() == 0.5


# ---- parity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "Norm.Gamma"])
def test_what_has_no_name_or_another_one_is_decayed(name: str | None) -> None:
    def decayed(params: dict[str, Parameter]) -> Lamb:
        return Lamb(
            [(each.title(), param) for each, param in params.items()] if name else params.values(),
            LRS,
            weight_decay=0.1,
        )

    ours, plain = trained(decayed), trained(lambda params: bighorn.Lamb(params.values(), LRS, weight_decay=0.1))
    assert all(value.equal(plain[each]) for each, value in ours.items())


def is_first(name: str) -> bool:
    """Return whether a tensor is in the first group: a 4-dim one (centred), a 2-dim one (not centred), and vectors."""
    return name.startswith(("conv", "norm", "fc"))


def grouped(params: dict[str, Parameter], named: bool = True) -> list[dict[str, Any]]:
    halves = [[item for item in params.items() if is_first(item[0]) == first] for first in (True, False)]
    given = [half if named else [param for _, param in half] for half in halves]
    return [
        {"params": given[0], "weight_decay": 0.3, "grad_centralization": True},
        {"params": given[1], "lr": iter(LRS), "grad_centralization": False},
    ]


@pytest.mark.parametrize("named", [True, False])
def test_grouped_names_are_ignored_and_convolutions_centred(named: bool) -> None:
    def plain(params: dict[str, Parameter]) -> bighorn.Lamb:
        first: dict[str, Any] = {"lr": 0.07, "weight_decay": 0.3, "grad_centralization": "conv"}
        second: dict[str, Any] = {"weight_decay": 0.1}
        groups = zip(grouped(params, named), (first, second), strict=True)
        return bighorn.Lamb([{"params": group["params"], **options} for group, options in groups], LRS)

    ours, theirs = trained(lambda params: Lamb(grouped(params, named), 0.07, weight_decay=0.1)), trained(plain)
    assert all(value.equal(theirs[name]) for name, value in ours.items())


@BOTH
@pytest.mark.parametrize("ordered", [True, False])
def test_a_call_is_a_step(kind: Any, ordered: bool) -> None:
    stepped = trained(lambda params: kind(grouped(params), 0.07, weight_decay=0.1))
    params = weights()
    optim = kind(
        [*grouped(params), *[{"order_params": list(reversed(params.items()))}] * ordered], 0.07, weight_decay=0.1
    )
    names = {id(param): name for name, param in params.items()}
    called = [names[id(param)] for param in optim.parameters]
    assert not ordered or called == list(reversed(params))
    for number in range(STEPS):
        done = optim(tuple(gradient(name, number) for name in called))
        assert done.equal(torch.tensor(True)) if kind is Came else done == (True,) * len(params)
    assert all(param.equal(stepped[name]) for name, param in params.items())


# ---- a call and .grad -----------------------------------------------------------------------------------------------


def test_a_call_with_gradients_of_another_dtype_and_none_leaves_grad_as_it_is() -> None:
    params = [Parameter(torch.ones(2).bfloat16()), Parameter(torch.ones(3))]
    allow_gradients_of(params[0], torch.bfloat16)
    params[0].grad = kept = torch.full((2,), 7.0).bfloat16()
    optim = Lamb(params, 0.5)
    assert optim((torch.ones(2), None)) == (True, True)
    assert (params[0] < 1).all()
    assert (params[1] == 1).all()
    assert params[0].grad is kept
    assert kept.equal(torch.full((2,), 7.0).bfloat16())
    assert params[0].grad_dtype == torch.bfloat16
    optim((torch.ones(2), torch.ones(3)))
    assert params[1].grad is None


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        (torch.ones(2, 3), TypeError, "gradients must be a tuple"),
        ((torch.ones(2),), ValueError, "1 gradients for 2 parameters"),
        ((torch.ones(2), 3), TypeError, r"gradients\[1\] must be a tensor"),
        ((torch.ones(2), torch.ones(2)), ValueError, r"gradients\[1\] has shape \(2,\).*\(3,\)"),
        ((torch.ones(2), torch.ones(3).to_sparse()), RuntimeError, "sparse"),
    ],
)
def test_a_call_with_other_gradients_changes_nothing(gradients: Any, error: type[Exception], message: str) -> None:
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    optim = Lamb(params, [0.1, 0.2, 0.3], weight_decay=0.1)
    optim((torch.ones(2), torch.ones(3)))
    params[0].grad = kept = torch.full((2,), 7.0)
    with refused(params, optim, error, message):
        optim(gradients)
    assert params[0].grad is kept
    assert params[1].grad is None


# ---- loss_scale -----------------------------------------------------------------------------------------------------

SEEN = (1e-3, 1e-3, 1e-16)
"""A large eps, so that steps depend on the size of gradients; with a small one, a multiple takes the same step."""


@pytest.mark.parametrize("loss_scale", [1024, 0.5, 1024.0])
def test_loss_scale_divides_gradients_and_writes_none(loss_scale: float) -> None:
    plain = trained(lambda params: Came(params.items(), LRS, SEEN, weight_decay=0.1))
    params = weights()
    optim = Came(params.items(), LRS, SEEN, weight_decay=0.1, loss_scale=loss_scale)
    for number in range(STEPS):
        step(params, optim, number)
        assert all(param.grad.equal(loss_scale * gradient(name, number)) for name, param in params.items())  # type: ignore[union-attr]
    assert all(param.equal(plain[name]) for name, param in params.items())


def scaled_training(loss_scale: float, scaler: torch.amp.GradScaler) -> nn.Linear:
    torch.manual_seed(3)
    model = nn.Linear(6, 5)
    optim = Came(model.parameters(), 0.1, SEEN, weight_decay=0.1, loss_scale=loss_scale)
    # Scalers of bighorn and Lightning set it for an optimizer that unscales inside its step.
    optim._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    for number in range(4):
        optim.zero_grad()
        loss = model(torch.randn(7, 6, generator=torch.Generator().manual_seed(number))).square().sum()
        scaler.scale(loss * loss_scale).backward()
        scaler.step(optim)
        scaler.update()
        assert not hasattr(optim, "grad_scale")
    return model


def test_a_scaler_that_hands_its_scale_over() -> None:
    scaled = scaled_training(1, torch.amp.GradScaler("cpu", init_scale=1024.0))
    plain = scaled_training(1, torch.amp.GradScaler("cpu", enabled=False))
    assert scaled.weight.equal(plain.weight)


def test_loss_scale_is_for_a_manager_that_nobody_makes_a_scaler_of() -> None:
    """Both have the same number, as MindFormers' documentation requires, but only one may divide by it."""
    manager = FixedLossScaleManager(1024.0, drop_overflow_update=False)
    params = weights()
    optim = Came(params.items(), 0.1, weight_decay=0.1, loss_scale=manager.get_loss_scale())
    step(params, optim, 0)
    scaler = manager.loss_scaler()
    with refused(list(params.values()), optim, RuntimeError, "loss_scale=1024 divides the gradients"):
        scaler.scale(torch.ones(()))
        scaler.step(optim)


def test_integers_that_are_taken() -> None:
    optim = Came([{"params": weights().items(), "weight_decay": 1}], 1, clip_threshold=2, loss_scale=3)
    group = optim.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["clip_threshold"], optim.loss_scale) == (1, 1, 2, 3)


# ---- errors ---------------------------------------------------------------------------------------------------------


def named() -> list[tuple[str, Parameter]]:
    return list(weights(torch.float32).items())


@pytest.mark.parametrize("error", [TypeError, ValueError])
@for_every(
    "params",
    [
        [3],
        ["weight"],
        [None],
        [torch.ones(3, requires_grad=True)],
        [(3, Parameter(torch.ones(3)))],
        [Parameter(torch.ones(3)), {"params": [Parameter(torch.ones(3))]}],
        [{"params": [Parameter(torch.ones(3)), 3]}],
    ],
)
def test_an_element_that_is_neither_parameter_nor_dict(params: Any, error: type[Exception]) -> None:
    """MindSpore's documentation promises a TypeError; as a bad value in a list, it is a ValueError too."""
    with pytest.raises(error, match=r"params\[\d\] must be a torch\.nn\.Parameter"):
        Lamb(params, 0.1)


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty"):
        Lamb([], 0.1)


@for_every(
    ("kind", "options", "error", "message"),
    [
        (Lamb, {"learning_rate": 0.1}, ValueError, "^group 1: unknown key 'learning_rate'"),
        (Lamb, {"weight_decy": 0.1}, ValueError, "^group 1: unknown key 'weight_decy' .did you mean 'weight_decay'"),
        (Lamb, {"betas": (0.9, 0.99)}, ValueError, "^group 1: unknown key 'betas'"),
        (Lamb, {"schedule_step": 3}, ValueError, "^group 1: unknown key 'schedule_step'"),
        (Lamb, {"lr": "fast"}, TypeError, "^group 1: lr must be"),
        (Lamb, {"lr": -0.1}, ValueError, r"^group 1: lr=-0\.1"),
        (Lamb, {"weight_decay": [0.1]}, TypeError, "^group 1: weight_decay must be"),
        (Lamb, {"weight_decay": -0.1}, ValueError, r"^group 1: weight_decay=-0\.1"),
        (Lamb, {"grad_centralization": "conv"}, TypeError, "^group 1: grad_centralization must be True or False"),
        (Lamb, {"grad_centralization": 1}, TypeError, "^group 1: grad_centralization must be True or False"),
        (Lamb, {"params": [3]}, TypeError, r"^group 1: params\[0\] must be"),
        (Lamb, {"params": []}, ValueError, "^group 1: params is empty: leave the group out"),
        (Came, {"params": iter([])}, ValueError, "^group 1: params is empty"),
        (Lamb, {"lr": torch.full((1, 1), 0.1)}, ValueError, r"^group 1: lr as a tensor .* 1-D .*shape \(1, 1\)"),
        (Came, {"decay_rate": 0.7}, ValueError, "^group 1: unknown key 'decay_rate'"),
        (Came, {"lr": -0.1}, ValueError, r"^group 1: lr=-0\.1"),
        (Came, {"weight_decay": 1.5}, ValueError, r"^group 1: weight_decay=1\.5.*\[0, 1\]"),
    ],
)
def test_groups(kind: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    first, second, *_ = named()
    with pytest.raises(error, match=message):
        kind([{"params": [first]}, {"params": [second], **options}], 0.1)
    optim = kind([{"params": [first]}], 0.1)
    with refused([first[1]], optim, error, message):
        optim.add_param_group({"params": [second], **options})


def test_a_group_without_parameters() -> None:
    with pytest.raises(ValueError, match=r"^group 0: a parameter group must have the key 'params'"):
        Lamb([{"lr": 0.1}], 0.1)
    optim = Lamb(named()[:1], 0.1)
    with pytest.raises(ValueError, match="order_params belongs"):
        optim.add_param_group({"order_params": named()})


def test_a_parameter_in_two_groups_is_mindspores_error_and_torchs() -> None:
    first, second, *_ = named()
    for earlier, later in ([first], [second, first]), ([first[1]], [first]):
        groups: list[dict[str, Any]] = [{"params": earlier}, {"params": later}]
        for error in (RuntimeError, ValueError):
            with pytest.raises(error, match=r"^group 1: params\[[01]\] is in an earlier group already"):
                Lamb(groups, 0.1)
    optim = Came([first, second], 0.1)
    with pytest.raises(RuntimeError, match=r"^group 1: params\[0\] is in"):
        optim.add_param_group({"params": [first]})
    assert len(optim.param_groups) == 1


@for_every(
    ("default", "rates"),
    [
        (0.1, [[0.1, 0.2], [0.1]]),
        ([0.1], [None, torch.tensor([0.1, 0.2])]),
        ([0.1], [iter([0.1, 0.2]), None]),
    ],
)
def test_vectors_of_rates_have_one_length(default: Any, rates: list[Any]) -> None:
    groups = [
        {"params": [param], **({} if rate is None else {"lr": rate})}
        for param, rate in zip(named()[:2], rates, strict=True)
    ]
    with pytest.raises(ValueError, match=r"lr has [12] values, and another lr has [12]: give all of them"):
        Lamb(groups, default)
    assert Lamb([{"params": named()[:1], "lr": iter([0.3, 0.2])}], [0.1, 0.2]).get_lr() == 0.3


def test_order_params() -> None:
    first, second, third, *_ = named()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second]}]
    for order, error, message in (
        ([first], ValueError, "every parameter"),
        ([first, second, third], ValueError, "1 are in no group"),
        ([first, second, first], ValueError, "twice"),
        ([first, 3], TypeError, "must hold the parameters"),
    ):
        with pytest.raises(error, match=message):
            Lamb([*groups, {"order_params": order}], 0.1)
    with pytest.warns(UserWarning, match="mean nothing there: lr"):
        optim = Lamb([*groups, {"order_params": [second, first], "lr": 0.5}], 0.1)
    assert [group["lr"] for group in optim.param_groups] == [0.1, 0.1]
    assert [param.shape for param in copy.deepcopy(optim).parameters] == [second[1].shape, first[1].shape]
