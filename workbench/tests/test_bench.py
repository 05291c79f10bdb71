import gc
import itertools
import json
import math
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import bighorn
from bighorn import Lamb
from bighorn import _kernels as kernels
from bighorn_workbench import bench, environment, measure, peers
from bighorn_workbench.bench_table import COLUMNS, answers, mark_clear, notes
from bighorn_workbench.shapes import SHAPES
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, assert_self_contained

CPU = torch.device("cpu")
SMALL = {
    "small": measure.ParamSet(lambda: [(16, 8), (8,), (1, 3, 2)]),
    "vector": measure.ParamSet(lambda: [(70,)]),
}


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, param_set in SMALL.items():
        monkeypatch.setitem(measure.PARAM_SETS, name, param_set)


def absent() -> peers.Build:
    raise ImportError("not installed: pip install other")


@pytest.fixture
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the optimizers of other packages look uninstalled."""
    for name in ("timm", "pytorch_optimizer"):
        monkeypatch.setitem(peers.PEERS, name, peers.Peer(f"{name}'s", absent, name))


def bench_json(invoke: Invoke, *arguments: object) -> tuple[dict[str, Any], str]:
    gc.freeze()  # the command collects garbage after each optimizer, in 0.2 s with all imports
    result = invoke("bench", "--seconds", "1e-9", "--json", "bench.json", *arguments)
    return json.loads(Path("bench.json").read_text()), result.output


# Tensors and parameters as published with the models (torchvision's, timm's and transformers' model cards).
@for_every(
    ("name", "tensors", "parameters"),
    [
        ("tiny", 200, 12_800),
        ("efficientnet_b0", 213, 5_288_548),
        ("vit_small", 152, 22_050_664),
        ("resnet50", 161, 25_557_032),
        ("bert_base", 199, 109_482_240),
        ("bert_large", 391, 335_141_888),
        ("llama_1b", 201, 1_100_048_384),
        ("one", 1, 31_254_528),
        ("linears", 100, 104_857_600),
    ],
)
def test_shapes_add_up_to_the_models_they_are_named_after(name: str, tensors: int, parameters: int) -> None:
    shapes = list(SHAPES[name]())
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes) == parameters


@pytest.mark.usefixtures("small_shapes")
def test_every_figure_is_written(invoke: Invoke) -> None:
    content, output = bench_json(invoke, "--shapes", "small,vector", "--threads", 1)
    assert content["command"] == "bighorn bench --shapes small,vector --threads 1 --seconds 1e-09 --json bench.json"
    assert content["environment"]["threads"] == 1
    assert content["config"]["clip"] is None
    assert content["machine"]["cores allowed"] >= 1
    assert content["packages"]["torch"] == version("torch")
    assert [(r["shapes"], r["tensors"], r["parameters"]) for r in content["results"]] == [
        ("small", 3, 142),
        ("vector", 1, 70),
    ]
    for result in content["results"]:
        rows = {row["name"]: row for row in result["optimizers"]}
        steps = peers.TABLES["steps"]
        assert list(rows) == [name for name in (steps.baseline, *steps.peers) if name not in content["absent"]]
        for row in rows.values():
            assert row["rounds"] == measure.LEAST_ROUNDS
            for figure in ("ms", "baseline_ms", "ratio"):
                assert 0 < row[figure]["p10"] <= row[figure]["median"] <= row[figure]["p90"]
            assert 0 < row["error"] < 1e-5
            assert row["label"] in output
        assert "foreach" in rows["lamb-foreach"]["explain"]
        assert all(rows[name]["error"] < 2e-7 for name in ("adamw", "lamb", "lamb-adam", "lamb-foreach"))


@pytest.mark.usefixtures("small_shapes", "only_ours")
def test_an_absent_peer_that_was_asked_for_is_an_error(invoke: Invoke) -> None:
    output = invoke("bench", "--shapes", "vector", "--optimizers", "timm", code=1).output
    assert "--optimizers timm: not installed: pip install other" in output


@pytest.mark.usefixtures("small_shapes")
def test_bf16_and_clipping_reach_the_optimizers(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.optim.Optimizer] = []

    def prepared(*arguments: Any) -> tuple[torch.optim.Optimizer, float]:
        optimizer, seconds = measure.prepared(*arguments)
        made.append(optimizer)
        return optimizer, seconds

    monkeypatch.setattr(bench, "prepared", prepared)
    options = ("--optimizers", "lamb", "--precision", "bf16", "--clip", "1e-4")
    content, _ = bench_json(invoke, "--shapes", "small", *options)
    assert 1e-5 < content["results"][0]["optimizers"][1]["error"] < 1e-2
    assert [type(optimizer) for optimizer in made] == [torch.optim.AdamW, torch.optim.AdamW, Lamb]
    for optimizer in made:
        tensors = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        assert {tensor.dtype for tensor in (*optimizer.param_groups[0]["params"], *tensors)} == {torch.bfloat16}
        averages = torch.cat([state["exp_avg"].flatten().float() for state in optimizer.state.values()])
        # With similar gradients in each step, the norm of the average approaches the gradients' norm from below.
        assert 0 < averages.norm() <= 1.01e-4


def test_apex_takes_part_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    apex = ModuleType("apex.optimizers")
    monkeypatch.setattr(apex, "FusedLAMB", lambda params, **options: (params, options), raising=False)
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "apex.optimizers", apex)
    with pytest.raises(ImportError, match="it takes cuda tensors alone, and this times --device cpu"):
        peers.PEERS["apex"].load_for("cpu")
    build: Any = peers.PEERS["apex"].load_for("cuda")
    assert build([], 0.1, None)[1]["max_grad_norm"] == 1e9
    assert build([], 0.1, 2.0)[1]["max_grad_norm"] == 2.0


@for_every(
    ("arguments", "words"),
    [
        (["--shapes", "bert_bse"], ["--shapes", "'bert_bse'", "did you mean bert_base?"]),
        (["--shapes", "zzz"], ["--shapes", "'zzz'", "there are tiny, efficientnet_b0"]),
        (["--shapes", "tiny,tiny"], ["--shapes", "twice"]),
        (["--optimizers", "lamp"], ["--optimizers", "'lamp'", "did you mean lamb?"]),
        (["--clip", "nan"], ["--clip=nan", "number in (0, 3.4e+38]"]),
        (["--threads", "0"], ["--threads=0", "from 1 to 1024"]),
        (["--seconds", "0"], ["--seconds=0.0", "number in (0, 3.4e+38]"]),
        (["--json", "."], ["--json", "is a folder"]),
        (["--table", "gpu"], ["--table gpu", "with --device cuda"]),
    ],
    ids=lambda value: " ".join(value[:2]) if value[0].startswith("--") and len(value) == 2 else None,
)
def test_wrong_input_is_refused(invoke: Invoke, arguments: list[str], words: list[str]) -> None:
    output = invoke("bench", *arguments, code=1).output
    assert all(word in output for word in words), output


def test_the_error_is_that_of_the_arithmetic() -> None:
    weights = [torch.ones(50), torch.full((3, 4), 2.0)]
    grads = [torch.linspace(1, 2, 50), torch.linspace(-2, -1, 12).view(3, 4)]

    def build(params: Any, lr: float, clip: float | None) -> torch.optim.Optimizer:
        """Return an optimizer whose step is wrong by 1%, except in double precision."""
        assert clip is None
        return torch.optim.SGD(params, lr=lr if params[0].dtype == torch.float64 else 1.01 * lr)

    def flat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors]).double()

    moved = measure.ERROR_LR * (flat(grads) + flat([grad.roll(1) for grad in grads]))
    expected = 0.01 * moved.norm() / (flat(weights) - moved).norm()
    assert measure.error(build, weights, grads) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.skipif(measure.temporaries(lambda: None) is None, reason="needs Linux and glibc")
@pytest.mark.parametrize("megabytes", [4, 40])
def test_temporaries_are_those_of_the_step(megabytes: int) -> None:
    def step() -> None:
        torch.ones(megabytes << 18)

    for _ in range(4):  # the result must not depend on memory that malloc keeps
        step()
        assert measure.temporaries(step) == pytest.approx(megabytes << 20, abs=2 << 20)
        kept = torch.ones(megabytes << 18)
        assert measure.temporaries(kept.neg_) == pytest.approx(0, abs=2 << 20)


@pytest.mark.skipif(measure.temporaries(lambda: None) is None, reason="needs Linux and glibc")
@pytest.mark.skipif(not kernels.status()["cpu"].available, reason="needs the cpu backend")
def test_temporaries_of_the_cpu_backend_are_bounded() -> None:
    weights, grads = measure.draw([(4000, 4000)], 0.02, torch.float32, CPU, 0), [torch.full((4000, 4000), 1e-3)]
    optimizer, _ = measure.prepared(peers.PEERS["lamb"].load(), weights, grads, None)
    found = measure.temporaries(optimizer.step)
    assert found is not None
    assert 1 << 20 < found <= 16 << 20  # above 16 MiB, the backend keeps a part of the update


def test_gradients_are_an_optimizer_s_own() -> None:
    """Apex's FusedLAMB leaves its update in the gradients."""

    class Overwrites(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            assert closure is None
            for param in self.param_groups[0]["params"]:
                param.grad.fill_(7)

    weights, grads = measure.draw([(5,)], 1.0, torch.float32, CPU, 0), measure.draw([(5,)], 1.0, torch.float32, CPU, 1)
    kept = grads[0].clone()
    other, _ = measure.prepared(peers.PEERS["adamw"].load(), weights, grads, None)
    measure.prepared(lambda params, lr, _: Overwrites(params, lr=lr), weights, grads, None)
    measure.prepared(peers.PEERS["adamw"].load(), weights, grads, 1e-3)  # torch's clip scales gradients in place
    assert torch.equal(grads[0], kept)
    assert torch.equal(other.param_groups[0]["params"][0].grad, kept)


def test_two_optimizers_take_turns() -> None:
    turns: list[str] = []

    first, second = torch.optim.SGD([torch.ones(1)]), torch.optim.SGD([torch.ones(1)])
    first.register_step_pre_hook(lambda *_: turns.append("first"))
    second.register_step_pre_hook(lambda *_: turns.append("second"))
    changes = [lambda step: turns.append(f"before first {step}"), lambda step: turns.append(f"before second {step}")]
    times = measure.rounds(first, second, 0, changes)
    each = [(f"before first {i}", "first", f"before second {i}", "second") for i in range(measure.LEAST_ROUNDS)]
    assert turns == list(itertools.chain.from_iterable(each))
    assert [len(mine) for mine in times] == [measure.LEAST_ROUNDS] * 2


def test_timm_is_loaded_without_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "timm" / "optim"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("import torchvision_that_nobody_has")
    (folder / "_types.py").write_text("from torch.optim import SGD as Base")
    (folder / "lamb.py").write_text(
        "from ._types import Base\n"
        "class Lamb(Base):\n"
        "    def __init__(self, params, lr, weight_decay, max_grad_norm):\n"
        "        super().__init__(params, lr=lr)\n"
        "        self.max_grad_norm = max_grad_norm\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("timm_optim", "timm_optim.lamb", "timm_optim._types"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    optimizer = peers.PEERS["timm"].load()([torch.ones(1)], 0.1, 2.0)
    assert vars(optimizer)["max_grad_norm"] == 2.0


def test_the_commit_is_that_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is untracked inside another project's checkout has no commit."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    package = tmp_path / "bighorn" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    monkeypatch.setattr(bighorn, "__file__", str(package))
    assert environment.commit() == {}
    git("init")
    assert environment.commit() == {}
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    found = environment.commit()
    assert len(str(found["commit"])) == 40
    assert found["clean"] is True
    package.write_text("changed")
    assert environment.commit() == {**found, "clean": False}


@pytest.mark.usefixtures("small_shapes")
def test_came_beside_its_peers(invoke: Invoke) -> None:
    content, output = bench_json(invoke, "--table", "came", "--shapes", "small")
    rows = {row["name"]: row for row in content["results"][0]["optimizers"]}
    assert {"adamw", "came", "came-last-two", "came-int8", "adafactor"} <= set(rows)
    assert "group 0" in rows["came"]["explain"]
    # Bighorn and its peer factor (16, 8) but not (8,); only last_two factors (1, 3, 2). The step is a Python number.
    assert rows["came"]["state_bytes"] == 4 * (128 + 2 * 24 + 2 * 8 + 2 * 6 + 3)
    assert rows["came-last-two"]["state_bytes"] == 4 * (128 + 2 * 24 + 2 * 8 + 6 + 2 * (3 + 2) + 3)
    for name, row in rows.items():
        # Adafactor clamps at a threshold that depends on the dtype.
        assert row["error"] < 1e-5, name
    assert "Came, int8" in output


@for_every(
    ("own", "ratio", "slower", "shown"),
    [
        ((0.97, 1.03), (1.2, 1.3, 1.4), 1.0, "1.30"),
        ((0.97, 1.03), (0.002, 0.003, 0.02), 1.0, "0.003"),
        ((0.97, 1.03), (0.9, 1.3, 1.4), 1.0, "noise"),  # rounds contradict each other
        ((0.97, 1.5), (1.2, 1.3, 1.4), 1.0, "noise"),  # the baseline differs more from itself
        ((0.2, 1.0), (1.2, 1.3, 1.4), 1.0, "noise"),
        ((0.97, 1.03), (0.02, 0.02, 0.03), 90.0, "noise"),  # another program slowed the baseline of these rounds
    ],
)
def test_a_ratio_within_the_noise_is_withheld(
    own: tuple[float, float], ratio: tuple[float, float, float], slower: float, shown: str
) -> None:
    """On a busy machine a table once had 1.10 beside a baseline with 0.35 against itself."""
    spreads = (("AdamW", 1.0, (own[0], 1.0, own[1])), ("Lamb", slower, ratio))
    rows: list[dict[str, Any]] = [
        {
            "label": label,
            "rounds": 5,
            "ms": {},
            "baseline_ms": {"median": ms},
            "ratio": {"p10": low, "median": middle, "p90": high},
        }
        for label, ms, (low, middle, high) in spreads
    ]
    mark_clear(rows)
    assert [COLUMNS["ratio"](row) for row in rows] == ["1.00", shown]
    [answer] = answers([{"shapes": "tiny", "optimizers": rows}])
    said = f"takes {shown} x the time of AdamW." if shown != "noise" else "cannot be distinguished from AdamW"
    assert said in answer
    note = f"the ratio cannot be distinguished from 1. The baseline against itself had {own[0]:.2f}-{own[1]:.2f} in 5"
    assert [note in line for line in notes(rows, {})] == ([True] if shown == "noise" else [])


@pytest.mark.usefixtures("small_shapes", "only_ours")
def test_the_report_has_peers_side_by_side(invoke: Invoke) -> None:
    content, output = bench_json(invoke, "--shapes", "small,vector", "--report", "bench.html")
    assert content["absent"] == dict.fromkeys(("timm", "pytorch_optimizer"), "not installed: pip install other")
    assert "Absent: timm's (not installed: pip install other)" in output
    page = assert_self_contained(Path("bench.html"))
    assert "Report: bench.html" in output
    assert page.tags.count("svg") == page.tags.count("thead") == 2
    for found in content["results"]:
        assert [row["name"] for row in found["optimizers"]] == ["adamw", "lamb", "lamb-adam", "lamb-foreach"]
        for row in found["optimizers"]:
            assert row["label"] in page.text
            assert f"{row['ms']['median']:.2f}" in page.text
    for word in ("temporaries", "state", "small", "vector", "Not installed here", "timm's, pytorch_optimizer's"):
        assert word in page.text
    assert "host" not in page.text  # the column would be empty
