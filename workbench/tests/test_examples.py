"""The page about your own task, and the examples in docs/examples, run like a reader would, but shorter."""

import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bighorn_workbench.study import compare, lr_find
from workbench.tests.command_line import Invoke, changed, write_text
from workbench.tests.test_own_tasks import CODE

DOCS = Path(__file__).parents[2] / "docs"
QUICK = {
    "train": ["--steps", 3],
    "memory": [],
    "compare": ["--trials", 1, "--seeds", 1, "--epochs", 0.1, "--processes", 1, "--batch-sizes", 32],
}


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])


def test_the_page_goes_from_an_empty_file_to_a_verdict(invoke: Invoke) -> None:
    page = (DOCS / "own-task.md").read_text()
    code, commands = re.findall(r"```(?:python|bash)\n(.*?)```", page, re.DOTALL)
    Path("mine.py").write_text(code)
    for line in commands.replace("\\\n", "").splitlines():
        _, name, *words = shlex.split(line, comments=True)
        output = invoke(name, *changed(words, *QUICK[name])).output
    assert "At batch 32 lamb cannot be compared with adamw" in output, "of one trial each"
    assert Path("rings.html").exists()
    for place in re.findall(r"\]\((examples/\S+)\)", page):
        assert (DOCS / place).is_file()


def folder_of_text(folder: Path) -> None:
    folder.mkdir()
    write_text(folder / "text.txt")
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 256, "n_positions": 128}
    config = {"model_type": "gpt2", "bos_token_id": None, "eos_token_id": None, **sizes}
    (folder / "config.json").write_text(json.dumps(config))


def folder_of_images(folder: Path) -> None:
    for number in range(2):
        (folder / str(number)).mkdir(parents=True)
        for index in range(20):
            pixels = np.full((8, 8, 3), 100 * number + index, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / str(number) / f"{index}.png")


@pytest.mark.parametrize(
    ("name", "packages", "data"),
    [
        ("tabular.py:Tabular", (), None),
        ("causal_lm.py:CausalLM", ("transformers",), folder_of_text),
        ("images.py:Images", ("timm", "torchvision"), folder_of_images),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_example_runs(invoke: Invoke, name: str, packages: tuple[str, ...], data: object) -> None:
    source = DOCS / "examples" / name.partition(":")[0]
    assert len(source.read_text().splitlines()) < 60
    absent = [package for package in packages if find_spec(package) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed")
    words = []
    if callable(data):
        data(Path("data"))
        words = ["--data", "data"]
    invoke("train", "--task", f"{source.parent}/{name}", *words, "--steps", 2, "--batch-size", 4, "--json", "run.json")
    history = json.loads(Path("run.json").read_text())["history"]
    assert len(history["loss"]) == 2
    assert history["evaluations"]


def test_studies_are_functions_too(tmp_path: Path) -> None:
    names: dict[str, type] = {}
    exec(CODE, names)
    task = names["Circles"]()
    found = compare(task, ["sgd"], [16], tmp_path / "s.study", trials=2, seeds=2, epochs=1)
    [cell] = found.cells
    assert [trial.config.seed for trial in cell.trials] == [1, 2]
    assert len(cell.tuning) == 2
    [answer] = found.answers
    assert answer.startswith("sgd had 2 of the 8 trials that a verdict needs")
    again = compare(task, ["sgd"], [16], tmp_path / "s.study", trials=2, seeds=2, epochs=1)
    assert again.cells == found.cells
    rates = lr_find(task, "sgd", steps=16, lr_max=1.0, seed=3)
    assert [[run.steps for run in rung] for rung in rates.rungs] == [[2] * 12, [8] * 4, [16] * 2]
    assert 0.001 < rates.lr < 1.0
    with pytest.raises(ValueError, match="--trials=0"):
        compare(task, trials=0)
    with pytest.raises(ValueError, match=r"lacks model\(\), batches\(\)"):
        lr_find(object())  # type: ignore[arg-type]
