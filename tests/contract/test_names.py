"""Names of parameters are the same in every wrapper, and an exclusion without a match is an error."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bighorn import Came, Lamb, groups
from bighorn._names import common_prefix, unwrapped
from tests.support.cases import Kind
from tests.support.optimizer_runs import assert_bitwise
from tests.support.processes import group_of_one
from tests.support.tables import for_every

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
EXCLUDED = ["bias", r"^1\."]


class Holder(nn.Module):
    """A module whose submodule is named `module`; with `scale`, it has another parameter."""

    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        if scale:
            self.scale = nn.Parameter(torch.ones(3))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group for DistributedDataParallel."""
    with group_of_one():
        yield


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def sharded(net: nn.Module) -> nn.Module:
    for module in (*net.children(), net):
        fully_shard(module)
    return net


class Forward(nn.Module):
    """A module with the names of Lightning's Fabric."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._forward_module = net


def checkpointed(net: nn.Module) -> nn.Module:
    for name, child in net.named_children():
        setattr(net, name, checkpoint_wrapper(child))
    return net


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "ddp": DistributedDataParallel,
    "compile-of-ddp": lambda net: compiled(DistributedDataParallel(net)),
    "ddp-of-compile": lambda net: DistributedDataParallel(compiled(net)),
    "checkpoint": checkpointed,
    "fsdp2": sharded,
    "compile-of-fsdp2": lambda net: compiled(sharded(net)),
    "fabric": Forward,
    "ddp-of-compile-of-checkpoint": lambda net: DistributedDataParallel(compiled(checkpointed(net))),
}
GIVEN: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "pairs": lambda net: {"params": net.named_parameters()},
    "names": lambda net: {"params": net.parameters(), "names": net},
    "mapping": lambda net: {"params": net.parameters(), "names": dict(net.named_parameters())},
    "groups": lambda net: {"params": [{"params": [pair]} for pair in net.named_parameters()]},
    "generators": lambda net: {"params": [{"params": net.named_parameters()}]},
    "rules": lambda net: {"params": groups.by_rules(net.named_parameters(), [groups.Rule("^1", lr=0.1)])},
}


def trained(net: nn.Module, kind: Kind, given: dict[str, Any], **options: Any) -> Any:
    exclusions: dict[str, Any] = {"exclude_from_weight_decay": EXCLUDED}
    if kind is not Came:
        exclusions["exclude_from_layer_adaptation"] = EXCLUDED
    optimizer = kind(**given, lr=0.1, weight_decay=0.1, **exclusions, **options)
    step(net, optimizer)
    return optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for i, p in enumerate(net.parameters()):
        grad = torch.linspace(-1, 1, p.numel()).view(p.shape) + i
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
    optimizer.step()


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["param_names"]]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.usefixtures("group")
def test_a_wrapped_model_steps_as_the_plain_one(wrapper: str, given: str, kind: Kind) -> None:
    """The README's pattern `^1\\.` once silently matched nothing in a wrapped model."""
    plain, wrapped = model(), WRAPPERS[wrapper](model())
    theirs, ours = trained(plain, kind, GIVEN[given](plain)), trained(wrapped, kind, GIVEN[given](wrapped))
    assert sorted(names_of(ours)) == sorted(names_of(theirs)) == sorted(NAMES)
    assert ours.telemetry().names == theirs.telemetry().names
    for p, q in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert (p.full_tensor() if isinstance(p, DTensor) else p).equal(q)


