"""Checkpoints of other optimizers: the run continues as under its optimizer, and a warning reports the conversion.

The file also tests the version of bighorn's own checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, ConvertedStateWarning, Lamb, Lars
from bighorn._optim.checkpoint_formats import FORMATS
from tests.contract.test_formula_checkpoints import GROUPED_STEPS, NAMES, note
from tests.support import peer_formulas
from tests.support.case_tensors import FEW
from tests.support.cases import LEFT_OUT, Case, Kind, set_gradients
from tests.support.error_checks import refused
from tests.support.optimizer_runs import (
    backward,
    copies,
    model,
    saved_and_loaded,
)
from tests.support.tables import for_every

pytestmark = pytest.mark.long

LEAVES = tuple(leaf for leaf in FEW if leaf.name != "empty")
VALUES = Case("foreign", {}, LEAVES)
PAGE = Path(__file__).parents[2] / "docs" / "presets.md"


@dataclass(frozen=True)
class Run:
    """A peer, and bighorn's optimizer with the options that continue the peer's run."""

    id: str
    name: str
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    kind: Kind = Lamb
    options: Mapping[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    """The text of the note after the peer's name."""
    absent: str | None = None
    without: tuple[str, ...] = ()
    """Options that the checkpoint sets and that some backends do not support."""
    counted: int = 3
    """The step count in the checkpoint."""


def timm(**options: Any) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    return lambda groups: peer_formulas.installed_timm("lamb").Lamb(groups, **options)


def came_pytorch(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    came: torch.optim.Optimizer = pytest.importorskip("came_pytorch").CAME(groups, lr=0.1, clip_threshold=0.8)
    return came


def pytorch_optimizer(kind: str, **options: Any) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        peer: torch.optim.Optimizer = getattr(pytest.importorskip("pytorch_optimizer"), kind)(groups, **options)
        return peer

    return make


ADAMW: dict[str, Any] = {"adam": True, "decay_mode": "decoupled"}
ADAM: dict[str, Any] = {"adam": True, "decay_mode": "l2"}

RUNS = (
    Run("adamw", "torch's AdamW", torch.optim.AdamW, options=ADAMW),
    Run("adamw-ratio", "torch's AdamW", torch.optim.AdamW, options={"adam": True}),
    Run("adam", "torch's Adam", lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.99)), options=ADAM),
    Run("adam-maximize", "torch's Adam", lambda groups: torch.optim.Adam(groups, maximize=True), options=ADAM),
    Run(
        "adamw-amsgrad",
        "torch's AdamW",
        lambda groups: torch.optim.AdamW(groups, amsgrad=True),
        options=ADAMW,
        says=("amsgrad=True is second_moment='amsgrad'",),
        without=("second_moment",),
    ),
    Run(
        "timm",
        "timm's Lamb",
        timm(),
        options={"max_grad_norm": 1.0},
        says=(
            "trust_clip=False is trust_ratio_bounds=None",
            "caution=False is cautious=False",
            "decoupled_decay=False is decay_mode='ratio', corrected_weight_decay=False",
            GROUPED_STEPS,
        ),
        absent=peer_formulas.TIMM_ABSENT,
    ),
    Run(
        "timm-lambc",
        "timm's Lamb",
        timm(trust_clip=True, always_adapt=True, decoupled_decay=True, max_grad_norm=None, grad_averaging=False),
        says=(
            "trust_clip=True is trust_ratio_bounds=(0.0, 1.0)",
            "caution=False is cautious=False",
            "decoupled_decay=True is decay_mode='decoupled'",
            GROUPED_STEPS,
        ),
        absent=peer_formulas.TIMM_ABSENT,
    ),
    Run(
        "timm-cautious",
        "timm's Lamb",
        timm(caution=True, bias_correction=False, max_grad_norm=None),
        options={"trust_ratio_bounds": (0.5, 2.0)},  # the checkpoint overrides them
        says=(
            "trust_clip=False is trust_ratio_bounds=None",
            "caution=True is cautious=True",
            "decoupled_decay=False is decay_mode='ratio', corrected_weight_decay=False",
            GROUPED_STEPS,
        ),
        absent=peer_formulas.TIMM_ABSENT,
        without=("cautious",),
    ),
    Run(
        "timm-lars",
        "timm's Lars",
        lambda groups: peer_formulas.installed_timm("lars").Lars(
            groups, momentum=0.9, nesterov=True, trust_coeff=0.3, trust_clip=True
        ),
        kind=Lars,
        says=(
            "trust_coeff=0.3 is trust_coefficient=0.3",
            "its state means lr_in_momentum=False. Note: checkpoints of timm's Lars do not tell the steps that it has "
            "made, of which one is counted",
        ),
        absent=peer_formulas.TIMM_ABSENT,
        counted=1,
    ),
    Run(
        "came",
        "came-pytorch's CAME",
        came_pytorch,
        kind=Came,
        options={"lr": 7.0},
        says=(
            "its state means factor='last_two'. Note: checkpoints of came-pytorch's CAME do not tell OneTrainer's "
            "use_cautious and stochastic_rounding, here cautious and weight_rounding",
        ),
    ),
    Run(
        "pytorch-optimizer-came",
        "pytorch_optimizer's CAME",
        pytorch_optimizer("CAME", eps1=1e-20, eps2=1e-14, foreach=False),
        kind=Came,
        options={"lr": 7.0},
        says=(
            GROUPED_STEPS,
            "its state means factor='last_two'. Note: checkpoints of pytorch_optimizer's CAME do not tell "
            "clip_threshold and maximize",
        ),
    ),
    *(
        Run(
            f"pytorch-optimizer-lamb-{decay_mode}",
            "pytorch_optimizer's Lamb",
            pytorch_optimizer("Lamb", adam_debias=True, weight_decouple=decay_mode == "decoupled", foreach=False),
            options={"bias_correction": False, "weight_norm_bounds": (0.0, 10.0)},
            says=(
                f"weight_decouple={decay_mode == 'decoupled'} is decay_mode='{decay_mode}'",
                f"{GROUPED_STEPS}. Note: checkpoints of pytorch_optimizer's Lamb do not tell pre_norm and maximize; "
                "without adam_debias it divides lr by 1 - beta1^t, which is 1 after 100 steps",
            ),
        )
        for decay_mode in ("decoupled", "ratio")
    ),
)


