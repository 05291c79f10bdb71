"""Tasks of users: the forms of `--task FILE.py:NAME`, and early errors for wrong tasks."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bighorn_workbench.builtin_tasks import fingerprint, load, trial
from bighorn_workbench.builtin_tasks.user import UserTask, user_call
from bighorn_workbench.compare import CompareConfig, prepare
from bighorn_workbench.config import RunConfig
from bighorn_workbench.errors import InputError
from bighorn_workbench.metrics import seems_lower
from bighorn_workbench.optimizers import OPTIMIZERS
from bighorn_workbench.ranks import Aborted, Interrupt
from bighorn_workbench.run import Batches, Run
from bighorn_workbench.tasks import Classification, Task, defaults
from bighorn_workbench.trials import make
from bighorn_workbench.workers import worker
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, assert_self_contained, changed, resuming
from workbench.tests.test_resume import assert_same, content

CODE = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Circles:
    """Points inside and outside of a circle."""

    metric, higher_is_better = "error", False
    batch_size, epochs, one_thread = 16, 2, True

    def __init__(self, count=200):
        points = torch.randn(int(count), 2, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
        self.sets = {name: data for name in ("train", "validation", "test")}

    def model(self):
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))

    def batches(self, split, batch_size, generator):
        return DataLoader(self.sets[split], batch_size, shuffle=split == "train", generator=generator)

    def loss(self, model, batch):
        points, labels = batch
        return nn.functional.cross_entropy(model(points), labels)

    def evaluate(self, model, split):
        wrong = sum(int((model(x).argmax(1) != y).sum()) for x, y in self.batches(split, 100, None))
        return {"error": wrong / len(self.sets[split])}

class Stream(Circles):
    """A generator without a length, which augments its points."""

    def batches(self, split, batch_size, generator):
        for points, labels in super().batches(split, batch_size, generator):
            yield {"points": points + 0.01 * torch.randn_like(points), "labels": labels}

    def loss(self, model, batch):
        return super().loss(model, (batch["points"], batch["labels"]))

    def evaluate(self, model, split):
        return {"error": float(sum(self.loss(model, batch) for batch in self.batches(split, 100, None)))}

class Steps(Stream):
    steps = 7

CIRCLES = Circles()
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a file with tasks; it differs in every test, since Python caches modules by name."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(trial, "MOST_BATCHES", 1000)
    name = re.sub(r"\W", "_", f"mine_{tmp_path.name}")
    (tmp_path / f"{name}.py").write_text(CODE)
    yield name
    sys.modules.pop(name, None)


def own(mine: str, members: str) -> str:
    """Write a task that differs from `Circles` in these members; return its place."""
    Path(f"{mine}.py").write_text(f"{CODE}\nclass Own(Circles):\n    {members}\n")
    return f"{mine}.py:Own"


def test_a_task_trains_and_is_written_down(invoke: Invoke, mine: str) -> None:
    place = f"{mine}.py:Circles"
    output = invoke("train", "--task", place, "--report", "run.html", "--json", "run.json").output
    assert f"{place}: Points inside and outside of a circle; " in output
    assert "val error" in output
    result = json.loads(Path("run.json").read_text())["result"]
    assert result["steps"] == 26  # 200 samples have 13 batches, the last one of 8
    assert result["best_validation_error"] <= result["validation_error"] == result["test_error"] < 0.45
    assert "test_loss" not in result
    page = assert_self_contained(Path("run.html"))
    assert page.tags.count("svg") == 4  # loss, error, trust ratios, learning rate


ODD = '''
import math
import torch
from torch import nn

class Odd:
    """A task whose metrics, parameters and gradients are not those of every step."""

    metric, higher_is_better, samples, evaluations, used = "accuracy", True, 64, 0, 0

    def model(self):
        return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def batches(self, split, batch_size, generator):
        return [torch.ones(batch_size, 2)] * 4

    def loss(self, model, batch):
        self.used += 1
        return model[self.used % 2](batch).square().mean()

    def evaluate(self, model, split):
        self.evaluations += 1
        later = {"seen": 1.0} if self.evaluations > 4 else {}
        return {"accuracy": math.nan if self.evaluations > 3 else 0.5, **later}

class Vector(Odd):
    def model(self):
        return nn.PReLU(2)

    def loss(self, model, batch):
        return (1 - model(-batch)).square().mean()

'''


@for_every(("name", "optimizer"), [("Odd", "lamb"), ("Odd", "came"), ("Vector", "came")])
def test_values_that_are_not_of_every_step_are_gaps(name: str, optimizer: str, invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    words = ["--optimizer", optimizer, "--steps", 12, "--batch-size", 4, "--report", "run.html", "--json", "run.json"]
    invoke("train", "--task", f"{tmp_path / 'odd.py'}:{name}", *words)
    found = json.loads(Path("run.json").read_text())
    assert found["result"]["test_accuracy"] is None
    assert found["history"]["layers"] == (["0.weight", "1.weight"] if name == "Odd" else [])
    for rows in found["history"]["metrics"].values():
        assert all(row.count(None) == 1 for row in rows)
    assert_self_contained(Path("run.html"))


@for_every("place", ["{}:Circles", "{}.py:CIRCLES", "{}:CIRCLES", "{}.py:Circles"])
def test_the_forms_of_a_place_are_one_task(invoke: Invoke, mine: str, place: str) -> None:
    invoke("train", "--task", place.format(mine), "--json", "run.json")
    first = json.loads(Path("run.json").read_text())["history"]["loss"][0]
    assert first == pytest.approx(0.78773, abs=1e-4)


def test_data_are_the_argument_of_the_name_and_an_object_takes_none(invoke: Invoke, mine: str) -> None:
    invoke("train", "--task", f"{mine}.py:Circles", "--data", 64, "--json", "run.json")
    assert json.loads(Path("run.json").read_text())["result"]["steps"] == 8
    output = invoke("train", "--task", f"{mine}.py:CIRCLES", "--data", "x", code=1).output
    assert "--data x: " in output
    assert "takes no data" in output


@pytest.mark.parametrize(("name", "step"), [("Circles", 13), ("Circles", 20), ("Steps", 4)])
def test_a_task_resumes_bitwise(
    invoke: Invoke, interrupt_after: Callable[[int], None], mine: str, name: str, step: int
) -> None:
    """The points are at the end of an epoch, within the second one, and with augmentation by the global generator."""
    options = ["--task", f"{mine}.py:{name}", "--seed", 3]
    invoke("train", *options, "--save", "whole.pt")
    interrupt_after(step)
    output = invoke("train", *options, "--save", "parts.pt", code=130).output
    interrupt_after(0)
    invoke(*resuming(output))
    assert_same(content(Path("parts.pt")), content(Path("whole.pt")))


def test_accumulated_parts_of_a_task_are_its_batch(invoke: Invoke, mine: str) -> None:
    options = ["--task", f"{mine}.py:Circles", "--data", 192, "--optimizer", "sgd", "--json", "run.json"]
    losses = []
    for parts in (1, 4):
        with torch.random.fork_rng():
            invoke("train", *options, "--steps", 1, "--accumulate", parts)
        losses.append(json.loads(Path("run.json").read_text())["history"]["loss"][0])
    assert losses[1] == pytest.approx(losses[0], rel=0.2)  # dropout
    odd = invoke("train", *options[:2], "--accumulate", 3, "--batch-size", 12, code=1).output
    assert "its tensors have [8, 2], [8]" in odd  # the last batch of an epoch of 200


def test_a_task_is_searched_compared_and_measured(invoke: Invoke, mine: str) -> None:
    place = f"{mine}.py:Circles"
    assert "Suggestion: lr " in invoke("lr-find", "--task", place, "--steps", 20).output
    assert "82 trainable parameters" in invoke("memory", "--task", place).output
    rates = ["--space", "lamb.lr=0.1", "--space", "adamw.lr=1e-9"]
    options = ["--trials", 1, "--seeds", 3, "--processes", 1, *rates, "--report", "c.html", "--json", "c.json"]
    output = invoke("compare", "--task", place, *options).output
    assert "At batch 16 lamb cannot be compared with adamw: lamb and adamw are not tuned." in output
    assert "lamb and adamw had 1 of the 8 trials that a verdict needs: give --trials 8" in output
    cells = json.loads(Path("c.json").read_text())["cells"]
    assert cells[0]["error"]["mean"] < cells[1]["error"]["mean"]
    page = assert_self_contained(Path("c.html"))
    assert "Error by optimizer" in page.text
    assert "<h1>At batch 16 lamb cannot be compared with adamw</h1>" in Path("c.html").read_text()
    assert "Lamb and adamw are not tuned. Error on the test data" in page.text


WRONG = {
    "percent": (
        "metric = 'accuracy'\n    def evaluate(self, model, split): return {'accuracy': 97.5}",
        ("gives accuracy = 97.5, but an accuracy is a share from 0 to 1. Divide it by 100",),
    ),
    "shapes": (
        "def loss(self, model, batch): return model(batch[0][:, :1]).sum()",
        ("loss was called with (Sequential, [float32[16, 2], int64[16]])", "line ", "mat1 and mat2 shapes"),
    ),
    "no scalar": ("def loss(self, model, batch): return model(batch[0])", ("returned float32[16, 2]", "scalar")),
    "NaN": ("def loss(self, model, batch): return model(batch[0]).sum() * float('nan')", ("is nan", "before any step")),
    "no gradient": ("def loss(self, model, batch): return batch[0].sum()", ("does not depend on the parameters",)),
    "zero": ("def loss(self, model, batch): return model(batch[0]).sum() * 0", ("all gradients are zero",)),
    "root": (
        "def loss(self, model, batch): return (model(batch[0]) * 0).sum().sqrt()",
        ("gradients that are not finite",),
    ),
    "empty": ("def batches(self, split, batch_size, generator): return []", ("gives no batch",)),
    "used up": (
        "def batches(self, split, batch_size, generator, made=iter([[torch.ones(4, 2)] * 2])): return made",
        ("has no len()", "Give --steps"),
    ),
    "no iterable": (
        "def batches(self, split, batch_size, generator): return 5",
        ("returned 5, which is not iterable",),
    ),
    "endless": (
        """def batches(self, split, batch_size, generator):
        yield from iter(lambda: (torch.ones(4, 2), torch.ones(4).long()), None)
    steps = 5""",
        ("gives more than 1,000 batches: it does not end",),
    ),
    "unseeded": (
        """def batches(self, split, batch_size, generator):
        return DataLoader(self.sets[split], batch_size, shuffle=True, generator=self.own)
    own = torch.Generator()""",
        ("another first batch for a generator with the same seed", "generator=generator"),
    ),
    "broken while iterating": (
        "def batches(self, split, batch_size, generator): return (1 / 0 for _ in range(3))\n    steps = 3",
        ("iterating", "ZeroDivisionError"),
    ),
    "unseeded model": (
        """def model(self):
        made = nn.Linear(2, 2)
        nn.init.normal_(made.weight, generator=self.own)
        return made
    own = torch.Generator()""",
        ("gives another weight for the same seed",),
    ),
    "no module": ("def model(self): return [1, 2]", ("model() returned [1, 2]", "torch.nn.Module")),
    "frozen": ("def model(self): return nn.Linear(2, 2).requires_grad_(False)", ("no trainable parameters",)),
    "model elsewhere": (
        "def model(self): return nn.Linear(2, 2, device='meta')",
        ("weight on meta", "--device is cpu"),
    ),
    "batch elsewhere": (
        "def batches(self, split, batch_size, generator): return [torch.ones(2, device='meta')]",
        ("a tensor on meta", "--device is cpu"),
    ),
    "complex": (
        "def model(self): return nn.Linear(2, 2, dtype=torch.complex64)",
        ("model() has the complex parameter weight", "torch.view_as_real()"),
    ),
    "lazy": ("def model(self): return nn.LazyLinear(2)", ("model() has weight without a shape", "Give it its sizes")),
    "other parameters": (
        """def model(self):
        self.calls = getattr(self, "calls", 0) + 1
        return nn.ModuleDict({f"layer{self.calls}": nn.Linear(2, 2)})""",
        ("model() gives other parameters at each call",),
    ),
    "length below zero": (
        """def batches(self, split, batch_size, generator):
        class Negative(list):
            def __len__(self): return -5
        return Negative([[torch.ones(4, 2), torch.ones(4).long()]])""",
        ("batches('train', 16, generator): len() failed", "should return >= 0"),
    ),
    "length zero": (
        """def batches(self, split, batch_size, generator):
        class Zero(list):
            def __len__(self): return 0
        return Zero([[torch.ones(4, 2), torch.ones(4).long()]])""",
        ("batches('train', 16, generator) gives batches, but its len() is 0",),
    ),
    "property": (
        "@property\n    def batch_size(self): return self.none",
        (": batch_size failed", "object has no attribute 'none'"),
    ),
    "method is a property": ("@property\n    def loss(self): return 1 / 0", (": loss failed", "ZeroDivisionError")),
    "no gradients after an evaluation": (
        """def evaluate(self, model, split):
        model.requires_grad_(False)
        return {'error': 0.5}""",
        ("evaluate(model, 'test') changes requires_grad of 0.weight",),
    ),
    "evaluate replaces a parameter": (
        """def evaluate(self, model, split):
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        return {'error': 0.5}""",
        ("evaluate(model, 'test') changes 0.weight, so that the next step would train other weights",),
    ),
    "evaluate loads weights": (
        """def evaluate(self, model, split):
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
        return {'error': 0.5}""",
        ("evaluate(model, 'test') changes 0.weight", "Evaluate a copy of the model, or put its weights back"),
    ),
    "gradients switched off": (
        """def loss(self, model, batch):
        found = super().loss(model, batch)
        torch.set_grad_enabled(False)
        return found""",
        ("loss(model, batch) leaves gradients switched off", "with torch.no_grad()"),
    ),
    "default device": (
        """def batches(self, split, batch_size, generator):
        torch.set_default_device('meta')
        return [[torch.ones(4, 2, device='cpu'), torch.ones(4, device='cpu').long()]]""",
        ("batches('train', 16, generator) leaves torch's default device at meta", "--device is cpu"),
    ),
    "names of metrics": (
        "def loss(self, model, batch): return super().loss(model, batch), {1: 0.5}",
        ("loss(model, batch) returned {1: 0.5} beside the loss", "metrics by name"),
    ),
    "a number beyond floats": (
        "def evaluate(self, model, split): return {'error': 10**400}",
        ("evaluate(model, 'test') returned {'error': 1000", "every value must be one number"),
    ),
    "a metric of a batch that is no number": (
        "def loss(self, model, batch): return super().loss(model, batch), {'rows': batch[0].mean(dim=0)}",
        ("loss(model, batch) returned the metric 'rows' = float32[2]", "must be a number"),
    ),
    "a metric of a batch beyond floats": (
        "def loss(self, model, batch): return super().loss(model, batch), {'big': 10**5000}",
        ("loss(model, batch) returned the metric 'big' = int", "must be a number"),
    ),
    "exit": ("def model(self): raise SystemExit(0)", ("model failed", "SystemExit: 0")),
    "no metric": ("def evaluate(self, model, split): return {'accuracy': 1.0}", ("{'error': ...}",)),
    "no dict": ("def evaluate(self, model, split): return 0.5", ("returned 0.5",)),
    "no number": ("def evaluate(self, model, split): return {'error': torch.ones(2)}", ("must be one number",)),
    "metric is NaN": ("def evaluate(self, model, split): return {'error': float('nan')}", ("error = nan",)),
    "evaluation fails": ("def evaluate(self, model, split): return self.set", ("evaluate was called with", "'set'")),
    "batch size": ("batch_size = 0", ("batch_size=0 is out of range",)),
    "batch sizes": ("batch_sizes = 8", ("batch_sizes must be a tuple",)),
    "constructor": ("def __init__(self): raise KeyError('sets')", ("KeyError: 'sets'",)),
    "no method": ("loss = None", ("lacks loss()",)),
    "one model for all": (
        "kept = torch.nn.Linear(2, 2)\n    def model(self): return self.kept",
        ("model() gives the same weight at each call", "copy.deepcopy()"),
    ),
    "a norm's shared buffers": (
        """kept = torch.nn.BatchNorm1d(2, affine=False)
    def model(self):
        return torch.nn.Sequential(self.kept, *super().model())""",
        ("model() gives the same 0.running_mean at each call",),
    ),
    "a batch size above the data": ("batch_size = 100_000", ("gives one batch of 200 samples", "at most 200")),
    "no name of a metric": ("metric = None", ("lacks the attribute metric",)),
}


@for_every("case", WRONG)
def test_wrong_tasks_are_found_before_they_train(invoke: Invoke, mine: str, case: str) -> None:
    member, messages = WRONG[case]
    place = own(mine, member)
    output = invoke("train", "--task", place, code=1).output
    torch.set_default_device(None)  # some tasks change torch's defaults
    torch.set_grad_enabled(True)
    for message in messages:
        assert message in output
    assert place in output
    assert "src/bighorn" not in output, "the traceback has frames of ours"


@for_every(
    ("place", "message"),
    [
        ("{}.py:Circle", "no 'Circle' there; did you mean Circles?"),
        ("no.py:Circles", "there is no file no.py"),
        ("{}.py:", "is not of the form FILE.py:NAME or PACKAGE.MODULE:NAME"),
        ("{}.py:torch", "lacks model(), batches(), loss(), evaluate(), the attribute metric"),
        ("no_such.module:Circles", "ModuleNotFoundError"),
        ("broken.py:Circles", "SyntaxError"),
        ("{}.py:Stream", "has no len(), so that an epoch has no length"),
    ],
)
def test_places_without_a_task(invoke: Invoke, mine: str, place: str, message: str) -> None:
    Path("broken.py").write_text("class Circles\n")
    assert message in invoke("train", "--task", place.format(mine), code=1).output
    assert f"name the task in it, as {mine}.py:NAME" in invoke("train", "--task", f"{mine}.py", code=2).output


ENDING = """
import sys
class Ending(Circles):
    calls = 0
    def count(self):
        Ending.calls += 1
        return Ending.calls
