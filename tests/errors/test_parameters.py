"""Errors for values that are not parameters, and for parameters that cannot be optimized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from bighorn import Came, Lamb
from tests.support.cases import KINDS, Kind, allow_gradients_of
from tests.support.error_checks import Errors, refused, stepped, weights
from tests.support.processes import group_of_one
from tests.support.tables import for_every

TWICE = r"more than one|duplicate|twice"
EQUAL_NAMES = "params has 2 parameters called 'a': .* prefix"
PARAMS: list[tuple[str, Any, tuple[Errors, str]]] = [
    ("numbers", lambda: [1.0, 2.0], (TypeError, "tensor|param")),
    ("none", lambda: None, (TypeError, "^params must be parameters, .*None$")),
    ("text", lambda: "weights", (TypeError, "^params must be parameters, .*'weights'$")),
    ("module", lambda: nn.Linear(2, 2), (TypeError, r"not a Linear: pass model\.named_parameters")),
    ("mapping", lambda: {"weight": Parameter(torch.ones(2))}, (TypeError, r"not a dict: pass its items\(\)")),
    ("group", lambda: {"params": weights()}, (TypeError, r"not a dict: .* \[group\]")),
    ("set", lambda: set(weights()), (TypeError, "ordered")),
    ("no-params", lambda: [{"params": None}], (TypeError, "^params must be parameters, .*None$")),
    ("lists", lambda: [weights(), weights()], (TypeError, "^params must be tensors, but a parameter is a list$")),
    ("triples", lambda: [("a", weights()[0], 1)], (TypeError, "not tuples of 3$")),
    ("turned", lambda: [(weights()[0], "a")], (TypeError, "a name is a Parameter$")),
    ("numbered", lambda: [(0, weights()[0])], (TypeError, r"a name is 0 \(int\)$")),
    ("not-a-leaf", lambda: [torch.ones(3, requires_grad=True) * 2], (ValueError, "no leaf.*pass those")),
    ("integers", lambda: [torch.ones(3, dtype=torch.int64)], ((ValueError, TypeError), "int64|float")),
    ("booleans", lambda: [torch.ones(3, dtype=torch.bool)], ((ValueError, TypeError), "bool|float")),
    ("float8", lambda: [torch.ones(3).to(torch.float8_e4m3fn)], (ValueError, "float8_e4m3fn, .*torch.float16.*cast")),
    (
        "half-named",
        lambda: [("a", Parameter(torch.ones(2))), Parameter(torch.ones(2))],
        (ValueError, "name all"),
    ),
    ("expanded", lambda: [torch.ones(1).expand(4)], (ValueError, "memory.*clone")),
    ("windows", lambda: [torch.ones(4).as_strided((3, 2), (1, 1))], (ValueError, "memory.*clone")),
    ("few-names", lambda: [{"params": weights(), "param_names": ["a", "b"]}], (ValueError, "param_names.*2.*3")),
    ("text-of-names", lambda: [{"params": weights(), "param_names": "abc"}], (TypeError, "param_names.*list.*'abc'$")),
    ("numbers-for-names", lambda: [{"params": weights(), "param_names": [0, 1, 2]}], (TypeError, "param_names.*0, 1")),
    ("equal-names", lambda: [(name, p) for name, p in zip("aba", weights(), strict=True)], (ValueError, EQUAL_NAMES)),
    ("equal-param-names", lambda: [{"params": weights(), "param_names": list("aba")}], (ValueError, EQUAL_NAMES)),
    ("no-params-key", lambda: [{"lr": 0.1}], ((KeyError, TypeError, ValueError), "params")),
    ("stacked-scalar", lambda: [{"params": [Parameter(torch.ones(()))], "stacked": True}], (ValueError, "stacked")),
    ("stacked-vector", lambda: [{"params": [Parameter(torch.ones(5))], "stacked": True}], (ValueError, "stacked")),
    ("twice", lambda: 2 * [Parameter(torch.ones(3))], (ValueError, TWICE)),
]


@for_every(("make", "refusal"), [case[1:] for case in PARAMS], ids=[case[0] for case in PARAMS])
def test_what_is_no_parameter(make: Any, refusal: tuple[Errors, str], kind: Kind) -> None:
    with pytest.raises(refusal[0], match=refusal[1]):
        kind(make(), lr=0.1)
    params = make()
    late = params[0] if isinstance(params, list) and isinstance(params[0], dict) else {"params": params}
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, *refusal):
        optimizer.add_param_group(late)


def test_a_parameter_whose_dtype_became_one_that_cannot_be_optimized(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    parameters[0].grad = None
    allow_gradients_of(parameters[0], torch.float32)
    parameters[0].data = parameters[0].data.to(torch.float8_e4m3fn)
    parameters[0].grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        optimizer.step()


def test_a_parameter_of_two_groups(kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    with pytest.raises(ValueError, match=TWICE):
        kind([{"params": parameters}, {"params": parameters}], lr=0.1)
    with refused(parameters, optimizer, ValueError, TWICE):
        optimizer.add_param_group({"params": [parameters[0]]})


def test_exclusions_without_names(kind: Kind) -> None:
    for option in ("exclude_from_weight_decay", "exclude_from_layer_adaptation")[: 1 if kind is Came else 2]:
        exclusion: dict[str, Any] = {option: ["1.weight"]}
        with pytest.raises(ValueError, match=r"(?s)name.*named_parameters"):
            kind(weights(), lr=0.1, **exclusion)
        params = weights()
        optimizer = kind([(f"{i}.weight", param) for i, param in enumerate(params)], lr=0.1, **exclusion)
        with refused(params, optimizer, ValueError, "name"):
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
        nothing: dict[str, Any] = {option: []}
        kind(weights(), lr=0.1, **nothing).add_param_group({"params": [Parameter(torch.ones(2))]})


@for_every(
    ("params", "error", "message"),
    [
        ([], ValueError, r"params is empty: pass model.named_parameters\(\).*anew"),
        (iter(()), ValueError, "params is empty"),
        (torch.ones(3, requires_grad=True), TypeError, "iterable|list|params"),
        ([{"params": weights()}, weights()[0]], TypeError, "must be a dict"),
    ],
)
def test_what_is_no_list_of_parameters(params: Any, error: type[Exception], message: str) -> None:
    for kind in KINDS:
        with pytest.raises(error, match=message):
            kind(params, lr=0.1)


def test_two_names_for_one_parameter(kind: Kind) -> None:
    """An exclusion would match only one of them."""
    a, b, _ = weights()
    with pytest.raises(ValueError, match=r"one parameter 'embed' and 'head'.*names=model"):
        kind([a, b], lr=0.1, names={"embed": a, "bias": b, "head": a})


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


@pytest.fixture(scope="module")
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    with group_of_one():
        yield DeviceMesh("cpu", [0])


def test_partial_sums(kind: Kind, one_rank: DeviceMesh) -> None:
    """A parameter or a gradient is a partial sum that is not reduced over ranks."""
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


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_the_cpu_backend_on_another_device(backend: str) -> None:
    """The device is `meta`, in place of CUDA."""
    parameter = Parameter(torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match=r"(?s)cpu.*meta"):
        Lamb([parameter], backend=backend)
    parameters, optimizer = stepped(Lamb, backend)
    with refused(parameters, optimizer, ValueError, "cpu.*meta"):
        optimizer.add_param_group({"params": [parameter]})


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_parameters_that_were_replaced_by_a_flat_tensor(kind: Kind, named: bool, alone: bool) -> None:
    """DeepSpeed's ZeRO replaces the parameters of a group by one tensor; its norm is not the norm of a layer."""
    pairs = [("a", Parameter(torch.ones(3, 2))), ("b", Parameter(torch.ones(2)))][: 1 if alone else 2]
    groups: list[dict[str, Any]] = [{"params": pairs}, {"params": [("c", Parameter(torch.ones(2)))]}]
    for group in groups:
        group["params"] = group["params"] if named else [p for _, p in group["params"]]
    optimizer = kind(groups, lr=0.1)
    flat = Parameter(torch.ones(8))
    flat.grad = torch.ones(8)
    optimizer.param_groups[0]["params"] = [flat]
    for _, param in pairs:
        param.ds_id = 0  # type: ignore[attr-defined]  # as DeepSpeed's ZeRO 3 marks them
    text = rf"the {len(pairs)} parameters of param_groups\[0\] were replaced by 1 flat.*use ZeRO 1 or 2"
    for _ in range(2):
        with refused([flat], optimizer, ValueError, text):
            optimizer.step()


