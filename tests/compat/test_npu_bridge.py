"""npu_bridge's LAMBOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bighorn.compat.npu_bridge import LAMBOptimizer
from tests.support.compat_training import LRS, assert_close, by_scalar, trained
from tests.support.error_checks import weights
from tests.support.tables import for_every


class Block(nn.Module):
    """A layer with the variable names of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(4, 4), nn.LayerNorm(4)


def test_the_documents_example() -> None:
    """The documented example, with other import lines and with `params`, which TensorFlow takes from its graph.

    NPUOptimizer has separate tests.
    """
    model, learning_rate = Block(), 0.1

    optimizer = LAMBOptimizer(
        learning_rate=learning_rate,
        weight_decay_rate=0.01,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        exclude_from_weight_decay=["LayerNorm", "layer_norm", "bias"],
        params=model.named_parameters(),
    )

    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # with gradients of zero, only weight decay changes parameters
    moved = {name for name, param in model.named_parameters() if not param.equal(before[name])}
    assert moved == {"dense.weight"}


@pytest.mark.parametrize("bias_correction", [True, False])
def test_it_is_the_paper(bias_correction: bool) -> None:
    exclude = [r"\.b", "gam{2}a$"]
    ours = trained(
        lambda params: LAMBOptimizer(
            LRS, 0.1, 0.8, 0.99, 1e-5, exclude, params=params.items(), bias_correction=bias_correction
        )
    )
    options = {"betas": (0.8, 0.99), "eps": 1e-5, "bias_correction": bias_correction}
    excluded = {"conv.bias", "norm.beta", "norm.gamma"}
    assert_close(ours, by_scalar(lambda name: {**options, "weight_decay": 0.0 if name in excluded else 0.1}))


@for_every(
    ("options", "error", "message"),
    [
        ({"learning_rate": -0.1}, ValueError, r"^learning_rate=-0\.1"),
        ({"learning_rate": "fast"}, TypeError, "^learning_rate must be"),
        ({"weight_decay_rate": -1}, ValueError, "^weight_decay_rate=-1"),
        ({"beta_1": 1.0}, ValueError, r"^beta_1=1\.0"),
        ({"beta_2": -0.5}, ValueError, r"^beta_2=-0\.5"),
        ({"epsilon": -1e-6}, ValueError, "^epsilon=-1e-06"),
        ({"exclude_from_weight_decay": "bias"}, TypeError, "^exclude_from_weight_decay must be"),
        ({"exclude_from_weight_decay": ["("]}, ValueError, "^exclude_from_weight_decay.*regular expression"),
        (
            {"exclude_from_weight_decay": ["bias"]},
            ValueError,
            r"needs names: pass model\.named_parameters\(\) as params, ",
        ),
        ({"bias_correction": 1}, ValueError, "^bias_correction=1 .*'lr'$"),
        ({"name": "LAMB"}, TypeError, "name"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LAMBOptimizer(**{"learning_rate": 0.1, "params": weights(), **options})


def test_params_are_needed() -> None:
    with pytest.raises(TypeError, match="params"):
        LAMBOptimizer(0.1)  # type: ignore[call-arg]
