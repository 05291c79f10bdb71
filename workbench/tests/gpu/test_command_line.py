"""`bighorn train --device cuda`, in separate processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_steps import GPU, needs_cuda

pytestmark = [*GPU, needs_cuda]


@pytest.mark.parametrize(
    "options",
    [
        "--optimizer lamb --max-grad-norm 1",
        "--optimizer came --state-dtype int8",
        "--optimizer lamb --precision bf16 --optimizer-option weight_rounding=stochastic",
        "--optimizer came --precision fp16",
        "--optimizer adamw --precision fp16 --max-grad-norm 1",
    ],
)
def test_train_learns_and_its_checkpoint_loads_on_both_devices(tmp_path: Path, options: str) -> None:
    def train(*words: str) -> tuple[str, dict[str, Any]]:
        outputs = ["--json", "run.json", "--report", "run.html"]
        command = [sys.executable, "-m", "bighorn_workbench", "train", *words, *outputs]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((tmp_path / "run.json").read_text())

    output, found = train("--device", "cuda", "--save", "run.pt", *options.split())
    assert output.count(torch.cuda.get_device_name()) == 2
    assert found["environment"]["device"] == torch.cuda.get_device_name()
    assert found["result"]["test_accuracy"] > 0.9
    for device in ("cuda", "cpu"):
        output, again = train("--resume", "run.pt", "--device", device)
        assert again["result"]["test_loss"] == found["result"]["test_loss"]
        assert ("cpu now" in output) == (device == "cpu")
