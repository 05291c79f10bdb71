"""MindFormers' Came: its rule, implemented again, everything that its documentation promises, and its errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import bighorn
from bighorn.compat.mindformers import Came
from bighorn.compat.mindspore import CosineDecayLR, FixedLossScaleManager
from tests.support.compat_training import LRS, STEPS, assert_close, gradient, step, trained, weights
from tests.support.error_checks import refused
from tests.support.tables import for_every


class Layer(nn.Module):
    """A layer with the parameter names of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.wo = nn.LayerNorm(16), nn.Linear(16, 16)
        self.ffn_norm, self.w1 = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w1(self.ffn_norm(x + self.wo(self.attention_norm(x))))
        return out


def test_the_documents_example() -> None:
    """The example of the documentation, with other import lines, model, `net.trainable_params()`, `x.name` and Model.

    A torch parameter does not know its name, so `net.trainable_params()` is `list(net.named_parameters())` and `x.name`
    is `x[0]`. A loop replaces the Model.
    """
    net = Layer()
    # 1) All parameters use the same learning rate and weight decay
    optim = Came(params=list(net.named_parameters()), learning_rate=0.1)
    assert [group["lr"] for group in optim.param_groups] == [0.1]

    # 2) Use parameter groups and set different values
    layernorm_params = list(filter(lambda x: "norm" in x[0], net.named_parameters()))
    no_layernorm_params = list(filter(lambda x: "norm" not in x[0], net.named_parameters()))
    group_params: list[dict[str, Any]] = [
        {"params": layernorm_params, "weight_decay": 0.01},
        {"params": no_layernorm_params, "lr": 0.01},
        {"order_params": list(net.named_parameters())},
    ]
    optim = Came(group_params, learning_rate=0.1, weight_decay=0.0)
    # The layernorm_params's parameters will use default learning rate of 0.1 and weight decay of 0.01.
    # The no_layernorm_params's parameters will use learning rate of 0.01 and default weight decay of 0.0.
    # The final parameters order in which the optimizer will be followed is the value of 'order_params'.
    assert [(group["lr"], group["weight_decay"]) for group in optim.param_groups] == [(0.1, 0.01), (0.01, 0.0)]
    assert list(map(id, optim.parameters)) == list(map(id, net.parameters()))

    loss = nn.CrossEntropyLoss()
    data, labels = torch.randn(12, 16), torch.arange(12) % 3
    losses = []
    for _ in range(30):
        output = loss(net(data), labels)
        losses.append(output.item())
        done = optim(torch.autograd.grad(output, optim.parameters))
        assert isinstance(done, Tensor)
        assert done.equal(torch.tensor(True))
    assert losses[-1] < losses[0]


# ---- the rule -------------------------------------------------------------------------------------------------------


