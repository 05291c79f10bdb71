"""``bighorn lr-find``: its curve, its end and its suggestion."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bighorn_workbench.lr_find import Curve
from bighorn_workbench.run import DivergedError, Run
from workbench.tests.command_line import Invoke, assert_self_contained


def test_a_search_ends_at_four_times_the_best_and_marks_its_suggestion(invoke: Invoke) -> None:
    output = invoke("lr-find", "--report", "lr.html", "--json", "lr.json").output
    found = json.loads(Path("lr.json").read_text())
    curve = found["curve"]
    assert "4 x its best" in output
    assert len(curve["lr"]) < 200
    past = curve["past_average"]
    assert past[-1] > 4 * min(past)
    assert all(loss <= 4 * min(past[: i + 1]) for i, loss in enumerate(past[:-1]))
    assert curve["lr"][0] == pytest.approx(1e-5)
    factors = {round(b / a, 9) for a, b in zip(curve["lr"][:-1], curve["lr"][1:], strict=True)}
    assert factors == {round(1e6 ** (1 / 199), 9)}
    assert found["suggestion"] in curve["lr"]
    assert 1e-3 < found["suggestion"] < found["best"]["lr"]
    page = assert_self_contained(Path("lr.html"))
    assert f"suggestion: {found['suggestion']:.2g}" in page.text
    assert f"Suggestion: lr {found['suggestion']:.2g}" in output


def test_the_suggestion_is_good_enough_to_train_with(invoke: Invoke) -> None:
    invoke("lr-find", "--json", "lr.json")
    lr = json.loads(Path("lr.json").read_text())["suggestion"]
    invoke("train", "--lr", lr, "--json", "run.json")
    assert json.loads(Path("run.json").read_text())["result"]["test_accuracy"] > 0.95


def test_smoothing_starts_at_the_first_loss_and_keeps_a_constant() -> None:
    curve = Curve()
    for _ in range(5):
        curve.add(0.1, 3.0)
    assert curve.smooth == pytest.approx([3.0] * 5)
    curve.add(0.1, 4.0)
    assert curve.smooth[-1] == pytest.approx(
        sum(0.95 ** (5 - i) * loss for i, loss in enumerate([3.0] * 5 + [4.0])) / sum(0.95**i for i in range(6))
    )


def test_the_suggestion_is_between_the_steepest_point_and_the_lowest() -> None:
    """An average over the past suggested step 70, where the learning rate is three times as large."""
    curve = Curve()
    for i in range(120):
        curve.add(10 ** (i / 20 - 5), 2 - math.tanh((i - 60) / 10) + (i - 84) ** 2 / 500 * (i > 84))
    best = int(np.argmin(curve.mean))
    assert abs(best - 84) <= 4
    assert curve.suggestion() == (60 + best) // 2


def test_a_loss_that_only_rises_has_no_suggestion(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Run.train_step

    def rising(run: Run) -> None:
        step(run)
        run.history.loss[-1] = 1.0 + 0.01 * run.step

    monkeypatch.setattr(Run, "train_step", rising)
    output = invoke("lr-find", "--steps", 20, "--lr-max", 0.1, "--report", "lr.html").output
    assert "No suggestion: the loss rises from the start" in output
    assert "All 20 steps, up to lr 0.1" in output


def test_a_loss_that_still_falls_asks_for_a_higher_end(invoke: Invoke) -> None:
    assert "The loss has not risen yet: give a higher --lr-max." in invoke("lr-find", "--lr-max", 0.01).output
    assert "has not risen" not in invoke("lr-find").output


@pytest.mark.parametrize(("at", "code", "said"), [(15, 0, "Stopped at lr"), (0, 1, "Take a lower --lr-min")])
def test_a_run_that_diverges_is_an_end(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, at: int, code: int, said: str
) -> None:
    step = Run.train_step

    def bursting(run: Run) -> None:
        if run.step == at:
            raise DivergedError("the loss became nan")
        step(run)

    monkeypatch.setattr(Run, "train_step", bursting)
    output = invoke("lr-find", "--steps", 30, code=code).output
    assert "the loss became nan" in output
    assert said in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr-min", "1", "--lr-max", "0.1"], "--lr-max 0.1 must be above --lr-min 1"),
        (["--lr-min", "0"], "--lr-min=0.0"),
        (["--steps", "3"], "--steps=3 is out of range: it must be an integer, at least 20"),
        (["--batch-size", "100000"], "batch size 100000 is more than"),
    ],
)
def test_bad_options(invoke: Invoke, options: list[str], message: str) -> None:
    assert message in invoke("lr-find", *options, code=1).output
