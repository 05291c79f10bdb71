"""LAMB, CAME and LARS derived again from their papers in floats.

LAMB is arXiv:1904.00962v5, Algorithm 2; CAME is arXiv:2307.02047v2, Algorithm 2; LARS is arXiv:1708.03888v3,
Algorithm 1.

The reference backend is compared with these formulas, so they share nothing with it: they use flat lists of floats and
`math`, and neither bighorn nor torch. They are slow; read them beside the paper.
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
    """Options of LAMB for one tensor; the defaults are the paper's."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    adam: bool = False
    hyperball: bool = False
    adapt: bool = True
    always_adapt: bool = True
    bias_correction: bool | Literal["lr"] = True
    grad_averaging: bool = True
    decay_mode: Literal["ratio", "decoupled", "l2"] = "ratio"
    corrected_weight_decay: float = False
    weight_norm_bounds: Bounds | None = None
    trust_ratio_bounds: Bounds | None = None
    stacked: bool = False
    second_moment: Literal["adam", "amsgrad", "adagrad"] = "adam"
    cautious: bool = False
    maximize: bool = False
    grad_centralization: bool | Literal["conv"] = False


@dataclass(frozen=True)
class LarsOptions:
    """Options of LARS for one tensor."""

    lr: float = 1.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    trust_coefficient: float = 1e-3
    eps: float = 1e-8
    denominator: Literal["sum", "joint"] = "sum"
    trust_clip: bool = False
    lr_in_momentum: bool = True
    adapt: bool = True
    always_adapt: bool = True
    stacked: bool = False
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
    radii: Floats = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.x) == math.prod(self.shape)
        self.m = self.m or [0.0] * len(self.x)
        self.v = self.v or [0.0] * len(self.x)
        self.v_max = self.v_max or [0.0] * len(self.x)


@dataclass(frozen=True)
class Ratio:
    """The norms and the trust ratio of one tensor (or of one slice of a stacked one)."""

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
    tensors: Sequence[Tensor | CameTensor],
    grads: Sequence[Floats | None],
    options: Sequence[Options | LarsOptions | CameOptions],
    *,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
) -> list[list[Ratio | CameFigures]]:
    """Step all tensors in place; return each tensor's figures, none if it has no gradient."""
    total = norm([a for g in grads if g is not None for a in g])
    if skip_nonfinite and not math.isfinite(total):
        return [[] for _ in tensors]
    clip = 1.0
    if max_grad_norm is not None and total > max_grad_norm:
        clip = max_grad_norm / total
    return [
        [] if g is None else _step_tensor(tensor, _prepared(tensor, [a * clip for a in g], o), o)
        for tensor, g, o in zip(tensors, grads, options, strict=True)
    ]


def _prepared(tensor: Tensor | CameTensor, g: Floats, o: Options | LarsOptions | CameOptions) -> Floats:
    if o.maximize:
        g = [-a for a in g]
    # A stacked tensor consists of slices, so the dims of a slice decide.
    dims = len(tensor.shape) - o.stacked
    if o.grad_centralization and dims >= (3 if o.grad_centralization == "conv" else 2):
        g = _centralised(g, rows=math.prod(tensor.shape[: 1 + o.stacked]))
    return g


def _step_tensor(
    tensor: Tensor | CameTensor, g: Floats, o: Options | LarsOptions | CameOptions
) -> list[Ratio | CameFigures]:
    tensor.t += 1
    if isinstance(tensor, CameTensor):
        assert isinstance(o, CameOptions)
        return [came_step(tensor, g, o)]
    assert not isinstance(o, CameOptions)
    return _lars(tensor, g, o) if isinstance(o, LarsOptions) else _lamb(tensor, g, o)


