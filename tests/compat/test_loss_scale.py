"""Loss scale managers with the names of npu_bridge and of MindSpore."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import ExponentialScale, FixedScale, Lamb, WindowScale
from bighorn.compat import mindspore, npu_bridge
from tests.support.tables import for_every


def scales(manager: Any, steps: str, *, update: Callable[[bool], bool] = bool) -> list[float]:
    """Return the scale after each step of a string of "f" (finite) and "o" (overflow)."""
    seen = []
    for step in steps:
        manager.update_loss_scale(update(step == "o"))
        seen.append(manager.get_loss_scale())
    return seen


def finite(overflow: bool) -> bool:
    return not overflow


def test_npu_bridge() -> None:
    manager = npu_bridge.ExponentialUpdateLossScaleManager(8.0, 3, decr_ratio=0.5)
    assert scales(manager, "ofoffofffo", update=finite) == [8, 8, 4, 4, 4, 4, 4, 4, 8, 8]
    manager = npu_bridge.ExponentialUpdateLossScaleManager(2, 1, 1, 4)
    assert scales(manager, "fooo", update=finite) == pytest.approx([8, 6.4, 5.12, 4.096])
    floor = npu_bridge.ExponentialUpdateLossScaleManager(2.0, 10, 1, decr_ratio=0.3)
    assert scales(floor, "ooo", update=finite) == [1, 1, 1]
    top = npu_bridge.ExponentialUpdateLossScaleManager(2.0**127, 1)
    assert scales(top, "ffoo", update=finite) == pytest.approx([2.0**127, 2.0**127, 2.0**127, 0.8 * 2.0**127])
    assert scales(npu_bridge.FixedLossScaleManager(1), "fo", update=finite) == [1, 1]


def test_mindspore() -> None:
    manager = mindspore.DynamicLossScaleManager(2.0, 4, 2)
    assert scales(manager, "ffoofofff") == [2, 8, 2, 1, 1, 1, 1, 4, 4]
    assert manager.get_drop_overflow_update()
    fixed = mindspore.FixedLossScaleManager()
    assert scales(fixed, "ofo") == [128] * 3
    assert fixed.get_drop_overflow_update()


def test_mindspores_limit_of_overflows() -> None:
    manager = mindspore.DynamicLossScaleManager(2.0)
    assert scales(manager, "o" * 600 + "f" + "o" * 1000)[-1] == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="1001 steps in a row overflowed"):
            manager.update_loss_scale(True)
    manager.update_loss_scale(False)
    assert scales(manager, "o") == [1]


def test_cells_are_not_there() -> None:
    assert mindspore.FixedLossScaleManager(8.0, False).get_update_cell() is None  # type: ignore[func-returns-value]
    with pytest.raises(NotImplementedError, match=r"loss_scaler\(\)"):
        mindspore.FixedLossScaleManager().get_update_cell()
    with pytest.raises(NotImplementedError, match=r"update_loss_scale\(overflow\)"):
        mindspore.DynamicLossScaleManager().get_update_cell()


BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (npu_bridge.FixedLossScaleManager, {"loss_scale": 0.5}, ValueError, "^loss_scale=0.5 .*at least 1"),
    (npu_bridge.FixedLossScaleManager, {"loss_scale": 0}, ValueError, "^loss_scale=0 .*at least 1"),
    (npu_bridge.FixedLossScaleManager, {"loss_scale": math.nan}, ValueError, "^loss_scale=nan"),
    (npu_bridge.FixedLossScaleManager, {"loss_scale": None}, TypeError, "^loss_scale must be a number"),
    (npu_bridge.FixedLossScaleManager, {"enable_overflow_check": 2}, TypeError, "^enable_overflow_check"),
    (npu_bridge.ExponentialUpdateLossScaleManager, {"init_loss_scale": 0.5}, ValueError, "^init_loss_scale=0.5"),
    (npu_bridge.ExponentialUpdateLossScaleManager, {"incr_every_n_steps": 0}, ValueError, "^incr_every_n_steps=0"),
    (npu_bridge.ExponentialUpdateLossScaleManager, {"incr_every_n_steps": 1.5}, TypeError, "^incr_every_n_steps must"),
    (npu_bridge.ExponentialUpdateLossScaleManager, {"decr_every_n_nan_or_inf": -1}, ValueError, "^decr_every_n_nan"),
    (npu_bridge.ExponentialUpdateLossScaleManager, {"incr_ratio": 1}, ValueError, "^incr_ratio=1"),
    (npu_bridge.ExponentialUpdateLossScaleManager, {"decr_ratio": 1.0}, ValueError, "^decr_ratio=1.0"),
    (mindspore.FixedLossScaleManager, {"loss_scale": 0.99}, ValueError, "^loss_scale=0.99"),
    (mindspore.FixedLossScaleManager, {"drop_overflow_update": 1}, TypeError, "^drop_overflow_update"),
    (mindspore.DynamicLossScaleManager, {"init_loss_scale": 0}, ValueError, "^init_loss_scale=0"),
    (mindspore.DynamicLossScaleManager, {"scale_factor": 0}, ValueError, "^scale_factor=0 .*above 1"),
    (mindspore.DynamicLossScaleManager, {"scale_factor": 1}, ValueError, "^scale_factor=1 .*above 1"),
    (mindspore.DynamicLossScaleManager, {"scale_window": 0}, ValueError, "^scale_window=0"),
]
NEEDED: dict[Any, dict[str, Any]] = {
    npu_bridge.FixedLossScaleManager: {"loss_scale": 8.0},
    npu_bridge.ExponentialUpdateLossScaleManager: {"init_loss_scale": 8.0, "incr_every_n_steps": 3},
}


@for_every(("kind", "arguments", "error", "message"), BAD)
def test_bad_input_is_refused_by_the_names_of_the_system(
    kind: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**{**NEEDED.get(kind, {}), **arguments})


def test_a_scaler_of_a_manager() -> None:
    """The scaler has the manager's policy, and the manager returns the scaler's scale."""
    manager = mindspore.DynamicLossScaleManager(64.0, 2, 2)
    scaler = manager.loss_scaler()
    assert (scaler.policy, scaler.max_consecutive_overflows) == (WindowScale(64.0, 2.0, 0.5, 2), 1000)
    param = Parameter(torch.ones(3))
    optimizer = Lamb([param])
    scaler.scale(param.sum() * torch.inf).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    assert param.equal(torch.ones(3))
    assert manager.get_loss_scale() == 32.0
    with pytest.raises(RuntimeError, match=r"update\(\) alone"):
        manager.update_loss_scale(True)
    with pytest.raises(RuntimeError, match="in use already"):
        manager.loss_scaler()
    moved = npu_bridge.FixedLossScaleManager(8.0)
    assert moved.loss_scaler(min_scale=8.0).policy == FixedScale(8.0)
    stepped = npu_bridge.ExponentialUpdateLossScaleManager(8.0, 5)
    stepped.update_loss_scale(True)
    with pytest.raises(RuntimeError, match="in use already"):
        stepped.loss_scaler()
    assert stepped.policy == ExponentialScale(8.0, 2.0, 0.8, 5, 2)
    assert not mindspore.FixedLossScaleManager(8.0, False).loss_scaler().skip_on_overflow
    assert not npu_bridge.FixedLossScaleManager(8.0, False).loss_scaler().skip_on_overflow
