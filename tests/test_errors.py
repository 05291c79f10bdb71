"""Bad input: refused at once, by torch's conventions for the type, with a message that names what was wrong.

TypeError for wrong types and unknown keywords, ValueError for values, RuntimeError for sparse gradients; and nothing
has changed afterwards: no parameter, no state, no step count, no group.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import Lamb

Errors: TypeAlias = "type[Exception] | tuple[type[Exception], ...]"


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (2, 3, 3, 3))]


def stepped(backend: str = "auto", **options: Any) -> tuple[list[Parameter], Lamb]:
    """An optimizer after one step, with gradients in place for the next."""
    parameters = weights()
    optimizer = Lamb(parameters, lr=0.1, weight_decay=0.1, backend=backend, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def snapshot(parameters: Sequence[Tensor], optimizer: Lamb) -> Any:
    state = [(p in optimizer.state) and dict(optimizer.state[p]) for p in parameters]
    return copy.deepcopy(([p.detach() for p in parameters], state, optimizer.state_dict()))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.allclose(a, b, 0, 0, equal_nan=True)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) or (a != a and b != b)


@contextmanager
def refused(parameters: Sequence[Tensor], optimizer: Lamb, error: Errors, message: str) -> Iterator[None]:
    """The block raises this error with such a message, and has changed nothing."""
    before = snapshot(parameters, optimizer)
    with pytest.raises(error, match=f"(?is){message}"):
        yield
    assert same(snapshot(parameters, optimizer), before), "something changed"


def test_the_snapshot_sees_a_change() -> None:
    parameters, optimizer = stepped()
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

VALUES: list[tuple[str, Any, type[Exception]]] = [
    ("lr", -0.1, ValueError),
    ("lr", math.nan, ValueError),
    ("lr", math.inf, ValueError),
    ("lr", 10**400, ValueError),
    ("lr", "0.1", TypeError),
    ("lr", True, TypeError),
    ("lr", None, TypeError),
    ("lr", torch.tensor(-0.1), ValueError),
    ("lr", torch.tensor(math.nan), ValueError),
    ("lr", torch.ones(2, 2), ValueError),
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
    ("weight_decay", -0.1, ValueError),
    ("weight_decay", math.nan, ValueError),
    ("weight_decay", math.inf, ValueError),
    ("weight_decay", "0.1", TypeError),
    ("adam", 1, TypeError),
    ("adam", "yes", TypeError),
    ("adapt", "no", TypeError),
    ("always_adapt", None, TypeError),
    ("grad_averaging", 0, TypeError),
    ("cautious", "very", TypeError),
    ("maximize", 1, TypeError),
    ("stacked", 2, TypeError),
    ("bias_correction", "v5", ValueError),
    ("decay_mode", "decoupeld", ValueError),
    ("second_moment", "amsgrd", ValueError),
    ("grad_centralization", "convolution", ValueError),
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
    ("state_dtype", torch.int8, ValueError),
    ("state_dtype", torch.complex64, ValueError),
]
WHOLE: list[tuple[str, Any, type[Exception]]] = [
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
    ("exclude_from_layer_adaptation", 3, TypeError),
    ("exclude_from_layer_adaptation", ["[a"], ValueError),
    ("names", 3, TypeError),
    ("names", ["a", "b"], TypeError),
    ("process_group", "WORLD", TypeError),
    ("process_group", 0, TypeError),
]


def ids(cases: list[tuple[str, Any, type[Exception]]]) -> list[str]:
    return [f"{name}={str(value).replace(' ', '')[:30]}" for name, value, _ in cases]


CONSTRUCTOR = [case for case in [*VALUES, *WHOLE] if case[0] not in {"adapt", "stacked", "grad_centralization"}]


@pytest.mark.parametrize(("name", "value", "error"), CONSTRUCTOR, ids=ids(CONSTRUCTOR))
def test_a_bad_value_at_construction(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        Lamb([("a", weights()[0])], **{name: value})


@pytest.mark.parametrize(("name", "value", "error"), VALUES, ids=ids(VALUES))
def test_a_bad_value_in_a_group(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        Lamb([{"params": weights(), name: value}])
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, error, name):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: value})


@pytest.mark.parametrize(("name", "value", "error"), VALUES, ids=ids(VALUES))
def test_a_bad_value_written_into_a_group_later(name: str, value: Any, error: type[Exception], backend: str) -> None:
    parameters, optimizer = stepped(backend)
    optimizer.param_groups[0][name] = value
    for method in (optimizer.step, optimizer.explain):
        with refused(parameters, optimizer, error, name):
            method()


def test_a_bad_value_in_the_last_group_stops_the_first(backend: str) -> None:
    parameters, optimizer = stepped(backend)
    late = Parameter(torch.ones(3))
    late.grad = torch.ones(3)
    optimizer.add_param_group({"params": [late]})
    optimizer.param_groups[1]["lr"] = -1.0
    with refused([*parameters, late], optimizer, ValueError, "lr"):
        optimizer.step()


def test_a_negative_tensor_lr_filled_in_later(backend: str) -> None:
    parameters = weights()
    optimizer = Lamb(parameters, lr=torch.tensor(0.1), backend=backend)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    with refused(parameters, optimizer, ValueError, "lr"):
        optimizer.step()


def test_the_message_tells_the_value() -> None:
    with pytest.raises(ValueError, match=re.escape("-0.125")):
        Lamb(weights(), lr=-0.125)
    with pytest.raises(ValueError, match=re.escape("1.25")):
        Lamb(weights(), betas=(0.9, 1.25))


def test_zero_is_allowed_where_it_makes_sense(backend: str) -> None:
    parameters = weights()
    before = [p.detach().clone() for p in parameters]
    optimizer = Lamb(parameters, lr=0, betas=(0, 0), eps=0, weight_decay=0, backend=backend)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(a.equal(b) for a, b in zip(parameters, before, strict=True))


# ---- unknown names ----------------------------------------------------------------------------------------------

UNKNOWN = [
    ("beta", (0.9, 0.99), "betas"),
    ("weigth_decay", 0.1, "weight_decay"),
    ("max_grad_nrom", 1.0, "max_grad_norm"),
    ("trust_ratio_bound", (0, 1), "trust_ratio_bounds"),
    ("learning_rate", 0.1, ""),
]


@pytest.mark.parametrize(("name", "value", "nearest"), UNKNOWN, ids=[name for name, *_ in UNKNOWN])
def test_an_unknown_option_suggests_the_nearest(name: str, value: Any, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"(?s){name}.*{nearest}"):
        Lamb(weights(), **{name: value})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("weigth_decay", "weight_decay"), ("adpat", "adapt"), ("learnrate", ""), ("stcked", "stacked")],
)
def test_an_unknown_group_key_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"(?s){name}.*{nearest}"):
        Lamb([{"params": weights(), name: 0.1}])
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, TypeError, f"{name}.*{nearest}"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], name: 0.1})


OF_THE_WHOLE: dict[str, Any] = {
    "max_grad_norm": 2.0,
    "skip_nonfinite": True,
    "backend": "foreach",
    "names": {},
    "exclude_from_weight_decay": ["bias"],
}


@pytest.mark.parametrize("name", OF_THE_WHOLE)
def test_an_option_of_the_whole_optimizer_is_no_group_key(name: str) -> None:
    """But for ZeroRedundancyOptimizer, which writes what the constructor got into every group."""
    with pytest.raises(TypeError, match=name):
        Lamb([{"params": weights(), name: OF_THE_WHOLE[name]}])
    optimizer = Lamb([{"params": weights(), "max_grad_norm": 1.0, "skip_nonfinite": False}], max_grad_norm=1.0)
    assert not {"max_grad_norm", "skip_nonfinite"} & optimizer.param_groups[0].keys()


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "differentiable"])
@pytest.mark.parametrize("value", [True, False, None])
def test_torchs_switches_name_ours(name: str, value: bool | None) -> None:
    switch: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"(?s){name}.*backend"):
        Lamb(weights(), **switch)


# ---- parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [[], iter(())], ids=["list", "iterator"])
def test_an_empty_parameter_list(empty: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        Lamb(empty)


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
def test_what_is_no_parameter(make: Any, refusal: tuple[Errors, str]) -> None:
    with pytest.raises(refusal[0], match=refusal[1]):
        Lamb(make())


@pytest.mark.parametrize("view", [torch.ones(1).expand(4), torch.ones(4).as_strided((3, 2), (1, 1))], ids=str)
def test_a_late_parameter_whose_elements_share_memory(view: Tensor) -> None:
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, ValueError, "memory.*clone"):
        optimizer.add_param_group({"params": [Parameter(view)]})


def test_too_few_names_for_a_late_group() -> None:
    parameters, optimizer = stepped_named()
    late = {"params": [Parameter(torch.ones(2)), Parameter(torch.ones(3))], "param_names": ["a"]}
    with refused(parameters, optimizer, ValueError, "param_names"):
        optimizer.add_param_group(late)


TWICE = r"more than one|duplicate|twice"


def test_a_parameter_given_twice() -> None:
    parameter = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=TWICE):
        Lamb([parameter, parameter])
    with pytest.raises(ValueError, match=TWICE):
        Lamb([{"params": [parameter]}, {"params": [parameter]}])
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, ValueError, TWICE):
        optimizer.add_param_group({"params": [parameters[0]]})


@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_stacked_needs_slices(shape: tuple[int, ...]) -> None:
    """Nothing about it becomes clearer later, so construction is where it is said."""
    with pytest.raises(ValueError, match="stacked"):
        Lamb([{"params": [Parameter(torch.ones(shape))], "stacked": True}])
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, ValueError, "stacked"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(shape))], "stacked": True})


def test_exclusions_without_names() -> None:
    for option in ("exclude_from_weight_decay", "exclude_from_layer_adaptation"):
        exclusion: dict[str, Any] = {option: ["bias"]}
        with pytest.raises(ValueError, match=r"(?s)name.*named_parameters"):
            Lamb(weights(), **exclusion)
        parameters, optimizer = stepped_named(**exclusion)
        with refused(parameters, optimizer, ValueError, "name"):
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})


def test_an_exclusion_of_nothing_needs_no_names() -> None:
    parameters = weights()
    optimizer = Lamb(parameters, exclude_from_weight_decay=[], exclude_from_layer_adaptation=[])
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})


def stepped_named(**options: Any) -> tuple[list[Parameter], Lamb]:
    parameters = weights()
    optimizer = Lamb([(f"layer{i}.weight", p) for i, p in enumerate(parameters)], **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def test_a_failed_add_param_group_can_be_repeated_rightly(backend: str) -> None:
    parameters, optimizer = stepped(backend)
    late = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [late], "lr": -1.0})
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones(3)
    optimizer.step()
    assert not late.equal(torch.ones(3))
    assert len(parameters) == 3


def test_a_parameter_whose_elements_share_memory(backend: str) -> None:
    parameters, optimizer = stepped(backend)
    parameters[1].data = torch.ones(1).expand(5)
    with refused(parameters, optimizer, (ValueError, RuntimeError), "memory|overlap|expand"):
        optimizer.step()


def test_fsdp1_flattened_parameters() -> None:
    flat = Parameter(torch.ones(30))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"(?is)fsdp.*use_orig_params|fsdp.*fully_shard|flatten"):
        Lamb([flat])


def test_distributed_tensors() -> None:
    """A DTensor holds one rank's shard: its local norm is not the layer's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        parameter = Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        with pytest.raises((ValueError, TypeError, NotImplementedError), match="DTensor"):
            Lamb([parameter])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("when", ["construction", "step"])