def _lamb(tensor: Tensor, g: Floats, o: Options) -> list[Ratio | CameFigures]:
    x, b1, b2, t = tensor.x, *o.betas, tensor.t

    if o.decay_mode == "l2":
        g = [a + o.weight_decay * w for a, w in zip(g, x, strict=True)]
    if o.decay_mode == "decoupled":
        decay = o.weight_decay * o.lr / o.corrected_weight_decay if o.corrected_weight_decay else o.weight_decay
        x[:] = [w * (1 - o.lr * decay) for w in x]

    b3 = 1 - b1 if o.grad_averaging else 1.0
    tensor.m = [b1 * m + b3 * a for m, a in zip(tensor.m, g, strict=True)]
    if o.second_moment == "adagrad":
        tensor.v = [v + a * a for v, a in zip(tensor.v, g, strict=True)]
    else:
        tensor.v = [b2 * v + (1 - b2) * a * a for v, a in zip(tensor.v, g, strict=True)]
    v = tensor.v
    if o.second_moment == "amsgrad":
        v = tensor.v_max = [max(old, new) for old, new in zip(tensor.v_max, v, strict=True)]

    correction1 = one_minus_power(b1, t)
    correction2 = 1.0 if o.second_moment == "adagrad" else one_minus_power(b2, t)
    lr = o.lr
    if o.bias_correction == "lr":
        lr *= math.sqrt(correction2) / correction1
    if o.bias_correction is not True:
        correction1 = correction2 = 1.0
    r = [(a / correction1) / (math.sqrt(b / correction2) + o.eps) for a, b in zip(tensor.m, v, strict=True)]

    ratios: list[Ratio | CameFigures] = []
    for part in _slices(tensor, o.stacked):
        u = r[part]
        if o.cautious:
            u = _cautious(u, g[part])
        if o.decay_mode == "ratio":
            u = [a + o.weight_decay * w for a, w in zip(u, x[part], strict=True)]
        weight_norm, update_norm = norm(x[part]), norm(u)
        if o.hyperball and o.adapt and len(tensor.shape) - o.stacked >= 2:
            if len(tensor.radii) == len(ratios):
                tensor.radii.append(weight_norm)
            ratios.append(Ratio(weight_norm, update_norm, _on_ball(x, part, u, lr, tensor.radii[len(ratios)])))
            continue
        q = 1.0
        if not o.hyperball and not o.adam and o.adapt and (o.always_adapt or o.weight_decay != 0):
            q = trust_ratio(weight_norm, update_norm, o.weight_norm_bounds, o.trust_ratio_bounds)
        x[part] = [w - lr * q * a for w, a in zip(x[part], u, strict=True)]
        ratios.append(Ratio(weight_norm, update_norm, q))
    return ratios


def _on_ball(x: Floats, part: slice, u: Floats, lr: float, radius: float) -> float:
    """Move a layer by lr R u / ||u||, and back to the ball: arXiv:2606.16899v1. Return the factor of lr u."""
    if norm(u) == 0:
        return 0.0
    y = [w - lr * radius * a / norm(u) for w, a in zip(x[part], u, strict=True)]
    back = radius / norm(y)
    x[part] = [back * a for a in y]
    return back * radius / norm(u)


def one_minus_power(beta: float, t: int) -> float:
    """Return 1 - beta^t to full precision; the plain difference would lose four digits for 0.9999."""
    return 1.0 if beta == 0 else -math.expm1(t * math.log(beta))


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


# ---- LARS -------------------------------------------------------------------------------------------------------


def _lars(tensor: Tensor, g: Floats, o: LarsOptions) -> list[Ratio | CameFigures]:
    ratios: list[Ratio | CameFigures] = []
    for part in _slices(tensor, o.stacked):
        w, beta = tensor.x[part], o.weight_decay
        decayed = [a + beta * b for a, b in zip(g[part], w, strict=True)]
        weight_norm, grad_norm = norm(w), norm(g[part] if o.denominator == "sum" else decayed)
        denominator = grad_norm + beta * weight_norm if o.denominator == "sum" else grad_norm
        local_lr = 1.0  # lambda in the paper
        if o.adapt and (o.always_adapt or beta != 0):
            if weight_norm > 0 and grad_norm > 0:
                local_lr = o.trust_coefficient * weight_norm / (denominator + o.eps)
            if o.trust_clip:
                local_lr = min(local_lr / o.lr, 1.0)
        before, after = (o.lr, 1.0) if o.lr_in_momentum else (1.0, o.lr)
        step = [before * local_lr * a for a in decayed]
        v = tensor.m[part] = [o.momentum * m + a for m, a in zip(tensor.m[part], step, strict=True)]
        if o.nesterov:
            v = [a + o.momentum * m for a, m in zip(step, v, strict=True)]
        tensor.x[part] = [b - after * m for b, m in zip(w, v, strict=True)]
        ratios.append(Ratio(weight_norm, denominator, local_lr))
    return ratios


