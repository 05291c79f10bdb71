"""LAMB of other packages, implemented again from their code, with the same defaults.

The formulas use Python floats, one element at a time, and nothing from bighorn or `scalar_formulas.py`. They share
Adam's averages and the norms. A function steps all tensors once, and its docstring names the source: repository, file
and commit. The last function returns timm's own optimizers, if timm is installed.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Floats = list[float]
Step = Callable[[Sequence["Leaf"], float], None]
Averages = list[tuple[Floats, Floats]]
"""CAME's averages of rows and of columns for each matrix of a tensor."""

BETA1, BETA2 = 0.9, 0.999


@dataclass
class Leaf:
    """A parameter with its state. `g` is set for each step."""

    name: str
    x: Floats
    shape: tuple[int, ...] = ()
    decays: bool = True  # whether its group has weight decay
    g: Floats = field(default_factory=list)
    m: Floats = field(default_factory=list)
    v: Floats = field(default_factory=list)
    sq: Averages = field(default_factory=list)
    res: Averages = field(default_factory=list)
    t: int = 0

    def __post_init__(self) -> None:
        self.m, self.v = [0.0] * len(self.x), [0.0] * len(self.x)

    def adam(self, g: Floats, eps: float, corrected: bool = True, beta2: float = BETA2) -> Floats:
        """Advance the averages of the gradient and of its square, and return Adam's update."""
        self.t += 1
        self.m = [BETA1 * m + (1 - BETA1) * a for m, a in zip(self.m, g, strict=True)]
        self.v = [beta2 * v + (1 - beta2) * a * a for v, a in zip(self.v, g, strict=True)]
        c1, c2 = (1 - BETA1**self.t, 1 - beta2**self.t) if corrected else (1.0, 1.0)
        return [m / c1 / (math.sqrt(v / c2) + eps) for m, v in zip(self.m, self.v, strict=True)]

    def corrections(self) -> tuple[float, float]:
        return 1 - BETA1**self.t, 1 - BETA2**self.t

    def move(self, lr: float, update: Floats) -> None:
        self.x = [x - lr * u for x, u in zip(self.x, update, strict=True)]


def norm(values: Floats) -> float:
    return math.sqrt(math.fsum(a * a for a in values))


def decayed(update: Floats, decay: float, x: Floats) -> Floats:
    return [u + decay * a for u, a in zip(update, x, strict=True)]


def ratio(weight_norm: float, update_norm: float) -> float:
    return weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0


def clipped(leaves: Sequence[Leaf]) -> list[Floats]:
    """Return the gradients, divided by their global norm if that is above 1."""
    total = max(norm([g for leaf in leaves for g in leaf.g]), 1.0)
    return [[g / total for g in leaf.g] for leaf in leaves]


def paper(leaves: Sequence[Leaf], lr: float, corrected: bool = True) -> None:
    """arXiv:1904.00962v5, Algorithm 2, with phi the identity; version 3 does not correct the averages."""
    for leaf in leaves:
        u = decayed(leaf.adam(leaf.g, 1e-6, corrected), 0.1, leaf.x)
        leaf.move(lr * ratio(norm(leaf.x), norm(u)), u)


def apex(leaves: Sequence[Leaf], lr: float, use_nvlamb: bool = False) -> None:
    """NVIDIA/apex 06a83ce, csrc/multi_tensor_lamb.cu, MOMENT_MODE_1; defaults of apex/optimizers/fused_lamb.py.

    Apex computes in float32, and this function in float64.
    """
    for leaf, g in zip(leaves, clipped(leaves), strict=True):
        decay = 0.01 if leaf.decays else 0.0
        u = decayed(leaf.adam(g, 1e-6), decay, leaf.x)
        leaf.move(lr * ratio(norm(leaf.x), norm(u)) if use_nvlamb or decay != 0 else lr, u)


def adamh(leaves: Sequence[Leaf], lr: float) -> None:
    """marin-community/levanter a4f7721, src/levanter/optim/adamh.py; other parameters take Adam's steps.

    A matrix of zeros becomes NaN there; here it is one of the others, which have the same rate.
    """
    for leaf, g in zip(leaves, clipped(leaves), strict=True):
        u, p_norm = leaf.adam(g, 1e-8, beta2=0.95), norm(leaf.x)
        if len(leaf.shape) < 2 or p_norm == 0 or leaf.name.startswith(("zero", "nothing")):
            leaf.move(lr, u)
            continue
        leaf.move(lr * p_norm / norm(u), u)
        new_norm = norm(leaf.x)
        leaf.x = [x / new_norm * p_norm for x in leaf.x]


def timm(
    leaves: Sequence[Leaf],
    lr: float,
    trust_clip: bool = False,
    decoupled_decay: bool = False,
    max_lr: float | None = None,
) -> None:
    """huggingface/pytorch-image-models 1.0.31, timm/optim/lamb.py, `_single_tensor_lamb`."""
    for leaf, g in zip(leaves, clipped(leaves), strict=True):
        u, q = leaf.adam(g, 1e-6), 1.0
        if leaf.decays:
            if decoupled_decay:
                leaf.move((lr if max_lr is None else lr**2 / max_lr) * 0.01, leaf.x)
            else:
                u = decayed(u, 0.01, leaf.x)
            q = ratio(norm(leaf.x), norm(u))
        leaf.move(lr * (min(q, 1.0) if trust_clip else q), u)


