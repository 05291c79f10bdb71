"""The end of processes: tests the cause of an occasional abort."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bighorn_workbench.errors import InputError
from bighorn_workbench.ranks import Ranks, end_process_group

ROOT = Path(__file__).parents[2]
CALL = "destroy_process" + "_group("


class Cycle:
    """A reference cycle that holds a model, as models with hooks have."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.self = model, self


@dataclass
class End:
    """The objects that were alive when the process group was destroyed."""

    models: list[weakref.ref[nn.Module]] = field(default_factory=list)
    alive: list[bool] = field(default_factory=list)

    def train(self) -> None:
        model = DistributedDataParallel(nn.Linear(4, 2), gradient_as_bucket_view=True)
        model(torch.ones(3, 4)).sum().backward()
        Cycle(model)
        self.models.append(weakref.ref(model.module))


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> End:
    """The end of a process group of one process, whose environment describes one of two."""
    seen, destroy, join = End(), dist.destroy_process_group, dist.init_process_group

    def destroyed() -> None:
        seen.alive.extend(model() is not None for model in seen.models)
        destroy()

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(dist, "destroy_process_group", destroyed)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "init_process_group", lambda backend: join(backend, **alone))
    return seen


@pytest.mark.parametrize("error", [None, InputError, ZeroDivisionError])
def test_no_model_is_alive_when_the_process_group_ends(error: type[Exception] | None, end: End) -> None:
    with nullcontext() if error is None else pytest.raises(error, match="wrong"), Ranks.join():
        end.train()
        assert end.models[0]() is not None  # without a reference cycle, nothing would be left to collect
        if error is not None:
            raise error("wrong")
    assert end.alive == [False]
    end_process_group()  # does nothing without a group
    assert end.alive == [False]


def test_every_process_ends_in_this_way() -> None:
    files = [path for folder in ("benchmarks", "workbench", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if CALL in path.read_text()] == ["ranks.py", "processes.py"]