"""
WAYS_OUT = {
    "a hook exits": """
    def loss(self, model, batch):
        found = super().loss(model, batch)
        if self.count() == 12:
            found.register_hook(lambda gradient: sys.exit(0))
        return found
""",
    "a loss raises Python's word for Ctrl-C": """
    def loss(self, model, batch):
        if self.count() == 12:
            raise KeyboardInterrupt
        return super().loss(model, batch)
""",
    "an evaluation exits": """
    def evaluate(self, model, split):
        return sys.exit() if self.count() == 6 else super().evaluate(model, split)
""",
    "the last evaluation exits, on test data": """
    def evaluate(self, model, split):
        return sys.exit() if self.count() == 13 else super().evaluate(model, split)
""",
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_a_way_out_of_a_task_is_named_and_what_was_done_is_kept(invoke: Invoke, mine: str, way: str) -> None:
    """After the code is corrected, the printed command continues the run, and repeats a failed evaluation."""
    path = Path(f"{mine}.py")
    path.write_text(CODE + ENDING + WAYS_OUT[way])
    options = ["--task", f"{mine}.py:Ending", "--report", "run.html", "--json", "run.json"]
    output = invoke("train", *options, code=1).output
    steps = len(json.loads(Path("run.json").read_text())["history"]["loss"])
    assert steps == (26 if "last" in way else 11 if "evaluation" in way else 10)
    assert f"Stopped after step {steps} of 26 and saved. Resume with:\n  bighorn train --resume bighorn-" in output
    assert re.search(r"(SystemExit|KeyboardInterrupt)", output.partition("Error: ")[2])
    assert_self_contained(Path("run.html"))
    path.write_text(CODE + ENDING + WAYS_OUT[way].replace(" == ", " < 0 == "))
    invoke(*resuming(output.replace(" --report run.html", "")))
    history = json.loads(Path("run.json").read_text())["history"]
    assert [step for step, _ in history["evaluations"]] == [3, 6, 8, 11, 13, 16, 19, 21, 24, 26]
    assert history["test"].keys() == {"error"}


@pytest.fixture
def _default_interrupt() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also in a background job, in which a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_interrupt")
def test_a_ctrl_c_stays_one() -> None:
    def abort() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with Interrupt(), pytest.raises(Aborted):
        user_call("loss", abort)
    with pytest.raises(KeyboardInterrupt):
        user_call("loss", lambda: signal.raise_signal(signal.SIGINT))


def test_names_of_users_are_text_wherever_they_are_written(invoke: Invoke, mine: str) -> None:
    """Pages, figures, tables and the terminal show attributes, templates of `re`, formulas and non-text as text."""
    for name in ('a" onload="alert(1)', "\\1 \\ell $\\frac{1 <bdi>&\x1b[2J\udc80\u202e"):
        Path(f"{mine}.py").write_text(f"""{CODE}
