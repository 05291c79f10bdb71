"""``bighorn compare``, on searches small enough to check by hand."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from rich.console import Console
from torch import nn

from bighorn_workbench import commands, costs, files, lr_find, run_queue, search, workers
from bighorn_workbench import study as notebook
from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.builtin_tasks.trial import held_out
from bighorn_workbench.compare import WIDEST, CompareConfig, prepare
from bighorn_workbench.config import RunConfig
from bighorn_workbench.costs import step_seconds
from bighorn_workbench.display import table_of
from bighorn_workbench.errors import InputError
from bighorn_workbench.metrics import RECORDED
from bighorn_workbench.optimizers import CONTESTANTS, OPTIMIZERS
from bighorn_workbench.run import Run
from bighorn_workbench.search import Search
from bighorn_workbench.space import Entry, read_spaces
from bighorn_workbench.storage import Place
from bighorn_workbench.tasks import Classification, defaults
from bighorn_workbench.trials import Cell, Trial, best_of, configured, make, paired, repeats
from bighorn_workbench.verdict import (
    chosen,
    columns,
    enough_seeds,
    interval,
    row,
    unfinished,
    untuned,
    verdicts,
    warnings,
)
from bighorn_workbench.workers import fill, places
from tests.support.processes import FORKS, LIMIT
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, assert_self_contained, changed


def trial(lr: float, seed: int, value: float, loss: float = 1.0, steps_to_target: int | None = 5) -> Trial:
    config = RunConfig(lr=lr, seed=seed)
    curve = ((5, value), (10, value))
    return Trial(config, value, loss, 10, steps_to_target, seconds=1.0, state_bytes=2_000_000, curve=curve)


def cell(optimizer: str, batch_size: int, lr: float, *accuracies: float) -> Cell:
    runs = tuple(trial(lr, seed, accuracy) for seed, accuracy in enumerate(accuracies))
    tuned = ((0.1, 0.5), *[(0.2, 0.9)] * 6, (0.3, 0.6))
    return Cell(optimizer, batch_size, tuned, lr, runs, space={"lr": (0.1, 0.3)})


STARTED = 1000.0
"""The simulated time from which the budget of a `small` search counts."""


def small(place: Place, **options: object) -> Search:
    """Return a search of seven short runs."""
    defaults = {"optimizers": "lamb", "batch_sizes": "256", "trials": 4, "seeds": 3, "epochs": 1.0}
    return prepare(CompareConfig(**(defaults | options)), Digits(), place, started=STARTED)  # type: ignore[arg-type]


compare_command = import_module("bighorn_workbench.compare")

SMALL = ["--optimizers", "lamb", "--batch-sizes", "256", "--trials", "4", "--seeds", "3", "--epochs", "1"]


@pytest.mark.slow
def test_a_tiny_search_end_to_end(invoke: Invoke) -> None:
    """The search runs in two processes, which share its trials."""
    options = ["--trials", 3, "--space", "sgd.lr=0.1", "--batch-sizes", "256,128", "--seeds", 2, "--epochs", 3]
    output = invoke(
        "compare", "--optimizers", "lamb,sgd", *options, "--processes", 2, "--report", "c.html", "--json", "c.json"
    ).output
    result = json.loads(Path("c.json").read_text())
    assert result["command"].startswith("bighorn compare --optimizers lamb,sgd")
    assert result["environment"]["torch"]
    cells = {(cell["config"]["optimizer"], cell["config"]["batch_size"]): cell for cell in result["cells"]}
    assert list(cells) == [("lamb", 128), ("lamb", 256), ("sgd", 128), ("sgd", 256)]
    for (name, size), cell in cells.items():
        assert len(cell["tuning"]) == 3
        assert [run["seed"] for run in cell["final"]] == [1, 2]
        assert cell["on_edge"] is (f"Warning: the best learning rate of {name} at batch {size}" in output)
        assert len(cell["curve"]["steps"]) == len(cell["curve"]["accuracy"])
        assert f"{cell['config']['lr']:g}" in output
        assert {run["lr"] for run in cell["tuning"]} == (
            {0.1} if name == "sgd" else {run["lr"] for run in cell["tuning"]}
        )
    page = assert_self_contained(Path("c.html"))
    for part in ("Accuracy by batch size", "steps to 95%", "lr 0.1", "Convergence", "--seeds 2", "best of 3 trials"):
        assert part in page.text
    best = cells["sgd", 256]
    again = make(RunConfig(**best["config"], seed=1), Digits(), "test", 0.95)
    assert (again.value, again.loss) == (best["final"][0]["accuracy"], best["final"][0]["loss"])


def test_rates_are_scanned_then_all_options_are_searched_around_the_best_one() -> None:
    space = {"lr": (0.001, 0.1), "warmup": (0.02, 0.4), "weight_decay": (0.5, 0.5)}
    entry = Entry("lamb", RunConfig(lr=0.03, weight_decay=0.01), space)
    first, *scan = entry.scan()
    assert first == {"lr": 0.03, "warmup": 0.1, "weight_decay": 0.5}
    assert [point["lr"] for point in scan] == [0.00158, 0.00398, 0.01, 0.0251, 0.0631], "fifths of two decades"
    assert all(point | {"lr": 0.03} == first for point in scan)
    points = entry.around(0.01, 16)
    assert points[:5] == entry.around(0.01, 5)
    for name, (low, high) in {"lr": (0.0025, 0.04), "warmup": (0.02, 0.4)}.items():
        low, high = math.log(low), math.log(high)
        eighths = Counter(int(8 * (math.log(point[name]) - low) / (high - low)) for point in points)
        assert set(eighths.values()) == {2}, "sixteen points of Sobol have two in each eighth of a range"
    assert {point["weight_decay"] for point in points} == {0.5}
    assert max(point["lr"] for point in entry.around(0.0631, 16)) <= 0.1, "the range of the space holds"
    assert Entry("lamb", RunConfig(lr=1e-6, weight_decay=0.0), space).scan()[0]["lr"] == 0.001
    again = Entry("adamw", RunConfig(lr=0.01, weight_decay=0.01), space)
    assert [len(again.scan()), again.scan()[0]["lr"]] == [5, 0.01], "a default among the rates is tried once"
    fixed = Entry("sgd", RunConfig(lr=1.0, weight_decay=0.0), {"lr": (0.1, 0.1)})
    assert (fixed.scan(), fixed.around(0.1, 5), fixed.most(12)) == ([{"lr": 0.1}], [], 1)
    of_one = Entry("sgd", RunConfig(lr=1.0, weight_decay=0.0), {"lr": (0.1, 0.1), "warmup": (0.02, 0.4)})
    assert [len(of_one.scan()), len(of_one.around(0.1, 5)), of_one.most(12)] == [1, 5, 12]


@pytest.fixture
def ten_seconds(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Let each run take ten simulated seconds of the time until a deadline; return the list of runs."""
    made: list[RunConfig] = []

    def counted(config: RunConfig, *_: object) -> Trial:
        made.append(config)
        return trial(config.lr or 0.0, config.seed, -abs(math.log(config.lr or 1.0) + 2))

    def left(each: Search) -> float:
        return (each.plan.deadline or 0.0) - STARTED - 10.0 * len(made)

    monkeypatch.setattr(search, "make", counted)
    monkeypatch.setattr(compare_command, "evaluation_seconds", lambda _: 0.0)
    monkeypatch.setattr(run_queue.Queue, "seconds", lambda _: 10.0)
    monkeypatch.setattr(Search, "left", property(left))
    return made


