"""Metrics of the last step, from the optimizer and as scalars for loggers at an interval of steps."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars, telemetry
from tests.support.cases import Kind
from tests.support.optimizer_runs import CASE, OWN, advance, backward, figures, model


def test_telemetry_is_of_its_own_step(kind: Kind, backend: str) -> None:
    case = CASE.of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(1))
    first = figures(optimizer.telemetry())
    kept = {name: column.clone() for name, column in first.items()}
    advance(case, parameters, optimizer, range(1, 2))
    for name, column in figures(optimizer.telemetry()).items():
        assert first[name].equal(kept[name])
        assert not column.equal(kept[name])


# ---- for loggers -----------------------------------------------------------------------------------------------------

LAYERWISE = ("weight_norm", "update_norm", "trust_ratio")
OURS = {Lamb: LAYERWISE, Came: ("update_rms", "clip_factor", "confidence"), Lars: LAYERWISE}


def stepped(kind: Kind, **options: Any) -> tuple[torch.nn.Module, Any]:
    net = model()
    pairs = list(net.named_parameters())
    groups: list[dict[str, Any]] = [{"params": pairs[:2], "lr": 0.5}, {"params": pairs[2:]}]
    optimizer = kind(groups, lr=0.25, **{"weight_decay": 0.1, **OWN[kind], **options})
    backward(net)
    optimizer.step()
    return net, optimizer


def test_every_figure_has_a_tag_for_every_layer(kind: Kind, backend: str) -> None:
    net, optimizer = stepped(kind, backend=backend)
    values = telemetry.scalars(optimizer)
    told, layers = optimizer.telemetry(), [name for name, _ in net.named_parameters()]
    assert list(told.names) == layers
    tags = [f"{figure}/{layer}" for figure in (*OURS[kind], "lr", "effective_lr") for layer in layers]
    assert list(values) == [*tags, "skipped_steps"]
    assert all(type(value) is float for value in values.values())
    for figure, column in figures(told).items():
        assert [values[f"{figure}/{layer}"] for layer in layers] == column.tolist()
    for layer in layers:
        lr = 0.5 if layer in layers[:2] else 0.25
        assert values[f"lr/{layer}"] == lr
        assert values[f"effective_lr/{layer}"] == lr * values[f"{OURS[kind][-1]}/{layer}"]


def test_layers_of_one_name_in_two_groups_are_told_apart(kind: Kind) -> None:
    nets = [torch.nn.Linear(3, 2) for _ in range(2)]
    optimizer = kind([{"params": list(net.named_parameters())} for net in nets], lr=0.1)
    assert telemetry.scalars(optimizer) == {}
    for net in nets:
        net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = ("weight", "bias", "weight-2", "bias-2")
    assert optimizer.telemetry().names == tuple(optimizer.telemetry().as_dict()) == names
    assert {f"lr/{name}" for name in names} < telemetry.scalars(optimizer).keys()


def test_the_learning_rate_is_that_of_the_step_and_not_what_was_written_since(kind: Kind, backend: str) -> None:
    _, optimizer = stepped(kind, backend=backend)
    for group in optimizer.param_groups:
        group["lr"] = 7.0  # like a scheduler after a step
    assert {telemetry.scalars(optimizer)[f"lr/{name}"] for name in optimizer.telemetry().names} == {0.5, 0.25}
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    by_tensor = kind([param], lr=torch.tensor(0.25), backend=backend)
    by_tensor.step()
    assert by_tensor.telemetry().lr.tolist() == [0.25]


def test_rows_of_several_buckets_and_slices_come_in_order(kind: Kind, backend: str) -> None:
    """Groups, exclusions, dtypes and stacks divide parameters among buckets; telemetry keeps the parameters' order."""
    torch.manual_seed(0)
    shapes = {"a": (4, 3), "b": (3,), "c": (4, 3), "d": (3,), "stack": (2, 5, 4)}
    params = {name: Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    params["c"] = Parameter(params["c"].detach().bfloat16())
    for p in params.values():
        p.grad = torch.randn_like(p)
    own: dict[str, dict[str, Any]] = {"b": {"weight_decay": 0.0}, "stack": {"stacked": True, "lr": 0.5}}
    others = []
    for name, p in params.items():
        twin = Parameter(p.detach().clone())
        twin.grad = p.grad
        others.append(kind([{"params": [twin], **own.get(name, {})}], lr=0.25, weight_decay=0.1, backend=backend))
        others[-1].step()
    stack = {"params": [("stack", params.pop("stack"))], **own["stack"]}
    options: dict[str, Any] = {"lr": 0.25, "weight_decay": 0.1, "exclude_from_weight_decay": ["b"]}
    optimizer = kind([{"params": params.items()}, stack], backend=backend, **options)
    optimizer.step()
    told = optimizer.telemetry()
    assert told.names == ("a", "b", "c", "d", "stack[0]", "stack[1]")
    assert told.lr.tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    for name, column in figures(told).items():
        assert (column.shape, column.dtype) == ((6,), torch.float32)
        assert column.equal(torch.cat([figures(other.telemetry())[name] for other in others])), name


def test_the_host_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = adapted(Lamb)
    train(net, optimizer, 1)
    waits: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(Tensor, name)

        def counted(*args: Any) -> Any:
            waits.append(name)
            return original(*args)

        return counted

    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, counting(name))
    telemetry.SlowLayers().watch(optimizer)
    assert waits == []
    telemetry.scalars(optimizer)
    assert waits == ["tolist"]


