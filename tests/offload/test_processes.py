"""Copies of an offloaded model, here and in forked and spawned processes."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bighorn import Lamb
from tests.support.offloading import Twins, loss_of, network, offloaded, train
from tests.support.optimizer_runs import assert_bitwise
from tests.support.processes import FORKS, LIMIT


def lamb(net: nn.Module) -> Lamb:
    return Lamb(net.named_parameters(), lr=0.1)


def in_a_fork(calls: list[Callable[[], Any]]) -> list[str]:
    """Return the errors of calls in a forked process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        said = []
        for call in calls:
            try:
                call()
                said.append("nothing")
            except BaseException as error:
                said.append(str(error))
        os.write(writer, "\n".join(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read().split("\n")
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_refuses_to_step() -> None:
    """A separate process forks, since JAX, which other tests import, warns of every fork."""
    process = FORKS.Process(target=refuse_to_step_in_a_fork)
    process.start()
    process.join(LIMIT)
    assert process.exitcode == 0


def refuse_to_step_in_a_fork() -> None:
    """A fork has no stepping thread, and would wait for it forever."""
    twins = Twins(lamb)
    theirs = twins.offloaded
    twins.train(range(2))
    step, *reads = in_a_fork([theirs.step, theirs.state_dict, twins.nets[1][0].state_dict])
    assert "and this fork has no thread that steps: make model and optimizer in the process that trains" in step
    assert reads == ["nothing", "nothing"]
    twins.train(range(2, 4))
    twins.assert_equal()


def trained_elsewhere(net: nn.Module, found: Any) -> None:
    """Train a copy of the model in a separate process."""
    twin = network()
    twin.load_state_dict(net.state_dict())
    copied = copy.deepcopy(net)
    for each in (twin, copied):
        train(each, lamb(each), range(2))
    found.put([torch.equal(a, b) for a, b in zip(copied.parameters(), twin.parameters(), strict=True)])


def test_another_process_gets_a_model_that_is_not_offloaded() -> None:
    """Arguments are pickled as for a spawned process, which moves CPU weights to shared memory."""
    twins = Twins(lamb)
    twins.train(range(2))
    twins.offloaded.synchronize()
    found = FORKS.SimpleQueue()
    child = FORKS.Process(target=trained_elsewhere, args=(twins.nets[1], found))
    child.start()
    assert found.get() == [True] * 8
    child.join()
    assert child.exitcode == 0
    twins.train(range(2, 4))
    twins.assert_equal()


def through_a_file(model: nn.Module) -> nn.Module:
    """Copy as pickle does, which torch.save uses."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_a_file])
def test_a_copy_of_the_model_is_not_offloaded(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    twins = Twins(lamb)
    twins.train(range(3))
    twins.assert_equal()
    net = twins.nets[1]
    copied = duplicate(net)
    assert_bitwise(list(copied.parameters()), list(net.parameters()))
    before = [param.clone() for param in net.parameters()]
    loss_of(copied, 3).backward()
    assert all(param.grad is not None for param in copied.parameters())
    own = lamb(copied)
    own.step()
    copied.state_dict()
    assert_bitwise(list(net.parameters()), before)
    train(copied, offloaded(copied, own), range(4, 5))  # a copy can be offloaded
    train(net, twins.offloaded, range(3, 4))