def test_the_cpu_backend_on_another_device(when: str) -> None:
    """`meta` stands in for a CUDA device."""
    parameter = Parameter(torch.ones(4, device="meta"))
    parameter.grad = torch.ones(4, device="meta")
    if when == "construction":
        with pytest.raises((ValueError, RuntimeError), match=r"(?s)cpu.*meta"):
            Lamb([parameter], backend="cpu").step()
        return
    parameters, optimizer = stepped("cpu") if cpu_works() else (weights(), None)
    if optimizer is None:
        pytest.skip("no cpu library")
    with refused(parameters, optimizer, ValueError, "cpu.*meta"):
        optimizer.add_param_group({"params": [parameter]})
        optimizer.step()


def cpu_works() -> bool:
    from bighorn import kernels

    return kernels.status()["cpu"].available


# ---- gradients --------------------------------------------------------------------------------------------------


def test_sparse_gradients_name_the_remedy(backend: str) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = Lamb(embedding.parameters(), backend=backend)
    embedding(torch.tensor([1, 2])).sum().backward()
    with refused([embedding.weight], optimizer, RuntimeError, "sparse.*(dense|SparseAdam|sparse=False)"):
        optimizer.step()


def test_a_sparse_gradient_after_good_ones(backend: str) -> None:
    parameters, optimizer = stepped(backend)
    parameters[0].grad = torch.ones(4, 3).to_sparse()
    with refused(parameters, optimizer, RuntimeError, "sparse"):
        optimizer.step()