class Named(Circles):
    metric = {name!r}
    description = "of " + metric
    def model(self): return nn.ModuleDict({{"layer " + self.metric.replace(chr(0xDC80), ''): super().model()}})
    def loss(self, model, batch):
        (inner,) = model.values()
        return super().loss(inner, batch), {{"batch's " + self.metric: 0.5}}
    def evaluate(self, model, split):
        (inner,) = model.values()
        return {{self.metric: super().evaluate(inner, split)["error"]}}
""")
        output = invoke("train", "--task", f"{mine}.py:Named", "--report", "r.html", "--json", "r.json").output
        options = ["--optimizers", "sgd,lamb", "--batch-sizes", "16,32", "--trials", 1, "--seeds", 2, "--epochs", 1]
        output += invoke(
            "compare", "--task", f"{mine}.py:Named", *options, "--processes", 1, "--report", "c.html"
        ).output
        assert not {"\x1b", "\udc80", "\u202e"} & set(output)
        for report in ("r.html", "c.html"):
            page = assert_self_contained(Path(report))
            assert not [name for name in page.attributes if name.startswith("on")]
            assert "bdi" not in page.tags
        assert json.loads(Path("r.json").read_text())["history"]["evaluations"][0][1].keys() == {name}


def test_runs_need_a_split_to_be_judged_by_before_the_test(invoke: Invoke, mine: str) -> None:
    path = Path(f"{mine}.py")
    path.write_text(CODE.replace('("train", "validation", "test")', '("train", "test")'))
    for command in ("compare", "train", "lr-find"):
        output = invoke(command, "--task", f"{mine}.py:Circles", code=1).output
        assert "batches was called with ('validation', 16, Generator), and failed" in output
        assert "give the task one, or a method held_out()" in output


def test_the_test_data_are_looked_at_once_after_all_steps(invoke: Invoke, mine: str) -> None:
    """The two tasks count the evaluations of each split; the trial of the task evaluates each once."""
    place = own(
        mine,
        """evaluated = []
    def evaluate(self, model, split):
        self.evaluated.append(split)
        return {"error": float(len(self.evaluated))}""",
    )
    invoke("train", "--task", place, "--json", "r.json", "--save", "r.pt")
    evaluated = sys.modules[mine].Own.evaluated
    assert evaluated == ["test", "validation", *["validation"] * 10, "test"]
    result = json.loads(Path("r.json").read_text())["result"]
    assert (result["validation_error"], result["best_validation_error"], result["test_error"]) == (12, 3, 13)
    invoke("train", "--resume", "r.pt", "--task", place)
    again = sys.modules[mine].Own.evaluated  # the file is imported again
    assert again == ["test", "validation"]  # by the trial; the test's result is in the checkpoint


def test_held_out_data_may_be_a_task_of_their_own(invoke: Invoke, mine: str) -> None:
    path = Path(f"{mine}.py")
    options = ["--optimizers", "sgd", "--trials", 1, "--seeds", 1, "--processes", 1]
    own = f"""{CODE}
