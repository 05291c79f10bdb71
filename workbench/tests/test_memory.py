"""``bighorn memory`` predicts the allocated bytes exactly."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bighorn import Came, Lamb, Lars
from bighorn._kernels.rounding import LOW, ROUNDING_MODES
from bighorn_workbench import models
from bighorn_workbench.builtin_tasks import TASKS
from bighorn_workbench.config import PRECISIONS, RunConfig
from bighorn_workbench.footprint import FOOTPRINTS, Named, Total, Weights, kinds, total_of
from bighorn_workbench.memory import layer_rows
from bighorn_workbench.optimizers import CONTESTANTS, state_bytes
from bighorn_workbench.peer_state import OF_OTHERS
from bighorn_workbench.run import Run
from bighorn_workbench.shapes import SHAPES, llama
from tests.support.tables import for_every
from workbench.tests.command_line import Invoke, assert_self_contained

ODD = [(), (1,), (7,), (0,), (1, 1), (1, 300), (300, 1), (3, 0), (2, 3, 4), (64, 65), (65, 64), (20, 300), (8, 1, 3, 3),
       (70, 64, 1, 1), (2, 3, 4, 5, 6), (5000,)]  # fmt: skip

BUILD: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "came": partial(Came, lr=1e-3),
    "came-bf16": partial(Came, lr=1e-3, state_dtype=torch.bfloat16),
    "came-fp16": partial(Came, lr=1e-3, state_dtype=torch.float16),
    "came-int8": partial(Came, lr=1e-3, state_dtype="int8"),
    "came-int4": partial(Came, lr=1e-3, state_dtype="int4"),
    "lamb": Lamb,
    "lamb-bf16": partial(Lamb, state_dtype=torch.bfloat16),
    "lamb-int8": partial(Lamb, state_dtype="int8"),
    "lamb-int4": partial(Lamb, state_dtype="int4"),
    "lars": Lars,
    "lars-int8": partial(Lars, state_dtype="int8"),
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


def allocated(optimizer: torch.optim.Optimizer, params: Named) -> dict[str, int]:
    """Return the bytes of state after a step, by parameter name."""
    for _, param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return {
        name: sum(value.nbytes for value in optimizer.state[param].values() if isinstance(value, Tensor))
        for name, param in params
    }


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Named:
    return [(str(index), nn.Parameter(torch.ones(shape, dtype=dtype))) for index, shape in enumerate(shapes)]


def on_meta(params: Named) -> Named:
    return [(name, param.detach().to("meta")) for name, param in params]


@pytest.mark.parametrize("precision", PRECISIONS)
@for_every("name", BUILD)
def test_odd_shapes_weigh_what_was_predicted(name: str, precision: str) -> None:
    # torch's Adafactor divides by the number of elements.
    shapes = [shape for shape in ODD if name != "adafactor" or 0 not in shape]
    params = parameters(shapes, PRECISIONS[precision])
    predicted = FOOTPRINTS[name](on_meta(params))
    assert predicted == allocated(BUILD[name](params), params)


@pytest.mark.parametrize("way", ROUNDING_MODES)
@for_every("dtype", LOW)
@for_every("name", [name for name in FOOTPRINTS if name.startswith(("came", "lamb", "lars"))])
def test_ways_of_rounding_weigh_what_was_predicted(name: str, way: str, dtype: torch.dtype) -> None:
    params = parameters(ODD, dtype)
    predicted = FOOTPRINTS[name](on_meta(params), weight_rounding=way)
    assert predicted == allocated(BUILD[name](params, weight_rounding=way), params)


def test_a_way_of_rounding_on_the_command_line(invoke: Invoke) -> None:
    """The option affects only bighorn's optimizers: the bytes of AdamW do not change."""
    totals = []
    for way in ROUNDING_MODES:
        options = "--optimizers", "lamb,lamb-bf16,came,adamw", "--precision", "bf16", "--weight-rounding", way
        invoke("memory", "--shapes", "tiny", *options, "--json", "m.json")
        totals.append(json.loads(Path("m.json").read_text())["total"])
    elements = 200 * 64
    for name in ("lamb", "lamb-bf16", "came"):
        more = [total[name] - totals[0][name] for total in totals]
        assert more == [0, 0, 2 * elements, elements, 4 * elements]  # nearest, stochastic, kahan, kahan8, master
    assert len({total["adamw"] for total in totals}) == 1


