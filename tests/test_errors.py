"""Bad input: refused at once, by torch's conventions for the type, with a message that names what was wrong.

TypeError for wrong types and unknown keywords, ValueError for values, RuntimeError for sparse gradients; and nothing
has changed afterwards: no parameter, no state, no step count, no group.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from bighorn import Came, Lamb
from cases import KINDS, Kind, Optimizer

Errors: TypeAlias = "type[Exception] | tuple[type[Exception], ...]"


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (4, 3, 3, 3))]


def stepped(kind: Kind, backend: str = "auto", **options: Any) -> tuple[list[Parameter], Optimizer]:
    """An optimizer after one step, with gradients in place for the next."""
    parameters = weights()
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, backend=backend, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def snapshot(parameters: Sequence[Tensor], optimizer: Optimizer) -> Any:
    state = [(p in optimizer.state) and dict(optimizer.state[p]) for p in parameters]
    return copy.deepcopy(([p.detach() for p in parameters], state, optimizer.state_dict()))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.placements == b.placements and same(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.allclose(a, b, 0, 0, equal_nan=True)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) or (a != a and b != b)


@contextmanager
def refused(parameters: Sequence[Tensor], optimizer: Optimizer, error: Errors, message: str) -> Iterator[None]:
    """The block raises this error with such a message, and has changed nothing."""
    before = snapshot(parameters, optimizer)
    with pytest.raises(error, match=f"(?is){message}"):
        yield
    assert same(snapshot(parameters, optimizer), before), "something changed"


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


# ---- hyper-parameters -------------------------------------------------------------------------------------------

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
    ("weight_rounding", "kahan", ValueError),  # of parameters in float32
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
OWN_VALUES: dict[Kind, list[Value]] = {Lamb: [*VALUES, *OF_LAMB], Came: [*VALUES, *OF_CAME]}
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
    ("names", 3, TypeError),
    ("names", ["a", "b"], TypeError),
    ("process_group", "WORLD", TypeError),
    ("process_group", 0, TypeError),
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
        ("relative_step", 1, TypeError),
        ("relative_step", True, ValueError),
        ("warmup_init", True, ValueError),
        ("warmup_init", "yes", TypeError),
    ],
}


def for_each(values: dict[Kind, list[Value]]) -> pytest.MarkDecorator:
    """Run a test with each value of each optimizer."""
    return pytest.mark.parametrize(
        ("kind", "name", "value", "error"),
        [
            pytest.param(kind, *row, id=f"{kind.algorithm.name}-{row[0]}={str(row[1]).replace(' ', '')[:30]}")
            for kind, rows in values.items()
            for row in rows
        ],
        indirect=["kind"],
    )


CONSTRUCTOR = {
    kind: [row for row in OWN_VALUES[kind] if row[0] not in kind.algorithm.group_only] + OWN_WHOLE[kind]
    for kind in KINDS
}


@for_each(CONSTRUCTOR)
def test_a_bad_value_at_construction(name: str, value: Any, error: type[Exception], kind: Kind) -> None:
    with pytest.raises(error, match=name):
        kind([("a", weights()[0])], **{"lr": 0.1, name: value})


@for_each(OWN_VALUES)
def test_a_bad_value_in_a_group(name: str, value: Any, error: type[Exception], kind: Kind) -> None:
    with pytest.raises(error, match=name):
        kind([{"params": weights(), name: value}], lr=0.1)
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, error, name):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: value})


@for_each(OWN_VALUES)
def test_a_bad_value_written_into_a_group_later(
    name: str, value: Any, error: type[Exception], kind: Kind, backend: str
) -> None:
    parameters, optimizer = stepped(kind, backend)
    optimizer.param_groups[0][name] = value
    for method in (optimizer.step, optimizer.explain):
        with refused(parameters, optimizer, error, name):
            method()


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


def test_zero_is_allowed_where_it_makes_sense(kind: Kind, backend: str) -> None:
    parameters = weights()
    before = [p.detach().clone() for p in parameters]
    zeros: dict[str, Any] = {"betas": (0, 0), "eps": 0} if kind is Lamb else {"betas": (0.9, 0, 0), "decay_rate": 0}
    optimizer = kind(parameters, lr=0, weight_decay=0, backend=backend, **zeros)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(a.equal(b) for a, b in zip(parameters, before, strict=True))


# ---- unknown names ----------------------------------------------------------------------------------------------

MISSPELT = {"beta": "betas", "weigth_decay": "weight_decay", "max_grad_nrom": "max_grad_norm", "learning_rate": ""}
OWN_MISSPELT = {
    Lamb: MISSPELT | {"trust_ratio_bound": "trust_ratio_bounds"},
    Came: MISSPELT | {"factr": "factor", "clip_treshold": "clip_threshold", "exclude_from_layer_adaptation": ""},
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in OWN_MISSPELT[kind]], indirect=["kind"]
)
def test_an_unknown_option_suggests_the_nearest(kind: Kind, name: str) -> None:
    nearest = OWN_MISSPELT[kind][name]
    with pytest.raises(TypeError, match=f"(?s){name!r}.*{nearest and repr(nearest)}"):
        kind(weights(), lr=0.1, **{name: 0.1})  # type: ignore[arg-type]


MISSPELT_KEYS = {"weigth_decay": "weight_decay", "learnrate": "", "stcked": "stacked"}
OWN_MISSPELT_KEYS = {Lamb: MISSPELT_KEYS | {"adpat": "adapt"}, Came: MISSPELT_KEYS | {"factr": "factor", "adapt": ""}}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in OWN_MISSPELT_KEYS[kind]], indirect=["kind"]
)
def test_an_unknown_group_key_suggests_the_nearest(kind: Kind, name: str) -> None:
    nearest = OWN_MISSPELT_KEYS[kind][name]
    with pytest.raises(TypeError, match=f"(?s){name!r}.*{nearest and repr(nearest)}"):
        kind([{"params": weights(), name: 0.1}], lr=0.1)
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, TypeError, f"{name!r}.*{nearest and repr(nearest)}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: 0.1})


OF_THE_WHOLE: dict[str, Any] = {
    "max_grad_norm": 2.0,
    "skip_nonfinite": True,
    "backend": "foreach",
    "names": {},
    "exclude_from_weight_decay": ["bias"],
}


@pytest.mark.parametrize("name", OF_THE_WHOLE)
def test_an_option_of_the_whole_optimizer_is_no_group_key(name: str, kind: Kind) -> None:
    """But for ZeroRedundancyOptimizer, which writes what the constructor got into every group."""
    with pytest.raises(TypeError, match=name):
        kind([{"params": weights(), name: OF_THE_WHOLE[name]}], lr=0.1)
    groups = [{"params": weights(), "max_grad_norm": 1.0, "skip_nonfinite": False}]
    optimizer = kind(groups, lr=0.1, max_grad_norm=1.0)
    assert not {"max_grad_norm", "skip_nonfinite"} & optimizer.param_groups[0].keys()


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "differentiable"])
@pytest.mark.parametrize("value", [True, False, None])
def test_torchs_switches_name_ours(name: str, value: bool | None, kind: Kind) -> None:
    switch: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"(?s){name}.*backend"):
        kind(weights(), lr=0.1, **switch)


# ---- parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [[], iter(())], ids=["list", "iterator"])
def test_an_empty_parameter_list(empty: Any, kind: Kind) -> None:
    with pytest.raises(ValueError, match="empty"):
        kind(empty, lr=0.1)


PARAMS: list[tuple[str, Any, tuple[Errors, str]]] = [
    ("tensor", lambda: torch.ones(3, requires_grad=True), (TypeError, "iterable|list|params")),
    ("numbers", lambda: [1.0, 2.0], (TypeError, "tensor|param")),
    ("none", lambda: None, (TypeError, "param|None")),
    ("not-a-leaf", lambda: [torch.ones(3, requires_grad=True) * 2], (ValueError, "leaf")),
    ("integers", lambda: [torch.ones(3, dtype=torch.int64)], ((ValueError, TypeError), "int64|float")),
    ("booleans", lambda: [torch.ones(3, dtype=torch.bool)], ((ValueError, TypeError), "bool|float")),
    ("half-named", lambda: [("a", Parameter(torch.ones(2))), Parameter(torch.ones(2))], (ValueError, "name")),
    ("expanded", lambda: [torch.ones(1).expand(4)], (ValueError, "memory.*clone")),
    ("windows", lambda: [torch.ones(4).as_strided((3, 2), (1, 1))], (ValueError, "memory.*clone")),
    ("few-names", lambda: [{"params": weights(), "param_names": ["a", "b"]}], (ValueError, "param_names.*2.*3")),
    ("no-params-key", lambda: [{"lr": 0.1}], ((KeyError, TypeError, ValueError), "params")),
]


@pytest.mark.parametrize(("make", "refusal"), [case[1:] for case in PARAMS], ids=[case[0] for case in PARAMS])
def test_what_is_no_parameter(make: Any, refusal: tuple[Errors, str], kind: Kind) -> None:
    with pytest.raises(refusal[0], match=refusal[1]):
        kind(make(), lr=0.1)


@pytest.mark.parametrize("view", [torch.ones(1).expand(4), torch.ones(4).as_strided((3, 2), (1, 1))], ids=str)
def test_a_late_parameter_whose_elements_share_memory(view: Tensor, kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, ValueError, "memory.*clone"):
        optimizer.add_param_group({"params": [Parameter(view)]})


def test_too_few_names_for_a_late_group(kind: Kind) -> None:
    parameters, optimizer = stepped_named(kind)
    late = {"params": [Parameter(torch.ones(2)), Parameter(torch.ones(3))], "param_names": ["a"]}
    with refused(parameters, optimizer, ValueError, "param_names"):
        optimizer.add_param_group(late)


TWICE = r"more than one|duplicate|twice"


def test_a_parameter_given_twice(kind: Kind) -> None:
    parameter = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=TWICE):
        kind([parameter, parameter], lr=0.1)
    with pytest.raises(ValueError, match=TWICE):
        kind([{"params": [parameter]}, {"params": [parameter]}], lr=0.1)
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, ValueError, TWICE):
        optimizer.add_param_group({"params": [parameters[0]]})


@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_stacked_needs_slices(shape: tuple[int, ...], kind: Kind) -> None:
    """Nothing about it becomes clearer later, so construction is where it is said."""
    with pytest.raises(ValueError, match="stacked"):
        kind([{"params": [Parameter(torch.ones(shape))], "stacked": True}], lr=0.1)
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, ValueError, "stacked"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(shape))], "stacked": True})


def test_exclusions_without_names(kind: Kind) -> None:
    for option in ("exclude_from_weight_decay", "exclude_from_layer_adaptation")[: 2 if kind is Lamb else 1]:
        exclusion: dict[str, Any] = {option: ["bias"]}
        with pytest.raises(ValueError, match=r"(?s)name.*named_parameters"):
            kind(weights(), lr=0.1, **exclusion)
        parameters, optimizer = stepped_named(kind, **exclusion)
        with refused(parameters, optimizer, ValueError, "name"):
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})


def test_an_exclusion_of_nothing_needs_no_names(kind: Kind) -> None:
    parameters = weights()
    exclusions: dict[str, Any] = {"exclude_from_weight_decay": []}
    exclusions |= {"exclude_from_layer_adaptation": []} if kind is Lamb else {}
    optimizer = kind(parameters, lr=0.1, **exclusions)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})


def stepped_named(kind: Kind, **options: Any) -> tuple[list[Parameter], Optimizer]:
    parameters = weights()
    optimizer = kind([(f"layer{i}.weight", p) for i, p in enumerate(parameters)], lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def test_a_failed_add_param_group_can_be_repeated_rightly(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    late = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [late], "lr": -1.0})
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones(3)
    optimizer.step()
    assert not late.equal(torch.ones(3))
    assert len(parameters) == 3


def test_a_parameter_whose_elements_share_memory(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    parameters[1].data = torch.ones(1).expand(5)
    with refused(parameters, optimizer, (ValueError, RuntimeError), "memory|overlap|expand"):
        optimizer.step()


def test_fsdp1_flattened_parameters(kind: Kind) -> None:
    flat = Parameter(torch.ones(30))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"(?is)fsdp.*use_orig_params|fsdp.*fully_shard|flatten"):
        kind([flat], lr=0.1)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_partial_sums(kind: Kind, one_rank: DeviceMesh) -> None:
    """A parameter, or a gradient, that is still to be added up over ranks."""
    pending = DTensor.from_local(torch.ones(4), one_rank, [Partial()])
    with pytest.raises(ValueError, match=r"(?s)Partial.*redistribute"):
        kind([Parameter(pending)], lr=0.1)
    parameter = Parameter(distribute_tensor(torch.ones(4), one_rank, [Replicate()]))
    optimizer = kind([parameter], lr=0.1)
    parameter.grad = pending
    with refused([parameter], optimizer, ValueError, "Partial.*redistribute"):
        optimizer.step()
    parameter.grad = pending.redistribute(placements=[Replicate()])
    optimizer.step()


def test_a_gradient_that_is_distributed_otherwise(kind: Kind, one_rank: DeviceMesh) -> None:
    parameter = Parameter(distribute_tensor(torch.ones(4), one_rank, [Shard(0)]))
    optimizer = kind([parameter], lr=0.1)
    parameter.grad = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [[0]]), [Shard(0), Replicate()])
    with refused([parameter], optimizer, ValueError, "gradient.*redistribute"):
        optimizer.step()


def test_a_state_that_is_distributed_otherwise(kind: Kind, one_rank: DeviceMesh) -> None:
    parameter = Parameter(torch.ones(4))
    optimizer = kind([parameter], lr=0.1)
    parameter.grad = torch.ones(4)
    optimizer.step()
    loaded = optimizer.state_dict()
    loaded["state"][0]["exp_avg"] = distribute_tensor(torch.ones(4), one_rank, [Shard(0)])
    with refused([parameter], optimizer, ValueError, "exp_avg.*set_optimizer_state_dict"):
        optimizer.load_state_dict(loaded)


@pytest.mark.parametrize("when", ["construction", "step"])
def test_the_cpu_backend_on_another_device(when: str) -> None:
    """`meta` stands in for a CUDA device."""
    parameter = Parameter(torch.ones(4, device="meta"))
    parameter.grad = torch.ones(4, device="meta")
    if when == "construction":
        with pytest.raises((ValueError, RuntimeError), match=r"(?s)cpu.*meta"):
            Lamb([parameter], backend="cpu").step()
        return
    parameters, optimizer = stepped(Lamb, "cpu") if cpu_works() else (weights(), None)
    if optimizer is None:
        pytest.skip("no cpu library")
    with refused(parameters, optimizer, ValueError, "cpu.*meta"):
        optimizer.add_param_group({"params": [parameter]})
        optimizer.step()


def cpu_works() -> bool:
    from bighorn import kernels

    return kernels.status()["cpu"].available


# ---- gradients --------------------------------------------------------------------------------------------------


def test_sparse_gradients_name_the_remedy(kind: Kind, backend: str) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = kind(embedding.parameters(), lr=0.1, backend=backend)
    embedding(torch.tensor([1, 2])).sum().backward()
    with refused([embedding.weight], optimizer, RuntimeError, "sparse.*(dense|SparseAdam|sparse=False)"):
        optimizer.step()


def test_a_sparse_gradient_after_good_ones(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    parameters[0].grad = torch.ones(4, 3).to_sparse()
    with refused(parameters, optimizer, RuntimeError, "sparse"):
        optimizer.step()


def test_a_gradient_of_another_shape(kind: Kind, backend: str) -> None:
    """Torch refuses the assignment, but not a parameter that changes under its gradient."""
    parameters, optimizer = stepped(kind, backend)
    parameters[1].data = torch.ones(7)
    with refused(parameters, optimizer, (ValueError, RuntimeError), "shape"):
        optimizer.step()
    fresh = Parameter(torch.ones(4, 3))
    fresh.grad = torch.ones(4, 3)
    fresh.data = fresh.data.view(3, 4)
    other = kind([fresh], lr=0.1, backend=backend)
    with refused([fresh], other, (ValueError, RuntimeError), r"shape.*\(4, 3\)|\(4, 3\).*shape"):
        other.step()


def test_a_gradient_on_another_device(kind: Kind, backend: str) -> None:
    """Torch lets a gradient on another device through where the parameter reports none of its own (a subclass)."""
    parameters, optimizer = stepped(kind, backend)

    class Elsewhere(Parameter):
        @property
        def grad(self) -> Tensor:  # type: ignore[override]
            return torch.ones(5, device="meta")

    foreign = Elsewhere(torch.ones(5))
    optimizer.add_param_group({"params": [foreign]})
    with refused([*parameters, foreign], optimizer, (ValueError, RuntimeError), "device|meta"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e5m2], ids=str)
def test_a_gradient_of_another_kind_than_its_parameter(kind: Kind, backend: str, dtype: torch.dtype) -> None:
    parameters, optimizer = stepped(kind, backend)
    parameters[1].grad = None
    parameters[1].grad_dtype = None
    parameters[1].grad = torch.ones(5).to(dtype)
    with refused(parameters, optimizer, (ValueError, RuntimeError, TypeError), str(dtype)):
        optimizer.step()


def test_a_step_after_a_refused_one_is_right(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    others, other = stepped(kind, backend)
    good = parameters[0].grad
    parameters[0].grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    parameters[0].grad = good
    optimizer.step()
    other.step()
    assert all(a.equal(b) for a, b in zip(parameters, others, strict=True))


# ---- checkpoints ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_other_shapes(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["exp_avg"] = torch.zeros(6)
    with refused(parameters, optimizer, ValueError, "shape"):
        optimizer.load_state_dict(state)


def test_a_checkpoint_of_another_model(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    others = [Parameter(torch.ones(n)) for n in (2, 3, 4)]
    other = kind(others, lr=0.7, backend=backend)
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    with refused(parameters, optimizer, ValueError, "shape"):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    fewer = kind(others[:2], lr=0.1, backend=backend)
    with refused(parameters, optimizer, ValueError, "size|group|number"):
        optimizer.load_state_dict(copy.deepcopy(fewer.state_dict()))


@pytest.mark.parametrize("key", ["lr", "betas", "weight_decay"])
def test_a_checkpoint_with_bad_hyper_parameters(key: str, kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][key] = (2.0, 2.0) if key == "betas" else -1.0
    with refused(parameters, optimizer, ValueError, key):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"state": {}}, {"model": 1}, "state"], ids=str)
def test_what_is_no_checkpoint(state: Any, kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, (ValueError, TypeError, KeyError), "param_groups|state"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("value", ["text", math.pi, torch.zeros(4, 3, dtype=torch.complex64)], ids=lambda v: str(v)[:4])
def test_a_checkpoint_with_a_foreign_moment(value: Any, kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg_sq"] = value
    with refused(parameters, optimizer, (ValueError, TypeError), "exp_avg_sq"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("value", [torch.ones(3), "one", -1.0, math.nan], ids=str)
def test_a_checkpoint_with_a_foreign_step(value: Any, kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = value
    with refused(parameters, optimizer, (ValueError, TypeError), "step"):
        optimizer.load_state_dict(state)


PARTS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "no-step": (["step"], {}, "'step'"),
    "no-exp_avg": (["exp_avg"], {}, "'exp_avg'"),
    "no-exp_avg_sq": (["exp_avg_sq"], {}, "'exp_avg_sq'"),
    "misspelt": (["exp_avg_sq"], {"exp_avg_sqr": torch.ones(4, 3)}, "'exp_avg_sq'"),
    "nothing-but-step": (["exp_avg", "exp_avg_sq"], {}, "'exp_avg'"),
    "codes-without-scales": ([], {"exp_avg": torch.ones(4, 3, dtype=torch.int8)}, "'exp_avg'.*int8"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_state(part: str, kind: Kind, backend: str) -> None:
    """Going on from it would take steps of a wrong size, whether it was loaded or the rest was deleted."""
    missing, more, named = PARTS[part]
    parameters, optimizer = stepped(kind, backend)
    state = copy.deepcopy(optimizer.state_dict())
    for each in (state["state"][0], optimizer.state[parameters[0]]):
        for name in missing:
            del each[name]
        each.update(more)
    with refused(parameters, optimizer, ValueError, named):
        optimizer.step()
    fresh = weights()
    other = kind(fresh, lr=0.1, backend=backend)
    with refused(fresh, other, ValueError, named):
        other.load_state_dict(state)


@pytest.mark.parametrize("name", ["exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"])
def test_a_statistic_that_is_missing_or_of_another_shape(name: str) -> None:
    parameters, optimizer = stepped(Came)
    for value, message in ((None, f"{name}'.*Load the matching"), (torch.ones(4, 3), f"{name}'.*shape.*options")):
        state = copy.deepcopy(optimizer.state_dict())
        del state["state"][2][name]
        state["state"][2] |= {} if value is None else {name: value}
        with refused(parameters, optimizer, ValueError, message):
            optimizer.load_state_dict(state)


def test_scales_that_are_missing_or_of_another_shape(kind: Kind) -> None:
    """Whether the moments at hand are in 8 bits or not; scales of another shape are those of blocks of another size."""
    for at_hand in (None, "int8"):
        for scale in ({}, {"exp_avg_scale": torch.ones(3)}, {"exp_avg_scale": torch.ones(64, 2)}):
            parameter = Parameter(torch.ones(64, 64))
            optimizer = kind([parameter], lr=0.1, state_dtype="int8")
            parameter.grad = torch.ones(64, 64)
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            state["param_groups"][0]["state_dtype"] = at_hand
            del state["state"][0]["exp_avg_scale"]
            state["state"][0] |= scale
            message = "exp_avg.*blocks are not of 256" if scale else "exp_avg.*int8|lacks 'exp_avg_scale'"
            with refused([parameter], optimizer, ValueError, message):
                optimizer.load_state_dict(state)


DAMAGE: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a-code-that-is-never-written": ("exp_avg", lambda codes: codes.fill_(-128), "'exp_avg'.*damaged"),
    "a-scale-below-0": ("exp_avg_scale", lambda scales: -scales, "'exp_avg'.*damaged"),
    "codes-that-are-floats": ("exp_avg", lambda codes: codes.float(), "'exp_avg'.*float32.*damaged"),
    "codes-of-another-shape": ("exp_avg", lambda codes: codes[:32], "'exp_avg'.*damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("at_hand", [None, "int8"], ids=str)
def test_damaged_codes(damage: str, at_hand: str | None, kind: Kind) -> None:
    name, spoil, message = DAMAGE[damage]
    parameter = Parameter(torch.ones(64, 64))
    optimizer = kind([parameter], lr=0.1, state_dtype="int8")
    parameter.grad = torch.ones(64, 64)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0][name] = spoil(state["state"][0][name])
    state["param_groups"][0]["state_dtype"] = at_hand
    with refused([parameter], optimizer, ValueError, message):
        optimizer.load_state_dict(state)


UNFIT: dict[str, tuple[torch.dtype, dict[str, Any], str]] = {
    "float64-int8": (torch.float64, {"state_dtype": "int8"}, 'torch.float64.*state_dtype="int8"'),
    "complex-int8": (torch.complex64, {"state_dtype": "int8"}, 'torch.complex64.*state_dtype="int8"'),
    "float32-master": (torch.float32, {"weight_rounding": "master"}, 'torch.float32.*weight_rounding="master"'),
    "float32-kahan": (torch.float32, {"weight_rounding": "kahan"}, 'torch.float32.*weight_rounding="kahan"'),
    "float64-stochastic": (torch.float64, {"weight_rounding": "stochastic"}, "torch.float64.*stochastic"),
}


@pytest.mark.parametrize("unfit", UNFIT)
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


@pytest.mark.parametrize("state_dtype", ["int8", "float16"])
def test_a_running_maximum_in_blocks(state_dtype: str) -> None:
    with pytest.raises(ValueError, match=f'{state_dtype}.*amsgrad.*state_dtype="float32"'):
        Lamb(weights(), second_moment="amsgrad", state_dtype=state_dtype)


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


def test_why_a_beta_is_refused_and_how_relative_step_wants_its_learning_rate() -> None:
    for options, message in (
        ({"lr": 0.1, "betas": (0.0, 0.9, 0.9)}, r"betas\[0\]=0.*misses the update.*0\.9"),
        ({"lr": 0.1, "betas": (0.9, 0.9, 1.0)}, r"betas\[2\]=1.0.*in \[0, 1\)"),
        ({}, "lr is missing.*relative_step"),
        ({"lr": 0.1, "relative_step": True}, "relative_step.*lr=0.1"),
        ({"warmup_init": True, "lr": 0.1}, "warmup_init.*relative_step=True"),
    ):
        with pytest.raises(ValueError, match=message):
            Came(weights(), **options)
    with pytest.raises(ValueError, match=r"relative_step.*lr=0\.1"):
        Came([{"params": weights(), "lr": 0.1}], relative_step=True)


@pytest.mark.parametrize("key", ["momentum", "nesterov", "weigth_decay"])
def test_a_checkpoint_with_options_that_are_not_ours(key: str, kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][key] = 0.0
    with refused(parameters, optimizer, (ValueError, TypeError), key):
        optimizer.load_state_dict(state)


def test_a_checkpoint_of_sgd(kind: Kind) -> None:
    others = weights()
    sgd = torch.optim.SGD(others, momentum=0.9, nesterov=True)
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    sgd.step()
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, (ValueError, TypeError), "momentum"):
        optimizer.load_state_dict(copy.deepcopy(sgd.state_dict()))


def test_a_checkpoint_of_the_other_optimizer(kind: Kind) -> None:
    """It names the first option that is not ours."""
    (other,) = set(KINDS) - {kind}
    parameters, optimizer = stepped(kind)
    _, theirs = stepped(other)
    message = r"param_groups\[0\].*unknown option '(adam|clip_threshold)'"
    with refused(parameters, optimizer, ValueError, message):
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))


def test_parameters_that_were_replaced_behind_their_names(kind: Kind) -> None:
    """As by DeepSpeed's ZeRO, which puts one flat tensor in the place of all: its norm would be no layer's."""
    pairs = [("a", Parameter(torch.ones(3, 2))), ("b", Parameter(torch.ones(2)))]
    optimizer = kind(pairs, lr=0.1)
    flat = Parameter(torch.ones(8))
    flat.grad = torch.ones(8)
    optimizer.param_groups[0]["params"] = [flat]
    with refused(
        [flat], optimizer, ValueError, r"2 names for 1 parameters, which were replaced: DeepSpeed.*shard_update"
    ):
        optimizer.step()