@pytest.mark.usefixtures("group")
def test_a_submodule_called_module_keeps_its_name(kind: Kind) -> None:
    net = Holder(scale=True)
    expected = ["scale", "module.weight", "module.bias"]
    assert names_of(kind(net.named_parameters(), lr=0.1)) == expected
    assert names_of(kind(DistributedDataParallel(net).named_parameters(), lr=0.1)) == expected
    late = kind([{"params": [("scale", net.scale)]}], lr=0.1)
    late.add_param_group({"params": [("module.weight", net.module.weight)]})
    assert names_of(late) == ["scale", "module.weight"]
    for alone in (Holder(scale=False), DistributedDataParallel(Holder(scale=False))):  # they look like wrapped models
        assert names_of(kind(alone.named_parameters(), lr=0.1)) == ["weight", "bias"]
    part = kind(net.module.parameters(), lr=0.1, names=net)
    assert names_of(part) == ["module.weight", "module.bias"]
    part.load_state_dict(part.state_dict())
    assert names_of(part) == ["module.weight", "module.bias"]
    assert groups.by_rules(net.named_parameters(), [groups.Rule(r"^module\.")])[0]["params"][0][0] == "module.weight"


@pytest.mark.usefixtures("group")
def test_a_group_that_joins_later_loses_the_same_prefix(kind: Kind) -> None:
    named = list(DistributedDataParallel(model()).named_parameters())
    optimizer = kind(named[:2], lr=0.1)
    optimizer.add_param_group({"params": named[2:]})
    assert names_of(optimizer) == NAMES


def test_names_in_a_view_of_a_dict_are_those_in_a_list(kind: Kind) -> None:
    params = {f"module.{name}": param for name, param in model().named_parameters()}
    assert names_of(kind([{"params": params.items()}], lr=0.1)) == NAMES


def test_prefixes() -> None:
    assert common_prefix([]) == common_prefix(["module"]) == ""
    assert common_prefix(["module.module.a", "module.module.b.c"]) == "module.module."
    assert unwrapped("_fsdp_wrapped_module.0._checkpoint_wrapped_module.weight") == "0.weight"
    assert unwrapped("_orig_mod") == "_orig_mod"


def test_exclusions_that_match_nothing(kind: Kind) -> None:
    for option in ("exclude_from_weight_decay", "exclude_from_layer_adaptation")[: 1 if kind is Came else 2]:
        net = model()
        exclusion: dict[str, Any] = {option: [r"^module\.1\.", "LayerNorm"]}
        with pytest.raises(ValueError, match=rf"(?s)^{option}.*'1\..*module\."):
            kind(net.named_parameters(), lr=0.1, **exclusion)
        with pytest.warns(UserWarning, match=rf"^{option}: 'norm' matches none of 4.*'1\."):
            kind(net.named_parameters(), lr=0.1, **(exclusion | {option: ["bias", "norm"]}))
        with pytest.warns(UserWarning, match=rf"^{option}: 'norm', 'gain' match none of 4") as told:
            kind(net.named_parameters(), lr=0.1, **(exclusion | {option: ["norm", "bias", "gain"]}))
        assert [each.filename for each in told] == [__file__]  # the line of the program, not of a library


@pytest.mark.parametrize("given", ["ndim<2", ["ndim<2", "^head"]], ids=str)
def test_excluding_by_shape_in_one_word(given: Any, kind: Kind) -> None:
    """It needs no names. The tensors of a stack are its slices."""
    net = nn.ModuleDict({"body": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 4)})
    net["layers"] = nn.ParameterList([torch.ones(3, 4)])
    named = dict(net.named_parameters())
    matrices = ["body.weight", "layers.0"] + ([] if "^head" in given else ["head.weight"])
    taken, _ = groups.by_rules(named.items(), [groups.Rule(given)])
    assert {name for name, _ in taken["params"]} == named.keys() - {*matrices}
    before = {name: p.detach().clone() for name, p in named.items()}
    parts: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name != "layers.0"]},
        {"params": [named["layers.0"]], "stacked": True},
    ]
    names = net if "^head" in given else None
    optimizer = kind(parts, lr=0.5, weight_decay=0.5, names=names, exclude_from_weight_decay=given)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert {name for name, p in named.items() if not p.equal(before[name])} == {*matrices} - {"layers.0"}
    if kind is Lamb:
        lamb = Lamb(net.named_parameters(), lr=0.5, exclude_from_layer_adaptation=given)
        for i, p in enumerate(net.parameters()):
            p.grad = torch.linspace(-1, 1, p.numel()).view_as(p) + i
        lamb.step()
        told = lamb.telemetry()
        assert {name for name, ratio in zip(told.names, told.trust_ratio, strict=True) if ratio != 1} == {*matrices}