@pytest.mark.parametrize("task", ["digits", "text", "mnist"])
def test_a_run_of_a_task_allocates_what_was_predicted(
    invoke: Invoke, text_file: Path, idx_folder: Path, task: str
) -> None:
    """`memory` predicts the bytes of the model and groups that `train` builds."""
    data = {"digits": None, "text": str(text_file), "mnist": str(idx_folder)}[task]
    names = "came", "came-int8", "lamb-int4", "lars", "adamw", "adafactor"
    chosen = ["--optimizers", ",".join(names), "--json", "m.json"]
    invoke("memory", "--task", task, *(["--data", data] if data else []), *chosen)
    result = json.loads(Path("m.json").read_text())
    made = TASKS[task](data)
    for name in names:
        config = RunConfig(task, data, **CONTESTANTS[name], batch_size=4, steps=1, threads=1)
        run = Run(config.resolved(made), made)
        run.train_step()
        assert result["total"][name] == state_bytes(run.optimizer)
        states = {label: run.optimizer.state[parameter] for label, parameter in run.model.named_parameters()}
        held = {label: sum(value.nbytes for value in state.values()) for label, state in states.items()}
        assert {layer["name"]: layer["bytes"][name] for layer in result["layers"]} == held


def test_what_it_lists_are_contestants_and_other_packages() -> None:
    assert set(FOOTPRINTS) - set(OF_OTHERS) == set(BUILD) <= set(CONTESTANTS)


