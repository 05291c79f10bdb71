"""LAMB re-derived from the paper (arXiv:1904.00962v5, Algorithm 2) in plain Python floats.

The witness that the reference backend is judged by, so it shares nothing with it: no bighorn, no torch, flat lists of
floats and `math` only. Slow on purpose; read it beside the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Floats = list[float]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Options:
    """What may differ from tensor to tensor. The defaults are the paper's LAMB."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    adam: bool = False
    adapt: bool = True
    always_adapt: bool = True
    bias_correction: bool | Literal["lr"] = True
    grad_averaging: bool = True
    decay_mode: Literal["ratio", "decoupled", "l2"] = "ratio"
    weight_norm_bounds: Bounds | None = None
    trust_ratio_bounds: Bounds | None = None
    stacked: bool = False
    second_moment: Literal["adam", "amsgrad", "adagrad"] = "adam"
    cautious: bool = False
    maximize: bool = False
    grad_centralization: bool | Literal["conv"] = False


@dataclass
class Tensor:
    """A parameter as a flat list in row-major order, with its state."""

    x: Floats
    shape: tuple[int, ...]
    t: int = 0
    m: Floats = field(default_factory=list)
    v: Floats = field(default_factory=list)
    v_max: Floats = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.x) == math.prod(self.shape)
        self.m = self.m or [0.0] * len(self.x)
        self.v = self.v or [0.0] * len(self.x)
        self.v_max = self.v_max or [0.0] * len(self.x)


@dataclass(frozen=True)
class Ratio:
    """The decision for one tensor (or one slice of a stacked one)."""

    weight_norm: float
    update_norm: float
    trust_ratio: float


def norm(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(a * a for a in values))


def clamp(value: float, bounds: Bounds | None) -> float:
    if bounds is None or math.isnan(value):
        return value
    return min(max(value, bounds[0]), bounds[1])


def trust_ratio(
    weight_norm: float,
    update_norm: float,
    weight_norm_bounds: Bounds | None = None,
    trust_ratio_bounds: Bounds | None = None,
) -> float:
    if weight_norm == 0 or update_norm == 0:
        return 1.0
    return clamp(clamp(weight_norm, weight_norm_bounds) / update_norm, trust_ratio_bounds)


def step(
    tensors: Sequence[Tensor],
    grads: Sequence[Floats | None],
    options: Sequence[Options],
    *,
    inv_scale: float = 1.0,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
) -> list[list[Ratio]]:
    """One step for all tensors, in place; returns each tensor's ratios (none where there was no gradient)."""
    present = [None if g is None else [a * inv_scale for a in g] for g in grads]
    total = norm([a for g in present if g is not None for a in g])
    if skip_nonfinite and not math.isfinite(total):
        return [[] for _ in tensors]
    clip = 1.0
    if max_grad_norm is not None and total > max_grad_norm:
        clip = max_grad_norm / total
    return [
        [] if g is None else _step_tensor(tensor, [a * clip for a in g], o)
        for tensor, g, o in zip(tensors, present, options, strict=True)
    ]


def _step_tensor(tensor: Tensor, g: Floats, o: Options) -> list[Ratio]:
    x, b1, b2 = tensor.x, *o.betas
    tensor.t += 1
    t = tensor.t

    if o.maximize:
        g = [-a for a in g]
    # A stacked tensor is its slices, so what counts are the dimensions of a slice.
    dims = len(tensor.shape) - o.stacked
    if o.grad_centralization and dims >= (3 if o.grad_centralization == "conv" else 2):
        g = _centralised(g, rows=math.prod(tensor.shape[: 1 + o.stacked]))
    if o.decay_mode == "l2":
        g = [a + o.weight_decay * w for a, w in zip(g, x, strict=True)]
    if o.decay_mode == "decoupled":
        x[:] = [w * (1 - o.lr * o.weight_decay) for w in x]

    b3 = 1 - b1 if o.grad_averaging else 1.0
    tensor.m = [b1 * m + b3 * a for m, a in zip(tensor.m, g, strict=True)]
    if o.second_moment == "adagrad":
        tensor.v = [v + a * a for v, a in zip(tensor.v, g, strict=True)]
    else:
        tensor.v = [b2 * v + (1 - b2) * a * a for v, a in zip(tensor.v, g, strict=True)]
    v = tensor.v
    if o.second_moment == "amsgrad":
        v = tensor.v_max = [max(old, new) for old, new in zip(tensor.v_max, v, strict=True)]

    correction1 = 1 - b1**t
    correction2 = 1.0 if o.second_moment == "adagrad" else 1 - b2**t
    lr = o.lr
    if o.bias_correction == "lr":
        lr *= math.sqrt(correction2) / correction1
    if o.bias_correction is not True:
        correction1 = correction2 = 1.0
    r = [(a / correction1) / (math.sqrt(b / correction2) + o.eps) for a, b in zip(tensor.m, v, strict=True)]

    ratios = []
    for part in _slices(tensor, o.stacked):
        u = r[part]
        if o.cautious:
            u = _cautious(u, g[part])
        if o.decay_mode == "ratio":
            u = [a + o.weight_decay * w for a, w in zip(u, x[part], strict=True)]
        weight_norm, update_norm = norm(x[part]), norm(u)
        q = 1.0
        if not o.adam and o.adapt and (o.always_adapt or o.weight_decay != 0):
            q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)
        x[part] = [w - lr * q * a for w, a in zip(x[part], u, strict=True)]
        ratios.append(Ratio(weight_norm, update_norm, q))
    return ratios


def _slices(tensor: Tensor, stacked: bool) -> Iterator[slice]:
    if not stacked:
        yield slice(0, len(tensor.x))
        return
    size = math.prod(tensor.shape[1:])
    for i in range(tensor.shape[0]):
        yield slice(i * size, (i + 1) * size)


def _centralised(g: Floats, rows: int) -> Floats:
    size = len(g) // rows if rows else 0
    out: Floats = []
    for i in range(rows):
        row = g[i * size : (i + 1) * size]
        mean = math.fsum(row) / size if size else 0.0
        out += [a - mean for a in row]
    return out


def _cautious(r: Floats, g: Floats) -> Floats:
    mask = [float(a * b > 0) for a, b in zip(r, g, strict=True)]
    share = math.fsum(mask) / len(mask) if mask else 1.0
    return [a * keep / max(share, 1e-3) for a, keep in zip(r, mask, strict=True)]
