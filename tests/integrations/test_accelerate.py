"""Accelerate: docs/trainers.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from bighorn import Came, Lamb, telemetry
from tests.support.trainer_model import INSTALL, OPTIONS, Net, assert_same, batches, by_hand

accelerate = pytest.importorskip("accelerate", reason=INSTALL)

pytestmark = pytest.mark.filterwarnings("ignore")


def lamb(net: Net) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.05, **OPTIONS)


def came(net: Net) -> Came:
    return Came(net.named_parameters(), lr=0.05, weight_decay=0.1, exclude_from_weight_decay=["bias", "norm"])


def falling(step: int) -> float:
    return float(0.8**step)


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
