"""The output, the files and the errors of ``bighorn train``."""

import dataclasses
import itertools
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch

from bighorn import WindowScale
from bighorn import _kernels as kernels
from bighorn_workbench import display, launch
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.builtin_tasks.digits import Digits
from bighorn_workbench.commands import bighorn as group
from bighorn_workbench.compare import CompareConfig
from bighorn_workbench.config import ParallelConfig, RunConfig
from bighorn_workbench.lr_find import SearchConfig
from bighorn_workbench.memory import MemoryConfig
from bighorn_workbench.optimizers import OPTIMIZERS
from bighorn_workbench.run import Run
from bighorn_workbench.tasks import Classification, defaults
from bighorn_workbench.train import results
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, Page, without_dropout


def test_digits_are_learned_and_written_down(invoke: Invoke) -> None:
    output = invoke("train", "--report", "out/run.html", "--json", "out/run.json").output
    lines = output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    [head] = [line for line in lines if line.lstrip().startswith("epoch")]
    assert head.split("  ")[-1] == "trust ratio"
    assert " acc " in head
    assert "val acc" in head
    assert "trust ratio: of the lowest/median/highest layer" in lines
    assert "  times lr, the share of its norm by which a layer moves" in lines
    result = json.loads(Path("out/run.json").read_text())
    assert result["result"]["test_accuracy"] > 0.95
    assert f"{result['result']['test_accuracy']:.2%}" in output
    assert f"{result['result']['best_validation_accuracy']:.2%}" in output
    assert result["result"]["validation_accuracy"] == result["history"]["evaluations"][-1][1]["accuracy"]
    assert result["result"]["steps"] == 179 == len(result["history"]["loss"])
    assert result["config"]["batch_size"] == 128
    assert result["config"]["lr"] == OPTIMIZERS["lamb"].lr
    assert result["history"]["commands"] == ["bighorn train --report out/run.html --json out/run.json"]
    assert len(result["history"]["metrics"]["trust_ratio"][0]) == len(result["history"]["layers"]) == 3


def test_the_best_evaluation_is_a_finite_one() -> None:
    task = Digits()
    run = Run(RunConfig(epochs=1, threads=1).resolved(task), task)
    for values, best in (((math.nan, 0.25, 0.5, math.inf), 0.5), ((math.nan,), None), ((), None)):
        run.history.evaluations = [(step, {"accuracy": value, "loss": 1.0}) for step, value in enumerate(values)]
        assert results(run)["best_validation_accuracy"] == best


@for_every("name", OPTIMIZERS)
def test_every_optimizer_learns(invoke: Invoke, name: str) -> None:
    output = invoke("train", "--optimizer", name, "--epochs", 6, "--json", "run.json").output
    assert ("trust ratio" in output) == (name in ("lamb", "lars"))
    assert ("confidence" in output) == (name in ("came", "came-published"))
    assert "training loss has" not in output
    assert json.loads(Path("run.json").read_text())["result"]["test_accuracy"] > 0.9


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_text_and_mnist_learn(invoke: Invoke, text_file: Path, idx_folder: Path, precision: str) -> None:
    tail = ["--precision", precision, "--batch-size", 16, "--json", "run.json"]
    invoke("train", "--task", "text", "--data", text_file, "--steps", 12, *tail)
    losses = json.loads(Path("run.json").read_text())["history"]["loss"]
    assert losses[-1] < losses[0] - 0.5
    invoke("train", "--task", "mnist", "--data", idx_folder, "--epochs", 12, *tail)
    assert json.loads(Path("run.json").read_text())["result"]["test_accuracy"] > 0.9


@for_every(
    ("options", "verb", "rates"),
    [
        (["--optimizer", "sgd", "--lr", "1e-6"], "hardly moved", "Try --lr 3.3e-07, 1e-07 or 3e-06"),
        (["--optimizer", "adamw", "--lr", "3"], "risen", "Try --lr 1 or 0.3"),
    ],
)
def test_a_loss_that_does_not_fall_is_said_with_rates_to_try(
    invoke: Invoke, options: list[str], verb: str, rates: str
) -> None:
    """The hint appears when the loss should have fallen, and at the end, also in the report."""
    output = invoke("train", *options, "--epochs", 4, "--report", "run.html", "--json", "run.json").output
    words = f"{rates}; bighorn lr-find and bighorn compare find a rate."
    assert output.count(f"The training loss has {verb}: ") == output.count(words) == 2
    assert output.index(words) < output.index("Test accuracy") < output.rindex(words)
    found = json.loads(Path("run.json").read_text())
    assert words in found["hint"]
    assert words in Page(Path("run.html")).text
    assert all(len(line) <= 80 for line in output.splitlines() if "training loss" in line)


