"""Hugging Face's Trainer: docs/with-transformers.md."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bighorn import Came, Lamb, schedules, telemetry
from bighorn.groups import zero_initialized
from tests.support.trainer_model import INPUTS, INSTALL, LABELS, OPTIONS, Net, assert_same, by_hand, lamb

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


def test_our_schedules_with_a_scheduler_that_writes_nothing(tmp_path: Path) -> None:
    """The trainer logs the rates of the schedule, and resumes bit for bit."""
    from bighorn.integrations import OwnSchedule

    arguments = {"save_strategy": "steps", "save_steps": 5, "logging_strategy": "steps", "logging_steps": 1}
    runs = []
    for folder, start in (("whole", None), ("resumed", "checkpoint-5")):
        net = Net()
        optimizer = Lamb(net.named_parameters(), lr=schedules.Cosine(0.05, 12), **OPTIONS)
        run = trainer(tmp_path / folder, net, arguments, optimizers=(optimizer, OwnSchedule(optimizer)))
        run.train(resume_from_checkpoint=start and str(tmp_path / "whole" / start))
        runs.append(run)
    expected = schedules.Cosine(0.05, 12).as_list(13)
    assert [entry["learning_rate"] for entry in runs[0].state.log_history if "learning_rate" in entry] == expected[:12]
    hand = by_hand(lamb, lambda step: expected[step] / 0.05, clip=1.0)  # the trainer clips to 1
    assert_same(runs[0].model, hand)
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert a.equal(b)
    assert runs[1].lr_scheduler.state_dict() == {"last_epoch": 12}
    net = Net()
    without = trainer(tmp_path, net, optimizers=(Lamb(net.named_parameters(), lr=schedules.Cosine(0.05, 12)), None))
    with pytest.raises(RuntimeError, match="a schedule for lr, and a torch LRScheduler"):
        without.train()
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, not Net"):
        OwnSchedule(net)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "warned"), [(1e-3, True), (0.05, False), (None, False)])
def test_a_learning_rate_that_is_not_used_is_named(rate: float | None, warned: bool, tmp_path: Path) -> None:
    from bighorn.integrations.transformers import TelemetryCallback

    net = Net()
    run = trainer(tmp_path, net, {} if rate is None else {"learning_rate": rate}, optimizers=(lamb(net), None))
    run.add_callback(TelemetryCallback(run))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train()
    texts = [str(each.message) for each in told if "learning_rate" in str(each.message)]
    assert bool(texts) == warned
    if warned:
        assert texts[0].startswith("TrainingArguments.learning_rate=0.001 is not used")
        assert "its lr is 0.05. Set it there" in texts[0]


def test_lora_makes_an_empty_group(tmp_path: Path) -> None:
    """All trained parameters decay, or none; names and exclusions are the wrapped model's."""
    peft = pytest.importorskip("peft", reason=INSTALL)
    bert = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.BertForSequenceClassification(bert), peft.LoraConfig(target_modules=["query"], r=2)
    )
    data = [{"input_ids": torch.randint(50, (6,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True
    )
    given = {"lr": 0.01, "names": model, "exclude_from_layer_adaptation": ["lora_B"]}
    run = transformers.Trainer(model=model, args=arguments, train_dataset=data, optimizer_cls_and_kwargs=(Lamb, given))
    run.train()
    assert sorted(len(group["params"]) for group in run.optimizer.param_groups) == [0, 2]
    ratios = dict(zip(*[list(each) for each in _ratios(run)], strict=True))
    assert [name for name, ratio in ratios.items() if ratio == 1.0] == [name for name in ratios if "lora_B" in name]
    assert len(ratios) == 2


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora_B": ("LoraConfig", {"r": 2}),
    "hada_w2_b": ("LoHaConfig", {"r": 2}),
    "lokr_w1": ("LoKrConfig", {"r": 2}),
    "oft_R": ("OFTConfig", {"r": 0, "oft_block_size": 4}),
    "lora_E": ("AdaLoraConfig", {"total_step": 100}),
}


@pytest.mark.parametrize("zero", ADAPTERS)
def test_the_factor_of_an_adapter_that_starts_at_zero_is_found(zero: str) -> None:
    """The names are in docs/with-transformers.md."""
    peft = pytest.importorskip("peft", reason=INSTALL)
    kind, options = ADAPTERS[zero]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    adapted = peft.get_peft_model(model, getattr(peft, kind)(target_modules=["0", "2"], **options))
    found = zero_initialized(adapted.named_parameters())
    assert len(found) == 2
    assert all(zero in name for name in found)
    page = (Path(__file__).parents[2] / "docs" / "with-transformers.md").read_text()
    assert f"| `{zero}` |" in page
    named = [(name, param) for name, param in adapted.named_parameters() if param.requires_grad]
    optimizer = Lamb(named, lr=0.01, exclude_from_layer_adaptation=found)
    for _ in range(3):
        adapted(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ratios = dict(zip(optimizer.telemetry().names, optimizer.telemetry().trust_ratio.tolist(), strict=True))
    assert {name for name in ratios if zero in name} <= {name for name, ratio in ratios.items() if ratio == 1}


def _ratios(run: Any) -> tuple[Any, Any]:
    last = run.optimizer.optimizer.telemetry()
    return last.names, last.trust_ratio.tolist()


def test_a_period_that_is_none_is_refused() -> None:
    from bighorn.integrations.transformers import TelemetryCallback

    with pytest.raises(ValueError, match="every=0 is out of range"):
        TelemetryCallback(None, every=0)
