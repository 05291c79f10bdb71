"""``bighorn compare``, on grids small enough to check by hand."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from bighorn.cli import sweep
from bighorn.cli.compare import WIDEST, _table, columns, continued, row, warnings
from bighorn.cli.config import RunConfig
from bighorn.cli.run import Run
from bighorn.cli.tasks.digits import Digits
from bighorn.cli.verdict import expected_seconds, interval, verdicts
from tests.support.command_line import Invoke, assert_self_contained
from tests.support.tables import for_every


def trial(lr: float, seed: int, value: float, loss: float = 1.0, steps_to_target: int | None = 5) -> sweep.Trial:
    config = RunConfig(lr=lr, seed=seed)
    curve = ((5, value / 2), (10, value))
    return sweep.Trial(config, value, loss, 10, steps_to_target, seconds=1.0, state_bytes=2_000_000, curve=curve)


def cell(optimizer: str, batch_size: int, lr: float, *accuracies: float) -> sweep.Cell:
    trials = tuple(trial(lr, seed, accuracy) for seed, accuracy in enumerate(accuracies))
    return sweep.Cell(optimizer, batch_size, ((0.1, 0.5), (0.2, 0.9), (0.3, 0.6)), lr, trials)


@pytest.mark.slow
def test_a_tiny_grid_end_to_end(invoke: Invoke) -> None:
    """The grid runs in two processes, which exchange jobs and trials."""
    options = ["--lrs", "lamb=0.005,0.01", "--lrs", "sgd=0.1", "--batch-sizes", "256,128", "--seeds", 2, "--epochs", 3]
    output = invoke(
        "compare", "--optimizers", "lamb,sgd", *options, "--processes", 2, "--report", "c.html", "--json", "c.json"
    ).output
    assert all(len(line) <= 80 for line in output.splitlines() if "Warning" not in line and "went on" not in line)
    result = json.loads(Path("c.json").read_text())
    assert result["command"].startswith("bighorn compare --optimizers lamb,sgd")
    assert result["environment"]["torch"]
    cells = {(cell["config"]["optimizer"], cell["config"]["batch_size"]): cell for cell in result["cells"]}
    assert list(cells) == [("lamb", 128), ("lamb", 256), ("sgd", 128), ("sgd", 256)]
    for (name, size), cell in cells.items():
        assert len(cell["tuning"]) == 2 * len(cell["tuned"])
        assert [run["seed"] for run in cell["final"]] == [0, 1]
        assert cell["on_edge"] is (f"Warning: the best learning rate of {name} at batch {size}" in output)
        assert len(cell["curve"]["steps"]) == len(cell["curve"]["accuracy"])
        assert f"{cell['config']['lr']:g}" in output
    # The low rates of lamb's grid are far from the best, so the grid continues until the best is inside, or 4 times.
    assert len(cells["lamb", 128]["tuned"]) > 2
    assert "lamb at batch 128: the end of the grid was the best, so it went on to 0.02" in output
    assert [len(cells["sgd", size]["tuned"]) for size in (128, 256)] == [1, 1]
    page = assert_self_contained(Path("c.html"))
    for part in ("Accuracy by batch size", "steps to 95%", "lamb 0.005, 0.01; sgd 0.1", "Convergence", "--seeds 2"):
        assert part in page.text
    cell = cells["sgd", 256]
    again = sweep.make(RunConfig(**cell["config"], seed=1), 0.95, tuning=False)
    assert (again.value, again.loss) == (cell["final"][1]["accuracy"], cell["final"][1]["loss"])


def test_batch_sizes_may_differ_between_optimizers() -> None:
    cells = [cell("adam", 32, 0.2, 0.9), cell("lamb", 64, 0.2, 0.8), cell("sgd", 64, 0.2, 0.7)]
    assert verdicts(cells) == ["At batch 64 lamb has 80.0%, sgd 70.0%.", "Not settled by one seed: run --seeds 10."]
    assert verdicts(cells[:2]) == []


def test_a_grid_goes_on_until_the_best_lies_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accuracies of one cell are highest at 0.35, and those of the other one rise with every rate."""

    def fake(config: RunConfig, *_: object) -> sweep.Trial:
        lr = config.lr or 0.0
        return trial(lr, config.seed, 1 - abs(lr - 0.35) if config.optimizer == "lamb" else lr / 1e3)

    monkeypatch.setattr(sweep, "make", fake)
    bases = [(name, RunConfig(optimizer=name).resolved(Digits())) for name in ("lamb", "sgd")]
    grids = {"lamb": (0.1, 0.2), "sgd": (0.1, 0.2)}
    counted = [sweep.count(bases, grids, 2, 1), 0]

    def made() -> None:
        counted[1] += 1

    def added(more: int) -> None:
        counted[0] += more

    lamb, sgd = sweep.run_cells(bases, grids, 2, 1, 0.9, 1, Digits(), made=made, added=added)
    assert [lr for lr, _ in lamb.tuned] == [0.1, 0.2, 0.4, 0.8]
    assert (lamb.lr, lamb.on_edge) == (0.4, False)
    assert [lr for lr, _ in sgd.tuned] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    assert (sgd.lr, sgd.on_edge) == (3.2, True)
    assert counted[0] == counted[1]
    assert continued([lamb, sgd], grids) == [
        "lamb at batch 128: the end of the grid was the best, so it went on to 0.4, 0.8.",
        "sgd at batch 128: the end of the grid was the best, so it went on to 0.4, 0.8, 1.6, 3.2.",
    ]
    assert "sgd at batch 128, 3.2, is on the edge" in warnings([lamb, sgd])[0]


