"""timm's registry and the groups that timm makes: docs/from-timm.md.

`import timm` needs torchvision, so the tests import timm's optimizers without the rest.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bighorn import Came, Lamb, Lars
from tests.support import peer_formulas
from tests.support.other_packages import timm_optim
from tests.support.trainer_model import Net, batches

if peer_formulas.TIMM_ABSENT:
    pytest.skip(peer_formulas.TIMM_ABSENT, allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def timm() -> Iterator[Any]:
    """timm.optim with our names in its registry, without the rest of timm."""
    with timm_optim() as module:
        yield module


def test_the_registry_makes_it_with_groups_of_its_own(timm: Any) -> None:
    net = Net()
    optimizer = timm.create_optimizer_v2(
        net, "bighornlamb", lr=0.01, weight_decay=0.1, names=net, exclude_from_layer_adaptation=["norm"]
    )
    assert type(optimizer) is Lamb
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decays == {name: 0.1 * (param.dim() > 1) for name, param in net.named_parameters()}
    inputs, labels = batches()[0]
    net(inputs, labels)["loss"].backward()
    optimizer.step()
    ratios = dict(zip(optimizer.telemetry().names, optimizer.telemetry().trust_ratio.tolist(), strict=True))
    assert ratios["norm.weight"] == 1.0 != ratios["body.weight"]


LINE: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "opt_eps": None, "opt_betas": None}


@pytest.mark.parametrize(
    ("opt", "line", "kind", "options"),
    [
        ("bighornlamb", {}, Lamb, {}),
        ("bighornlamb", {"opt_eps": 1e-7, "opt_betas": [0.9, 0.95]}, Lamb, {"eps": 1e-7, "betas": (0.9, 0.95)}),
        ("bighorntimm", {}, Lamb, {"always_adapt": False, "max_grad_norm": 1.0}),
        ("bighorncame", {}, Came, {}),
        ("bighorncame", {"opt_betas": [0.8, 0.95]}, Came, {"betas": (0.8, 0.95, 0.9999)}),
        ("bighorncame", {"opt_betas": [0.8, 0.95, 0.99]}, Came, {"betas": (0.8, 0.95, 0.99)}),
        ("bighorncame", {"opt_eps": 1e-20}, Came, {"eps": (1e-20, 1e-16)}),
        ("bighorncame", {"opt_args": {"eps": (1e-20, 1e-10)}}, Came, {"eps": (1e-20, 1e-10)}),
        ("bighorncame", {"opt_args": {"state_dtype": "bfloat16"}}, Came, {"state_dtype": "bfloat16"}),
        ("bighornlars", {}, Lars, {}),
        ("bighornlars", {"opt_eps": 1e-3, "momentum": 0.5}, Lars, {"eps": 1e-3, "momentum": 0.5}),
        ("bighornlars", {"opt_args": {"nesterov": True}}, Lars, {"nesterov": True}),
        ("bighornlamb", {"opt_args": {"exclude_from_layer_adaptation": None}}, Lamb, {}),
        ("bighornlamb", {"opt_foreach": False}, Lamb, {}),
    ],
)
def test_what_its_command_line_gives(timm: Any, opt: str, line: Any, kind: Any, options: Any) -> None:
    """`optimizer_kwargs` converts the arguments of train.py for the registry."""
    arguments = importlib.import_module("timm.optim._optim_factory").optimizer_kwargs(
        argparse.Namespace(opt=opt, **{**LINE, **line})
    )
    net, hand = Net(), Net()
    optimizer = timm.create_optimizer_v2(net, **arguments)
    assert type(optimizer) is kind
    few = [p for p in hand.parameters() if p.dim() < 2]
    groups = [
        {"params": few, "weight_decay": 0.0},
        {"params": [p for p in hand.parameters() if p.dim() > 1], "weight_decay": 0.1},
    ]
    if opt in ("bighornlamb", "bighornlars") and "exclude_from_layer_adaptation" not in line.get("opt_args", {}):
        groups[0]["adapt"] = False
    by_hand = kind(groups, lr=0.01, **options)
    for inputs, labels in batches():
        for model, each in ((net, optimizer), (hand, by_hand)):
            model(inputs, labels)["loss"].backward()
            each.step()
            each.zero_grad()
    assert all(a.equal(b) for a, b in zip(net.parameters(), hand.parameters(), strict=True))


def test_the_command_runs_a_script_with_the_names_registered(tmp_path: Path) -> None:
    """The process is separate, with a folder in place of torchvision, which timm's other modules need."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom timm.optim import list_optimizers\nprint(sys.argv[1:], list_optimizers('bighorn*'))\n"
    )
    start = (
        "import sys, types, runpy; from importlib.util import find_spec;"
        "package = types.ModuleType('timm'); package.__path__ = list(find_spec('timm').submodule_search_locations);"
        "sys.modules['timm'] = package; models = types.ModuleType('timm.models');"
        "models.group_parameters = models.group_with_matcher = None; sys.modules['timm.models'] = models;"
        "sys.argv = ['-m', *sys.argv[1:]]; runpy.run_module('bighorn.integrations.timm', run_name='__main__')"
    )
    command = [sys.executable, "-W", "ignore", "-c", start]
    done = subprocess.run([*command, str(script), "--opt", "bighornlamb"], capture_output=True, text=True, check=True)
    assert done.stdout == "['--opt', 'bighornlamb'] ['bighorncame', 'bighornlamb', 'bighornlars', 'bighorntimm']\n"


def test_a_checkpoint_of_its_factory_loads_as_the_page_says(
    timm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/from-timm.md once had groups without the model's list of parameters without decay, which a ViT has."""
    net = Net()
    monkeypatch.setattr(net, "no_weight_decay", lambda: {"head.weight"}, raising=False)
    theirs = timm.create_optimizer_v2(net, "lamb", lr=0.01, weight_decay=0.1)
    for inputs, labels in batches()[:3]:
        net(inputs, labels)["loss"].backward()
        theirs.step()
        theirs.zero_grad()
    monkeypatch.chdir(tmp_path)
    torch.save({"optimizer": theirs.state_dict()}, "last.pth.tar")
    page = (Path(__file__).parents[2] / "docs" / "from-timm.md").read_text()
    [block] = re.findall(r"## Resume.*?```py\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"model": net}
    exec(block, names)
    ours = names["optimizer"]
    assert [group["weight_decay"] for group in ours.param_groups] == [0.0, 0.1]
    for param in net.parameters():
        assert ours.state[param]["exp_avg"].equal(theirs.state[param]["exp_avg"])
        assert ours.state[param]["step"] == 3
