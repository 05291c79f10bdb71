"""The lines to paste from ``bighorn compare``: a program with them trains like the run."""

from typing import Any

import pytest
import torch
from torch import nn

from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.config import RunConfig
from bighorn_workbench.constructor import constructor
from bighorn_workbench.optimizers import CONTESTANTS
from bighorn_workbench.run import Run
from bighorn_workbench.trials import configured
from tests.support.tables import for_every

STEPS = 5


class Plain(Digits):
    """Digits whose model has no randomness after its start."""

    def model(self) -> nn.Module:
        """Return a network with a norm, whose parameters have names of both kinds."""
        return nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Return the mean cross-entropy."""
        inputs, targets = batch
        return super().loss(model, (inputs.flatten(1).to(next(model.parameters()).dtype), targets))


class Excluding(Plain):
    """`Plain` with another choice of parameters without weight decay."""

    def excluded(self, name: str, parameter: nn.Parameter) -> bool:
        """Exclude the last layer."""
        return name.startswith("3.") or parameter.ndim < 2


def pasted(config: RunConfig, task: Plain) -> list[torch.Tensor]:
    """Return the weights after the steps of a program with the lines."""
    run = Run(config, task)
    names: dict[str, Any] = {"model": run.model, "task": task}
    lines = constructor(config, run.total, excluded=hasattr(task, "excluded"))
    exec(lines, names)
    optimizer, scheduler = names["optimizer"], names.get("scheduler")
    for _ in range(STEPS):
        loss = task.loss(run.model, next(run._batches))
        (loss[0] if isinstance(loss, tuple) else loss).backward()
        if "clip_grad_norm_" in lines:
            nn.utils.clip_grad_norm_(run.model.parameters(), config.max_grad_norm or 0.0)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return [parameter.detach() for parameter in run.model.parameters()]


CLIP: dict[str, Any] = {"max_grad_norm": 0.5}  # torch's optimizers have none: it is a line of the loop
OWN_NAMES = "lamb", "came", "came-published", "lars-int8", "lamb-nearest", "lamb-clipped"
NAMES = *OWN_NAMES, "lamb-adamw", "lamb-hyperball", "muon", "nesterov", "adamw"


@pytest.mark.parametrize("kind", [Plain, Excluding])
@for_every(("name", "more"), [*((name, {}) for name in NAMES), ("adamw", CLIP)])
def test_a_program_with_the_lines_trains_as_the_run_did(name: str, more: dict[str, Any], kind: type[Plain]) -> None:
    task = kind()
    base = RunConfig(**CONTESTANTS[name], **more, batch_size=64, epochs=1, threads=1).resolved(task)
    decay = "one_minus_momentum" if base.optimizer in ("lars", "sgd") else "one_minus_beta2"
    config = configured(base, {"lr": 0.02, "weight_decay": 0.1, "warmup": 0.2, decay: 0.05}, seed=1)
    run = Run(config, task)
    for _ in range(STEPS):
        run.train_step()
    expected = [parameter.detach() for parameter in run.model.parameters()]
    for one, other in zip(pasted(config, task), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_run_without_warmup_has_no_line_of_it() -> None:
    config = RunConfig(optimizer="adamw", lr=0.02, weight_decay=0.1, batch_size=64, warmup="0", threads=1, epochs=1)
    assert ".after_warmup" not in constructor(config.resolved(Plain()), 10)


def test_every_contestant_has_lines_that_run() -> None:
    for name, options in CONTESTANTS.items():
        config = RunConfig(**options, batch_size=32, epochs=1, threads=1).resolved(Plain())
        for excluded in (False, True):
            compile(constructor(config, 10, excluded), name, "exec")
    config = RunConfig(**CONTESTANTS["lamb-free"], batch_size=32, epochs=1, threads=1).resolved(Plain())
    names: dict[str, Any] = {"model": nn.LSTM(2, 2)}
    lines = constructor(config, 10)
    assert "exclude_from_layer_adaptation=['weight_hh', 'ndim<2']," in lines
    exec(lines, names)
    assert isinstance(names["optimizer"], torch.optim.Optimizer)
