"""Bighorn's optimizers equal those of other packages, with common options: optax, pytorch_optimizer, timm, torch.

The two sides share no gradient tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb, Lars
from tests.support import peer_formulas
from tests.support.cases import leaves_out
from tests.support.tables import for_every

SHAPES = ((7, 5), (17,), (4097,), (1,), (3, 2, 3, 3))
STEPS = 10


def parameters(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(11)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [Parameter(values.to(dtype)) for values in made]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return gradients; one tensor's are tiny, so that eps matters, and another's contain zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    made[0] *= 1e-3
    made[2][::3] = 0.0
    return [values.to(dtype) for values in made]


def lrs() -> Iterator[tuple[int, float]]:
    yield from ((step, 0.01 * (1 + step % 3)) for step in range(STEPS))


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], dtype: torch.dtype) -> None:
    for step, lr in lrs():
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter, gradient in zip(params, gradients(step, dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()


def assert_close(ours: list[Parameter], theirs: list[Tensor], rtol: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        error = (mine.detach().double() - other.detach().double()).norm() / other.detach().double().norm()
        assert error <= rtol, f"shape {tuple(mine.shape)}: {error:.2e}"


@pytest.fixture
def jax_in_double() -> Iterator[None]:
    jax = pytest.importorskip("jax")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def optax_lamb(dtype: torch.dtype, name: str = "lamb", **options: Any) -> list[Tensor]:
    import jax.numpy as jnp

    optax = pytest.importorskip("optax")
    schedule = jnp.asarray([lr for _, lr in lrs()])
    optimizer = getattr(optax, name)(lambda count: schedule[count], **options)
    params = [jnp.asarray(p.detach().numpy()) for p in parameters(dtype)]
    state = optimizer.init(params)
    for step, _ in lrs():
        updates, state = optimizer.update([jnp.asarray(g.numpy()) for g in gradients(step, dtype)], state, params)
        params = optax.apply_updates(params, updates)
    return [torch.tensor(values.tolist(), dtype=dtype) for values in params]


@pytest.mark.parametrize("adam", [False, True], ids=["lamb", "adam"])
@pytest.mark.parametrize("grad_averaging", [True, False])
@pytest.mark.parametrize("decay_mode", ["ratio", "decoupled"])
def test_pytorch_optimizer(adam: bool, grad_averaging: bool, decay_mode: Literal["ratio", "decoupled"]) -> None:
    """This LAMB clamps ||x|| to 10 and, with `adam_debias`, is the paper's version 3. It also adds eps to ||u||."""
    peer = pytest.importorskip("pytorch_optimizer")
    common: dict[str, Any] = {
        "lr": 0.01,
        "weight_decay": 0.1,
        "grad_averaging": grad_averaging,
        "adam": adam,
        "eps": 1e-300,
    }
    theirs = parameters(torch.float64)
    train(
        peer.Lamb(theirs, weight_decouple=decay_mode == "decoupled", adam_debias=True, **common), theirs, torch.float64
    )
    ours = parameters(torch.float64)
    mine = Lamb(
        ours, decay_mode=decay_mode, bias_correction=False, weight_norm_bounds=(0, 10), backend="reference", **common
    )
    train(mine, ours, torch.float64)
    assert_close(ours, list(theirs), 2e-14)


Make = Callable[..., torch.optim.Optimizer]
ADAM: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}, {}),
    "adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}, {"second_moment": "amsgrad"}),
    "adam-l2": (torch.optim.Adam, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decay_mode": "l2"}),
    "adam-l2-maximize": (
        torch.optim.Adam,
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "decay_mode": "l2", "maximize": True},
    ),
    "adam-eps": (torch.optim.Adam, {"eps": 1e-2}, {"eps": 1e-2}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decay_mode": "decoupled"}),
    "adamw-amsgrad-maximize": (
        torch.optim.AdamW,
        {"weight_decay": 0.1, "amsgrad": True, "maximize": True},
        {"weight_decay": 0.1, "decay_mode": "decoupled", "second_moment": "amsgrad", "maximize": True},
    ),
    "adamw-betas": (
        torch.optim.AdamW,
        {"weight_decay": 0.01, "betas": (0.5, 0.9)},
        {"weight_decay": 0.01, "decay_mode": "decoupled", "betas": (0.5, 0.9)},
    ),
}


