"""timm's registry and the groups that timm makes: docs/with-timm.md.

`import timm` needs torchvision, so the tests import timm's optimizers from their folder. The optimizers use timm's
models only for layer decay, for which the tests make groups themselves.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from bighorn import Lamb
from tests.support import peer_formulas
from tests.support.trainer_model import Net, batches

if peer_formulas.TIMM_ABSENT:
    pytest.skip(peer_formulas.TIMM_ABSENT, allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Any:
    peer_formulas.installed_timm_lamb()
    models: Any = ModuleType("timm.models")
    models.group_parameters = models.group_with_matcher = None
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.models", models)
    return importlib.import_module("timm_optim._optim_factory")


def registered(factory: Any) -> Any:
    info = factory.OptimInfo(name="bighorn", opt_class=Lamb, has_betas=True, description="LAMB, fused")
    factory.default_registry.register(info)
    return factory


def test_the_registry_makes_it_with_groups_of_its_own(factory: Any) -> None:
    net = Net()
    make = registered(factory).create_optimizer_v2
    optimizer = make(net, "bighorn", lr=0.01, weight_decay=0.1, names=net, exclude_from_layer_adaptation=["norm"])
    assert type(optimizer) is Lamb
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert decays == {name: 0.1 * (param.dim() > 1) for name, param in net.named_parameters()}
    inputs, labels = batches()[0]
    net(inputs, labels)["loss"].backward()
    optimizer.step()
    ratios = dict(zip(optimizer.telemetry().names, optimizer.telemetry().trust_ratio.tolist(), strict=True))
    assert ratios["norm.weight"] == 1.0 != ratios["body.weight"]


def test_groups_of_layer_decay_are_taken_with_the_key_that_timms_schedulers_read() -> None:
    net = Net()
    groups = [
        {"params": list(net.body.parameters()), "lr_scale": 0.5, "weight_decay": 0.1},
        {"params": list(net.head.parameters()), "lr_scale": 1.0, "weight_decay": 0.1},
    ]
    optimizer = Lamb(groups, lr=0.01, names=net, exclude_from_layer_adaptation=["bias"])
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * group["lr_scale"]  # as timm's Scheduler.update_groups does
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    again = Lamb(groups, lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    assert [group["lr_scale"] for group in again.param_groups] == [0.5, 1.0]
