"""Options that are refused: bad values and unknown names, at construction, in groups and later."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from bighorn import PRESETS, Came, Lamb, Lars
from bighorn.schedules import WarmUp
from tests.support.cases import KINDS, Kind
from tests.support.error_checks import refused, same, snapshot, stepped, weights
from tests.support.tables import for_every


def test_the_snapshot_sees_a_change(kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    for change in (
        lambda: parameters[2].data.add_(1),
        lambda: optimizer.state[parameters[0]]["step"].add_(1),
        lambda: optimizer.state.pop(parameters[1]),
        lambda: optimizer.param_groups[0].update(lr=0.2),
    ):
        before = snapshot(parameters, optimizer)
        assert same(snapshot(parameters, optimizer), before)
        change()
        assert not same(snapshot(parameters, optimizer), before)


Value: TypeAlias = "tuple[str, type[Exception], list[Any]]"

VALUES: list[Value] = [
    ("lr", ValueError, [-0.1, math.nan, math.inf, 10**400, *map(torch.tensor, (-0.1, math.nan)), torch.ones(2, 2)]),
    ("lr", ValueError, [[0.1, math.nan]]),
    ("lr", TypeError, ["0.1", True]),
    ("weight_decay", ValueError, [-0.1, math.nan, math.inf]),
    ("weight_decay", TypeError, ["0.1"]),
    ("maximize", TypeError, [1]),
    ("stacked", TypeError, [2]),
    ("grad_centralization", ValueError, ["convolution"]),
    ("state_dtype", ValueError, [torch.int32, torch.complex64, torch.float64, "bf16", "uint8"]),
    ("min_8bit_size", ValueError, [-1]),
    ("min_8bit_size", TypeError, [4000.5, True]),
    ("weight_rounding", ValueError, ["stocastic", None]),
    ("rounding_seed", ValueError, [-1, 2**63]),
    ("rounding_seed", TypeError, [0.5]),
]
OF_LAMB: list[Value] = [
    ("lr", TypeError, [None]),
    ("betas", ValueError, [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, -1e-9), (math.nan, 0.9), (0.9, math.nan)]),
    ("betas", TypeError, [0.9, ("a", "b"), None, np.array([0.9, 0.99])]),
    ("eps", ValueError, [-1e-9, math.nan, math.inf]),
    ("eps", TypeError, ["small"]),
    ("adam", TypeError, [1, "yes"]),
    ("adapt", TypeError, ["no"]),
    ("always_adapt", TypeError, [None]),
    ("grad_averaging", TypeError, [0]),
    ("cautious", TypeError, ["very"]),
    ("bias_correction", ValueError, ["v5"]),
    ("decay_mode", ValueError, ["decoupeld"]),
    ("second_moment", ValueError, ["amsgrd"]),
    ("weight_norm_bounds", ValueError, [(10, 0), (-1, 10), (0, math.nan), (0, 0)]),
    ("weight_norm_bounds", TypeError, [10, ("0", "10")]),
    ("trust_ratio_bounds", ValueError, [(1, 0.5)]),
    ("trust_ratio_bounds", TypeError, ["0,1"]),
]
OF_CAME: list[Value] = [
    ("betas", ValueError, [(0.0, 0.999, 0.9999), (1.0, 0.999, 0.9999), (0.9, 1.0, 0.9999), (0.9, 0.999, 1.0)]),
    ("betas", ValueError, [(0.9, -1e-9, 0.9999), (0.9, 0.999, math.nan)]),
    ("betas", TypeError, [(0.9, 0.999), ("a", "b", "c"), None]),
    ("eps", ValueError, [(0.0, 1e-16), (1e-30, 0), (1e-44, 1e-16), (1e-30, 1e-39), (1e-30, -1e-16), (math.inf, 1e-16)]),
    ("eps", TypeError, [(1e-30, "small"), (1e-30, 1e-3, 1e-16), 1e-30]),
    ("clip_threshold", ValueError, [0.0, -1.0, math.inf]),
    ("clip_threshold", TypeError, [None]),
    ("factor", ValueError, ["matrx", None]),
    ("decay_rate", ValueError, [-0.8, math.nan]),
    ("decay_rate", TypeError, ["0.8"]),
    ("scale_parameter", TypeError, [1]),
    ("scale_eps", ValueError, [0.0]),
    ("scale_eps", TypeError, ["1e-3"]),
    ("bias_correction", TypeError, ["lr"]),
    ("cautious", TypeError, ["very"]),
]
OF_LARS: list[Value] = [
    ("lr", TypeError, [None]),
    ("momentum", ValueError, [1.0, -0.1, math.nan]),
    ("momentum", TypeError, ["0.9"]),
    ("nesterov", TypeError, [1]),
    ("trust_coefficient", ValueError, [0.0, math.inf]),
    ("trust_coefficient", TypeError, [None]),
    ("eps", ValueError, [-1e-9]),
    ("eps", TypeError, ["small"]),
    ("denominator", ValueError, ["some", None]),
    ("trust_clip", TypeError, [1]),
    ("lr_in_momentum", TypeError, ["no"]),
    ("always_adapt", TypeError, [None]),
    ("adapt", TypeError, ["no"]),
]
WHOLE: list[Value] = [
    ("max_grad_norm", ValueError, [0.0, -1.0, math.nan]),
    ("max_grad_norm", TypeError, ["1"]),
    ("skip_nonfinite", TypeError, [1]),
    ("backend", ValueError, ["cuda", "foreech"]),
    ("exclude_from_weight_decay", TypeError, ["bias", [1], torch.nn.LayerNorm]),
    ("exclude_from_weight_decay", ValueError, [["("]]),
    ("names", TypeError, [3, ["a", "b"]]),
    ("grad_norm_group", TypeError, ["WORLD", 0]),
]
NO_ADAPTATION: list[Value] = [
    ("exclude_from_layer_adaptation", TypeError, [3]),
    ("exclude_from_layer_adaptation", ValueError, [["[a"]]),
]
OWN_VALUES: dict[Kind, list[Value]] = {Lamb: VALUES + OF_LAMB, Came: VALUES + OF_CAME, Lars: VALUES + OF_LARS}
OWN_WHOLE: dict[Kind, list[Value]] = {
    Lamb: WHOLE + NO_ADAPTATION,
    Came: [*WHOLE, ("lr", ValueError, [None])],
    Lars: WHOLE + NO_ADAPTATION,
}


def rows(table: list[Value]) -> Iterator[tuple[str, type[Exception], Any]]:
    return ((name, error, value) for name, error, values in table for value in values)


@for_every(
    ("kind", "name", "error", "value"),
    [(kind, *row) for kind in KINDS for row in rows(OWN_VALUES[kind] + OWN_WHOLE[kind])],
)
def test_a_bad_value_at_construction(name: str, value: Any, error: type[Exception], kind: Kind) -> None:
    of_group = {name: value} if name in kind.algorithm.group_only else {}
    with pytest.raises(error, match=name):
        kind([{"params": [("a", weights()[0])], **of_group}], **{"lr": 0.1, **({} if of_group else {name: value})})


@for_every(
    ("kind", "betas", "message"),
    [
        (Came, (0.0, 0.999, 0.9999), r"^betas\[0\]=0.0 .*misses the update, and without momentum it never does.*0\.9$"),
        (Came, (0.9, 0.999, 1), r"^betas\[2\]=1 .*would stay at 0.*in \[0, 1\)"),
        (Came, (0.9, 0.99), r"^betas must be 3 numbers \(.*\), not \(0.9, 0.99\): beta3 is missing, such as 0.9999$"),
        (Lamb, (0.9, 0.99, 0.999), r"^betas must be 2 numbers \(.*\), not \(0.9, 0.99, 0.999\): beta3 is CAME's$"),
    ],
)
def test_betas_are_refused_with_the_reason(kind: Kind, betas: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kind(weights(), lr=0.1, betas=betas)


@for_every(("kind", "name", "error", "value"), [(kind, *row) for kind in KINDS for row in rows(OWN_VALUES[kind])])
def test_a_bad_value_in_a_group(name: str, value: Any, error: type[Exception], kind: Kind) -> None:
    """It is given, added, or written later; a step with the good value is taken before and after it."""
    with pytest.raises(error, match=name):
        kind([{"params": weights(), name: value}], lr=0.1)
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, error, name):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: value})
    group = optimizer.param_groups[0]
    good, group[name] = group[name], value
    for method in (optimizer.step, optimizer.explain):
        with refused(parameters, optimizer, error, rf"param_groups\[0\].*{name}"):
            method()
    group[name] = good
    optimizer.step()


def test_a_bad_value_in_the_last_group_stops_the_first(kind: Kind) -> None:
    """It is in a tensor that a program fills later."""
    parameters, optimizer = stepped(kind)
    late = Parameter(torch.ones(3))
    late.grad = torch.ones(3)
    optimizer.add_param_group({"params": [late], "lr": torch.tensor(0.1)})
    optimizer.step()
    optimizer.param_groups[1]["lr"].fill_(-1.0)
    with refused([*parameters, late], optimizer, ValueError, "lr"):
        optimizer.step()


ZEROS: dict[Kind, dict[str, Any]] = {
    Lamb: {"betas": (0, 0), "eps": 0},
    Came: {"betas": (0.9, 0, 0), "decay_rate": 0},
    Lars: {"momentum": 0, "eps": 0, "trust_clip": True},
}


def test_zero_is_allowed_where_it_makes_sense(kind: Kind, backend: str) -> None:
    parameters = weights()
    before = [p.detach().clone() for p in parameters]
    optimizer = kind(parameters, lr=0, weight_decay=0, backend=backend, **ZEROS[kind])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(a.equal(b) for a, b in zip(parameters, before, strict=True))


# ---- unknown names ----------------------------------------------------------------------------------------------


def test_an_option_of_a_group_is_told_where_it_goes(kind: Kind) -> None:
    for name, default in kind.algorithm.group_only.items():
        with pytest.raises(TypeError, match=rf"{name!r}, an option of a group: give \[.*{name!r}: \.\.\."):
            kind(weights(), lr=0.1, **{name: not default})  # type: ignore[arg-type]


def test_an_optimizer_is_made_with_the_options_of_another(kind: Kind) -> None:
    """Avalanche passes `defaults` to its class, and PyKEEN the options of the first group."""
    optimizer = kind(weights(), lr=0.1, weight_decay=0.2, maximize=True)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    for options in (optimizer.defaults, group):
        fresh = kind(weights(), **options)
        assert fresh.defaults == optimizer.defaults
        assert not fresh.state


def test_what_defaults_do_not_hold_is_said_to_be_lost(kind: Kind) -> None:
    net = torch.nn.Linear(3, 2)
    whole: dict[str, Any] = {"max_grad_norm": 1.0, "exclude_from_weight_decay": ["bias"]}
    optimizer = kind(net.named_parameters(), lr=WarmUp(0.1, 2), **whole)
    with pytest.warns(UserWarning, match="^max_grad_norm, exclude_from_weight_decay, schedule of lr of the") as caught:
        kind(net.parameters(), **optimizer.defaults)
    assert caught[0].filename == __file__
    again = kind(net.named_parameters(), **{**optimizer.defaults, "lr": WarmUp(0.1, 2)}, **whole)
    assert again.defaults == optimizer.defaults


@pytest.mark.parametrize(
    ("off", "remedy"),
    [
        ({"adam_w_mode": False}, 'decay_mode="l2" for adam_w_mode=False'),
        ({"debias": False}, "use bias_correction"),
        ({"weight_decouple": False}, 'decay_mode="decoupled"'),
        ({"min_coeff": 0}, "trust_ratio_bounds"),
        ({"clamp_value": 0.0}, "weight_norm_bounds"),
        ({"eps1": 0.0}, "leave it out"),
    ],
)
def test_an_option_of_others_whose_off_means_something_else_is_refused(off: dict[str, Any], remedy: str) -> None:
    """Apex's adam_w_mode=False was once accepted, and decayed as with True."""
    with pytest.raises(TypeError, match=re.escape(remedy)):
        Lamb.like("apex", weights(), **off)