def by_formula(
    lrs: tuple[float, ...] = LRS,
    eps: tuple[float, float, float] = (1e-30, 1e-3, 1e-16),
    clip_threshold: float = 1.0,
    decay_rate: float = 0.8,
    beta1: float = 0.9,
    beta3: float = 0.99,
    weight_decay: float = 0.1,
    scale_parameter: bool = False,
    momentum: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Return mindformers/core/optim/came.py's results (0ca25cc) in float64, with statistics of the last two dims."""
    results = {}
    for name, param in weights().items():
        x = param.detach().clone()
        m = torch.zeros_like(x)
        factored = x.dim() >= 2
        row, col = (x.mean(-1) * 0, x.mean(-2) * 0) if factored else (m, m)
        res_row, res_col, v = row, col, m
        for t, lr in enumerate(lrs, 1):
            g, b2 = gradient(name, t - 1), 1 - t**-decay_rate
            scale = max(eps[1], x.square().mean().sqrt().item()) if scale_parameter else 1.0
            q = g**2 + eps[0]
            if factored:
                row, col = b2 * row + (1 - b2) * q.mean(-1), b2 * col + (1 - b2) * q.mean(-2)
                u = factors(row, col) * g
            else:
                v = b2 * v + (1 - b2) * q
                u = g / v.sqrt()
            u = u / max(1.0, u.square().mean().sqrt().item() / clip_threshold)
            m = (beta1 * m + (1 - beta1) * u).to(momentum).double()
            update = m
            if factored:
                w = (u - m) ** 2 + eps[2]
                res_row, res_col = (
                    beta3 * res_row + (1 - beta3) * w.mean(-1),
                    beta3 * res_col + (1 - beta3) * w.mean(-2),
                )
                update = factors(res_row, res_col) * m
            x = x - weight_decay * lr * scale * x - lr * scale * update
        results[name] = x
    return results


def factors(row: Tensor, col: Tensor) -> Tensor:
    return (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2)


@for_every(
    "options",
    [
        {},
        {"scale_parameter": True},
        {"clip_threshold": 0.3},
        {"decay_rate": 0.5, "beta1": 0.7, "beta3": 0.9},
        {"decay_rate": 0.0},
        {"eps": (1e-3, 0.5, 1e-2), "scale_parameter": True},
        {"weight_decay": 0.0},
    ],
    ids=str,
)
def test_its_rule(options: dict[str, Any]) -> None:
    ours = trained(lambda params: Came(params.items(), LRS, **{"weight_decay": 0.1, **options}))
    assert_close(ours, by_formula(**options))


def test_the_arguments_in_the_documents_order() -> None:
    arguments = (LRS, (1e-20, 1e-2, 1e-10), 0.5, 0.7, 0.8, 0.9, 0.2, True, False, False, False, 1)
    ours = trained(lambda params: Came(params.values(), *arguments))
    assert_close(ours, by_formula(*arguments[:8]))


@pytest.mark.parametrize("warmup_init", [False, True])
def test_relative_step(warmup_init: bool) -> None:
    ours = trained(lambda params: Came(params.items(), weight_decay=0.1, relative_step=True, warmup_init=warmup_init))
    least = [1e-6 * t if warmup_init else 1e-2 for t in range(1, STEPS + 1)]
    lrs = tuple(min(lr, 1 / math.sqrt(t)) for t, lr in enumerate(least, 1))
    assert_close(ours, by_formula(lrs), tolerance=1e-9)  # the rounding of x hides a step of 1e-6


def test_compression_keeps_the_momentum_and_nothing_else_in_float16() -> None:
    optimizers = []

    def make(params: dict[str, Parameter]) -> Came:
        optimizers.append(Came(params.items(), LRS, weight_decay=0.1, compression=True))
        return optimizers[0]

    assert_close(trained(make), by_formula(momentum=torch.float16), tolerance=2e-3)
    for state in optimizers[0].state.values():
        assert {name: value.dtype for name, value in state.items() if name not in ("step", "exp_avg")} == dict.fromkeys(
            state.keys() - {"step", "exp_avg"}, torch.float64
        )
        assert state["exp_avg"].dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_compression_with_tiny_gradients(dtype: torch.dtype) -> None:
    """In float16 an eps of 1e-30 is 0, so statistics in float16 would become NaN."""
    param = Parameter(torch.ones(8, 4, dtype=dtype))
    optim = Came([param], 1e-3, compression=True)
    for _ in range(50):
        assert optim((torch.full((8, 4), 1e-5, dtype=dtype),))
    assert param.isfinite().all()
    assert (param < 1).all()
    assert optim.state[param]["exp_avg_sq_row"].dtype == torch.float32


def test_groups_have_their_own_lr_and_weight_decay() -> None:
    def groups(params: dict[str, Parameter]) -> list[dict[str, Any]]:
        first = [item for item in params.items() if "norm" in item[0]]
        second = [item for item in params.items() if "norm" not in item[0]]
        order = {"order_params": list(reversed(params.items()))}
        return [{"params": first, "weight_decay": 0.3}, {"params": second, "lr": list(LRS)}, order]

    ours = trained(lambda params: Came(groups(params), learning_rate=0.07, weight_decay=0.1))
    norms, others = by_formula((0.07,) * STEPS, weight_decay=0.3), by_formula()
    assert_close(ours, {name: (norms if "norm" in name else others)[name] for name in ours})


def test_a_call_is_a_step() -> None:
    stepped = trained(lambda params: Came(params.items(), CosineDecayLR(0.0, 0.1, 9), weight_decay=0.1))
    params = weights()
    groups: list[dict[str, Any]] = [{"params": list(params.items())}, {"order_params": list(params.values())[::-1]}]
    optim = Came(groups, CosineDecayLR(0.0, 0.1, 9), weight_decay=0.1)
    for number in range(STEPS):
        assert optim(tuple(gradient(name, number) for name in reversed(params))).equal(torch.tensor(True))
    assert all(param.equal(stepped[name]) for name, param in params.items())


# ---- loss_scale -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_scale", [1024, 0.5, 1024.0])
def test_loss_scale_divides_gradients_and_writes_none(loss_scale: float) -> None:
    plain = trained(lambda params: Came(params.items(), LRS, weight_decay=0.1))
    params = weights()
    optim = Came(params.items(), LRS, weight_decay=0.1, loss_scale=loss_scale)
    for number in range(STEPS):
        step(params, optim, number)
        assert all(param.grad.equal(loss_scale * gradient(name, number)) for name, param in params.items())  # type: ignore[union-attr]
    assert all(param.equal(plain[name]) for name, param in params.items())


def scaled_training(loss_scale: float, scaler: torch.amp.GradScaler) -> nn.Linear:
    torch.manual_seed(3)
    model = nn.Linear(6, 5)
    optim = Came(model.parameters(), 0.1, weight_decay=0.1, loss_scale=loss_scale)
    # Bighorn's and Lightning's scalers set this for an optimizer that unscales inside its step.
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
    """Both have the same number, as MindFormers' documentation requires, but only one of them may divide by it."""
    manager = FixedLossScaleManager(1024.0, drop_overflow_update=False)
    params = weights()
    optim = Came(params.items(), 0.1, weight_decay=0.1, loss_scale=manager.get_loss_scale())
    step(params, optim, 0)
    scaler = manager.loss_scaler()
    with refused(list(params.values()), optim, RuntimeError, "loss_scale=1024 divides the gradients"):
        scaler.scale(torch.ones(()))
        scaler.step(optim)


def test_loss_scale_beside_a_scaler_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"loss_scale=8 divides the gradients, and so does the scaler"):
        scaled_training(8, torch.amp.GradScaler("cpu", init_scale=1024.0))


