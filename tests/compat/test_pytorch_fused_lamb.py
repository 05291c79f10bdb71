"""LAMBrrr's Lamb."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bighorn import ConvertedStateWarning
from bighorn.compat.pytorch_fused_lamb import Lamb, lamb
from tests.support.compat_training import gradient
from tests.support.compat_training import weights as named_weights
from tests.support.error_checks import weights


def test_groups_have_an_amsgrad_of_their_own() -> None:
    first, second, late = weights()
    groups: list[dict[str, Any]] = [{"params": [first], "amsgrad": True}, {"params": [second]}]
    optimizer = Lamb(groups)
    optimizer.add_param_group({"params": [late], "amsgrad": True})
    assert [group["second_moment"] for group in optimizer.param_groups] == ["amsgrad", "adam", "amsgrad"]
    assert all("amsgrad" not in group for group in optimizer.param_groups)
    with pytest.raises(TypeError, match="amsgrad must be"):
        Lamb([{"params": [late], "amsgrad": 2}])


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
    message = r"^state_dict is a checkpoint of LAMBrrr's Lamb \(1 group\), and was converted; amsgrad=[^.]*$"
    with pytest.warns(ConvertedStateWarning, match=message if amsgrad else message.replace("; amsgrad=[^.]*", "")):
        optimizer.load_state_dict(saved)
    for i, param in enumerate(params.values()):
        for name, value in states[i].items():
            assert optimizer.state[param][name].equal(value)
    assert optimizer.param_groups[0]["lr"] == 0.1


FUNCTIONAL: dict[str, Any] = {
    "amsgrad": False,
    "beta1": 0.9,
    "beta2": 0.99,
    "lr": 0.1,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "maximize": False,
}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_functional_form_is_the_class(dtype: torch.dtype, amsgrad: bool) -> None:
    """It writes parameters, averages and counts in place, and reads no `.grad`."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((3, 4), (5,))]

    params = [torch.nn.Parameter(value) for value in drawn()]
    twins = [param.detach().clone() for param in params]
    optimizer = Lamb(twins, 0.1, (0.9, 0.99), 1e-8, 0.1, amsgrad)
    states = [[torch.zeros_like(twin) for twin in twins] for _ in range(3)]
    steps = [torch.zeros(()) for _ in twins]
    for number in range(3):
        gradients = drawn()
        with torch.no_grad():
            largest = states[2] if amsgrad else []
            options = FUNCTIONAL | {"amsgrad": amsgrad, "has_complex": dtype.is_complex}
            lamb(params, gradients, states[0], states[1], largest, steps, **options)
        for twin, grad in zip(twins, gradients, strict=True):
            twin.grad = grad
        optimizer.step()
        assert steps == [number + 1, number + 1]
    for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
        assert param.equal(twin)
        assert param.grad is None
        average = optimizer.state[twin]["exp_avg"]
        assert torch.view_as_real(states[0][i]).equal(average) if dtype.is_complex else states[0][i].equal(average)


def test_16_bit_averages_stay_those_of_the_caller() -> None:
    param, average, square, step = torch.ones(2), torch.zeros(2).bfloat16(), torch.zeros(2).bfloat16(), torch.zeros(())
    lamb([param], [torch.ones(2)], [average], [square], [], [step], **FUNCTIONAL)
    assert average.equal(torch.full((2,), 0.1).bfloat16())
    assert square.equal(torch.full((2,), 0.01).bfloat16())


def test_errors_of_the_functional_form() -> None:
    param = torch.ones(2)
    lists: list[Any] = [[param], [torch.ones(2)], [torch.zeros(2)], [torch.zeros(2)], [], [torch.zeros(())]]
    with pytest.raises(ValueError, match="there are 0 tensors of max_exp_avg_sq for 1 params"):
        lamb(*lists, **FUNCTIONAL | {"amsgrad": True})
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        lamb(*lists, **FUNCTIONAL | {"lr": -1.0})
    with pytest.raises(TypeError, match="has_complex must be"):
        lamb(*lists, **FUNCTIONAL | {"has_complex": 2})
    assert param.equal(torch.ones(2))
    lamb([], [], [], [], [], [], **FUNCTIONAL)
