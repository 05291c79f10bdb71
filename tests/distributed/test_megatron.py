"""Refusals of megatron_groups; tests/integrations/test_megatron.py steps inside megatron-core."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bighorn import Came, Lamb, Lars, megatron_groups
from tests.support.processes import group_of_one


def test_another_optimizer_has_no_ranges() -> None:
    chained = torch.optim.SGD([torch.zeros(2)])
    with pytest.raises(TypeError, match=r"(?s)gbuf_ranges, not SGD.*--use-distributed-optimizer.*chained_optimizers"):
        megatron_groups(chained)


def one_rank() -> SimpleNamespace:
    """Return the attributes of Megatron's distributed optimizer for a model with one parameter."""
    model, flat = torch.nn.Linear(20, 30, bias=False), torch.zeros(600)
    model.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    held = {"param": SimpleNamespace(start=0, end=600, size=600)}
    return SimpleNamespace(
        gbuf_ranges=[{"float32": [{"param_map": {model.weight: held}}]}],
        model_chunks=[model],
        model_fp32_groups=[[model.weight]],
        model_float16_groups=[[]],
        optimizer=torch.optim.Adam([flat]),
        buffers=[],
        data_parallel_group=None,
        get_parameter_state_dp_zero=dict,
        sharded_state_dict=dict,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda of: of.optimizer.param_groups[0]["params"].append(torch.zeros(1)),
            "2 tensors in group 0.*1 p.*once",
        ),
        (lambda of: of.gbuf_ranges.clear(), r"gbuf_ranges lacks a parameter of shape \(30, 20\) of group 0"),
        (lambda of: of.model_chunks.clear(), r"model_chunks lacks a parameter of shape \(30, 20\) of group 0"),
        (
            lambda of: of.buffers.append(SimpleNamespace(tp_group=SimpleNamespace(size=lambda: 2))),
            "weight is a part of a layer.*tensor_model_parallel_size 1",
        ),
        (
            lambda of: of.optimizer.param_groups[0].update(params=[torch.zeros(600, dtype=torch.bfloat16)]),
            "no float32 weights of weight: leave out use_precision_aware_optimizer",
        ),
    ],
    ids=["replaced", "no-range", "no-chunk", "tensor-parallel", "precision-aware"],
)
def test_maps_that_lack_something_are_refused(change: Callable[[Any], object], message: str) -> None:
    distributed = one_rank()
    change(distributed)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        megatron_groups(distributed)


@pytest.mark.parametrize(("kind", "refused"), [(Lamb, [0]), (Came, [0, 1]), (Lars, [0, 1])])
def test_megatrons_checkpoints_of_other_state_are_refused(kind: Any, refused: list[int]) -> None:
    distributed = one_rank()
    flat = distributed.optimizer.param_groups[0]["params"][0]
    with group_of_one() as group:
        distributed.data_parallel_group = group
        distributed.buffers = []
        distributed.optimizer = kind(megatron_groups(distributed), lr=0.1)
        saves = {name: getattr(distributed, name) for name in ("get_parameter_state_dp_zero", "sharded_state_dict")}
        assert [save() for save in saves.values()] == [{}, {}]  # no state before the first step
        flat.grad = torch.ones(600)
        distributed.optimizer.step()
        for index, (name, save) in enumerate(saves.items()):
            if index in refused:
                with pytest.raises(ValueError, match=f"{name} would save of {kind.__name__}, whose.*--no-save-optim"):
                    save()
            else:
                assert save() == {}
