"""torch_npu's NpuFusedLamb works as documented, without the documented restrictions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bighorn.compat.torch_npu import NpuFusedLamb
from tests.support.error_checks import weights


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


def test_float16_parameters_are_closer_to_float64_than_with_float16_moments() -> None:
    """torch_npu's tests record 13.414 and 149.0, and docs/from-npu.md these figures."""
    for shape, in_float64, recorded, documented in (((2, 3), 13.407, 13.414, 13.409), ((6, 3), 148.88, 149.0, 148.92)):
        sums = []
        for dtype in (torch.float16, torch.float64):
            param = torch.arange(shape[0] * shape[1], dtype=dtype).view(shape).requires_grad_()
            param.grad = param.detach() / 100
            optimizer = NpuFusedLamb([param], lr=0.01, eps=1e-5)
            for _ in range(10):
                optimizer.step()
            sums.append(float(param.detach().double().sum()))
        ours, exact = sums
        assert exact == pytest.approx(in_float64, abs=5e-3)
        assert ours == pytest.approx(documented, abs=5e-3)
        assert abs(ours - exact) < abs(recorded - exact)


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
