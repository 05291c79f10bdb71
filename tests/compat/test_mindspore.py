"""MindSpore's Lamb: its groups, its errors, and calls with gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import bighorn
from bighorn.compat import mindformers, mindspore
from bighorn.compat.mindspore import Lamb, PolynomialDecayLR
from tests.support.cases import allow_gradients_of
from tests.support.compat_training import LRS, STEPS, assert_close, by_scalar, gradient, trained, weights
from tests.support.error_checks import refused
from tests.support.tables import for_every

pytestmark = pytest.mark.filterwarnings("ignore:params have no names")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.conv2(self.conv1(x).relu()).flatten(1))
        return out


def test_the_documents_example() -> None:
    """The example of the documentation, with other import lines, `net.trainable_params()`, `x.name` and Model.

    A torch parameter does not know its name, so the first is `list(net.named_parameters())` and the second `x[0]`. A
    loop replaces the Model.
    """
    optimizers = learning_rate_schedule = mindspore

    net = Net()
    # 1) All parameters use the same learning rate and weight decay
    optim = optimizers.Lamb(params=list(net.named_parameters()), learning_rate=0.1)
    assert [group["lr"] for group in optim.param_groups] == [0.1]

    # 2) Use parameter groups and set different values
    poly_decay_lr = learning_rate_schedule.PolynomialDecayLR(
        learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5
    )
    conv_params = list(filter(lambda x: "conv" in x[0], net.named_parameters()))
    no_conv_params = list(filter(lambda x: "conv" not in x[0], net.named_parameters()))
    group_params: list[dict[str, Any]] = [
        {"params": conv_params, "weight_decay": 0.01, "grad_centralization": True},
        {"params": no_conv_params, "lr": poly_decay_lr},
        {"order_params": list(net.named_parameters())},
    ]
    optim = optimizers.Lamb(group_params, learning_rate=0.1, weight_decay=0.0)
    # The conv_params's parameters will use default learning rate of 0.1 and weight decay of 0.01 and grad
    # centralization of True.
    # The no_conv_params's parameters will use dynamic learning rate of poly decay learning rate and default
    # weight decay of 0.0 and grad centralization of False.
    # The final parameters order in which the optimizer will be followed is the value of 'order_params'.
    assert [[group[key] for key in ("weight_decay", "grad_centralization")] for group in optim.param_groups] == [
        [0.01, "conv"],
        [0.0, False],
    ]
    assert list(map(id, optim.parameters)) == list(map(id, net.parameters()))

    loss = nn.CrossEntropyLoss()
    data, labels = torch.randn(12, 1, 6, 6), torch.arange(12) % 3
    losses, lrs = [], []
    for _ in range(6):
        output = loss(net(data), labels)
        losses.append(output.item())
        gradients = torch.autograd.grad(output, optim.parameters)
        assert optim(gradients) == (True,) * 6
        lrs.append([group["lr"] for group in optim.param_groups])
    assert losses[-1] < losses[0]
    assert lrs == [[0.1, poly_decay_lr(step)] for step in range(6)]


@pytest.mark.parametrize("kind", [Lamb, mindformers.Came])
def test_get_lr_is_that_of_the_next_step(kind: Any) -> None:
    net = Net()
    assert kind(net.parameters(), 0.1).get_lr() == 0.1
    schedule = PolynomialDecayLR(0.1, 0.01, 4, 0.5)
    groups = [{"params": [net.fc.weight], "lr": schedule}, {"params": [net.fc.bias]}]
    optim = kind([*groups, {"order_params": [net.fc.bias, net.fc.weight]}], 0.2)
    for step in range(3):
        assert optim.get_lr() == optim.get_lr() == (0.2, schedule(step))
        optim(tuple(torch.ones_like(param) for param in optim.parameters))
    optim.param_groups[1]["lr"] = optim.param_groups[0]["lr"] = 0.5
    assert optim.get_lr() == 0.5


# ---- parity -------------------------------------------------------------------------------------------------------

ARGUMENTS = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-5}
WITNESS = {"betas": (0.8, 0.99), "eps": 1e-5}


def decayed(name: str) -> float:
    return 0.0 if "beta" in name or "gamma" in name else 0.1


def test_ungrouped_it_decays_all_but_beta_and_gamma() -> None:
    ours = trained(lambda params: Lamb(params.items(), LRS, 0.8, 0.99, 1e-5, 0.1))
    assert_close(ours, by_scalar(lambda name: {**WITNESS, "weight_decay": decayed(name)}))


def test_what_has_no_name_is_decayed() -> None:
    with pytest.warns(UserWarning, match="params have no names"):
        ours = trained(lambda params: Lamb(params.values(), LRS, **ARGUMENTS, weight_decay=0.1))
    assert_close(ours, by_scalar(lambda _: {**WITNESS, "weight_decay": 0.1}))


def test_a_name_with_a_capital_is_decayed() -> None:
    ours = trained(
        lambda params: Lamb([(name.title(), param) for name, param in params.items()], LRS, weight_decay=0.1)
    )
    assert_close(ours, by_scalar(lambda _: {"weight_decay": 0.1}))


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
    ours = trained(lambda params: Lamb(grouped(params, named), 0.07, weight_decay=0.1))

    def witness(name: str) -> dict[str, Any]:
        if is_first(name):
            return {"lr": 0.07, "weight_decay": 0.3, "grad_centralization": "conv"}
        return {"weight_decay": 0.1}

    assert_close(ours, by_scalar(witness))


def test_a_call_is_a_step() -> None:
    stepped = trained(lambda params: Lamb(params.items(), LRS, weight_decay=0.1))
    params = weights()
    optim = Lamb(params.items(), LRS, weight_decay=0.1)
    for number in range(STEPS):
        assert optim(tuple(gradient(name, number) for name in params)) == (True,) * len(params)
    assert all(param.equal(stepped[name]) for name, param in params.items())


def test_a_call_follows_order_params() -> None:
    params = weights()
    order = list(reversed(params.items()))
    optim = Lamb([*grouped(params), {"order_params": order}], 0.07, weight_decay=0.1)
    assert list(map(id, optim.parameters)) == [id(param) for _, param in order]
    for number in range(STEPS):
        optim(tuple(gradient(name, number) for name, _ in order))
    plain = trained(lambda params: Lamb(grouped(params), 0.07, weight_decay=0.1))
    assert all(param.equal(plain[name]) for name, param in params.items())


def test_a_schedule_of_weight_decay() -> None:
    params = weights()
    optim = Lamb(params.values(), 0.1, weight_decay=PolynomialDecayLR(0.3, 0.1, 2, 1.0))
    decays = []
    for number in range(3):
        optim(tuple(gradient(name, number) for name in params))
        decays.append(optim.param_groups[0]["weight_decay"])
    assert decays == pytest.approx([0.3, 0.2, 0.1])


# ---- a call and .grad -----------------------------------------------------------------------------------------------


def test_a_call_leaves_grad_as_it_is() -> None:
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    kept = torch.full((2,), 7.0)
    params[0].grad = kept
    optim = Lamb(params, 0.1)
    optim((torch.ones(2), torch.ones(3)))
    assert params[0].grad is kept
    assert kept.equal(torch.full((2,), 7.0))
    assert params[1].grad is None


def test_gradients_of_another_dtype_and_none() -> None:
    params = [Parameter(torch.ones(2).bfloat16()), Parameter(torch.ones(3))]
    allow_gradients_of(params[0], torch.bfloat16)
    params[0].grad = torch.ones(2).bfloat16()
    optim = Lamb(params, 0.5)
    assert optim((torch.ones(2), None)) == (True, True)
    assert (params[0] < 1).all()
    assert (params[1] == 1).all()
    assert params[0].grad.dtype == params[0].grad_dtype == torch.bfloat16


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


# ---- errors ---------------------------------------------------------------------------------------------------------


def named() -> list[tuple[str, Parameter]]:
    return list(weights(torch.float32).items())


ARGUMENT_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"learning_rate": "0.1"}, TypeError, "^learning_rate must be"),
    ({"learning_rate": None}, TypeError, "^learning_rate must be"),
    ({"learning_rate": {0.1}}, TypeError, "^learning_rate must be"),
    ({"learning_rate": True}, TypeError, "^learning_rate must be"),
    ({"learning_rate": ["fast"]}, TypeError, "^learning_rate: values"),
    ({"learning_rate": -0.1}, ValueError, r"^learning_rate=-0\.1"),
    ({"learning_rate": torch.ones(2, 2)}, ValueError, "^learning_rate as a tensor"),
    ({"learning_rate": []}, ValueError, "^learning_rate: values is empty"),
    ({"learning_rate": [0.1, math.nan]}, ValueError, r"^learning_rate: values\[1\]=nan"),
    ({"beta1": 1}, TypeError, "^beta1 must be a float"),
    ({"beta2": "0.9"}, TypeError, "^beta2 must be a float"),
    ({"eps": 1}, TypeError, "^eps must be a float"),
    ({"beta1": 0.0}, ValueError, r"^beta1=0\.0.*in \(0, 1\)"),
    ({"beta1": 1.0}, ValueError, r"^beta1=1\.0.*in \(0, 1\)"),
    ({"beta2": 0.0}, ValueError, r"^beta2=0\.0.*in \(0, 1\)"),
    ({"beta2": 1.5}, ValueError, r"^beta2=1\.5.*in \(0, 1\)"),
    ({"beta2": math.nan}, ValueError, "^beta2=nan"),
    ({"eps": 0.0}, ValueError, r"^eps=0\.0.*above 0"),
    ({"eps": math.inf}, ValueError, "^eps=inf"),
    ({"weight_decay": "0.1"}, TypeError, "^weight_decay must be a number or a schedule"),
    ({"weight_decay": [0.1, 0.2]}, TypeError, "^weight_decay must be a number or a schedule"),
    ({"weight_decay": True}, TypeError, "^weight_decay must be a number or a schedule"),
    ({"weight_decay": -0.1}, ValueError, r"^weight_decay=-0\.1"),
    ({"weight_decay": 10**400}, ValueError, "^weight_decay=1000"),
    (
        {"weight_decay": lambda step: -1.0 - step},
        ValueError,
        r"^the schedule of weight_decay at step 0: w.*=-1\.0",
    ),
    ({"loss_scale": 2.0}, TypeError, "loss_scale"),
]


@for_every(("options", "error", "message"), ARGUMENT_ERRORS)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Lamb(**{"params": named(), "learning_rate": 0.1, **options})


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


@for_every("params", [3, None, "weight", Parameter(torch.ones(3)), {"params": []}, set()])
def test_params_that_are_no_list(params: Any) -> None:
    with pytest.raises(TypeError, match="params must be a list"):
        Lamb(params, 0.1)


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty"):
        Lamb([], 0.1)


@for_every(
    ("options", "error", "message"),
    [
        ({"learning_rate": 0.1}, ValueError, "^group 1: unknown key 'learning_rate'"),
        ({"weight_decy": 0.1}, ValueError, "^group 1: unknown key 'weight_decy' .did you mean 'weight_decay'"),
        ({"betas": (0.9, 0.99)}, ValueError, "^group 1: unknown key 'betas'"),
        ({"schedule_step": 3}, ValueError, "^group 1: unknown key 'schedule_step'"),
        ({"lr": "fast"}, TypeError, "^group 1: lr must be"),
        ({"lr": -0.1}, ValueError, r"^group 1: lr=-0\.1"),
        ({"weight_decay": [0.1]}, TypeError, "^group 1: weight_decay must be"),
        ({"weight_decay": -0.1}, ValueError, r"^group 1: weight_decay=-0\.1"),
        ({"grad_centralization": "conv"}, TypeError, "^group 1: grad_centralization must be True or False"),
        ({"grad_centralization": 1}, TypeError, "^group 1: grad_centralization must be True or False"),
    ],
)
def test_groups(options: dict[str, Any], error: type[Exception], message: str) -> None:
    first, second, *_ = named()
    with pytest.raises(error, match=message):
        Lamb([{"params": [first]}, {"params": [second], **options}], 0.1)
    optim = Lamb([{"params": [first]}], 0.1)
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
    optim = mindformers.Came([first, second], 0.1)
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


def test_centring_as_in_the_shipped_code() -> None:
    """The page's line: 2 or more dims, if dim 1 is a multiple of 16."""
    params = {"wide": Parameter(torch.ones(2, 16)), "narrow": Parameter(torch.ones(2, 15))}
    optim = Lamb([{"params": [params["wide"]]}, {"params": [params["narrow"]]}], 0.1)
    optim.param_groups[0]["grad_centralization"] = True
    optim(tuple(torch.arange(1.0, param.numel() + 1).view_as(param) for param in params.values()))
    moments = {name: optim.state[param]["exp_avg"].mean(dim=1) for name, param in params.items()}
    assert moments["wide"].abs().max() < 1e-6
    assert moments["narrow"].min() > 0.5


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


def test_it_is_ours_underneath() -> None:
    params = weights()
    optim = Lamb(params.items(), 0.1)
    assert isinstance(optim, bighorn.Lamb)
    assert "cpu" in optim.explain() or "foreach" in optim.explain() or "reference" in optim.explain()