def test_parameters_that_were_replaced_one_by_one(kind: Kind) -> None:
    """Accelerate puts distributed tensors into the groups, and DeepSpeed without ZeRO float32 ones."""
    optimizer = kind([("a", Parameter(torch.ones(3, 2))), ("b", Parameter(torch.ones(2)))], lr=0.1)
    others = [Parameter(torch.ones(3, 2)), Parameter(torch.ones(2))]
    optimizer.param_groups[0]["params"] = others
    for _ in range(2):
        for param in others:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert all(optimizer.state[param]["step"] == 2 for param in others)
    optimizer.param_groups[0]["params"] = [Parameter(torch.ones(3, 2), requires_grad=False)]
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"2 names for 1 parameters, which were replaced"):
        optimizer.step()


def test_steps_of_some_groups(kind: Kind) -> None:
    """DeepSpeed's ZeRO steps one group at a time, and removes the others from the optimizer meanwhile."""
    parameters = [Parameter(torch.arange(1.0, 7).view(3, 2) + i) for i in range(3)]
    twins = [Parameter(param.detach().clone()) for param in parameters]

    def groups(a: Parameter, b: Parameter, c: Parameter) -> list[dict[str, Any]]:
        return [{"params": [("a", a)], "lr": 0.2}, {"params": [("b", b)]}, {"params": [("c", c)]}]

    ours, theirs = (kind(groups(*mine), lr=0.1) for mine in (parameters, twins))
    for param in parameters:
        param._hp_mapping = None  # type: ignore[attr-defined]  # as DeepSpeed's ZeRO marks them
    for step in range(3):
        for param in (*parameters, *twins):
            param.grad = torch.full_like(param, 1.0 + step)
        everything = ours.param_groups
        for group in everything:
            ours.param_groups = [group]
            ours.step()
        ours.param_groups = everything
        theirs.step()
        assert list(ours.telemetry().as_dict().items()) == list(theirs.telemetry().as_dict().items())
        if step == 1:
            ours.load_state_dict(ours.state_dict())
    assert all(param.equal(twin) for param, twin in zip(parameters, twins, strict=True))
    assert ours.telemetry().names == ("a", "b", "c")
    clipping = kind([{"params": [parameters[0]]}, {"params": [parameters[1]]}], lr=0.1, max_grad_norm=1.0)
    clipping.param_groups = clipping.param_groups[:1]
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 uses all gradients, and this step is of 1 of 2 groups"):
        clipping.step()


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ({"lr": 0.1}, r"param_groups\[1\]: .*must have the key 'params'"),
        ({"params": [Parameter(torch.ones(2))], "weight_deca": 0.1}, r"param_groups\[1\]: .*'weight_decay'"),
        ({"params": [Parameter(torch.ones(2))], "lr": -1.0}, r"param_groups\[1\]: lr=-1.0 is out of range"),
        ({"params": [torch.ones(2, dtype=torch.int64)]}, r"param_groups\[1\].params\[0\] cannot be.*torch.int64"),
    ],
)
def test_groups_that_cannot_be_added(kind: Kind, group: dict[str, Any], text: str) -> None:
    """A dict that is written into `param_groups` is checked as `add_param_group` checks it."""
    parameters, optimizer = stepped(kind)
    optimizer.add_param_group({"params": []})
    optimizer.param_groups.pop()  # which the messages do not count
    optimizer.param_groups.append({**group})
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.step()
    optimizer.param_groups.pop()
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in parameters] == [2, 2, 2]


