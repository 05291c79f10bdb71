"""``bighorn lr-find``: runs at fixed rates; the best continue."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bighorn_workbench import lr_find
from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.config import RunConfig
from bighorn_workbench.trials import Trial
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, assert_self_contained


def made(monkeypatch: pytest.MonkeyPatch, best: float, seen: list[RunConfig]) -> None:
    """Let a run be better the nearer its rate is to ``best``, or diverge if that is 0."""

    def run(config: RunConfig, *_: Any) -> Trial:
        seen.append(config)
        value = -abs(math.log(config.lr or 1.0) - math.log(best)) if best else -math.inf
        return Trial(config, value, 1.0 if best else math.inf, config.steps or 0, None, 0.1, 0, ())

    monkeypatch.setattr(lr_find, "make", run)


@pytest.mark.parametrize("best", [0.01, 0.2, 1.0])
def test_the_best_rates_train_for_longer(best: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []
    made(monkeypatch, best, seen)
    config = RunConfig(threads=1, warmup="18").resolved(Digits())
    found = lr_find.find(config, Digits(), (0.0005, 5.0))
    total = seen[-1].steps or 0
    lengths = [config.steps for config in seen]
    assert lengths == [round(total / 8)] * 12 + [round(total / 2)] * 4 + [total] * 2
    near = sorted({config.lr or 0.0 for config in seen[:12]}, key=lambda lr: abs(math.log(lr / best)))
    assert sorted(near[:4]) == [config.lr for config in seen[12:16]]
    assert sorted(near[:2]) == [config.lr for config in seen[16:]]
    assert found.lr == near[0]
    factors = [b / a for a, b in zip(sorted(near)[:-1], sorted(near)[1:], strict=True)]
    assert factors == pytest.approx([1e4 ** (1 / 12)] * 11, rel=0.01)
    assert found.words[0].startswith(f"Suggestion: lr {near[0]:.3g}, with accuracy ")
    assert not found.edge
    assert {config.warmup for config in seen} == {f"{100 * 18 / total:.6g}%"}, (
        "a warm-up in steps is a share of each run"
    )
    assert all(config.epochs is None and config.seed == 0 for config in seen)


def test_a_rate_at_an_end_and_runs_that_diverge_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(threads=1).resolved(Digits())
    for best, words in ((1e-6, "give a lower --lr-min"), (100.0, "give a higher --lr-max")):
        made(monkeypatch, best, [])
        assert words in lr_find.find(config, Digits(), (0.001, 1.0)).words[-1]
    made(monkeypatch, 0.0, [])
    with pytest.raises(ValueError, match=r"every run of \d+ steps diverged, also at lr .*Take a lower --lr-min"):
        lr_find.find(config, Digits(), (0.001, 1.0))


def test_the_suggestion_is_good_enough_to_train_with(invoke: Invoke) -> None:
    output = invoke("lr-find", "--epochs", 6, "--report", "lr.html", "--json", "lr.json").output
    found = json.loads(Path("lr.json").read_text())
    assert [len(rung) for rung in found["rungs"]] == [12, 4, 2]
    assert f"18 of 18: lr {found['rungs'][-1][-1]['lr']:.3g}" in output
    assert f"Suggestion: lr {found['suggestion']:.3g}" in output
    assert max(found["rungs"][-1], key=lambda run: (run["accuracy"], -run["loss"]))["lr"] == found["suggestion"]
    page = assert_self_contained(Path("lr.html"))
    assert f"Start lamb at lr {found['suggestion']:.3g}" in page.text
    invoke("train", "--lr", found["suggestion"], "--json", "run.json")
    assert json.loads(Path("run.json").read_text())["result"]["test_accuracy"] > 0.95


@for_every(
    ("options", "message"),
    [
        (["--lr-min", "1", "--lr-max", "0.1"], "--lr-max 0.1 must be above --lr-min 1"),
        (["--lr-min", "6"], "--lr-max 5 must be above --lr-min 6"),
        (["--lr-min", "0"], "--lr-min=0.0"),
        (["--lr-max", "1e308"], "3.4e+38"),
        (["--lr-max", "1e30", "--lr-min", "1e-300"], "3.4e+38"),
        (["--steps", "0"], "--steps=0 is out of range"),
        (["--epochs", "1", "--steps", "3"], "--epochs and --steps both set the length"),
        (["--batch-size", "100000"], "batch size 100000 is more than"),
    ],
)
def test_bad_options(invoke: Invoke, options: list[str], message: str) -> None:
    assert message in invoke("lr-find", *options, code=1).output
