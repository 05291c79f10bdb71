"""CAME of other packages, implemented again from their code, with the same order of operations and defaults.

The formulas use Python floats, one element at a time, and nothing from bighorn or `scalar_formulas.py`. A function
steps all tensors once, and its docstring names the source: repository, file and commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.support.peer_formulas import Averages, Floats, Leaf, norm

Matrices = tuple[int, int, int]
"""The number of matrices in a tensor, their rows and their columns."""


def last_two(shape: tuple[int, ...]) -> Matrices | None:
    """came-pytorch's `_get_options`: a matrix of the last two dims for each index of the others."""
    return (math.prod(shape[:-2]), shape[-2], shape[-1]) if len(shape) >= 2 else None


def linear(shape: tuple[int, ...]) -> Matrices | None:
    """SANA's `_get_options`: "linear", "1x1_conv", and all others unfactored."""
    if len(shape) == 2 or (len(shape) == 4 and shape[2] == shape[3] == 1):
        return 1, shape[0], shape[1]
    return None


def came_pytorch(
    leaves: Sequence[Leaf],
    lr: float,
    rule: Callable[[tuple[int, ...]], Matrices | None] = last_two,
    b2: Callable[[int], float] = lambda _: 0.999,
    b3: float = 0.9999,
    store: Callable[[Leaf, Floats], Floats] = lambda _, m: m,
    confident: Callable[[tuple[int, ...]], bool] = lambda _: True,
) -> None:
    """came-pytorch 0.1.3, CAME.py, with weight_decay=0.1.

    Args:
        leaves: The parameters.
        lr: The learning rate.
        rule: The division of a shape into matrices: their number, rows and columns; None if unfactored.
        b2: The decay of the averages of squared gradients, by the step from 1.
        b3: The decay of the averages of the instability.
        store: Returns the momentum that the next step reads.
        confident: Whether the step of a factored tensor uses the instability, by its shape.
    """
    b1, eps, threshold, decay = 0.9, (1e-30, 1e-16), 1.0, 0.1
    for leaf in leaves:
        leaf.t += 1
        squares = [g * g + eps[0] for g in leaf.g]
        matrices = rule(leaf.shape)
        if matrices is None:
            leaf.v = [v * b2(leaf.t) + (1 - b2(leaf.t)) * q for v, q in zip(leaf.v, squares, strict=True)]
            scale = [1 / math.sqrt(v) for v in leaf.v]
        else:
            if not leaf.sq:
                number, rows, cols = matrices
                leaf.sq, leaf.res = ([([0.0] * rows, [0.0] * cols) for _ in range(number)] for _ in "sr")
            scale = advance(leaf.sq, squares, b2(leaf.t))
        u = [s * g for s, g in zip(scale, leaf.g, strict=True)]
        rms = norm(u) / math.sqrt(len(u))
        u = [a / max(rms / threshold, 1.0) for a in u]
        m = [a * b1 + (1 - b1) * b for a, b in zip(leaf.m, u, strict=True)]
        leaf.m, step = store(leaf, m), m
        if matrices is not None:
            trust = advance(leaf.res, [(a - b) ** 2 + eps[1] for a, b in zip(u, m, strict=True)], b3)
            step = [t * a for t, a in zip(trust if confident(leaf.shape) else u, m, strict=True)]
        leaf.x = [x + x * (-decay * lr) - a * lr for x, a in zip(leaf.x, step, strict=True)]


def advance(averages: Averages, squares: Floats, beta: float) -> Floats:
    """Advance the averages, and return `_approx_sq_grad` of every element."""
    out, start = [], 0
    for row, col in averages:
        rows, cols = len(row), len(col)
        q = squares[start : start + rows * cols]
        row[:] = [beta * a + (1 - beta) * math.fsum(q[i * cols : (i + 1) * cols]) / cols for i, a in enumerate(row)]
        col[:] = [beta * a + (1 - beta) * math.fsum(q[j::cols]) / rows for j, a in enumerate(col)]
        mean = math.fsum(row) / rows
        out += [1 / math.sqrt(a / mean) * (1 / math.sqrt(b)) for a in row for b in col]
        start += rows * cols
    return out


def sana(leaves: Sequence[Leaf], lr: float) -> None:
    """NVlabs/Sana, diffusion/utils/optimizer.py, CAMEWrapper."""
    came_pytorch(leaves, lr, rule=linear)


def mindformers(leaves: Sequence[Leaf], lr: float) -> None:
    """Mindformers 0ca25cc, mindformers/core/optim/came.py, with its defaults."""
    came_pytorch(leaves, lr, b2=lambda t: 1 - t**-0.8, b3=0.99)


def came8bit(leaves: Sequence[Leaf], lr: float, min_8bit_size: int = 16384) -> None:
    """NVlabs/Sana, diffusion/utils/optimizer.py, CAME8BitWrapper: the step uses the momentum before rounding."""
    came_pytorch(leaves, lr, rule=linear, store=lambda leaf, m: min_max(leaf, m, min_8bit_size))


def onetrainer8bit(leaves: Sequence[Leaf], lr: float) -> None:
    """Nerogar/OneTrainer 247b0c3, modules/util/optimizer/CAME8bit.py.

    For a 1x1 convolution it has `res_approx = update.view(grad.shape)` in place of `res_approx.view`, so the step is
    the momentum times the update and does not depend on the gradient's sign.
    """
    came_pytorch(
        leaves,
        lr,
        rule=linear,
        store=lambda leaf, m: min_max(leaf, m, 16384),
        confident=lambda shape: len(shape) == 2,
    )


def min_max(leaf: Leaf, values: Floats, min_8bit_size: int, block: int = 2048) -> Floats:
    """`_quantize_state`, then `_dequantize_state`: `split(block)` of a matrix takes `block` rows, not elements."""
    if linear(leaf.shape) is None or len(values) <= min_8bit_size:
        return values
    out, chunk = [], block * math.prod(leaf.shape[1:])
    for start in range(0, len(values), chunk):
        mine = values[start : start + chunk]
        low, scale = min(mine), (max(mine) - min(mine)) / 255
        out += [round((a - low) / scale) * scale + low if scale else a for a in mine]
    return out
