"""Options that are refused: bad values and unknown names, at construction, in groups and later."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from bighorn import PRESETS, Came, Lamb, Lars
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


Value: TypeAlias = "tuple[str, Any, type[Exception]]"

VALUES: list[Value] = [
    ("lr", -0.1, ValueError),
    ("lr", math.nan, ValueError),
    ("lr", math.inf, ValueError),
    ("lr", 10**400, ValueError),
    ("lr", "0.1", TypeError),
    ("lr", True, TypeError),
    ("lr", torch.tensor(-0.1), ValueError),
    ("lr", torch.tensor(math.nan), ValueError),
    ("lr", torch.ones(2, 2), ValueError),
    ("weight_decay", -0.1, ValueError),
    ("weight_decay", math.nan, ValueError),
    ("weight_decay", math.inf, ValueError),
    ("weight_decay", "0.1", TypeError),
    ("maximize", 1, TypeError),
    ("stacked", 2, TypeError),
    ("grad_centralization", "convolution", ValueError),
    ("state_dtype", torch.int32, ValueError),
    ("state_dtype", torch.complex64, ValueError),
    ("state_dtype", "bf16", ValueError),
    ("state_dtype", "uint8", ValueError),
    ("state_dtype", torch.float64, ValueError),
    ("min_8bit_size", -1, ValueError),
    ("min_8bit_size", 4000.5, TypeError),
    ("min_8bit_size", True, TypeError),
    ("weight_rounding", "stocastic", ValueError),
    ("weight_rounding", None, ValueError),
    ("weight_rounding", "kahan", ValueError),  # parameters are float32
    ("rounding_seed", -1, ValueError),
    ("rounding_seed", 2**63, ValueError),
    ("rounding_seed", 0.5, TypeError),
]
OF_LAMB: list[Value] = [
    ("lr", None, TypeError),
    ("betas", (1.0, 0.9), ValueError),
    ("betas", (0.9, 1.0), ValueError),
    ("betas", (-0.1, 0.9), ValueError),
    ("betas", (0.9, -1e-9), ValueError),
    ("betas", (0.9, 1.5), ValueError),
    ("betas", (math.nan, 0.9), ValueError),
    ("betas", (0.9, math.nan), ValueError),
    ("betas", 0.9, TypeError),
    ("betas", ("a", "b"), TypeError),
    ("betas", None, TypeError),
    ("betas", np.array([0.9, 0.99]), TypeError),
    ("eps", -1e-9, ValueError),
    ("eps", math.nan, ValueError),
    ("eps", math.inf, ValueError),
    ("eps", "small", TypeError),
    ("adam", 1, TypeError),
    ("adam", "yes", TypeError),
    ("adapt", "no", TypeError),
    ("always_adapt", None, TypeError),
    ("grad_averaging", 0, TypeError),
    ("cautious", "very", TypeError),
    ("bias_correction", "v5", ValueError),
    ("decay_mode", "decoupeld", ValueError),
    ("second_moment", "amsgrd", ValueError),
    ("weight_norm_bounds", (10, 0), ValueError),
    ("weight_norm_bounds", (-1, 10), ValueError),
    ("weight_norm_bounds", (0, math.nan), ValueError),
    ("weight_norm_bounds", (0, 0), ValueError),
    ("weight_norm_bounds", 10, TypeError),
    ("weight_norm_bounds", ("0", "10"), TypeError),
    ("trust_ratio_bounds", (1, 0.5), ValueError),
    ("trust_ratio_bounds", (-1, 1), ValueError),
    ("trust_ratio_bounds", (0, 0), ValueError),
    ("trust_ratio_bounds", (math.nan, 1), ValueError),
    ("trust_ratio_bounds", "0,1", TypeError),
]
OF_CAME: list[Value] = [
    ("betas", (0.0, 0.999, 0.9999), ValueError),
    ("betas", (1.0, 0.999, 0.9999), ValueError),
    ("betas", (0.9, 1.0, 0.9999), ValueError),
    ("betas", (0.9, 0.999, 1.0), ValueError),
    ("betas", (0.9, -1e-9, 0.9999), ValueError),
    ("betas", (0.9, 0.999, math.nan), ValueError),
    ("betas", (0.9, 0.999), TypeError),
    ("betas", ("a", "b", "c"), TypeError),
    ("betas", None, TypeError),
    ("eps", (0.0, 1e-16), ValueError),
    ("eps", (1e-30, 0), ValueError),
    ("eps", (1e-44, 1e-16), ValueError),
    ("eps", (1e-30, 1e-39), ValueError),
    ("eps", (1e-30, -1e-16), ValueError),
    ("eps", (math.inf, 1e-16), ValueError),
    ("eps", (1e-30, "small"), TypeError),
    ("eps", (1e-30, 1e-3, 1e-16), TypeError),
    ("eps", 1e-30, TypeError),
    ("clip_threshold", 0.0, ValueError),
    ("clip_threshold", -1.0, ValueError),
    ("clip_threshold", math.inf, ValueError),
    ("clip_threshold", None, TypeError),
    ("factor", "matrx", ValueError),
    ("factor", None, ValueError),
    ("decay_rate", -0.8, ValueError),
    ("decay_rate", math.nan, ValueError),
    ("decay_rate", "0.8", TypeError),
    ("scale_parameter", 1, TypeError),
    ("scale_eps", 0.0, ValueError),
    ("scale_eps", "1e-3", TypeError),
    ("bias_correction", "lr", TypeError),
]
OF_LARS: list[Value] = [
    ("lr", None, TypeError),
    ("momentum", 1.0, ValueError),
    ("momentum", -0.1, ValueError),
    ("momentum", math.nan, ValueError),
    ("momentum", "0.9", TypeError),
    ("nesterov", 1, TypeError),
    ("trust_coefficient", 0.0, ValueError),
    ("trust_coefficient", math.inf, ValueError),
    ("trust_coefficient", None, TypeError),
    ("eps", -1e-9, ValueError),
    ("eps", "small", TypeError),
    ("denominator", "some", ValueError),
    ("denominator", None, ValueError),
    ("trust_clip", 1, TypeError),
    ("lr_in_momentum", "no", TypeError),
    ("always_adapt", None, TypeError),
    ("adapt", "no", TypeError),
]
OWN_VALUES: dict[Kind, list[Value]] = {
    Lamb: [*VALUES, *OF_LAMB],
    Came: [*VALUES, *OF_CAME],
    Lars: [*VALUES, *OF_LARS],
}
WHOLE: list[Value] = [
    ("max_grad_norm", 0.0, ValueError),
    ("max_grad_norm", -1.0, ValueError),
    ("max_grad_norm", math.nan, ValueError),
    ("max_grad_norm", "1", TypeError),
    ("skip_nonfinite", 1, TypeError),
    ("backend", "cuda", ValueError),
    ("backend", "foreech", ValueError),
    ("exclude_from_weight_decay", "bias", TypeError),
    ("exclude_from_weight_decay", [1], TypeError),
    ("exclude_from_weight_decay", ["("], ValueError),
    ("exclude_from_weight_decay", torch.nn.LayerNorm, TypeError),
    ("names", 3, TypeError),
    ("names", ["a", "b"], TypeError),
    ("grad_norm_group", "WORLD", TypeError),
    ("grad_norm_group", 0, TypeError),
]
OWN_WHOLE: dict[Kind, list[Value]] = {
    Lamb: [
        *WHOLE,
        ("exclude_from_layer_adaptation", 3, TypeError),
        ("exclude_from_layer_adaptation", ["[a"], ValueError),
    ],
    Came: [
        *WHOLE,
        ("lr", None, ValueError),
    ],
    Lars: [*WHOLE, ("exclude_from_layer_adaptation", 3, TypeError)],
}


@for_every(
    ("kind", "name", "value", "error"), [(kind, *row) for kind in KINDS for row in OWN_VALUES[kind] + OWN_WHOLE[kind]]
)
def test_a_bad_value_at_construction(name: str, value: Any, error: type[Exception], kind: Kind) -> None:
    of_group = {name: value} if name in kind.algorithm.group_only else {}
    with pytest.raises(error, match=name):
        kind([{"params": [("a", weights()[0])], **of_group}], **{"lr": 0.1, **({} if of_group else {name: value})})


@pytest.mark.parametrize(
    ("betas", "reason"),
    [
        ((0.0, 0.999, 0.9999), r"^betas\[0\]=0.0 .*misses the update, and without momentum it never does.*0\.9$"),
        ((0.9, 0.999, 1.0), r"^betas\[2\]=1\.0 .*would stay at 0.*in \[0, 1\)"),
        ((0.9, 0.999, 1), r"^betas\[2\]=1 .*would stay at 0.*in \[0, 1\)"),
    ],
)
def test_betas_that_came_cannot_divide_by_are_refused_with_the_reason(betas: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Came(weights(), lr=0.1, betas=betas)


@for_every(
    ("kind", "betas", "which"),
    [(Lamb, (0.9, 0.99, 0.999), "beta3 is CAME's"), (Came, (0.9, 0.99), "beta3 is missing, such as 0.9999")],
)
def test_betas_of_the_other_optimizer_are_refused_with_the_one_that_differs(kind: Kind, betas: Any, which: str) -> None:
    with pytest.raises(TypeError, match=rf"^betas must be \d numbers \(.*\), not {re.escape(repr(betas))}: {which}$"):
        kind(weights(), lr=0.1, betas=betas)


def refuse_each(kind: Kind, refuse: Callable[[str, Any, type[Exception]], None]) -> None:
    """Check the refusal of each bad value, and fail with all wrong refusals."""
    found = []
    for name, value, error in OWN_VALUES[kind]:
        try:
            refuse(name, value, error)
        except (Exception, pytest.fail.Exception) as failure:
            found.append(f"{name}={value!r}: {type(failure).__name__}: {failure}")
    assert not found, "\n".join(["", *found])


def test_bad_values_in_a_group(kind: Kind) -> None:
    parameters, optimizer = stepped(kind)

    def refuse(name: str, value: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=name):
            kind([{"params": weights(), name: value}], lr=0.1)
        with refused(parameters, optimizer, error, name):
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: value})

    refuse_each(kind, refuse)


def test_bad_values_written_into_a_group_later(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    group = optimizer.param_groups[0]

    def refuse(name: str, value: Any, error: type[Exception]) -> None:
        optimizer.step()  # with the good value, also after a refusal
        good, group[name] = group[name], value
        try:
            for method in (optimizer.step, optimizer.explain):
                with refused(parameters, optimizer, error, name):
                    method()
        finally:
            group[name] = good

    refuse_each(kind, refuse)


def test_a_bad_value_written_later_is_told_with_its_group(kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    for name, value in (("lr", "0.1"), ("lr", [0.1, math.nan]), ("maximize", 1)):
        before = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with refused(parameters, optimizer, (TypeError, ValueError), rf"param_groups\[0\]: {name}"):
            optimizer.step()
        optimizer.param_groups[0][name] = before


def test_a_bad_value_in_the_last_group_stops_the_first(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    late = Parameter(torch.ones(3))
    late.grad = torch.ones(3)
    optimizer.add_param_group({"params": [late]})
    optimizer.param_groups[1]["lr"] = -1.0
    with refused([*parameters, late], optimizer, ValueError, "lr"):
        optimizer.step()


def test_a_negative_tensor_lr_filled_in_later(kind: Kind, backend: str) -> None:
    parameters = weights()
    optimizer = kind(parameters, lr=torch.tensor(0.1), backend=backend)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    with refused(parameters, optimizer, ValueError, "lr"):
        optimizer.step()


def test_the_message_tells_the_value(kind: Kind) -> None:
    with pytest.raises(ValueError, match=re.escape("-0.125")):
        kind(weights(), lr=-0.125)
    with pytest.raises(ValueError, match=re.escape("1.25")):
        kind(weights(), lr=0.1, max_grad_norm=-1.25)


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

MISSPELT = {"beta": "betas", "weigth_decay": "weight_decay", "max_grad_nrom": "max_grad_norm", "learning_rate": "lr"}
OWN_MISSPELT = {
    Lamb: MISSPELT | {"trust_ratio_bound": "trust_ratio_bounds"},
    Came: MISSPELT | {"factr": "factor", "clip_treshold": "clip_threshold", "exclude_from_layer_adaptation": ""},
    Lars: MISSPELT
    | {"beta": "", "trust_coeficient": "trust_coefficient", "momentun": "momentum", "nestrov": "nesterov"},
}


@for_every(("kind", "name"), [(kind, name) for kind in KINDS for name in OWN_MISSPELT[kind]])
def test_an_unknown_option_suggests_the_nearest(kind: Kind, name: str) -> None:
    nearest = OWN_MISSPELT[kind][name]
    with pytest.raises(TypeError, match=f"(?s){name!r}.*{nearest and repr(nearest)}"):
        kind(weights(), lr=0.1, **{name: 0.1})  # type: ignore[arg-type]


def test_an_option_of_a_group_is_told_where_it_goes(kind: Kind) -> None:
    for name in kind.algorithm.group_only:
        with pytest.raises(TypeError, match=rf"{name!r}, an option of a group: give \[.*{name!r}: \.\.\."):
            kind(weights(), lr=0.1, **{name: True})  # type: ignore[arg-type]


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
    optimizer = kind([{"params": weights(), **off}], lr=0.1, **off)
    assert off.items() <= optimizer.param_groups[0].items()
    assert not off.keys() & optimizer.defaults.keys()
    with pytest.raises(TypeError, match=rf"'foreach', an option of torch\.optim but not of {kind.__name__}"):
        kind(weights(), lr=0.1, foreach=True)  # type: ignore[arg-type]
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


@for_every("name", ["foreach", "fused", "capturable", "differentiable"])
def test_torchs_switches_name_ours(name: str, kind: Kind) -> None:
    switch: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=f"(?s){name}.*backend"):
        kind(weights(), lr=0.1, **switch)


UNFIT: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "float64-int8": (torch.float64, {"state_dtype": "int8"}, 'torch.float64.*state_dtype="int8"'),
    "complex-int8": (torch.complex64, {"state_dtype": "int8"}, 'torch.complex64.*state_dtype="int8"'),
    "float32-master": (torch.float32, {"weight_rounding": "master"}, 'torch.float32.*weight_rounding="master"'),
    "float32-kahan": (torch.float32, {"weight_rounding": "kahan"}, 'torch.float32.*weight_rounding="kahan"'),
    "float64-stochastic": (torch.float64, {"weight_rounding": "stochastic"}, "torch.float64.*stochastic"),
}


@for_every("unfit", UNFIT)
@pytest.mark.parametrize("when", ["at construction", "in a group later", "in a checkpoint"])
def test_a_precision_that_does_not_fit_the_parameter(unfit: str, when: str, kind: Kind) -> None:
    dtype, options, message = UNFIT[unfit]
    parameter = Parameter(torch.ones(64, 64, dtype=dtype))
    if when == "at construction":
        with pytest.raises(ValueError, match=message):
            kind([parameter], lr=0.1, **options)
        return
    optimizer = kind([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    if when == "in a group later":
        optimizer.param_groups[0].update(options)
        with refused([parameter], optimizer, ValueError, message):
            optimizer.step()
        return
    state["param_groups"][0].update(options)
    with refused([parameter], optimizer, ValueError, message):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("state_dtype", ["int8", "int4"])
def test_a_running_maximum_in_blocks(state_dtype: str) -> None:
    with pytest.raises(ValueError, match=f'{state_dtype}.*amsgrad.*state_dtype="float32"'):
        Lamb(weights(), second_moment="amsgrad", state_dtype=state_dtype)  # type: ignore[arg-type]


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


def test_came_without_a_learning_rate_and_with_relative_step() -> None:
    with pytest.raises(ValueError, match="lr is missing: give a learning rate"):
        Came(weights())
    with pytest.raises(TypeError, match=r"'relative_step', an option of Adafactor.*lr=bighorn.schedules.RelativeStep"):
        Came(weights(), relative_step=True)  # type: ignore[arg-type]


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