def test_runs_are_kept_and_a_longer_comparison_goes_on(invoke: Invoke, ten_seconds: list[RunConfig]) -> None:
    made = ten_seconds
    options = ["--processes", 1, "--study", "new/s.study"]
    invoke("compare", *SMALL, *options, "--json", "a.json")
    assert [config.seed for config in made] == [0, 0, 0, 0, 1, 2, 3]
    assert len({config.lr for config in made[4:]}) == 1
    best = max(made[:4], key=lambda config: -abs(math.log(config.lr or 1.0) + 2))
    assert (made[4].lr, made[4].warmup, made[4].weight_decay) == (best.lr, best.warmup, best.weight_decay)
    output = invoke("compare", *SMALL, *options, "--json", "b.json").output
    assert "7 runs are already in new/s.study" in output
    assert len(made) == 7
    first, again = (json.loads(Path(name).read_text())["cells"] for name in ("a.json", "b.json"))
    assert first == again
    invoke("compare", *changed(SMALL, "--seeds", "5"), *options)
    assert [config.seed for config in made[7:]] == [4, 5]
    invoke("compare", *changed(SMALL, "--epochs", "2"), *options)
    assert len(made) == 9 + 7, "runs of another length are other runs"


def test_a_budget_gives_each_optimizer_the_same_number_of_trials(tmp_path: Path, ten_seconds: list[RunConfig]) -> None:
    """Runs of ten seconds: eight trials and three final runs of two cells take 220, and another trial of each 240."""
    found = small(tmp_path / "s.study", optimizers="lamb,sgd", trials=None, budget="235 s")
    found.work()
    kinds = Counter((config.optimizer, config.seed == 0) for config in ten_seconds)
    assert kinds == {("lamb", True): 8, ("lamb", False): 3, ("sgd", True): 8, ("sgd", False): 3}
    assert found.total == found.done == len(found.finished()) == 22
    assert all(config.seed == 0 for config in ten_seconds[:16]), "final runs begin when the search has ended"
    rates = [config.lr or 0.0 for config in ten_seconds[:16] if config.optimizer == "sgd"]
    assert all(0.1 / 4 <= lr <= 0.1 * 4 for lr in rates[5:]), "around the best one of the scan, the default"
    ten_seconds.clear()
    again = small(tmp_path / "s.study", optimizers="lamb,sgd", trials=None, budget="5 s")
    again.work()
    assert not ten_seconds, "nothing is left to do"
    longer = small(tmp_path / "s.study", optimizers="lamb,sgd", trials=9, budget="1h")
    longer.work()
    assert longer.trials == 9


@for_every(
    ["runs", "trials", "seeds"],
    [(13, 8, 5), (15, 9, 6), (18, 10, 8), (25, 12, 13), (36, 13, 15), (56, 16, 20), (245, 85, 20)],
)
def test_a_budget_is_divided_into_trials_and_seeds(
    tmp_path: Path, ten_seconds: list[RunConfig], runs: int, trials: int, seeds: int
) -> None:
    """Two more seeds for each trial after the eighth, up to twenty; from the thirteenth on, repeats of the best third.

    workbench/benchmarks/budget_splits.py says why.
    """
    ten_seconds.clear()
    place, options = tmp_path / str(runs), {"trials": None, "seeds": None}
    found = small(place, budget=f"{10 * runs}s", **options)
    assert found.fitting(found.left) == (trials, seeds)
    found.work()
    [cell] = found.cells()
    assert (len(cell.tuning), len(cell.trials)) == (found.trials, found.seeds) == (trials, seeds)
    assert len(cell.repeats) == math.prod(repeats(trials))
    assert runs - 9 < len(ten_seconds) <= runs, "another trial would need more"
    ten_seconds.clear()
    [again] = small(place, budget="5s", **options).cells()
    assert (len(again.tuning), len(again.trials)) == (trials, seeds), "known runs are used without time for more"


@pytest.mark.usefixtures("ten_seconds")
@for_every(
    ["given", "trials", "seeds"],
    [({"trials": 8}, 8, 20), ({"seeds": 3}, 15, 3), ({"trials": 9, "seeds": 7}, 9, 7), ({"budget": "1h"}, 100, 20)],
)
def test_a_budget_keeps_the_numbers_that_are_given(
    tmp_path: Path, given: dict[str, Any], trials: int, seeds: int
) -> None:
    found = small(tmp_path / "s.study", **({"trials": None, "seeds": None, "budget": "360s"} | given))
    assert found.fitting(found.left) == (trials, seeds)


def test_more_seeds_and_fewer_trials_never_take_finished_trials_away(
    tmp_path: Path, ten_seconds: list[RunConfig]
) -> None:
    path = tmp_path / "s.study"
    small(path, trials=14).work()
    assert len(ten_seconds) == 14 + 4 * 2 + 3
    options: list[dict[str, Any]] = [{"trials": None, "budget": "75 s"}, {"trials": 4}, {"trials": 8, "budget": "5 s"}]
    for number, each in enumerate(options):
        ten_seconds.clear()
        more = small(path, seeds=10, **each)
        assert (more.done, more.total) == (25 if number == 0 else 32, 32)
        more.work()
        [cell] = more.cells()
        assert (len(cell.tuning), len(cell.trials)) == (14, 10)
        assert [config.seed for config in ten_seconds] == ([4, 5, 6, 7, 8, 9, 10] if number == 0 else [])


def test_the_time_left_is_what_the_other_runs_take(
    invoke: Invoke, tmp_path: Path, ten_seconds: list[RunConfig]
) -> None:
    """The start of two processes once counted as the time of each run: 8 min left of a command that took 88 s."""
    output = invoke("compare", *SMALL, "--processes", 1).output
    assert "; 1 epoch, 7 runs, 1 at a time" in output
    assert re.findall(r"^\d of 7: .*?(?:; (.*) left)?$", output, re.MULTILINE) == [
        *("about 60 s", "about 50 s", "about 40 s", "about 30 s", "about 20 s", "about 10 s"),
        "",
    ]
    found = prepare(CompareConfig(optimizers="lamb,sgd", batch_sizes="256", trials=4), Digits(), tmp_path / "s", 2)
    assert found.needed(4, 5) == (2 * 9 * 10 + 10) / 2, "one process may wait for the last run of the other"
    ten_seconds.clear()
    found.work()
    assert (len(ten_seconds), found.needed(4, 5)) == (18, 0)
    ten_seconds.clear()
    output = invoke("compare", "--optimizers", "adamw", *SMALL[2:], "--processes", 1).output
    assert len({config.lr for config in ten_seconds[:4]}) == 4, "the default of AdamW, a scanned rate, is tried once"
    assert re.findall(r"^(\d) of 7: ", output, re.MULTILINE) == list("1234567")


def test_workers_follow_the_process_that_leads(tmp_path: Path, ten_seconds: list[RunConfig]) -> None:
    leader = small(tmp_path / "s.study", optimizers="lamb,sgd", trials=None, budget="235 s")
    worker = Search(leader.plan, leader.task, leads=False)
    assert (worker.is_open, worker.trials) == (True, 6)
    plan = dataclasses.replace(leader.plan, owner="another command")
    other = Search(plan, leader.task, leads=False)
    leader.work()
    worker.extend()
    assert (worker.is_open, worker.trials, worker.total - worker.done) == (False, 8, 0)
    assert len(ten_seconds) == 22
    other.extend()
    assert other.is_open, "it is another command's decision"
    second = Search(plan, leader.task)
    second.work()
    for each in (worker, other):
        again = Search(each.plan, each.task, leads=False)
        assert not again.is_open, "each command's decision is in the study"
        again.work()
    for wrong in (7, [8], [8, 5, "x"], ["8", 5, True]):
        second._tuning[0].study.set_user_attr(second._decision, wrong)
        with pytest.raises(InputError, match=r"trials of another command are .*Give another name"):
            Search(plan, leader.task, leads=False)


