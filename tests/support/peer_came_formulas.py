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
) -> None:
    """came-pytorch 0.1.3, CAME.py, with weight_decay=0.1.

    Args:
        leaves: The parameters.
        lr: The learning rate.
        rule: The division of a shape into matrices: their number, rows and columns; None if unfactored.
        b2: The decay of the averages of squared gradients, by the step from 1.
        b3: The decay of the averages of the instability.
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
        leaf.m = step = m
        if matrices is not None:
            trust = advance(leaf.res, [(a - b) ** 2 + eps[1] for a, b in zip(u, m, strict=True)], b3)
            step = [t * a for t, a in zip(trust, m, strict=True)]
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
    """NVlabs/Sana, diffusion/utils/optimizer.py, CAMEWrapper; CAME8BitWrapper for tensors that it keeps in float32."""
    came_pytorch(leaves, lr, rule=linear)


def mindformers(leaves: Sequence[Leaf], lr: float) -> None:
    """Mindformers 0ca25cc, mindformers/core/optim/came.py, with its defaults."""
    came_pytorch(leaves, lr, b2=lambda t: 1 - t**-0.8, b3=0.99)
