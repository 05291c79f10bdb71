"""Parameters whose steps can be slow although the models' shapes are fast: other layouts, dtypes and uses of a step."""

import torch
from torch import Tensor

from bighorn_workbench.measure import Change, ParamSet
from bighorn_workbench.shapes import resnet50

MISSING = 0.1
"""The share of parameters without a gradient in a step of `missing`."""


def channels_last(drawn: Tensor) -> Tensor:
    """Return a copy whose channels are the innermost in memory, if it has them."""
    return drawn.clone(memory_format=torch.channels_last if drawn.dim() == 4 else torch.contiguous_format)


def transposed(drawn: Tensor) -> Tensor:
    """Return a copy whose dims are in reverse order in memory."""
    dims = tuple(reversed(range(drawn.dim())))
    return drawn.permute(dims).contiguous().permute(dims)


def with_gaps(drawn: Tensor) -> Tensor:
    """Return a copy that is every row's first half of a tensor."""
    return torch.cat([drawn, drawn], dim=-1)[..., : drawn.shape[-1]]


def missing(params: list[Tensor]) -> Change:
    """Return a function that removes the gradients of a random tenth, another one at each step."""
    grads = [param.grad for param in params]

    def remove(step: int) -> None:
        drawn = torch.rand(len(params), generator=torch.Generator().manual_seed(step)).tolist()
        for param, grad, number in zip(params, grads, drawn, strict=True):
            param.grad = None if number < MISSING else grad

    return remove


def moved(params: list[Tensor]) -> Change:
    """Return a function that replaces the storage of all parameters."""

    def move(step: int) -> None:
        del step
        for param in params:
            param.data = param.data.clone()

    return move


def alternating(params: list[Tensor]) -> Change:
    """Return a function that gives gradients the strides of channels_last at every second step."""
    grads = [(param.grad, channels_last(param.grad)) for param in params if param.grad is not None]

    def alternate(step: int) -> None:
        for param, each in zip(params, grads, strict=True):
            param.grad = each[step % 2]

    return alternate


WRONG_BASELINE = (
    "torch's fused AdamW reads these gradients in the wrong order (2.13), so its time is only a lower bound: its "
    "foreach is right."
)
"""The note of sets whose gradients have other strides than their parameters."""


CLIFFS = {
    "missing": ParamSet(lambda: [(64, 64)] * 1000, change=missing),
    "moved": ParamSet(lambda: [(64, 64)] * 200, change=moved),
    "alternating": ParamSet(lambda: [(128, 128, 3, 3)] * 60, change=alternating, note=WRONG_BASELINE, on_cuda=False),
    "channels_last": ParamSet(resnet50, layout=channels_last, note=WRONG_BASELINE, on_cuda=False),
    "gaps": ParamSet(lambda: [(4096, 4096)], layout=with_gaps, on_cuda=False),
    "transposed": ParamSet(lambda: [(4096, 2048)], layout=transposed, note=WRONG_BASELINE, on_cuda=False),
    "transposed_both": ParamSet(lambda: [(4096, 2048)], layout=transposed, grad_layout=transposed),
    "tall": ParamSet(lambda: [(1_000_000, 16)]),
    "wide": ParamSet(lambda: [(16, 1_000_000)]),
    "long_rows": ParamSet(lambda: [(2048, 28672)]),
    "few_rows": ParamSet(lambda: [(128, 8192)]),
    "experts": ParamSet(lambda: [(64, 512, 2048)]),
    "million": ParamSet(lambda: [(1_000_000,)]),
    "float64": ParamSet(lambda: [(2048, 2048)], dtype=torch.float64),
}
"""The sets by name. In `missing`, another random tenth of the parameters has no gradient at each step; in `moved`, each
parameter has new storage; in `alternating`, gradients have other strides. Gradients are contiguous in `channels_last`
and `transposed`, and have their parameter's strides in `transposed_both`."""
