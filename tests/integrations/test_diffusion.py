"""The command for diffusion trainers, with modules that have their names, arguments and order of calls.

docs/with-diffusion.md has the versions of the trainers in which it was run.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import bighorn.integrations.diffusion as launcher
from bighorn import Came, Lamb
from tests.support.optimizer_runs import saved_and_loaded

FILES = {
    "library/train_util.py": """
import ast, importlib
def get_optimizer(args, trainable_params):
    if args.fused_backward_pass:
        assert args.optimizer_type.lower() == "adafactor", "only Adafactor can step in backward"
    options = {key: ast.literal_eval(value) for key, value in (each.split("=") for each in args.optimizer_args)}
    module, _, name = args.optimizer_type.rpartition(".")
    kind = getattr(importlib.import_module(module or "torch.optim"), name)
    return name, str(options), kind(trainable_params, lr=args.learning_rate, **options)
""",
    "library/adafactor_fused.py": """
def patch_adafactor_fused(optimizer):
    optimizer.step_param = "of Adafactor"
""",
    "musubi_tuner/modules/adafactor_fused.py": """
def patch_adafactor_fused(optimizer):
    optimizer.step_param = "of Adafactor"
""",
    "modules/util/optimizer/CAME.py": """
class CAME:
    def __init__(self, params, lr=None, eps=(1e-30, 1e-16), clip_threshold=1.0, betas=(0.9, 0.999, 0.9999),
                 weight_decay=0.0, stochastic_rounding=False, use_cautious=False): ...
""",
    "modules/util/optimizer/CAME8bit.py": """
class CAME8bit:
    def __init__(self, params, lr=None, eps=(1e-30, 1e-16), clip_threshold=1.0, betas=(0.9, 0.999, 0.9999),
                 weight_decay=0.0, stochastic_rounding=False, use_cautious=False, min_8bit_size=16384,
                 quant_block_size=2048): ...
""",
    "toolkit/optimizer.py": """
import torch
def get_optimizer(params, optimizer_type="adam", learning_rate=1e-6, optimizer_params=None):
    if optimizer_type.lower() != "adam":
        raise ValueError(f"Unknown optimizer type {optimizer_type}")
    return torch.optim.Adam(params, lr=learning_rate, **(optimizer_params or {}))
""",
    "simpletuner/helpers/training/optimizer_param.py": """
import inspect
optimizer_choices = {"adamw": {"precision": "any", "default_settings": {}, "class": None}}
def optimizer_parameters(optimizer, args):
    choice = optimizer_choices[optimizer]
    settings = {**choice["default_settings"], **args}
    known = inspect.signature(choice["class"].__init__).parameters
    if not any(param.kind is inspect.Parameter.VAR_KEYWORD for param in known.values()):
        settings = {name: value for name, value in settings.items() if name in known}
    return choice["class"], settings
""",
    "pytorch_optimizer/__init__.py": "",
}
"""Modules of the trainers, with what the launcher reads in them."""


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of a trainer as its script would."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    tops = {name.split("/")[0] for name in FILES}

    def of_trainers() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in tops]

    for name in of_trainers():
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module
    for name in of_trainers():  # others, which a test has imported first, stay: triton cannot be imported twice
        del sys.modules[name]


class Prepared:
    """Accelerate's wrapper of an optimizer."""

    def __init__(self, optimizer: Any, steps: int = 1, scaler: object = None) -> None:
        self.optimizer, self.scaler, self.gradient_state = optimizer, scaler, Namespace(num_steps=steps)
        self.param_groups = optimizer.param_groups


OPTIONS: dict[str, Any] = {"weight_decay": 0.01, "weight_rounding": "stochastic"}
INT8: dict[str, Any] = {**OPTIONS, "state_dtype": "int8", "min_8bit_size": 64}


def sd_arguments(kind: str, options: Mapping[str, Any], **others: Any) -> Namespace:
    words = [f"{name}={value!r}" for name, value in options.items()]
    line = {"fused_backward_pass": True, "gradient_accumulation_steps": 1, "learning_rate": 0.1}
    return Namespace(optimizer_type=kind, optimizer_args=words, **(line | others))


def sd_scripts(load: Any, params: Any) -> Any:
    arguments = sd_arguments("bighorn.Came", INT8)
    optimizer = load("library.train_util").get_optimizer(arguments, params)[-1]
    assert arguments.fused_backward_pass is True
    return optimizer


