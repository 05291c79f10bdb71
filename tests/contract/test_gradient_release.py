"""Gradient release takes the same steps bit for bit without keeping gradients, and refuses unsupported uses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from bighorn import Came, Lamb, Lars, LossScaler, TailOverlap, release_gradients, schedules
from tests.support.cases import Case, Kind, set_gradients
from tests.support.offloading import in_groups, loss_of, network
from tests.support.optimizer_runs import BY_ID, assert_bitwise, assert_same_everything, copies, runs
from tests.support.processes import group_of_one
from tests.support.ranks import ranks

pytestmark = pytest.mark.long

STEPS = 3
TRIED = (
    *("paper-v5", "both-by-name", "amsgrad-in-lr", "two-groups-options", "mixed-paper-v5", "complex64-paper-v5"),
    *("came-published", "came-relative-step", "came-two-groups-options", "came-float32-states-int8-last-two"),
    *("lars-paper", "lars-two-groups"),
)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def make(kind: Kind, net: nn.Module, **options: Any) -> Any:
    return kind(net.named_parameters(), **{"lr": 0.1, "weight_decay": 0.1, **options})


# ---- equal steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "case"), runs([BY_ID[name] for name in TRIED]), indirect=["backend"])
def test_one_after_the_other_is_all_at_once(backend: str, case: Case) -> None:
    """Parameters step last first, in the order of backward, including late and missing gradients."""
    whole = case.parameters()
    single = copies(whole)
    optimizers = [case.optimizer(parameters, backend) for parameters in (whole, single)]
    for step in range(STEPS):
        for parameters, optimizer in zip((whole, single), optimizers, strict=True):
            case.set_lr(optimizer, step)
            set_gradients(parameters, case.gradients(step))
        for parameter in reversed(single):
            if parameter.grad is not None:
                optimizers[1].step_param(parameter)
                assert parameter.grad is None
        for optimizer in optimizers:
            optimizer.step()
    assert_bitwise(single, whole)
    for ours, theirs in zip(single, whole, strict=True):
        assert_bitwise(list(optimizers[1].state[ours].values()), list(optimizers[0].state[theirs].values()))


def test_a_training(kind: Kind) -> None:
    """The run has groups, a schedule, telemetry, step hooks and a parameter that the model does not always use."""
    nets = network(), network()
    plain, released = (in_groups(kind, net) for net in nets)
    release_gradients(nets[1], released)
    ended: list[int] = []
    released.register_step_post_hook(lambda *_: ended.append(len(ended)))
    left: list[bool] = []  # whether a gradient is left when the next one is complete
    for parameter in nets[1].parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: left.append(any(each.grad is not None for each in nets[1].parameters()))
        )
    for step in range(6):
        for net, optimizer in zip(nets, (plain, released), strict=True):
            (loss_of(net, step) if step != 3 else net[0](torch.ones(9)).square().mean()).backward()
            optimizer.step()
        assert all(parameter.grad is None for parameter in nets[1].parameters())
        plain.zero_grad()
        names, mine = plain.telemetry().names, released.telemetry().names
        assert sorted(names) == sorted(mine)
    assert_bitwise(list(nets[1].parameters()), list(nets[0].parameters()))
    assert [group["schedule_step"] for group in released.param_groups] == [6, 6]
    assert ended == list(range(6))
    assert set(left) == {False}


@pytest.mark.parametrize("protocol", ["sd-scripts", "OneTrainer", "flashoptim"])
def test_hooks_of_other_trainers(protocol: str, kind: Kind) -> None:
    """Steps, schedule, hooks and telemetry equal an ordinary run.

    sd-scripts and flashoptim never call `step()`, and pass groups that are older than a loaded checkpoint.
    """
    nets = network(), network()
    plain, released = (make(kind, net, lr=schedules.Cosine(0.1, 8)) for net in nets)
    ended: list[int] = []
    released.register_step_post_hook(lambda *_: ended.append(len(ended)))

    def step_param(param: Tensor, group: dict[str, Any]) -> None:
        released.step_param(param, group)

    def step_parameter(param: Tensor, group: dict[str, Any]) -> None:
        released.step_parameter(param, group, 0)

    for group in released.param_groups:
        for param in group["params"]:

            def hook(tensor: Tensor, group: dict[str, Any] = group) -> None:
                (step_parameter if protocol == "OneTrainer" else step_param)(tensor, group)
                tensor.grad = None

            param.register_post_accumulate_grad_hook(hook)
    released.load_state_dict(released.state_dict())
    for step in range(5):
        for net, optimizer in zip(nets, (plain, released), strict=True):
            some = protocol == "OneTrainer" and step == 3
            (net[0](torch.ones(9)).square().mean() if some else loss_of(net, step)).backward()
            if optimizer is plain or protocol == "OneTrainer":
                optimizer.step()
            if optimizer is plain:
                optimizer.zero_grad()
    step_param(next(iter(nets[1].parameters())), released.param_groups[0])  # without a gradient: nothing happens
    if protocol != "OneTrainer":
        assert len(ended) == 4
        released.step()
    assert len(ended) == 5
    assert_bitwise(list(nets[1].parameters()), list(nets[0].parameters()))
    assert [group["schedule_step"] for group in released.param_groups] == [5]
    assert sorted(plain.telemetry().names) == sorted(released.telemetry().names)


@pytest.mark.parametrize("zeroes", [False, True])
def test_the_end_of_a_step_steps_nothing_that_was_not_handed_in(zeroes: bool, kind: Kind) -> None:
    """A trainer accumulates two gradients, scales the loss, freezes a layer for one step, and calls no `step()`.

    The first parameter of a step once stepped the others with half of their gradients, and scaled ones.
    """
    nets = network(), network()
    plain, released = (make(kind, net, lr=schedules.Cosine(0.1, 8)) for net in nets)
    last = False

    def hook(tensor: Tensor) -> None:
        if last:
            assert tensor.grad is not None
            tensor.grad /= 64
            released.step_param(tensor, released.param_groups[0])

    for param in nets[1].parameters():
        param.register_post_accumulate_grad_hook(hook)
    for step in range(5):
        for net, optimizer in zip(nets, (plain, released), strict=True):
            net[0].requires_grad_(step not in {1, 4})
            for half in range(2):
                last = half == 1
                (64 * loss_of(net, 2 * step + half)).backward()
            if optimizer is plain:
                for param in net.parameters():
                    if param.grad is not None:
                        param.grad /= 64
                plain.step()
                plain.zero_grad()
            elif zeroes:
                released.zero_grad()
    if not zeroes:
        released.step()
    assert_same_everything(list(nets[1].parameters()), released, list(nets[0].parameters()), plain)


@pytest.mark.parametrize("moving", [None, 0, 3])
def test_a_first_step_at_lr_0(moving: int | None, kind: Kind) -> None:
    """With zero gradients alone, as torch.distributed.checkpoint takes it, it creates state. Weights once differed."""
    nets = network(), network()
    own: dict[str, Any] = {"lr_in_momentum": False} if kind is Lars else {}
    plain, released = (make(kind, net, lr=lambda step: 0.1 * step, **own) for net in nets)
    release_gradients(nets[1], released)
    for step in range(3):
        for net, optimizer in zip(nets, (plain, released), strict=True):
            params = list(net.parameters())
            weights = [float(step > 0 or i == moving) for i in range(len(params))]
            # In the first step, all gradients are zero, or all but one.
            loss = sum((p.sum() * weight for p, weight in zip(params, weights, strict=True)), torch.zeros(()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_everything(list(nets[1].parameters()), released, list(nets[0].parameters()), plain)
    counts = [optimizer.param_groups[0]["schedule_step"] for optimizer in (plain, released)]
    assert counts == [2 if moving is None else 3] * 2


def test_a_loop_may_hand_in_all_parameters_after_backward(kind: Kind) -> None:
    nets = network(), network()
    plain, single = (make(kind, net) for net in nets)
    for step in range(5):
        for net in nets:
            loss_of(net, step).backward()
        plain.step()
        plain.zero_grad()
        for param in nets[1].parameters():
            single.step_param(param, single.param_groups[0])
    single.step()
    assert_same_everything(list(nets[1].parameters()), single, list(nets[0].parameters()), plain)


def test_gradients_are_accumulated_where_the_handle_says_so(kind: Kind) -> None:
    nets = network(), network()
    plain, released = (make(kind, net) for net in nets)
    release = release_gradients(nets[1], released)
    for step in range(6):
        loss_of(nets[0], step).backward()
        if step % 3 == 2:
            loss_of(nets[1], step).backward()
            assert all(parameter.grad is None for parameter in nets[1].parameters())
            for optimizer in (plain, released):
                optimizer.step()
                optimizer.zero_grad()
            continue
        with release.accumulate():
            loss_of(nets[1], step).backward()
        assert all(parameter.grad is not None for parameter in nets[1].parameters())
    assert_bitwise(list(nets[1].parameters()), list(nets[0].parameters()))
    assert int(released.state[nets[1][0].weight]["step"]) == 2
    release.remove()
    loss_of(nets[1], 0).backward()
    assert all(parameter.grad is not None for parameter in nets[1].parameters())
    assert int(released.state[nets[1][0].weight]["step"]) == 2
    release_gradients(nets[1], released)


def test_tied_weights_step_once_in_closures_with_a_torch_scheduler(kind: Kind) -> None:
    """Autograd adds up their gradients before the hook runs."""
    results = []
    for released in (False, True):
        net = network()
        rows, columns = net[3].weight.shape
        net[4], net[5] = nn.Linear(rows, columns), nn.Linear(columns, rows)
        net[5].weight = net[3].weight
        optimizer = make(kind, net)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        if released:
            release_gradients(net, optimizer)
        for step in range(3):

            def closure(net: nn.Module = net, step: int = step) -> Tensor:
                loss: Tensor = loss_of(net, step)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.zero_grad()
            assert optimizer.step(closure) > 0
            scheduler.step()
        results.append((list(net.parameters()), optimizer))
    assert_same_everything(*results[1], *results[0])


@pytest.mark.filterwarnings("ignore")  # FSDP2's, which do not concern gradients
@pytest.mark.process
@ranks(2)
def test_reduced_gradients_of_fsdp2(kind: Kind, tmp_path: Path) -> None:
    """A state that is saved asynchronously between two steps also continues without release."""

    def network(sharded: bool) -> nn.Sequential:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3)).double()
        for layer in (net[0], net[2], net) if sharded else ():
            fully_shard(layer)
        return net

    nets: list[Any] = [network(False), network(True), network(True)]
    optimizers = [kind(net.named_parameters(), lr=0.1, weight_decay=0.1) for net in nets]
    whole, released, back = zip(nets, optimizers, strict=True)
    release_gradients(*released)

    def train(steps: range, net: Any, optimizer: Any) -> int:
        """Return the reductions of the last step, without reductions of gradients."""
        for step in steps:
            torch.manual_seed(step)
            data = torch.randn(4, 9, dtype=torch.float64)
            with CommDebugMode() as comms:  # type: ignore[no-untyped-call]
                net(data if net is whole[0] else data.chunk(2)[dist.get_rank()]).square().mean().backward()
                optimizer.step()
            if net is not released[0]:
                optimizer.zero_grad()
        counts = {str(op): count for op, count in comms.get_comm_counts().items()}
        return sum(count for op, count in counts.items() if "reduce" in op and "scatter" not in op)

    train(range(3), *whole)
    assert train(range(3), *released) >= 4  # one for each parameter
    assert all(p.grad is None for p in released[0].parameters())

    # A save that continues during the next steps contains the state at its start.
    model, state = get_state_dict(*released)
    beside = dist.new_group(backend="gloo")  # in the default group its messages would mix with the training's
    saving = async_save({"model": model, "optimizer": state}, checkpoint_id=tmp_path, process_group=beside)
    train(range(3, 5), *released)
    assert isinstance(saving, Future)
    saving.result()
    model, state = get_state_dict(*back)
    load({"model": model, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(*back, model_state_dict=model, optim_state_dict=state)
    assert train(range(3, 5), *back) == 1 + {Lamb: 1, Came: 4, Lars: 1}[kind]  # and one that compares presence
    train(range(3, 5), *whole)
    for net in (released[0], back[0]):
        for ours, theirs in zip(net.parameters(), whole[0].parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-12, atol=1e-12)


def test_parameters_that_change_places_draw_the_bits_of_their_new_ones(kind: Kind) -> None:
    """A plan of one parameter does not depend on its position, but its random bits do."""
    ends = []
    for alone in (False, True):
        params = [Parameter(torch.linspace(-1, 1, 1200).view(40, 30).bfloat16()) for _ in range(4)]
        optimizer = kind(params, lr=0.01, weight_rounding="stochastic")
        (group,) = optimizer.param_groups
        for step in range(3):
            for i, param in enumerate(params):
                param.grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(4 * step + i)).bfloat16()
            for param in params if alone else ():
                optimizer.step_param(param, group)
            optimizer.step()
            group["params"][1:3] = group["params"][2:0:-1]
        ends.append(params)
    assert_bitwise(*ends)


def test_a_state_of_a_step_that_has_begun_can_be_loaded(kind: Kind) -> None:
    """A program continues with this after an error in the middle of a backward."""
    net = network()
    optimizer = make(kind, net)
    release_gradients(net, optimizer)
    loss_of(net, 0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    next(net[5].parameters()).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, 1).backward()
    optimizer.load_state_dict(saved)
    net[5].requires_grad_(False)
    loss_of(net, 1).backward()
    optimizer.step()


def test_nothing_keeps_the_model_alive(kind: Kind) -> None:
    net = network()
    optimizer = make(kind, net)
    release_gradients(net, optimizer)
    loss_of(net, 0).backward()
    there = weakref.ref(net[0].weight)
    del net, optimizer
    gc.collect()
    assert there() is None


# ---- unsupported uses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_an_optimizer_for_each_parameter_inside_backward(option: dict[str, Any], kind: Kind) -> None:
    """Torchtune's optimizer_in_bwd makes them; a clip would use the norm of each tensor alone."""
    net = network()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    made = {param: kind([param], lr=0.1, **option) for param in net.parameters()}
    hooks = [param.register_post_accumulate_grad_hook(lambda param: made[param].step()) for param in made]
    with pytest.raises(RuntimeError, match=rf"{next(iter(option))}=.* looks at all gradients, but .* inside backward"):
        loss_of(net, 0).backward()
    assert_bitwise(list(net.parameters()), before)
    assert not any(optimizer.state for optimizer in made.values())
    for hook in hooks:
        hook.remove()
    loss_of(net, 0).backward()
    for optimizer in made.values():
        optimizer.step()
        optimizer.explain()
        optimizer.load_state_dict(optimizer.state_dict())
    for param in made:
        param.register_post_accumulate_grad_hook(lambda param: made[param].step())
    with pytest.raises(RuntimeError, match="inside backward"):
        loss_of(net, 0).backward()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.mark.usefixtures("alone")
