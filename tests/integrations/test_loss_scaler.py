"""The loss scaler in the loops of Accelerate and Lightning, which accept a GradScaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bighorn import Lamb, LossScaler, WindowScale

DATA = torch.linspace(-1, 1, 32).reshape(8, 4)
BAD = 2
"""The step whose gradient overflows."""


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def make(kind: str, params: Any) -> torch.optim.Optimizer:
    return Lamb(params, lr=0.1, weight_decay=0.1) if kind == "Lamb" else torch.optim.AdamW(params, lr=0.1)


def by_hand(kind: str, clip: float | None) -> tuple[nn.Linear, float]:
    """Return the model and the scale of the same training without a scaler and without the step that overflows."""
    net = model()
    optimizer = make(kind, net.parameters())
    for step in range(4):
        if step == BAD:
            continue
        optimizer.zero_grad()
        net(DATA[2 * step : 2 * step + 2]).square().sum().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net, 512.0


def assert_same(net: nn.Module, scaler: LossScaler, kind: str, clip: float | None) -> None:
    expected, scale = by_hand(kind, clip)
    for a, b in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == scale


kinds = pytest.mark.parametrize("kind", ["Lamb", "AdamW"])
clips = pytest.mark.parametrize("clip", [None, 0.5])


@kinds
@clips
@pytest.mark.filterwarnings("ignore")
def test_accelerate(kind: str, clip: float | None) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'bighorn[test-integrations]'")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = scaler = LossScaler(WindowScale(1024.0))
    net = model()
    net, optimizer = accelerator.prepare(net, make(kind, net.parameters()))
    # Accelerate's clip unscales only under float16, and accelerate 1.15 refuses float16 without a GPU.
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    for step in range(4):
        optimizer.zero_grad()
        accelerator.backward(net(DATA[2 * step : 2 * step + 2]).square().sum() * (torch.inf if step == BAD else 1))
        if clip is not None:
            accelerator.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        # If the optimizer itself skips, the host does not wait for the result.
        assert optimizer.step_was_skipped == (step == BAD and kind == "AdamW")
    assert_same(net, scaler, kind, clip)


@kinds
@clips
@pytest.mark.filterwarnings("ignore")
def test_lightning(kind: str, clip: float | None, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="pip install 'bighorn[test-integrations]'")
    from lightning.pytorch.plugins import MixedPrecision

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                loss: Tensor = self.net(batch).square().sum()
            return loss * (torch.inf if index == BAD else 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(kind, self.net.named_parameters())

    scaler = LossScaler(WindowScale(1024.0))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        gradient_clip_val=clip,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(DATA, batch_size=2))  # type: ignore[arg-type]
    assert_same(module.net, scaler, kind, clip)

    path = tmp_path / "checkpoint.ckpt"
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["MixedPrecision"] == scaler.state_dict()