def onetrainer(name: str, **options: Any) -> Callable[[Any, Any], Any]:
    words = {"lr": 0.1, "eps": (1e-30, 1e-16), "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.01}
    words |= {"stochastic_rounding": True, **options}
    return lambda load, params: getattr(load(f"modules.util.optimizer.{name}"), name)(params=params, **words)


def simpletuner(load: Any, params: Any) -> Any:
    words = {"betas": (0.9, 0.999), "eps": 1e-30, "state_dtype": "int8", "min_8bit_size": 64, "weight_decay": 0.01}
    module = load("simpletuner.helpers.training.optimizer_param")
    kind, settings = module.optimizer_parameters("bighorn-came", words)
    return kind(params, lr=0.1, **settings)


def ai_toolkit(load: Any, params: Any) -> Any:
    words = {**INT8, "betas": [0.9, 0.999, 0.9999]}
    return load("toolkit.optimizer").get_optimizer(params, "bighorn.came", learning_rate="1e-1", optimizer_params=words)


def hooks_of_fused_pass(module: str) -> Callable[[Any, Any], Callable[[Any, Any, int], None]]:
    """Return how sd-scripts and musubi-tuner step in backward."""

    def fuse(load: Any, optimizer: Any) -> Callable[[Any, Any, int], None]:
        prepared = Prepared(optimizer)
        load(module).patch_adafactor_fused(prepared)
        return lambda param, group, _: prepared.step_param(param, group)  # type: ignore[attr-defined]

    return fuse


def hooks_of_onetrainer(_: Any, optimizer: Any) -> Callable[[Any, Any, int], None]:
    step: Callable[[Any, Any, int], None] = optimizer.step_parameter
    return step


@dataclass(frozen=True)
class Trainer:
    """A way in: how the trainer makes its optimizer, how it steps in backward, and what our optimizer then is."""

    id: str
    make: Callable[[Any, Any], Any]
    options: Mapping[str, Any]
    fuse: Callable[[Any, Any], Callable[[Any, Any, int], None]] | None = None


LINEAR: dict[str, Any] = {"factor": "linear", "state_dtype": "int8", "min_8bit_size": 65}
TRAINERS = (
    Trainer("sd-scripts", sd_scripts, INT8, hooks_of_fused_pass("library.adafactor_fused")),
    Trainer(
        "musubi-tuner",
        lambda _, params: Came(params, lr=0.1, **INT8),  # its builder takes bighorn.Came as it is
        INT8,
        hooks_of_fused_pass("musubi_tuner.modules.adafactor_fused"),
    ),
    Trainer(
        "OneTrainer-CAME",
        onetrainer("CAME", use_cautious=True),
        {**OPTIONS, "factor": "last_two", "cautious": True},
        hooks_of_onetrainer,
    ),
    Trainer(
        "OneTrainer-CAME8bit",
        onetrainer("CAME8bit", min_8bit_size=64, quant_block_size=2048),
        {**OPTIONS, **LINEAR},
        hooks_of_onetrainer,
    ),
    Trainer("SimpleTuner", simpletuner, INT8),
    Trainer("ai-toolkit", ai_toolkit, INT8),
    Trainer(
        "diffusion-pipe",
        lambda load, params: load("pytorch_optimizer").BighornCame(params, lr=0.1, betas=[0.9, 0.999], **INT8),
        INT8,
    ),
)


def parameters(dtypes: str) -> list[Parameter]:
    """Return the matrices of an adapter and a bias, in float32 and bfloat16, or in bfloat16."""
    torch.manual_seed(0)
    shapes = ((24, 40), (40, 24), (8, 6, 3, 3), (24,))
    kinds = (torch.float32, torch.bfloat16) if dtypes == "mixed" else (torch.bfloat16,)
    return [Parameter(torch.randn(shape).to(kinds[i % len(kinds)])) for i, shape in enumerate(shapes)]


def go(optimizer: Any, params: list[Parameter], steps: range, hook: Any = None) -> None:
    """Take steps, in backward if there is a hook, as a trainer's loop does."""
    for group in optimizer.param_groups if hook else []:
        for i, param in enumerate(group["params"]):

            def stepped(param: Any, group: Any = group, i: int = i) -> None:
                hook(param, group, i)
                param.grad = None

            param.register_post_accumulate_grad_hook(stepped)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(param.shape, generator=generator).to(param.dtype) for param in params]
        torch.stack([(p * g).sum().float() for p, g in zip(params, gradients, strict=True)]).sum().backward()  # type: ignore[no-untyped-call]
        if hook is None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("dtypes", ["mixed", "bfloat16"])
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.id)
def test_a_run_and_its_continuation_are_ours(trainer: Trainer, dtypes: str, trainers: Any) -> None:
    expected = parameters(dtypes)
    go(Came(expected, lr=0.1, **trainer.options), expected, range(6))
    for fused in (False, True) if trainer.fuse else (False,):
        params = parameters(dtypes)
        optimizer = trainer.make(trainers, params)
        go(optimizer, params, range(3), trainer.fuse(trainers, optimizer) if fused and trainer.fuse else None)
        resumed = [Parameter(param.detach().clone()) for param in params]
        later = trainer.make(trainers, resumed)
        later.load_state_dict(saved_and_loaded(optimizer.state_dict()))
        go(later, resumed, range(3, 6), trainer.fuse(trainers, later) if fused and trainer.fuse else None)
        assert all(a.equal(b) for a, b in zip(expected, resumed, strict=True))


