"""Descriptions of an optimizer: its repr, explain(), telemetry as a table, and dir()."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bighorn import CAME_PRESETS, PRESETS, Came, Lamb
from bighorn._optim.presets import ELSEWHERE
from bighorn.schedules import Cosine
from tests.support.cases import KINDS, Kind
from tests.support.tables import for_every

DOCS = Path(__file__).parents[2] / "docs"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def test_the_repr_shows_what_differs_from_the_defaults() -> None:
    net = model()
    assert repr(Lamb(net.parameters())) == "Lamb()\n  group 0: 6 tensors, 244 elements: lr=0.001"
    groups = [
        {"params": net[0].parameters()},  # type: ignore[index]
        {"params": net[2].parameters(), "weight_decay": 0.1, "adapt": False},  # type: ignore[index]
    ]
    optimizer = Lamb(groups, lr=Cosine(0.1, 9), betas=(0.8, 0.99), max_grad_norm=1.0, state_dtype=torch.bfloat16)
    optimizer.param_groups[0]["initial_momentum"] = 3  # a framework's key
    head, first, second = repr(optimizer).splitlines()
    assert head == "Lamb(max_grad_norm=1.0)"
    assert first == (
        "  group 0: 2 tensors, 144 elements: lr=Cosine(lr=0.1, decay_steps=9, end_lr=0.0), betas=(0.8, 0.99), "
        "state_dtype='bfloat16'"
    )
    assert "weight_decay=0.1" in second
    assert "adapt=False" in second
    assert "factor='linear'" in repr(Came.like("sana", net.parameters(), lr=1e-4))
    assert repr(Lamb(net.parameters(), names=net)).splitlines()[0] == "Lamb(names=Sequential)"


def test_a_repr_holds_after_groups_were_added_and_copies_were_made(kind: Kind) -> None:
    net = model()
    optimizer = kind([net.get_parameter("0.weight")], lr=0.1)
    optimizer.add_param_group({"params": [net.get_parameter("2.weight")], "lr": 0.2})
    assert "group 1: 1 tensor, 64 elements: lr=0.2" in repr(optimizer)
    assert repr(copy.deepcopy(optimizer)) == repr(optimizer)


def test_explain_shows_exclusions_clip_and_schedules() -> None:
    net = model()
    optimizer = Lamb(
        net.named_parameters(),
        lr=Cosine(0.1, 9),
        max_grad_norm=1.0,
        exclude_from_weight_decay=["bias"],
        exclude_from_layer_adaptation="ndim<2",
    )
    kernels, options = optimizer.explain().splitlines()
    assert kernels.startswith("group 0: ")
    assert options == (
        "  options of group 0: lr by Cosine(lr=0.1, decay_steps=9, end_lr=0.0), now 0.1; no weight decay for 0.bias, "
        "1.bias, 2.bias; no trust ratio for 0.bias, 1.weight, 1.bias, 2.bias; gradients clipped to a 2-norm of 1 over "
        "all groups"
    )
    many = Lamb([(f"w{i}", nn.Parameter(torch.ones(2))) for i in range(9)], exclude_from_weight_decay=["w"])
    assert "no weight decay for w0, w1, w2, w3 and 5 more" in many.explain()
    assert "options of" not in Lamb(net.parameters(), adam=True).explain()
    assert Lamb(net.named_parameters()).explain().splitlines()[1] == (
        "  options of group 0: a trust ratio for 0.bias, 1.weight, 1.bias, 2.bias: biases and norms are best without "
        "one, as with exclude_from_layer_adaptation='ndim<2'"
    )


def test_telemetry_prints_as_a_table_and_is_a_dict(kind: Kind) -> None:
    net = model()
    optimizer = kind(net.named_parameters(), lr=0.1)
    assert optimizer.telemetry().as_dict() == {}
    assert "0 steps skipped" in str(optimizer.telemetry())
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    telemetry = optimizer.telemetry()
    head, names, *rows = str(telemetry).splitlines()
    assert head == f"{kind.__name__}Telemetry, 0 steps skipped"
    assert [row.split()[0] for row in rows] == list(telemetry.names)
    found = telemetry.as_dict()
    assert names.split() == list(found["0.weight"])
    column = "confidence" if kind is Came else "trust_ratio"
    assert [row[column] for row in found.values()] == getattr(telemetry, column).tolist()
    assert {len(row.split()) for row in rows} == {1 + len(names.split())}


def test_dir_has_no_internals(kind: Kind) -> None:
    optimizer = kind(model().parameters(), lr=0.1)
    names = dir(optimizer)
    assert {"explain", "telemetry", "step", "param_groups", "state"} <= set(names)
    assert [name for name in names if name.startswith("_") and not name.startswith("__")] == []


@for_every("name", sorted(ELSEWHERE))
def test_an_argument_of_another_package_is_answered_with_ours(name: str) -> None:
    for kind in KINDS:
        if name in kind.__init__.__code__.co_varnames:
            continue
        unknown: dict[str, Any] = {name: True}
        with pytest.raises(TypeError, match=f"{kind.__name__} got '{name}', an option of ") as error:
            kind([nn.Parameter(torch.ones(2))], lr=0.1, **unknown)
        option = ELSEWHERE[name]
        is_one = set(option.needs) <= inspect.signature(kind).parameters.keys()
        assert str(error.value).endswith(f": {option.remedy if is_one else 'leave it out'}")


def test_the_arguments_of_presets_are_answered_with_them() -> None:
    for preset in PRESETS:
        if preset.argument:
            assert f'Lamb.like("{preset.name}"' in ELSEWHERE[preset.argument].remedy
    assert {preset.argument for preset in PRESETS} > {"trust_clip", "use_nvlamb", "decoupled_decay"}
    assert not any(preset.argument for preset in CAME_PRESETS)


@pytest.mark.parametrize("page", ["from-apex", "from-timm"])
def test_every_argument_of_a_migration_page_is_ours_or_is_answered(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    [table] = re.findall(r"^\| argument of .*?\n\n", text, re.DOTALL | re.MULTILINE)
    found = [name for row in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])]
    assert len(found) > 10
    ours = Lamb.__init__.__code__.co_varnames
    assert [name for name in found if name not in ours and name not in ELSEWHERE] == []
