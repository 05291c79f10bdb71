"""`bighorn train --device`, with "meta" as a simulated GPU: it refuses CPU tensors and reads of values."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bighorn_workbench import config, environment, run, train
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.checkpoint import digest
from bighorn_workbench.config import ParallelConfig, RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.ranks import Ranks
from bighorn_workbench.run import MAX_UNREAD, DivergedError, Run
from bighorn_workbench.values import device_of
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


@needs_no_gpu
@for_every("command", ["train", "lr-find", "bench"])
def test_cuda_needs_a_device(invoke: Invoke, command: str) -> None:
    output = invoke(command, "--device", "cuda", "--report", "out/run.html", code=1).output
    assert "--device cuda: torch sees no CUDA device here" in output
    assert "or --device cpu" in output
    assert not Path("out").exists()


def test_the_package_of_a_device_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of torch_xla registers its device; the package of this test registers none."""
    (tmp_path / "torch_opengl.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="--device opengl: torch has no such device here") as raised:
        device_of("opengl")
    assert len(str(raised.value)) < 220
    assert sys.modules.pop("torch_opengl").__file__ == str(tmp_path / "torch_opengl.py")


@pytest.mark.parametrize("command", ["train", "lr-find", "compare"])
def test_runs_are_not_made_on_xla(command: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "device_of", lambda _: torch.device("xla"))
    output = invoke(command, "--device", "xla", "--report", "run.html", code=1).output
    assert "--device xla: its steps are graphs that end where a program calls torch_xla.sync()" in output


def test_cuda_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "device_of", torch.device)
    outputs: dict[str, Path | None] = dict.fromkeys(("--save", "--report", "--json"))
    ctx = train.train.make_context("train", ["--device", "cuda"])
    with pytest.raises(InputError, match="--device cuda with 2 processes is not supported: no machine with several"):
        train._prepare(ctx, outputs, None, None, Ranks(0, 2))
    train._prepare(ctx, outputs, None, None, Ranks())


@needs_no_gpu
def test_a_run_of_a_gpu_resumes_on_the_cpu_and_says_so(invoke: Invoke) -> None:
    invoke("train", "--steps", 4, "--save", "run.pt")
    checkpoint = torch.load("run.pt", weights_only=True)
    checkpoint["config"]["device"], checkpoint["environment"]["device"] = "cuda", "H900"
    for saved in checkpoint["run"]["generators"]:
        saved["cuda"] = torch.zeros(16, dtype=torch.uint8)
    torch.save({**checkpoint, "digest": digest(checkpoint)}, "run.pt")
    assert "no CUDA device here" in invoke("train", "--resume", "run.pt", code=1).output
    output = invoke("train", "--resume", "run.pt", "--device", "cpu", "--json", "run.json").output
    assert "device: H900 then, cpu now" in output
    found = json.loads(Path("run.json").read_text())
    assert (found["config"]["device"], found["environment"]["device"]) == ("cpu", "cpu")


def test_the_generator_of_a_gpu_is_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    state, restored = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, _: restored.append(value))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    on_gpu, on_cpu = run.generator_state(cuda), run.generator_state(cpu)
    assert ("cuda" in on_gpu, "cuda" in on_cpu) == (True, False)
    run.restore_generators(on_cpu, cpu)
    assert not restored
    run.restore_generators(on_gpu, cuda)
    assert restored[0] is state


def run_on(device: str, data: Path | None = None, task: str = "digits", **options: Any) -> Run:
    made = TASKS[task](None if data is None else str(data))
    ready = RunConfig(task=task, device=device, **options).resolved(made)
    return Run(ready, made, parallel=ParallelConfig(accumulate=2))


@pytest.mark.parametrize(("task", "precision"), [("digits", "fp32"), ("text", "bf16"), ("mnist", "fp32")])
def test_everything_of_a_step_is_on_the_device(
    text_file: Path, idx_folder: Path, task: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step reads from the device, since a read of a meta tensor is an error."""
    monkeypatch.setattr(config, "device_of", torch.device)
    data = {"digits": None, "text": text_file}.get(task, idx_folder)
    run = run_on("meta", data, task, precision=precision, optimizer="sgd", steps=200, batch_size=16)
    seen: list[torch.device] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.extend(tensor.device for tensor in inputs)

    run.model.register_forward_pre_hook(note)
    for _ in range(3):
        run.train_step()
    assert {parameter.device.type for parameter in run.model.parameters()} == {"meta"}
    assert {value.device.type for state in run.optimizer.state.values() for value in state.values()} == {"meta"}
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: np.full(tensor.shape, 0.5).tolist())
    assert run.evaluate() == {"loss": 0.5, "accuracy": 0.5}
    assert len(seen) > 6
    assert {device.type for device in seen} == {"meta"}


def test_losses_that_are_read_together_are_the_same() -> None:
    exact = run_on("cpu", optimizer="adamw", steps=30, threads=1)
    for _ in range(30):
        exact.train_step()
    run = run_on("cpu", optimizer="adamw", steps=30, threads=1)
    run._max_unread = 2
    known = []
    for _ in range(30):
        run.train_step()
        known.append(len(run._history.loss))
    assert known[:7] == [0, 2, 3, 3, 5, 6, 6]  # 10 evaluations, one every three steps
    assert run.history.loss == exact.history.loss
    assert run.history.batch_metrics == exact.history.batch_metrics


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_loss_that_is_read_late_ends_the_run_where_it_was(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    run = run_on("cpu", optimizer=optimizer, steps=200)
    run._max_unread = MAX_UNREAD
    score, calls = run._train_step._score, iter(range(1000))

    def diverging(*arguments: Any) -> tuple[Tensor, list[Tensor]]:
        loss, metrics = score(*arguments)
        return loss * (float("nan") if next(calls) >= 2 * 3 else 1.0), metrics  # two parts of a batch per step

    monkeypatch.setattr(run._train_step, "_score", diverging)
    for _ in range(6):
        run.train_step()
    with pytest.raises(DivergedError, match="the loss became nan in step 4"):
        assert run.history
    history = run.history
    assert run.step == len(history.loss) == len(history.lr) == 3
    assert history.metric_steps == ([1, 2, 3] if optimizer == "lamb" else [])
    assert all(len(rows) == 3 for rows in history.metrics.values())


def test_the_name_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H900")
    assert (environment.device_name("cpu"), environment.device_name("cuda")) == ("cpu", "H900")
