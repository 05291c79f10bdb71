"""With overlap="forward", a module waits only for its own weights."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bighorn import Lamb
from bighorn.offloading.copies import Pairs
from bighorn.offloading.forward import users
from tests.support.offloading import OVERLAPS, Overlap, Twins, loss_of, network, offloaded, train
from tests.support.optimizer_runs import assert_bitwise
from tests.support.processes import LIMIT
from tests.support.slow_copies import SlowArrival, SlowCopies


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a list of blocks, and attention that uses its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def names_of(model: nn.Module, params: list[Tensor]) -> set[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)] for param in params}


def test_the_users_of_parameters() -> None:
    model = Tied()
    found = {id(module): names_of(model, params) for module, params in users(model)}
    assert found[id(model)] == {"embedding.weight", "scale", "norm.weight", "norm.bias"}
    assert found[id(model.head)] == {"embedding.weight"}
    first = {name for name, _ in model.named_parameters() if name.startswith("blocks.0.")}
    assert found[id(model.blocks[0])] == first
    assert "blocks.0.self_attn.out_proj.weight" in first
    assert id(model.blocks[0].self_attn) not in found


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def lamb(model: nn.Module) -> Lamb:
    return Lamb(model.named_parameters(), lr=0.05)


def test_a_model_with_tied_weights_and_attention() -> None:
    twins = Twins(lamb, tied, overlap="forward", copies=SlowCopies(bandwidth=3e5, seed=3))
    for step in range(5):
        tokens = torch.randint(0, 11, (5, 3), generator=torch.Generator().manual_seed(step))
        for model, optimizer in twins:
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal()


class Asked:
    """An arrival that tells when it is waited for."""

    def __init__(self, arrival: SlowArrival, asked: threading.Event) -> None:
        self.arrival, self.asked = arrival, asked

    def synchronize(self) -> None:
        self.asked.set()
        self.arrival.synchronize()

    wait = synchronize


class Held(SlowCopies):
    """Copies to the device; those after the first begin when one of them is waited for."""

    def __init__(self) -> None:
        super().__init__(seed=None)
        self.asked, self.sent, self.copied = threading.Event(), 0, 0
        copy = self.inward.copy

        def hold(pairs: list[tuple[Tensor, Tensor]], arrival: SlowArrival) -> None:
            assert self.copied == 0 or self.asked.wait(LIMIT)
            self.copied += 1
            copy(pairs, arrival)

        self.inward.copy = hold  # type: ignore[method-assign]

    def to_device(self, pairs: Pairs) -> Any:
        arrival = super().to_device(pairs)
        self.sent += 1
        return arrival if self.sent == 1 else Asked(arrival, self.asked)


def test_the_step_returns_and_the_first_layers_run_while_others_are_on_their_way() -> None:
    net, copies = network(), Held()
    optimizer = offloaded(net, lamb(net), overlap="forward", copies=copies)
    before = net[5].weight.clone()
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    net[1](net[0](torch.ones(9)))  # of the first bucket that is sent
    assert not copies.asked.is_set()
    assert torch.equal(net[5].weight, before)
    net[5](torch.ones(90))
    assert not torch.equal(net[5].weight, before)


@pytest.mark.parametrize("of_submodule", [False, True])
def test_a_state_dict_waits(of_submodule: bool) -> None:
    twins = Twins(lamb, overlap="forward", copies=SlowCopies(bandwidth=1e6, seed=None))
    twins.train(range(1))
    saved = [[value.clone() for value in (net[3] if of_submodule else net).state_dict().values()] for net in twins.nets]
    assert_bitwise(saved[1], saved[0])


def through_a_file(model: nn.Module) -> nn.Module:
    """Copy as pickle does, which torch.save uses."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_copy_of_the_model_is_not_offloaded(overlap: Overlap, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    twins = Twins(lamb, overlap=overlap)
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
    again = offloaded(copied, own, overlap=overlap)  # a copy can be offloaded
    train(copied, again, range(4, 5))
    again.synchronize()
    train(net, twins.offloaded, range(3, 4))
