"""LARS of other packages, implemented again from their code, with the same order of operations and defaults.

The formulas use Python floats, one element at a time, and nothing from bighorn or `scalar_formulas.py`. A function
steps all tensors once with weight_decay=0.1, and its docstring names the source: repository, file and commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.peer_formulas import Floats, Leaf, decayed, norm

DECAY = 0.1


def paper(leaves: Sequence[Leaf], lr: float) -> None:
    """arXiv:1708.03888v3, Algorithm 1; the ratio is 1 where a norm is 0, which the paper leaves open."""
    eta = 0.001
    for leaf in leaves:
        w_norm, g_norm = norm(leaf.x), norm(leaf.g)
        local_lr = eta * w_norm / (g_norm + DECAY * w_norm) if w_norm and g_norm else 1.0
        sgd(leaf, [lr * local_lr * a for a in decayed(leaf.g, DECAY, leaf.x)], 1.0, 0.9)


def sgd(leaf: Leaf, grad: Floats, lr: float, momentum: float) -> None:
    """torch.optim.SGD without decay, which many packages use behind their ratio."""
    leaf.m = [momentum * m + g for m, g in zip(leaf.m, grad, strict=True)]
    leaf.move(lr, leaf.m)


def timm(leaves: Sequence[Leaf], lr: float, momentum: float = 0.0, trust_clip: bool = False) -> None:
    """huggingface/pytorch-image-models 1.0.31, timm/optim/lars.py, `_single_tensor_lars`."""
    trust_coeff, eps = 0.001, 1e-8
    for leaf in leaves:
        grad = leaf.g
        if leaf.decays:
            w_norm, g_norm = norm(leaf.x), norm(leaf.g)
            q = trust_coeff * w_norm / (g_norm + w_norm * DECAY + eps) if w_norm > 0 and g_norm > 0 else 1.0
            if trust_clip:
                q = min(q / lr, 1.0)
            grad = [a * q for a in decayed(grad, DECAY, leaf.x)]
        sgd(leaf, grad, lr, momentum)


def apex(leaves: Sequence[Leaf], lr: float, momentum: float = 0.0) -> None:
    """NVIDIA/apex 0bfb830, apex/parallel/LARC.py, around torch.optim.SGD."""
    trust_coefficient, eps = 0.02, 1e-8
    for leaf in leaves:
        param_norm, grad_norm, grad = norm(leaf.x), norm(leaf.g), leaf.g
        if param_norm != 0 and grad_norm != 0:
            adaptive_lr = trust_coefficient * param_norm / (grad_norm + param_norm * DECAY + eps)
            adaptive_lr = min(adaptive_lr / lr, 1)
            grad = [a * adaptive_lr for a in decayed(grad, DECAY, leaf.x)]
        sgd(leaf, grad, lr, momentum)


def flash(leaves: Sequence[Leaf], lr: float, momentum: float = 0.0) -> None:
    """Lightning-Universe/lightning-flash 0944535, flash/core/optimizers/lars.py; bolts 2c8b022 has the same step."""
    trust_coefficient, eps = 0.001, 1e-8
    for leaf in leaves:
        d_p, p_norm, g_norm = leaf.g, norm(leaf.x), norm(leaf.g)
        if leaf.decays and p_norm != 0 and g_norm != 0:
            lars_lr = p_norm / (g_norm + p_norm * DECAY + eps)
            lars_lr *= trust_coefficient
            d_p = [a * lars_lr for a in decayed(d_p, DECAY, leaf.x)]
        sgd(leaf, d_p, lr, momentum)


def simclr(leaves: Sequence[Leaf], lr: float) -> None:
    """google-research/simclr 383d414, tf2/lars_optimizer.py with classic_momentum; also tensorflow/models 0ca414d."""
    momentum, eeta = 0.9, 0.001
    for leaf in leaves:
        grad, trust_ratio = leaf.g, 1.0
        if not any(word in leaf.name for word in ("bias", "norm")):
            grad = decayed(grad, DECAY, leaf.x)
            w_norm, g_norm = norm(leaf.x), norm(grad)
            trust_ratio = (eeta * w_norm / g_norm if g_norm > 0 else 1.0) if w_norm > 0 else 1.0
        sgd(leaf, [lr * trust_ratio * g for g in grad], 1.0, momentum)


def barlowtwins(leaves: Sequence[Leaf], lr: float) -> None:
    """facebookresearch/barlowtwins 046eec3, main.py; vicreg b42aa23; deepmind-research 4822a45, byol."""
    momentum, eta = 0.9, 0.001
    for leaf in leaves:
        dp = decayed(leaf.g, DECAY, leaf.x)
        param_norm, update_norm = norm(leaf.x), norm(dp)
        q = eta * param_norm / update_norm if param_norm > 0 and update_norm > 0 else 1.0
        sgd(leaf, [a * q for a in dp], lr, momentum)


def mindspore(leaves: Sequence[Leaf], lr: float) -> None:
    """mindspore-ai/mindspore 01fc6ef, nn/optim/lars.py, around nn.Momentum(momentum=0.9); CANN's lars_v2_update.py.

    The wrapper sets Momentum's decay to 0, also for the parameters that its filter leaves out.
    """
    epsilon, coefficient = 1e-5, 0.001
    for leaf in leaves:
        grad = leaf.g
        if "LayerNorm" not in leaf.name and "bias" not in leaf.name:
            weight_norm, grad_norm = norm(leaf.x), norm(leaf.g)
            coeff = coefficient * weight_norm / (weight_norm * DECAY + grad_norm + epsilon)
            grad = [a * coeff for a in decayed(grad, DECAY, leaf.x)]
        sgd(leaf, grad, lr, 0.9)
