"""Lightning: docs/trainers.md."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from bighorn import LossScaler, WindowScale, telemetry
from tests.support.trainer_model import (
    INPUTS,
    INSTALL,
    LABELS,
    OVERFLOWS,
    Net,
    adamw,
    assert_same,
    by_hand,
    came,
    falling,
    lamb,
)

lightning = pytest.importorskip("lightning", reason=INSTALL)

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, make: Any, overflows: int | None = None) -> None:
        super().__init__()
        self.net, self.make, self.overflows = Net(), make, overflows

    def training_step(self, batch: tuple[Tensor, Tensor], step: int) -> Tensor:
        with contextlib.nullcontext() if self.overflows is None else torch.autocast("cpu", enabled=False):
            loss: Tensor = self.net(*batch)["loss"]
        return loss * (torch.inf if step == self.overflows else 1)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.net)
        scheduler = {"scheduler": LambdaLR(optimizer, falling), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def fit(module: Module, folder: Path, ckpt_path: Path | None = None, **options: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "logger": False, **options},
    )
    data = torch.utils.data.TensorDataset(INPUTS, LABELS)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("make", [lamb, came])
@pytest.mark.parametrize("bf16", [False, True])
def test_amp_accumulation_and_clipping(make: Any, bf16: bool, tmp_path: Path) -> None:
    module = Module(make)
    precision = "bf16-mixed" if bf16 else "32-true"
    fit(module, tmp_path, precision=precision, gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert_same(module.net, by_hand(make, falling, accumulate=2, clip=0.5, bf16=bf16))


@pytest.mark.parametrize("make", [lamb, came])
def test_resuming_is_bitwise(make: Any, tmp_path: Path) -> None:
    whole, half, resumed = Module(make), Module(make), Module(make)
    fit(whole, tmp_path, max_epochs=2)
    path = tmp_path / "half.ckpt"
    fit(half, tmp_path).save_checkpoint(path)
    trainer = fit(resumed, tmp_path, path, max_epochs=2)
    assert trainer.global_step == 24
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [lamb, adamw])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_loss_scaler(make: Any, clip: float | None, tmp_path: Path) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    module, scaler = Module(make, OVERFLOWS), LossScaler(WindowScale(1024.0))
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    trainer = fit(module, tmp_path, plugins=plugins, gradient_clip_val=clip)
    assert_same(module.net, by_hand(make, falling, clip=clip, without=OVERFLOWS))
    assert scaler.get_scale() == 512.0
    trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")
    saved = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    assert saved["MixedPrecision"] == scaler.state_dict()


def test_telemetry_reaches_the_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from bighorn.integrations.lightning import TelemetryCallback

    logger = CSVLogger(tmp_path)
    callback = TelemetryCallback(every=2)
    trainer = fit(Module(lamb), tmp_path, logger=logger, callbacks=[callback], accumulate_grad_batches=3)
    expected = telemetry.scalars(trainer.optimizers[0])
    header, first, second = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), row.split(","), strict=True)) for row in (first, second)]
    assert [row["step"] for row in rows] == ["2", "4"]
    assert {key: float(value) for key, value in rows[1].items() if key != "step"} == pytest.approx(expected)


def test_a_period_that_is_none_is_refused() -> None:
    from bighorn.integrations.lightning import TelemetryCallback

    with pytest.raises(TypeError, match="must be an integer, not '50'"):
        TelemetryCallback(every="50")  # type: ignore[arg-type]