def test_a_grid_goes_on_downwards_too() -> None:
    assert sweep.beyond(0.1, [(0.1, 0.9), (0.2, 0.8)], given=2) == (0.05,)


def test_the_curve_of_a_cell_is_the_median_of_its_seeds() -> None:
    assert cell("lamb", 32, 0.2, 0.9, 0.7, 0.8).curve == [(5, 0.4), (10, 0.8)]


def test_the_rate_of_the_best_held_out_accuracy_is_chosen() -> None:
    trials = [trial(0.1, 0, 0.8), trial(0.1, 1, 0.9), trial(0.3, 0, 0.7), trial(0.3, 1, 0.99), trial(1.0, 0, 0.0)]
    lr, tuned = sweep.choose(trials)
    assert lr == 0.1
    assert dict(tuned) == pytest.approx({0.1: 0.85, 0.3: 0.845, 1.0: 0.0})
    assert sweep.choose([trial(0.1, 0, 0.9, loss=0.5), trial(0.2, 0, 0.9, loss=0.4)])[0] == 0.2


def test_tuning_never_sees_the_test_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Digits, str]] = []
    evaluate = Digits.evaluate

    def watched(task: Digits, model: nn.Module, split: str) -> dict[str, float]:
        seen.append((task, split))
        return evaluate(task, model, split)

    monkeypatch.setattr(Digits, "evaluate", watched)
    config = RunConfig(epochs=1, threads=1).resolved(Digits())
    sweep.make(config, 0.9, tuning=True)
    sweep.make(config, 0.9, tuning=False)
    (tuned, first), (final, last) = seen[0], seen[-1]
    assert (first, last) == ("validation", "test")
    assert tuned.samples + len(tuned.data["validation"][0]) == final.samples


def test_a_diverged_run_is_the_worst_one() -> None:
    config = RunConfig(lr=1e30, warmup="0", epochs=2, threads=1).resolved(Digits())
    outcome = sweep.make(config, 0.9, tuning=False)
    assert (outcome.value, outcome.loss, outcome.steps_to_target) == (0.0, float("inf"), None)


def test_what_a_cell_comes_to() -> None:
    few = cell("lamb", 32, 0.3, 0.9, 0.7, 0.8)
    assert row(few) == ("lamb", "32", "0.3*", "80.0% (70.0-90.0)", "5 of 10", "1.0000", "2.00 MB", "1.0 s")
    never = dataclasses.replace(few, trials=tuple(trial(0.2, seed, 0.5, steps_to_target=None) for seed in range(3)))
    assert row(never)[4] == "never of 10"


def test_a_wide_table_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    wide = dataclasses.replace(
        cell("came-corrected", 16384, 0.0002, 0.9),
        trials=(dataclasses.replace(trial(0.0002, 0, 0.9, steps_to_target=None), seconds=12345.6),),
    )
    Console(width=WIDEST, soft_wrap=True).print(_table([wide], columns("accuracy", 0.95)))
    shown = capsys.readouterr().out
    assert all(part in shown for part in row(wide)[:-1])


def test_the_words_say_what_the_figures_say() -> None:
    cells = [
        cell("lamb", 32, 0.2, 0.9),
        cell("lamb", 64, 0.2, 0.8),
        cell("sgd", 32, 0.2, 0.9),
        cell("sgd", 64, 0.1, 0.85),
    ]
    assert verdicts(cells) == [
        "lamb loses 10.0 points from batch 32 to 64.",
        "sgd loses 5.0 points from batch 32 to 64.",
        "At batch 64 sgd has 85.0%, lamb 80.0%.",
        "Not settled by one seed: run --seeds 10.",
    ]
    [warning] = warnings(cells)
    assert "sgd at batch 64, 0.1, is on the edge of its grid" in warning