def test_a_loss_that_falls_late_has_a_hint_on_the_way_alone(invoke: Invoke, tmp_path: Path) -> None:
    """The hint appears after the warm-up and a tenth of the run, or an epoch if that is shorter."""
    (tmp_path / "late.py").write_text(LATE)
    words = ["--task", f"{tmp_path / 'late.py'}:Late", "--steps", 60, "--json", "run.json"]
    output = invoke("train", *words).output
    assert output.count("The training loss has hardly moved: 1 at first, 1 in the last 6 steps.") == 1
    assert output.index("training loss has") < output.index("    12  ") < output.index("Test loss")
    assert json.loads(Path("run.json").read_text())["hint"] is None
    assert "training loss has" not in invoke("train", *words, "--warmup", "40").output


LATE = """
import torch
from torch import nn

class Late:
    metric, higher_is_better, steps_made = "loss", False, 0
    def model(self): return nn.Linear(2, 1)
    def batches(self, split, batch_size, generator): return [torch.ones(batch_size, 2)] * 100
    def loss(self, model, batch):
        self.steps_made += 1
        value = 1.0 if self.steps_made < 20 else 0.1
        return value + 0 * model(batch).mean() + 1e-9 * model(batch).square().mean()
    def evaluate(self, model, split): return {"loss": 0.5}
"""