# ---- CAME -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CameOptions:
    """The options of CAME; the defaults are came-pytorch's."""

    lr: float = 1e-3
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999)
    eps: tuple[float, float] = (1e-30, 1e-16)
    clip_threshold: float = 1.0
    weight_decay: float = 0.0
    decay_rate: float | None = None
    bias_correction: bool = False
    scale_parameter: bool = False
    scale_eps: float = 1e-3
    cautious: bool = False
    maximize: bool = False
    stacked: bool = False
    grad_centralization: bool | Literal["conv"] = False


@dataclass
class Factors:
    """The averages of the rows and the columns of one matrix."""

    row: Floats
    col: Floats

    def advance(self, squares: Floats, beta: float) -> None:
        rows, cols = len(self.row), len(self.col)
        for i in range(rows):
            self.row[i] = beta * self.row[i] + (1 - beta) * math.fsum(squares[i * cols : (i + 1) * cols]) / cols
        for j in range(cols):
            self.col[j] = beta * self.col[j] + (1 - beta) * math.fsum(squares[j::cols]) / rows

    def rsqrt(self, correction: float = 1.0) -> Floats:
        """Return 1 / sqrt of every element of the matrix that the averages represent."""
        row, col = [a / correction for a in self.row], [a / correction for a in self.col]
        mean = math.fsum(row) / len(row)
        return [1 / math.sqrt(a / mean) / math.sqrt(b) for a in row for b in col]


@dataclass
class CameTensor:
    """A parameter as a flat list in row-major order, with its state; its matrices are consecutive."""

    x: Floats
    shape: tuple[int, ...]
    factor: Literal["matrix", "last_two"] | None = "matrix"
    t: int = 0
    m: Floats = field(default_factory=list)
    v: Floats = field(default_factory=list)
    sq: list[Factors] = field(default_factory=list)
    res: list[Factors] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        assert len(self.x) == size
        self.m, self.v = [0.0] * size, [0.0] * size
        if self.factor and size:
            split = 1 if self.factor == "matrix" else len(self.shape) - 1
            rows, cols = self.shape[split - 1], math.prod(self.shape[split:])
            for averages in (self.sq, self.res):
                averages += [Factors([0.0] * rows, [0.0] * cols) for _ in range(size // (rows * cols))]


@dataclass(frozen=True)
class CameFigures:
    """CAME's metrics of one tensor."""

    update_rms: float
    clip: float
    confidence: float


def came_step(tensor: CameTensor, g: Floats, o: CameOptions) -> CameFigures:
    """Step one tensor in place, which is not stacked, with a gradient whose sign and mean are right."""
    (b1, b2, b3), size = o.betas, len(tensor.x)
    if not size:
        return CameFigures(0.0, 1.0, 1.0)
    if o.decay_rate is not None:
        b2 = 1 - tensor.t ** (-o.decay_rate)

    squares = [a * a + o.eps[0] for a in g]
    if tensor.factor:
        u = [a * s for a, s in zip(g, _factored(tensor.sq, squares, b2), strict=True)]
    else:
        tensor.v = [b2 * v + (1 - b2) * q for v, q in zip(tensor.v, squares, strict=True)]
        u = [a / math.sqrt(v) for a, v in zip(g, tensor.v, strict=True)]
    update_rms = norm(u) / math.sqrt(size)
    clip = 1 / max(1.0, update_rms / o.clip_threshold)
    u = [a * clip for a in u]

    tensor.m = [b1 * m + (1 - b1) * a for m, a in zip(tensor.m, u, strict=True)]
    confidence = [1.0] * size
    if tensor.factor:
        instability = [(a - m) ** 2 + o.eps[1] for a, m in zip(u, tensor.m, strict=True)]
        confidence = _factored(tensor.res, instability, b3, one_minus_power(b3, tensor.t) if o.bias_correction else 1.0)
    step = [m * s for m, s in zip(tensor.m, confidence, strict=True)]
    if o.cautious:
        step = _cautious(step, g)

    lr = o.lr
    if o.scale_parameter:
        lr *= max(o.scale_eps, norm(tensor.x) / math.sqrt(size))
    tensor.x = [w - lr * o.weight_decay * w - lr * a for w, a in zip(tensor.x, step, strict=True)]
    return CameFigures(update_rms, clip, math.fsum(confidence) / size)


def _factored(averages: list[Factors], squares: Floats, beta: float, correction: float = 1.0) -> Floats:
    size = len(squares) // len(averages)
    out: Floats = []
    for i, matrix in enumerate(averages):
        matrix.advance(squares[i * size : (i + 1) * size], beta)
        out += matrix.rsqrt(correction)
    return out