@pytest.mark.parametrize(("preset", "argument"), [(p.name, p.argument) for p in PRESETS if p.argument])
@pytest.mark.parametrize("value", [True, False])
def test_the_argument_of_a_preset_is_refused_beside_it(preset: Any, argument: str, value: bool) -> None:
    with pytest.raises(ValueError, match=f"preset {preset!r} is {argument}=True, got {value}"):
        Lamb.like(preset, weights(), **{argument: value})
    if not value:
        Lamb.like("apex", weights(), **{argument: value})


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        (Came, {"exclude_from_layer_adaptation": "ndim<2"}, "an option of Lamb and Lars but not of Came: leave it out"),
        (Lamb, {"clip_threshold": 1.0}, "an option of Came but not of Lamb: leave it out, or use Came"),
    ],
    indirect=["kind"],
)
def test_an_option_of_another_class_names_the_class(kind: Kind, option: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kind(weights(), lr=0.1, **option)


def test_an_option_of_others_that_is_off_is_taken(kind: Kind) -> None:
    """Torchtitan and NeMo pass `foreach=False` to every optimizer."""
    off: dict[str, Any] = {"foreach": False, "fused": None, "amsgrad": False, "dampening": 0.0}
    unknown: dict[str, Any] = {"use_nvlamb": False, "caution": None}
    optimizer = kind([{"params": weights(), **off}], lr=0.1, **off, **unknown)
    assert off.items() <= optimizer.param_groups[0].items()
    assert not {*off, *unknown} & optimizer.defaults.keys()
    with pytest.raises(TypeError, match="unknown option 'learning_rate'"):
        kind(weights(), lr=0.1, learning_rate=None)  # type: ignore[arg-type]


OF_THE_WHOLE: dict[str, Any] = {
    "max_grad_norm": 2.0,
    "skip_nonfinite": True,
    "backend": "foreach",
    "names": {},
    "exclude_from_weight_decay": ["bias"],
}


@for_every("name", OF_THE_WHOLE)
def test_an_option_of_the_whole_optimizer_is_no_group_key(name: str, kind: Kind) -> None:
    """ZeroRedundancyOptimizer is an exception: it writes the constructor's arguments into every group."""
    with pytest.raises(ValueError, match=rf"^param_groups\[0\] has {name}=.*belongs to the whole optimizer"):
        kind([{"params": weights(), name: OF_THE_WHOLE[name]}], lr=0.1)
    groups = [{"params": weights(), "max_grad_norm": 1.0, "skip_nonfinite": False}]
    optimizer = kind(groups, lr=0.1, max_grad_norm=1.0)
    assert not {"max_grad_norm", "skip_nonfinite"} & optimizer.param_groups[0].keys()


UNFIT: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "float64-int8": (torch.float64, {"state_dtype": "int8"}, 'torch.float64.*state_dtype="int8"'),
    "complex-int8": (torch.complex64, {"state_dtype": "int8"}, 'torch.complex64.*state_dtype="int8"'),
}


