"""Other packages' LAMBs, implemented again from their code, with the same order of operations and the same defaults.

The formulas use Python floats, one element at a time, and nothing from bighorn or `scalar_formulas.py`. A function
steps all tensors once, and its docstring names the source: repository, file and commit. The last function returns
timm's own optimizers, if timm is installed.
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


@dataclass
class Leaf:
    """A parameter with its state. `g` is set for each step."""

    name: str
    x: Floats
    decays: bool = True  # whether its group has weight decay
    g: Floats = field(default_factory=list)
    m: Floats = field(default_factory=list)
    v: Floats = field(default_factory=list)
    t: int = 0

    def __post_init__(self) -> None:
        self.m = [0.0] * len(self.x)
        self.v = [0.0] * len(self.x)


def norm(values: Floats) -> float:
    return math.sqrt(math.fsum(a * a for a in values))


def paper_v5(leaves: Sequence[Leaf], lr: float, debiased: bool = True) -> None:
    """arXiv:1904.00962v5, Algorithm 2, with phi the identity; version 3 has the same without the two lines for t."""
    beta1, beta2, eps, lam = 0.9, 0.999, 1e-6, 0.1
    for leaf in leaves:
        leaf.t += 1
        r = []
        for i, g in enumerate(leaf.g):
            m = leaf.m[i] = beta1 * leaf.m[i] + (1 - beta1) * g
            v = leaf.v[i] = beta2 * leaf.v[i] + (1 - beta2) * g**2
            if debiased:
                m, v = m / (1 - beta1**leaf.t), v / (1 - beta2**leaf.t)
            r.append(m / (math.sqrt(v) + eps))
        u = [a + lam * x for a, x in zip(r, leaf.x, strict=True)]
        ratio = norm(leaf.x) / norm(u) if norm(leaf.x) and norm(u) else 1.0
        leaf.x = [x - lr * ratio * a for x, a in zip(leaf.x, u, strict=True)]


def paper_v3(leaves: Sequence[Leaf], lr: float) -> None:
    paper_v5(leaves, lr, debiased=False)


def apex(leaves: Sequence[Leaf], lr: float, use_nvlamb: bool = False) -> None:
    """NVIDIA/apex 06a83ce, csrc/multi_tensor_lamb.cu, MOMENT_MODE_1; defaults of apex/optimizers/fused_lamb.py.

    Apex computes in float32, and this function in float64.
    """
    beta1, beta2, eps, weight_decay, max_grad_norm = 0.9, 0.999, 1e-6, 0.01, 1.0
    total = norm([g for leaf in leaves for g in leaf.g])
    clipped = total / max_grad_norm if total > max_grad_norm else 1.0
    for leaf in leaves:
        leaf.t += 1
        decay = weight_decay if leaf.decays else 0.0
        param_norm, update = norm(leaf.x), []
        for i, g in enumerate(leaf.g):
            scaled = g / clipped
            leaf.m[i] = leaf.m[i] * beta1 + (1 - beta1) * scaled
            leaf.v[i] = leaf.v[i] * beta2 + (1 - beta2) * scaled * scaled
            unbiased_m, unbiased_v = leaf.m[i] / (1 - beta1**leaf.t), leaf.v[i] / (1 - beta2**leaf.t)
            update.append(unbiased_m / (math.sqrt(unbiased_v) + eps) + decay * leaf.x[i])
        ratio = lr
        if use_nvlamb or decay != 0.0:
            update_norm = norm(update)
            ratio = lr * (param_norm / update_norm) if update_norm != 0.0 and param_norm != 0.0 else lr
        leaf.x = [x - ratio * u for x, u in zip(leaf.x, update, strict=True)]


def nvlamb(leaves: Sequence[Leaf], lr: float) -> None:
    apex(leaves, lr, use_nvlamb=True)


def timm(leaves: Sequence[Leaf], lr: float, trust_clip: bool = False, decoupled_decay: bool = False) -> None:
    """huggingface/pytorch-image-models 1.0.31, timm/optim/lamb.py, `_single_tensor_lamb`."""
    beta1, beta2, eps, weight_decay, max_grad_norm = 0.9, 0.999, 1e-6, 0.01, 1.0
    clip = max(norm([norm(leaf.g) for leaf in leaves]) / max_grad_norm, 1.0)
    for leaf in leaves:
        leaf.t += 1
        decay = weight_decay if leaf.decays else 0.0
        update = []
        for i, g in enumerate(leaf.g):
            g = g / clip
            leaf.m[i] += (1 - beta1) * (g - leaf.m[i])
            leaf.v[i] = leaf.v[i] * beta2 + (1 - beta2) * g * g
            denom = math.sqrt(leaf.v[i]) / (1 - beta2**leaf.t) ** 0.5 + eps
            update.append(leaf.m[i] / (1 - beta1**leaf.t) / denom)
        if decay != 0 and decoupled_decay:
            leaf.x = [x + x * (-lr * decay) for x in leaf.x]
        elif decay != 0:
            update = [u + decay * x for u, x in zip(update, leaf.x, strict=True)]
        if decay != 0:
            w_norm, g_norm = norm(leaf.x), norm(update)
            ratio = w_norm / g_norm if w_norm > 0 and g_norm > 0 else 1.0
            update = [u * (min(ratio, 1.0) if trust_clip else ratio) for u in update]
        leaf.x = [x - lr * u for x, u in zip(leaf.x, update, strict=True)]


def lambc(leaves: Sequence[Leaf], lr: float) -> None:
    timm(leaves, lr, trust_clip=True)


def lambw(leaves: Sequence[Leaf], lr: float) -> None:
    timm(leaves, lr, decoupled_decay=True)


def cybertronai(leaves: Sequence[Leaf], lr: float, adam: bool = False) -> None:
    """cybertronai/pytorch-lamb, pytorch_lamb/lamb.py, as in jettify/pytorch-optimizer 06f9dbb.

    At 207f672 it has no rule for norms of zero: a zero parameter never moves, and becomes NaN on a zero gradient.
    """
    beta1, beta2, eps, weight_decay = 0.9, 0.999, 1e-6, 0.1
    for leaf in leaves:
        for i, g in enumerate(leaf.g):
            leaf.m[i] = leaf.m[i] * beta1 + (1 - beta1) * g
            leaf.v[i] = leaf.v[i] * beta2 + (1 - beta2) * g * g
        weight_norm = min(max(norm(leaf.x), 0), 10)
        adam_step = [m / (math.sqrt(v) + eps) for m, v in zip(leaf.m, leaf.v, strict=True)]
        adam_step = [a + weight_decay * x for a, x in zip(adam_step, leaf.x, strict=True)]
        adam_norm = norm(adam_step)
        trust_ratio = 1.0 if weight_norm == 0 or adam_norm == 0 else weight_norm / adam_norm
        if adam:
            trust_ratio = 1.0
        leaf.x = [x + a * (-lr * trust_ratio) for x, a in zip(leaf.x, adam_step, strict=True)]


def torch_npu(leaves: Sequence[Leaf], lr: float, adam: bool = False, use_global_grad_norm: bool = False) -> None:
    """Ascend/pytorch 1178aa0, torch_npu/optim/npu_fused_lamb.py."""
    beta1, beta2, eps, weight_decay = 0.9, 0.999, 1e-6, 0.1
    global_grad_norm = norm([g for leaf in leaves for g in leaf.g]) if use_global_grad_norm else 1.0
    for leaf in leaves:
        grad = [g / global_grad_norm for g in leaf.g] if global_grad_norm > 1 else leaf.g
        leaf.m = [m * beta1 + (1 - beta1) * g for m, g in zip(leaf.m, grad, strict=True)]
        leaf.v = [v * beta2 + (1 - beta2) * g * g for v, g in zip(leaf.v, grad, strict=True)]
        adam_step = [m / (math.sqrt(v) + eps) for m, v in zip(leaf.m, leaf.v, strict=True)]
        adam_step = [a + weight_decay * x for a, x in zip(adam_step, leaf.x, strict=True)]
        trust_ratio = 1.0
        if not adam:
            weight_norm = min(max(math.sqrt(math.fsum(x**2 for x in leaf.x)), 0), 10)
            adam_norm = math.sqrt(math.fsum(a**2 for a in adam_step))
            trust_ratio = 1.0 if weight_norm == 0 or adam_norm == 0 else weight_norm / adam_norm
        leaf.x = [x - lr * (a * trust_ratio) for x, a in zip(leaf.x, adam_step, strict=True)]


def torch_npu_adam(leaves: Sequence[Leaf], lr: float) -> None:
    torch_npu(leaves, lr, adam=True)


def torch_npu_clipped(leaves: Sequence[Leaf], lr: float) -> None:
    torch_npu(leaves, lr, use_global_grad_norm=True)


def deepspeed(leaves: Sequence[Leaf], lr: float, correct_moments: bool = False) -> None:
    """microsoft/DeepSpeed 0c1913d, csrc/lamb/fused_lamb_cuda_kernel.cu; defaults of deepspeed/ops/lamb/fused_lamb.py.

    deepspeedai/DeepSpeed e5d277f corrects the moments instead of the step size.
    """
    b1, b2, eps, decay, max_coeff, min_coeff = 0.9, 0.999, 1e-8, 0.05, 10.0, 0.01
    for leaf in leaves:
        leaf.t += 1
        bias_correction1, bias_correction2 = 1 - b1**leaf.t, 1 - b2**leaf.t
        step_size = lr * math.sqrt(bias_correction2) / bias_correction1
        if correct_moments:
            step_size = lr
        else:
            bias_correction1 = bias_correction2 = 1.0
        update = []
        for j, g in enumerate(leaf.g):
            leaf.m[j] = b1 * leaf.m[j] + (1 - b1) * g
            leaf.v[j] = b2 * leaf.v[j] + (1 - b2) * g * g
            denom = math.sqrt(leaf.v[j] / bias_correction2) + eps
            update.append(leaf.m[j] / bias_correction1 / denom + decay * leaf.x[j])
        reg_w, reg_u, lamb_coeff = norm(leaf.x), norm(update), 1.0
        if reg_w != 0 and reg_u != 0:
            lamb_coeff = max(min(reg_w / reg_u, max_coeff), min_coeff)
        leaf.x = [x - step_size * lamb_coeff * u for x, u in zip(leaf.x, update, strict=True)]


def deepspeed_corrected(leaves: Sequence[Leaf], lr: float) -> None:
    deepspeed(leaves, lr, correct_moments=True)


def colossalai(leaves: Sequence[Leaf], lr: float) -> None:
    """hpcaitech/ColossalAI 02aba63, colossalai/nn/optimizer/distributed_lamb.py, on one rank."""
    beta1, beta2, eps, weight_decay = 0.9, 0.999, 1e-6, 0.1
    for leaf in leaves:
        leaf.t += 1
        leaf.m = [m * beta1 + (1 - beta1) * g for m, g in zip(leaf.m, leaf.g, strict=True)]
        leaf.v = [v * beta2 + (1 - beta2) * g * g for v, g in zip(leaf.v, leaf.g, strict=True)]
        scaled_lr = lr * (((1 - beta2**leaf.t) ** 0.5) / (1 - beta1**leaf.t))
        update = [m / (math.sqrt(v) + eps) for m, v in zip(leaf.m, leaf.v, strict=True)]
        update = [u + weight_decay * x for u, x in zip(update, leaf.x, strict=True)]
        w_norm, g_norm = norm(leaf.x), norm(update)
        scaled_lr *= w_norm / g_norm if w_norm > 0 and g_norm > 0 else 1.0
        leaf.x = [x + -scaled_lr * u for x, u in zip(leaf.x, update, strict=True)]


def tfa(
    leaves: Sequence[Leaf],
    lr: float,
    exclude_from_weight_decay: Sequence[str] = ("bias", "norm"),
    exclude_from_layer_adaptation: Sequence[str] | None = None,
) -> None:
    """tensorflow/addons 00beec0, tensorflow_addons/optimizers/lamb.py, `_resource_apply_dense`."""
    beta_1, beta_2, epsilon, weight_decay_rate = 0.9, 0.999, 1e-6, 0.1
    exclude_from_layer_adaptation = exclude_from_layer_adaptation or exclude_from_weight_decay
    for leaf in leaves:
        leaf.t += 1
        update = []
        for i, grad in enumerate(leaf.g):
            leaf.m[i] = leaf.m[i] * beta_1 + grad * (1 - beta_1)
            leaf.v[i] = leaf.v[i] * beta_2 + (grad * grad) * (1 - beta_2)
            m_hat, v_hat = leaf.m[i] / (1.0 - beta_1**leaf.t), leaf.v[i] / (1.0 - beta_2**leaf.t)
            update.append(m_hat / (math.sqrt(v_hat) + epsilon))
        if not any(re.search(pattern, leaf.name) for pattern in exclude_from_weight_decay):
            update = [u + weight_decay_rate * x for u, x in zip(update, leaf.x, strict=True)]
        ratio = 1.0
        if not any(re.search(pattern, leaf.name) for pattern in exclude_from_layer_adaptation):
            w_norm, g_norm = norm(leaf.x), norm(update)
            ratio = w_norm / g_norm if w_norm > 0 and g_norm > 0 else 1.0
        leaf.x = [x - ratio * lr * u for x, u in zip(leaf.x, update, strict=True)]


def tfa_apart(leaves: Sequence[Leaf], lr: float) -> None:
    tfa(leaves, lr, exclude_from_layer_adaptation=["big"])


def mindspore(leaves: Sequence[Leaf], lr: float, grouped: bool = False) -> None:
    """mindspore-ai/mindspore: nn/optim/lamb.py 0385abb, and the kernels of its one operation on an Ascend device.

    Those are .../ascend/optimizer/ir_fission/lamb_fission.cc 0f4901b with LambApplyOptimizerAssign and
    LambApplyWeightAssign. The GPU kernel (gpu/kernel/nn/lamb_gpu_kernel.h 08097c0) is the same but for tensors of one
    element, where it leaves ||u|| unset; earlier ones clip the ratio to 10 and take eps inside the root for ||u||.
    """
    beta1, beta2, eps, weight_decay = 0.9, 0.999, 1e-6, 0.1
    for leaf in leaves:
        leaf.t += 1
        decay_flag = grouped or ("beta" not in leaf.name and "gamma" not in leaf.name)
        decay = weight_decay if decay_flag else 0.0
        update = []
        for i, gradient in enumerate(leaf.g):
            leaf.m[i] = beta1 * leaf.m[i] + (1.0 - beta1) * gradient
            leaf.v[i] = beta2 * leaf.v[i] + (1.0 - beta2) * gradient**2
            next_mm, next_vv = leaf.m[i] / (1.0 - beta1**leaf.t), leaf.v[i] / (1.0 - beta2**leaf.t)
            update.append(next_mm / (math.sqrt(next_vv) + eps) + decay * leaf.x[i])
        w_norm, g_norm = norm(leaf.x), norm(update)
        ratio = (w_norm / g_norm if g_norm > 0 else 1.0) if w_norm > 0 else 1.0
        leaf.x = [x - ratio * (u * lr) for x, u in zip(leaf.x, update, strict=True)]


def mindspore_grouped(leaves: Sequence[Leaf], lr: float) -> None:
    mindspore(leaves, lr, grouped=True)


TIMM_ABSENT = None if find_spec("timm") else "timm is not installed: pip install --no-deps timm"
"""The reason why timm's Lamb is missing; its dependencies do not have a CPU build everywhere."""


def installed_timm(module: str) -> Any:
    """Return a module of timm's optimizers, from timm's folder, since `import timm` needs torchvision."""
    spec = find_spec("timm")
    assert spec is not None
    assert spec.submodule_search_locations
    package = sys.modules.setdefault("timm_optim", ModuleType("timm_optim"))
    package.__path__ = [f"{folder}/optim" for folder in spec.submodule_search_locations]
    return importlib.import_module(f"timm_optim.{module}")
