"""A user's task that misbehaves trains or ends in one message; the name of a metric is shown as text everywhere."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bighorn_workbench.builtin_tasks import trial
from tests.support.attack_settings import tries
from workbench.tests.command_line import assert_self_contained, call
from workbench.tests.test_own_tasks import CODE, WRONG

METRICS = (
    "error",
    "<script>alert(1)</script>",
    "\x1b[2J\x07",
    "{{ 7 * 7 }}",
    "$x_{\\frac$",
    "a" * 300,
    "\udc80",
    "",
    "../up",
    "%s",
)
"""Names of the metric: a plain one, and markup of pages, terminals, templates, mathematics, paths and formats."""

MEMBERS = (
    *(member for member, _ in WRONG.values() if "metric = " not in member),
    "def model(self): raise KeyError('\\x1b[2J')",
    "def batches(self, split, batch_size, generator): yield from self.none('<b>')",
    "def batches(self, split, batch_size, generator): return [object()]",
    "def loss(self, model, batch): return torch.ones(())",
    "def loss(self, model, batch): return super().loss(model, batch), {self.metric: batch[0]}",
    "def loss(self, model, batch): return super().loss(model, batch), {'\\x1b': batch[0].mean()}",
    "def loss(self, model, batch): return super().loss(model, batch), {self.metric: torch.ones((), device='meta')}",
    "def loss(self, model, batch): return super().loss(model, batch).to('meta')",
    "def loss(self, model, batch): return super().loss(model, batch) * 1j",
    "def loss(self, model, batch): torch.set_default_dtype(torch.float64); return super().loss(model.double(), batch)",
    "def loss(self, model, batch): model[0].weight = nn.Parameter(torch.ones(16, 2)); return model(batch[0]).mean()",
    "def loss(self, model, batch): model.zero_grad(); torch.manual_seed(0); return super().loss(model, batch)",
    "def loss(self, model, batch): raise RuntimeError(self.metric)",
    "def evaluate(self, model, split): return {self.metric: '0.5'}",
    "def evaluate(self, model, split): return {self.metric: 0.5, '\\x1b[2J': 1.0, '<i>': 2.0, 7: 0.5}",
    "def evaluate(self, model, split): return {self.metric: torch.ones((), device='meta')}",
    "def evaluate(self, model, split): model.train(); return {self.metric: 1j}",
    "def evaluate(self, model, split): raise ValueError('\\x1b]0;title\\x07')",
)
"""Members of a task that are wrong or unusual."""

NUMBERS = itertools.count()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(trial, "MOST_BATCHES", 1000)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("misbehaving_"):
            del sys.modules[name]


@st.composite
def tasks(draw: st.DrawFn) -> str:
    """Return the text of a task with a name for its metric and up to two wrong members."""
    members = draw(st.lists(st.sampled_from(MEMBERS), max_size=2, unique=True))
    named = [
        "class Named(Circles):",
        f"metric, epochs = {draw(st.sampled_from(METRICS))!r}, 1",
        "def evaluate(self, model, split): return {self.metric: super().evaluate(model, split)['error']}",
    ]
    return CODE + "\n    ".join(named) + "\n" + "\n    ".join(["class Mine(Named):", "pass", *members]) + "\n"


@tries(60)
@given(text=tasks())
def test_a_task_trains_or_ends_in_one_message(folder: Path, text: str) -> None:
    name = f"misbehaving_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(text, errors="surrogateescape")
    page = folder / "run.html"
    page.unlink(missing_ok=True)
    words = ["train", "--task", f"{name}.py:Mine", "--threads", "1", "--report", str(page), "--json", "run.json"]
    result = call(*words)
    torch.set_default_device(None)  # some tasks change torch's defaults
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    assert result.exit_code in {0, 1, 2}, result.output
    assert not set("\x1b\x07") & set(result.output), repr(result.output)
    assert result.exit_code == 0 or "Error" in result.output, result.output
    if page.exists():
        assert_self_contained(page)
