"""npu_bridge's LAMBOptimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bighorn.compat.npu_bridge import LAMBOptimizer


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


def test_params_are_needed() -> None:
    with pytest.raises(TypeError, match="params"):
        LAMBOptimizer(0.1)  # type: ignore[call-arg]
