"""LAMBrrr's Lamb."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bighorn import ConvertedStateWarning
from bighorn.compat.pytorch_fused_lamb import Lamb
from tests.support.compat_training import LRS, assert_close, by_scalar, gradient, trained
from tests.support.compat_training import weights as named_weights
from tests.support.error_checks import weights
from tests.support.tables import for_every


def test_the_documents_example() -> None:
    """The example of the documentation, with another import line; a data set and a model replace `...`."""
    from torch import nn

    torch.manual_seed(0)
    dataset = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(20)]
    model = nn.Linear(4, 2)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = Lamb(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    for x, y in dataset:
        optimizer.zero_grad()
        outputs = model(x)
        loss = criterion(outputs, y)
        loss.backward()
        optimizer.step()

    for start, param in zip(before, model.parameters(), strict=True):
        # Each of the twenty steps has the length lr * ||x||.
        assert 0 < (param - start).norm() <= 1.001 * 20 * 1e-3 * 1.02 * start.norm()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_is_version_5_of_the_paper(amsgrad: bool, maximize: bool) -> None:
    ours = trained(lambda params: Lamb(params.values(), LRS, (0.9, 0.99), 1e-8, 0.1, amsgrad, maximize=maximize))
    options = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": maximize}
    assert_close(ours, by_scalar(lambda _: {**options, "second_moment": "amsgrad" if amsgrad else "adam"}))


def test_groups_have_an_amsgrad_of_their_own() -> None:
    first, second, late = weights()
    groups: list[dict[str, Any]] = [{"params": [first], "amsgrad": True}, {"params": [second]}]
    optimizer = Lamb(groups)
    optimizer.add_param_group({"params": [late], "amsgrad": True})
    assert [group["second_moment"] for group in optimizer.param_groups] == ["amsgrad", "adam", "amsgrad"]
    assert all("amsgrad" not in group for group in optimizer.param_groups)


def test_a_parameter_that_is_zero_moves_and_stays_finite() -> None:
    """In the shipped class it never moves, and it is NaN after a gradient of zero."""
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = Lamb([param], lr=0.1)
    param.grad = torch.zeros(3)
    optimizer.step()
    assert param.equal(torch.zeros(3))
    param.grad = torch.ones(3)
    optimizer.step()
    assert (param < 0).all()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_checkpoint_of_the_shipped_class_goes_on(amsgrad: bool) -> None:
    """The checkpoint has the state and the group keys that LAMBrrr's class saves."""
    params = named_weights(torch.float32)
    states = {}
    for i, (name, param) in enumerate(params.items()):
        states[i] = {
            "step": torch.tensor(3.0),
            "exp_avg": gradient(name, 0, param.dtype),
            "exp_avg_sq": gradient(name, 1, param.dtype).square(),
        }
        if amsgrad:
            states[i]["max_exp_avg_sq"] = 2 * states[i]["exp_avg_sq"]
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": amsgrad}
    torch_only = {"maximize": False, "foreach": True, "capturable": True, "differentiable": False, "fused": False}
    optimizer = Lamb(params.values(), amsgrad=amsgrad)
    saved = {"state": states, "param_groups": [{**group, **torch_only, "params": list(range(len(params)))}]}
    with pytest.warns(ConvertedStateWarning):  # the groups are those of torch's Adam
        optimizer.load_state_dict(saved)
    for i, param in enumerate(params.values()):
        for name, value in states[i].items():
            assert optimizer.state[param][name].equal(value)
    assert optimizer.param_groups[0]["lr"] == 0.1


@for_every(
    ("options", "error", "message"),
    [
        ({"lr": -0.1}, ValueError, r"lr=-0\.1"),
        ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
        ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]=1\.0"),
        ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\]=-0\.1"),
        ({"weight_decay": -1.0}, ValueError, r"weight_decay=-1\.0"),
        ({"amsgrad": 1}, TypeError, "amsgrad must be"),
        ({"maximize": 1}, TypeError, "maximize must be"),
        ({"foreach": True}, TypeError, "foreach"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Lamb(weights(), **options)
    if "foreach" not in options:
        with pytest.raises(error, match=message):
            Lamb([{"params": weights(), **options}])