def test_data_parallel_gradients_are_not_there_yet(kind: Kind) -> None:
    ddp = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match=r"fully_shard.*or TailOverlap"):
        release_gradients(ddp, make(kind, ddp))
    net = network()
    optimizer = make(kind, net)
    release_gradients(net, optimizer)
    with pytest.raises(RuntimeError, match=r"fully_shard.*or TailOverlap"):
        DistributedDataParallel(net)(torch.ones(4, 9))
    optimizer = make(kind, ddp)
    overlap = TailOverlap(ddp, optimizer)
    with pytest.raises(ValueError, match="step pre-hooks"):
        release_gradients(ddp.module, optimizer)
    del overlap


def test_what_is_refused(kind: Kind) -> None:
    net = network()
    optimizer = make(kind, net)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not list"):
        release_gradients(list(net.parameters()), optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, not Sequential"):
        release_gradients(net, net)
    with pytest.raises(ValueError, match=r"AdamW, which has no step_param.*: use Lamb, Came or Lars"):
        release_gradients(net, torch.optim.AdamW(net.parameters()))
    options: list[dict[str, Any]] = [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}]
    for option in options:
        with pytest.raises(ValueError, match=rf"{next(iter(option))}=.* looks at all gradients first; leave it out"):
            release_gradients(net, make(kind, net, **option))
    with pytest.raises(ValueError, match=r"does not hold the trainable parameter 2.weight: add it, or freeze it"):
        release_gradients(net, kind(net[0].named_parameters("0"), lr=0.1))
    loss_of(net, 0).backward()
    before = copies(list(net.parameters()))
    with pytest.raises(TypeError, match=r"group must be the parameter's group, a dict of param_groups, not a int"):
        optimizer.step_parameter(net[0].weight, 0, 1)
    assert_bitwise(list(net.parameters()), before)
    release_gradients(net, optimizer)
    with pytest.raises(ValueError, match=r"0.weight has a hook for its gradient already"):
        release_gradients(net, optimizer)
    with pytest.raises(ValueError, match="is no parameter of this optimizer"):
        optimizer.step_param(torch.ones(3, requires_grad=True))


