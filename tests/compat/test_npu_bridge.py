"""compat.npu_bridge in one process; tests/distributed/test_overlap_scaled.py has NPUOptimizer on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from bighorn import Came, Lamb
from bighorn.compat.npu_bridge import FixedLossScaleManager, LAMBOptimizer, NPULossScaleOptimizer, NPUOptimizer
from tests.support import overlap_runs
from tests.support.tables import for_every

LAMB: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def scaled(opt: torch.optim.Optimizer, scale: float = 64.0, check: bool = True) -> NPUOptimizer:
    return NPULossScaleOptimizer(opt, FixedLossScaleManager(scale, check))


def sample(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def test_an_overflow_is_skipped_and_a_checkpoint_goes_on() -> None:
    model = overlap_runs.network()
    optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), overlap_runs.branches()[0], is_loss_scale=True)
    for _ in range(2):
        optimizer.minimize(overlap_runs.loss(model, sample(0)) * torch.inf)
    for p, start in zip(model.parameters(), overlap_runs.network().parameters(), strict=True):
        assert p.equal(start)
    saved = optimizer.state_dict()
    assert saved["scaler"]["scale"] == 32.0
    optimizer = NPUOptimizer(Lamb(model.parameters(), lr=1.0), overlap_runs.branches()[0], is_loss_scale=True)
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["scaler"] == saved["scaler"]
    assert optimizer.opt.param_groups[0]["lr"] == 0.05


def test_it_counts_the_steps_that_were_taken() -> None:
    model = overlap_runs.network()
    optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), overlap_runs.branches()[0], is_loss_scale=True)
    plain = NPUOptimizer(Lamb(model.parameters(), **LAMB))
    steps = torch.tensor(0)
    optimizer.minimize(overlap_runs.loss(model, sample(0)) * torch.inf, steps)
    assert steps == 0
    optimizer.minimize(overlap_runs.loss(model, sample(0)), global_step=steps)
    plain.minimize(overlap_runs.loss(model, sample(1)), steps)
    assert steps == 2
    before = [param.detach().clone() for param in model.parameters()]
    for wrong in (0, torch.tensor(0.0), "tf.Variable"):
        with pytest.raises(TypeError, match=r"global_step must be a tensor of integers, as torch\.tensor\(0\), not"):
            plain.minimize(overlap_runs.loss(model, sample(2)), wrong)  # type: ignore[arg-type]
    assert all(
        param.equal(start) and param.grad is None for param, start in zip(model.parameters(), before, strict=True)
    )


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))])


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: NPUOptimizer(sgd(), is_loss_scale=True), ValueError, "is_loss_scale=True.*manager"),
    (lambda: NPUOptimizer(sgd(), FixedLossScaleManager(2)), ValueError, "is_loss_scale=False.*manager"),
    (lambda: NPUOptimizer(sgd(), is_distributed=True), ValueError, "is_distributed=True.*DistributedDataParallel"),
    (lambda: NPUOptimizer(sgd(), is_distributed=True, model=cast(Any, nn.Linear(2, 2))), ValueError, "type Linear"),
    (lambda: scaled(scaled(sgd())), ValueError, "opt scales the loss already"),
    (lambda: NPULossScaleOptimizer(sgd(), cast(Any, 128.0)), TypeError, "not float"),
    (lambda: NPUOptimizer(cast(Any, nn.Linear(2, 2))), TypeError, "^opt must be .*, not Linear$"),
    (lambda: NPUOptimizer(sgd(), is_distributed=cast(Any, "no")), TypeError, "^is_distributed must be .*, not 'no'"),
    (lambda: NPUOptimizer(sgd(), is_loss_scale=cast(Any, "no")), TypeError, "^is_loss_scale must be .*, not 'no'"),
    (
        lambda: NPUOptimizer(sgd(), is_tailing_optimization=cast(Any, "no")),
        TypeError,
        "^is_tailing_optimization must be .*, not 'no'",
    ),
    (lambda: cast(Any, LAMBOptimizer)(0.1), TypeError, "params"),
]


@for_every(("make", "error", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_is_refused(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_state_that_does_not_fit_leaves_both_as_they_were() -> None:
    model = overlap_runs.network()
    scaled = NPUOptimizer(Lamb(model.parameters(), **LAMB), FixedLossScaleManager(2), is_loss_scale=True)
    plain = NPUOptimizer(Lamb(model.parameters(), **LAMB))
    other = NPUOptimizer(Lamb([nn.Parameter(torch.ones(2))], **LAMB), FixedLossScaleManager(8), is_loss_scale=True)
    before = scaled.state_dict()
    for state, words in (
        (plain.state_dict(), "no state of a loss scaler, and there is one here.*is_loss_scale=False"),
        (other.state_dict(), "loaded param_groups have"),
        ({}, "with 'opt' and 'scaler'"),
    ):
        with pytest.raises(ValueError, match=words):
            scaled.load_state_dict(state)
        assert scaled.state_dict() == before
    with pytest.raises(ValueError, match=r"has state of a loss scaler, and there is none here.*is_loss_scale=True"):
        plain.load_state_dict(before)


def test_tailing_without_distributed_warns_and_does_nothing() -> None:
    model = overlap_runs.network()
    with pytest.warns(
        UserWarning, match=r"no effect without is_distributed.*documentation says: pass is_distributed=True and"
    ):
        optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), is_tailing_optimization=True, name="alone")
    assert optimizer.name == "alone"
    optimizer.minimize(overlap_runs.loss(model, sample(0)))


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("some", [False, True])
def test_minimize_drops_the_gradients_of_a_step_that_raised(scale: float | None, some: bool) -> None:
    param = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([param], lr=0.25)
    optimizer = NPUOptimizer(sgd) if scale is None else scaled(sgd, scale)
    handle = sgd.register_step_pre_hook(lambda *_: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception, match="stopped"):
        optimizer.minimize(param.sum(), var_list=[param] if some else None)
    handle.remove()
    optimizer.minimize(param.sum(), var_list=[param] if some else None)
    assert param.tolist() == [0.75, 0.75]


def test_the_arguments_and_methods_of_tensorflows_optimizers() -> None:
    param, steps = nn.Parameter(torch.ones(2)), torch.tensor(0)
    optimizer = NPUOptimizer(torch.optim.SGD([param], lr=0.25, momentum=0.5), name="train")
    assert optimizer.get_name() == "train"
    assert optimizer.variables() == []
    gate: dict[str, Any] = {"gate_gradients": NPUOptimizer.GATE_GRAPH, "colocate_gradients_with_ops": True}
    optimizer.minimize(lambda: param.sum(), steps, None, aggregation_method=2, name="step", **gate)
    assert param.tolist() == [0.75, 0.75]
    [momentum] = optimizer.variables()
    assert momentum is optimizer.get_slot(param, "momentum")
    optimizer.apply_gradients(optimizer.compute_gradients(lambda: param.sum(), **gate), steps, name="step")
    assert steps == 2
    for call in (optimizer.minimize, optimizer.compute_gradients):
        with pytest.raises(ValueError, match="grad_loss is not supported: multiply the loss by it"):
            call(param.sum(), grad_loss=cast(Any, torch.ones(())))


# ---- compute_gradients and apply_gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("scale", [None, 64.0])
def test_a_clip_between_the_halves_sees_unscaled_gradients(nested: bool, scale: float | None) -> None:
    plain, model = overlap_runs.network(), overlap_runs.network()
    reference = Lamb(plain.parameters(), **LAMB)
    inner: torch.optim.Optimizer = Lamb(model.parameters(), **LAMB)
    inner = NPUOptimizer(inner) if nested else inner
    optimizer = NPUOptimizer(inner) if scale is None else scaled(inner, scale)
    assert isinstance(optimizer.opt, Lamb)
    steps = torch.tensor(0)
    for step in range(4):
        overlap_runs.backward(overlap_runs.loss(plain, sample(step)))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
        pairs = optimizer.compute_gradients(overlap_runs.loss(model, sample(step)))
        grads = [grad for grad, _ in pairs if grad is not None]
        ratio = min(1.0, 0.05 / (torch.nn.utils.get_total_norm(grads).item() + 1e-6))
        assert ratio < 1
        optimizer.apply_gradients([(grad * ratio, var) for grad, var in pairs if grad is not None], steps)
    assert steps == 4
    overlap_runs.assert_same(model, plain)


def test_var_list_is_all_that_gets_gradients() -> None:
    model, frozen = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = scaled(torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.bias.detach().clone()
    value = frozen(model(torch.ones(1, 2))).sum()
    [(grad, var)] = optimizer.compute_gradients(value, [model.weight])
    assert var is model.weight
    assert model.bias.grad is None
    assert all(param.grad is None for param in frozen.parameters())
    assert grad is not None
    expected = model.weight.detach() - grad
    optimizer.apply_gradients([(grad, var)])
    assert model.weight.equal(expected)
    assert model.bias.equal(before)
    optimizer.minimize(frozen(model(torch.ones(1, 2))).sum(), var_list=[model.bias])
    assert model.weight.equal(expected)
    assert not model.bias.equal(before)
    unused = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [unused]})
    assert optimizer.compute_gradients(model(torch.ones(1, 2)).sum(), [unused]) == [(None, unused)]


def test_gradients_of_ones_own_are_not_scaled() -> None:
    """As with tf.gradients and apply_gradients, only compute_gradients scales."""
    param = nn.Parameter(torch.ones(2))
    optimizer = scaled(torch.optim.SGD([param], lr=0.5))
    for _ in range(2):
        optimizer.apply_gradients(zip(torch.autograd.grad(param.square().sum(), [param]), [param], strict=True))
    assert param.tolist() == [0.0, 0.0]
    optimizer.apply_gradients([(torch.tensor([torch.inf, 1.0]), param)])
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("check", [True, False])
def test_an_overflow_that_a_clip_hides_is_skipped_unless_it_is_not_checked(check: bool) -> None:
    param = nn.Parameter(torch.ones(2))
    manager = FixedLossScaleManager(64.0, enable_overflow_check=check)
    assert manager.get_enable_overflow_check() is check
    optimizer = NPULossScaleOptimizer(torch.optim.SGD([param], lr=0.5), manager)
    steps = torch.tensor(0)
    [(grad, _)] = optimizer.compute_gradients((param * torch.inf).sum())
    assert grad is not None
    optimizer.apply_gradients([(grad.clamp(-1, 1), param)], steps)
    assert param.tolist() == ([1.0, 1.0] if check else [0.5, 0.5])
    assert steps == (0 if check else 1)


def test_two_sets_of_gradients_for_one_scale() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = scaled(torch.optim.SGD([param], lr=0.5))
    optimizer.compute_gradients((param * torch.inf).sum())
    with pytest.raises(RuntimeError, match=r"call apply_gradients\(\) between.*zero_grad\(\) to drop"):
        optimizer.compute_gradients(param.sum())
    optimizer.zero_grad()
    optimizer.apply_gradients(optimizer.compute_gradients(param.sum()))
    assert param.tolist() == [0.5, 0.5]


@for_every(
    ("pairs", "error", "words"),
    [
        (lambda p: [(p, nn.Parameter(torch.ones(2)))], ValueError, r"\[0\]\[1\] is a tensor of shape \(2,\).*no param"),
        (lambda p: [(None, p), (p.detach(), p)], ValueError, r"\[1\] is the second pair of its parameter"),
        (lambda p: [(torch.ones(1), p)], ValueError, r"shape \(1,\) for a parameter of shape \(2,\)"),
        (lambda p: [(None, p)], ValueError, "has no gradient"),
        (lambda p: [p.detach()], TypeError, r"grads_and_vars\[0\] must be a pair"),
    ],
)
def test_pairs_that_are_refused(pairs: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = NPUOptimizer(torch.optim.SGD([param]))
    with pytest.raises(error, match=words):
        optimizer.apply_gradients(pairs(param))
    assert param.tolist() == [1.0, 1.0]
    assert param.grad is None
    with pytest.raises(ValueError, match=r"var_list\[1\] is str, and no parameter"):
        optimizer.compute_gradients(param.sum(), [param, "w"])  # type: ignore[list-item]


def test_slots() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    lamb = Lamb([param])
    optimizer = scaled(NPUOptimizer(lamb))
    assert optimizer.get_slot_names() == []
    assert optimizer.get_slot(param, "m") is None
    optimizer.minimize(param.sum())
    assert optimizer.get_slot_names() == ["exp_avg", "exp_avg_sq"]
    for name, ours in (("m", "exp_avg"), ("v", "exp_avg_sq"), ("exp_avg", "exp_avg")):
        assert optimizer.get_slot(param, name) is lamb.state[param][ours]
    assert optimizer.get_slot(param, "momentum") is None
    with pytest.raises(ValueError, match="var is a tensor"):
        optimizer.get_slot(torch.ones(2, 3), "m")
    factored = NPUOptimizer(Came([param], lr=0.1))
    factored.minimize(param.sum())
    assert "exp_avg" in factored.get_slot_names()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=6),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("branch", range(3), ids=["dynamic", "fixed", "none"])
def test_a_branch_of_the_example_is_the_plain_optimizer(name: str, branch: int) -> None:
    """The first step overflows if the loss is scaled; no scheduler warns that the optimizer was not stepped."""
    plain, model = overlap_runs.network(), overlap_runs.network()
    reference, manager = Lamb(plain.parameters(), **LAMB), overlap_runs.branches()[branch]
    optimizer = NPUOptimizer(Lamb(model.parameters(), **LAMB), manager, is_loss_scale=manager is not None)
    schedules = [SCHEDULERS[name](reference), SCHEDULERS[name](optimizer)]
    for step in range(5):
        skipped = step == 0 and manager is not None
        if not skipped:
            overlap_runs.backward(overlap_runs.loss(plain, sample(step)))
        reference.step()
        reference.zero_grad()
        optimizer.minimize(overlap_runs.loss(model, sample(step)) * (torch.inf if skipped else 1.0))
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
    overlap_runs.assert_same(model, plain)
    before = [param.clone() for param in model.parameters()]
    twin = copy.deepcopy(optimizer)
    assert twin.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    weight = twin.param_groups[0]["params"][0]
    twin.minimize((weight - 1).square().sum())
    assert not weight.equal(before[0])
    assert all(map(torch.equal, model.parameters(), before)), "the copy steps its own parameters"


def test_hooks_groups_and_gradients_are_those_of_the_optimizer() -> None:
    param = nn.Parameter(torch.ones(2))
    lamb = Lamb([param])
    optimizer = NPUOptimizer(lamb)
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda opt, *_: calls.append(opt))
    optimizer.register_step_post_hook(lambda opt, *_: calls.append(opt))
    optimizer.minimize(param.sum())
    assert calls == [lamb, lamb]
    assert optimizer.state is lamb.state
    assert optimizer.defaults is lamb.defaults
    assert optimizer.param_groups is lamb.param_groups
    param.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert param.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert [each.grad for each in (param,)] == [None]
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3
    with pytest.raises(RuntimeError, match="no closure"):
        scaled(optimizer).step(lambda: torch.tensor(3.0))