@pytest.mark.parametrize("name", ["CAME", "CAME8bit"])
def test_onetrainers_checkpoints_tell_what_its_own_tell(name: str, trainers: Any) -> None:
    """Its CAME takes the two flags from the window, its CAME8bit from the checkpoint."""
    params = parameters("mixed")
    saved = onetrainer(name, use_cautious=True)(trainers, params)
    go(saved, params, range(1))
    later = onetrainer(name, use_cautious=False, stochastic_rounding=False)(trainers, params)
    later.load_state_dict(saved_and_loaded(saved.state_dict()))
    flags = {(group["cautious"], group["weight_rounding"]) for group in later.param_groups}
    assert flags == ({(False, "nearest")} if name == "CAME" else {(True, "stochastic")})


def test_other_optimizers_are_left_alone(trainers: Any) -> None:
    params = parameters("mixed")
    util, fused = trainers("library.train_util"), trainers("library.adafactor_fused")
    with pytest.raises(AssertionError, match="only Adafactor"):
        util.get_optimizer(sd_arguments("AdamW", {}), params)
    adafactor = util.get_optimizer(sd_arguments("Adafactor", {}), params)[-1]
    fused.patch_adafactor_fused(prepared := Prepared(adafactor))
    assert prepared.step_param == "of Adafactor"  # type: ignore[attr-defined]
    assert type(trainers("toolkit.optimizer").get_optimizer(params, "adam")) is torch.optim.Adam
    choices = trainers("simpletuner.helpers.training.optimizer_param").optimizer_choices
    assert list(choices) == ["adamw", "bighorn-came", "bighorn-lamb", "bighorn-lars"]
    assert type(trainers("toolkit.optimizer").get_optimizer(params, "bighorn.lamb")) is Lamb


def ai_toolkit_named(load: Any, params: Any, name: str, **options: Any) -> Any:
    return load("toolkit.optimizer").get_optimizer(params, name, learning_rate=0.1, optimizer_params=options)


def simpletuner_words(load: Any, params: Any, name: str = "bighorn-came", **words: Any) -> Any:
    module = load("simpletuner.helpers.training.optimizer_param")
    kind, settings = module.optimizer_parameters(name, words)
    return kind(params, lr=0.1, **settings)


def of_sd_scripts(load: Any, params: Any, options: Any, **others: Any) -> Any:
    return load("library.train_util").get_optimizer(sd_arguments("bighorn.Came", options, **others), params)