def test_exclusions_that_are_not_complained_about(kind: Kind, group: None) -> None:
    """They match in another spelling, or match frozen parameters, or parameters of another pipeline stage."""
    del group
    net = nn.ModuleDict({"dense": nn.Linear(4, 4), "LayerNorm": nn.LayerNorm(4)})
    for patterns in (["bias", "LayerNorm.bias", "LayerNorm.weight"], ["LayerNorm", "layer_norm", "bias"]):
        kind(net.named_parameters(), lr=0.1, exclude_from_weight_decay=patterns)
    kind(net["dense"].parameters(), lr=0.1, names=net, exclude_from_weight_decay=["LayerNorm"])
    stage: dict[str, Any] = {
        "grad_norm_group": dist.group.WORLD,
        "max_grad_norm": 1.0,
        "exclude_from_weight_decay": ["embedding"],
    }
    kind(net.named_parameters(), lr=0.1, **stage)
    kind(net.named_parameters(), lr=0.1, exclude_from_weight_decay=lambda name, _: "embedding" in name)


@pytest.mark.parametrize("empty_first", [False, True])
def test_an_empty_group_among_named_ones(empty_first: bool, kind: Kind) -> None:
    """Hugging Face's Trainer makes such groups for LoRA, since no trained parameter decays."""
    net = model()
    given: list[dict[str, Any]] = [{"params": list(net.parameters())}, {"params": [], "weight_decay": 0.1}]
    pairs: list[dict[str, Any]] = [{"params": list(net.named_parameters())}, {"params": []}]
    for params, names in ((given, net), (pairs, None)):
        optimizer = kind(params[::-1] if empty_first else params, lr=0.1, names=names)
        step(net, optimizer)
        assert names_of(optimizer) == NAMES
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_callable_gets_the_bare_name() -> None:
    seen: list[str] = []

    def excluded(name: str, param: Tensor) -> bool:
        del param
        seen.append(name)
        return False

    net = compiled(model())
    step(net, Lamb(net.named_parameters(), lr=0.1, exclude_from_weight_decay=excluded))
    assert seen == NAMES


def named(names: Sequence[str], shape: tuple[int, int] = (3, 4)) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(shape))) for name in names]


def stepped(kind: Kind, groups: Sequence[Sequence[str]], **options: Any) -> Any:
    """Return an optimizer that has stepped; the gradient of a parameter follows from its name."""
    optimizer = kind([{"params": named(names)} for names in groups], lr=0.1, weight_decay=0.1, **options)
    step_by_name(optimizer)
    return optimizer


