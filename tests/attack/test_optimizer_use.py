"""Random sequences of calls to an optimizer; each step is compared with the float64 reference."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor
from torch.nn import Parameter

from tests.attack.test_random_cases import ROUNDINGS
from tests.backends.test_backends import check_step, twins_of
from tests.contract.test_reports import REPORTS
from tests.support.attack_settings import tries
from tests.support.case_tensors import Leaf
from tests.support.cases import CAME, KINDS, LAMB, LARS, Case, Optimizer, set_gradients
from tests.support.error_checks import same, snapshot
from tests.support.optimizer_runs import OWN, saved_and_loaded

LEAVES = (
    Leaf("conv1.bias", (5,)),
    Leaf("plain.weight", (3, 2, 2), layout="transposed"),
    Leaf("big.weight", (4, 3)),
    Leaf("like.weight", (4, 3)),
)
LATER = Leaf("later.weight", (2, 3))
PRECISIONS: tuple[tuple[torch.dtype, dict[str, Any]], ...] = (
    (torch.float32, {}),
    (torch.float32, {"state_dtype": "int8", "min_8bit_size": 1}),
    (torch.float32, {"state_dtype": torch.bfloat16}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"weight_rounding": "kahan"}),
    (torch.bfloat16, {"weight_rounding": "master"}),
)
ROWS = {
    table.kind: {name: options for name, options in table.options.items() if "by-callable" not in name}  # not pickled
    for table in (LAMB, CAME, LARS)
}


@tries(1000)
class OptimizerUse(RuleBasedStateMachine):
    """An optimizer of some parameters, and the reference backend's optimizer of their float64 copies."""

    @initialize(
        kind=st.sampled_from(KINDS),
        backend=st.sampled_from(["cpu", "foreach"]),
        precision=st.sampled_from(PRECISIONS),
        row=st.integers(0, 99),
        key=st.integers(0, 2**20),
    )
    def make(self, kind: Any, backend: str, precision: tuple[Any, Any], row: int, key: int) -> None:
        rows = ROWS[kind]
        options = {**rows[sorted(rows)[row % len(rows)]], **precision[1]}
        if options.get("state_dtype") == "int8" and options.get("second_moment") == "amsgrad":
            del options["second_moment"]
        if options.get("state_dtype") == torch.bfloat16 and options.get("second_moment") == "adagrad":
            del options["second_moment"]
        if options.get("state_dtype") == torch.bfloat16 and options.get("betas") == (0.9, 0.0, 0.0):
            del options["betas"]  # all u are 1 or -1, so elements of the momentum reach ties together
        case = Case(f"use-{key}", options, LEAVES, dtype=precision[0]).of(kind)
        self.backend = backend if case.runs_on(backend) else "foreach"
        self.case, self.steps = case, 0
        self.parameters = case.parameters()
        self.optimizer = case.optimizer(self.parameters, self.backend)
        self.twins, self.twin = twins_of(case, self.parameters)
        self.frozen: set[int] = set()

    def gradients(self) -> list[Tensor | None]:
        self.steps += 1
        return [None if i in self.frozen else g for i, g in enumerate(self.case.gradients(self.steps))]

    def everything(self) -> Any:
        return snapshot(self.parameters, self.optimizer)

    @precondition(lambda self: len(self.frozen) < len(self.parameters))
    @rule(often=st.integers(1, 2))
    def step(self, often: int) -> None:
        for _ in range(often):
            check_step(
                self.case,
                self.parameters,
                self.optimizer,
                self.twins,
                self.twin,
                self.gradients(),
                f"step {self.steps}",
                ROUNDINGS,
            )

    @precondition(lambda self: self.case.options.get("skip_nonfinite"))
    @rule(bad=st.sampled_from([float("nan"), float("inf")]))
    def skip(self, bad: float) -> None:
        gradients = self.gradients()
        present = [g for g in gradients if g is not None]
        if present:
            present[-1].view(-1)[-1:].fill_(bad)
            before = [p.detach().clone() for p in self.parameters]
            set_gradients(self.parameters, gradients)
            self.optimizer.step()
            set_gradients(self.twins, [None if g is None else g.double() for g in gradients])
            self.twin.step()  # creates state, like the step of the other optimizer
            assert all(a.equal(b) for a, b in zip(self.parameters, before, strict=True)), "a bad step has written"

    @rule(which=st.integers(0, 4))
    def freeze_or_thaw(self, which: int) -> None:
        which %= len(self.parameters)
        self.frozen ^= {which}
        for p in (self.parameters[which], self.twins[which]):
            p.grad = None
            p.requires_grad_(which not in self.frozen)

    @rule(which=st.integers(0, 4))
    def move(self, which: int) -> None:
        """Move a parameter to new memory in another layout."""
        p = self.parameters[which % len(self.parameters)]
        p.grad = None
        p.data = p.data.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)

    @rule(which=st.integers(0, 4), factor=st.sampled_from([0.0, 0.5, 2.0]))
    def write(self, which: int, factor: float) -> None:
        """Write into a parameter, like a program that reinitialises a layer."""
        if self.case.options.get("hyperball"):
            factor = factor or 0.5  # a new optimizer refuses a matrix of zeros
        with torch.no_grad():
            self.parameters[which % len(self.parameters)].mul_(factor)

    @rule(lr=st.sampled_from([0.0, 0.02, 0.1]), weight_decay=st.sampled_from([0.05, 0.3]), as_tensor=st.booleans())
    def set_numbers(self, lr: float, weight_decay: float, as_tensor: bool) -> None:
        for optimizer in (self.optimizer, self.twin):
            for group in optimizer.param_groups:
                group["weight_decay"] = torch.tensor(weight_decay, dtype=torch.float64) if as_tensor else weight_decay
                if "lr" not in self.case.options:
                    group["lr"] = torch.tensor(lr, dtype=torch.float64) if as_tensor else lr

    @rule(report=st.sampled_from(sorted(REPORTS)))
    def report(self, report: str) -> None:
        before = self.everything()
        REPORTS[report](self.optimizer)
        assert same(self.everything(), before), "a report has changed something"

    @rule(key=st.sampled_from(["momentum", "nesterov", "initial_momentum", "tags"]))
    def write_a_key(self, key: str) -> None:
        """Write a key of other tools into the groups of one of the two optimizers."""
        for group in self.optimizer.param_groups if key not in self.optimizer.algorithm.options else ():
            group[key] = 0.9

    @rule()
    def exchange_states(self) -> None:
        """Exchange the states of two parameters, like a program that exchanges two layers."""
        for optimizer, parameters in ((self.optimizer, self.parameters), (self.twin, self.twins)):
            first, second = parameters[2:4]
            if first in optimizer.state and second in optimizer.state:
                states = optimizer.state.pop(first), optimizer.state.pop(second)
                optimizer.state[second], optimizer.state[first] = states

    @precondition(lambda self: len(self.parameters) == len(LEAVES))
    @rule(own=st.booleans())
    def add_param_group(self, own: bool) -> None:
        self.case = replace(self.case, leaves=(*LEAVES, LATER))
        options = OWN[self.case.kind] if own else {}
        if own and self.case.options.get("hyperball"):
            options = {**options, "hyperball": False}  # a group of Adam's steps says that its matrices leave the ball
        self.parameters.append(self.case.parameters()[-1])
        self.twins.append(Parameter(self.parameters[-1].detach().double()))
        for optimizer, parameters in ((self.optimizer, self.parameters), (self.twin, self.twins)):
            optimizer.add_param_group({"params": [(LATER.name, parameters[-1])], **options})

    def fresh(self) -> Optimizer:
        first, later = self.parameters[: len(LEAVES)], self.parameters[len(LEAVES) :]
        optimizer = replace(self.case, leaves=LEAVES).optimizer(first, self.backend)
        for parameter in later:
            optimizer.add_param_group({"params": [(LATER.name, parameter)]})
        return optimizer

    @rule()
    def load(self) -> None:
        """Load the state dict into a new optimizer, like a restarted program."""
        before = self.everything()
        optimizer = self.fresh()
        optimizer.load_state_dict(saved_and_loaded(self.optimizer.state_dict()))
        self.optimizer = optimizer
        assert same(self.everything(), before)

    @rule(pickled=st.booleans())
    def copy(self, pickled: bool) -> None:
        before = self.everything()
        for p in self.parameters:
            p.grad = None
        both = (self.parameters, self.optimizer)
        self.parameters, self.optimizer = pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)
        assert same(self.everything(), before)

    @rule()
    def set_to_none(self) -> None:
        before = self.everything()
        for optimizer in (self.optimizer, self.twin):  # schedules count this step too
            optimizer.zero_grad()
            optimizer.step()
        assert same(self.everything()[:2], before[:2]), "a step without gradients has written"


def test_the_reference_agrees_after_any_sequence() -> None:
    run_state_machine_as_test(OptimizerUse)


def test_a_lost_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attack.test_optimizer_use.saved_and_loaded", lambda state: {**state, "state": {}})
    unshrunk = hypothesis.settings(OptimizerUse.TestCase.settings, max_examples=500, phases=[hypothesis.Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(OptimizerUse, settings=unshrunk)
