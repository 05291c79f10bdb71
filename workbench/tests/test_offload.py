"""`bighorn train --offload` and `bighorn memory --offload`, with the stand-in for a device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bighorn import Lamb, offload
from bighorn.offloading import OffloadedOptimizer
from bighorn_workbench import train_step
from bighorn_workbench.config import ParallelConfig
from bighorn_workbench.footprint import Weights, offload_bytes
from tests.support.cases import needs_grad_dtype
from tests.support.slow_copies import SlowCopies
from workbench.tests.command_line import Invoke

KEPT = ("loss", "batch_metrics", "lr", "metrics", "scale", "skipped")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[OffloadedOptimizer]:
    """Let the CPU replace a GPU; return the list of offloaded optimizers."""
    made: list[OffloadedOptimizer] = []

    def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> OffloadedOptimizer:
        made.append(offload(model, optimizer, copies=SlowCopies(), **options))
        return made[-1]

    check = ParallelConfig.check
    monkeypatch.setattr(train_step, "offload", offloaded)
    monkeypatch.setattr(
        ParallelConfig, "check", lambda self, *rest: check(ParallelConfig(accumulate=self.accumulate), *rest)
    )
    return made


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer", "came", "--accumulate", "2"],
        ["--max-grad-norm", "0.3"],
        ["--optimizer", "adamw"],
        ["--precision", "fp16", "--loss-scale", "1e38"],
    ],
    ids=" ".join,
)
def test_an_offloaded_run_is_the_run(options: list[str], invoke: Invoke, stand_in: list[OffloadedOptimizer]) -> None:
    """Runs with and without offload load each other's checkpoints."""
    train = partial(invoke, "train", "--steps", 10, *options)
    train("--json", "plain.json", "--save", "plain.pt")
    train("--json", "offloaded.json", "--save", "offloaded.pt", "--offload")
    assert len(stand_in) == 1
    plain, offloaded = (json.loads(Path(f"{name}.json").read_text()) for name in ("plain", "offloaded"))
    assert [offloaded["history"][key] for key in KEPT] == [plain["history"][key] for key in KEPT]
    assert offloaded["result"]["optimizer_state_bytes"] == plain["result"]["optimizer_state_bytes"]
    saved = [torch.load(f"{name}.pt", weights_only=True) for name in ("plain", "offloaded")]
    for ours, theirs in zip(*(each["run"]["model"].values() for each in saved), strict=True):
        assert torch.equal(ours, theirs)
    invoke("train", "--resume", "plain.pt", "--offload", "--json", "again.json")
    invoke("train", "--resume", "offloaded.pt")


def test_a_clip_of_torchs_optimizers(invoke: Invoke, stand_in: list[OffloadedOptimizer]) -> None:
    losses = []
    for offloads in ([], ["--offload"]):
        invoke("train", "--steps", 8, "--optimizer", "adamw", "--max-grad-norm", "0.3", "--json", "r.json", *offloads)
        losses.append(json.loads(Path("r.json").read_text())["history"]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(stand_in) == 1


def test_the_cpu_has_nothing_to_offload(invoke: Invoke) -> None:
    result = invoke("train", "--offload", "--steps", 2, code=1)
    assert "give --device cuda, or leave --offload out" in result.output


def test_memory(invoke: Invoke) -> None:
    words = ("memory", "--shapes", "llama_7b", "--optimizers", "lamb,adamw")
    assert "with bighorn.offload device  host" in invoke(*words, "--offload", "--json", "m.json").output
    assert "with bighorn.offload" not in invoke(*words).output
    found = json.loads(Path("m.json").read_text())
    places, state, weights = found["offload"]["lamb"], found["total"]["lamb"], found["parameters"] * 4
    assert places["host_with_masters"] is None
    assert places["host"] == 2 * weights + state
    assert 2 * 10e6 < places["device"] - weights < 1.2e9


def test_a_small_model_has_no_more_gradients_than_it_has() -> None:
    weights = Weights([("w", torch.empty(50, 8, device="meta"))], frozen_bytes=100)
    found = offload_bytes("lamb", weights, 3204, 3204)
    assert found == {"device": 100 + 2 * 1600, "host": 2 * 1600 + 3204, "host_with_masters": None}


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param("lamb", Lamb, marks=needs_grad_dtype), ("adamw", torch.optim.AdamW)]
)
def test_masters_are_counted(name: str, kind: Any, invoke: Invoke, tmp_path: Path) -> None:
    net = nn.Linear(70, 30).bfloat16()
    (tmp_path / "nets.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(70, 30)\n")
    options = ["--model", "nets:net", "--optimizers", name, "--precision", "bf16", "--offload", "--json", "m.json"]
    assert "masters" in invoke("memory", *options).output
    optimizer = offload(net, kind(net.parameters(), lr=0.1), masters=True, copies=SlowCopies())
    net(torch.ones(2, 70).bfloat16()).sum().backward()
    optimizer.step()
    params = [param for group in optimizer._groups for param in group]
    held = sum(param.weights.nbytes + param.grad.nbytes + param.host.nbytes for param in params)
    state = sum(value.nbytes for param in params for value in optimizer.optimizer.state[param.host].values())
    assert json.loads(Path("m.json").read_text())["offload"][name]["host_with_masters"] == held + state
