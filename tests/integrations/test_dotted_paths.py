"""Optimizers made from a dotted path, as in Hydra, torchtune and torchtitan: docs/trainers.md."""

from __future__ import annotations

from typing import Any

import pytest

from bighorn import Came, Lamb
from tests.support.trainer_model import INSTALL, Net

omegaconf = pytest.importorskip("omegaconf", reason=INSTALL)

YAML = """
optimizer:
  {key}: bighorn.{kind}
  lr: 1e-3
  betas: {betas}
  weight_decay: 0.1
  state_dtype: bfloat16
  exclude_from_weight_decay: [bias, norm]
"""
BETAS = {Lamb: [0.9, 0.95], Came: [0.9, 0.95, 0.99]}


def node(kind: Any, key: str) -> Any:
    return omegaconf.OmegaConf.create(YAML.format(kind=kind.__name__, betas=BETAS[kind], key=key)).optimizer


def check(optimizer: Any, kind: Any) -> None:
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert (group["betas"], group["lr"], group["state_dtype"]) == (tuple(BETAS[kind]), 1e-3, "bfloat16")
    assert group["param_names"] == [name for name, _ in Net().named_parameters()]


@pytest.mark.parametrize("kind", [Lamb, Came])
@pytest.mark.parametrize("convert", ["none", "all"])
def test_hydra(kind: Any, convert: str) -> None:
    """By default, lists of the file have OmegaConf's type."""
    hydra = pytest.importorskip("hydra", reason=INSTALL)
    net = Net()
    make = hydra.utils.instantiate(node(kind, "_target_"), _partial_=True, _convert_=convert)
    check(make(list(net.named_parameters())), kind)


@pytest.mark.parametrize("kind", [Lamb, Came])
def test_torchtune(kind: Any) -> None:
    """The test repeats `config.instantiate(cfg.optimizer, params)`: torchtune cannot be installed with every torch."""
    import pkgutil

    net = Net()
    config = omegaconf.OmegaConf.to_object(node(kind, "_component_"))
    make = pkgutil.resolve_name(config.pop("_component_"))
    check(make(net.parameters(), names=net, **config), kind)


def test_torchtitan() -> None:
    """Groups have bare parameters, `param_names` and options; the constructor gets no options."""
    net = Net()
    pairs = list(net.named_parameters())
    groups = [
        {"params": [p for n, p in pairs if "norm" not in n], "param_names": [n for n, _ in pairs if "norm" not in n]},
        {"params": [p for n, p in pairs if "norm" in n], "param_names": [n for n, _ in pairs if "norm" in n]},
    ]
    optimizer = Lamb([{**groups[0], "lr": 0.1, "weight_decay": 0.1}, {**groups[1], "lr": 0.01, "adapt": False}])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert optimizer.param_groups[1]["param_names"] == ["norm.weight", "norm.bias"]