@for_every("unfit", UNFIT)
def test_a_precision_that_does_not_fit_the_parameter(unfit: str, kind: Kind) -> None:
    dtype, options, message = UNFIT[unfit]
    check_refused_everywhere(kind, Parameter(torch.ones(64, 64, dtype=dtype)), options, message)


@for_every(
    ("second_moment", "state_dtype", "message"),
    [
        ("amsgrad", "int8", 'int8.*amsgrad.*state_dtype="float32"'),
        ("amsgrad", "int4", 'int4.*amsgrad.*state_dtype="float32"'),
        ("adagrad", "bfloat16", 'bfloat16.*adagrad.*state_dtype="float32" or "int8"'),
    ],
)
def test_a_second_moment_that_a_state_dtype_cannot_keep(second_moment: str, state_dtype: str, message: str) -> None:
    """A sum in bfloat16 was 0.28 of the true one after 10,000 steps."""
    options = {"second_moment": second_moment, "state_dtype": state_dtype}
    check_refused_everywhere(Lamb, Parameter(torch.ones(64, 64)), options, message)


def check_refused_everywhere(kind: Kind, parameter: Parameter, options: dict[str, Any], message: str) -> None:
    """Check that options are refused when they are given, in a checkpoint, or written into a group later."""
    with pytest.raises(ValueError, match=message):
        kind([parameter], lr=0.1, **options)
    optimizer = kind([parameter], lr=0.1)
    with refused([parameter], optimizer, ValueError, message):
        optimizer.add_param_group({"params": [Parameter(parameter.detach().clone())], **options})
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(options)
    with refused([parameter], optimizer, ValueError, message):
        optimizer.load_state_dict(state)
    optimizer.param_groups[0].update(options)
    with refused([parameter], optimizer, ValueError, message):
        optimizer.step()


