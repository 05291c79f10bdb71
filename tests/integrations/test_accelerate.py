"""Accelerate: docs/trainers.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from bighorn import LossScaler, WindowScale, telemetry
from tests.support.trainer_model import (
    INSTALL,
    OVERFLOWS,
    Net,
    adamw,
    assert_same,
    batches,
    by_hand,
    came,
    falling,
    lamb,
)

accelerate = pytest.importorskip("accelerate", reason=INSTALL)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("make", [lamb, came])
@pytest.mark.parametrize("bf16", [False, True])
def test_prepare_mixed_precision_accumulation_and_clipping(make: Any, bf16: bool) -> None:
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16" if bf16 else "no", gradient_accumulation_steps=2
    )
    net = Net()
    optimizer = make(net)
    told: list[int] = []
    telemetry.log_every(optimizer, 3, lambda values, step: told.append(step) if values else None)
    model, prepared, scheduler = accelerator.prepare(net, optimizer, LambdaLR(optimizer, falling))
    for inputs, labels in batches():
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs, labels)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
    assert_same(net, by_hand(make, falling, accumulate=2, clip=0.5, bf16=bf16))
    assert told == [3, 6]
    assert telemetry.scalars(prepared) == telemetry.scalars(optimizer)


@pytest.mark.parametrize("make", [lamb, came])
def test_a_saved_state_is_gone_on_with_bitwise(make: Any, tmp_path: Path) -> None:
    nets = []
    for steps in (range(12), range(6), range(6, 12)):
        net = Net()
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(net, make(net))
        if steps.start:
            accelerator.load_state(str(tmp_path))
        for inputs, labels in batches()[steps.start : steps.stop]:
            accelerator.backward(model(inputs, labels)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if steps.stop == 6:
            accelerator.save_state(str(tmp_path))
        nets.append(net)
    for a, b in zip(nets[0].parameters(), nets[2].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [lamb, adamw])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_loss_scaler(make: Any, clip: float | None) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = scaler = LossScaler(WindowScale(1024.0))
    net = Net()
    model, optimizer = accelerator.prepare(net, make(net))
    # Accelerate's clip unscales only under float16, and accelerate 1.15 refuses float16 without a GPU.
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    for step, (inputs, labels) in enumerate(batches()):
        accelerator.backward(model(inputs, labels)["loss"] * (torch.inf if step == OVERFLOWS else 1))
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        # If the optimizer itself skips, the host does not wait for the result.
        assert optimizer.step_was_skipped == (step == OVERFLOWS and make is adamw)
        optimizer.zero_grad()
    assert_same(net, by_hand(make, clip=clip, without=OVERFLOWS))
    assert scaler.get_scale() == 512.0
