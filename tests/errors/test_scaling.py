"""Errors for options and calls of the loss scaler."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from bighorn import ExponentialScale, FixedScale, Lamb, LossScaler, WindowScale
from tests.support.loss_scaling import backward
from tests.support.tables import for_every

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "scale-0": (lambda: FixedScale(0.0), ValueError, "init_scale=0.0 .*above 0"),
    "scale-negative": (lambda: FixedScale(-1.0), ValueError, "init_scale=-1.0"),
    "scale-inf": (lambda: WindowScale(math.inf), ValueError, "init_scale=inf .*float32"),
    "scale-beyond": (lambda: WindowScale(1e39), ValueError, "init_scale=1e[+]39 .*float32"),
    "scale-nan": (lambda: WindowScale(math.nan), ValueError, "init_scale=nan"),
    "scale-text": (lambda: FixedScale("8"), TypeError, "init_scale must be a number, not '8'"),  # type: ignore[arg-type]
    "scale-bool": (lambda: FixedScale(True), TypeError, "init_scale must be a number"),
    "growth-1": (lambda: WindowScale(growth_factor=1.0), ValueError, "growth_factor=1.0 .*above 1"),
    "backoff-1": (lambda: ExponentialScale(backoff_factor=1), ValueError, "backoff_factor=1 .*in .0, 1.$"),
    "backoff-0": (lambda: ExponentialScale(backoff_factor=0), ValueError, "backoff_factor=0 "),
    "interval-0": (lambda: WindowScale(growth_interval=0), ValueError, "growth_interval=0 .*at least 1"),
    "interval-half": (lambda: WindowScale(growth_interval=1.5), TypeError, "growth_interval must be an integer"),  # type: ignore[arg-type]
    "bad-0": (lambda: ExponentialScale(backoff_interval=-2), ValueError, "backoff_interval=-2"),
    "policy-number": (lambda: LossScaler(1024.0), TypeError, "policy must be a FixedScale.*1024.0"),  # type: ignore[arg-type]
    "policy-device": (lambda: LossScaler("cuda"), TypeError, "policy must be .*'cuda'"),  # type: ignore[arg-type]
    "policy-class": (lambda: LossScaler(WindowScale), TypeError, "policy must be"),  # type: ignore[arg-type]
    "min-0": (lambda: LossScaler(min_scale=0.0), ValueError, "min_scale=0.0"),
    "max-text": (lambda: LossScaler(max_scale="big"), TypeError, "max_scale"),  # type: ignore[arg-type]
    "below-min": (lambda: LossScaler(FixedScale(0.5)), ValueError, "init_scale=0.5 is not within min_scale=1.0"),
    "above-max": (lambda: LossScaler(max_scale=2.0), ValueError, "init_scale=65536.0 .*max_scale=2.0"),
    "skip": (lambda: LossScaler(skip_on_overflow=1), TypeError, "skip_on_overflow must be True or False"),  # type: ignore[arg-type]
    "enabled": (lambda: LossScaler(enabled="no"), TypeError, "enabled must be True or False"),  # type: ignore[arg-type]
    "most-0": (lambda: LossScaler(max_consecutive_overflows=0), ValueError, "max_consecutive_overflows=0"),
    "most-text": (lambda: LossScaler(max_consecutive_overflows="3"), TypeError, "max_consecutive_overflows"),  # type: ignore[arg-type]
    "group": (lambda: LossScaler(process_group="world"), TypeError, "process_group.*'world'"),
    "torchs-option": (lambda: LossScaler(init_scale=2.0), TypeError, r"LossScaler\(WindowScale\(init_scale="),
    "device": (lambda: LossScaler(device="cuda"), TypeError, "'device'; the scale lives where"),
    "typo": (lambda: LossScaler(min_scal=2.0), TypeError, r"'min_scal' \(did you mean 'min_scale'"),
    "no-optimizer": (lambda: LossScaler().step(3), TypeError, "must be a torch.optim.Optimizer, not 3"),  # type: ignore[arg-type]
    "no-state": (lambda: LossScaler().load_state_dict(None), TypeError, "must be what state_dict.*not None"),  # type: ignore[arg-type]
    "half-a-state": (
        lambda: LossScaler().load_state_dict({"scale": 1.0}),
        ValueError,
        r"misses \['_growth_tracker'\]: it",
    ),
    "foreign": (lambda: LossScaler(xyz=2.0), TypeError, r"'xyz'\. Known: policy, min_scale"),
}


@for_every("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()


def test_closures_are_refused() -> None:
    param = Parameter(torch.ones(3))
    for optimizer in (Lamb([param]), torch.optim.SGD([param])):
        scaler = LossScaler()
        backward(scaler.scale(param.sum()))
        with pytest.raises(RuntimeError, match="closure"):
            scaler.step(optimizer, lambda: 1.0)
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, closure=lambda: 1.0)
        scaler.step(optimizer, None)  # as Accelerate does
