"""Sums of squares and the norms from them: in float64, or where a device has none, in float32 at two scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bighorn._capabilities import capabilities, wide

SCALES = (2.0**40, 2.0**-64)
"""Where a device has no float64, a sum of squares is two sums in float32: of x times each of the two scales.

They add up like one sum, over tensors and over ranks. The first overflows for norms above 2^24, and the second has full
precision there. Elements below 2^-103, about 1e-31, vanish in both; norms are right up to the end of float32.
"""


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares of all elements: 0-dim float64, or `[2]` float32 by :data:`SCALES`."""
    if wide(x.device) == torch.float64:  # a sum in pairs, more accurate than a norm of many elements
        return x.to(torch.float64).square().sum()
    return square_sums([x], x.device)[0]


def square_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of each tensor: `[tensors]` in float64, or `[tensors, 2]` by :data:`SCALES`."""
    if not tensors:
        return no_square_sums(0, device=device)
    if wide(device) == torch.float64:
        return _sums(tensors, device, order=2)
    norms: tuple[list[Tensor], ...] = tuple([] for _ in SCALES)
    for some in _divided(tensors):
        for found, scale in zip(norms, SCALES, strict=True):
            found += torch._foreach_norm(torch._foreach_mul([tensor.float() for tensor in some], scale))
    return torch.stack([torch.stack(found) for found in norms], dim=-1).square()


def product_sums(xs: Sequence[Tensor], ys: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return what `inner` needs of pairs of tensors: sums that add up like sums of squares, `[2 * pairs]` of them."""
    products = torch._foreach_mul(list(xs), list(ys))
    if wide(device) == torch.float64:
        magnitudes = _sums(products, device, order=1)
        torch._foreach_clamp_min_(products, 0.0)
        return torch.cat([_sums(products, device, order=1), magnitudes])
    roots = torch._foreach_sqrt(torch._foreach_abs(products))
    torch._foreach_clamp_min_(products, 0.0)
    torch._foreach_sqrt_(products)
    return square_sums([*products, *roots], device)


def inner(product_sums: Tensor) -> Tensor:
    """Return the inner product of each pair: the sums of positive products, and of the magnitudes of all products."""
    sums = product_sums if product_sums.dtype == torch.float64 else root(product_sums).square()
    positive, magnitudes = sums.chunk(2)
    return 2 * positive - magnitudes


SERIAL = 1 << 14
"""The elements of a part of a tensor that a CPU adds up with one thread, so that no bits depend on threads."""


def _sums(tensors: Sequence[Tensor], device: torch.device, order: int) -> Tensor:
    """Return the sum of the magnitudes (order 1) or squares (order 2) of each tensor, in float64."""
    if device.type != "cpu":
        if not capabilities(device).float64_norms:
            tensors = [tensor.to(torch.float64) for tensor in tensors]
        norms = torch.stack(torch._foreach_norm(list(tensors), order, dtype=torch.float64))
        return norms.square() if order == 2 else norms
    # In parts, added up: the norm of a large tensor takes 3 times as long on a CPU (torch 2.13).
    parts = [torch.split(tensor.reshape(-1), SERIAL) for tensor in tensors]
    norms = torch.stack(torch._foreach_norm([part for each in parts for part in each], order, dtype=torch.float64))
    sums = norms.square() if order == 2 else norms
    return torch.stack([each.sum() for each in sums.split_with_sizes(list(map(len, parts)))])


SCALED_AT_ONCE = 1 << 25
"""The elements of the scaled copies that exist at a time, if no tensor is larger: 128 MiB."""


def _divided(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    total = 0
    for tensor in tensors:
        if some and total + tensor.numel() > SCALED_AT_ONCE:
            yield some
            some, total = [], 0
        some.append(tensor)
        total += tensor.numel()
    yield some


def no_square_sums(*shape: int, device: torch.device) -> Tensor:
    """Return sums of squares that are 0: this shape, followed by the shape of one sum."""
    one = () if wide(device) == torch.float64 else (len(SCALES),)
    return torch.zeros((*shape, *one), dtype=wide(device), device=device)


def root(square_sums: Tensor) -> Tensor:
    """Return the norms: the roots of sums of squares, in float64 or float32."""
    roots = square_sums.sqrt()
    if roots.dtype == torch.float64:
        return roots
    small, large = roots.unbind(dim=-1)
    return torch.where(small < math.inf, small / SCALES[0], large / SCALES[1])


def square_sum_on(device: torch.device, sum_there: Tensor) -> Tensor:
    """Return a sum of squares on a device where it has the other form."""
    return square_sum(root(sum_there).float().to(device))