def step_by_name(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            param.grad = torch.linspace(-1, sum(map(ord, name)) / 100, param.numel()).view_as(param).to(param)
    optimizer.step()


def by_name(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        name: optimizer.state[param]["exp_avg"]
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


@pytest.mark.parametrize(
    "groups",
    [
        [["key", "query", "norm"]],
        [["key"], ["norm", "query"]],
        [["norm", "key"], ["query"]],
        [["module.key", "module.norm"], ["module.query"]],
    ],
    ids=str,
)
def test_state_is_loaded_by_name(groups: list[list[str]], kind: Kind, backend: str) -> None:
    """Query and key in another order once exchanged their moments."""
    sizes = [len(names) for names in groups]
    names = iter(["query", "key", "norm"])
    saved = stepped(kind, [[next(names) for _ in range(size)] for size in sizes], backend=backend)
    loaded = kind([{"params": named(each)} for each in groups], lr=0.5, weight_decay=0.1, backend=backend)
    before = names_of(loaded)
    state_dict = saved.state_dict()
    state_dict["state"] = {key: state_dict["state"][key] for key in (2, 0, 1)}
    divided = len(groups) > 1
    with pytest.warns(match="saved in other groups") if divided else nullcontext():
        loaded.load_state_dict(state_dict)
    assert names_of(loaded) == before == [name.removeprefix("module.") for each in groups for name in each]
    theirs, ours = by_name(saved), by_name(loaded)
    assert all(ours[name].equal(theirs[name]) for name in ("query", "key", "norm"))
    assert [group["lr"] for group in loaded.param_groups] == [0.5 if divided else 0.1] * len(groups)
    assert [group["schedule_step"] for group in loaded.param_groups] == [1] * len(groups)


@for_every(
    ("saved", "here", "decays", "told"),
    [
        # Each group gets the options of the saved group with its parameters.
        ([["a", "b"], ["c"]], [["c"], ["b", "a"]], [0.2, 0.1], []),
        ([["a"], ["b"], []], [[], ["b"], ["a"]], [0.3, 0.2, 0.1], []),
        # A saved group that is divided here, or joined with one that has other options.
        ([["a", "b"], ["c"]], [["a"], ["b", "c"]], [0.6, 0.7], [0, 1]),
        ([["a", "b"], ["c"]], [["a", "b", "c"]], [0.6], [0]),
        ([["a", "b", "c"]], [["a"], ["b", "c"]], [0.6, 0.7], [0, 1]),
        ([["a", "b"], ["c"], ["d"]], [["d"], ["a"], ["b", "c"]], [0.3, 0.7, 0.8], [1, 2]),
    ],
)
def test_options_follow_the_names(
    kind: Kind, saved: list[list[str]], here: list[list[str]], decays: list[float], told: list[int]
) -> None:
    """They once were taken by position: weights went on with a decay of 0."""

    def grouped(groups: list[list[str]], first: int) -> Any:
        groups_with_decay = [{"params": named(each), "weight_decay": (first + i) / 10} for i, each in enumerate(groups)]
        return kind(groups_with_decay, lr=lambda step: 0.1 / (step + 1))

    theirs, ours = grouped(saved, 1), grouped(here, 6)
    for _ in range(2):
        step_by_name(theirs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.load_state_dict(theirs.state_dict())
    assert [int(re.findall(r"param_groups\[(\d)\]", str(each.message))[0]) for each in caught] == told
    assert {each.filename for each in caught} <= {__file__}
    assert [group["weight_decay"] for group in ours.param_groups] == decays
    assert [group["schedule_step"] for group in ours.param_groups] == [2] * len(here)
    assert all(by_name(ours)[name].equal(by_name(theirs)[name]) for name in by_name(theirs))
    assert [group["param_names"] for group in ours.param_groups] == here
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    step_by_name(ours)


def test_parameters_that_change_places_in_a_group_keep_their_names(kind: Kind) -> None:
    """Names, and random bits with them, once stayed at their places."""
    ends = []
    for sorts in (False, True):
        pairs = named("abc", (40, 30))
        pairs = [(name, nn.Parameter(param.detach().bfloat16())) for name, param in pairs]
        optimizer = kind(pairs, lr=0.01, weight_rounding="stochastic")
        (group,) = optimizer.param_groups
        step_by_name(optimizer)
        params = dict(zip(group["param_names"], group["params"], strict=True))
        if sorts:
            group["params"].reverse()
        for _ in range(2):
            for name, param in params.items():
                param.grad = torch.linspace(-1, ord(name), param.numel()).view_as(param).bfloat16()
            optimizer.step()
        assert group["param_names"] == (["c", "b", "a"] if sorts else ["a", "b", "c"])
        assert [*optimizer.telemetry().names] == group["param_names"]
        ends.append(params)
    assert all(ends[0][name].equal(ends[1][name]) for name in "abc")


def test_groups_of_models_with_equal_names_are_loaded_group_by_group(kind: Kind) -> None:
    saved = kind([{"params": named("ab")}, {"params": named("ab")}], lr=0.1)
    for i, param in enumerate(param for group in saved.param_groups for param in group["params"]):
        param.grad = torch.full((3, 4), i + 1.0)
    saved.step()
    loaded = kind([{"params": named("ba")}, {"params": named("ab")}], lr=0.1)
    loaded.load_state_dict(saved.state_dict())
    order = [saved.state[param]["exp_avg"] for group in saved.param_groups for param in group["params"]]
    found = [loaded.state[param]["exp_avg"] for group in loaded.param_groups for param in group["params"]]
    assert all(ours.equal(order[i]) for ours, i in zip(found, (1, 0, 2, 3), strict=True))


def test_models_with_equal_names_in_other_places_are_loaded_by_position(kind: Kind) -> None:
    """A name in two groups does not tell which of them is meant; the state of one model would go to both."""
    saved, loaded = (kind([{"params": named(name)} for name in names], lr=0.1) for names in ("wwbb", "bbww"))
    for i, group in enumerate(saved.param_groups):
        group["params"][0].grad = torch.linspace(-1, i + 1, 12).view(3, 4)
    saved.step()
    with pytest.warns(UserWarning, match=r"by position: 'w' for 'b'"):
        loaded.load_state_dict(saved.state_dict())
    theirs, ours = (
        [each.state[group["params"][0]]["exp_avg"] for group in each.param_groups] for each in (saved, loaded)
    )
    assert_bitwise(ours, theirs)


def test_other_names_stay_and_are_told(kind: Kind) -> None:
    """A model's names decide about exclusions, telemetry and random bits, also after another model's are loaded."""
    saved = stepped(kind, [["backbone.weight", "head"]])
    loaded = kind(named(["encoder.weight", "head"]), lr=0.1, weight_decay=0.1, exclude_from_weight_decay=["encoder"])
    with pytest.warns(UserWarning, match=r"by position: 'backbone\.weight' for 'encoder\.weight'$") as told:
        loaded.load_state_dict(saved.state_dict())
    assert [each.filename for each in told] == [__file__]
    assert names_of(loaded) == ["encoder.weight", "head"]
    assert by_name(loaded)["encoder.weight"].equal(by_name(saved)["backbone.weight"])
    assert "no weight decay for encoder.weight" in loaded.explain()
    step_by_name(loaded)
    assert list(loaded.telemetry().names) == ["encoder.weight", "head"]


def test_a_model_without_names_gets_none_from_a_checkpoint(kind: Kind) -> None:
    saved = stepped(kind, [["a", "b"]])
    loaded = kind([param for _, param in named("xy")], lr=0.1)
    loaded.load_state_dict(saved.state_dict())
    assert "param_names" not in loaded.param_groups[0]
    with pytest.raises(ValueError, match=r"param_groups\[0\]\.params\[1\] has shape \(3, 4\).*\(5, 4\)"):
        kind([param for _, param in (*named("x"), *named("y", (5, 4)))], lr=0.1).load_state_dict(saved.state_dict())


def test_a_distributed_checkpoint_of_reordered_parameters(kind: Kind) -> None:
    """DCP loads parameters in the model's order, and names in the order of the saved model."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    net, other = (nn.ParameterDict(named(names)) for names in ("qk", "kq"))
    optimizer = kind(net.named_parameters(), lr=0.1)
    step_by_name(optimizer)
    loaded = kind(other.named_parameters(), lr=0.1)
    set_optimizer_state_dict(other, loaded, get_optimizer_state_dict(net, optimizer))
    theirs, ours = by_name(optimizer), by_name(loaded)
    assert names_of(optimizer) != names_of(loaded)
    assert all(ours[name].equal(theirs[name]) for name in "qk")


def test_a_checkpoint_of_adamw_is_loaded_by_name() -> None:
    theirs, ours = named(["query", "key"]), named(["key", "query"])
    adamw = torch.optim.AdamW(theirs, lr=0.1)
    step_by_name(adamw)
    lamb = Lamb(ours, lr=0.1, adam=True, decay_mode="decoupled")
    with pytest.warns(UserWarning, match="torch's AdamW"):
        lamb.load_state_dict(adamw.state_dict())
    assert all(by_name(lamb)[name].equal(by_name(adamw)[name]) for name in ("query", "key"))