def test_a_verdict_has_an_interval_over_seeds() -> None:
    """Differences of 1, 2 and 3 points: the mean is 2, and its interval t(0.975, 2) * 1 / sqrt(3) = 2.484."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.4841), abs=1e-4)
    assert interval([1.0]) == (1.0, math.inf)
    small, large = cell("lamb", 32, 0.2, 0.91, 0.92, 0.93), cell("lamb", 64, 0.2, 0.9, 0.9, 0.9)
    even = [cell("sgd", 32, 0.2, 0.9, 0.9, 0.9), cell("sgd", 64, 0.2, 0.85, 0.85, 0.85)]
    assert verdicts([small, large, *even]) == [
        "lamb loses 2.0 +- 2.5 points from batch 32 to 64: at most 4.5.",
        "sgd loses 5.0 +- 0.0 points from batch 32 to 64.",
        "At batch 64 lamb has 90.0%, sgd 85.0%: ahead by 5.0 +- 0.0 points.",
        "+- are 95% intervals by Student's t, paired over 3 seeds.",
    ]
    near = cell("sgd", 64, 0.2, 0.87, 0.91, 0.89)
    assert verdicts([large, near])[:2] == [
        "At batch 64 lamb has 90.0%, sgd 89.0%: apart by 1.0 +- 5.0 points.",
        "Not settled: run --seeds 10.",
    ]


def test_runs_are_timed_before_they_begin() -> None:
    config = RunConfig(epochs=1, threads=1, batch_size=64).resolved(Digits())
    run = Run(config, Digits())
    seconds = expected_seconds([("lamb", run)], {"lamb": (0.1, 0.2)}, seeds=3, tuning_seeds=1)
    assert run.step == 2
    assert 0 < seconds < 3600
    diverging = dataclasses.replace(config, lr=1e30, warmup="0", steps=1, epochs=None)
    assert expected_seconds([("lamb", Run(diverging, run.task))], {"lamb": (0.1,)}, 1, 1) > 0


@for_every(
    ("options", "message"),
    [
        (["--device", "cuda"], "--device cuda"),
        (["--optimizers", "lam"], "no 'lam' here; did you mean lamb?"),
        (["--optimizers", ""], "--optimizers: no '' here; there are lamb"),
        (["--optimizers", "lamb,lamb"], "names something twice"),
        (["--lrs", "sgd=0.1"], "no 'sgd' here; there are lamb, adamw"),
        (["--lrs", "lamb:0.1"], "is not of the form OPTIMIZER=LR,LR"),
        (["--lrs", "lamb=0.1,x"], "is not a list of numbers"),
        (["--lrs", "lamb=0.1,-1"], "must hold positive numbers, each once"),
        (["--lrs", "lamb=nan"], "must hold positive numbers"),
        (["--batch-sizes", "1.5"], "is not a list of numbers"),
        (["--batch-sizes", "32,32"], "each once"),
        (["--batch-sizes", "32,1400"], "--batch-size 1400 is more than the 1151 training samples"),
        (["--seeds", "0"], "--seeds=0"),
        (["--processes", "0"], "--processes=0"),
        (["--target", "nan"], "--target=nan is out of range: it must be a finite number"),
        (["--epochs", "-1"], "--epochs=-1.0"),
        (["--task", "mnist"], "--task mnist needs --data DIR"),
        (["--task", "mnist-rows"], "--task mnist-rows needs --data DIR"),
    ],
)
def test_bad_options(invoke: Invoke, options: list[str], message: str) -> None:
    result = invoke("compare", *options, code=1)
    assert message in result.output
    assert len(result.output.splitlines()) <= 3


def test_variants_take_part_with_their_own_options(invoke: Invoke) -> None:
    rates = [word for name in ("came", "came-int8", "came-corrected") for word in ("--lrs", f"{name}=0.001")]
    options = ["--batch-sizes", 256, "--epochs", 1, "--seeds", 1, "--processes", 1, *rates, "--json", "c.json"]
    invoke("compare", "--optimizers", "came,came-int8,came-corrected", *options)
    cells = {cell["name"]: cell for cell in json.loads(Path("c.json").read_text())["cells"]}
    assert list(cells) == ["came", "came-int8", "came-corrected"]
    assert [cell["config"]["optimizer"] for cell in cells.values()] == ["came"] * 3
    assert cells["came-int8"]["config"]["state_dtype"] == "int8"
    assert cells["came-int8"]["state_bytes"] < cells["came"]["state_bytes"]
    assert cells["came-corrected"]["config"]["optimizer_option"] == ["bias_correction=True"]
    assert len({cell["loss"]["median"] for cell in cells.values()}) == 3
