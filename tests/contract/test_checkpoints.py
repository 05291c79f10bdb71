"""After saving, loading, copying and pickling, a run continues bit for bit."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn._kernels import codec
from bighorn._optim.param_groups import COUNT
from tests.support.cases import CASES, TORCH, Case, Kind, set_gradients
from tests.support.covering_cases import covering_states
from tests.support.optimizer_runs import (
    CASE,
    OWN,
    Net,
    advance,
    assert_bitwise,
    assert_same_everything,
    backward,
    copies,
    model,
    runs,
    saved_and_loaded,
)
from tests.support.processes import group_of_one
from tests.support.tables import for_every

SMALL = [case for case in CASES if "cautious" not in case.id and case.size < 100_000]


def check_continuations(case: Case, backend: str) -> None:
    """Compare a run with the runs of a loaded checkpoint, a deep copy and a pickle, which have all arguments."""
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    set_gradients(parameters, [None] * len(parameters))
    others = copies(parameters)
    at_hand = {} if "lr" in case.options else {"lr": 7.0}
    other = case.optimizer(others, backend, weight_decay=0.9, **at_hand)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert_same_everything(parameters, optimizer, others, other)
    both = (parameters, optimizer)
    runs = [(others, other), copy.deepcopy(both), pickle.loads(pickle.dumps(both))]
    advance(case, parameters, optimizer, range(2, 4))
    for params, each in runs:
        assert params[0] is not parameters[0]
        advance(case, params, each, range(2, 4))
        assert_same_everything(parameters, optimizer, params, each)


@for_every("case", covering_states(SMALL), ids=lambda case: case.id)
def test_a_run_continues_bitwise(case: Case) -> None:
    check_continuations(case, "auto")


@pytest.mark.parametrize(("backend", "case"), runs(covering_states(SMALL, details=False)), indirect=["backend"])
def test_a_run_continues_bitwise_on_each_backend(case: Case, backend: str) -> None:
    check_continuations(case, backend)


def test_a_copy_before_the_first_step(kind: Kind) -> None:
    case = CASE.of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, "auto")
    others, other = copy.deepcopy((parameters, optimizer))
    advance(case, parameters, optimizer, range(2))
    advance(case, others, other, range(2))
    assert_same_everything(parameters, optimizer, others, other)
    other.add_param_group({"params": [("added", Parameter(torch.ones(2)))]})
    assert other.param_groups[1]["weight_decay"] == 0.1


WIDE = torch.float32, torch.float32, torch.float32
NARROW = torch.bfloat16, torch.bfloat16, torch.float32


@for_every(
    ("dtype", "state_dtype", "shape", "dtypes"),
    [
        (torch.float32, None, (64, 64), WIDE),
        (torch.float64, None, (64, 64), (torch.float64, torch.float64, torch.float64)),
        (torch.bfloat16, None, (64, 64), WIDE),
        (torch.float16, None, (64, 64), WIDE),
        (torch.float32, torch.bfloat16, (64, 64), NARROW),
        (torch.bfloat16, torch.bfloat16, (64, 64), NARROW),
        (torch.bfloat16, "int8", (64, 64), (torch.int8, torch.uint8, torch.float32)),
        (torch.bfloat16, "int8", (64, 63), WIDE),
        (torch.float32, "int8", (4096,), WIDE),
    ],
)
def test_dtypes_of_state(dtype: Any, state_dtype: Any, shape: tuple[int, ...], dtypes: Any, kind: Kind) -> None:
    """An option applies to moments; CAME's other averages, the scales of codes and the count of steps are wide."""
    param = Parameter(torch.ones(shape, dtype=dtype))
    optimizer = kind([param], lr=0.1, state_dtype=state_dtype)
    param.grad = torch.ones_like(param)
    optimizer.step()
    other = kind(copies([param]), lr=0.1)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    first, second, others = dtypes
    narrow = {"step": torch.float32, "exp_avg": first, **({"exp_avg_sq": second} if kind is Lamb else {})}
    for each in (optimizer, other):
        [state] = each.state.values()
        assert {name: value.dtype for name, value in state.items()} == {
            name: narrow.get(name, others) for name in state
        }
        assert ("exp_avg_scale" in state) == (first is torch.int8)