def test_a_parameter_that_cannot_be_stepped_ahead(kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    parameters[0].grad = None
    with refused(parameters, optimizer, ValueError, r"params\[0\] has no gradient"):
        optimizer.step_param(parameters[0])
    with refused(parameters, optimizer, ValueError, "^3 is no parameter"):
        optimizer.step_param(3)  # type: ignore[arg-type]


def test_parts_that_leave_out_a_gradient(kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, ValueError, "leave out 2 of 3 parameters"):
        optimizer.step_in_parts([parameters[:1]], lambda _: None)  # type: ignore[list-item]


def test_what_is_frozen_has_no_state(kind: Kind) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(requires_grad=False), torch.nn.Linear(4, 2))
    predicted = kind.state_bytes(net)
    optimizer = kind(net.named_parameters(), lr=0.1)
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert predicted == {
        name: sum(value.nbytes for value in optimizer.state[param].values())
        for name, param in net.named_parameters()
        if param in optimizer.state
    }
    assert list(predicted) == ["1.weight", "1.bias"]


def test_a_parameter_that_was_written_into_a_group_twice(kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    optimizer.param_groups[0]["params"].append(parameters[0])
    with refused(parameters, optimizer, ValueError, "is among the parameters twice"):
        optimizer.step()


def test_a_parameter_is_called_by_its_name(kind: Kind) -> None:
    with pytest.raises(ValueError, match=r"^body\.weight cannot be optimized as asked for"):
        kind([("body.weight", Parameter(torch.ones(3, 3).double()))], lr=0.1, state_dtype="int8")


def test_state_of_one_name_is_added_up(kind: Kind) -> None:
    twice = [{"params": [("weight", Parameter(torch.ones(3)))]} for _ in range(2)]
    [(name, size)] = kind.state_bytes(twice).items()
    assert (name, size) == ("weight", 2 * kind.state_bytes(twice[:1])["weight"])
