"""Random loops with TailOverlap equal DistributedDataParallel without it, bit for bit.

A group of one process has the same buckets and hooks as one of several, and a failure can be shrunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bighorn import Came, Lamb, TailOverlap
from tests.support.attack_settings import tries
from tests.support.overlap_runs import backward, distributed
from tests.support.processes import group_of_one

WIDTH = 6
LAYERS = ("linear", "shared", "norm", "double", "frozen")
ACTIONS = ("accumulate", "no-grad", "retain", "synchronize", "clip", "drop", "hook", "load", "fail", "inf", "keep")
"""Actions between two steps: accumulate and retain before the last backward(), the others after it."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "lamb": lambda params: Lamb(params, lr=0.01, weight_decay=0.1),
    "lamb-foreach": lambda params: Lamb(params, lr=0.01, skip_nonfinite=True, backend="foreach"),
    "came": lambda params: Came(params, lr=0.01),
    "adamw": lambda params: AdamW(params, lr=0.01),
    "adamw-fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: SGD(params, lr=0.01, momentum=0.9),
}


class Net(nn.Module):
    def __init__(self, layers: Sequence[str], unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        for kind in layers:
            layer: Any = nn.LayerNorm(WIDTH) if kind == "norm" else nn.Linear(WIDTH, WIDTH)
            if kind == "shared":
                layer.weight = self.layers[0].weight
            dtype = torch.float64 if kind == "double" else torch.float32
            self.layers.append(layer.requires_grad_(kind != "frozen").to(dtype))
        self.unused = nn.Linear(WIDTH, 1) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        for layer in layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype))).to(x.dtype)
        return x


@dataclass(frozen=True)
class Setup:
    """A model, an optimizer and whether it has a scaler."""

    layers: Sequence[str]
    bucket_cap_mb: float
    static_graph: bool
    optimizer: str
    scaled: bool
    outside: bool
    """Whether the optimizer holds a parameter outside the model."""


class Loop:
    """A training loop, with TailOverlap or without."""

    def __init__(self, setup: Setup, overlaps: bool) -> None:
        torch.manual_seed(0)
        self.module, self.outside = Net(setup.layers, setup.static_graph), nn.Parameter(torch.ones(3))
        self.ddp = distributed(self.module, bucket_cap_mb=setup.bucket_cap_mb, static_graph=setup.static_graph)
        self.params = [*self.module.parameters(), *[self.outside] * setup.outside]
        self.optimizer = OPTIMIZERS[setup.optimizer](self.params)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=setup.scaled)
        self.overlap = TailOverlap(self.ddp, self.optimizer, scaler=self.scaler) if overlaps else None
        self.hooks: list[Any] = []

    def forward(self, step: int) -> Tensor:
        samples = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        result: Tensor = self.ddp(samples).square().mean() + self.outside.square().sum()
        return result

    def iterate(self, step: int, actions: frozenset[str]) -> None:
        """Take one step."""
        if "accumulate" in actions:
            with self.ddp.no_sync():
                backward(self.scaler.scale(self.forward(step + 1000)))
        loss = self.scaler.scale(self.forward(step) * (torch.inf if "inf" in actions else 1.0))
        loss.backward(retain_graph="retain" in actions)  # type: ignore[no-untyped-call]
        if "retain" in actions:
            self.synchronize()
            backward(loss)
        if "no-grad" in actions:
            with torch.no_grad():
                self.forward(0)
        if "synchronize" in actions or "clip" in actions:
            self.synchronize()
        if "clip" in actions:
            nn.utils.clip_grad_norm_(self.params, 0.1)
        if "drop" in actions:
            self.params[0].grad = None
        if "hook" in actions:
            self.hooks.append(self.optimizer.register_step_pre_hook(lambda *_: None))
        if "load" in actions:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        if "fail" in actions:
            group, lr = self.optimizer.param_groups[0], self.optimizer.param_groups[0]["lr"]
            group["lr"] = -1.0
            with pytest.raises(ValueError, match=r"lr=-1\.0"):
                self.step()
            group["lr"] = lr
        self.step()
        self.scaler.update()
        if "keep" not in actions:
            (self.overlap or self.optimizer).zero_grad()

    def synchronize(self) -> None:
        if self.overlap is not None:
            self.overlap.synchronize()

    def step(self) -> None:
        if self.overlap is None:
            self.scaler.step(self.optimizer)
        else:
            self.overlap.step()

    def tensors(self) -> Iterator[Tensor]:
        """Yield weights and counted state; a skipped first step may have created zeros in one of the loops."""
        for param in self.params:
            yield param.detach()
            state = self.optimizer.state.get(param, {})
            yield from [value.detach() for value in state.values() if state.get("step", 1)]
        yield torch.tensor(self.scaler.get_scale())


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with group_of_one():
        yield


SETUPS = st.builds(
    Setup,
    st.lists(st.sampled_from(LAYERS), max_size=4),
    st.sampled_from([1e-5, 1e-4, 25]),
    st.booleans(),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.booleans(),
    st.booleans(),
)


@tries(150)
@given(SETUPS, st.lists(st.frozensets(st.sampled_from(ACTIONS), max_size=4), min_size=1, max_size=5))
def test_random_loops(setup: Setup, iterations: list[frozenset[str]]) -> None:
    loops = [Loop(setup, overlaps) for overlaps in (True, False)]
    # torch asserts that the first backward() of a static graph is synchronized, and that none is repeated.
    never = {"accumulate", "retain"} if setup.static_graph else set()
    # Without TailOverlap, torch's optimizers step in part, and a scaler skips, before options are checked.
    never |= {"fail"} if "lamb" not in setup.optimizer and setup.optimizer != "came" else set()
    # Unscaled gradients do not add up with scaled ones, and momentum without memory is not defined after a skip.
    never |= {"keep"} if setup.scaled else {"inf"}
    for step, wanted in enumerate(iterations):
        actions = wanted - never - ({"fail"} if "inf" in wanted else set())
        for loop in loops:
            loop.iterate(step, actions)
        for ours, theirs in zip(*(loop.tensors() for loop in loops), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    for loop in loops:
        loop.synchronize()
        with contextlib.suppress(IndexError):
            loop.hooks.pop().remove()
