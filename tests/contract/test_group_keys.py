"""Keys of parameter groups: keys of frameworks are kept, saved and loaded; misspelt options are refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn._foreign_options import OF_SGD
from bighorn.schedules import WarmUp
from tests.support.cases import KINDS, Kind
from tests.support.error_checks import refused
from tests.support.optimizer_runs import assert_bitwise, backward, model, saved_and_loaded
from tests.support.tables import for_every

PAGE = Path(__file__).parents[2] / "docs" / "groups.md"

FRAMEWORKS: dict[str, dict[str, Any]] = {
    "torch's schedulers": {"initial_lr": 0.1, "max_lr": 0.1, "min_lr": 0.0, "max_momentum": 0.9, "base_momentum": 0.8},
    "torch's SWALR": {"swa_lr": 0.05},
    "timm": {"lr_scale": 0.5},
    "DINO, DINOv2": {"lr_multiplier": 0.5, "wd_multiplier": 0.0, "is_last_layer": True},
    "BEiT, MAE, EVA": {"lr_scale": 0.5, "layer_id": 3, "group": "visual"},
    "MMEngine": {"lr_mult": 0.1, "decay_mult": 0.0, "lr_scale": 0.5, "group_name": "layer_3_decay"},
    "Megatron-LM": {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "pre_wd_mult": 1.0,
    },
    "DeepSpeed": {"moe": False, "use_muon": False},
    "Ultralytics": {"param_group": "bn", "use_muon": False},
    "Composer": {"initial_weight_decay": 0.1},
    "Schedule-Free's wrapper": {
        "train_mode": True,
        "k": 3,
        "weight_sum": 0.5,
        "lr_max": 0.1,
        "scheduled_lr": 0.1,
        "r": 0.0,
    },
    "GaLore": {"rank": 8, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
    "OneTrainer": {"unique_name": "unet", "optimizer_type": "came"},
    "others": {"requires_grad": True, "layer_decay": 0.75, "tags": ["a"], "nothing": None},
}
"""Keys that frameworks write into groups, by framework."""

MISSPELLINGS: dict[str, list[str]] = {
    "weight_decay": [
        "weigth_decay",
        "weight_decays",
        "weightdecay",
        "weightDecay",
        "weight-decay",
        "weight_decay_rate",
    ],
    "lr": ["LR", "lr_", "lrs", "learning_rate", "learnrate", "lrate"],
    "betas": ["beta", "beta1", "beta_2", "b1"],
    "eps": ["epsilon"],
    "maximize": ["maximise"],
    "stacked": ["stack", "stcked"],
    "max_grad_norm": ["max_grad_nrom", "max_gradient_norm"],
    "state_dtype": ["state_dtpye"],
    "exclude_from_weight_decay": ["exclude_from_weight_decays"],
    "weight_rounding": ["weight_roundings"],
    "grad_centralization": ["grad_centralisation"],
    "min_8bit_size": ["min_8bits_size"],
}
OWN = {
    Lamb: {"adapt": ["adpat"], "trust_ratio_bounds": ["trust_ratio_bound"], "always_adapt": ["always_adapts"]},
    Came: {"factor": ["factr"], "clip_threshold": ["clip_treshold"], "scale_parameter": ["scale_paramter"]},
    Lars: {"adapt": ["adpat"], "trust_coefficient": ["trust_coefficients"], "nesterov": ["nestrov"]},
}


def misspelt(kind: Kind) -> list[tuple[str, str]]:
    """Return options, and misspelt names that resemble them."""
    given = {**MISSPELLINGS, **OWN[kind]}
    return [(meant, name) for meant in given if kind is not Lars or meant != "betas" for name in given[meant]]


OTHERS = {"amsgrad": True, "fused": True, "foreach": True, "momentum": 0.9, "nesterov": True}
"""Options of torch's optimizers that would have no effect here."""


