"""A user's task that misbehaves trains or ends in one message; the name of a metric is shown as text everywhere."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.attack_settings import tries
from workbench.tests.command_line import assert_self_contained, call

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

BODIES: Mapping[str, Sequence[str]] = {
    "metric": tuple(f"metric = {name!r}" for name in (*METRICS, 7, None)),
    "model": (
        "return nn.Linear(2, 2)",
        "return None",
        "return nn.Identity()",
        "return nn.Linear(2, 2).requires_grad_(False)",
        "return nn.Linear(2, 2, device='meta')",
        "return nn.Linear(2, 2).double()",
        "raise KeyError('\\x1b[2J')",
        "raise SystemExit(3)",
        "return [nn.Linear(2, 2)]",
    ),
    "batches": (
        "return [torch.ones(4, 2)] * 3",
        "return []",
        "return None",
        "return iter([torch.ones(4, 2)])",
        "yield from [torch.ones(4, 2)] * 2; raise OSError('<b>')",
        "return [torch.ones(4, 3)]",
        "return [object()]",
        "return [torch.full((4, 2), float('nan'))]",
        "return {1: torch.ones(4, 2)}",
    ),
    "loss": (
        "return model(batch).square().mean()",
        "return model(batch)",
        "return 1.0",
        "return torch.ones(())",
        "return model(batch).mean() * float('inf')",
        "return model(batch).square().mean(), {self.metric: batch}",
        "return model(batch).square().mean(), {'\\x1b': batch.mean()}",
        "return model(batch).square().mean().to('meta')",
        "import torch; torch.set_default_dtype(torch.float64); return model(batch.double()).mean()",
        "model.weight = nn.Parameter(torch.ones(2, 2)); return model(batch).mean()",
        "model.zero_grad(); torch.manual_seed(0); return model(batch).square().mean()",
        "return model(batch).square().mean() * 1j",
        "return model(batch).square().mean(), {self.metric: torch.ones((), device='meta')}",
        "raise RuntimeError(self.metric)",
    ),
    "evaluate": (
        "return {self.metric: 0.5}",
        "return {self.metric: float('nan')}",
        "return {self.metric: torch.tensor(0.5)}",
        "return {self.metric: '0.5'}",
        "return {self.metric: torch.ones(2)}",
        "return {}",
        "return 0.5",
        "return {self.metric: 0.5, '\\x1b[2J': 1.0, '<i>': 2.0}",
        "return {self.metric: torch.ones((), device='meta')}",
        "return {7: 0.5, self.metric: 0.5}",
        "return {self.metric: 10**400}",
        "model.train(); return {self.metric: 1j}",
        "raise ValueError('\\x1b]0;title\\x07')",
    ),
}
ARGUMENTS = {
    "model": "self",
    "batches": "self, split, batch_size, generator",
    "loss": "self, model, batch",
    "evaluate": "self, model, split",
}
NUMBERS = itertools.count()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("misbehaving_"):
            del sys.modules[name]


@st.composite
def tasks(draw: st.DrawFn) -> str:
    """Return the text of a task whose methods misbehave in up to two ways."""
    bad = draw(st.lists(st.sampled_from(sorted(BODIES)), min_size=1, max_size=2, unique=True))
    chosen = {name: draw(st.sampled_from(of)) if name in bad else of[0] for name, of in BODIES.items()}
    lines = [
        "import torch",
        "from torch import nn",
        "class Mine:",
        "    higher_is_better, epochs = False, 1",
        f"    {chosen.pop('metric')}",
    ]
    for name, body in chosen.items():
        lines.append(f"    def {name}({ARGUMENTS[name]}):\n        {body}")
    return "\n".join(lines) + "\n"


@tries(60)
@given(text=tasks())
def test_a_task_trains_or_ends_in_one_message(folder: Path, text: str) -> None:
    name = f"misbehaving_{next(NUMBERS)}"
    (folder / f"{name}.py").write_text(text, errors="surrogateescape")
    page = folder / "run.html"
    page.unlink(missing_ok=True)
    words = ["train", "--task", f"{name}.py:Mine", "--threads", "1", "--report", str(page), "--json", "run.json"]
    result = call(*words)
    assert result.exit_code in {0, 1, 2}, result.output
    assert not set("\x1b\x07") & set(result.output), repr(result.output)
    assert result.exit_code == 0 or "Error" in result.output, result.output
    if page.exists():
        assert_self_contained(page)
