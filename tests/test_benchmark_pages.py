"""Tables of the docs are those of the scripts in benchmarks, whose plan for many GPUs agrees with what was counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bighorn.cli.shapes import SHAPES

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scale, eight_bit = script("scale"), script("eight_bit")


@pytest.mark.parametrize("source", [scale, eight_bit], ids=lambda source: source.__name__)
def test_the_tables_are_those_of_the_script(source: ModuleType) -> None:
    """If not: `python benchmarks/scale.py`, `python benchmarks/eight_bit.py --page`."""
    assert source.PAGE.read_text() == source.written()


def test_every_tensor_is_in_a_group() -> None:
    for model in scale.MODELS:
        assert sum(model.groups()) == sum(tensor.numel() for tensor in model.tensors)
        assert len(set(model.groups()[:-1])) == 1  # blocks are alike


@pytest.mark.parametrize(("label", "optimizer"), [("Lamb", "lamb"), ("Came", "came")])
def test_the_plan_sends_what_was_counted(label: str, optimizer: str) -> None:
    path = ROOT / "benchmarks" / "results" / "sharded-step.json"
    if not path.is_file():
        pytest.skip("benchmarks/sharded_step.py has not been run on this checkout")
    found = json.loads(path.read_text())
    counted = found["collectives_on_4_ranks"][label]["FSDP2"]
    tensors = [torch.empty(shape, device="meta") for shape in SHAPES[found["shapes"]]()]
    planned = scale.sums(optimizer, tensors)
    assert counted["collectives"] == len(planned)
    assert counted["bytes"] == sum(size for _, size in planned)