def test_a_gradient_of_another_shape(backend: str) -> None:
    """Torch refuses the assignment, but not a parameter that changes under its gradient."""
    parameters, optimizer = stepped(backend)
    parameters[1].data = torch.ones(7)
    with refused(parameters, optimizer, (ValueError, RuntimeError), "shape"):
        optimizer.step()
    fresh = Parameter(torch.ones(4, 3))
    fresh.grad = torch.ones(4, 3)
    fresh.data = fresh.data.view(3, 4)
    other = Lamb([fresh], backend=backend)
    with refused([fresh], other, (ValueError, RuntimeError), r"shape.*\(4, 3\)|\(4, 3\).*shape"):
        other.step()


def test_a_gradient_on_another_device(backend: str) -> None:
    """Torch lets a gradient on another device through where the parameter reports none of its own (a subclass)."""
    parameters, optimizer = stepped(backend)

    class Elsewhere(Parameter):
        @property
        def grad(self) -> Tensor:  # type: ignore[override]
            return torch.ones(5, device="meta")

    foreign = Elsewhere(torch.ones(5))
    optimizer.add_param_group({"params": [foreign]})
    with refused([*parameters, foreign], optimizer, (ValueError, RuntimeError), "device|meta"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e5m2], ids=str)
def test_a_gradient_of_another_kind_than_its_parameter(backend: str, dtype: torch.dtype) -> None:
    parameters, optimizer = stepped(backend)
    parameters[1].grad = None
    parameters[1].grad_dtype = None
    parameters[1].grad = torch.ones(5).to(dtype)
    with refused(parameters, optimizer, (ValueError, RuntimeError, TypeError), str(dtype)):
        optimizer.step()


