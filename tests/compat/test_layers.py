"""Properties of every compatibility layer: checkpoints, copies, schedulers, and bighorn's own form of state."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import bighorn
from bighorn.compat import apex, mindformers, mindspore, npu_bridge, pytorch_fused_lamb, timm, torch_npu
from tests.support import scalar_formulas
from tests.support.compat_training import LRS, assert_close, by_scalar, gradient, step, trained, weights
from tests.support.processes import group_of_one
from tests.support.tables import for_every

Params = Mapping[str, Parameter]
Layers = dict[str, tuple[Callable[[Params, Any], Optimizer], Callable[[Params, Any], Optimizer]]]

EXCLUDED: dict[str, Any] = {"exclude_from_weight_decay": ["beta", "gamma"]}

LAYERS: Layers = {
    "torch_npu": (
        lambda params, lr: torch_npu.NpuFusedLamb(params.items(), lr, weight_decay=0.1, use_global_grad_norm=True),
        lambda params, lr: bighorn.Lamb.like("torch_npu", params.items(), lr=lr, weight_decay=0.1, max_grad_norm=1.0),
    ),
    "mindspore": (
        lambda params, lr: mindspore.Lamb(params.items(), lr, weight_decay=0.1),
        lambda params, lr: bighorn.Lamb.like("mindspore", params.items(), lr=lr, weight_decay=0.1),
    ),
    "pytorch_fused_lamb": (
        lambda params, lr: pytorch_fused_lamb.Lamb(params.items(), lr, weight_decay=0.1, amsgrad=True),
        lambda params, lr: bighorn.Lamb(params.items(), lr, eps=1e-8, weight_decay=0.1, second_moment="amsgrad"),
    ),
    "apex": (
        lambda params, lr: apex.FusedLAMB(params.items(), lr, adam_w_mode=False, use_nvlamb=True),
        lambda params, lr: bighorn.Lamb.like("nvlamb", params.items(), lr=lr, decay_mode="l2"),
    ),
    "apex's masters": (
        lambda params, lr: apex.FusedMixedPrecisionLamb(
            params.items(), lr, weight_decay=0.0, reduced_precision_dtype=torch.bfloat16
        ),
        lambda params, lr: bighorn.Lamb.like(
            "apex", params.items(), lr=lr, weight_decay=0.0, weight_rounding=rounding(params)
        ),
    ),
    "timm": (
        lambda params, lr: timm.Lamb(params.items(), lr, trust_clip=True, foreach=True),
        lambda params, lr: bighorn.Lamb.like("lambc", params.items(), lr=lr),
    ),
    "npu_bridge": (
        lambda params, lr: npu_bridge.LAMBOptimizer(lr, 0.1, params=params.items(), **EXCLUDED),
        lambda params, lr: bighorn.Lamb(params.items(), lr, weight_decay=0.1, **EXCLUDED),
    ),
    "mindformers": (
        lambda params, lr: mindformers.Came(params.items(), lr, weight_decay=0.1, compression=True, loss_scale=4),
        lambda params, lr: bighorn.Came(
            params.items(),
            lr,
            (0.9, 0.999, 0.99),
            weight_decay=0.1,
            factor="last_two",
            decay_rate=0.8,
            state_dtype=torch.float16,
        ),
    ),
}
"""Each compatibility class, and bighorn's optimizer with the options that it is equal to."""

DTYPES = (torch.float32, torch.bfloat16)


def rounding(params: Params) -> Any:
    """Apex keeps float32 weights for parameters of the dtype that was named, and for no others."""
    return "master" if params["fc.weight"].dtype == torch.bfloat16 else "nearest"