def fused_pass(load: Any, prepared: Prepared) -> None:
    load("library.adafactor_fused").patch_adafactor_fused(prepared)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda load, params: ai_toolkit_named(load, params, "bighorn.cane"), "must be bighorn.Came.*not 'bighorn.can"),
        (lambda load, params: ai_toolkit_named(load, params, "bighorn.came", betta=1), "'betta' .did you mean 'betas'"),
        (lambda load, params: ai_toolkit_named(load, params, "sgd"), "Unknown optimizer type sgd"),
        (
            lambda load, params: simpletuner_words(load, params, weight_rouding="kahan"),
            "did you mean 'weight_rounding'",
        ),
        (lambda load, params: simpletuner_words(load, params, "bighorn-cam"), "must be bighorn-came.*'bighorn-cam'"),
        (lambda load, params: of_sd_scripts(load, params, {"cautions": True}), "did you mean 'cautious'"),
        (
            lambda load, params: of_sd_scripts(load, params, {}, gradient_accumulation_steps=2),
            "gradient_accumulation_steps is 2: set it to 1, or leave --fused_backward_pass out",
        ),
        (
            lambda load, params: fused_pass(load, Prepared(Came(params, lr=0.1), steps=4)),
            "gradient_accumulation_st.* 4",
        ),
        (
            lambda load, params: fused_pass(load, Prepared(Came(params, lr=0.1), scaler="a scaler")),
            "mixed_precision is 'fp16': use --mixed_precision bf16",
        ),
        (
            lambda load, params: fused_pass(load, Prepared(Came(params, lr=0.1, max_grad_norm=1.0))),
            "single parameters: max_grad_norm=1.0 looks at all gradients first; leave it out",
        ),
    ],
)
def test_wrong_words_end_with_one_message(make: Any, message: str, trainers: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(trainers, parameters("mixed"))


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        ("library/train_util.py", "def make_optimizer(args): ...", "function get_optimizer"),
        ("toolkit/optimizer.py", "def get_optimizer(config): ...", "argument 'params' of get_optimizer"),
        ("modules/util/optimizer/CAME.py", "def CAME(params, lr): ...", "argument 'eps' of CAME"),
        ("simpletuner/helpers/training/optimizer_param.py", "", "function optimizer_parameters"),
        (
            "simpletuner/helpers/training/optimizer_param.py",
            "def optimizer_parameters(optimizer, args): ...",
            "function optimizer_choices",
        ),
    ],
)
def test_another_version_of_a_trainer_is_named(
    name: str, text: str, missing: str, trainers: Any, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    importlib.invalidate_caches()
    module = name.removesuffix(".py").replace("/", ".")
    with pytest.raises(RuntimeError, match=f"{module} has no {missing}, which bighorn.* version .* is not known"):
        trainers(module)


def test_a_module_that_was_imported_before_is_changed_too() -> None:
    program = "import sys; sys.path.insert(0, '.'); import pytorch_optimizer, bighorn.integrations.diffusion; "
    program += "print(pytorch_optimizer.BighornCame.__name__, pytorch_optimizer.BighornLamb.__name__)"
    assert launched("-c", program, files=("pytorch_optimizer/__init__.py",)) == "came Lamb\n"


# ---- the command ------------------------------------------------------------------------------------------------

SCRIPT = """
import multiprocessing, pickle, sys
import beside
class Config:
    steps: int = 3
def in_a_child(config):
    assert type(config) is Config
    from modules.util.optimizer.CAME import CAME
    print("child", CAME.__module__, flush=True)
if __name__ == "__main__":
    print(beside.NAME, sys.argv, __file__, Config.__annotations__)
    from modules.util.optimizer.CAME import CAME
    print("parent", CAME.__module__, flush=True)
    child = multiprocessing.get_context("spawn").Process(target=in_a_child, args=(Config(),))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launched(*words: str, files: tuple[str, ...] = (), code: int = 0) -> str:
    for name in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(FILES[name])
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


LAUNCH = ("-m", "bighorn.integrations.diffusion")


@pytest.mark.parametrize("first", [(), ("--local_rank=0",)])
def test_a_script_and_its_children_run_as_under_python(first: tuple[str, ...]) -> None:
    """The folder of the script is on the path; spawned processes find the script's classes and our optimizers."""
    for name in ("modules/util/optimizer/CAME.py", "modules/util/optimizer/CAME8bit.py"):
        path = Path("trainer") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES[name])
    Path("trainer/beside.py").write_text("NAME = 'beside'")
    Path("trainer/train.py").write_text(SCRIPT)
    arguments = ["trainer/train.py", *first, "--config", "x.json"]
    assert launched(*LAUNCH, *first, *(word for word in arguments if word not in first)) == (
        f"beside {arguments} {Path('trainer/train.py').absolute()} {{'steps': <class 'int'>}}\n"
        "parent bighorn.integrations.diffusion\nchild bighorn.integrations.diffusion\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "error: SCRIPT is missing"), (("absent.py",), "error: absent.py is no file"), (("--lr", "1"), "error: --lr")],
)
def test_a_command_without_a_script_is_explained(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=said):
        launcher.main(list(words))
    launcher.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m bighorn.integrations.diffusion SCRIPT")