def test_a_budget_without_time_for_a_verdict_is_refused_and_says_what_fits(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_command, "step_seconds", lambda _: 0.005)  # a busy machine's would take hours
    options = ["--batch-sizes", 256, "--epochs", 1, "--seeds", 1, "--processes", 1]
    output = invoke("compare", "--optimizers", "lamb", *options, "--budget", "0.001s", code=1).output
    assert "--budget 0.001s has no time for 8 trials and 1 final run of each optimizer at each batch size" in output
    assert "Give --budget 1min, fewer --optimizers, --batch-sizes or --seeds, or a proxy of the task" in output
    options[3] = 5000
    output = invoke("compare", *options, "--budget", "30s", code=1).output
    found = re.search(r"take about \S+ \w+. Give --budget (\d+)min, --epochs (\d\S*), fewer", output)
    assert found is not None, output
    assert 5000 * 0.5 / int(found[1]) * 0.5 < float(found[2]) < 5000 * 0.5 / int(found[1]) * 2


def test_ctrl_c_reports_what_there_is_and_keeps_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [6]

    def interrupted(*arguments: object) -> Trial:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "make", interrupted)
    small_one = changed(SMALL, "--optimizers", "lamb,sgd", "--trials", "2", "--processes", "1")
    options = [*small_one, "--report", "c.html"]
    output = invoke("compare", *options, "--json", "c.json", code=130).output
    assert "6 of 10: sgd, batch 256, lr " in output
    assert "lamb at batch 256: 1 of 3 final runs." in output, "each optimizer has the same seeds"
    assert (
        "Interrupted after 6 of 10 runs. Repeat the command with --study bighorn-compare.study to continue." in output
    )
    assert [len(each["final"]) for each in json.loads(Path("c.json").read_text())["cells"]] == [1, 1]
    assert "1 of 3 final runs" in assert_self_contained(Path("c.html")).text
    left[0] = 100
    output = invoke("compare", *options, "--study", "bighorn-compare.study").output
    assert "6 runs are already in bighorn-compare.study" in output
    assert left[0] == 96


def test_runs_take_the_devices_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reports two of a device that is absent, and no run is made."""
    chosen: list[int] = []
    module = SimpleNamespace(device_count=lambda: 2, set_device=chosen.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(Search, "work", lambda *_: None)
    plan = small(tmp_path / "s.study").plan
    monkeypatch.setattr("bighorn_workbench.workers.cores", lambda: 3)  # a container may have 3 of 64 cores
    assert [places("xpu"), places("xpu:1"), places("cpu")] == [2, 1, 3]
    for device in ("xpu", "xpu:1", "cpu"):
        base = dataclasses.replace(plan.entries[0].base, device=device)
        there = dataclasses.replace(plan, entries=(dataclasses.replace(plan.entries[0], base=base),))
        for number in range(3):
            workers.worker(there, os.getppid(), number)
    assert chosen == [0, 1, 0]


ENDING = """
import multiprocessing, os, sys, torch
from torch import nn
class Ending:
    metric, higher_is_better, samples, steps, calls = "error", False, 64, 4, 0
    def model(self): return nn.Linear(1, 1)
    def batches(self, split, size, generator): return [torch.ones(size, 1)] * 4
    def loss(self, model, batch):
        Ending.calls += 1
        return {way} if {when} else model(batch).square().mean()
    def evaluate(self, model, split): return {{"error": 1.0}}
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("way", "messages"),
    [
        ("os._exit(0)", ("the processes of the runs were killed 1 times without one result", "such as os._exit()")),
        ("1 / 0", ("ends.py:Ending: loss was called with (Linear, float32[32, 1]), and failed:", "ZeroDivisionError")),
    ],
)
def test_an_end_of_another_process_is_named(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, way: str, messages: tuple[str, str]
) -> None:
    monkeypatch.setattr(workers, "MOST_KILLS", 1)  # each pool imports torch in its processes, in 15 seconds
    if way == "os._exit(0)":  # a kill looks the same in a process that was forked after the imports
        monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKS)
    Path("ends.py").write_text(ENDING.format(way=way, when="multiprocessing.parent_process()"))
    options = ["--task", "ends.py:Ending", "--optimizers", "sgd", "--trials", 1, "--seeds", 1, "--processes", 2]
    output = invoke("compare", *options, "--study", "s.study", code=1).output
    assert all(message in output for message in messages), output


@pytest.mark.process
def test_processes_of_the_caller_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the workers of a DataLoader in a notebook."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORKS)
    monkeypatch.setattr(workers, "worker", failing_worker)
    other = FORKS.Process(target=time.sleep, args=(LIMIT,))
    other.start()
    try:
        with pytest.raises(ZeroDivisionError):
            fill(small(tmp_path / "s.study"), 2, lambda: None)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()


def failing_worker(*_: object) -> None:
    raise ZeroDivisionError


def test_a_task_that_ends_later_is_named_and_runs_are_kept(invoke: Invoke) -> None:
    Path("ends.py").write_text(ENDING.format(way="sys.exit(0)", when="Ending.calls > 18"))
    options = ["--task", "ends.py:Ending", "--optimizers", "sgd", "--trials", 2, "--seeds", 2, "--processes", 1]
    output = invoke("compare", *options, "--json", "c.json", code=1).output
    assert re.search("Stopped after [1-3] of 4 runs. Repeat the command with --study bighorn-compare.study", output)
    assert "Error: ends.py:Ending: loss was called with (Linear, float32[32, 1]), and failed:" in output
    assert "SystemExit: 0" in output
    assert Path("c.json").exists()
    Path("ends.py").write_text(ENDING.format(way="sys.exit(0)", when="Ending.calls > 10**6"))
    fresh = invoke("compare", *options, "--study", "bighorn-compare.study").output  # other code, other runs
    assert "runs are already in" not in fresh


