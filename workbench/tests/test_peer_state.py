"""``bighorn memory`` counts the state of other packages' optimizers as they allocate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bighorn_workbench.peer_state import OF_OTHERS
from tests.support.tables import for_every

# bitsandbytes and torchao quantize from 4,096 elements on, torchao only whole blocks; GaLore projects the longer side.
SHAPES = [(7,), (1, 300), (300, 1), (2, 3, 4), (64, 65), (20, 300), (70, 64, 1, 1), (5000,), (4096,), (64, 128),
          (300, 200)]  # fmt: skip


def galore(imported: Callable[[str], Any], params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    groups = [
        {"params": [param for param in params if param.ndim != 2]},
        {"params": [param for param in params if param.ndim == 2], **matrices},
    ]
    made: torch.optim.Optimizer = imported("galore_torch.adamw").AdamW(groups, no_deprecation_warning=True)
    return made


BUILD: dict[str, Callable[[Callable[[str], Any], list[nn.Parameter]], torch.optim.Optimizer]] = {
    "lion": lambda imported, params: imported("lion_pytorch").Lion(params),
    "bitsandbytes-int8": lambda imported, params: imported("bitsandbytes.optim").AdamW8bit(params),
    "torchao-int4": lambda imported, params: imported("torchao.optim").AdamW4bit(params),
    "galore": galore,
}


def held(value: object) -> int:
    """Return the bytes of a state: a tensor, the parts of a quantized one, or a projection."""
    if hasattr(value, "tensor_attrs"):
        return sum(getattr(value, name).nbytes for name in value.tensor_attrs)
    tensor = getattr(value, "ortho_matrix", value)
    return tensor.nbytes if isinstance(tensor, Tensor) else 0


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@for_every("name", BUILD)
def test_the_state_is_counted_as_it_is_allocated(name: str, dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = BUILD[name](lambda module: pytest.importorskip(module, exc_type=ImportError), params)
    optimizer.step()
    # All tensors share bitsandbytes' two tables.
    states = [{key: value for key, value in optimizer.state[param].items() if "qmap" not in key} for param in params]
    assert [sum(map(held, state.values())) for state in states] == list(map(OF_OTHERS[name], params))


def test_only_what_needs_a_gpu_is_counted_by_reading() -> None:
    assert OF_OTHERS.keys() - BUILD.keys() == {"flashoptim"}