def test_bf16_is_the_whole_model(invoke: Invoke) -> None:
    invoke("train", "--precision", "bf16", "--epochs", 1, "--save", "run.pt")
    run = torch.load("run.pt", weights_only=True)["run"]
    assert {tensor.dtype for tensor in run["model"].values()} == {torch.bfloat16}
    assert {state["exp_avg"].dtype for state in run["optimizer"]["state"].values()} == {torch.float32}


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_fp16_skips_until_the_scale_fits_and_learns(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setattr("bighorn_workbench.values.WindowScale", lambda: WindowScale(2.0**30))
    options = ["--optimizer", optimizer, "--precision", "fp16", "--epochs", 8, "--max-grad-norm", 1]
    output = invoke("train", *options, "--save", "run.pt", "--json", "run.json").output
    result = json.loads(Path("run.json").read_text())
    skipped, scale = result["history"]["skipped"], result["history"]["scale"]
    assert skipped == list(range(1, len(skipped) + 1))
    assert 0 < len(skipped) < 20
    assert scale[: len(skipped) + 1] == [2.0 ** (30 - step) for step in range(len(skipped) + 1)]
    assert set(scale[len(skipped) :]) == {scale[-1]}
    assert f"Loss scale           {scale[-1]:g}; {len(skipped)} steps skipped" in output
    assert result["result"]["test_accuracy"] > 0.9
    run = torch.load("run.pt", weights_only=True)["run"]
    assert run["scaler"]["scale"] == scale[-1]
    assert run["scaler"]["_growth_tracker"] == run["step"] - len(skipped)
    assert {int(state["step"]) for state in run["optimizer"]["state"].values()} == {run["step"] - len(skipped)}
    assert {tensor.dtype for tensor in run["model"].values()} == {torch.float32}


def test_a_scale_that_never_fits_ends_the_run(invoke: Invoke) -> None:
    result = invoke("train", "--precision", "fp16", "--loss-scale", "1e30", "--json", "run.json", code=1)
    assert "step 51: 50 steps in a row overflowed" in result.output
    assert json.loads(Path("run.json").read_text())["result"]["skipped_steps"] == 50


def test_accumulated_parts_are_the_batch(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of several processes also accumulate with other optimizers."""
    monkeypatch.setattr(torch.nn.functional, "dropout", without_dropout)
    options = ["--steps", 8, "--optimizer", "adamw", "--max-grad-norm", 0.3]
    losses = []
    for parts in (1, 4):
        invoke("train", *options, "--accumulate", parts, "--json", "run.json")
        losses.append(json.loads(Path("run.json").read_text())["history"]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    invoke("train", *options[:-2], "--json", "run.json")
    assert json.loads(Path("run.json").read_text())["history"]["loss"] != pytest.approx(losses[0], rel=1e-4)


@for_every("flag", ["--tail-overlap", "--shard-update"])
def test_what_needs_several_processes_does_nothing_in_one_and_says_so(invoke: Invoke, flag: str) -> None:
    assert f"Warning: {flag} has no effect in one process" in invoke("train", "--steps", 1, flag).output


@for_every(("scaling", "expected"), [("none", 0.01), ("sqrt", 0.02), ("linear", 0.04)])
def test_lr_scaling_counts_from_batch_256(invoke: Invoke, scaling: str, expected: float) -> None:
    invoke("train", "--lr", 0.01, "--batch-size", 1024, "--lr-scaling", scaling, "--steps", 1, "--json", "run.json")
    assert json.loads(Path("run.json").read_text())["peak_lr"] == pytest.approx(expected)


LINEAR = [left / 6 for left in range(6, 0, -1)]


@for_every(
    ("options", "warmup", "decay"),
    [
        ("--warmup 4", [0.25, 0.5, 0.75, 1], LINEAR),
        ("--warmup 4 --schedule linear", [0.25, 0.5, 0.75, 1], LINEAR),
        (
            "--warmup 40% --schedule cosine",
            [0.25, 0.5, 0.75, 1],
            [0.5 + math.cos(math.pi * i / 6) / 2 for i in range(6)],
        ),
        ("--warmup 4 --schedule constant", [0.25, 0.5, 0.75, 1], [1] * 6),
        ("--warmup 0", [], [left / 10 for left in range(10, 0, -1)]),
        ("--warmup 100%", [done / 10 for done in range(1, 11)], []),
    ],
)
def test_the_schedule_is_what_was_asked_for(
    invoke: Invoke, options: str, warmup: list[float], decay: list[float]
) -> None:
    words = options.split()
    output = invoke("train", "--lr", 1e-2, "--steps", 10, "--json", "run.json", *words).output
    lr = json.loads(Path("run.json").read_text())["history"]["lr"]
    assert lr == pytest.approx([0.01 * share for share in (*warmup, *decay)])
    if len(warmup) == 4:
        assert f"10 steps, 4 warm-up, then {words[3] if words[3:] else 'linear'}" in output


@for_every(
    ("options", "message"),
    [
        (["--task", "digit"], "no 'digit' here; did you mean digits?"),
        (["--optimizer", "AdamW"], "no 'AdamW' here; did you mean adamw?"),
        (["--lr", "0,01"], "'0,01' is not a valid float. Write 0.01, with a point."),
        (["--steps", "1,000"], "'1,000' is not a valid integer. Write 1000, without a comma."),
        (["--warmup", "12,5%"], "a share of the run (0% to 100%). Write 12.5%, with a point."),
        (["--precision", "fp16", "--loss-scale", "1,5"], "such as 1024. Write 1.5, with a point."),
        (["--optimizr", "lamb"], "Did you mean one of: '--optimizer',"),
        (["--lr", "-1"], "--lr=-1.0 is out of range: it must be a finite number in (0, 3.4e+38]"),
        (["--lr", "1e39"], "--lr=1e+39"),
        (["--lr", "3e38", "--lr-scaling", "linear", "--batch-size", "512"], "3.4e+38"),
        (["--seed", str(2**63)], "--seed=9223372036854775808 is out of range: it must be an integer, from 0 to"),
        (["--threads", "100000"], "--threads=100000 is out of range: it must be an integer, from 1 to 1024"),
        (["--lr", "nan"], "--lr=nan"),
        (["--weight-decay", "-0.1"], "--weight-decay=-0.1"),
        (["--weight-decay", "1e308"], "3.4e+38"),
        (["--batch-size", "0"], "--batch-size=0"),
        (["--batch-size", "2000"], "more than the 1151 training samples of digits"),
        (["--epochs", "0"], "--epochs=0"),
        (["--epochs", "0.01"], "less than one step"),
        (["--steps", "0"], "--steps=0"),
        (["--steps", "3", "--epochs", "2"], "--epochs and --steps both set the length"),
        (["--steps", "3", "--warmup", "4"], "--warmup 4 is longer than the run of 3 steps"),
        (["--warmup", "9" * 5000], "is not a number of steps (200) or a share of the run"),
        (["--warmup", "0.1"], "--warmup '0.1' is not a number of steps (200) or a share of the run"),
        (["--warmup", "101%"], "--warmup 101% is longer than the run"),
        (["--schedule", "cosin"], "no 'cosin' here; did you mean cosine?"),
        (["--max-grad-norm", "0"], "--max-grad-norm=0.0 is out of range: it must be a finite number in (0, 3.4e+38]"),
        (["--accumulate", "0"], "--accumulate=0"),
        (["--accumulate", "3"], "--batch-size 128 cannot be split evenly over --accumulate 3: take a multiple"),
        (["--loss-scale", "dynamic"], "--loss-scale dynamic is for --precision fp16; fp32 holds gradients"),
        (["--precision", "bf16", "--loss-scale", "8"], "--loss-scale 8 is for --precision fp16"),
        (["--precision", "fp16", "--loss-scale", "0.5"], "--loss-scale 0.5 is neither none, dynamic nor a number of"),
        (["--precision", "fp16", "--loss-scale", "auto"], "--loss-scale auto is neither none, dynamic nor a number"),
        (["--tail-overlap", "--shard-update"], "--tail-overlap and --shard-update exclude each other"),
        (["--optimizer-option", "max_grad_norm=1"], "max_grad_norm is set by the command itself"),
        (["--threads", "0"], "--threads=0"),
        (["--seed", "-1"], "--seed=-1"),
        (["--backend", "cpu", "--optimizer", "adamw"], "leave --backend out"),
        (["--data", "x"], "the task digits has its data built in"),
        (["--task", "mnist"], "--task mnist needs --data DIR"),
        (["--task", "mnist", "--data", "nowhere"], "--data nowhere is not a folder"),
        (["--task", "text", "--data", "nowhere"], "--data nowhere cannot be read: No such file"),
        (["--report", "."], "--report . is a folder"),
        (["--save", "/proc/x/run.pt"], "--save /proc/x/run.pt: there is no folder /proc/x"),
        (["--lr", "1e30", "--warmup", "0"], "the loss became nan"),
    ],
)
def test_bad_options(invoke: Invoke, options: list[str], message: str) -> None:
    result = invoke("train", *options, code=2 if "'" in message and "warmup" not in message else 1)
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output[result.output.index("Error") :].splitlines()) <= 3


def test_bad_texts(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 5000)
    assert "has 9 characters" in invoke("train", "--task", "text", "--data", "short.txt", code=1).output
    assert "is not UTF-8 text" in invoke("train", "--task", "text", "--data", "binary.txt", code=1).output
    assert "cannot be read: Is a directory" in invoke("train", "--task", "text", "--data", ".", code=1).output


def test_an_unknown_command_names_the_nearest(invoke: Invoke) -> None:
    assert "did you mean train?" in invoke("trian", code=2).output
    output = invoke("train", "--batchsize", 3, code=2).output
    assert "No such option '--batchsize'. Did you mean '--batch-size'?" in output
    assert "Did you mean" not in invoke("compare", "--lrs", 0.1, code=2).output  # once --trials, for the dashes
    assert "there are train, compare" in invoke("xyz", code=2).output


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name in {"rich", "sklearn"} else name)
    with pytest.raises(SystemExit, match=r"needs rich, scikit-learn: pip install rich scikit-learn"):
        launch.main()


CONFIGS: tuple[type[Any], ...] = (RunConfig, ParallelConfig, CompareConfig, MemoryConfig, SearchConfig)


@for_every(("name", "config"), zip(("train", "train", "compare", "memory", "lr-find"), CONFIGS, strict=True))
def test_options_agree_with_the_configuration(invoke: Invoke, name: str, config: type[Any]) -> None:
    """Every field is an option with the field's default, and the help shows the default."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    options = {option.name: option for option in command.params}
    text = re.sub(r"(?<=\w)- ", "-", " ".join(invoke(name, "--help").output.split()))  # lines end at hyphens, too
    for field in dataclasses.fields(config):
        option = options[field.name]
        assert isinstance(option, click.Option)
        assert option.default == field.default
        flag = "--" + field.name.replace("_", "-")
        assert option.opts == [flag]
        shown = field.metadata["shown"] or field.default
        if shown is not None:
            part = text[text.index(f" {flag} ") :]
            assert str(shown) in part[: part.index("]", part.index("[default:"))], flag


def test_defaults_name_every_task_and_optimizer(invoke: Invoke) -> None:
    text = " ".join(invoke("train", "--help").output.split())
    for name, task in TASKS.items():
        assert f"{name} {defaults(task).batch_size}" in text
        assert f"{name} {defaults(task).epochs:g}" in text
    for name, recipe in OPTIMIZERS.items():
        assert f"{name} {recipe.lr:g}" in text


def test_state_dtype_and_options_reach_the_optimizer(invoke: Invoke) -> None:
    sizes = {}
    for dtype in ("fp32", "bf16", "fp16", "int8"):
        invoke("train", "--optimizer", "came", "--steps", 1, "--state-dtype", dtype, "--json", "run.json")
        sizes[dtype] = json.loads(Path("run.json").read_text())["result"]["optimizer_state_bytes"]
    assert sizes["fp32"] > sizes["bf16"] == sizes["fp16"] > sizes["int8"]
    options = ["--optimizer-option", "bias_correction=True", "--optimizer-option", "factor=last_two"]
    output = invoke("train", "--optimizer", "came", "--steps", 1, *options, "--save", "run.pt").output
    assert "came, bias_correction=True, factor=last_two: lr 0.001" in output
    [first, _] = torch.load("run.pt", weights_only=True)["run"]["optimizer"]["param_groups"]
    assert (first["bias_correction"], first["factor"]) == (True, "last_two")


@for_every(
    ("options", "message"),
    [
        (["--optimizer", "adamw", "--state-dtype", "bf16"], "--state-dtype bf16 is for lamb, came and lars"),
        (["--optimizer", "sgd", "--backend", "foreach"], "--backend foreach is for lamb, came and lars"),
        (["--backend", "triton"], 'backend="triton" cannot serve this tensor: it is on cpu, not on a GPU'),
        (["--optimizer-option", f"betas={'-' * 100_000}1"], "betas must be 2 numbers"),
        (["--optimizer-option", "amsgrad"], "'amsgrad' is not of the form NAME=VALUE"),
        (["--optimizer-option", "lr=1"], "lr is set by the command itself"),
        (["--optimizer", "came", "--optimizer-option", "relative_step=True"], "an option of Adafactor"),
        (["--optimizer-option", "adam=True", "--optimizer-option", "adam=False"], "adam is given twice"),
        (["--optimizer-option", "bias_corection=True"], "did you mean 'bias_correction'?"),
        (["--optimizer-option", "decay_mode=l3"], "decay_mode='l3'"),
        (["--optimizer", "adam", "--optimizer-option", "amsgrd=True"], "amsgrd"),
    ],
)
def test_options_that_an_optimizer_does_not_have(invoke: Invoke, options: list[str], message: str) -> None:
    assert message in invoke("train", "--steps", 1, *options, code=1).output


def test_the_rule_of_a_name_is_an_option() -> None:
    """`came` is the recommended rule, and `came-published` the paper's."""

    def losses(name: str, *options: str) -> list[float]:
        task = TASKS["digits"](None)
        run = Run(RunConfig(optimizer=name, steps=4, optimizer_option=options).resolved(task), task)
        while not run.done:
            run.train_step()
        return run.history.loss

    assert losses("came") == losses("came-published", "bias_correction=True")
    assert losses("came-published") == losses("came", "bias_correction=False")
    assert losses("came") != losses("came-published")


def test_digits_train_on_one_thread_unless_told_otherwise() -> None:
    data = (torch.ones(2, 2), torch.ones(2))
    digits, large = TASKS["digits"](None), Classification(data, data)
    assert RunConfig().resolved(digits).threads == 1
    assert RunConfig().resolved(large).threads == torch.get_num_threads()
    assert RunConfig(threads=2).resolved(digits).threads == 2


def test_kernels_without_the_c_library_are_said_in_a_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "plain torch" not in invoke("train", "--steps", "1").output
    monkeypatch.setattr(kernels, "status", lambda _: {"cpu": kernels.Status(False, "no compiler")})
    line = "The kernels run in plain torch, which is slower, without the C library: no compiler"
    assert line in invoke("train", "--steps", "1").output
    assert "plain torch" not in invoke("train", "--steps", "1", "--optimizer", "adamw").output


def test_a_long_run_begins_with_an_estimate(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bighorn_workbench.run.time", SimpleNamespace(perf_counter=itertools.count(step=0.25).__next__))
    assert "This takes" not in invoke("train", "--steps", "8").output
    monkeypatch.setattr(display, "LONG", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    assert "This takes a few seconds, without evaluations." in invoke("train", "--steps", "8").output
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.1, 0.1))
    busy = "without evaluations, and more while other programs run (load 999.0 on "
    assert busy in invoke("train", "--steps", "8").output


def test_the_words_of_users_are_printed_as_they_are(invoke: Invoke) -> None:
    """rich would interpret an emoji and a colour in them."""
    Path("[red].txt").write_text("ab" * 5000)
    output = invoke("train", "--task", "text", "--data", "[red].txt", "--steps", "1", "--json", ":llama:.json").output
    assert "JSON: :llama:.json" in output
    assert "[red].txt" in output
