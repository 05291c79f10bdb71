"""Other packages' LARS, implemented again from their code, with the same order of operations and the same defaults.

The formulas use Python floats, one element at a time, and nothing from bighorn or `scalar_formulas.py`. A function
steps all tensors once with weight_decay=0.1, and its docstring names the source: repository, file and commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.peer_formulas import Floats, Leaf, norm

DECAY = 0.1


def paper(leaves: Sequence[Leaf], lr: float) -> None:
    """arXiv:1708.03888v3, Algorithm 1; a ratio of 1 where a norm is 0, of which the paper says nothing."""
    momentum, eta = 0.9, 0.001
    for leaf in leaves:
        w_norm, g_norm = norm(leaf.x), norm(leaf.g)
        local_lr = eta * w_norm / (g_norm + DECAY * w_norm) if w_norm and g_norm else 1.0
        leaf.m = [
            momentum * v + lr * local_lr * (g + DECAY * w) for v, g, w in zip(leaf.m, leaf.g, leaf.x, strict=True)
        ]
        leaf.x = [w - v for w, v in zip(leaf.x, leaf.m, strict=True)]


def sgd(leaf: Leaf, grad: Floats, lr: float, momentum: float) -> None:
    """torch.optim.SGD without decay, which many have behind their ratio."""
    leaf.m = [momentum * m + g for m, g in zip(leaf.m, grad, strict=True)]
    leaf.x = [x - lr * m for x, m in zip(leaf.x, leaf.m, strict=True)]


def timm(leaves: Sequence[Leaf], lr: float, momentum: float = 0.0, trust_clip: bool = False) -> None:
    """huggingface/pytorch-image-models 1.0.31, timm/optim/lars.py, `_single_tensor_lars`."""
    trust_coeff, eps = 0.001, 1e-8
    for leaf in leaves:
        grad = leaf.g
        if leaf.decays:
            w_norm, g_norm = norm(leaf.x), norm(leaf.g)
            ratio = trust_coeff * w_norm / (g_norm + w_norm * DECAY + eps) if w_norm > 0 and g_norm > 0 else 1.0
            if trust_clip:
                ratio = min(ratio / lr, 1.0)
            grad = [(g + DECAY * x) * ratio for g, x in zip(grad, leaf.x, strict=True)]
        sgd(leaf, grad, lr, momentum)


def apex(leaves: Sequence[Leaf], lr: float, momentum: float = 0.0) -> None:
    """NVIDIA/apex 0bfb830, apex/parallel/LARC.py, around torch.optim.SGD."""
    trust_coefficient, eps = 0.02, 1e-8
    for leaf in leaves:
        param_norm, grad_norm, grad = norm(leaf.x), norm(leaf.g), leaf.g
        if param_norm != 0 and grad_norm != 0:
            adaptive_lr = trust_coefficient * param_norm / (grad_norm + param_norm * DECAY + eps)
            adaptive_lr = min(adaptive_lr / lr, 1)
            grad = [(g + DECAY * x) * adaptive_lr for g, x in zip(grad, leaf.x, strict=True)]
        sgd(leaf, grad, lr, momentum)


def flash(leaves: Sequence[Leaf], lr: float, momentum: float = 0.0) -> None:
    """Lightning-Universe/lightning-flash 0944535, flash/core/optimizers/lars.py; bolts 2c8b022 has the same step."""
    trust_coefficient, eps = 0.001, 1e-8
    for leaf in leaves:
        d_p, p_norm, g_norm = leaf.g, norm(leaf.x), norm(leaf.g)
        if leaf.decays and p_norm != 0 and g_norm != 0:
            lars_lr = p_norm / (g_norm + p_norm * DECAY + eps)
            lars_lr *= trust_coefficient
            d_p = [(g + DECAY * x) * lars_lr for g, x in zip(d_p, leaf.x, strict=True)]
        sgd(leaf, d_p, lr, momentum)


def simclr(leaves: Sequence[Leaf], lr: float, excluded: Sequence[str] = ("bias", "norm")) -> None:
    """google-research/simclr 383d414, tf2/lars_optimizer.py with classic_momentum; also tensorflow/models 0ca414d."""
    momentum, eeta = 0.9, 0.001
    for leaf in leaves:
        grad, trust_ratio = leaf.g, 1.0
        if not any(word in leaf.name for word in excluded):
            grad = [g + DECAY * x for g, x in zip(grad, leaf.x, strict=True)]
            w_norm, g_norm = norm(leaf.x), norm(grad)
            trust_ratio = (eeta * w_norm / g_norm if g_norm > 0 else 1.0) if w_norm > 0 else 1.0
        scaled_lr = lr * trust_ratio
        leaf.m = [momentum * v + scaled_lr * g for v, g in zip(leaf.m, grad, strict=True)]
        leaf.x = [x - v for x, v in zip(leaf.x, leaf.m, strict=True)]


def barlowtwins(leaves: Sequence[Leaf], lr: float) -> None:
    """facebookresearch/barlowtwins 046eec3, main.py; vicreg b42aa23; deepmind-research 4822a45, byol."""
    momentum, eta = 0.9, 0.001
    for leaf in leaves:
        dp = [g + DECAY * p for g, p in zip(leaf.g, leaf.x, strict=True)]
        param_norm, update_norm = norm(leaf.x), norm(dp)
        q = eta * param_norm / update_norm if param_norm > 0 and update_norm > 0 else 1.0
        sgd(leaf, [a * q for a in dp], lr, momentum)


def mindspore(leaves: Sequence[Leaf], lr: float) -> None:
    """mindspore-ai/mindspore 01fc6ef, nn/optim/lars.py, around nn.Momentum(momentum=0.9); CANN's lars_v2_update.py.

    The wrapper takes the decay away from Momentum, also of the parameters that its filter leaves out.
    """
    epsilon, coefficient = 1e-5, 0.001
    for leaf in leaves:
        grad = leaf.g
        if "LayerNorm" not in leaf.name and "bias" not in leaf.name:
            weight_norm, grad_norm = norm(leaf.x), norm(leaf.g)
            coeff = coefficient * weight_norm / (weight_norm * DECAY + grad_norm + epsilon)
            grad = [(g + DECAY * x) * coeff for g, x in zip(grad, leaf.x, strict=True)]
        sgd(leaf, grad, lr, 0.9)
