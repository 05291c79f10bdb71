"""The tables of docs/scale.md are those of benchmarks/scale.py, whose plan agrees with what has been counted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from bighorn.cli.shapes import SHAPES

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
assert _spec is not None
assert _spec.loader is not None
scale = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scale)


def test_the_tables_are_those_of_the_script() -> None:
    """If not: `python benchmarks/scale.py`."""
    assert scale.PAGE.read_text() == scale.written()


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