class Two(Circles):
    def __init__(self, held=False):
        super().__init__()
        del self.sets["test" if held else "validation"]
    def held_out(self): return """
    path.write_text(own + "Two(held=True)\n")
    assert "sgd at batch 16: lr 0.1" in invoke("compare", "--task", f"{mine}.py:Two", *options).output
    assert "Test error" in invoke("train", "--task", f"{mine}.py:Two").output
    path.write_text(own + "Two()\n")
    output = invoke("compare", "--task", f"{mine}.py:Two", *options, code=1).output
    assert f"{mine}.py:Two.held_out(): batches was called with ('validation', 16, Generator)" in output
    path.write_text(own + "self.none\n")
    assert f"{mine}.py:Two: held_out failed" in invoke("compare", "--task", f"{mine}.py:Two", *options, code=1).output


def test_parameters_may_be_excluded_from_decay_and_trust_ratio() -> None:
    class Excluding(Classification):
        def excluded(self, name: str, parameter: nn.Parameter) -> bool:
            return name == "0.weight" or parameter.ndim < 2

    data = torch.randn(8, 3), torch.randint(2, (8,))
    task = Excluding(data, data, model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    run = Run(RunConfig(threads=1, batch_size=4).resolved(task), task)
    first, second = run.optimizer.param_groups
    assert (first["param_names"], first["weight_decay"]) == (["1.weight"], 0.01)
    assert (second["param_names"], second["adapt"]) == (["0.weight", "0.bias", "1.bias"], False)


def test_runs_whose_metric_is_no_number_are_the_worst(invoke: Invoke, mine: str) -> None:
    bursting = "return {'error': 0.5 if model[0].weight.std() < 0.6 else float('nan')}"
    options = ["--optimizers", "sgd,adamw", "--trials", 1, "--seeds", 2, "--processes", 1]
    for name in ("sgd", "adamw"):  # nothing is left to tune
        options += [word for key in OPTIMIZERS[name].space for word in ("--space", f"{name}.{key}=0.1")]
    options[options.index("sgd.lr=0.1")] = "sgd.lr=2"
    place = own(mine, f"def evaluate(self, model, split): {bursting}")
    words = ["--task", place, *options, "--report", "c.html", "--json", "c.json"]
    output = invoke("compare", *words).output
    assert "2 of 2 final runs of sgd at batch 16 diverged. They count as the worst value." in output
    assert "At batch 16 sgd (inf) cannot be distinguished from adamw (0.5): runs of sgd diverged." in output
    assert json.loads(Path("c.json").read_text())["cells"][0]["error"]["mean"] is None
    assert_self_contained(Path("c.html"))


def test_an_error_of_a_model_that_has_diverged_is_the_runs(invoke: Invoke, mine: str) -> None:
    """torch.distributions refuses parameters that are NaN; so does a loss that follows in the same way."""
    options = ["--optimizers", "sgd,adamw", "--trials", 1, "--seeds", 1, "--processes", 1, "--space", "sgd.lr=1e30"]
    checked = """def loss(self, model, batch):
        return super().loss(model, batch) + 0 * torch.distributions.Normal(model(batch[0]), 1.0).mean.sum()"""
    judged = """def loss(self, model, batch): return 1e12 * super().loss(model, batch)
    def evaluate(self, model, split):
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return super().evaluate(model, split)"""
    for members in (checked, judged + "\n    steps = 1"):
        output = invoke("compare", "--task", own(mine, members), *options).output
        assert "sgd at batch 16: all 1 trial diverged, so that no options were chosen" in output
        assert "adamw at batch 16: lr" in output


def test_a_study_is_of_a_tasks_model_code_and_data(invoke: Invoke, mine: str) -> None:
    words = ["--optimizers", "sgd", "--batch-sizes", 16, "--trials", 1, "--seeds", 1, "--processes", 1]

    def output(place: str, *more: object) -> str:
        return invoke("compare", "--task", place, *changed(words, *more), "--study", "s.study").output

    output(f"{mine}.py:Circles")
    assert "2 runs are already in s.study" in output(f"./{mine}.py:Circles"), "the place is not a part of it"
    assert "2 runs are already in s.study" in output(f"{mine}.py:Circles", "--batch-sizes", "8,16")
    for old, new in (("nn.Tanh()", "nn.ReLU()"), ("1.2", "1.3"), ("x, y in", "x, y  in")):
        Path(f"{mine}.py").write_text(CODE.replace(old, new))
        assert "s.study has runs of sgd, batch 16, but none that fits" in output(f"{mine}.py:Circles"), new


def test_a_report_over_steps_says_so(invoke: Invoke, mine: str) -> None:
    words = ["--optimizers", "sgd", "--trials", 1, "--seeds", 1, "--processes", 1, "--report", "c.html"]
    invoke("compare", "--task", f"{mine}.py:Steps", *words)
    assert "error by step" in Path("c.html").read_text()
    invoke("compare", "--task", f"{mine}.py:Circles", *words)
    assert "error by epoch" in Path("c.html").read_text()


def test_batches_without_tensors_are_told_apart() -> None:
    class Words:
        batch_size = 2

        def __init__(self, *words: object) -> None:
            self.words = words

        def batches(self, split: str, *_: object) -> list[object]:
            return [(split, self.words)]

    array = np.arange(3000.0)
    for one, other in (("a", "b"), (array, array + (np.arange(3000) == 1500)), ({"x": [1]}, {"x": [2]})):
        first, second, again = (fingerprint(Words(each)) for each in (one, other, one))  # type: ignore[arg-type]
        assert first == again != second


def test_data_are_drawn_from_seeded_generators_and_processes_compare_them(
    invoke: Invoke, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = "def __init__(self):\n        super().__init__()\n        perm = {}(200)\n"
    drawn += "        data = torch.utils.data.Subset(self.sets['train'], perm.tolist())\n"
    drawn += "        self.sets = dict.fromkeys(self.sets, data)"
    invoke("train", "--epochs", 1)  # draws random numbers
    place = own(mine, drawn.format("torch.randperm"))
    assert fingerprint(load(place)) == fingerprint(load(place))
    place = own(mine, drawn.format("torch.arange(200).roll(__import__('os').getpid()) + 0 * torch.randperm"))
    task = load(place)
    plan = prepare(CompareConfig(task=place, optimizers="sgd", trials=1, seeds=1), task, Path("s.study")).plan
    monkeypatch.setattr("os.getpid", lambda: 7)
    with pytest.raises(InputError, match=r"has other training data in each process.*--processes 1"):
        worker(plan, os.getppid(), 0)


def test_attributes_that_a_run_changes_are_not_those_of_the_next(mine: str) -> None:
    names: dict[str, Any] = {}
    exec(
        f"{CODE}\nclass Own(Circles):\n    count = 0\n    def loss(self, model, batch):\n        self.count += 1\n"
        "        return min(1.0, self.count / 60) * super().loss(model, batch)\n",
        names,
    )
    task = UserTask(names["Own"](), f"{mine}.py:Own")
    config = RunConfig(threads=1, lr=0.1, optimizer="sgd").resolved(task)
    one, other = (make(config, task, "test") for _ in range(2))
    assert one.curve == other.curve
    assert task.inner.count == 0


def test_passes_are_seeded_by_seed_and_epoch_and_skipped_by_their_length() -> None:
    class Counted:
        metric = "loss"

        def __init__(self) -> None:
            self.taken = 0

        def model(self) -> nn.Module:
            return nn.Linear(1, 1)

        def batches(self, split: str, batch_size: int, generator: torch.Generator) -> list[int]:  # noqa: ARG002
            self.taken += 1
            return torch.randperm(5, generator=generator).tolist()

        def loss(self, model: nn.Module, batch: int) -> torch.Tensor:
            return model(torch.tensor([float(batch)])).sum()  # type: ignore[no-any-return]

        def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:  # noqa: ARG002
            return {"loss": 0.0}

    task: Task = Counted()
    whole = Batches(task, 1, seed=7)
    stream = [next(whole) for _ in range(35)]
    assert [sorted(stream[start : start + 5]) for start in range(0, 35, 5)] == [list(range(5))] * 7
    assert stream[:5] != stream[5:10]
    for count in (0, 3, 5, 17, 20):
        counted = Counted()
        rest = Batches(counted, 1, seed=7)
        rest.skip(count)
        assert counted.taken == 2 if count else 1  # one to find the length, one for the rest of a pass
        assert [next(rest) for _ in range(35 - count)] == stream[count:]


def test_tensors_in_memory_are_a_task_of_their_own() -> None:
    inputs, targets = torch.randn(40, 3), torch.randint(2, (40,))
    task = Classification((inputs, targets), (inputs[:4], targets[:4]), "noise", lambda: nn.Linear(3, 2))
    held = task.held_out()
    assert defaults(task).samples == 40
    assert (held.samples, len(held.data["validation"][0])) == (32, 8)
    assert held.model is task.model
    with pytest.raises(NotImplementedError, match="give Classification a function"):
        Classification((inputs, targets), (inputs, targets)).model()


def test_an_evaluation_that_changes_weights_later_ends_the_run(invoke: Invoke, mine: str) -> None:
    """Averages that begin as a copy of the weights differ only after a step; weights that are put back are the same."""
    average = """def evaluate(self, model, split):
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        self.average = getattr(self, 'average', kept)
        model.load_state_dict(self.average)
        found = super().evaluate(model, split)
        model.load_state_dict(kept)
        return found"""
    invoke("train", "--task", own(mine, average))
    forgotten = average.replace("model.load_state_dict(kept)", "pass")
    output = invoke("train", "--task", own(mine, forgotten), code=1).output
    assert "evaluate(model, 'validation') changes 0.weight" in output


def test_seeds_that_make_no_difference_are_refused_unless_that_is_meant(invoke: Invoke, mine: str) -> None:
    """`compare` alone refuses them, since its intervals are over seeds."""
    seeded = "def model(self):\n        torch.manual_seed(0)\n        return super().model()"
    words = ["--task", own(mine, seeded), "--batch-sizes", 16]
    output = invoke("compare", *words, code=1).output
    assert "model() gives the same initial values for the seeds 0 and 1, so that all runs would be one" in output
    assert "pretrained = True" in output
    invoke("train", *words[:2])
    own(mine, f"{seeded}\n    pretrained = True")
    invoke("compare", *words, "--trials", 1, "--seeds", 1, "--processes", 1)


def test_a_metric_that_seems_better_lower_must_say_so(invoke: Invoke, mine: str) -> None:
    lower = ("val_loss", "error", "RMSE", "Perplexity", "wer", "test-nll", "l2_error")
    assert all(map(seems_lower, lower))
    errors = (
        *("nmse", "nrmse", "rmsd", "smape", "wmape", "mape", "mad", "mase", "mpjpe", "eer", "per", "val_per", "ber"),
        *("lpips", "emd", "chamfer", "huber", "ce", "bce", "val_ce", "cost", "energy", "bits", "bits_per_byte"),
        *("miss_rate", "negative_log_likelihood"),
    )
    assert all(map(seems_lower, errors))
    higher = ("accuracy", "performance", "tokens_per_second", "log_likelihood", "map", "reward_per_episode", "success")
    assert not any(map(seems_lower, higher))
    path = Path(f"{mine}.py")
    code = CODE.replace("higher_is_better = ", "other = ")
    path.write_text(code)
    output = invoke("train", "--task", f"{mine}.py:Circles", code=1).output
    assert "is a lower error better? Give the task the attribute higher_is_better = False, or True." in output
    path.write_text(code.replace("other = ", "higher_is_better = ").replace("False", "True", 1))
    invoke("train", "--task", f"{mine}.py:Circles")


def test_the_number_of_evaluations_does_not_change_a_run(mine: str) -> None:
    """Each pass of a DataLoader, and each mask of dropout, draws random numbers."""
    names: dict[str, type] = {}
    exec(CODE, names)
    task = UserTask(names["Circles"](), f"{mine}.py:Circles")
    config = RunConfig(threads=1, lr=0.1).resolved(task)
    few, many = (make(config, task, "test", evaluations=count) for count in (1, 20))
    assert few.value == many.value
    assert [step for step, _ in few.curve] == [26]


def test_a_constant_that_models_share_is_accepted(invoke: Invoke, mine: str) -> None:
    """Such a constant is the matrix of a graph, or a frozen part that is trained elsewhere."""
    members = """kept = nn.Linear(2, 2).requires_grad_(False)
    def model(self):
        made = nn.Sequential(self.kept, *super().model())
        made.register_buffer("matrix", self.kept.weight.detach())
        return made"""
    invoke("train", "--task", own(mine, members))