def stepping(kind: Kind, keys: dict[str, Any], late: bool) -> tuple[torch.nn.Module, Any]:
    net = model()
    given = {} if late else keys
    optimizer = kind([{"params": list(net.named_parameters()), **given}], lr=0.1)
    optimizer.param_groups[0].update(lr=0.05, weight_decay=0.02)  # like the framework's scheduler
    backward(net)
    if late:
        optimizer.step()
        optimizer.param_groups[0].update(keys)
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("late", [False, True], ids=["given", "written later"])
def test_keys_of_frameworks_are_kept_saved_and_loaded(late: bool, kind: Kind) -> None:
    keys = {key: value for each in FRAMEWORKS.values() for key, value in each.items()}
    net, optimizer = stepping(kind, keys, late)
    plain, without = stepping(kind, {}, late)
    assert_bitwise(list(net.parameters()), list(plain.parameters()))
    assert keys.items() <= optimizer.param_groups[0].items()
    without.load_state_dict(saved_and_loaded(optimizer.state_dict()))  # an optimizer whose groups lack the keys
    for each in (without, copy.deepcopy(without)):
        assert keys.items() <= each.param_groups[0].items()
    optimizer.step()
    without.step()
    assert_bitwise(list(net.parameters()), list(plain.parameters()))
    optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(2)))], **keys})
    assert keys.items() <= optimizer.param_groups[1].items()
    assert keys.items() <= kind(optimizer.param_groups, lr=0.1).param_groups[0].items()


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_hold_them(flat: bool, kind: Kind) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    keys = FRAMEWORKS["DINO, DINOv2"]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, optimizer = stepping(kind, keys, late=False)
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    other, fresh = stepping(kind, dict.fromkeys(keys, 7.0), late=False)
    set_optimizer_state_dict(other, fresh, saved, options=options)
    assert {key: fresh.param_groups[0][key] for key in keys} == keys


@for_every(("kind", "meant", "name"), [(kind, *pair) for kind in KINDS for pair in misspelt(kind)])
def test_misspelt_options_are_refused_wherever_they_are_written(meant: str, name: str, kind: Kind) -> None:
    message = rf"{re.escape(repr(name))} \(did you mean {meant!r}\?\)"
    net, optimizer = stepping(kind, {}, late=False)
    params = list(net.parameters())
    if meant not in kind.algorithm.group_only:
        with pytest.raises(TypeError, match=message):
            kind(params, **{"lr": 0.1, name: 0.1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message):
        stepping(kind, {name: 0.1}, late=False)
    with refused(params, optimizer, TypeError, message):
        optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(2)))], name: 0.1})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][name] = 0.1
    with refused(params, optimizer, ValueError, message):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0][name] = 0.1
    for method in (optimizer.step, optimizer.explain):
        with refused(params, optimizer, TypeError, rf"param_groups\[0\].*{message}"):
            method()
    del optimizer.param_groups[0][name]
    optimizer.step()


@for_every("name", OTHERS)
def test_options_of_other_optimizers_are_refused(name: str, kind: Kind) -> None:
    if name in kind.algorithm.options:
        return
    for late in (False, True) if name not in OF_SGD else (False,):
        remedy = ".*backend" if name in ("fused", "foreach") else ""
        with pytest.raises(TypeError, match=rf"(?s){name!r}, an option of torch.optim{remedy}"):
            stepping(kind, {name: OTHERS[name]}, late)
    others, own = {
        Lars: ("Lamb", "decay_mode"),
        Lamb: ("Came", "factor"),
        Came: ("Lamb and Lars", "adapt"),
    }[kind]
    for late in (False, True):
        with pytest.raises(TypeError, match=rf"{own!r}, an option of {others} but not of this optimizer"):
            stepping(kind, {own: True}, late)
    with pytest.raises(TypeError, match=r"the key 3: a key of a group must be a string"):
        stepping(kind, {3: True}, late=True)  # type: ignore[dict-item]


@pytest.mark.parametrize("name", sorted(OF_SGD & OTHERS.keys()))
def test_tools_may_write_options_of_sgd_later(name: str, kind: Kind) -> None:
    """Momentum schedulers write `momentum` into the groups of any optimizer; it is an option of LARS."""
    if name in kind.algorithm.options:
        return
    keys = {name: OTHERS[name]}
    net, optimizer = stepping(kind, keys, late=True)
    plain, other = stepping(kind, {}, late=True)
    assert_bitwise(list(net.parameters()), list(plain.parameters()))
    other.load_state_dict(optimizer.state_dict())
    other.step()
    assert other.param_groups[0][name] == OTHERS[name]


def test_the_page_lists_the_frameworks() -> None:
    text = " ".join(PAGE.read_text().split())
    assert [framework for framework in FRAMEWORKS if framework != "others" and framework not in text] == []


MULTIPLIED = {
    "lr_scale": "lr",
    "lr_mult": "lr",
    "lr_multiplier": "lr",
    "wd_mult": "weight_decay",
    "decay_mult": "weight_decay",
}