def test_every_so_many_steps(kind: Kind) -> None:
    net, optimizer = stepped(kind)
    told: list[tuple[int, dict[str, float]]] = []
    handle = telemetry.log_every(optimizer, 2, lambda values, step: told.append((step, values)))
    for _ in range(5):
        backward(net)
        optimizer.step()
    assert [step for step, _ in told] == [2, 4]
    assert all(values.keys() == telemetry.scalars(optimizer).keys() for _, values in told)
    handle.remove()
    optimizer.step()
    assert len(told) == 2


@pytest.mark.parametrize("name", ["optimizer", "optim"])
def test_an_optimizer_is_found_in_its_wrappers(name: str, kind: Kind) -> None:
    _, optimizer = stepped(kind)
    wrapped: Any = types.SimpleNamespace(**{name: types.SimpleNamespace(**{name: optimizer})})
    assert telemetry.scalars(wrapped) == telemetry.scalars(optimizer)


def test_what_is_refused() -> None:
    net = model()
    with pytest.raises(TypeError, match="a Lamb, a Came or a Lars, not AdamW"):
        telemetry.scalars(torch.optim.AdamW(net.parameters()))
    optimizer = Lamb(net.parameters())
    for steps, error, message in (
        (0, ValueError, "steps=0 is out of range: it must be an integer, at least 1"),
        (True, TypeError, "must be an integer, not True"),
        (2.0, TypeError, r"must be an integer, not 2\.0 \(float\)"),
    ):
        with pytest.raises(error, match=message):
            telemetry.log_every(optimizer, steps, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="log must be a function of the scalars and the step, not 'wandb'"):
        telemetry.log_every(optimizer, 1, "wandb")  # type: ignore[arg-type]


# ---- layers that start at zero ---------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A LoRA adapter: A is random, and B zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lora_A, self.lora_B = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lora_B(self.lora_A(x))
        return out


def adapted(kind: Kind, **options: Any) -> tuple[Adapter, Any]:
    net = Adapter()
    return net, kind(net.named_parameters(), lr=0.01, **options)


def train(net: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        (net(data) - data.roll(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "every", "message"),
    [
        (Lamb, 1, r"^lora_B.weight started at zero, .* below 0.05: .*adaptation=\["),
        (Lamb, 2, r"^lora_B.weight started at zero, .* below 0.05: .*adaptation=\["),
        (Lars, 1, r"^lora_B.weight started at zero, and LARS's.*\"ndim<2\"$"),  # its first step has a ratio of 1
    ],
)
def test_slow_layers_that_started_at_zero_are_named_once(kind: Kind, every: int, message: str) -> None:
    net, optimizer = adapted(kind)
    telemetry.log_every(optimizer, every, lambda *_: None)
    with pytest.warns(UserWarning, match=message) as told:
        train(net, optimizer, 12)
    assert len(told) == 1  # and lora_A, whose ratio is also small, is not among them


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lamb, {"exclude_from_layer_adaptation": ["lora_B"]}),
        (Lamb, {"weight_norm_bounds": (1.0, 100.0)}),
        (Came, {}),
        (Lars, {"exclude_from_layer_adaptation": ["lora_B"]}),
    ],
)
def test_layers_that_are_not_slow_are_not_named(kind: Kind, options: Any) -> None:
    net, optimizer = adapted(kind, **options)
    slow, seen = telemetry.SlowLayers(), []

    def report(*_: object) -> None:
        slow.watch(optimizer)
        seen.append(slow.found(telemetry.scalars(optimizer)))

    handle = optimizer.register_step_post_hook(report)
    train(net, optimizer, 6)
    handle.remove()
    assert seen == [[]] * 6


def test_a_layer_that_recovers_is_not_slow() -> None:
    slow = telemetry.SlowLayers()
    net, optimizer = adapted(Lamb)
    train(net, optimizer, 1)
    slow.watch(optimizer)
    with pytest.warns(UserWarning, match="started at zero"):
        found = [
            slow.found({"trust_ratio/lora_B.weight": ratio}) for ratio in (0.01, 0.01, 0.2, 0.01, 0.01, 0.01, 0.01)
        ]
    assert found == [[], [], [], [], [], ["lora_B.weight"], ["lora_B.weight"]]


def test_skipped_steps_are_counted_from_the_state_on_that_was_loaded(kind: Kind) -> None:
    net = model()
    optimizer = kind(net.named_parameters(), lr=0.1, skip_nonfinite=True)
    for factor in (1.0, torch.inf, 1.0, torch.nan):
        backward(net)
        assert net.first.weight.grad is not None
        net.first.weight.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.telemetry().skipped == telemetry.scalars(optimizer)["skipped_steps"] == 2
    for fresh in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert fresh.telemetry().skipped == 0
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.telemetry().skipped == 0


@pytest.mark.parametrize("state_dtype", ["int4", "int8", None])
def test_code_errors_are_of_moments_in_codes(kind: Kind, state_dtype: Any) -> None:
    """`code_errors` creates no state, and returns errors like those for evenly spread values."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1))
    optimizer = kind(net.named_parameters(), lr=0.01, state_dtype=state_dtype)
    assert optimizer.code_errors() == {}
    assert not optimizer.state
    net(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    found = optimizer.code_errors()
    assert list(found) == (["0.weight"] if state_dtype else [])
    assert all(0.03 < error < 0.3 if state_dtype == "int4" else 0.001 < error < 0.02 for error in found.values())
