"""Hugging Face's Trainer: docs/with-transformers.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bighorn import Came, Lamb, telemetry
from tests.support.trainer_model import INPUTS, INSTALL, LABELS, OPTIONS, Net, assert_same, by_hand

transformers = pytest.importorskip("transformers", reason=INSTALL)

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = [{"inputs": inputs, "labels": label} for inputs, label in zip(INPUTS, LABELS, strict=True)]


class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A trainer that does not shuffle, so that a loop by hand sees the same batches."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(DATA)


def trainer(folder: Path, net: Net, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    return InOrder(
        model=net,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            disable_tqdm=True,
            **{"report_to": [], "save_strategy": "no", "logging_strategy": "no", **(arguments or {})},
        ),
        train_dataset=DATA,
        **options,
    )


def lamb(net: Net) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.05, **OPTIONS)


def linear(steps: int, warmup: int) -> Any:
    return lambda step: step / warmup if step < warmup else (steps - step) / (steps - warmup)


@pytest.mark.parametrize("bf16", [False, True])
def test_by_optimizers_with_a_scheduler_accumulation_and_clipping(bf16: bool, tmp_path: Path) -> None:
    net = Net()
    optimizer = lamb(net)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "bf16": bf16}
    trainer(tmp_path, net, arguments, optimizers=(optimizer, scheduler)).train()
    assert_same(net, by_hand(lamb, linear(6, 2), accumulate=2, clip=0.5, bf16=bf16))


@pytest.mark.parametrize("kind", [Lamb, Came])
def test_by_class_and_arguments(kind: Any, tmp_path: Path) -> None:
    """The trainer builds groups of bare parameters and makes a linear schedule."""
    net = Net()
    own = {"exclude_from_layer_adaptation": OPTIONS["exclude_from_layer_adaptation"]} if kind is Lamb else {}

    def alike(net: Net) -> Any:
        return kind(
            net.named_parameters(), lr=0.05, weight_decay=0.1, exclude_from_weight_decay=["bias", "norm"], **own
        )

    made = trainer(
        tmp_path,
        net,
        {"weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5},
        optimizer_cls_and_kwargs=(kind, {"lr": 0.05, "names": net, **own}),
    )
    made.train()
    groups = {name: group["weight_decay"] for group in made.optimizer.param_groups for name in group["param_names"]}
    assert groups == {
        name: 0.1 if name in {"body.weight", "head.weight"} else 0.0 for name, _ in net.named_parameters()
    }
    assert_same(net, by_hand(alike, linear(12, 2), clip=0.5))


def test_resuming_is_bitwise(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 5}
    whole, resumed = Net(), Net()
    runs = [trainer(tmp_path / "whole", whole, arguments, optimizers=(lamb(whole), None))]
    runs[0].train()
    runs.append(trainer(tmp_path / "resumed", resumed, arguments, optimizers=(lamb(resumed), None)))
    runs[1].train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert [run.state.global_step for run in runs] == [12, 12]
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert a.equal(b)
    states = [list(run.optimizer.optimizer.state.values()) for run in runs]
    for a, b in zip(*states, strict=True):
        assert all(value.equal(b[name]) for name, value in a.items())


def test_telemetry_reaches_what_report_to_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason=INSTALL)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from bighorn.integrations.transformers import TelemetryCallback

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    net = Net()
    run = trainer(tmp_path, net, {"report_to": ["tensorboard"]}, optimizers=(lamb(net), None))
    run.add_callback(TelemetryCallback(run, every=6))
    run.train()
    (file,) = (tmp_path / "events").rglob("events*")
    events = EventAccumulator(str(file)).Reload()
    for tag, value in telemetry.scalars(run.optimizer).items():
        first, last = events.Scalars(f"train/{tag}")
        assert (first.step, last.step) == (6, 12)
        assert last.value == pytest.approx(value)
    assert not any("trust_ratio" in key for entry in run.state.log_history for key in entry)


def test_a_period_that_is_none_is_refused() -> None:
    from bighorn.integrations.transformers import TelemetryCallback

    with pytest.raises(ValueError, match="every=0 is out of range"):
        TelemetryCallback(None, every=0)
