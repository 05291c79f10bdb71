"""Bighorn's optimizers equal torch's, timm's, optax's and pytorch_optimizer's with each option.

The two sides share no gradient tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb, Lars
from tests.support.case_tensors import Leaf
from tests.support.cases import Case, leaves_out
from tests.support.peer_runs import Witness, largest_difference, optax, package, starts, train
from tests.support.tables import for_every

CASE = Case(
    "witnesses",
    {},
    (
        Leaf("tiny", (7, 5), grad="tiny"),
        Leaf("vector", (17,)),
        Leaf("page", (4097,)),
        Leaf("one", (1,)),
        Leaf("conv", (3, 2, 3, 3)),
    ),
)

Make = Callable[..., torch.optim.Optimizer]


def trained(make: Make, dtype: torch.dtype, **options: Any) -> list[Parameter]:
    params = starts(CASE, dtype)
    train(CASE, make(params, **options), params)
    return params


def assert_close(ours: list[Parameter], theirs: list[Tensor], rtol: float) -> None:
    assert largest_difference(CASE, ours, theirs) <= rtol


@pytest.mark.parametrize("adam", [False, True], ids=["lamb", "adam"])
@pytest.mark.parametrize("grad_averaging", [True, False])
@pytest.mark.parametrize("decay_mode", ["ratio", "decoupled"])
def test_pytorch_optimizers_lamb(adam: bool, grad_averaging: bool, decay_mode: Literal["ratio", "decoupled"]) -> None:
    """This LAMB clamps ||x|| to 10 and, with `adam_debias`, is the paper's version 3. It also adds eps to ||u||."""
    common = {"weight_decay": 0.1, "grad_averaging": grad_averaging, "adam": adam, "eps": 1e-300}
    theirs = package("pytorch_optimizer", "Lamb", weight_decouple=decay_mode == "decoupled", adam_debias=True, **common)
    bounds = {"bias_correction": False, "weight_norm_bounds": (0, 10)}
    ours = trained(Lamb, torch.float64, decay_mode=decay_mode, backend="reference", **bounds, **common)
    assert_close(ours, run(theirs), 2e-14)


def run(witness: Witness) -> list[Tensor]:
    witness.need()
    return witness.run(CASE, False)


AMSGRAD, L2, DECOUPLED = {"second_moment": "amsgrad"}, {"decay_mode": "l2"}, {"decay_mode": "decoupled"}
DECAY, UP = {"weight_decay": 0.1}, {"maximize": True}
ADAM: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}, {}),
    "adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}, AMSGRAD),
    "adam-l2": (torch.optim.Adam, DECAY, DECAY | L2),
    "adam-l2-maximize": (torch.optim.Adam, DECAY | UP, DECAY | UP | L2),
    "adam-eps": (torch.optim.Adam, {"eps": 1e-2}, {"eps": 1e-2}),
    "adamw": (torch.optim.AdamW, DECAY, DECAY | DECOUPLED),
    "adamw-amsgrad-maximize": (torch.optim.AdamW, DECAY | UP | {"amsgrad": True}, DECAY | UP | DECOUPLED | AMSGRAD),
    "adamw-betas": (torch.optim.AdamW, DECAY | {"betas": (0.5, 0.9)}, DECAY | DECOUPLED | {"betas": (0.5, 0.9)}),
}


def adam_pair(id_: str, dtype: torch.dtype, backend: str) -> tuple[list[Parameter], list[Tensor]]:
    make, theirs, ours = ADAM[id_]
    if leaves_out(backend, ours):
        pytest.skip(f"{backend} leaves out {ours}")
    common = {"lr": 0.1, "eps": 1e-8}
    mine = trained(Lamb, dtype, **{**common, "adam": True, "backend": backend, **ours})
    return mine, list(trained(make, dtype, **{**common, **theirs}))


@for_every("id_", ADAM)
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_degenerate_mode_is_torchs_adam_in_float64(id_: str, name: str) -> None:
    assert_close(*adam_pair(id_, torch.float64, name), 4e-15)


@for_every("id_", ADAM)
def test_degenerate_mode_is_torchs_adam_in_float32(id_: str, backend: str) -> None:
    assert_close(*adam_pair(id_, torch.float32, backend), 4e-7)


# ---- LARS -----------------------------------------------------------------------------------------------------------

BOOL = (False, True)


def combined(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return every combination of options; Nesterov momentum needs a momentum that is not 0."""
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    return [row for row in rows if row.get("momentum", 0.9) or not row["nesterov"]]


SGD = {"nesterov": BOOL, "momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)}
LARS: dict[str, tuple[Callable[..., Witness], list[dict[str, Any]]]] = {
    "timm": (
        lambda **options: package("timm", "Lars", trust_coeff=0.3, **options),
        combined(trust_clip=BOOL, always_adapt=BOOL, eps=(1e-8, 1e-3), **SGD),
    ),
    "pytorch_optimizer": (
        lambda **options: package("pytorch_optimizer", "LARS", trust_coefficient=0.3, foreach=False, **options),
        combined(maximize=BOOL, **SGD),
    ),
    "optax": (
        lambda **options: optax("lars", trust_coefficient=0.3, **options),
        combined(nesterov=BOOL, weight_decay=(0.0, 0.1), eps=(0.0, 1e-3)),
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("preset", LARS)
def test_lars_of_other_packages(preset: Any) -> None:
    witness, rows = LARS[preset]
    for options in rows:
        theirs = run(witness(**options))
        for name in ("reference", "foreach"):
            given = {"lr": 0.1, "backend": name, "trust_coefficient": 0.3, **options}
            ours = trained(lambda params, **rest: Lars.like(preset, params, **rest), torch.float64, **given)
            assert largest_difference(CASE, ours, theirs) <= 2e-14, given


def test_the_witnesses_can_disagree() -> None:
    """The bounds above detect the difference between versions 3 and 5 of the paper."""
    five, three = (
        trained(Lamb, torch.float64, weight_decay=0.1, bias_correction=each, backend="reference")
        for each in (True, False)
    )
    assert largest_difference(CASE, five, list(three)) > 1e-3
