"""Trainings by optimizers of other packages, or by their formulas, and by ours on the same tensors."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support import peer_formulas
from tests.support.cases import LRS, Case, set_gradients, set_lr

STEPS = 10
BARE = {"weight_decay": 0.0}

FORMULA = "its formula"
INSTALL = {
    "optax": "pip install 'bighorn[peers]'",
    "keras": "pip install 'bighorn[peers]'",
    "timm": "pip install --no-deps timm",
    "pytorch_optimizer": "pip install 'bighorn[peers]'",
    "came_pytorch": "pip install 'bighorn[peers]'",
}
"""Packages that are witnesses, and how to install them; timm's dependencies do not have a CPU build everywhere."""


@dataclass(frozen=True, eq=False)
class Witness:
    """A training by a peer."""

    name: str
    """The package, or `FORMULA`."""
    run: Callable[[Case, bool], list[Tensor]]
    """Trains a case in float64 and returns its tensors; with True, biases have a group without decay."""

    def need(self) -> None:
        if self.name in INSTALL and find_spec(self.name) is None:
            pytest.skip(f"{self.name} is not installed: {INSTALL[self.name]}")


@functools.cache
def witnessed(witness: Witness, case: Case, grouped: bool = False) -> list[Tensor]:
    return witness.run(case, grouped)


def lrs() -> Iterator[tuple[int, float]]:
    yield from ((step, LRS[step % len(LRS)]) for step in range(STEPS))


def gradients(case: Case, step: int, dtype: torch.dtype) -> list[Tensor]:
    return [gradient.to(dtype) for gradient in case.gradients(step) if gradient is not None]


def starts(case: Case, dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(parameter.detach().to(dtype)) for parameter in case.parameters()]


def in_groups(case: Case, params: Sequence[Parameter], **undecayed: Any) -> list[dict[str, Any]]:
    """Return the parameters with biases in a separate group."""
    pairs = [(leaf.name, parameter) for leaf, parameter in zip(case.leaves, params, strict=True)]
    biases = [pair for pair in pairs if "bias" in pair[0]]
    return [{"params": [pair for pair in pairs if "bias" not in pair[0]]}, {"params": biases, **undecayed}]


def train(case: Case, optimizer: torch.optim.Optimizer, params: Sequence[Parameter]) -> None:
    for step, lr in lrs():
        set_lr(optimizer, lr)
        set_gradients(params, gradients(case, step, params[0].dtype))
        optimizer.step()


def largest_difference(case: Case, ours: Sequence[Tensor], theirs: Sequence[Tensor], without: str = "^$") -> float:
    """Return the largest ||ours - theirs|| / ||theirs|| of the tensors whose name does not match a pattern."""
    largest = 0.0
    for leaf, mine, other in zip(case.leaves, ours, theirs, strict=True):
        if not re.search(without, leaf.name):
            right = other.detach().double()
            error, norm = float((mine.detach().double() - right).norm()), float(right.norm())
            largest = max(largest, error / norm if norm else error)
    return largest


# ---- the witnesses ------------------------------------------------------------------------------------------------


def formula(step: Callable[..., None], **settings: Any) -> Witness:
    """Return a witness that runs a peer's formula."""

    def run(case: Case, grouped: bool) -> list[Tensor]:
        leaves = [
            peer_formulas.Leaf(leaf.name, p.flatten().tolist(), leaf.shape, not (grouped and "bias" in leaf.name))
            for leaf, p in zip(case.leaves, starts(case, torch.float64), strict=True)
        ]
        for count, lr in lrs():
            for leaf, gradient in zip(leaves, gradients(case, count, torch.float64), strict=True):
                leaf.g = gradient.flatten().tolist()
            step(leaves, lr, **settings)
        return [torch.tensor(leaf.x, dtype=torch.float64).view(leaf.shape) for leaf in leaves]

    return Witness(FORMULA, run)


def package(name: str, kind: str, **options: Any) -> Witness:
    """Return a witness that runs a package's torch optimizer; timm's are imported from their own modules."""

    def run(case: Case, grouped: bool) -> list[Tensor]:
        module = peer_formulas.installed_timm(kind.lower()) if name == "timm" else importlib.import_module(name)
        params = starts(case, torch.float64)
        groups = in_groups(case, params, **BARE) if grouped else [{"params": params}]
        train(case, getattr(module, kind)(groups, lr=0.1, **options), params)
        return [parameter.detach() for parameter in params]

    return Witness(name, run)


@contextlib.contextmanager
def jax_in_double() -> Iterator[None]:
    jax: Any = importlib.import_module("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def optax(name: str, **options: Any) -> Witness:
    """Return a witness that runs an optimizer of optax; it compiles a whole step, which is quickest."""

    def run(case: Case, _: bool) -> list[Tensor]:
        jax: Any = importlib.import_module("jax")
        peer: Any = importlib.import_module("optax")
        with jax_in_double():
            schedule = jax.numpy.asarray([lr for _, lr in lrs()])
            optimizer = getattr(peer, name)(lambda count: schedule[count], **options)

            @jax.jit  # type: ignore[untyped-decorator]
            def step(params: Any, state: Any, grads: Any) -> Any:
                updates, state = optimizer.update(grads, state, params)
                return peer.apply_updates(params, updates), state

            params = [jax.numpy.asarray(p.detach().numpy()) for p in starts(case, torch.float64)]
            state = optimizer.init(params)
            for count in range(STEPS):
                grads = [jax.numpy.asarray(g.numpy()) for g in gradients(case, count, torch.float64)]
                params, state = step(params, state, grads)
            return [torch.tensor(values.tolist(), dtype=torch.float64) for values in params]

    return Witness("optax", run)


def keras_lamb(case: Case, _: bool) -> list[Tensor]:
    """Train with Keras on torch. On import, it reads its backend from the environment and writes settings to disk."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        patch.setenv("KERAS_HOME", folder)
        keras = importlib.import_module("keras")
        keras.config.set_floatx("float64")
        variables = [keras.Variable(p.detach().numpy()) for p in starts(case, torch.float64)]
        optimizer = keras.optimizers.Lamb(weight_decay=0.1)
        for step, lr in lrs():
            optimizer.learning_rate = lr
            grads = [keras.ops.convert_to_tensor(g.numpy()) for g in gradients(case, step, torch.float64)]
            optimizer.apply(grads, variables)
        return [variable.value.detach() for variable in variables]


KERAS_LAMB = Witness("keras", keras_lamb)
