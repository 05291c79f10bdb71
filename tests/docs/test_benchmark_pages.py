"""The tables of the docs and of the README equal the measurements, and the plan equals the counted collectives."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bighorn.cli.shapes import SHAPES

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = ("scale", "eight_bit", "precision_table", "lora", "offload", "offload_peers")
scale, eight_bit, precision_table, lora, offload, offload_peers = map(script, NAMES)


@pytest.mark.parametrize("source", [scale, eight_bit, precision_table, lora, offload, offload_peers], ids=NAMES)
def test_the_tables_are_those_of_the_script(source: ModuleType) -> None:
    """To update a table, run `python benchmarks/scale.py`, or `eight_bit.py` or `precision_table.py` with `--page`."""
    assert source.PAGE.read_text() == source.written()


README = {
    "200 tiny tensors": ("step-fp32", "tiny"),
    "EfficientNet-B0": ("step-fp32", "efficientnet_b0"),
    "ViT-S/16": ("step-fp32", "vit_small"),
    "ResNet-50": ("step-fp32", "resnet50"),
    "BERT-base": ("step-fp32", "bert_base"),
    "BERT-large": ("step-fp32", "bert_large"),
    "one 30522x1024 tensor": ("step-fp32", "one"),
    "BERT-base in bf16, bf16 state": ("step-bf16", "bert_base"),
}
"""The rows of its table: the file in results, and the parameter set in it."""


def cells(name: str, shapes: str) -> dict[str, str]:
    """Return the cell of each optimizer in a table, by label."""
    measured = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]
    (found,) = [result["optimizers"] for result in measured if result["shapes"] == shapes]
    ratios = {optimizer["label"]: optimizer["ratio"] for optimizer in found}
    return {label: f"{each['median']:.2f} ({each['p10']:.2f}-{each['p90']:.2f})" for label, each in ratios.items()}


def test_the_study_of_lora_shows_what_its_page_says() -> None:
    saved = json.loads(lora.RESULT.read_text())
    assert saved["clean"] is True
    assert {run["seed"] for run in saved["runs"]} == {0, 1, 2}
    warmed = [run for run in saved["runs"] if run["optimizer"] == "`Lamb`" and run["warm_up"]]
    slow, fast = ([run for run in warmed if (run["lr"] > 0.02) is over] for over in (False, True))
    assert all(run["losses"]["40"] > 3 and run["lora_B_trust_ratio"]["40"] < 0.002 for run in slow)
    assert {f"{run['losses']['40']:.2f}" for run in fast} == {"2.61", "2.64", "2.65"}
    assert all(run["losses"]["100"] > run["losses"]["0"] for run in fast)


@pytest.mark.parametrize("row", README)
def test_the_readme_says_what_was_measured(row: str) -> None:
    found = cells(*README[row])
    columns = [found[label] for label in ("Lamb", "Lamb, adam=True", "Came")]
    assert f"| {row} | {' | '.join(columns)} |" in (ROOT / "README.md").read_text()


def test_the_page_of_precisions_says_what_was_measured() -> None:
    page = (ROOT / "docs" / "precision.md").read_text()
    columns = [cells("step-precision", shapes) for shapes in ("vit_small", "bert_base")]
    labels = list(columns[0])[1:]  # without the one that the others are relative to
    assert len(labels) == 12
    for label in labels:
        assert f"| {label} | {' | '.join(column[label] for column in columns)} |" in page


def test_the_table_of_precisions_has_the_bytes_that_are_predicted() -> None:
    found = json.loads(precision_table.RESULT.read_text())["rows"]
    assert {row.name: row.state_bytes("bert_base") for row in precision_table.ROWS} == {
        name: row["bytes_per_parameter"] for name, row in found.items()
    }


def test_every_tensor_is_in_a_group() -> None:
    for model in scale.MODELS:
        assert sum(model.groups()) == sum(tensor.numel() for tensor in model.tensors)
        assert len(set(model.groups()[:-1])) == 1  # all blocks have the same size


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