# ---- errors ---------------------------------------------------------------------------------------------------------


@for_every(
    ("options", "error", "message"),
    [
        ({"learning_rate": "0.1"}, TypeError, "^learning_rate must be"),
        ({"learning_rate": {0.1}}, TypeError, "^learning_rate must be"),
        ({"learning_rate": -0.1}, ValueError, r"^learning_rate=-0\.1"),
        ({"learning_rate": []}, ValueError, "^learning_rate: values is empty"),
        ({"learning_rate": None}, ValueError, "^learning_rate is missing"),
        ({"relative_step": True}, ValueError, r"^relative_step=True.*leave learning_rate=0\.1 out"),
        ({"warmup_init": True}, ValueError, r"^warmup_init=True.*set relative_step=True"),
        ({"learning_rate": None, "warmup_init": True}, ValueError, r"^warmup_init=True.*set relative_step=True"),
        ({"eps": 1e-30}, TypeError, "^eps must be three floats"),
        ({"eps": (1e-30, 1e-16)}, ValueError, "^eps=.*three floats"),
        ({"eps": (1e-30, 1, 1e-16)}, TypeError, r"^eps\[1\] must be a float"),
        ({"eps": [0.0, 1e-3, 1e-16]}, ValueError, r"^eps\[0\]=0\.0"),
        ({"eps": (1e-30, 1e-3, -1e-16)}, ValueError, r"^eps\[2\]=-1e-16"),
        ({"clip_threshold": "1"}, TypeError, "^clip_threshold must be"),
        ({"clip_threshold": 0}, ValueError, "^clip_threshold=0"),
        ({"decay_rate": 1}, TypeError, "^decay_rate must be a float"),
        ({"decay_rate": 1.1}, ValueError, r"^decay_rate=1\.1.*\[0, 1\]"),
        ({"decay_rate": -0.1}, ValueError, r"^decay_rate=-0\.1"),
        ({"beta1": 1}, TypeError, "^beta1 must be a float"),
        ({"beta1": -0.1}, ValueError, r"^beta1=-0\.1 .*\(0, 1\)$"),
        ({"beta1": 1.1}, ValueError, r"^beta1=1\.1"),
        ({"beta1": 0.0}, ValueError, "^beta1=0.0 .*without momentum"),
        ({"beta1": 1.0}, ValueError, r"^beta1=1\.0"),
        ({"beta3": 0}, TypeError, "^beta3 must be a float"),
        ({"beta3": -0.1}, ValueError, r"^beta3=-0\.1"),
        ({"beta3": 1.1}, ValueError, r"^beta3=1\.1 .*\[0, 1\)$"),
        ({"beta3": 1.0}, ValueError, r"^beta3=1\.0.*instability.*stay at 0"),
        ({"weight_decay": "0.1"}, TypeError, "^weight_decay must be"),
        ({"weight_decay": 1}, TypeError, r"^weight_decay must be a float, not 1 \(int\)"),
        ({"weight_decay": [0.1]}, TypeError, "^weight_decay must be"),
        ({"weight_decay": -0.1}, ValueError, r"^weight_decay=-0\.1"),
        ({"weight_decay": 2.0}, ValueError, r"^weight_decay=2\.0 .*\[0, 1\]"),
        ({"scale_parameter": 1}, TypeError, "^scale_parameter must be"),
        ({"relative_step": 1}, TypeError, "^relative_step must be"),
        ({"warmup_init": 1}, TypeError, "^warmup_init must be"),
        ({"compression": 1}, TypeError, "^compression must be"),
        ({"loss_scale": "1"}, TypeError, "^loss_scale must be a number"),
        ({"loss_scale": True}, TypeError, "^loss_scale must be a number"),
        ({"loss_scale": 0}, ValueError, "^loss_scale=0.*above 0"),
        ({"loss_scale": -1.0}, ValueError, r"^loss_scale=-1\.0"),
        ({"loss_scale": math.inf}, ValueError, "^loss_scale=inf"),
        ({"params": [3]}, TypeError, r"^params\[0\] must be a torch\.nn\.Parameter"),
        ({"params": 3}, TypeError, "^params must be a list"),
        ({"use_locking": True}, TypeError, "use_locking"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Came(**{"params": weights().items(), "learning_rate": 0.1, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learning_rate": 0.1}, ValueError, "^group 1: unknown key 'learning_rate'"),
        ({"decay_rate": 0.7}, ValueError, "^group 1: unknown key 'decay_rate'"),
        ({"lr": -0.1}, ValueError, r"^group 1: lr=-0\.1"),
        ({"weight_decay": 1.5}, ValueError, r"^group 1: weight_decay=1\.5.*\[0, 1\]"),
        ({"params": [3]}, TypeError, r"^group 1: params\[0\] must be"),
    ],
)
def test_groups(options: dict[str, Any], error: type[Exception], message: str) -> None:
    first, second, *_ = weights().items()
    with pytest.raises(error, match=message):
        Came([{"params": [first]}, {"params": [second], **options}], 0.1)
    optim = Came([{"params": [first]}], 0.1)
    with refused([first[1]], optim, error, message):
        optim.add_param_group({"params": [second], **options})


def test_integers_that_are_taken() -> None:
    optim = Came([{"params": weights().items(), "weight_decay": 1}], 1, clip_threshold=2, loss_scale=3)
    assert isinstance(optim, bighorn.Came)
    group = optim.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["clip_threshold"], optim.loss_scale) == (1, 1, 2, 3)