def test_accelerate_launches_it() -> None:
    pytest.importorskip("accelerate", reason="make integrations")
    Path("train.py").write_text("import sys; print(sys.argv)")
    words = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", *LAUNCH)
    out = launched(*words, "train.py", "--steps", "3")
    assert out.endswith("['train.py', '--steps', '3']\n")


# ---- configurations that people have published --------------------------------------------------------------------

PUBLISHED = (
    # the README of CAME, and requests for it in trainers: kohya_ss#1811, musubi-tuner#31, sd-scripts#1985, #837
    "weight_decay=1e-2 betas=(0.9,0.999,0.9999) eps=(1e-30,1e-16)",
    "betas=0.9,0.999,0.9999 weight_decay=0.01",
    "weight_decay=0.01 eps=(1e-30,1e-16) betas=(0.9,0.999,0.9999)",
    "weight_decay=0.01",
    "eps=1e-30,1e-16",  # LoRA_Easy#61
    "weight_decay=0.04",  # a notebook for LoRA_Easy
    "betas=0.9,0.999,0.9999 weight_decay=0.01 eps=1e-30,1e-16",  # a script for Wan
    "betas=0.9,0.999,0.9999",  # an Anima trainer
    "betas=0.8,0.95,0.9999 weight_decay=0.01",
    "betas=[0.9,0.999,0.9999] eps=[1e-30,1e-16] weight_decay=0.0",  # SANA
    "weight_decay=0.03 betas=(0.9,0.999,0.9999) eps=(1e-30,1e-16)",  # PixArt
    "betas=(0.9,0.95,0.99) clip_threshold=1.0 fixed_decay=False ams_bound=False",
)
ANSWERED = {
    "weight_decay=0.01 eps=1e-8 betas=0.9,0.99": "beta3 is missing, such as 0.9999",
    "weight_decay=0.04 eps=1e-16": r"such as \(1e-30, 1e-16\), not 1e-16",
    "weight_decay=0.0001 update_strategy='cautious'": 'use cautious=True for "cautious"',
    "stochastic_rounding=True use_cautious=True": 'use weight_rounding="stochastic"',
    "eps1=1e-30 eps2=1e-16 ams_bound=False": r"use eps=\(eps1, eps2\)",
    "block_size=2048 min_8bit_size=16384": "blocks have 256 elements",
    "enable_stochastic_rounding=True enable_cautious=True": 'use weight_rounding="stochastic"',
    "betas=(0.9,0.95) clip_threshold=(1.0,1e-3,1e-3)": "beta3 is missing",
    "use_stochastic_rounding=True use_quantized_buffers=True": 'use weight_rounding="stochastic"',
    "use_quantized_buffers=True quantized_buffers_dtype='uint8'": 'use state_dtype="int8"',
    "weight_decouple=True weight_decay=0.01": "'weight_decouple'.*leave it out",
}


def test_the_line_on_the_page_is_read_by_literal_eval() -> None:
    """sd-scripts' library/train_util.py and musubi-tuner's trainer_base.py read it so; a word needs quotes inside."""
    text = (Path(__file__).parents[2] / "docs" / "with-diffusion.md").read_text()
    for line in re.findall(r"--optimizer_args (.*?)\n(?:\n|```)", text, re.DOTALL):
        options = as_typed(" ".join(shlex.split(line.replace("\\\n", " "))))
        optimizer = Came(parameters("bfloat16"), lr=0.01, **options)
        assert optimizer.defaults["bias_correction"] is True
    assert (options["state_dtype"], options["weight_rounding"]) == ("int8", "stochastic")
    with pytest.raises(ValueError, match="malformed"):
        ast.literal_eval("int8")


def as_typed(words: str) -> dict[str, Any]:
    """Read words as sd-scripts does."""
    return {key: ast.literal_eval(value) for key, value in (word.split("=") for word in words.split())}


@pytest.mark.parametrize("words", PUBLISHED)
def test_a_published_configuration_is_accepted(words: str) -> None:
    Came(parameters("mixed"), lr=1e-4, **as_typed(words))


@pytest.mark.parametrize(("words", "answer"), ANSWERED.items())
def test_a_published_configuration_is_answered(words: str, answer: str) -> None:
    with pytest.raises(TypeError, match=answer) as caught:
        Came(parameters("mixed"), lr=1e-4, **as_typed(words))
    assert "\n" not in str(caught.value)