def adam_pair(id_: str, dtype: torch.dtype, backend: str) -> tuple[list[Parameter], list[Tensor]]:
    make, torch_options, our_options = ADAM[id_]
    if leaves_out(backend, our_options):
        pytest.skip(f"{backend} leaves out {our_options}")
    theirs = parameters(dtype)
    train(make(theirs, **{"eps": 1e-8, **torch_options}), theirs, dtype)
    ours = parameters(dtype)
    train(Lamb(ours, adam=True, backend=backend, **{"eps": 1e-8, **our_options}), ours, dtype)
    return ours, list(theirs)


@pytest.mark.parametrize("id_", ADAM)
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_degenerate_mode_is_torchs_adam_in_float64(id_: str, name: str) -> None:
    ours, theirs = adam_pair(id_, torch.float64, name)
    assert_close(ours, theirs, 2e-15)


@pytest.mark.parametrize("id_", ADAM)
def test_degenerate_mode_is_torchs_adam_in_float32(id_: str, backend: str) -> None:
    ours, theirs = adam_pair(id_, torch.float32, backend)
    assert_close(ours, theirs, 4e-7)


# ---- LARS -----------------------------------------------------------------------------------------------------------

BOOL = (False, True)


def combined(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return every combination of options; torch's momentum and its kin have Nesterov's only if it is not 0."""
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    return [row for row in rows if row.get("momentum", 0.9) or not row["nesterov"]]


SGD = {"nesterov": BOOL, "momentum": (0.0, 0.9), "weight_decay": (0.0, 0.1)}


def lars_of(preset: Any, name: str, options: dict[str, Any]) -> list[Parameter]:
    params = parameters(torch.float64)
    train(Lars.like(preset, params, backend=name, trust_coefficient=0.3, **options), params, torch.float64)
    return params


@pytest.mark.skipif(peer_formulas.TIMM_ABSENT is not None, reason=str(peer_formulas.TIMM_ABSENT))
@for_every("options", combined(trust_clip=BOOL, always_adapt=BOOL, eps=(1e-8, 1e-3), **SGD), ids=str)
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_timms_lars(name: str, options: dict[str, Any]) -> None:
    theirs = parameters(torch.float64)
    peer = peer_formulas.installed_timm("lars").Lars
    train(peer(theirs, trust_coeff=0.3, **options), theirs, torch.float64)
    assert_close(lars_of("timm", name, options), list(theirs), 2e-14)


@for_every("options", combined(maximize=BOOL, **SGD), ids=str)
@pytest.mark.parametrize("name", ["reference", "foreach"])
def test_pytorch_optimizers_lars(name: str, options: dict[str, Any]) -> None:
    peer = pytest.importorskip("pytorch_optimizer")
    theirs = parameters(torch.float64)
    train(peer.LARS(theirs, trust_coefficient=0.3, foreach=False, **options), theirs, torch.float64)
    assert_close(lars_of("pytorch_optimizer", name, options), list(theirs), 2e-14)


@pytest.mark.process
@pytest.mark.usefixtures("jax_in_double")
@for_every("options", combined(nesterov=BOOL, weight_decay=(0.0, 0.1), eps=(0.0, 1e-3)), ids=str)
def test_optaxs_lars(options: dict[str, Any]) -> None:
    theirs = optax_lamb(torch.float64, "lars", trust_coefficient=0.3, **options)
    for name in ("reference", "foreach"):
        assert_close(lars_of("optax", name, options), theirs, 2e-14)


def test_the_witnesses_can_disagree() -> None:
    """The bounds above detect the difference between versions 3 and 5 of the paper."""
    five, three = parameters(torch.float64), parameters(torch.float64)
    train(Lamb(five, weight_decay=0.1, backend="reference"), five, torch.float64)
    train(Lamb(three, weight_decay=0.1, bias_correction=False, backend="reference"), three, torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(five, list(three), 1e-3)