@pytest.mark.parametrize("key", MULTIPLIED)
def test_a_multiplier_multiplies_a_schedule(key: str, kind: Kind, backend: str) -> None:
    """Two groups with different `lr_scale` once got one rate from a schedule."""
    name = MULTIPLIED[key]
    params, others = ([Parameter(torch.ones(2, 3)) for _ in range(2)] for _ in range(2))
    schedule = WarmUp(0.2, 2, from_zero=False)
    options: Any = {"lr": 0.1, "weight_decay": 0.1, name: schedule, "backend": backend}
    keys: list[dict[str, Any]] = [{key: 0.5}, {name: 0.5 * schedule}]
    scaled, given = (
        kind([{"params": each[:1], **own}, {"params": each[1:]}], **options)
        for each, own in zip((params, others), keys, strict=True)
    )
    for _ in range(3):
        for param in (*params, *others):
            param.grad = torch.full((2, 3), 0.5)
        scaled.step()
        given.step()
        assert [group[name] for group in scaled.param_groups] == [group[name] for group in given.param_groups]
        assert scaled.param_groups[0][name] == 0.5 * scaled.param_groups[1][name] > 0
    assert scaled.param_groups[0][key] == 0.5
    torch.testing.assert_close(params, others, rtol=1e-6, atol=0)


@pytest.mark.parametrize("key", MULTIPLIED)
def test_a_multiplier_that_nothing_reads_is_refused(key: str, kind: Kind) -> None:
    name, net = MULTIPLIED[key], model()
    optimizer = kind([{"params": list(net.named_parameters()), key: 0.5}], lr=0.25, weight_decay=0.25)
    backward(net)
    said = rf"param_groups\[0\]: {key}=0\.5 changes nothing.*{name}=0\.25.*{name}=0\.125 itself, or remove {key}"
    with refused(list(net.parameters()), optimizer, ValueError, said):
        optimizer.step()
    optimizer.param_groups[0][name] = 0.125
    optimizer.step()


def test_a_multiplier_must_be_a_number(kind: Kind) -> None:
    with pytest.raises(TypeError, match="lr_scale must be a number, not 'half'"):
        kind([{"params": [Parameter(torch.ones(2))], "lr_scale": "half"}], lr=WarmUp(0.2, 2))


@for_every(
    "keys",
    [
        {"lars_exclude": True},
        {"LARS_exclude": torch.tensor(True)},
        {"lars_exclude": 1},
        {"layer_adaptation": False},
        {"layer_adaptation": 0},
    ],
)
@pytest.mark.parametrize("kind", [Lamb, Lars], indirect=True)
def test_groups_without_layer_adaptation_in_other_words(keys: dict[str, Any], kind: Kind) -> None:
    """They exclude from the trust ratio alone, like the LARS of OpenSelfSup and I-JEPA; weight decay is unchanged."""
    runs = []
    for options in (keys, {"adapt": False}, {}, {key: not value for key, value in keys.items()}):
        param = Parameter(torch.ones(2, 3))
        optimizer = kind([{"params": [param], **options}], lr=0.1, weight_decay=0.1)
        assert not options.keys() & keys.keys() & optimizer.param_groups[0].keys()
        param.grad = torch.linspace(-1, 1, 6).view(2, 3)
        optimizer.step()
        runs.append(param)
    assert runs[0].equal(runs[1])
    assert runs[2].equal(runs[3])
    assert not runs[0].equal(runs[2])
    for key in keys:
        with pytest.raises(TypeError, match=f"{key} must be True or False, not 'yes'"):
            kind([{"params": [param], key: "yes"}], lr=0.1)
        optimizer.param_groups[0].update(keys)
        with refused([param], optimizer, TypeError, rf"param_groups\[0\] got '{key}' .*: write adapt=False"):
            optimizer.step()


@pytest.mark.parametrize("shape", [(3,), ()])
def test_a_group_that_becomes_stacked_is_refused_as_one_that_is_made_so(shape: tuple[int, ...], kind: Kind) -> None:
    param = Parameter(torch.ones(shape))
    message = f"it has {len(shape)} dims, but stacked=True needs 2 or more"
    with pytest.raises(ValueError, match=message):
        kind([{"params": [param], "stacked": True}], lr=0.1)
    optimizer = kind([param], lr=0.1)
    for stacked in (False, True, False):
        param.grad, before = torch.ones(shape), param.detach().clone()
        optimizer.param_groups[0]["stacked"] = stacked
        if not stacked:
            optimizer.step()
            continue
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert torch.equal(param, before)