def test_what_an_older_version_did_not_write_is_the_default(kind: Kind) -> None:
    case = CASE.of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, "auto")
    advance(case, parameters, optimizer, range(1))
    state = saved_and_loaded(optimizer.state_dict())
    new, default = {Lamb: ("trust_ratio_bounds", None), Came: ("decay_rate", None), Lars: ("trust_clip", False)}[kind]
    for group in state["param_groups"]:
        del group[new], group["format_version"]
    others = copies(parameters)
    other = case.optimizer(others, "auto")
    other.load_state_dict(state)
    assert other.param_groups[0][new] is default
    assert all(group["format_version"] == 1 for group in other.param_groups)
    assert_same_everything(parameters, optimizer, others, other)


@pytest.mark.parametrize("stacked", [False, True], ids=["one-layer", "stacked"])
@pytest.mark.parametrize("width", [20, 6])
@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_of_all_matrices_together_become_blocks_of_their_rows(bits: int, width: int, stacked: bool) -> None:
    """Earlier versions had one scale for 256 codes of an index of dim 0, independent of the matrices of `last_two`."""
    shape = (2, 2, 3, width) if stacked else (2, 3, width)
    outer = shape[: 1 + stacked]
    parameter = Parameter(torch.ones(shape))
    group = {"params": [parameter], "stacked": stacked}
    optimizer = Came([group], lr=0.1, state_dtype=f"int{bits}", factor="last_two", min_8bit_size=0)  # type: ignore[arg-type]
    parameter.grad = torch.ones(shape)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    top = 127 if bits == 8 else 7
    codes = (torch.arange(parameter.numel()) % (2 * top + 1) - top).to(torch.int8).view(shape)
    scales = torch.arange(1.0, 1 + math.prod(outer)).view(*outer, 1)
    values = codes / top * scales.view(*outer, *[1] * (len(shape) - len(outer)))
    stored = codes if bits == 8 else codec.pack_int4(codes.flatten(len(outer)))
    saved["state"][0] |= {"exp_avg": stored, "exp_avg_scale": scales}
    optimizer.load_state_dict(saved_and_loaded(saved))
    state = optimizer.state[parameter]
    if width < 8:  # scales of so short rows would take as many bytes as codes
        assert "exp_avg_scale" not in state
        torch.testing.assert_close(state["exp_avg"], values)
    else:
        new = values.abs().amax(dim=-1, keepdim=True)
        torch.testing.assert_close(state["exp_avg_scale"], new)
        now = codec.dequantize(optimizer.algorithm.forms, "exp_avg", state, parameter.shape)
        assert ((now - values).abs() <= 1.001 / (2 * top) * new).all()
        assert state["exp_avg"].shape == (shape if bits == 8 else (*shape[:-1], width // 2))
    optimizer.step()


def test_load_state_dict_hooks_still_run(kind: Kind) -> None:
    optimizer = kind(model().parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("post"))
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post"] * 2


def test_a_distributed_checkpoint_of_a_fresh_optimizer_is_no_step(kind: Kind, backend: str) -> None:
    """DCP creates the state by a step at lr = 0 with zero gradients, which moves nothing and is not counted."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def made(net: Net) -> Any:
        options: dict[str, Any] = {"weight_decay": [0.1, 0.2], "max_grad_norm": 1.0, "backend": backend}
        return kind(net.named_parameters(), lr=lambda step: 0.1 / (step + 1), **options)

    nets = [model() for _ in range(3)]
    optimizer, loaded, twin = map(made, nets)
    state = get_optimizer_state_dict(nets[0], optimizer)
    assert set(state["state"]) == {name for name, _ in nets[0].named_parameters()}
    assert_bitwise(list(nets[0].parameters()), list(nets[2].parameters()))
    assert all(p.grad is None for p in nets[0].parameters())
    assert {optimizer.param_groups[0][name] for name in ("lr", "weight_decay")} == {0.1}
    assert optimizer.param_groups[0][COUNT] == 0
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())
    set_optimizer_state_dict(nets[1], loaded, state)
    for net, each in zip(nets, (optimizer, loaded, twin), strict=True):
        for step in range(2):
            backward(net, step)
            each.step()
        assert_same_everything(list(nets[0].parameters()), optimizer, list(net.parameters()), each)


def test_a_parameter_that_joins_at_lr_0_skips_no_step_of_the_others(kind: Kind, backend: str) -> None:
    """A step at lr 0 and gradients of zeros once changed no moments if one parameter got its state in it."""
    params, others = ([Parameter(torch.linspace(1, 2, 6).view(2, 3)) for _ in range(2)] for _ in range(2))
    optimizer, twin = (
        kind([{"params": each}, {"params": [late]}], lr=lambda step: 0.1 / (step + 1), backend=backend)
        for *each, late in (params, others)
    )
    for grads in ([torch.linspace(-1, 2, 6).view(2, 3), None], [torch.zeros(2, 3)] * 2):
        rates = [group["lr"] for group in optimizer.param_groups]
        for each, mine in ((optimizer, params), (twin, others)):
            for param, grad in zip(mine, grads, strict=True):
                param.grad = grad
            if grads[1] is not None:
                for group in each.param_groups:
                    group["lr"] = 0.0
        others[1].grad = None  # in the twin it joins at the next step
        optimizer.step()
        twin.step()
        for group, rate in zip((*optimizer.param_groups, *twin.param_groups), rates * 2, strict=True):
            group["lr"] = rate
    assert_bitwise(params, others)
    assert_bitwise(list(optimizer.state[params[0]].values()), list(twin.state[others[0]].values()))
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 1]
    assert not twin.state.get(others[1])


def test_a_real_step_at_lr_0_counts(kind: Kind, backend: str) -> None:
    """A warm-up from 0 takes such a step: moments and counts change, and parameters do not."""
    net, untouched = model(), model()
    own: dict[str, Any] = {"lr_in_momentum": False} if kind is Lars else {}
    optimizer = kind(net.parameters(), lr=0.0, weight_decay=0.1, backend=backend, **own)
    backward(net)
    optimizer.step()
    assert_bitwise(list(net.parameters()), list(untouched.parameters()))
    for state in optimizer.state.values():
        assert state["step"] == 1
        assert state["exp_avg"].any()


@pytest.mark.parametrize(
    "how",
    [
        *(("torch.save", flatten, every) for flatten in (False, True) for every in (False, True)),
        *(("dcp.save", flatten, False) for flatten in (False, True)),
    ],
    ids=str,
)
def test_distributed_checkpoint_continues_bitwise(how: tuple[str, bool, bool], kind: Kind, tmp_path: Path) -> None:
    """docs/sharding.md has the options with which torch loads parameters that were never trained."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def train(net: Any, optimizer: torch.optim.Optimizer, step: int, every: bool) -> None:
        optimizer.zero_grad()
        backward(net, step) if every else net.last(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()

    dcp: Any = checkpoint
    way, flatten, every = how
    if way == "torch.save" and not every and TORCH < (2, 9):
        pytest.skip("before torch 2.9, set_optimizer_state_dict needs state of every parameter")
    net, other = model(), model()
    options: dict[str, Any] = {"weight_decay": 0.1, "max_grad_norm": 1.0, **OWN[kind]}
    optimizer, fresh = (kind(each.named_parameters(), lr=lr, **options) for each, lr in ((net, 0.1), (other, 0.5)))
    for step in range(3):
        train(net, optimizer, step, every)
    form = StateDictOptions(flatten_optimizer_state_dict=flatten, strict=every)
    state = get_optimizer_state_dict(net, optimizer, options=form)
    other.load_state_dict(net.state_dict())
    if way == "torch.save":
        state = saved_and_loaded(state)
    else:
        with group_of_one():
            dcp.save(state, checkpoint_id=tmp_path)
            state = get_optimizer_state_dict(other, fresh, options=form)
            dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=not every))
    set_optimizer_state_dict(other, fresh, state, options=form)
    assert_bitwise(list(other.parameters()), list(net.parameters()))
    for each, of in ((net, optimizer), (other, fresh)):
        train(each, of, 3, every)
        train(each, of, 4, True)
    assert_same_everything(list(net.parameters()), optimizer, list(other.parameters()), fresh)


def test_the_step_of_a_schedule_is_the_most_that_a_parameter_has_taken(kind: Kind) -> None:
    """Checkpoints of other optimizers count per parameter alone."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(3))]
    optimizer = kind(params, lr=[0.4, 0.3, 0.2, 0.1], weight_decay=0.1)
    for _ in range(3):
        params[0].grad = torch.ones(3)
        optimizer.step()
    params[1].grad = torch.ones(3)
    state_dict = optimizer.state_dict()
    state_dict["state"][1] = {name: value.clone() for name, value in state_dict["state"][0].items()}
    state_dict["state"][1]["step"].fill_(1.0)
    for order in ((0, 1), (1, 0)):
        other = kind([Parameter(torch.ones(3)) for _ in params], lr=[0.4, 0.3, 0.2, 0.1], weight_decay=0.1)
        state = {index: state_dict["state"][each] for index, each in enumerate(order)}
        groups = [{name: value for name, value in state_dict["param_groups"][0].items() if name != COUNT}]
        other.load_state_dict({"state": state, "param_groups": groups})
        assert other.param_groups[0][COUNT] == 3