def test_state_of_other_packages(invoke: Invoke) -> None:
    """The integration tests compare the counts with the packages' allocations."""
    params = [("w", torch.empty(256, 512, dtype=torch.bfloat16)), ("b", torch.empty(100, dtype=torch.bfloat16))]
    matrix, vector = 256 * 512, 100
    assert {name: [size(param) for _, param in params] for name, size in OF_OTHERS.items()} == {
        "lion": [2 * matrix, 2 * vector],
        "bitsandbytes-int8": [2 * matrix + 8 * matrix // 256, 8 * vector],
        "torchao-int4": [matrix + 8 * matrix // 128 + 128 + 4, 4 * vector + 4],
        "flashoptim": [3 * matrix + 4 * matrix // 32 + 8, 3 * vector + 4 * 4 + 8],
        "galore": [2 * 128 * (2 * 512 + 256), 4 * vector],
    }
    every = "--optimizers", ",".join(FOOTPRINTS), "--shapes", "llama_1b"
    output = invoke("memory", *every, "--offload", "--json", "m.json").output
    assert all(len(line) <= 80 for line in output.splitlines())
    result = json.loads(Path("m.json").read_text())
    assert set(result["offload"]["galore"].values()) == {None}
    releasing = {name for name, size in result["released"].items() if size is not None}
    assert releasing == {name for name in FOOTPRINTS if name.startswith(("came", "lamb", "lars"))} | {"flashoptim"}


def test_llama_shapes_are_those_of_its_configuration() -> None:
    shapes = list(llama(layers=1, width=8, hidden=12, heads=4, key_heads=2, vocabulary=10))
    assert sorted(shapes) == sorted(
        [(10, 8), (8, 8), (4, 8), (4, 8), (8, 8), (12, 8), (12, 8), (8, 12), (8,), (8,), (8,), (10, 8)]
    )


def test_table_and_report_of_a_large_model(invoke: Invoke) -> None:
    lines = invoke("memory", "--shapes", "llama_7b", "--report", "m.html", "--json", "m.json").output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[:4] == [
        "llama_7b: 6.7B trainable parameters in 291 tensors, fp32",
        "27.0GB of weights, 27.0GB of gradients",
        "with adamw: 53.9GB of state, 108GB in all",
        "with came-int4: 3.5GB of state, 57.4GB in all, 31.0GB with released gradients",
    ]
    [came] = [line.split() for line in lines if line.startswith(" came-int8")]
    assert came == ["came-int8", "6.9GB", "1.019", "60.8GB", "56%", "34.3GB"]
    in_bf16 = invoke("memory", "--shapes", "llama_7b", "--precision", "bf16").output.splitlines()
    assert in_bf16[2:4] == [
        "with adamw: 27.0GB of state, 53.9GB in all",
        "with adamw in fp32, as under autocast: 108GB in all",
    ]
    result = json.loads(Path("m.json").read_text())
    assert result["parameters"] == 6_738_415_616
    assert result["total"]["adamw"] == 8 * 6_738_415_616 + 4 * 291
    assert result["environment"]["torch"]
    assert sum(layer["bytes"]["came"] for layer in result["layers"]) == result["total"]["came"]
    page = assert_self_contained(Path("m.html"))
    assert page.tags.count("svg") == 1
    head = "llama_7b needs 108GB with adamw, 57.4GB with came-int4"
    for words in (head, "64 of 11008x4096", "bytes per parameter", "--shapes llama_7b", "53.9GB"):
        assert words in page.text


def test_the_rest_of_the_layers_adds_up() -> None:
    params = [(f"blocks.{index}.w", torch.empty(8, 8, device="meta")) for index in range(3)]
    params += [("head.weight", torch.empty(20, 8, device="meta")), ("bias", torch.empty(2, device="meta"))]
    found = kinds(params, {"adamw": FOOTPRINTS["adamw"](params)})
    assert [(kind.name, kind.count, kind.bytes["adamw"]) for kind in found] == [
        ("blocks.*.w", 3, 3 * (2 * 256 + 4)),
        ("head.weight", 1, 2 * 640 + 4),
        ("bias", 1, 2 * 8 + 4),
    ]
    assert layer_rows(found, 1) == [("blocks.*.w\n3 of 8x8", "1.5k"), ("2 others", "1.3k")]


CODE = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        assert torch.empty(1).is_meta
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

class Zoo:
    tied = Tied

def frozen(): return Tied().requires_grad_(False)
def lazy(): return nn.LazyLinear(3)
def number(): return 7
def broken(): raise RuntimeError("no weights here")
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a module in the current folder with models of all kinds."""
    name = f"zoo_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield name
    sys.modules.pop(name, None)


def test_any_model_without_its_frozen_and_doubled_weights(invoke: Invoke, zoo: str) -> None:
    invoke("memory", "--model", f"{zoo}:Zoo.tied", "--json", "m.json")
    result = json.loads(Path("m.json").read_text())
    assert [(layer["name"], layer["shape"]) for layer in result["layers"]] == [("embedding.weight", [50, 8])]
    assert result["total"]["sgd"] == 4 * 400
    assert result["all"]["sgd"] == 4 * (3 * 400 + 72)
    assert result["released"]["sgd"] is None


@for_every(
    ("what", "message"),
    [
        (":Tide", "no 'Tide' there; did you mean Tied?"),
        (":Zoo.tide", "no 'tide' there; did you mean tied?"),
        (":number", "gives a int, but must give a torch.nn.Module"),
        (":broken", "RuntimeError: no weights here"),
        (":lazy", "weight has no shape before the first batch"),
        (":frozen", "has no trainable parameters"),
        ("_:Tied", "ModuleNotFoundError: No module named"),
        ("", "is not of the form FILE.py:NAME or PACKAGE.MODULE:NAME"),
        (":", "is not of the form FILE.py:NAME"),
    ],
)
def test_models_that_cannot_be_had(invoke: Invoke, zoo: str, what: str, message: str) -> None:
    assert message in invoke("memory", "--model", zoo + what, code=1).output


@for_every(
    ("options", "message"),
    [
        (["--shapes", "bert_bse"], "--shapes: no 'bert_bse' here; did you mean bert_base?"),
        (["--task", "text:"], "--task 'text:' is not of the form FILE.py:NAME or PACKAGE.MODULE:NAME"),
        (["--optimizers", "came,lam"], "--optimizers: no 'lam' here; did you mean lamb?"),
        (["--task", "text", "--shapes", "one"], "--task and --shapes each say what to predict for"),
        (["--shapes", "one", "--data", "x"], "--data x is for a task, but --shapes is given"),
        (["--optimizer-option", "factr=1"], "no optimizer here has it: did you mean factor?"),
        (["--optimizer-option", "factor=rows"], "--optimizer-option: factor='rows' is not known"),
        (["--optimizer-option", "weight_rounding=kahan"], "give --weight-rounding kahan."),
        (["--optimizers", "adamw", "--optimizer-option", "factor=matrix"], "only Bighorn's optimizers take any."),
        (["--report", "no/../."], "is a folder"),
        (["--gpu-memory", "24"], "--gpu-memory '24' is not a size like 24GB, 80GiB or 512MB."),
        (["--gpu-memory", f"{'9' * 400}GB"], "9GB' is not a size like"),
        (["--gpu-memory", "0GB"], "--gpu-memory '0GB' is not a size like"),
        (["--gpu-memory", "-1GB"], "--gpu-memory '-1GB' is not a size like"),
    ],
)
def test_wrong_input_is_refused(invoke: Invoke, options: list[str], message: str) -> None:
    assert message in invoke("memory", *options, code=1).output


def test_no_output_is_written_over_an_input(invoke: Invoke) -> None:
    Path("in.json").write_text("{}")
    for options in (["--hf-config", "in.json"], ["--task", "text", "--data", "in.json"]):
        output = invoke("memory", *options, "--json", "in.json", code=1).output
        assert f"--json in.json is the file of {options[-2]} in.json, which it would overwrite" in output
    assert Path("in.json").read_text() == "{}"


def test_whether_it_fits(invoke: Invoke) -> None:
    """400 trainable weights, 72 frozen ones; AdamW keeps 2 numbers and a step, in 4 bytes each."""
    weights, gradients, state = 4 * (400 + 72), 4 * 400, 8 * 400 + 4
    one = Weights([("w", torch.empty(50, 8, device="meta"))], 4 * 72)
    assert total_of("adamw", one, state) == Total(state, weights + gradients + state, None)
    two = [("a", torch.empty(30, device="meta")), ("b", torch.empty(70, device="meta"))]
    assert total_of("came", Weights(two), 500) == Total(500, 400 + 400 + 500, 400 + 280 + 500)

    def said(memory: str, *options: str) -> str:
        output = invoke("memory", "--shapes", "llama_7b", "--gpu-memory", memory, *options).output
        return next(line for line in output.splitlines() if line.startswith("Fits in"))

    chosen = "--optimizers", "came,came-int8,lamb,adamw"
    assert said("80GB", *chosen) == (
        "Fits in 80GB, before activations? yes: came-int8; with released gradients: came; no: lamb, adamw"
    )
    assert said("8GB", *chosen) == (
        "Fits in 8GB, before activations? no: came, came-int8, lamb, adamw. The least is came-int8, 60.8GB: sharded "
        "(FSDP2), 8 such GPUs hold it; with released gradients it is came-int8, 34.3GB; or halve weights and "
        "gradients by --precision bf16 --weight-rounding stochastic"
    )
    assert "with released gradients: came-int8" in said("24GB", *chosen, "--precision", "bf16")


def test_a_hugging_face_configuration_is_read_offline(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module replaces transformers; the integration tests build its real models."""

    class Config:
        architectures = ("Tiny",)

    class Tiny(nn.Linear):
        def __init__(self, config: Any) -> None:
            assert config._attn_implementation == "eager"  # a kernel named by the file would be downloaded
            super().__init__(40, 10, bias=False)

    def from_pretrained(path: str, local_files_only: bool, trust_remote_code: bool) -> Config:
        assert local_files_only
        assert not trust_remote_code
        if json.loads(Path(path).read_text()) != {"model_type": "tiny"}:
            raise ValueError("unrecognized model")
        return Config()

    package: Any = ModuleType("transformers")
    package.AutoConfig = SimpleNamespace(from_pretrained=from_pretrained)
    package.Tiny = Tiny
    package.AutoModel = SimpleNamespace(from_config=lambda _, trust_remote_code: nn.Linear(2 - trust_remote_code, 1))
    package.pipeline = lambda _: Path("was-here").touch()
    Path("config.json").write_text('{"model_type": "tiny"}')
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs the package transformers" in invoke("memory", "--hf-config", "config.json", code=1).output
    monkeypatch.setitem(sys.modules, "transformers", package)
    invoke("memory", "--hf-config", "config.json", "--json", "m.json")
    assert json.loads(Path("m.json").read_text())["parameters"] == 400
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    Config.architectures = ("pipeline",)  # a function of the package, not a model
    invoke("memory", "--hf-config", "config.json", "--json", "m.json")
    assert json.loads(Path("m.json").read_text())["parameters"] == 3
    assert not Path("was-here").exists()

    class Endless(nn.Module):
        def __init__(self, _: Any) -> None:
            super().__init__()
            for number in itertools.count():  # as of a configuration with millions of layers
                self.register_parameter(f"layer{number}", nn.Parameter(torch.empty(1)))

    monkeypatch.setattr(models, "MOST_TENSORS", 1000)
    package.Endless, Config.architectures = Endless, ("Endless",)
    output = invoke("memory", "--hf-config", "config.json", code=1).output
    assert "it has more than 1,000 parameters' tensors. Correct its number of layers" in output
    for endless in ({"num_labels": 1001}, {"text_config": {"num_hidden_layers": 1001}}, {"depths": [2, 1001]}):
        Path("config.json").write_text(json.dumps(endless))
        output = invoke("memory", "--hf-config", "config.json", code=1).output
        assert "=1,001, more than 1,000. Correct it" in output, "before transformers makes a list of them"
    Path("config.json").write_text("{}")
    assert "ValueError: unrecognized model" in invoke("memory", "--hf-config", "config.json", code=1).output
    assert "there is no such file" in invoke("memory", "--hf-config", "absent.json", code=1).output
    two = "memory", "--hf-config", "config.json", "--shapes", "one"
    assert "--shapes and --hf-config each say" in invoke(*two, code=1).output


def test_options_go_to_the_optimizers_that_have_them(invoke: Invoke) -> None:
    options = ["--optimizer-option", "factor=last_two", "--optimizer-option", "min_8bit_size=0"]
    invoke("memory", "--shapes", "resnet50", *options, "--json", "m.json")
    total = json.loads(Path("m.json").read_text())["total"]
    params = [(str(i), torch.empty(shape, device="meta")) for i, shape in enumerate(SHAPES["resnet50"]())]
    mine: dict[str, Any] = {"state_dtype": "int8", "min_8bit_size": 0}
    assert total["came-int8"] == sum(Came.state_bytes(params, factor="last_two", **mine).values())
    assert total["lamb-int8"] == sum(Lamb.state_bytes(params, **mine).values())
    assert total["came-int8"] != sum(Came.state_bytes(params, **mine).values())