BY_HAND: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], dict[str, Any]]] = {
    "apex": (apex.FusedLAMB, {}, {}),
    "apex, l2": (apex.FusedLAMB, {"adam_w_mode": False, "bias_correction": False}, {"decay_mode": "l2"}),
    "apex, no averaging": (apex.FusedLAMB, {"grad_averaging": False}, {}),
    "apex, no decay": (apex.FusedLAMB, {"weight_decay": 0.0}, {"adam": True}),
    "nvlamb, no decay": (apex.FusedLAMB, {"weight_decay": 0.0, "use_nvlamb": True}, {}),
    "apex's masters": (apex.FusedMixedPrecisionLamb, {"betas": (0.8, 0.9), "eps": 1e-3}, {}),
    "timm": (timm.Lamb, {"max_grad_norm": None}, {}),
    "timm, no decay": (timm.Lamb, {"weight_decay": 0.0}, {"adam": True}),
    "timm, no decay, always": (timm.Lamb, {"weight_decay": 0.0, "always_adapt": True}, {}),
    "timm, lambc": (timm.Lamb, {"trust_clip": True}, {"trust_ratio_bounds": (0.0, 1.0)}),
    "timm, lambw": (timm.Lamb, {"decoupled_decay": True}, {"decay_mode": "decoupled"}),
    "timm, caution": (timm.Lamb, {"caution": True}, {"cautious": True}),
}
"""Classes, their arguments, and the options of the scalar formulas that are not among these arguments."""


@for_every("name", BY_HAND)
def test_apex_and_timm_are_the_scalar_formulas(name: str) -> None:
    kind, given, options = BY_HAND[name]
    ours = trained(lambda params: kind(params.values(), LRS, **given))
    scalars = dataclasses.fields(scalar_formulas.Options)
    known = {field.name for field in scalars} & given.keys()
    by_hand = {"weight_decay": 0.01, **{each: given[each] for each in known}, **options}
    assert_close(ours, by_scalar(lambda _: by_hand, given.get("max_grad_norm", 1.0)), 1e-12)


REFUSED: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], str]] = {
    "apex's amsgrad": (apex.FusedLAMB, {"amsgrad": True}, r"^amsgrad=True is refused by apex, too: use bighorn\.Lamb"),
    "apex's zeros": (apex.FusedLAMB, {"set_grad_none": False}, r"call zero_grad\(set_to_none=False\)$"),
    "apex's step": (apex.FusedMixedPrecisionLamb, {"step": 5}, "^step=5 must be 0: load_state_dict restores"),
    "apex's dtype": (
        apex.FusedMixedPrecisionLamb,
        {"reduced_precision_dtype": "fp16"},
        "^reduced_precision_dtype must",
    ),
    "timm's decay": (timm.Lamb, {"corrected_weight_decay": True}, "pass a schedule as weight_decay"),
    "timm's flag": (timm.Lamb, {"trust_clip": 1}, "^trust_clip must be"),
}


@for_every("name", REFUSED)
def test_an_argument_without_a_counterpart_is_refused_with_what_to_do(name: str) -> None:
    kind, given, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        kind(weights().values(), **given)