def torch_npu(leaves: Sequence[Leaf], lr: float, adam: bool = False, use_global_grad_norm: bool = False) -> None:
    """Ascend/pytorch 1178aa0, torch_npu/optim/npu_fused_lamb.py.

    The step of cybertronai/pytorch-lamb, pytorch_lamb/lamb.py, as in jettify/pytorch-optimizer 06f9dbb, is the same. At
    207f672 it has no rule for norms of zero: a zero parameter never moves, and becomes NaN on a zero gradient.
    """
    grads = clipped(leaves) if use_global_grad_norm else [leaf.g for leaf in leaves]
    for leaf, g in zip(leaves, grads, strict=True):
        u = decayed(leaf.adam(g, 1e-6, corrected=False), 0.1, leaf.x)
        leaf.move(lr if adam else lr * ratio(min(max(norm(leaf.x), 0), 10), norm(u)), u)


def deepspeed(leaves: Sequence[Leaf], lr: float, correct_moments: bool = False) -> None:
    """microsoft/DeepSpeed 0c1913d, csrc/lamb/fused_lamb_cuda_kernel.cu; defaults of deepspeed/ops/lamb/fused_lamb.py.

    deepspeedai/DeepSpeed e5d277f corrects the moments instead of the step size.
    """
    max_coeff, min_coeff = 10.0, 0.01
    for leaf in leaves:
        u = decayed(leaf.adam(leaf.g, 1e-8, correct_moments), 0.05, leaf.x)
        step_size = lr if correct_moments else corrected_lr(lr, leaf)
        reg_w, reg_u, lamb_coeff = norm(leaf.x), norm(u), 1.0
        if reg_w != 0 and reg_u != 0:
            lamb_coeff = max(min(reg_w / reg_u, max_coeff), min_coeff)
        leaf.move(step_size * lamb_coeff, u)


def colossalai(leaves: Sequence[Leaf], lr: float) -> None:
    """hpcaitech/ColossalAI 02aba63, colossalai/nn/optimizer/distributed_lamb.py, on one rank."""
    for leaf in leaves:
        u = decayed(leaf.adam(leaf.g, 1e-6, corrected=False), 0.1, leaf.x)
        leaf.move(corrected_lr(lr, leaf) * ratio(norm(leaf.x), norm(u)), u)


def corrected_lr(lr: float, leaf: Leaf) -> float:
    c1, c2 = leaf.corrections()
    return lr * math.sqrt(c2) / c1


def tfa(leaves: Sequence[Leaf], lr: float, exclude_from_layer_adaptation: Sequence[str] | None = None) -> None:
    """tensorflow/addons 00beec0, tensorflow_addons/optimizers/lamb.py, `_resource_apply_dense`."""
    exclude_from_weight_decay = ("bias", "norm")
    exclude_from_layer_adaptation = exclude_from_layer_adaptation or exclude_from_weight_decay
    for leaf in leaves:
        u, q = leaf.adam(leaf.g, 1e-6), 1.0
        if not any(re.search(pattern, leaf.name) for pattern in exclude_from_weight_decay):
            u = decayed(u, 0.1, leaf.x)
        if not any(re.search(pattern, leaf.name) for pattern in exclude_from_layer_adaptation):
            q = ratio(norm(leaf.x), norm(u))
        leaf.move(lr * q, u)


def mindspore(leaves: Sequence[Leaf], lr: float, grouped: bool = False) -> None:
    """mindspore-ai/mindspore: nn/optim/lamb.py 0385abb, and the kernels of its one operation on an Ascend device.

    The kernels are .../ascend/optimizer/ir_fission/lamb_fission.cc 0f4901b, with LambApplyOptimizerAssign and
    LambApplyWeightAssign. The GPU kernel (gpu/kernel/nn/lamb_gpu_kernel.h 08097c0) is the same, except that it leaves
    ||u|| unset for one element; earlier versions clip the ratio to 10 and take eps inside the root for ||u||.
    """
    for leaf in leaves:
        decay_flag = grouped or ("beta" not in leaf.name and "gamma" not in leaf.name)
        u = decayed(leaf.adam(leaf.g, 1e-6), 0.1 if decay_flag else 0.0, leaf.x)
        leaf.move(lr * ratio(norm(leaf.x), norm(u)), u)


TIMM_ABSENT = None if find_spec("timm") else "timm is not installed: pip install --no-deps timm"
"""The reason of a skip without timm, whose dependencies do not have a CPU build everywhere."""


def installed_timm(module: str) -> Any:
    """Return a module of timm's optimizers from timm's folder, since `import timm` needs torchvision."""
    spec = find_spec("timm")
    assert spec is not None
    assert spec.submodule_search_locations
    package = sys.modules.setdefault("timm_optim", ModuleType("timm_optim"))
    package.__path__ = [f"{folder}/optim" for folder in spec.submodule_search_locations]
    return importlib.import_module(f"timm_optim.{module}")