def test_a_step_after_a_refused_one_is_right(backend: str) -> None:
    parameters, optimizer = stepped(backend)
    others, other = stepped(backend)
    good = parameters[0].grad
    parameters[0].grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    parameters[0].grad = good
    optimizer.step()
    other.step()
    assert all(a.equal(b) for a, b in zip(parameters, others, strict=True))


# ---- checkpoints ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_other_shapes(backend: str) -> None:
    parameters, optimizer = stepped(backend)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["exp_avg"] = torch.zeros(6)
    with refused(parameters, optimizer, ValueError, "shape"):
        optimizer.load_state_dict(state)


def test_a_checkpoint_of_another_model(backend: str) -> None:
    parameters, optimizer = stepped(backend)
    others = [Parameter(torch.ones(n)) for n in (2, 3, 4)]
    other = Lamb(others, lr=0.7, backend=backend)
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    with refused(parameters, optimizer, ValueError, "shape"):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    fewer = Lamb(others[:2], backend=backend)
    with refused(parameters, optimizer, ValueError, "size|group|number"):
        optimizer.load_state_dict(copy.deepcopy(fewer.state_dict()))


@pytest.mark.parametrize("key", ["lr", "betas", "weight_decay"])
def test_a_checkpoint_with_bad_hyper_parameters(key: str) -> None:
    parameters, optimizer = stepped()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][key] = (2.0, 2.0) if key == "betas" else -1.0
    with refused(parameters, optimizer, ValueError, key):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"state": {}}, {"model": 1}, "state"], ids=str)
def test_what_is_no_checkpoint(state: Any) -> None:
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, (ValueError, TypeError, KeyError), "param_groups|state"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("value", ["text", math.pi, torch.zeros(4, 3, dtype=torch.complex64)], ids=lambda v: str(v)[:4])
def test_a_checkpoint_with_a_foreign_moment(value: Any) -> None:
    parameters, optimizer = stepped()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg_sq"] = value
    with refused(parameters, optimizer, (ValueError, TypeError), "exp_avg_sq"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("value", [torch.ones(3), "one", -1.0, math.nan], ids=str)
def test_a_checkpoint_with_a_foreign_step(value: Any) -> None:
    parameters, optimizer = stepped()
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
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_state(part: str, backend: str) -> None:
    """Going on from it would take steps of a wrong size, whether it was loaded or the rest was deleted."""
    missing, more, named = PARTS[part]
    parameters, optimizer = stepped(backend)
    state = copy.deepcopy(optimizer.state_dict())
    for each in (state["state"][0], optimizer.state[parameters[0]]):
        for name in missing:
            del each[name]
        each.update(more)
    with refused(parameters, optimizer, ValueError, named):
        optimizer.step()
    fresh = weights()
    other = Lamb(fresh, backend=backend)
    with refused(fresh, other, ValueError, named):
        other.load_state_dict(state)


@pytest.mark.parametrize("key", ["momentum", "nesterov", "weigth_decay"])
def test_a_checkpoint_with_options_that_are_not_ours(key: str) -> None:
    parameters, optimizer = stepped()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][key] = 0.0
    with refused(parameters, optimizer, (ValueError, TypeError), key):
        optimizer.load_state_dict(state)


def test_a_checkpoint_of_sgd() -> None:
    others = weights()
    sgd = torch.optim.SGD(others, momentum=0.9, nesterov=True)
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    sgd.step()
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, (ValueError, TypeError), "momentum"):
        optimizer.load_state_dict(copy.deepcopy(sgd.state_dict()))


def test_amsgrad_that_is_on_in_a_checkpoint_must_be_on_here() -> None:
    others = weights()
    adam = torch.optim.Adam(others, amsgrad=True)
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    parameters, optimizer = stepped()
    with refused(parameters, optimizer, ValueError, "amsgrad.*second_moment"):
        optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    Lamb(weights(), second_moment="amsgrad").load_state_dict(copy.deepcopy(adam.state_dict()))