def lr(number: int) -> float:
    return 0.1 / (number + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_it_is_ours_with_its_options(layer: str, dtype: torch.dtype) -> None:
    results = []
    for make in LAYERS[layer]:
        params = weights(dtype)
        optimizer = make(params, lr)
        for number in range(5):
            step(params, optimizer, number)
        results.append(params)
    assert all(param.equal(results[1][name]) for name, param in results[0].items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["load", "native", "deepcopy", "pickle"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_copy_goes_on(layer: str, way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, native = LAYERS[layer]
    whole = weights(dtype)
    uninterrupted = make(whole, lr)
    params = weights(dtype)
    optimizer = make(params, lr)
    for number in range(6):
        step(whole, uninterrupted, number)
    for number in range(3):
        step(params, optimizer, number)
    if way == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    elif way == "pickle":
        optimizer = pickle.loads(pickle.dumps(optimizer))
    else:
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        fresh = {name: Parameter(param.detach().clone()) for name, param in params.items()}
        optimizer = (native if way == "native" else make)(fresh, lr)
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    params = dict(zip(params, optimizer.param_groups[0]["params"], strict=True))
    for number in range(3, 6):
        step(params, optimizer, number)
    assert all(param.equal(whole[name]) for name, param in params.items())
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert dtypes <= {torch.float32, torch.float16 if layer == "mindformers" else torch.float32}


def test_pickles_need_schedules_that_pickle() -> None:
    """A pickled optimizer that was called with gradients can be called again after loading."""
    params = weights(torch.float32)
    schedule = mindspore.CosineDecayLR(0.01, 0.1, 9)
    for optim in (mindspore.Lamb(params.items(), schedule), mindformers.Came(params.items(), schedule, loss_scale=2)):
        optim(tuple(torch.ones_like(param) for param in params.values()))
        again = pickle.loads(pickle.dumps(optim))
        again(tuple(torch.ones_like(param) for param in params.values()))
        assert again.param_groups[0]["lr"] == schedule(1)
        assert getattr(again, "loss_scale", 2) == 2


MISSPELT: dict[str, tuple[type, str, str]] = {
    "torch_npu": (torch_npu.NpuFusedLamb, "use_global_gradnorm", "use_global_grad_norm"),
    "mindspore": (mindspore.Lamb, "lr", "learning_rate"),
    "pytorch_fused_lamb": (pytorch_fused_lamb.Lamb, "amsgrd", "amsgrad"),
    "apex": (apex.FusedLAMB, "adamw_mode", "adam_w_mode"),
    "apex's masters": (apex.FusedMixedPrecisionLamb, "reduced_precision_type", "reduced_precision_dtype"),
    "timm": (timm.Lamb, "trust_clp", "trust_clip"),
    "npu_bridge": (npu_bridge.LAMBOptimizer, "weight_decay", "weight_decay_rate"),
    "npu_bridge's wrapper": (npu_bridge.NPUOptimizer, "is_losscale", "is_loss_scale"),
    "npu_bridge's distributed wrapper": (npu_bridge.NPUDistributedOptimizer, "models", "model"),
    "npu_bridge's scaling wrapper": (npu_bridge.NPULossScaleOptimizer, "is_distribute", "is_distributed"),
    "mindformers": (mindformers.Came, "clip_treshold", "clip_threshold"),
}


@for_every("layer", MISSPELT)
def test_a_misspelt_keyword_suggests_the_nearest(layer: str) -> None:
    kind, name, nearest = MISSPELT[layer]
    with pytest.raises(TypeError, match=rf"{kind.__name__} got an unknown .*{name!r} \(did you mean {nearest!r}\?\)"):
        kind(**{name: 1})


ABSENT: dict[str, tuple[type, str, str]] = {
    "ours": (pytorch_fused_lamb.Lamb, "max_grad_norm", r"; bighorn\.Lamb has it$"),
    "ours in torch_npu's": (torch_npu.NpuFusedLamb, "bias_correction", r"; bighorn\.Lamb has it$"),
    "ours in MindFormers'": (mindformers.Came, "max_grad_norm", r"; bighorn\.Came has it$"),
    "torch's foreach": (
        pytorch_fused_lamb.Lamb,
        "foreach",
        r'torch\.optim: with bighorn\.Lamb, use backend="foreach"$',
    ),
    "torch's fused": (pytorch_fused_lamb.Lamb, "fused", r"torch\.optim: with bighorn\.Lamb, every backend is fused; "),
    "the wider wrapper's": (npu_bridge.NPULossScaleOptimizer, "is_tailing_optimization", "; NPUOptimizer has it$"),
}


@for_every("case", ABSENT)
def test_a_keyword_that_another_class_has_names_that_class(case: str) -> None:
    kind, name, words = ABSENT[case]
    with pytest.raises(TypeError, match=rf"{kind.__name__} got an unknown argument {name!r}.*{words}"):
        kind(**{name: True})


def test_state_bytes_in_the_words_of_a_face() -> None:
    params = weights(torch.float32)
    expected = bighorn.Lamb.state_bytes(params.items())
    for layer in (mindspore.Lamb, npu_bridge.LAMBOptimizer):
        assert layer.state_bytes(params.items()) == layer.state_bytes(params.items(), learning_rate=0.1) == expected
    assert mindformers.Came.state_bytes(params.items()) == bighorn.Came.state_bytes(params.items(), factor="last_two")
    assert torch_npu.NpuFusedLamb.state_bytes(params.items()) == expected


@pytest.mark.parametrize("layer", LAYERS)
def test_a_torch_scheduler_drives_it(layer: str) -> None:
    params = weights(torch.float32)
    optimizer = LAYERS[layer][0](params, 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []
    for number in range(3):
        step(params, optimizer, number)
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [0.05, 0.025, 0.0125]
    refusing = LAYERS[layer][0](params, lr)
    torch.optim.lr_scheduler.ExponentialLR(refusing, 0.5)
    with pytest.raises(RuntimeError, match="initial_lr"):
        step(params, refusing, 0)


@pytest.mark.parametrize("layer", LAYERS)
def test_it_is_itself_on_the_ranks_of_shard_update(layer: str) -> None:
    """A rank's share has the options of the whole, among them a loss_scale."""
    alone, shared = (weights(torch.float32) for _ in range(2))
    whole, optimizer = (LAYERS[layer][0](params, 0.1) for params in (alone, shared))
    with group_of_one():
        parts = bighorn.shard_update(optimizer)
        for number in range(2):
            step(alone, whole, number)
            for name, param in shared.items():
                param.grad = gradient(name, number, param.dtype) * getattr(optimizer, "loss_scale", 1)
            parts.step()
    assert all(param.equal(alone[name]) for name, param in shared.items())


def test_a_loss_scale_divides_whole_steps_alone() -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = mindformers.Came(model.named_parameters(), 0.1, loss_scale=4)
    with pytest.raises(ValueError, match="loss_scale=4 divides the gradients of a whole step; leave it at 1"):
        bighorn.release_gradients(model, optimizer)


def test_apex_groups_count_their_steps() -> None:
    """PolyWarmUpScheduler of NVIDIA's BERT reads the count, also right after a checkpoint has been loaded."""
    params = weights(torch.float32)
    optimizer = apex.FusedLAMB(params.values())
    for number in range(3):
        step(params, optimizer, number)
    of_apex = {
        "lr": 0.1,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "grad_averaging": True,
        "max_grad_norm": 1.0,
        "params": list(range(len(params))),
        "step": 3,
        "initial_lr": 0.1,  # of torch's schedulers
    }
    moments = ({name: state[name] for name in ("exp_avg", "exp_avg_sq")} for state in optimizer.state.values())
    checkpoint = {"state": dict(enumerate(moments)), "param_groups": [of_apex]}
    loaded = apex.FusedLAMB(params.values())
    with pytest.warns(bighorn.ConvertedStateWarning, match="checkpoint of apex's FusedLAMB") as caught:
        loaded.load_state_dict(checkpoint)
    assert "initial_lr" not in str(caught[0].message)
    again = apex.FusedMixedPrecisionLamb(weights(torch.float32).values())
    again.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded, again, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert [group["step"] for group in each.param_groups] == [3]
    step(params, loaded, 3)
    assert loaded.param_groups[0]["step"] == 4


@for_every("kind", (torch.amp.GradScaler, bighorn.LossScaler), ids=lambda kind: kind.__name__)
def test_apex_masters_step_float16_gradients_of_a_scaler(kind: Callable[..., Any]) -> None:
    """Torch's GradScaler refuses to unscale them for any other optimizer."""
    params = weights(torch.float16)
    optimizer = apex.FusedMixedPrecisionLamb(params.values(), reduced_precision_dtype=torch.float16)
    scaler = kind(device="cpu", init_scale=4.0) if kind is torch.amp.GradScaler else kind(bighorn.FixedScale(4.0))
    plain = weights(torch.float16)
    expected = apex.FusedMixedPrecisionLamb(plain.values(), reduced_precision_dtype=torch.float16)
    for number in range(2):
        for name, param in params.items():
            param.grad = scaler.scale(gradient(name, number, torch.float16))
        step(plain, expected, number)
        scaler.step(optimizer)
        scaler.update()
    assert all(param.equal(plain[name]) for name, param in params.items())
    before = {name: param.detach().clone() for name, param in params.items()}
    for param in params.values():
        param.grad = torch.full_like(param, float("inf"))
    scaler.step(optimizer)
    assert all(param.equal(before[name]) for name, param in params.items())