def in_groups(parameters: list[Parameter]) -> list[dict[str, Any]]:
    """Return two groups whose options differ."""
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    return [{"params": decayed, "lr": 0.1, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]


def go(optimizer: torch.optim.Optimizer, parameters: list[Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(parameters, VALUES.gradients(step))
        optimizer.step()


def bare(parameters: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in in_groups(parameters)]


def trained(run: Run, steps: int = 3) -> tuple[list[Parameter], torch.optim.Optimizer]:
    if run.absent:
        pytest.skip(run.absent)
    parameters = VALUES.parameters()
    theirs = run.make(in_groups(parameters))
    go(theirs, parameters, range(steps))
    return parameters, theirs


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_a_run_goes_on_as_it_would_have_gone_on_there(run: Run, backend: str) -> None:
    if set(run.without) & set(LEFT_OUT.get(backend, ())):
        pytest.skip(f"{backend} leaves out {run.without}")
    theirs, peer = trained(run)
    ours = copies(theirs)
    optimizer = run.kind(bare(ours), backend=backend, **run.options)
    with pytest.warns(ConvertedStateWarning) as caught:
        optimizer.load_state_dict(saved_and_loaded(peer.state_dict()))
    assert [str(warning.message) for warning in caught] == [
        "; ".join([f"state_dict is a checkpoint of {run.name} (2 groups), and was converted", *run.says])
    ]
    go(optimizer, ours, range(3, 6))
    go(peer, theirs, range(3, 6))
    for leaf, a, b in zip(LEAVES, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=leaf.name)
        assert optimizer.state[a]["step"] == 3 + run.counted


# ---- the note ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        ("adamw", {}, ["adam=False stays, where torch's AdamW has True"]),
        (
            "adamw",
            {"adam": True, "decay_mode": "l2"},
            ["decay_mode='l2' stays, where torch's AdamW has 'decoupled' or"],
        ),
        ("adam", {"adam": True}, ["decay_mode='ratio' stays, where torch's Adam has 'l2'"]),
        (
            "adam",
            {"adam": True, "decay_mode": "l2", "second_moment": "amsgrad", "bias_correction": False},
            ["bias_correction=False stays", "second_moment='amsgrad' stays, where torch's Adam has 'adam'"],
        ),
        ("timm", {}, ["max_grad_norm=1.0 is for the constructor, which was given None"]),
        ("timm-lambc", {"max_grad_norm": 2.0}, ["max_grad_norm=None is for the constructor, which was given 2.0"]),
        ("timm", {"max_grad_norm": 1.0, "adam": True}, ["adam=True stays, where timm's Lamb has False"]),
        (
            "came",
            {"lr": 1.0, "decay_rate": 0.8},
            ["decay_rate=0.8 stays, where came-pytorch's CAME has None", "do not tell OneTrainer's use_cautious"],
        ),
    ],
)
def test_the_note_says_in_what_the_next_steps_will_differ(run: str, options: Any, says: list[str]) -> None:
    row = next(each for each in RUNS if each.id == run)
    parameters, peer = trained(row, steps=1)
    _, *notes = note(row.kind(bare(copies(parameters)), **options), saved_and_loaded(peer.state_dict())).split(
        " Note: "
    )
    assert len(notes) == len(says)
    assert all(said in text for said, text in zip(says, notes, strict=True))


def test_groups_of_torch_before_2_7_do_not_tell_adam_from_adamw() -> None:
    parameters, peer = trained(RUNS[0], steps=1)
    state = copy.deepcopy(peer.state_dict())
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    optimizer = Lamb(bare(copies(parameters)), adam=True)
    assert 'torch\'s Adam or AdamW do not tell its decay_mode, "decoupled" for AdamW' in note(optimizer, state)


def test_every_kind_of_checkpoint_is_on_the_page() -> None:
    names = {run.name for run in RUNS} | NAMES | {"torch's Adam or AdamW", "LAMBrrr's Lamb"}
    assert {row.name for row in FORMATS} == names
    for row in FORMATS:
        assert row.name in PAGE.read_text()


# ---- converted values and exceptions ----------------------------------------------------------------------------


def after_adamw(**options: Any) -> tuple[list[Parameter], torch.optim.AdamW]:
    """Return parameters after steps of torch's AdamW whose last gradients are much smaller than the first."""
    torch.manual_seed(13)
    parameters = [Parameter(torch.randn(7, 3)), Parameter(torch.full((9,), 1e-20))]
    adamw = torch.optim.AdamW([{"params": [p]} for p in parameters], lr=0.01, **options)
    for scale in (1.0, 1e-3):
        for parameter in parameters:
            parameter.grad = scale * torch.randn_like(parameter)
        adamw.step()
    return parameters, adamw


def test_a_checkpoint_of_torchs_adamw_changes_what_it_names_and_nothing_else(backend: str) -> None:
    parameters, adamw = after_adamw(weight_decay=0.2, maximize=True)
    own = {"adapt": False, "decay_mode": "l2", "bias_correction": "lr"}
    groups: list[dict[str, Any]] = [{"params": [parameters[0]], **own}, {"params": [parameters[1]]}]
    optimizer = Lamb(groups, lr=7.0, trust_ratio_bounds=(0.0, 2.0), backend=backend)
    keys = optimizer.param_groups[0].keys()
    note(optimizer, saved_and_loaded(adamw.state_dict()))
    first, second = optimizer.param_groups
    assert first.keys() == second.keys() == keys
    assert {key: first[key] for key in own} == own
    assert (second["adapt"], second["decay_mode"], second["bias_correction"]) == (True, "ratio", True)
    for group in (first, second):
        assert (group["lr"], group["weight_decay"], group["maximize"]) == (0.01, 0.2, True)
        assert group["trust_ratio_bounds"] == (0.0, 2.0)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [3, 3]


def test_amsgrad_starts_from_the_second_moment_if_there_is_no_maximum() -> None:
    for keep in (True, False):
        parameters, adamw = after_adamw(amsgrad=True)
        state = copy.deepcopy(adamw.state_dict())
        for each in state["state"].values():
            assert not each["max_exp_avg_sq"].equal(each["exp_avg_sq"])
            if not keep:
                del each["max_exp_avg_sq"]
        optimizer = Lamb([{"params": [p]} for p in parameters], second_moment="amsgrad")
        note(optimizer, state)
        assert all(each["max_exp_avg_sq"].equal(each["exp_avg_sq"]) != keep for each in optimizer.state.values())


def test_a_fresh_checkpoint_and_parameters_without_state(backend: str) -> None:
    """The peer has not stepped yet, or some of its parameters have never had a gradient."""
    parameters = VALUES.parameters()
    optimizer = Lamb(bare(parameters), backend=backend, **ADAMW)
    note(optimizer, torch.optim.AdamW(in_groups(copies(parameters))).state_dict())
    assert not optimizer.state
    assert [group["schedule_step"] for group in optimizer.param_groups] == [0, 0]
    go(optimizer, parameters, range(1))
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


@pytest.mark.filterwarnings("error")
def test_what_cannot_be_gone_on_with_is_refused_and_changes_nothing() -> None:
    theirs = VALUES.parameters()
    adam = torch.optim.Adam(in_groups(theirs))
    go(adam, theirs, range(1))
    parameters = copies(theirs)
    came = Came(bare(parameters), lr=0.1)
    go(came, parameters, range(1))
    before = copy.deepcopy(came.state_dict())
    with pytest.raises(ValueError, match="a checkpoint of torch's Adam, whose state is not Came's: load it into Lamb"):
        came.load_state_dict(adam.state_dict())
    lamb = Lamb(bare(copies(theirs)))
    unknown = copy.deepcopy(adam.state_dict())
    for group in unknown["param_groups"]:
        group["lookahead"] = group.pop("amsgrad")
    with pytest.raises(ValueError, match=r"param_groups\[0\].*unknown here, .*: the state is another"):
        lamb.load_state_dict(unknown)
    with pytest.raises(ConvertedStateWarning):  # if the warning is an error, the state stays as it was
        lamb.load_state_dict(adam.state_dict())
    assert not lamb.state
    assert repr(came.state_dict()) == repr(before)


@for_every("kind", [Lamb, Lars, Came])
def test_groups_like_torchaos_are_refused(kind: Kind) -> None:
    """They have no "foreach" or "maximize", and a moment is a tensor of codes that cannot be copied."""
    parameters, adamw = after_adamw()
    state = copy.deepcopy(adamw.state_dict())
    keys = ("lr", "betas", "eps", "weight_decay", "amsgrad", "params")
    state["param_groups"] = [{key: group[key] for key in keys} for group in state["param_groups"]]
    optimizer = kind([{"params": [p]} for p in parameters], lr=0.1)
    with pytest.raises(ValueError, match="no key of Bighorn's: the state is another optimizer's"):
        optimizer.load_state_dict(state)
    assert not optimizer.state


def test_a_converted_checkpoint_keeps_keys_of_others_and_names_them() -> None:
    theirs = VALUES.parameters()
    adamw = torch.optim.AdamW(in_groups(theirs))
    go(adamw, theirs, range(1))
    for group in adamw.param_groups:
        group |= {"lr_multiplier": 0.5, "is_last_layer": False}
    parameters = copies(theirs)
    lamb = Lamb([{**group, "lr_multiplier": 1.0} for group in bare(parameters)], **ADAMW)
    with pytest.warns(ConvertedStateWarning, match=r"Note: 'is_last_layer' of its groups are kept"):
        lamb.load_state_dict(adamw.state_dict())
    assert [group["lr_multiplier"] for group in lamb.param_groups] == [0.5] * len(lamb.param_groups)


PEERS: dict[str, Callable[..., Any]] = {
    "CAME": lambda **options: pytorch_optimizer("CAME", **options),
    "Lamb": lambda **options: pytorch_optimizer("Lamb", **options),
    "timm": lambda **options: timm(decoupled_decay=True, **options),
}


@for_every(
    ("peer", "options", "message"),
    [
        ("CAME", {"weight_decouple": False}, "weight_decouple=False, which is not known: .*decoupled decay alone"),
        ("CAME", {"ams_bound": True}, "ams_bound=True, which is not known"),
        ("CAME", {"fixed_decay": True}, "fixed_decay=True, which is not known: give weight_decay a schedule"),
        ("Lamb", {"rectify": True}, "rectify=True, which is not known"),
        ("Lamb", {"fixed_decay": True}, "fixed_decay=True, which is not known"),
    ],
)
def test_options_without_a_counterpart_are_refused(peer: str, options: Any, message: str) -> None:
    if peer == "timm" and peer_formulas.TIMM_ABSENT:
        pytest.skip(peer_formulas.TIMM_ABSENT)
    parameters = VALUES.parameters()
    theirs = PEERS[peer](**options)(in_groups(parameters))
    ours = Came(bare(parameters), lr=0.1) if peer == "CAME" else Lamb(bare(parameters))
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(theirs.state_dict())


def test_pytorch_optimizers_lamb_adds_eps_to_the_norm_in_its_ratio() -> None:
    """docs/presets.md has the difference; without it the steps are equal."""
    theirs, ours = Parameter(torch.ones(4, 3, dtype=torch.float64)), Parameter(torch.ones(4, 3, dtype=torch.float64))
    theirs.grad = ours.grad = torch.full((4, 3), 1e-3, dtype=torch.float64)
    options: dict[str, Any] = {"lr": 0.1, "eps": 1e-3}
    peer = pytest.importorskip("pytorch_optimizer").Lamb([theirs], adam_debias=True, foreach=False, **options)
    optimizer = Lamb([ours], bias_correction=False, weight_norm_bounds=(0, 10), **options)
    peer.step()
    optimizer.step()
    share = 1 / (1 + 1e-3 / optimizer.telemetry().update_norm.item())
    assert 1 - share > 1e-3
    torch.testing.assert_close(theirs - 1, (ours - 1) * share, rtol=1e-6, atol=0)


# ---- bighorn's own ----------------------------------------------------------------------------------------------


def test_a_state_without_an_entry_of_ours_is_refused(kind: Kind) -> None:
    """Such entries were once silently kept and ignored."""
    param = Parameter(torch.ones(3))
    optimizer = kind([("w", param)], lr=0.1)
    saved = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": optimizer.state_dict()["param_groups"]}
    with refused([param], optimizer, ValueError, "state of w has 'momentum_buffer', and no entry of Bighorn's"):
        optimizer.load_state_dict(saved)


def test_the_format_version_is_in_every_group_and_stays_there(kind: Kind) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    net = model()
    optimizer = kind(net.named_parameters(), lr=0.1)
    backward(net)
    optimizer.step()
    optimizer.add_param_group({"params": [("added", Parameter(torch.ones(2)))]})
    assert [group["format_version"] for group in saved_and_loaded(optimizer.state_dict())["param_groups"]] == [1, 1]
    assert kind(optimizer.param_groups, lr=0.1).param_groups[0]["format_version"] == 1
    one = kind(net.named_parameters(), lr=0.1)
    flat: dict[str, Any] = get_optimizer_state_dict(
        net, one, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert {flat[f"param_groups.{name}.format_version"] for name, _ in net.named_parameters()} == {1}
