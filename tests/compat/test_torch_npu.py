"""torch_npu's NpuFusedLamb works as documented, without the documented restrictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn.compat.torch_npu import NpuFusedLamb
from tests.support.compat_training import LRS, assert_close, by_scalar, trained
from tests.support.error_checks import weights
from tests.support.tables import for_every


def test_the_documents_example() -> None:
    """The example of the documentation, without `.npu()` and import lines. The last parameter has no gradient."""

    def _create_simple_params_and_grads() -> list[Tensor]:
        params = [
            torch.arange(6).reshape(2, 3).float(),
            torch.arange(12).reshape(4, 3).float(),
            torch.arange(6).reshape(2, 3).half(),
            torch.arange(12).reshape(4, 3).half(),
            torch.arange(15).reshape(5, 3).float(),
            torch.arange(18).reshape(6, 3).half(),
            torch.arange(6).reshape(2, 3).float(),
        ]

        for i, p in enumerate(params):
            if i < len(params) - 1:
                p.requires_grad = True
                p.grad = p.clone().detach() / 100.0

        return params

    opt_kwargs = {"lr": 0.01, "eps": 1e-5}
    params = _create_simple_params_and_grads()
    fused_opt = NpuFusedLamb(params, **opt_kwargs)  # type: ignore[arg-type]
    with torch.no_grad():
        fused_opt.step()

    for before, after in zip(_create_simple_params_and_grads()[:-1], params, strict=False):
        assert after.dtype == before.dtype
        m, v = 0.1 * before.detach().double() / 100, 0.001 * (before.detach().double() / 100) ** 2
        r = m / (v.sqrt() + 1e-5)
        expected = before.detach().double() - 0.01 * before.double().norm().clamp(max=10) / r.norm() * r
        tolerance = 1e-6 if after.dtype == torch.float32 else 1e-3
        torch.testing.assert_close(after.detach().double(), expected, rtol=tolerance, atol=tolerance)
    assert params[-1].equal(torch.arange(6).reshape(2, 3).float())


@pytest.mark.parametrize("order", [2, 1.0, torch.inf])
@pytest.mark.parametrize("max_norm", [0.5, 100])
def test_the_fused_clip_is_torchs_over_all_groups(max_norm: float, order: float) -> None:
    ours, theirs = weights(), weights()
    optimizer = NpuFusedLamb([{"params": ours[:1]}, {"params": ours[1:]}])
    for params in (ours, theirs):
        for param in params[:-1]:
            param.grad = param.detach() + 1
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, order)
    assert optimizer.clip_grad_norm_fused_(max_norm, norm_type=order).equal(expected)
    assert ours[-1].grad is None
    for a, b in zip(ours[:-1], theirs, strict=False):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.equal(b.grad)
    with pytest.raises(ValueError, match=r"max_norm=-1 is out of range"):
        optimizer.clip_grad_norm_fused_(-1)


WITNESS = {"weight_decay": 0.1, "bias_correction": False, "weight_norm_bounds": (0.0, 10.0)}


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_it_is_version_3_of_the_paper(adam: bool, clips: bool) -> None:
    ours = trained(
        lambda params: NpuFusedLamb(params.values(), lr=LRS, weight_decay=0.1, adam=adam, use_global_grad_norm=clips)
    )
    assert_close(ours, by_scalar(lambda _: {**WITNESS, "adam": adam}, max_grad_norm=1.0 if clips else None))


def test_the_arguments_in_the_documents_order() -> None:
    one = trained(lambda params: NpuFusedLamb(params.values(), 0.1, (0.8, 0.9), 1e-3, 0.1, True, True))
    two = trained(
        lambda params: NpuFusedLamb(
            params.values(),
            lr=0.1,
            betas=(0.8, 0.9),
            eps=1e-3,
            weight_decay=0.1,
            adam=True,
            use_global_grad_norm=True,
        )
    )
    assert all(map(torch.equal, one.values(), two.values()))


@for_every(
    ("options", "error", "message"),
    [
        ({"lr": -0.1}, ValueError, r"lr=-0\.1"),
        ({"eps": -1e-6}, ValueError, "eps=-1e-06"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\]=-0\.1"),
        ({"betas": (0.9, 1.1)}, ValueError, r"betas\[1\]=1\.1"),
        ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]=1\.0"),
        ({"weight_decay": -1}, ValueError, "weight_decay=-1"),
        ({"adam": 1}, TypeError, "adam must be"),
        ({"use_global_grad_norm": 1}, TypeError, "use_global_grad_norm must be"),
        ({"bias_correction": True}, TypeError, "bias_correction"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NpuFusedLamb(weights(), **options)


# ---- forbidden by its constraints, allowed by ours ----------------------------------------------------------------


def replaced(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def shared(model: nn.Module) -> None:
    whole = torch.cat([param.data.flatten() for param in model.parameters()])
    torch.nn.utils.vector_to_parameters(whole, model.parameters())


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "cpu": lambda model: model.cpu(),
    "double-and-back": lambda model: model.double().float(),
    "data": replaced,
    "one-buffer": shared,
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "grad-none": lambda model: model.zero_grad(set_to_none=True),
    "in-place": lambda model: [param.data.mul_(1.0) for param in model.parameters()],
}


def moved_training(move: Callable[[nn.Module], object]) -> list[Parameter]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    optimizer = NpuFusedLamb(model.parameters(), lr=0.1, weight_decay=0.1, use_global_grad_norm=True)
    for seed in range(5):
        optimizer.zero_grad()
        data = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        model(data).square().mean().backward()
        optimizer.step()
        if seed in (0, 2):
            move(model)
    return list(model.parameters())


@pytest.mark.parametrize("move", MOVES)
def test_parameters_may_be_allocated_anew(move: str) -> None:
    for ours, still in zip(moved_training(MOVES[move]), moved_training(lambda _: None), strict=True):
        torch.testing.assert_close(ours, still, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_module_that_moves_to_another_dtype_goes_on_there(dtype: torch.dtype) -> None:
    model = nn.Linear(6, 5)
    still = nn.Linear(6, 5).to(dtype)
    still.load_state_dict(model.state_dict())
    ours, plain = (NpuFusedLamb(net.parameters(), lr=0.1, weight_decay=0.1) for net in (model, still))
    for number in range(4):
        if number == 2:
            model.to(dtype)
        for net, optimizer in ((model, ours), (still, plain)):
            for param in net.parameters():
                generator = torch.Generator().manual_seed(number)
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()
    for param, other in zip(model.parameters(), still.parameters(), strict=True):
        assert param.dtype == dtype
        torch.testing.assert_close(param, other, rtol=0.05, atol=0.05)
        assert ours.state[param]["exp_avg"].dtype in (torch.float32, torch.float64)


def test_a_parameter_set_to_none_in_its_module_is_out_of_reach_but_harmless() -> None:
    model = nn.Linear(6, 5)
    optimizer = NpuFusedLamb(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    model.bias = None  # type: ignore[assignment]
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
