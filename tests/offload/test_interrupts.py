"""Ctrl-C at every instruction of offload in the training loop: the step is taken or not, and the loop continues."""

from __future__ import annotations

import faulthandler
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import bighorn.offloading
from bighorn import Lamb, schedules
from bighorn.offloading import OffloadedOptimizer
from tests.support.offloading import loss_of, network, offloaded
from tests.support.optimizer_runs import assert_bitwise
from tests.support.slow_copies import SlowCopies

TRACED = str(Path(bighorn.offloading.__file__).parent)
"""The interrupted code. Python's own locks promise nothing: an interrupt inside `threading` can leave one held."""

SECONDS = 300
"""Seconds after which a test counts as hung, and the process ends with the stacks of all threads."""


class Interrupt:
    """KeyboardInterrupt at one line, or instruction, of this thread in the traced code."""

    def __init__(self, event: str) -> None:
        self.event, self.at, self.count = event, 0, 0

    @contextmanager
    def coming(self, at: int) -> Iterator[None]:
        self.at, self.count = at, 0
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        if event == self.event:
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


class Loop:
    """An offloaded training, and a plain one that repeats its steps."""

    def __init__(self, use: str) -> None:
        self.net, self.twin = network(), network()
        self.assigns, options = use == "assigned", {}
        if use == "clip":
            make: Any = lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4)  # noqa: E731
            options["max_grad_norm"] = 0.01
        else:
            make = lambda net: Lamb(net.named_parameters(), lr=schedules.Cosine(1e-3, 100_000))  # noqa: E731
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if use == "scaler" else None
        self.copies = SlowCopies(delay=0, seed=None)
        self.optimizer: OffloadedOptimizer = offloaded(
            self.net, make(self.net), copies=self.copies, scaler=self.scaler, **options
        )
        self.plain, self.clips = make(self.twin), use == "clip"
        self.steps, self.phase = 0, ""

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.net.parameters()]

    def taken(self) -> int:
        counts = {int(state["step"]) for state in self.optimizer.state.values()} or {0}
        assert len(counts) == 1, "some parameters have taken a step that others have not"
        return counts.pop()

    def backward(self, net: nn.Module) -> None:
        loss = loss_of(net, self.steps)
        if self.assigns:
            params = list(net.parameters())
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad
        elif net is self.net and self.scaler is not None:
            self.scaler.scale(loss).backward()
        else:
            loss.backward()

    def iteration(self) -> None:
        """Run one iteration of the training loop."""
        self.phase = "backward"
        self.backward(self.net)
        self.phase = "step"
        self.optimizer.step()
        self.phase = "after"
        if self.scaler is not None:
            self.scaler.update()
        self.optimizer.zero_grad()

    def follow(self) -> None:
        """Let the plain training take the step, and compare everything."""
        self.backward(self.twin)
        if self.clips:
            nn.utils.clip_grad_norm_(self.twin.parameters(), 0.01)
        self.plain.step()
        self.plain.zero_grad()

    def compare(self) -> None:
        self.optimizer.synchronize()
        assert_bitwise(list(self.net.parameters()), list(self.twin.parameters()))
        for ours, its in zip(self.optimizer.param_groups, self.plain.param_groups, strict=True):
            assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in its.items() if k != "params"}
        for (_, ours), (_, its) in zip(self.optimizer.state.items(), self.plain.state.items(), strict=True):
            assert_bitwise([ours[name] for name in its], list(its.values()))

    def settle(self) -> None:
        """Wait until the stepping thread and the copies are idle."""
        self.optimizer._worker.run(int)
        self.copies.settle()

    def recover(self, again: bool) -> None:
        """Apply a documented remedy after Ctrl-C: call step() again, or zero_grad()."""
        returned = self.optimizer._current.returned
        self.settle()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if again and self.phase == "step" and not returned:
                try:
                    self.optimizer.step()
                except RuntimeError as error:
                    assert "has not ended" in str(error)  # noqa: PT017
            if self.scaler is not None and self.phase == "step":
                self.scaler._per_optimizer_states.clear()
            self.optimizer.zero_grad()
        self.optimizer.synchronize()
        after = self.weights()
        taken = self.taken() - self.steps
        warned = any("all parameters have taken that step" in str(each.message) for each in said)
        if self.phase == "backward":
            assert (taken, warned) == (0, False)
        elif not returned and not again:
            assert taken == warned
        self.settle()
        assert_bitwise(self.weights(), after)
        if taken:
            self.follow()
        self.steps += taken

    def run(self, points: Iterable[int], interrupt: Interrupt) -> None:
        """Train one iteration with an interrupt at each point, and alternate the two remedies."""
        for again, at in zip(cycle([False, True]), points, strict=False):
            try:
                with interrupt.coming(at):
                    self.iteration()
            except KeyboardInterrupt:
                self.recover(again)
            else:
                assert not 0 < at <= interrupt.count, "Ctrl-C was swallowed"
                self.follow()
                self.steps += 1
            self.compare()


def total(interrupt: Interrupt, use: str) -> int:
    """Return the number of events in an iteration after the first."""
    loop = Loop(use)
    loop.run([0, 0], interrupt)
    return interrupt.count


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


USES = ["schedule", "clip", "scaler", "assigned"]


@pytest.mark.parametrize("use", USES)
def test_an_interrupt_at_some_lines(use: str) -> None:
    """The uses begin at different lines, so together they cover most lines with both remedies."""
    interrupt = Interrupt("line")
    last = total(interrupt, use)
    Loop(use).run([0, *range(1 + USES.index(use), last, len(USES))], interrupt)


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_an_interrupt_at_every_instruction(use: str) -> None:
    interrupt = Interrupt("opcode")
    last = total(interrupt, use)
    Loop(use).run(range(last + 2), interrupt)
