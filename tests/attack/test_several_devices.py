"""A model on several devices, simulated by fake tensors: a clip, a scaler and counts of skipped steps meet."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from bighorn import Lamb
from bighorn._optim.step_plan import scale_and_mask
from tests.support.attack_settings import tries

DEVICES = st.sampled_from(["cuda:0", "cuda:1", "cuda:2"])


@tries(200)
@given(
    sums=DEVICES,
    grad_scale=st.none() | DEVICES,
    found_inf=st.none() | DEVICES,
    max_grad_norm=st.none() | st.just(1.0),
    skip_nonfinite=st.booleans(),
)
def test_any_placement_has_one_factor_and_one_mask(
    sums: str, grad_scale: str | None, found_inf: str | None, max_grad_norm: float | None, skip_nonfinite: bool
) -> None:
    settings = Lamb([Parameter(torch.ones(2))], max_grad_norm=max_grad_norm, skip_nonfinite=skip_nonfinite)._settings
    with FakeTensorMode():
        total = torch.empty((), dtype=torch.float64, device=sums)
        first, second = (None if at is None else torch.empty((), device=at) for at in (grad_scale, found_inf))
        scale, mask = scale_and_mask(settings, first, second, lambda: total)
        assert isinstance(scale, Tensor) == (max_grad_norm is not None or grad_scale is not None)
        assert (mask is not None) == (skip_nonfinite or found_inf is not None)
        if settings.needs_all_grads:
            found = [each.device for each in (scale, mask) if isinstance(each, Tensor)]
            assert set(found) == {total.device}