@pytest.mark.parametrize("kind", [Came], indirect=True)
@pytest.mark.parametrize(
    "change", [{"factor": "last_two"}, {"stacked": True}, {"factor": "last_two", "stacked": True}], ids=str
)
def test_options_that_change_the_shapes_of_statistics_after_a_step(
    change: dict[str, Any], kind: Kind, backend: str
) -> None:
    parameter = Parameter(torch.ones(4, 6, 5))
    optimizer = kind([parameter], lr=0.1, backend=backend)
    parameter.grad = torch.ones(4, 6, 5)
    optimizer.step()
    optimizer.param_groups[0].update(change)
    with refused([parameter], optimizer, ValueError, "exp_avg_sq.*made with other options"):
        optimizer.step()


def test_an_option_of_the_whole_optimizer_written_into_a_group_later(kind: Kind) -> None:
    parameters, optimizer = stepped(kind, max_grad_norm=2.0)
    optimizer.param_groups[0]["max_grad_norm"] = 2.0  # like ZeroRedundancyOptimizer
    optimizer.step()
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with refused(parameters, optimizer, ValueError, r"max_grad_norm=1\.0, which belongs to the whole optimizer"):
        optimizer.step()


@for_every("name", ["lr", "eps", "weight_decay"])
def test_an_option_that_was_removed_from_a_group_is_the_default_again(name: str, kind: Kind) -> None:
    _, optimizer = stepped(kind)
    default = optimizer.defaults[name]
    del optimizer.param_groups[0][name]
    optimizer.step()
    assert optimizer.param_groups[0][name] == default