def test_gradients_cannot_be_accumulated(kind: Kind) -> None:
    net = network()
    optimizer = make(kind, net)
    release_gradients(net, optimizer)
    loss_of(net, 0).backward()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(RuntimeError, match=r"5\.\w+ was already stepped.*call optimizer.step\(\) before another"):
        loss_of(net, 1).backward()
    assert_bitwise(list(net.parameters()), before)


def test_a_parameter_of_two_reentrant_checkpoints(kind: Kind) -> None:
    """Each use contributes only a part of the gradient."""
    net = nn.Sequential(nn.Linear(9, 9), nn.Tanh())
    optimizer = make(kind, net)
    release_gradients(net, optimizer)
    inner = checkpoint(net, torch.ones(4, 9, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="reentrant"):
        checkpoint(net, inner, use_reentrant=True).sum().backward()


def test_a_weight_that_backward_needs_again(kind: Kind) -> None:
    """Autograd must detect the change with kernels of any backend."""
    net = network()
    optimizer = make(kind, net)
    release_gradients(net, optimizer)
    loss = loss_of(net, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("scaler", [LossScaler(), torch.amp.GradScaler("cpu")], ids=["ours", "torch"])
def test_a_scaler_is_refused(scaler: torch.amp.GradScaler, kind: Kind) -> None:
    net = network()
    optimizer = make(kind, net)
    release_gradients(net, optimizer)
    scaler.scale(loss_of(net, 0)).backward()
    with pytest.raises(
        (RuntimeError, AssertionError), match=r"a gradient scaler has scaled|No inf checks were recorded"
    ):
        scaler.step(optimizer)