def test_torchrun_is_refused_and_without_optuna_its_extra_is_named(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "start it once, without torchrun, which is for train" in invoke("compare", *SMALL, code=1).output
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    assert "compare needs Optuna: pip install optuna" in invoke("compare", code=1).output


def test_an_error_after_the_runs_keeps_them_and_says_where(
    invoke: Invoke, ten_seconds: list[RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A report that cannot be drawn, a file that cannot be written, and an error in the verdict."""

    def failing(*_: object) -> None:
        raise ValueError("-inf + inf in fsum")

    words = ["compare", *SMALL, "--processes", 1]
    with monkeypatch.context() as patch:
        patch.setattr("bighorn_workbench.reports.compare.compare_report", failing)
        output = invoke(*words, "--report", "c.html", code=1).output
    assert "Stopped after 7 of 7 runs. Repeat the command with --study bighorn-compare.study to continue." in output
    assert "--report c.html cannot be drawn (ValueError: -inf + inf in fsum)" in output
    with monkeypatch.context() as patch:
        patch.setattr(compare_command, "verdicts", failing)
        with pytest.raises(ValueError, match="inf in fsum"):
            invoke(*words)
    elsewhere, write = tmp_path / "elsewhere", files.write
    elsewhere.mkdir()

    def full(path: Path, content: Callable[[BinaryIO], object]) -> None:
        if path.parent == Path():
            raise files.WriteError(f"{path} cannot be written")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        patch.setattr(tempfile, "tempdir", str(elsewhere))
        output = invoke(*words, "--json", "c.json", code=1).output
    assert f"Repeat the command with --study {elsewhere}/bighorn-compare.study to continue." in output
    assert "Error: c.json cannot be written" in output.replace("\n", " ") or "Error: \nc.json cannot" in output
    for name in ("bighorn-compare.study", "bighorn-compare-2.study", f"{elsewhere}/bighorn-compare.study"):
        ten_seconds.clear()
        assert f"7 runs are already in {name}" in invoke(*words, "--study", name).output
        assert not ten_seconds


def test_runs_of_a_notebook_are_kept_too(
    tmp_path: Path, ten_seconds: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise ValueError("no verdict")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bighorn_workbench.study.verdicts", failing)
    with (
        pytest.warns(UserWarning, match=r"Stopped after 2 of 2 runs.*--study bighorn-compare\.study"),
        pytest.raises(ValueError, match="no verdict"),
    ):
        notebook.compare(Digits(), ["lamb"], [256], trials=1, seeds=1, epochs=1)
    assert len(ten_seconds) == 2
    monkeypatch.undo()
    assert (tmp_path / "bighorn-compare.study").exists()


def test_a_notebook_is_told_what_the_command_is_told(
    tmp_path: Path, ten_seconds: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = {"trials": 1, "seeds": 1, "epochs": 1}
    for options, message in (
        ({"data": "nowhere"}, "compare() takes no data"),
        ({"processes": 7}, "compare() takes no processes"),
        ({"device": "none"}, "--device none"),
        ({"study": tmp_path}, "is a folder"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            notebook.compare(Digits(), ["lamb"], [256], **short, **options)  # type: ignore[arg-type]
    assert not ten_seconds
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    found = notebook.compare(Digits(), ["lamb"], 256, **short)  # type: ignore[arg-type]
    assert (found.cells[0].batch_size, torch.get_num_threads()) == (256, 2)
    assert torch.equal(state, torch.get_rng_state())

    def made(config: RunConfig, *_: object) -> Trial:
        value = -math.inf if config.optimizer == "sgd" or config.seed == 2 else -1.0
        return trial(config.lr or 0.0, config.seed, value)

    monkeypatch.setattr(search, "make", made)
    answers = notebook.compare(Digits(), ["lamb", "sgd"], [256], trials=1, seeds=2, epochs=1).answers
    assert "Warning: 1 of 2 final runs of lamb at batch 256 diverged. They count as the worst value." in answers
    assert any(line.startswith("sgd at batch 256: all 1 trial diverged") for line in answers), answers


def test_runs_of_another_model_or_other_data_are_not_used_and_that_is_said(
    invoke: Invoke, ten_seconds: list[RunConfig]
) -> None:
    inputs = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    train, test = (inputs[:320], targets[:320]), (inputs[320:], targets[320:])

    def runs(**changes: Any) -> int:
        ten_seconds.clear()
        options: dict[str, Any] = {"train": train, "test": test, "model": lambda: nn.Linear(8, 2)} | changes
        notebook.compare(Classification(**options), ["sgd"], [32], study="n.study", trials=1, seeds=1, epochs=1)
        return len(ten_seconds)

    assert (runs(), runs()) == (2, 0)
    assert runs(model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))) == 2
    assert runs(test=(test[0], 1 - test[1])) == 2
    assert runs(train=(train[0], 1 - train[1])) == 2
    words = ["compare", "--optimizers", "sgd", "--batch-sizes", 32, "--study", "n.study", "--processes", 1]
    output = invoke(*words, "--trials", 1, "--seeds", 1).output
    assert "n.study has runs of sgd, batch 32, but none that fits: the model" in output
    assert "none that fits" not in invoke(*words, "--trials", 1, "--seeds", 1).output


def test_a_target_may_be_negative() -> None:
    assert (defaults(SimpleNamespace(target=-1.5)).target, CompareConfig(target=-1.5).target) == (-1.5, -1.5)
    with pytest.raises(ValueError, match=r"it must be a finite number$"):
        CompareConfig(target=math.inf)


def test_batch_sizes_may_differ_between_optimizers() -> None:
    cells = [cell("adam", 32, 0.2, 0.9), cell("lamb", 64, 0.2, 0.8), cell("sgd", 64, 0.2, 0.7)]
    of_64 = "No clear winner at batch 64: lamb cannot be distinguished from sgd."
    assert verdicts(cells) == [of_64], "the baseline has no batch 64"
    assert verdicts(cells[:2]) == []


def test_the_curve_of_a_cell_is_the_mean_of_its_seeds() -> None:
    """It therefore ends at the value of the cell in the table and in the verdict."""
    found = cell("lamb", 32, 0.2, 0.9, 0.7, 0.5)
    runs = (dataclasses.replace(run, curve=((5, run.value / 2), (10, run.value))) for run in found.trials)
    found = dataclasses.replace(found, trials=tuple(runs))
    assert [step for step, _ in found.curve] == [5, 10]
    assert [value for _, value in found.curve] == pytest.approx([0.35, 0.7])
    assert row(found)[3] == "70.0% (50.0-90.0)"
    assert (
        "from lamb (70.0%) with 3 seeds: a difference of 20.0"
        in verdicts([found, cell("sgd", 32, 0.2, 0.5, 0.5, 0.5)])[0]
    )


def test_the_best_trial_is_that_of_the_best_value_then_of_the_lowest_loss() -> None:
    runs = [trial(0.1, 0, 0.8), trial(0.2, 0, 0.9, loss=0.5), trial(0.3, 0, 0.9, loss=0.4), trial(1.0, 0, 0.0)]
    assert best_of(runs, higher=True).config.lr == 0.3
    assert best_of(runs, higher=False).config.lr == 1.0
    config = RunConfig(lr=1e30, warmup="0", epochs=2, threads=1).resolved(Digits())
    diverged = make(config, Digits(), "test", 0.9)
    assert (diverged.value, diverged.loss, diverged.steps_to_target) == (-math.inf, math.inf, None)
    assert best_of([diverged, trial(0.1, 0, -0.8)], higher=True).value == -0.8
    assert best_of([trial(0.1, 0, 0.0, loss=math.inf), trial(0.1, 0, -0.8)], higher=True).value == 0.0
    assert best_of([trial(0.1, 0, 0.8, loss=math.nan), trial(0.2, 0, 0.8, loss=2.0)], higher=True).config.lr == 0.2


def test_repeats_decide_among_the_best_trials() -> None:
    """A trial that was better with one seed alone is not chosen, and a trial without repeats neither."""
    trials = [trial(0.1, 0, 0.9), trial(0.2, 0, 0.8), trial(0.3, 0, 0.7)]
    again = [trial(0.1, 1, 0.2), trial(0.2, 1, 0.6), trial(0.1, 2, 0.4), trial(0.2, 2, 0.7)]
    best = best_of(trials, True, again)
    assert best.config.lr == 0.2
    assert best.value == pytest.approx(0.7)
    assert best_of(trials, True, [*again, trial(0.2, 3, -math.inf)]).config.lr == 0.1, "it diverged once"
    worst = [dataclasses.replace(each, value=-math.inf) for each in again]
    assert best_of(trials, True, worst).config.lr == 0.1
    assert best_of(trials, True, [*worst[:2], again[3], trial(0.1, 2, -math.inf)]).config.lr == 0.2, "fewer diverged"
    found = dataclasses.replace(cell("lamb", 32, 0.2, 0.5), tuning=tuple(trials), repeats=tuple(again))
    assert found.best == best
    assert len(found.as_json()["tuning"]) == 3
    assert [each["seed"] for each in found.as_json()["repeats"]] == [1, 1, 2, 2]


@pytest.fixture
def lucky(monkeypatch: pytest.MonkeyPatch, ten_seconds: list[RunConfig]) -> list[RunConfig]:
    """Let the fifth of the best trials be the best one in truth; return the list of runs."""
    made = ten_seconds
    simulated: Callable[..., Trial] = vars(search)["make"]

    def seeded(config: RunConfig, *others: Any) -> Trial:
        found = simulated(config, *others)
        tried = sorted((each.lr or 0.0 for each in made if each.seed == 0), key=lambda lr: abs(math.log(lr) + 2))
        value = found.value if config.seed == 0 else float(config.lr == tried[4])
        return dataclasses.replace(found, config=config, value=value)

    monkeypatch.setattr(search, "make", seeded)
    return made


def test_the_final_runs_have_the_options_of_the_best_mean(tmp_path: Path, lucky: list[RunConfig]) -> None:
    """Of fifteen trials the best five are repeated with three seeds."""
    found = small(tmp_path / "s.study", trials=15, seeds=2)
    assert found.total == 15 + 5 * 3 + 2
    found.work()
    assert [config.seed for config in lucky[:15]] == [0] * 15
    best = sorted((config.lr or 0.0 for config in lucky[:15]), key=lambda lr: abs(math.log(lr) + 2))[:5]
    assert Counter(config.lr for config in lucky[15:30]) == dict.fromkeys(best, 3)
    assert sorted({config.seed for config in lucky[15:30]}) == [1_000_001, 1_000_002, 1_000_003]
    assert [(config.lr, config.seed) for config in lucky[30:]] == [(best[4], 1), (best[4], 2)]
    [filled] = found.cells()
    assert filled.lr == best[4]
    assert filled.best.value == pytest.approx((3 - abs(math.log(best[4]) + 2)) / 4)
    [words] = chosen([filled])
    assert words.endswith(" on validation data, the best of 15 trials by the mean of 4 seeds.")


def test_repeats_are_known_when_a_study_goes_on(tmp_path: Path, lucky: list[RunConfig]) -> None:
    """Before they were wanted again, the luckiest trial was taken for the best, and its final runs for missing."""
    options: dict[str, Any] = {"trials": None, "seeds": None}
    first = small(tmp_path / "s.study", budget="560s", **options)
    first.work()
    assert (first.trials, first.seeds, len(lucky)) == (16, 20, 56)
    lucky.clear()
    again = small(tmp_path / "s.study", budget="5s", **options)
    assert (again.trials, again.seeds, again.total, again.done) == (16, 20, 56, 56)
    assert again.cells() == first.cells()
    names = {each.study_name for each in again.database.storage.get_all_studies()}
    assert len(names) == 3, "trials, repeats and final runs of the best options alone"
    shorter = Search(dataclasses.replace(again.plan, deadline=None, trials=14), again.task, leads=False)
    assert (again.plan.trials, shorter.trials) == (100, 14), "a process that follows takes the plan as it is"


def test_options_that_diverge_with_some_seed_still_have_final_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ten_seconds: list[RunConfig]
) -> None:
    """Final runs then say how many diverge; only if all trials do, there are none."""
    simulated: Callable[..., Trial] = vars(search)["make"]

    def loses(config: RunConfig, *others: Any) -> Trial:
        found = simulated(config, *others)
        return dataclasses.replace(found, value=-math.inf, loss=math.inf) if config.seed == 1_000_001 else found

    monkeypatch.setattr(search, "make", loses)
    found = small(tmp_path / "s.study", trials=13, seeds=2)
    found.work()
    [filled] = found.cells()
    assert len(ten_seconds) == 13 + 4 + 2
    assert (len(filled.repeats), len(filled.trials)) == (4, 2)
    assert unfinished(found) == []


def test_unfinished_repeats_are_counted(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, ten_seconds: list[RunConfig]
) -> None:
    simulated: Callable[..., Trial] = vars(search)["make"]

    def interrupted(config: RunConfig, *others: Any) -> Trial:
        if len(ten_seconds) == 15:
            raise KeyboardInterrupt
        return simulated(config, *others)

    monkeypatch.setattr(search, "make", interrupted)
    options = changed(SMALL, "--trials", "13")
    output = invoke("compare", *options, "--processes", 1, "--study", "s.study", code=130).output
    assert re.search(r"lamb at batch 256: 13 of 13 trials and 2 repeats, the best with lr \S+: accuracy ", output)
    assert "Interrupted after 15 of 20 runs." in output


def test_tuning_never_sees_the_test_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Digits, str]] = []
    evaluate = Digits.evaluate

    def watched(task: Digits, model: nn.Module, split: str) -> dict[str, float]:
        seen.append((task, split))
        return evaluate(task, model, split)

    monkeypatch.setattr(Digits, "evaluate", watched)
    config = RunConfig(epochs=1, threads=1).resolved(Digits())
    make(config, held_out(Digits()), "validation")
    make(config, Digits(), "test")
    (tuned, first), (final, last) = seen[0], seen[-1]
    assert (first, last) == ("validation", "test")
    assert tuned.samples + len(tuned.data["validation"][0]) == final.samples


def test_what_a_cell_comes_to() -> None:
    few = cell("lamb", 32, 0.3, 0.9, 0.7, 0.8)
    assert row(few) == ("lamb", "32", "0.3*", "80.0% (70.0-90.0)", "5 of 10", "1.0000", "2.00 MB", "1.0 s")
    never = dataclasses.replace(few, trials=tuple(trial(0.2, seed, 0.5, steps_to_target=None) for seed in range(3)))
    assert row(never)[4] == "never of 10"
    assert row(never, target=False)[4] == "10"


def test_a_wide_table_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    wide = dataclasses.replace(
        cell("came", 16384, 0.0002, 0.9),
        trials=(dataclasses.replace(trial(0.0002, 0, 0.9, steps_to_target=None), seconds=12345.6),),
    )
    Console(width=WIDEST, soft_wrap=True).print(table_of(columns("accuracy", 0.95), [row(wide)]))
    shown = capsys.readouterr().out
    assert all(part in shown for part in row(wide))


def test_the_words_say_what_the_figures_say() -> None:
    values = {("lamb", 32): 0.9, ("lamb", 64): 0.8, ("sgd", 32): 0.9, ("sgd", 64): 0.85}
    cells = [cell(name, size, 0.2, value) for (name, size), value in values.items()]
    assert verdicts(cells) == [
        "At batch 32 sgd (90.0%) cannot be distinguished from lamb (90.0%): one seed has no interval; give --seeds 10.",
        "At batch 64 sgd (85.0%) cannot be distinguished from lamb (80.0%): one seed has no interval; give --seeds 10.",
        "lamb loses 10.0 points from batch 32 to 64.",
        "sgd loses 5.0 points from batch 32 to 64.",
    ]
    diverged = dataclasses.replace(cells[0], trials=(trial(0.2, 0, -math.inf, math.inf), trial(0.2, 1, 0.9)))
    assert "1 of 2 final runs of lamb at batch 32 diverged" in warnings([diverged])[0]
    [reason] = untuned([cells[0], cell("sgd", 64, 0.1, 0.85)])
    assert reason.startswith("The best rate of sgd at batch 64, 0.1, is on the edge of its range")
    assert reason.endswith("give --space sgd.lr=0.01,0.3.")
    edges = [cell("sgd", 64, 0.1, 0.85), cell("sgd", 512, 0.3, 0.8), cell("lamb", 64, 0.3, 0.8)]
    assert untuned(edges) == [
        "The best rate of sgd at batch 64, 0.1, and at batch 512, 0.3, is on the edge of its range: give --space "
        "sgd.lr=0.01,3.",
        "The best rate of lamb at batch 64, 0.3, is on the edge of its range: give --space lamb.lr=0.1,3.",
    ]
    assert "sgd cannot be compared from batch 64 to 512: it is not tuned." in verdicts(edges[:2])
    assert not warnings([dataclasses.replace(cells[0], trials=(trial(0.2, 0, 0.9, math.inf),))]), "its value is finite"
    assert [columns("accuracy", target)[4] for target in (0.975, 0.999, 0.9)] == [
        *("steps to 97.5%", "steps to 99.9%", "steps to 90%")
    ]


def test_a_verdict_has_intervals_over_seeds_that_hold_together() -> None:
    """Differences of 1, 2 and 3 points: the mean is 2, and its interval t(0.975, 2) * 1 / sqrt(3) = 2.484; of two
    comparisons together t(1 - 0.025 / 2, 2) / sqrt(3) = 3.582."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.4841), abs=1e-4)
    assert interval([1.0, 2.0, 3.0], comparisons=2) == pytest.approx((2.0, 3.5823), abs=1e-3)
    assert interval([1.0]) == (1.0, math.inf)
    lamb, large = cell("lamb", 32, 0.2, 0.91, 0.92, 0.93), cell("lamb", 64, 0.2, 0.9, 0.901, 0.899)
    even = [cell("sgd", 32, 0.2, 0.9, 0.9, 0.9), cell("sgd", 64, 0.2, 0.85, 0.851, 0.849)]
    assert verdicts([*even, lamb, large]) == [
        "At batch 64 lamb (90.0%) is ahead of sgd (85.0%) by 5.0 +- 0.4 points.",
        "At batch 32 lamb (92.0%) cannot be distinguished from sgd (90.0%) with 3 seeds: a difference of 2.0 +- 3.6 "
        "points, which needs about 5 seeds to show.",
        "sgd loses 5.0 +- 0.4 points from batch 32 to 64.",
        "lamb loses 2.0 +- 3.8 points from batch 32 to 64, at most 5.8.",
        "+- are 95% intervals by Student's t, paired over 3 seeds, corrected for the number of comparisons.",
    ]
    better = cell("lamb", 64, 0.2, 0.92, 0.92, 0.94)
    assert verdicts([lamb, better])[0] == "lamb gains 0.7 +- 2.5 points from batch 32 to 64, at most 3.2."


def test_runs_are_paired_by_their_seed() -> None:
    """Each seed of lamb is 2 points ahead of the same seed of sgd, whose runs have ended in another order."""
    accuracies = {"lamb": {2: 0.9, 3: 0.94}, "sgd": {1: 0.7, 3: 0.92, 2: 0.88}}
    cells = [
        dataclasses.replace(cell(name, 64, 0.2), trials=tuple(trial(0.2, *run) for run in runs.items()))
        for name, runs in accuracies.items()
    ]
    for order in (cells, cells[::-1]):
        assert "with 2 seeds: a difference of 2.0 +- 18.0 points" in verdicts(order)[0]


def seeds_of(name: str, values: dict[int, float], size: int = 64) -> Cell:
    """Return a cell whose final runs have these values of the metric by seed."""
    return dataclasses.replace(cell(name, size, 0.2), trials=tuple(trial(0.2, *run) for run in values.items()))


def test_ranks_means_and_intervals_are_of_common_seeds() -> None:
    """Lamb is behind on both common seeds, and its third seed is the best of all."""
    lamb = seeds_of("lamb", {1: 0.9, 2: 0.9101, 3: 1.0})
    adamw, came = seeds_of("adamw", {1: 0.9203, 2: 0.93}), seeds_of("came", {1: 0.8, 2: 0.81})
    lines = verdicts([lamb, adamw, came])
    assert lines[0] == "At batch 64 lamb (90.5%) is behind adamw (92.5%) by 2.0 +- 0.5 points."
    assert "adamw is the clear winner at batch 64." in lines
    assert "At batch 64 means and verdicts are over the 2 seeds that all optimizers have." in lines
    assert "paired over 2 seeds" in lines[-1]
    assert [len(each.trials) for each in paired([lamb, adamw, came])] == [2, 2, 2]
    small = seeds_of("lamb", {1: 0.8, 2: 0.8, 3: 0.8}, 32)
    assert [len(each.trials) for each in paired([lamb, adamw, small])] == [2, 2, 3], "each batch size has its own"
    apart = verdicts([seeds_of("lamb", {1: 0.9}), seeds_of("adamw", {2: 0.9})])
    assert apart == [
        "At batch 64 lamb (90.0%) cannot be distinguished from adamw (90.0%): no seed has finished for both."
    ]


@for_every("higher", [False, True])
@for_every("seeds", [(1, 2), (1, 1)])
def test_runs_of_two_optimizers_that_diverge_are_named(higher: bool, seeds: tuple[int, int]) -> None:
    """Their differences are both infinities, or no number."""
    worst = -math.inf if higher else math.inf
    cells = [
        dataclasses.replace(
            seeds_of(name, {each: worst if each == seed else 0.5 for each in (1, 2, 3)}, size),
            metric="reward",
            higher_is_better=higher,
        )
        for size in (32, 64)
        for name, seed in zip(("lamb", "sgd"), seeds, strict=True)
    ]
    lines = verdicts(cells)
    assert lines[0].endswith(
        "cannot be distinguished from lamb (-inf): runs of sgd and lamb diverged.".replace("-inf", str(worst))
    ), lines
    assert "lamb cannot be compared from batch 32 to 64: its runs diverged." in lines
    assert [row(each)[3] for each in cells]
    assert all(math.isfinite(value) for each in cells for _, value in each.curve)


@pytest.mark.parametrize("metric", ["accumulated_reward", "accuracy"])
def test_a_run_that_diverged_is_never_chosen(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All values are below 0, the value of no result by the name of an accuracy."""
    task = Digits()
    task.metric = metric
    monkeypatch.setattr(Digits, "evaluate", lambda *_: {metric: -5.0, "loss": 1.0})
    config = RunConfig(lr=1e30, warmup="0", epochs=2, threads=1).resolved(task)
    diverged, whole = make(config, task, "test"), make(dataclasses.replace(config, lr=0.01), task, "test")
    assert (diverged.diverged, whole.diverged) == (True, False)
    assert best_of([diverged, whole], higher=True) is whole
    found = lr_find.find(dataclasses.replace(config, epochs=1), held_out(task), (1e-3, 1e30))
    for before, rung in itertools.pairwise(found.rungs):
        assert {run.config.lr for run in rung} <= {run.config.lr for run in before if not run.diverged}
    assert found.lr in {run.config.lr for run in found.rungs[-1] if not run.diverged}


def test_an_optimizer_whose_trials_all_diverged_has_no_final_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "make", lambda config, *_: trial(config.lr or 0.0, config.seed, -math.inf, math.inf))
    found = small(tmp_path / "s.study")
    found.work()
    assert (found.done, found.total, found.needed(4, 3), found.cells()) == (4, 4, 0, [])
    assert unfinished(found) == [
        "lamb at batch 256: all 4 trials diverged, so that no options were chosen: give a lower --space lamb.lr."
    ]


@for_every("metric", ["seconds", "steps", "lr", "curve", "final"])
def test_a_metric_with_the_name_of_another_figure_keeps_apart(metric: str) -> None:
    found = dataclasses.replace(cell("lamb", 64, 0.2, 0.5, 0.7), metric=metric).as_json()
    plain = cell("lamb", 64, 0.2, 0.5, 0.7).as_json()
    assert {*plain, *plain["final"][0]} - {"accuracy", "loss"} == set(RECORDED), "of metrics, loss is the same figure"
    assert found[f"metric {metric}"] == plain["accuracy"]
    assert found["final"][0][f"metric {metric}"] == 0.5
    assert {key: found[key] for key in ("seconds", "steps")} == {"seconds": 1.0, "steps": 10}
    assert found["final"][0]["lr"] == found["config"]["lr"] == 0.2
    assert found["curve"]["steps"] == [5, 10]


def test_seeds_that_would_show_a_difference_are_the_fewest() -> None:
    """The deviation of 1, 3 and 5 is 2: t(0.975, 5) * 2 / sqrt(6) = 2.10 and t(0.975, 3) * 2 / sqrt(4) = 3.18."""
    for mean, seeds in ((2.12, 6), (2.08, 7), (3.2, 4), (0.94, 20), (0.93, None), (0.0, None)):
        assert enough_seeds([mean - 2, mean, mean + 2]) == seeds, mean
    assert enough_seeds([3.2 - 2, 3.2, 3.2 + 2], comparisons=2) == 5, "t(0.9875, 4) * 2 / sqrt(5) = 3.13"
    assert enough_seeds([2.12, 2.12, 2.12], resolution=2.0) == 6


def test_seeds_that_agree_by_chance_show_no_difference() -> None:
    """Two of 360 images at three seeds: the interval is of one image, t(0.975, 2) * 0.28 / sqrt(3) = 0.69."""
    one, other = (cell(name, 64, 0.2, *[value] * 3) for name, value in (("lamb", 0.9), ("sgd", 0.9 - 2 / 360)))
    words = "At batch 64 sgd (89.4%) is behind lamb (90.0%) by 0.6 +- 0.0 points."
    assert verdicts([one, other])[0] == words, "the step of two values is unknown"
    on_the_way = tuple((step, 0.5 + count / 360) for step, count in enumerate((0, 7, 31, 32)))
    one = dataclasses.replace(one, trials=tuple(dataclasses.replace(run, curve=on_the_way) for run in one.trials))
    words = "At batch 64 sgd (89.4%) cannot be distinguished from lamb (90.0%) with 3 seeds: a difference of 0.6 +- 0.7"
    assert verdicts([one, other])[0].startswith(words)
    finer = dataclasses.replace(other, trials=(*other.trials[:2], trial(0.2, 2, other.trials[0].value + 1e-4)))
    assert verdicts([one, finer])[0] == "At batch 64 sgd (89.4%) is behind lamb (90.0%) by 0.552 +- 0.014 points."
    clear = verdicts([cell("lamb", 64, 0.2, *[1.0] * 5), cell("sgd", 64, 0.2, *[0.1] * 5)])
    assert clear[0] == "At batch 64 sgd (10.0%) is behind lamb (100.0%) by 90.0 +- 0.0 points."
    far = [cell("lamb", 64, 0.2, 1e300, 2e300, 5.0), cell("sgd", 64, 0.2, 5.0, 5.0 + 1e-11, 6.0)]
    assert "cannot be distinguished" in verdicts(far)[0]


def test_each_optimizer_is_compared_with_the_baseline_then_with_the_best() -> None:
    """Three optimizers at one batch size are two comparisons: t(1 - 0.025 / 2, 2) = 6.205 over sqrt(3)."""
    rows = {
        "lamb": cell("lamb", 64, 0.2, 0.9, 0.9001, 0.8999),
        "adamw": cell("adamw", 64, 0.2, 0.8, 0.8001, 0.7999),
        "came": cell("came", 64, 0.2, 0.89, 0.91, 0.87),
    }
    assert verdicts(list(rows.values())) == [
        "At batch 64 lamb (90.0%) is ahead of adamw (80.0%) by 10.000 +- 0.036 points.",
        "At batch 64 came (89.0%) is ahead of adamw (80.0%) by 9.0 +- 7.1 points.",
        "No clear winner at batch 64: lamb cannot be distinguished from came.",
        "+- are 95% intervals by Student's t, paired over 3 seeds, corrected for the number of comparisons.",
    ]
    of_lamb = verdicts(list(rows.values()), baseline="lamb")
    assert of_lamb[0] == "At batch 64 adamw (80.0%) is behind lamb (90.0%) by 10.000 +- 0.036 points."
    assert of_lamb[1].startswith(
        "At batch 64 came (89.0%) cannot be distinguished from lamb (90.0%) with 3 seeds: a difference of 1.0 +- 7.1"
    )
    few = dataclasses.replace(rows["lamb"], tuned=rows["lamb"].tuned[:7])
    assert verdicts([few, rows["adamw"], rows["came"]])[1:4] == [
        "At batch 64 lamb cannot be compared with adamw: lamb is not tuned.",
        "lamb had 7 of the 8 trials that a verdict needs: give --trials 8, which takes a few seconds more on one "
        "processor, or less with fewer --epochs, fewer layers or less data.",
        "No clear winner at batch 64: lamb is not tuned.",
    ]
    worse = dataclasses.replace(rows["adamw"], tuned=few.tuned)
    assert verdicts([rows["lamb"], worse, rows["came"]])[-1] == (
        "No clear winner at batch 64: lamb cannot be distinguished from came; adamw is not tuned."
    )
    assert verdicts([rows["lamb"], rows["adamw"], cell("came", 64, 0.2, 0.7, 0.7, 0.7)])[2] == (
        "lamb is the clear winner at batch 64."
    )
    fixed = dataclasses.replace(few, tuned=(), space={"lr": (0.2, 0.2)})
    assert not untuned([fixed]), "nothing was to be tuned"
    edge = dataclasses.replace(rows["lamb"], lr=0.3)
    words = verdicts([edge, rows["adamw"]])
    assert words[0] == "At batch 64 lamb cannot be compared with adamw: lamb is not tuned."
    assert words[1].endswith("give --space lamb.lr=0.1,3.")


def test_optimizers_with_the_same_few_trials_have_one_sentence() -> None:
    """Trials of 1 s: the cells with 2 of them lack 6 each, which are 24 s of four cells; one with 7 lacks 1."""
    two = [cell(name, size, 0.2, 0.9) for name in ("adamw", "lamb") for size in (32, 64)]
    cells = [dataclasses.replace(each, tuned=each.tuned[:2]) for each in two]
    came = cell("came", 32, 0.2, 0.9)
    sentences = untuned([*cells, dataclasses.replace(came, tuned=came.tuned[:7])])
    assert [sentence.partition(" more")[0] for sentence in sentences] == [
        "adamw and lamb had 2 of the 8 trials that a verdict needs: give --trials 8, which takes about 20 s",
        "came had 7 of the 8 trials that a verdict needs: give --trials 8, which takes a few seconds",
    ]
    assert verdicts(cells[::2])[0] == "At batch 32 lamb cannot be compared with adamw: lamb and adamw are not tuned."


def test_a_metric_that_is_better_lower_is_written_in_its_own_unit() -> None:
    low, high = (
        dataclasses.replace(cell(name, 64, 0.2, *values), metric="perplexity", higher_is_better=False)
        for name, values in (("lamb", (20.0, 21.0)), ("sgd", (30.0, 31.5)))
    )
    ahead = "At batch 64 lamb (20.5) is ahead of sgd (30.75) by 10.2 +- 3.18 of perplexity."
    assert verdicts([high, low])[0] == ahead
    diverged = dataclasses.replace(high, trials=(trial(0.2, 0, math.inf, math.inf), trial(0.2, 1, 30.0)))
    assert verdicts([low, diverged])[0] == (
        "At batch 64 sgd (inf) cannot be distinguished from lamb (20.5): runs of sgd diverged."
    )
    assert row(low)[3] == "20.5 (20-21)"


def test_runs_are_timed_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(epochs=1, threads=1, batch_size=64).resolved(Digits())
    run = Run(config, Digits())
    clock = itertools.count()
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: next(clock) ** 2))
    assert step_seconds(run) == 3**2 - 2**2, "the second step, from the third look at the clock to the fourth"
    assert run.step == 2
    diverging = dataclasses.replace(config, lr=1e30, warmup="0", steps=1, epochs=None)
    assert step_seconds(Run(diverging, run.task)) == 5**2 - 4**2


def test_a_variant_keeps_what_it_sets(tmp_path: Path) -> None:
    spaces = read_spaces(["lamb-warm.lr=0.01,0.1", "adam.lr=0.2", "sgd.weight_decay=0"], ["lamb-warm", "adam", "sgd"])
    assert spaces["lamb-warm"]["lr"] == (0.01, 0.1)
    assert "warmup" not in spaces["lamb-warm"]
    assert spaces["adam"]["lr"] == (0.2, 0.2)
    assert spaces["sgd"]["weight_decay"] == (0.0, 0.0)
    found = small(tmp_path / "s.study", optimizers="lamb-warm")
    assert unfinished(found) == ["lamb-warm at batch 256: no trials yet."]


@for_every(
    ("name", "params", "options"),
    [
        ("lamb", {"lr": 0.1}, ()),
        ("lamb", {"one_minus_beta2": 0.01}, ("betas=(0.9, 0.99)",)),
        ("adamw", {"one_minus_beta1": 0.05, "eps": 1e-4}, ("betas=(0.95, 0.999)", "eps=0.0001")),
        ("came", {"one_minus_beta3": 0.001}, ("betas=(0.9, 0.999, 0.999)",)),
        ("sgd", {"one_minus_momentum": 0.02}, ("momentum=0.98",)),
        ("lars", {"one_minus_momentum": 0.2, "eps": 1e-6}, ("momentum=0.8", "eps=1e-06")),
    ],
)
def test_options_of_an_optimizer_are_searched_by_their_names(
    name: str, params: dict[str, float], options: tuple[str, ...]
) -> None:
    """Each is an option of the optimizer, and has the optimizer's default."""
    base = RunConfig(**CONTESTANTS[name], batch_size=256, threads=1).resolved(Digits())
    assert configured(base, params, 0).optimizer_option == options
    spans = [f"{name}.{key}={value / 1e5:g},1" for key, value in params.items()]
    start = Entry(name, base, read_spaces(spans, [name])[name]).start
    plain, first = (
        Run(each, Digits()).optimizer.param_groups[0]
        for each in (base, configured(base, {key: start[key] for key in params}, 0))
    )
    for option in ("lr", "betas", "momentum", "eps"):
        assert first.get(option) == pytest.approx(plain.get(option)), option


def test_one_decay_of_each_optimizer_is_searched() -> None:
    """Each optimizer therefore has as many options; Adafactor has neither beta2 nor momentum."""
    decays = {
        name: [key for key in each.space if "beta" in key or "momentum" in key] for name, each in OPTIMIZERS.items()
    }
    assert {name for name, each in decays.items() if len(each) != 1} == {"adafactor"}


@for_every(
    ("options", "message"),
    [
        (["--device", "cuda"], "--device cuda"),
        (["--optimizers", "lam"], "no 'lam' here; did you mean lamb?"),
        (["--optimizers", ""], "--optimizers: no '' here; there are lamb"),
        (["--optimizers", "lamb,lamb"], "names something twice"),
        (["--space", "sgd.lr=0.1"], "add sgd to --optimizers lamb,adamw, or leave it out"),
        (["--space", "Lamb.lr=0.1"], "no 'Lamb' here; did you mean lamb?"),
        (["--space", "lamb.lr=0.1,0.01"], "--space lamb.lr=0.1,0.01: give the lowest first."),
        (
            ["--space", "lamb.rate=0.1"],
            "--space lamb: no 'rate' here; there are lr, weight_decay, warmup, one_minus_beta2, one_minus_beta1, eps.",
        ),
        (["--space", "lamb:lr"], "is not of the form OPTIMIZER.OPTION=LOWEST,HIGHEST"),
        (["--space", "lamb.lr=0.1,x"], "is not a list of positive numbers"),
        (["--space", "lamb.lr=0,0.1"], "--space lamb.lr '0,0.1' is not a list of positive numbers"),
        (["--space", "lamb.lr=0"], "--space lamb.lr '0' is not a list of positive numbers"),
        (
            ["--space", "lamb.lr=0.1,1", "--space", "lamb.lr=2"],
            "--space 'lamb.lr=2': lamb.lr is given twice.",
        ),
        (["--space", "lamb.lr=1,2,3"], "has 3 numbers: give the lowest and the highest"),
        (["--space", "lamb.warmup=0.1,10"], "warmup is at most 1"),
        (["--trials", "0"], "--trials=0"),
        (["--budget", "1,5h"], "--budget '1,5h' is not a time like 2h, 90min or 1.5d. Write 1.5h, with a point."),
        (["--optimizers", "adamW8bit"], "no 'adamW8bit' here; did you mean adamw?"),
        (["--budget", "2"], "--budget '2' is not a time like 2h, 90min or 1.5d."),
        (["--budget", "0.0s"], "--budget '0.0s' is not a time like 2h"),
        (["--baseline", "sgd"], "--baseline: no 'sgd' here; there are lamb, adamw."),
        (["--batch-sizes", "1.5"], "is not a list of positive numbers"),
        (["--batch-sizes", "32,32"], "names something twice"),
        (["--batch-sizes", "32,1400"], "batch size 1400 is more than the 1151 training samples"),
        (["--seeds", "0"], "--seeds=0"),
        (["--processes", "0"], "--processes=0"),
        (["--target", "nan"], "--target=nan is out of range: it must be a finite number"),
        (["--epochs", "-1"], "--epochs=-1.0"),
        (["--task", "mnist"], "--task mnist needs --data DIR"),
        (["--study", "s", "--json", "s"], "--json s is the file of --study s"),
    ],
)
def test_bad_options(invoke: Invoke, options: list[str], message: str) -> None:
    result = invoke("compare", *options, code=1)
    assert message in result.output
    assert len(result.output.splitlines()) <= 3


def test_variants_take_part_with_their_own_options(invoke: Invoke) -> None:
    options = ["--batch-sizes", 256, "--epochs", 1, "--trials", 1, "--seeds", 1, "--processes", 1, "--json", "c.json"]
    invoke("compare", "--optimizers", "came,came-int8,came-published", *options)
    cells = {cell["name"]: cell for cell in json.loads(Path("c.json").read_text())["cells"]}
    assert list(cells) == ["came", "came-int8", "came-published"]
    assert [cell["config"]["optimizer"] for cell in cells.values()] == ["came", "came", "came-published"]
    assert cells["came-int8"]["config"]["state_dtype"] == "int8"
    assert cells["came-int8"]["state_bytes"] < cells["came"]["state_bytes"]
    assert len({cell["loss"]["mean"] for cell in cells.values()}) == 3


def test_the_help_says_what_each_contestant_is(invoke: Invoke) -> None:
    output = invoke("compare", "--help").output
    _, _, table = output.partition("Names for --optimizers:")
    described = dict(re.findall(r"^  ([a-z0-9-]+) {2,}(\S.*)$", table, re.MULTILINE))
    assert list(described) == list(CONTESTANTS)
    assert described["came-published"].startswith("came by the paper's rule")
    assert all(text not in described.values() for text in CONTESTANTS)
