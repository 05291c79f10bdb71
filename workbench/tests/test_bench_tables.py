"""The tables of `workbench/benchmarks/bench_tables.py`, and the loop that is a baseline in one table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import baseline_lamb
import bench_tables
import traffic
from bighorn_workbench import peers
from bighorn_workbench.bench_table import COLUMNS
from bighorn_workbench.shapes import SHAPES
from cliffs import CLIFFS, WRONG_BASELINE
from tests.support.processes import Outcome, outcomes

SCRIPT = f"""
import sys
sys.path[:0] = {[str(Path(bench_tables.__file__).parent), *sys.path]}
import functools, torch
torch.compile = functools.partial(torch.compile, backend="eager")  # or the C++ compiler takes a quarter of a minute
from bighorn_workbench.measure import PARAM_SETS, ParamSet
from cliffs import CLIFFS, WRONG_BASELINE
PARAM_SETS["small"] = ParamSet(lambda: [(16, 8), (8,), (1, 3, 2)])
import bench_tables, cliffs, dataclasses
for name, each in cliffs.CLIFFS.items():
    cliffs.CLIFFS[name] = dataclasses.replace(each, shapes=lambda: [(6, 4)] * 3)
bench_tables.main()
"""


def run(folder: Path, *words: str) -> Outcome:
    """Run the program in a separate process, since it adds to the tables of the package."""
    [ended] = outcomes(SCRIPT, [words], folder=folder)
    return ended


def test_the_table_of_lambrrr(tmp_path: Path) -> None:
    options = ("--shapes", "small", "--clip", "1e-4", "--seconds", "1e-9", "--json", "bench.json")
    done = run(tmp_path, "--table", "lambrrr", *options)
    assert done.code == 0, done.errors
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["command"].startswith("python workbench/benchmarks/bench_tables.py --table lambrrr --shapes small")
    assert content["baseline"] == "loop"
    assert "apex" in content["absent"]
    assert "Absent: apex FusedLAMB (not installed; it is built from" in done.output
    rows = {row["name"]: row for row in content["results"][0]["optimizers"] if row["name"] != "timm"}
    assert list(rows) == ["loop", "compiled", "lamb"]
    assert all(row["error"] < 2e-7 for row in rows.values())
    [heading] = [line for line in done.output.splitlines() if "compile" in line and "ratio" in line]
    assert heading.split() == ["optimizer", "ms", "ms", "p10-p90", "ratio", "p10-p90", "compile", "error"]
    [compiled] = [line for line in done.output.splitlines() if line.startswith(" compiled foreach")]
    assert f" {bench_tables.compile_seconds(rows['compiled'])} " in compiled
    assert len(heading.rstrip()) <= 80


@pytest.mark.slow
def test_the_table_of_cliffs(tmp_path: Path) -> None:
    names = ["missing", "transposed", "float64"]
    done = run(tmp_path, "--table", "cliffs", "--shapes", ",".join(names), "--seconds", "1e-9", "--json", "bench.json")
    assert done.code == 0, done.errors
    results = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert [each["shapes"] for each in results] == names
    for each in results:
        rows = {row["name"]: row for row in each["optimizers"]}
        assert list(rows) == ["adamw", "adamw-foreach", "lamb", "came"]
        assert all(row["error"] is None and row["tensors"] == each["tensors"] for row in rows.values())
        assert (WRONG_BASELINE in each["notes"]) == (each["shapes"] == "transposed")
    assert done.output.count(WRONG_BASELINE) == 1
    assert "first step" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--table precision --seconds -1", "--seconds=-1.0 is out of range: it must be a finite number in (0, "),
        ("--table cliffs --device cuda", "--table cliffs is measured with --device cpu."),
        # torch 2.11 on an H100: "params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout".
        # `alternating` and `gaps` ran there; the others have the same difference of strides.
        (
            "--device cuda --shapes tiny,transposed",
            "--shapes transposed: torch's fused AdamW, the first row, refuses",
        ),
    ],
)
def test_wrong_input_is_one_message(words: str, message: str, tmp_path: Path) -> None:
    done = run(tmp_path, *words.split())
    assert done.code == 1
    assert done.errors.startswith(f"Error: {message}")
    assert len(done.errors.splitlines()) == 1


def test_a_table_names_what_there_is() -> None:
    ours = {*peers.PEERS}, {*SHAPES}, {*COLUMNS}
    scripts = {*bench_tables.OWN_PEERS}, {*CLIFFS}, {*traffic.COLUMNS, "compile"}
    known = [one | other for one, other in zip(ours, scripts, strict=True)]
    for tables, (names, shapes, columns) in ((peers.TABLES, ours), (bench_tables.OWN_TABLES, known)):
        for table in tables.values():
            assert {table.baseline, *table.peers} <= names
            assert set(table.shapes) <= shapes
            assert set(table.columns) <= columns


def test_the_compiled_form_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    baseline_lamb.compiled_foreach.cache_clear()
    with pytest.raises(ImportError, match="there is no no-such-compiler"):
        bench_tables.OWN_PEERS["compiled"].load()


@pytest.mark.parametrize("form", [baseline_lamb.loop, baseline_lamb.foreach])
def test_the_baselines_are_lamb(form: baseline_lamb.Step) -> None:
    """Each equals the paper's LAMB on each kind of layer; zero weights and gradients take Adam's step or none."""
    weights = [torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.zeros(4)]
    pairs: list[list[Tensor]] = []
    for ours in (True, False):
        params = [weight.double().clone() for weight in weights]
        peer = peers.PEERS["lamb"].load()(params, 0.1, None)
        optimizer = peer if ours else baseline_lamb.BaselineLamb(params, 0.1, peers.WEIGHT_DECAY, form)
        for step in range(3):
            for param in params:
                param.grad = torch.linspace(-1, 2, param.numel(), dtype=torch.float64).view_as(param).roll(step)
            optimizer.step()
        pairs.append(params)
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
