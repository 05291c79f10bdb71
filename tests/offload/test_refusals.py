"""Unsupported uses of offload are refused before anything changes, with the remedy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bighorn import Came, Lamb, offload, release_gradients
from tests.support.offloading import Make, loss_of, network, offloaded, train
from tests.support.processes import group_of_one
from tests.support.slow_copies import SlowCopies
from tests.support.tables import for_every


def lamb(net: nn.Module, **options: Any) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.1, **options)


@for_every(
    ("error", "wrong", "message"),
    [
        (TypeError, {"model": "net"}, "model must be a torch.nn.Module, not str"),
        (TypeError, {"optimizer": 3}, "optimizer must be a torch.optim.Optimizer, not int"),
        (TypeError, {"scaler": 1024}, "scaler must be a torch.amp.GradScaler or a LossScaler, not int"),
        (TypeError, {"bucket_mb": "large"}, "bucket_mb must be a number, not 'large'"),
        (TypeError, {"masters": "float32"}, "masters must be True or False, not 'float32'"),
        (ValueError, {"bucket_mb": 0}, "bucket_mb=0 is out of range: it must be"),
        (ValueError, {"max_grad_norm": -1.0}, "max_grad_norm=-1.0 is out of range"),
        (ValueError, {"max_grad_norm": 1.0}, "max_grad_norm is an option of Lamb itself: give it to the optimizer"),
        (ValueError, {"copies": None}, "the parameters are on cpu, so there is nothing to offload: move"),
    ],
)
def test_wrong_arguments(error: type[Exception], wrong: dict[str, Any], message: str) -> None:
    net = network()
    with pytest.raises(error, match=message):
        offload(**{"model": net, "optimizer": lamb(net), "copies": SlowCopies(), **wrong})


class Whole(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def released(net: nn.Module) -> Lamb:
    optimizer = lamb(net)
    release_gradients(net, optimizer)
    return optimizer


def stepped(net: nn.Module) -> Lamb:
    optimizer = lamb(net)
    train(net, optimizer, range(1))
    return optimizer


@for_every(
    ("make", "options", "message"),
    [
        (lambda net: torch.optim.LBFGS(net.parameters()), {}, "cannot step a part of its parameters"),
        (lambda net: Whole(net.parameters()), {}, r"its step\(\) is not one of torch.optim"),
        (lambda net: torch.optim.Adam(net.parameters(), capturable=True), {}, "capturable=True"),
        (lambda _: lamb(network()), {}, "holds none of the model's parameters"),
        (released, {}, "has a hook for its gradient already"),
        (lambda net: offloaded(net, lamb(net)), {}, "was offloaded already"),
        (lambda net: lamb(net.half(), weight_rounding="kahan"), {"masters": True}, "leave weight_rounding out"),
        (stepped, {"masters": True}, "is for an optimizer without state"),
    ],
)
def test_what_is_not_supported(make: Make, options: dict[str, Any], message: str) -> None:
    net = network()
    optimizer = make(net)
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    hooks = list(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(ValueError, match=message):
        offload(net, optimizer, copies=SlowCopies(), **options)
    assert [id(param) for group in optimizer.param_groups for param in group["params"]] == params
    assert list(optimizer._optimizer_step_pre_hooks) == hooks


def test_sparse_gradients() -> None:
    net = nn.Sequential(nn.Embedding(3, 4, sparse=True))
    with pytest.raises(ValueError, match="0 has sparse gradients: make it with sparse=False"):
        offload(net, torch.optim.SGD(net.parameters()), copies=SlowCopies())


def test_ddp_is_refused() -> None:
    with group_of_one():
        net = DistributedDataParallel(network())
        with pytest.raises(ValueError, match=r"DistributedDataParallel averages gradients after .* use fully_shard"):
            offload(net, lamb(net), copies=SlowCopies())
        del net


def test_a_step_of_the_inner_optimizer() -> None:
    net = network()
    inner = lamb(net)
    optimizer = offloaded(net, inner)
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) of what offload\(\) returned"):
        inner.step()
    optimizer.step()


def cut(net: nn.Module) -> None:
    for param in net.parameters():
        param.data = param.data[:1]


@pytest.mark.parametrize("change", [nn.Module.double, cut])
def test_a_model_that_is_moved_afterwards(change: Callable[[nn.Module], Any]) -> None:
    net = network()
    optimizer = offloaded(net, Came(net.named_parameters(), lr=0.1))
    change(net)
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match=r"was offloaded from cpu as torch.float32 .* then make the optimizer"):
        optimizer.step()


def test_parameters_that_come_later() -> None:
    net = network()
    optimizer = offloaded(net, lamb(net))
    with pytest.raises(RuntimeError, match=r"add the group to the optimizer before offload\(\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_copies_of_the_optimizer(duplicate: Callable[[Any], Any]) -> None:
    net = network()
    with pytest.raises(TypeError, match=r"save state_dict\(\) instead"):
        duplicate(offloaded(net, lamb(net)))


def test_an_attribute_that_no_one_has() -> None:
    net = network()
    with pytest.raises(AttributeError, match="telemetri"):
        offloaded(net, lamb(net)).telemetri()
